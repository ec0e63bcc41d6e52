"""The clock's rules, and the hooks on real torch: steps, epochs, phases."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from strandline._clock import BACKWARDS, GRAPH, MODULE, STEPPER, Clock

PACKAGE = os.path.join(os.path.dirname(__file__), "..", "..", "python")


def test_leader_is_the_optimizer_that_ends_an_iteration(library):
    clock = Clock(library)
    for _ in range(10):  # a GAN: two optimizers
        for key in (1, 2):
            clock.optimizer_begins(key, key)
            clock.optimizer_ends(key)
    assert library.steps == 10


def test_rival_leads_when_the_leader_stays_away(library):
    clock = Clock(library)
    clock.optimizer_ends(1)
    for _ in range(10):
        clock.optimizer_ends(2)
    assert library.steps == 1 + 9


def test_weaker_events_count_only_without_an_optimizer(library):
    clock = Clock(library)
    for _ in range(30):
        clock.tick(MODULE, 7)
    assert library.steps == 21
    clock.optimizer_ends(1)
    for _ in range(20):
        clock.tick(MODULE, 7)
        clock.tick(GRAPH, 8)
        clock.optimizer_ends(1)
    assert library.steps == 21 + 1 + 20


def test_backward_counts_when_no_optimizer_exists(library):
    clock = Clock(library)
    for _ in range(10):
        clock.backward_begins()
        clock.backward_ends()
    assert library.steps == 9


def test_an_optimizer_made_since_leads_at_once(library):
    """Ten trials, each with an optimizer of its own: no step of theirs is lost."""
    clock = Clock(library)
    for trial in range(10):
        made = clock.steps
        for _ in range(5):
            clock.optimizer_begins(trial, trial)
            clock.optimizer_ends(trial, made)
    assert library.steps == 50


def test_two_optimizers_made_since_count_once(library):
    clock = Clock(library)
    for trial in range(4):
        made = clock.steps
        for _ in range(5):
            for key in (2 * trial, 2 * trial + 1):
                clock.optimizer_begins(key, key)
                clock.optimizer_ends(key, made)
    assert library.steps == 20


def test_backward_counts_soon_where_an_optimizer_never_steps(library):
    clock = Clock(library)
    clock.leader.hopeful = True
    for _ in range(60):
        clock.backward_begins()
        clock.backward_ends()
    assert library.steps == 51


def test_accumulation_counts_optimizer_steps(library):
    clock = Clock(library)
    clock.leader.hopeful = True
    for _ in range(5):
        for _ in range(8):
            clock.backward_begins()
            clock.backward_ends()
        clock.optimizer_begins(1, 1)
        clock.optimizer_ends(1)
    assert library.steps == 5


def test_loader_epochs(library):
    clock = Clock(library)
    for _ in range(5):
        clock.validation_ends()
        clock.loader_begins(1, 10)
        for _ in range(10):
            clock.optimizer_ends(1)
        clock.validation_begins()
        clock.loader_begins(2, 3)
    assert library.epochs == 4


def test_loader_and_toggle_count_an_epoch_once(library):
    clock = Clock(library)
    for _ in range(5):
        clock.validation_ends()  # train()
        clock.loader_begins(1, 10)
        for step in range(10):
            clock.optimizer_begins(1, 1)
            clock.optimizer_ends(1)
            if step == 4:  # validation in the middle of a pass
                clock.validation_begins()
                clock.validation_ends()
        clock.validation_begins()
    assert library.epochs == 4


def test_toggle_epochs_without_a_loader(library):
    clock = Clock(library)
    for _ in range(5):
        clock.validation_ends()
        for _ in range(6):
            clock.optimizer_begins(1, 1)
            clock.optimizer_ends(1)
        clock.validation_begins()
    assert library.epochs == 4


def test_new_optimizer_over_the_same_parameters_goes_on_and_begins_a_cycle(library):
    clock = Clock(library)
    for cycle in range(5):
        for _ in range(12):
            clock.optimizer_begins(1, 100 + cycle)
            clock.optimizer_ends(1)
    assert (library.steps, library.epochs) == (60, 4)


def test_by_hand_silences_the_guesses(library):
    clock = Clock(library)
    clock.step_by_hand()
    for _ in range(100):
        clock.optimizer_ends(1)
    assert library.steps == 1


def test_requests_are_steps_however_they_overlap():
    output = run(
        """
        import asyncio, threading, strandline
        for _ in range(3):
            with strandline.request():
                loss()
                with strandline.request(): loss()   # part of the request around it
        async def serve(n):
            with strandline.request():
                await asyncio.sleep(0.001 * (n % 3))
        async def all_of_them(): await asyncio.gather(*(serve(n) for n in range(7)))
        asyncio.run(all_of_them())
        def thread():
            with strandline.request(): loss()
        threads = [threading.Thread(target=thread) for _ in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        try:
            with strandline.request(): raise KeyError
        except KeyError: pass
        loss()                                      # the root module's calls are not guessed from then on
        """
    )
    assert output == [3 + 7 + 4 + 1, 0]


def test_no_step_is_guessed_within_the_first_request():
    output = run(
        """
        import strandline
        for _ in range(20):
            with strandline.request():
                for _ in range(12): loss()
        """
    )
    assert output == [20, 0]


def run(source, **env):
    """A program under the hooks with a library that prints its counts at the end."""
    head = f"""
        import sys, os; sys.path[:0] = [{PACKAGE!r}, {os.path.dirname(__file__)!r}]
        import torch
        from fake_library import FakeLibrary
        from strandline import _boot
        library = FakeLibrary()
        assert _boot.start("host", library=library)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        def loss(): return model(torch.randn(2, 4)).sum()
    """
    text = textwrap.dedent(head) + textwrap.dedent(source) + "\nprint(library.steps, library.epochs)\n"
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "strandline:" not in done.stderr, done.stderr
    return [int(word) for word in done.stdout.split()[-2:]]


@pytest.mark.parametrize(
    "source, steps, epochs",
    [
        (
            "opt = torch.optim.SGD(model.parameters(), 0.1)\nfor _ in range(7): loss().backward(); opt.step(); opt.zero_grad()",
            7,
            0,
        ),
        (
            "opt = torch.optim.LBFGS(model.parameters(), max_iter=3)\ndef f(): opt.zero_grad(); l = loss() ** 2; l.backward(); return l\nfor _ in range(4): opt.step(f)",
            4,
            0,
        ),
        (
            "for _ in range(7):\n  loss().backward()\n  with torch.no_grad():\n    for p in model.parameters(): p -= 0.1 * p.grad; p.grad = None",
            6,
            0,
        ),
        ("model.eval()\nwith torch.inference_mode():\n  for _ in range(60): model(torch.randn(2, 4))", 51, 0),
        (
            "opt = torch.optim.AdamW(model.parameters())\nd = torch.utils.data.DataLoader(torch.randn(12, 4), 4)\nfor e in range(4):\n  model.train()\n"
            "  for x in d: model(x).sum().backward(); opt.step()\n  model.eval()\n  with torch.no_grad():\n    for x in torch.utils.data.DataLoader(torch.randn(8, 4), 4): model(x)",
            12,
            3,
        ),
        (
            "opt = torch.optim.SGD(model.parameters(), 0.1)\nfor e in range(4):\n  model.train()\n  for _ in range(3): loss().backward(); opt.step()\n  model.eval(); loss()",
            12,
            3,
        ),
        (
            "opt = torch.optim.SGD(model.parameters(), 0.1)\nteacher = torch.nn.Linear(2, 2)\nfor e in range(6):\n  teacher.eval(); loss().backward(); opt.step()",
            6,
            0,
        ),
        (
            "import strandline\nfor _ in range(5): strandline.step()\nstrandline.epoch()\nwith strandline.phase('validation'): assert library.now == 4\nassert library.now == 0",
            5,
            1,
        ),
    ],
    ids=["sgd", "lbfgs", "by hand sgd", "server", "loaders", "toggles", "teacher", "public functions"],
)
def test_programs(source, steps, epochs):
    assert run(source) == [steps, epochs]


def test_phases():
    run(
        """
        opt = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        model[0].register_full_backward_hook(lambda *a: seen.append(library.now))
        l = loss(); seen.append(library.now); l.backward(); seen.append(library.now); opt.step(); seen.append(library.now)
        model.eval(); seen.append(library.now); model.train(); seen.append(library.now)
        assert seen == [0, 2, 1, 1, 4, 1], seen
        """
    )


def test_exceptions_of_the_user_pass_through_unchanged():
    run(
        """
        import traceback
        opt = torch.optim.SGD(model.parameters(), 0.1)
        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x * 1
            @staticmethod
            def backward(ctx, g): raise KeyError("mine")
        for _ in range(3):
            try:
                Bad.apply(loss()).backward()
            except KeyError as error:
                ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith("_hooks.py")]
                assert len(ours) <= 1, ours
            else:
                raise SystemExit("swallowed")
        loss().backward(); opt.step()
        assert library.now == 1
        """
    )


def test_forked_children_are_inert():
    assert run(
        """
        opt = torch.optim.SGD(model.parameters(), 0.1)
        loss().backward(); opt.step()
        child = os.fork()
        if child == 0:
            for _ in range(3): opt.step(); model.eval(); model.train()
            os._exit(library.steps)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        """
    ) == [1, 0]


def test_no_object_of_the_users_is_kept():
    run(
        """
        import weakref, gc
        gc.disable()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        loss().backward(); opt.step()
        d = torch.utils.data.DataLoader(torch.randn(12, 4), 4); next(iter(d)); model.eval()
        known = [weakref.ref(x) for x in (opt, model, d, d.dataset, model[0].weight)]
        del loss, opt, model, d
        gc.collect()
        assert [k() for k in known] == [None] * 5, known
        """
    )


def test_compiled_code_has_no_graph_break():
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    except Exception:
        pytest.skip("torch.compile does not work here")
    assert (
        run(
            """
        opt = torch.optim.SGD(model.parameters(), 0.1)
        whole = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(4):
            whole(torch.randn(2, 4)).sum().backward(); opt.step(); opt.zero_grad()
        stepping = torch.compile(lambda: opt.step(), backend="eager")
        whole(torch.randn(2, 4)).sum().backward(); stepping()
        """
        )[0]
        >= 4
    )


def test_server_hooks_do_not_break_graphs():
    assert (
        run(
            """
        whole = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            for _ in range(60): whole(torch.randn(2, 4))
        """
        )[0]
        >= 40
    )


def test_without_the_library():
    text = f"""
import sys; sys.path.insert(0, {PACKAGE!r})
import strandline
assert "torch" not in sys.modules
strandline.step(); strandline.epoch(); strandline.phase("validation")
with strandline.phase("forward"): pass
assert strandline.report() is False and not strandline.active() and strandline.stats() == {{}}
try: strandline.install()
except ImportError as error: assert "strandline run" in str(error)
else: raise SystemExit("no error")
"""
    env = {key: value for key, value in os.environ.items() if key not in ("STRANDLINE_LIB", "LD_PRELOAD")}
    subprocess.run([sys.executable, "-c", text], check=True, env=env)


def test_ranks():
    assert MODULE < GRAPH < BACKWARDS < STEPPER
