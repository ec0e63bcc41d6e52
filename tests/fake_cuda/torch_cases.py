"""Cases for tests/cuda_torch.rs: real torch on a stand-in for a GPU, allocating from the test service.

Run as `python torch_cases.py CASE`; nothing that computes on the GPU works, so nothing does. The library is
`STRANDLINE_TEST_SERVICE`, strandline's Python side `STRANDLINE_TEST_PYTHON_SIDE`.
"""

import ctypes
import gc
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import warnings

import torch

MIB = 1 << 20
PAGE = 2 * MIB
LIBRARY = os.environ["STRANDLINE_TEST_SERVICE"]
library = ctypes.CDLL(LIBRARY)


def python_side():
    spec = importlib.util.spec_from_file_location("_torch_cuda", os.environ["STRANDLINE_TEST_PYTHON_SIDE"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install():
    library.strandline_test_install()
    return python_side().install(library)


def log():
    buffer = ctypes.create_string_buffer(1 << 16)
    library.strandline_test_log(buffer, len(buffer))
    return buffer.value.decode().splitlines()


def empty(size, device="cuda"):
    return torch.empty(size, dtype=torch.uint8, device=device)


def raises(kind, text, function):
    try:
        function()
    except kind as error:
        assert text in str(error), str(error)
        return error
    raise AssertionError("nothing was raised")


def case_everything_is_replaced():
    installed = install()
    assert not installed.declined, installed.declined
    assert not installed.limits, installed.limits
    assert len(installed.replaced) == 24, installed.replaced
    assert torch.cuda.memory.get_allocator_backend() == "pluggable"
    assert python_side().install is not None
    assert "devices 1" not in log()
    torch.cuda.init()
    assert "devices 1" in log()


def case_statistics():
    install()
    assert torch.cuda.memory_stats() == {}
    a = empty(1000)
    b = empty(4 * MIB)
    stats = torch.cuda.memory_stats()
    assert len(stats) == 9 * 3 * 4 + 8 + 6, len(stats)
    assert stats["allocated_bytes.all.current"] == PAGE + 4 * MIB
    assert stats["requested_bytes.small_pool.current"] == 1000
    assert stats["requested_bytes.large_pool.peak"] == 4 * MIB
    assert stats["allocation.all.allocated"] == 2
    assert stats["max_split_size"] == -1
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == PAGE + 4 * MIB
    del b
    assert torch.cuda.memory_allocated() == PAGE
    assert torch.cuda.max_memory_allocated() == PAGE + 4 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == PAGE
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    assert "Active memory" in torch.cuda.memory_summary()
    if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "memory_stats"):
        assert torch.accelerator.memory_allocated() == PAGE
        assert torch.accelerator.memory_stats()["allocated_bytes.all.peak"] == PAGE
        torch.accelerator.reset_peak_memory_stats()
        torch.accelerator.empty_cache()
        assert "empty_cache None" in log()
    torch.cuda.empty_cache()
    assert "empty_cache None" in log()
    if hasattr(torch.cuda, "caching_allocator_enable"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it has an effect, so nothing is to be warned of
            torch.cuda.caching_allocator_enable(False)
            torch.cuda.caching_allocator_enable(True)
        lines = log()
        assert lines[-2:] == ["enable_cache false", "enable_cache true"], lines
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    assert torch.cuda.mem_get_info()[1] == 1 << 30
    del a
    assert torch.cuda.memory_allocated() == 0


def case_snapshot():
    install()
    torch.cuda.memory._record_memory_history()
    a = empty(1000)
    b = empty(3 * MIB)
    del a
    segments = torch.cuda.memory_snapshot()
    assert [segment["total_size"] for segment in segments] == [4 * MIB]
    assert segments[0]["segment_pool_id"] == (0, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "snapshot.pickle")
        torch.cuda.memory._dump_snapshot(path)
        with open(path, "rb") as file:
            snapshot = pickle.load(file)
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions == ["alloc", "alloc", "free_requested"], actions
    from torch.cuda import _memory_viz

    assert "4.0MiB" in _memory_viz.segsum(snapshot)
    assert _memory_viz.trace_plot(snapshot) and _memory_viz.segment_plot(snapshot)
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=7)
    assert "record_history Alloc native false entries 7" in log()
    torch.cuda.memory._record_memory_history("state", context=None)
    assert "record_history Never native true entries 0" in log()
    raises(RuntimeError, "context", lambda: torch.cuda.memory._record_memory_history(context="sometimes"))
    del b


def case_fault_is_survived():
    """A panic of the allocator's own: said, and the job gets its memory all the same."""
    install()
    # One without a name would be taken for a capture, one that is not appended to for data of the job.
    with tempfile.NamedTemporaryFile() as file, open(file.name, "ab") as log_file:
        saved = os.dup(2)
        os.dup2(log_file.fileno(), 2)
        try:
            a = empty(14)
        finally:
            os.dup2(saved, 2)
        file.seek(0)
        said = file.read().decode()
    assert torch.cuda.memory_allocated() == PAGE
    assert "internal fault in malloc" in said, said
    del a
    assert torch.cuda.memory_allocated() == 0


def case_out_of_memory():
    install()
    told = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *numbers: told.append(numbers))
    error = raises(torch.OutOfMemoryError, "CUDA out of memory. Tried", lambda: empty(2 << 30))
    assert "\u2713" in str(error)
    assert told == [(0, 2 << 30, 1 << 30, 1 << 30)], told
    raises(torch.OutOfMemoryError, "out of memory", lambda: torch.cuda.caching_allocator_alloc(2 << 30))

    # In the autograd thread of the device.
    class Big(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return empty(2 << 30)

    x = torch.empty(10, device="cuda", requires_grad=True)
    y = Big.apply(x)
    g = torch.empty(10, device="cuda")
    raises(torch.OutOfMemoryError, "CUDA out of memory", lambda: torch.autograd.backward([y], [g]))
    # Many in a row: nothing of the exception is lost or freed twice.
    for _ in range(2000):
        try:
            empty(2 << 30)
        except torch.OutOfMemoryError:
            pass
    assert torch.cuda.memory_allocated() == 2 * PAGE


def case_backward_lines():
    """Allocations 1 and 2 are leaves, 3 and 4 the outputs of two operators of the forward pass, 6 and 7 their
    gradients: each names the forward allocation of its own operator."""
    install()
    assert python_side().link_backward(library)

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx, grad):
            return torch.empty_like(grad)

    x = torch.empty(10, device="cuda", requires_grad=True)
    g = torch.empty(10, device="cuda")
    y = Operator.apply(x)
    z = Operator.apply(y)
    with torch.no_grad():
        torch.empty(10, device="cuda")  # allocation 5: no operator's output
    torch.autograd.backward([z], [g])
    lines = [line for line in log() if line.startswith("backward")]
    assert lines == ["backward of 4 at 6", "backward of 3 at 7"], lines


