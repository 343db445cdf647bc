"""Bad input, damaged and hostile folders, and a server under load: the figures R4, R5, R7, R8 and R11 of the fault list at a small size.

`make faults` has the size for a release.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import bad_inputs
import damage
import fuzzing
import hostile
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


MakeFigure = Callable[[workloads.World, Path], Figure]
FIGURES: dict[str, tuple[MakeFigure, list[pytest.MarkDecorator]]] = {
    "R4 verify and opening detect damage in every kind of folder": (lambda world, scratch: damage.damages(world, every=None, most=200), []),
    "R4 verify of a store detects a missing part or segment": (lambda world, scratch: damage.store_damages(world), []),
    "R5 every command reports bad input in one line with its location and exit code": (
        lambda world, scratch: bad_inputs.bad_inputs(world, scratch, most=30),
        [],
    ),
    "R7 64 clients with a fifth of invalid requests get correct predictions or one line": (
        lambda world, scratch: server_load.clients(world, scratch, seconds=1),
        [],
    ),
    "R8 a server stopped while loading or later exits with 0": (lambda world, scratch: server_load.stops(world, scratch, times=2), []),
    "R11 hostile folders and archives execute nothing and write nowhere else": (hostile.hostile, [watched]),
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name, marks=marks) for name, (make, marks) in FIGURES.items()])
def test_the_guarantee_holds(world: workloads.World, scratch: Path, make: MakeFigure) -> None:
    figure = make(world, scratch)
    assert figure.trials
    assert not figure.failures, "\n".join(figure.failures[:10])


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
