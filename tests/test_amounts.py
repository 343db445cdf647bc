"""Budgets as they are written."""

from __future__ import annotations

import pytest

from cramlm.config.base import NOMINAL_FLOPS, Budget, parse_budget
from cramlm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20m", Budget(seconds=1200)),
        ("90", Budget(seconds=90)),
        ("3e15flops", Budget(flops=3e15)),
        ("2.5E12 FLOPs", Budget(flops=2.5e12)),
        ("1000000flop", Budget(flops=1e6)),
    ],
)
def test_a_budget_is_a_time_or_a_number_of_operations(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "soon", "0flops", "-3e15flops", "3e15", "flops", "0m", "1e999flops", "nanflops"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="3e15flops"):
        parse_budget(text)


def test_operations_have_the_time_that_they_take_on_a_common_machine() -> None:
    assert parse_budget("20m").nominal_seconds == 1200
    assert Budget(flops=60 * NOMINAL_FLOPS).nominal_seconds == 60
