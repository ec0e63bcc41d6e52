"""The index of references says what the collector says."""

import ctypes
import gc
import pathlib
import subprocess
import sys
import time

import pytest
from runner import COMMAND
from strandline._index import Index

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"


class Holder:
    def __init__(self, thing):
        self.thing = thing


class Kin(Holder):
    pass


def closure(thing):
    return lambda: thing


def generator(thing):
    yield 1
    print(thing)


@pytest.fixture
def things():
    return [[number] for number in range(5)]


@pytest.fixture
def kept(things):
    """Every way to hold the first of the things, and some of the others."""
    running = generator(things[0])
    next(running)
    return [
        {"key": things[0], "other": things[1]},
        (things[0], things[0], things[2]),
        Holder(things[0]),
        Kin(things[3]),
        closure(things[0]),
        running,
        {1, 2, (things[0], 7)[1]},
    ]


def indexes(library):
    objects = gc.get_objects()
    return Index(objects, (Holder, Kin), library), Index(objects, (Holder, Kin), NoIndex())


class NoIndex:
    def python_index(self, objects, classes, seconds):
        return None


def test_holders_are_those_that_the_collector_names(built_library, things, kept):
    quick, slow = indexes(built_library)
    assert quick.is_quick and not slow.is_quick
    ours = {id(things), id(quick.objects)}

    def pairs(index, asked):
        return {(id(holder), child) for holder, child in index.holders(asked) if id(holder) not in ours}

    for asked in ([things[0]], [things[1], things[3]], [things[4]], [kept], [[]]):
        assert pairs(quick, asked) == pairs(slow, asked)
    assert len(pairs(quick, [things[0]])) >= 5
    quick.close()
    slow.close()


def test_instances_are_found_with_those_of_subclasses(built_library, kept):
    for index in indexes(built_library):
        holders, kin = index.instances()
        assert {id(kept[2]), id(kept[3])} <= set(map(id, holders))
        assert id(kept[3]) in set(map(id, kin)) and id(kept[2]) not in set(map(id, kin))
        index.close()


def test_what_nothing_refers_to_is_told(built_library, things, kept):
    alone = [object(), []]
    for index in indexes(built_library):
        found = index.referenced([things[0], *things[3:4]])
        assert found == [things[0], things[3]]
        index.close()
    objects = [alone[1]]
    for library in (built_library, NoIndex()):
        assert Index(objects, (), library).referenced(alone) == []


def test_many_holders_of_one_object(built_library):
    thing = []
    many = [[thing] for _ in range(1000)]
    for index in indexes(built_library):
        assert set(map(id, many)) <= {id(holder) for holder, _ in index.holders([thing])}
        index.close()


def test_holders_come_in_the_order_of_the_list(built_library):
    """Of holders that are equally near the first one is taken: so the order is part of an answer."""
    thing = []
    holders = [kind([thing]) for _ in range(5000) for kind in (list, tuple)] + [{1: thing}, Holder(thing)]
    for objects in (holders, holders[::-1]):
        index = Index([thing, *objects], (Holder,), built_library)
        held = [holder for holder, _ in index.holders([thing])]
        assert held and list(map(id, held)) == [id(each) for each in objects if refers(each, thing)]
        index.close()


def refers(holder, thing):
    return any(each is thing for each in gc.get_referents(holder))


def test_one_object_that_refers_to_many(built_library):
    things = [[] for _ in range(100_000)]
    index = Index([*things, things], (), built_library)
    for thing in (things[0], things[50_000], things[-1]):
        assert [holder is things for holder, _ in index.holders([thing])] == [True]
    index.close()


def test_an_index_of_nothing_and_of_no_list(built_library):
    index = Index([], (), built_library)
    assert index.is_quick and index.instances() == [] and index.holders([[]]) == []
    index.close()
    assert built_library.python_index((1, 2), ()) is None
    assert built_library.python_index([1, 2], [int]) is None
    built_library.python_forget(None)


def test_no_index_is_made_when_time_is_up(built_library):
    assert built_library.python_index(gc.get_objects(), (), 0.0) is None


def test_time_in_which_others_compute_is_not_counted(built_library):
    """The objects' own traversal stands for a machine that is busy with something else: it sleeps."""

    class Slow:
        pass

    traverse, place = 71, 184  # Py_tp_traverse, and where PyTypeObject has it
    slot = ctypes.pythonapi.PyType_GetSlot
    slot.restype, slot.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    stored = ctypes.c_void_p.from_address(id(Slow) + place)
    before = stored.value
    assert before == slot(Slow, traverse)
    sleeps = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *_: time.sleep(0.5) or 0)
    objects = [Slow(), *([] for _ in range(40_000))]
    collecting = gc.isenabled()
    gc.disable()
    try:
        stored.value = ctypes.cast(sleeps, ctypes.c_void_p).value
        index = built_library.python_index(objects, (), 0.4)
    finally:
        stored.value = before
        if collecting:
            gc.enable()
    assert index is not None
    built_library.python_forget(index)


def test_little_memory_costs_the_index_and_not_the_job(built_library):
    """An allocation that fails would abort the process: so none may be made that can."""
    script = f"""
import ctypes, gc, resource, sys
sys.path.insert(0, {str(PACKAGE)!r})
from strandline._library import Library
library = Library(ctypes.PyDLL({str(COMMAND.parent / "libstrandline.so")!r}))
things = [[number] for number in range(1_500_000)]
objects = gc.get_objects()
pages = int(open("/proc/self/statm").read().split()[0])
for more in range(0, 220, 20):
    now = pages * 4096 + (more << 20)
    resource.setrlimit(resource.RLIMIT_AS, (now, resource.RLIM_INFINITY))
    index = library.python_index(objects, (list,))
    if index is not None:
        library.python_forget(index)
    print(more, index is not None)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    assert lines[1] == "False" and lines[-1] == "True", done.stdout
