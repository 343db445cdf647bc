"""Data classes shared by several packages, and the events that stages emit.

The texts of `Example`s retrieve `Document`s of the corpus into a `Selection`; both are tokenized and packed into `Batch`es, one per
training step; the trained model turns a text into a `Prediction`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

Split: TypeAlias = Literal["train", "dev", "test"]
Diacritics: TypeAlias = Literal["keep", "remove"]
TaskKind: TypeAlias = Literal["classification", "multi-label", "regression"]
"""The target of a text: one label; any number of labels, or none; a number."""
LinearName: TypeAlias = Literal["tfidf", "bayes", "static"]
LINEAR_NAMES: Final[tuple[LinearName, ...]] = get_args(LinearName)
"""The linear models of a run, cheapest first: logistic regression on n-grams; naive Bayes on labelled and retrieved texts; logistic
regression on n-grams and text vectors.
"""
COMBINED: Final = "combined"
"""The name of the combination among the models of a run (evaluation/combination.py)."""


@dataclass(frozen=True, slots=True)
class Document:
    """One passage of the corpus. id: unique, "file/id" if files share ids. source: the file, or the value of the source column."""

    id: str
    text: str
    source: str


PAIR_BOUNDARY: Final = "\x1e"
"""Between the texts of a pair; white space for words, tokens and n-grams, a marker for text/markers.py."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of the task; `label` is None only in files to predict.

    Several labels are a sorted JSON list, a number is Python's repr (data/labels.py), so that targets are equal if their strings are.
    """

    id: str
    text: str
    text_pair: str | None
    label: str | None

    @property
    def whole_text(self) -> str:
        """The text for retrieval: both texts of a pair, separated by a space."""
        return self.text if self.text_pair is None else f"{self.text} {self.text_pair}"

    @property
    def divided_text(self) -> str:
        """The text for linear models: both texts of a pair, separated by `PAIR_BOUNDARY`, which neither of them holds."""
        if self.text_pair is None:
            return self.text
        return PAIR_BOUNDARY.join(half.replace(PAIR_BOUNDARY, " ") for half in (self.text, self.text_pair))


@dataclass(frozen=True, slots=True)
class Scale:
    """Standardisation of a regression's numbers: training uses (number - mean) / spread."""

    mean: float = 0.0
    spread: float = 1.0

    def standardized(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return numbers as training uses them; of other kinds of tasks, whose scale has its defaults, the values themselves."""
        return (numbers - self.mean) / self.spread


@dataclass(frozen=True, slots=True)
class Task:
    """The labelled data. `labels` is sorted; label ids are indices into it. `test` may be empty.

    unlabelled: further texts of the task, whose labels are unknown; none of them is the text of a labelled row.
    With `unseen_labels = "ignore"` dev and test rows may have labels that are not in `labels`; they are scored as wrong. A regression has
    one label, the name of its number; `scale` is that of the training numbers.
    label_texts: a text for labels whose names are words; none in a regression, or if the names are not used.
    """

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    test: tuple[Example, ...]
    labels: tuple[str, ...]
    dev_is_split_from_train: bool
    kind: TaskKind = "classification"
    scale: Scale = Scale()
    unlabelled: tuple[Example, ...] = ()
    label_texts: tuple[Example, ...] = ()

    @property
    def with_label_texts(self) -> Task:
        """This task with the label texts at the end of the training rows: what linear models are fitted on."""
        return replace(self, train=(*self.train, *self.label_texts), label_texts=())

    def with_training_in_dev(self, rows: Sequence[int]) -> Task:
        """Return this task with copies of the training texts at these indices after the dev texts."""
        return replace(self, dev=(*self.dev, *(self.train[row] for row in rows)))

    def with_texts(self, change: Callable[[str], str]) -> Task:
        """This task with `change` of every text."""

        def changed(examples: tuple[Example, ...]) -> tuple[Example, ...]:
            pairs = [(each, None if each.text_pair is None else change(each.text_pair)) for each in examples]
            return tuple(replace(each, text=change(each.text), text_pair=pair) for each, pair in pairs)

        labelled = replace(self, train=changed(self.train), dev=changed(self.dev), test=changed(self.test))
        return replace(labelled, unlabelled=changed(self.unlabelled), label_texts=changed(self.label_texts))

    @property
    def queries(self) -> list[str]:
        """The texts that retrieve: those of the training rows, then the unlabelled ones."""
        return [example.whole_text for example in (*self.train, *self.unlabelled)]


@dataclass(frozen=True, slots=True)
class Selection:
    """Documents chosen for a task: parallel arrays sorted by (rank, position).

    position: index in the corpus, int64. rank: best rank over all queries, from 0, int32. query: index of the training text with that rank
    (the smallest if several; -1 without queries), int32. score: that query's score, float32. weight: sampling weight in training, mean 1,
    > 0, float32.
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
    """The packed rows of one step: R rows of L positions; a row holds several sequences, and no sequence is split over rows.

    token_ids: (R, L) int64, padded with `pad`.
    sequence: (R, L) int64, index of the sequence at a position, 0..S-1 in the order of `first`; -1 = padding.
    position: (R, L) int64, position within its sequence, from 0.
    first: (S,) int64, flat index (row * L + column) of each sequence's first token ([CLS]).
    masked: (M,) int64, flat indices of the positions to predict a token at; may be empty.
    mlm_labels: (M,) int64, the tokens to predict at `masked`: the original ones, or the next ones.
    task_labels: (S,) int64, label id of each sequence; -1 for external text. With `targets`, 0 for every task sequence.
    external: (S,) bool, True for retrieved text, False for task text.
    soft_labels: (S, labels) float32, the teacher's probabilities or standardized number; NaN where it predicts none. (S, 0) without a
    teacher.
    causal_from: (S,) int64, position in each sequence from which attention is causal; (0,) if it is full everywhere.
    candidates: (C,) int64, rising, the tokens that the softmax at `masked` is over, `mlm_labels` among them; (0,) = the whole vocabulary.
    stand_for: (C,) float32, the number of tokens that each candidate stands for: 1 for those to predict.
    chance: (M,) float32 in [0, 1), random numbers that sample the generator's token at `masked`; (0,) without a generator.
    term: kind of the text term that predicts `masked` (config/terms.py); "" without one.
    targets: (S, labels) float32, 1 for each label of a task sequence, else 0; or (S, 1), its number; zeros for external text. (S, 0) if
    each text has one label.
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
    candidates: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    stand_for: FloatArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    chance: FloatArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    targets: FloatArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    term: str = ""

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All fields but `term`, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "term"}

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return int((self.sequence >= 0).sum())


@dataclass(frozen=True, slots=True)
class Prediction:
    """The most probable label, and the probability of every label, in label order, with sum 1."""

    label: str
    probabilities: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SelectivePrediction:
    """A prediction that may be withheld. label: the most probable label; None if the confidence is below the threshold.

    confidence: calibrated probability that the most probable label is right (evaluation/confidence.py). probabilities: of every label, in
    label order, with sum 1; the model's own, not calibrated.
    """

    label: str | None
    confidence: float
    probabilities: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LabelsPrediction:
    """The labels with a probability of at least 0.5, and the independent probability of every label."""

    labels: tuple[str, ...]
    probabilities: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NumberPrediction:
    """The predicted number, in the unit of the training file."""

    value: float


AnyPrediction: TypeAlias = Prediction | LabelsPrediction | NumberPrediction

EventKind: TypeAlias = Literal["plan", "start", "progress", "done", "up_to_date", "stale", "note", "warning", "step", "evaluation"]


@dataclass(frozen=True, slots=True)
class Event:
    """Progress of a stage, for the console and `events.jsonl`.

    start: the stage starts (`total` and `unit` if known). progress: `done` of `total` so far, cumulative. done: the stage ended, with a
    summary. up_to_date: the stage need not run. stale: it runs again, with the reason. step: a logged training step. evaluation: scores
    on dev. `data` holds plain JSON values.
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
    """Ignore an event; the default `Emit` of library functions."""


Work: TypeAlias = Literal["parsed", "decoded", "tokenized"]
_COUNTS: Final[ContextVar[Counter[tuple[Work, str]] | None]] = ContextVar("counts", default=None)


@contextmanager
def counting() -> Iterator[Counter[tuple[Work, str]]]:
    """Count how often each item (a file, a text) is parsed, decoded or tokenized inside the block, in this thread."""
    counts: Counter[tuple[Work, str]] = Counter()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


def count(work: Work, items: Iterable[str]) -> None:
    """Count this work on these items, if inside `counting`."""
    if (counts := _COUNTS.get()) is not None:
        counts.update((work, item) for item in items)
