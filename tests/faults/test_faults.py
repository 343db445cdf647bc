"""Commands that are killed, stopped or refused a file: the figures R1 to R3, R8 and R9 of the fault list at a small size.

`make faults` has the size for a release, of all commands.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import crashes
import determinism
import io_errors
import power_loss
import pytest
import syscalls
import workloads
from figures import Figure

watched = pytest.mark.skipif(not syscalls.available(), reason="this kernel has no seccomp notifications")


def opens_export(call: syscalls.Call) -> bool:
    name = Path(call.path).name
    return call.name == "openat" and (name.startswith(".export.tmp-") or name == "mlm")


MakeFigure = Callable[[workloads.World, Path], Figure]
FIGURES: dict[str, tuple[MakeFigure, list[pytest.MarkDecorator]]] = {
    "R1 after kill -9 before a change to a file the same command gives the same bytes": (
        lambda world, scratch: crashes.kills(world, scratch, most=3, workloads=("index", "select")),
        [watched],
    ),
    "R1 after kill -9 at a random moment the same command gives the same bytes": (
        lambda world, scratch: crashes.random_kills(world, scratch, times=2),
        [],
    ),
    "R2 a failed call on a file exits with 4 and leaves no partial result": (
        lambda world, scratch: io_errors.failures(world, scratch, workloads=("index", "select", "finish"), most=4),
        [watched],
    ),
    "R2 an export folder that cannot be listed is a disk error": (
        lambda world, scratch: io_errors.failures(world, scratch, workloads=("finish",), most=100, concerning=opens_export),
        [watched, pytest.mark.slow],
    ),
    "R3 after a power loss every result is old or new": (
        lambda world, scratch: power_loss.losses(world, scratch, most=30, rerun_every=30, workloads=("index", "finish")),
        [watched],
    ),
    "R6 runs are equal and index and selection do not depend on the number of processes": (
        lambda world, scratch: determinism.repeats(world, scratch, runs=2),
        [pytest.mark.slow],
    ),
    "R8 a run stopped by SIGTERM at any moment continues": (lambda world, scratch: crashes.stops(world, scratch, times=1), []),
    "R9 of two index builders one builds at whatever moment the other starts": (
        lambda world, scratch: crashes.races(world, scratch, times=3),
        [watched],
    ),
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name, marks=marks) for name, (make, marks) in FIGURES.items()])
def test_the_guarantee_holds(world: workloads.World, scratch: Path, make: MakeFigure) -> None:
    figure = make(world, scratch)
    assert figure.trials
    assert not figure.failures, "\n".join(figure.failures[:10])


@watched
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_a_command_that_does_not_train_gives_one_line_and_leaves_no_partial_result(
    world: workloads.World, scratch: Path, number: int, code: int
) -> None:
    pids: list[int] = []

    def interrupt(call: syscalls.Call) -> None:
        os.kill(pids[0], number)

    decide, _ = crashes.counted(scratch / "index", 60, interrupt)
    body = crashes.command(["index", world.folder / "data/corpus.jsonl", "--workers", "1", "--out", scratch / "index"], scratch)
    assert syscalls.supervise(body, decide, started=pids.append) == code
    assert (scratch / "stderr").read_text().splitlines()[-1].startswith("cramlm: error: stopped by a signal")
    assert not workloads.leftovers(scratch)
