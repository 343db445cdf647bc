"""`CramClassifier` and `CramRegressor` as scikit-learn estimators, on runs of a second."""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
import pytest
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, StratifiedShuffleSplit, cross_val_score, cross_validate
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer

from commands import Child
from cramlm import CramClassifier, CramRegressor
from cramlm.data.task import load_task
from cramlm.errors import ArtifactError, CramError, DataError, UsageError
from cramlm.estimator import in_parameters
from cramlm.inference.predictor import Predictor
from cramlm.storage.artifacts import verify
from cramlm.storage.locks import lock
from jsonl import read_jsonl
from server_process import PATIENCE
from tiny_task import write_task

ROWS = {"max_length": 32, "batch_size": 256, "batch_unit": "tokens", "checkpoint_every": 1000, "dropout": 0.1}
SETTINGS = {
    "threads": 1,
    "precision": "fp32",
    "tokens_per_second": 10_000.0,
    "baseline.enabled": False,
    "baseline.c": [3.0],  # of the teacher
    "teacher.models": ["tfidf"],
    "tokenizer.vocab_size": 200,
    "encoder.layers": 1,
    "encoder.hidden": 32,
    "encoder.heads": 2,
    "encoder.intermediate": 32,
    "encoder.max_positions": 64,
    **{f"phases[0].{name}": value for name, value in {**ROWS, "steps": 40}.items()},
}
SHORT = {**SETTINGS, "phases[0].steps": 4}
OPEN_STEPS = {name: value for name, value in SETTINGS.items() if name != "phases[0].steps"}
QUICK_LINEAR = {"recipe": "tfidf", "settings": {"threads": 1, "baseline.c": [3.0]}}
WITH_CORPUS = {**SETTINGS, "retriever.max_documents": 60, **{f"phases[1].{name}": value for name, value in {**ROWS, "steps": 20}.items()}}


