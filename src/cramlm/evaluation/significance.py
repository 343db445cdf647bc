"""Paired significance tests of two methods on the same test rows, over several seeds of each.

The statistic is the mean over seeds of the score of one method less that of the other (macro-F1 or accuracy).

    p          approximate randomisation: for every test row, the predictions of the two methods are exchanged or not, at random and in all
               seeds alike (predictions of two seeds for one row are not independent). p is the share of differences at least as large,
               (1 + hits) / (1 + trials). Noreen 1989; Yeh 2000, "More accurate tests for the statistical significance of result
               differences".
    interval   paired bootstrap at 95 %: rows and seeds are sampled with replacement, the same for both methods. With one seed only rows
               vary; with few seeds the interval is a little narrow.

`holm` corrects several p for their number (Holm 1979). Exchanging and sampling rows change counts per label only, so a thousand trials are
one matrix product.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Metric: TypeAlias = Literal["macro_f1", "accuracy"]
_Floats: TypeAlias = npt.NDArray[np.float64]
_Singles: TypeAlias = npt.NDArray[Any]  # float32, or float64 after it was widened

TRIALS = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean over seeds of one minus other, in 0..1; its interval at 95 %; the two-sided p."""

    value: float
    low: float
    high: float
    p: float


def compare_predictions(
    true: Sequence[str],
    one: Sequence[Sequence[str]],
    other: Sequence[Sequence[str]],
    *,
    metric: Metric = "macro_f1",
    seed: int = 0,
    trials: int = TRIALS,
) -> Difference:
    """The score of `one` less that of `other`. one, other: for each seed the predictions for the rows of `true`, in order."""
    assert len(one) == len(other) > 0, f"{len(one)} and {len(other)} seeds"
    assert all(len(predictions) == len(true) > 0 for predictions in (*one, *other))
    names = sorted({*true, *(label for predictions in (*one, *other) for label in predictions)})
    codes = {name: code for code, name in enumerate(names)}
    truth = np.array([codes[label] for label in true])
    sides = [
        [_Predictions(truth, np.array([codes[label] for label in predictions]), len(names)) for predictions in side]
        for side in (one, other)
    ]
    value = float(np.mean([a.score(metric) - b.score(metric) for a, b in zip(*sides, strict=True)]))
    samples = _sample(len(true), seed, trials)
    swapped = np.mean(
        [a.score_swapped(b, samples.swaps, metric) - b.score_swapped(a, samples.swaps, metric) for a, b in zip(*sides, strict=True)], axis=0
    )
    hits = int((np.abs(swapped) >= abs(value) - 1e-12).sum())
    resampled = np.stack(
        [a.score_weighted(samples.weights, metric) - b.score_weighted(samples.weights, metric) for a, b in zip(*sides, strict=True)]
    )
    seeds = np.random.Generator(np.random.Philox(key=[seed, 0x5EED])).integers(0, len(one), size=(len(one), trials))
    means = np.take_along_axis(resampled, seeds, axis=0).mean(axis=0)
    low, high = (float(end) for end in np.percentile(means, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]))
    return Difference(value, low, high, (1 + hits) / (1 + trials))


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Float32 (trials, rows), so that products with counts are exact. swaps: 0 or 1; weights: how often a row is sampled."""

    swaps: _Singles
    weights: _Singles


@functools.lru_cache(maxsize=1)
def _sample(rows: int, seed: int, trials: int) -> _Samples:
    """The same samples for every pair of methods with this number of rows."""
    random = np.random.Generator(np.random.Philox(key=[seed, 0x5169]))
    swaps = (random.random((trials, rows), dtype=np.float32) < 0.5).astype(np.float32)
    positions = random.integers(0, rows, size=(trials, rows)) + rows * np.arange(trials)[:, None]
    weights = np.bincount(positions.ravel(), minlength=trials * rows).reshape(trials, rows).astype(np.float32)
    return _Samples(swaps, weights)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: each p adjusted for their number, from the smallest up; at most 1. The order of names is kept."""
    corrected, highest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=lambda each: p[each])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[name]))
        corrected[name] = highest
    return {name: corrected[name] for name in p}


class _Predictions:
    """The predictions of one seed as counts per row and label: hits, and involved (true + predicted, the denominator of F1)."""

    def __init__(self, truth: npt.NDArray[np.int64], predictions: npt.NDArray[np.int64], labels: int) -> None:
        one_of = np.eye(labels, dtype=np.float32)
        self.hit = one_of[truth] * (truth == predictions)[:, None]
        self.involved = one_of[truth] + one_of[predictions]

    def score(self, metric: Metric) -> float:
        return float(_score(self.hit.sum(axis=0), self.involved.sum(axis=0), metric))

    def score_swapped(self, other: _Predictions, swaps: _Singles, metric: Metric) -> _Floats:
        """Scores (trials,) with the predictions of `other` in the rows of `swaps` (trials, rows)."""
        hit = self.hit.sum(axis=0) + swaps @ (other.hit - self.hit)
        involved = self.involved.sum(axis=0) + swaps @ (other.involved - self.involved)
        return _score(hit, involved, metric)

    def score_weighted(self, weights: _Singles, metric: Metric) -> _Floats:
        """Scores (trials,) of rows that occur `weights` (trials, rows) times."""
        return _score(weights @ self.hit, weights @ self.involved, metric)


def _score(hit: _Singles, involved: _Singles, metric: Metric) -> _Floats:
    """Over the last axis, labels: macro-F1 over the labels involved, or accuracy."""
    hit, involved = hit.astype(np.float64), involved.astype(np.float64)
    if metric == "accuracy":
        share: _Floats = 2 * hit.sum(axis=-1) / involved.sum(axis=-1)
        return share
    occurs = involved > 0.5  # sums of differences are whole numbers up to rounding
    f1 = np.divide(2 * hit, involved, out=np.zeros_like(hit), where=occurs)
    mean: _Floats = f1.sum(axis=-1) / occurs.sum(axis=-1)
    return mean
