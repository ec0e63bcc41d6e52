"""Prints what the Python side costs: the hooks of one step, and one search among a million objects.

cost.py [OBJECTS]
"""

import gc
import pathlib
import sys
import time

sys.path[:0] = [
    str(pathlib.Path(__file__).resolve().parents[3] / "python"),
    str(pathlib.Path(__file__).resolve().parents[1]),
]
import torch
from fake_library import FakeLibrary
from strandline import _boot, _explain, _library


def cheap_library():
    """The C calls of a real library if one is preloaded, else Python functions that do nothing."""
    return _library.find() or FakeLibrary()


def step_cost():
    """CPU time of our functions alone: what they wrap is replaced by nothing, so that torch's own noise is out."""
    from torch.optim import optimizer as module

    torch.autograd.backward = lambda *args, **kwargs: None
    plain = torch.autograd.backward
    library = cheap_library()
    if isinstance(library, FakeLibrary):
        library.phases = type("Drop", (), {"append": lambda self, x: None})()
    assert _boot.start("host", library=library)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    (before,), (after,) = (
        module._global_optimizer_pre_hooks.values(),
        module._global_optimizer_post_hooks.values(),
    )
    backward = torch.autograd.backward

    def ours():
        backward(1)
        before(optimizer, (), {})
        after(optimizer, (), {})

    def theirs():
        plain(1)

    cost = {}
    for function in (theirs, ours):
        rounds = []
        for _ in range(15):
            began = time.thread_time()
            for _ in range(5000):
                function()
            rounds.append((time.thread_time() - began) / 5000 * 1e6)
        cost[function] = rounds
    low, middle = min(cost[ours]) - min(cost[theirs]), sorted(cost[ours])[7] - sorted(cost[theirs])[7]
    kind = (
        "stand-in written in Python"
        if isinstance(library, FakeLibrary)
        else "preloaded library, ctypes calls"
    )
    print(f"hooks of one step, CPU time ({kind}): least {low:.2f} µs, median {middle:.2f} µs of 15 rounds")


class Thing:
    pass


def search_cost(count):
    things = []
    while len(things) * 3 < count:
        thing = Thing()
        thing.list, thing.other = [len(things)], {"k": thing}
        things.append(thing)
    history = {"loss": []}
    blocks = []
    for step in range(1000):
        tensor = torch.zeros(8)
        history["loss"].append(tensor)
        blocks.append({"address": tensor.untyped_storage().data_ptr(), "size": 32, "step": step})
        del tensor
    candidates = [
        {
            "id": n,
            "device": -1,
            "live_bytes": 1,
            "live_blocks": 1000,
            "stack": [],
            "blocks": blocks[n * 16 : n * 16 + 16],
        }
        for n in range(20)
    ]
    wall, spent = time.perf_counter(), time.process_time()
    answers = _explain.Explainer._search(candidates, wall)
    print(
        f"search for 20 candidates among {len(gc.get_objects()):,} objects: {time.perf_counter() - wall:.2f} s, "
        f"{time.process_time() - spent:.2f} s of CPU; explained {sum(bool(a['kept_at']) for a in answers.values())} of 20"
    )


if __name__ == "__main__":
    step_cost()
    search_cost(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
