"""The base class of all settings, and amounts as text: counts (50M), durations (20m), budgets (a duration, or 3e15flops)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from cramlm.errors import UsageError

NOMINAL_FLOPS = 2e11
"""Operations per second that a budget in FLOPs is taken for where a time is wanted before anything is measured: two cores in bf16."""


class FrozenModel(BaseModel):
    """A table of settings: frozen, no unknown names, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_may_be_a_word(cls, data: Any) -> Any:
        """Read None as "none" where that is one of a setting's words: `--set logit_adjustment=none` reads it as unset."""
        if not isinstance(data, dict):
            return data
        words = {name for name, field in cls.model_fields.items() if "none" in get_args(field.annotation)}
        return {name: "none" if value is None and name in words else value for name, value in data.items()}


def parse_count(value: Any) -> Any:
    """Text like 50M, 1.5k or 2_000 as a whole number; anything else as it is, for the field's own check.

    Raises:
        ValueError: for text that is no count.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s*([kMG]?)", value.strip())
    count = None if match is None else float(match[1].replace("_", "")) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[match[2]]
    if count is None or not count.is_integer():
        raise ValueError("must be a count like 500000, 500k or 50M")
    return int(count)


Count: TypeAlias = Annotated[int, BeforeValidator(parse_count)]


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
