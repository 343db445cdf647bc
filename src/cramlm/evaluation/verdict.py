"""Recommend one of the models of a run, by dev alone and on equal terms.

Every model is the best on dev of many candidates, and the more candidates there were, the more its dev score is too high. Models are
therefore compared by cross-fitted scores: the candidate is chosen on one half of dev and scored on the other, both ways, over several
splits that are the same for all models. The standard deviation of a difference over random halves of dev equals the standard error of the
difference on all of dev (half-sample replication, McCarthy 1969); differences are measured in this standard error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.evaluation.kinds import METRIC_NAMES, DevScorer, ScoreArray, format_metric, is_percent
from cramlm.records import IntArray

CLEAR: Final = 1.28
"""A difference of more standard errors is clear: one-sided, by chance once in ten times."""
SPLITS: Final = 20
_SPLIT_STREAM: Final = 0x5B17


@dataclass(frozen=True, slots=True)
class Verdict:
    """recommended: a name of the models compared. scores: the cross-fitted dev score of each. text: one or two sentences."""

    recommended: str
    clear: bool
    scores: Mapping[str, float]
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"recommended": self.recommended, "clear": self.clear, "cross_fitted": dict(self.scores), "text": self.text}


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


def compare_on_dev(scorer: DevScorer, candidates: Mapping[str, npt.NDArray[Any]], *, seed: int) -> Verdict:
    """Compare models, cheapest first, and recommend one. A model is recommended over a cheaper one only if it is clearly better.

    candidates: the dev predictions of everything that each model was chosen from, (m, n, ...).
    """
    metric = scorer.metric
    halves = cross_fitted(scorer, candidates, seed=seed)
    scores = {name: float(values.mean()) for name, values in halves.items()}
    cheapest, *others = candidates
    if not others:
        score = format_metric(metric, scores[cheapest])
        text = f"{cheapest}: {METRIC_NAMES[metric]} {score} on dev; no other model was fitted to compare with."
        return Verdict(cheapest, False, scores, text)
    best, comparisons = cheapest, []
    for name in others:
        differences = halves[name] - halves[best]
        comparison = _Comparison(name, best, float(differences.mean()), float(differences.std()))
        comparisons.append(comparison)
        if comparison.clear and comparison.difference > 0:
            best = name
    decisive = next((each for each in reversed(comparisons) if best in (each.model, each.cheaper)), comparisons[-1])
    gap = decisive.gap(metric)
    basis = f"(cross-fitted on dev: {', '.join(f'{name} {format_metric(metric, score)}' for name, score in scores.items())})"
    if best == decisive.model:
        text = f"Use {best}: it is {gap} better than {decisive.cheaper}, which is cheaper {basis}."
    elif decisive.clear:
        text = f"Use {best}: it is cheaper than {decisive.model} and {gap} better {basis}."
    else:
        text = f"No clear difference between {decisive.model} and {best} ({gap}); the cheaper is {best}: use it {basis}."
    return Verdict(best, decisive.clear, scores, text)


def cross_fitted(scorer: DevScorer, models: Mapping[str, npt.NDArray[Any]], *, seed: int, splits: int = SPLITS) -> dict[str, ScoreArray]:
    """Scores of each model, candidates (m, n, ...), on `2 * splits` halves of dev, each with the candidate that is best on the other half.

    Halves keep the labels' proportions and are the same for every model, so that differences between models are paired.
    """
    scores: dict[str, list[float]] = {name: [] for name in models}
    for number in range(splits):
        half = _half(scorer, seed, number)
        one, other = np.flatnonzero(half), np.flatnonzero(~half)
        for chosen_on, scored_on in ((one, other), (other, one)):
            for name, predictions in models.items():
                best = int(np.argmax(scorer.scores(predictions, chosen_on)))
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
