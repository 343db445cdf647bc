"""What the stages share: the plan, the chosen text, and small helpers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramlm.amounts import Budget
from cramlm.arrays import read_array
from cramlm.artifacts import Artifact, borrowed_seconds
from cramlm.config import PhaseConfig, RetrieverConfig
from cramlm.model.device import Precision
from cramlm.records import FloatArray
from cramlm.training.budget import Speed


@dataclass(frozen=True, slots=True)
class Clock:
    """When the run began (monotonic seconds) and what it may use (neither time nor operations: as much as it needs)."""

    began: float
    budget: Budget

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, and those of the stages that it has from another run."""
        return time.monotonic() - self.began + borrowed_seconds()

    @property
    def left(self) -> float | None:
        """Seconds of the budget that are not spent; None where it is no time."""
        return None if self.budget.seconds is None else self.budget.seconds - self.elapsed


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decided before anything is read: the bound of the selection, the number format, the threads, the speed of this machine.

    speed: tokens per second. economy: tokens per operation. operations: whether the budget is counted in these.
    """

    retriever: RetrieverConfig | None
    precision: Precision
    threads: int
    speed: Speed
    economy: Speed
    operations: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """The published selection."""

    artifact: Artifact

    def texts(self) -> list[str]:
        """The selected passages in order of (rank, position)."""
        with (self.artifact.path / "selected.jsonl").open(encoding="utf-8") as file:
            return [json.loads(line)["text"] for line in file]

    def weights(self) -> FloatArray | None:
        """How often training draws each passage, mean 1, in the same order; None where all are drawn alike."""
        weights: FloatArray = read_array(self.artifact.path / "weight.npy")
        return None if (weights == weights[0]).all() else weights


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished phase: as it was run, what it published, and what it reported (its phase.json)."""

    phase: PhaseConfig
    artifact: Artifact
    report: Mapping[str, Any]


def fingerprint(chosen: Chosen | None) -> str | None:
    """The selection's fingerprint, None where nothing is retrieved."""
    return None if chosen is None else chosen.artifact.fingerprint


def phases_by_name(phases: Sequence[PhaseConfig]) -> dict[str, Any]:
    """Phases as plain data under their names, so that a reason to run again reads 'phases.joint.steps 500 -> 600'."""
    return {phase.name: phase.model_dump(mode="json") for phase in phases}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Readable JSON; numbers must be finite."""
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
