"""Compare models: paired significance tests on test rows, and the recommendation of one model of a run, by dev alone.

Significance. The statistic is the mean over seeds of the score of one method less that of the other (macro-F1 or accuracy; of numbers
Pearson's correlation), on the same test rows.

    p          approximate randomisation: for every test row, the predictions of the two methods are exchanged or not, at random and in all
               seeds alike (predictions of two seeds for one row are not independent). p is the share of differences at least as large,
               (1 + hits) / (1 + trials). Noreen 1989; Yeh 2000, "More accurate tests for the statistical significance of result
               differences".
    interval   paired bootstrap at 95 %: rows and seeds are sampled with replacement, the same for both methods. With one seed only rows
               vary; with few seeds the interval is a little narrow.

`holm` corrects several p for their number (Holm 1979). Every score is a function of sums over rows (counts per label, moments of numbers),
so many trials are one matrix product.

Recommendation. Every model is the best on dev of many candidates, and the more candidates there were, the more its dev score is too high.
Models are therefore compared by cross-fitted scores: the candidate is chosen on one half of dev and scored on the other, both ways, over
several splits that are the same for all models. The standard deviation of a difference over random halves of dev equals the standard error
of the difference on all of dev (half-sample replication, McCarthy 1969); differences are measured in this standard error. Where dev is
small, linear models are compared with one another on dev and the training texts that they predict out of fold.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.data.labels import RULES
from cramlm.errors import counted
from cramlm.evaluation.kinds import METRIC_NAMES, DevScorer, ScoreArray, format_metric, is_percent
from cramlm.evaluation.metrics import ROUNDING, indicators, mean_f1
from cramlm.records import IntArray, TaskKind

Metric: TypeAlias = Literal["macro_f1", "accuracy"]
_Floats: TypeAlias = npt.NDArray[np.float64]
_Singles: TypeAlias = npt.NDArray[Any]  # float32, or float64 after it was widened

TRIALS = 2000
LEVEL = 0.95
_BLOCK: Final = 1 << 22  # trials times rows at a time
CLEAR: Final = 1.64
"""A difference of more standard errors is clear: one-sided, by chance once in twenty times (docs/log.md)."""
SPLITS: Final = 20
_FEW_ROWS: Final = 10
"""Of dev; the spread over halves of fewer, which is often 0, says nothing."""
_SPLIT_STREAM: Final = 0x5B17


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
    kind: TaskKind = "classification",
    metric: Metric = "macro_f1",
    trials: int = TRIALS,
) -> Difference:
    """The score of `one` less that of `other`. one, other: for each seed the predictions for the rows of `true`, in order, all as labels of
    `Example`. metric: of labels; numbers are compared by Pearson's correlation.
    """
    assert len(one) == len(other) > 0, f"{len(one)} and {len(other)} seeds"
    assert all(len(predictions) == len(true) > 0 for predictions in (*one, *other))
    if kind == "regression":
        terms, score = functools.partial(_moments, _numbers(true)), _pearson
        sides = [[terms(_numbers(predictions)) for predictions in side] for side in (one, other)]
    else:
        names = sorted({name for labels in (true, *one, *other) for label in labels for name in RULES[kind].names(label)})
        truth = _label_sets(true, kind, names)
        sides = [[_counts(truth, _label_sets(predictions, kind, names)) for predictions in side] for side in (one, other)]
        score = functools.partial(_label_score, metric=metric)
    value = float(np.mean([score(a.sum(axis=0)) - score(b.sum(axis=0)) for a, b in zip(*sides, strict=True)]))
    samples, pairs = _sample(len(true), trials), list(zip(*sides, strict=True))
    hits = 0
    for swaps in samples.swaps():
        swapped = np.mean([score(_swapped(a, b, swaps)) - score(_swapped(b, a, swaps)) for a, b in pairs], axis=0)
        hits += int((np.abs(swapped) >= abs(value) - 1e-12).sum())
    resampled = np.concatenate(
        [np.stack([score(weights @ a) - score(weights @ b) for a, b in pairs]) for weights in samples.weights()], axis=1
    )
    seeds = np.random.Generator(np.random.Philox(key=[0, 0x5EED])).integers(0, len(one), size=(len(one), trials))
    means = np.take_along_axis(resampled, seeds, axis=0).mean(axis=0)
    low, high = (float(end) for end in np.percentile(means, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]))
    return Difference(value, low, high, (1 + hits) / (1 + trials))


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """packed: bits of the swaps, uint8 (trials, rows / 8). counts: how often a row is sampled, uint8 (trials, rows)."""

    packed: npt.NDArray[np.uint8]
    counts: npt.NDArray[np.uint8]

    def swaps(self) -> Iterator[_Singles]:
        """Yield 0 or 1 in blocks of trials, (block, rows), in float32, so that products with counts are exact."""
        rows = self.counts.shape[1]
        for block in _blocks(*self.counts.shape):
            yield np.unpackbits(self.packed[block], axis=1, count=rows).astype(np.float32)

    def weights(self) -> Iterator[_Singles]:
        """Yield `counts` in the same way."""
        for block in _blocks(*self.counts.shape):
            yield self.counts[block].astype(np.float32)


def _blocks(trials: int, rows: int) -> Iterator[slice]:
    """Yield slices of trials with at most `_BLOCK` values, or with one trial."""
    size = max(1, _BLOCK // rows)
    return (slice(start, min(trials, start + size)) for start in range(0, trials, size))


@functools.lru_cache(maxsize=1)
def _sample(rows: int, trials: int) -> _Samples:
    """The same samples for every pair of methods with this number of rows."""
    random = np.random.Generator(np.random.Philox(key=[0, 0x5169]))
    sizes = [block.stop - block.start for block in _blocks(trials, rows)]
    packed = [np.packbits(random.random((size, rows), dtype=np.float32) < 0.5, axis=1) for size in sizes]
    counts = []
    for size in sizes:
        positions = random.integers(0, rows, size=(size, rows)) + rows * np.arange(size)[:, None]
        counts.append(np.bincount(positions.ravel(), minlength=size * rows).reshape(size, rows).astype(np.uint8))
    return _Samples(np.concatenate(packed), np.concatenate(counts))


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: each p adjusted for their number, from the smallest up; at most 1. The order of names is kept."""
    corrected, highest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=lambda each: p[each])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[name]))
        corrected[name] = highest
    return {name: corrected[name] for name in p}


