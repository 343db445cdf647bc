"""Dev scores of many candidates at once, and choice on one half of dev with scores on the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cramlm.config.run import CHOOSING
from cramlm.data.labels import format_labels, format_number
from cramlm.evaluation import choice
from cramlm.evaluation.choice import TAUS, DevScorer, cross_fitted, logit_adjustments
from cramlm.evaluation.kinds import KINDS
from cramlm.records import TaskKind

LABELS = ("a", "b", "c")
UNSEEN = (*LABELS, "foreign", "other")  # dev may hold labels that training does not have
METRICS = [(kind, metric) for kind, metrics in CHOOSING.items() for metric in metrics]
# Exact halves, and differences below the precision of a probability in float32.
LOGITS = st.sampled_from([-3.0, -1.0, -0.5, -1e-9, 0.0, 1e-9, 0.5, 0.5 + 6e-8, 2.0])


def spelled(kind: TaskKind) -> st.SearchStrategy[str]:
    match kind:
        case "classification":
            return st.sampled_from(UNSEEN)
        case "multi-label":
            return st.lists(st.sampled_from(UNSEEN), unique=True).map(lambda names: format_labels(sorted(names)))
        case "regression":
            return st.sampled_from([1.0, 2.0, 2.5, 2000.0]).map(format_number)


@pytest.mark.parametrize(("kind", "metric"), METRICS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_scores_of_candidates_are_those_of_the_kind(kind: TaskKind, metric: str, data: Any) -> None:
    true = data.draw(st.lists(spelled(kind), min_size=1, max_size=12))
    labels = ("value",) if kind == "regression" else LABELS
    row = st.lists(LOGITS, min_size=len(labels), max_size=len(labels))
    candidates = [
        np.array(data.draw(st.lists(row, min_size=len(true), max_size=len(true))), dtype=np.float32)
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    scorer = DevScorer.of(kind, true, labels, metric)
    found = scorer.scores(np.stack([scorer.predictions(logits) for logits in candidates]))
    judge = KINDS[kind]
    for score, logits in zip(found, candidates, strict=True):
        expected = judge.score(true, judge.spelled(judge.outputs(logits), labels), labels).figures[metric]
        assert score == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("kind", "metric"), METRICS)
def test_scores_of_some_rows_are_those_of_these_rows_however_many_candidates_there_are(
    kind: TaskKind, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    spell: dict[TaskKind, Any] = {
        "classification": lambda: str(random.choice(UNSEEN)),
        "multi-label": lambda: format_labels([name for name in UNSEEN if random.random() < 0.4]),
        "regression": lambda: format_number(float(random.normal())),
    }
    true, labels = [spell[kind]() for _ in range(30)], ("value",) if kind == "regression" else LABELS
    scorer = DevScorer.of(kind, true, labels, metric)
    predictions = np.stack([scorer.predictions(random.normal(size=(30, len(labels))).astype(np.float32)) for _ in range(9)])
    rows = np.array([0, 3, 4, 9, 17, 20, 29])
    part = DevScorer(kind, metric, scorer.truth[rows], scorer.labels)
    np.testing.assert_allclose(scorer.scores(predictions, rows), part.scores(predictions[:, rows]))
    monkeypatch.setattr(choice, "_AT_ONCE", 2 * scorer.truth.size)
    np.testing.assert_allclose(scorer.scores(predictions, rows), part.scores(predictions[:, rows]))
    assert scorer.scores(predictions[:0]).shape == (0,)


@pytest.mark.parametrize("kind", ["classification", "multi-label"])
def test_the_best_of_many_random_candidates_has_its_true_score_when_cross_fitted(kind: TaskKind) -> None:
    """Random predictions of three even labels are right once in three times; the best of 300 on 90 dev texts seems better by far."""
    random = np.random.default_rng(5)
    true = [LABELS[number % 3] if kind == "classification" else format_labels([LABELS[number % 3]]) for number in range(90)]
    metric = "accuracy" if kind == "classification" else "micro_f1"
    scorer = DevScorer.of(kind, true, LABELS, metric)
    shape = (300, 90) if kind == "classification" else (300, 90, 3)
    predictions = random.integers(0, 3, shape).astype(np.int16) if kind == "classification" else random.random(shape) < 1 / 3
    assert scorer.scores(predictions).max() > 0.42
    halves = cross_fitted(scorer, {"many": predictions, "one": predictions[:1]}, seed=1)
    assert halves["many"].mean() == pytest.approx(1 / 3, abs=0.04)
    assert halves["one"].mean() == pytest.approx(scorer.scores(predictions[:1])[0], abs=0.01)
    assert len(halves["many"]) == 2 * choice.SPLITS


def test_halves_are_a_function_of_the_seed_and_keep_the_labels_proportions() -> None:
    true = ["a"] * 40 + ["b"] * 10 + ["foreign"] * 2
    scorer = DevScorer.of("classification", true, LABELS, "accuracy")
    for number in range(4):
        half = choice._half(scorer, 7, number)
        assert np.array_equal(half, choice._half(scorer, 7, number))
        assert [int(half[scorer.truth == label].sum()) for label in np.unique(scorer.truth)] == [20, 5, 1]
    assert not np.array_equal(choice._half(scorer, 7, 0), choice._half(scorer, 8, 0))


def test_a_single_dev_text_is_scored_without_an_error() -> None:
    scorer = DevScorer.of("classification", ["a"], LABELS, "macro_f1")
    found = cross_fitted(scorer, {"one": np.zeros((2, 1), np.int16)}, seed=0)
    assert np.isfinite(found["one"]).all()


def test_adjustments_are_tau_times_the_log_of_the_labels_rarity_and_numbers_have_none() -> None:
    found = logit_adjustments("classification", ["a"] * 7 + ["b"], LABELS)
    assert tuple(found) == TAUS
    logs = -np.log(np.array([8, 2, 1]) / 11)
    np.testing.assert_allclose(found[0.5], 0.5 * (logs - logs.mean()), rtol=1e-6)
    assert found[0.0].tolist() == [0, 0, 0]
    assert {tau: values.tolist() for tau, values in logit_adjustments("regression", ["1"], ("value",)).items()} == {0.0: [0.0]}
