"""Training texts that are predicted out of fold and decide together with a small dev set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from linear_fixtures import topic_task
from sklearn.linear_model import LogisticRegression

from cramlm.evaluation.kinds import KINDS
from cramlm.linear import cross_validation
from cramlm.linear.cross_validation import DECIDING_TEXTS, FOLDS, SMALL_DEV, fold_predictor, held_out_folds
from cramlm.linear.files import Setting
from cramlm.linear.fit import SearchSpace, fit_linear
from cramlm.linear.solvers import SOLVERS, solver_of


def test_a_fold_is_predicted_by_the_regression_of_the_other_rows_with_the_label_frequencies_of_all() -> None:
    random = np.random.default_rng(0)
    targets = np.repeat([0, 1, 2], [30, 20, 10])
    rows = random.normal(size=(60, 4)).astype(np.float32) + np.eye(3, 4, dtype=np.float32)[targets]
    inside = np.arange(60) % 4 == 0
    inside[50:55] = True
    for weights in ("uniform", "balanced"):
        setting = Setting("multinomial", weights, 0.0)
        logits = fold_predictor(SOLVERS["classification"](3), rows, targets, inside, setting)(2.0)
        other = LogisticRegression(C=2.0, class_weight="balanced" if weights == "balanced" else None, tol=1e-8, max_iter=1000)
        expected = other.fit(rows[~inside], targets[~inside]).predict_log_proba(rows[inside])
        if weights == "uniform":
            expected += np.log(np.bincount(targets) / 60) - np.log(np.bincount(targets[~inside]) / (~inside).sum())
        np.testing.assert_allclose(logits, expected, atol=1e-2)


@pytest.mark.parametrize(("dev_texts", "expected"), [(0, 100), (SMALL_DEV - 1, 100), (SMALL_DEV, 0)])
def test_all_folds_of_few_texts_decide_beside_a_small_dev_set(dev_texts: int, expected: int) -> None:
    task = topic_task(sea=60, hill=40)
    strata = solver_of(task).targets(task)
    chosen = held_out_folds(task.train, strata, dev_texts=dev_texts)
    assert sum(map(len, chosen)) == expected
    assert len(np.unique(np.concatenate([*chosen, [-1]]))) == expected + 1, "no text is in two folds"
    assert all(np.bincount(strata[fold]).tolist() == [8, 12] for fold in chosen), "each has its share of every label"
    assert not held_out_folds(task.train[: FOLDS - 1], strata, dev_texts=0)
    assert not held_out_folds(task.train[:1] * 10, strata[:10], dev_texts=0), "equal texts share a fold, and nothing is left to fit"


def test_of_many_training_texts_as_many_folds_are_predicted_as_are_needed() -> None:
    task = topic_task(sea=600, hill=400)
    chosen = held_out_folds(task.train, solver_of(task).targets(task), dev_texts=150)
    assert [len(fold) for fold in chosen] == [200, 200]
    assert sum(map(len, chosen)) >= DECIDING_TEXTS - 150


def test_two_wrong_dev_labels_do_not_decide_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    task = topic_task(sea=60, hill=8)
    swapped = {"sea": "hill", "hill": "sea"}
    by_label = {str(row.label): row for row in task.dev}
    wrong = tuple(replace(row, label=swapped[label]) for label, row in by_label.items())

    def test_score() -> float:
        fitted = fit_linear(replace(task, dev=wrong), SearchSpace((0.01, 1.0), "macro_f1", 0, ("words", "tokens")), stage="baseline")
        logits = fitted.model.logits([row.text for row in task.test])
        predicted = KINDS[task.kind].predicted_labels(KINDS[task.kind].outputs(logits), task.labels)
        return float(KINDS[task.kind].score([str(row.label) for row in task.test], predicted, task.labels).metrics["macro_f1"])

    assert test_score() > 0.85
    monkeypatch.setattr(cross_validation, "SMALL_DEV", 0)
    assert test_score() < 0.6, "dev alone prefers a model that is wrong"
