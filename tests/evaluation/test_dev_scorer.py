"""Scores of many candidates at once, and the predictions of several labels and of numbers."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from evaluation_fixtures import LABELS, dev_task
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cramlm.config.run import DEV_METRICS
from cramlm.data.labels import format_labels, format_number
from cramlm.evaluation.kinds import BF16_ERROR, KINDS, DevScorer, distinct_rows
from cramlm.evaluation.prediction import outputs_of
from cramlm.records import LabelsPrediction, NumberPrediction, TaskKind

UNSEEN = (*LABELS, "foreign", "other")  # dev may hold labels that training does not have
METRICS = [(kind, metric) for kind, metrics in DEV_METRICS.items() for metric in metrics]
# Exact halves, and differences below the precision of a probability in float32.
LOGITS = st.sampled_from([-3.0, -1.0, -0.5, -1e-9, 0.0, 1e-9, 0.5, 0.5 + 6e-8, 2.0])


def labels_of(kind: TaskKind) -> st.SearchStrategy[str]:
    match kind:
        case "classification":
            return st.sampled_from(UNSEEN)
        case "multi-label":
            return st.lists(st.sampled_from(UNSEEN), unique=True).map(lambda names: format_labels(sorted(names)))
        case "regression":
            return st.sampled_from([1.0, 2.0, 2.5, 2000.0]).map(format_number)


@pytest.mark.parametrize(("kind", "metric"), METRICS)
@given(data=st.data())
def test_scores_of_candidates_are_those_of_the_kind(kind: TaskKind, metric: str, data: Any) -> None:
    task = dev_task(data.draw(st.lists(labels_of(kind), min_size=1, max_size=12)), kind)
    row = st.lists(LOGITS, min_size=len(task.labels), max_size=len(task.labels))
    candidates = [
        np.array(data.draw(st.lists(row, min_size=len(task.dev), max_size=len(task.dev))), dtype=np.float32)
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    scorer = DevScorer.of(task, metric)
    scores = scorer.scores(np.stack([scorer.predictions(logits) for logits in candidates]))
    true = [str(example.label) for example in task.dev]
    for score, logits in zip(scores, candidates, strict=True):
        predicted = KINDS[kind].predicted_labels(KINDS[kind].outputs(logits), task.labels)
        assert score == pytest.approx(KINDS[kind].score(true, predicted, task.labels).metrics[metric], abs=1e-6)
    # Scores of a part are those of a scorer of this part, if it has all labels that training does not have.
    rows = np.array([row for row, label in enumerate(true) if row % 2 == 0 or any(unseen in label for unseen in ("foreign", "other"))])
    part = DevScorer(kind, metric, scorer.truth[rows], scorer.labels)
    predictions = np.stack([scorer.predictions(logits) for logits in candidates])
    np.testing.assert_allclose(scorer.scores(predictions, rows), part.scores(predictions[:, rows]))


@pytest.mark.parametrize("unit", [1e-30, 1e-9, 1e30])
@pytest.mark.parametrize("metric", DEV_METRICS["regression"])
def test_scores_of_numbers_do_not_depend_on_their_unit(metric: str, unit: float) -> None:
    true, logits = np.array([0.1, 0.1, 0.7, 0.4, 0.9]), np.array([[0.1, 0.3, 0.5, 0.6, 0.8], [0.7] * 5], np.float32)[..., None]
    plain, scaled = (DevScorer.of(dev_task([format_number(each) for each in true * by], "regression"), metric) for by in (1, unit))
    expected = plain.scores(np.stack(list(map(plain.predictions, logits))))
    found = scaled.scores(np.stack([scaled.predictions(each * np.float32(unit)) for each in logits]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[0] > 0.3


@pytest.mark.parametrize("metric", DEV_METRICS["regression"])
def test_the_score_for_equal_numbers_is_0(metric: str) -> None:
    scorer = DevScorer.of(dev_task(["0.1"] * 7, "regression"), metric)  # the computed mean is not 0.1
    assert scorer.scores(np.array([[1.0] * 7, [0.1] * 7, np.arange(7.0)], np.float32)).tolist() == [0, 0, 0]


def test_each_logit_of_a_multi_label_task_is_a_probability_of_its_own() -> None:
    logits = np.array([[3.0, -2.0, 0.0], [-1.0, -2.0, -300.0]], dtype=np.float32)
    outputs, kind = outputs_of("multi-label", logits), KINDS["multi-label"]
    np.testing.assert_allclose(outputs, torch.sigmoid(torch.from_numpy(logits)).numpy(), rtol=1e-6, atol=1e-9)
    predictions = kind.predictions(outputs, ("x", "y", "z"))
    assert [each.labels for each in predictions if isinstance(each, LabelsPrediction)] == [("x", "z"), ()]
    assert kind.predicted_labels(outputs, ("x", "y", "z")) == ['["x", "z"]', "[]"]
    assert kind.near_ties(logits).tolist() == [True, False]
    assert not kind.near_ties(logits[1:] - BF16_ERROR).any()


def test_the_logit_of_a_regression_is_its_number() -> None:
    outputs = outputs_of("regression", np.array([[2003.5], [-1.0]], dtype=np.float32))
    assert KINDS["regression"].predictions(outputs, ("year",)) == [NumberPrediction(2003.5), NumberPrediction(-1.0)]


@given(
    arrays(np.int16, st.tuples(st.integers(1, 6), st.integers(1, 3)), elements=st.integers(-1, 2))
    | arrays(np.bool_, st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)))
    | arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 3)), elements=st.sampled_from([-1.5, 0.0, 0.25, 3.0]))
)
def test_distinct_rows_are_those_of_numpy(rows: npt.NDArray[Any]) -> None:
    found, expected = distinct_rows(rows), np.unique(rows, axis=0)
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, expected)


def test_distinct_rows_of_many_texts_hold_their_own_bytes_only() -> None:
    rows = np.random.default_rng(0).random((4, 5000, 20)) < 0.5
    tracemalloc.start()
    found = distinct_rows(rows)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.2 * found.nbytes
    assert most < 4 * found.nbytes
