"""L2-regularized linear models of each kind of task, and an exact change of coordinates that makes them cheap on few texts.

    classification    multinomial logistic regression (L-BFGS), or one-vs-rest (liblinear's dual coordinate descent)
    multi-label       one binary logistic regression per label
    regression        ridge regression with alpha = 1 / C, so that C is the inverse regularization in all of them

Multinomial regression is better where labels have uneven sizes (SciERC, 100 training texts: macro-F1 28 and 19), one-vs-rest is two to four
times faster on many texts.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt
import scipy  # its other modules are loaded where they are used, and scikit-learn in the functions that fit: a prediction needs neither
import scipy.sparse

from cramlm.data.labels import RULES
from cramlm.linear.settings import ClassWeights, Scheme
from cramlm.records import FloatArray, IntArray, Task, TaskKind

UNEVEN: Final = 2.0
"""Balanced class weights are tried if the largest label has more than this many times the texts of the smallest."""
_ABSENT: Final = -30.0  # bias of a label without a training row: probability 1e-13
_LIBLINEAR: Final[dict[str, Any]] = {"solver": "liblinear", "dual": True, "tol": 0.1, "max_iter": 60}
_LBFGS: Final[dict[str, Any]] = {"gtol": 1e-4, "maxiter": 40}  # more iterations do not change dev scores beyond noise
_JITTER: Final = 1e-5  # added to the diagonal of inner products of rows of length 1
_DENSE_COLUMN: Final = 0.03  # share of the rows with an entry from which a column is multiplied as dense
_COLUMNS_AT_ONCE: Final = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Coefficients:
    """weights: float32 (features, outputs). bias: float32 (outputs,)."""

    weights: FloatArray
    bias: FloatArray

    def scores(self, rows: Any) -> FloatArray:
        """Decision values (rows, outputs) of a matrix (rows, features), dense or CSR."""
        values: FloatArray = np.asarray(rows @ self.weights, dtype=np.float32) + self.bias
        return values


Fitter: TypeAlias = Callable[[float], Coefficients]


class Solver(Protocol):
    """Fits linear models for one kind of task. `targets` is an array with a row for each text."""

    def targets(self, task: Task) -> Any:
        """The targets of the training texts."""

    def strata(self, targets: Any) -> IntArray:
        """The stratum of each row, (n,): samples keep the proportions of the strata."""

    def schemes(self, targets: Any) -> tuple[tuple[Scheme, ClassWeights], ...]:
        """The candidates: schemes and class weights, in order."""

    def fitter(self, rows: Any, targets: Any, scheme: Scheme, class_weights: ClassWeights, *, outputs: int, seed: int) -> Fitter:
        """Return a function from C to the model fitted on a matrix (n, features), dense or CSR. Each call starts from the last model."""

    def logits(self, scheme: Scheme, scores: FloatArray) -> FloatArray:
        """Convert decision values to logits as an encoder has them (evaluation/kinds.py), float32 (n, outputs)."""


class ClassificationSolver:
    def targets(self, task: Task) -> Any:
        return RULES["classification"].targets([str(example.label) for example in task.train], task.labels, task.scale)[0]

    def strata(self, targets: Any) -> IntArray:
        strata: IntArray = targets
        return strata

    def schemes(self, targets: Any) -> tuple[tuple[Scheme, ClassWeights], ...]:
        sizes = Counter(targets.tolist()).values()
        weights: tuple[ClassWeights, ...] = ("balanced", "uniform") if max(sizes) > UNEVEN * min(sizes) else ("uniform",)
        names: tuple[Scheme, ...] = ("multinomial", "one-vs-rest")
        return tuple((scheme, each) for scheme in names for each in weights)

    def fitter(self, rows: Any, targets: Any, scheme: Scheme, class_weights: ClassWeights, *, outputs: int, seed: int) -> Fitter:
        present = np.unique(targets)
        several = len(present) > 2  # of two labels one-vs-rest fits one vector
        ids = np.searchsorted(present, targets)
        sizes = np.bincount(ids)
        uniform = class_weights == "uniform"
        row_weights = np.ones(len(ids), np.float32) if uniform else (len(ids) / (len(sizes) * sizes[ids])).astype(np.float32)
        start = Coefficients(np.zeros((rows.shape[1], len(present)), np.float32), np.zeros(len(present), np.float32))

        def absent() -> Coefficients:
            return Coefficients(np.zeros((rows.shape[1], outputs), np.float32), np.full(outputs, _ABSENT, np.float32))

        def constant(c: float) -> Coefficients:
            fitted = absent()
            fitted.bias[present] = 0.0
            return fitted

        def one_vs_rest(c: float) -> Coefficients:
            fitted = absent()
            for label in present if several else present[1:]:
                fitted.weights[:, label], fitted.bias[label] = _binary(rows, targets == label, c, class_weights, seed)
            if not several:
                fitted.weights[:, present[0]], fitted.bias[present[0]] = -fitted.weights[:, present[1]], -fitted.bias[present[1]]
            return fitted

        def multinomial(c: float) -> Coefficients:
            nonlocal start
            start = _multinomial(rows, ids, row_weights, c, start)
            fitted = absent()
            fitted.weights[:, present], fitted.bias[present] = start.weights, start.bias
            return fitted

        if len(present) == 1:
            return constant
        match scheme:
            case "multinomial":
                return multinomial
            case "one-vs-rest":
                return one_vs_rest
            case "ridge":
                raise AssertionError("ridge regression is for numbers")
            case _:
                assert_never(scheme)

    def logits(self, scheme: Scheme, scores: FloatArray) -> FloatArray:
        values = scores.astype(np.float64)
        if scheme == "one-vs-rest":
            values = -np.logaddexp(0, -values)  # log of each label's own probability, normalized below as scikit-learn does
        values -= np.logaddexp.reduce(values, axis=1, keepdims=True)
        logits: FloatArray = values.astype(np.float32)
        return logits


class MultiLabelSolver:
    def targets(self, task: Task) -> Any:
        return RULES["multi-label"].targets([str(example.label) for example in task.train], task.labels, task.scale)[1]

    def strata(self, targets: Any) -> IntArray:
        return np.zeros(len(targets), dtype=np.int64)

    def schemes(self, targets: Any) -> tuple[tuple[Scheme, ClassWeights], ...]:
        return (("one-vs-rest", "balanced"), ("one-vs-rest", "uniform"))  # with uniform weights rare labels are hardly ever predicted

    def fitter(self, rows: Any, targets: Any, scheme: Scheme, class_weights: ClassWeights, *, outputs: int, seed: int) -> Fitter:
        def fit(c: float) -> Coefficients:
            fitted = Coefficients(np.zeros((rows.shape[1], outputs), np.float32), np.zeros(outputs, np.float32))
            for label in range(outputs):
                positive = targets[:, label] > 0
                if positive.all() or not positive.any():  # all rows agree
                    fitted.bias[label] = -_ABSENT if positive.all() else _ABSENT
                else:
                    fitted.weights[:, label], fitted.bias[label] = _binary(rows, positive, c, class_weights, seed)
            return fitted

        return fit

    def logits(self, scheme: Scheme, scores: FloatArray) -> FloatArray:
        return scores


class RegressionSolver:
    def targets(self, task: Task) -> Any:
        return np.array([float(str(example.label)) for example in task.train])

    def strata(self, targets: Any) -> IntArray:
        return np.zeros(len(targets), dtype=np.int64)

    def schemes(self, targets: Any) -> tuple[tuple[Scheme, ClassWeights], ...]:
        return (("ridge", "uniform"),)

    def fitter(self, rows: Any, targets: Any, scheme: Scheme, class_weights: ClassWeights, *, outputs: int, seed: int) -> Fitter:
        from sklearn.linear_model import Ridge

        solver = "sparse_cg" if scipy.sparse.issparse(rows) else "cholesky"

        def fit(c: float) -> Coefficients:
            model = Ridge(alpha=1 / c, solver=solver).fit(_with_columns(rows), targets)
            weights = model.coef_.reshape(-1, 1)[: rows.shape[1]].astype(np.float32)
            return Coefficients(weights, np.array([model.intercept_], dtype=np.float32))

        return fit

    def logits(self, scheme: Scheme, scores: FloatArray) -> FloatArray:
        return scores


SOLVERS: Final[dict[TaskKind, Solver]] = {
    "classification": ClassificationSolver(),
    "multi-label": MultiLabelSolver(),
    "regression": RegressionSolver(),
}


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """Training rows in coordinates of the space that they span.

    An L2-regularized linear model is a combination of its training rows (representer theorem), so that fitting in the coordinates of an
    orthonormal basis of their span gives the same model with n columns instead of hundreds of thousands. The coordinates are the Cholesky
    factor of the matrix of inner products. rows: float32 (n, n), lower triangular.
    """

    rows: FloatArray

    @classmethod
    def of(cls, gram: FloatArray) -> Coordinates:
        """From the inner products of the training rows, (n, n), which are overwritten."""
        gram[np.diag_indices_from(gram)] += _JITTER  # repeated texts make the matrix singular
        return cls(np.ascontiguousarray(scipy.linalg.cholesky(gram, lower=True, overwrite_a=True, check_finite=False)))

    def transform(self, products: FloatArray) -> FloatArray:
        """Coordinates of other texts from their inner products with the training rows, (m, n) -> (m, n)."""
        solved = scipy.linalg.solve_triangular(self.rows, products.T, lower=True, check_finite=False)
        coordinates: FloatArray = np.ascontiguousarray(solved.T)
        return coordinates

    def restore(self, fitted: Coefficients, train: Any) -> Coefficients:
        """Convert a model fitted on `rows` to one of the features of `train`, CSR (n, features)."""
        combined = scipy.linalg.solve_triangular(self.rows, fitted.weights, lower=True, trans="T", check_finite=False)
        return Coefficients(np.asarray(train.T @ combined, dtype=np.float32), fitted.bias)


def inner_products(one: Any, other: Any) -> FloatArray:
    """Inner products of the rows of two CSR matrices with the same columns, dense float32 (rows of one, rows of the other).

    Columns with many entries are multiplied as dense matrices: a sparse product takes time with the square of a column's length.
    """
    counts = np.bincount(other.indices, minlength=other.shape[1])
    frequent = np.flatnonzero(counts > _DENSE_COLUMN * other.shape[0])
    products: FloatArray = np.zeros((one.shape[0], other.shape[0]), dtype=np.float32)
    for start in range(0, len(frequent), _COLUMNS_AT_ONCE):
        columns = frequent[start : start + _COLUMNS_AT_ONCE]
        products += one[:, columns].toarray() @ other[:, columns].toarray().T
    rare = np.flatnonzero(counts <= _DENSE_COLUMN * other.shape[0])
    products += (one[:, rare] @ other[:, rare].T).toarray()
    return products


def _multinomial(rows: FloatArray, ids: IntArray, row_weights: FloatArray, c: float, start: Coefficients) -> Coefficients:
    """Minimize the weighted cross-entropy + |weights|^2 / 2c, as scikit-learn's LogisticRegression does, from the coefficients `start`.

    In single precision: scikit-learn converts the matrix to double precision in every iteration, which takes three times as long.
    """
    texts, features = rows.shape
    labels = len(start.bias)
    total, indices = float(row_weights.sum()), np.arange(texts)

    def objective(values: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        weights = values[: features * labels].reshape(features, labels).astype(np.float32)
        scores = rows @ weights + values[features * labels :].astype(np.float32)
        scores -= scores.max(axis=1, keepdims=True)
        odds = np.exp(scores)
        sums = odds.sum(axis=1)
        loss = float((row_weights * (np.log(sums) - scores[indices, ids])).sum(dtype=np.float64))
        loss += float(np.square(weights, dtype=np.float64).sum()) / (2 * c)
        slope = odds * (row_weights / sums)[:, None]
        slope[indices, ids] -= row_weights
        gradient = np.concatenate([(rows.T @ slope + weights / c).ravel(), slope.sum(axis=0)])
        return loss / total, gradient.astype(np.float64) / total

    first = np.concatenate([start.weights.ravel(), start.bias]).astype(np.float64)
    solution = scipy.optimize.minimize(objective, first, jac=True, method="L-BFGS-B", options=_LBFGS).x.astype(np.float32)
    return Coefficients(solution[: features * labels].reshape(features, labels), solution[features * labels :])


def _binary(rows: Any, positive: Any, c: float, class_weights: ClassWeights, seed: int) -> tuple[FloatArray, float]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    balanced = "balanced" if class_weights == "balanced" else None
    model = LogisticRegression(C=c, class_weight=balanced, random_state=seed, **_LIBLINEAR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # stopping a little early at large C is as good on dev
        model.fit(_with_columns(rows), positive.astype(np.int64))
    return model.coef_[0, : rows.shape[1]].astype(np.float32), float(model.intercept_[0])


def _with_columns(rows: Any) -> Any:
    """The matrix, or one column of zeros if it has none, which scikit-learn refuses."""
    return rows if rows.shape[1] else np.zeros((rows.shape[0], 1), dtype=np.float32)
