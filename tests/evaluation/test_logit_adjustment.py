"""The strength of logit adjustment that is best on dev."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cramlm.evaluation.choice import TAUS
from cramlm.evaluation.logit_adjustment import Adjustment, choose_adjustment

LABELS = ("common", "rare")
TRAIN = ["common"] * 98  # with one more of each label: 99 to 1


def chosen(logits: list[tuple[float, float]], true: list[str], metric: str = "macro_f1", **options: tuple[float, ...]) -> Adjustment:
    return choose_adjustment(np.array(logits, np.float32), true, LABELS, trained_on=TRAIN, metric=metric, **options)  # type: ignore[arg-type]


def test_logits_that_follow_the_frequencies_are_adjusted_by_half_the_log_odds_times_tau() -> None:
    """The log-odds of the labels in training are log 99 = 4.6: the rare text, 2.0 behind, is first in front with half of it."""
    found = chosen([(5.0, 0.0), (4.9, 0.0), (2.0, 0.0)], ["common", "common", "rare"])
    assert found.tau == 0.5
    assert found.values.tolist() == [pytest.approx(-0.25 * math.log(99), abs=1e-4), pytest.approx(0.25 * math.log(99), abs=1e-4)]
    assert (found.before, found.after) == (pytest.approx(0.4), 1.0)
    assert found.figures["accuracy"] == 1.0


def test_the_smallest_of_equally_good_taus_is_chosen() -> None:
    found = chosen([(1.0, 0.0), (0.0, 1.0)], ["common", "rare"])
    assert (found.tau, found.values.tolist()) == (0.0, [0.0, 0.0])


def test_the_metric_that_the_run_chooses_by_decides() -> None:
    """Of ten texts one is rare; its label costs two common ones: worth it for macro-F1, not for accuracy."""
    logits = [(9.0, 0.0)] * 7 + [(1.0, 0.0)] * 3
    true = ["common"] * 9 + ["rare"]
    assert chosen(logits, true, "macro_f1").tau > 0
    assert chosen(logits, true, "accuracy").tau == 0


def test_a_dev_label_that_training_lacks_is_a_miss_and_no_error() -> None:
    assert chosen([(1.0, 0.0), (1.0, 0.0)], ["common", "other"]).tau == 0


def test_predictions_of_every_tau_are_kept() -> None:
    logits = [(5.0, 0.0), (2.0, 0.0)]
    assert chosen(logits, ["common", "rare"]).predictions.tolist() == [[0, int(tau * math.log(99) > 2)] for tau in TAUS]
    assert chosen(logits, ["common", "rare"], taus=(0.0,)).predictions.tolist() == [[0, 0]]