class Data:
    """The tiny task in memory; labels are integers whose order differs from that of their names."""

    def __init__(self, folder: Path) -> None:
        paths = write_task(folder, documents=80)
        rows = {split: read_jsonl(paths[split]) for split in ("train", "test")}
        self.corpus = paths["corpus"]
        self.X, self.X_test = ([row["text"] for row in rows[split]] for split in ("train", "test"))
        self.y, self.y_test = ([{"sea": 10, "hill": 9}[row["label"]] for row in rows[split]] for split in ("train", "test"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data(tmp_path_factory.mktemp("data"))


def tiny(**changes: Any) -> CramClassifier:
    return CramClassifier(**{"budget": None, "seed": 3, "settings": SETTINGS, **changes})


@pytest.fixture(scope="module")
def fitted(data: Data, tmp_path_factory: pytest.TempPathFactory) -> CramClassifier:
    """A classifier fitted with a corpus, with its run in a permanent folder."""
    folder = tmp_path_factory.mktemp("fitted")
    classifier = tiny(corpus=data.corpus, settings=WITH_CORPUS, out=folder / "runs", store=folder / "store")
    assert classifier.fit(data.X, data.y) is classifier
    return classifier


def test_it_predicts_the_classes_of_the_labels_with_probabilities_in_their_order(fitted: CramClassifier, data: Data) -> None:
    assert fitted.classes_.tolist() == [9, 10]
    predictions = fitted.predict(data.X_test)
    assert predictions.dtype == fitted.classes_.dtype
    assert fitted.score(data.X_test, data.y_test) == np.mean(predictions == data.y_test) > 0.8
    probabilities = fitted.predict_proba(data.X_test)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    predictor = Predictor.load(fitted.run_.export)
    assert predictor.labels == ("10", "9"), "columns are in the order of the classes, not of their names"
    np.testing.assert_array_equal(probabilities, predictor.probabilities(data.X_test)[:, ::-1])


def test_the_run_has_a_dev_split_and_no_test_file(fitted: CramClassifier, data: Data) -> None:
    task = load_task(fitted.run_.path)
    assert (len(task.train) + len(task.dev), len(task.test)) == (len(data.X), 0)
    assert len(task.dev) == 4
    assert (fitted.run_.path / "selection" / "selection.arrow").is_file()
    assert verify(fitted.run_.path) > 5


def test_an_equal_fit_reuses_its_run_and_another_has_its_own_folder(fitted: CramClassifier, data: Data) -> None:
    weights = fitted.run_.export / "model.safetensors"
    before = weights.stat().st_mtime_ns
    again = clone(fitted).fit(np.array(data.X), np.array(data.y, dtype=object))
    assert again.run_.path == fitted.run_.path
    assert weights.stat().st_mtime_ns == before
    other = tiny(out=fitted.out, seed=4, settings=SHORT).fit(data.X, data.y)
    assert other.run_.path.parent == fitted.run_.path.parent
    assert other.run_.path != fitted.run_.path


def test_a_linear_model_is_fitted_and_saved(data: Data, tmp_path: Path) -> None:
    settings = {"baseline.c": [3.0], "tokenizer.vocab_size": 200, "threads": 1}
    classifier = CramClassifier(recipe="static", corpus=data.corpus, settings=settings, store=tmp_path / "store").fit(data.X, data.y)
    assert classifier.score(data.X, data.y) > 0.9
    saved = classifier.save(tmp_path / "static")
    assert (Predictor.load(saved).probabilities(data.X)[:, ::-1] == classifier.predict_proba(data.X)).all()


def test_unlabelled_texts_are_read_by_the_run(data: Data, tmp_path: Path) -> None:
    settings = {"baseline.c": [3.0], "tokenizer.vocab_size": 200}
    further = ["a new text of the wave", data.X[0]]
    classifier = CramClassifier(recipe="static", corpus=data.corpus, unlabelled=further, settings=settings, out=tmp_path / "runs")
    classifier.set_params(store=tmp_path / "store").fit(data.X, data.y)
    assert [example.text for example in load_task(classifier.run_.path).unlabelled] == further[:1]
    with pytest.raises(DataError, match=r"unlabelled\[1\] is missing"):
        clone(classifier).set_params(unlabelled=["a", None]).fit(data.X, data.y)


def test_a_saved_model_gives_the_same_predictions(fitted: CramClassifier, data: Data, tmp_path: Path) -> None:
    saved = fitted.save(tmp_path / "model")
    assert verify(saved) == 1
    np.testing.assert_array_equal(Predictor.load(saved).probabilities(data.X_test)[:, ::-1], fitted.predict_proba(data.X_test))
    fitted.save(tmp_path / "model")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("mine")
    with pytest.raises(UsageError, match="letters: holds something else, which would be replaced"):
        fitted.save(tmp_path / "letters")
    assert (tmp_path / "letters" / "dear.txt").read_text() == "mine"


def test_a_pickle_contains_the_path_of_the_run_and_no_weights(fitted: CramClassifier, data: Data) -> None:
    content = pickle.dumps(fitted)
    assert len(content) < 20_000 < (fitted.run_.export / "model.safetensors").stat().st_size
    again = pickle.loads(content)
    np.testing.assert_array_equal(again.predict(data.X_test), fitted.predict(data.X_test))


def test_a_run_in_a_relative_folder_is_found_from_another_working_directory(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    classifier = tiny(recipe="tfidf", settings={"threads": 1}, out="runs", store=tmp_path / "store").fit(data.X, data.y)
    content = pickle.dumps(classifier)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = pickle.loads(content)
    np.testing.assert_array_equal(again.predict(data.X_test), classifier.predict(data.X_test))
    assert again.get_params() == classifier.get_params()
    classifier.save("saved")
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(ArtifactError, match="export: the model of this estimator is no longer there; restore the folder, or fit again"):
        pickle.loads(content).predict(data.X_test)
    assert Predictor.load("saved").labels == ("10", "9")


def test_a_temporary_run_is_pickled_with_its_model_and_deleted_with_its_estimator(data: Data, tmp_path: Path) -> None:
    classifier = tiny(settings=SHORT).fit(data.X, data.y)
    expected, confidences = classifier.predict_proba(data.X_test), classifier.predict_or_abstain(data.X_test, below=0.5)[1]
    folder = classifier.run_.path
    assert folder.is_dir()
    joblib.dump(classifier, tmp_path / "classifier.joblib")
    del classifier
    assert not folder.exists()

    def work() -> None:
        loaded = joblib.load(tmp_path / "classifier.joblib")
        own = loaded.run_.path
        assert own.is_dir()
        np.save(tmp_path / "probabilities.npy", loaded.predict_proba(data.X_test))
        del loaded
        assert not own.exists()

    assert Child(work).communicate(PATIENCE) == ("", "")
    np.testing.assert_array_equal(np.load(tmp_path / "probabilities.npy"), expected)
    again = pickle.loads(pickle.dumps(joblib.load(tmp_path / "classifier.joblib")))
    np.testing.assert_array_equal(again.predict_or_abstain(data.X_test, below=0.5)[1], confidences)
    np.testing.assert_array_equal(copy.deepcopy(again).predict_proba(data.X_test), expected)
    assert verify(again.save(tmp_path / "saved")) == 1
    pickle.loads(pickle.dumps(clone(again)))
    assert again.fit(data.X, data.y).run_.scores


@pytest.mark.slow
def test_fitted_classifiers_come_back_from_other_processes(data: Data) -> None:
    classifier = CramClassifier(recipe="tfidf", settings={"threads": 1})
    found = cross_validate(classifier, data.X, data.y, cv=2, n_jobs=2, return_estimator=True, error_score="raise")
    assert np.isfinite(found["test_score"]).all()
    assert [each.predict(data.X_test).shape for each in found["estimator"]] == [(len(data.X_test),)] * 2


def test_it_works_in_a_pipeline_with_cross_validation(data: Data) -> None:
    lowered = FunctionTransformer(lambda texts: [text.lower() for text in texts])
    scores = cross_val_score(Pipeline([("lower", lowered), ("classify", tiny(settings=SHORT))]), data.X, data.y, cv=2, error_score="raise")
    assert scores.shape == (2,)
    assert np.isfinite(scores).all()


def test_a_grid_search_sets_parameters_and_indexes_the_corpus_once(data: Data, tmp_path: Path) -> None:
    settings = {**WITH_CORPUS, "phases[0].steps": 4, "phases[1].steps": 4}
    classifier = tiny(corpus=data.corpus, settings=settings, store=tmp_path / "store")
    grid = [{"recipe": ["tlm"]}, {"recipe": ["labels-only"], "settings": [SHORT]}]  # labels-only ignores the corpus
    halves = StratifiedShuffleSplit(1, test_size=0.5, random_state=0)
    search = GridSearchCV(classifier, grid, cv=halves, refit=True, error_score="raise").fit(data.X, data.y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.predict(data.X_test[:2]).shape == (2,)
    assert len(list((tmp_path / "store" / "indexes").glob("*/manifest.json"))) == 1


@pytest.mark.parametrize(
    "classes",
    [("très bien", "007"), (True, False), (1.0, 2.0), (-1, 1), (np.str_("b"), np.str_("a"))],
    ids=lambda pair: type(pair[0]).__name__,
)
def test_labels_of_any_sortable_type_keep_their_type(classes: tuple[Any, Any], data: Data) -> None:
    y = [classes[label == 10] for label in data.y]
    classifier = CramClassifier(**QUICK_LINEAR).fit(tuple(data.X), y)
    assert classifier.classes_.tolist() == sorted(classes)
    assert set(classifier.predict(data.X_test).tolist()) <= set(classes)


def test_of_several_labels_per_text_predictions_have_the_form_of_the_labels(data: Data, tmp_path: Path) -> None:
    sets = [
        [topic for topic, number in (("hill", 9), ("sea", 10)) if number == label or text.startswith("the")]
        for text, label in zip(data.X, data.y, strict=True)
    ]
    matrix = np.array([["hill" in each, "sea" in each, False] for each in sets], dtype=int)
    of_sets, of_matrix, of_sparse = (
        CramClassifier(**QUICK_LINEAR, out=tmp_path / "runs").fit(data.X, y)
        for y in (list(map(tuple, sets)), matrix.tolist(), csr_matrix(matrix))
    )
    assert (of_sets.classes_.tolist(), of_matrix.classes_.tolist()) == (["hill", "sea"], [0, 1, 2])
    assert of_sparse.run_.path == of_matrix.run_.path
    probabilities = of_sets.predict_proba(data.X_test)
    assert Predictor.load(of_sets.run_.export).probabilities(data.X_test).tolist() == probabilities.tolist()
    np.testing.assert_array_equal(of_matrix.predict_proba(data.X_test), np.column_stack([probabilities, np.zeros(len(probabilities))]))
    predicted = of_matrix.predict(data.X_test)
    assert predicted[:, :2].tolist() == (probabilities >= 0.5).astype(int).tolist()
    assert list(of_sets.predict(data.X_test)) == [tuple(np.array(["hill", "sea"])[row > 0]) for row in predicted[:, :2]]
    assert of_sets.score(data.X, iter(sets)) == of_matrix.score(data.X, matrix) == of_sparse.score(data.X, csr_matrix(matrix)) > 0.8
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(of_matrix)).predict(data.X_test), predicted)
    assert np.isfinite(cross_val_score(clone(of_matrix), data.X, matrix, cv=2, scoring="f1_micro", error_score="raise")).all()
    for use in (lambda: of_sets.predict_or_abstain(data.X_test, below=0.5), lambda: of_sets.threshold(accuracy=0.9)):
        with pytest.raises(ValueError, match="abstaining is for texts of one label each"):
            use()


def test_numbers_are_predicted_in_their_unit_and_scored_by_r2(data: Data, tmp_path: Path) -> None:
    y, y_test = (np.array([2000.0 + label for label in labels]) for labels in (data.y, data.y_test))
    regressor = CramRegressor(**QUICK_LINEAR, out=tmp_path / "runs")
    assert regressor.fit(data.X, pandas.Series(y)) is regressor
    predictions = regressor.predict(data.X_test)
    assert (predictions.dtype, predictions.shape) == (np.float64, (len(data.X_test),))
    assert abs(predictions.mean() - 2009.5) < 0.3
    assert regressor.score(data.X_test, y_test) > 0.3
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(regressor)).predict(data.X_test), predictions)
    assert Predictor.load(regressor.save(tmp_path / "model")).kind == "regression"
    with pytest.raises(NotFittedError):
        clone(regressor).predict(data.X_test)


