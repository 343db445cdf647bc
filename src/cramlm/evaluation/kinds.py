"""Test scores twice where test rows stand in train as well: on the released split, and on the rows that do not.

Two public tasks show why: ACL-ARC citation intent has 52 of its 139 test rows verbatim in train, HyperPartisan 51 of 65.

What a model's logits mean, by kind of task: as answers, and as scores. Needs neither torch nor transformers.

                      logits (n, labels) become                 an answer                 compared by
    classification    probabilities that sum to 1 (softmax)     the most probable label   macro-F1
    multi-label       a probability for each label (sigmoid)    those of 0.5 or more      macro-F1
    regression        a number, (n, 1), as it is                that number               Pearson's correlation

Answers are compared as `Example.label` spells them (data/labels.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from cramlm.config.run import CHOOSING
from cramlm.data.decontamination import check_task
from cramlm.data.labels import RULES, format_labels, format_number
from cramlm.errors import DataError, UsageError
from cramlm.evaluation.metrics import LabelScores, NumberScores, Scores, calibration_error, score, score_labels, score_numbers
from cramlm.records import Answer, BoolArray, Example, FloatArray, LabelsPrediction, NumberPrediction, Prediction, Task, TaskKind


def score_test(task: Task, predicted: Sequence[str]) -> tuple[AnyScores, AnyScores | None]:
    """Scores on all test rows, and on those whose text is not in train (None if that is all or none of them)."""
    true = [str(example.label) for example in task.test]
    kept = check_task(task).leak_free_test.tolist()
    score = KINDS[task.kind].score
    whole = score(true, predicted, task.labels)
    if not 0 < len(kept) < len(true):
        return whole, None
    return whole, score([true[index] for index in kept], [predicted[index] for index in kept], task.labels)


CLOSE: Final = 0.15
"""Logits that are nearer than this in bf16 can change places in fp32: measured differences are up to 0.12."""
NAMES: Final[Mapping[str, str]] = {
    "accuracy": "accuracy",
    "subset_accuracy": "subset accuracy",
    "micro_f1": "micro-F1",
    "macro_f1": "macro-F1",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "rmse": "RMSE",
    "r2": "R²",
}
_NOT_PERCENT: Final = ("pearson", "spearman", "rmse", "r2")


class AnyScores(Protocol):
    """What the scores of every kind have."""

    @property
    def rows(self) -> int:
        """How many texts were scored."""

    @property
    def per_class(self) -> Mapping[str, Mapping[str, float]]:
        """label -> precision, recall, f1 and support; empty for numbers."""

    @property
    def figures(self) -> dict[str, float]:
        """Every figure by its name in `NAMES`."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, the figures and their intervals among them."""


class Kind(Protocol):
    """metrics: of a table of models, in order. has_prior: whether how often training shows an answer sways it."""

    metrics: tuple[str, ...]
    has_prior: bool

    def outputs(self, logits: FloatArray) -> FloatArray:
        """Finite logits (n, labels) as probabilities, or as numbers; float32."""

    def unsure(self, logits: FloatArray) -> BoolArray:
        """Which rows of bf16's logits could be answered otherwise in fp32, (n,)."""

    def rarity(self, trained_on: Sequence[str], names: Sequence[str]) -> npt.NDArray[np.float64]:
        """What added to the logits takes away how often training texts, whose labels are `trained_on`, have each label, (labels,)."""

    def answers(self, outputs: FloatArray, names: Sequence[str]) -> list[Answer]:
        """For the user."""

    def spelled(self, outputs: FloatArray, names: Sequence[str]) -> list[str]:
        """The answers as labels of `Example`."""

    def score(self, true: Sequence[str], predicted: Sequence[str], names: Sequence[str], outputs: FloatArray | None = None) -> AnyScores:
        """Compare labels of `Example`; `outputs`, those that `predicted` come from, add what only probabilities tell."""


class OneLabelKind:
    metrics: tuple[str, ...] = ("accuracy", "micro_f1", "macro_f1")
    has_prior: bool = True

    def outputs(self, logits: FloatArray) -> FloatArray:
        odds = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
        probabilities: FloatArray = (odds / odds.sum(axis=1, keepdims=True)).astype(np.float32)
        return probabilities

    def unsure(self, logits: FloatArray) -> BoolArray:
        if logits.shape[1] == 1:
            return np.zeros(len(logits), dtype=np.bool_)
        best = np.partition(logits, -2, axis=1)[:, -2:]
        close: BoolArray = best[:, 1] - best[:, 0] < CLOSE
        return close

    def rarity(self, trained_on: Sequence[str], names: Sequence[str]) -> npt.NDArray[np.float64]:
        found = Counter(trained_on)
        counts = np.array([1 + found[name] for name in names], dtype=np.float64)
        rarity = -np.log(counts / counts.sum())
        centred: npt.NDArray[np.float64] = rarity - rarity.mean()
        return centred

    def answers(self, outputs: FloatArray, names: Sequence[str]) -> list[Answer]:
        return [Prediction(names[int(row.argmax())], dict(zip(names, row.tolist(), strict=True))) for row in outputs]

    def spelled(self, outputs: FloatArray, names: Sequence[str]) -> list[str]:
        return [names[index] for index in outputs.argmax(axis=1)]

    def score(self, true: Sequence[str], predicted: Sequence[str], names: Sequence[str], outputs: FloatArray | None = None) -> Scores:
        scores = score(true, predicted, names)
        return scores if outputs is None else replace(scores, calibration_error=calibration_error(outputs, true, names))


