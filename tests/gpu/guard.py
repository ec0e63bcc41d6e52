"""Guard mode on a machine with a GPU: one command, one table, exit code 1 if a check failed.

    python tests/gpu/guard.py --library target/release/libstrandline.so --command target/release/strandline
        [--only WORD …] [--json OUT]

Each check is a job of its own under `strandline run --guard --mode heap`. The faults are planted through the driver
(cuMemsetD8) or by torch's own kernels on a tensor that reaches too far, so no compiler is needed. The costs at the end
are printed only: they decide nothing. The checks of `POKED` launch no kernel of torch's and also run over the
stand-in for the driver (tests/test_guard_device.py).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from checks import must, run_all

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LIMIT = 240

# What every job begins with. `make` and `drop` are the lines that a fault has to name.
START = """
import ctypes, sys, time
import torch

cuda = ctypes.CDLL("libcuda.so.1")

def enter():
    torch.cuda.init()
    torch.empty(1, device="cuda")
    context = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0

def poke(address, size):
    code = cuda.cuMemsetD8_v2(ctypes.c_uint64(address), ctypes.c_ubyte(3), ctypes.c_size_t(size))
    assert code == 0, code
    torch.cuda.synchronize()

def make(n):
    return torch.empty(n, device="cuda")

def drop(box):
    box.clear()

def over(address, n):
    # A tensor over memory that is not its own.
    device = torch.device("cuda", torch.cuda.current_device())
    storage = torch._C._construct_storage_from_data_pointer(address, device, 4 * n)
    return torch.empty(0, device="cuda").set_(storage, 0, (n,))

enter()
"""

JOBS = {
    "overflow": """
box = [make(1000)]
poke(box[0].data_ptr() + 4000, 16)
drop(box)
""",
    "underflow": """
box = [make(300000)]
poke(box[0].data_ptr() - 32, 32)
drop(box)
""",
    "odd": """
box = [torch.empty(1003, dtype=torch.uint8, device="cuda")]
poke(box[0].data_ptr() + 1003, 1)
drop(box)
""",
    "use": """
box = [make(1000)]
address = box[0].data_ptr()
drop(box)
poke(address + 64, 8)
""",
    "reused": """
