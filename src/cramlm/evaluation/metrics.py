"""Scores of predicted labels, sets of labels and numbers, equal to those of scikit-learn and SciPy, with bootstrap intervals.

Labels: macro-F1 is the mean over the labels that occur in the truth or among the predictions (`f1_score(..., average="macro",
zero_division=0)`). A true label that training does not have is a label that is always missed, so micro-F1 equals accuracy.

Sets of labels: macro-F1 as above, micro-F1 over all pairs of a text and a label, subset accuracy is the share of texts whose whole set is
right.

Numbers: Pearson's and Spearman's correlation are 0 if one side is constant; RMSE is in the user's unit; R2 is below 0 for predictions worse
than the mean. Spearman's has no interval, since every resample would have to be ranked again.

Intervals are percentile bootstraps over rows. Resampling n rows with replacement samples the cells of the confusion matrix from a
multinomial of n trials, so a thousand resamples cost milliseconds for any n, and `Scores` needs only its matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.records import FloatArray, IntArray

RESAMPLES = 1000
LEVEL = 0.95
CALIBRATION_BINS = 15
ROUNDING = 1e-12  # of a sum of squares: a smaller spread is a rounding error
CELLS_AT_ONCE = 4_000_000  # sampled counts held in memory, 32 MB

Interval: TypeAlias = tuple[float, float]
_Numbers: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores of predicted labels, each from 0 to 1.

    per_class: label -> precision, recall, f1 (0 where undefined) and support (rows that truly have it), for the given labels and then those
    of the truth that are not among them. confusion: rows are true, columns predicted labels, in the order of `per_class`.
    calibration_error: expected calibration error of the probabilities, None where only labels were scored.
    """

    rows: int
    accuracy: float
    macro_f1: float
    micro_f1: float
    per_class: Mapping[str, Mapping[str, float]]
    confusion: IntArray
    calibration_error: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Accuracy, macro-F1 and micro-F1 by name."""
        return {"accuracy": self.accuracy, "macro_f1": self.macro_f1, "micro_f1": self.micro_f1}

    def intervals(self, *, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Interval]:
        """Return 95 % bootstrap intervals of macro_f1, micro_f1 and accuracy; equal seeds give equal intervals."""
        return bootstrap_intervals(self.confusion, seed=seed, resamples=resamples)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values with intervals. confusions: the cells of `confusion` that are not 0, as [true, predicted, rows]."""
        true, predicted = self.confusion.nonzero()
        values: dict[str, Any] = {
            "rows": self.rows,
            **self.metrics,
            "intervals": {name: list(interval) for name, interval in self.intervals().items()},
            "per_class": {label: dict(row) for label, row in self.per_class.items()},
            "confusions": np.stack([true, predicted, self.confusion[true, predicted]], axis=1).tolist(),
        }
        if self.calibration_error is not None:
            values["calibration_error"] = self.calibration_error
        return values


