"""Guard mode on a GPU, over a stand-in for the driver whose memory is real and which runs the very kernels
(cuda/guard.cu, compiled as C)."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from runner import COMMAND, ROOT
from test_c_api import LIBRARY, compiled, run

FAKES = ROOT / "tests" / "fake_cuda"
CC = os.environ.get("CC", "cc")


# What torch needs of CUDA's headers and tools comes with it.
spec = importlib.util.find_spec("torch")
PACKAGES = pathlib.Path(spec.origin).parent.parent if spec else None


def stand_in(folder, *flags):
    library = folder / "libcuda.so.1"
    strict = ["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-shared", "-fPIC"]
    command = [CC, *strict, *flags, "-o", library, FAKES / "libcuda.c", "-ldl", "-lpthread"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    flags = [f"-I{ROOT / 'include'}", f"-L{LIBRARY.parent}", "-lstrandline", "-ldl"]
    how = ("-O1", "-fno-inline", "-std=gnu11", "-Wno-pedantic")
    return compiled(folder, FAKES / "guard_program.c", flags=flags, how=how), stand_in(folder)


def guarded(tmp_path, bench, kind, **settings):
    program, library = bench
    env = {
        "STRANDLINE_GUARD": "1",
        "STRANDLINE_LIBCUDA": str(library),
        "FAKE_CUDA_BACKED": "1",
        "FAKE_CUDA_VERBOSE": "1",
        **settings,
    }
    done = run(tmp_path, program, kind, env=env)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.endswith("misuses: 0\n"), done.stdout + done.stderr
    found = list((tmp_path / "strandline-out").rglob("guard.json"))
    return done, json.loads(found[0].read_text()) if found else []


def key(fault):
    return fault["what"], fault["size"], fault["first"], fault["changed"]


@pytest.mark.parametrize(
    ("kind", "faults", "freed"),
    [
        ("overflow", [("overflow", 1000, 1000, 3)], True),
        ("underflow", [("underflow", 5000001, -16, 16)], True),
        ("both", [("overflow", 5000001, 5000512, 1), ("underflow", 5000001, -512, 1)], True),
        ("live", [("overflow", 5000001, 5000001, 1)], False),
        ("use", [("use-after-free", 1000, 10, 2)], True),
        ("many", [("use-after-free", 5000001, 4000000, 1)], True),
        ("trim", [("use-after-free", 5000001, 3, 1)], True),
    ],
)
def test_a_fault_is_named_with_both_stacks(tmp_path, bench, kind, faults, freed):
    done, seen = guarded(tmp_path, bench, kind)
    assert sorted(map(key, seen)) == faults, done.stderr
    for fault in seen:
        functions = [frame["function"] for frame in fault["allocated"]]
        assert functions[:2] == ["make_on", "make"] and "main" in functions[:3]
        functions = [frame["function"] for frame in fault["freed"]]
        assert functions[:2] == (["drop", "main"] if freed else [])
        assert fault["device"] == 0
        assert f"{fault['what'].replace('-', ' ').upper()}  " in done.stderr
    assert "on GPU 0" in done.stderr and "allocated at    " in done.stderr
    assert ("freed at        " in done.stderr) == freed
    assert "guard_program.c:" in done.stderr


def test_a_block_freed_twice(tmp_path, bench):
    done, (fault,) = guarded(tmp_path, bench, "twice")
    assert fault["what"] == "freed-twice"
    assert [frame["function"] for frame in fault["freed_again"]][:2] == ["drop", "main"]
    assert "FREED TWICE" in done.stderr


@pytest.mark.parametrize("kind", ["early", "step"])
def test_what_is_found_is_said_while_the_program_runs(tmp_path, bench, kind):
    done, faults = guarded(tmp_path, bench, kind)
    assert len(faults) == 1
    said = done.stderr.index("OVERFLOW" if kind == "early" else "USE AFTER FREE")
    assert said < done.stderr.index("still running")


def test_nothing_is_read_before_the_stream_is_done(tmp_path, bench):
    done, faults = guarded(tmp_path, bench, "busy")
    assert [fault["what"] for fault in faults] == ["overflow"]
    assert done.stderr.index("OVERFLOW") > done.stderr.index("still running")


def test_a_block_is_looked_at_when_other_streams_are_done_with_it(tmp_path, bench):
    done, faults = guarded(tmp_path, bench, "streams")
    assert done.stdout.splitlines()[:2] == ["looked at while in use: 0", "looked at after: 1"]
    assert [key(fault) for fault in faults] == [("overflow", 1000, 1000, 3)]


def test_a_capture_is_left_alone(tmp_path, bench):
    done, faults = guarded(tmp_path, bench, "capture")
    assert done.stdout.splitlines()[0] == "launches during the capture: 0"
    assert [key(fault) for fault in faults] == [("overflow", 1000, 1000, 3)], "looked at after the capture"
    assert "1 block had no patterns" in done.stderr


def test_what_is_held_back_is_given_up_before_a_request_is_refused(tmp_path, bench):
    memory = str(256 << 20)
    done, faults = guarded(tmp_path, bench, "pressure", FAKE_CUDA_MEMORY=memory)
    assert faults == []
    assert done.stdout.count("malloc -5 out of memory") == 1
    # 256 MiB, less the other block; two blocks were held back before.
    assert int(done.stdout.split("blocks of 6 MiB: ")[1].split()[0]) >= 41, done.stdout


@pytest.mark.parametrize("kind", ["clean", "threads"])
def test_a_clean_program_has_no_faults(tmp_path, bench, kind):
    done, faults = guarded(tmp_path, bench, kind)
    assert faults == [] and "guard mode" not in done.stderr


def test_a_stream_that_does_not_get_on_holds_up_no_launch(tmp_path, bench):
    done, faults = guarded(tmp_path, bench, "full")
    assert [key(fault) for fault in faults] == [("overflow", 1000, 1000, 3)], (
        "looked at once the stream got on"
    )
    assert "blocks had no patterns, being allocated while much waited on the stream" in done.stderr


def test_the_end_waits_for_no_stream_that_is_stuck(tmp_path, bench):
    began = time.monotonic()
    done, faults = guarded(tmp_path, bench, "stuck")
    assert 5 < time.monotonic() - began < 30
    assert [key(fault) for fault in faults] == [("overflow", 700, 700, 1)], "the other stream is looked at"
    assert "not done in time" in done.stderr
    assert "; guard mode found 1 memory fault (above); report: " in done.stderr.splitlines()[-1]
    (path,) = (tmp_path / "strandline-out").rglob("report.json")
    assert path.stat().st_mtime < path.with_name("guard.json").stat().st_mtime - 5, "the report comes first"


@pytest.mark.parametrize("kind", ["destroyed", "early exit", "finishing"])
def test_what_others_do_meanwhile_is_respected(tmp_path, bench, kind):
    settings = {"early exit": {"FAKE_CUDA_MEMORY": str(256 << 20)}, "finishing": {"FAKE_CUDA_QUEUE": "20000"}}
    done, faults = guarded(tmp_path, bench, kind, **settings.get(kind, {}))
    assert faults == [] and "handed out in use" not in done.stdout
    assert "guard mode ends" not in done.stderr


def test_blocks_that_wait_for_a_stream_count_as_held_back(tmp_path, bench):
    done, faults = guarded(tmp_path, bench, "waiting", FAKE_CUDA_MEMORY=str(512 << 20))
    assert faults == []
    assert "not looked at for want of memory" in done.stderr, done.stdout


def test_each_thread_s_own_stream_is_left_alone(tmp_path, bench):
    done, faults = guarded(tmp_path, bench, "per thread")
    assert faults == [] and "launches: 0" in done.stdout
    assert "1 block of per-thread default streams had no patterns" in done.stderr


def test_a_stream_that_is_gone_does_not_end_the_guarding(tmp_path, bench):
    done, faults = guarded(tmp_path, bench, "gone")
    assert [key(fault) for fault in faults] == [("overflow", 1000, 1000, 3)]
    assert "guard mode ends" not in done.stderr and "the stream being gone" in done.stderr


def test_blocks_that_are_too_large_to_hold_back_are_counted(tmp_path, bench):
    done, faults = guarded(tmp_path, bench, "large")
    assert faults == []
    assert "1 block of more than 32.00 MiB not held back once freed" in done.stderr


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("cuModuleLoadData", 222),
        ("cuModuleGetFunction", 500),
        ("cuMemHostAlloc", 2),
        ("cuMemHostGetDevicePointer_v2", 1),
    ],
)
def test_kernels_that_cannot_be_loaded_are_said_and_the_job_runs_on(tmp_path, bench, function, code):
    done, faults = guarded(tmp_path, bench, "overflow", FAKE_CUDA_FAULT=f"{function}:0:{code}")
    assert faults == []
    (line,) = [line for line in done.stderr.splitlines() if "guard" in line]
    assert "GPU 0 is not guarded" in line and "update the driver, or leave --guard out" in line


def test_a_driver_without_the_functions(tmp_path, bench, tmp_path_factory):
    old = stand_in(tmp_path_factory.mktemp("old"), "-DNO_KERNELS")
    done, faults = guarded(tmp_path, (bench[0], old), "clean")
    assert faults == [] and "cuModuleLoadData is not supported by this driver" in done.stderr


@pytest.mark.parametrize(
    "kernel", ["cuLaunchKernel", "strandline_guard_arm", "strandline_guard_retire", "strandline_guard_check"]
)
@pytest.mark.parametrize("call", [1, 40])
def test_a_launch_that_fails_ends_the_guarding_and_not_the_job(tmp_path, bench, kernel, call):
    kind = "many" if kernel.endswith("check") else "clean"
    done, _ = guarded(tmp_path, bench, kind, FAKE_CUDA_FAULT=f"{kernel}:{call}:719")
    lines = [line for line in done.stderr.splitlines() if "guard mode ends" in line]
    assert len(lines) == 1 and "cuLaunchKernel failed with code 719" in lines[0], done.stderr


def test_the_driver_s_end_is_no_failure(tmp_path, bench):
    done, _ = guarded(tmp_path, bench, "clean", FAKE_CUDA_FAULT="cuLaunchKernel:0:4")
    assert "guard mode" not in done.stderr


def test_the_kernels_are_those_of_the_source():
    made_from = re.search(r"SHA-256 of the source: (\w+)", (ROOT / "cuda/guard.ptx").read_text())
    seen = hashlib.sha256((ROOT / "cuda/guard.cu").read_bytes()).hexdigest()
    assert made_from and made_from.group(1) == seen, "run scripts/guard_ptx.py"


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100"])
def test_the_kernels_assemble(arch):
    ptxas = PACKAGES / "triton/backends/nvidia/bin/ptxas" if PACKAGES else None
    if ptxas is None or not ptxas.exists():
        pytest.skip("no ptxas")
    command = [ptxas, f"-arch={arch}", "-o", os.devnull, ROOT / "cuda/guard.ptx"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


def test_torch_under_the_gpu_test(tmp_path):
    """Those checks of tests/gpu/guard.py that need no kernel of torch's."""
    headers = (
        [PACKAGES / "nvidia/cu13/include", PACKAGES / "triton/backends/nvidia/include"] if PACKAGES else []
    )
    if not headers or not all(folder.exists() for folder in headers):
        pytest.skip("no torch for CUDA 13")
    stand_in(tmp_path)
    runtime = tmp_path / "libfakecudart.so"
    include = [f"-I{folder}" for folder in headers]
    command = [CC, "-O1", "-shared", "-fPIC", *include, "-o", runtime, FAKES / "cudart.c", "-ldl"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    try:
        from guard import POKED
    finally:
        sys.path.pop(0)
    base = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_") and k != "LD_PRELOAD"}
    env = {
        **base,
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": str(tmp_path),
        "STRANDLINE_LIBCUDA": str(tmp_path / "libcuda.so.1"),
        "FAKE_CUDA_BACKED": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, ROOT / "tests/gpu/guard.py", "--library", LIBRARY, "--command", COMMAND]
    done = subprocess.run(
        [*map(str, command), "--only", *POKED], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" PASS ") == len(POKED), done.stdout
