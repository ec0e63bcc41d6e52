"""Times captures at given depths; run by benches/stacks.rs: `python stacks_bench.py PROBE`."""

import ctypes
import sys

probe = ctypes.CDLL(sys.argv[1])  # without the GIL, as an allocation in a training job
probe.probe_time.argtypes = [ctypes.c_uint32, ctypes.c_bool]
probe.probe_time.restype = ctypes.c_double
starting = ctypes.PyDLL(sys.argv[1]).probe_start  # with the GIL
starting.argtypes, starting.restype = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool], ctypes.c_void_p
method = ctypes.cast(starting(64, 65_536, True), ctypes.c_char_p).value.decode()
assert "by offsets" in method, method

# The frames already there: <module> and `measure`.
BASE = 2


def recursive(n, native):
    return recursive(n - 1, native) if n else probe.probe_time(200_000, native)


scope = {"probe": probe}
for i in range(64):
    inner = f"level{i - 1}(native)" if i else "probe.probe_time(200_000, native)"
    exec(f"def level{i}(native):\n    a = {i}\n    return {inner}", scope)


def measure(kind, depth, native=False):
    if kind == "recursive":
        return recursive(depth - BASE - 1, native)
    return scope[f"level{depth - BASE - 1}"](native)


for kind in ("distinct", "recursive"):
    cells = [f"{measure(kind, depth):7.1f}" for depth in (3, 13, 23, 43)]
    print(f"{kind:<10}", *cells, f"  {measure(kind, 23, True):7.1f}")
