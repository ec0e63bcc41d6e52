"""GPU acceptance: one command on a machine with a GPU, one table (kept in docs/gpu.md).

    python tests/gpu/accept.py --library target/release/libstrandline.so --command target/release/strandline
        [--workloads DIR] [--only SECTION …] [--gpus N] [JOB …]

Each measurement runs in a process of its own. Three allocators are compared in the same run: torch's native
one, native with expandable segments, and strandline (preloaded; heap mode). Exit code 1: a job failed, or its
result is not what it should be; figures of speed and memory are only printed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

COST = r"""
import json, os, random, sys, time, torch
from torch.utils.cpp_extension import load_inline
source = '''
#include <torch/extension.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <chrono>
#include <random>
#include <vector>
using clk = std::chrono::steady_clock;
double pair(size_t size, int n) {
  auto* a = c10::cuda::CUDACachingAllocator::get();
  for (int i = 0; i < 1000; i++) a->raw_deallocate(a->raw_allocate(size));
  auto t = clk::now();
  for (int i = 0; i < n; i++) a->raw_deallocate(a->raw_allocate(size));
  return std::chrono::duration<double, std::nano>(clk::now() - t).count() / n;
}
double churn(double most, int n) {
  auto* a = c10::cuda::CUDACachingAllocator::get();
  std::mt19937_64 rng(1);
  std::uniform_real_distribution<double> u(std::log(512.0), std::log(most));
  std::vector<size_t> sizes(4096);
  for (auto& s : sizes) s = (size_t)std::exp(u(rng));
  std::vector<void*> live;
  for (int i = 0; i < 2000; i++) live.push_back(a->raw_allocate(sizes[i % 4096]));
  std::vector<uint32_t> which(n);
  for (auto& w : which) w = rng() % 2000;
  auto run = [&](int k) { for (int i = 0; i < k; i++) { a->raw_deallocate(live[which[i]]);
      live[which[i]] = a->raw_allocate(sizes[(i * 7) % 4096]); } };
  run(n);
  auto t = clk::now();
  run(n);
  double ns = std::chrono::duration<double, std::nano>(clk::now() - t).count() / n;
  for (auto* p : live) a->raw_deallocate(p);
  return ns;
}
'''
header = source.replace("raw_deallocate", "raw_delete").replace("raw_allocate", "raw_alloc")
if "COST_WRAPPER" in os.environ:  # torch's wrapper of plug-ins as it is: none of its methods is replaced
    sys.path.insert(0, os.environ["COST_WRAPPER"])
    import strandline
    from strandline import _torch_cuda
    _torch_cuda._replace_methods = lambda torch, library, result: None
    strandline.install("heap", quiet=True)
