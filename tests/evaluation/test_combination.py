"""The combination of models: calibration, weights, what is left out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from evaluation_fixtures import LABELS, dev_task
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from cramlm.evaluation.combination import Combination, calibrate, combine_on_dev
from cramlm.records import FloatArray

TRUTH = np.arange(300) % len(LABELS)
TASK = dev_task([LABELS[label] for label in TRUTH])


def model(evidence: float, *, seed: int, scale: float = 1.0) -> FloatArray:
    """Probabilities of a model whose logit of the true label is higher by `evidence` standard deviations of independent noise."""
    noise = np.random.default_rng(seed).normal(size=(len(TRUTH), len(LABELS)))
    probabilities: FloatArray = softmax(scale * (noise + evidence * np.eye(len(LABELS))[TRUTH]), axis=1).astype(np.float32)
    return probabilities


def accuracy(logits: Any) -> float:
    return float((logits.argmax(axis=1) == TRUTH).mean())


def test_two_equally_good_independent_models_are_better_together() -> None:
    models = {"tfidf": model(1.0, seed=1), "tlm": model(1.0, seed=2)}
    combined = combine_on_dev(TASK, models, metric="macro_f1").combination
    assert accuracy(combined.logits(models)) > max(accuracy(each) for each in models.values()) + 0.03


@given(st.floats(0.003, 2), st.integers(0, 5))
def test_calibration_undoes_the_temperature_of_a_model(scale: float, seed: int) -> None:
    plain, scaled = model(1.0, seed=seed), model(1.0, seed=seed, scale=scale)
    prior = np.zeros(len(LABELS))
    one, other = calibrate(plain, TRUTH, prior), calibrate(scaled, TRUTH, prior)
    assert other.loss == pytest.approx(one.loss, abs=1e-3)
    assert np.allclose(other.log_probabilities(scaled), one.log_probabilities(plain), atol=0.05)


def test_calibration_adds_back_the_prior_that_logit_adjustment_subtracted() -> None:
    log_prior = np.log(np.array([0.7] + [0.3 / (len(LABELS) - 1)] * (len(LABELS) - 1)))
    truth = np.random.default_rng(0).choice(len(LABELS), size=2000, p=np.exp(log_prior))
    logits = np.random.default_rng(1).normal(size=(2000, len(LABELS))) + 1.0 * np.eye(len(LABELS))[truth]
    calibration = calibrate(softmax(logits, axis=1).astype(np.float32), truth, log_prior)
    assert calibration.shift == pytest.approx(log_prior, abs=0.2)


def test_weights_fall_with_the_dev_loss_and_are_equal_for_equally_good_models() -> None:
    models = {"tfidf": model(2.0, seed=1), "static": model(2.0, seed=1), "tlm": model(1.8, seed=3)}
    combination = combine_on_dev(TASK, models, metric="macro_f1").combination
    weights = combination.weights
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["tfidf"] == weights["static"] > weights["tlm"] > 0
    gap = combination.models["tlm"].loss - combination.models["static"].loss
    assert weights["tlm"] / weights["static"] == pytest.approx(np.exp(-gap / 0.1))


def test_a_model_far_above_the_lowest_dev_loss_is_left_out() -> None:
    models = {"tfidf": model(3.0, seed=1), "static": model(3.0, seed=2), "tlm": model(0.0, seed=3)}
    fit = combine_on_dev(TASK, models, metric="macro_f1")
    assert set(fit.combination.models) == {"tfidf", "static"}
    assert set(fit.losses) == set(models)
    wrong = models | {"tlm": np.eye(len(LABELS), dtype=np.float32)[(TRUTH + 1) % len(LABELS)]}  # with probabilities of zero
    combined = combine_on_dev(TASK, wrong, metric="macro_f1").combination
    assert np.isfinite(combined.logits(wrong)).all()
    assert set(combined.models) == {"tfidf", "static"}


def test_dev_labels_that_training_does_not_have_do_not_count_for_the_calibration() -> None:
    probabilities, prior = model(1.0, seed=1), np.zeros(len(LABELS))
    strange = np.concatenate([TRUTH, [len(LABELS)]])
    longer = np.concatenate([probabilities, probabilities[:1]])
    assert calibrate(longer, strange, prior).loss == pytest.approx(calibrate(probabilities, TRUTH, prior).loss)


def test_a_combination_written_as_json_reads_back_with_equal_logits() -> None:
    models = {"tfidf": model(1.0, seed=1), "tlm": model(1.0, seed=2)}
    combined = combine_on_dev(TASK, models, metric="macro_f1").combination
    read = Combination.from_dict(json.loads(json.dumps(combined.as_dict(), allow_nan=False)))
    assert (read.logits(models) == combined.logits(models)).all()
