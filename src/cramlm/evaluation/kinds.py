"""The kinds of task (one label, several, a number): what logits become as predictions, and how these are scored. Needs no torch.

                      logits (n, labels) become                 a prediction            compared by
    classification    probabilities that sum to 1 (softmax)     the most probable label   macro-F1
    multi-label       a probability for each label (sigmoid)    labels of 0.5 or more     macro-F1
    regression        a number, (n, 1), unchanged               that number               Pearson's correlation

Predicted and true labels are compared as strings, as `Example.label` holds them (data/labels.py).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from cramlm.config.run import DEV_METRICS
from cramlm.data.labels import RULES, format_labels, format_number, number_text, spelled_otherwise
from cramlm.data.task import text_key
from cramlm.errors import DataError, UsageError, brief
from cramlm.evaluation.metrics import (
    LabelScores,
    NumberScores,
    Scores,
    calibration_error,
    indicators,
    mean_f1,
    score,
    score_labels,
    score_numbers,
)
from cramlm.records import (
    AnyPrediction,
    BoolArray,
    Example,
    FloatArray,
    IntArray,
    LabelsPrediction,
    NumberPrediction,
    Prediction,
    Task,
    TaskKind,
)

BF16_ERROR: Final = 0.15
"""Two logits that differ by less than this in bf16 may have the other order in fp32. Errors of up to 0.12 were measured."""
METRIC_NAMES: Final[Mapping[str, str]] = {
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
_AT_ONCE: Final = 4_000_000  # predictions that `DevScorer` scores at a time

ScoreArray = npt.NDArray[np.float64]


class AnyScores(Protocol):
    """The interface of the scores of every kind of task."""

    @property
    def rows(self) -> int:
        """Number of texts that were scored."""

    @property
    def per_class(self) -> Mapping[str, Mapping[str, float]]:
        """label -> precision, recall, f1 and support; empty for numbers."""

    @property
    def metrics(self) -> dict[str, float]:
        """Every metric by its name in `METRIC_NAMES`."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the metrics, their intervals and more."""


class Kind(Protocol):
    """table_metrics: the columns of a table of models, in order. has_prior: True if label frequencies in training shift the logits."""

    table_metrics: tuple[str, ...]
    has_prior: bool

    def outputs(self, logits: FloatArray) -> FloatArray:
        """Convert finite logits (n, labels) to probabilities, or to numbers; float32."""

    def near_ties(self, logits: FloatArray) -> BoolArray:
        """Rows of bf16 logits whose prediction may be another in fp32, (n,)."""

    def negative_log_prior(self, task: Task) -> npt.NDArray[np.float64]:
        """Return minus the log label frequencies of the training texts, (labels,); added to logits, they cancel the prior."""

    def predictions(self, outputs: FloatArray, names: Sequence[str]) -> list[AnyPrediction]:
        """Return the predictions as objects for the user."""

    def predicted_labels(self, outputs: FloatArray, names: Sequence[str]) -> list[str]:
        """Return the predictions as labels of `Example`."""

    def score(self, true: Sequence[str], predicted: Sequence[str], names: Sequence[str], outputs: FloatArray | None = None) -> AnyScores:
        """Compare labels of `Example`. outputs: those that `predicted` were made from, for scores of the probabilities."""


class OneLabelKind:
    """One label per text: softmax."""

    table_metrics: tuple[str, ...] = ("accuracy", "micro_f1", "macro_f1")
    has_prior: bool = True

    def outputs(self, logits: FloatArray) -> FloatArray:
        odds = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
        probabilities: FloatArray = (odds / odds.sum(axis=1, keepdims=True)).astype(np.float32)
        return probabilities

    def near_ties(self, logits: FloatArray) -> BoolArray:
        if logits.shape[1] == 1:
            return np.zeros(len(logits), dtype=np.bool_)
        best = np.partition(logits, -2, axis=1)[:, -2:]
        close: BoolArray = best[:, 1] - best[:, 0] < BF16_ERROR
        return close

    def negative_log_prior(self, task: Task) -> npt.NDArray[np.float64]:
        count = Counter(str(example.label) for example in task.train)
        counts = np.array([1 + count[name] for name in task.labels], dtype=np.float64)
        values = -np.log(counts / counts.sum())
        centred: npt.NDArray[np.float64] = values - values.mean()
        return centred

    def predictions(self, outputs: FloatArray, names: Sequence[str]) -> list[AnyPrediction]:
        return [Prediction(names[int(row.argmax())], dict(zip(names, row.tolist(), strict=True))) for row in outputs]

    def predicted_labels(self, outputs: FloatArray, names: Sequence[str]) -> list[str]:
        return [names[index] for index in outputs.argmax(axis=1)]

    def score(self, true: Sequence[str], predicted: Sequence[str], names: Sequence[str], outputs: FloatArray | None = None) -> Scores:
        scores = score(true, predicted, names)
        return scores if outputs is None else replace(scores, calibration_error=calibration_error(outputs, true, names))


