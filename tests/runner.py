"""Runs jobs under strandline as a user would, and without it, for the end-to-end tests."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMAND = pathlib.Path(os.environ.get("STRANDLINE_COMMAND", ROOT / "target" / "release" / "strandline"))
LIMIT = 240  # seconds for one job

# What a shell has put into the background ignores this signal, and so would the jobs, which inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclasses.dataclass
class Done:
    """How a job ended."""

    code: int
    out: str
    err: str
    folder: pathlib.Path

    def reports(self):
        """Every report that the run wrote, the one with the most steps last."""
        found = [json.loads(path.read_text()) for path in sorted(self.folder.rglob("report.json"))]
        return sorted(found, key=lambda report: report["run"]["steps"])

    @property
    def report(self):
        reports = self.reports()
        assert reports, f"no report in {self.folder}; stderr: {self.err[-2000:]}"
        return reports[-1]


class Runner:
    """Writes and runs jobs in a folder of the test's own."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.out = folder / "out"

    def script(self, text: str, name: str = "train.py") -> pathlib.Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def environment(self, env=None):
        base = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_") and k != "LD_PRELOAD"}
        return {**base, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}

    def bare(self, *command, env=None, stdin=None, cwd=None, before=None) -> Done:
        done = subprocess.run(
            [str(c) for c in command],
            env=self.environment(env),
            input=stdin,
            cwd=cwd or self.folder,
            preexec_fn=before,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        return Done(done.returncode, done.stdout, done.stderr, self.out)

    def command(self, *command, options=(), out=None):
        """`out=False` leaves the reports' folder at its default."""
        place = [] if out is False else ["--out", out or self.out]
        return [COMMAND, "run", "--mode", "host", *place, *options, "--", *command]

    def run(self, *command, options=(), out=None, **how) -> Done:
        return self.bare(*self.command(*command, options=options, out=out), **how)

    def start(
        self, *command, options=(), out=None, env=None, stdin=None, stderr=subprocess.PIPE
    ) -> subprocess.Popen:
        return subprocess.Popen(
            [str(c) for c in self.command(*command, options=options, out=out)],
            env=self.environment(env),
            cwd=self.folder,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def same(self, *command, quiet=True, cwd=None, **how) -> Done:
        """Runs a job with and without strandline, at the same time and each in a folder of its own; its
        output, errors and exit code must be the same."""
        options = ["--quiet"] if quiet else []
        folders = [cwd or self.folder / name for name in ("plain", "ours")]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            plain = pool.submit(self.bare, *command, cwd=folders[0], **how)
            ours = pool.submit(self.run, *command, options=options, cwd=folders[1], **how)
            plain, ours = plain.result(), ours.result()
        assert (ours.code, ours.out) == (plain.code, plain.out), f"changed; stderr: {ours.err[-3000:]}"
        if quiet:
            assert ours.err == plain.err
        return ours


class Running:
    """A job that runs, its `process`, until it is told to end; it does not outlive the block that it is used in."""

    process: subprocess.Popen

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def wait_for_line(process: subprocess.Popen, text: str) -> None:
    """Reads the job's output until a line holds `text`."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the job ended before it printed {text!r}: {process.stderr.read()[-2000:]}")


def end(process: subprocess.Popen, with_signal: int | None = None) -> tuple[int, str, str]:
    if with_signal is not None:
        process.send_signal(signal.Signals(with_signal))
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err
