"""The index of the program's own objects: what is in it, and when it claims to know all that refers to an object."""

import gc
import sys
import types

import pytest
import torch
from strandline import _explain, _near
from strandline._near import near
from strandline._roots import Roots
from strandline._tensors import own_references


@pytest.fixture
def program(tmp_path):
    """A module of the user's."""
    module = types.ModuleType("a_program")
    module.__file__ = str(tmp_path / "a_program.py")
    sys.modules["a_program"] = module
    yield module
    del sys.modules["a_program"]


@pytest.fixture
def installed():
    """A module of a library's."""
    module = types.ModuleType("a_library")
    module.__file__ = "/usr/lib/python3/site-packages/a_library.py"
    sys.modules["a_library"] = module
    yield module
    del sys.modules["a_library"]


class Asked:
    """An index for as long as the test runs."""

    def __init__(self, library):
        self.roots = Roots()
        self.index = near(self.roots, (), own_references, library)

    def __enter__(self):
        return self.index

    def __exit__(self, *_):
        self.index.close()
        self.roots.close()


def test_what_the_program_names_is_in_it_with_its_holders(built_library, program):
    program.__dict__.update(outer={"inner": []}, other=[])
    with Asked(built_library) as index:
        inner = program.outer["inner"]
        assert not index.whole and index.is_quick
        assert [holder is program.outer for holder, _ in index.holders([inner])] == [True]
        found = index.holders([program.other])
        assert [holder is program.__dict__ for holder, _ in found] == [True]


def test_all_is_known_of_what_only_the_program_refers_to(built_library, program):
    program.__dict__.update(once=[], twice=[])
    program.again = (program.twice,)
    with Asked(built_library) as index:
        assert index.knows_all(program.once) and index.knows_all(program.twice)
        assert not index.knows_all([])  # it is not in the index at all


def test_not_all_is_known_of_what_a_library_refers_to(built_library, program, installed):
    program.__dict__.update(shared=[], free=[])
    installed.kept = [program.shared]
    with Asked(built_library) as index:
        assert not index.knows_all(program.shared)
        assert index.knows_all(program.free)
        assert not any(thing is installed.kept for thing in index.objects)


def test_not_all_is_known_of_what_the_collector_does_not_see(built_library, program):
    numpy = pytest.importorskip("numpy")
    program.shared = []
    program.array = numpy.empty(1, dtype=object)
    program.array[0] = program.shared
    with Asked(built_library) as index:
        assert not index.knows_all(program.shared)


def test_variables_are_references_that_are_known(built_library, program, installed):
    thing = program.thing = []
    other = program.other = []
    installed.kept = [other]
    with Asked(built_library) as index:
        assert index.knows_all(thing) == ((3, 11) <= sys.version_info < (3, 14))
        assert not index.knows_all(other)


def test_a_captured_variable_is_no_reference_of_the_frames(built_library, program, installed):
    captured = program.captured = []
    program.function = lambda: captured
    installed.kept = [captured]
    with Asked(built_library) as index:
        assert not index.knows_all(captured)


def test_variables_of_a_running_generator_are_counted_once(built_library, program, installed):
    def running():
        thing = program.thing = []
        installed.kept = [thing]
        yield knows(thing)  # called as Python calls functions of its own, with the frame's variables in order

    def knows(thing):
        with Asked(built_library) as index:
            return index.knows_all(thing)

    program.running = running()
    assert next(program.running) is False


def test_classes_of_the_program_are_gone_through_and_others_are_not(built_library, program, installed):
    for module in (program, installed):
        exec("class Kind:\n    kept = []", module.__dict__)
    program.foreign = installed.Kind
    with Asked(built_library) as index:
        met = set(map(id, index.objects))
        assert id(program.Kind) in met and id(program.Kind.kept) in met
        assert id(installed.Kind) not in met and id(installed.Kind.kept) not in met


def test_a_program_with_too_much_has_no_such_index(built_library, program, monkeypatch):
    program.many = [[] for _ in range(2000)]
    monkeypatch.setattr(_near, "_MOST", 1000)
    assert near(Roots(), (), own_references, built_library) is None
    monkeypatch.undo()
    program.many = [0.5] * (1 << 20)  # nothing to go through, but to look at
    assert near(Roots(), (), own_references, built_library) is None


def test_what_is_asked_with_something_else_is_refused(built_library):
    assert built_library.python_reach((1, 2), [], [0], 10) is None
    assert built_library.python_reach([], (int,), [0], 10) is None
    assert built_library.python_reach([], [], [], 10) == ([], [])


def test_torchs_own_reference_to_a_tensor_is_known(built_library, program, installed):
    program.__dict__.update(
        weight=torch.nn.Parameter(torch.ones(2)), alone=torch.ones(2), shared=torch.ones(2)
    )
    program.loss = program.weight.sum()  # whose graph refers to the parameter, in C++
    installed.kept = [program.shared]
    with Asked(built_library) as index:
        assert index.knows_all(program.weight) and index.knows_all(program.alone)
        assert not index.knows_all(program.shared)


def candidate(tensors):
    blocks = [
        {"address": tensor.untyped_storage().data_ptr(), "size": 64, "step": step}
        for step, tensor in enumerate(tensors)
    ]
    return {"id": 1, "device": -1, "live_bytes": 1, "live_blocks": len(blocks), "stack": [], "blocks": blocks}


def searched(monkeypatch, library, asked):
    """The path that a search gives, and how often it asked for all of the collector's objects."""
    counted = []

    class Collector:
        def __getattr__(self, name):
            return getattr(gc, name)

        def get_objects(self):
            counted.append(1)
            return gc.get_objects()

    monkeypatch.setattr(_explain, "gc", Collector())
    monkeypatch.setattr(_near._library, "find", lambda: library)
    answer = _explain.Explainer._search([asked], 60.0)[1]
    return answer["held_by"]["path"], len(counted)


def test_what_the_program_alone_holds_is_found_without_all_objects(built_library, program, monkeypatch):
    program.history = [torch.ones(16) for _ in range(6)]
    asked = candidate(program.history)
    path, whole = searched(monkeypatch, built_library, asked)
    assert "global history[0]" in path and whole == 0


def test_what_a_library_holds_is_found_among_all_objects(built_library, program, installed, monkeypatch):
    installed.history = [torch.ones(16) for _ in range(6)]
    path, whole = searched(monkeypatch, built_library, candidate(installed.history))
    assert "global history[0]" in path and whole == 1


def test_what_a_library_holds_nearer_is_not_missed(built_library, program, installed, monkeypatch):
    program.far = {"very": {"far": [torch.ones(16) for _ in range(6)]}}
    installed.near = list(program.far["very"]["far"])
    path, whole = searched(monkeypatch, built_library, candidate(installed.near))
    assert "global near[0]" in path and whole == 1
