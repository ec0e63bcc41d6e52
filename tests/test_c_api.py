"""The C ABI as a C programmer has it: the header, the examples as C and as C++, `make install`, pkg-config."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from runner import COMMAND, ROOT

LIBRARY = COMMAND.parent / "libstrandline.so"
CC, CXX = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
HEADER = (ROOT / "include" / "strandline.h").read_text()


def compiled(
    folder: pathlib.Path, source: pathlib.Path, language: str = "c", flags=None, how=("-O1", "-fno-inline")
):
    program = folder / f"{source.stem}_{language.replace('+', 'p')}"
    start = [CC, "-std=c11", "-x", "c"] if language == "c" else [CXX, "-std=c++11", "-x", "c++"]
    flags = flags or [f"-I{ROOT / 'include'}", f"-L{LIBRARY.parent}", "-lstrandline"]
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g", *how]
    command = [*start, *strict, str(source), "-x", "none", "-o", str(program), *flags, "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def run(folder: pathlib.Path, *command, env=None):
    base = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_") and k != "LD_PRELOAD"}
    settings = {**base, "LD_LIBRARY_PATH": str(LIBRARY.parent), **(env or {})}
    return subprocess.run(
        [str(c) for c in command], cwd=folder, env=settings, capture_output=True, text=True, timeout=120
    )


def report_of(folder: pathlib.Path):
    (found,) = list((folder / "strandline-out").rglob("report.json"))
    return json.loads(found.read_text())


@pytest.mark.parametrize("language", ["c", "c++"])
def test_a_leaking_loop_is_found_with_its_function(tmp_path, language):
    program = compiled(tmp_path, ROOT / "examples/c/leak.c", language)
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("60 live blocks, 15728640 bytes allocated, ")
    report = report_of(tmp_path)
    assert report["verdict"] == "leak" and report["run"]["mode"] == "host" and report["run"]["steps"] == 60
    (finding,) = report["findings"]
    assert finding["class"] == "per-iteration"
    assert (finding["live_blocks"], finding["bytes_per_step"]) == (60, 256 << 10)
    functions = [frame["function"] for frame in finding["stack"]]
    assert functions[:4] == ["take", "make_result", "step", "main"]
    at = finding["allocated_at"]
    source = (ROOT / "examples/c/leak.c").read_text().splitlines()
    assert at["function"] == "take" and at["file"].endswith("examples/c/leak.c")
    assert "strandline_malloc(" in source[at["line"] - 1]
    assert all(frame["user"] for frame in finding["stack"][:4])
    assert not any("strandline" in function for function in functions)
    # Said while it ran, and where the report is.
    assert "LEAK  per-iteration  +256.0 KiB/step" in done.stderr
    assert "leak.c:35 in make_result > leak.c:" in done.stderr and "Python" not in done.stderr
    assert "report.html" in done.stderr


@pytest.mark.parametrize("how", [("-O2",), ("-O2", "-no-pie")])
def test_functions_that_were_inlined_are_named(tmp_path, how):
    program = compiled(tmp_path, ROOT / "examples/c/leak.c", how=how)
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    (finding,) = report_of(tmp_path)["findings"]
    frames = [frame for frame in finding["stack"] if frame["user"]]
    assert [frame["function"] for frame in frames[:4]] == ["take", "make_result", "step", "main"]
    source = (ROOT / "examples/c/leak.c").read_text().splitlines()
    for frame, text in zip(frames, ["strandline_malloc(", "take(", "make_result(", "step("]):
        assert text in source[frame["line"] - 1]


def test_without_debugging_information_the_function_is_named(tmp_path):
    program = compiled(tmp_path, ROOT / "examples/c/leak.c", how=("-O1", "-fno-inline", "-g0"))
    done = run(tmp_path, program)
    (finding,) = report_of(tmp_path)["findings"]
    assert [frame["function"] for frame in finding["stack"][:4]] == ["take", "make_result", "step", "main"]
    assert finding["allocated_at"] == {**finding["allocated_at"], "function": "take", "line": 0}
    assert "allocated at  leak_c in make_result > leak_c in take" in done.stderr


def test_requests_are_steps_and_a_bounded_cache_is_no_leak(tmp_path):
    program = compiled(tmp_path, ROOT / "examples/c/server.c")
    done = run(tmp_path, program)
    assert (done.returncode, done.stdout) == (0, "240 requests\n"), done.stderr
    assert done.stderr == ""
    report = report_of(tmp_path)
    assert report["run"]["steps"] == 240
    (finding,) = report["findings"]
    assert [frame["function"] for frame in finding["stack"][:3]] == ["take", "log_answer", "serve"]
    assert finding["live_blocks"] == 240


CROWD = """
#include <pthread.h>
#include <stdio.h>
#include "strandline.h"
#define THREADS 24
#define REQUESTS 400
static void *kept[THREADS][REQUESTS];
static void *serve(void *mine) {
    void **list = mine;
    int i;
    for (i = 0; i < REQUESTS; i++) {
        strandline_request_begin();
        if (strandline_malloc(STRANDLINE_HOST, 4096, NULL, &list[i]) != 0) return mine;
        strandline_request_end();
    }
    return NULL;
}
int main(void) {
    pthread_t threads[THREADS];
    void *failed;
    int i, lost = 0;
    if (strandline_open(STRANDLINE_HOST, "{\\"quiet\\": true}") != 0) return 1;
    for (i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, serve, kept[i]);
    for (i = 0; i < THREADS; i++) pthread_join(threads[i], &failed), lost += failed != NULL;
    return lost;
}
"""


def test_threads_that_end_their_requests_at_once_are_judged_in_turn(tmp_path):
    source = tmp_path / "crowd.c"
    source.write_text(CROWD)
    done = run(tmp_path, compiled(tmp_path, source))
    assert (done.returncode, done.stderr) == (0, "")
    report = report_of(tmp_path)
    assert report["run"]["steps"] == 9600
    assert [note for note in report["not_leaks"] if note.get("withdrawn")] == []
    (finding,) = report["findings"]
    # What the newest steps may still use is not counted yet.
    assert finding["class"] == "per-iteration" and 9560 < finding["live_blocks"] <= 9600
    assert finding["called_at_step"] < 120


SLOW = """
#include <pthread.h>
#include "strandline.h"
static void one(size_t size) {
    void *block;
    strandline_malloc(STRANDLINE_HOST, size, NULL, &block);
    strandline_free(block);
}
static void *quick(void *count) {
    long i;
    for (i = 0; i < (long)count; i++) strandline_request_begin(), one(1 << 20), strandline_request_end();
    return NULL;
}
static void others(long count) {
    pthread_t thread;
    pthread_create(&thread, NULL, quick, (void *)count);
    pthread_join(thread, NULL);
}
int main(void) {
    void *block;
    if (strandline_open(STRANDLINE_HOST, "{}") != 0) return 1;
    others(60);
    if (TOLD) strandline_request_begin();
    strandline_malloc(STRANDLINE_HOST, 80 << 20, NULL, &block);
    others(100);
    strandline_free(block);
    if (TOLD) strandline_request_end();
    return 0;
}
"""


@pytest.mark.parametrize("told", [1, 0])
def test_what_a_slow_request_holds_is_in_use(tmp_path, told):
    source = tmp_path / "slow.c"
    source.write_text(SLOW)
    done = run(tmp_path, compiled(tmp_path, source, how=("-O1", "-fno-inline", f"-DTOLD={told}")))
    assert done.returncode == 0
    assert ("LEAK" in done.stderr) == (not told), done.stderr


def test_why_accounting_did_not_begin_is_said(tmp_path):
    source = tmp_path / "wrong.c"
    source.write_text(
        """
        #include <stdio.h>
        #include "strandline.h"
        int main(void) {
            char why[512];
            int code = strandline_open(STRANDLINE_HOST, "{\\"quiet\\": 3}");
            strandline_error(why, sizeof why);
            puts(why);
            return code == STRANDLINE_EINVAL ? 0 : 1;
        }
        """
    )
    done = run(tmp_path, compiled(tmp_path, source))
    assert done.returncode == 0
    assert done.stdout.startswith(
        "The options are not the JSON object of strandline.h: invalid type: integer `3`"
    )
    assert done.stderr.startswith("strandline: the options are not the JSON object")


def test_an_example_says_what_fails(tmp_path):
    program = compiled(tmp_path, ROOT / "examples/c/leak.c")
    done = run(tmp_path, program, "cuda", env={"STRANDLINE_LIBCUDA": str(tmp_path / "none.so")})
    assert done.returncode == 1
    why = "No GPU can be used: NVIDIA's driver (libcuda.so.1) is not here.\n"
    assert done.stderr.startswith("strandline_open failed (-3): " + why)


def test_installed_and_built_through_pkg_config(tmp_path):
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    prefix, stage = tmp_path / "opt", tmp_path / "stage"
    for arguments in ([f"PREFIX={prefix}"], ["PREFIX=/usr/special", f"DESTDIR={stage}"]):
        done = subprocess.run(["make", "install", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    staged = stage / "usr/special"
    assert (staged / "lib/libstrandline.so").is_file()
    assert "prefix=/usr/special\n" in (staged / "lib/pkgconfig/strandline.pc").read_text()
    env = {**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    asked = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "strandline"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    version = subprocess.run(
        ["pkg-config", "--modversion", "strandline"], env=env, capture_output=True, text=True, check=True
    )
    assert version.stdout.strip() == macro_version()
    program = compiled(tmp_path, ROOT / "examples/c/leak.c", flags=asked.stdout.split())
    done = run(tmp_path, program, env={"LD_LIBRARY_PATH": str(prefix / "lib")})
    assert done.returncode == 0, done.stderr
    assert report_of(tmp_path)["verdict"] == "leak"
    # The installed command finds the installed library.
    done = run(tmp_path, prefix / "bin/strandline", "run", "--mode", "host", "--", "true")
    assert done.returncode == 0, done.stderr
    wrong = subprocess.run(["make", "install", "PREFIX=here"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2 and "PREFIX=here is not an absolute path" in wrong.stderr


def macro_version() -> str:
    parts = (
        re.search(rf"STRANDLINE_VERSION_{part} (\d+)", HEADER)[1] for part in ("MAJOR", "MINOR", "PATCH")
    )
    return ".".join(parts)


def test_the_versions_agree():
    library = ctypes.CDLL(str(LIBRARY))
    library.strandline_version.restype = ctypes.c_char_p
    library.strandline_version_number.restype = ctypes.c_uint32
    version = library.strandline_version().decode()
    assert version == macro_version()
    major, minor, patch = map(int, version.split("."))
    assert library.strandline_version_number() == major * 10000 + minor * 100 + patch
    assert library.strandline_abi_version() == int(re.search(r"ABI_VERSION (\d+)", HEADER)[1])
    cargo = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    assert cargo == version


def test_every_declared_function_is_exported_and_every_public_one_declared():
    declared = set(re.findall(r"\b(strandline_\w+)\(", re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)))
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert declared <= exported, declared - exported
    public = {name for name in exported if name.startswith("strandline_")}
    undeclared = {
        name
        for name in public - declared
        if not name.startswith(("strandline_torch_", "strandline_internal_"))
    }
    assert not undeclared


UNTOLD = r"""
#include "strandline.h"
static void *make(size_t size) {
    void *block = NULL;
    strandline_malloc(STRANDLINE_HOST, size, NULL, &block);
    return block;
}
static void work(void) { strandline_free(make(1 << 20)); }
static void keep(void) { make(1 << 16); }
int main(void) {
    int i;
    strandline_open(STRANDLINE_HOST, "{\"quiet\": true}");
    for (i = 0; i < 100; i++) {
        work();
        keep();
    }
    return 0;
}
"""


def test_a_program_that_tells_no_steps_has_some(tmp_path):
    source = tmp_path / "untold.c"
    source.write_text(UNTOLD)
    done = run(tmp_path, compiled(tmp_path, source))
    assert (done.returncode, done.stderr) == (0, "")
    report = report_of(tmp_path)
    assert report["run"]["steps"] > 50
    (finding,) = report["findings"]
    assert [frame["function"] for frame in finding["stack"][:3]] == ["make", "keep", "main"]
    assert abs(finding["bytes_per_step"] - (1 << 16)) < 1 << 12


CALLS = r"""
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "strandline.h"

