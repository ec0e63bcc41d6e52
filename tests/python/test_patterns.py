"""Holder, kept line, fix and bound on small programs after reports of real leaks (patterns.py)."""

import gc
import os
import re
import sys
import types

import pytest
from patterns import HEAD, PATTERNS
from strandline import _explain, _hooks, _library


def explain(source, path, name, seconds=60.0):
    """Runs a program and explains the blocks that it noted, as one candidate. There is time enough: without the
    library's index a search computes for a second here, and a slower machine may take more than a job is given."""
    path.write_text(source)
    blocks, step, answers, stack = [], [0], [], []

    def note(tensor):
        frame = sys._getframe(1)
        function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        stack[:] = [{"file": frame.f_code.co_filename, "function": function, "line": frame.f_lineno}]
        storage = tensor.untyped_storage()
        blocks.append({"address": storage.data_ptr(), "size": storage.nbytes(), "step": step[0]})

    def tick():
        step[0] += 1

    def ask():
        candidate = {
            "id": 1,
            "device": -1,
            "live_bytes": sum(b["size"] for b in blocks),
            "live_blocks": len(blocks),
            "stack": stack if PATTERNS.get(name, {}).get("stack") else [],
            "blocks": pick(blocks),
            "shape": PATTERNS.get(name, {}).get("shape", ""),
            "asked": PATTERNS.get(name, {}).get("asked", 0),
        }
        answers.append(_explain.Explainer._search([candidate], seconds).get(1))

    module = types.ModuleType("user_program")
    module.__file__ = str(path)
    module.__dict__.update(note=note, tick=tick, ask=ask)
    collecting = gc.isenabled()
    others = other_tests()
    sys.modules["user_program"] = module
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    finally:
        if collecting:
            gc.enable()
        del sys.modules["user_program"]
        sys.modules.update(others)
    return answers[-1], module


def other_tests():
    """Takes out the modules of the other tests that ran in this process: they are no part of the user's program."""
    folder = os.path.dirname(__file__)
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    return {
        name: sys.modules.pop(name)
        for name, file in files.items()
        if os.path.dirname(file) == folder and name != __name__
    }


def pick(blocks):
    many = min(16, len(blocks))
    return [blocks[round(n * (len(blocks) - 1) / max(1, many - 1))] for n in range(many)]


@pytest.fixture(autouse=True, params=["near", "index", "collector"])
def references(request, monkeypatch):
    """Who refers to whom is asked of the library, of the program's own objects first or of all at once, or of the
    collector where the library cannot tell."""
    library = request.getfixturevalue("built_library") if request.param != "collector" else None
    monkeypatch.setattr(_library, "find", lambda: library)
    if request.param == "index":
        monkeypatch.setattr(_explain, "near", lambda *_, **__: None)


@pytest.fixture(autouse=True)
def optimizer_hooks(library):
    """The hook that knows which optimizers step."""
    import weakref

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    steps = [0]

    def before(optimizer, args, kwargs):
        steps[0] += 1
        key = id(optimizer.param_groups[0]["params"][0])
        known = _hooks.optimizers.get(key)
        if known is None or known.optimizer() is not optimizer:
            made = _hooks.Stepping(weakref.ref(optimizer), steps[0], steps[0])
            known = _hooks.optimizers[key] = made
        known.last = steps[0]

    handle = register_optimizer_step_pre_hook(before)
    yield
    handle.remove()
    _hooks.optimizers.clear()


@pytest.mark.parametrize("name", list(PATTERNS))
def test_pattern(name, tmp_path):
    wanted = PATTERNS[name]
    source = HEAD + wanted["source"]
    answer, _ = explain(source, tmp_path / "train.py", name)
    assert answer is not None
    said = f"\n{answer}"
    assert answer["held_by"] is not None, said
    assert re.search(wanted["path"], answer["held_by"]["path"]), said
    if wanted["kind"]:
        assert answer["held_by"]["kind"] == wanted["kind"], said
    if wanted["kept"]:
        line = next(n for n, text in enumerate(source.splitlines(), 1) if "KEEP" in text)
        assert answer["kept_at"] and answer["kept_at"]["line"] == line, said
        assert re.search(wanted["fix"], answer["fix"]) and answer["fix"], said
    if wanted["not_leak"]:
        assert answer["not_a_leak"] and re.search(wanted["not_leak"], answer["not_a_leak"]), said
    else:
        assert answer["not_a_leak"] is None, said
        assert answer["released_by"] == wanted["released"], said
    if wanted["bounded"]:
        assert answer["bounded"] == wanted["bounded"], said
    if wanted["used"]:
        assert str(answer["used"]).lower() == wanted["used"], said


@pytest.mark.parametrize("name", ["running loss local", "list of losses"])
def test_out_of_time_names_nobody_wrongly(name, tmp_path):
    """Half a search must not say that C++ holds what a list or a graph holds."""
    answer, _ = explain(HEAD + PATTERNS[name]["source"], tmp_path / "train.py", name, seconds=-1.0)
    assert answer["not_a_leak"] is None, answer
    if answer["held_by"] is None:
        assert "out of time" in answer["fix"]
    else:
        assert answer["held_by"]["kind"] == PATTERNS[name]["kind"], answer


