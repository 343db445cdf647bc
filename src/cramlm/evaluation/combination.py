"""The combination of a run's models: the calibrated log-probabilities of the encoder and of the linear models, averaged.

Two numbers per model are calibrated on dev by minimizing the loss (negative log-likelihood): a scale of its log-probabilities (an inverse
temperature, Guo et al. 2017) and the share of the log prior that is added back, because its own logit adjustment subtracted some. Weights
are equal: fitted to the few hundred dev texts of a small task, they would be mostly noise. A model whose calibrated dev loss is far above
the lowest is left out. The logit adjustment of the average is chosen on dev, like that of every model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.evaluation.kinds import KINDS, DevScorer
from cramlm.evaluation.logit_adjustment import Adjustment, choose_adjustment
from cramlm.records import FloatArray, IntArray, Task

COMBINED: Final = "combined"
"""The name of the combination among the models of a run."""
ENCODER: Final = "encoder"
"""The name of the run's encoder in a combination; linear models have their own names."""
COMBINATION_FILE: Final = "combination.json"
FORMAT: Final = 1
LARGEST_GAP: Final = 0.3
"""A model whose calibrated dev loss exceeds the lowest by more nats per text is left out."""
_SCALES: Final = (0.05, 20_000.0)
_SMALLEST_PROBABILITY: Final = 1e-7  # float32 probabilities of 0 have no logarithm


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """scale: factor of the log-probabilities. shift: added to them, float32 (labels,). loss: on dev after calibration, nats per text."""

    scale: float
    shift: FloatArray
    loss: float

    def log_probabilities(self, probabilities: FloatArray) -> npt.NDArray[np.float64]:
        """Calibrated log-probabilities of probabilities (n, labels)."""
        return _log_softmax(self.scale * _logarithm(probabilities) + self.shift)


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
        average = np.mean([each.log_probabilities(probabilities[name]) for name, each in self.models.items()], axis=0)
        logits: FloatArray = (average + self.adjustment).astype(np.float32)
        return logits

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them."""
        models = {
            name: {"scale": each.scale, "shift": list(map(float, each.shift)), "dev_loss": each.loss} for name, each in self.models.items()
        }
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
        models = {
            name: Calibration(float(each["scale"]), _vector(each["shift"], len(labels)), float(each["dev_loss"]))
            for name, each in values["models"].items()
        }
        if not models or not all(np.isfinite([each.scale, each.loss]).all() and each.scale > 0 for each in models.values()):
            raise ValueError("models: expected at least one, with a positive scale")
        return cls(labels, models, _vector(values["adjustment"], len(labels)), float(values["tau"]))


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
    truth = DevScorer.of(task, metric).truth.astype(np.int64)
    log_prior = -KINDS[task.kind].negative_log_prior([str(example.label) for example in task.train], task.labels)
    calibrations = {name: calibrate(values, truth, log_prior) for name, values in probabilities.items()}
    lowest = min(each.loss for each in calibrations.values())
    kept = {name: each for name, each in calibrations.items() if each.loss <= lowest + LARGEST_GAP}
    unadjusted = Combination(task.labels, kept, np.zeros(len(task.labels), dtype=np.float32), 0.0)
    adjustment = choose_adjustment(unadjusted.logits(probabilities), task, metric=metric)
    combination = Combination(task.labels, kept, adjustment.values, adjustment.tau)
    return CombinationFit(combination, {name: each.loss for name, each in calibrations.items()}, adjustment)


def calibrate(probabilities: FloatArray, truth: IntArray, log_prior: npt.NDArray[np.float64]) -> Calibration:
    """Fit scale and share of the log prior to true label ids; ids of labels that the model does not have are left out.

    The loss is convex in both numbers, so the result does not depend on where the search begins.
    """
    from scipy.optimize import minimize

    seen = truth < probabilities.shape[1]
    logarithms, rows, targets = _logarithm(probabilities[seen]), np.arange(int(seen.sum())), truth[seen]
    if not len(rows):
        return Calibration(1.0, np.zeros(len(log_prior), dtype=np.float32), 0.0)
    # The search needs values near 1: those of a strongly regularized linear model differ by hundredths.
    logarithms -= logarithms.mean(axis=1, keepdims=True)
    unit = float(logarithms.std()) or 1.0
    logarithms /= unit

    def loss_and_gradient(parameters: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        scale, share = parameters
        log_predicted = _log_softmax(scale * logarithms + share * log_prior)
        excess = np.exp(log_predicted)
        excess[rows, targets] -= 1
        gradient = np.array([(excess * logarithms).sum(), (excess @ log_prior).sum()]) / len(rows)
        return float(-log_predicted[rows, targets].mean()), gradient

    bounds = [(_SCALES[0] * unit, _SCALES[1] * unit), (0.0, 1.0)]
    best = minimize(loss_and_gradient, x0=np.array([unit, 0.0]), jac=True, method="L-BFGS-B", bounds=bounds)
    scale, share = map(float, best.x)
    return Calibration(scale / unit, (share * log_prior).astype(np.float32), float(best.fun))


def _logarithm(probabilities: FloatArray) -> npt.NDArray[np.float64]:
    return np.log(np.maximum(probabilities.astype(np.float64), _SMALLEST_PROBABILITY))


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    normalized: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalized


def _vector(values: Any, length: int) -> FloatArray:
    vector: FloatArray = np.array(values, dtype=np.float32)
    if vector.shape != (length,) or not np.isfinite(vector).all():
        raise ValueError(f"expected {length} finite numbers")
    return vector
