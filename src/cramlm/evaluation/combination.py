"""The combination of a run's models: a weighted average of the calibrated logits of the encoder and of the linear models.

The logits are log-probabilities in a classification, log-odds where a text may have several labels, and in a regression the numbers.

Each model is calibrated on dev (calibration.py). Its weight decreases exponentially with its calibrated dev loss, at a fixed rate: weights
fitted to a few hundred dev texts would be mostly noise, and equal weights give a bad model too much influence. A model far above the lowest
loss is left out. The logit adjustment of the average is chosen on dev, like that of every model. Where dev is small, training texts that
the linear models predict out of fold decide with it (linear/cross_validation.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cramlm.evaluation.calibration import Calibration, calibrate, calibrate_labels, calibrate_numbers, finite_vector
from cramlm.evaluation.kinds import KINDS, dev_truth
from cramlm.evaluation.logit_adjustment import TAUS, Adjustment, choose_adjustment
from cramlm.records import FloatArray, IntArray, Task, TaskKind

ENCODER: Final = "encoder"
"""The name of the run's encoder in a combination; linear models have their own names."""
COMBINATION_FILE: Final = "combination.json"
FORMAT: Final = 3
LOSS_SCALE: Final = 0.1
"""The weight of a model is proportional to exp(-loss / LOSS_SCALE), its calibrated dev loss in nats (docs/log.md)."""
SHRINKAGE: Final = 50  # dev texts; see `_calibrated`
EXPECTED_GAP, EXPECTED_GAP_UNLABELLED = 0.1, 0.02
"""Calibrated loss of an encoder with 100 labels less that of the best linear model, in nats, on average; without and with unlabelled texts
of the task (docs/log.md)."""
LARGEST_GAP: Final = 0.3
"""A model whose calibrated dev loss exceeds the lowest by more nats, of weight below 0.05, is left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Combination:
    """kind: of the task. models: the calibration of each model that is part of it, by name. adjustment: added to the average, float32
    (labels,). tau: its strength (logit_adjustment.py).
    """

    kind: TaskKind
    labels: tuple[str, ...]
    models: Mapping[str, Calibration]
    adjustment: FloatArray
    tau: float

    def logits(self, outputs: Mapping[str, FloatArray]) -> FloatArray:
        """Combined logits, float32 (n, labels), of the outputs (n, labels) of each model in `models`."""
        average = sum(weight * self.models[name].logits(outputs[name], self.kind) for name, weight in self.weights.items())
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
        labels = list(self.labels)
        return {"format": FORMAT, "kind": self.kind, "labels": labels, "models": models, "adjustment": adjustment, "tau": self.tau}

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
        if values["kind"] not in KINDS:
            raise ValueError(f"kind {values['kind']!r}, expected one of {', '.join(KINDS)}")
        return cls(values["kind"], labels, models, finite_vector(values["adjustment"], len(labels)), float(values["tau"]))


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """The predictions of a model for training texts out of fold.

    rows: indices of the training texts, int64 (h,). outputs: probabilities or numbers, float32 (h, labels).
    """

    rows: IntArray
    outputs: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class CombinationFit:
    """losses: the calibrated dev loss of every model. adjustment: of the average, with the dev predictions of every tau."""

    combination: Combination
    losses: Mapping[str, float]
    adjustment: Adjustment


def combine_on_dev(
    task: Task, outputs: Mapping[str, FloatArray], *, metric: str, held_out: Mapping[str, HeldOut] | None = None
) -> CombinationFit:
    """Calibrate models on the dev texts and combine them.

    outputs: of each model for `task.dev`, (n, labels), after its logit adjustment. metric: the dev score that chooses tau. held_out: the
    predictions of the linear models out of fold, if dev is small. The linear models are then calibrated on dev and these texts, and tau is
    chosen on both; training texts have the average of the linear models only. Ignored unless all linear models predict the same texts.
    """
    known = comparable({name: each for name, each in (held_out or {}).items() if name in outputs})
    whole = task.with_training_in_dev(next(iter(known.values())).rows.tolist() if known else [])
    calibrations = _calibrated(task, whole, outputs, known)
    lowest = min(each.loss for each in calibrations.values())
    kept = {name: each for name, each in calibrations.items() if each.loss <= lowest + LARGEST_GAP}
    unadjusted = Combination(task.kind, task.labels, kept, np.zeros(len(task.labels), dtype=np.float32), 0.0)
    logits, taus = unadjusted.logits(outputs), TAUS
    if linear := {name: each for name, each in kept.items() if name in known}:
        of_linear = replace(unadjusted, models=linear).logits({name: known[name].outputs for name in linear})
        taus = (choose_adjustment(np.concatenate([logits, of_linear]), whole, metric=metric, averaged=True).tau,)
    adjustment = choose_adjustment(logits, task, metric=metric, taus=taus)
    combination = Combination(task.kind, task.labels, kept, adjustment.values, adjustment.tau)
    return CombinationFit(combination, {name: each.loss for name, each in calibrations.items()}, adjustment)


def comparable(held_out: Mapping[str, HeldOut]) -> Mapping[str, HeldOut]:
    """Return `held_out` if all models predict the same training texts, otherwise an empty mapping.

    Losses on different texts cannot be compared.
    """
    first, *others = [each.rows.tolist() for each in held_out.values()] or [[]]
    return held_out if first and all(each == first for each in others) else {}


def _calibrated(task: Task, whole: Task, outputs: Mapping[str, FloatArray], held_out: Mapping[str, HeldOut]) -> dict[str, Calibration]:
    """Calibrate models on dev and the training texts that they predict out of fold. whole: the task with both as dev.

    A model without such predictions is calibrated on dev. Its loss is the lowest loss of the other models plus an estimated difference:
    that on the n dev texts, which is mostly chance, with the weight n / (n + SHRINKAGE), and the expected one with the rest of the weight.
    """
    if not held_out:
        return {name: calibrate_on_dev(task, values) for name, values in outputs.items()}
    both = {name: np.concatenate([outputs[name], each.outputs]) for name, each in held_out.items()}
    calibrations = {name: calibrate_on_dev(whole, values) for name, values in both.items()}
    best = min(calibrations, key=lambda name: calibrations[name].loss)
    reference = _dev_loss(calibrations[best], outputs[best], task)
    share = len(task.dev) / (len(task.dev) + SHRINKAGE)
    expected = EXPECTED_GAP_UNLABELLED if task.unlabelled else EXPECTED_GAP
    for name in outputs.keys() - held_out.keys():
        alone = calibrate_on_dev(task, outputs[name])
        difference = _dev_loss(alone, outputs[name], task) - reference
        calibrations[name] = replace(alone, loss=calibrations[best].loss + share * difference + (1 - share) * expected)
    return {name: calibrations[name] for name in outputs}


def _dev_loss(calibration: Calibration, outputs: FloatArray, task: Task) -> float:
    """Return the loss of calibrated outputs (n, labels) on dev, in the unit of `Calibration.loss`."""
    truth, logits = dev_truth(task), calibration.logits(outputs, task.kind)
    match task.kind:
        case "classification":
            known = np.flatnonzero(truth < logits.shape[1])
            return float(-logits[known, truth[known]].mean()) if len(known) else 0.0
        case "multi-label":
            targets = truth[:, : logits.shape[1]]
            return float((np.logaddexp(0, logits) - targets * logits).sum()) / max(1, int(targets.sum()))
        case "regression":
            error = float(np.square(truth - logits[:, 0]).mean())
            return 0.5 * math.log(error) if error > 0 else 0.0


def calibrate_on_dev(task: Task, outputs: FloatArray) -> Calibration:
    """Calibrate a model on its outputs for `task.dev`, (n, labels)."""
    truth, log_prior = dev_truth(task), -KINDS[task.kind].negative_log_prior(task)
    match task.kind:
        case "classification":
            return calibrate(outputs, truth.astype(np.int64), log_prior)
        case "multi-label":
            return calibrate_labels(outputs, truth[:, : len(task.labels)], log_prior)
        case "regression":
            return calibrate_numbers(outputs, truth)
