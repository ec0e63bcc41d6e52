"""Starts strandline's Python side in a process: the library's mode, the clock, the hooks into torch.

Must not know: the hooks' and the clock's rules.
Invariant: `start` may be called at any time, more than once, with or without torch, and never raises.
"""

import atexit
import ctypes
import glob
import os
import sys
import sysconfig
from typing import Any, Dict, List, Optional, Set, Union

from . import _around, _library, _trouble
from ._clock import Clock

_clock: Optional[Clock] = None
_library_in_use: Any = None
_hooked = False
_EVERY = 50  # steps between two looks at pinned memory, at least
_gpu_taken = False


def start(
    mode: Union[str, int] = "auto", options: Optional[Dict[str, Any]] = None, library: Any = None
) -> bool:
    """Called when `import torch` has finished, or by `install`. `library` replaces the real one in tests.

    A mode that the library already is in is left alone ("auto" then changes nothing). Returns whether
    accounting is on.
    """
    global _clock, _gpu_taken, _library_in_use
    try:
        library = library or _library.load()
        if library is None:
            return False
        if options is None and _is_worker():
            return _when_it_trains(mode)
        number = library.mode()
        heap, observer = _library.MODES["heap"], _library.MODES["observer"]
        if number <= 0:
            number = _mode(mode, "STRANDLINE_MODE" if options is None else "install()")
            code = library.start(number, {"library_roots": _library_roots(), **(options or {})})
            if code < 0:
                _trouble.say(f"cannot start in mode {mode}: error {code}")
                return False
        elif number == observer and _torch_waits() and _mode(mode, "STRANDLINE_MODE") == heap:
            # CUDA's own functions were followed before torch came; its heap can still be ours if they gave nothing.
            number = heap if library.start(heap, None) >= 0 else observer
        if number in (heap, observer) and _torch_waits():
            _gpu_taken = True
            _take_gpu(library, number)
        if _clock is None:
            from ._explain import Explainer

            _library_in_use = library
            clock = Clock(library)
            clock.explain = Explainer(library, clock).answer_pending
            _look_now_and_then(clock)
            _tell_of_collections(library)
            _clock = clock
            os.register_at_fork(after_in_child=_sleep)
            atexit.register(_end)
        hook()
        return True
    except Exception:
        _trouble.said("start")
        return False


