"""Compares strandline's stacks with the interpreter's own frames, situation by situation.

Run by tests/stacks_python.rs under every interpreter that it finds: `python stacks_driver.py PROBE`.
Prints one line a check and exits 1 if one failed.
"""

import asyncio
import ctypes
import functools
import gc
import os
import subprocess
import sys
import sysconfig
import threading
import traceback

PROBE = sys.argv[1]
WHOLE = "whole-library" in sys.argv[2:]
OLD = sys.version_info < (3, 11)


def load(kind):
    probe = kind(PROBE)
    for name in ("probe_start", "probe_frames", "probe_allocated_at"):
        getattr(probe, name).restype = ctypes.c_void_p
    probe.probe_start.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool]
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
        return (lambda: here(1))()

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
    exec(
        compile("got.append(capture())", "/v/lib/python3.9/site-packages/torch/nn/m.py", "exec"),
        {"got": got, "capture": held.probe_capture},
    )
    SEEN.append("who_wrote_it" in text(held.probe_allocated_at(got[-1])))


def a_thread_without_python():
    """A thread that Python does not know has native frames instead."""
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    start = ctypes.cast(free.probe_capture_to, ctypes.c_void_p)
    result = ctypes.c_uint32(0xFFFF_FFF0)
    assert libc.pthread_create(ctypes.byref(thread), None, start, ctypes.byref(result)) == 0
    assert libc.pthread_join(thread, None) == 0
    rows = frames(result.value) if result.value else []
    SEEN.append(all(row[0] == "N" for row in rows) and len(rows) >= 2)
    # The probe's own frames are strandline's, and left out.
    SEEN.append("libc.so" in rows[0][4] or "libpthread" in rows[0][4])


def native_frames_before_python():
    def call():
        return held.probe_capture_native(), told(sys._getframe())

    (stack, truth) = call()
    rows = frames(stack)
    native = [row for row in rows if row[0] == "N"]
    SEEN.append("libffi" in native[0][4] or "ffi" in native[0][3])
    SEEN.append(any("ctypes" in row[4] or "ctypes" in row[3] for row in native))
    SEEN.append(not any("EvalFrame" in row[3] for row in native))
    SEEN.append([row[0] for row in rows] == ["N"] * len(native) + ["P"] * (len(rows) - len(native)))
    SEEN.append(python_rows(stack) == truth)
    if not all(SEEN):
        print("    ", SEEN, *(row[3:] for row in rows))
    again = {(held.probe_capture_native(), held.probe_capture()) for _ in range(3)}
    SEEN.append(len(again) == 1 and len(next(iter(again))) == 2)


def a_library_that_comes_and_goes():
    """Native frames stay right while shared objects are loaded and unloaded around them."""
    libdl = ctypes.CDLL(None)
    libdl.dlopen.restype = ctypes.c_void_p
    libdl.dlclose.argtypes = [ctypes.c_void_p]
    names = [b"libutil.so.1", b"librt.so.1", b"libanl.so.1", b"libnsl.so.1", b"libBrokenLocale.so.1"]
    seen = set()
    for name in names * 3:
        for action in (lambda: libdl.dlopen(name, 2), lambda: libdl.dlclose(handle) if handle else None):
            handle = action()
            seen.add(held.probe_capture_native())
    SEEN.append(len(seen) == 1)
    SEEN.append("ffi" in frames(seen.pop())[0][4])


def a_forked_child_is_silent():
    child = os.fork()
    if child == 0:
        held.probe_disable()
        quiet = held.probe_capture() == 0 and held.probe_capture_native() == 0 and frames(1) == []
        os._exit(0 if quiet else 1)
    SEEN.append(os.waitpid(child, 0)[1] == 0 and held.probe_capture() != 0)


def the_end_of_python():
    """Captures in daemon threads while Python ends, and in the process's exit handlers after that."""
    for _ in range(5):
        child = subprocess.run([sys.executable, "-c", ENDING, PROBE], timeout=60)
        SEEN.append(child.returncode == 0)


ENDING = """
import ctypes, sys, threading, time
held, free = ctypes.PyDLL(sys.argv[1]), ctypes.CDLL(sys.argv[1])
held.probe_start.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool]
held.probe_start(64, 20000, True)
def work(n):
    return work(n - 1) if n else free.probe_time(10_000_000, False)
for _ in range(2):
    threading.Thread(target=work, args=(10,), daemon=True).start()
libc = ctypes.CDLL(None)
handler = ctypes.cast(held.probe_capture, ctypes.c_void_p)
getattr(libc, "__cxa_atexit")(handler, None, None)
class Late:
    def __del__(self, capture=held.probe_capture):
        capture()
late = Late()
time.sleep(0.1)
"""