def test_parameters_are_set_and_cloned_and_methods_raise_not_fitted_error_before_fit() -> None:
    classifier = CramClassifier(corpus=["a.jsonl"], budget="1m")
    assert clone(classifier.set_params(seed=1, settings={"threads": 1})).get_params() == classifier.get_params()
    assert {"recipe", "corpus", "budget", "init", "seed", "dev_fraction", "out", "store", "settings"} <= set(classifier.get_params())
    with pytest.raises(ValueError, match="Invalid parameter"):
        classifier.set_params(retriever="bm25")
    for call in (lambda: tiny().predict(["a"]), lambda: tiny().predict_proba(["a"]), lambda: tiny().save("x")):
        with pytest.raises(NotFittedError):
            call()


TEXTS = ["a ship", "a hill", "a wave", "a ridge"]


@pytest.fixture(scope="module")
def fitted_on_pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[CramClassifier, pandas.DataFrame]:
    """A classifier that was fitted on a table of two columns, and such a table: the label is 1 where both texts have one topic."""
    topics = {"sea": "anchor sailor tide wave", "hill": "summit ridge slope valley"}
    rng = np.random.default_rng(5)

    def text(topic: str) -> str:
        return " ".join(rng.choice(topics[topic].split(), 6))

    names = [(one, other) for one in topics for other in topics] * 12
    table = pandas.DataFrame([(text(one), text(other), int(one == other)) for one, other in names], columns=["first", "second", "same"])
    out = tmp_path_factory.mktemp("pairs")
    further = list(zip(table["second"], table["first"], strict=True))
    classifier = CramClassifier(**QUICK_LINEAR, out=out / "runs", store=out / "store", unlabelled=further)
    return classifier.fit(table[["first", "second"]], table["same"]), table