def _swapped(one: _Singles, other: _Singles, swaps: _Singles) -> _Singles:
    """Sums (trials, k) of the terms `one` (rows, k), with those of `other` in the rows of `swaps` (trials, rows)."""
    sums: _Singles = one.sum(axis=0) + swaps @ (other - one)
    return sums


def _label_sets(labels: Sequence[str], kind: TaskKind, names: Sequence[str]) -> _Singles:
    """One for each label of a row, float32 (rows, labels)."""
    return indicators([RULES[kind].names(label) for label in labels], names, np.float32)


def _counts(truth: _Singles, predicted: _Singles) -> _Singles:
    """Counts per row and label, (rows, 2 * labels): hits, then involved (true + predicted, the denominator of F1)."""
    return np.concatenate([truth * predicted, truth + predicted], axis=1)


def _label_score(sums: _Singles, *, metric: Metric) -> _Floats:
    """Over the last axis, sums of `_counts`: macro-F1 over the labels involved, or accuracy."""
    hit, involved = np.split(sums.astype(np.float64), 2, axis=-1)
    if metric == "accuracy":
        share: _Floats = 2 * hit.sum(axis=-1) / involved.sum(axis=-1)
        return share
    return mean_f1(hit, involved)


def _numbers(labels: Sequence[str]) -> _Floats:
    return np.array([float(label) for label in labels])


def _moments(truth: _Floats, predicted: _Floats) -> _Floats:
    """1, x, y, x^2, y^2 and xy of each row (rows, 6), of numbers less the mean of the true ones, whose squares keep their digits."""
    x, y = predicted - truth.mean(), truth - truth.mean()
    return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=1)


def _pearson(sums: _Floats) -> _Floats:
    """Pearson's correlation from sums of `_moments` over the last axis; 0 of constant numbers."""
    count, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    of_x, of_y = xx - x * x / count, yy - y * y / count
    lengths = np.sqrt(np.maximum(of_x, 0) * np.maximum(of_y, 0))
    varied = (of_x > ROUNDING * xx) & (of_y > ROUNDING * yy) & (lengths > 0)
    correlation: _Floats = np.divide(xy - x * y / count, lengths, out=np.zeros_like(lengths), where=varied)
    return correlation


@dataclass(frozen=True, slots=True)
class Verdict:
    """recommended: a name of the models compared. scores: the cross-fitted dev score of each. text: one or two sentences."""

    recommended: str
    clear: bool
    scores: Mapping[str, float]
    text: str

    def as_dict(self) -> dict[str, Any]:
        return {"recommended": self.recommended, "clear": self.clear, "cross_fitted": dict(self.scores), "text": self.text}


