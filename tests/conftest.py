"""What the end-to-end tests are given."""

import sys

import pytest
from report_jobs import Job
from runner import Runner


@pytest.fixture
def jobs(tmp_path):
    return Runner(tmp_path)


@pytest.fixture(scope="session")
def python():
    return sys.executable


@pytest.fixture(scope="session")
def report_jobs(tmp_path_factory):
    """Runs a job, each text once, and says where its report lies."""
    made = {}

    def job(text):
        if text not in made:
            runner = Runner(tmp_path_factory.mktemp("job"))
            done = runner.run(sys.executable, runner.script(text).name, out="out")
            assert done.code == 0, done.err
            (file,) = (runner.folder / "out").rglob("report.json")
            page = file.with_name("report.html").relative_to(runner.folder)
            made[text] = Job(err=done.err, file=file, shown=str(page))
        return made[text]

    return job
