"""torch's own CUDA tests under native and under strandline: whatever passes there must pass here.

    python tests/gpu/torch_tests.py TEST_FILE … --library SO --command STRANDLINE [--workers N] [-k EXPRESSION]

TEST_FILE is a file of torch's source tree (test/test_cuda.py; not part of this project). Needs pytest, pytest-xdist
and pytest-timeout. Prints the counts and every test that passes natively and not under strandline; exit code 1 if
there is one. Must not know: what the tests do.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml


def outcomes(path):
    table = {}
    for case in xml.parse(path).iter("testcase"):
        state, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                state, why = "failed", (child.get("message") or "").splitlines()[:1]
            elif child.tag == "skipped":
                state = "skipped"
        table[f"{case.get('classname')}::{case.get('name')}"] = (state, "".join(why)[:160])
    return table


def environment():
    return {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_") and k != "LD_PRELOAD"}


def under_strandline(args, env, out, command):
    """The command that runs `command` on strandline's heap; tells `env` where the library is."""
    env["STRANDLINE_LIB"] = str(args.library)
    return [str(args.command), "run", "--mode", "heap", "--quiet", "--out", str(out), "--", *command]


def run(args, ours, folder):
    result = folder / ("ours.xml" if ours else "native.xml")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x" if args.first else "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-n", str(args.workers), "--timeout", str(args.timeout), f"--junitxml={result}"]
    command += ["-k", args.k] if args.k else []
    for name in args.deselect:
        command += ["--deselect", name]
    command += [str(path) for path in args.files]
    env = environment()
    if ours:
        command = under_strandline(args, env, folder / "out", command)
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, cwd=args.files[0].parent, timeout=args.limit
    )
    print(
        f"{'strandline' if ours else 'native':11} {done.stdout.strip().splitlines()[-1:]} exit {done.returncode}",
        flush=True,
    )
    if not result.exists():
        print(done.stdout[-1500:], done.stderr[-1500:])
        return {}
    return outcomes(result)


def alone(args, name):
    """Runs one test in a process of its own under strandline; what it says if it fails, else nothing."""
    path, test = name.rsplit("::", 1)
    case = path.rsplit(".", 1)[1]
    file = next(file for file in args.files if f".{file.stem}." in f".{path}.")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--tb=short",
        ]
        env = environment()
        command = under_strandline(args, env, folder, [*command, f"{file}::{case}::{test}"])
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            cwd=file.parent,
            timeout=120,
        )
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("E ", file.name))]
    return "\n    ".join(lines[-6:])[-700:] or f"exit {done.returncode}: {done.stderr[-300:]}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=lambda p: pathlib.Path(p).resolve())
    parser.add_argument("--library", type=lambda p: pathlib.Path(p).resolve(), required=True)
    parser.add_argument("--command", type=lambda p: pathlib.Path(p).resolve(), required=True)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--timeout", type=int, default=60, help="seconds a test may take")
    parser.add_argument("--limit", type=int, default=400, help="seconds a whole run may take")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--deselect", action="append", default=[])
    parser.add_argument("-k", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        native = run(args, False, pathlib.Path(folder))
        ours = run(args, True, pathlib.Path(folder))
    # Some tests watch the whole card, where others run beside them: what is lost is tried again by itself.
    first = [
        name
        for name, (state, _) in native.items()
        if state == "passed" and ours.get(name, ("missing", ""))[0] != "passed"
    ]
    print(f"tried again by themselves: {len(first)}", *first, sep="\n    ", flush=True)
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        answers = pool.map(lambda name: alone(args, name), first)
        lost = {name: why for name, why in zip(first, answers, strict=True) if why}
    gained = [
        name
        for name, (state, _) in ours.items()
        if state == "passed" and native.get(name, ("missing", ""))[0] == "failed"
    ]
    passed = sum(state == "passed" for state, _ in native.values())
    print(
        f"passed natively {passed}, of these not under strandline {len(lost)}; failed natively and passed here {len(gained)}"
    )
    for name, why in sorted(lost.items()):
        print(f"  {name}\n    {why}")
    return 1 if lost or not native else 0


if __name__ == "__main__":
    sys.exit(main())
