"""Calibration of a model's outputs on labelled texts that it was not trained on.

Of probabilities two numbers are fitted by minimizing the loss (negative log-likelihood): a scale of the logits (an inverse temperature, Guo
et al. 2017, "On Calibration of Modern Neural Networks") and the share of the log prior that is added back, because the model's own logit
adjustment subtracted some. The logits are log-probabilities in a classification, and log-odds where a text may have several labels. The
numbers of a regression get slope and intercept of the least-squares line, if there are enough of them. Importing this module loads NumPy
only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.records import BoolArray, FloatArray, IntArray, TaskKind

_SCALES: Final = (0.05, 20_000.0)
_SMALLEST_SLOPE: Final = 1e-3
FEWEST_NUMBERS: Final = 20
"""Of different texts: a line through fewer points is further from other texts' numbers than the predictions themselves (docs/log.md)."""
_SMALLEST_PROBABILITY: Final = 1e-7  # float32 probabilities of 0 have no logarithm


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """scale: factor of the logits, or of numbers. shift: added to them, float32 (labels,). loss: on dev after calibration, in nats per
    text; of several labels per true label; of numbers half the logarithm of the mean squared error.
    """

    scale: float
    shift: FloatArray
    loss: float

    def logits(self, outputs: FloatArray, kind: TaskKind) -> npt.NDArray[np.float64]:
        """Calibrated log-probabilities, log-odds or numbers (n, labels) of a model's outputs (n, labels), by kind of task."""
        match kind:
            case "classification":
                return self.log_probabilities(outputs)
            case "multi-label":
                return self.scale * _log_odds(outputs) + self.shift
            case "regression":
                return self.scale * outputs.astype(np.float64) + self.shift

    def log_probabilities(self, probabilities: FloatArray) -> npt.NDArray[np.float64]:
        """Calibrated log-probabilities of the probabilities (n, labels) of a classification."""
        return _log_softmax(self.scale * _logarithm(probabilities) + self.shift)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` reads them."""
        return {"scale": self.scale, "shift": list(map(float, self.shift)), "dev_loss": self.loss}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, labels: int) -> Calibration:
        """Read what `as_dict` returned.

        Raises:
            ValueError: if a number or the length is wrong. KeyError, TypeError: if a field is missing or has another type.
        """
        calibration = cls(float(values["scale"]), finite_vector(values["shift"], labels), float(values["dev_loss"]))
        if not np.isfinite([calibration.scale, calibration.loss]).all() or calibration.scale <= 0:
            raise ValueError("expected a positive scale and a finite loss")
        return calibration


def calibrate(probabilities: FloatArray, truth: IntArray, log_prior: npt.NDArray[np.float64]) -> Calibration:
    """Fit scale and share of the log prior to true label ids; ids of labels that the model does not have are left out.

    The loss is convex in both numbers, so the result does not depend on where the search begins. One additional text for which every label
    is equally true keeps the scale finite if all predictions are right (after Platt 1999).
    """
    seen = truth < probabilities.shape[1]
    logarithms, rows, targets = _logarithm(probabilities[seen]), np.arange(int(seen.sum())), truth[seen]
    if not len(rows):
        return Calibration(1.0, np.zeros(len(log_prior), dtype=np.float32), 0.0)
    # The search needs values near 1: those of a strongly regularized linear model differ by hundredths.
    logarithms -= logarithms.mean(axis=1, keepdims=True)
    unit = float(logarithms.std()) or 1.0
    logarithms /= unit
    smoothing = 1 / (len(rows) + 1)

    def loss_and_gradient(parameters: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        scale, share = parameters
        log_predicted = _log_softmax(scale * logarithms + share * log_prior)
        excess = np.exp(log_predicted)
        excess[rows, targets] -= 1 - smoothing
        excess -= smoothing / len(log_prior)
        gradient = np.array([(excess * logarithms).sum(), (excess @ log_prior).sum()]) / len(rows)
        return float(-(1 - smoothing) * log_predicted[rows, targets].mean() - smoothing * log_predicted.mean()), gradient

    return _minimized(loss_and_gradient, unit, log_prior)


def calibrate_labels(probabilities: FloatArray, truth: BoolArray, log_odds_of_labels: npt.NDArray[np.float64]) -> Calibration:
    """Fit scale and share of the log-odds of labels in training where a text may have several labels. truth: (n, labels).

    The loss is the sum of the binary losses of all labels, convex in both numbers. One additional text for which every label is as true as
    not keeps the scale finite, as in `calibrate`.
    """
    log_odds = _log_odds(probabilities)
    unit = float(log_odds.std()) or 1.0
    log_odds /= unit
    smoothing = 1 / (len(truth) + 1)
    targets = (1 - smoothing) * truth + smoothing / 2
    count = max(1, int(truth.sum()))

    def loss_and_gradient(parameters: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        scale, share = parameters
        logits = scale * log_odds + share * log_odds_of_labels
        excess = 0.5 * (1 + np.tanh(0.5 * logits)) - targets
        gradient = np.array([(excess * log_odds).sum(), (excess @ log_odds_of_labels).sum()]) / count
        return float((np.logaddexp(0, logits) - targets * logits).sum()) / count, gradient

    return _minimized(loss_and_gradient, unit, log_odds_of_labels)


def _minimized(loss_and_gradient: Callable[[Any], Any], unit: float, log_prior: npt.NDArray[np.float64]) -> Calibration:
    """Minimize a loss of (scale, share of `log_prior`). loss_and_gradient: of logits that were divided by `unit`."""
    from scipy.optimize import minimize

    bounds = [(_SCALES[0] * unit, _SCALES[1] * unit), (0.0, 1.0)]
    best = minimize(loss_and_gradient, x0=np.array([unit, 0.0]), jac=True, method="L-BFGS-B", bounds=bounds)
    scale, share = map(float, best.x)
    return Calibration(scale / unit, (share * log_prior).astype(np.float32), float(best.fun))


def calibrate_numbers(numbers: FloatArray, truth: npt.NDArray[np.float64]) -> Calibration:
    """Fit the line from predicted numbers (n, 1) to true ones (n,); those of fewer than `FEWEST_NUMBERS` different texts stay as they are.
    One additional text, wrong by a standard deviation of the true numbers, keeps the loss finite. The line never falls: a model that is
    wrong in direction gets the smallest slope.
    """
    predicted, mean = numbers[:, 0].astype(np.float64), float(truth.mean())
    slope, shift, spread = 1.0, 0.0, float(truth.var())
    if len({*zip(predicted.tolist(), truth.tolist(), strict=True)}) >= FEWEST_NUMBERS:
        centred = predicted - predicted.mean()
        variance = float(centred @ centred)
        slope = max(float(centred @ (truth - mean)) / variance, _SMALLEST_SLOPE) if variance > 0 else 1.0
        shift = mean - slope * float(predicted.mean())
    squares = float(np.square(truth - slope * predicted - shift).sum())
    error = (squares + spread) / (len(truth) + 1)
    return Calibration(slope, np.array([shift], dtype=np.float32), 0.5 * math.log(error) if error > 0 else 0.0)


def _log_odds(probabilities: FloatArray) -> npt.NDArray[np.float64]:
    inside = np.clip(probabilities.astype(np.float64), _SMALLEST_PROBABILITY, 1 - _SMALLEST_PROBABILITY)
    log_odds: npt.NDArray[np.float64] = np.log(inside) - np.log1p(-inside)
    return log_odds


def _logarithm(probabilities: FloatArray) -> npt.NDArray[np.float64]:
    return np.log(np.maximum(probabilities.astype(np.float64), _SMALLEST_PROBABILITY))


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    normalized: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalized


def finite_vector(values: Any, length: int) -> FloatArray:
    """Return float32 (length,).

    Raises:
        ValueError: if there are not `length` finite numbers.
    """
    vector: FloatArray = np.array(values, dtype=np.float32)
    if vector.shape != (length,) or not np.isfinite(vector).all():
        raise ValueError(f"expected {length} finite numbers")
    return vector