class SeveralLabelsKind:
    """Any number of labels per text: a sigmoid each."""

    table_metrics: tuple[str, ...] = ("subset_accuracy", "micro_f1", "macro_f1")
    has_prior: bool = True

    def outputs(self, logits: FloatArray) -> FloatArray:
        probabilities: FloatArray = (0.5 * (1 + np.tanh(0.5 * logits.astype(np.float64)))).astype(np.float32)
        return probabilities

    def near_ties(self, logits: FloatArray) -> BoolArray:
        close: BoolArray = np.asarray((np.abs(logits) < BF16_ERROR).any(axis=1))
        return close

    def negative_log_prior(self, task: Task) -> npt.NDArray[np.float64]:
        count = Counter(name for example in task.train for name in RULES["multi-label"].names(str(example.label)))
        shares = np.array([1 + count[name] for name in task.labels], dtype=np.float64) / (2 + len(task.train))
        log_odds: npt.NDArray[np.float64] = np.log1p(-shares) - np.log(shares)
        return log_odds

    def predictions(self, outputs: FloatArray, names: Sequence[str]) -> list[AnyPrediction]:
        return [LabelsPrediction(_labels_above_half(row, names), dict(zip(names, row.tolist(), strict=True))) for row in outputs]

    def predicted_labels(self, outputs: FloatArray, names: Sequence[str]) -> list[str]:
        return [format_labels(_labels_above_half(row, names)) for row in outputs]

    def score(self, true: Sequence[str], predicted: Sequence[str], names: Sequence[str], outputs: FloatArray | None = None) -> LabelScores:
        rules = RULES["multi-label"]
        return score_labels([rules.names(label) for label in true], [rules.names(label) for label in predicted], names)


class NumberKind:
    """A number per text: the output itself."""

    table_metrics: tuple[str, ...] = ("rmse", "r2", "spearman", "pearson")
    has_prior: bool = False

    def outputs(self, logits: FloatArray) -> FloatArray:
        return logits

    def near_ties(self, logits: FloatArray) -> BoolArray:
        return np.zeros(len(logits), dtype=np.bool_)

    def negative_log_prior(self, task: Task) -> npt.NDArray[np.float64]:
        return np.zeros(len(task.labels))

    def predictions(self, outputs: FloatArray, names: Sequence[str]) -> list[AnyPrediction]:
        return [NumberPrediction(float(row[0])) for row in outputs]

    def predicted_labels(self, outputs: FloatArray, names: Sequence[str]) -> list[str]:
        return [format_number(float(row[0])) for row in outputs]

    def score(self, true: Sequence[str], predicted: Sequence[str], names: Sequence[str], outputs: FloatArray | None = None) -> NumberScores:
        return score_numbers([float(label) for label in true], [float(label) for label in predicted])


KINDS: Final[dict[TaskKind, Kind]] = {"classification": OneLabelKind(), "multi-label": SeveralLabelsKind(), "regression": NumberKind()}


