"""What a run will cost, held against what there is."""

from __future__ import annotations

import pytest

from cramlm.config.base import Budget
from cramlm.errors import EnvironmentFault, UsageError
from cramlm.planning.budget import Sizes
from cramlm.planning.cost import Machine, Outlook, Texts, foresee, refuse_hopeless
from cramlm.planning.speed import Measurement
from cramlm.recipes import tlm

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


def test_a_busy_machine_excuses_a_short_time_but_not_too_few_operations() -> None:
    busy = Measurement(100.0, 2, 0.2, 1e7, None)
    texts = Texts(Sizes(100, 2, 5000, 5000, 5000, 0), 64, 0)
    config = tlm(train="", corpus=["corpus.txt"])

    def foreseen(budget: Budget) -> Outlook:
        return foresee(config, budget, texts, Machine(busy, busy, 1000))

    assert all(phase.steps for phase in foreseen(Budget(seconds=20.0)).phases)
    assert all(phase.steps for phase in foreseen(Budget(flops=1e13)).phases)
    with pytest.raises(UsageError, match="fewer than 20 teach nothing"):
        foreseen(Budget(flops=1e10))
