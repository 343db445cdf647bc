"""Which labels are suspicious, by probabilities out of fold."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cramlm.linear.label_errors import SuspiciousLabel, suspicious_labels
from cramlm.records import FloatArray


def rows(*values: tuple[float, ...]) -> FloatArray:
    return np.array(values, dtype=np.float32)


def test_a_text_is_suspicious_if_another_label_is_at_least_as_probable_as_for_the_texts_that_have_it() -> None:
    probabilities = rows((0.9, 0.1), (0.7, 0.3), (0.2, 0.8), (0.1, 0.9), (0.15, 0.85))
    labels = np.array([0, 0, 1, 1, 0])  # thresholds: (0.9 + 0.7 + 0.15) / 3 = 0.583 and 0.85
    assert suspicious_labels(probabilities, labels) == [SuspiciousLabel(4, 0, 1, float(np.float32(0.15)), float(np.float32(0.85)))]
    assert suspicious_labels(probabilities[:4], labels[:4]) == []


def test_the_threshold_of_a_label_is_its_own_mean_so_that_rare_labels_are_found() -> None:
    probabilities = rows(*[(0.9, 0.1)] * 8, (0.75, 0.25), (0.72, 0.28), (0.7, 0.3))
    labels = np.array([0] * 8 + [1, 1, 0])  # the model gives label 1 at most 0.3: its threshold is 0.265, that of label 0 is 0.878
    assert suspicious_labels(probabilities, labels) == []  # label 1 is confident for row 10, but less probable than its own label
    softer = rows(*[(0.9, 0.1)] * 8, (0.75, 0.25), (0.72, 0.28), (0.2, 0.3))
    assert [each.row for each in suspicious_labels(softer, labels)] == [10]


def test_the_largest_margin_comes_first() -> None:
    probabilities = rows((0.4, 0.6), (0.05, 0.95), (0.2, 0.8), *[(0.8, 0.2)] * 9, *[(0.45, 0.55)] * 3)
    labels = np.array([0] * 12 + [1] * 3)
    assert [each.row for each in suspicious_labels(probabilities, labels)] == [1, 2, 0]


@given(st.integers(0, 50))
def test_texts_that_were_not_predicted_are_left_out(seed: int) -> None:
    random = np.random.default_rng(seed)
    probabilities = random.dirichlet(np.ones(3), size=40).astype(np.float32)
    labels = random.integers(0, 3, 40)
    missing = random.random(40) < 0.3
    probabilities[missing] = 0
    found = suspicious_labels(probabilities, labels)
    kept = np.flatnonzero(~missing)
    again = suspicious_labels(probabilities[kept], labels[kept])
    assert [each.row for each in found] == [int(kept[each.row]) for each in again]
    assert all(each.suggested != each.label and each.suggested_probability > each.label_probability for each in found)
