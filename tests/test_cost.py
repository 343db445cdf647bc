"""The forecast cost of a run, compared with the resources of the machine."""

from __future__ import annotations

import pytest

from cramlm.config.base import Budget
from cramlm.errors import EnvironmentFault, UsageError
from cramlm.planning.budget import Sizes
from cramlm.planning.cost import CostForecast, Machine, TextSizes, check_resources, forecast_cost
from cramlm.planning.speed import Measurement
from cramlm.recipes import tlm

FORECAST = CostForecast((), None, 1, 0, (), 60.0, 1e12, memory=3_000_000_000, disk=2_000_000_000)


@pytest.mark.parametrize(
    ("memory", "disk", "line"),
    [
        (2_900_000_000, 9_000_000_000, "needs about 3.0 GB of memory and 2.9 GB are available; pass a smaller"),
        (None, 1_900_000_000, "runs/x: this run needs about 2.0 GB of disk and 1.9 GB are free; free space, or pass"),
    ],
)
def test_a_run_that_needs_more_than_the_machine_has_is_refused_with_both_numbers(memory: int | None, disk: int, line: str) -> None:
    with pytest.raises(EnvironmentFault, match=line):
        check_resources(FORECAST, memory=memory, disk=disk, folder="runs/x")


def test_a_run_that_just_fits_is_not_refused() -> None:
    check_resources(FORECAST, memory=3_000_000_000, disk=2_000_000_000, folder="runs/x")


def test_a_short_time_is_accepted_on_a_busy_machine_and_too_few_operations_never() -> None:
    busy = Measurement(100.0, 2, 0.2, 1e7, None)
    texts = TextSizes(Sizes(100, 2, 5000, 5000, 5000, 0), 64, 0)
    config = tlm(train="", corpus=["corpus.txt"])

    def forecast(budget: Budget) -> CostForecast:
        return forecast_cost(config, budget, texts, Machine(busy, busy, 1000))

    assert all(phase.steps for phase in forecast(Budget(seconds=20.0)).phases)
    assert all(phase.steps for phase in forecast(Budget(flops=1e13)).phases)
    with pytest.raises(UsageError, match="at least 20 are needed"):
        forecast(Budget(flops=1e10))


def test_a_time_budget_leaves_out_what_reading_and_counting_the_corpus_takes() -> None:
    quiet = Measurement(10_000.0, 1, 1.0, 1e7, None)
    config = tlm(train="", corpus=["corpus.txt"])

    def seconds_of_training(corpus_bytes: int) -> float:
        texts = TextSizes(Sizes(100, 2, 5000, 5000, 5000, 0), 64, corpus_bytes)
        return sum(forecast_cost(config, Budget(seconds=600.0), texts, Machine(quiet, quiet, 1000)).phase_seconds)

    assert seconds_of_training(0) == pytest.approx(600, rel=0.05)
    assert seconds_of_training(500_000_000) == pytest.approx(600 - 25 - 27 - 6, rel=0.05)
    assert seconds_of_training(5_000_000_000) > 250, "of a larger corpus a sample is counted"
