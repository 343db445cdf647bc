"""L2-regularized linear models of each kind of task, and an exact change of coordinates that makes them cheap on few texts.

    classification    multinomial or one-vs-rest logistic regression; of two labels one-vs-rest alone, which is nearly the same
    multi-label       one binary logistic regression per label
    regression        ridge regression with alpha = 1 / C, so that C is the inverse regularization in all of them

Dense matrices are fitted by L-BFGS, one-vs-rest on sparse matrices by liblinear's dual coordinate descent. Multinomial regression is better
where labels have uneven sizes (SciERC, 100 training texts: macro-F1 28 and 19), one-vs-rest is faster on many short texts.
"""

from __future__ import annotations

import functools
import threading
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar, assert_never

import numpy as np
import numpy.typing as npt
import scipy  # its other modules are loaded where they are used, and scikit-learn in the functions that fit: a prediction needs neither
import scipy.sparse

from cramlm.data.labels import RULES
from cramlm.linear.files import ClassWeights, Scheme, Setting
from cramlm.records import BoolArray, FloatArray, IntArray, Task, TaskKind

UNEVEN: Final = 2.0
"""Balanced class weights are tried if the largest label has more than this many times the texts of the smallest."""
_ABSENT: Final = -30.0  # bias of a label without a training row: probability 1e-13
_LIBLINEAR: Final[dict[str, Any]] = {"solver": "liblinear", "dual": True, "tol": 0.1}
_LIBLINEAR_LOCK: Final = threading.Lock()
"""liblinear has one state of random numbers for all threads, and `catch_warnings` one list of filters."""
_PASSES: Final = (10, 60)  # of coordinate descent over a matrix: at least, at most
_MAX_VISITS: Final = 150_000_000  # entries that the passes over one matrix visit; large matrices need fewer passes for the same dev score
_LBFGS: Final[dict[str, Any]] = {"gtol": 1e-4, "maxiter": 40}  # more iterations do not change dev scores beyond noise
_JITTER: Final = 1e-5  # added to the diagonal of inner products of rows of length 1; ten times as much until it suffices
_DENSE_COLUMN: Final = 0.03  # share of the rows with an entry from which a column is multiplied as dense
_COLUMNS_AT_ONCE: Final = 2048
_LONG_FIT: Final = 100_000_000  # texts * features * labels: a fit of more takes seconds
MIN_THREADED_PRODUCTS: Final = 1_000_000
"""Texts * texts * labels of a fit in coordinates. Of smaller ones the interpreter, which runs one thread at a time, takes the most time."""


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def on_one_blas_thread(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Limit the matrix products of NumPy and SciPy to one thread while `function` runs.

    A search fits hundreds of models of a few hundred rows, whose products are too small to be shared: with 500 texts and two threads of
    OpenBLAS on two quiet cores it takes 17 to 20 times as long as with one (docs/log.md). The sums of a product, too, would depend on the
    number of cores.
    """

    @functools.wraps(function)
    def limited(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        import scipy.optimize  # noqa: F401 - the BLAS of SciPy is another than that of NumPy, and only a loaded one is limited
        from threadpoolctl import threadpool_limits

        with threadpool_limits(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


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
GoOn: TypeAlias = Callable[[], None]
"""As `Workers.go_on`: an error that it raises ends a fit."""
Loss: TypeAlias = Callable[[FloatArray], tuple[float, FloatArray]]
"""From scores (n, outputs) to their loss and its derivatives (n, outputs)."""


def keep_going() -> None:
    """Let a fit run to its end."""


@dataclass(frozen=True, slots=True)
class Solver(ABC):
    """Fits linear models for one kind of task. `targets` is an array with a row for each text.

    outputs: the number of labels. seed: of liblinear. go_on: called between the labels or iterations of a long fit.
    """

    outputs: int
    seed: int = 0
    go_on: GoOn = keep_going

    @abstractmethod
    def targets(self, task: Task) -> Any:
        """Return the targets of the training texts."""

    def strata(self, targets: Any) -> IntArray:
        """Return the stratum of each row, (n,): samples keep the proportions of the strata."""
        return np.zeros(len(targets), dtype=np.int64)

    @abstractmethod
    def labels(self, targets: Any) -> BoolArray | None:
        """Return which rows have which label, (n, outputs); None if targets are numbers."""

    @abstractmethod
    def schemes(self, targets: Any) -> tuple[tuple[Scheme, ClassWeights], ...]:
        """Return the candidates: schemes and class weights, in order."""

    @abstractmethod
    def fitter(self, rows: Any, targets: Any, setting: Setting, weights: FloatArray | None = None) -> Fitter:
        """Return a function from C to the model fitted on a matrix (n, features), dense or CSR. Each call starts from the last model.

        setting: its C is not read. weights: of the rows, (n,); None = 1.
        """

    def logits(self, scheme: Scheme, scores: FloatArray) -> FloatArray:
        """Convert decision values to logits as an encoder has them (evaluation/kinds.py), float32 (n, outputs)."""
        return scores

    @abstractmethod
    def predictable(self, fitted: Any, others: Any) -> BoolArray:
        """Where a model fitted on the targets `fitted` can predict the targets `others`, (others, outputs).

        Of a label without a row it knows nothing; its probability would contradict the texts that have it.
        """

    @abstractmethod
    def prior_odds(self, targets: Any, weights: FloatArray | None = None) -> npt.NDArray[np.float64]:
        """Return the share of each label, or, where a text may have several, its odds, 0 if all texts have it; (outputs,).

        The intercepts of a model with uniform class weights follow their logarithm. weights: of the texts, (n,); None = 1.
        """

    def _fitter_of_all(self, rows: Any, fit_some: Fitter, labels: IntArray, bias: FloatArray) -> Fitter:
        """Return a fitter of all labels from one of some labels. bias: of the others, on which all rows agree, (outputs,)."""

        def fit(c: float) -> Coefficients:
            fitted, some = Coefficients(np.zeros((rows.shape[1], self.outputs), np.float32), bias.copy()), fit_some(c)
            fitted.weights[:, labels], fitted.bias[labels] = some.weights, some.bias
            return fitted

        return fit

    def _binary_fitter(self, rows: Any, positive: BoolArray, class_weights: ClassWeights, weights: FloatArray) -> Fitter:
        """Return a function from C to a binary regression for each column of `positive`, (n, labels). weights: of the rows, (n,).

        liblinear fits a sparse matrix, one label after another. L-BFGS fits all labels of a dense matrix together, from the last
        coefficients, which takes a fifth of the time with 13 labels. Both regularize the intercept like a weight.
        """
        if scipy.sparse.issparse(rows):
            doubles = _with_columns(rows.astype(np.float64))  # liblinear's type; else scikit-learn converts once for each label

            def fit_one_by_one(c: float) -> Coefficients:
                fitted = _zeros(rows, positive.shape[1])
                for label in range(positive.shape[1]):
                    self.go_on()
                    model = self._liblinear(doubles, positive[:, label], c, class_weights, weights)
                    fitted.weights[:, label], fitted.bias[label] = model.coef_[0, : rows.shape[1]], model.intercept_[0]
                return fitted

            return fit_one_by_one

        row_weights = np.repeat(weights[:, None], positive.shape[1], axis=1)
        if class_weights == "balanced":
            count, total = weights.astype(np.float64) @ positive, weights.sum(dtype=np.float64)
            row_weights *= (total / (2 * np.where(positive, count, total - count))).astype(np.float32)
        loss, start = _log_losses(positive, row_weights), _zeros(rows, positive.shape[1])

        def fit_together(c: float) -> Coefficients:
            nonlocal start
            start = self._minimize(rows, loss, c, start, bias_penalty=1.0)
            return start

        return fit_together

    def _liblinear(self, rows: Any, positive: BoolArray, c: float, class_weights: ClassWeights, weights: FloatArray) -> Any:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        count, total = float(weights.astype(np.float64) @ positive), float(weights.sum(dtype=np.float64))
        balanced = {0: total / (2 * (total - count)), 1: total / (2 * count)} if class_weights == "balanced" else None
        passes = min(_PASSES[1], max(_PASSES[0], _MAX_VISITS // max(rows.nnz, 1)))
        model = LogisticRegression(C=c, class_weight=balanced, random_state=self.seed, max_iter=passes, **_LIBLINEAR)
        with _LIBLINEAR_LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # stopping a little early at large C is as good on dev
            return model.fit(rows, positive.astype(np.int64), sample_weight=weights)

    def _minimize(self, rows: FloatArray, loss: Loss, c: float, start: Coefficients, *, bias_penalty: float) -> Coefficients:
        """Minimize loss(scores) + (|weights|^2 + bias_penalty |bias|^2) / 2c from the coefficients `start`.

        In single precision: scikit-learn converts the matrix to double precision in every iteration, which takes three times as long.
        """
        (texts, features), outputs = rows.shape, len(start.bias)
        long = texts * features * outputs > _LONG_FIT
        penalties = np.repeat(np.array([1.0, bias_penalty]) / c, [features * outputs, outputs])

        def objective(values: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
            if long:
                self.go_on()
            weights = values[: features * outputs].reshape(features, outputs).astype(np.float32)
            value, slope = loss(rows @ weights + values[features * outputs :].astype(np.float32))
            shrinkage = penalties * values
            gradient = np.concatenate([(slope.T @ rows).T.ravel(), slope.sum(axis=0)]) + shrinkage  # faster than rows.T @ slope
            return (value + float(shrinkage @ values) / 2) / texts, gradient / texts

        first = np.concatenate([start.weights.ravel(), start.bias]).astype(np.float64)
        solution = scipy.optimize.minimize(objective, first, jac=True, method="L-BFGS-B", options=_LBFGS).x.astype(np.float32)
        return Coefficients(solution[: features * outputs].reshape(features, outputs), solution[features * outputs :])


class ClassificationSolver(Solver):
    def targets(self, task: Task) -> Any:
        return RULES["classification"].targets([str(example.label) for example in task.train], task.labels, task.scale)[0]

    def strata(self, targets: Any) -> IntArray:
        strata: IntArray = targets
        return strata

    def labels(self, targets: Any) -> BoolArray | None:
        labels: BoolArray = targets[:, None] == np.arange(self.outputs)
        return labels

    def schemes(self, targets: Any) -> tuple[tuple[Scheme, ClassWeights], ...]:
        sizes = Counter(targets.tolist()).values()
        weights: tuple[ClassWeights, ...] = ("balanced", "uniform") if max(sizes) > UNEVEN * min(sizes) else ("uniform",)
        names: tuple[Scheme, ...] = ("one-vs-rest",) if len(sizes) <= 2 else ("multinomial", "one-vs-rest")
        return tuple((scheme, each) for scheme in names for each in weights)

    def fitter(self, rows: Any, targets: Any, setting: Setting, weights: FloatArray | None = None) -> Fitter:
        present, ids = np.unique(targets, return_inverse=True)
        row_weights = np.ones(len(targets), np.float32) if weights is None else weights
        fit_present = self._fitter_of_present(rows, ids, len(present), setting, row_weights)
        return self._fitter_of_all(rows, fit_present, present, np.full(self.outputs, _ABSENT, np.float32))

    def _fitter_of_present(self, rows: Any, ids: IntArray, count: int, setting: Setting, weights: FloatArray) -> Fitter:
        """Return a fitter of the labels that have a row, 0 to `count` - 1."""
        if count == 1:
            return lambda c: _zeros(rows, 1)
        match setting.scheme:
            case "multinomial":
                return self._multinomial_fitter(rows, ids, setting.class_weights, weights)
            case "one-vs-rest" if count == 2:  # one vector
                fit_second = self._binary_fitter(rows, ids[:, None] == 1, setting.class_weights, weights)

                def fit_both(c: float) -> Coefficients:
                    second = fit_second(c)
                    return Coefficients(np.hstack([-second.weights, second.weights]), np.hstack([-second.bias, second.bias]))

                return fit_both
            case "one-vs-rest":
                return self._binary_fitter(rows, ids[:, None] == np.arange(count), setting.class_weights, weights)
            case "ridge":
                raise AssertionError("ridge regression is for numbers")
            case _:
                assert_never(setting.scheme)

    def _multinomial_fitter(self, rows: Any, ids: IntArray, class_weights: ClassWeights, weights: FloatArray) -> Fitter:
        """Return a function from C to a multinomial regression of the labels 0, 1, ..., fitted from the last coefficients.

        ids: (n,). weights: of the rows, (n,).
        """
        sizes = np.bincount(ids, weights=weights)
        if class_weights == "balanced":
            weights = (weights * (sizes.sum() / (len(sizes) * sizes[ids]))).astype(np.float32)
        loss, start = _cross_entropy(ids, weights), _zeros(rows, len(sizes))

        def fit(c: float) -> Coefficients:
            nonlocal start
            start = self._minimize(rows, loss, c, start, bias_penalty=0.0)
            return start

        return fit

    def logits(self, scheme: Scheme, scores: FloatArray) -> FloatArray:
        values = scores.astype(np.float64)
        if scheme == "one-vs-rest":
            values = -np.logaddexp(0, -values)  # log of each label's own probability, normalized below as scikit-learn does
        values -= np.logaddexp.reduce(values, axis=1, keepdims=True)
        logits: FloatArray = values.astype(np.float32)
        return logits

    def predictable(self, fitted: Any, others: Any) -> BoolArray:
        present = np.bincount(fitted, minlength=self.outputs) > 0
        own = present[others] & (present.sum() > 1)
        return np.repeat(own[:, None], self.outputs, axis=1)

    def prior_odds(self, targets: Any, weights: FloatArray | None = None) -> npt.NDArray[np.float64]:
        counts = np.bincount(targets, weights, minlength=self.outputs)
        shares: npt.NDArray[np.float64] = counts / counts.sum()
        return shares


class MultiLabelSolver(Solver):
    def targets(self, task: Task) -> Any:
        return RULES["multi-label"].targets([str(example.label) for example in task.train], task.labels, task.scale)[1]

    def labels(self, targets: Any) -> BoolArray | None:
        labels: BoolArray = targets > 0
        return labels

    def schemes(self, targets: Any) -> tuple[tuple[Scheme, ClassWeights], ...]:
        return (("one-vs-rest", "balanced"), ("one-vs-rest", "uniform"))  # with uniform weights rare labels are hardly ever predicted

    def fitter(self, rows: Any, targets: Any, setting: Setting, weights: FloatArray | None = None) -> Fitter:
        positive = targets > 0
        varied = np.flatnonzero(positive.any(axis=0) & ~positive.all(axis=0))
        row_weights = np.ones(len(targets), np.float32) if weights is None else weights
        fit_varied = (
            self._binary_fitter(rows, positive[:, varied], setting.class_weights, row_weights) if len(varied) else lambda c: _zeros(rows, 0)
        )
        return self._fitter_of_all(rows, fit_varied, varied, np.where(positive.all(axis=0), -_ABSENT, _ABSENT).astype(np.float32))

    def predictable(self, fitted: Any, others: Any) -> BoolArray:
        varied = (fitted > 0).any(axis=0) & (fitted == 0).any(axis=0)
        return np.repeat(varied[None], len(others), axis=0)

    def prior_odds(self, targets: Any, weights: FloatArray | None = None) -> npt.NDArray[np.float64]:
        row_weights = np.ones(len(targets)) if weights is None else weights
        have, lack = row_weights @ (targets > 0), row_weights @ (targets == 0)
        odds: npt.NDArray[np.float64] = np.divide(have, lack, out=np.zeros(self.outputs), where=lack > 0)
        return odds


class RegressionSolver(Solver):
    def targets(self, task: Task) -> Any:
        return np.array([float(str(example.label)) for example in task.train])

    def labels(self, targets: Any) -> BoolArray | None:
        return None

    def schemes(self, targets: Any) -> tuple[tuple[Scheme, ClassWeights], ...]:
        return (("ridge", "uniform"),)

    def fitter(self, rows: Any, targets: Any, setting: Setting, weights: FloatArray | None = None) -> Fitter:
        from sklearn.linear_model import Ridge

        solver = "sparse_cg" if scipy.sparse.issparse(rows) else "cholesky"

        def fit(c: float) -> Coefficients:
            model = Ridge(alpha=1 / c, solver=solver).fit(_with_columns(rows), targets, sample_weight=weights)
            fitted = model.coef_.reshape(-1, 1)[: rows.shape[1]].astype(np.float32)
            return Coefficients(fitted, np.array([model.intercept_], dtype=np.float32))

        return fit

    def predictable(self, fitted: Any, others: Any) -> BoolArray:
        return np.full((len(others), self.outputs), len(fitted) > 1)

    def prior_odds(self, targets: Any, weights: FloatArray | None = None) -> npt.NDArray[np.float64]:
        return np.ones(self.outputs)


SOLVERS: Final[Mapping[TaskKind, Callable[..., Solver]]] = {
    "classification": ClassificationSolver,
    "multi-label": MultiLabelSolver,
    "regression": RegressionSolver,
}


def solver_of(task: Task, *, seed: int = 0, go_on: GoOn = keep_going) -> Solver:
    """Return the solver of a task."""
    return SOLVERS[task.kind](len(task.labels), seed, go_on)


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
        """Return the coordinates for inner products of the training rows, (n, n), whose diagonal is overwritten."""
        jitter, indices = _JITTER, np.diag_indices_from(gram)
        diagonal = gram[indices].copy()
        while True:
            gram[indices] = diagonal + jitter  # repeated texts make the matrix singular; its rounding errors grow with the number of texts
            try:
                return cls(np.ascontiguousarray(scipy.linalg.cholesky(gram, lower=True, check_finite=False)))
            except np.linalg.LinAlgError:
                if jitter >= 1:  # far above the rounding errors of any number of texts that fits in memory
                    raise
                jitter *= 10

    def transform(self, products: FloatArray) -> FloatArray:
        """Coordinates of other texts from their inner products with the training rows, (m, n) -> (m, n)."""
        solved = scipy.linalg.solve_triangular(self.rows, products.T, lower=True, check_finite=False)
        coordinates: FloatArray = np.ascontiguousarray(solved.T)
        return coordinates

    def restore(self, fitted: Coefficients, *train: Any) -> Coefficients:
        """Convert a model fitted on `rows` to one of the features of the training rows.

        train: their matrices (n, features), CSR or dense, which are side by side.
        """
        combined = scipy.linalg.solve_triangular(self.rows, fitted.weights, lower=True, trans="T", check_finite=False)
        weights = np.concatenate([np.asarray(part.T @ combined, dtype=np.float32) for part in train])
        return Coefficients(weights, fitted.bias)


def worthwhile_threads(threads: int, *, texts: int, labels: int) -> int:
    """Return `threads`, or 1 if fits of so many texts and labels are too small for several threads."""
    return threads if texts**2 * labels >= MIN_THREADED_PRODUCTS else 1


def inner_products(one: Any, other: Any) -> FloatArray:
    """Inner products of the rows of two CSR matrices with the same columns, dense float32 (rows of one, rows of the other).

    Columns with many entries are multiplied as dense matrices: a sparse product takes time with the square of a column's length.
    """
    counts = np.bincount(other.indices, minlength=other.shape[1])
    frequent = np.flatnonzero(counts > _DENSE_COLUMN * other.shape[0])
    products: FloatArray = np.zeros((one.shape[0], other.shape[0]), dtype=np.float32)
    for start in range(0, len(frequent), _COLUMNS_AT_ONCE):
        columns = frequent[start : start + _COLUMNS_AT_ONCE]
        right = other[:, columns].toarray()
        products += (right if one is other else one[:, columns].toarray()) @ right.T  # NumPy computes half of a matrix times its transpose
    rare = np.flatnonzero(counts <= _DENSE_COLUMN * other.shape[0])
    products += (one[:, rare] @ other[:, rare].T).toarray()
    return products


def _cross_entropy(ids: IntArray, row_weights: FloatArray) -> Loss:
    """Return the weighted cross-entropy of scores (n, labels), summed over rows. ids: the column of each row's label; row_weights: (n,)."""
    indices = np.arange(len(ids))

    def loss(scores: FloatArray) -> tuple[float, FloatArray]:
        below_largest = scores - scores.max(axis=1, keepdims=True)
        odds = np.exp(below_largest)
        sums = odds.sum(axis=1)
        value = float((row_weights * (np.log(sums) - below_largest[indices, ids])).sum(dtype=np.float64))
        slope = odds * (row_weights / sums)[:, None]
        slope[indices, ids] -= row_weights
        return value, slope

    return loss


def _log_losses(positive: BoolArray, row_weights: FloatArray) -> Loss:
    """Return the weighted log loss of scores (n, labels), summed over rows and labels; both arrays are (n, labels)."""
    signs = np.where(positive, np.float32(1), np.float32(-1))

    def loss(scores: FloatArray) -> tuple[float, FloatArray]:
        margins = signs * scores
        odds = np.exp(-np.abs(margins))
        value = float((row_weights * (np.log1p(odds) - np.minimum(margins, 0))).sum(dtype=np.float64))
        return value, -signs * row_weights * np.where(margins > 0, odds, 1) / (1 + odds)

    return loss


def _zeros(rows: Any, outputs: int) -> Coefficients:
    return Coefficients(np.zeros((rows.shape[1], outputs), np.float32), np.zeros(outputs, np.float32))


def _with_columns(rows: Any) -> Any:
    """Return the matrix, or one column of zeros if it has none, which scikit-learn refuses."""
    if rows.shape[1]:
        return rows
    return scipy.sparse.csr_matrix((rows.shape[0], 1)) if scipy.sparse.issparse(rows) else np.zeros((rows.shape[0], 1), dtype=np.float32)
