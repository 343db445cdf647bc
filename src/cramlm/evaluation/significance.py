"""Whether one method is better than another on the same test rows, over several seeds of each.

The statistic is the mean over seeds of the score of one minus that of the other (macro-F1, or the share of right rows).

    p          approximate randomisation: at every test row the answers of the two methods change places or not, by a coin that all seeds
               share (the answers of two seeds to one row are no independent evidence), and p is how often a difference at least as large
               comes out, (1 + hits) / (1 + trials). Noreen 1989; Yeh 2000, "More accurate tests for the statistical significance of
               result differences".
    interval   paired bootstrap at 95 %: rows and seeds are drawn with replacement, both methods see the same draw. With one seed only
               rows vary; with few seeds the interval is a little narrow.

Where several methods are compared with one, `holm` corrects their p for being many (Holm 1979).

Swapping and drawing rows change counts per label only, so a thousand trials are one product of matrices.
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
    """How much better `one` is than `other`: answers of each seed (the same number for both) to the rows of `true`, in their order."""
    assert len(one) == len(other) > 0, f"{len(one)} and {len(other)} seeds"
    assert all(len(answers) == len(true) > 0 for answers in (*one, *other))
    names = sorted({*true, *(label for answers in (*one, *other) for label in answers)})
    codes = {name: code for code, name in enumerate(names)}
    truth = np.array([codes[label] for label in true])
    sides = [[_Answers(truth, np.array([codes[label] for label in answers]), len(names)) for answers in side] for side in (one, other)]
    value = float(np.mean([a.score(metric) - b.score(metric) for a, b in zip(*sides, strict=True)]))
    draws = _draw(len(true), seed, trials)
    swapped = np.mean(
        [a.score_swapped(b, draws.swaps, metric) - b.score_swapped(a, draws.swaps, metric) for a, b in zip(*sides, strict=True)], axis=0
    )
    hits = int((np.abs(swapped) >= abs(value) - 1e-12).sum())
    drawn = np.stack(
        [a.score_weighted(draws.weights, metric) - b.score_weighted(draws.weights, metric) for a, b in zip(*sides, strict=True)]
    )
    seeds = np.random.Generator(np.random.Philox(key=[seed, 0x5EED])).integers(0, len(one), size=(len(one), trials))
    means = np.take_along_axis(drawn, seeds, axis=0).mean(axis=0)
    low, high = (float(end) for end in np.percentile(means, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]))
    return Difference(value, low, high, (1 + hits) / (1 + trials))


@dataclass(frozen=True, slots=True, eq=False)
class _Draws:
    """Float32 (trials, rows), so that products with counts are exact. swaps: 0 or 1; weights: how often a row was drawn."""

    swaps: _Singles
    weights: _Singles


@functools.lru_cache(maxsize=1)
def _draw(rows: int, seed: int, trials: int) -> _Draws:
    """The same for every pair of methods with so many rows."""
    random = np.random.Generator(np.random.Philox(key=[seed, 0x5169]))
    swaps = (random.random((trials, rows), dtype=np.float32) < 0.5).astype(np.float32)
    places = random.integers(0, rows, size=(trials, rows)) + rows * np.arange(trials)[:, None]
    weights = np.bincount(places.ravel(), minlength=trials * rows).reshape(trials, rows).astype(np.float32)
    return _Draws(swaps, weights)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Each p corrected for their number, step by step from the smallest; never below its own, at most 1, in the given order."""
    corrected, highest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=lambda each: p[each])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[name]))
        corrected[name] = highest
    return {name: corrected[name] for name in p}


class _Answers:
    """One seed's answers as what each row adds to the counts of each label: hits, and involved (true + answered, the denominator of F1)."""

    def __init__(self, truth: npt.NDArray[np.int64], answers: npt.NDArray[np.int64], labels: int) -> None:
        one_of = np.eye(labels, dtype=np.float32)
        self.hit = one_of[truth] * (truth == answers)[:, None]
        self.involved = one_of[truth] + one_of[answers]

    def score(self, metric: Metric) -> float:
        return float(_score(self.hit.sum(axis=0), self.involved.sum(axis=0), metric))

    def score_swapped(self, other: _Answers, swaps: _Singles, metric: Metric) -> _Floats:
        """Scores (trials,) where the rows in `swaps` (trials, rows) are answered by `other`."""
        hit = self.hit.sum(axis=0) + swaps @ (other.hit - self.hit)
        involved = self.involved.sum(axis=0) + swaps @ (other.involved - self.involved)
        return _score(hit, involved, metric)

    def score_weighted(self, weights: _Singles, metric: Metric) -> _Floats:
        """Scores (trials,) of rows that occur `weights` (trials, rows) times."""
        return _score(weights @ self.hit, weights @ self.involved, metric)


def _score(hit: _Singles, involved: _Singles, metric: Metric) -> _Floats:
    """Over the last axis, labels: macro-F1 over those involved, or the share of rows that are right."""
    hit, involved = hit.astype(np.float64), involved.astype(np.float64)
    if metric == "accuracy":
        share: _Floats = 2 * hit.sum(axis=-1) / involved.sum(axis=-1)
        return share
    there = involved > 0.5  # sums of differences are whole numbers up to rounding
    f1 = np.divide(2 * hit, involved, out=np.zeros_like(hit), where=there)
    mean: _Floats = f1.sum(axis=-1) / there.sum(axis=-1)
    return mean
