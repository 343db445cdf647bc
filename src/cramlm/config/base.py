"""The base class of all settings, and amounts as text: counts (50M), durations (20m), budgets (a duration, or 3e15flops)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from cramlm.errors import UsageError

MAX_FLOPS = 1e26
MAX_SECONDS = 1_000 * 365 * 86_400.0
"""The largest budgets: about what the largest language models take, and a thousand years."""


class FrozenModel(BaseModel):
    """A group of settings: immutable, without unknown names, with finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_as_a_value(cls, data: Any) -> Any:
        """Replace None by "none" where a setting has that value: `--set logit_adjustment=none` parses as unset."""
        if not isinstance(data, dict):
            return data
        has_none = {name for name, field in cls.model_fields.items() if "none" in get_args(field.annotation)}
        return {name: "none" if value is None and name in has_none else value for name, value in data.items()}


def classes_by_kind(union: Any) -> dict[str, type[BaseModel]]:
    """Return the classes of a union by their `kind`."""
    return {model.model_fields["kind"].default: model for model in get_args(union)}


def parse_count(value: Any) -> Any:
    """Return text like 50M, 1.5k or 2_000 as a whole number, anything else unchanged (for the field's own validation).

    Raises:
        ValueError: if the text is not a count.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d[\d_]{0,30}(?:\.\d{1,30})?)\s*([kMG]?)", value.strip())
    # A fraction is exact: as floating-point numbers, 4.1 * 10**6 is no whole number.
    count = None if match is None else Fraction(match[1].replace("_", "")) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[match[2]]
    if count is None or count.denominator != 1:
        raise ValueError("must be a count like 500000, 500k or 50M")
    return int(count)


Count: TypeAlias = Annotated[int, BeforeValidator(parse_count)]


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of a run; at most one field is set, and none if it is unlimited.

    seconds: wall-clock time of the whole run. flops: operations of the matrix products of training, as `training.objective.executed_flops`
    counts them; the time is not limited.
    """

    seconds: float | None = None
    flops: float | None = None


def parse_budget(text: str) -> Budget:
    """Parse a time ('90s', '20m', '1.5h', or a plain number of seconds) or a number of operations ('3e15flops').

    Raises:
        UsageError: if it is neither, or not positive, or above `MAX_FLOPS` or `MAX_SECONDS`.
    """
    flops = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?) ?flops?", text.strip().lower())
    if flops is not None:
        if float(flops[1]) <= 0:
            raise UsageError(f"budget {text!r} is not a positive number of operations; write it like 3e15flops")
        if float(flops[1]) > MAX_FLOPS:
            raise UsageError(f"budget {text!r} is over 1e26 operations; pass a smaller one, like 3e15flops")
        return Budget(flops=float(flops[1]))
    seconds = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if seconds is None or float(seconds[1]) <= 0:
        raise UsageError(f"budget {text!r} is neither a positive time, like 20m, nor a number of operations, like 3e15flops")
    amount = float(seconds[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[seconds[2]]
    if amount > MAX_SECONDS:
        raise UsageError(f"budget {text!r} is over 1,000 years; pass a smaller one, like 20m")
    return Budget(seconds=amount)
