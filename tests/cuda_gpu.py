"""What torch can do with strandline as its allocator, tried on a real GPU: the rows of docs/torch.md.

    python tests/cuda_gpu.py LIBRARY [CASE…]

LIBRARY is the test service (`cargo build --release --example torch_service`, then
target/release/examples/libtorch_service.so), which tries the driver and the torch side without the heap, or
libstrandline.so itself. Each case runs in a process of its own; one line per case, exit code 1 if any failed.
"""

import concurrent.futures
import ctypes
import os
import subprocess
import sys
import time

import cuda_gpu_graphs
from cuda_gpu_library import install, load, python_side

MIB = 1 << 20
globals().update({name: case for name, case in vars(cuda_gpu_graphs).items() if name.startswith("case_")})


def case_methods(path):
    installed = install(path)
    import torch

    assert torch.cuda.memory.get_allocator_backend() == "pluggable"
    return f"{len(installed.replaced)} methods replaced, declined {installed.declined}, limits {installed.limits}"


def case_training(path):
    install(path)
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(128, 256, device="cuda"), torch.randint(10, (128,), device="cuda")
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.7, losses
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, peak {torch.cuda.max_memory_allocated() / MIB:.1f} MiB"


def case_statistics(path):
    install(path)
    import torch

    a = torch.ones(5 * MIB, device="cuda")
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    assert requested == 20 * MIB, requested
    assert torch.cuda.memory_allocated() >= 20 * MIB
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory_summary()
    segments = torch.cuda.memory_snapshot()
    assert any(s["address"] <= a.data_ptr() < s["address"] + s["total_size"] for s in segments)
    for segment in segments:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    if hasattr(torch.accelerator, "memory_allocated"):
        assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
    return "ok"


def case_history(path):
    """What torch's viewer draws from: past events with the stacks that were asked for."""
    install(path)
    import json

    import torch
    from torch.cuda import _memory_viz as viz

    def thealloc():
        return torch.ones(3 * MIB, dtype=torch.uint8, device="cuda")

    torch.cuda.memory._record_memory_history(context="all", stacks="all", max_entries=1000)
    a = thealloc()
    side = torch.cuda.Stream()
    a.record_stream(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
    del a
    b = thealloc()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    snapshot = torch.cuda.memory._snapshot()
    trace = snapshot["device_traces"][0]
    actions = [entry["action"] for entry in trace]
    sizes = [entry["size"] for entry in trace if entry["action"] == "alloc"]
    assert sizes.count(3 * MIB) == 2, trace
    assert actions.count("free_requested") == actions.count("free_completed") >= 1, actions
    assert "segment_map" in actions or "segment_alloc" in actions, actions
    text = json.dumps(snapshot)
    assert "thealloc" in text and "::ones" in text, "the Python and the C++ frames"
    assert viz.trace_plot(snapshot) and viz.segment_plot(snapshot) and viz.segsum(snapshot)
    torch.cuda.memory._record_memory_history(None)
    thealloc()
    assert not torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.caching_allocator_enable(False)
    reserved = torch.cuda.memory_reserved()
    direct = thealloc()
    assert torch.cuda.memory_reserved() == reserved and direct.sum().item() == 3 * MIB
    torch.cuda.caching_allocator_enable(True)
    del direct, b
    return f"{len(trace)} events"


def case_out_of_memory(path):
    install(path)
    import torch

    told = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *numbers: told.append(numbers))
    try:
        torch.empty(1 << 42, device="cuda", dtype=torch.uint8)
    except torch.OutOfMemoryError as error:
        text = str(error)
    assert told and told[0][1] == 1 << 42 and told[0][2] >= 1 << 30, told
    torch.ones(100, device="cuda").sum().item()
    return text[:80]