def test_pairs_of_texts_come_from_two_columns(fitted_on_pairs: tuple[CramClassifier, pandas.DataFrame]) -> None:
    classifier, table = fitted_on_pairs
    first, second = table["first"].tolist(), table["second"].tolist()
    assert {(row.text, row.text_pair) for row in load_task(classifier.run_.path).train} <= set(zip(first, second, strict=True))
    expected = Predictor.load(classifier.run_.export).probabilities(first, second)
    pairs = table[["first", "second"]]
    for form in (pairs, pairs.to_numpy(), list(zip(first, second, strict=True)), pairs.to_numpy().tolist()):
        np.testing.assert_array_equal(classifier.predict_proba(form), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(classifier)).predict_proba(pairs), expected)
    again = clone(classifier).fit(pairs.to_numpy(), table["same"])
    assert again.run_.path == classifier.run_.path


def test_pairs_work_in_cross_validation(data: Data) -> None:
    pairs = np.array([data.X, data.X], dtype=object).T
    assert cross_val_score(CramClassifier(**QUICK_LINEAR), pairs, data.y, cv=2).mean() > 0.8
    regressor = CramRegressor(**QUICK_LINEAR).fit(pairs, [float(len(text)) for text in data.X])
    assert regressor.predict(pairs[:3]).shape == (3,)


