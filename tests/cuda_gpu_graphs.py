"""Cases of tests/cuda_gpu.py: CUDA graphs, and graph trees with what they ask of the allocator."""

import functools
import random

from cuda_gpu_library import install

MIB = 1 << 20


def case_graph(path):
    install(path)
    import torch

    static = torch.zeros(1024, device="cuda")
    work = torch.randn(1024, 1024, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (work @ static).relu()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Temporaries are freed during the capture.
        out = ((work @ static).relu() + torch.ones(1024, device="cuda")).clone()
    for value in (1.0, 2.0):
        static.fill_(value)
        noise = [torch.full((1024,), 9.0, device="cuda") for _ in range(50)]
        graph.replay()
        expected = (work @ static).relu() + 1
        assert torch.allclose(out, expected, rtol=1e-3, atol=1e-2)
        del noise
    del graph, out
    torch.cuda.empty_cache()
    return "captured and replayed"


def _live(torch, pool):
    segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == tuple(pool)]
    blocks = [block for segment in segments for block in segment["blocks"]]
    return {block["address"] for block in blocks if block["state"] == "active_allocated"}


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def case_checkpoint_blocks(path):
    """A pool put back to what it had handed out, without a kernel: slots, blocks and their owners."""
    install(path)
    import torch

    def inside(sizes):
        """Blocks that the pool hands out to this thread."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
        try:
            return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        finally:
            torch._C._cuda_endAllocateToPool(0, pool)
            torch._C._cuda_releasePool(0, pool)

    def addresses(tensors):
        return {tensor.data_ptr() for tensor in tensors}

    torch.cuda.init()
    random.seed(1)
    sizes = [int(2 ** random.uniform(0, 24)) for _ in range(60)]
    holder = torch.cuda.MemPool()  # keeps the pool while nobody allocates from it
    pool = holder.id
    outside = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    kept = inside(sizes)
    del kept[::3]
    state = torch._C._cuda_getCheckpointState(0, pool)
    then = addresses(kept)
    assert _live(torch, pool) == then
    for rounds in range(5):
        # Some go and others come, in their places and elsewhere.
        gone = [kept.pop(random.randrange(len(kept))).data_ptr() for _ in range(len(kept) // 4)]
        more = inside(random.choices(sizes, k=30))
        torch.cuda.empty_cache()
        stale = [_storage(tensor) for tensor in more]
        outputs = [
            torch._C._construct_storage_from_data_pointer(at, torch.device("cuda", 0), 1) for at in gone
        ]
        torch._C._cuda_setCheckpointPoolState(0, state, stale, [output._cdata for output in outputs])
        assert _live(torch, pool) == then, rounds
        assert torch._C._cuda_checkPoolLiveAllocations(0, pool, then)
        assert not any(torch._C._has_Standard_Deleter(storage) for storage in stale)
        assert all(torch._C._has_Standard_Deleter(_storage(tensor)) for tensor in kept)
        assert all(torch._C._has_Standard_Deleter(output._cdata) for output in outputs)
        del more
        assert _live(torch, pool) == then, "what was taken back is nobody's to free"
        kept += [torch.empty(0, dtype=torch.uint8, device="cuda").set_(output) for output in outputs]
        del outputs
    for _ in range(200):
        torch._C._cuda_setCheckpointPoolState(0, state, [], [])
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    del kept
    assert _live(torch, pool) == set() and torch.cuda.memory_allocated() < allocated
    fails = []
    for wrong in ((0, (0, 99999)), (0, (0, 0))):
        try:
            torch._C._cuda_getCheckpointState(*wrong)
        except RuntimeError as error:
            fails.append(str(error))
    assert len(fails) == 2, fails
    del holder
    try:
        torch._C._cuda_setCheckpointPoolState(0, state, [], [])
    except RuntimeError as error:
        fails.append(str(error))
    assert len(fails) == 3, fails
    assert outside.data_ptr() not in then
    return fails[-1][:100]


def case_checkpoint_of_a_capture(path):
    """Graphs of two paths in one pool: each replays right whatever was recorded after it."""
    install(path)
    import torch

    pool = torch.cuda.graph_pool_handle()
    x = torch.ones(512, 512, device="cuda")
    stream = torch.cuda.Stream()

    def record(function):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            outputs = function()
        return graph, outputs

    def root():
        return [x * 2 + 1, (x.reshape(-1)[:1000] + 3).clone()]

    def branch(number, large, small):
        return [(large.sin() * number) + large, small.exp() + number, (large + large).sqrt()]

    # What kernels are loaded for comes before the captures.
    branch(1, *root())
    torch.cuda.synchronize()
    first, (large, small) = record(root)
    state = torch._C._cuda_getCheckpointState(0, pool)
    then = {large.data_ptr(), small.data_ptr()}
    assert _live(torch, pool) == then
    seen = []
    for number in range(1, 4):
        second, outputs = record(functools.partial(branch, number, large, small))
        assert _live(torch, pool) == then | {output.data_ptr() for output in outputs}
        assert not then & {output.data_ptr() for output in outputs}
        for value in (0.0, 0.5, 2.0):
            x.fill_(value)
            noise = [torch.full((512, 512), 9.0, device="cuda") for _ in range(20)]
            first.replay()
            second.replay()
            torch.cuda.synchronize()
            expected_large, expected_small = root()
            assert torch.equal(large, expected_large) and torch.equal(small, expected_small)
            for output, right in zip(outputs, branch(number, expected_large, expected_small)):
                assert torch.allclose(output, right), number
            del noise
        seen.append(outputs[0].data_ptr())
        torch._C._cuda_setCheckpointPoolState(0, state, [_storage(output) for output in outputs], [])
        del outputs
        assert _live(torch, pool) == then, "only the root's outputs"
    del second
    torch.cuda.empty_cache()
    first.replay()
    torch.cuda.synchronize()
    assert torch.equal(large, root()[0])
    return f"three paths, the second output at {len(set(seen))} address(es)"


def case_compile_reduce_overhead(path):
    install(path)
    import torch

    function = torch.compile(lambda x: (x * 2).relu(), mode="reduce-overhead")
    for i in range(5):
        assert function(torch.full((10000,), float(i), device="cuda")).sum().item() == 20000 * i
    import torch._inductor.config as config

    assert config.triton.cudagraph_trees
    return f"cudagraph_trees {config.triton.cudagraph_trees}"


def case_graph_trees(path):
    """torch.compile(mode="reduce-overhead") with graph trees: paths that branch, backward passes, other shapes."""
    install(path)
    import torch
    import torch._inductor.config as config
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees as trees

    assert config.triton.cudagraph_trees, "they are on"
    # After each step torch compares the pool's live blocks with the tensors that it knows.
    config.triton.slow_path_cudagraph_asserts = True
    torch.manual_seed(0)
    weight = torch.randn(256, 256, device="cuda") / 16

    def root(x):
        return (x @ weight).relu() + 1, x.sum(1)

    branches = [
        lambda y: y.sin() * 2,
        lambda y: (y @ weight.t()).tanh() + y,
        lambda y: torch.cat([y, y * y], 1).sort(1)[0],
    ]
    compiled_root = torch.compile(root, mode="reduce-overhead")
    compiled = [torch.compile(branch, mode="reduce-overhead") for branch in branches]
    for rounds in range(6):
        for number, branch in enumerate(branches):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(64, 256, device="cuda")
            expected, sums = root(x)
            y, s = compiled_root(x)
            noise = [torch.full((64, 256), 7.0, device="cuda") for _ in range(30)]
            if rounds % 2:
                s = s.clone()
            z = compiled[number](y)
            w = compiled[(number + rounds) % 3](y) if rounds > 2 else None
            assert torch.allclose(y, expected, rtol=1e-3, atol=1e-3), (rounds, number)
            assert torch.allclose(s, sums, rtol=1e-3, atol=1e-3)
            assert torch.allclose(z, branch(expected), rtol=1e-2, atol=1e-2), (rounds, number)
            if w is not None:
                right = branches[(number + rounds) % 3](expected)
                assert torch.allclose(w, right, rtol=1e-2, atol=1e-2), (rounds, number)
            del noise, y, z, w, s
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and manager.debug_checkpointing_counter > 0, "a pool was put back"
    put_back = manager.debug_checkpointing_counter

    def train(wrap):
        torch.manual_seed(1)
        layers = [
            torch.nn.Linear(128, 256),
            torch.nn.GELU(),
            torch.nn.LayerNorm(256),
            torch.nn.Linear(256, 10),
        ]
        model = torch.nn.Sequential(*layers).cuda()
        step, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for i in range(24):
            x = torch.randn(64 if i % 8 < 6 else 32, 128, device="cuda")
            loss = torch.nn.functional.cross_entropy(step(x), torch.randint(10, (len(x),), device="cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    eager = train(lambda model: model)
    ours = train(lambda model: torch.compile(model, mode="reduce-overhead", dynamic=False))
    assert all(abs(a - b) < 1e-2 * (1 + abs(b)) for a, b in zip(ours, eager)), list(zip(ours, eager))
    assert not counters["inductor"]["cudagraph_skips"], counters["inductor"]
    torch.compiler.reset()
    return f"{put_back} times put back, loss {ours[0]:.3f} -> {ours[-1]:.3f}"
