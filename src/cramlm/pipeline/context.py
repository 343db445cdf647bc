"""The context of a run and what its stages share: `Stage`, which makes keys, the plan, the encoded texts, the selection.

`shared_stages` shares stages between runs. Most of those before training depend on the task, the texts and a few settings only;
another run with equal inputs (in another folder, with another recipe or seed) links their files from `stages/` in the store. Phases are
trained by every run.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cramlm.config.phase import PhaseConfig
from cramlm.config.retriever import RetrieverConfig
from cramlm.config.run import RunConfig
from cramlm.errors import EnvironmentFault
from cramlm.io.machine import available_cores, describe_machine
from cramlm.model.huggingface.pretrained import Pretrained
from cramlm.model.prompts import Prompt
from cramlm.model.tokenizer import SpanArray, Tokenizer, Tokens
from cramlm.planning.budget import Speed
from cramlm.records import Emit, Event, FloatArray, Task, silent
from cramlm.retrieval.selection import SelectionTable
from cramlm.storage import stages
from cramlm.storage.artifacts import Artifact, hash_json
from cramlm.storage.locks import environment_faults, limit_in_environment, make_folder
from cramlm.storage.stages import StagePool, borrowed_seconds, pooled
from cramlm.training.ranks import ALONE, Ranks, never

if TYPE_CHECKING:
    from cramlm.model.model import Precision

UNLABELLED_WEIGHT: Final = 3.0
"""Sampling weight of an unlabelled text of the task; that of a retrieved passage is 1 on average (docs/log.md)."""
SOFT_LABELS: Final = "soft-labels"
"""Kind of the part of a linear teacher that does not depend on the seed: the soft labels of passages."""
SHARED: Final = frozenset({"baseline", "selection", "tokenizer", "tokens", "embedding", "static", "bayes", SOFT_LABELS})
"""Kinds of stages and of parts of stages that runs share."""
LIMIT_VARIABLE: Final = "CRAMLM_STAGES_GB"
DEFAULT_LIMIT: Final = 4.0  # GB
_LIBRARIES: Final = ("cramlm", "numpy", "scipy", "scikit-learn", "numba", "tokenizers")  # that compute the shared stages


@dataclass(frozen=True, slots=True)
class Process:
    """The process that a run is in. stop: returns an exit code after a signal. began: start of a time budget (`time.monotonic`), None =
    now. ranks: the processes that train together.
    """

    stop: Callable[[], int | None] = never
    began: float | None = None
    ranks: Ranks = ALONE


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Decisions before the texts are read: the size of the selection, number format, threads, and the speed of this machine in tokens per
    second.
    """

    retriever: RetrieverConfig | None
    precision: Precision
    threads: int
    speed: Speed


