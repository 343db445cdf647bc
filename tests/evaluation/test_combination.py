"""The combination of models: calibration, weights, what is left out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from evaluation_fixtures import LABELS, dev_task
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, softmax

from cramlm.data.labels import format_labels
from cramlm.evaluation.calibration import Calibration, calibrate_labels, calibrate_numbers
from cramlm.evaluation.combination import (
    EXPECTED_GAP,
    EXPECTED_GAP_UNLABELLED,
    SHRINKAGE,
    Combination,
    HeldOut,
    calibrate,
    calibrate_on_dev,
    combine_on_dev,
)
from cramlm.evaluation.kinds import main_metric
from cramlm.records import Example, FloatArray, Task

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


LABEL_SETS = np.random.default_rng(7).random((300, len(LABELS))) < np.array([0.6, 0.2, 0.05])
TASK_OF_SETS = dev_task(
    [format_labels([name for name, is_true in zip(LABELS, row, strict=True) if is_true]) for row in LABEL_SETS], "multi-label"
)
NUMBERS = np.random.default_rng(8).normal(2000.0, 30.0, size=300)
TASK_OF_NUMBERS = dev_task([repr(float(number)) for number in NUMBERS], "regression")


def tagger(evidence: float, *, seed: int, scale: float = 1.0) -> FloatArray:
    """Probability of each label, whose logit is higher by `evidence` standard deviations of independent noise where the label is true."""
    noise = np.random.default_rng(seed).normal(size=LABEL_SETS.shape)
    probabilities: FloatArray = expit(scale * (noise + evidence * (2 * LABEL_SETS - 1))).astype(np.float32)
    return probabilities


def scorer(noise: float, *, seed: int, slope: float = 1.0, offset: float = 0.0) -> FloatArray:
    """Numbers with independent noise, on another scale by `slope` and `offset`."""
    numbers = NUMBERS + np.random.default_rng(seed).normal(scale=noise, size=len(NUMBERS))
    return (slope * numbers + offset).astype(np.float32)[:, None]


def test_models_of_several_labels_are_better_together_and_calibration_undoes_their_temperature() -> None:
    models = {"tfidf": tagger(1.0, seed=1, scale=0.1), "tlm": tagger(1.0, seed=2)}
    combined = combine_on_dev(TASK_OF_SETS, models, metric="macro_f1").combination
    wrong = {name: int(((values >= 0.5) != LABEL_SETS).sum()) for name, values in models.items()}
    assert int(((combined.logits(models) >= 0) != LABEL_SETS).sum()) < 0.8 * min(wrong.values())
    plain = calibrate_on_dev(TASK_OF_SETS, tagger(1.0, seed=2))
    scaled = calibrate_on_dev(TASK_OF_SETS, tagger(1.0, seed=2, scale=0.1))
    assert scaled.loss == pytest.approx(plain.loss, abs=1e-3)
    assert scaled.scale == pytest.approx(10 * plain.scale, rel=0.05)


def test_calibration_of_several_labels_adds_back_the_log_odds_that_logit_adjustment_subtracted() -> None:
    shares = np.array([0.6, 0.2, 0.05])
    log_odds = np.log(shares / (1 - shares))
    generator = np.random.default_rng(0)
    truth = generator.random((4000, 3)) < shares
    likelihood_ratios = 2 * (generator.normal(size=truth.shape) + (2 * truth - 1))  # of two normal distributions around 1 and -1
    calibration = calibrate_labels(expit(likelihood_ratios).astype(np.float32), truth, log_odds)
    assert calibration.scale == pytest.approx(1, abs=0.1)
    assert calibration.shift == pytest.approx(log_odds, abs=0.15)


def test_models_of_numbers_are_better_together_and_calibration_undoes_their_unit() -> None:
    models = {"tfidf": scorer(20, seed=1, slope=0.1, offset=7), "tlm": scorer(20, seed=2)}
    combined = combine_on_dev(TASK_OF_NUMBERS, models, metric="pearson").combination
    same = {"tfidf": scorer(20, seed=2, slope=0.1, offset=7), "tlm": scorer(20, seed=2)}
    assert combine_on_dev(TASK_OF_NUMBERS, same, metric="pearson").combination.weights["tfidf"] == pytest.approx(0.5, abs=1e-3)

    def error(numbers: Any) -> float:
        return float(np.sqrt(np.square(numbers[:, 0] - NUMBERS).mean()))

    alone = calibrate_on_dev(TASK_OF_NUMBERS, models["tlm"]).logits(models["tlm"], "regression")
    assert error(combined.logits(models)) < 0.9 * error(alone)


@pytest.mark.parametrize("numbers", [np.full((300, 1), 5.0, dtype=np.float32), -scorer(1, seed=1), NUMBERS[:, None].astype(np.float32)])
def test_constant_reversed_and_exact_numbers_have_a_finite_calibration_that_reads_back(numbers: FloatArray) -> None:
    calibration = calibrate_on_dev(TASK_OF_NUMBERS, numbers)
    read = Calibration.from_dict(json.loads(json.dumps(calibration.as_dict(), allow_nan=False)), labels=1)
    assert read.logits(numbers, "regression").mean() == pytest.approx(NUMBERS.mean(), rel=1e-4)


@pytest.mark.parametrize("truth", [NUMBERS[:4], np.tile(NUMBERS[:4], 50)], ids=["few", "repeated"])
def test_no_line_is_fitted_to_the_numbers_of_few_different_texts(truth: FloatArray) -> None:
    numbers = np.resize(scorer(200, seed=1)[:4], (len(truth), 1))
    calibration = calibrate_numbers(numbers, truth)
    assert calibration.logits(numbers, "regression") == pytest.approx(numbers)
    assert math.exp(calibration.loss) == pytest.approx(np.sqrt(np.square(numbers[:, 0] - truth).mean()), rel=0.2)


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


FEW = 10
DEV_AND_TRAIN = replace(TASK, dev=TASK.dev[:FEW], train=TASK.dev[FEW:])
OUT_OF_FOLD = np.arange(len(TRUTH) - FEW)


def test_training_texts_out_of_fold_decide_the_weights_of_linear_models_where_dev_is_small() -> None:
    lucky = np.concatenate([model(4.0, seed=1)[:FEW], model(0.5, seed=1)[FEW:]])  # good on dev, by chance
    models = {"static": model(2.0, seed=2), "bayes": lucky, "tlm": model(2.0, seed=3)}
    held_out = {name: HeldOut(OUT_OF_FOLD, models[name][FEW:]) for name in ("static", "bayes")}
    on_dev = {name: values[:FEW] for name, values in models.items()}
    alone = combine_on_dev(DEV_AND_TRAIN, on_dev, metric="macro_f1").combination
    fit = combine_on_dev(DEV_AND_TRAIN, on_dev, metric="macro_f1", held_out=held_out)
    assert alone.weights["bayes"] > 0.4
    assert fit.combination.weights.get("bayes", 0.0) < 0.05 < fit.combination.weights["tlm"]
    assert fit.adjustment.predictions.shape == (1, FEW), "the verdict reads dev predictions"
    on_both = combine_on_dev(TASK, {name: models[name] for name in held_out}, metric="macro_f1").losses
    assert {name: fit.losses[name] for name in held_out} == pytest.approx(on_both, abs=0.01), "as if those texts were of dev"


@pytest.mark.parametrize(("unlabelled", "gap"), [((), EXPECTED_GAP), (TASK.dev[:1], EXPECTED_GAP_UNLABELLED)])
def test_the_dev_loss_of_a_model_without_predictions_out_of_fold_counts_by_the_number_of_dev_texts(
    unlabelled: tuple[Example, ...], gap: float
) -> None:
    models = {"static": model(2.0, seed=2), "tlm": model(2.0, seed=3)}
    held_out = {"static": HeldOut(OUT_OF_FOLD, models["static"][FEW:])}
    on_dev = {name: values[:FEW] for name, values in models.items()}
    fit = combine_on_dev(replace(DEV_AND_TRAIN, unlabelled=unlabelled), on_dev, metric="macro_f1", held_out=held_out)
    truth = TRUTH[:FEW]
    losses = [-fit.combination.models[name].log_probabilities(on_dev[name])[np.arange(FEW), truth].mean() for name in ("tlm", "static")]
    share = FEW / (FEW + SHRINKAGE)
    expected = share * (losses[0] - losses[1]) + (1 - share) * gap
    assert fit.losses["tlm"] - fit.losses["static"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("task", "make"), [(TASK, model), (TASK_OF_SETS, tagger), (TASK_OF_NUMBERS, scorer)])
def test_models_of_every_kind_of_task_are_combined_with_predictions_out_of_fold(task: Task, make: Any) -> None:
    models = {name: make(1.0, seed=seed) for seed, name in enumerate(("static", "bayes", "tlm"))}
    some = replace(task, dev=task.dev[:FEW], train=task.dev[FEW:])
    held_out = {name: HeldOut(OUT_OF_FOLD, models[name][FEW:]) for name in ("static", "bayes")}
    on_dev = {name: values[:FEW] for name, values in models.items()}
    metric = main_metric(task.kind)
    combined = combine_on_dev(some, on_dev, metric=metric, held_out=held_out).combination
    assert np.isfinite(combined.logits(models)).all()
    weights = list(combined.weights.values())
    assert len(weights) == 3
    assert min(weights) > 0.1, "of equally good models"
    missing = held_out | {"bayes": HeldOut(OUT_OF_FOLD[:0], models["bayes"][:0])}
    by_dev = combine_on_dev(some, on_dev, metric=metric, held_out=missing).combination
    assert by_dev.as_dict() == combine_on_dev(some, on_dev, metric=metric).combination.as_dict()


def test_dev_labels_that_training_does_not_have_do_not_count_for_the_calibration() -> None:
    probabilities, prior = model(1.0, seed=1), np.zeros(len(LABELS))
    strange = np.concatenate([TRUTH, [len(LABELS)]])
    longer = np.concatenate([probabilities, probabilities[:1]])
    assert calibrate(longer, strange, prior).loss == pytest.approx(calibrate(probabilities, TRUTH, prior).loss)


@pytest.mark.parametrize(("task", "make"), [(TASK, model), (TASK_OF_SETS, tagger), (TASK_OF_NUMBERS, scorer)])
def test_a_combination_written_as_json_reads_back_with_equal_logits(task: Task, make: Any) -> None:
    models = {"tfidf": make(1.0, seed=1), "tlm": make(1.0, seed=2)}
    combined = combine_on_dev(task, models, metric=main_metric(task.kind)).combination
    read = Combination.from_dict(json.loads(json.dumps(combined.as_dict(), allow_nan=False)))
    assert (read.logits(models) == combined.logits(models)).all()
