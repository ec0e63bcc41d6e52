"""The pytest plugin, driven as a user would: pytest in a process of its own."""

import os
import subprocess
import textwrap

import pytest
from runner import COMMAND, ROOT

SUITE = """
    import gc
    import pytest, torch

    kept = []
    net = torch.nn.Linear(8, 8)

    @pytest.mark.strandline(max_growth="0 B/step", steps=20)
    def test_clean():
        net(torch.ones(4, 8)).sum().backward()

    @pytest.mark.strandline(max_growth="0 B/step", steps=20)
    def test_leaky():
        kept.append(torch.ones(1000))

    @pytest.mark.strandline(max_growth="5 KiB/step", steps=20)
    def test_allowed():
        kept.append(torch.ones(1000))

    @pytest.mark.strandline
    def test_cycle():
        a = [torch.ones(1000)]
        a.append(a)

    cache = {}
    calls = []

    @pytest.mark.strandline(steps=20)
    def test_bounded():
        calls.append(1)
        cache[len(calls) % 3] = torch.ones(100 * (len(calls) % 3 + 1))

    @pytest.mark.strandline(steps=20, warmup=0)
    def test_one_jump():
        calls.append(2)
        if calls.count(2) == 7:
            cache["jump"] = torch.ones(5000)

    @pytest.mark.parametrize("size", [10, 20])
    @pytest.mark.strandline(steps=5)
    def test_arguments(size, tmp_path):
        torch.ones(size)

    def test_fixture_clean(strandline_steps):
        for n in strandline_steps(20):
            torch.ones(100)

    def test_fixture_leaky(strandline_steps):
        for n in strandline_steps(20, max_growth="1 B/step", warmup=2):
            kept.append(torch.ones(2000))

    def test_fixture_left_early(strandline_steps):
        for n in strandline_steps(20):
            break

    def test_unmarked():
        kept.append(torch.ones(10))

    class TestMethods:
        @pytest.mark.strandline(steps=6)
        def test_method(self):
            kept.append(torch.ones(512))
"""


@pytest.fixture
def run(tmp_path):
    def run(text, *options, ini="", env=None, program=None):
        (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
        (tmp_path / "pytest.ini").write_text("[pytest]\n" + ini)
        base = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("STRANDLINE", "PYTEST")) and k != "LD_PRELOAD"
        }
        base.update(
            PYTHONPATH=str(ROOT / "python"),
            STRANDLINE_LIB=str(COMMAND.parent / "libstrandline.so"),
            OMP_NUM_THREADS="1",
            **(env or {}),
        )
        import sys

        command = program or [sys.executable, "-m", "pytest"]
        command = [*command, "-p", "strandline.pytest_plugin", "-p", "no:cacheprovider", "-rA", *options]
        done = subprocess.run(command, cwd=tmp_path, env=base, capture_output=True, text=True, timeout=240)
        results = {}
        for line in done.stdout.splitlines():
            word, _, rest = line.partition(" ")
            if word in ("PASSED", "FAILED", "SKIPPED", "ERROR") and "::" in rest:
                results[rest.split("::", 1)[1].split(" - ")[0]] = word
        return done, results

    return run


def test_marked_tests_are_measured(run, tmp_path):
    done, results = run(SUITE, "--strandline")
    assert results == {
        "test_clean": "PASSED",
        "test_leaky": "FAILED",
        "test_allowed": "PASSED",
        "test_cycle": "PASSED",
        "test_bounded": "PASSED",
        "test_one_jump": "PASSED",
        "test_arguments[10]": "PASSED",
        "test_arguments[20]": "PASSED",
        "test_fixture_clean": "PASSED",
        "test_fixture_leaky": "FAILED",
        "test_fixture_left_early": "PASSED",
        "test_unmarked": "PASSED",
        "TestMethods::test_method": "FAILED",
    } | {"test_fixture_left_early": results["test_fixture_left_early"]}, done.stdout + done.stderr
    assert "left early" in done.stdout
    assert done.returncode == 1
    text = done.stdout
    assert "memory grows by 3.9 KiB/step; 0 B/step are allowed" in text
    assert "memory grows by 7.8 KiB/step; 1 B/step are allowed" in text
    # The kept line is the one that allocates, too.
    line = 1 + textwrap.dedent(SUITE).splitlines().index("    kept.append(torch.ones(1000))")
    assert f"test_it.py:{line} in test_leaky" in text
    assert "left behind" in text and "Traceback" not in text
    assert (tmp_path / "strandline-out" / "pytest").is_dir()