@dataclass(slots=True)
class SelectedPassages:
    """The published selection, and after its passages the unlabelled texts of the task, which are passages for all later stages.

    unlabelled: these texts. tokens: ids of each passage, set by the stage `tokens`; spans: character spans of the tokens, if a
    teacher needs them.
    """

    table: SelectionTable
    unlabelled: tuple[str, ...] = ()
    tokens: Tokens | None = None
    spans: SpanArray | None = None
    _texts: list[str] | None = None

    def encoded(self, tokens: Tokens, spans: SpanArray | None) -> SelectedPassages:
        """Return the selection with token ids."""
        assert len(tokens) == len(self.table) + len(self.unlabelled)
        return replace(self, tokens=tokens, spans=spans)

    @property
    def ids(self) -> Tokens:
        """Token ids of each passage."""
        assert self.tokens is not None, "the stage `tokens` runs before those that read ids"
        return self.tokens

    @property
    def artifact(self) -> Artifact:
        return self.table.artifact

    def texts(self) -> list[str]:
        """Return the selected passages in order of (rank, position), then the unlabelled texts; cached until `release_texts`."""
        if self._texts is None:
            self._texts = [*self.table.texts(), *self.unlabelled]
        return self._texts

    def release_texts(self) -> None:
        """Clear the cache of `texts`."""
        self._texts = None

    def weights(self) -> FloatArray | None:
        """Sampling weight of each passage, in the same order: mean 1 of retrieved ones, `UNLABELLED_WEIGHT` of unlabelled texts; None if
        all are equal.
        """
        own = np.full(len(self.unlabelled), UNLABELLED_WEIGHT, dtype=np.float32)
        weights = np.concatenate([self.table.numbers().weight, own])
        return None if (weights == weights[0]).all() else weights

    def characters(self) -> int:
        """Return the number of characters of all passages, weighted as training samples them."""
        return self.table.text_characters() + round(UNLABELLED_WEIGHT * sum(map(len, self.unlabelled)))


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """The texts of a run as token ids. tokenizer: caches the ids of the task's texts. selection: with the ids of its passages."""

    tokenizer: Tokenizer
    selection: SelectedPassages | None
    prompt: Prompt | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of a run: the folder `name`, filled by `write` and identified by `key`.

    version: raise it when equal settings and inputs would give another folder. settings: the part of the config that is read. inputs:
    fingerprints of the data that is read. kind: of the artifact; None = `name`. unused: settings without an effect on these inputs, which
    runs that share the stage may differ in.
    """

    name: str
    version: int
    settings: Mapping[str, Any]
    inputs: Mapping[str, Any]
    write: Callable[[Path], None]
    kind: str | None = None
    unused: tuple[str, ...] = ()

    @property
    def key(self) -> dict[str, Any]:
        """Everything that the content of the folder depends on, as plain JSON."""
        parts: tuple[Mapping[str, Any], ...] = ({"format": self.version}, self.settings, self.inputs)
        key = {name: value for part in parts for name, value in part.items()}
        assert len(key) == sum(map(len, parts)), "a name is a setting or an input, and `format` is the version"
        return key

    @property
    def shared_key(self) -> dict[str, Any]:
        """The key without unused settings."""
        return {name: value for name, value in self.key.items() if name not in self.unused}


def threads_of(config: RunConfig) -> int:
    """Return the number of threads of a run with this config in one process: by default that of the cores."""
    return config.threads or available_cores()


@dataclass(frozen=True, slots=True, eq=False)
class RunContext:
    """The inputs that every stage of a run can read. folder: of the run. store: folder of the corpora and indexes that runs share. began:
    start of the run (`time.monotonic`). stop: returns an exit code after a signal. pretrained: the weights to start from.
    """

    config: RunConfig
    task: Task
    folder: Path
    store: Path
    began: float
    emit: Emit = silent
    stop: Callable[[], int | None] = never
    ranks: Ranks = ALONE
    pretrained: Pretrained | None = None

    @property
    def threads(self) -> int:
        """Threads of work on the CPU."""
        return threads_of(self.config)

    @property
    def elapsed(self) -> float:
        """Seconds since the start, plus those of the stages taken from another run."""
        return time.monotonic() - self.began + borrowed_seconds()

    @property
    def seconds_left(self) -> float | None:
        """None if the budget is not a time."""
        seconds = self.config.limit.seconds
        return None if seconds is None else seconds - self.elapsed

    def build(self, stage: Stage) -> Artifact:
        """Return the published folder of a stage: the present one if its key is equal, else a new one (storage/stages.py)."""
        folder, kind = self.folder / stage.name, stage.kind or stage.name
        keys = {"key": stage.key, "shared_key": stage.shared_key}
        return stages.stage(folder, kind=kind, write=stage.write, emit=self.emit, name=stage.name, **keys)


@dataclass(frozen=True, slots=True)
class FinishedPhase:
    """A finished phase: its final settings, its artifact, and its report (phase.json)."""

    phase: PhaseConfig
    artifact: Artifact
    report: Mapping[str, Any]


def fingerprint(chosen: SelectedPassages | None) -> str | None:
    """Return the fingerprint of all passages; None if nothing is retrieved."""
    if chosen is None:
        return None
    retrieved = chosen.artifact.fingerprint
    return hash_json([retrieved, *chosen.unlabelled]) if chosen.unlabelled else retrieved


@contextmanager
def shared_stages(store: Path, config: RunConfig, *, emit: Emit) -> Iterator[None]:
    """Inside the block, take stages that are in the store from there and put those that are built there; note if it cannot be written.

    Results of one machine, with the same number of threads and versions of libraries, are shared: others may differ in the last bits.

    Raises:
        UsageError: if the variable with the limit is no number.
    """
    limit, folder = stages_limit(), store / "stages"
    if limit == 0 or not _is_writable(folder, emit):
        yield
        return
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    environment = {"libraries": libraries, "machine": describe_machine(), "threads": threads_of(config)}
    with pooled(StagePool(folder, SHARED, environment, round(1e9 * limit))):
        yield


def stages_limit() -> float:
    """Return how many GB the shared stages may take: $CRAMLM_STAGES_GB, else 4; 0 shares nothing.

    Raises:
        UsageError: if the variable holds no such number.
    """
    return limit_in_environment(LIMIT_VARIABLE, DEFAULT_LIMIT, "a size in GB, like 4; 0 shares no stages", finite=True)


def _is_writable(folder: Path, emit: Emit) -> bool:
    try:
        with environment_faults(folder):
            make_folder(folder)
        if os.access(folder, os.W_OK):
            return True
        reason = "no permission to write"
    except EnvironmentFault as error:
        reason = str(error).partition(";")[0]
    emit(Event("note", "run", f"stages are not shared with other runs: {folder}: {reason}"))
    return False