torch.cuda.init(); torch.zeros(1, device="cuda")
module = load_inline("strandline_cost", cpp_sources=header, functions=["pair", "churn"], with_cuda=False,
                     extra_cflags=["-O2"], extra_include_paths=[os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/include"],
                     build_directory=os.environ["COST_BUILD"])
n = 100000
rows = {"pair 4 KiB": min(module.pair(4096, n) for _ in range(3)),
        "pair 4 MiB": min(module.pair(4 << 20, n) for _ in range(3)),
        "churn small": min(module.churn(512 * 1024.0, n) for _ in range(3)),
        "churn mixed": min(module.churn(16 * 1024 * 1024.0, n) for _ in range(3))}
print(json.dumps(rows))
"""

# Processes start side by side and take turns: only one at a time has the GPU and is timed. What every job waits for
# at its start (the loading of cuDNN, cuBLAS and torch's kernels) is done before a process takes its turn.
RESULT = r"""
import fcntl, json, os, runpy, sys, time
import torch
from torch import nn
torch.cuda.init()
for dtype in (torch.float32, torch.bfloat16):
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        x = nn.Conv2d(3, 64, 3).cuda()(torch.rand(2, 3, 40, 40, device="cuda")).flatten(2)
        x = nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda()(x.transpose(1, 2))
        x = nn.LSTM(64, 64, batch_first=True).cuda()(x.float())[0]
        nn.functional.cross_entropy(nn.BatchNorm1d(64).cuda()(x.mean(1)), torch.tensor([1, 2], device="cuda")).backward()
del x
torch.cuda.synchronize()
torch.cuda.empty_cache()
turn = open(os.environ["ACCEPT_TURN"], "w")
fcntl.flock(turn, fcntl.LOCK_EX)
torch.cuda.reset_peak_memory_stats()
steps = []
from torch.optim import optimizer as _o
_o.register_optimizer_step_post_hook(lambda *a: steps.append(time.perf_counter()))
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
finally:
    torch.cuda.synchronize()
    end = time.perf_counter()
    stats = torch.cuda.memory_stats()
    skip = len(steps) // 5
    rate = (len(steps) - skip) / (end - steps[skip]) if len(steps) > skip + 1 else 0
    with open(os.environ["ACCEPT_OUT"], "w") as f:
        json.dump({"rate": rate, "reserved": stats.get("reserved_bytes.all.peak", 0),
                   "requested": stats.get("requested_bytes.all.peak", 0),
                   "active": stats.get("active_bytes.all.peak", 0), "steps": [*steps, end],
                   "own": {k[len("strandline."):]: v for k, v in stats.items() if k.startswith("strandline.")}}, f)
    turn.close()
"""

# What a job prints under deterministic settings.
DETERMINISTIC = """
import runpy, sys, torch
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
runpy.run_path(sys.argv[1], run_name="__main__")
"""


class Runs:
    def __init__(self, args, folder):
        self.args, self.folder = args, pathlib.Path(folder)

    def environment(self, allocator, extra=None):
        env = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_") and k != "LD_PRELOAD"}
        env.update(DEVICE="cuda", SIZE="full", PYTHONUNBUFFERED="1", COST_BUILD=str(self.folder / "cost"))
        if allocator == "expandable":
            env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        env.update(extra or {})
        return env

    def run(self, allocator, arguments, out=None, limit=170, extra=None, mode="heap"):
        command = [sys.executable, *map(str, arguments)]
        if allocator == "strandline":
            command = [
                str(self.args.command),
                "run",
                "--mode",
                mode,
                "--quiet",
                "--out",
                str(out or self.folder / "out"),
                "--",
                *command,
            ]
        env = self.environment(allocator, {"STRANDLINE_LIB": str(self.args.library), **(extra or {})})
        if allocator == "wrapper":
            env["COST_WRAPPER"] = str(ROOT / "python")
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=limit, cwd=self.folder
        )


def cost(runs):
    script = runs.folder / "cost.py"
    script.write_text(COST)
    (runs.folder / "cost").mkdir()
    table = {}
    for allocator in ("native", "strandline", "wrapper") * 2:
        done = runs.run(allocator, [script])
        if done.returncode:
            print(f"cost, {allocator}: FAILED\n{done.stderr[-1500:]}")
            return False
        rows = json.loads(done.stdout.splitlines()[-1])
        for name, ns in rows.items():
            table.setdefault(name, {}).setdefault(allocator, []).append(ns)
    print(
        f"\n{'malloc+free, ns':18} {'native':>8} {'preloaded':>10} {'ratio':>6} {'wrapper':>8} {'ratio':>6}"
    )
    for name, columns in table.items():
        native, ours, wrapper = (min(columns[kind]) for kind in ("native", "strandline", "wrapper"))
        print(
            f"{name:18} {native:8.0f} {ours:10.0f} {ours / native:6.2f} {wrapper:8.0f} {wrapper / native:6.2f}",
            flush=True,
        )
    return True


def timed(runs, script, name, number, allocator, gpu):
    """One timed run of a job: its figures with its `output`, or what went wrong as a text."""
    result = runs.folder / f"{name}-{number}.json"
    extra = {"ACCEPT_OUT": str(result), "ACCEPT_TURN": str(runs.folder / f"turn-{gpu}")}
    extra.update(only(runs, gpu))
    try:
        done = runs.run(
            allocator,
            [script, runs.args.workloads / f"{name}.py"],
            out=runs.folder / f"{name}-{number}",
            extra=extra,
            limit=300,
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    if done.returncode or not result.exists():
        return f"exit {done.returncode} {done.stderr[-600:]}"
    row = {**json.loads(result.read_text()), "output": done.stdout}
    runs.args.keep.mkdir(parents=True, exist_ok=True)
    (runs.args.keep / f"{name}-{number}-{allocator}.json").write_text(json.dumps(row))
    return row


def only(runs, gpu):
    """The environment in which a job sees one of the GPUs that this process may use."""
    if runs.args.gpus == 1:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else str(gpu)}


def jobs_of(runs):
    """The jobs, each with the number of the GPU that it runs on."""
    every = sorted(p.stem for p in runs.args.workloads.glob("*.py") if p.stem != "score")
    return list(zip(runs.args.names or every, itertools.cycle(range(runs.args.gpus))))


def workloads(runs):
    script = runs.folder / "result.py"
    script.write_text(RESULT)
    print(
        f"\n{'job':20} {'steps/s native':>14} {'ours':>8} {'ratio':>6}   {'reserved/requested native':>25} {'expand.':>8} {'ours':>6}  output"
    )
    ratios, went_well = [], True
    with contextlib.ExitStack() as stack:
        pools = [
            stack.enter_context(concurrent.futures.ThreadPoolExecutor(runs.args.ahead))
            for _ in range(runs.args.gpus)
        ]
        jobs = {
            name: [
                (allocator, pools[gpu].submit(timed, runs, script, name, number, allocator, gpu))
                for number, allocator in enumerate(runs.args.order)
            ]
            for name, gpu in jobs_of(runs)
        }
        for name, runs_of_it in jobs.items():
            rows = {}
            for allocator, job in runs_of_it:
                row = job.result()
                if isinstance(row, str):
                    went_well = False
                    print(f"{name:20} {allocator}: FAILED {row}", flush=True)
                else:
                    rows.setdefault(allocator, []).append(row)
            if "native" in rows and "strandline" in rows:
                ratios.append(line(name, rows))
    if ratios:
        print(
            f"{'geometric mean':20} {'':14} {'':8} {statistics.geometric_mean(ratios):6.3f}   lowest {min(ratios):.3f}"
        )
    return went_well


def line(name, rows):
    """Prints the row of one job; its ratio of speeds, the best of each."""
    native, ours = rows["native"], rows["strandline"]
    best = [max(row["rate"] for row in side) for side in (native, ours)]
    over = [
        f"{max(r['reserved'] for r in side) / max(1, min(r['requested'] for r in side)):.3f}" if side else "-"
        for side in (native, rows.get("expandable"), ours)
    ]
    outputs = {row["output"] for row in native}
    same = "same" if ours[0]["output"] in outputs else "DIFFERS"
    if same == "DIFFERS" and len(outputs) > 1:
        same = "native differs too"
    ratio = best[1] / best[0] if best[0] else float("nan")
    print(
        f"{name:20} {best[0]:14.2f} {best[1]:8.2f} {ratio:6.3f}   {over[0]:>25} {over[1]:>8} {over[2]:>6}  {same}",
        flush=True,
    )
    return ratio


def results(runs):
    """Whether each job prints the same under strandline as natively, with deterministic settings."""
    script = runs.folder / "deterministic.py"
    script.write_text(DETERMINISTIC)

    def printed(allocator, name, gpu):
        extra = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        extra.update(only(runs, gpu))
        out = runs.folder / f"results-{name}"
        job = [script, runs.args.workloads / f"{name}.py"]
        try:
            done = runs.run(allocator, job, out=out, extra=extra, limit=300)
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode == 0 else None

    went_well = True
    with concurrent.futures.ThreadPoolExecutor(runs.args.jobs) as pool:
        rows = [
            (name, [pool.submit(printed, kind, name, gpu) for kind in ("native", "native", "strandline")])
            for name, gpu in jobs_of(runs)
        ]
        for name, jobs in rows:
            first, second, ours = (job.result() for job in jobs)
            said = "same" if ours in (first, second) else "DIFFERS"
            if None in (first, second, ours):
                said = "FAILED"
            elif said != "same" and first != second:
                said = "differs, as two native runs do"
            went_well &= said.islower()
            print(f"{name:20} {said}", flush=True)
    return went_well


def features(runs):
    done = subprocess.run(
        [sys.executable, str(HERE.parent / "cuda_gpu.py"), str(runs.args.library)],
        env=runs.environment("native"),
        capture_output=True,
        text=True,
        timeout=560,
    )
    print("\n" + done.stdout + done.stderr[-500:], flush=True)
    return done.returncode == 0


def findings(runs):
    went_well = True
    for mode in runs.args.modes:
        command = [
            sys.executable,
            str(runs.args.workloads / "score.py"),
            "--device",
            "cuda",
            "--strandline",
            str(runs.args.command),
            "--python",
            sys.executable,
            "--mode",
            mode,
            "--jobs",
            str(runs.args.jobs),
            "--keep",
            str(runs.args.keep / mode),
            *runs.args.names,
        ]
        env = runs.environment("native", {"STRANDLINE_LIB": str(runs.args.library)})
        print(f"\nfindings, --mode {mode}", flush=True)
        went_well &= subprocess.run(command, env=env, timeout=560).returncode == 0
    return went_well


SECTIONS = {
    "features": features,
    "findings": findings,
    "cost": cost,
    "workloads": workloads,
    "results": results,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "target/release/libstrandline.so")
    parser.add_argument("--command", type=pathlib.Path, default=ROOT / "target/release/strandline")
    parser.add_argument("--workloads", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", choices=sorted(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--modes", nargs="*", default=["heap", "observer"])
    parser.add_argument("--jobs", type=int, default=1, help="findings, results: jobs at a time")
    parser.add_argument("--ahead", type=int, default=4, help="workloads: processes started side by side")
    parser.add_argument(
        "--gpus", type=int, default=1, help="workloads, results: GPUs among which the jobs are divided"
    )
    parser.add_argument(
        "--order",
        nargs="*",
        choices=["native", "strandline", "expandable"],
        default=["native", "strandline", "expandable", "native", "strandline"],
        help="workloads: the runs of each job",
    )
    parser.add_argument("--keep", type=pathlib.Path, default=pathlib.Path("strandline-out/accept"))
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    for name in ("library", "command", "workloads", "keep"):
        if getattr(args, name):
            setattr(args, name, getattr(args, name).resolve())
    went_well = True
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(args, folder)
        for name in args.only:
            if name in ("findings", "workloads", "results") and not args.workloads:
                went_well = False
                print(f"{name}: needs --workloads DIR")
                continue
            began = time.time()
            went_well &= SECTIONS[name](runs)
            print(f"({name}: {time.time() - began:.0f} s)", flush=True)
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())
