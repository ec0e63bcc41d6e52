"""Puts something before and after a function of torch, without a frame of ours between the user's call and torch.

Tracebacks, warnings (which name the caller) and debuggers then show what they show without strandline. Where the
library is not here to call the three from C (tests), a plain function does it.
Must not know: torch, or what is done before and after.
Invariant: the function's result, exception and arguments are the original's; what is done before and after raises
no `Exception` into the user's code. What is none (KeyboardInterrupt: signals are handled wherever Python runs) passes.
"""

import ctypes
import functools
import types
from typing import Any, Callable, List, Optional

from . import _library, _trouble

# before(*arguments) returns a token for after(token, result, failed).
Before = Callable[..., Any]
After = Callable[[Any, Any, bool], None]


def around(original: Any, before: Before, after: Optional[After] = None) -> Any:
    """A stand-in for `original`, a plain function or method, which does the two around each call."""
    done = after or _nothing
    builtin = _builtin(before, original, done)
    if builtin is None:
        return _plain(original, before, done)
    # A built-in function is no descriptor: as __call__ of a class it gets the arguments alone.
    kind = type("around", (_Around,), {"__call__": builtin, "__module__": __name__})
    return functools.update_wrapper(kind(), original)


class _Around:
    """Looks like the original to those who ask (inspect, pickle, help): by what update_wrapper has copied."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return repr(self.__wrapped__)  # type: ignore[attr-defined]


def _nothing(token: Any, result: Any, failed: bool) -> None:
    pass


def _plain(original: Any, before: Before, after: After) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        token, result, failed = None, None, True
        try:
            token = before(*args, **kwargs)
        except Exception:
            pass
        try:
            result = original(*args, **kwargs)
            failed = False
            return result
        finally:
            try:
                after(token, result, failed)
            except Exception:
                pass

    return function


class _Definition(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_VARARGS_AND_KEYWORDS = 1 | 2
_kept: List[Any] = []  # built-in functions refer to their definitions for ever


def _builtin(before: Before, original: Any, after: After) -> Any:
    """The library's function that calls the three, or None where it cannot be had."""
    try:
        library = _library.find()
        place = library.around() if library is not None else None
        if not place:
            return None
        name = getattr(original, "__name__", "function").encode()
        definition = _Definition(name, place, _VARARGS_AND_KEYWORDS, None)
        _kept.append(definition)
        new = ctypes.PyDLL(None).PyCFunction_NewEx
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
        return new(ctypes.addressof(definition), (before, original, after), None)
    except Exception:
        _trouble.said("a function of torch with something around it")
        return None
