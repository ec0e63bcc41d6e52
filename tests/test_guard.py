"""Guard mode: writes outside of live blocks of host memory are named with the stacks that matter."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from runner import COMMAND, ROOT
from test_c_api import LIBRARY, compiled, run

FAULTY = r"""
#include <stdio.h>
#include <string.h>
#include "strandline.h"

static char *make(size_t size) {
    void *block = NULL;
    strandline_malloc(STRANDLINE_HOST, size, NULL, &block);
    return (char *)block;
}
static void drop(void *block) { strandline_free(block); }
static void write_behind(char *block, size_t size) { memset(block + size, 0, 3); }

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "clean";
    char *a, *b;
    size_t requested = 0;
    int i;
    strandline_open(STRANDLINE_HOST, NULL);
    a = make(1000);
    b = make(5000000);
    memset(a, 1, 1000);
    memset(b, 2, 5000000);
    strandline_block_size(a, &requested, NULL);
    if (requested != 1000) return 4;
    if (strcmp(kind, "overflow") == 0) write_behind(a, 1000);
    if (strcmp(kind, "live") == 0) write_behind(b, 5000000);
    if (strcmp(kind, "live") != 0) drop(b);
    drop(a);
    if (strcmp(kind, "use") == 0) a[10] = 7;
    if (strcmp(kind, "many") == 0) {
        /* So much is freed after it that the block leaves the quarantine: it is looked at then. */
        b[4000000] = 7;
        for (i = 0; i < 100; i++) drop(make(4000000));
    }
    if (strcmp(kind, "twice") == 0) drop(a);
    printf("reads %02x\n", (unsigned char)a[20]);
    return 0;
}
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    source = folder / "faulty.c"
    source.write_text(FAULTY)
    return compiled(folder, source)


def guarded(tmp_path, program, kind):
    done = run(tmp_path, program, kind, env={"STRANDLINE_GUARD": "1"})
    assert done.returncode == 0, done.stderr
    found = list((tmp_path / "strandline-out").rglob("guard.json"))
    return done, json.loads(found[0].read_text()) if found else []


@pytest.mark.parametrize(
    ("kind", "what", "size", "first", "changed", "allocated", "freed"),
    [
        ("overflow", "overflow", 1000, 1000, 3, ["make", "main"], ["drop", "main"]),
        ("live", "overflow", 5000000, 5000000, 3, ["make", "main"], []),
        ("use", "use-after-free", 1000, 10, 1, ["make", "main"], ["drop", "main"]),
        ("many", "use-after-free", 5000000, 4000000, 1, ["make", "main"], ["drop", "main"]),
    ],
)
def test_a_fault_is_named_with_both_stacks(
    tmp_path, faulty, kind, what, size, first, changed, allocated, freed
):
    done, faults = guarded(tmp_path, faulty, kind)
    (fault,) = faults
    assert (fault["what"], fault["size"], fault["first"], fault["changed"]) == (what, size, first, changed)
    assert [frame["function"] for frame in fault["allocated"]][:2] == allocated
    assert [frame["function"] for frame in fault["freed"]][:2] == freed
    lines = done.stderr.splitlines()
    assert (
        what.replace("-", " ").upper() in lines[0]
        and "allocated at    " in lines[1]
        and "faulty.c:" in lines[1]
    )
    assert "; guard mode found 1 memory fault (above); report: " in lines[-1]
    assert done.stdout == "reads ff\n", "freed memory is poisoned"


def test_a_block_freed_twice(tmp_path, faulty):
    done, faults = guarded(tmp_path, faulty, "twice")
    (fault,) = faults
    assert fault["what"] == "freed-twice"
    assert [frame["function"] for frame in fault["freed_again"]][:2] == ["drop", "main"]
    assert fault["freed"] != fault["freed_again"]
    assert "freed again at" in done.stderr


def test_a_clean_program_has_no_faults(tmp_path, faulty):
    done, faults = guarded(tmp_path, faulty, "clean")
    assert faults == [] and "OVERFLOW" not in done.stderr


def test_without_the_guard_nothing_is_looked_at(tmp_path, faulty):
    done = run(tmp_path, faulty, "overflow")
    assert "OVERFLOW" not in done.stderr
    assert list((tmp_path / "strandline-out").rglob("guard.json")) == []


def test_the_ledger_counts_a_block_s_own_size(tmp_path):
    program = compiled(tmp_path, ROOT / "examples/c/leak.c")
    done = run(tmp_path, program, env={"STRANDLINE_GUARD": "1"})
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "strandline-out").rglob("report.json")
    (finding,) = json.loads(path.read_text())["findings"]
    assert (finding["live_blocks"], finding["live_bytes"]) == (60, 60 << 18)


TORCH = """
import ctypes, torch
def make(n): return torch.ones(n)
def overflow(t): ctypes.memset(t.data_ptr() + t.numel() * 4, 0, 2)
t = make(1000)
overflow(t)
del t
for step in range(30):
    x = torch.randn(64, 64)
    y = (x @ x).sum()
kept = make(500)
address = kept.data_ptr()
del kept
ctypes.memset(address + 8, 0, 1)
print("sum", float(torch.ones(1000).sum()))
"""


def test_cpu_tensors(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "job.py"
    script.write_text(TORCH)
    import sys

    command = [
        COMMAND,
        "run",
        "--mode",
        "host",
        "--guard",
        "--out",
        tmp_path / "out",
        "--",
        sys.executable,
        script,
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_")}
    done = subprocess.run([str(c) for c in command], env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "sum 1000.0\n"), done.stderr
    (path,) = (tmp_path / "out").rglob("guard.json")
    faults = {fault["what"]: fault for fault in json.loads(path.read_text())}
    assert set(faults) == {"overflow", "use-after-free"}
    assert faults["overflow"]["size"] == 4000 and faults["overflow"]["first"] == 4000
    at = next(frame for frame in faults["overflow"]["allocated"] if frame["user"])
    assert at["function"] == "make" and at["file"].endswith("job.py")
    assert faults["use-after-free"]["first"] == 8
    assert any(frame["line"] == 13 for frame in faults["use-after-free"]["freed"])
    assert LIBRARY.exists()
