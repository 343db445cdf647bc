"""The linear models of the baseline, by kind of task, on TF-IDF rows (scipy CSR).

    classification    logistic regression, one per label against the rest; the label with the highest score
    multi-label       the same; every label whose score is over 0
    regression        ridge regression; alpha is 1 / C, so that C is the inverse regularisation in all of them

Logistic regression is liblinear's dual coordinate descent: on 20 Newsgroups (10,137 texts, characters) it is two to four times as fast as
multinomial L-BFGS or SAGA, at equal scores.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier

from cramlm.data.labels import RULES, spell_labels, spell_number
from cramlm.records import IntArray, Task, TaskKind

Weights: TypeAlias = Literal["rows alike", "labels alike"]

_BALANCED_ABOVE = 2.0  # size of the largest label over that of the smallest
_TOLERANCE = 0.1  # liblinear's own default for this solver; 0.5 is a third faster, but moves which variant is chosen on small dev sets
_PASSES = 60


class Linear(Protocol):
    """targets: what is learnt of each training text, an array with a row for each."""

    def targets(self, task: Task) -> Any:
        """Of the training rows."""

    def strata(self, targets: Any) -> IntArray:
        """What a part of the training rows keeps in proportion, (n,)."""

    def weightings(self, targets: Any) -> tuple[Weights, ...]:
        """The ways of weighting rows that are worth trying."""

    def fit(self, rows: Any, targets: Any, *, c: float, weights: Weights, seed: int) -> Any:
        """A fitted model."""

    def predict(self, model: Any, rows: Any, names: Sequence[str]) -> list[str]:
        """Its answers, as `Example.label` spells them."""


class OneLabelLinear:
    def targets(self, task: Task) -> Any:
        return RULES["classification"].targets([str(example.label) for example in task.train], task.labels, task.scale)[0]

    def strata(self, targets: Any) -> IntArray:
        strata: IntArray = targets
        return strata

    def weightings(self, targets: Any) -> tuple[Weights, ...]:
        sizes = Counter(targets.tolist()).values()
        return ("labels alike", "rows alike") if max(sizes) > _BALANCED_ABOVE * min(sizes) else ("rows alike",)

    def fit(self, rows: Any, targets: Any, *, c: float, weights: Weights, seed: int) -> Any:
        return fit_classifier(rows, targets, c=c, weights=weights, seed=seed)

    def predict(self, model: Any, rows: Any, names: Sequence[str]) -> list[str]:
        return [names[index] for index in model.predict(rows)]


class SeveralLabelsLinear:
    def targets(self, task: Task) -> Any:
        return RULES["multi-label"].targets([str(example.label) for example in task.train], task.labels, task.scale)[1]

    def strata(self, targets: Any) -> IntArray:
        return np.zeros(len(targets), dtype=np.int64)

    def weightings(self, targets: Any) -> tuple[Weights, ...]:
        return ("labels alike", "rows alike")  # a label of few texts is hardly ever said where rows count alike

    def fit(self, rows: Any, targets: Any, *, c: float, weights: Weights, seed: int) -> Any:
        """A model for each label, or its value where all rows agree."""
        fitted: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            for column in targets.T.astype(np.int64):
                agreed = column.min() == column.max()
                fitted.append(int(column[0]) if agreed else _logistic(c, weights, seed).fit(rows, column))
        return fitted

    def predict(self, model: Any, rows: Any, names: Sequence[str]) -> list[str]:
        chosen = np.zeros((rows.shape[0], len(names)), dtype=np.bool_)
        for column, each in enumerate(model):
            chosen[:, column] = each if isinstance(each, int) else each.decision_function(rows) > 0
        return [spell_labels([names[index] for index in np.flatnonzero(row).tolist()]) for row in chosen]


class NumberLinear:
    def targets(self, task: Task) -> Any:
        return np.array([float(str(example.label)) for example in task.train])

    def strata(self, targets: Any) -> IntArray:
        return np.zeros(len(targets), dtype=np.int64)

    def weightings(self, targets: Any) -> tuple[Weights, ...]:
        return ("rows alike",)

    def fit(self, rows: Any, targets: Any, *, c: float, weights: Weights, seed: int) -> Any:
        return Ridge(alpha=1 / c, solver="sparse_cg").fit(rows, targets)

    def predict(self, model: Any, rows: Any, names: Sequence[str]) -> list[str]:
        return [spell_number(number) for number in model.predict(rows)]


LINEAR: Final[dict[TaskKind, Linear]] = {
    "classification": OneLabelLinear(),
    "multi-label": SeveralLabelsLinear(),
    "regression": NumberLinear(),
}


def fit_classifier(rows: Any, labels: IntArray, *, c: float, weights: Weights, seed: int) -> OneVsRestClassifier:
    """Logistic regression, one per label, on TF-IDF rows (scipy CSR) and label ids."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a little early at large C is as good on dev
        return OneVsRestClassifier(_logistic(c, weights, seed)).fit(rows, labels)


def _logistic(c: float, weights: Weights, seed: int) -> LogisticRegression:
    balanced = {"rows alike": None, "labels alike": "balanced"}[weights]
    return LogisticRegression(
        solver="liblinear", dual=True, C=c, class_weight=balanced, tol=_TOLERANCE, max_iter=_PASSES, random_state=seed
    )
