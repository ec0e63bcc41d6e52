"""The C ABI and CUDA programs on a machine with a GPU: one command, one table, exit code 1 if a check failed.

    python tests/gpu/capi.py --library target/release/libstrandline.so --command target/release/strandline
        [--programs DIR] [--only WORD …] [--json OUT]
    python tests/gpu/capi.py --build DIR [--cudart DIR]      builds the programs where a compiler is, for --programs

Without --programs the programs are built by the machine's own compiler. `--cudart` is the folder of libcudart.so and
libcudart_static.a; by default CUDA_HOME's or that of the wheel nvidia-cuda-runtime. A check whose need is missing
(nvcc, CuPy, JAX, RMM) is shown as skipped with the reason.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from checks import Failed, Skipped, must, run_all

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FAKES = ROOT / "tests" / "fake_cuda"
LIMIT = 180
KEPT = 1 << 20


# ---- programs ------------------------------------------------------------------------------------------------


def cudart_folder(asked: str | None) -> pathlib.Path:
    places = [asked] if asked else []
    places += [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "lib64")]
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        places += [os.path.join(place, "cu13", "lib"), os.path.join(place, "cuda_runtime", "lib")]
    for place in places:
        if (
            place
            and glob.glob(os.path.join(place, "libcudart.so*"))
            and glob.glob(os.path.join(place, "*_static.a"))
        ):
            return pathlib.Path(place)
    raise Skipped(f"no cudart in {', '.join(map(str, places))}")


def build(folder: pathlib.Path, library: pathlib.Path, cudart: str | None) -> None:
    """Builds every program into `folder`, with the shared cudart beside them."""
    cc = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if cc is None:
        raise Skipped("no C compiler; build elsewhere with --build and pass --programs")
    folder.mkdir(parents=True, exist_ok=True)
    lib = cudart_folder(cudart)
    shared = sorted(glob.glob(str(lib / "libcudart.so.*")), key=len)[0]
    shutil.copy(shared, folder)
    here = "-Wl,-rpath,$ORIGIN"

    def compile(*arguments):
        done = subprocess.run(
            [cc, "-g", "-O1", "-fno-inline", *map(str, arguments)], capture_output=True, text=True
        )
        if done.returncode:
            raise Failed(f"{arguments}: {done.stderr[-500:]}")

    program = ["-DOPENED", FAKES / "program.c"]
    tail = ["-lpthread", "-ldl", "-lrt"]
    compile(*program, "-o", folder / "program_shared", folder / os.path.basename(shared), here, *tail)
    compile(*program, "-o", folder / "program_static", lib / "libcudart_static.a", *tail, "-lstdc++")
    for name in ("leak", "server"):
        source = ROOT / "examples" / "c" / f"{name}.c"
        compile(
            f"-I{ROOT / 'include'}",
            source,
            "-o",
            folder / name,
            f"-L{library.parent}",
            "-lstrandline",
            "-lpthread",
        )


KERNELS = r"""
#include <cstdio>
#include <cuda_runtime.h>
__global__ void slow(unsigned *at, unsigned n, unsigned value) {
  long long until = clock64() + 20000000;
  while (clock64() < until) {}
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) at[i] = value;
}
__global__ void fill(unsigned *at, unsigned n, unsigned value) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) at[i] = value;
}
__global__ void count(const unsigned *at, unsigned n, unsigned value, unsigned *wrong) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    if (at[i] != value) atomicAdd(wrong, 1u);
}
#define CHECK(x) do { cudaError_t e = (x); if (e) { printf("%s: %d\n", #x, e); return 9; } } while (0)
// A block is freed while a slow kernel on another stream still writes to it; its memory is asked for again at once
// and filled. cudaFree's promise: the slow kernel has ended before the memory is anybody else's.
int main() {
  const unsigned n = 1 << 20;
  cudaStream_t one, two;
  CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
  unsigned *wrong, total = 0;
  CHECK(cudaMallocManaged(&wrong, sizeof *wrong));
  *wrong = 0;
  for (int i = 0; i < 30; i++) {
    unsigned *a, *b;
    CHECK(cudaMalloc(&a, n * sizeof *a));
    slow<<<64, 256, 0, one>>>(a, n, 7);
    CHECK(cudaFree(a));
    CHECK(cudaMalloc(&b, n * sizeof *b));
    fill<<<64, 256, 0, two>>>(b, n, i);
    CHECK(cudaStreamSynchronize(two));
    count<<<64, 256, 0, two>>>(b, n, i, wrong);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(b));
  }
  total = *wrong;
  CHECK(cudaFree(wrong));
  printf("wrong %u\n", total);
  return total ? 8 : 7;
}
"""

COST = r"""
import ctypes, sys, time
cudart = ctypes.CDLL(sys.argv[1])
at = ctypes.c_void_p()
def pair(size):
    cudart.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(size)); cudart.cudaFree(at)
