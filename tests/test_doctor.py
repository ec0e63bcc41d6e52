"""`strandline doctor`: each thing that is wrong has a line with a remedy, and the exit code says whether any is."""

import os
import resource
import subprocess

import pytest
from runner import COMMAND


def doctor(*arguments, cwd, env=None, before=None):
    base = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_") and k != "LD_PRELOAD"}
    done = subprocess.run(
        [COMMAND, "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**base, **(env or {})},
        preexec_fn=before,
        timeout=240,
    )
    lines = {}
    last = None
    for line in done.stdout.splitlines():
        if line.startswith("      "):
            assert "→" in line
            lines[last] += line
        else:
            last = line[6:18].strip()
            lines[last] = line
    for what, line in lines.items():
        assert line.startswith("ok") or "→" in line, f"{what} has no remedy: {line}"
    assert "panicked" not in done.stderr
    return done.returncode, lines


def test_all_is_well(tmp_path, python):
    code, lines = doctor("--python", python, cwd=tmp_path)
    assert code == 0, lines
    for what in (
        "library",
        "LD_PRELOAD",
        "ulimit -v",
        "reports",
        "Python",
        "torch",
        "job",
        "stacks",
        "dump, top",
    ):
        assert lines[what].startswith("ok"), lines[what]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_library_that_is_none(tmp_path):
    broken = tmp_path / "libstrandline.so"
    code, lines = doctor("--python", "/nowhere/python", cwd=tmp_path, env={"STRANDLINE_LIB": str(broken)})
    assert code == 1 and "is not a file" in lines["library"]
    assert lines["Python"].startswith("FAIL") and "--python" in lines["Python"]
    broken.write_bytes(b"\x7fELF, but not really")
    code, lines = doctor("--python", "/nowhere/python", cwd=tmp_path, env={"STRANDLINE_LIB": str(broken)})
    assert code == 1 and "cannot be preloaded" in lines["library"]


def test_a_python_without_torch(tmp_path, python):
    bare = tmp_path / "bare"
    subprocess.run([python, "-m", "venv", "--without-pip", bare], check=True)
    code, lines = doctor("--python", bare / "bin" / "python", cwd=tmp_path)
    assert code == 1 and lines["Python"].startswith("ok")
    assert lines["torch"].startswith("FAIL") and "pip install torch" in lines["torch"]


@pytest.mark.parametrize(
    ("env", "what", "word"),
    [
        ({"LD_PRELOAD": "/usr/lib/libasan.so.8"}, "LD_PRELOAD", "FAIL"),
        ({"LD_PRELOAD": "/opt/libstrandline.so"}, "LD_PRELOAD", "note"),
        ({"STRANDLINE_MODE": "off"}, "environment", "note"),
    ],
)
def test_the_environment(tmp_path, env, what, word):
    code, lines = doctor("--python", "/nowhere/python", cwd=tmp_path, env=env)
    assert code == 1 and lines[what].startswith(word), lines[what]


def test_a_folder_and_a_limit(tmp_path):
    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))

    code, lines = doctor("--python", "/nowhere/python", "--out", "/proc/x", cwd=tmp_path, before=limited)
    assert code == 1
    assert (
        lines["reports"].startswith("FAIL") and "/proc/x" in lines["reports"] and "--out" in lines["reports"]
    )
    assert lines["ulimit -v"].startswith("FAIL") and str(1 << 33) in lines["ulimit -v"]


def test_a_job_that_does_not_work(tmp_path, python):
    """A Python whose torch is broken in a way that only running shows."""
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "__init__.py").write_text(
        "__version__ = '2.11.0'\nclass version:\n    cuda = None\ndef ones(n):\n    raise SystemExit('torch is broken')\n"
    )
    code, lines = doctor("--python", python, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert code == 1 and lines["job"].startswith("FAIL"), lines