def test_nothing_is_kept(tmp_path):
    """What the search has seen dies as soon as the program lets go of it."""
    source = HEAD + PATTERNS["exceptions kept"]["source"].replace(
        "feats = x * 2;", "feats = x * 2; seen.append(weakref.ref(feats));"
    ).replace("def main", "seen = []\ndef main")
    _, module = explain(source, tmp_path / "train.py", "kept")
    gc.collect()  # main's frame, its list and the exceptions in it are a cycle of the program's own
    assert len(module.seen) == 12 and not any(known() is not None for known in module.seen)


def test_locals_are_not_pinned(tmp_path):
    """Reading a running frame's locals leaves no snapshot behind in the frame."""
    source = (
        HEAD
        + """
def main():
    out = []
    bag = []
    for i in range(5):
        x = torch.randn(64); note(x); bag.append(x); tick()
    ask()
    known = weakref.ref(x)
    bag.clear()
    del x
    return known() is None
freed = main()
"""
    )
    _, module = explain(source, tmp_path / "train.py", "snapshot")
    assert module.freed


def test_collector_is_left_as_it_was(tmp_path):
    source = HEAD + "x = torch.randn(4); note(x); tick(); was = gc.isenabled(); ask(); now = gc.isenabled()"
    _, module = explain(source, tmp_path / "train.py", "collector")
    assert module.was == module.now


def test_users_locals_dict_is_left_alone(tmp_path):
    source = (
        HEAD
        + "def main():\n    a = torch.randn(4); note(a); tick()\n    mine = locals()\n    ask()\n    return sorted(k for k in mine if k == 'a')\nkeys = main()"
    )
    _, module = explain(source, tmp_path / "train.py", "locals")
    assert module.keys == ["a"]


def test_a_method_of_that_name_in_a_file_that_knows_no_such_class_says_nothing(tmp_path, monkeypatch):
    """`engine.step()` in a loop of another file is no reading of a meter that has a method `step`, too."""
    file = tmp_path / "elsewhere.py"
    file.write_text("def drive(engine):\n    for _ in range(9):\n        engine.step()\n")
    module = types.ModuleType("elsewhere")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    name = "another object's method of that name"
    answer, _ = explain(HEAD + PATTERNS[name]["source"], tmp_path / "train.py", name)
    assert answer["used"] == "read", answer


ADAPTERS = """
from torch import nn
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.extra = nn.ModuleDict({})
    def update_layer(self, name):
        self.extra[name] = nn.Linear(8, 8)
    def forward(self, x):
        return sum(layer(x) for layer in self.extra.values())
def add_adapter(model, name):
    for layer in model.children():
        layer.update_layer(name)
"""
ADAPTED = """
import adapters
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = adapters.Adapted()
    def forward(self, x): return self.b(x)
net = Net()
for i in range(8):
    {adds}  # ADD
    net(torch.randn(2, 8)).sum().backward()
    note(net.b.extra[f"t{{i}}"].weight.grad)
    tick()
ask()
"""


@pytest.mark.parametrize(
    "adds, place",
    [
        ('adapters.add_adapter(net, f"t{i}")', "adapters.py"),
        ('net.b.update_layer(f"t{i}")', "train.py"),
    ],
)
def test_a_modules_forward_adds_no_modules(adds, place, tmp_path, monkeypatch):
    """Modules that a library adds to one of its own, of which the gradients stay: neither the line that made the module
    around them, nor the one that runs it keeps them."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "adapters.py").write_text(ADAPTERS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "adapters", raising=False)
    source = HEAD + ADAPTED.format(adds=adds)
    try:
        answer, _ = explain(source, tmp_path / "train.py", "adapted")
    finally:
        sys.modules.pop("adapters", None)
    kept = answer["kept_at"]
    assert kept["file"].endswith(place), answer
    assert ("# ADD" if place == "train.py" else "self.extra[name] =") in kept["code"], answer


METRICS = """
class Curve:
    def __init__(self): self.preds = []
    def update(self, preds): self.preds.append(preds)
    def compute(self): return sum(float(p.sum()) for p in self.preds)
{reset}
"""
MEASURED = """
import metrics
curve = metrics.Curve()
for i in range(12):
    x = torch.randn(64); note(x)
    curve.update(x)  # KEEP
    del x; tick()
ask()
"""


@pytest.mark.parametrize(
    "reset, fix",
    [
        (
            "    def reset(self): self.preds = []",
            r"metrics\.py:4 keeps what .*; call curve\.reset\(\) when it has been read",
        ),
        ("", r"metrics\.py:4 keeps what .*; reset or clear it regularly"),
    ],
)
def test_a_librarys_metric_is_reset_by_its_own_method(reset, fix, tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "metrics.py").write_text(METRICS.format(reset=reset))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "metrics", raising=False)
    try:
        answer, _ = explain(HEAD + MEASURED, tmp_path / "train.py", "measured")
    finally:
        sys.modules.pop("metrics", None)
    assert "# KEEP" in answer["kept_at"]["code"], answer
    assert re.search(fix, answer["fix"]), answer
