"""What a run will cost, held against what there is."""

from __future__ import annotations

import pytest

from cramlm.errors import EnvironmentFault
from cramlm.stages.cost import Outlook, refuse_hopeless

FORESEEN = Outlook((), None, 1, 0, (), 60.0, 1e12, memory=3_000_000_000, disk=2_000_000_000)


@pytest.mark.parametrize(
    ("memory", "disk", "line"),
    [
        (2_900_000_000, 9_000_000_000, "needs about 3.0 GB of memory and 2.9 GB are available; pass a smaller"),
        (None, 1_900_000_000, "runs/x: this run needs about 2.0 GB of disk and 1.9 GB are free; free space, or pass"),
    ],
)
def test_a_run_that_needs_more_than_there_is_is_refused_with_both_figures(memory: int | None, disk: int, line: str) -> None:
    with pytest.raises(EnvironmentFault, match=line):
        refuse_hopeless(FORESEEN, memory=memory, disk=disk, folder="runs/x")


def test_a_run_that_just_fits_is_not_refused() -> None:
    refuse_hopeless(FORESEEN, memory=3_000_000_000, disk=2_000_000_000, folder="runs/x")