for size in (4096, 4 << 20):
    for _ in range(50): pair(size)
    best = 1e9
    for _ in range(5):
        t = time.perf_counter()
        for _ in range(200): pair(size)
        best = min(best, (time.perf_counter() - t) / 200)
    print(f"{size} {best * 1e6:.2f}")
"""

TORCH = r"""
import torch
kept = []
pinned = []
for step in range(40):
    x = torch.ones(256, 1024, device="cuda") * step
    kept.append(x.sum(0))
    pinned.append(torch.empty(1000).pin_memory())
    x.sum().item()
print(len(kept), torch.cuda.memory_allocated() >= 40 * 4096)
"""


class Bench:
    def __init__(self, options, folder):
        self.library = pathlib.Path(options.library).resolve()
        self.command = pathlib.Path(options.command).resolve()
        self.folder = folder
        self.runs = 0
        if options.programs:
            self.programs = pathlib.Path(options.programs).resolve()
        else:
            self.programs = folder / "programs"
            build(self.programs, self.library, options.cudart)

    def bare(self, *command, env=None):
        self.runs += 1
        base = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_") and k != "LD_PRELOAD"}
        paths = f"{self.library.parent}:{self.programs}:{base.get('LD_LIBRARY_PATH', '')}"
        place = self.folder / f"run{self.runs}"
        place.mkdir()
        done = subprocess.run(
            [str(c) for c in command],
            cwd=place,
            env={**base, "LD_LIBRARY_PATH": paths, **(env or {})},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        done.place = place
        return done

    def under(self, *command, mode="auto", env=None, quiet=True):
        options = ["--mode", mode] + (["--quiet"] if quiet else [])
        return self.bare(self.command, "run", *options, "--", *command, env=env)

    @staticmethod
    def report(done):
        found = [json.loads(p.read_text()) for p in done.place.rglob("report.json")]
        must(found, f"no report; stderr: {done.stderr[-600:]}")
        return max(found, key=lambda report: report["run"]["steps"])

    def same(self, *command, mode="auto", env=None):
        """Runs a program with and without strandline: output and exit code must not change."""
        plain, ours = self.bare(*command, env=env), self.under(*command, mode=mode, env=env)
        seen, wanted = (ours.returncode, ours.stdout), (plain.returncode, plain.stdout)
        must(seen == wanted, f"changed from {wanted} to {seen}: {ours.stderr[-400:]}")
        return ours


def the_leak(report, function, device, blocks=None):
    must(report["verdict"] == "leak", f"verdict {report['verdict']}: {report['reason']}")
    found = [f for f in report["findings"] if function in [frame["function"] for frame in f["stack"]]]
    must(len(found) == 1, f"{len(found)} findings in {function} of {len(report['findings'])}")
    must(found[0]["device"] == device, f"device {found[0]['device']}")
    if blocks is not None:
        must(
            found[0]["live_blocks"] in (blocks, blocks - 1), f"{found[0]['live_blocks']} blocks, not {blocks}"
        )
    at = found[0]["allocated_at"]
    return f"{os.path.basename(at['file'])}:{at['line']} {at['function']}, {report['run']['steps']} steps"


def c_example(bench, name, function, blocks, *arguments):
    done = bench.bare(bench.programs / name, *arguments)
    must(done.returncode == 0, f"exit {done.returncode}: {done.stderr[-400:]}")
    report = bench.report(done)
    return the_leak(report, function, 0 if arguments else -1, blocks)


def program(bench, how, kind, mode, device):
    done = bench.same(bench.programs / f"program_{how}", kind, 80, mode=mode)
    must(done.returncode == 7, f"exit {done.returncode}: {done.stdout} {done.stderr[-300:]}")
    report = bench.report(done)
    text = the_leak(report, "keep_result", device, 80)
    served = [
        entry["stats"].get("allocation.all.allocated", 0)
        for entry in report["devices"]
        if entry["device"] == 0
    ]
    if mode == "heap" and kind in ("device", "pitch", "driver"):
        must(served and served[0] >= 240, f"the heap served {served}")
    return text


def unchanged(bench, how, kind, mode):
    done = bench.same(bench.programs / f"program_{how}", kind, 40, mode=mode)
    return " ".join(done.stdout.split())[:60]


def kernels(bench, mode):
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise Skipped("no nvcc")
    source, target = bench.folder / "kernels.cu", bench.folder / "kernels"
    if not target.exists():
        source.write_text(KERNELS)
        done = subprocess.run([nvcc, "-o", target, source], capture_output=True, text=True)
        must(done.returncode == 0, done.stderr[-400:])
    done = bench.same(target, mode=mode)
    must(done.returncode == 7, f"exit {done.returncode}: {done.stdout}")
    return done.stdout.strip()


def framework(bench, package, script, mode, function, env=None):
    if importlib.util.find_spec(package) is None:
        raise Skipped(f"no {package}")
    done = bench.under(sys.executable, ROOT / "examples" / "frameworks" / script, mode=mode, env=env)
    must(done.returncode == 0, f"exit {done.returncode}: {done.stderr[-600:]}")
    report = bench.report(done)
    found = [f for f in report["findings"] if any(frame["file"].endswith(script) for frame in f["stack"])]
    must(
        found,
        f"{report['verdict']}, {report['reason']}; {len(report['findings'])} findings, none in {script}",
    )
    return f"{found[0]['class']}, line {found[0]['allocated_at']['line']}, {report['run']['steps']} steps"


def torch_once(bench, mode):
    if importlib.util.find_spec("torch") is None:
        raise Skipped("no torch")
    script = bench.folder / "torch_job.py"
    script.write_text(TORCH)
    done = bench.same(sys.executable, script, mode=mode)
    must(done.returncode == 0, done.stderr[-400:])
    report = bench.report(done)
    devices = {entry["device"]: entry for entry in report["devices"]}
    must(set(devices) == {0}, f"devices {sorted(devices)}: pinned memory or segments were counted")
    must(devices[0]["live_bytes"] < 4 << 20, f"{devices[0]['live_bytes']} live bytes: a segment was counted")
    return f"{devices[0]['live_blocks']} blocks, {devices[0]['live_bytes']} bytes"


def startup(bench):
    def best(command):
        times = []
        for _ in range(20):
            began = time.perf_counter()
            command()
            times.append(time.perf_counter() - began)
        return min(times) * 1e3

    base = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    loaded = {**base, "LD_PRELOAD": str(bench.library), "STRANDLINE_MODE": "auto"}
    plain = best(lambda: subprocess.run(["/bin/true"], env=base, check=True))
    ours = best(lambda: subprocess.run(["/bin/true"], env=loaded, check=True))
    must(ours - plain < 1.0, f"{ours - plain:.2f} ms more")
    return f"+{ours - plain:.2f} ms"


def cost(bench):
    shared = glob.glob(str(bench.programs / "libcudart.so.*"))[0]
    script = bench.folder / "cost.py"
    script.write_text(COST)
    rows = {}
    runs = {
        "CUDA": lambda: bench.bare(sys.executable, script, shared),
        "watched": lambda: bench.under(sys.executable, script, shared),
        "served": lambda: bench.under(sys.executable, script, shared, mode="heap"),
    }
    for name, run in runs.items():
        done = run()
        must(done.returncode == 0, f"{name}: {done.stderr[-300:]}")
        rows[name] = [line.split()[1] for line in done.stdout.splitlines()]
    return "; ".join(f"{name} {'/'.join(times)}" for name, times in rows.items()) + " µs (4 KiB/4 MiB)"


def checks(bench):
    """(name, function) of every check."""
    yield "C: leak, host", lambda: c_example(bench, "leak", "make_result", 60)
    yield "C: leak, GPU", lambda: c_example(bench, "leak", "make_result", 60, "cuda")
    yield "C: server, GPU", lambda: c_example(bench, "server", "log_answer", 240, "cuda")
    kinds = {"device": 0, "pitch": 0, "async": 0, "pinned": -2, "managed": -3, "driver": 0}
    for how in ("shared", "static"):
        for kind, device in kinds.items():
            for mode in ("auto", "heap"):
                yield (
                    f"program, {how} cudart, {kind}, {mode}",
                    lambda how=how, kind=kind, mode=mode, device=device: program(
                        bench, how, kind, mode, device
                    ),
                )
    for kind in ("errors", "threads"):
        for mode in ("auto", "heap"):
            yield (
                f"same answers: {kind}, {mode}",
                lambda kind=kind, mode=mode: unchanged(bench, "static", kind, mode),
            )
    for mode in ("auto", "heap"):
        yield f"cudaFree waits for the device, {mode}", lambda mode=mode: kernels(bench, mode)
    yield "CuPy, CFunctionAllocator", lambda: framework(bench, "cupy", "cupy_allocator.py", "heap", "step")
    yield "RMM, callback resource", lambda: framework(bench, "rmm", "rmm_resource.py", "heap", "step")
    allocator = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
    yield "JAX, cuda_async allocator", lambda: framework(bench, "jax", "jax_async.py", "auto", "", allocator)
    for mode in ("heap", "observer"):
        yield f"torch is counted once, {mode}", lambda mode=mode: torch_once(bench, mode)
    yield "start-up of a process without CUDA", lambda: startup(bench)
    yield "cudaMalloc+cudaFree", lambda: cost(bench)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", default=str(ROOT / "target/release/libstrandline.so"))
    parser.add_argument("--command", default=str(ROOT / "target/release/strandline"))
    parser.add_argument("--programs")
    parser.add_argument("--cudart")
    parser.add_argument("--build", metavar="DIR")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.build:
        build(pathlib.Path(options.build), pathlib.Path(options.library).resolve(), options.cudart)
        print(f"built in {options.build}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        every = checks(Bench(options, pathlib.Path(folder)))
        wanted = (
            (name, check)
            for name, check in every
            if not options.only or any(word in name for word in options.only)
        )
        return run_all(wanted, 52, options.json)


if __name__ == "__main__":
    sys.exit(main())
