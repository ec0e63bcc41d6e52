"""The roots of a Python process: module globals and the locals of every running frame.

Must not know: tensors, what is searched.
Invariant: reading a frame's locals leaves nothing behind in the frame (before Python 3.13 `f_locals` is a snapshot
that would keep the locals of that moment alive); strandline's own frames are no roots.
"""

import contextlib
import functools
import sys
from types import FrameType, ModuleType
from typing import Any, Dict, List, NamedTuple, Set, Tuple

_SUSPENDABLE = (
    0x20 | 0x80 | 0x200
)  # a generator, coroutine or async generator, which refers to its frame's variables
_OPTIMIZED = 0x1  # the frame's locals are slots, f_locals is a copy of them
_OURS = __file__.rsplit("_roots", 1)[0]


class Local(NamedTuple):
    """A name in a running frame."""

    file: str
    function: str
    first_line: int
    name: str
    depth: int  # 0 is the innermost frame
    main: bool  # of the thread that searches


def is_ours(code: Any) -> bool:
    return code.co_filename.startswith(_OURS)


@functools.lru_cache(maxsize=16384)
def is_user_file(file: str) -> bool:
    """Whether a source file is the user's: neither the standard library's nor an installed package's."""
    if not file or file.startswith(("<frozen", _OURS, "<strandline>")):
        return False
    return "/site-packages/" not in file and "/dist-packages/" not in file and not file.startswith(_standard)


def _standard_places() -> Tuple[str, ...]:
    import os

    own = os.path.dirname(os.__file__)
    return (own + os.sep,)


_standard = _standard_places()


def locals_of(frame: FrameType) -> Dict[str, Any]:
    """The names and values of a frame; the caller must drop them soon."""
    seen = frame.f_locals
    if not frame.f_code.co_flags & _OPTIMIZED:
        return seen if type(seen) is dict else dict(seen)
    names = dict(seen)
    if (
        sys.version_info < (3, 13) and frame.f_trace is None and sys.getrefcount(seen) <= 3
    ):  # `seen`, the argument, the frame: not the user's, and no debugger that would write it back
        seen.clear()
    return names


class Roots:
    """Taken once for a search: which objects are held directly by a root, and how it is written."""

    def __init__(self) -> None:
        self.globals: Dict[int, Any] = {}  # id of a module's dict -> module
        self.locals: Dict[int, List[Local]] = {}  # id of a value -> the names it has in frames
        self.frames: Set[int] = set()
        self.threads: Dict[Tuple[str, str], int] = {}  # (file, function) -> how many other threads run it
        self.values: List[Any] = []  # the dicts of the user's modules, and what running functions name
        self.slots: Dict[int, int] = {}  # id of a value -> references to it that are variables of frames
        self.files: List[str] = []  # the user's source files: the main script and the modules imported
        self._take_modules()
        self._take_frames()

    def _take_modules(self) -> None:
        main = sys.modules.get("__main__")
        files: List[Any] = [getattr(main, "__file__", None)]
        for name, module in list(sys.modules.items()):
            kind = type(module)
            if kind is ModuleType:
                names = module.__dict__
            elif ModuleType in kind.__mro__:
                names = object.__getattribute__(module, "__dict__")
            else:  # what a module has put in its place
                with contextlib.suppress(Exception):  # of the user's code, which this may run
                    files.append(getattr(module, "__file__", None))
                continue
            ours = type(name) is str and name.partition(".")[0] == __package__
            if type(names) is not dict or ours:
                continue
            self.globals.setdefault(id(names), module)
            file = names.get("__file__")
            if module is main or (type(file) is str and is_user_file(file)):
                self.values.append(names)
                files.append(file)
        sources = (file for file in files if type(file) is str and file.endswith(".py"))
        self.files += [file for file in dict.fromkeys(sources) if is_user_file(file)]

    def _take_frames(self) -> None:
        import threading

        me = threading.get_ident()
        for thread, innermost in sys._current_frames().items():
            depth, frame = 0, innermost
            running: Set[Tuple[str, str]] = set()
            while frame is not None:
                code = frame.f_code
                self.frames.add(id(frame))
                if thread != me:
                    running.add((code.co_filename, code.co_name))
                if not is_ours(code) and code.co_flags & _OPTIMIZED:
                    cells = {*code.co_cellvars, *code.co_freevars}
                    for name, value in locals_of(frame).items():
                        if value is None or type(value) in _PLAIN:
                            continue
                        place = Local(
                            code.co_filename, code.co_name, code.co_firstlineno, name, depth, thread == me
                        )
                        self.locals.setdefault(id(value), []).append(place)
                        self.values.append(value)
                        if _IN_SLOTS and not code.co_flags & _SUSPENDABLE and name not in cells:
                            self.slots[id(value)] = self.slots.get(id(value), 0) + 1
                        del value
                elif not is_ours(code) and id(frame.f_globals) not in self.globals:
                    self.globals[id(frame.f_globals)] = None  # a script run by exec or runpy
                    self.values.append(frame.f_globals)
                depth += 1
                frame = frame.f_back  # type: ignore[assignment]
            for place in running:
                self.threads[place] = self.threads.get(place, 0) + 1
            del frame
        del innermost

    def close(self) -> None:
        self.globals.clear()
        self.locals.clear()
        self.values.clear()

    def local(self, thing: Any) -> List[Local]:
        """The names of `thing` in running frames, the best first: the user's files, then the outermost."""
        found = self.locals.get(id(thing), [])
        return sorted(
            found,
            key=lambda place: (
                not is_user_file(place.file),
                place.name.startswith("."),
                not place.main,
                -place.depth,
            ),
        )

    def named(self, thing: Any) -> Any:
        """The dict of a module of the user's that has a name for `thing`, None if there is none."""
        for module in self.globals.values():
            names = getattr(module, "__dict__", None)
            file = names.get("__file__") if type(names) is dict else None
            if not isinstance(file, str) or not is_user_file(file):
                continue
            if any(value is thing for value in list(names.values())):
                return names
        return None

    def module_file(self, names: Dict[str, Any]) -> str:
        file = names.get("__file__")
        return file if isinstance(file, str) else str(names.get("__name__", "?"))


# Whether each variable of a frame is a reference to its value, and only that: before, a frame is an object that refers
# to them itself; since, a function's arguments may be its caller's references.
_IN_SLOTS = (3, 11) <= sys.version_info < (3, 14)
_PLAIN = (bool, int, float, complex, str, bytes)