def test_a_model_of_pairs_refuses_single_texts_and_the_other_way_round(
    fitted_on_pairs: tuple[CramClassifier, pandas.DataFrame], fitted: CramClassifier
) -> None:
    of_pairs, table = fitted_on_pairs
    with pytest.raises(ValueError, match="X holds single texts, and this model was fitted on pairs: two columns"):
        of_pairs.predict(table["first"])
    with pytest.raises(ValueError, match="X holds pairs, and this model was fitted on single texts: one column"):
        fitted.predict([("one", "two")])
    with pytest.raises(ValueError, match="unlabelled holds single texts and X holds pairs"):
        CramClassifier(**QUICK_LINEAR, unlabelled=["one"]).fit(table[["first", "second"]], table["same"])


Change = Callable[[list[Any], list[Any]], tuple[Any, Any]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:3], y), "X and y have inconsistent numbers of samples: 3 texts, 4 labels"),
        (lambda x, y: (x, ["a"] * 4), "one class only \\(.*a.*\\)"),
        (lambda x, y: ([*x[:2], None, x[3]], y), "X\\[2\\] is missing \\(None\\); drop it"),
        (lambda x, y: (np.array([x[0], float("nan"), *x[2:]], dtype=object), y), "X\\[1\\] is missing \\(nan\\)"),
        (lambda x, y: ([*x[:3], 5], y), "X\\[3\\] is int \\('5'\\), not a text"),
        (lambda x, y: ([{"text": text} for text in x], y), "X\\[0\\] is dict .*; pass one column of the table"),
        (lambda x, y: ([*x[:3], "  "], y), "X\\[3\\] is blank"),
        (lambda x, y: ([*x[:3], "\ud800"], y), "X\\[3\\]: character 0 is a lone surrogate"),
        (lambda x, y: (x[0], y), "X is one string \\(.*\\); pass a list of strings"),
        (lambda x, y: (None, y), "X is a NoneType; pass a list of strings"),
        (lambda x, y: (x, None), "y is a NoneType; pass a flat list with one label per text"),
        (lambda x, y: (x, dict(zip(y, x, strict=False))), "y is a dict; pass a flat list with one label per text"),
        (lambda x, y: (np.array(x).reshape(4, 1), y), "X has 2 dimensions; pass a list of texts or one column of a table"),
        (lambda x, y: (np.array(x).reshape(2, 2, 1), y), "X has 3 dimensions; pass one column of it, or a list of strings"),
        (lambda x, y: (np.array([x, x, x]).T, y), "X has 3 columns; .*, or two columns for pairs of texts"),
        (lambda x, y: (np.array(x).reshape(2, 2), y), "inconsistent numbers of samples: 2 texts, 4 labels"),
        (lambda x, y: ([[x[0], x[1]], *x[1:]], y), "X\\[1\\] is '.*', not a pair of texts"),
        (lambda x, y: ([(text, " ") for text in x], y), "X\\[0, 1\\] is blank"),
        (lambda x, y: (pandas.DataFrame({"one": x, "two": [*x[:3], None]}), y), "X\\[3, 1\\] is missing"),
        (lambda x, y: ([], []), "X holds no texts"),
        (lambda x, y: (x, [*y[:3], None]), "y\\[3\\] is missing"),
        (lambda x, y: (x, [0, 1, 0, float("nan")]), "y\\[3\\] is missing"),
        (lambda x, y: (x, [0, 1, 0, np.float32("nan")]), "y\\[3\\] is missing"),
        (lambda x, y: (x, [*y[:3], pandas.NA]), "y\\[3\\] is missing \\(<NA>\\); drop the row"),
        (lambda x, y: (x, np.array([pandas.NA, *y[1:]], dtype=object)), "y\\[0\\] is missing"),
        (lambda x, y: ([*x[:3], pandas.NA], y), "X\\[3\\] is missing \\(<NA>\\)"),
        (lambda x, y: (x, [0, 1, 0, "b"]), "y mixes text and other labels"),
        (lambda x, y: (x, [*y[:3], "b\ud800"]), "y\\[3\\]: character 1 is a lone surrogate; remove it"),
        (lambda x, y: (x, [["a"], *y[1:]]), "y\\[1\\] is 'hill', and other rows are lists of labels"),
        (lambda x, y: (x, [(label, 1) for label in y]), "y mixes text and other labels: the first is 'sea', a label of y\\[0\\] is 1"),
        (lambda x, y: (x, [["a"], ["b", None], [], ["a"]]), "a label of y\\[1\\] is missing"),
        (lambda x, y: (x, [["a"], ["b", ["c"]], [], ["a"]]), "a label of y\\[1\\] is a list"),
        (lambda x, y: (x, [["a"], ["b", "b"], [], ["a"]]), "y\\[1\\] has a label twice"),
        (lambda x, y: (x, [["a"], ["b"], []]), "inconsistent numbers of samples: 4 texts, 3 labels"),
        (lambda x, y: (x, [[], [], [], []]), "y holds no labels"),
        (lambda x, y: (x, np.ones((4, 2))), "y: every row has the labels \\('0', '1'\\)"),
        (lambda x, y: (x, np.eye(3)), "inconsistent numbers of samples: 4 texts, 3 labels"),
        (lambda x, y: (x, np.eye(4)), "y: 4 labels that occur 4 times in all .*; are these ids\\?"),
        (lambda x, y: (x, csr_matrix(2 * np.eye(4))), "y is a sparse matrix with other values than 0 and 1"),
        (lambda x, y: (x, [0.5, 1.25, 0.5, 2.75]), "y holds no classes: Unknown label type"),
        (lambda x, y: (x, [1, 10**30, 1, 10**30]), "y holds 10{30}, which cannot be a class; convert all labels to strings"),
        (lambda x, y: (x, pandas.to_datetime(["2026", "2027"] * 2)), "y holds Timestamp\\('2026-01-01.*, which cannot be a class"),
        (lambda x, y: (x, 2 * np.eye(4)), "y has 2 dimensions; pass one column of it, or a flat list"),
        (lambda x, y: (["a ship", "a hill", "A  ship", "a hill"], y), "X holds 2 distinct texts, too few to split a dev set off; a class"),
        (lambda x, y: (["a ship"] * 4, y), "X holds 1 distinct text, too few to split a dev set off"),
        (lambda x, y: (x, [7, 8, 9, 7]), "y holds 3 classes for 4 texts, more than one per two texts; are these ids"),
    ],
)
def test_bad_input_is_refused_with_its_index_before_anything_is_written(change: Change, message: str, tmp_path: Path) -> None:
    texts, labels = change(TEXTS, ["sea", "hill", "sea", "hill"])
    with pytest.raises(ValueError, match=message) as refused:
        tiny(out=tmp_path / "runs").fit(texts, labels)
    assert isinstance(refused.value, DataError)
    assert not (tmp_path / "runs").exists()


