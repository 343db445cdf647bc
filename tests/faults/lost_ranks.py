"""R10: one of two ranks under torchrun is killed, is stopped or computes NaN; all end in time, and the rerun has the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from figures import Figure, measured
from workloads import results

from cramlm.config.run import RunConfig, to_toml
from tiny_task import tiny_config, write_task

STEPS = 150
TIMEOUT = 20.0  # seconds that ranks wait for each other; torchrun kills a stopped rank half a minute later
PATIENCE = 300  # seconds for a whole run on a busy machine
FIT_WITH_NAN = Path(__file__).with_name("fit_with_nan.py")


def write_config(folder: Path) -> Path:
    """Write the config of a run that trains for some seconds with fifteen checkpoints."""
    data = tiny_config(write_task(folder / "data"), baseline={"enabled": False}, tokens_per_second=10_000, distributed={"timeout": TIMEOUT})
    data["phases"][0] |= {"steps": STEPS, "checkpoint_every": 10}
    file = folder / "run.toml"
    file.write_text(to_toml(RunConfig.model_validate(data)), "utf-8")
    return file


def launch(
    config: Path, folder: Path, *flags: str, log: str = "output", fit: tuple[str, ...] = ("-m", "cramlm")
) -> subprocess.Popen[bytes]:
    """Start `cramlm fit` into `folder`/run under torchrun, with the output of all processes in `folder`/`log`."""
    folder.mkdir(exist_ok=True)
    flags = flags or ("--nproc-per-node", "2")
    command = (*fit, "fit", "--config", str(config), "--out", str(folder / "run"), "--store", str(folder / "store"))
    with (folder / log).open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *flags, *command], stdout=file, stderr=file)


def output(folder: Path) -> str:
    """Return the output of all launchers and ranks."""
    return "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("output*")))


def error_lines(folder: Path) -> list[str]:
    """Return the error lines of the command."""
    return [line for line in output(folder).splitlines() if line.startswith("cramlm: error")]


def ranks_of(folder: Path) -> dict[int, int]:
    """Return rank -> pid of every process that trains into `folder`."""
    pids = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                arguments, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
            if rank and str(folder / "run").encode() in arguments:
                pids[rank[0]] = int(process.name)
    return pids


@measured("R10", "one of 2 ranks under torchrun killed, stopped, or at NaN: no process left in time, the rerun with the same bits")
def losses(figure: Figure, scratch: Path, *, times: int, seed: int = 7) -> None:
    """Kill a rank, stop one, and compute NaN on one, in turn, `times` in all; a random rank at a random moment."""
    rng = random.Random(seed)
    config = write_config(scratch)
    began = time.monotonic()
    assert launch(config, scratch / "undisturbed").wait(PATIENCE) == 0, output(scratch / "undisturbed")
    duration, end = time.monotonic() - began, results(scratch / "undisturbed")
    done, slowest = 0, 0.0
    for trial in range(times):
        kind, rank = ("killed", "stopped", "NaN")[trial % 3], rng.randrange(2)
        where = f"trial {trial}, rank {rank} {kind}"
        with figure.trial(scratch) as folder:
            if kind == "NaN":
                seconds = _compute_nan(figure, where, config, folder, rank, rng.randrange(STEPS))
            else:
                number = signal.SIGKILL if kind == "killed" else signal.SIGSTOP
                seconds = _send(figure, where, config, folder, rank, number, rng.uniform(0.1, 0.9) * duration)
            done += seconds is None
            slowest = max(slowest, seconds or 0.0)
            figure.check(not (left := ranks_of(folder)), f"{where}: ranks {sorted(left)} are left")
            figure.check(launch(config, folder).wait(PATIENCE) == 0, f"{where}: the next run fails: {output(folder)[-300:]}")
            figure.check(results(folder) == end, f"{where}: the end differs from the undisturbed one")
        print(f"R10: {figure.trials} of {times}, {len(figure.failures)} failures so far", file=sys.stderr, flush=True)
    figure.check(slowest < TIMEOUT + 60, f"{slowest:.0f} s until all had ended")
    figure.notes.append(f"at most {slowest:.0f} s until all had ended, {done} times the run had ended before")


def _send(figure: Figure, where: str, config: Path, folder: Path, rank: int, number: signal.Signals, after: float) -> float | None:
    """Send a signal to a rank `after` so many seconds; return the seconds until all have ended, None if the run ended first."""
    process = launch(config, folder)
    deadline = time.monotonic() + after
    while (rank not in ranks_of(folder) or time.monotonic() < deadline) and process.poll() is None:
        time.sleep(0.05)
    if process.poll() is not None:
        figure.check(process.returncode == 0, f"{where}: ended by itself with {process.returncode}: {output(folder)[-300:]}")
        return None
    os.kill(ranks_of(folder)[rank], number)
    began = time.monotonic()
    code = process.wait(TIMEOUT + 90)
    figure.check(code != 0, f"{where}: torchrun exits with 0")
    return time.monotonic() - began


def _compute_nan(figure: Figure, where: str, config: Path, folder: Path, rank: int, step: int) -> float:
    """Make the loss of a rank NaN after so many steps; return the seconds of the run."""
    began = time.monotonic()
    code = launch(config, folder, fit=(str(FIT_WITH_NAN), str(rank), str(step))).wait(PATIENCE)
    figure.check(code != 0, f"{where} after {step} steps: torchrun exits with 0")
    lines = error_lines(folder)
    figure.check(len(lines) == 1 and "the loss is nan" in lines[0], f"{where} after {step} steps: error lines {lines}")
    return time.monotonic() - began
