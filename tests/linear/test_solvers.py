"""Solvers, compared with scikit-learn's and with plain products of matrices."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier

from cramlm.linear import solvers
from cramlm.linear.features import unit_rows
from cramlm.linear.files import ClassWeights, Scheme, Setting
from cramlm.linear.solvers import SOLVERS, Coefficients, Coordinates, inner_products, solver_of
from cramlm.records import Example, IntArray, Task, TaskKind


def problem(labels: int, texts: int = 120, features: int = 60, seed: int = 1) -> tuple[Any, IntArray, Any]:
    """Sparse rows of length 1 whose columns depend on the label, uneven labels, and rows of other texts."""
    random = np.random.default_rng(seed)
    shares = np.arange(1, labels + 1, dtype=np.float64) ** 1.5
    targets = np.concatenate([np.arange(labels), random.choice(labels, texts - labels, p=shares / shares.sum())])
    informative = random.random((texts, features)) < np.where(np.arange(features) % labels == targets[:, None], 0.25, 0.08)
    rows = scipy.sparse.csr_matrix(informative * random.uniform(0.5, 2, (texts, features)), dtype=np.float32)
    other = scipy.sparse.csr_matrix((random.random((50, features)) < 0.12) * random.random((50, features)), dtype=np.float32)
    return unit_rows(rows), targets, unit_rows(other)


def fitted(rows: Any, targets: IntArray, scheme: Scheme, weights: ClassWeights, c: float, outputs: int) -> Coefficients:
    return SOLVERS["classification"](outputs).fitter(rows, targets, Setting(scheme, weights, c))(c)


def centred(coefficients: Coefficients) -> tuple[Any, Any]:
    """A multinomial model is unchanged by what is added to all labels."""
    return (coefficients.weights - coefficients.weights.mean(axis=1, keepdims=True), coefficients.bias - coefficients.bias.mean())


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solvers that go on until nothing changes."""
    monkeypatch.setattr(solvers, "_LBFGS", {"gtol": 1e-7, "maxiter": 2000})
    monkeypatch.setattr(solvers, "_LIBLINEAR", {**solvers._LIBLINEAR, "tol": 1e-6})
    monkeypatch.setattr(solvers, "_PASSES", (20_000, 20_000))
    monkeypatch.setattr(solvers, "_JITTER", 1e-7)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("labels", "weights", "warm"), [(2, "uniform", False), (2, "balanced", True), (5, "uniform", True), (5, "balanced", False)]
)
def test_multinomial_regression_equals_scikit_learns(labels: int, weights: ClassWeights, warm: bool) -> None:
    rows, targets, other = problem(labels)
    fit = SOLVERS["classification"](labels).fitter(rows, targets, Setting("multinomial", weights, 3.0))
    for c in (0.3, 1.0) if warm else ():
        fit(c)
    ours = fit(3.0)
    theirs = LogisticRegression(C=3.0, class_weight=None if weights == "uniform" else weights, tol=1e-8, max_iter=5000)
    theirs.fit(rows.astype(np.float64), targets)
    if labels == 2:  # scikit-learn fits one vector: half of the difference of ours, whose penalty is twice as large
        half = LogisticRegression(C=6.0, class_weight=None if weights == "uniform" else weights, tol=1e-8, max_iter=5000)
        half.fit(rows.astype(np.float64), targets)
        expected = np.stack([-half.coef_[0], half.coef_[0]], axis=1) / 2, np.array([-1, 1]) * half.intercept_[0] / 2
    else:
        expected = theirs.coef_.T, theirs.intercept_ - theirs.intercept_.mean()
    for found, wanted in zip(centred(ours), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-2)
    scores = other @ expected[0] + expected[1]
    assert (ours.scores(other).argmax(axis=1) == scores.argmax(axis=1)).all()


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("weights", ["uniform", "balanced"])
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_one_vs_rest_equals_scikit_learns(form: str, weights: ClassWeights) -> None:
    rows, targets, other = problem(4)
    options: dict[str, Any] = {"C": 3.0, "solver": "liblinear", "class_weight": None if weights == "uniform" else weights}
    theirs = OneVsRestClassifier(LogisticRegression(**options, tol=1e-8, max_iter=10_000)).fit(rows.astype(np.float64), targets)
    ours = fitted(rows if form == "sparse" else rows.toarray(), targets, "one-vs-rest", weights, 3.0, 4)
    for label, model in enumerate(theirs.estimators_):
        np.testing.assert_allclose(ours.weights[:, label], model.coef_[0], atol=1e-2)
        assert ours.bias[label] == pytest.approx(model.intercept_[0], abs=1e-2)
    solver = SOLVERS["classification"](4)
    np.testing.assert_allclose(
        np.exp(solver.logits("one-vs-rest", ours.scores(other))), theirs.predict_proba(other.astype(np.float64)), atol=5e-3
    )


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("scheme", ["multinomial", "one-vs-rest"])
@pytest.mark.parametrize("labels", [2, 5])
def test_coordinates_of_the_rows_give_the_model_of_the_features(scheme: Scheme, labels: int) -> None:
    rows, targets, other = problem(labels, texts=70, features=300, seed=2)
    coordinates = Coordinates.of(inner_products(rows, rows))
    reduced = fitted(coordinates.rows, targets, scheme, "balanced", 3.0, labels)
    plain = fitted(rows, targets, scheme, "balanced", 3.0, labels)
    restored = coordinates.restore(reduced, rows)
    np.testing.assert_allclose(restored.weights, plain.weights, atol=1e-2)
    np.testing.assert_allclose(restored.bias, plain.bias, atol=1e-2)
    there = reduced.scores(coordinates.transform(inner_products(other, rows)))
    np.testing.assert_allclose(there, plain.scores(other), atol=1e-2)
    np.testing.assert_allclose(there, restored.scores(other), atol=1e-3)


