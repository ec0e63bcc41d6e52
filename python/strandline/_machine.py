"""What the machine and torch say about themselves: a device's memory, whether a profiler runs.

Must not know: blocks, who asks.
Invariant: never raises; what cannot be found out is no limit, and no profiler.
"""

import os


def profiling() -> bool:
    try:
        import torch

        return bool(torch.autograd._profiler_enabled())
    except Exception:
        return False


def _allowed() -> float:
    """The memory that a container of this machine may use, where it is limited."""
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(place) as file:
                return float(file.read())
        except (OSError, ValueError):
            continue
    return float("inf")


def memory(device: int) -> float:
    try:
        if device >= 0:
            import torch

            return float(torch.cuda.get_device_properties(device).total_memory)
        return min(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), _allowed())
    except Exception:
        return float("inf")
