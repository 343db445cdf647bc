"""Amounts as a user writes them: times like 20m, and budgets, which are a time or a number of floating-point operations."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cramlm.errors import UsageError

NOMINAL_FLOPS = 2e11
"""Operations per second that a budget in FLOPs is taken for where a time is wanted before anything is measured: two cores in bf16."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may use; one of the two is set.

    seconds: wall-clock time, everything included. flops: operations of the matrix products of training, as `planning.executed_flops`
    counts them; a run takes whatever time they need.
    """

    seconds: float | None = None
    flops: float | None = None

    @property
    def nominal_seconds(self) -> float:
        """Its time, or the time that its operations take on two common cores: to choose a size by, not a promise."""
        return self.seconds if self.seconds is not None else (self.flops or 0.0) / NOMINAL_FLOPS


def parse_duration(text: str) -> float:
    """Seconds in '90s', '20m', '1.5h' or a plain number of seconds.

    Raises:
        UsageError: for anything else, or a time that is not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"budget {text!r} is not a positive time; write it like 90s, 20m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def parse_budget(text: str) -> Budget:
    """A time as `parse_duration` reads it, or a number of operations: '3e15flops'.

    Raises:
        UsageError: for anything else, or an amount that is not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?) ?flops?", text.strip().lower())
    if match is None:
        try:
            return Budget(seconds=parse_duration(text))
        except UsageError as error:
            raise UsageError(f"budget {text!r} is neither a positive time, like 20m, nor a number of operations, like 3e15flops") from error
    if float(match[1]) <= 0:
        raise UsageError(f"budget {text!r} is no operation at all; write it like 3e15flops")
    return Budget(flops=float(match[1]))