def test_repeated_rows_have_coordinates() -> None:
    rows, _, other = problem(3, texts=20)
    twice = scipy.sparse.vstack([rows, rows], format="csr")
    coordinates = Coordinates.of(inner_products(twice, twice))
    found = coordinates.transform(inner_products(other, twice))
    np.testing.assert_allclose(coordinates.rows @ coordinates.rows.T, (twice @ twice.T).toarray(), atol=1e-4)
    np.testing.assert_allclose(found @ coordinates.rows.T, (other @ twice.T).toarray(), atol=1e-3)


def test_rows_whose_inner_products_have_rounding_errors_above_the_first_jitter_have_coordinates() -> None:
    random = np.random.default_rng(5)
    errors = random.choice(np.array([-3e-5, 3e-5]), (60, 60))
    products = (1 + errors + errors.T).astype(np.float32)  # of 60 equal rows
    assert np.linalg.eigvalsh(products.astype(np.float64)).min() < -10 * solvers._JITTER, "the first attempts fail"
    rows = Coordinates.of(products.copy()).rows
    np.testing.assert_allclose(rows @ rows.T, products + 1e-3 * np.eye(60), atol=1e-5)
    assert (np.triu(rows, 1) == 0).all()


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 30), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.integers(0, 99))
def test_inner_products_equal_the_plain_product(one: int, other: int, columns: int, density: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    # One column in three is full: dense and sparse columns, none and all of them.
    share = np.where(np.arange(columns) % 3 == 0, 1.0, density)
    left, right = (
        scipy.sparse.csr_matrix(random.standard_normal((rows, columns)) * (random.random((rows, columns)) < share), dtype=np.float32)
        for rows in (one, other)
    )
    np.testing.assert_allclose(inner_products(left, right), left.toarray() @ right.toarray().T, rtol=1e-4, atol=1e-4)


def test_more_dense_columns_than_are_multiplied_at_once_are_all_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "_COLUMNS_AT_ONCE", 2)
    values = np.random.default_rng(0).standard_normal((6, 7)).astype(np.float32)
    matrix = scipy.sparse.csr_matrix(values)
    np.testing.assert_allclose(inner_products(matrix, matrix), values @ values.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["multinomial", "one-vs-rest"])
def test_a_label_without_a_row_is_never_predicted_and_a_single_label_always(scheme: Scheme) -> None:
    rows, _, other = problem(3)
    targets = np.where(np.arange(rows.shape[0]) % 2, 0, 2)
    solver = SOLVERS["classification"](3)
    logits = solver.logits(scheme, fitted(rows, targets, scheme, "uniform", 1.0, 3).scores(other))
    assert np.exp(logits[:, 1]).max() < 1e-10
    np.testing.assert_allclose(np.exp(logits).sum(axis=1), 1, rtol=1e-5)
    alone = solver.logits(scheme, fitted(rows, np.ones_like(targets), scheme, "uniform", 1.0, 3).scores(other))
    assert (alone.argmax(axis=1) == 1).all()


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("classification", "multinomial"), ("classification", "one-vs-rest"), ("multi-label", "one-vs-rest"), ("regression", "ridge")],
)
def test_rows_without_columns_give_a_model_of_the_frequencies(kind: TaskKind, scheme: Scheme) -> None:
    rows, ids = scipy.sparse.csr_matrix((40, 0), dtype=np.float32), np.where(np.arange(40) < 30, 1, 0)
    targets = {"classification": ids, "multi-label": np.stack([1 - ids, ids], axis=1), "regression": ids * 8.0}[kind]
    outputs = 1 if kind == "regression" else 2
    coefficients = SOLVERS[kind](outputs).fitter(rows, targets, Setting(scheme, "uniform", 10.0))(10.0)
    assert coefficients.weights.shape == (0, outputs)
    scores = coefficients.scores(scipy.sparse.csr_matrix((3, 0), dtype=np.float32))
    if kind == "regression":
        np.testing.assert_allclose(scores, 6.0)
    else:
        assert (scores[:, 1] > 0).all()
        assert (scores[:, 0] < 0).all()


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_a_label_of_all_texts_or_of_none_is_a_constant_in_a_multi_label_model(form: str) -> None:
    rows, targets, other = problem(3)
    rows = rows if form == "sparse" else rows.toarray()
    setting = Setting("one-vs-rest", "balanced", 1.0)
    constant = SOLVERS["multi-label"](2).fitter(rows, np.ones((rows.shape[0], 2)), setting)(1.0)
    assert (constant.scores(other) > 20).all()
    sets = np.zeros((rows.shape[0], 3))
    sets[:, 0], sets[:, 1] = 1, targets == 1
    scores = SOLVERS["multi-label"](3).fitter(rows, sets, setting)(1.0).scores(other)
    assert (scores[:, 0] > 20).all()
    assert (scores[:, 2] < -20).all()
    assert 0 < (scores[:, 1] > 0).mean() < 1