static const char *why(void) {
    static char text[1024];
    size_t length = strandline_error(text, sizeof text);
    assert(length == strlen(text));
    return text;
}

static void cut(void) {
    char small[8];
    size_t length = strandline_error(small, sizeof small);
    assert(length > 7 && strlen(small) == 7 && strandline_error(NULL, 0) == length);
}

int main(void) {
    void *a = NULL, *b = NULL, *c = (void *)1;
    size_t requested = 0, rounded = 0, free_bytes = 0, total = 0;
    strandline_counters counters, old;
    int status;
    errno = 77;
    assert(strcmp(why(), "") == 0);
    assert(strandline_mode() == STRANDLINE_MODE_OFF);
    assert(strandline_step() == STRANDLINE_EINACTIVE && strstr(why(), "strandline_open"));
    assert(strandline_malloc(STRANDLINE_HOST, 10, NULL, &c) == STRANDLINE_EINACTIVE && c == (void *)1);
    assert(strandline_open(-7, NULL) == STRANDLINE_EINVAL && strstr(why(), "-7 is no device"));
    assert(strandline_open(STRANDLINE_HOST, "{nonsense") == STRANDLINE_EINVAL);
    assert(strandline_open(STRANDLINE_HOST, "{\"quiet\": true, \"out\": \"told\"}") == 0);
    assert(strandline_open(STRANDLINE_HOST, NULL) == 0 && strandline_mode() == STRANDLINE_MODE_HOST);
    assert(strandline_open(0, NULL) == STRANDLINE_EINVAL && strstr(why(), "mode host already"));
    cut();

    assert(strandline_malloc(STRANDLINE_HOST, 1000, NULL, &a) == 0 && (uintptr_t)a % 64 == 0);
    memset(a, 7, 1000);
    assert(strandline_malloc(STRANDLINE_HOST, 0, (void *)5, &b) == 0 && b != a);
    assert(strandline_malloc(STRANDLINE_HOST, 10, NULL, NULL) == STRANDLINE_EINVAL);
    assert(strandline_malloc(0, 10, NULL, &c) == STRANDLINE_ENOENT && strstr(why(), "GPU 0 is not open"));
    assert(strandline_malloc(STRANDLINE_HOST, (size_t)1 << 60, NULL, &c) == STRANDLINE_ENOMEM && c == (void *)1);
    assert(strandline_block_size(a, &requested, &rounded) == 0 && requested == 1000 && rounded >= 1000);
    assert(strandline_block_size((char *)a + 1, NULL, NULL) == STRANDLINE_ENOENT);
    assert(strandline_block_size(&status, NULL, NULL) == STRANDLINE_ENOENT);
    assert(strandline_record_stream(a, (void *)9) == 0);
    assert(strandline_record_stream(&status, NULL) == STRANDLINE_ENOENT);
    assert(strandline_get_counters(STRANDLINE_HOST, &counters, sizeof counters) == 0);
    assert(counters.live_blocks == 2 && counters.mallocs == 2 && counters.frees == 0);
    assert(counters.requested_bytes >= 1000 && counters.allocated_bytes >= counters.requested_bytes);
    assert(counters.reserved_bytes >= counters.allocated_bytes && counters.out_of_memory == 1);
    memset(&old, 0xff, sizeof old);
    assert(strandline_get_counters(STRANDLINE_HOST, &old, 16) == 0);
    assert(old.allocated_bytes == counters.allocated_bytes && old.requested_bytes == UINT64_MAX);
    assert(strandline_get_counters(STRANDLINE_HOST, NULL, 8) == STRANDLINE_EINVAL);
    assert(strandline_get_counters(0, &counters, sizeof counters) == STRANDLINE_ENOENT);
    assert(strandline_memory_info(STRANDLINE_HOST, &free_bytes, &total) == 0 && free_bytes <= total && total > 0);
    assert(strandline_memory_info(STRANDLINE_HOST, NULL, NULL) == 0);
    assert(strandline_set_limit(STRANDLINE_HOST, 8 << 20) == 0);
    assert(strandline_malloc(STRANDLINE_HOST, 64 << 20, NULL, &c) == STRANDLINE_ENOMEM);
    assert(strandline_set_limit(STRANDLINE_HOST, 0) == 0);
    assert(strandline_free(NULL) == 0);
    assert(strandline_free(a) == 0 && strandline_free(a) == STRANDLINE_ENOENT);
    assert(strandline_free((char *)b + 8) == STRANDLINE_ENOENT && strandline_free(&status) == STRANDLINE_ENOENT);
    assert(strandline_reset_peaks(STRANDLINE_HOST) == 0 && strandline_trim(STRANDLINE_HOST) == 0);
    assert(strandline_stats(STRANDLINE_HOST, NULL, 0) > 100 && strandline_stats(3, NULL, 0) == 2);
    assert(strandline_findings(NULL, 0) == 2);

    assert(strandline_phase(STRANDLINE_PHASE_BACKWARD) == STRANDLINE_PHASE_OTHER);
    assert(strandline_phase(99) == STRANDLINE_EINVAL && strandline_epoch() == 0);
    assert(strandline_phase_of("backward") == STRANDLINE_PHASE_BACKWARD && strandline_phase_of("") == STRANDLINE_EINVAL);
    int rollout = strandline_phase_of("rollout");
    assert(rollout > STRANDLINE_PHASE_VALIDATION && strandline_phase_of("rollout") == rollout);
    assert(strandline_phase(rollout) == STRANDLINE_PHASE_BACKWARD && strandline_phase(0) == rollout);
    assert(strandline_request_end() == STRANDLINE_EINVAL);
    assert(strandline_request_begin() == 1 && strandline_request_begin() == 2);
    assert(strandline_request_end() == 1 && strandline_request_end() == 0);
    assert(strandline_report("elsewhere") == 0 && strandline_report("/proc/nowhere") == STRANDLINE_EIO);

    fflush(stdout);
    if (fork() == 0) {
        int inert = strandline_malloc(STRANDLINE_HOST, 10, NULL, &c) == STRANDLINE_EINACTIVE &&
                    strandline_step() == STRANDLINE_EINACTIVE && strandline_free(b) == STRANDLINE_EINACTIVE &&
                    strandline_open(STRANDLINE_HOST, NULL) == STRANDLINE_EINACTIVE && strstr(why(), "forked");
        _exit(inert ? 0 : 1);
    }
    wait(&status);
    assert(status == 0);
    assert(strandline_free(b) == 0);
    assert(errno == 77);
    puts("all");
    return 0;
}
"""


@pytest.mark.parametrize("language", ["c", "c++"])
def test_every_function_answers_as_the_header_says(tmp_path, language):
    source = tmp_path / "calls.c"
    source.write_text("#define _GNU_SOURCE\n" + CALLS if language == "c" else CALLS)
    done = run(tmp_path, compiled(tmp_path, source, language))
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr
    assert sorted(p.parent.name for p in tmp_path.rglob("report.json")) != []
    assert (tmp_path / "elsewhere" / "report.json").is_file()
    assert list((tmp_path / "told").glob("rank0-*/report.json"))