def the_table_is_bounded():
    """Thousands of distinct stacks: the bound holds, and says so."""
    body = "\n".join(f"    got.append(capture()) if n == {i} else None" for i in range(200))
    scope = {"capture": held.probe_capture, "got": []}
    for i in range(150):
        exec(compile(f"def f{i}(n):\n{body}", f"many{i}.py", "exec"), scope)
        for n in range(200):
            scope[f"f{i}"](n)
    figures = (ctypes.c_uint64 * 7)()
    held.probe_stats(figures)
    stacks, _nodes, _distinct, size, _first_sights, overflowed, _forgotten = figures
    print(
        "    ",
        *(
            f"{name} {figure}"
            for name, figure in zip(
                ("stacks", "nodes", "frames", "bytes", "first sights", "overflowed", "forgotten"), figures
            )
        ),
    )
    SEEN.append(stacks <= 20_000 < len(scope["got"]) and overflowed > 0 and scope["got"][-1] == 2**32 - 1)
    SEEN.append(frames(2**32 - 1) == [] and size < 64 << 20)


def line_tables_of_the_standard_library():
    """Every instruction of every function: the decoder against the interpreter's own."""
    minor = sys.version_info[1]
    api = ctypes.pythonapi.PyCode_Addr2Line
    api.argtypes = [ctypes.py_object, ctypes.c_int]
    free.probe_lines.argtypes = [
        ctypes.c_uint32,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_int32),
    ]
    table_name = "co_lnotab" if minor < 10 else "co_linetable"
    folder = sysconfig.get_path("stdlib")
    codes = instructions = wrong = 0

    def one(code):
        nonlocal codes, instructions, wrong
        codes += 1
        count = len(code.co_code) // 2
        table = getattr(code, table_name)
        out = (ctypes.c_int32 * count)()
        assert free.probe_lines(minor, table, len(table), code.co_firstlineno, 2, count, out) == 1
        if minor >= 11:
            truth = [position[0] for position in code.co_positions()]
        elif minor == 10:
            truth = [None] * count
            for start, end, line in code.co_lines():
                truth[start // 2 : end // 2] = [line] * ((end - start) // 2)
        else:
            truth = [api(code, 2 * i) for i in range(count)]
        seen = [None if line == -(2**31) else line for line in out]
        instructions += count
        if seen != truth:
            wrong += 1
            if wrong == 1:
                print("    ", code, [(i, a, b) for i, (a, b) in enumerate(zip(seen, truth)) if a != b][:5])
        for constant in code.co_consts:
            if hasattr(constant, "co_code"):
                one(constant)

    files = 0
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "lib2to3", "idlelib"})
        # The whole library takes a minute: a tenth of the files, another one in each version.
        for name in sorted(names):
            files += 1
            if name.endswith(".py") and (WHOLE or files % 10 == minor % 10):
                try:
                    with open(os.path.join(where, name), "rb") as source:
                        code = compile(source.read(), name, "exec", dont_inherit=True)
                except (SyntaxError, ValueError, RecursionError):
                    continue
                one(code)
    print(f"     {codes} code objects, {instructions} instructions, {wrong} wrong")
    SEEN.append(wrong == 0 and codes > 500)


def by_the_public_api():
    """Without offsets: the same frames with the GIL, none without it (then native ones)."""

    def down(n):
        return down(n - 1) if n else (held.probe_capture(), told(sys._getframe()))

    stack, truth = down(10)
    SEEN.append(python_rows(stack) == truth)
    SEEN.append(len({held.probe_capture() for _ in range(3)}) == 1)
    stack = free.probe_capture()
    SEEN.append(stack != 0 and all(row[0] == "N" for row in frames(stack)))
    for i in range(200):
        scope = {"capture": held.probe_capture}
        source = "\n" * (i % 3) + f"def g{i % 5}(): return capture()\ngot = g{i % 5}()"
        exec(compile(source, f"m{i % 7}.py", "exec"), scope)
        row = python_rows(scope["got"])[0]
        name = row[1].rsplit(".", 1)[-1]
        SEEN.append(row[0] == i % 3 + 1 and name == f"g{i % 5}" and row[2] == f"m{i % 7}.py")
    try:
        raise KeyError(1)
    except KeyError as error:
        held.probe_capture()
        SEEN.append(sys.exc_info()[1] is error)
    deep_recursion()


def main():
    by_offsets = "public-api" not in sys.argv[2:]
    method = text(held.probe_start(64, 20_000, by_offsets))
    print(sys.version.split()[0], method)
    if not by_offsets:
        check("method", "public API" in method, method)
        for function in (by_the_public_api, who_wrote_it, a_thread_without_python, a_forked_child_is_silent):
            situation(function)
    else:
        check("method", "by offsets" in method, method)
        check("started_twice", text(held.probe_start(64, 20_000, True)) == method)
        for function in (
            nested_calls,
            generators,
            coroutines,
            callbacks_from_c,
            comprehensions,
            threads,
            exceptions,
            closures_and_decorators,
            executed_code,
            names_outside_ascii,
            long_functions,
            recursion_below_the_bound,
            deep_recursion,
            same_place_same_stack,
            code_made_again_at_the_same_address,
            who_wrote_it,
            a_thread_without_python,
            native_frames_before_python,
            a_library_that_comes_and_goes,
            a_forked_child_is_silent,
            the_end_of_python,
            line_tables_of_the_standard_library,
            the_table_is_bounded,
        ):
            situation(function)
    print(f"{len(CHECKS) - len(FAILED)} passed, {len(FAILED)} failed")
    sys.exit(bool(FAILED))


main()