def case_fault_of_our_own():
    install()
    raises(RuntimeError, "fault of its own", lambda: empty(13))
    assert empty(14).data_ptr() != 0


def case_sizes_and_deleters():
    install()
    nothing = empty(0)
    assert nothing.data_ptr() == 0
    del nothing
    pointer = torch.cuda.caching_allocator_alloc(100)
    assert torch.cuda.memory_allocated() == PAGE
    torch.cuda.caching_allocator_delete(pointer)
    assert torch.cuda.memory_allocated() == 0
    a = empty(100)
    a.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == 0
    # Freed by threads that never used CUDA.
    blocks = [empty(100) for _ in range(50)]
    threads = [threading.Thread(target=lambda: blocks and blocks.pop()) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert torch.cuda.memory_allocated() == 0


def case_streams():
    install()
    side = torch.cuda.Stream()
    a = empty(100)
    a.record_stream(side)
    assert f"record_stream true {side.cuda_stream}" in log()
    with torch.cuda.stream(side):
        b = empty(100)
    streams = {segment["stream"] for segment in torch.cuda.memory_snapshot()}
    assert streams == {0, side.cuda_stream}, streams
    del a, b


def case_pools():
    install()
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        inside = empty(100)
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(empty(100)))
        thread.start()
        thread.join()
        assert pool.use_count() == 2
    outside = empty(100)
    assert pool.use_count() == 1
    addresses = {segment["address"] for segment in pool.snapshot()}
    assert addresses == {inside.data_ptr()}, addresses
    check = torch._C._cuda_checkPoolLiveAllocations
    assert check(0, pool.id, {inside.untyped_storage().data_ptr()})
    assert not check(0, pool.id, set())
    assert not check(0, pool.id, {outside.data_ptr()})
    identifier = pool.id
    del inside
    log()
    del pool
    assert "release_pool 0 PoolId({}, {})".format(*identifier) in log()
    raises(RuntimeError, "use_on_oom", lambda: torch.cuda.MemPool(use_on_oom=True))
    plain = torch.cuda.memory.CUDAPluggableAllocator(
        LIBRARY, "strandline_torch_malloc", "strandline_torch_free"
    )
    raises(RuntimeError, "another allocator", lambda: torch.cuda.MemPool(plain.allocator()))


