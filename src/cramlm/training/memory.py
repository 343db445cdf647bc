"""Resident memory of this process on Linux, its peak, and the memory that is available.

glibc keeps freed memory in its heap, so that a process that trains one model after the other grows by fragmentation; `trim` returns free
pages to the system. It takes milliseconds and belongs between pieces of work, not into every step.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def resident() -> int | None:
    """Resident bytes; None if unknown."""
    return _field("VmRSS:")


def peak_resident() -> int | None:
    """Peak of the resident bytes since the process started or since `reset_peak`; None if unknown."""
    return _field("VmHWM:")


def reset_peak() -> None:
    """Start a new peak; does nothing where the system cannot."""
    try:
        _RESET.write_text("5")
    except OSError:
        return


def available() -> int | None:
    """Bytes available without swapping: of the machine, or less if this process's control group or address space (`ulimit -v`) limits it;
    None if unknown.
    """
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    if (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        free = min(free, max(0, most - (_field("VmSize:") or 0)))
    try:
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text("ascii")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no control group, or "max"
        return free
    return max(0, min(free, limit - used))


def trim() -> None:
    """Collect garbage and return freed pages to the system."""
    gc.collect()
    if sys.platform == "linux":
        trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl has none
        if trim_heap is not None:
            trim_heap(0)


def _field(name: str) -> int | None:
    try:
        line = next(line for line in _STATUS.read_text("ascii", "replace").splitlines() if line.startswith(name))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024
