"""CUDA programs that know nothing of strandline, over stand-ins for the driver and the runtime.

tests/fake_cuda/program.c is linked with a small cudart as a shared library, as an archive, and with the driver
itself. What the program prints and its exit code are compared with a run without strandline.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from runner import COMMAND, ROOT, Runner

FAKES = ROOT / "tests" / "fake_cuda"
CC = os.environ.get("CC", "cc")
KEPT = 1 << 20


def cc(*arguments) -> None:
    done = subprocess.run(
        [CC, "-Wall", "-Wextra", "-Werror", "-O1", "-g", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> dict[str, pathlib.Path]:
    """The program, by how it reaches CUDA."""
    folder = tmp_path_factory.mktemp("cuda")
    library, source = folder / "libcuda.so.1", FAKES / "program.c"
    cc(
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        library,
        FAKES / "libcuda.c",
        "-ldl",
        "-lpthread",
    )
    made = {}
    for name, how in {"shared": [], "hidden": ["-DHIDDEN_DRIVER"]}.items():
        place = folder / name
        place.mkdir()
        cudart = place / "libcudart.so.13"
        cc(
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcudart.so.13",
            *how,
            "-o",
            cudart,
            FAKES / "small_cudart.c",
            "-ldl",
        )
        made[name] = place / "program"
        cc(source, "-o", made[name], cudart, library, "-lpthread", "-ldl", f"-Wl,-rpath,{place}:{folder}")
    for name, how in {"static": [], "static_dlsym": ["-DBY_DLSYM"]}.items():
        member, archive = folder / f"{name}.o", folder / f"lib{name}.a"
        cc("-c", "-fPIC", *how, "-o", member, FAKES / "small_cudart.c")
        subprocess.run(["ar", "rcs", str(archive), str(member)], check=True)
        made[name] = folder / f"program_{name}"
        # The driver is opened at run time, as cudart does; nothing of CUDA is linked as a shared library.
        cc("-DOPENED", source, "-o", made[name], archive, "-lpthread", "-ldl", f"-Wl,-rpath,{folder}")
    return made


def command(jobs, *job, mode):
    return [COMMAND, "run", "--quiet", "--mode", mode, "--out", jobs.out, "--", *job]


def followed(tmp_path, program, *arguments, mode="auto", env=None, rounds=80, compare_errors=True):
    """Runs the program with and without strandline; the report of the run with it."""
    jobs = Runner(tmp_path)
    env = {"FAKE_CUDA_MEMORY": str(4 << 30), "FAKE_CUDA_VERBOSE": "1", **(env or {})}
    plain = jobs.bare(program, *arguments, rounds, env=env)
    ours = jobs.bare(*command(jobs, program, *arguments, rounds, mode=mode), env=env)
    assert (ours.code, ours.out) == (plain.code, plain.out), ours.err
    assert plain.code == 7, plain.out + plain.err
    if compare_errors:
        assert ours.err == plain.err
    return ours


def check_leak(report, device, blocks=80):
    assert report["verdict"] == "leak", report["reason"]
    (finding,) = report["findings"]
    functions = [frame["function"] for frame in finding["stack"] if frame["user"]]
    assert functions[:3] == ["take", "keep_result", "rounds"], finding["stack"]
    assert finding["device"] == device and finding["class"] == "per-iteration"
    # Each round is a step, and each block is counted once. A report is of the last step's end: a round ends
    # with the first allocation of the next, so the last round's block is not in it.
    assert finding["live_blocks"] == blocks - 1
    assert finding["live_bytes"] == (blocks - 1) * KEPT
    assert finding["allocated_at"]["line"] > 0 and finding["allocated_at"]["file"].endswith("/program.c")
    assert report["run"]["steps"] > 0.5 * blocks
    assert abs(finding["bytes_per_step"] - KEPT) < 0.05 * KEPT
    (entry,) = [entry for entry in report["devices"] if entry["device"] == device]
    assert entry["live_blocks"] == blocks


@pytest.mark.parametrize("how", ["shared", "hidden", "static", "static_dlsym"])
def test_a_leak_is_found_however_cudart_is_linked(tmp_path, programs, how):
    done = followed(tmp_path, programs[how], "device")
    assert done.report["run"]["mode"] == "observer"
    check_leak(done.report, 0)


@pytest.mark.parametrize("how", ["shared", "static"])
@pytest.mark.parametrize(
    ("kind", "device"), [("pitch", 0), ("async", 0), ("pinned", -2), ("managed", -3), ("driver", 0)]
)
def test_every_way_to_allocate(tmp_path, programs, how, kind, device):
    check_leak(followed(tmp_path, programs[how], kind).report, device)


def test_threads(tmp_path, programs):
    rounds = 640
    # How four threads take turns is the machine's; where they never come round alike, there are no steps to judge by.
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        report = followed(folder, programs["shared"], "threads", rounds=rounds).report
        assert [entry["live_blocks"] for entry in report["devices"]] == [rounds]
        assert report["verdict"] in ("leak", "undecided")
        if report["verdict"] == "leak":
            break
    (finding,) = report["findings"]
    assert "keep_result" in [frame["function"] for frame in finding["stack"]]
    assert rounds - 8 <= finding["live_blocks"] < rounds  # those of the last step are not in it


def test_two_devices_have_a_ledger_each(tmp_path, programs):
    report = followed(tmp_path, programs["shared"], "two", rounds=160, env={"FAKE_CUDA_DEVICES": "2"}).report
    assert sorted(entry["device"] for entry in report["devices"]) == [0, 1]
    assert [entry["live_blocks"] for entry in report["devices"]] == [80, 80]


@pytest.mark.parametrize("mode", ["auto", "heap"])
def test_a_forked_child_is_left_alone(tmp_path, programs, mode):
    done = followed(tmp_path, programs["shared"], "fork", mode=mode)
    assert "child 5" in done.out
    assert len(done.reports()) == 1


@pytest.mark.parametrize("mode", ["auto", "heap"])
def test_cuda_s_answers_are_the_same(tmp_path, programs, mode):
    done = followed(tmp_path, programs["static"], "errors", mode=mode, compare_errors=False)
    assert "too large 2\nnothing 1\nnull 0\nforeign 1\naligned 0\nfree 0\nagain 1\n" in done.out


@pytest.mark.parametrize(
    ("how", "kind"), [("shared", "device"), ("static", "device"), ("static", "pitch"), ("static", "driver")]
)
def test_the_heap_serves_when_asked(tmp_path, programs, how, kind):
    done = followed(tmp_path, programs[how], kind, mode="heap")
    report = done.report
    assert report["run"]["mode"] == "heap"
    check_leak(report, 0)
    (entry,) = report["devices"]
    stats = entry["stats"]
    assert stats["allocation.all.allocated"] == 240 and stats["allocation.all.freed"] == 160


@pytest.mark.parametrize("how", ["shared", "static"])
def test_guard_mode_changes_nothing_for_a_clean_program(tmp_path, programs, how):
    env = {"STRANDLINE_GUARD": "1", "FAKE_CUDA_BACKED": "1"}
    done = followed(tmp_path, programs[how], "device", mode="heap", env=env)
    check_leak(done.report, 0)
    assert not list(done.folder.rglob("guard.json"))


def test_what_the_heap_does_not_serve_is_in_the_same_ledger(tmp_path, programs):
    report = followed(tmp_path, programs["static"], "async", env={"STRANDLINE_CONF": "serve_cuda:1"}).report
    check_leak(report, 0)


def test_a_program_that_touches_no_cuda(tmp_path, programs):
    done = followed(tmp_path, programs["static"], "empty")
    assert done.out == "no CUDA: none\nno CUDA: an error\n"
    assert done.reports() == []


def test_only_who_asks_is_followed(tmp_path, programs):
    """Preloaded without STRANDLINE_MODE, or in another mode, CUDA's functions are only passed on."""
    library = COMMAND.parent / "libstrandline.so"
    for mode in ({}, {"STRANDLINE_MODE": "host"}, {"STRANDLINE_MODE": "off"}):
        env = {"LD_PRELOAD": str(library), "FAKE_CUDA_MEMORY": str(4 << 30), **mode}
        done = Runner(tmp_path).bare(programs["static"], "device", env=env)
        assert (done.code, done.out, done.err) == (7, "kept 80\n", "")
        assert not (tmp_path / "strandline-out").exists()


