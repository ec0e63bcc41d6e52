"""The wheel: built, installed into an environment of its own, and used there."""

import os
import re
import subprocess
import sys
import zipfile

import pytest
from runner import ROOT


def clean_environment(folder):
    drop = ("STRANDLINE", "PYTHON", "LD_PRELOAD", "VIRTUAL_ENV")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(drop)}, "HOME": str(folder)}


def call(*command, cwd, env, code=0):
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == code, (
        f"{command}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # cargo and pip keep their caches where they are.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("STRANDLINE", "LD_PRELOAD"))}
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder, env=env)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of an environment that has the wheel, and sees this environment's torch."""
    folder = tmp_path_factory.mktemp("venv")
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder, env=dict(os.environ))
    (site,) = folder.glob("lib/python3*/site-packages")
    # Installed first, so that a strandline of the outer environment does not count.
    env = dict(os.environ)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    call(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder, env=env)
    import torch

    (site / "outer.pth").write_text(os.path.dirname(os.path.dirname(torch.__file__)) + "\n")
    return folder / "bin"


def test_what_is_in_it(wheel):
    assert re.fullmatch(r"strandline-[0-9.]+-py3-none-(many)?linux_\w+\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        points = next(archive.read(n).decode() for n in names if n.endswith("entry_points.txt"))
        mode = archive.getinfo("strandline/_native/strandline").external_attr >> 16
    for name in (
        "__init__.py",
        "__main__.py",
        "py.typed",
        "pytest_plugin.py",
        "_boot.py",
        "_native/libstrandline.so",
    ):
        assert f"strandline/{name}" in names
    assert any(name.endswith("licenses/LICENSE-MIT") for name in names)
    assert mode & 0o111, "the command can be run"
    assert "[pytest11]" in points and "strandline = strandline.pytest_plugin" in points
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "target/"))]


def test_versions_are_one(installed, tmp_path):
    env = clean_environment(tmp_path)
    said = call(installed / "strandline", "--version", cwd=tmp_path, env=env).stdout.split()[1]
    code = (
        "import strandline, importlib.metadata as m; print(strandline.__version__, m.version('strandline'))"
    )
    assert call(installed / "python", "-c", code, cwd=tmp_path, env=env).stdout.split() == [said, said]


def test_a_job_runs_under_it(installed, tmp_path):
    env = clean_environment(tmp_path)
    code = (
        "import torch, strandline, sys\n"
        "kept = []\n"
        "for _ in range(50):\n    kept.append(torch.ones(1000))\n    strandline.step()\n"
        "print(strandline.active(), strandline.__file__)\n"
    )
    python = installed / "python"
    run = [python, "-m", "strandline", "run", "--mode", "host", "--fail-on-leak", "--", python, "-c", code]
    done = call(*run, cwd=tmp_path, env=env, code=3)
    assert done.stdout.startswith("True ") and "LEAK" in done.stderr
    assert list((tmp_path / "strandline-out").rglob("report.json"))
    done = call(installed / "strandline", "check", cwd=tmp_path, env=env, code=3)
    assert "FAIL" in done.stdout
    # The exit code of the job is passed on.
    call(
        installed / "strandline",
        "run",
        "--",
        python,
        "-c",
        "raise SystemExit(7)",
        cwd=tmp_path,
        env=env,
        code=7,
    )


def test_import_is_harmless(installed, tmp_path):
    code = (
        "import sys, strandline\n"
        "strandline.step(); strandline.epoch(); strandline.phase('forward'); strandline.report()\n"
        "assert not strandline.active() and strandline.stats() == {}\n"
        "assert 'torch' not in sys.modules and 'ctypes.util' not in sys.modules\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libstrandline' not in maps\n"
    )
    done = call(installed / "python", "-c", code, cwd=tmp_path, env=clean_environment(tmp_path))
    assert (done.stdout, done.stderr) == ("", "")


def test_pytest_finds_the_plugin(installed, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest, torch\nkept = []\n"
        "@pytest.mark.strandline(steps=8)\ndef test_leaky():\n    kept.append(torch.ones(1000))\n"
        "@pytest.mark.strandline(steps=8)\ndef test_clean():\n    torch.ones(1000)\n"
    )
    run = [installed / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = clean_environment(tmp_path)
    done = call(*run, "--strandline", "--strandline-mode", "host", cwd=tmp_path, env=env, code=1)
    assert "1 failed, 1 passed" in done.stdout and "3.9 KiB/step" in done.stdout
    done = call(*run, cwd=tmp_path, env=env)
    assert "2 skipped" in done.stdout