def test_texts_and_labels_may_be_generators(data: Data, tmp_path: Path) -> None:
    for labels in (data.y, [[label] for label in data.y]):
        of_list = CramClassifier(**QUICK_LINEAR, out=tmp_path / "runs").fit(data.X, labels)
        of_generators = CramClassifier(**QUICK_LINEAR, out=tmp_path / "runs").fit(iter(data.X), iter(labels))
        assert of_generators.run_.path == of_list.run_.path


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([1, 2, 3], "inconsistent numbers of samples: 4 texts, 3 labels"),
        ([1, 2, None, 3], "y\\[2\\] is missing"),
        ([1, 2, 3, np.inf], "y\\[3\\] is inf, not a finite number"),
        ([1, 2, -3e40, 3], "y\\[2\\] is -3e\\+40, whose absolute value is over 1e\\+30; divide all numbers"),
        (None, "y is a NoneType; pass a flat list with one number per text"),
        ([1, "2", 3, 4], "y\\[1\\] is '2', not a finite number; convert it, or use CramClassifier"),
        (np.eye(4), "y has 2 dimensions; pass one column of it, or a flat list with one number per text"),
        ([2.0] * 4, "y: every row has the number 2.0; there is nothing to learn"),
        ([2e9, 2e9, 2e9, 2e9 + 4], "y: the mean of the numbers, 2000000001, is more than 1,000,000 times their spread of 1.73, too much"),
    ],
)
def test_bad_numbers_are_refused_with_their_index(y: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        CramRegressor(out=tmp_path / "runs").fit(TEXTS, y)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "magic"}, "recipe 'magic' is not one of tlm"),
        ({"recipe": "tlm"}, "the recipe tlm retrieves from raw text; pass corpus="),
        ({"dev_fraction": 0.9}, "dev_fraction"),
        ({"settings": {"encoder.depth": 3}}, "encoder.depth"),
        ({"settings": {"encoder.layers": {2}}}, r"'encoder.layers'. is \{2\}, not a number"),
        ({"budget": "soon"}, "budget 'soon' is neither a positive time"),
        ({"recipe": "tlm-small:chemprot:x"}, "recipe 'tlm-small:chemprot:x': the scale 'x' is not a number"),
        ({"recipe": "tfidf", "init": "mine"}, "trains from scratch; drop init=, or take the recipe tlm"),
        ({"recipe": "plm"}, r"the recipe plm starts from pretrained weights; pass init= \(a folder with config.json"),
        ({"settings": {"task.kind": "regression"}}, "task.kind.* is 'regression', and this is a classification task by the form of y"),
        ({"seed": np.random.RandomState(0)}, "^seed: Input should be a valid integer"),  # as scikit-learn's random_state
        ({"settings": {"task.train": "other.csv"}}, "task.train.* would replace what fit.X, y. reads; drop it"),
        ({"settings": ["threads=1"]}, "settings is a list; pass a dictionary"),
        ({"settings": {"seed.more": 3}}, r"settings\['seed.more'\]: 'seed' is a value, not a table"),
        ({"settings": {"model": "static", "phases": []}}, r"needs a corpus; pass corpus, or set model = 'tfidf'"),
    ],
)
def test_parameters_are_validated_by_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        tiny(**{"out": tmp_path / "runs", **changes}).fit(TEXTS, [0, 1, 0, 1])
    assert isinstance(refused.value, UsageError)
    assert "--" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": OPEN_STEPS, "budget": "1e3flops"}, r'pass budget="[\w.]+flops" or more$'),
        ({"corpus": "FOLDER/bad.jsonl"}, r'bad.jsonl:1: .*settings=\{"corpus.on_bad_row": "skip"\}'),
        ({"corpus": "FOLDER/other.csv"}, r'no column .text.; found .body.; pass settings=\{"corpus.text_column": NAME\}'),
        ({"settings": {**SETTINGS, "device": "cuda"}}, r'use settings=\{"device": "cpu"\}'),
        ({"recipe": "plm", "init": "FOLDER"}, "pass another folder to init|init takes a folder with config.json"),
    ],
)
def test_errors_of_a_fit_name_parameters_and_no_options_of_the_command_line(
    changes: dict[str, Any], message: str, data: Data, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "other.csv").write_text("body\nsome text\n")
    named = {name: value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(CramError, match=message) as refused:
        tiny(out=tmp_path / "runs", store=tmp_path / "store", **named).fit(data.X, data.y)
    assert "--" not in str(refused.value)


def test_every_message_that_names_an_option_is_written_for_python() -> None:
    """The messages below the command line that a fit of the estimator can end with or print."""
    messages = {
        "/tmp/cramlm-x/fit-1/data/unlabelled.jsonl: all 12 unlabelled texts are those of labelled rows; leave the file out": (
            "all 12 unlabelled texts are those of labelled rows; drop unlabelled"
        ),
        "pass --budget 1.8e12flops or more, or a smaller --preset": 'pass budget="1.8e12flops" or more, or a smaller encoder, as in '
        'settings={"encoder.layers": 2}',
        "free space, or pass --out and --store on another disk": "free space, or pass out and store on another disk",
        "pass --budget 20m or --set phases[0].steps=N": 'pass budget="20m" or settings={"phases[0].steps": N}',
        "pass a new or empty folder as --out": "pass a new or empty folder as out",
        "pass --set tokens_per_second=N": 'pass settings={"tokens_per_second": N}',
        "to predict a number pass --task-type regression": "to predict a number use CramRegressor",
        "pass --task-type multi-label --label-separator '|'": "pass y as lists of labels to CramClassifier",
        "pass --id-column": 'pass settings={"corpus.id_column": NAME}',
    }
    assert {message: in_parameters(message) for message in messages} == messages


def test_parameters_may_be_numpy_numbers_and_paths(data: Data, tmp_path: Path) -> None:
    """Samplers of random searches return NumPy numbers."""
    plain = {"recipe": "tfidf", "seed": 3, "dev_fraction": 0.25, "settings": {"threads": 1, "baseline.c": [1.0, 3.0]}}
    numpy = plain | {"seed": np.int64(3), "dev_fraction": np.float32(0.25)}
    numpy["settings"] = {"threads": np.int64(1), "baseline.c": np.array([1.0, 3.0])}
    runs = [CramClassifier(out=tmp_path / "runs", **each).fit(data.X, data.y).run_.path for each in (plain, numpy)]
    assert runs[0] == runs[1]
    with pytest.raises(CramError, match="no-such-model"):
        tiny(recipe="plm", init=tmp_path / "no-such-model").fit(data.X, data.y)


def test_fit_waits_while_another_process_builds_the_same_run(data: Data, tmp_path: Path) -> None:
    classifier = tiny(out=tmp_path / "runs", settings=SHORT).fit(data.X, data.y)
    refitted: list[Any] = []
    with lock(classifier.run_.path / "run"):
        waiting = threading.Thread(target=lambda: refitted.append(clone(classifier).fit(data.X, data.y)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    waiting.join(PATIENCE)
    assert refitted[0].run_.path == classifier.run_.path
