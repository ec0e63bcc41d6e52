"""The pytest plugin: tests that fail when what they repeat leaves memory behind.

    @pytest.mark.strandline(max_growth="0 B/step", steps=20)
    def test_step():            # called `warmup` times, then `steps` times more
        train_step()

    def test_loop(strandline_steps):
        for _ in strandline_steps(20, max_growth="0 B/step"):
            train_step()

Must not know: how memory is accounted.
Invariant: does nothing, imports nothing of strandline and starts nothing unless a test is marked, the fixture is
used, or pytest was given --strandline.
"""

import gc
import inspect
import os
import re
import statistics
import sys
import tempfile
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, NoReturn, Optional

import pytest

_RESTARTED = "STRANDLINE_PYTEST"
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


class Limit(NamedTuple):
    """What a marker or a call of the fixture asks for."""

    max_growth: float  # bytes per step
    steps: int
    warmup: int


_ARGUMENTS = "max_growth='0 B/step', steps=20, warmup=3"


def limit(max_growth: Any = "0 B/step", steps: int = 20, warmup: int = 3) -> Limit:
    """Reads the arguments of the marker; ValueError says what is wrong with them."""
    if isinstance(max_growth, (int, float)) and not isinstance(max_growth, bool):
        growth = float(max_growth)
    else:
        read = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*/\s*step\s*", str(max_growth))
        if read is None or read.group(2).lower() not in _UNITS:
            raise ValueError(f'max_growth is for example "0 B/step" or "1.5 KiB/step", not {max_growth!r}')
        growth = float(read.group(1)) * _UNITS[read.group(2).lower()]
    if not isinstance(steps, int) or steps < 5:
        raise ValueError(f"steps is at least 5, not {steps!r}: fewer cannot tell growth from chance")
    if not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"warmup is a number of steps, not {warmup!r}")
    if growth < 0:
        raise ValueError("max_growth is not negative")
    return Limit(growth, steps, warmup)


# ---- pytest's hooks -------------------------------------------------------------------------------------


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("strandline", "memory that stays behind (strandline)")
    group.addoption(
        "--strandline",
        action="store_true",
        help="start pytest again with strandline's library preloaded, so that marked tests are measured",
    )
    group.addoption(
        "--strandline-mode",
        choices=["auto", "heap", "observer", "host"],
        help="where strandline's events come from (auto: a GPU if there is one, else CPU tensors)",
    )
    group.addoption(
        "--strandline-strict",
        action="store_true",
        help="marked tests fail, instead of being skipped, where they cannot be measured",
    )
    parser.addini("strandline", "as --strandline", type="bool", default=False)
    parser.addini("strandline_mode", "as --strandline-mode", default="")
    parser.addini("strandline_strict", "as --strandline-strict", type="bool", default=False)


def pytest_configure(config: Any) -> None:
    config.addinivalue_line(
        "markers",
        f"strandline({_ARGUMENTS}): call the test again and again and fail if memory "
        "that it allocates stays behind",
    )


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: Any, parser: Any, args: Any) -> Iterator[None]:
    # Before output is captured: a new program would write into files that nobody reads.
    if _asked(early_config, "strandline") and not _there():
        _restart(early_config)
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    marker = item.get_closest_marker("strandline")
    if marker is None:
        return
    _limit_of(marker)
    if not isinstance(item, pytest.Function) or hasattr(item, "_testcase") or _is_unittest(item):
        _fail("strandline measures test functions and methods of plain classes, not unittest.TestCase")
    if inspect.iscoroutinefunction(item.obj):
        _fail(
            "strandline calls a test again and again, which it cannot do with a coroutine; use strandline_steps"
        )
    if not _asked(item.config, "strandline_strict"):
        _require(item.config)  # else the test fails when it is called, which pytest tells from an error


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Optional[bool]:
    marker = pyfuncitem.get_closest_marker("strandline")
    if marker is None:
        return None
    _require(pyfuncitem.config)
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    for _ in _Steps(_limit_of(marker)):
        pyfuncitem.obj(**arguments)
    return True


