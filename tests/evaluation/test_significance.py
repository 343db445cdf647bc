"""Paired tests over seeds: equal methods do not differ, better ones do, and the figures are those of independent computations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sklearn.metrics import f1_score

from cramlm.evaluation.significance import compare_predictions, holm

LABELS = np.array(["a", "b", "c"])


def answers(true: list[str], right: float, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [label if random.random() < right else str(random.choice(LABELS)) for label in true]


TRUE = [str(label) for label in np.random.default_rng(1).choice(LABELS, 300, p=[0.6, 0.3, 0.1])]


def test_the_difference_is_the_mean_over_seeds_of_scikit_learns_macro_f1() -> None:
    one, other = ([answers(TRUE, right, seed) for seed in (1, 2, 3)] for right in (0.7, 0.5))
    found = compare_predictions(TRUE, one, other, trials=200)
    expected = np.mean([f1_score(TRUE, a, average="macro") - f1_score(TRUE, b, average="macro") for a, b in zip(one, other, strict=True)])
    assert found.value == pytest.approx(expected)
    assert found.low < found.value < found.high
    assert found.p < 0.01
    assert found == compare_predictions(TRUE, one, other, trials=200)
    mirrored = compare_predictions(TRUE, other, one, trials=200)
    assert (mirrored.value, mirrored.p) == (pytest.approx(-found.value), found.p)


def test_equal_predictions_have_no_difference() -> None:
    same = [answers(TRUE, 0.6, 4)]
    found = compare_predictions(TRUE, same, same, trials=100)
    assert (found.value, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_p_is_that_of_all_swaps_of_the_rows_where_two_methods_differ() -> None:
    true, one, other = ["a"] * 6 + ["b"] * 4, ["a"] * 6 + ["b"] * 4, ["b"] * 4 + ["a"] * 2 + ["b"] * 4
    observed, hits, swaps = 0.4, 0, list(itertools.product((False, True), repeat=4))
    for swap in swaps:  # accuracy: only the four rows count
        hits += abs(sum(-0.1 if each else 0.1 for each in swap)) >= observed - 1e-9
    found = compare_predictions(true, [one], [other], metric="accuracy", trials=4000)
    assert found.value == pytest.approx(observed)
    assert found.p == pytest.approx(hits / len(swaps), abs=0.02)


def test_equal_methods_are_significantly_different_as_often_as_p_says() -> None:
    small = TRUE[:80]
    found = [
        compare_predictions(small, [answers(small, 0.6, seed)], [answers(small, 0.6, seed + 500)], trials=150).p for seed in range(150)
    ]
    assert 0.01 <= np.mean(np.array(found) <= 0.05) <= 0.1


def test_holm_multiplies_the_smallest_by_their_number_and_keeps_the_order() -> None:
    assert holm({"x": 0.04, "y": 0.01, "z": 0.03}) == pytest.approx({"x": 0.06, "y": 0.03, "z": 0.06})
    assert holm({"x": 0.9, "y": 0.8}) == {"x": 1.0, "y": 1.0}