def case_checkpoints():
    """The states and differences that graph trees exchange with the allocator, by torch's own functions."""
    install()
    check = torch._C._cuda_checkPoolLiveAllocations
    take, put = torch._C._cuda_getCheckpointState, torch._C._cuda_setCheckpointPoolState
    pool = torch.cuda.MemPool()
    raises(RuntimeError, "no blocks of PoolId", lambda: take(0, pool.id))

    def inside(*sizes):
        with torch.cuda.use_mem_pool(pool):
            return [empty(size) for size in sizes]

    def storage(tensor):
        return tensor.untyped_storage()._cdata

    def live(*tensors):
        return check(0, pool.id, {tensor.data_ptr() for tensor in tensors})

    def owned(tensor):
        return torch._C._has_Standard_Deleter(storage(tensor))

    a, b = inside(1000, 3 * MIB)
    states = [take(0, pool.id) for _ in range(100)]
    state = states.pop()
    assert type(state).__name__ == "_cuda_CUDAAllocator_AllocatorState", type(state)
    assert len({id(state) for state in states}) == 99
    log()
    del states
    gc.collect()
    assert log().count("state dropped") == 99

    # A block more is taken back from its tensor, and one that was freed is there again, without an owner.
    (c,) = inside(2 * MIB)
    addresses = a.data_ptr(), b.data_ptr(), c.data_ptr()
    del b
    assert live(a, c) and owned(a) and owned(c)
    put(0, state, [storage(c)], [])
    assert check(0, pool.id, set(addresses[:2])) and owned(a) and not owned(c)
    # Nobody frees what was taken back; the other has its owner still.
    del c
    assert check(0, pool.id, set(addresses[:2]))
    del a
    assert check(0, pool.id, {addresses[1]})
    torch._C._cuda_cudaCachingAllocator_raw_delete(addresses[1])
    assert check(0, pool.id, set())

    # A tensor over memory that it does not own, as a replayed graph's outputs are, gets the block.
    put(0, state, [], [])
    build = torch._C._construct_storage_from_data_pointer
    outputs = [build(at, torch.device("cuda", 0), 1000) for at in addresses[:2]]
    assert not any(torch._C._has_Standard_Deleter(output._cdata) for output in outputs)
    put(0, state, [], [output._cdata for output in outputs])
    assert all(torch._C._has_Standard_Deleter(output._cdata) for output in outputs)
    assert [output.data_ptr() for output in outputs] == list(addresses[:2])
    # Twice, and every block still has one owner.
    put(0, state, [], [])
    assert check(0, pool.id, set(addresses[:2]))
    outputs.pop()
    assert check(0, pool.id, {addresses[0]})
    torch._C._free_And_Remove_DeleterFn(outputs[0]._cdata)
    assert check(0, pool.id, set())

    # Threads have states of their own, and give them back.
    def often():
        for _ in range(200):
            put(0, state, [], [])
            take(0, pool.id)

    threads = [threading.Thread(target=often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert check(0, pool.id, set(addresses[:2]))

    # Many at once.
    many = inside(*[1000] * 300)
    put(0, state, [storage(tensor) for tensor in many], [])
    assert check(0, pool.id, set(addresses[:2])) and not any(map(owned, many))
    del many

    # Torch refuses to take back what no tensor was named for, after the fact: then it drops what it was given.
    torch._C._cuda_cudaCachingAllocator_raw_delete(addresses[1])
    fewer = take(0, pool.id)
    put(0, state, [], [])
    raises(RuntimeError, "stale tensors", lambda: put(0, fewer, [], []))
    assert check(0, pool.id, set())
    raises(RuntimeError, "not of device 1", lambda: put(1, state, [], []))


def case_checkpoints_in_cpp():
    """What torch's headers make of a state and of the difference, in C++ that was compiled with them."""
    install()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensors = [empty(1000) for _ in range(5)]
    checks = ctypes.CDLL(os.environ["STRANDLINE_TEST_CHECKPOINT"])
    checks.check_checkpoint.restype = ctypes.c_char_p
    checks.check_checkpoint.argtypes = [
        ctypes.c_ulonglong,
        ctypes.c_ulonglong,
        ctypes.c_void_p,
        ctypes.c_size_t,
    ]
    blocks = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    for _ in range(20):
        wrong = checks.check_checkpoint(*pool.id, blocks, len(tensors))
        assert wrong is None, wrong
    assert log().count("state dropped") == 20
    assert all(torch._C._has_Standard_Deleter(tensor.untyped_storage()._cdata) for tensor in tensors)
    assert torch.cuda.memory_stats()["allocation.all.current"] == len(tensors)
    del tensors
    assert torch.cuda.memory_allocated() == 0


def case_profiler():
    install()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        a = empty(3 * MIB)
        del a
    usage = [
        (event.name, getattr(event, "device_memory_usage", None) or getattr(event, "cuda_memory_usage", 0))
        for event in profiler.events()
    ]
    # Torch adds what an operator allocated to the operator, and shows a free by itself.
    assert ("aten::empty", 3 * MIB) in usage and ("[memory]", -3 * MIB) in usage, usage


def case_peers():
    install()
    a = empty(100, "cuda:0")
    b = a.to("cuda:1")
    assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(1) == PAGE
    assert torch.cuda.memory_stats(1)["allocation.all.current"] == 1
    lines = log()
    assert any(line.startswith("enable_peer") for line in lines), lines
    assert not any(line.startswith("copy_between") for line in lines), lines
    del a, b


def case_no_peers():
    install()
    a = empty(100, "cuda:0")
    b = a.to("cuda:1")
    lines = log()
    assert "copy_between 0 1 100" in lines, lines
    del a, b


def _receiver(queue, answers):
    install()
    tensor = queue.get()
    other = queue.get()
    answers.put((tensor.shape[0], tensor.data_ptr() != 0, other.data_ptr() - tensor.data_ptr(), log()))
    del tensor, other
    answers.put(log())


def case_sharing():
    install()
    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=_receiver, args=(queue, answers))
    process.start()
    tensor = empty(3 * MIB)
    queue.put(tensor)
    queue.put(tensor[MIB:])
    size, there, distance, lines = answers.get(timeout=120)
    assert size == 3 * MIB and there and distance == MIB
    assert lines.count(f"open_shared 0 {4 * MIB}") == 1, lines
    assert "close_shared" in answers.get(timeout=60)
    process.join()
    assert process.exitcode == 0


def case_plain_plug_in():
    """Only what torch documents: a path and two names."""
    library.strandline_test_install()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        LIBRARY, "strandline_torch_malloc", "strandline_torch_free"
    )
    torch.cuda.memory.change_current_allocator(allocator)
    a = empty(1000)
    raises(torch.OutOfMemoryError, "CUDA out of memory", lambda: empty(2 << 30))
    del a
    raises(RuntimeError, "getDeviceStats", torch.cuda.memory_allocated)


