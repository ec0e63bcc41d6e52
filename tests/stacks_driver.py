"""Compares strandline's stacks with the interpreter's own frames, situation by situation.

Run by tests/stacks_python.rs under every interpreter that it finds: `python stacks_driver.py PROBE`.
Prints one line a check and exits 1 if one failed.
"""

import asyncio
import ctypes
import functools
import gc
import os
import sys
import sysconfig
import threading
import traceback

PROBE = sys.argv[1]
OLD = sys.version_info < (3, 11)


def load(kind):
    probe = kind(PROBE)
    for name in ("probe_start", "probe_frames", "probe_allocated_at"):
        getattr(probe, name).restype = ctypes.c_void_p
    probe.probe_start.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    for name in ("probe_capture", "probe_capture_native"):
        getattr(probe, name).restype = ctypes.c_uint32
    for name in ("probe_frames", "probe_allocated_at"):
        getattr(probe, name).argtypes = [ctypes.c_uint32]
    return probe


held = load(ctypes.PyDLL)  # calls with the GIL
free = load(ctypes.CDLL)  # gives the GIL up during a call


def text(address):
    return ctypes.cast(address, ctypes.c_char_p).value.decode()


def frames(stack):
    """[(kind, user, line, function, file)], innermost first."""
    lines = text(held.probe_frames(stack)).split("\n")
    rows = [line.split("\t") for line in lines if line]
    return [(row[0], row[1] == "true", int(row[2]), row[3], row[4]) for row in rows]


def told(frame):
    """The same from the interpreter's own frames, from `frame` outwards."""
    rows = []
    while frame is not None:
        code = frame.f_code
        name = code.co_name if OLD else code.co_qualname
        rows.append((frame.f_lineno, name, code.co_filename))
        frame = frame.f_back
    return rows


def python_rows(stack):
    return [(line, name, file) for kind, _, line, name, file in frames(stack) if kind == "P"]


FAILED = []
CHECKS = []


def check(name, ok, *details):
    CHECKS.append(name)
    print("ok  " if ok else "FAIL", name, *([] if ok else details), flush=True)
    if not ok:
        FAILED.append(name)


SEEN = []


def here(*_):
    """Captures with and without the GIL and compares with the chain of frames."""
    for probe in (held, free):
        stack, truth = probe.probe_capture(), told(sys._getframe())[:64]
        rows = python_rows(stack)
        SEEN.append(rows[:64] == truth and stack != 0)
        if SEEN.count(False) == 1 and not SEEN[-1]:
            print("     seen", rows[:4], "\n     told", truth[:4])
    return stack


def situation(function):
    """Every capture within `function` must have agreed, and there must have been some."""
    SEEN.clear()
    try:
        function()
    except Exception:
        traceback.print_exc()
        SEEN.append(False)
    check(function.__name__, bool(SEEN) and all(SEEN), f"{SEEN.count(False)} of {len(SEEN)} were wrong")


def nested_calls():
    def a():
        return b()

    def b():
        return (lambda: here(
            1
        ))()

    a()


def generators():
    def inner():
        yield here()
        yield here()

    def outer():
        yield from inner()
        yield here()

    list(outer())
    sum(here() for _ in range(3))


def coroutines():
    async def leaf():
        await asyncio.sleep(0)
        return here()

    async def numbers():
        for i in range(2):
            here()
            yield i

    async def main():
        await asyncio.gather(leaf(), leaf())
        async for _ in numbers():
            here()
        async with Context():
            here()

    class Context:
        async def __aenter__(self):
            here()

        async def __aexit__(self, *_):
            here()

    asyncio.run(main())


def callbacks_from_c():
    sorted([3, 1, 2], key=lambda x: (here(), x)[1])
    list(map(here, range(2)))
    functools.reduce(lambda a, b: (here(), a + b)[1], [1, 2, 3])

    class Odd:
        def __init__(self):
            here()

        def __eq__(self, other):
            here()
            return True

        def __del__(self):
            here()

        def __getattr__(self, name):
            here()
            return 1

        @property
        def prop(self):
            return here()

        def __call__(self):
            return here()

        def __enter__(self):
            here()

        def __exit__(self, *_):
            here()

    odd = Odd()
    assert [odd].index(Odd()) == 0
    odd.missing
    odd.prop
    odd()
    with odd:
        pass
    type("Made", (), {"__init_subclass__": classmethod(here)})
    exec("class Sub(Base): pass", {"Base": type("Base", (), {"__init_subclass__": classmethod(here)})})
    del odd
    gc.collect()


def comprehensions():
    [here() for _ in range(2)]
    {i: here() for i in range(2)}
    [[here() for _ in range(2)] for _ in range(2)]


def threads():
    def work():
        for _ in range(50):
            here()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def exceptions():
    def fails():
        try:
            raise ValueError
        except ValueError:
            here()
            raise
        finally:
            here()

    try:
        fails()
    except ValueError:
        here()


def closures_and_decorators():
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*arguments, **named):
            return function(*arguments, **named)

        return wrapper

    value = 5

    @decorate
    def inner(first, *rest, key=None):
        here()
        return value + first

    inner(1, 2, key=3)


def executed_code():
    exec(compile("def f():\n\n    here()\nf()\n", "typed.py", "exec"), {"here": here})
    eval("here()", {"here": here})
    exec("here()", {"here": here})