@pytest.fixture
def strandline_steps(request: Any) -> Iterator[Callable[..., Iterator[int]]]:
    """`for n in strandline_steps(20, max_growth="0 B/step", warmup=3): …` fails if the body leaves memory behind."""
    _require(request.config)
    begun: List[_Steps] = []

    def steps(steps: int = 20, max_growth: Any = "0 B/step", warmup: int = 3) -> Iterator[int]:
        begun.append(_Steps(limit(max_growth, steps, warmup)))
        return iter(begun[-1])

    yield steps
    for one in begun:
        if not one.ended:
            _fail("the loop over strandline_steps was left early, so nothing was measured")


# ---- getting the library in -----------------------------------------------------------------------------


def _is_unittest(item: Any) -> bool:
    unittest = sys.modules.get("unittest")
    return unittest is not None and item.cls is not None and issubclass(item.cls, unittest.TestCase)


def _fail(text: str) -> NoReturn:
    pytest.fail(text, pytrace=False)


def _limit_of(marker: Any) -> Limit:
    try:
        inspect.signature(limit).bind(*marker.args, **marker.kwargs)
    except TypeError as wrong:
        _fail(f"pytest.mark.strandline({_ARGUMENTS}): {wrong}")
    try:
        return limit(*marker.args, **marker.kwargs)
    except ValueError as wrong:
        _fail(f"pytest.mark.strandline: {wrong}")


def _asked(config: Any, name: str) -> bool:
    given = getattr(config.known_args_namespace, name, None)
    return bool(given or config.getini(name))


def _there() -> bool:
    """Whether the library was preloaded into this process."""
    return "libstrandline" in os.environ.get("LD_PRELOAD", "") and _library_here() is not None


def _library_here() -> Any:
    from . import _library

    return _library.find()


def _require(config: Any) -> None:
    """Returns if this process accounts; else skips the test, or fails it."""
    why = _missing()
    if why is None:
        return
    if _asked(config, "strandline_strict"):
        _fail(f"strandline: {why}")
    pytest.skip(f"strandline: {why}")


def _missing() -> Optional[str]:
    library = _library_here()
    if library is None:
        if os.environ.get(_RESTARTED):
            return "the library was preloaded and is not in this process; see strandline doctor"
        return "its library is not in this process; run pytest --strandline, or strandline run -- pytest"
    if library.mode() <= 0:
        try:
            import torch  # noqa: F401  accounting begins when torch is imported
        except ImportError as failure:
            return f"torch cannot be imported ({failure})"
    if library.mode() <= 0:
        return "it does not account here (STRANDLINE_MODE=off, or a forked process)"
    return None


