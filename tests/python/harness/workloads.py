"""Runs training jobs with a known truth under the Python side and a stand-in for the library (fake_ledger.cpp).

    workloads.py DIR [--every N] [NAME ...]      DIR holds the jobs and truth.json

Every site whose blocks survive is offered as a candidate; the answers are compared with the truth: on leaky jobs
the kept line, on clean ones that each has a reason not to be a leak. Must not know the rules that it checks.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parents[2] / "python"
BOOT = """
import sys, runpy, atexit
sys.path.insert(0, {package!r})
import torch
from strandline import _boot, _library
assert _boot.start("host"), "not started"
atexit.register(lambda: _library.find().report())
sys.path.pop(0)
sys.argv = [{job!r}]
runpy.run_path({job!r}, run_name="__main__")
"""


def build(folder):
    library = pathlib.Path(folder) / "libfake_ledger.so"
    include = sysconfig.get_paths()["include"]
    subprocess.run(
        [
            "g++",
            "-O1",
            "-shared",
            "-fPIC",
            "-std=c++17",
            f"-I{include}",
            "-o",
            str(library),
            str(HERE / "fake_ledger.cpp"),
            "-ldl",
        ],
        check=True,
    )
    return library


def run(job, library, every, least=3):
    """The lines that the stand-in wrote while `job` ran, and how the job ended."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "answers"
        env = dict(
            os.environ,
            DEVICE="cpu",
            SIZE="small",
            OMP_NUM_THREADS="1",
            LD_PRELOAD=str(library),
            FAKE_LEDGER_OUT=str(out),
            FAKE_LEDGER_EVERY=str(every),
            FAKE_LEDGER_LEAST=str(least),
            STRANDLINE_DEBUG="1",
        )
        done = subprocess.run(
            [sys.executable, "-c", BOOT.format(package=str(PACKAGE), job=str(job))],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return lines, done


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("-v", action="store_true")
    args = parser.parse_args()
    truths = json.loads((args.dir / "truth.json").read_text())
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        library = build(folder)
        for name in args.names or truths:
            truth = truths[name]
            lines, done = run(
                args.dir / f"{name}.py", library, args.every, least=1 if truth["class"] == "one-off" else 3
            )
            answers = [line["answer"] for line in lines if "answer" in line]
            total = next((line for line in lines if "steps" in line), {})
            kept = [
                f"{os.path.basename(a['kept_at']['file'])}:{a['kept_at']['line']}" if a["kept_at"] else None
                for a in answers
            ]
            if truth["culprit"]:
                right = (
                    bool(answers)
                    and all(k == truth["culprit"] or a["not_a_leak"] for k, a in zip(kept, answers))
                    and truth["culprit"] in kept
                )
            else:
                right = all(a["not_a_leak"] for a in answers)
            right = right and done.returncode == 0 and total.get("steps") == truth["steps"]
            wrong += not right
            seconds = sum(a["seconds"] for a in answers)
            print(
                f"{name:20} {'ok' if right else 'WRONG':6} truth {truth['culprit']} steps {total.get('steps')}/{truth['steps']} epochs {total.get('epochs')}  {len(answers)} candidates {seconds:.3f} s"
            )
            if "strandline" in done.stderr or done.returncode:
                print(done.stderr[-3000:])
            for line, answer, place in zip([x for x in lines if "answer" in x], answers, kept):
                if args.v or not (place == truth["culprit"] or answer["not_a_leak"]):
                    top = next((f for f in line["stack"] if name in f["file"]), {})
                    print(
                        f"    step {line['step']} line {top.get('line')}: kept {place} | {answer['held_by'] and answer['held_by']['path']} | {answer['held_by'] and answer['held_by']['kind']} | not: {answer['not_a_leak']} | {answer['bounded']} | {answer['released_by']}\n        {answer['fix']}"
                    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
