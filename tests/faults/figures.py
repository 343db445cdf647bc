"""A figure of the fault list: the number of trials and the failures."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

P = ParamSpec("P")


@dataclass(slots=True)
class Figure:
    """One row of the table. trials: in the unit that `what` names. failures: one line each. late: checks that held, but took too long."""

    name: str
    what: str
    trials: int = 0
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def check(self, holds: object, failure: str) -> None:
        """Add a failure unless `holds`."""
        if not holds:
            self.failures.append(failure)

    def check_time(self, holds: object, failure: str) -> None:
        """Check something that depends on the speed of the machine: a failure in `make faults`, not in the test suite."""
        if not holds:
            self.late.append(failure)

    @contextmanager
    def trial(self, scratch: Path) -> Iterator[Path]:
        """Yield the path of a folder for one trial; then count the trial and remove the folder."""
        yield scratch / "trial"
        self.trials += 1
        shutil.rmtree(scratch / "trial")

    @property
    def wrong(self) -> list[str]:
        """Return the failures and the late checks."""
        return [*self.failures, *self.late]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON, with the first failures only."""
        return {
            "figure": self.name,
            "what": self.what,
            "trials": self.trials,
            "failures": len(self.wrong),
            "first_failures": self.wrong[:5],
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
        }


def measured(name: str, what: str) -> Callable[[Callable[Concatenate[Figure, P], None]], Callable[P, Figure]]:
    """Make a function that fills a figure, its first argument, into one that returns a new figure with its seconds."""

    def decorate(fill: Callable[Concatenate[Figure, P], None]) -> Callable[P, Figure]:
        @functools.wraps(fill)
        def filled(*arguments: P.args, **named: P.kwargs) -> Figure:
            new, began = Figure(name, what), time.monotonic()
            fill(new, *arguments, **named)
            new.seconds = time.monotonic() - began
            return new

        return filled

    return decorate
