"""Scores of predicted labels, equal to scikit-learn's, and how sure one can be of them.

Macro-F1 is the mean over the labels that occur in the truth or among the predictions, which is `f1_score(true, predicted,
average="macro", zero_division=0)`. A true label that training never showed is a label of its own that is always missed, so micro-F1
equals accuracy.

Intervals are percentile bootstraps over rows. Resampling n rows with replacement draws the cells of the confusion matrix from a multinomial
of n trials, so a thousand resamples cost milliseconds whatever n is, and a `Scores` needs nothing but its matrix for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.records import FloatArray, IntArray

RESAMPLES = 1000
LEVEL = 0.95
CALIBRATION_BINS = 15
CELLS_AT_ONCE = 4_000_000  # drawn counts held in memory, 32 MB

Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How predictions compare with the truth; every figure in 0..1.

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
    def figures(self) -> dict[str, float]:
        """The three scores by name."""
        return {"accuracy": self.accuracy, "macro_f1": self.macro_f1, "micro_f1": self.micro_f1}

    def intervals(self, *, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Interval]:
        """95 % bootstrap intervals of macro_f1, micro_f1 and accuracy; same seed, same figures."""
        return bootstrap_intervals(self.confusion, seed=seed, resamples=resamples)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, intervals included."""
        values: dict[str, Any] = {
            "rows": self.rows,
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "micro_f1": self.micro_f1,
            "intervals": {name: list(interval) for name, interval in self.intervals().items()},
            "per_class": {label: dict(row) for label, row in self.per_class.items()},
            "confusion": self.confusion.tolist(),
        }
        if self.calibration_error is not None:
            values["calibration_error"] = self.calibration_error
        return values


def score(true: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> Scores:
    """Compare two parallel lists of labels; `predicted` are all among `labels`, `true` need not be."""
    assert len(true) == len(predicted) > 0, f"{len(true)} true and {len(predicted)} predicted labels"
    assert set(predicted) <= set(labels)
    names = [*labels, *sorted(set(true) - set(labels))]
    codes = {label: code for code, label in enumerate(names)}
    cells = [codes[label] * len(names) + codes[answer] for label, answer in zip(true, predicted, strict=True)]
    return _scores_of(np.bincount(cells, minlength=len(names) ** 2).reshape(len(names), len(names)), names)


def _scores_of(confusion: IntArray, names: Sequence[str]) -> Scores:
    hits, support, answered = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    precision, recall, f1 = (_share(hits, answered), _share(hits, support), _share(2 * hits, support + answered))
    right = int(hits.sum()) / int(support.sum())
    return Scores(
        rows=int(support.sum()),
        accuracy=right,
        macro_f1=float(f1[support + answered > 0].mean()),
        micro_f1=right,
        per_class={
            name: {"precision": float(precision[row]), "recall": float(recall[row]), "f1": float(f1[row]), "support": int(support[row])}
            for row, name in enumerate(names)
        },
        confusion=confusion,
    )


def _share(part: IntArray, whole: IntArray) -> npt.NDArray[np.float64]:
    """Of the whole; 0 where there is none."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


def bootstrap_intervals(confusion: IntArray, *, seed: int, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """Percentile intervals at 95 % from a confusion matrix of counts, by resampling its rows of data with replacement."""
    true, predicted = confusion.nonzero()
    counts = confusion[true, predicted]
    rows, classes = int(counts.sum()), len(confusion)
    random = np.random.Generator(np.random.Philox(key=[seed, 0xB007]))
    at_once = max(1, CELLS_AT_ONCE // max(len(counts), classes))
    samples = []
    for start in range(0, resamples, at_once):
        drawn = random.multinomial(rows, counts / rows, size=min(at_once, resamples - start))
        samples.append(_macro_and_micro(drawn, true, predicted, classes))
    macro, micro = np.concatenate(samples, axis=1)
    ends = [50 * (1 - LEVEL), 50 * (1 + LEVEL)]
    low, high = (float(end) for end in np.percentile(micro, ends))
    macro_low, macro_high = (float(end) for end in np.percentile(macro, ends))
    return {"macro_f1": (macro_low, macro_high), "micro_f1": (low, high), "accuracy": (low, high)}


def calibration_error(probabilities: FloatArray, true: Sequence[str], labels: Sequence[str], *, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error: mean distance, weighted by rows, between confidence and accuracy in bins of equal width.

    probabilities: (n, labels). Confidence is the highest probability of a row; a bin holds (lower, upper].

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3.
    """
    confidence = probabilities.max(axis=1).astype(np.float64)
    correct = np.array([labels[index] for index in probabilities.argmax(axis=1)], dtype=object) == np.array(true, dtype=object)
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gap = np.bincount(place, weights=confidence - correct, minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def _macro_and_micro(drawn: IntArray, true: IntArray, predicted: IntArray, classes: int) -> npt.NDArray[np.float64]:
    """Macro-F1 and accuracy, (2, samples), of counts (samples, cells) that lie at (true, predicted)."""
    cell = np.arange(len(true))
    of_truth, of_answer = (np.zeros((len(true), classes)) for _ in range(2))
    of_truth[cell, true] = 1
    of_answer[cell, predicted] = 1
    counts = drawn.astype(np.float64)
    hits = counts @ (of_truth * of_answer)
    involved = counts @ (of_truth + of_answer)  # support + predicted, the denominator of F1
    f1 = np.divide(2 * hits, involved, out=np.zeros_like(hits), where=involved > 0)
    return np.stack([f1.sum(axis=1) / (involved > 0).sum(axis=1), hits.sum(axis=1) / counts.sum(axis=1)])