def distinct_rows(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the distinct rows (k, ...) of an array (m, ...), in lexicographic order, as `np.unique(rows, axis=0)` returns them.

    That makes a structured type with a field for each column: with 10,000 texts and 20 labels it takes 4 s, and its result holds 39 MB.
    """
    flat = np.ascontiguousarray(rows).reshape(len(rows), math.prod(rows.shape[1:]))
    first = {row.tobytes(): row for row in flat}
    ordered = sorted(first.values(), key=functools.cmp_to_key(_compare_rows))
    return np.array(ordered, dtype=rows.dtype).reshape(-1, *rows.shape[1:])


def _compare_rows(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    column = int(np.argmax(one != other))
    return int(one[column] > other[column]) - int(one[column] < other[column])


def dev_truth(task: Task) -> npt.NDArray[Any]:
    """Return the true labels of dev as `DevScorer` has predictions, with ids or columns beyond the labels that training has; numbers are
    float64.
    """
    true = [str(example.label) for example in task.dev]
    match task.kind:
        case "classification":
            ids = {name: number for number, name in enumerate([*task.labels, *sorted(set(true) - set(task.labels))])}
            return np.array([ids[label] for label in true], dtype=np.int16)
        case "multi-label":
            sets = [RULES[task.kind].names(label) for label in true]
            return indicators(sets, [*task.labels, *sorted({name for each in sets for name in each} - set(task.labels))], np.bool_)
        case "regression":
            return np.array([float(label) for label in true], dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class DevScorer:
    """Scores the predictions of many candidates on the dev texts of a task; equal to the scores of `Kind.score`.

    The predictions of one candidate are, by kind of task, label ids int16 (n,), chosen labels bool (n, labels), or numbers float32 (n,).
    truth: of `dev_truth`.
    """

    kind: TaskKind
    metric: str
    truth: npt.NDArray[Any]
    labels: int

    @classmethod
    def of(cls, task: Task, metric: str) -> DevScorer:
        """Scores by `metric` on `task.dev`."""
        return cls(task.kind, metric, dev_truth(task), len(task.labels))

    def predictions(self, logits: FloatArray) -> npt.NDArray[Any]:
        """Return the predictions of logits (n, labels). They are made from the outputs, whose float32 may round close logits to a tie."""
        return self.predictions_of_outputs(KINDS[self.kind].outputs(logits))

    def predictions_of_outputs(self, outputs: FloatArray) -> npt.NDArray[Any]:
        """Return the predictions of outputs (n, labels)."""
        match self.kind:
            case "classification":
                ids: npt.NDArray[Any] = outputs.argmax(axis=1).astype(np.int16)
                return ids
            case "multi-label":
                return np.asarray(outputs >= 0.5)
            case "regression":
                return outputs[:, 0]

    def scores(self, predictions: npt.NDArray[Any], rows: IntArray | None = None) -> ScoreArray:
        """Return the metric of every candidate (m, n, ...) on some rows (None: all), float64 (m,).

        A label of dev that training does not have counts in macro-F1 with 0 on any rows, as it does on all of them.
        """
        chosen = slice(None) if rows is None else rows
        truth, step = self.truth[chosen], max(1, _AT_ONCE // max(1, self.truth.size))
        parts = [self._scores(predictions[start : start + step][:, chosen], truth) for start in range(0, len(predictions), step)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _scores(self, predictions: npt.NDArray[Any], truth: npt.NDArray[Any]) -> ScoreArray:
        match self.kind:
            case "classification":
                names = max(self.labels, int(self.truth.max(initial=-1)) + 1)
                return _label_scores(predictions, truth, self.metric, known=self.labels, names=names)
            case "multi-label":
                return _set_scores(predictions, truth, self.metric, known=self.labels)
            case "regression":
                return _number_scores(predictions.astype(np.float64), truth, self.metric)


def score_test(task: Task, predicted: Sequence[str]) -> tuple[AnyScores, AnyScores | None]:
    """Scores on all test rows, and on the rows whose text is not in train (None if those are all rows or none).

    Two public tasks show why: 52 of the 139 test rows of ACL-ARC citation intent and 51 of the 65 of HyperPartisan are verbatim in train.
    """
    true = [str(example.label) for example in task.test]
    of_train = {text_key(example) for example in task.train}
    kept = [index for index, example in enumerate(task.test) if text_key(example) not in of_train]
    score = KINDS[task.kind].score
    whole = score(true, predicted, task.labels)
    if not 0 < len(kept) < len(true):
        return whole, None
    return whole, score([true[index] for index in kept], [predicted[index] for index in kept], task.labels)


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


def check_labels(kind: TaskKind, labels: Sequence[str], examples: Sequence[Example], *, origin: str, remedy: str) -> None:
    """Raise DataError with the first label that is not in `labels`, its row in `origin`, and what to do other than drop it."""
    for example in examples:
        unknown = [] if example.label is None else [name for name in RULES[kind].names(example.label) if name not in labels]
        if unknown:
            what = f"label {brief(unknown[0])} is none of the model's ({brief_labels(labels)}){spelled_otherwise(unknown[0], labels)}"
            raise DataError(f"{origin}:{example.id}: {what}; drop the row, or {remedy}")


def brief_labels(labels: Sequence[str]) -> str:
    """Return the first labels for a one-line message, each shortened."""
    return ", ".join(brief(name, 30) for name in labels[:10]) + (", …" if len(labels) > 10 else "")


def main_metric(kind: TaskKind) -> str:
    """Return the metric by which models are compared."""
    return DEV_METRICS[kind][0]


def require_single_label(kind: TaskKind, what: str, instead: str) -> None:
    """Raise UsageError unless the task is a classification. what: the operation. instead: the remedy."""
    if kind != "classification":
        raise UsageError(f"{what} is for texts of one label each, and this is a {kind} task; {instead}")


def is_percent(metric: str) -> bool:
    """Return True if the metric is a share that tables show in percent."""
    return metric not in _NOT_PERCENT


def format_metric(metric: str, value: float, *, places: int = 1) -> str:
    """Return a value as tables show it: shares in percent, correlations with two decimals more, errors in the user's unit."""
    if is_percent(metric):
        return f"{100 * value:z.{places}f}"
    return number_text(value, 4) if metric == "rmse" else f"{value:z.{places + 2}f}"  # z: no -0.000


def _labels_above_half(row: FloatArray, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(names[index] for index in np.flatnonzero(row >= 0.5).tolist())


def _label_scores(predictions: npt.NDArray[Any], truth: npt.NDArray[Any], metric: str, *, known: int, names: int) -> ScoreArray:
    hits = predictions == truth
    if metric != "macro_f1":
        return np.asarray(hits.mean(axis=1), dtype=np.float64)
    candidates = len(predictions)
    row = np.arange(candidates)[:, None] * names
    predicted = np.bincount((row + predictions).ravel(), minlength=candidates * names).reshape(candidates, names)
    right = np.bincount((row + truth)[hits], minlength=candidates * names).reshape(candidates, names)
    return mean_f1(right, predicted + np.bincount(truth, minlength=names), known=known)


def _set_scores(predictions: npt.NDArray[Any], truth: npt.NDArray[Any], metric: str, *, known: int) -> ScoreArray:
    unseen = truth.shape[1] - predictions.shape[2]
    if unseen:
        predictions = np.concatenate([predictions, np.zeros((*predictions.shape[:2], unseen), dtype=np.bool_)], axis=2)
    if metric == "subset_accuracy":
        return np.asarray((predictions == truth).all(axis=2).mean(axis=1), dtype=np.float64)
    right = (predictions & truth).sum(axis=1)
    involved = predictions.sum(axis=1) + truth.sum(axis=0)
    if metric == "macro_f1":
        return mean_f1(right, involved, known=known)
    return np.asarray(2 * right.sum(axis=1) / np.maximum(involved.sum(axis=1), 1))


def _number_scores(predictions: ScoreArray, truth: ScoreArray, metric: str) -> ScoreArray:
    if not np.ptp(truth) > 0:
        return np.zeros(len(predictions))
    if metric == "r2":
        spread = float(np.square(truth - truth.mean()).sum())
        return 1 - np.square(predictions - truth).sum(axis=1) / spread if spread > 0 else np.zeros(len(predictions))
    if metric == "spearman":
        from scipy.stats import rankdata

        predictions, truth = rankdata(predictions, axis=1), rankdata(truth)
    x, y = predictions - predictions.mean(axis=1, keepdims=True), truth - truth.mean()
    lengths = np.sqrt(np.square(x).sum(axis=1) * np.square(y).sum())
    varied = (np.ptp(predictions, axis=1) > 0) & (lengths > 0)  # the computed mean of equal numbers may differ from them
    correlations: ScoreArray = np.divide(x @ y, lengths, out=np.zeros(len(x)), where=varied)
    return correlations
