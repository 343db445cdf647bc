"""torchrun with two ranks: killed, stopped or signalled ranks leave no process behind, and the rerun has the bits of an undisturbed run.

`make faults ARGS=R10` does this at random moments (lost_ranks.py); training/test_distributed.py tests single phases without torchrun.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from lost_ranks import PATIENCE, TIMEOUT, error_lines, launch, losses, output, ranks_of, write_config
from workloads import results

from cramlm.storage.artifacts import verify
from ranks import free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> dict[str, str]:
    """The results of two ranks."""
    process = launch(config, config.parent / "undisturbed")
    assert process.wait(PATIENCE) == 0, output(config.parent / "undisturbed")
    return results(config.parent / "undisturbed")


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE
    while not list(folder.glob("run/.work/phase-1-joint/step-*")):
        assert process.poll() is None, output(folder)
        assert time.monotonic() < until, output(folder)
        time.sleep(0.05)


def assert_finishes(config: Path, folder: Path, expected: dict[str, str]) -> None:
    assert launch(config, folder).wait(PATIENCE) == 0, output(folder)
    assert results(folder) == expected
    assert verify(folder) > 5


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_r10_a_rank_that_is_killed_or_stopped_leaves_nobody_behind_and_the_rerun_has_the_same_bits(
    config: Path, undisturbed: dict[str, str], tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    process = launch(config, tmp_path)
    wait_for_checkpoint(tmp_path, process)
    os.kill(ranks_of(tmp_path)[rank], number)
    assert process.wait(TIMEOUT + 30 + 30) != 0  # torchrun gives a stopped rank half a minute before it kills it
    assert ranks_of(tmp_path) == {}
    (line,) = error_lines(tmp_path)
    assert line.endswith("run the same command again to continue"), line
    # Of the rank that ended first: the one that noticed that the other was gone, or the killed one.
    assert re.search(rf"exitcode  : (4|-{signal.SIGKILL:d})", output(tmp_path))
    assert_finishes(config, tmp_path, undisturbed)


def test_torchrun_starts_the_ranks_again_by_itself_if_it_may(config: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    process = launch(config, tmp_path, "--nproc-per-node", "2", "--max-restarts", "1")
    wait_for_checkpoint(tmp_path, process)
    os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
    assert process.wait(PATIENCE) == 0, output(tmp_path)
    assert "resuming from step" in output(tmp_path)
    assert results(tmp_path) == undisturbed


def test_sigterm_to_torchrun_saves_and_the_rerun_has_the_same_bits(config: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    process = launch(config, tmp_path)
    wait_for_checkpoint(tmp_path, process)
    process.terminate()
    assert process.wait(30) != 0
    assert ranks_of(tmp_path) == {}
    (line,) = error_lines(tmp_path)
    assert "stopped after step" in line
    assert_finishes(config, tmp_path, undisturbed)


def test_ranks_whose_launcher_is_killed_save_and_end(config: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    process = launch(config, tmp_path)
    wait_for_checkpoint(tmp_path, process)
    process.kill()
    process.wait()
    until = time.monotonic() + TIMEOUT + 30
    while ranks_of(tmp_path):
        assert time.monotonic() < until, output(tmp_path)
        time.sleep(0.2)
    assert_finishes(config, tmp_path, undisturbed)


def test_two_nodes_that_meet_over_the_network_are_two_ranks(config: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    nodes = [launch(config, tmp_path, *meeting, log=f"output-{node}") for node in range(2)]
    assert [node.wait(PATIENCE) for node in nodes] == [0, 0], output(tmp_path)
    assert results(tmp_path) == undisturbed


def test_the_death_of_a_node_ends_the_other_within_the_timeout(config: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    nodes = [launch(config, tmp_path, *meeting, log=f"output-{node}") for node in range(2)]
    wait_for_checkpoint(tmp_path, nodes[0])
    lost = ranks_of(tmp_path)[1]
    launcher = int(Path(f"/proc/{lost}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    for pid in (launcher, lost):
        os.kill(pid, signal.SIGKILL)
    assert all(node.wait(TIMEOUT + 60) != 0 for node in nodes)
    assert ranks_of(tmp_path) == {}
    assert_finishes(config, tmp_path, undisturbed)


def test_a_fault_at_any_moment_leaves_nobody_behind_and_the_rerun_has_the_same_bits(tmp_path: Path) -> None:
    figure = losses(tmp_path, times=3)
    assert figure.trials == 3
    assert not figure.failures, "\n".join(figure.failures)