def case_observer():
    """Preloaded; torch keeps its allocator."""
    library.strandline_test_install()
    side = python_side()
    a = empty(1000)
    assert not [line for line in log() if line.startswith("observed")]
    side.observe(library)
    b = empty(5 * MIB)
    del b
    lines = log()
    assert lines == [
        f"observed true {5 * MIB} 0 {5 * MIB + 1024} {22 * MIB}",
        f"observed true {-5 * MIB} 0 1024 {22 * MIB}",
    ], lines
    side.observe(library, False)
    del a
    assert not log()
    assert torch.cuda.memory.get_allocator_backend() == "native"


def case_too_late():
    library.strandline_test_install()
    torch.cuda.init()
    side = python_side()
    raises(side.Unavailable, "already initialised", lambda: side.install(library))
    assert torch.cuda.memory.get_allocator_backend() == "native"


def case_settings():
    import warnings

    install()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
            assert "has no effect" in str(caught[0].message)
    import torch._inductor.config as config

    assert config.triton.cudagraph_trees is True


def case_plain_graphs():
    """Where a method that graph trees need is not known, plain graphs are used."""
    library.strandline_test_install()
    side = python_side()
    side._GRAPH_TREES = side._GRAPH_TREES | {"aMethodOfTheFuture"}
    side.install(library)
    import torch._inductor.config as config

    assert config.triton.cudagraph_trees is False


def case_children():
    """A preloaded library that needs nothing lets every child start, and says nothing."""
    environment = dict(os.environ, LD_PRELOAD=LIBRARY)
    for command in (["bash", "-c", "true"], ["ls", "/"], [sys.executable, "-c", "pass"]):
        done = subprocess.run(command, env=environment, capture_output=True)
        assert done.returncode == 0 and not done.stderr, (command, done)


def case_exit():
    """Tensors that live until the end are freed after much else is gone; the driver may be too."""
    install()
    global kept
    kept = [empty(100) for _ in range(10)]
    kept.append(kept)


if __name__ == "__main__":
    globals()["case_" + sys.argv[1]]()
    print("passed", sys.argv[1], flush=True)
