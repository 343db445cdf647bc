"""Answers and scores of several labels and of numbers, beside scikit-learn's and SciPy's own."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import accuracy_score, f1_score, mean_squared_error, r2_score
from sklearn.preprocessing import MultiLabelBinarizer

from cramlm.evaluation.evaluate import outputs_of
from cramlm.evaluation.kinds import CLOSE, KINDS
from cramlm.evaluation.metrics import score_labels, score_numbers
from cramlm.records import LabelsPrediction, NumberPrediction

NAMES = ("a", "b", "c", "never")
RANDOM = np.random.Generator(np.random.Philox(key=[4, 2]))
TRUE = [[name for name in ("a", "b", "c", "foreign") if RANDOM.random() < 0.4] for _ in range(60)]
SAID = [[name for name in ("a", "b", "c") if RANDOM.random() < 0.5] for _ in range(60)]


def test_scores_of_several_labels_are_those_of_scikit_learn_over_the_labels_that_occur() -> None:
    scores = score_labels(TRUE, SAID, NAMES)
    encoder = MultiLabelBinarizer(classes=["a", "b", "c", "foreign"]).fit(TRUE)
    true, said = encoder.transform(TRUE), encoder.transform(SAID)
    assert scores.macro_f1 == pytest.approx(f1_score(true, said, average="macro", zero_division=0))
    assert scores.micro_f1 == pytest.approx(f1_score(true, said, average="micro"))
    assert scores.subset_accuracy == accuracy_score(true, said)
    assert list(scores.per_class) == [*NAMES, "foreign"]
    assert scores.per_class["foreign"]["recall"] == scores.per_class["never"]["support"] == 0
    intervals = scores.as_dict()["intervals"]
    assert all(low < scores.figures[name] < high for name, (low, high) in intervals.items())
    nothing = score_labels([[], []], [[], []], NAMES)
    assert (nothing.macro_f1, nothing.micro_f1, nothing.subset_accuracy) == (0, 0, 1)


def test_scores_of_a_single_label_that_a_text_has_or_not_are_those_of_scikit_learn() -> None:
    true, said = [["a"], [], ["a"], []], [["a"], ["a"], [], []]
    scores = score_labels(true, said, ("a",))
    expected = f1_score([1, 0, 1, 0], [1, 1, 0, 0])
    assert (scores.macro_f1, scores.micro_f1, scores.subset_accuracy) == (expected, expected, 0.5)
    assert scores.per_class == {"a": {"precision": 0.5, "recall": 0.5, "f1": expected, "support": 2}}


def test_scores_of_numbers_are_those_of_scipy_and_scikit_learn() -> None:
    true = RANDOM.normal(2000, 10, 80)
    said = true + RANDOM.normal(1, 5, 80)
    scores = score_numbers(true.tolist(), said.tolist())
    assert scores.pearson == pytest.approx(scipy.stats.pearsonr(true, said).statistic)
    assert scores.spearman == pytest.approx(scipy.stats.spearmanr(true, said).statistic)
    assert scores.rmse == pytest.approx(mean_squared_error(true, said) ** 0.5)
    assert scores.r2 == pytest.approx(r2_score(true, said))
    intervals = scores.as_dict()["intervals"]
    assert all(low < scores.figures[name] < high for name, (low, high) in intervals.items())
    again = np.random.Generator(np.random.Philox(key=[1, 1])).integers(0, 80, (400, 80))  # a plain bootstrap, row by row
    plain = np.percentile([scipy.stats.pearsonr(true[rows], said[rows]).statistic for rows in again], [2.5, 97.5])
    np.testing.assert_allclose(intervals["pearson"], plain, atol=0.03)


def test_numbers_that_do_not_vary_correlate_with_nothing() -> None:
    for true, said in (([1.0, 2.0], [5.0, 5.0]), ([3.0, 3.0], [1.0, 2.0]), ([1.0], [1.0])):
        scores = score_numbers(true, said)
        assert scores.pearson == scores.spearman == 0
        assert np.isfinite(list(scores.figures.values())).all()


def test_logits_of_several_labels_are_probabilities_each_on_its_own() -> None:
    logits = np.array([[3.0, -2.0, 0.0], [-1.0, -2.0, -300.0]], dtype=np.float32)
    outputs = outputs_of("multi-label", logits)
    np.testing.assert_allclose(outputs, torch.sigmoid(torch.from_numpy(logits)).numpy(), rtol=1e-6, atol=1e-9)
    answers = KINDS["multi-label"].answers(outputs, ("x", "y", "z"))
    assert [answer.labels for answer in answers if isinstance(answer, LabelsPrediction)] == [("x", "z"), ()]
    assert KINDS["multi-label"].spelled(outputs, ("x", "y", "z")) == ['["x", "z"]', "[]"]
    assert KINDS["multi-label"].unsure(logits).tolist() == [True, False]
    assert not KINDS["multi-label"].unsure(logits[1:] - CLOSE).any()


def test_the_logit_of_a_regression_is_its_number() -> None:
    outputs = outputs_of("regression", np.array([[2003.5], [-1.0]], dtype=np.float32))
    assert KINDS["regression"].answers(outputs, ("year",)) == [NumberPrediction(2003.5), NumberPrediction(-1.0)]
