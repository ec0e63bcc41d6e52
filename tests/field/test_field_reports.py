"""Leaks and false alarms as people report them, each rebuilt as a small job (jobs/, table.py)."""

import concurrent.futures
import pathlib
import re
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))
from runner import Runner  # noqa: E402
from table import JOBS, Clean  # noqa: E402

AT_ONCE = 2  # jobs that run at a time


@pytest.fixture(scope="session")
def ran(request, tmp_path_factory):
    """Runs every job that this session selects, several at a time; a test waits for its own."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_report"
    ]
    pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
    base = tmp_path_factory.mktemp("field")

    def run(name):
        folder = base / name
        folder.mkdir()
        return Runner(folder).run(sys.executable, HERE / "jobs" / f"{name}.py", cwd=HERE / "jobs")

    futures = {name: pool.submit(run, name) for name in names}
    yield futures
    pool.shutdown(cancel_futures=True)


def marked(name, word):
    lines = (HERE / "jobs" / f"{name}.py").read_text().splitlines()
    own = [(f"{name}.py", n) for n, line in enumerate(lines, 1) if word in line.partition("#")[2]]
    return own


def test_every_job_is_in_the_table():
    assert sorted(JOBS) == sorted(path.stem for path in (HERE / "jobs").glob("[A-Z]*.py"))
    assert len(JOBS) >= 25 and 3 * sum(isinstance(job, Clean) for job in JOBS.values()) >= len(JOBS)


@pytest.mark.parametrize("name", sorted(JOBS))
def test_report(ran, name):
    wanted, done = JOBS[name], ran[name].result()
    assert done.code == 0, done.err[-3000:]
    assert "strandline: fault" not in done.err, done.err
    report = done.report
    (text,) = [path.read_text() for path in done.folder.rglob("report.txt")]
    said = (
        [(f["class"], f["allocated_at"], f["held_by"], f["kept_at"], f["fix"]) for f in report["findings"]],
        report["not_leaks"],
    )
    for words in wanted.says:
        # A pattern that begins with ^ is about the whole text.
        assert re.search(words, text, re.S if words.startswith("^") else 0), (words, text)
    if isinstance(wanted, Clean):
        assert report["findings"] == [], said
        assert report["verdict"] == wanted.verdict, report["reason"]
        if wanted.never_called:
            assert "LEAK" not in done.err, done.err
        return
    assert len(report["findings"]) == 1, said
    (finding,) = report["findings"]
    assert finding["class"] == wanted.kind, said
    assert re.search(wanted.held, finding["held_by"]["path"]), said
    if wanted.allocated:
        at = finding["allocated_at"]
        place = (pathlib.Path(at["file"]).name, at["line"])
        assert place in marked(name, "ALLOCATES") or place[0] == "small.py", said
    keeps = marked(name, "KEEPS")
    kept = finding["kept_at"]
    if "notebook" in name or "last_traceback" in name:
        assert kept is None, said  # no line of a program: the interpreter stores it
    else:
        assert kept and (pathlib.Path(kept["file"]).name, kept["line"]) in keeps, said
    assert finding["fix"] and finding["evidence"] and finding["called_at_step"] <= 60, said
