"""The number of cores that a process may use. Imports little, because every command asks for it when it starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def available_cores(*, groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of cores that this process may use: those of its affinity, but not more than a CPU quota of its control groups.

    A container that is limited to two cores by a quota still sees all cores of its host. groups: where Linux mounts control groups;
    membership: its list of those that this process is in (cgroups(7)).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(groups, membership))]))


def _quotas(groups: Path, membership: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of the control groups of this process and of all groups around them; versions 1 and 2."""
    try:
        lines = membership.read_text("utf-8").splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top, names = (groups / "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")) if controllers else (groups, ("cpu.max",))
        folder = top / path.strip("/")
        for each in (folder, *folder.parents):
            if not each.is_relative_to(top):
                break
            try:
                quota, period = " ".join((each / name).read_text("ascii") for name in names).split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)
            except (OSError, ValueError):  # a group without the controller
                continue
