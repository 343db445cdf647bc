"""Scores beside scikit-learn's and SciPy's own, and their bootstrap intervals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.metrics import accuracy_score, f1_score, mean_squared_error, r2_score
from sklearn.preprocessing import MultiLabelBinarizer

from cramlm.evaluation.kinds import format_metric
from cramlm.evaluation.metrics import RESAMPLES, bootstrap_number_intervals, calibration_error, score, score_labels, score_numbers

LABELS = ("a", "b", "c", "d")
NAMES = ("a", "b", "c", "never")
RANDOM = np.random.Generator(np.random.Philox(key=[4, 2]))
TRUE = [[name for name in ("a", "b", "c", "foreign") if RANDOM.random() < 0.4] for _ in range(60)]
PREDICTED = [[name for name in ("a", "b", "c") if RANDOM.random() < 0.5] for _ in range(60)]


def imitation(rows: int, classes: int, *, seed: int, right: float = 0.7) -> tuple[list[str], list[str], list[str]]:
    """True and predicted labels of a classifier that is right in `right` of the rows or by luck."""
    random = np.random.default_rng(seed)
    labels = [f"label-{number:02}" for number in range(classes)]
    true = [labels[number] for number in random.integers(classes, size=rows)]
    predicted = [label if random.random() < right else labels[random.integers(classes)] for label in true]
    return true, predicted, labels


@given(st.lists(st.tuples(st.sampled_from((*LABELS, "never seen")), st.sampled_from(LABELS)), min_size=1, max_size=30))
def test_every_score_equals_scikit_learns(rows: list[tuple[str, str]]) -> None:
    true, predicted = ([row[side] for row in rows] for side in (0, 1))
    scores = score(true, predicted, LABELS)
    assert scores.accuracy == pytest.approx(metrics.accuracy_score(true, predicted))
    assert scores.macro_f1 == pytest.approx(metrics.f1_score(true, predicted, average="macro", zero_division=0))
    assert scores.micro_f1 == pytest.approx(metrics.f1_score(true, predicted, average="micro", zero_division=0))
    names = list(scores.per_class)
    matrix = metrics.confusion_matrix(true, predicted, labels=names)
    assert scores.confusion.tolist() == matrix.tolist()
    assert scores.as_dict()["confusions"] == [[row, column, matrix[row, column]] for row, column in np.argwhere(matrix).tolist()]
    report = metrics.classification_report(true, predicted, labels=names, output_dict=True, zero_division=0)
    for name in names:
        ours, theirs = scores.per_class[name], report[name]
        assert ours["precision"] == pytest.approx(theirs["precision"])
        assert ours["recall"] == pytest.approx(theirs["recall"])
        assert ours["f1"] == pytest.approx(theirs["f1-score"])
        assert ours["support"] == theirs["support"]


def test_scores_become_plain_json() -> None:
    true, predicted, labels = imitation(50, 3, seed=1)
    scores = score([*true, "strange"], [*predicted, labels[0]], labels)
    values = json.loads(json.dumps(scores.as_dict(), allow_nan=False))
    assert values["macro_f1"] == scores.macro_f1
    assert (values["per_class"]["strange"]["recall"], values["per_class"]["strange"]["support"]) == (0, 1)
    assert values["per_class"][labels[0]]["support"] == true.count(labels[0])
    low, high = values["intervals"]["macro_f1"]
    assert low < values["macro_f1"] < high


def test_intervals_equal_those_of_resampled_rows() -> None:
    true, predicted, labels = imitation(400, 4, seed=2)
    codes = np.array([[labels.index(label) for label in side] for side in (true, predicted)])
    random = np.random.default_rng(7)
    samples = [codes[:, random.integers(len(true), size=len(true))] for _ in range(400)]
    macro = [metrics.f1_score(*sample, average="macro") for sample in samples]
    micro = [(sample[0] == sample[1]).mean() for sample in samples]
    intervals = score(true, predicted, labels).intervals(resamples=5_000)
    # Percentiles of 400 resamples scatter by about 0.003 here.
    assert intervals["macro_f1"] == pytest.approx(np.percentile(macro, [2.5, 97.5]), abs=0.008)
    assert intervals["micro_f1"] == pytest.approx(np.percentile(micro, [2.5, 97.5]), abs=0.008)


def test_intervals_depend_on_the_seed_and_not_on_how_many_resamples_are_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    true, predicted, labels = imitation(100, 3, seed=3)
    scores = score(true, predicted, labels)
    whole = scores.intervals(seed=4)
    assert whole != scores.intervals(seed=5)
    monkeypatch.setattr("cramlm.evaluation.metrics.CELLS_AT_ONCE", 70)
    assert scores.intervals(seed=4) == whole


def test_a_perfect_or_a_single_row_has_an_interval_of_no_width() -> None:
    assert score(["a", "b", "b"], ["a", "b", "b"], LABELS).intervals()["micro_f1"] == (1.0, 1.0)
    assert score(["a"], ["b"], LABELS).intervals()["macro_f1"] == (0.0, 0.0)


@pytest.mark.parametrize(
    ("probabilities", "true", "bins", "error"),
    [
        # Bins of 1/15: 0.62 and 0.65 are in (0.6, 0.667] with accuracy 1/2, 0.9 in (0.867, 0.933] with accuracy 1.
        ([[0.62, 0.38], [0.35, 0.65], [0.9, 0.1]], "aaa", 15, (2 * abs(0.635 - 0.5) + 1 * abs(0.9 - 1.0)) / 3),
        ([[0.75, 0.25]] * 4, "aaab", 15, 0.0),
        # 1.0 is in the last bin (wrong: gap 1), 0.5 alone in its own (right: gap 0.5); two bins: (0, 0.5] and (0.5, 1].
        ([[1.0, 0.0], [0.5, 0.5]], "ba", 2, (1.0 + 0.5) / 2),
    ],
    ids=["by hand", "calibrated", "at the edge of a bin"],
)
def test_the_calibration_error_is_that_of_a_hand_calculation(probabilities: list[list[float]], true: str, bins: int, error: float) -> None:
    found = calibration_error(np.array(probabilities, dtype=np.float32), list(true), ["a", "b"], bins=bins)
    assert found == pytest.approx(error, abs=1e-6)


def test_scores_of_several_labels_are_those_of_scikit_learn_over_the_labels_that_occur() -> None:
    scores = score_labels(TRUE, PREDICTED, NAMES)
    encoder = MultiLabelBinarizer(classes=["a", "b", "c", "foreign"]).fit(TRUE)
    true, predicted = encoder.transform(TRUE), encoder.transform(PREDICTED)
    assert scores.macro_f1 == pytest.approx(f1_score(true, predicted, average="macro", zero_division=0))
    assert scores.micro_f1 == pytest.approx(f1_score(true, predicted, average="micro"))
    assert scores.subset_accuracy == accuracy_score(true, predicted)
    assert list(scores.per_class) == [*NAMES, "foreign"]
    assert scores.per_class["foreign"]["recall"] == scores.per_class["never"]["support"] == 0
    intervals = scores.as_dict()["intervals"]
    assert all(low < scores.metrics[name] < high for name, (low, high) in intervals.items())
    nothing = score_labels([[], []], [[], []], NAMES)
    assert (nothing.macro_f1, nothing.micro_f1, nothing.subset_accuracy) == (0, 0, 1)


def test_scores_of_a_single_label_that_a_text_has_or_not_are_those_of_scikit_learn() -> None:
    true, predicted = [["a"], [], ["a"], []], [["a"], ["a"], [], []]
    scores = score_labels(true, predicted, ("a",))
    expected = f1_score([1, 0, 1, 0], [1, 1, 0, 0])
    assert (scores.macro_f1, scores.micro_f1, scores.subset_accuracy) == (expected, expected, 0.5)
    assert scores.per_class == {"a": {"precision": 0.5, "recall": 0.5, "f1": expected, "support": 2}}


def test_scores_of_numbers_are_those_of_scipy_and_scikit_learn() -> None:
    true = RANDOM.normal(2000, 10, 80)
    predicted = true + RANDOM.normal(1, 5, 80)
    scores = score_numbers(true.tolist(), predicted.tolist())
    assert scores.pearson == pytest.approx(scipy.stats.pearsonr(true, predicted).statistic)
    assert scores.spearman == pytest.approx(scipy.stats.spearmanr(true, predicted).statistic)
    assert scores.rmse == pytest.approx(mean_squared_error(true, predicted) ** 0.5)
    assert scores.r2 == pytest.approx(r2_score(true, predicted))
    intervals = scores.as_dict()["intervals"]
    assert all(low < scores.metrics[name] < high for name, (low, high) in intervals.items())
    again = np.random.Generator(np.random.Philox(key=[1, 1])).integers(0, 80, (400, 80))  # a plain bootstrap, row by row
    plain = np.percentile([scipy.stats.pearsonr(true[rows], predicted[rows]).statistic for rows in again], [2.5, 97.5])
    np.testing.assert_allclose(intervals["pearson"], plain, atol=0.03)


@pytest.mark.parametrize(
    ("true", "predicted"),
    [
        ([*[1.1] * 9, 5.0], [1.0, 2, 3, 1, 2, 1.5, 1.2, 1, 1, 4]),
        ([1.1, 2.3, 0.4, 1.7, 2.2, 0.9], [*[0.7] * 5, 1.9]),
        ([1e-9 * number for number in (3, 1, 4, 1, 5, 9)], [2e-9, 1e-9, 2e-9, 3e-9, 3e-9, 8e-9]),
        (RANDOM.normal(2000, 10, 30).tolist(), RANDOM.normal(2000, 10, 30).tolist()),
    ],
    ids=["true numbers mostly equal", "predictions mostly equal", "small", "ordinary"],
)
def test_intervals_of_numbers_are_those_of_the_scores_of_each_resample(true: list[float], predicted: list[float]) -> None:
    counts = np.random.Generator(np.random.Philox(key=[0, 0xB007])).multinomial(len(true), np.ones(len(true)) / len(true), RESAMPLES)
    resamples = [score_numbers(np.repeat(true, times).tolist(), np.repeat(predicted, times).tolist()).metrics for times in counts]
    for name, interval in bootstrap_number_intervals(np.array(true), np.array(predicted)).items():
        assert interval == pytest.approx(np.percentile([each[name] for each in resamples], [2.5, 97.5]), rel=1e-6, abs=1e-12)


def test_constant_numbers_have_correlation_0() -> None:
    for true, predicted in (([1.0, 2.0], [5.0, 5.0]), ([3.0, 3.0], [1.0, 2.0]), ([1.0], [1.0]), ([0.1] * 7, [*range(7)])):
        scores = score_numbers(true, predicted)
        assert scores.pearson == scores.spearman == 0
        assert scores.r2 == 0 or np.ptp(true) > 0
        assert np.isfinite(list(scores.metrics.values())).all()


@pytest.mark.parametrize(
    ("error", "shown"), [(13104.4, "13104"), (9999.6, "10000"), (987.65, "987.6"), (0.012345, "0.01235"), (2.5e6, "2500000"), (0, "0")]
)
def test_an_error_in_the_unit_of_large_numbers_is_shown_without_an_exponent(error: float, shown: str) -> None:
    assert format_metric("rmse", error) == shown


def test_a_score_that_rounds_to_0_has_no_sign() -> None:
    assert [format_metric("pearson", -1e-9), format_metric("macro_f1", -1e-9), format_metric("pearson", -0.25)] == [
        "0.000",
        "0.0",
        "-0.250",
    ]
