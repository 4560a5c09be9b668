"""The memory of this machine: of its GPU, or of the host for a run on a CPU."""

from pathlib import Path

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container, cgroup 2 and 1


def gpu_bytes() -> int | None:
    """Memory of the first GPU, or None where torch finds none."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def host_bytes() -> int | None:
    """Memory that this process may have at most: the machine's, or the container's where that is less."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    for path in LIMITS:
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(found, default=None)
