"""The number of cores is that of the affinity, or of a CPU quota; memory is in bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from cramlm.io.machine import available_cores, available_memory, has_bf16_instructions, system_memory
from cramlm.model.model import has_bf16

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
    assert available_cores(**control_groups(tmp_path, membership, files)) == cores


MB = 10**6
STATISTICS = f"anon {5 * MB}\nactive_file {2 * MB}\ninactive_file {30 * MB}"


@pytest.mark.parametrize(
    ("membership", "files", "available"),
    [
        pytest.param(INNER, {"pod/memory.max": f"{50 * MB}", "pod/memory.current": f"{40 * MB}", "pod/memory.stat": STATISTICS}, 42 * MB),
        pytest.param(INNER, {"memory.max": "max", "memory.current": "4096", "memory.stat": STATISTICS}, None, id="no limit"),
        pytest.param(
            FIRST,
            {
                "memory/memory.limit_in_bytes": f"{50 * MB}",
                "memory/memory.usage_in_bytes": f"{40 * MB}",
                "memory/memory.stat": f"inactive_file 0\ntotal_active_file {2 * MB}\ntotal_inactive_file {30 * MB}",
            },
            42 * MB,
            id="version 1",
        ),
        pytest.param(INNER, {}, None, id="no files"),
    ],
)
def test_a_limit_of_memory_counts_without_the_files_that_the_kernel_caches(
    tmp_path: Path, membership: str, files: dict[str, str], available: int | None
) -> None:
    measured = available_memory(**control_groups(tmp_path, membership, files))
    assert measured == available if available is not None else measured > 100 * MB


def control_groups(folder: Path, membership: str | None, files: dict[str, str]) -> dict[str, Path]:
    """Write a tree of control groups, and the list of those of a process; return their paths by the names of arguments."""
    for name, content in files.items():
        (folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "groups" / name).write_text(content + "\n", "ascii")
    if membership is not None:
        (folder / "membership").write_text(membership, "ascii")
    return {"groups": folder / "groups", "membership": folder / "membership"}


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux only")
def test_the_memory_of_the_machine_is_in_bytes() -> None:
    memory = system_memory()
    total, available = memory
    assert total == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.01)
    assert 0 < available < total


@pytest.mark.parametrize(
    ("flags", "has_bf16"), [("fpu avx2 avx512_bf16", True), ("fpu amx_bf16", True), ("fpu avx2 avx512f", False), (None, False)]
)
def test_bf16_is_among_the_flags_of_the_processor(tmp_path: Path, flags: str | None, has_bf16: bool) -> None:
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"processor\t: 0\nmodel name\t: A  B\nflags\t\t: {flags}\n", encoding="ascii")
    assert has_bf16_instructions(processors=file) == has_bf16


def test_the_flags_of_this_processor_agree_with_torch() -> None:
    assert has_bf16_instructions() == has_bf16(torch.device("cpu"))