def _look_now_and_then(clock: Clock) -> None:
    """Graphs that grow, hooks registered again and again, and pinned memory: looked at a few times, then ever more
    rarely."""
    from . import _graphs, _repeated, _workers

    graphs, pinned = _graphs.Graphs(clock.native), _workers.Pinned(clock.native)
    repeated = _repeated.Repeated(clock.native)

    def look(step: int) -> int:
        try:
            if step in _graphs.LOOKS or graphs.doubtful:
                graphs.look(step)
            if step in _graphs.LOOKS:
                repeated.look()
            pinned.look(_workers.pinned_bytes())
        except Exception:
            _trouble.said("a look at graphs, hooks and pinned memory")
        ahead = [at for at in _graphs.LOOKS if at > step]
        soon = _graphs.SOON if graphs.doubtful else max(_EVERY, step // 8)
        return min([step + soon, *ahead])

    clock.look, clock.next_look = look, _graphs.LOOKS[0]


def _tell_of_collections(library: Any) -> None:
    """Says when the garbage collector works, so that what it frees is known to have been in cycles."""
    import gc

    tell = library.collecting

    def collecting(phase: str, facts: Any) -> None:
        tell(1 if phase == "start" else 0)

    gc.callbacks.append(collecting)


def _torch_waits() -> bool:
    """Whether torch is here and its GPU allocator has not been taken or watched yet."""
    return not _gpu_taken and "torch" in sys.modules


def hook() -> None:
    """Puts the hooks into torch, if torch has been imported; else they wait for the next `start`."""
    global _hooked
    if _hooked or _clock is None or "torch" not in sys.modules:
        return
    _hooked = True
    from . import _hooks

    _hooks.install(_clock)


def clock() -> Optional[Clock]:
    """The clock in force, None before `start` and in forked children."""
    return None if _clock is None or _clock.asleep else _clock


def _end() -> None:
    """At the end of a run, while Python still lives: explains what waits, then the last report."""
    if clock() is None or _clock is None:
        return
    try:
        if _clock.explain is not None:
            _clock.explain()
    except Exception:
        _trouble.said("the last search for holders")
    _library_in_use.finish()


def _library_roots() -> List[str]:
    """Folders whose files are not the user's, besides installed packages."""
    paths = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return [path for path in paths if path] + ["<strandline>", os.path.dirname(os.path.abspath(__file__))]


def _is_worker() -> bool:
    """Whether this process was started by multiprocessing (spawn, forkserver): it did not ask for us."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _when_it_trains(mode: Union[str, int]) -> bool:
    """A worker is left alone until it shows itself a rank of its own: it initialises CUDA and loads no data for
    another process, or goes on after an optimizer step. Nothing is begun inside an optimizer's hooks: torch
    iterates over them at that moment."""
    import importlib

    import torch

    optimizer = importlib.import_module("torch.optim.optimizer")
    backward, lazy_init = torch.autograd.backward, torch.cuda._lazy_init
    stepped: List[bool] = []
    handle = optimizer.register_optimizer_step_post_hook(lambda *_: stepped.append(True))

    def begin() -> None:
        if torch.autograd.backward is watched_backward:
            torch.autograd.backward = backward
        if torch.cuda._lazy_init is watched_init:
            torch.cuda._lazy_init = lazy_init
        handle.remove()
        start(mode, {})

    def before_backward(*args: Any, **kwargs: Any) -> None:
        if stepped and torch.autograd.backward is watched_backward:
            begin()

    def before_init(*args: Any, **kwargs: Any) -> None:
        if not torch.cuda.is_initialized() and not _loads_data():
            begin()

    watched_backward = _around.around(backward, before_backward)
    watched_init = _around.around(lazy_init, before_init)
    torch.autograd.backward = watched_backward
    torch.cuda._lazy_init = watched_init
    return False


def _loads_data() -> bool:
    """Whether this process is a DataLoader's worker."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _mode(mode: Union[str, int], where: str) -> int:
    """The number of a mode that can be had here; says what is done instead of one that cannot. `where` it stands."""
    if isinstance(mode, int):
        return mode
    modes = _library.MODES
    word = mode.strip().lower()
    if word not in modes and word != "auto":
        import difflib

        near = difflib.get_close_matches(word, [*modes, "auto"], 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        modes_are = ", ".join(["auto", *modes])
        _once(f"{where}: there is no mode {mode!r}{meant}; the modes: {modes_are}; auto is used")
        word = "auto"
    lacking = _no_gpu() if word in ("auto", "heap", "observer") else None
    if word == "auto":
        return modes["host" if lacking or "torch" not in sys.modules else "heap"]
    if lacking:
        _once(f"mode {word} is for a GPU, and {lacking}: CPU tensors are accounted instead (mode host)")
        word = "host"
    return modes[word]


_told: Set[str] = set()


def _once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _trouble.say(text)


def _no_gpu() -> Optional[str]:
    """Why torch will find no GPU, if so. Asks the file system: asking CUDA would spoil a later fork."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides every GPU"
    if os.environ.get("STRANDLINE_LIBCUDA") or any(map(glob.glob, _DEVICES)):
        return None
    return "there is none here (no /dev/nvidia0)"


# A driver of NVIDIA's, Windows' below WSL, Tegra's.
_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu/*")


def _take_gpu(library: Any, mode: int) -> None:
    """Makes strandline's heap torch's CUDA allocator, or watches torch's own."""
    from . import _torch_cuda

    functions = ctypes.CDLL(library.path)
    if mode == _library.MODES["heap"]:
        try:
            _torch_cuda.install(functions)
        except _torch_cuda.Unavailable as reason:
            _trouble.say(f"{reason}; torch keeps its allocator and strandline watches it")
            mode = _library.MODES["observer"]
            library.start(mode, None)
    if mode == _library.MODES["observer"]:
        _torch_cuda.observe(functions)
    _torch_cuda.link_backward(functions)


def _sleep() -> None:
    if _clock is not None:
        _clock.asleep = True
