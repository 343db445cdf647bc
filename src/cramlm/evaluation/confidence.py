"""The confidence of predictions, and which predictions to withhold ("none of these", selective classification).

The confidence of a prediction is the calibrated probability (calibration.py) of the predicted label. Calibration changes no label: the
model's own probabilities choose it. A prediction whose confidence is below a threshold is withheld. Coverage is the share of the texts that
get a label, accuracy the share of those whose label is right; both are counted on dev for every threshold (El-Yaniv and Wiener 2010, "On
the foundations of noise-free selective classification").

    confidence.json     per model of a run: scale, shift, and the counts on dev and test

Importing this module loads NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.errors import ArtifactError, UsageError, counted
from cramlm.evaluation.calibration import Calibration, calibrate
from cramlm.records import BoolArray, FloatArray, IntArray
from cramlm.storage.artifacts import check_files
from cramlm.storage.locks import damage_named

CONFIDENCE_FILE: Final = "confidence.json"
FORMAT: Final = 1
MOST_THRESHOLDS: Final = 200
"""Thresholds of a curve that are stored, evenly spaced over the coverage."""
FEWEST_TEXTS: Final = 10
"""Dev texts above a threshold; of fewer the accuracy says little."""
_STEPS: Final = 10_000  # thresholds are multiples of 1 / _STEPS, so that one that is printed can be typed

Confidences = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class CoverageCurve:
    """Accuracy over coverage on labelled texts.

    thresholds: float64 (m,), decreasing. texts: int64 (m,), texts with at least this confidence; the last is all of them. right: int64
    (m,), those of them whose label is predicted.
    """

    thresholds: Confidences
    texts: IntArray
    right: IntArray

    @classmethod
    def of(cls, confidence: Confidences, right: BoolArray) -> CoverageCurve:
        """Count texts of this confidence, (n,), whose prediction is right or wrong, (n,). n >= 1."""
        rounded = np.floor(confidence * _STEPS) / _STEPS
        thresholds, counts = np.unique(rounded, return_counts=True)
        hits = np.bincount(np.searchsorted(thresholds, rounded), weights=right, minlength=len(thresholds)).astype(np.int64)
        texts = np.cumsum(counts[::-1])
        positions = np.searchsorted(texts, np.linspace(1, texts[-1], min(MOST_THRESHOLDS, len(texts))))
        kept = np.arange(len(texts)) if len(texts) <= MOST_THRESHOLDS else np.unique(positions)
        return cls(thresholds[::-1][kept], texts[kept], np.cumsum(hits[::-1])[kept])

    @property
    def coverage(self) -> Confidences:
        """The share of the texts that get a label, by threshold."""
        shares: Confidences = self.texts / self.texts[-1]
        return shares

    @property
    def accuracy(self) -> Confidences:
        """The share of right labels among those, by threshold."""
        shares: Confidences = self.right / self.texts
        return shares

    def at_accuracy(self, wanted: float) -> int | None:
        """Index of the lowest threshold with at least this accuracy; None if no threshold reaches it on `FEWEST_TEXTS` texts."""
        reached = np.flatnonzero((self.accuracy >= wanted) & (self.texts >= FEWEST_TEXTS))
        return int(reached[-1]) if len(reached) else None

    def at_threshold(self, threshold: float) -> tuple[int, int]:
        """Texts with at least this confidence among those of the stored thresholds, and right labels among them."""
        index = int(np.searchsorted(-self.thresholds, -threshold, side="right")) - 1
        return (0, 0) if index < 0 else (int(self.texts[index]), int(self.right[index]))

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` reads them."""
        return {"thresholds": self.thresholds.tolist(), "texts": self.texts.tolist(), "right": self.right.tolist()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CoverageCurve:
        """Read what `as_dict` returned.

        Raises:
            ValueError, KeyError, TypeError: if a field is missing or damaged.
        """
        thresholds = np.array(values["thresholds"], dtype=np.float64)
        texts, right = (np.array(values[name], dtype=np.int64) for name in ("texts", "right"))
        if not (thresholds.ndim == 1 and thresholds.shape == texts.shape == right.shape and len(texts)):
            raise ValueError("thresholds, texts and right have different lengths")
        if not (np.isfinite(thresholds).all() and (np.diff(thresholds) < 0).all() and (texts > 0).all() and (right <= texts).all()):
            raise ValueError("thresholds must decrease, and counts be positive")
        return cls(thresholds, texts, right)


@dataclass(frozen=True, slots=True, eq=False)
class Confidence:
    """The calibrated confidence of a model. labels: in the order of its probabilities. dev, test: the curves; test is for reports only,
    and None without test texts.
    """

    labels: tuple[str, ...]
    calibration: Calibration
    dev: CoverageCurve
    test: CoverageCurve | None = None

    def of(self, probabilities: FloatArray) -> Confidences:
        """Confidence of the most probable label of each row of the model's probabilities (n, labels): float64 (n,)."""
        return confidence_of(self.calibration, probabilities)

    def threshold(self, *, accuracy: float) -> float:
        """Return the lowest threshold with at least this accuracy on dev.

        Raises:
            UsageError: if no threshold reaches it, or it is not in (0, 1].
        """
        if not 0 < accuracy <= 1:
            raise UsageError(f"accuracy is {accuracy:g}; pass a share above 0 and at most 1, like 0.95")
        index = self.dev.at_accuracy(accuracy)
        if index is not None:
            return float(self.dev.thresholds[index])
        enough = np.flatnonzero(self.dev.texts >= FEWEST_TEXTS)
        if not len(enough):
            texts = counted(int(self.dev.texts[-1]), "text")
            raise UsageError(f"dev has {texts}, too few to choose a threshold on (at least {FEWEST_TEXTS}); pass a threshold, like 0.6")
        best = int(enough[np.argmax(self.dev.accuracy[enough])])
        raise UsageError(
            f"no threshold reaches an accuracy of {100 * accuracy:g} % on dev; the highest is {100 * self.dev.accuracy[best]:.1f} %, of "
            f"the {self.dev.texts[best]:,} most confident of {self.dev.texts[-1]:,} texts; choose a lower accuracy, or a threshold"
        )


def confidence_of(calibration: Calibration, probabilities: FloatArray) -> Confidences:
    """As `Confidence.of`."""
    if not len(probabilities):
        return np.zeros(0)
    calibrated = np.exp(calibration.log_probabilities(probabilities))
    chosen: Confidences = calibrated[np.arange(len(calibrated)), probabilities.argmax(axis=1)]
    return chosen


def fit_confidence(
    labels: tuple[str, ...],
    dev: tuple[FloatArray, IntArray],
    test: tuple[FloatArray, IntArray] | None,
    *,
    log_prior: npt.NDArray[np.float64],
) -> Confidence:
    """Calibrate a model on dev, and count its curves.

    dev, test: probabilities (n, labels) and true label ids (n,); the id of a label that the model does not have is `labels` or more.
    """
    calibration = calibrate(*dev, log_prior)

    def curve(probabilities: FloatArray, truth: IntArray) -> CoverageCurve:
        return CoverageCurve.of(confidence_of(calibration, probabilities), probabilities.argmax(axis=1) == truth)

    return Confidence(labels, calibration, curve(*dev), None if test is None else curve(*test))


@dataclass(frozen=True, slots=True, eq=False)
class ConfidenceFile:
    """The confidence of each model of a folder, by its name; labels in the order of the probabilities."""

    labels: tuple[str, ...]
    models: Mapping[str, Confidence]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` reads them."""
        models: dict[str, Any] = {}
        for name, each in self.models.items():
            models[name] = {**each.calibration.as_dict(), "dev": each.dev.as_dict()}
            if each.test is not None:
                models[name]["test"] = each.test.as_dict()
        return {"format": FORMAT, "labels": list(self.labels), "models": models}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ConfidenceFile:
        """Read what `as_dict` returned.

        Raises:
            ValueError, KeyError, TypeError: if the format is another one, or a field is missing or damaged.
        """
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, this version reads {FORMAT}")
        labels, models = tuple(values["labels"]), {}
        for name, each in values["models"].items():
            test = CoverageCurve.from_dict(each["test"]) if "test" in each else None
            calibration = Calibration.from_dict(each, labels=len(labels))
            models[name] = Confidence(labels, calibration, CoverageCurve.from_dict(each["dev"]), test)
        return cls(labels, models)

    def only(self, model: str) -> ConfidenceFile:
        """Return the same with one model."""
        return ConfidenceFile(self.labels, {model: self.models[model]})

    def save(self, folder: Path) -> None:
        """Write confidence.json.

        Raises:
            OSError: if the file cannot be written.
        """
        content = json.dumps(self.as_dict(), ensure_ascii=False, allow_nan=False)
        (folder / CONFIDENCE_FILE).write_text(content + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> ConfidenceFile | None:
        """Read confidence.json; None if the folder has none.

        Raises:
            ArtifactError: if it is damaged. EnvironmentFault: if the disk fails.
        """
        path = folder / CONFIDENCE_FILE
        if not path.is_file():
            return None
        check_files(folder, [CONFIDENCE_FILE])
        with damage_named(path, "export the model again", what="damaged, not the confidence of a model"):
            return cls.from_dict(json.loads(path.read_bytes()))


def load_confidence(folder: Path, model: str | None = None) -> Confidence | None:
    """Read the confidence of one model of a folder; None if the folder has none. model: its name; by default the folder's only one.

    Raises:
        ArtifactError: if the file is damaged. EnvironmentFault: if the disk fails.
    """
    file = ConfidenceFile.load(folder)
    if file is None:
        return None
    return next(iter(file.models.values()), None) if model is None else file.models.get(model)


def usable_confidence(confidence: Confidence | None, labels: Sequence[str]) -> Confidence:
    """Return the confidence of a model with these labels.

    Raises:
        UsageError: if there is none. ArtifactError: if it has other labels.
    """
    if confidence is None:
        raise UsageError(
            f"the model has no calibrated confidence: its folder lacks {CONFIDENCE_FILE}; run the same `cramlm fit` again, which adds it"
        )
    if confidence.labels != tuple(labels):
        raise ArtifactError(f"{CONFIDENCE_FILE}: has other labels than the model; export the model again")
    return confidence
