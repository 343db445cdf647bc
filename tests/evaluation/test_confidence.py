"""Calibrated confidence, the curve of accuracy over coverage, and the threshold for a wanted accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from cramlm.errors import ArtifactError, UsageError
from cramlm.evaluation.confidence import ConfidenceFile, CoverageCurve, fit_confidence, load_confidence, usable_confidence
from cramlm.evaluation.metrics import calibration_error
from cramlm.records import FloatArray, IntArray
from damaging import edit_json
from jsonl import read_json

LABELS = ("a", "b", "c")
NO_PRIOR = np.zeros(3)


def labelled(count: int, *, seed: int, scale: float = 1.0) -> tuple[FloatArray, IntArray]:
    """Probabilities of labels that are sampled from them, raised to a power: with a scale of 1 they are calibrated."""
    random = np.random.default_rng(seed)
    true = softmax(2.0 * random.normal(size=(count, 3)), axis=1)
    truth = (random.random((count, 1)) > true.cumsum(axis=1)).sum(axis=1)
    raised = true**scale
    return (raised / raised.sum(axis=1, keepdims=True)).astype(np.float32), truth.astype(np.int64)


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
def test_the_confidence_is_calibrated_on_other_texts_whatever_the_temperature_of_the_model(scale: float) -> None:
    confidence = fit_confidence(LABELS, labelled(2000, seed=1, scale=scale), None, log_prior=NO_PRIOR)
    probabilities, truth = labelled(2000, seed=2, scale=scale)
    values = confidence.of(probabilities)
    right = probabilities.argmax(axis=1) == truth
    stated = values[:, None].astype(np.float32)
    assert calibration_error(stated, np.where(right, "right", "wrong").tolist(), ["right"]) < 0.06


def test_perfect_predictions_on_few_texts_do_not_give_a_confidence_of_one() -> None:
    probabilities = np.tile(np.array([[0.6, 0.3, 0.1]], dtype=np.float32), (12, 1))
    confidence = fit_confidence(LABELS, (probabilities, np.zeros(12, np.int64)), None, log_prior=NO_PRIOR)
    assert 0.8 < confidence.of(probabilities)[0] < 0.999


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=300))
def test_the_curve_counts_the_texts_at_or_above_each_threshold(rows: list[tuple[float, bool]]) -> None:
    values, right = np.array([value for value, _ in rows]), np.array([each for _, each in rows])
    curve = CoverageCurve.of(values, right)
    assert curve.texts[-1] == len(rows)
    assert curve.right[-1] == right.sum()
    assert len(curve.thresholds) <= 200
    for threshold, texts, hits in zip(curve.thresholds, curve.texts, curve.right, strict=True):
        assert texts == (values >= threshold).sum()
        assert hits == right[values >= threshold].sum()
        assert curve.at_threshold(float(threshold)) == (texts, hits)


def test_the_threshold_is_the_lowest_with_the_wanted_accuracy() -> None:
    probabilities, truth = labelled(500, seed=3)
    confidence = fit_confidence(LABELS, (probabilities, truth), None, log_prior=NO_PRIOR)
    values, right = confidence.of(probabilities), probabilities.argmax(axis=1) == truth
    threshold = confidence.threshold(accuracy=0.9)
    assert right[values >= threshold].mean() >= 0.9
    lower = [each for each in confidence.dev.thresholds if each < threshold]
    assert all(right[values >= each].mean() < 0.9 for each in lower)
    assert confidence.threshold(accuracy=0.1) == confidence.dev.thresholds[-1]


def test_an_accuracy_that_is_not_reached_names_the_highest() -> None:
    probabilities, truth = np.full((30, 3), 1 / 3, dtype=np.float32), np.arange(30) % 3
    confidence = fit_confidence(LABELS, (probabilities, truth), None, log_prior=NO_PRIOR)
    with pytest.raises(
        UsageError, match=r"no threshold reaches an accuracy of 95 % on dev; the highest is 33.3 %, of the 30 most confident"
    ):
        confidence.threshold(accuracy=0.95)
    few = fit_confidence(LABELS, (probabilities[:5], truth[:5]), None, log_prior=NO_PRIOR)
    with pytest.raises(UsageError, match="dev has 5 texts, too few to choose a threshold on"):
        few.threshold(accuracy=0.2)


def test_labels_that_training_does_not_have_count_as_wrong() -> None:
    probabilities, truth = labelled(100, seed=4)
    confidence = fit_confidence(LABELS, (probabilities, np.full(100, 3)), None, log_prior=NO_PRIOR)
    assert confidence.dev.right[-1] == 0
    assert truth.max() < 3


def written(tmp_path: Any) -> dict[str, Any]:
    confidence = fit_confidence(LABELS, labelled(50, seed=5), labelled(50, seed=6), log_prior=NO_PRIOR)
    ConfidenceFile(LABELS, {"combined": confidence, "tfidf": confidence}).save(tmp_path)
    values: dict[str, Any] = read_json(tmp_path / "confidence.json")
    return values


def test_a_written_confidence_reads_back_equal(tmp_path: Any) -> None:
    values = written(tmp_path)
    file = ConfidenceFile.load(tmp_path)
    assert file.as_dict() == values
    assert load_confidence(tmp_path, "static") is None
    assert load_confidence(tmp_path / "missing") is None
    assert usable_confidence(load_confidence(tmp_path, "tfidf"), LABELS).labels == LABELS
    with pytest.raises(ArtifactError, match="other labels"):
        usable_confidence(load_confidence(tmp_path, "tfidf"), ("a", "b", "d"))
    with pytest.raises(UsageError, match=r"lacks confidence.json"):
        usable_confidence(None, LABELS)


@pytest.mark.parametrize("part", ["format", "labels", "models"])
def test_a_damaged_confidence_is_refused_in_one_line(part: str, tmp_path: Any) -> None:
    values = written(tmp_path)
    damaged: dict[str, Any] = {"format": 0, "labels": ["a"], "models": {"combined": {**values["models"]["combined"], "dev": {}}}}
    edit_json(tmp_path / "confidence.json", **{part: damaged[part]})
    with pytest.raises(ArtifactError, match=r"confidence\.json: damaged"):
        ConfidenceFile.load(tmp_path)