def test_the_holder_is_named(run, tmp_path):
    done, results = run(
        """
        import pytest, torch

        class Trainer:
            def __init__(self):
                self.net = torch.nn.Linear(64, 64)
                self.total = 0

            def step(self):
                loss = self.net(torch.randn(256, 64)).pow(2).mean()
                loss.backward(retain_graph=True)
                self.total += loss

        trainer = Trainer()

        @pytest.mark.strandline(steps=25)
        def test_step():
            trainer.step()
        """,
        "--strandline",
    )
    assert results == {"test_step": "FAILED"}
    for part in ("global trainer.total", "self.total += loss", "kept alive at", "self.total += loss.item()"):
        assert part in done.stdout, done.stdout


def test_without_the_library_marked_tests_are_skipped(run):
    done, results = run(SUITE)
    assert results["test_unmarked"] == "PASSED"
    assert done.returncode == 0
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert skipped and all("pytest --strandline" in line for line in skipped)
    assert "FAILED" not in done.stdout
    assert "libstrandline" not in done.stderr


def test_strict_fails_them(run):
    done, results = run(SUITE, "-k", "clean or unmarked", ini="strandline_strict = true\n")
    assert results["test_clean"] == "FAILED" and results["test_unmarked"] == "PASSED"
    assert "pytest --strandline" in done.stdout
    done, _ = run(SUITE, "-k", "test_clean", "--strandline-strict")
    assert done.returncode == 1


def test_the_ini_file_and_strandline_run_do_too(run):
    some = ["-k", "test_clean or test_leaky"]
    _, results = run(SUITE, *some, ini="strandline = true\n")
    assert results == {"test_clean": "PASSED", "test_leaky": "FAILED"}
    import sys

    program = [str(COMMAND), "run", "--quiet", "--mode", "host", "--", sys.executable, "-m", "pytest"]
    _, results = run(SUITE, *some, program=program)
    assert results == {"test_clean": "PASSED", "test_leaky": "FAILED"}


def test_wrong_markers_are_refused(run):
    done, results = run(
        """
        import pytest, unittest
        @pytest.mark.strandline(max_growth="much")
        def test_growth(): pass
        @pytest.mark.strandline(steps=2)
        def test_steps(): pass
        @pytest.mark.strandline(max_grwth="0 B/step")
        def test_name(): pass
        class TestOld(unittest.TestCase):
            @pytest.mark.strandline
            def test_old(self): pass
        @pytest.mark.strandline
        async def test_async(): pass
        """,
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout
    named = "strandline(max_growth='0 B/step', steps=20, warmup=3): got an unexpected keyword argument 'max_grwth'"
    for part in ('"0 B/step"', "at least 5", named, "unittest.TestCase", "coroutine"):
        assert part in done.stdout, (part, done.stdout)
    assert "limit()" not in done.stdout
    assert "PASSED" not in results.values()


def test_unused_it_does_nothing(run):
    done, results = run(
        """
        import sys
        def test_nothing_is_imported():
            assert "torch" not in sys.modules
            ours = [name for name in sys.modules if name.startswith("strandline")]
            assert sorted(ours) == ["strandline", "strandline.pytest_plugin"]
        """
    )
    assert results == {"test_nothing_is_imported": "PASSED"}, done.stdout
    done, _ = run("def test_x(): pass", "--markers")
    assert "strandline(max_growth='0 B/step'" in done.stdout


def test_output_exit_code_and_capture_are_as_ever(run):
    text = """
        import sys
        def test_out(capfd):
            print("to stdout")
            print("to stderr", file=sys.stderr)
            assert capfd.readouterr() == ("to stdout\\n", "to stderr\\n")
    """
    plain, _ = run(text, "-q")
    ours, _ = run(text, "-q", "--strandline")
    assert (plain.returncode, ours.returncode) == (0, 0)
    assert ours.stderr == plain.stderr
    assert ours.stdout.splitlines()[:-1] == plain.stdout.splitlines()[:-1]
    none, _ = run("", "--strandline")
    assert none.returncode == 5, "no tests"


def test_growth_is_told_from_what_only_looks_like_it():
    import sys

    sys.path.insert(0, str(ROOT / "python"))
    from strandline.pytest_plugin import growth_of, limit

    assert growth_of([n * 100 for n in range(21)]) == 100
    assert growth_of([1000] * 21) == 0
    assert growth_of([0] * 7 + [5000] * 14) == 0
    assert growth_of([n % 5 * 1000 for n in range(21)]) == 0
    assert growth_of([n // 5 * 1000 for n in range(21)]) > 100
    assert growth_of([-n * 100 for n in range(21)]) == 0
    assert limit("1.5 KiB/step").max_growth == 1536
    assert limit(7).max_growth == 7
    for wrong in ({"max_growth": "1 KiB"}, {"max_growth": "1 X/step"}, {"steps": "a"}, {"warmup": -1}):
        with pytest.raises(ValueError):
            limit(**wrong)
