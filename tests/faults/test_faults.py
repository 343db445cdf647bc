"""The figures of the fault list at a small size; test_ranks.py has R10, and `make faults` the size for a release."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import bad_inputs
import crashes
import damage
import determinism
import fuzzing
import hostile
import io_errors
import power_loss
import pytest
import server_load
import syscalls
import workloads
from figures import Figure
from hypothesis import given
from hypothesis import strategies as st

from cramlm.data.corpus import verify_corpora
from cramlm.errors import ArtifactError
from cramlm.retrieval.bm25.index import verify_indexes
from cramlm.storage.artifacts import verify

watched = pytest.mark.skipif(not syscalls.available(), reason="this kernel has no seccomp notifications")


def opens_export(call: syscalls.Call) -> bool:
    name = Path(call.path).name
    return call.name == "openat" and (name.startswith(".export.tmp-") or name == "mlm")


MakeFigure = Callable[[workloads.World, Path], Figure]
FIGURES: dict[str, tuple[MakeFigure, list[pytest.MarkDecorator]]] = {
    "R1 after kill -9 before a change to a file the same command gives the same bytes": (
        lambda world, scratch: crashes.kills(world, scratch, most=3, workloads=("select",)),
        [watched, pytest.mark.faults],
    ),
    "R1 after kill -9 at a random moment the same command gives the same bytes": (
        lambda world, scratch: crashes.random_kills(world, scratch, times=1),
        [pytest.mark.faults],
    ),
    "R1 after kill -9 old results are not taken for those of other settings": (
        lambda world, scratch: crashes.kills(world, scratch, most=20, workloads=("fit with other settings",)),
        [watched, pytest.mark.slow],
    ),
    "R2 a failed call on a file exits with 4 and leaves no partial result": (
        lambda world, scratch: io_errors.failures(world, scratch, workloads=("index",), most=4),
        [watched],
    ),
    "R2 an export folder that cannot be listed is a disk error": (
        lambda world, scratch: io_errors.failures(world, scratch, workloads=("finish",), most=100, concerning=opens_export),
        [watched, pytest.mark.slow],
    ),
    "R3 after a power loss every result is old or new": (
        lambda world, scratch: power_loss.losses(world, scratch, most=30, rerun_every=30, workloads=("index", "finish")),
        [watched, pytest.mark.faults],
    ),
    "R4 verify and opening detect damage in every kind of folder": (lambda world, scratch: damage.damages(world, every=None, most=200), []),
    "R4 verify of a store detects a missing part or segment": (lambda world, scratch: damage.store_damages(world), []),
    "R5 every command reports bad input in one line with its location and exit code": (
        lambda world, scratch: bad_inputs.bad_inputs(world, scratch, most=30),
        [],
    ),
    "R6 runs are equal and index and selection do not depend on the number of processes": (
        lambda world, scratch: determinism.repeats(world, scratch, runs=2),
        [pytest.mark.slow],
    ),
    "R7 64 clients with a fifth of invalid requests get correct predictions or one line": (
        lambda world, scratch: server_load.clients(world, scratch, seconds=0.1),
        [pytest.mark.faults],
    ),
    "R8 a run stopped by SIGTERM at any moment continues": (
        lambda world, scratch: crashes.stops(world, scratch, times=1),
        [pytest.mark.faults],
    ),
    "R8 a server stopped while loading or later exits with 0": (
        lambda world, scratch: server_load.stops(world, scratch, times=2),
        [pytest.mark.faults],
    ),
    "R9 of two index builders one builds at whatever moment the other starts": (
        lambda world, scratch: crashes.races(world, scratch, times=2),
        [watched, pytest.mark.faults],
    ),
    "R11 hostile folders and archives execute nothing and write nowhere else": (
        lambda world, scratch: hostile.hostile(world, scratch, alike=2),
        [watched],
    ),
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name, marks=marks) for name, (make, marks) in FIGURES.items()])
def test_the_guarantee_holds(world: workloads.World, scratch: Path, make: MakeFigure) -> None:
    figure = make(world, scratch)
    assert figure.trials
    assert not figure.failures, "\n".join(figure.failures[:10])


@pytest.mark.faults
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


@given(fuzzing.rows, st.integers(0, 2**62))
def test_tables_in_every_format_are_read_completely_and_damaged_ones_get_one_line(tmp_path: Path, table: fuzzing.Rows, seed: int) -> None:
    assert fuzzing.check_table(tmp_path, [(text if text.strip() else "x", label) for text, label in table], seed) is None


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "found").glob("*")), ids=lambda path: path.name)
def test_files_found_by_fuzzing_violate_no_rule(file: Path) -> None:
    assert fuzzing.violation(file, None) is None


def test_verify_of_an_undamaged_store_finds_nothing(world: workloads.World) -> None:
    for check in (verify, verify_corpora, verify_indexes):
        check(world.folder / "catalog")
    with pytest.raises(ArtifactError):
        verify(world.folder / "data")
