"""The strength of logit adjustment that is best on dev."""

from __future__ import annotations

import math

import numpy as np
import pytest
from evaluation_fixtures import LABELS, dev_task

from cramlm.evaluation.logit_adjustment import TAUS, Adjustment, choose_adjustment, logit_adjustments

TRAIN = ["common"] * 98  # with one more of each label: 99 to 1


def chosen(logits: list[tuple[float, float]], true: list[str], metric: str = "macro_f1", **taus: tuple[float, ...]) -> Adjustment:
    task = dev_task(true, train=TRAIN, labels=("common", "rare"))
    return choose_adjustment(np.array(logits, np.float32), task, metric=metric, **taus)


def test_adjustments_are_minus_tau_times_the_log_prior_and_numbers_have_none() -> None:
    adjustments = logit_adjustments(dev_task([], train=["a"] * 7 + ["b"]))
    assert tuple(adjustments) == TAUS
    logs = -np.log(np.array([8, 2, 1]) / 11)
    assert len(logs) == len(LABELS)
    np.testing.assert_allclose(adjustments[0.5], 0.5 * (logs - logs.mean()), rtol=1e-6)
    assert adjustments[0.0].tolist() == [0, 0, 0]
    assert {tau: values.tolist() for tau, values in logit_adjustments(dev_task([], "regression", train=["1"])).items()} == {0.0: [0.0]}


def test_logits_that_follow_the_frequencies_are_adjusted_by_half_the_log_odds_times_tau() -> None:
    """The log-odds of the labels in training are log 99 = 4.6; the rare text, 2.0 behind, is predicted right with half of that."""
    result = chosen([(5.0, 0.0), (4.9, 0.0), (2.0, 0.0)], ["common", "common", "rare"])
    assert result.tau == 0.5
    assert result.values.tolist() == [pytest.approx(-0.25 * math.log(99), abs=1e-4), pytest.approx(0.25 * math.log(99), abs=1e-4)]
    assert (result.before, result.after) == (pytest.approx(0.4), 1.0)
    assert result.metrics["accuracy"] == 1.0


def test_the_smallest_of_equally_good_taus_is_chosen() -> None:
    result = chosen([(1.0, 0.0), (0.0, 1.0)], ["common", "rare"])
    assert (result.tau, result.values.tolist()) == (0.0, [0.0, 0.0])


def test_the_metric_of_the_run_decides() -> None:
    """One text of ten is rare; predicting it right costs two common ones: better macro-F1, worse accuracy."""
    logits = [(9.0, 0.0)] * 7 + [(1.0, 0.0)] * 3
    true = ["common"] * 9 + ["rare"]
    assert chosen(logits, true, "macro_f1").tau > 0
    assert chosen(logits, true, "accuracy").tau == 0


def test_a_dev_label_that_training_does_not_have_is_a_miss_and_no_error() -> None:
    assert chosen([(1.0, 0.0), (1.0, 0.0)], ["common", "other"]).tau == 0


def test_predictions_of_every_tau_are_kept() -> None:
    logits = [(5.0, 0.0), (2.0, 0.0)]
    assert chosen(logits, ["common", "rare"]).predictions.tolist() == [[0, int(tau * math.log(99) > 2)] for tau in TAUS]
    assert chosen(logits, ["common", "rare"], taus=(0.0,)).predictions.tolist() == [[0, 0]]