def test_out_of_memory_is_cuda_s_own(tmp_path, programs):
    for mode in ("auto", "heap"):
        jobs = Runner(tmp_path)
        env = {"FAKE_CUDA_MEMORY": str(32 << 20)}
        plain = jobs.bare(programs["static"], "device", env=env)
        ours = jobs.bare(*command(jobs, programs["static"], "device", mode=mode), env=env)
        assert (plain.code, plain.out) == (9, "cudaMalloc: 2\n")
        assert (ours.code, ours.out) == (9, "cudaMalloc: 2\n"), ours.err


TORCH = """
import torch, strandline
kept = []
for step in range(40):
    scratch = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    kept.append(torch.empty(4096, dtype=torch.uint8, device="cuda"))
    strandline.step()
print(len(kept), torch.cuda.memory_allocated())
"""


@pytest.mark.parametrize("mode", ["observer", "heap"])
def test_torch_s_own_memory_is_counted_once(tmp_path, programs, mode):
    """torch asks cudaMalloc for segments and hands out blocks of them: only the blocks are counted."""
    torch = pytest.importorskip("torch")
    if not (torch.version.cuda or "").startswith("13"):
        pytest.skip("the stand-in for torch's cudart is that of CUDA 13")
    packages = pathlib.Path(torch.__file__).parent.parent
    includes = [f"-I{packages / path}" for path in ("nvidia/cu13/include", "triton/backends/nvidia/include")]
    cudart = tmp_path / "libfakecudart.so"
    cc("-shared", "-fPIC", "-o", cudart, *includes, FAKES / "cudart.c", "-ldl")
    jobs = Runner(tmp_path)
    script = jobs.script(TORCH, "job.py")
    stand_ins = programs["shared"].parent.parent
    env = {
        "LD_PRELOAD": str(cudart),
        "LD_LIBRARY_PATH": str(stand_ins),
        "STRANDLINE_LIBCUDA": str(stand_ins / "libcuda.so.1"),  # there is no device file to go by
    }
    done = jobs.bare(*command(jobs, sys.executable, script, mode=mode), env=env)
    assert done.code == 0, done.err
    assert done.out.startswith("40 "), done.err
    (entry,) = done.report["devices"]
    assert entry["device"] == 0 and done.report["run"]["mode"] == mode
    assert entry["live_blocks"] in (40, 41)
    assert entry["live_bytes"] == 40 * 4096 + (entry["live_blocks"] - 40) * (1 << 20)
