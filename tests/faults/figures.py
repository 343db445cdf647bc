"""What a figure of the fault list comes to: how much was tried, and what went wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Figure:
    """One row of the table. trials: in the unit that `what` names. failures: a line each. late: what held, but took too long."""

    name: str
    what: str
    trials: int = 0
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def check(self, holds: object, failure: str) -> None:
        """Count a failure unless something holds."""
        if not holds:
            self.failures.append(failure)

    def check_time(self, holds: object, failure: str) -> None:
        """Count what depends on the speed of the machine: `make faults` counts it as a failure, the test suite does not."""
        if not holds:
            self.late.append(failure)

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began

    @property
    def wrong(self) -> list[str]:
        """What failed, and what was late."""
        return [*self.failures, *self.late]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, with the first failures only."""
        return {
            "figure": self.name,
            "what": self.what,
            "trials": self.trials,
            "failures": len(self.wrong),
            "first_failures": self.wrong[:5],
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
        }
