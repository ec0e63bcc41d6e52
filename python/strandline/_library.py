"""Finds libstrandline in this process, or loads it, and speaks its C ABI (include/strandline.h).

Must not know: torch, the clock, how a candidate is explained.
Invariant: no method raises for a failure of the library; calls keep the GIL (PyDLL), they are short.
"""

import ctypes
import json
import os
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

ABI_VERSION = 1
EINACTIVE = -2
MODES = {"off": 0, "heap": 1, "observer": 2, "host": 3}
OTHER, FORWARD, BACKWARD, OPTIMIZER, VALIDATION = range(5)
PHASES = {
    "other": OTHER,
    "forward": FORWARD,
    "train": FORWARD,
    "training": FORWARD,
    "backward": BACKWARD,
    "optimizer": OPTIMIZER,
    "validation": VALIDATION,
    "validate": VALIDATION,
    "valid": VALIDATION,
    "val": VALIDATION,
    "evaluation": VALIDATION,
    "evaluate": VALIDATION,
    "eval": VALIDATION,
    "test": VALIDATION,
    "testing": VALIDATION,
}

_NONE = ctypes.c_size_t(-1).value

_SIGNATURES = {
    "strandline_abi_version": (ctypes.c_uint32, []),
    "strandline_version": (ctypes.c_char_p, []),
    "strandline_start": (ctypes.c_int, [ctypes.c_int, ctypes.c_char_p]),
    "strandline_mode": (ctypes.c_int, []),
    "strandline_step": (ctypes.c_int, []),
    "strandline_epoch": (ctypes.c_int, []),
    "strandline_phase": (ctypes.c_int, [ctypes.c_int]),
    "strandline_phase_of": (ctypes.c_int, [ctypes.c_char_p]),
    "strandline_candidates": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_size_t]),
    "strandline_explain": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_char_p]),
    "strandline_collecting": (ctypes.c_int, [ctypes.c_int]),
    "strandline_remark": (ctypes.c_int, [ctypes.c_char_p]),
    "strandline_say": (ctypes.c_int, [ctypes.c_char_p]),
    "strandline_around": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
    "strandline_trim": (ctypes.c_int, [ctypes.c_int]),
    "strandline_finish": (ctypes.c_int, []),
    "strandline_report": (ctypes.c_int, [ctypes.c_char_p]),
    "strandline_internal_index": (ctypes.c_void_p, [ctypes.py_object, ctypes.py_object, ctypes.c_uint32]),
    "strandline_internal_reach": (
        ctypes.c_size_t,
        [
            ctypes.py_object,
            ctypes.py_object,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.py_object,
            ctypes.c_void_p,
            ctypes.c_uint32,
        ],
    ),
    "strandline_internal_holders": (
        ctypes.c_size_t,
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t],
    ),
    "strandline_internal_instances": (
        ctypes.c_size_t,
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t],
    ),
    "strandline_internal_forget": (None, [ctypes.c_void_p]),
    "strandline_internal_request_opens": (ctypes.c_int64, []),
    "strandline_internal_request_closes": (None, [ctypes.c_int64]),
    "strandline_stats": (ctypes.c_size_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]),
}


