"""CuPy on strandline's heap: a loop that leaks, found with its Python line.

    strandline run --mode heap -- python examples/frameworks/cupy_allocator.py

CuPy takes an allocator as two C functions (CFunctionAllocator). Its `param` is the stream here, so that a block
is freed in the order of the stream that it was made for; there is one CFunctionAllocator for each stream.
"""

import ctypes
import sys

import cupy

STEPS = 60
library = ctypes.CDLL(None)  # preloaded by `strandline run`
if not hasattr(library, "strandline_open"):
    sys.exit("run this under strandline: strandline run --mode heap -- python " + sys.argv[0])
library.strandline_error.restype = ctypes.c_size_t


def why():
    text = ctypes.create_string_buffer(2048)
    library.strandline_error(text, ctypes.c_size_t(len(text)))
    return text.value.decode()


def address(name):
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


class Allocator:
    """`cupy.cuda.set_allocator(Allocator(device))`"""

    def __init__(self, device):
        if library.strandline_open(device, None) < 0:
            raise RuntimeError(why())
        self.streams = {}

    def __call__(self, size):
        stream = cupy.cuda.get_current_stream().ptr
        allocator = self.streams.get(stream)
        if allocator is None:
            functions = address("strandline_cupy_malloc"), address("strandline_cupy_free")
            allocator = self.streams[stream] = cupy.cuda.CFunctionAllocator(stream, *functions, library)
        block = allocator.malloc(size)
        if size and not block.ptr:  # CuPy itself would use the null pointer
            raise MemoryError(why())
        return block


cupy.cuda.set_allocator(Allocator(0))
history = []


def step(batch):
    scaled = batch * 2.0
    history.append(scaled.sum(axis=0))  # the leak: 4 KiB of GPU memory a step
    return float(scaled[0, 0])


total = 0.0
for number in range(STEPS):
    total += step(cupy.full((256, 1024), number, dtype=cupy.float32))
    library.strandline_step()
print(f"total {total:.1f}, kept {len(history)}")
