"""kill -9 at random moments of a whole run, then the same call again: the final weights are those of a run that nobody disturbed.

The parent imports torch once and forks a child per start, so that a kill lands in our code and not in an import. Only children compute:
OpenMP's threads do not survive a fork.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

import cramlm.pipeline.run
from cramlm.config.run import RunConfig
from cramlm.storage.artifacts import hash_file, verify
from tiny_task import tiny_config, write_task


def start(config: RunConfig, folder: Path) -> int:
    """Run the pipeline in a child; returns its pid. The child's exit code is 0 if the run finished."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            cramlm.pipeline.run.run(config, out=folder / "run", store=folder / "store")
            code = 0
        finally:
            os._exit(code)
    return pid


def finish(pid: int) -> int:
    """Wait for a child; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def results(folder: Path) -> dict[str, str]:
    """Hashes of what a user keeps: the weights of both exports, the predictions on test, and what was selected."""
    run = folder / "run"
    names = (
        "export/model.safetensors",
        "export/mlm/model.safetensors",
        "evaluation/predictions-test.jsonl",
        "selection/selection.arrow",
        "tokenizer/tokenizer.json",
    )
    return {name: hash_file(run / name) for name in names}


def survive(kills: int, tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    config = RunConfig.model_validate(tiny_config(paths))
    began = time.monotonic()
    assert finish(start(config, tmp_path / "undisturbed")) == 0
    duration = time.monotonic() - began
    expected = results(tmp_path / "undisturbed")

    generator = random.Random(11)
    killed = trials = 0
    while killed < kills:
        trials += 1
        folder = tmp_path / f"trial-{trials}"
        for _ in range(min(generator.choice((1, 2)), kills - killed)):
            pid = start(config, folder)
            time.sleep(generator.uniform(0.02, 0.95) * duration)
            os.kill(pid, signal.SIGKILL)
            if finish(pid) == -signal.SIGKILL:
                killed += 1
            else:  # it was done before the kill: the machine is faster now than when the duration was measured
                duration *= 0.8
                break
        assert finish(start(config, folder)) == 0, f"the run after kill {killed} did not finish"
        assert results(folder) == expected, f"after kill {killed}"
        assert verify(folder) > 5
        leftovers = [path for path in folder.rglob("*.tmp-*") if path.is_dir()]
        assert not leftovers, leftovers
        shutil.rmtree(folder)


def test_a_run_killed_three_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    survive(3, tmp_path)


@pytest.mark.slow
def test_a_run_killed_at_fifty_random_moments_ends_with_the_same_bits(tmp_path: Path) -> None:
    survive(50, tmp_path)
