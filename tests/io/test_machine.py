"""The number of cores is that of the affinity, or of a CPU quota; memory is in bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cramlm.io.machine import available_cores, system_memory

AFFINITY = len(os.sched_getaffinity(0))
INNER = "0::/pod/container\n"  # version 2
FIRST = "4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n"  # version 1


def first_version(folder: str, quota: str) -> dict[str, str]:
    return {f"cpu/{folder}cpu.cfs_quota_us": quota, f"cpu/{folder}cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        pytest.param(INNER, {"pod/container/cpu.max": "100000 100000"}, 1, id="one core"),
        pytest.param(INNER, {"pod/container/cpu.max": "50000 100000"}, 1, id="half a core"),
        pytest.param(INNER, {"pod/container/cpu.max": "max 100000", "pod/cpu.max": "90000 100000"}, 1, id="a quota of the outer group"),
        pytest.param(INNER, {"cpu.max": "100000 100000"}, 1, id="a container that sees its own group as the root"),
        pytest.param(INNER, {"pod/container/cpu.max": "900000000 100000"}, AFFINITY, id="a quota of more cores than there are"),
        pytest.param(INNER, {"pod/container/cpu.max": "max 100000"}, AFFINITY, id="no quota"),
        pytest.param(INNER, {"pod/container/cpu.max": "?"}, AFFINITY, id="a file that is not a quota"),
        pytest.param(INNER, {}, AFFINITY, id="no files"),
        pytest.param(FIRST, first_version("docker/1f/", "100000"), 1, id="version 1"),
        pytest.param(FIRST, first_version("", "100000"), 1, id="version 1 in a container"),
        pytest.param(FIRST, first_version("docker/1f/", "-1"), AFFINITY, id="version 1 without a quota"),
        pytest.param(None, {}, AFFINITY, id="no control groups"),
    ],
)
def test_a_quota_of_cpu_time_limits_the_number_of_cores(tmp_path: Path, membership: str | None, files: dict[str, str], cores: int) -> None:
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content + "\n", "ascii")
    if membership is not None:
        (tmp_path / "membership").write_text(membership, "ascii")
    assert available_cores(groups=tmp_path / "groups", membership=tmp_path / "membership") == cores


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux only")
def test_the_memory_of_the_machine_is_in_bytes() -> None:
    memory = system_memory()
    assert memory is not None
    total, available = memory
    assert total == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.01)
    assert 0 < available < total