def score(true: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> Scores:
    """Score labels. true, predicted: one label per row; those predicted are all among `labels`, the true ones need not be."""
    assert len(true) == len(predicted) > 0, f"{len(true)} true and {len(predicted)} predicted labels"
    assert set(predicted) <= set(labels)
    names = [*labels, *sorted(set(true) - set(labels))]
    codes = {label: code for code, label in enumerate(names)}
    cells = [codes[label] * len(names) + codes[prediction] for label, prediction in zip(true, predicted, strict=True)]
    confusion = np.bincount(cells, minlength=len(names) ** 2).reshape(len(names), len(names))
    hits = confusion.diagonal()
    per_class, macro_f1 = _by_class(names, hits, confusion.sum(axis=1), confusion.sum(axis=0))
    right = int(hits.sum()) / len(true)
    return Scores(len(true), accuracy=right, macro_f1=macro_f1, micro_f1=right, per_class=per_class, confusion=confusion)


def _by_class(names: Sequence[str], hits: IntArray, support: IntArray, predicted: IntArray) -> tuple[dict[str, dict[str, float]], float]:
    """Return the scores of each label, and macro-F1 over the labels that occur.

    hits, support, predicted: (labels,), rows where the label is predicted correctly, is true, is predicted.
    """
    precision, recall, f1 = _share(hits, predicted), _share(hits, support), _share(2 * hits, support + predicted)
    occurs = support + predicted > 0
    per_class: dict[str, dict[str, float]] = {
        name: {"precision": float(precision[row]), "recall": float(recall[row]), "f1": float(f1[row]), "support": int(support[row])}
        for row, name in enumerate(names)
    }
    return per_class, float(f1[occurs].mean()) if occurs.any() else 0.0


def mean_f1(hits: npt.NDArray[Any], involved: npt.NDArray[Any], *, known: int | None = None) -> _Numbers:
    """Return macro-F1 over the last axis, that of labels, of those involved and those after the first `known`; 0 if there is none.

    hits: rows where a label is both true and predicted. involved: rows where it is true plus rows where it is predicted, the denominator of
    F1; from sums of differences it may be a whole number only up to rounding.
    """
    occurs = involved > 0.5
    f1 = np.divide(2.0 * hits, involved, out=np.zeros(hits.shape), where=occurs)
    count = occurs[..., :known].sum(axis=-1) + (0 if known is None else involved.shape[-1] - known)
    return np.asarray(f1.sum(axis=-1) / np.maximum(count, 1))


def _share(part: IntArray, whole: IntArray) -> _Numbers:
    """Return part / whole; 0 where whole is 0."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


def bootstrap_intervals(confusion: IntArray, *, seed: int, resamples: int) -> dict[str, Interval]:
    """Return 95 % percentile intervals from a confusion matrix (labels, labels) of counts, by resampling the rows of the data."""
    true, predicted = confusion.nonzero()
    counts, classes = confusion[true, predicted], len(confusion)

    cell = np.arange(len(true))
    of_truth, of_prediction = (np.zeros((len(true), classes)) for _ in range(2))
    of_truth[cell, true] = 1
    of_prediction[cell, predicted] = 1

    def figures(sampled: _Numbers) -> _Numbers:
        hits = sampled @ (of_truth * of_prediction)
        return np.stack([mean_f1(hits, sampled @ (of_truth + of_prediction)), hits.sum(axis=1) / sampled.sum(axis=1)])

    samples = _resample(counts, figures, largest=max(len(counts), classes), seed=seed, resamples=resamples)
    intervals = percentile_intervals(("macro_f1", "micro_f1"), samples)
    return {**intervals, "accuracy": intervals["micro_f1"]}


def _resample(
    counts: IntArray, figures: Callable[[_Numbers], _Numbers], *, largest: int, seed: int = 0, resamples: int = RESAMPLES
) -> _Numbers:
    """Resample rows with replacement and return their scores, (scores, resamples).

    counts: (cells,), rows of each kind. figures: from sampled counts (samples, cells) to scores (scores, samples). largest: numbers per
    sample in the largest array of `figures`, which bounds the memory.
    """
    rows = int(counts.sum())
    random = np.random.Generator(np.random.Philox(key=[seed, 0xB007]))
    at_once = max(1, CELLS_AT_ONCE // largest)
    sizes = [min(at_once, resamples - start) for start in range(0, resamples, at_once)]
    return np.concatenate([figures(random.multinomial(rows, counts / rows, size).astype(np.float64)) for size in sizes], axis=1)


def percentile_intervals(names: Sequence[str], samples: _Numbers) -> dict[str, Interval]:
    """Return the 95 % percentile interval of each score. samples: (names, resamples)."""
    low, high = np.percentile(samples, [50 * (1 - LEVEL), 50 * (1 + LEVEL)], axis=1)
    return {name: (float(one), float(other)) for name, one, other in zip(names, low, high, strict=True)}


def calibration_error(probabilities: FloatArray, true: Sequence[str], labels: Sequence[str], *, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error: mean distance, weighted by rows, between confidence and accuracy in bins of equal width.

    probabilities: (n, labels). Confidence is the highest probability of a row; a bin holds (lower, upper].

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3.
    """
    confidence = probabilities.max(axis=1).astype(np.float64)
    correct = np.array([labels[index] for index in probabilities.argmax(axis=1)], dtype=object) == np.array(true, dtype=object)
    index = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gap = np.bincount(index, weights=confidence - correct, minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


@dataclass(frozen=True, slots=True, eq=False)
class LabelScores:
    """Scores of predicted sets of labels, each from 0 to 1. The F1 of a label that is neither true nor predicted is 0.

    per_class: as in `Scores`. true, predicted: (rows, labels) of 0 and 1, columns in the order of `per_class`.
    """

    rows: int
    subset_accuracy: float
    macro_f1: float
    micro_f1: float
    per_class: Mapping[str, Mapping[str, float]]
    true: IntArray
    predicted: IntArray

    @property
    def metrics(self) -> dict[str, float]:
        return {"subset_accuracy": self.subset_accuracy, "macro_f1": self.macro_f1, "micro_f1": self.micro_f1}

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values with intervals."""
        return {
            "rows": self.rows,
            **self.metrics,
            "intervals": {name: list(ends) for name, ends in bootstrap_label_intervals(self.true, self.predicted).items()},
            "per_class": {label: dict(row) for label, row in self.per_class.items()},
        }


def score_labels(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]) -> LabelScores:
    """Score sets of labels. true, predicted: one set per row; labels predicted are all among `labels`, the true ones need not be."""
    assert len(true) == len(predicted) > 0, f"{len(true)} true and {len(predicted)} predicted sets of labels"
    names = [*labels, *sorted({name for row in true for name in row} - set(labels))]
    truth, predictions = indicators(true, names, np.int64), indicators(predicted, names, np.int64)
    hits, support, predicted_counts = (truth * predictions).sum(axis=0), truth.sum(axis=0), predictions.sum(axis=0)
    per_class, macro_f1 = _by_class(names, hits, support, predicted_counts)
    return LabelScores(
        rows=len(truth),
        subset_accuracy=float((truth == predictions).all(axis=1).mean()),
        macro_f1=macro_f1,
        micro_f1=float(2 * hits.sum() / max(1, support.sum() + predicted_counts.sum())),
        per_class=per_class,
        true=truth,
        predicted=predictions,
    )


def bootstrap_label_intervals(true: IntArray, predicted: IntArray) -> dict[str, Interval]:
    """Return 95 % percentile intervals of the three scores, by resampling rows. true, predicted: (rows, labels) of 0 and 1."""
    patterns, counts = np.unique(np.concatenate([true, predicted], axis=1), axis=0, return_counts=True)
    truth, predictions = (half.astype(np.float64) for half in np.split(patterns, 2, axis=1))
    right = (truth == predictions).all(axis=1).astype(np.float64)

    def figures(sampled: _Numbers) -> _Numbers:
        hits, involved = sampled @ (truth * predictions), sampled @ (truth + predictions)
        micro = 2 * hits.sum(axis=1) / np.maximum(involved.sum(axis=1), 1)
        return np.stack([sampled @ right / len(true), mean_f1(hits, involved), micro])

    return percentile_intervals(("subset_accuracy", "macro_f1", "micro_f1"), _resample(counts, figures, largest=max(patterns.shape)))


def indicators(rows: Sequence[Sequence[str]], names: Sequence[str], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return 1 for each label of a row, else 0, (rows, names)."""
    columns = {name: column for column, name in enumerate(names)}
    table = np.zeros((len(rows), len(names)), dtype=dtype)
    for row, labels in enumerate(rows):
        table[row, [columns[label] for label in labels]] = 1
    return table


@dataclass(frozen=True, slots=True, eq=False)
class NumberScores:
    """Scores of predicted numbers. rmse: in the user's unit. true, predicted: (rows,)."""

    rows: int
    pearson: float
    spearman: float
    rmse: float
    r2: float
    true: _Numbers
    predicted: _Numbers

    @property
    def per_class(self) -> Mapping[str, Mapping[str, float]]:
        return {}

    @property
    def metrics(self) -> dict[str, float]:
        return {"pearson": self.pearson, "spearman": self.spearman, "rmse": self.rmse, "r2": self.r2}

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values with intervals."""
        intervals = bootstrap_number_intervals(self.true, self.predicted)
        return {"rows": self.rows, **self.metrics, "intervals": {name: list(ends) for name, ends in intervals.items()}}


def score_numbers(true: Sequence[float], predicted: Sequence[float]) -> NumberScores:
    """Score numbers. true, predicted: one finite number per row."""
    from scipy.stats import pearsonr, spearmanr

    assert len(true) == len(predicted) > 0, f"{len(true)} true and {len(predicted)} predicted numbers"
    truth, predictions = np.asarray(true, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    varied = np.ptp(truth) > 0 and np.ptp(predictions) > 0
    error = float(np.square(truth - predictions).sum())
    spread = float(np.square(truth - truth.mean()).sum())
    return NumberScores(
        rows=len(truth),
        pearson=_finite(pearsonr(truth, predictions).statistic) if varied else 0.0,
        spearman=_finite(spearmanr(truth, predictions).statistic) if varied else 0.0,
        rmse=float(np.sqrt(error / len(truth))),
        r2=1 - error / spread if np.ptp(truth) > 0 and spread > 0 else 0.0,
        true=truth,
        predicted=predictions,
    )


def bootstrap_number_intervals(true: _Numbers, predicted: _Numbers) -> dict[str, Interval]:
    """Return 95 % percentile intervals of pearson, rmse and r2, by resampling rows. true, predicted: (rows,)."""
    rows = len(true)
    middle = true.mean()
    x, y = true - middle, predicted - middle  # sums of squares of large numbers would cancel
    sums = np.stack([x, y, x * x, y * y, x * y, np.square(x - y)], axis=1)

    def figures(sampled: _Numbers) -> _Numbers:
        mean_x, mean_y, xx, yy, xy, error = (sampled @ sums / rows).T
        of_x, of_y = xx - mean_x**2, yy - mean_y**2
        of_x = np.where(of_x > ROUNDING * xx, of_x, 0)  # a smaller variance is that of equal numbers
        of_y = np.where(of_y > ROUNDING * yy, of_y, 0)
        spread = np.sqrt(of_x * of_y)
        pearson = np.divide(xy - mean_x * mean_y, spread, out=np.zeros_like(spread), where=spread > 0)
        r2 = 1 - np.divide(error, of_x, out=np.ones_like(of_x), where=of_x > 0)
        return np.stack([np.clip(pearson, -1, 1), np.sqrt(error), r2])

    return percentile_intervals(("pearson", "rmse", "r2"), _resample(np.ones(rows, np.int64), figures, largest=rows))


def _finite(value: float) -> float:
    return float(value) if np.isfinite(value) else 0.0
