"""Logit adjustment, with its strength tau chosen on dev.

Training weighs every text equally, so a model prefers frequent labels; macro-F1 weighs every label equally. Logit adjustment subtracts tau
times the log of each label's frequency in training from its logit (Menon et al. 2021, "Long-tail learning via logit adjustment", post-hoc
variant). Where a text may have several labels, the log-odds of each label take the place of the log frequency, which lowers the threshold
of rare labels. The adjustment becomes part of the classifier's bias, so an exported model is its weights and nothing else.

tau is chosen at every dev evaluation of a phase that learns labels: by unadjusted scores, the weights that prefer frequent labels least
would be kept, whatever else they have learnt (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.config.run import RunConfig
from cramlm.evaluation.kinds import KINDS, DevScorer
from cramlm.records import FloatArray, Task

TAUS: Final = tuple(tenth / 10 for tenth in range(11))
"""Values of tau that are tried; 0 leaves the logits unchanged."""
TAU_WIDTH: Final = 0.15
"""Standard deviation of the weights of neighbouring values of tau in the average that decides where few texts do (docs/log.md)."""


@dataclass(frozen=True, slots=True, eq=False)
class Adjustment:
    """The chosen tau; of equally good ones the smallest.

    values: added to the logits, float32 (labels,); in a classification their mean is 0. before, after: the dev score with tau = 0 and with
    `tau`. metrics: all dev scores with `tau`, by name. predictions: on dev with every tau that was tried, (taus, n, ...).
    """

    tau: float
    values: FloatArray
    before: float
    after: float
    metrics: Mapping[str, float]
    predictions: npt.NDArray[Any]


def logit_adjustments(task: Task, taus: Sequence[float] = TAUS) -> dict[float, FloatArray]:
    """Return the adjustment of the logits for each tau, float32 (labels,). Numbers have no prior: their only adjustment is 0.

    Label frequencies are those of the training texts, with one more text for every label.
    """
    kind = KINDS[task.kind]
    if not kind.has_prior:
        return {0.0: np.zeros(len(task.labels), dtype=np.float32)}
    negative_log_prior = kind.negative_log_prior(task)
    return {tau: (tau * negative_log_prior).astype(np.float32) for tau in taus}


def adjusts_logits(config: RunConfig) -> bool:
    """Return True if a logit adjustment is chosen on dev."""
    return config.logit_adjustment == "dev" and KINDS[config.task.kind].has_prior


def neighbouring_taus(taus: Sequence[float]) -> npt.NDArray[np.float64]:
    """Weights (taus, taus) of an average of scores over neighbouring values of tau, which varies less by chance than each score."""
    weights = np.exp(-0.5 * np.square(np.subtract.outer(taus, taus) / TAU_WIDTH))
    result: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return result


def choose_adjustment(logits: FloatArray, task: Task, *, metric: str, taus: Sequence[float] = TAUS, averaged: bool = False) -> Adjustment:
    """Return the adjustment of dev logits (n, labels) that gives the highest `metric` on `task.dev`.

    averaged: choose by the average over neighbouring values of tau.
    """
    kind, scorer, true = KINDS[task.kind], DevScorer.of(task, metric), [str(example.label) for example in task.dev]
    adjustments = logit_adjustments(task, taus)
    predictions = np.stack([scorer.predictions(logits + values) for values in adjustments.values()])
    scores = scorer.scores(predictions)
    best = int(np.argmax(neighbouring_taus(tuple(adjustments)) @ scores if averaged else scores))
    tau, values = list(adjustments.items())[best]
    outputs = kind.outputs((logits + values).astype(np.float32))
    metrics = kind.score(true, kind.predicted_labels(outputs, task.labels), task.labels).metrics
    return Adjustment(tau, values, float(scores[0]), float(scores[best]), metrics, predictions)