def names_outside_ascii():
    for name in ("plätze", "функция", "関数", "\U00020000x"):
        source = f"def {name}():\n  return here()\n{name}()\n"
        exec(compile(source, f"{name}.py", "exec"), {"here": here})


def long_functions():
    body = "\n".join(f"    x = [{i},\n      here() if {i} % 97 == 0 else 0]" for i in range(700))
    exec(compile("def f():\n" + body + "\nf()\n", "long.py", "exec"), {"here": here})
    gaps = "def f():\n" + "\n" * 3000 + "    here()\n" + "\n" * 200 + "    here()\nf()\n"
    exec(compile(gaps, "gaps.py", "exec"), {"here": here})


def recursion_below_the_bound():
    def down(n):
        return down(n - 1) if n else here()

    down(30)


def deep_recursion():
    def down(n):
        return down(n - 1) if n else (held.probe_capture(), told(sys._getframe()))

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    stack, truth = down(2000)
    sys.setrecursionlimit(before)
    rows = python_rows(stack)
    SEEN.append(rows[:64] == truth[:64] and len(rows) == 65)
    SEEN.append(rows[64] == (0, "(deeper frames were not kept)", "<strandline>"))


def same_place_same_stack():
    def one():
        return held.probe_capture()

    stacks = {one() for _ in range(100)}
    SEEN.append(len(stacks) == 1)
    # Two calls on one line are one place for a reader, two lines are two.
    a, b = one(), one()
    c = one()
    SEEN.append(a == b and a != c)


def code_made_again_at_the_same_address():
    """Code objects that are freed and made anew: other name, file or line, often at the same address."""
    addresses, reused = set(), 0
    for i in range(400):
        file, name, gap = f"/x/made{i % 7}.py", f"made{i % 5}", "\n" * (i % 3)
        scope = {"capture": held.probe_capture, "sys": sys}
        source = f"def {name}():\n{gap}  return capture(), sys._getframe().f_lineno\ngot = {name}()\n"
        code = compile(source, file, "exec")
        exec(code, scope)
        address = id(scope[name].__code__)
        reused += address in addresses
        addresses.add(address)
        stack, line = scope["got"]
        row = python_rows(stack)[0]
        SEEN.append(row == (line, name, file))
        if SEEN.count(False) == 1 and not SEEN[-1]:
            print("     seen", row, "told", (line, name, file))
        scope.clear()
        del code, scope
    # The lines of a body whose names and length stay the same.
    for i in range(400):
        source = "\n" * (i % 11) + "pass\n" + "\n" * (i % 2) + "got = capture()\n"
        scope = {"capture": held.probe_capture}
        exec(compile(source, "<string>", "exec"), scope)
        row = python_rows(scope["got"])[0]
        SEEN.append(row[0] == i % 11 + i % 2 + 2)
    print("     addresses used again:", reused)
    SEEN.append(reused > 10)


def who_wrote_it():
    here_file = os.path.abspath(__file__)
    stdlib = sysconfig.get_path("stdlib")
    got = []
    sorted_by = functools.cmp_to_key(lambda a, b: got.append(held.probe_capture()) or 0)
    sorted([1, 2], key=sorted_by)
    queue = threading.Thread(target=lambda: got.append(held.probe_capture()))
    queue.start()
    queue.join()
    blamed = [text(held.probe_allocated_at(stack)) for stack in got]
    SEEN.append(all(os.path.abspath(b.split(":")[0]) == here_file for b in blamed))
    library = [user for _, user, _, _, file in frames(got[-1]) if file.startswith(stdlib)]
    SEEN.append(bool(library) and not any(library))
    exec(compile("got.append(capture())", "/v/lib/python3.9/site-packages/torch/nn/m.py", "exec"),
         {"got": got, "capture": held.probe_capture})
    SEEN.append("who_wrote_it" in text(held.probe_allocated_at(got[-1])))


def a_thread_without_python():
    """A thread that Python does not know has no Python frames, and says so without a crash."""
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    start = ctypes.cast(free.probe_capture_to, ctypes.c_void_p)
    result = ctypes.c_uint32(0xFFFF_FFF0)
    assert libc.pthread_create(ctypes.byref(thread), None, start, ctypes.byref(result)) == 0
    assert libc.pthread_join(thread, None) == 0
    rows = frames(result.value) if result.value else []
    SEEN.append(all(row[0] == "N" for row in rows) and result.value != 0xFFFF_FFF0)


def main():
    method = text(held.probe_start(64, 20_000))
    print(sys.version.split()[0], method)
    check("method", "by offsets" in method, method)
    check("started_twice", text(held.probe_start(64, 20_000)) == method)
    for function in (
        nested_calls, generators, coroutines, callbacks_from_c, comprehensions, threads, exceptions,
        closures_and_decorators, executed_code, names_outside_ascii, long_functions,
        recursion_below_the_bound, deep_recursion, same_place_same_stack,
        code_made_again_at_the_same_address, who_wrote_it, a_thread_without_python,
    ):
        situation(function)
    print(f"{len(CHECKS) - len(FAILED)} passed, {len(FAILED)} failed")
    sys.exit(bool(FAILED))


main()
