"""The combination of a run's models: a weighted average of the calibrated log-probabilities of the encoder and of the linear models.

Each model is calibrated on dev (calibration.py). Its weight decreases exponentially with its calibrated dev loss, at a fixed rate: weights
fitted to a few hundred dev texts would be mostly noise, and equal weights give a bad model too much influence. A model far above the lowest
loss is left out. The logit adjustment of the average is chosen on dev, like that of every model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cramlm.evaluation.calibration import Calibration, calibrate, finite_vector
from cramlm.evaluation.kinds import KINDS, DevScorer
from cramlm.evaluation.logit_adjustment import Adjustment, choose_adjustment
from cramlm.records import FloatArray, Task

ENCODER: Final = "encoder"
"""The name of the run's encoder in a combination; linear models have their own names."""
COMBINATION_FILE: Final = "combination.json"
FORMAT: Final = 2
LOSS_SCALE: Final = 0.1
"""The weight of a model is proportional to exp(-loss / LOSS_SCALE), its calibrated dev loss in nats per text (docs/log.md)."""
LARGEST_GAP: Final = 0.3
"""A model whose calibrated dev loss exceeds the lowest by more nats per text, of weight below 0.05, is left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Combination:
    """models: the calibration of each model that is part of it, by name. adjustment: added to the average, float32 (labels,). tau: its
    strength (logit_adjustment.py).
    """

    labels: tuple[str, ...]
    models: Mapping[str, Calibration]
    adjustment: FloatArray
    tau: float

    def logits(self, probabilities: Mapping[str, FloatArray]) -> FloatArray:
        """Combined logits, float32 (n, labels), of the probabilities (n, labels) of each model in `models`."""
        average = sum(weight * self.models[name].log_probabilities(probabilities[name]) for name, weight in self.weights.items())
        logits: FloatArray = (average + self.adjustment).astype(np.float32)
        return logits

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each model; their sum is 1."""
        lowest = min(each.loss for each in self.models.values())
        weights = {name: math.exp((lowest - each.loss) / LOSS_SCALE) for name, each in self.models.items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them."""
        models = {name: each.as_dict() for name, each in self.models.items()}
        adjustment = list(map(float, self.adjustment))
        return {"format": FORMAT, "labels": list(self.labels), "models": models, "adjustment": adjustment, "tau": self.tau}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Combination:
        """Read what `as_dict` returned.

        Raises:
            ValueError: if the format is another one, no model is named, or a number or length is wrong. KeyError, TypeError: if a field is
                missing or has another type.
        """
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, this version reads {FORMAT}")
        labels = tuple(values["labels"])
        models = {name: Calibration.from_dict(each, labels=len(labels)) for name, each in values["models"].items()}
        if not models:
            raise ValueError("models: expected at least one")
        return cls(labels, models, finite_vector(values["adjustment"], len(labels)), float(values["tau"]))


@dataclass(frozen=True, slots=True, eq=False)
class CombinationFit:
    """losses: the calibrated dev loss of every model, nats per text. adjustment: of the average, with the dev predictions of every tau."""

    combination: Combination
    losses: Mapping[str, float]
    adjustment: Adjustment


def combine_on_dev(task: Task, probabilities: Mapping[str, FloatArray], *, metric: str) -> CombinationFit:
    """Calibrate models on the dev texts of a classification and combine them.

    probabilities: of each model for `task.dev`, (n, labels), after its logit adjustment. metric: the dev score that chooses tau.
    """
    assert task.kind == "classification", "only distributions over labels are combined"
    calibrations = {name: calibrate_on_dev(task, values, metric=metric) for name, values in probabilities.items()}
    lowest = min(each.loss for each in calibrations.values())
    kept = {name: each for name, each in calibrations.items() if each.loss <= lowest + LARGEST_GAP}
    unadjusted = Combination(task.labels, kept, np.zeros(len(task.labels), dtype=np.float32), 0.0)
    adjustment = choose_adjustment(unadjusted.logits(probabilities), task, metric=metric)
    combination = Combination(task.labels, kept, adjustment.values, adjustment.tau)
    return CombinationFit(combination, {name: each.loss for name, each in calibrations.items()}, adjustment)


def calibrate_on_dev(task: Task, probabilities: FloatArray, *, metric: str) -> Calibration:
    """Calibrate a model of a classification on its probabilities for `task.dev`, (n, labels). metric: any dev score of the task."""
    truth = DevScorer.of(task, metric).truth.astype(np.int64)
    log_prior = -KINDS[task.kind].negative_log_prior([str(example.label) for example in task.train], task.labels)
    return calibrate(probabilities, truth, log_prior)
