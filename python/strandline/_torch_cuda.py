"""strandline's heap as torch's CUDA allocator: the swap, and what torch would lose by it.

`install(library)` makes the heap inside `libstrandline.so` torch's allocator for the rest of the process.
It must run before CUDA is initialised: torch swaps allocators only then, and only once.

Two things keep torch's own features alive. The methods of torch's allocator object are replaced by ours
where this version of torch lets them be recognised (the library does that, and says which); for the rest,
and for what torch answers in a form only Python can build, the functions of `torch._C` that torch's Python
code calls are exchanged here. What neither can do is listed in `Installed.limits`, one sentence each.

This file must not know how memory is managed. It works with every torch since 2.4: it asks what is there
and never assumes it from the version. Nothing is swallowed: an error in `install` is raised, and what
this torch lacks is a sentence in `limits`.
"""

import ctypes
import importlib.util
import json
import os
import re
import sys
import warnings

__all__ = ["Installed", "Unavailable", "install", "link_backward", "observe"]


class Unavailable(RuntimeError):
    """The heap cannot be torch's allocator in this process; the text says why."""


class Installed:
    """What `install` did: names of torch's methods and functions, and sentences about the rest."""

    def __init__(self):
        self.replaced = []  # methods of torch's allocator object that are ours now
        self.declined = {}  # methods that stayed torch's -> reason
        self.patched = []  # functions of torch._C that are ours now
        self.limits = []  # what does not work, one sentence each
        self.allocator = None  # torch's object: it must live as long as torch uses it

    def __repr__(self):
        return f"Installed(replaced={self.replaced!r}, patched={self.patched!r}, limits={self.limits!r})"


_installed = None


def install(library):
    """Makes strandline's heap torch's CUDA allocator. `library` is the loaded `ctypes.CDLL`."""
    global _installed
    if _installed is not None:
        return _installed
    import torch

    result = Installed()
    _declare(library)
    result.allocator = _swap(torch, library, result)
    _replace_methods(torch, library, result)
    _patch_profiler(torch, library, result)
    _patch_statistics(torch, library, result)
    _patch_snapshot(torch, library, result)
    _patch_history(torch, library, result)
    _patch_accelerator(torch, library, result)
    _patch_settings(torch, result)
    _patch_sharing(torch, result)
    _note_methods(result)
    if not _GRAPH_TREES.issubset(result.replaced):
        _after_import("torch._inductor.config", _without_cudagraph_trees)
    _installed = result
    return result


def observe(library, on=True):
    """Observer mode: torch keeps its allocator, and the preloaded library is told of every block."""
    library.strandline_torch_observe.argtypes = [ctypes.c_int]
    library.strandline_torch_observe.restype = None
    library.strandline_torch_observe(int(bool(on)))


def link_backward(library):
    """Lets blocks that are born in a backward pass name the line of the forward pass whose gradient they are.
    Answers whether this torch allows it: what the library reads of autograd's nodes is compared with what
    torch says of two of them."""
    import torch

    library.strandline_torch_autograd.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.strandline_torch_autograd.restype = ctypes.c_int
    with torch.enable_grad():
        leaf = torch.ones(1, requires_grad=True)
        nodes = [(leaf * 2).grad_fn, (leaf * 3).grad_fn]
    # A node's Python object is its header and then a std::shared_ptr to the C++ object.
    addresses = [ctypes.c_void_p.from_address(id(node) + object.__basicsize__).value for node in nodes]
    return all(
        bool(library.strandline_torch_autograd(address, node._sequence_nr()))
        for address, node in zip(addresses, nodes)
    )


