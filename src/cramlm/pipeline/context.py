"""What the stages share: the context of a run, the plan, the text, and small helpers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cramlm.config.base import Budget
from cramlm.config.run import PhaseConfig, RetrieverConfig, RunConfig
from cramlm.model.device import Precision
from cramlm.model.huggingface.pretrained import Pretrained
from cramlm.model.prompts import Prompt
from cramlm.model.tokenizer import SpanArray, Tokenizer, Tokens
from cramlm.planning.budget import Speed
from cramlm.records import Emit, FloatArray, Task, silent
from cramlm.retrieval.selection import SelectionTable
from cramlm.storage.artifacts import Artifact, borrowed_seconds, stage
from cramlm.training.distributed import ALONE, Ranks
from cramlm.training.loop import never


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

    speed: tokens per second. operations: True if the budget is a number of operations.
    """

    retriever: RetrieverConfig | None
    precision: Precision
    threads: int
    speed: Speed
    operations: bool


@dataclass(slots=True)
class Chosen:
    """The published selection. tokens: ids of each passage, after the stage `tokens`; spans: where they stand in the texts (tokenizer.py),
    if a teacher needs them.
    """

    table: SelectionTable
    tokens: Tokens | None = None
    spans: SpanArray | None = None
    _texts: list[str] | None = None

    def encoded(self, tokens: Tokens, spans: SpanArray | None) -> Chosen:
        """The selection with the ids of its passages."""
        assert len(tokens) == len(self.table)
        return replace(self, tokens=tokens, spans=spans)

    @property
    def ids(self) -> Tokens:
        """Ids of each passage."""
        assert self.tokens is not None, "the stage `tokens` comes before those that read ids"
        return self.tokens

    @property
    def artifact(self) -> Artifact:
        return self.table.artifact

    def texts(self) -> list[str]:
        """The selected passages in order of (rank, position), kept in memory until `forget_texts`."""
        if self._texts is None:
            self._texts = self.table.texts()
        return self._texts

    def forget_texts(self) -> None:
        """Free the memory of `texts`."""
        self._texts = None

    def weights(self) -> FloatArray | None:
        """How often training draws each passage, mean 1, in the same order; None where all are drawn equally often."""
        weights = self.table.numbers().weight
        return None if (weights == weights[0]).all() else weights


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a run as models read it. tokenizer: knows the ids of the task's texts. selection: with the ids of its passages."""

    tokenizer: Tokenizer
    selection: Chosen | None
    prompt: Prompt | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A run as its stages see it. folder: where they are published; store: where those are that runs share. stop: returns an exit code
    once a signal came. pretrained: the weights to start from.
    """

    config: RunConfig
    task: Task
    folder: Path
    store: Path
    clock: Clock
    emit: Emit = silent
    stop: Callable[[], int | None] = never
    ranks: Ranks = ALONE
    pretrained: Pretrained | None = None

    def stage(self, name: str, *, key: Mapping[str, Any], write: Callable[[Path], None], kind: str | None = None) -> Artifact:
        """The published folder `name` of this run for `key`: the one that is there if it is up to date, else built now. kind: of the
        artifact; None = the name.
        """
        return stage(self.folder / name, kind=kind or name, key=key, write=write, emit=self.emit, name=name)


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
