"""The functions that are taken the place of, compared with CUDA's own headers.

Every function of cuda.h and cuda_runtime_api.h that hands memory out or takes it back is either replaced
(src/attach/cuda_api/table.rs) or listed below with the reason why not. A new one in a new CUDA fails here.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess

import pytest
from runner import COMMAND, ROOT

TABLE = (ROOT / "src/attach/cuda_api/table.rs").read_text()
REPLACED = set(re.findall(r'c"(cu(?:Mem|GetProc|da)\w+)" ', TABLE))

VIRTUAL = "physical memory and addresses by hand: whoever calls it is an allocator itself"
OPAQUE = "arrays are opaque and have no address"
PARTS = "pools are made here, blocks come from the functions that are replaced"
GRAPH = "memory of a graph lives inside the graph"
QUERY = "hands nothing out"
FOREIGN = "memory of somebody else, made visible"
BELOW = "reaches cuMemAllocPitch, which is replaced where cudart asks for it; takes a struct by value"
REGISTER = "memory that somebody else has allocated is pinned"

NOT_REPLACED = {
    "cuArrayCreate": OPAQUE, "cuArray3DCreate": OPAQUE, "cuMipmappedArrayCreate": OPAQUE,
    "cudaMallocArray": OPAQUE, "cudaMalloc3DArray": OPAQUE, "cudaMallocMipmappedArray": OPAQUE,
    "cudaFreeArray": OPAQUE, "cudaFreeMipmappedArray": OPAQUE,
    "cudaMalloc3D": BELOW,
    "cuMemCreate": VIRTUAL, "cuMemAddressReserve": VIRTUAL, "cuMemAddressFree": VIRTUAL,
    "cuMemPoolCreate": PARTS, "cudaMemPoolCreate": PARTS,
    "cuGraphAddMemAllocNode": GRAPH, "cuGraphAddMemFreeNode": GRAPH, "cudaGraphAddMemAllocNode": GRAPH,
    "cudaGraphAddMemFreeNode": GRAPH,
    "cuMemHostRegister": REGISTER, "cudaHostRegister": REGISTER,
    "cuMemImportFromShareableHandle": FOREIGN, "cuExternalMemoryGetMappedBuffer": FOREIGN,
}  # fmt: skip

# What a name that hands memory out or takes it back looks like.
MEMORY = re.compile(
    r"^(cuMem(Alloc|Free|HostAlloc|HostRegister|Create|AddressReserve|AddressFree|PoolCreate)\w*"
    r"|cuMemImportFromShareableHandle|cuExternalMemoryGetMappedBuffer"
    r"|cu(Array|Array3D|MipmappedArray)Create\w*"
    r"|cuGraphAddMem(Alloc|Free)Node"
    r"|cuda(Malloc|Free|HostAlloc|HostRegister|MemPoolCreate)\w*|cudaGraphAddMem(Alloc|Free)Node"
    r"|cuGetProcAddress\w*)$"
)


def headers() -> pathlib.Path:
    """The folder of cuda.h, from the wheels that torch needs (nvidia-cuda-runtime), or triton's."""
    for package, path in (("nvidia", "cu13/include"), ("triton", "backends/nvidia/include")):
        spec = importlib.util.find_spec(package)
        for place in spec.submodule_search_locations or [] if spec else []:
            folder = pathlib.Path(place) / path
            if (folder / "cuda.h").is_file() and (folder / "cuda_runtime_api.h").is_file():
                return folder
    pytest.skip("CUDA's headers are in no package here (nvidia-cuda-runtime carries them, torch needs it)")


def declared(name: str) -> set[str]:
    """The functions that a header declares, without comments."""
    text = (headers() / name).read_text(errors="replace")
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    if name == "cuda.h":
        return set(re.findall(r"\bCUresult\s+CUDAAPI\s+(\w+)\s*\(", text))
    return set(re.findall(r"\bcudaError_t\s+CUDARTAPI\s+(\w+)\s*\(", text))


def plain(name: str) -> str:
    return re.sub(r"(_v\d+)?(_ptsz)?$", "", name)


@pytest.mark.parametrize("header", ["cuda.h", "cuda_runtime_api.h"])
def test_every_function_that_allocates_is_known(header):
    functions = declared(header)
    assert len(functions) > 200, f"{header} was not understood"
    of_memory = {plain(name) for name in functions if MEMORY.match(name)}
    known = {plain(name) for name in REPLACED} | set(NOT_REPLACED)
    assert of_memory - known == set(), "neither replaced nor listed with a reason"


def test_nothing_is_listed_that_cuda_does_not_have():
    functions = {plain(name) for name in declared("cuda.h") | declared("cuda_runtime_api.h")}
    assert {plain(name) for name in REPLACED} - functions == set()
    assert set(NOT_REPLACED) - functions == set()


def test_the_versions_are_the_headers_own():
    """`#define cuMemAlloc cuMemAlloc_v2`: the exported name behind each is the one that is replaced."""
    text = (headers() / "cuda.h").read_text(errors="replace")
    for base, exported in re.findall(r"^#\s*define\s+(cu\w+)\s+(cu\w+_v\d+)\s*$", text, re.M):
        if plain(base) in {plain(name) for name in REPLACED}:
            assert exported in REPLACED, f"{base} means {exported} now"
    # Functions with a variant for per-thread default streams have it replaced as well.
    for name in re.findall(r"__CUDA_API_PTSZ\((\w+)\)", text):
        if name in REPLACED:
            assert f"{name}_ptsz" in REPLACED
    runtime = (headers() / "cuda_runtime_api.h").read_text(errors="replace")
    for name in re.findall(r"__CUDART_API_PTSZ\((\w+)\)", runtime):
        if name in REPLACED:
            assert f"{name}_ptsz" in REPLACED


def test_each_is_exported():
    assert len(REPLACED) == 29
    library = COMMAND.parent / "libstrandline.so"
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert REPLACED | {"dlsym"} <= exported
    foreign = {name for name in exported if re.match(r"cu(da)?[A-Z]", name)}
    assert foreign == REPLACED, "something of CUDA's is exported that the table does not list"