@dataclass(frozen=True, slots=True, eq=False)
class OutOfFold:
    """The predictions of linear models for n dev texts and, out of fold, h training texts, if dev is small.

    scorer: on all n + h texts. predictions: of the chosen setting, (n + h, ...) by name of the model.
    """

    scorer: DevScorer
    predictions: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A model compared with the best of the cheaper ones. difference: the model's score less that one's. error: its standard error."""

    model: str
    cheaper: str
    difference: float
    error: float

    @property
    def clear(self) -> bool:
        return abs(self.difference) > CLEAR * self.error

    def gap(self, metric: str) -> str:
        """The size of the difference and its standard error, with the metric."""
        scale, places, unit = (100, 1, "points of ") if is_percent(metric) else (1, 3, "")
        return f"{abs(scale * self.difference):.{places}f} ± {scale * self.error:.{places}f} {unit}{METRIC_NAMES[metric]}"

    def advice(self, best: str, metric: str, *, basis: str) -> str:
        """Return the sentence that recommends `best`, one of the two models. basis: the scores, in parentheses."""
        gap = self.gap(metric)
        if best == self.model:
            return f"Use {best}: it is {gap} better than {self.cheaper}, which is cheaper {basis}."
        if self.clear:
            return f"Use {best}: it is cheaper than {self.model} and {gap} better {basis}."
        return f"No clear difference between {self.model} and {best} ({gap}); the cheaper is {best}: use it {basis}."


def compare_on_dev(
    scorer: DevScorer, candidates: Mapping[str, npt.NDArray[Any]], *, seed: int, out_of_fold: OutOfFold | None = None
) -> Verdict:
    """Compare models, cheapest first, and recommend one.

    Each model is compared with the one recommended so far, and takes its place only if it is clearly better. The alternative, the cheapest
    model that no other clearly beats, is wrong more often (docs/log.md): with an error of three points, a weak model is beaten by none.

    candidates: the dev predictions of everything that each model was chosen from, (m, n, ...). out_of_fold: the
    predictions by which the linear models are compared with one another, instead of the candidates on dev.
    """
    metric = scorer.metric
    rows = len(scorer.truth)
    more = {} if out_of_fold is None else {name: values[None] for name, values in out_of_fold.predictions.items()}
    more_halves = {} if out_of_fold is None else cross_fitted(out_of_fold.scorer, more, seed=seed)
    halves = cross_fitted(scorer, {name: more[name][:, :rows] if name in more else each for name, each in candidates.items()}, seed=seed)
    scores = {name: float(values.mean()) for name, values in halves.items()}
    cheapest, *others = candidates
    few = f" Dev has {counted(rows, 'row')}, which is too few to compare models." if rows < _FEW_ROWS else ""
    if not others:
        score = format_metric(metric, scores[cheapest])
        text = f"{cheapest}: {METRIC_NAMES[metric]} {score} cross-fitted on dev; no other model was fitted to compare with."
        return Verdict(cheapest, False, scores, text + few)

    def compare(model: str, cheaper: str) -> _Comparison:
        decide = more_halves if {model, cheaper} <= more_halves.keys() else halves
        differences = decide[model] - decide[cheaper]
        return _Comparison(model, cheaper, float(differences.mean()), float(differences.std()))

    best, comparisons = cheapest, []
    for name in others:
        comparison = compare(name, best)
        comparisons.append(comparison)
        if comparison.clear and comparison.difference > 0:
            best = name
    decisive = next(each for each in reversed(comparisons) if best in (each.model, each.cheaper))
    by_dev = not {decisive.model, decisive.cheaper} <= more_halves.keys()
    shown = scores if by_dev else {name: float(values.mean()) for name, values in more_halves.items()}
    texts = "" if out_of_fold is None else f"{counted(len(out_of_fold.scorer.truth) - rows, 'training text')} out of fold"
    listed = ", ".join(f"{name} {format_metric(metric, score)}" for name, score in shown.items())
    basis = f"({'cross-fitted on dev' if by_dev else f'on dev and {texts}'}: {listed})"
    text = decisive.advice(best, metric, basis=basis)
    with_cheaper = [compare(best, name) for name in itertools.takewhile(lambda name: name != best, candidates)]
    if near := [each for each in with_cheaper if not each.clear]:
        closest = min(near, key=lambda each: each.difference)
        text += f" The cheaper {closest.cheaper} is not clearly worse ({closest.gap(metric)})."
    if by_dev and texts:
        text += f" The linear models were compared on {texts}, too."
    return Verdict(best, decisive.clear, scores, text + few)


def cross_fitted(scorer: DevScorer, models: Mapping[str, npt.NDArray[Any]], *, seed: int) -> dict[str, ScoreArray]:
    """Scores of each model, candidates (m, n, ...), on `2 * SPLITS` halves of dev, each with the candidate that is best on the other half.

    Halves keep the labels' proportions and are the same for every model, so that differences between models are paired.
    """
    scores: dict[str, list[float]] = {name: [] for name in models}
    for number in range(SPLITS):
        half = _half(scorer, seed, number)
        one, other = np.flatnonzero(half), np.flatnonzero(~half)
        for chosen_on, scored_on in ((one, other), (other, one)):
            if not len(scored_on):  # dev is one row
                continue
            for name, predictions in models.items():
                best = int(np.argmax(scorer.scores(predictions, chosen_on))) if len(chosen_on) else 0
                scores[name].append(float(scorer.scores(predictions[best : best + 1], scored_on)[0]))
    return {name: np.array(values) for name, values in scores.items()}


def _half(scorer: DevScorer, seed: int, number: int) -> npt.NDArray[np.bool_]:
    """A random half of dev, True for its rows. The numbers of texts of each label in the two halves differ by at most one."""
    random = np.random.Generator(np.random.Philox(key=[seed, _SPLIT_STREAM + number]))
    order: IntArray = random.permutation(len(scorer.truth))
    if scorer.kind == "classification":
        order = order[np.argsort(scorer.truth[order], kind="stable")]
    half = np.zeros(len(order), dtype=np.bool_)
    half[order[number % 2 :: 2]] = True
    return half