def _declare(library):
    """The C functions' types; they are declared in src/attach/torch/queries.rs."""
    text = ctypes.c_void_p  # not c_char_p: the address is needed to give the text back
    types = {
        "strandline_torch_stats": (text, [ctypes.c_int]),
        "strandline_torch_snapshot": (text, [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]),
        "strandline_torch_free_text": (None, [text]),
        "strandline_torch_reset": (None, []),
        "strandline_torch_reset_peak": (None, [ctypes.c_int]),
        "strandline_torch_reset_accumulated": (None, [ctypes.c_int]),
        "strandline_torch_get_memory_fraction": (ctypes.c_double, [ctypes.c_int]),
        "strandline_torch_record_history": (
            None,
            [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int],
        ),
        "strandline_torch_history_enabled": (ctypes.c_int, []),
        "strandline_torch_enable_cache": (None, [ctypes.c_int]),
        "strandline_torch_report_to_profiler": (ctypes.c_int, [ctypes.c_int]),
        "strandline_torch_replace_methods": (text, [ctypes.c_int, ctypes.c_int]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    if hasattr(library, "strandline_stats"):
        library.strandline_stats.restype = ctypes.c_size_t
        library.strandline_stats.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]


def _address(library, name):
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _json(library, pointer):
    """The JSON value of a text that the library returned, which is given back."""
    if not pointer:
        raise RuntimeError("strandline is not active in this process")
    try:
        return json.loads(ctypes.string_at(pointer).decode())
    finally:
        library.strandline_torch_free_text(pointer)


# ---- the swap -------------------------------------------------------------------------------------------

_HOOKS = {
    "set_init_fn": "strandline_torch_init",
    "set_reset_fn": "strandline_torch_reset",
    "set_memory_fraction_fn": "strandline_torch_memory_fraction",
    "set_base_alloc_fn": "strandline_torch_base_alloc",
    "set_record_stream_fn": "strandline_torch_record_stream",
    "set_begin_allocate_to_pool": "strandline_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "strandline_torch_end_allocate_to_pool",
    "set_release_pool": "strandline_torch_release_pool",
}


def _swap(torch, library, result):
    make = getattr(torch._C, "_cuda_customAllocator", None)
    change = getattr(torch._C, "_cuda_changeCurrentAllocator", None)
    if make is None or change is None or torch.version.cuda is None:
        raise Unavailable("this torch was built without CUDA")
    if torch.cuda.is_initialized():
        raise Unavailable(
            "CUDA is already initialised in this process, and torch swaps its allocator only before that; "
            "start the job with `strandline run`, or import strandline before anything that uses the GPU"
        )
    allocator = make(_address(library, "strandline_torch_malloc"), _address(library, "strandline_torch_free"))
    for setter, name in _HOOKS.items():
        function = getattr(allocator, setter, None)
        if function is None:
            # Memory would be reused under a running kernel or a captured graph: better not to start.
            raise Unavailable(f"this torch's CUDAPluggableAllocator has no {setter}")
        function(_address(library, name))
    try:
        change(allocator)
    except RuntimeError as error:
        raise Unavailable(f"torch refused to swap its allocator: {error}") from error
    return allocator


def _version(torch):
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(numbers.group(1)), int(numbers.group(2))) if numbers else (0, 0)


def _replace_methods(torch, library, result):
    answer = _json(library, library.strandline_torch_replace_methods(*_version(torch)))
    result.replaced = answer["replaced"]
    result.declined = dict(answer["declined"])
    if answer["error"]:
        result.limits.append(
            "torch's own allocator methods stay in use ({}): allocations are slower by torch's wrapper.".format(
                answer["error"]
            )
        )


_LOST = {
    "cacheInfo": "torch.backends.cudnn.benchmark = True raises in convolutions",
    "createOrIncrefPool": "torch.cuda.MemPool() raises",
    "getPoolUseCount": "torch.cuda.MemPool() raises",
    "attachOutOfMemoryObserver": "out-of-memory observers raise when they are attached",
    "memcpyAsync": "copies between GPUs without peer access fail",
    "setCheckpointPoolState": "torch.compile(mode='reduce-overhead') uses plain CUDA graphs, no graph trees",
}

# What graph trees need of the allocator, besides pools.
_GRAPH_TREES = {"getCheckpointState", "setCheckpointPoolState", "checkPoolLiveAllocations"}


def _note_methods(result):
    for method, loss in _LOST.items():
        if method not in result.replaced:
            reason = result.declined.get(method, "torch's methods could not be replaced")
            result.limits.append(f"{loss}: {reason} ({method}).")


# ---- torch._C functions ---------------------------------------------------------------------------------


def _patch(owner, name, function, result):
    """Exchanges a function of torch if this torch has it."""
    if not hasattr(owner, name):
        return False
    function.__name__ = name
    setattr(owner, name, function)
    result.patched.append(name)
    return True


def _statistics(torch, library):
    """A function like `torch._C._cuda_memoryStats`: a device's statistics as nested dictionaries."""
    documented = torch.cuda.memory_stats.__doc__ or ""

    def statistics(device):
        stats = _json(library, library.strandline_torch_stats(device))
        # Counters that newer versions have; the policies they count do not exist in our heap.
        if "num_oom_rejections" in documented:
            stats.setdefault("num_oom_rejections", 0)
        if "reserved_bytes_by_private_pools" in documented:
            stats.setdefault("reserved_bytes_by_private_pools", {})
        return stats

    return statistics


