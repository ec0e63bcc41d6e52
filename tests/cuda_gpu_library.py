"""The library that tests/cuda_gpu.py tries, made torch's allocator."""

import ctypes
import importlib.util
import os

HERE = os.path.dirname(os.path.abspath(__file__))


def python_side():
    path = os.path.join(HERE, "..", "python", "strandline", "_torch_cuda.py")
    spec = importlib.util.spec_from_file_location("_torch_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(path):
    library = ctypes.CDLL(path)
    if hasattr(library, "strandline_test_install"):
        library.strandline_test_install()
    else:
        # With the GIL: the stacks' offsets are compared with what Python says.
        assert ctypes.PyDLL(path).strandline_start(1, None) == 0
    return library


def install(path):
    return python_side().install(load(path))
