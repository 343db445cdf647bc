"""The nouns that cross borders between folders, and the event that every stage reports with.

A text's way through the program, in these words: a `Document` of the corpus is found by the texts of `Example`s and listed in
a `Selection`; both are cut into token sequences, a step's worth of which is a `Batch`; the objective turns a batch
into `Losses`; the finished model turns a new text into a `Prediction`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

Split: TypeAlias = Literal["train", "dev", "test"]
TaskKind: TypeAlias = Literal["classification", "multi-label", "regression"]
"""What a text is answered with: one label, any number of labels (none too), or a number."""


@dataclass(frozen=True, slots=True)
class Document:
    """One passage of the corpus; `id` is unique in it, `source` says where it came from (a file or the user's column)."""

    id: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Example:
    """One row of the task; `label` is None only where a file to predict has none.

    Several labels are written as a JSON list in sorted order, a number as Python spells it (data/labels.py), so that equal strings are
    equal answers whatever the kind of task.
    """

    id: str
    text: str
    text_pair: str | None
    label: str | None

    @property
    def whole_text(self) -> str:
        """The text that retrieval and the baselines see: both halves of a pair, one after the other."""
        return self.text if self.text_pair is None else f"{self.text} {self.text_pair}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How a number is learnt: as (number - mean) / spread, so that training sees numbers around 0 whatever the user's unit is."""

    mean: float = 0.0
    spread: float = 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """The labelled data. `labels` is sorted; label ids are positions in it. `test` may be empty.

    Dev and test rows may carry a label that is not in `labels` only with `unseen_labels = "ignore"`; they count as wrong. A regression has
    one label, the name of its number; `scale` is that of the training numbers.
    """

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    test: tuple[Example, ...]
    labels: tuple[str, ...]
    dev_is_split_from_train: bool
    kind: TaskKind = "classification"
    scale: Scale = Scale()


@dataclass(frozen=True, slots=True)
class Selection:
    """Documents chosen for a task: parallel arrays sorted by (rank, position).

    position: place in the corpus, int64. rank: best over all queries, 0 = first, int32. query: index of the training text that
    gave that rank (the smallest, on ties; -1 where none was asked), int32. score: that query's score, float32. weight: how often training
    draws it, 1 = as often as the average one, float32, > 0.
    """

    position: IntArray
    rank: Int32Array
    query: Int32Array
    score: FloatArray
    weight: FloatArray

    def __len__(self) -> int:
        return len(self.position)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's packed token rows: R rows of L places, several sequences side by side in a row, no sequence cut by a row.

    token_ids: (R, L) int64, `pad` where a row is not filled.
    sequence: (R, L) int64, which sequence of the batch a place belongs to, 0..S-1 in order of `first`; -1 = padding.
    position: (R, L) int64, place inside its sequence, from 0.
    first: (S,) int64, flat index (row * L + column) of each sequence's first token ([CLS]).
    masked: (M,) int64, flat indices of places at which a token is to be predicted; may be empty.
    mlm_labels: (M,) int64, those tokens: the original ones at `masked`, or those that come next.
    task_labels: (S,) int64, label id of each task sequence, -1 where it has none (external text). Where `targets` say what is to be
    answered, 0 stands for any label.
    external: (S,) bool, True where the sequence is retrieved text, False where it is task text.
    soft_labels: (S, labels) float32, what a teacher makes of each sequence; zeros where it was not asked. (S, 0) without a teacher.
    causal_from: (S,) int64, the place inside each sequence from which on places see only those up to themselves; (0,) if all see all.
    chance: (M,) float32 in [0, 1), which of a generator's guesses is taken at `masked`; (0,) where none is asked.
    term: the text term that asks for `masked` (config/terms.py); "" where none does.
    targets: (S, labels) float32, 1 for each label that a task sequence has, 0 for the others; or (S, 1), its number; zeros for external
    text. (S, 0) where each text has one label.
    """

    token_ids: IntArray
    sequence: IntArray
    position: IntArray
    first: IntArray
    masked: IntArray
    mlm_labels: IntArray
    task_labels: IntArray
    external: BoolArray
    soft_labels: FloatArray
    causal_from: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    chance: FloatArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    targets: FloatArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    term: str = ""

    @property
    def tokens(self) -> int:
        """Real (non-padding) tokens."""
        return int((self.sequence >= 0).sum())


@dataclass(frozen=True, slots=True)
class Prediction:
    """One answer: the most probable label, and the probability of every label (in label order, sums to 1)."""

    label: str
    probabilities: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LabelsPrediction:
    """Any number of labels, each at least as probable as not, and the probability of every label, each between 0 and 1 on its own."""

    labels: tuple[str, ...]
    probabilities: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NumberPrediction:
    """A number in the unit of the training file."""

    value: float


AnyPrediction: TypeAlias = Prediction | LabelsPrediction | NumberPrediction

EventKind: TypeAlias = Literal["plan", "start", "progress", "done", "up_to_date", "stale", "note", "warning", "step", "evaluation"]


@dataclass(frozen=True, slots=True)
class Event:
    """What a stage tells while it runs; the console shows it, `events.jsonl` keeps it.

    start: a stage begins (`total` and `unit` where known). progress: `done` of `total` so far (absolute, not a difference).
    done: the stage ended, `message` sums it up. fresh / stale: it need not / must run again, and why. step: one logged training
    step. evaluation: scores on dev. `data` holds plain JSON values.
    """

    kind: EventKind
    stage: str
    message: str = ""
    done: float = 0.0
    total: float | None = None
    unit: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


Emit: TypeAlias = Callable[[Event], None]


def silent(event: Event) -> None:
    """An `Emit` that tells nobody; the default for library use."""


Work: TypeAlias = Literal["parsed", "decoded", "tokenized"]
_COUNTS: Final[ContextVar[Counter[tuple[Work, str]] | None]] = ContextVar("counts", default=None)


@contextmanager
def counting() -> Iterator[Counter[tuple[Work, str]]]:
    """Count until the block ends, in this thread: how often each item (a file, a text) was worked on."""
    counts: Counter[tuple[Work, str]] = Counter()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


def count(work: Work, items: Iterable[str]) -> None:
    """Note that this was done to these items."""
    if (counts := _COUNTS.get()) is not None:
        counts.update((work, item) for item in items)
