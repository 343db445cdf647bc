"""This machine: the number of cores that a process may use, its memory on Linux, a description.

Imports little, because every command reads the number of cores when it starts.
"""

from __future__ import annotations

import gc
import importlib.metadata
import math
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from cramlm.errors import counted

_STATUS: Final = Path("/proc/self/status")
_PROCESSORS: Final = Path("/proc/cpuinfo")
_BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16"})
_SPIN_COUNT: Final = "10000"
"""Iterations for which an idle OpenMP thread spins before it sleeps. With the default, two threads next to another busy process are up to a
hundred times slower than one; with this value, at most twice (docs/log.md)."""
_GROUPS: Final = Path("/sys/fs/cgroup")
"""Where Linux mounts control groups (cgroups(7))."""
_MEMBERSHIP: Final = Path("/proc/self/cgroup")
"""The control groups that this process is in."""


def available_cores(*, groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the number of cores that this process may use: those of its affinity, but not more than a CPU quota of its control groups.

    A container that is limited to two cores by a quota still sees all cores of its host.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(groups, membership))]))


def _quotas(groups: Path, membership: Path) -> Iterator[float]:
    """Yield the CPU quotas of the control groups of this process, in cores."""
    for group, version in _control_groups("cpu", groups, membership):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        with suppress(OSError, ValueError):  # a group without the controller
            quota, period = " ".join((group / name).read_text("ascii") for name in names).split()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)


def _unused_memory(groups: Path, membership: Path) -> Iterator[int]:
    """Yield the bytes that memory limits of the control groups of this process leave; as in MemAvailable, cached files are free."""
    for group, version in _control_groups("memory", groups, membership):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
        total = "total_" if version == 1 else ""
        with suppress(OSError, ValueError, KeyError):  # a group without the controller, or "max"
            limit, used = (int((group / name).read_text("ascii")) for name in names)
            statistics = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text("ascii").splitlines())
            cached = sum(int(statistics[f"{total}{state}_file"]) for state in ("active", "inactive"))
            yield limit - max(0, used - cached)


def _control_groups(controller: str, groups: Path, membership: Path) -> Iterator[tuple[Path, Literal[1, 2]]]:
    """Yield the folders of the control groups of this process and of all groups around them, and the version of their files."""
    try:
        lines = membership.read_text("utf-8").splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        top = groups / controller if controllers else groups
        folder = top / path.strip("/")
        yield from ((each, 1 if controllers else 2) for each in (folder, *folder.parents) if each.is_relative_to(top))


def limit_spinning() -> None:
    """Let idle threads of OpenMP sleep soon, unless GOMP_SPINCOUNT is set. Has an effect before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def resident_memory() -> int | None:
    """Return the resident bytes of this process; None if unknown."""
    return _field("VmRSS:")


def peak_memory() -> int | None:
    """Return the peak of the resident bytes since the process started or since `reset_peak_memory`; None if unknown."""
    return _field("VmHWM:")


def reset_peak_memory() -> None:
    """Start a new peak; does nothing where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def system_memory() -> tuple[int, int] | None:
    """Return the bytes of memory of the machine, in all and available without swapping; None if unknown."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None
    return total, available


def available_memory(*, groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes available without swapping: of the machine, or less if this process's control groups or address space
    (`ulimit -v`) limit it; None if unknown.
    """
    if (memory := system_memory()) is None:
        return None
    _, free = memory
    if (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        free = min(free, max(0, most - (_field("VmSize:") or 0)))
    return max(0, min([free, *_unused_memory(groups, membership)]))


def trim_memory() -> None:
    """Collect garbage and return freed pages to the system.

    glibc keeps freed memory in its heap, so that a process that trains one model after the other grows by fragmentation. It takes
    some 0.3 seconds, and the pages that are needed again take as long, so it belongs between pieces of work.
    """
    gc.collect()
    if sys.platform == "linux":
        import ctypes  # here: every command imports this module

        trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl has none
        if trim_heap is not None:
            trim_heap(0)


def _field(name: str) -> int | None:
    try:
        line = next(line for line in _STATUS.read_text("ascii", "replace").splitlines() if line.startswith(name))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024


def describe_machine() -> str:
    """Describe this machine in one line of a log: processor, cores, memory, system; unknown parts are left out."""
    parts = [_processor_field("model name") or platform.processor(), counted(os.cpu_count() or 1, "core"), _installed_memory()]
    torch = importlib.metadata.version("torch")
    parts.append(f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch}")
    return ", ".join(part for part in parts if part)


def has_bf16_instructions(*, processors: Path = _PROCESSORS) -> bool:
    """Return True if the processor multiplies matrices in bf16 in hardware (AVX512-BF16 or AMX), as `model.has_bf16`, without torch.

    False where the system does not say.
    """
    return not _BF16_FLAGS.isdisjoint(_processor_field("flags", processors).split())


def _processor_field(name: str, processors: Path = _PROCESSORS) -> str:
    """Return a field of the first processor, with single spaces; empty if unknown."""
    try:
        lines = processors.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((" ".join(line.partition(":")[2].split()) for line in lines if line.startswith(name)), "")


def _installed_memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB"
    except (OSError, ValueError):
        return ""