class Library:
    """The library's functions with Python types. `step`, `epoch` and `phase` are the bare C functions."""

    def __init__(self, dll: Any, path: Optional[str] = None) -> None:
        self.path = path
        self._functions: Dict[str, Any] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(dll, name)
            function.restype, function.argtypes = result, arguments
            self._functions[name[len("strandline_") :]] = function
        self.step = self._functions["step"]
        self.epoch = self._functions["epoch"]
        self.phase = self._functions["phase"]
        self.mode = self._functions["mode"]
        self.collecting = self._functions["collecting"]
        self.request_opens = self._functions["internal_request_opens"]
        self.request_closes = self._functions["internal_request_closes"]

    def abi_version(self) -> int:
        return int(self._functions["abi_version"]())

    def version(self) -> str:
        return (self._functions["version"]() or b"").decode()

    def start(self, mode: int, options: Optional[Dict[str, Any]] = None) -> int:
        text = json.dumps(options).encode() if options else None
        return int(self._functions["start"](mode, text))

    def phase_of(self, name: str) -> int:
        """The number of a phase of the program's own."""
        return int(self._functions["phase_of"](name.encode("utf-8", "replace").replace(b"\0", b"?")))

    def candidates(self) -> List[Dict[str, Any]]:
        found = self._json("candidates")
        return found if isinstance(found, list) else []

    def explain(self, identity: int, answer: Dict[str, Any]) -> int:
        return int(self._functions["explain"](identity, json.dumps(answer).encode()))

    def remark(self, remark: Dict[str, str]) -> int:
        """Something worth knowing that is no finding: kind, what, because, fix."""
        return int(self._functions["remark"](json.dumps(remark).encode()))

    def say(self, line: str) -> int:
        """A line on the stderr that the process was started with."""
        return int(self._functions["say"](line.encode("utf-8", "replace")))

    def around(self) -> Optional[int]:
        """Where the function lies that calls others around one of torch's; None where this Python cannot have it."""
        place = self._functions["around"](None, None, None)
        return int(place) if place else None

    def trim(self) -> int:
        """Gives the host's cache back: what no block lies in."""
        return int(self._functions["trim"](-1))

    def finish(self) -> int:
        """The run is over: the last report, once."""
        return int(self._functions["finish"]())

    def report(self, folder: Optional[str] = None) -> int:
        return int(self._functions["report"](os.fsencode(folder) if folder else None))

    def stats(self, device: int) -> Dict[str, Any]:
        found = self._json("stats", device)
        return found if isinstance(found, dict) else {}

    # numbers of Python objects, as attach/python_objects.rs has them
    def python_index(
        self, objects: List[Any], classes: Tuple[type, ...], seconds: float = 60.0
    ) -> Optional[int]:
        """The references among `objects`; None where this Python cannot be asked so, or not in that time."""
        return self._functions["internal_index"](objects, classes, int(seconds * 1000)) or None

    def python_reach(
        self, roots: List[Any], types: List[type], closed: Sequence[int], most: int
    ) -> Optional[Tuple[List[Any], Sequence[int]]]:
        """What the objects of `roots` lead to, the nearest first, and for each how many references to it were not met
        (255 for more); types but those given, and what has one of the ids in `closed`, are not gone through. None where
        this Python does not tell, or there are more than `most`."""
        found: List[Any] = []
        unseen = (ctypes.c_uint8 * most)()
        shut = (ctypes.c_size_t * len(closed))(*closed)
        count = int(self._functions["internal_reach"](roots, types, shut, len(closed), found, unseen, most))
        return None if count == _NONE else (found, unseen[:count])

    def python_holders(self, index: int, identity: int) -> Optional[Sequence[int]]:
        """The numbers of the objects that refer to this one; None if the index does not know it."""
        return self._numbers("internal_holders", index, identity)

    def python_instances(self, index: int, number: int) -> Sequence[int]:
        """The numbers of the instances of the class of this number."""
        return self._numbers("internal_instances", index, number) or ()

    def python_forget(self, index: int) -> None:
        self._functions["internal_forget"](index)

    def _numbers(self, name: str, index: int, which: int) -> Optional[Sequence[int]]:
        function = self._functions[name]
        room = 64
        while True:
            numbers = (ctypes.c_uint32 * room)()
            count = int(function(index, which, numbers, room))
            if count == _NONE:
                return None
            if count <= room:
                return numbers[:count]
            room = count

    def _json(self, name: str, *first: int) -> Any:
        function = self._functions[name]
        length = int(function(*first, None, 0))
        for _ in range(4):  # the text may grow between the two calls
            if length <= 0 or length > 1 << 40:
                return None
            buffer = ctypes.create_string_buffer(length + 1)
            now = int(function(*first, buffer, length + 1))
            if now <= length:
                try:
                    return json.loads(buffer.value.decode("utf-8", "replace"))
                except ValueError:
                    return None
            length = now
        return None


_found: Optional[Library] = None


def find() -> Optional[Library]:
    """The library of this process, if it is there (preloaded or loaded before) and speaks our ABI."""
    global _found
    if _found is None:
        try:
            dll = ctypes.PyDLL(None)
            if hasattr(dll, "strandline_abi_version"):
                _found = _checked(Library(dll))
        except (OSError, AttributeError):
            pass
    return _found


def load() -> Optional[Library]:
    """As `find`; else loads the file named by STRANDLINE_LIB or lying next to this package."""
    global _found
    if find() is None:
        for path in _places():
            try:
                _found = _checked(Library(ctypes.PyDLL(path, mode=ctypes.RTLD_GLOBAL), path))
            except (OSError, AttributeError) as failure:
                _say(f"{path} cannot be loaded: {failure}")
                continue
            if _found is not None:
                break
    return _found


def _places() -> List[str]:
    named = os.environ.get("STRANDLINE_LIB")
    if named:
        return [named]
    here = os.path.dirname(__file__)
    names = [
        "libstrandline.so",
        os.path.join("_native", "libstrandline.so"),
        os.path.join("..", "libstrandline.so"),
    ]
    return [path for path in (os.path.join(here, name) for name in names) if os.path.isfile(path)]


def _checked(library: Library) -> Optional[Library]:
    if library.abi_version() == ABI_VERSION:
        return library
    _say(
        f"the library speaks ABI {library.abi_version()}, this package ABI {ABI_VERSION}: use a pair of one release"
    )
    return None


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"strandline: {text}\n")
    except (OSError, ValueError, AttributeError):
        pass
