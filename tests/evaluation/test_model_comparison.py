"""Comparisons of models: significance tests over seeds on test rows, and the model that is recommended by dev."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from evaluation_fixtures import LABELS, dev_task
from scipy.stats import pearsonr
from sklearn.metrics import f1_score

from cramlm.config.run import DEV_METRICS
from cramlm.data.labels import format_labels, format_number
from cramlm.evaluation import comparison
from cramlm.evaluation.comparison import SPLITS, OutOfFold, Verdict, _half, compare_on_dev, compare_predictions, cross_fitted, holm
from cramlm.evaluation.kinds import DevScorer
from cramlm.records import IntArray, TaskKind


def random_labels(true: list[str], right: float, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [label if random.random() < right else str(random.choice(LABELS)) for label in true]


TRUE = [str(label) for label in np.random.default_rng(1).choice(LABELS, 300, p=[0.6, 0.3, 0.1])]


def test_the_difference_is_the_mean_over_seeds_of_scikit_learns_macro_f1() -> None:
    one, other = ([random_labels(TRUE, right, seed) for seed in (1, 2, 3)] for right in (0.7, 0.5))
    difference = compare_predictions(TRUE, one, other, trials=200)
    expected = np.mean([f1_score(TRUE, a, average="macro") - f1_score(TRUE, b, average="macro") for a, b in zip(one, other, strict=True)])
    assert difference.value == pytest.approx(expected)
    assert difference.low < difference.value < difference.high
    assert difference.p < 0.01
    assert difference == compare_predictions(TRUE, one, other, trials=200)
    mirrored = compare_predictions(TRUE, other, one, trials=200)
    assert (mirrored.value, mirrored.p) == (pytest.approx(-difference.value), difference.p)


def test_the_number_of_trials_that_are_computed_at_a_time_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [[random_labels(TRUE, right, seed) for seed in (1, 2)] for right in (0.6, 0.55)]
    at_once = compare_predictions(TRUE, *sides, trials=50)
    monkeypatch.setattr(comparison, "_BLOCK", 7 * len(TRUE) + 1)
    comparison._sample.cache_clear()
    assert compare_predictions(TRUE, *sides, trials=50) == at_once


def test_differences_of_several_labels_are_those_of_scikit_learn_and_of_numbers_those_of_scipy() -> None:
    random = np.random.default_rng(3)
    truth = random.random((200, 3)) < np.array([0.5, 0.3, 0.1])
    sides = [truth ^ (random.random(truth.shape) < wrong) for wrong in (0.1, 0.3)]
    true, one, other = (
        [format_labels([name for name, is_true in zip(LABELS, row, strict=True) if is_true]) for row in each] for each in (truth, *sides)
    )
    difference = compare_predictions(true, [one], [other], kind="multi-label", trials=200)
    assert difference.value == pytest.approx(f1_score(truth, sides[0], average="macro") - f1_score(truth, sides[1], average="macro"))
    assert difference.low < difference.value < difference.high
    assert difference.p < 0.01
    numbers = 2000 + random.normal(size=200)
    near, far = (numbers + random.normal(scale=scale, size=200) for scale in (0.5, 1.5))
    as_labels = [[format_number(value) for value in values] for values in (numbers, near, far)]
    difference = compare_predictions(as_labels[0], [as_labels[1]], [as_labels[2]], kind="regression", trials=200)
    assert difference.value == pytest.approx(pearsonr(numbers, near)[0] - pearsonr(numbers, far)[0])
    assert difference.low < difference.value < difference.high
    assert difference.p < 0.01
    constant = compare_predictions(as_labels[0], [["7.0"] * 200], [["7.0"] * 200], kind="regression", trials=50)
    assert (constant.value, constant.p) == (0, 1)


@pytest.mark.parametrize("unit", [1e-30, 1e-9, 1e9])
def test_the_difference_of_numbers_does_not_depend_on_their_unit(unit: float) -> None:
    random = np.random.default_rng(4)
    numbers = random.normal(size=50)
    sides = [numbers, numbers + random.normal(size=50), np.full(50, 0.3)]
    plain, scaled = (
        compare_predictions(true, [one], [other], kind="regression", trials=100)
        for true, one, other in ([[format_number(value * by) for value in side] for side in sides] for by in (1, unit))
    )
    assert plain.value == pytest.approx(pearsonr(numbers, sides[1])[0])
    assert [scaled.value, scaled.low, scaled.high] == pytest.approx([plain.value, plain.low, plain.high], rel=1e-6)
    assert scaled.p == plain.p


@pytest.mark.parametrize(("kind", "metric"), [(kind, metric) for kind, metrics in DEV_METRICS.items() for metric in metrics])
def test_a_dev_set_of_one_row_has_scores_without_a_warning(kind: TaskKind, metric: str) -> None:
    scorer = DevScorer.of(dev_task([{"classification": "a", "multi-label": '["a"]', "regression": "1.5"}[kind]], kind), metric)
    logits = np.zeros((2, 1, scorer.labels), dtype=np.float32)
    scores = cross_fitted(scorer, {"x": np.stack(list(map(scorer.predictions, logits)))}, seed=0)["x"]
    assert len(scores) == SPLITS
    assert np.isfinite(scores).all()


def test_the_score_on_a_dev_set_of_one_row_is_that_of_the_row() -> None:
    scorer = DevScorer("classification", "macro_f1", np.array([1], np.int16), 2)
    right, wrong = np.array([[1], [0]], np.int16), np.array([[0]], np.int16)
    verdict = compare_on_dev(scorer, {"wrong": wrong, "right": right}, seed=1)
    assert verdict.scores == {"wrong": 0.0, "right": 1.0}
    assert verdict.text.endswith(" Dev has 1 row, which is too few to compare models.")


def test_equal_predictions_have_no_difference() -> None:
    same = [random_labels(TRUE, 0.6, 4)]
    difference = compare_predictions(TRUE, same, same, trials=100)
    assert (difference.value, difference.low, difference.high, difference.p) == (0, 0, 0, 1)


def test_p_is_that_of_all_swaps_of_the_rows_where_two_methods_differ() -> None:
    true, one, other = ["a"] * 6 + ["b"] * 4, ["a"] * 6 + ["b"] * 4, ["b"] * 4 + ["a"] * 2 + ["b"] * 4
    observed, hits, swaps = 0.4, 0, list(itertools.product((False, True), repeat=4))
    for swap in swaps:  # accuracy: only the four rows count
        hits += abs(sum(-0.1 if each else 0.1 for each in swap)) >= observed - 1e-9
    difference = compare_predictions(true, [one], [other], metric="accuracy", trials=4000)
    assert difference.value == pytest.approx(observed)
    assert difference.p == pytest.approx(hits / len(swaps), abs=0.02)


def test_equal_methods_are_significantly_different_as_often_as_p_says() -> None:
    small = TRUE[:80]
    p = [
        compare_predictions(small, [random_labels(small, 0.6, seed)], [random_labels(small, 0.6, seed + 500)], trials=150).p
        for seed in range(100)
    ]
    assert 0.01 <= np.mean(np.array(p) <= 0.05) <= 0.1


def test_holm_multiplies_the_smallest_by_their_number_and_keeps_the_order() -> None:
    assert holm({"x": 0.04, "y": 0.01, "z": 0.03}) == pytest.approx({"x": 0.06, "y": 0.03, "z": 0.06})
    assert holm({"x": 0.9, "y": 0.8}) == {"x": 1.0, "y": 1.0}


TRUTH = np.arange(200) % 2
SCORER = DevScorer.of(dev_task([LABELS[label] for label in TRUTH]), "macro_f1")


def predictions(share: float, *, candidates: int = 1, seed: int = 0) -> IntArray:
    """(candidates, 200) label ids of which about `share` are right."""
    right = np.random.default_rng(seed).random((candidates, 200)) < share
    return np.where(right, TRUTH, 1 - TRUTH).astype(np.int16)


def verdict(**candidates: IntArray) -> Verdict:
    return compare_on_dev(SCORER, candidates, seed=3)


def test_a_clearly_better_model_is_recommended_with_the_difference_and_a_clearly_worse_one_is_not() -> None:
    result = verdict(tfidf=predictions(0.6), tlm=predictions(0.85, seed=1))
    assert (result.recommended, result.clear) == ("tlm", True)
    assert result.text.startswith("Use tlm: it is ")
    assert "points of macro-F1 better than tfidf, which is cheaper" in result.text
    values = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert (values["recommended"], values["cross_fitted"]) == ("tlm", pytest.approx(dict(result.scores)))
    result = verdict(tfidf=predictions(0.85), tlm=predictions(0.6, seed=1))
    assert (result.recommended, result.clear) == ("tfidf", True)
    assert result.text.startswith("Use tfidf: it is cheaper than tlm and ")


def test_without_a_clear_difference_the_cheaper_model_is_recommended() -> None:
    one = predictions(0.8)
    right, wrong = np.flatnonzero(one[0] == TRUTH)[:5], np.flatnonzero(one[0] != TRUTH)[:7]
    other = one.copy()
    other[0, [*right, *wrong]] = 1 - other[0, [*right, *wrong]]
    result = verdict(tfidf=one, tlm=other)  # right in two more of 200 texts
    assert (result.recommended, result.clear) == ("tfidf", False)
    assert result.text.startswith("No clear difference between tlm and tfidf")
    assert "the cheaper is tfidf: use it" in result.text
    assert not verdict(tfidf=one, tlm=one).clear


def test_a_high_maximum_of_many_dev_scores_does_not_recommend_a_model() -> None:
    many, one = predictions(0.7, candidates=400, seed=2), predictions(0.72, seed=4)
    assert SCORER.scores(many).max() > SCORER.scores(one)[0] + 0.04
    assert verdict(tfidf=one, tlm=many).recommended == "tfidf"


def test_an_equally_good_dearer_model_is_recommended_less_than_once_in_ten_times() -> None:
    wrong = 0
    for seed in range(30):
        one, other = predictions(0.7, seed=2 * seed), predictions(0.7, candidates=20, seed=2 * seed + 1)
        wrong += verdict(tfidf=one, tlm=other).recommended == "tlm"
    assert wrong < 3


def test_of_three_models_the_cheapest_that_no_other_clearly_beats_is_recommended() -> None:
    low, middle, high = (predictions(share, seed=number) for number, share in enumerate((0.55, 0.7, 0.85)))
    assert verdict(tfidf=low, static=middle, tlm=high).recommended == "tlm"
    assert verdict(tfidf=low, static=high, tlm=middle).recommended == "static"
    assert verdict(tfidf=high, static=low, tlm=middle).recommended == "tfidf"
    result = verdict(tfidf=low, static=high, tlm=predictions(0.85, seed=7))
    assert (result.recommended, result.clear) == ("static", False)
    assert "No clear difference between tlm and static" in result.text
    result = verdict(tlm=predictions(0.8))
    assert (result.recommended, result.clear) == ("tlm", False)
    assert result.text == f"tlm: macro-F1 {100 * result.scores['tlm']:.1f} cross-fitted on dev; no other model was fitted to compare with."


def test_the_verdict_names_a_cheaper_model_that_is_not_clearly_worse() -> None:
    shares = {"tfidf": (0.6, 1014), "bayes": (0.78, 14), "static": (0.82, 514), "tlm": (0.86, 2014)}
    result = verdict(**{name: predictions(share, seed=seed) for name, (share, seed) in shares.items()})
    assert result.text.startswith("Use tlm: it is ")
    assert "better than bayes, which is cheaper" in result.text
    assert "). The cheaper static is not clearly worse (" in result.text
    assert "not clearly worse" not in verdict(tfidf=predictions(0.6), tlm=predictions(0.85, seed=1)).text


def test_linear_models_are_compared_on_training_texts_out_of_fold_where_dev_is_small() -> None:
    few = DevScorer.of(dev_task([LABELS[label] for label in TRUTH[:12]]), "macro_f1")
    weak, good = predictions(0.6), predictions(0.85, seed=1)
    good[:, :12] = weak[:, :12]
    models = {"tfidf": weak, "static": good, "tlm": good}
    on_dev = {name: values[:, :12] for name, values in models.items()}
    assert compare_on_dev(few, on_dev, seed=3).recommended == "tfidf"
    out_of_fold = OutOfFold(SCORER, {name: models[name][0] for name in ("tfidf", "static")})
    result = compare_on_dev(few, on_dev, seed=3, out_of_fold=out_of_fold)
    assert result.recommended == "static"
    assert result.text.startswith("No clear difference between tlm and static")
    assert "The linear models were compared on 188 training texts out of fold, too." in result.text
    del on_dev["tlm"]
    result = compare_on_dev(few, on_dev, seed=3, out_of_fold=out_of_fold)
    assert result.text.startswith("Use static: it is ")
    assert "(on dev and 188 training texts out of fold: tfidf " in result.text


def test_numbers_are_compared_by_their_correlation() -> None:
    random = np.random.default_rng(1)
    truth = random.normal(size=120)
    scorer = DevScorer.of(dev_task([repr(float(value)) for value in truth], "regression"), "pearson")
    good, bad = (np.stack([truth + noise * random.normal(size=120)]).astype(np.float32) for noise in (0.3, 3.0))
    result = compare_on_dev(scorer, {"tfidf": bad, "tlm": good}, seed=0)
    assert result.recommended == "tlm"
    assert "points" not in result.text


@pytest.mark.parametrize("kind", ["classification", "multi-label"])
def test_the_best_of_many_random_candidates_has_its_true_score_when_cross_fitted(kind: TaskKind) -> None:
    """Random predictions of three even labels are right once in three times; the best of 300 on 90 dev texts has a far higher score."""
    random = np.random.default_rng(5)
    true = [LABELS[number % 3] if kind == "classification" else format_labels([LABELS[number % 3]]) for number in range(90)]
    scorer = DevScorer.of(dev_task(true, kind), "accuracy" if kind == "classification" else "micro_f1")
    shape = (300, 90) if kind == "classification" else (300, 90, 3)
    many = random.integers(0, 3, shape).astype(np.int16) if kind == "classification" else random.random(shape) < 1 / 3
    assert scorer.scores(many).max() > 0.42
    halves = cross_fitted(scorer, {"many": many, "one": many[:1]}, seed=1)
    assert halves["many"].mean() == pytest.approx(1 / 3, abs=0.04)
    assert halves["one"].mean() == pytest.approx(scorer.scores(many[:1])[0], abs=0.01)
    assert len(halves["many"]) == 2 * SPLITS


@pytest.mark.parametrize("kind", ["classification", "multi-label"])
def test_a_label_that_training_lacks_counts_in_cross_fitted_scores_as_on_all_of_dev(kind: TaskKind) -> None:
    labels = [name if kind == "classification" else format_labels([name]) for name in (*"abc" * 20, "foreign")]
    scorer = DevScorer.of(dev_task(labels, kind), "macro_f1")
    ids = np.array([*[0, 1, 2] * 20, 0])
    perfect = ids.astype(np.int16) if kind == "classification" else np.eye(3, dtype=np.bool_)[ids]
    on_dev = scorer.scores(perfect[None])[0]
    assert on_dev == pytest.approx((2 + 40 / 41) / 4)
    np.testing.assert_allclose(cross_fitted(scorer, {"model": perfect[None]}, seed=1)["model"], on_dev, atol=0.03)


def test_halves_are_a_function_of_the_seed_and_keep_the_labels_proportions() -> None:
    scorer = DevScorer.of(dev_task(["a"] * 40 + ["b"] * 10 + ["foreign"] * 2), "accuracy")
    for number in range(4):
        half = _half(scorer, 7, number)
        assert np.array_equal(half, _half(scorer, 7, number))
        assert [int(half[scorer.truth == label].sum()) for label in np.unique(scorer.truth)] == [20, 5, 1]
    assert not np.array_equal(_half(scorer, 7, 0), _half(scorer, 8, 0))
    single = DevScorer.of(dev_task(["a"]), "macro_f1")
    assert np.isfinite(cross_fitted(single, {"one": np.zeros((2, 1), np.int16)}, seed=0)["one"]).all()