box = [make(1000)]
address = box[0].data_ptr()
drop(box)
poke(address + 64, 8)
total = torch.cuda.mem_get_info()[1]
# So much is freed after it that the block is handed out again; it is looked at before.
for _ in range(40):
    more = torch.empty(min(256 << 20, total // 64), dtype=torch.uint8, device="cuda")
    del more
torch.cuda.synchronize()
print("still running", flush=True)
""",
    "live": """
kept = [make(100 + n % 50) for n in range(3000)]
poke(kept[1234].data_ptr() + kept[1234].nbytes, 4)
""",
    "large": """
size = min(512 << 20, torch.cuda.mem_get_info()[1] // 64)
box = [torch.empty(size, dtype=torch.uint8, device="cuda")]
address = box[0].data_ptr()
drop(box)
poke(address + size - 5, 5)
""",
    "untouched": """
for n in range(3000):
    box = [make(1 + n * 37 % 100000)]
    poke(box[0].data_ptr(), box[0].nbytes) if n % 100 == 0 else None
    drop(box)
torch.cuda.empty_cache()
print(torch.cuda.memory_allocated() < 64 << 20)
""",
    "kernel": """
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    box = [make(4096)]
    over(box[0].data_ptr(), 4096 + 8).fill_(2.0)
    drop(box)
torch.cuda.synchronize()
""",
    "stale kernel": """
box = [make(1 << 20)]
address = box[0].data_ptr()
drop(box)
over(address, 1 << 20).fill_(2.0)
torch.cuda.synchronize()
""",
    "capture": """
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    box = [make(1000)]
    x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
poke(box[0].data_ptr() + 4000, 4)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side):
    drop(box)
    y = x * 2
    z = y + 1
for _ in range(5):
    graph.replay()
torch.cuda.synchronize()
print(float(z.sum()))
""",
    "streams": """
side = torch.cuda.Stream()
right = True
for n in range(20):
    x = torch.zeros(1 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(2000000)
        x += 1
        y = x.sum()
    x.record_stream(side)
    del x
    # Were it handed out or poisoned too early, the sum would tell.
    z = torch.full((1 << 20,), 7.0, device="cuda")
    del z
    side.synchronize()
    right = right and float(y) == 1 << 20
print(right)
""",
    "out of memory": """
torch.cuda.set_per_process_memory_fraction(0.05)
kept, counts = [], []
part = torch.cuda.mem_get_info()[1] // 100
for _ in range(3):
    del kept[:]
    try:
        for _ in range(20):
            kept.append(torch.empty(part, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    counts.append(len(kept))
print(len(set(counts)) == 1 and counts[0] >= 3)
""",
    "train": """
torch.manual_seed(0)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 120
width, batch = 1024, 256
model = torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(width, width), torch.nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
copies = torch.cuda.Stream()
inputs = [torch.randn(batch, width) for _ in range(4)]
inputs = [x.pin_memory() for x in inputs]
# Once captured, replayed in each step.
static = torch.randn(batch, width, device="cuda")
graph = torch.cuda.CUDAGraph()
warm = torch.cuda.Stream()
warm.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(warm):
    for _ in range(3):
        torch.tanh(static @ static.t()).sum()
torch.cuda.current_stream().wait_stream(warm)
with torch.cuda.graph(graph):
    mixed = torch.tanh(static @ static.t()).mean()
def step(n):
    with torch.cuda.stream(copies):
        x = inputs[n % 4].to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(copies)
    x.record_stream(torch.cuda.current_stream())
    graph.replay()
    loss = ((model(x) - x) ** 2).mean() + mixed
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if n % 40 == 39:
        torch.cuda.empty_cache()
    return loss
for n in range(20):
    step(n)
torch.cuda.synchronize()
began = time.perf_counter()
for n in range(20, steps):
    loss = step(n)
torch.cuda.synchronize()
took = (time.perf_counter() - began) / (steps - 20)
print(f"loss {float(loss):.4f}")
print(f"milliseconds {took * 1e3:.3f} a step", file=sys.stderr)
""",
    "pairs": """
def pairs(size, n=3000):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(n):
        x = torch.empty(size, dtype=torch.uint8, device="cuda")
        del x
    called = time.perf_counter() - began
    torch.cuda.synchronize()
    return called / n * 1e6, (time.perf_counter() - began) / n * 1e6
for size in (4096, 4 << 20, 64 << 20):
    pairs(size, 300)
    print(size, *[f"{value:.2f}" for value in pairs(size)])
""",
}

# job: (what, size, first, changed), whether it was freed, whether the user's frames are those of make and drop
FAULTS = {
    "overflow": (("overflow", 4000, 4000, 16), True),
    "underflow": (("underflow", 1200000, -32, 32), True),
    "odd": (("overflow", 1003, 1003, 1), True),
    "use": (("use-after-free", 4000, 64, 8), True),
    "reused": (("use-after-free", 4000, 64, 8), True),
    "live": (("overflow", None, None, 4), False),
    "large": (("use-after-free", None, None, 5), True),
    "kernel": (("overflow", 16384, 16384, 32), True),
    "stale kernel": (("use-after-free", 4 << 20, 0, 4 << 20), True),
    "capture": (("overflow", 4000, 4000, 4), True),
}
POKED = ("overflow", "underflow", "odd", "use", "reused", "live", "large", "untouched")


class Bench:
    def __init__(self, options, folder):
        self.library = pathlib.Path(options.library).resolve()
        self.command = pathlib.Path(options.command).resolve()
        self.folder = folder
        self.runs = 0

    def run(self, job, *arguments, how=("--mode", "heap", "--guard")):
        """Runs a job under strandline; with `how` None without it."""
        self.runs += 1
        place = self.folder / f"run{self.runs}"
        place.mkdir()
        script = place / "job.py"
        script.write_text(START + JOBS[job])
        command = [sys.executable, script, *arguments]
        if how is not None:
            command = [self.command, "run", *how, "--out", place / "out", "--", *command]
        env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith("STRANDLINE_") or k == "STRANDLINE_LIBCUDA"
        }
        env["STRANDLINE_LIB"] = str(self.library)
        done = subprocess.run(
            [str(c) for c in command], cwd=place, env=env, capture_output=True, text=True, timeout=LIMIT
        )
        must(done.returncode == 0, f"exit {done.returncode}: {done.stdout[-200:]} {done.stderr[-900:]}")
        found = list(place.rglob("guard.json"))
        done.faults = json.loads(found[0].read_text()) if found else []
        done.source = script.read_text().splitlines()
        must("internal fault" not in done.stderr, done.stderr[-600:])
        for words in ("is not guarded", "guard mode ends", "has no effect"):
            must(words not in done.stderr, done.stderr[-600:])
        return done


def line_of(fault, which, done, text):
    """The frame of the job's own line that has `text`."""
    frames = [frame for frame in fault[which] if frame["file"].endswith("job.py")]
    lines = [done.source[frame["line"] - 1].strip() for frame in frames]
    must(any(text in line for line in lines), f"{which}: no line with {text!r} in {lines}")
    return frames[0]["line"]


def planted(bench, job):
    done = bench.run(job)
    (what, size, first, changed), freed = FAULTS[job]
    must(
        len(done.faults) == 1,
        f"{len(done.faults)} faults: {json.dumps(done.faults)[:400]} {done.stderr[-400:]}",
    )
    (fault,) = done.faults
    must(fault["what"] == what, f"{fault['what']}, not {what}")
    for name, wanted in (("size", size), ("first", first), ("changed", changed)):
        must(wanted is None or fault[name] == wanted, f"{name} {fault[name]}, not {wanted}")
    must(fault["device"] == 0, f"device {fault['device']}")
    born = line_of(fault, "allocated", done, "torch.empty(")
    text = f"{what}, {fault['changed']} bytes from {fault['first']}; allocated at line {born}"
    if freed:
        text += f", freed at line {line_of(fault, 'freed', done, 'box.clear()')}"
    else:
        must(fault["freed"] == [], "a stack of a free that never was")
    said = what.replace("-", " ").upper()
    must(done.stderr.count(said) == 1 and "on GPU 0" in done.stderr, f"not said: {done.stderr[-400:]}")
    must("job.py:" in done.stderr, f"no line is named: {done.stderr[-400:]}")
    if job == "capture":
        must(done.stdout == "3000.0\n", f"the graph's result: {done.stdout!r}")
    return text


def no_faults(bench, job, output):
    done = bench.run(job)
    must(done.faults == [], f"{len(done.faults)} faults: {done.stderr[-600:]}")
    must(done.stdout == output, f"said {done.stdout!r}, not {output!r}")
    return " ".join(done.stdout.split())[:60]


def training(bench):
    plain = bench.run("train", how=None)
    done = bench.run("train")
    must(done.faults == [], f"{len(done.faults)} faults: {done.stderr[-900:]}")
    must(done.stdout == plain.stdout, f"{done.stdout!r}, natively {plain.stdout!r}")
    notes = [line for line in done.stderr.splitlines() if "guard mode" in line]
    return f"{done.stdout.strip()}, as natively; {notes[0] if notes else 'every block was looked at'}"


WAYS = {"native": None, "heap": ("--mode", "heap"), "guard": ("--mode", "heap", "--guard")}


def cost_of_training(bench):
    took = {}
    for name, how in WAYS.items():
        runs = [bench.run("train", "320", how=how) for _ in range(2)]
        took[name] = min(float(done.stderr.split("milliseconds ")[1].split()[0]) for done in runs)
    native, heap, guard = took.values()
    return f"ms a step: native {native:.3f}, heap {heap:.3f}, guard {guard:.3f} ({guard / heap:.2f} x heap)"


def cost_of_pairs(bench):
    rows = {name: bench.run("pairs", how=how).stdout.splitlines() for name, how in WAYS.items()}
    sizes = [line.split()[0] for line in rows["native"]]
    text = []
    for n, size in enumerate(sizes):
        parts = (f"{name} {'/'.join(lines[n].split()[1:])}" for name, lines in rows.items())
        text.append(f"{int(size) >> 10} KiB: {', '.join(parts)}")
    return "µs a pair, called/done: " + "; ".join(text)


def checks(bench):
    """(name, function) of every check."""
    for job in FAULTS:
        yield job, lambda job=job: planted(bench, job)
    yield "untouched", lambda: no_faults(bench, "untouched", "True\n")
    yield "streams", lambda: no_faults(bench, "streams", "True\n")
    yield "out of memory", lambda: no_faults(bench, "out of memory", "True\n")
    yield "training", lambda: training(bench)
    yield "cost: training", lambda: cost_of_training(bench)
    yield "cost: pairs", lambda: cost_of_pairs(bench)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", default=str(ROOT / "target/release/libstrandline.so"))
    parser.add_argument("--command", default=str(ROOT / "target/release/strandline"))
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        every = checks(Bench(options, pathlib.Path(folder)))
        wanted = ((name, check) for name, check in every if not options.only or name in options.only)
        return run_all(wanted, 16, options.json)


if __name__ == "__main__":
    sys.exit(main())