def _patch_statistics(torch, library, result):
    replacements = {
        "getDeviceStats": ("_cuda_memoryStats", _statistics(torch, library)),
        "resetPeakStats": (
            "_cuda_resetPeakMemoryStats",
            lambda device: library.strandline_torch_reset_peak(device),
        ),
        "resetAccumulatedStats": (
            "_cuda_resetAccumulatedMemoryStats",
            lambda device: library.strandline_torch_reset_accumulated(device),
        ),
        "getMemoryFraction": (
            "_cuda_getMemoryFraction",
            lambda device: library.strandline_torch_get_memory_fraction(device),
        ),
    }
    for method, (name, function) in replacements.items():
        if method not in result.replaced:
            _patch(torch._C, name, function, result)
    if hasattr(torch._C, "_cuda_memoryStats"):
        _patch(torch._C, "_cuda_memoryStats", _with_work(torch._C._cuda_memoryStats, library), result)


def _with_work(statistics, library):
    """`statistics` with what the heap asked of the driver: `strandline.maps` … in `torch.cuda.memory_stats()`."""

    def with_work(device):
        stats = statistics(device)
        room = ctypes.create_string_buffer(1 << 14)  # some 130 counters
        if library.strandline_stats(device, room, len(room)) < len(room):
            ours = json.loads(room.value.decode() or "{}")
            work = {name[len("strandline.") :]: ours[name] for name in ours if name.startswith("strandline.")}
            if work:
                stats["strandline"] = work
        return stats

    return with_work


def _patch_snapshot(torch, library, result):
    """`torch.cuda.memory_snapshot`, `memory._snapshot`, `_dump_snapshot`, `MemPool.snapshot`."""

    def snapshot(pool=None):
        first, second, traces = ((*tuple(pool), True))[:3] if pool is not None else (0, 0, True)
        answer = _json(library, library.strandline_torch_snapshot(first, second, int(bool(traces))))
        # Each stack once, and shared by its entries: a pickle keeps it once, too.
        stacks = answer.pop("stacks")
        for segment in answer["segments"]:
            segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
        for entries in answer["device_traces"]:
            for entry in entries:
                if entry["action"] == "oom":
                    entry["device_free"] = entry.pop("addr")
                frames = stacks.get(str(entry.pop("stack")))
                if frames:
                    entry["frames"] = frames
                entry.setdefault("compile_context", "")
                entry.setdefault("user_metadata", "")
        while len(answer["device_traces"]) < torch.cuda.device_count():
            answer["device_traces"].append([])
        answer["allocator_settings"] = _settings()
        answer["external_annotations"] = []
        return answer

    if not _patch(torch._C, "_cuda_memorySnapshot", snapshot, result):
        result.limits.append("torch.cuda.memory_snapshot() raises: this torch asks for it in another way.")


def _settings():
    """What torch's viewer shows of the allocator: the words are torch's, the allocator is strandline."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get(
            "PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        ),
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": True,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {},
    }


def _patch_history(torch, library, result):
    """`torch.cuda.memory._record_memory_history`: past events for snapshots. The stacks of live blocks are
    known in any case; torch's own function would also hook every operator, for stacks that nobody would read."""
    contexts = {None: 0, "state": 1, "alloc": 2, "all": 3}

    def tell(enabled, context, native, entries, clear):
        entries = max(0, min(int(entries), 2**64 - 1))
        library.strandline_torch_record_history(int(enabled), context, int(native), entries, int(clear))

    def option(name, value, allowed):
        if value not in allowed:
            raise RuntimeError(f"expected {name} to be one of {sorted(map(str, allowed))}, got {value!r}")

    def record(enabled, context="all", stacks="all", max_entries=sys.maxsize, clear_history=False, *_, **__):
        option("enabled", enabled, (None, "state", "all"))
        option("context", context, contexts)
        option("stacks", stacks, ("python", "all"))
        # "state" is about live blocks: no past events.
        entries = max_entries if enabled == "all" else 0
        tell(enabled is not None, contexts[context], stacks == "all", entries, clear_history)

    def record_legacy(
        enabled,
        record_context=True,
        trace_alloc_max_entries=1,
        trace_alloc_record_context=False,
        record_context_cpp=False,
        clear_history=False,
        *_,
        **__,
    ):
        context = 3 if trace_alloc_record_context else 1 if record_context else 0
        tell(bool(enabled), context, record_context_cpp, trace_alloc_max_entries, clear_history)

    _patch(torch._C, "_cuda_record_memory_history", record, result)
    _patch(torch._C, "_cuda_record_memory_history_legacy", record_legacy, result)
    _patch(
        torch._C,
        "_cuda_cudaCachingAllocator_enable",
        lambda value: library.strandline_torch_enable_cache(int(bool(value))),
        result,
    )
    _patch(
        torch._C,
        "_cuda_isHistoryEnabled",
        lambda: bool(library.strandline_torch_history_enabled()),
        result,
    )


