"""Hooks that the job must not notice: no warning, no error, no side effect that it would not have had."""

import os
import subprocess
import sys
import textwrap
import warnings

from strandline import _code
from test_clock import PACKAGE, run


def test_an_empty_first_parameter_group_is_an_optimizer_like_any_other():
    source = """
        opt = torch.optim.SGD([{"params": []}, {"params": list(model.parameters())}], 0.1)
        for _ in range(20): loss().backward(); opt.step(); opt.zero_grad()
    """
    assert run(source)[0] == 20


def test_an_iterable_dataset_is_not_asked_for_its_length():
    source = """
        import warnings; warnings.simplefilter("error")
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self): return iter(torch.randn(12, 4))
            def __len__(self): return 8
        opt = torch.optim.SGD(model.parameters(), 0.1)
        seen = 0
        for x in torch.utils.data.DataLoader(Stream(), batch_size=4):
            model(x).sum().backward(); opt.step(); seen += 1
        assert seen == 3
    """
    assert run(source)[0] == 3


def test_compiled_modules_do_not_warn_of_our_hooks():
    source = """
        import warnings; warnings.simplefilter("error")
        whole = torch.compile(model, backend="eager")
        with torch.no_grad():
            for _ in range(60): whole(torch.randn(2, 4))
    """
    assert run(source)[0] >= 40


def test_parsing_the_users_file_warns_of_nothing_and_keeps_the_filters(tmp_path):
    file = tmp_path / "train.py"
    file.write_text('pattern = "\\d+"\nkept = []\n')
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert _code.File(str(file)).statements
    assert not said
    assert list(warnings.filters) == before


RANK = f"""
    import sys; sys.path[:0] = [{PACKAGE!r}, {os.path.dirname(__file__)!r}]
    import torch
    from fake_library import FakeLibrary
    from strandline import _boot
    library = FakeLibrary()
    started = []
    _boot._is_worker = lambda: True
    _boot._library.load = lambda: library
    assert _boot.start("host") is False
    real = _boot.start
    _boot.start = lambda *args, **rest: started.append(args) or real(*args, **rest)
"""


def worker(source):
    text = textwrap.dedent(RANK) + textwrap.dedent(source)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr


def test_a_rank_with_hooks_of_its_own_trains_undisturbed():
    # torch iterates over its dictionary of hooks while ours runs.
    worker("""
        from torch.optim.optimizer import register_optimizer_step_post_hook as after
        net = torch.nn.Linear(2, 1)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        calls = []
        after(lambda *_: calls.append(1))
        for step in range(5):
            net(torch.ones(1, 2)).sum().backward(); opt.step()
        assert len(calls) == 5 and len(started) == 1, (calls, started)
        assert library.steps == 4, library.steps
    """)


def test_a_worker_that_only_computes_is_left_alone():
    worker("""
        for _ in range(5): torch.nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
        assert not started
    """)


def test_a_rank_begins_before_its_first_use_of_cuda_and_a_loaders_worker_does_not():
    worker("""
        import torch.utils.data._utils.worker as data
        real_init = []
        for watched in (True, False):
            data._worker_info = object() if watched else None
            try: torch.cuda._lazy_init()
            except (RuntimeError, AssertionError) as error: real_init.append(str(error))
            assert len(started) == (0 if watched else 1), started
        assert len(real_init) == 2, "torch's own initialisation was tried both times"
    """)
