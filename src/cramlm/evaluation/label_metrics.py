"""Scores of predicted sets of labels, equal to scikit-learn's, and how sure one can be of them.

Macro-F1 is the mean over the labels that occur in the truth or among the predictions, `f1_score(..., average="macro", zero_division=nan)`;
micro-F1 counts every yes alike, whatever its label; subset accuracy is the share of texts whose labels are all right. A true label that
training never showed is one that is always missed. Intervals are percentile bootstraps over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.evaluation.metrics import CELLS_AT_ONCE, LEVEL, RESAMPLES, Interval
from cramlm.records import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class LabelScores:
    """How predicted sets compare with the true ones; every figure in 0..1, F1 0 where nothing is there to be found or was.

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
    def figures(self) -> dict[str, float]:
        return {"subset_accuracy": self.subset_accuracy, "macro_f1": self.macro_f1, "micro_f1": self.micro_f1}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, intervals included."""
        return {
            "rows": self.rows,
            **self.figures,
            "intervals": {name: list(ends) for name, ends in bootstrap_label_intervals(self.true, self.predicted).items()},
            "per_class": {label: dict(row) for label, row in self.per_class.items()},
        }


def score_labels(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]) -> LabelScores:
    """Compare two parallel lists of sets of labels; those predicted are all among `labels`, the true ones need not be."""
    from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support  # a second to import

    assert len(true) == len(predicted) > 0, f"{len(true)} true and {len(predicted)} predicted sets of labels"
    names = [*labels, *sorted({name for row in true for name in row} - set(labels))]
    truth, answers = _indicators(true, names), _indicators(predicted, names)
    columns = precision_recall_fscore_support(truth, answers, average=None, zero_division=0)
    per_class = {
        name: {"precision": float(precision), "recall": float(recall), "f1": float(f1), "support": int(support)}
        for name, precision, recall, f1, support in zip(names, *columns, strict=True)
    }
    occurs = (truth + answers).sum(axis=0) > 0
    return LabelScores(
        rows=len(truth),
        subset_accuracy=float(accuracy_score(truth, answers)),
        macro_f1=float(f1_score(truth, answers, average="macro", zero_division=np.nan)) if occurs.any() else 0.0,
        micro_f1=float(f1_score(truth, answers, average="micro", zero_division=0)),
        per_class=per_class,
        true=truth,
        predicted=answers,
    )


def bootstrap_label_intervals(true: IntArray, predicted: IntArray, *, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """Percentile intervals at 95 % of the three figures, by resampling rows with replacement; same seed, same figures."""
    patterns, counts = np.unique(np.concatenate([true, predicted], axis=1), axis=0, return_counts=True)
    truth, answers = (half.astype(np.float64) for half in np.split(patterns, 2, axis=1))
    right = (truth == answers).all(axis=1).astype(np.float64)
    random = np.random.Generator(np.random.Philox(key=[seed, 0xB007]))
    rows, samples = int(counts.sum()), []
    at_once = max(1, CELLS_AT_ONCE // max(patterns.shape))
    for start in range(0, resamples, at_once):
        drawn = random.multinomial(rows, counts / rows, size=min(at_once, resamples - start)).astype(np.float64)
        hits, involved = drawn @ (truth * answers), drawn @ (truth + answers)
        f1 = np.divide(2 * hits, involved, out=np.zeros_like(hits), where=involved > 0)
        macro = f1.sum(axis=1) / np.maximum((involved > 0).sum(axis=1), 1)
        micro = 2 * hits.sum(axis=1) / np.maximum(involved.sum(axis=1), 1)
        samples.append(np.stack([drawn @ right / rows, macro, micro]))
    return percentile_intervals(("subset_accuracy", "macro_f1", "micro_f1"), np.concatenate(samples, axis=1))


def percentile_intervals(names: Sequence[str], samples: npt.NDArray[np.float64]) -> dict[str, Interval]:
    """Of samples (names, resamples)."""
    low, high = np.percentile(samples, [50 * (1 - LEVEL), 50 * (1 + LEVEL)], axis=1)
    return {name: (float(one), float(other)) for name, one, other in zip(names, low, high, strict=True)}


def _indicators(rows: Sequence[Sequence[str]], names: Sequence[str]) -> IntArray:
    columns = {name: column for column, name in enumerate(names)}
    table = np.zeros((len(rows), len(names)), dtype=np.int64)
    for row, labels in enumerate(rows):
        table[row, [columns[label] for label in labels]] = 1
    return table
