"""Notices hooks that are registered on one module again and again: each goes on running, and keeps what it stores.

What such a hook keeps is born anew in each step, so that no block of it ever grows old.

Must not know: candidates, blocks, who allocates.
Invariant: looks a few times in a run, at modules only if hooks were registered since the look before, and no more once
their number stood still from one such look to the next; runs no code of the user's; holds no module, hook or tensor
afterwards. One module's hook is said once.
"""

import functools
import gc
import sys
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ._path import instance_dict
from ._roles import module_path
from ._source import HOOKS

_MANY = 4  # hooks of one code on one thing: fewer may be meant

_Key = Tuple[int, str, int]  # ids of the module (or parameter) and of the hook's code, the kind of hook


class Repeated:
    """Counts, from look to look, the hooks of one code on each module."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._made: Optional[int] = None  # hooks that had ever been registered at the last look
        self._counts: Optional[Dict[_Key, int]] = None
        self._settled = False
        self._said: Dict[_Key, None] = {}

    def look(self) -> None:
        hooks = sys.modules.get("torch.utils.hooks")
        if hooks is None:
            return
        before, self._made = self._made, hooks.RemovableHandle.next_id
        if before is None or self._made - before < 2 or self._settled:
            return
        self._compare()

    def _compare(self) -> None:
        modules = _modules()
        before, self._counts = self._counts, {}
        more = before is None
        for module in modules:
            for kind, code, count in _alike(module):
                key = (id(module), kind, id(code))
                self._counts[key] = count
                then = count if before is None else before.get(key, count)
                more = more or count > then
                if count >= _MANY and count > then and key not in self._said:
                    self._said[key] = None
                    self._tell(module_path(modules, module) or type(module).__name__, kind, code, count, then)
        self._settled = not more

    def _tell(self, module: str, kind: str, code: Any, count: int, then: int) -> None:
        name = getattr(code, "co_qualname", code.co_name)
        self._library.remark(
            {
                "kind": "repeated-hooks",
                "what": f"{name}() is registered {count} times as a hook of {module}, and was {then} times before",
                "because": "each of these hooks runs in every step and keeps what it captured and what it stores, one "
                "more each time",
                "fix": f"{HOOKS[kind]} is called again and again: register the hook once, or keep the handle and call "
                "handle.remove()",
            }
        )


def _modules() -> List[Any]:
    import torch

    kinds: Dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        known = kinds.get(kind)
        if known is None:
            known = kinds[kind] = torch.nn.Module in kind.__mro__
        if known:
            found.append(thing)
    return found


def _alike(module: Any) -> Iterator[Tuple[str, Any, int]]:
    """The kinds of hooks of a module, the codes that they run, and how many hooks run each."""
    names = instance_dict(module) or {}
    for kind in HOOKS:
        hooks = names.get(kind)
        if not isinstance(hooks, dict) or len(hooks) < _MANY:
            continue
        counts: Dict[int, List[Any]] = {}
        for hook in list(dict.values(hooks)):
            code = _code(hook)
            if code is not None:
                counts.setdefault(id(code), []).append(code)
        for codes in counts.values():
            yield kind, codes[0], len(codes)


def _code(hook: Any) -> Any:
    while type(hook) is functools.partial:
        hook = hook.func
    hook = getattr(hook, "__func__", hook) if type(hook).__name__ == "method" else hook
    return getattr(hook, "__code__", None) if type(hook).__name__ == "function" else None