class SeveralLabelsKind:
    metrics: tuple[str, ...] = ("subset_accuracy", "micro_f1", "macro_f1")
    has_prior: bool = True

    def outputs(self, logits: FloatArray) -> FloatArray:
        probabilities: FloatArray = (0.5 * (1 + np.tanh(0.5 * logits.astype(np.float64)))).astype(np.float32)
        return probabilities

    def unsure(self, logits: FloatArray) -> BoolArray:
        close: BoolArray = np.asarray((np.abs(logits) < CLOSE).any(axis=1))
        return close

    def rarity(self, trained_on: Sequence[str], names: Sequence[str]) -> npt.NDArray[np.float64]:
        found = Counter(name for label in trained_on for name in RULES["multi-label"].names(label))
        shares = np.array([1 + found[name] for name in names], dtype=np.float64) / (2 + len(trained_on))
        odds: npt.NDArray[np.float64] = np.log1p(-shares) - np.log(shares)
        return odds

    def answers(self, outputs: FloatArray, names: Sequence[str]) -> list[Answer]:
        return [LabelsPrediction(_chosen(row, names), dict(zip(names, row.tolist(), strict=True))) for row in outputs]

    def spelled(self, outputs: FloatArray, names: Sequence[str]) -> list[str]:
        return [format_labels(_chosen(row, names)) for row in outputs]

    def score(self, true: Sequence[str], predicted: Sequence[str], names: Sequence[str], outputs: FloatArray | None = None) -> LabelScores:
        rules = RULES["multi-label"]
        return score_labels([rules.names(label) for label in true], [rules.names(label) for label in predicted], names)


class NumberKind:
    metrics: tuple[str, ...] = ("rmse", "spearman", "pearson")
    has_prior: bool = False

    def outputs(self, logits: FloatArray) -> FloatArray:
        return logits

    def unsure(self, logits: FloatArray) -> BoolArray:
        return np.zeros(len(logits), dtype=np.bool_)

    def rarity(self, trained_on: Sequence[str], names: Sequence[str]) -> npt.NDArray[np.float64]:
        return np.zeros(len(names))

    def answers(self, outputs: FloatArray, names: Sequence[str]) -> list[Answer]:
        return [NumberPrediction(float(row[0])) for row in outputs]

    def spelled(self, outputs: FloatArray, names: Sequence[str]) -> list[str]:
        return [format_number(float(row[0])) for row in outputs]

    def score(self, true: Sequence[str], predicted: Sequence[str], names: Sequence[str], outputs: FloatArray | None = None) -> NumberScores:
        return score_numbers([float(label) for label in true], [float(label) for label in predicted])


KINDS: Final[dict[TaskKind, Kind]] = {"classification": OneLabelKind(), "multi-label": SeveralLabelsKind(), "regression": NumberKind()}


def gold_labels(examples: Sequence[Example]) -> list[str]:
    """Return the label of each example.

    Raises:
        DataError: if there is no example, or one has no label.
    """
    if not examples:
        raise DataError("there are no examples to score; pass at least one labelled text")
    labels = []
    for example in examples:
        if example.label is None:
            raise DataError(f"example {example.id}: has no label, so there is nothing to compare with; add it, or use predict")
        labels.append(example.label)
    return labels


def check_labels(kind: TaskKind, known: Sequence[str], examples: Sequence[Example], *, origin: str) -> None:
    """Raises DataError naming the first label of `examples` that is not in `known`, and its row in `origin`."""
    for example in examples:
        unknown = [] if example.label is None else [name for name in RULES[kind].names(example.label) if name not in known]
        if unknown:
            shown = ", ".join(map(repr, known[:10])) + (", ..." if len(known) > 10 else "")
            raise DataError(
                f"{origin}:{example.id}: label {unknown[0]!r} is none of the model's ({shown}); "
                "drop the row, or pass --unseen-labels ignore to count it as missed"
            )


def metric_of(kind: TaskKind) -> str:
    """The dev score by which methods are compared."""
    return CHOOSING[kind][0]


def only_one_label(kind: TaskKind, what: str, instead: str) -> None:
    """Raises UsageError where `what` is made for texts of one label each and this is another kind of task."""
    if kind != "classification":
        raise UsageError(f"{what} is for texts of one label each, and this is a {kind} task; {instead}")


def is_percent(metric: str) -> bool:
    """Whether it is a share, shown in percent."""
    return metric not in _NOT_PERCENT


def figure(metric: str, value: float, *, places: int = 1) -> str:
    """A figure as tables show it: shares in percent, correlations with two places more, errors in the user's unit."""
    if is_percent(metric):
        return f"{100 * value:.{places}f}"
    return f"{value:.4g}" if metric == "rmse" else f"{value:.{places + 2}f}"


def _chosen(row: FloatArray, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(names[index] for index in np.flatnonzero(row >= 0.5).tolist())
