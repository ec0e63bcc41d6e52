"""Makes cuda/guard.ptx from cuda/guard.cu.

    pip install nvidia-cuda-nvrtc-cu12 && python scripts/guard_ptx.py

Needed only after a change of the source. The text is for compute capability 7.0 and PTX 6.4, so that drivers from
CUDA 10.1 on compile it for every GPU from Volta on: NVRTC writes its own, newer version into the header, but uses
nothing of it for this source. `--check PTXAS…` compiles the result with those assemblers.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import hashlib
import importlib.util
import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "cuda"
VERSION = "6.4"
HEADER = "// Made from guard.cu by scripts/guard_ptx.py; do not edit. SHA-256 of the source: {}\n"


def nvrtc() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in glob.glob(f"{place}/cuda_nvrtc/lib/libnvrtc.so.12"):
            return ctypes.CDLL(path)
    sys.exit("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12 (13 has no target for Volta)")


def compiled(source: bytes) -> str:
    library, program = nvrtc(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"guard.cu", 0, None, None)
    options = [b"--gpu-architecture=compute_70", b"--std=c++17"]
    code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if code:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        sys.exit(log.value.decode())
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, text)
    return text.value.decode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", nargs="*", default=[], metavar="PTXAS")
    parser.add_argument("--arch", nargs="*", default=["sm_90"])
    options = parser.parse_args()
    source = (FOLDER / "guard.cu").read_bytes()
    text = compiled(source)
    # The compiler's comment names its build, which is of no use to anybody.
    text = text[text.index(".version") :]
    text = re.sub(r"\.version \S+", f".version {VERSION}", text, count=1)
    path = FOLDER / "guard.ptx"
    path.write_text(HEADER.format(hashlib.sha256(source).hexdigest()) + text.rstrip("\x00\n") + "\n")
    names = re.findall(r"\.entry (\w+)", text)
    print(f"{path}: {len(text)} bytes, {', '.join(names)}")
    for ptxas in options.check:
        for arch in options.arch:
            done = subprocess.run(
                [ptxas, "-v", f"-arch={arch}", "-o", "/dev/null", path], capture_output=True, text=True
            )
            print(f"{ptxas} {arch}: {'ok' if done.returncode == 0 else done.stderr + done.stdout}")


if __name__ == "__main__":
    main()
