"""torchrun with two ranks on this machine (R10): killed, stopped, asked to stop, on two nodes; nobody is left behind, and the bits are
those of two ranks that nobody disturbed. What happens inside a phase is in training/test_distributed.py, without torchrun's ten seconds.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_kill import results

from cramlm.artifacts import verify
from cramlm.config import RunConfig, to_toml
from ranks import free_port
from tiny_task import tiny_config, write_task

pytestmark = pytest.mark.slow
TIMEOUT = 20.0
PATIENCE = 300  # seconds for a whole run on a busy machine


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    data = tiny_config(write_task(folder / "data"), baseline={"enabled": False}, tokens_per_second=10_000, distributed={"timeout": TIMEOUT})
    data["phases"][0] |= {"steps": 150, "checkpoint_every": 10}
    file = folder / "run.toml"
    file.write_text(to_toml(RunConfig.model_validate(data)), "utf-8")
    return file


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> dict[str, str]:
    """The results of two ranks."""
    process = launch(config, config.parent / "undisturbed")
    assert process.wait(PATIENCE) == 0, output(config.parent / "undisturbed")
    return results(config.parent / "undisturbed")


def launch(config: Path, folder: Path, *flags: str, log: str = "output") -> subprocess.Popen[bytes]:
    """torchrun over `cramlm fit` into `folder`/run; what all say goes to `folder`/`log`."""
    folder.mkdir(exist_ok=True)
    flags = flags or ("--nproc-per-node", "2")
    fit = ("-m", "cramlm", "fit", "--config", str(config), "--out", str(folder / "run"), "--store", str(folder / "store"))
    with (folder / log).open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *flags, *fit], stdout=file, stderr=file)


def output(folder: Path) -> str:
    return "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("output*")))


def error_lines(folder: Path) -> list[str]:
    return [line for line in output(folder).splitlines() if line.startswith("cramlm: error")]


def ranks_of(folder: Path) -> dict[int, int]:
    """rank -> pid of every process that trains into `folder`."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                arguments, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
            if rank and str(folder / "run").encode() in arguments:
                found[rank[0]] = int(process.name)
    return found


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
    assert "exitcode  : 4" in output(tmp_path)
    assert_finishes(config, tmp_path, undisturbed)


def test_r10_kills_at_random_moments_of_the_whole_run(config: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    draw = random.Random(7)
    for _ in range(3):
        process = launch(config, tmp_path)
        while not ranks_of(tmp_path) and process.poll() is None:
            time.sleep(0.1)
        time.sleep(draw.uniform(1, 20))
        for pid in draw.sample(list(ranks_of(tmp_path).values()), k=1) if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait(TIMEOUT + 90)
        assert ranks_of(tmp_path) == {}
    assert_finishes(config, tmp_path, undisturbed)


def test_torchrun_starts_the_ranks_again_by_itself_if_it_may(config: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    process = launch(config, tmp_path, "--nproc-per-node", "2", "--max-restarts", "1")
    wait_for_checkpoint(tmp_path, process)
    os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
    assert process.wait(PATIENCE) == 0, output(tmp_path)
    assert "goes on from step" in output(tmp_path)
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