def _patch_profiler(torch, library, result):
    """`torch.profiler.profile(profile_memory=True)`: the library tells it of blocks while one is running, and
    has to know when, because asking torch at every allocation is not free."""
    import torch.autograd.profiler as profiler

    enable = getattr(profiler, "_enable_profiler", None)
    disable = getattr(profiler, "_disable_profiler", None)
    if enable is None or disable is None or not library.strandline_torch_report_to_profiler(0):
        result.limits.append(
            "torch.profiler.profile(profile_memory=True) shows no GPU memory events: this torch cannot be told "
            "of them."
        )
        return

    def started(*arguments, **keywords):
        library.strandline_torch_report_to_profiler(1)
        return enable(*arguments, **keywords)

    def stopped(*arguments, **keywords):
        try:
            return disable(*arguments, **keywords)
        finally:
            library.strandline_torch_report_to_profiler(0)

    _patch(profiler, "_enable_profiler", started, result)
    _patch(profiler, "_disable_profiler", stopped, result)


def _patch_accelerator(torch, library, result):
    """`torch.accelerator.memory_*`: torch asks the allocator that is registered for the device type, which a
    swap does not change."""

    def current(device):
        return torch.cuda.current_device() if device is None or device < 0 else device

    statistics = _statistics(torch, library)
    for name, function in {
        "_accelerator_getDeviceStats": lambda device=None: statistics(current(device)),
        "_accelerator_resetPeakStats": lambda device=None: library.strandline_torch_reset_peak(
            current(device)
        ),
        "_accelerator_resetAccumulatedStats": lambda device=None: library.strandline_torch_reset_accumulated(
            current(device)
        ),
        "_accelerator_isAllocatorInitialized": lambda: torch.cuda.is_initialized(),
        "_accelerator_emptyCache": lambda: library.strandline_torch_reset(),
        "_accelerator_getMemoryInfo": lambda device=None: torch.cuda.mem_get_info(current(device)),
    }.items():
        _patch(torch._C, name, function, result)


def _patch_settings(torch, result):
    """Settings of torch's own allocator have no effect on ours: say so instead of accepting them."""

    def warned(original, what):
        def function(*arguments, **keywords):
            warnings.warn(
                f"{what} has no effect: strandline's heap is the CUDA allocator of this process",
                RuntimeWarning,
                stacklevel=3,
            )
            return original(*arguments, **keywords)

        return function

    for name, what in {
        "_cuda_cudaCachingAllocator_set_allocator_settings": "torch.cuda.memory._set_allocator_settings",
        "_accelerator_setAllocatorSettings": "torch._C._accelerator_setAllocatorSettings",
    }.items():
        original = getattr(torch._C, name, None)
        if original is not None:
            _patch(torch._C, name, warned(original, what), result)


def _patch_sharing(torch, result):
    """Sharing CUDA tensors between processes: by two methods of the allocator, or not at all."""
    if "shareIpcHandle" in result.replaced and "getIpcDevPtr" in result.replaced:
        return
    reason = (
        f"strandline cannot share CUDA tensors between processes with this torch ({torch.__version__} does not ask the allocator "
        "for a handle); share a CPU copy, or run with --mode observer"
    )

    def share(self, *_):
        raise RuntimeError(reason)

    _patch(torch.UntypedStorage, "_share_cuda_", share, result)
    result.limits.append(reason + ".")


# ---- torch.compile --------------------------------------------------------------------------------------


def _without_cudagraph_trees(config):
    """Graph trees put a pool back into an earlier state, which this torch does not let us do; plain graphs need
    nothing of the kind."""
    config.triton.cudagraph_trees = False


class _AfterImport:
    """A finder that lets one module be found as ever, and acts when it has been imported."""

    def __init__(self, name, action):
        self.name = name
        self.action = action

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.action(module)

        spec.loader.exec_module = exec_module
        return spec


def _after_import(name, action):
    """Runs `action(module)` once the module is imported: now, if it is."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))
