"""RMM on strandline's heap: a loop that leaks, found with its Python line.

    strandline run --mode heap -- python examples/frameworks/rmm_resource.py

Whatever takes its memory from RMM's current resource (cuDF, cuML, CuPy through rmm) is served and accounted.
RMM calls a Python function for each block: for finding leaks, not for production.
"""

import ctypes
import sys

import rmm

STEPS = 60
library = ctypes.CDLL(None)  # preloaded by `strandline run`
if not hasattr(library, "strandline_open"):
    sys.exit("run this under strandline: strandline run --mode heap -- python " + sys.argv[0])
library.strandline_error.restype = ctypes.c_size_t
library.strandline_malloc.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
library.strandline_free.argtypes = [ctypes.c_void_p]
library.strandline_record_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]


def check(code):
    if code < 0:
        text = ctypes.create_string_buffer(2048)
        library.strandline_error(text, ctypes.c_size_t(len(text)))
        raise MemoryError(text.value.decode())


def handle(stream):
    """The cudaStream_t of an rmm.pylibrmm.stream.Stream, by the protocol of cuda.core."""
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]
    if stream.is_default():
        return 0
    raise RuntimeError(
        "this RMM does not say what its streams are; use the default stream, or RMM 25.06 or newer"
    )


def allocate(size, stream):
    block = ctypes.c_void_p()
    check(library.strandline_malloc(0, size, handle(stream), ctypes.byref(block)))
    return block.value


def deallocate(block, size, stream):
    check(library.strandline_record_stream(block, handle(stream)))  # freed in this stream's order
    check(library.strandline_free(block))


check(library.strandline_open(0, None))
rmm.mr.set_current_device_resource(rmm.mr.CallbackMemoryResource(allocate, deallocate))
history = []


def step():
    scratch = rmm.DeviceBuffer(size=4 << 20)
    history.append(rmm.DeviceBuffer(size=64 << 10))  # the leak
    return scratch.size


total = 0
for _ in range(STEPS):
    total += step()
    library.strandline_step()
print(f"total {total}, kept {len(history)}")
