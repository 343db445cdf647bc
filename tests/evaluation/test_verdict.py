"""The three answers of a verdict: the dearer model is clearly better, clearly worse, or not clearly different."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cramlm.evaluation.choice import DevScorer
from cramlm.evaluation.verdict import Verdict, compare_on_dev
from cramlm.records import IntArray

LABELS = ("a", "b")
TRUTH = np.arange(200) % 2


def predictions(share: float, *, candidates: int = 1, seed: int = 0) -> IntArray:
    """(candidates, 200) label ids of which about `share` are right."""
    right = np.random.default_rng(seed).random((candidates, 200)) < share
    return np.where(right, TRUTH, 1 - TRUTH).astype(np.int16)


def verdict(**candidates: IntArray) -> Verdict:
    scorer = DevScorer.of("classification", [LABELS[label] for label in TRUTH], LABELS, "macro_f1")
    return compare_on_dev(scorer, candidates, seed=3)


def test_a_clearly_better_model_is_recommended_with_the_difference() -> None:
    found = verdict(tfidf=predictions(0.6), tlm=predictions(0.85, seed=1))
    assert (found.recommended, found.clear) == ("tlm", True)
    assert found.text.startswith("Use tlm: it is ")
    assert "points of macro-F1 better than tfidf, which is cheaper" in found.text


def test_a_clearly_worse_model_is_not() -> None:
    found = verdict(tfidf=predictions(0.85), tlm=predictions(0.6, seed=1))
    assert (found.recommended, found.clear) == ("tfidf", True)
    assert found.text.startswith("Use tfidf: it is cheaper than tlm and ")


def test_without_a_clear_difference_the_cheaper_is_recommended() -> None:
    one = predictions(0.8)
    right, wrong = np.flatnonzero(one[0] == TRUTH)[:5], np.flatnonzero(one[0] != TRUTH)[:7]
    other = one.copy()
    other[0, [*right, *wrong]] = 1 - other[0, [*right, *wrong]]
    found = verdict(tfidf=one, tlm=other)  # right in two more of 200 texts
    assert (found.recommended, found.clear) == ("tfidf", False)
    assert found.text.startswith("No clear difference between tlm and tfidf")
    assert "the cheaper is tfidf: use it" in found.text


def test_the_largest_of_many_dev_scores_is_no_reason_to_recommend_a_model() -> None:
    many = predictions(0.7, candidates=400, seed=2)
    scorer = DevScorer.of("classification", [LABELS[label] for label in TRUTH], LABELS, "macro_f1")
    one = predictions(0.72, seed=4)
    assert scorer.scores(many).max() > scorer.scores(one)[0] + 0.04
    assert verdict(tfidf=one, tlm=many).recommended == "tfidf"


def test_wrong_recommendations_of_an_equal_model_are_about_one_in_ten() -> None:
    wrong = 0
    for seed in range(40):
        one, other = predictions(0.7, seed=2 * seed), predictions(0.7, candidates=20, seed=2 * seed + 1)
        wrong += verdict(tfidf=one, tlm=other).recommended == "tlm"
    assert wrong <= 8


def test_of_three_models_the_cheapest_that_none_clearly_beats_is_recommended() -> None:
    low, middle, high = (predictions(share, seed=number) for number, share in enumerate((0.55, 0.7, 0.85)))
    assert verdict(tfidf=low, static=middle, tlm=high).recommended == "tlm"
    assert verdict(tfidf=low, static=high, tlm=middle).recommended == "static"
    assert verdict(tfidf=high, static=low, tlm=middle).recommended == "tfidf"
    found = verdict(tfidf=low, static=high, tlm=predictions(0.85, seed=7))
    assert (found.recommended, found.clear) == ("static", False)
    assert "No clear difference between tlm and static" in found.text


def test_equal_predictions_are_no_clear_difference() -> None:
    same = predictions(0.8)
    found = verdict(tfidf=same, tlm=same)
    assert (found.recommended, found.clear) == ("tfidf", False)


def test_a_model_alone_has_its_score_and_nothing_to_compare_with() -> None:
    found = verdict(tlm=predictions(0.8))
    assert (found.recommended, found.clear) == ("tlm", False)
    assert "no other model was fitted to compare with" in found.text


def test_numbers_are_compared_by_their_correlation() -> None:
    random = np.random.default_rng(1)
    truth = random.normal(size=120)
    scorer = DevScorer.of("regression", [repr(float(value)) for value in truth], ("value",), "pearson")
    good, bad = (np.stack([truth + noise * random.normal(size=120)]).astype(np.float32) for noise in (0.3, 3.0))
    found = compare_on_dev(scorer, {"tfidf": bad, "tlm": good}, seed=0)
    assert found.recommended == "tlm"
    assert "points" not in found.text


def test_a_verdict_becomes_plain_json() -> None:
    found = verdict(tfidf=predictions(0.6), tlm=predictions(0.85, seed=1))
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["recommended"] == "tlm"
    assert values["cross_fitted"] == pytest.approx(dict(found.scores))
