"""Scores of predicted numbers, equal to SciPy's and scikit-learn's, and how sure one can be of them.

Pearson's correlation says whether the numbers rise together along a line, Spearman's whether they are in the same order; both are 0 where
one side is constant. RMSE is the error in the user's unit; R2 the share of the variance explained, below 0 for answers worse than the mean.
Intervals are percentile bootstraps over rows; there is none of Spearman, whose ranks each resample would have to count anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.evaluation.label_metrics import percentile_intervals
from cramlm.evaluation.metrics import CELLS_AT_ONCE, RESAMPLES, Interval

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class NumberScores:
    """How predicted numbers compare with the true ones. rmse: in the user's unit. true, predicted: (rows,)."""

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
    def figures(self) -> dict[str, float]:
        return {"pearson": self.pearson, "spearman": self.spearman, "rmse": self.rmse, "r2": self.r2}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, intervals included."""
        intervals = bootstrap_number_intervals(self.true, self.predicted)
        return {"rows": self.rows, **self.figures, "intervals": {name: list(ends) for name, ends in intervals.items()}}


def score_numbers(true: Sequence[float], predicted: Sequence[float]) -> NumberScores:
    """Compare two parallel lists of finite numbers."""
    from scipy.stats import pearsonr, spearmanr

    assert len(true) == len(predicted) > 0, f"{len(true)} true and {len(predicted)} predicted numbers"
    truth, answers = np.asarray(true, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    varied = np.ptp(truth) > 0 and np.ptp(answers) > 0
    error = float(np.square(truth - answers).sum())
    spread = float(np.square(truth - truth.mean()).sum())
    return NumberScores(
        rows=len(truth),
        pearson=_finite(pearsonr(truth, answers).statistic) if varied else 0.0,
        spearman=_finite(spearmanr(truth, answers).statistic) if varied else 0.0,
        rmse=float(np.sqrt(error / len(truth))),
        r2=1 - error / spread if spread > 0 else 0.0,
        true=truth,
        predicted=answers,
    )


def bootstrap_number_intervals(true: _Numbers, predicted: _Numbers, *, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """Percentile intervals at 95 % of pearson, rmse and r2, by resampling rows with replacement; same seed, same figures."""
    rows = len(true)
    middle = true.mean()
    x, y = true - middle, predicted - middle  # sums of squares of large numbers would cancel
    sums = np.stack([x, y, x * x, y * y, x * y, np.square(x - y)], axis=1)
    random = np.random.Generator(np.random.Philox(key=[seed, 0xB007]))
    samples = []
    at_once = max(1, CELLS_AT_ONCE // rows)
    for start in range(0, resamples, at_once):
        drawn = random.multinomial(rows, np.full(rows, 1 / rows), size=min(at_once, resamples - start)).astype(np.float64)
        mean_x, mean_y, xx, yy, xy, error = (drawn @ sums / rows).T
        of_x, of_y = np.maximum(xx - mean_x**2, 0), np.maximum(yy - mean_y**2, 0)
        spread = np.sqrt(of_x * of_y)
        pearson = np.divide(xy - mean_x * mean_y, spread, out=np.zeros_like(spread), where=spread > 0)
        r2 = 1 - np.divide(error, of_x, out=np.ones_like(of_x), where=of_x > 0)
        samples.append(np.stack([np.clip(pearson, -1, 1), np.sqrt(error), r2]))
    return percentile_intervals(("pearson", "rmse", "r2"), np.concatenate(samples, axis=1))


def _finite(value: float) -> float:
    return float(value) if np.isfinite(value) else 0.0
