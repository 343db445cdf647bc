from __future__ import annotations

import math

import numpy as np
import pytest

from cramlm.evaluation.label_prior import choose_shift

LABELS = ("common", "rare")
TRAIN = ["common"] * 98  # with one more of each label: 99 to 1


def chosen(logits: list[tuple[float, float]], true: list[str], choose_by: str = "macro_f1") -> tuple[float, list[float]]:
    found = choose_shift(np.array(logits, np.float32), true, LABELS, trained_on=TRAIN, choose_by=choose_by)
    return found.share, [round(float(value), 4) for value in found.shift]


def test_answers_that_follow_the_frequencies_too_much_are_shifted_by_half_the_log_odds_times_the_share() -> None:
    """The log-odds of the labels in training are log 99 = 4.6: the rare text, 2.0 behind, is first in front with half of it."""
    share, shift = chosen([(5.0, 0.0), (4.9, 0.0), (2.0, 0.0)], ["common", "common", "rare"])
    assert share == 0.5
    assert shift == [pytest.approx(-0.25 * math.log(99), abs=1e-4), pytest.approx(0.25 * math.log(99), abs=1e-4)]


def test_answers_that_dev_likes_as_they_are_stay() -> None:
    assert chosen([(1.0, 0.0), (0.0, 1.0)], ["common", "rare"]) == (0.0, [0.0, 0.0])


def test_the_score_that_the_run_goes_by_decides() -> None:
    """Of ten texts one is rare; catching it costs two common ones: worth it for macro-F1, not for accuracy."""
    logits = [(9.0, 0.0)] * 7 + [(1.0, 0.0)] * 3
    true = ["common"] * 9 + ["rare"]
    assert chosen(logits, true, "macro_f1")[0] > 0
    assert chosen(logits, true, "accuracy")[0] == 0


def test_a_dev_label_that_training_lacks_is_a_miss_and_no_error() -> None:
    assert chosen([(1.0, 0.0), (1.0, 0.0)], ["common", "other"])[0] == 0
