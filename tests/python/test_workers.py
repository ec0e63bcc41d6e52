"""What the parent can see of DataLoader workers and pinned memory, and what it says."""

import os
import subprocess
import sys

import pytest
import torch
from strandline import _workers
from torch.utils.data import DataLoader


class Cuda:
    """Stands for a CUDA tensor."""

    is_cuda = True


def test_cuda_tensors_are_found_in_batches():
    cpu = torch.zeros(2)
    assert _workers.cuda_in(cpu) is None
    assert _workers.cuda_in({"x": cpu, "y": [cpu, (cpu,)]}) is None
    assert _workers.cuda_in(Cuda()) == "the batch itself"
    assert _workers.cuda_in({"x": cpu, "y": [cpu, Cuda()]}) == "['y'][1]"


def test_a_process_that_has_the_gpu_open(tmp_path):
    folder = tmp_path / "17" / "fd"
    folder.mkdir(parents=True)
    os.symlink("/dev/null", folder / "0")
    os.symlink("/dev/nvidiactl", folder / "1")
    assert not _workers.has_cuda(17, str(tmp_path))
    os.symlink("/dev/nvidia0", folder / "2")
    assert _workers.has_cuda(17, str(tmp_path))
    assert not _workers.has_cuda(18, str(tmp_path))


def test_workers_with_the_gpu_are_named_once(library, monkeypatch):
    workers = _workers.Workers(library)
    workers._pids = {1: (41, 42)}
    monkeypatch.setattr(_workers, "has_cuda", lambda pid: pid == 42)
    for _ in range(3):
        workers.batch({"x": Cuda()})
    assert [remark["kind"] for remark in library.remarks] == ["cuda-from-workers", "cuda-in-workers"]
    assert "['x']" in library.remarks[0]["what"] and "42" in library.remarks[1]["what"]
    assert all(remark["because"] and remark["fix"] for remark in library.remarks)


def test_workers_left_over(library, monkeypatch):
    lives = {1, 2, 3, 4, 5, 6}
    monkeypatch.setattr(_workers, "_lives", lives.__contains__)
    workers = _workers.Workers(library)

    class Process:
        def __init__(self, pid):
            self.pid = pid

    class Iterator:
        def __init__(self, *pids):
            self._workers = [Process(pid) for pid in pids]

    kept = [Iterator(1, 2), Iterator(3, 4)]
    for iterator in kept:
        workers.began(iterator)
    assert library.remarks == [], "the one before may still be shutting down"
    workers.began(Iterator(5, 6))
    assert [remark["kind"] for remark in library.remarks] == ["left-over-workers"]
    assert "4 DataLoader workers" in library.remarks[0]["what"]


def test_workers_that_ended_are_forgotten(library):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert not _workers._lives(child.pid)
    assert _workers._lives(os.getpid())


def test_real_loaders_are_watched_and_innocent(library):
    seen = []

    class Watcher(_workers.Workers):
        def batch(self, data):
            seen.append(data)
            super().batch(data)

    from torch.utils.data import dataloader

    kind = dataloader._MultiProcessingDataLoaderIter
    before = kind.__init__, kind._next_data
    try:
        _workers.watch(Watcher(library))
        loader = DataLoader(list(range(8)), batch_size=4, num_workers=1)
        for _ in range(3):
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    finally:
        kind.__init__, kind._next_data = before
    assert len(seen) == 6 and library.remarks == []


@pytest.mark.parametrize(
    ("levels", "said"),
    [(range(0, 90, 10), 1), ([5] * 20, 0), ([1, 2, 3, 4, 5, 6, 7, 7, 8, 9], 0), ([None] * 20, 0)],
)
def test_pinned_memory_that_grows(library, levels, said):
    pinned = _workers.Pinned(library)
    for level in levels:
        pinned.look(None if level is None else level << 20)
    assert [remark["kind"] for remark in library.remarks] == ["pinned-memory"] * said