def case_full_card(path):
    """Fills the card, leaves holes, and trains with the batch halved after each torch.OutOfMemoryError."""
    install(path)
    import torch

    total = torch.cuda.mem_get_info()[0]
    blocks = []
    try:
        while True:
            blocks.append(torch.empty(192 * MIB + len(blocks) % 7 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        text = str(error)
    filled = sum(block.nbytes for block in blocks)
    assert filled > 0.9 * total, (filled, total)
    assert "out of memory" in text and "GiB" in text, text
    # Every other block goes: half of the card is free, no two free blocks side by side.
    del blocks[::2]
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, halved, done = 16 << 20, 0, 0
    while done < 5:
        x = loss = None
        optimizer.zero_grad()
        try:
            x = torch.randn(batch, 1024, device="cuda")
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            done += 1
        except torch.OutOfMemoryError:
            batch, halved = batch // 2, halved + 1
    used = torch.cuda.max_memory_allocated() / total
    assert halved and batch >= 1 << 19, (halved, batch)
    return f"{filled >> 30} GiB filled, batch halved {halved} times to {batch}, peak {used:.0%} of the card"


def case_streams(path):
    install(path)
    import torch

    side = torch.cuda.Stream()
    for _ in range(200):
        a = torch.full((MIB,), 1.0, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100000)
            b = a * 2
        a.record_stream(side)
        del a
        c = torch.full((MIB,), 7.0, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        assert b.sum().item() == 2 * MIB
        del b, c
    return "ok"


def case_cudnn_benchmark(path):
    install(path)
    import torch

    torch.backends.cudnn.benchmark = True
    conv = torch.nn.Conv2d(16, 32, 3).cuda()
    conv(torch.randn(8, 16, 64, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    return "ok"


def case_mem_pool(path):
    install(path)
    import torch

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.ones(1000, device="cuda")
    outside = torch.ones(1000, device="cuda")
    addresses = [block["address"] for segment in pool.snapshot() for block in segment["blocks"]]
    assert any(a <= inside.data_ptr() for a in addresses) and outside.data_ptr() not in addresses
    assert (inside + outside).sum().item() == 2000
    del inside, pool
    return "ok"


def _receive(path, queue, answers):
    install(path)
    tensor = queue.get()
    answers.put(float(tensor.sum().item()))
    tensor.fill_(3)
    import torch

    torch.cuda.synchronize()
    del tensor
    answers.put("done")


def case_sharing(path):
    import torch

    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=_receive, args=(path, queue, answers))
    process.start()
    install(path)
    tensor = torch.full((5 * MIB,), 2.0, device="cuda")
    queue.put(tensor)
    assert answers.get(timeout=120) == 2.0 * 5 * MIB
    assert answers.get(timeout=120) == "done"
    assert tensor.sum().item() == 3.0 * 5 * MIB
    process.join()
    return "both ways"


def case_compile(path):
    install(path)
    import torch

    function = torch.compile(lambda x: (x * 2).relu().sum())
    value = function(torch.ones(10000, device="cuda")).item()
    assert value == 20000
    return "default mode"


def case_profiler(path):
    install(path)
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiler:
        a = torch.ones(4 * MIB, device="cuda")
        del a
    usage = [(event.name, getattr(event, "device_memory_usage", 0)) for event in profiler.events()]
    assert any(bytes_ == 16 * MIB for _, bytes_ in usage), usage
    return "ok"


def case_backward_lines(path):
    library = load(path)
    side = python_side()
    side.install(library)
    assert side.link_backward(library)
    import torch

    model = torch.nn.Linear(100, 100).cuda()
    model(torch.randn(10, 100, device="cuda")).sum().backward()
    if hasattr(library, "strandline_test_log"):
        buffer = ctypes.create_string_buffer(1 << 16)
        library.strandline_test_log(buffer, len(buffer))
        assert b"backward of" in buffer.value
    return "linked"


def case_peers(path):
    install(path)
    import torch

    if torch.cuda.device_count() < 2:
        return "skipped: one GPU"
    a = torch.arange(1000.0, device="cuda:0")
    b = a.to("cuda:1")
    c = torch.ones(1000, device="cuda:1")
    assert (b + c).sum().item() == a.sum().item() + 1000
    d = c.to("cuda:0") + a
    assert d.sum().item() == a.sum().item() + 1000
    return f"copied both ways; peer access {torch.cuda.can_device_access_peer(0, 1)}"


def case_observer(path):
    """In a child that preloads the library; torch keeps its allocator."""
    if "LD_PRELOAD" not in os.environ:
        return run("observer", path, preload=True)
    library = ctypes.CDLL(path)
    if not hasattr(library, "strandline_test_install"):
        return "skipped: the library's observer mode is judged by its findings"
    load(path)
    python_side().observe(library)
    import torch

    a = torch.ones(5 * MIB, device="cuda")
    del a
    buffer = ctypes.create_string_buffer(1 << 16)
    library.strandline_test_log(buffer, len(buffer))
    assert b"observed true %d" % (20 * MIB) in buffer.value, buffer.value
    return "ok"


def case_speed(path):
    """Nanoseconds per pair through torch, for comparison with native on the same machine."""
    install(path)
    import torch

    raw, drop = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    drop(raw(4096))
    start = time.perf_counter()
    for _ in range(2000):
        drop(raw(4096))
    return "%.0f ns per pair from Python" % ((time.perf_counter() - start) / 2000 * 1e9)


def case_exit(path):
    install(path)
    import torch

    global kept
    kept = [torch.ones(1000, device="cuda") for _ in range(10)]
    kept.append(kept)
    return "tensors outlive the interpreter"


def run(name, path, preload=False):
    environment = dict(os.environ)
    if preload:
        environment["LD_PRELOAD"] = path
    done = subprocess.run(
        [sys.executable, os.path.abspath(__file__), "--case", name, path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    answer = [line[6:] for line in done.stdout.splitlines() if line.startswith("PASS: ")]
    if done.returncode == 0 and answer:
        return answer[-1]
    raise AssertionError(f"exit {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-1500:]}")


def main():
    path, chosen = os.path.abspath(sys.argv[1]), sys.argv[2:]
    names = [name[5:] for name in globals() if name.startswith("case_")]
    unknown = set(chosen) - set(names)
    if unknown:
        print(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    names = [name for name in names if not chosen or name in chosen]
    # The one that needs the whole card runs when the others are through.
    alone = [name for name in names if name == "full_card"]
    failed = 0

    def attempt(name):
        try:
            return name, True, run(name, path)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return name, False, f"FAILED {error}"

    for group, workers in (([name for name in names if name not in alone], 5), (alone, 1)):
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for name, passed, text in pool.map(attempt, group):
                failed += not passed
                print(f"{name:24} {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        print("PASS: {}".format(globals()["case_" + sys.argv[2]](sys.argv[3])), flush=True)
    else:
        sys.exit(main())