def _restart(config: Any) -> None:
    """Replaces this process by the same one under the library. Returns only if that cannot be done."""
    from . import _library

    called = os.path.basename(sys.argv[0])
    library = next(iter(_library._places()), None)
    if os.environ.get(_RESTARTED) or hasattr(config, "workerinput"):
        return
    if called not in ("pytest", "py.test", "__main__.py"):
        _say(f"pytest was called by {called}, which is not started again; use strandline run -- {called}")
        return
    if library is None or not os.path.isfile(library):
        _say("libstrandline.so was not found; install the wheel, or name the file in STRANDLINE_LIB")
        return
    library = os.path.abspath(library)
    mode = getattr(config.known_args_namespace, "strandline_mode", None) or config.getini("strandline_mode")
    environment = dict(os.environ)
    environment.setdefault("STRANDLINE_OUT", os.path.join(os.getcwd(), "strandline-out", "pytest"))
    environment.setdefault("STRANDLINE_QUIET", "1")
    if mode:
        environment["STRANDLINE_MODE"] = mode
    environment.update(
        {
            _RESTARTED: "1",
            "STRANDLINE_JOB": str(os.getpid()),
            "LD_PRELOAD": ":".join([library, *filter(None, [os.environ.get("LD_PRELOAD")])]),
        }
    )
    original = list(getattr(sys, "orig_argv", ()))
    arguments = original[1:] if original else ["-m", "pytest", *sys.argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    except OSError as failure:
        _say(f"pytest could not be started again ({failure}); use strandline run -- pytest")


def _say(text: str) -> None:
    sys.stderr.write(f"strandline: {text}\n")


# ---- measuring ------------------------------------------------------------------------------------------


class _Steps:
    """Iterates `warmup + steps` times, notes what is allocated after each, and judges at the end."""

    def __init__(self, asked: Limit) -> None:
        self.asked = asked
        self.ended = False

    def __iter__(self) -> Iterator[int]:
        import strandline

        level = _gauge()
        levels: List[int] = []
        cold = gc.get_freeze_count() == 0  # a program that freezes objects itself is left alone
        try:
            for n in range(self.asked.warmup + self.asked.steps):
                if n == self.asked.warmup:
                    gc.collect()
                    levels.append(level())
                if cold:
                    gc.freeze()  # collecting then looks at what the step made only
                yield n
                gc.collect()
                if cold:
                    gc.unfreeze()  # a holder is not found among what is frozen
                strandline.step()
                if n >= self.asked.warmup:
                    levels.append(level())
        finally:
            if cold:
                gc.unfreeze()
        self.ended = True
        growth = growth_of(levels)
        if growth > self.asked.max_growth:
            _fail(_message(growth, levels, self.asked))


def growth_of(levels: List[int]) -> float:
    """Bytes per step: the median of the slopes of all pairs, and no more than the floor rises. So neither one
    jump, nor a cache that is filled and emptied, is growth."""
    n = len(levels)
    slopes = [(levels[j] - levels[i]) / (j - i) for i in range(n) for j in range(i + 1, n)]
    quarter = max(1, n // 4)
    floor = (min(levels[-quarter:]) - min(levels[:quarter])) / (n - quarter)
    return max(0.0, min(statistics.median(slopes), floor))


def _gauge() -> Callable[[], int]:
    """A function that tells the bytes that tensors occupy now."""
    import strandline

    key = "requested_bytes.all.current"
    if _library_here().mode() == 3:  # host
        return lambda: int(strandline.stats(-1)[key])
    import torch

    def on_gpus() -> int:
        torch.cuda.synchronize()
        return sum(torch.cuda.memory_stats(device).get(key, 0) for device in range(torch.cuda.device_count()))

    return on_gpus


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _message(growth: float, levels: List[int], asked: Limit) -> str:
    lines = [
        f"memory grows by {_size(growth)}/step; {_size(asked.max_growth)}/step are allowed "
        f"(from {_size(levels[0])} to {_size(levels[-1])} in {asked.steps} steps)"
    ]
    report = _report()
    since = report.get("run", {}).get("steps", 0) - asked.steps
    for finding in report.get("findings", []):
        if finding.get("last_step", 0) >= since:
            lines += _finding(finding)
    left: Dict[str, List[int]] = {}
    for site in report.get("sites", []):
        at = site.get("allocated_at") or next(iter(site.get("stack", [])), None)
        place = f"{at['file']}:{at['line']} in {at['function']}" if at else "an unknown place"
        total = left.setdefault(place, [0, 0])
        for born in site.get("generations", []):
            if born["first"] >= since:
                total[0] += born["bytes"]
                total[1] += born["blocks"]
    for place, (size, blocks) in sorted(left.items(), key=lambda one: -one[1][0])[:5]:
        if size > 0:
            lines.append(f"  left behind   {_size(size)} in {blocks} blocks, allocated at {place}")
    return "\n".join(lines)


def _finding(finding: Dict[str, Any]) -> List[str]:
    lines = []
    if finding.get("held_by"):
        lines.append(f"  held by       {finding['held_by']['path']}")
    kept = finding.get("kept_at")
    if kept:
        lines.append(f"  kept alive at {kept['file']}:{kept['line']}    {kept['code'].strip()}")
    if finding.get("fix"):
        lines.append(f"  fix           {finding['fix']}")
    return lines


def _report() -> Dict[str, Any]:
    import json

    import strandline

    from . import _boot

    try:
        clock = _boot.clock()
        if clock is not None and clock.explain is not None:
            clock.explain()
        with tempfile.TemporaryDirectory(prefix="strandline-") as folder:
            if strandline.report(folder):
                with open(os.path.join(folder, "report.json"), encoding="utf-8") as file:
                    return dict(json.load(file))
    except (OSError, ValueError) as failure:
        _say(f"no report for the message: {failure}")
    return {}
