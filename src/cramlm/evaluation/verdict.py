"""Which model of a run to use: a comparison of all of them on equal terms, by dev alone.

Every model is the best on dev of many candidates, and the more it tried, the more its dev score flatters it. Models are therefore compared
by cross-fitted scores (choice.py). The standard deviation of a difference over random halves of dev equals the standard error of the
difference on all of dev (half-sample replication, McCarthy 1969), which is what a difference is measured in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt

from cramlm.evaluation.choice import DevScorer, cross_fitted
from cramlm.evaluation.kinds import NAMES, figure

CLEAR: Final = 1.28
"""A difference of more standard errors is clear: one-sided, by chance once in ten times."""


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


def compare_on_dev(scorer: DevScorer, candidates: Mapping[str, npt.NDArray[Any]], *, seed: int) -> Verdict:
    """Compare models, cheapest first. candidates: the dev predictions of everything that each model was chosen from, (m, n, ...).

    A model is recommended in place of a cheaper one only where it is clearly better.
    """
    names, metric = list(candidates), scorer.metric
    halves = cross_fitted(scorer, candidates, seed=seed)
    scores = {name: float(values.mean()) for name, values in halves.items()}
    shown = ", ".join(f"{name} {figure(metric, score)}" for name, score in scores.items())
    if len(names) == 1:
        return Verdict(
            names[0],
            False,
            scores,
            f"{names[0]}: {NAMES[metric]} {shown.rpartition(' ')[2]} on dev; no other model was fitted to compare with.",
        )
    best, compared = names[0], []
    for name in names[1:]:
        differences = halves[name] - halves[best]
        mean, error = float(differences.mean()), float(differences.std())
        clear = abs(mean) > CLEAR * error
        compared.append((name, best, mean, error, clear))
        if clear and mean > 0:
            best = name
    rival, other, mean, error, clear = next((each for each in reversed(compared) if best in each[:2]), compared[-1])
    unit = "points of " if metric not in ("pearson", "spearman", "r2") else ""
    scale = 100 if unit else 1
    gap = f"{abs(scale * mean):.{1 if unit else 3}f} ± {scale * error:.{1 if unit else 3}f} {unit}{NAMES[metric]}"
    basis = f"(cross-fitted on dev: {shown})"
    if best == rival:
        text = f"Use {best}: it is {gap} better than {other}, which is cheaper {basis}."
    elif clear:
        text = f"Use {best}: it is cheaper than {rival} and {gap} better {basis}."
    else:
        text = f"No clear difference between {rival} and {best} ({gap}); the cheaper is {best}: use it {basis}."
    return Verdict(best, clear, scores, text)