@pytest.mark.parametrize("form", ["sparse", "dense", "coordinates"])
def test_a_regression_of_numbers_equals_scikit_learns_ridge(form: str) -> None:
    rows, _, other = problem(3, texts=60, features=300)
    numbers = 2000 + 30 * rows.toarray()[:, 0] - 20 * rows.toarray()[:, 1]
    coordinates = Coordinates.of(inner_products(rows, rows))
    given = {"sparse": rows, "dense": rows.toarray(), "coordinates": coordinates.rows}[form]
    ours = SOLVERS["regression"](1).fitter(given, numbers, Setting("ridge", "uniform", 10.0))(10.0)
    if form == "coordinates":
        ours = coordinates.restore(ours, rows)
    theirs = Ridge(alpha=0.1, solver="cholesky").fit(rows.toarray().astype(np.float64), numbers)
    np.testing.assert_allclose(ours.scores(other)[:, 0], theirs.predict(other.toarray()), rtol=1e-3)


def test_balanced_weights_are_tried_where_labels_are_uneven() -> None:
    assert {weights for _, weights in schemes((10, 20))} == {"uniform"}
    assert {weights for _, weights in schemes((10, 21))} == {"uniform", "balanced"}
    assert {weights for _, weights in schemes((10, 15, 1))} == {"uniform", "balanced"}


def test_of_two_labels_one_regression_is_tried_since_both_schemes_give_the_same() -> None:
    assert {scheme for scheme, _ in schemes((10, 12))} == {"one-vs-rest"}
    assert {scheme for scheme, _ in schemes((10, 12, 11))} == {"multinomial", "one-vs-rest"}
    rows, targets, other = problem(2)
    solver, half = SOLVERS["classification"](2), fitted(rows.toarray(), targets, "multinomial", "uniform", 5.0, 2)
    one = solver.logits("one-vs-rest", fitted(rows.toarray(), targets, "one-vs-rest", "uniform", 10.0, 2).scores(other))
    np.testing.assert_allclose(np.exp(solver.logits("multinomial", half.scores(other))), np.exp(one), atol=0.05)


def schemes(sizes: tuple[int, ...]) -> set[tuple[str, str]]:
    """What is tried with labels of these sizes."""
    names = ("a", "b", "c")[: len(sizes)]
    rows = tuple(Example(name, name, None, name) for name, size in zip(names, sizes, strict=True) for _ in range(size))
    task = Task(rows, rows, (), names, False)
    return set(solver_of(task).schemes(solver_of(task).targets(task)))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("weights", ["uniform", "balanced"])
@pytest.mark.parametrize(("scheme", "labels", "dense"), [("multinomial", 4, True), ("one-vs-rest", 4, True), ("one-vs-rest", 3, False)])
def test_a_row_of_weight_two_counts_like_the_row_twice(scheme: Scheme, labels: int, dense: bool, weights: ClassWeights) -> None:
    rows, targets, other = problem(labels, texts=60)
    twice = np.arange(len(targets)) % 3 == 0
    repeated = scipy.sparse.vstack([rows, rows[twice]], format="csr")
    of_repeated = fitted(
        repeated.toarray() if dense else repeated, np.concatenate([targets, targets[twice]]), scheme, weights, c=3.0, outputs=labels
    )
    row_weights = np.where(twice, 2, 1).astype(np.float32)
    fit = SOLVERS["classification"](labels).fitter(rows.toarray() if dense else rows, targets, Setting(scheme, weights, 3.0), row_weights)
    np.testing.assert_allclose(fit(3.0).scores(other), of_repeated.scores(other), atol=5e-3)


@pytest.mark.parametrize(
    ("kind", "scheme", "dense"),
    [
        ("classification", "one-vs-rest", False),
        ("multi-label", "one-vs-rest", False),
        ("classification", "multinomial", False),
        ("multi-label", "one-vs-rest", True),
    ],
)
def test_a_long_fit_ends_between_labels_or_iterations_if_it_must(
    kind: TaskKind, scheme: Scheme, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solvers, "_LONG_FIT", 0)
    rows, classes, _ = problem(6)
    targets = classes if kind == "classification" else classes[:, None] == np.arange(6)
    begun: list[int] = []

    def go_on() -> None:
        begun.append(len(begun))
        if len(begun) == 3:
            raise CancelledError

    setting = Setting(scheme, "uniform", 1.0)
    fit = SOLVERS[kind](6, go_on=go_on).fitter(rows.toarray() if dense else rows, targets, setting)
    with pytest.raises(CancelledError):
        fit(1.0)
    assert begun == [0, 1, 2]
