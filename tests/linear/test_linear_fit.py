"""The search for the linear model that is best on dev."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tracemalloc
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_fixtures import (
    TOPICS,
    corpus_vectors,
    example,
    number_task,
    opposed_vectors,
    pair_task,
    relation_task,
    several_labels_task,
    topic_task,
    topics,
    word_vectors,
)
from threadpoolctl import threadpool_info, threadpool_limits

from cramlm.config.run import BaselineConfig, TaskConfig
from cramlm.data.task import read_task, texts_of_labels
from cramlm.evaluation.kinds import KINDS, DevScorer
from cramlm.evaluation.logit_adjustment import TAUS, logit_adjustments
from cramlm.linear import cross_validation, solvers
from cramlm.linear import fit as fit_module
from cramlm.linear.cross_validation import FOLDS
from cramlm.linear.features import VARIANTS
from cramlm.linear.files import terms_of
from cramlm.linear.fit import VECTOR_WEIGHTS, LinearFit, SearchSpace, Spans, TaskFeatures, fit_linear, markers_of, refit
from cramlm.linear.solvers import inner_products, solver_of
from cramlm.linear.teacher import out_of_fold_labels
from cramlm.records import PAIR_BOUNDARY, Event, Example, Task, TaskKind, silent
from cramlm.text.markers import MIN_TEXTS

SHARED = Path(__file__).parents[3] / "shared" / "data" / "tasks"
VECTORS = word_vectors({word: axis for axis, words in enumerate(TOPICS.values()) for word in words})
METRICS: dict[TaskKind, str] = {"classification": "macro_f1", "multi-label": "macro_f1", "regression": "pearson"}


def fit(task: Task, **more: Any) -> LinearFit:
    space = {"c": (1.0, 10.0), "metric": METRICS[task.kind], "seed": 0, **more}
    vectors, emit, threads = corpus_vectors(space.pop("vectors", None)), space.pop("emit", silent), space.pop("threads", 1)
    return fit_linear(task, SearchSpace(**space), stage="baseline", vectors=vectors, threads=threads, emit=emit)


def score(fitted: LinearFit, task: Task, rows: tuple[Example, ...]) -> Any:
    """The model's scores on some texts."""
    kind = KINDS[task.kind]
    outputs = kind.outputs(fitted.model.logits([row.divided_text for row in rows]))
    return kind.score([str(row.label) for row in rows], kind.predicted_labels(outputs, task.labels), task.labels, outputs)


def test_words_between_two_marked_entities_are_learned_where_those_of_the_whole_text_do_not_discriminate() -> None:
    task = relation_task()
    words, best = (fit(task, variants=variants) for variants in (("words",), ("words", "marked")))
    assert score(words, task, task.test).metrics["accuracy"] < 0.7
    assert best.model.ngrams.variant == "marked"
    assert score(best, task, task.test).metrics["accuracy"] > 0.9
    swapped = [row.text.replace("<<", "{").replace("[[", "<<").replace("{", "[[") for row in task.test]
    assert not np.array_equal(best.model.logits(swapped), best.model.logits([row.text for row in task.test]))


def test_vectors_of_segments_of_too_many_texts_are_those_of_a_sample_with_every_label(monkeypatch: pytest.MonkeyPatch) -> None:
    task, events = pair_task(), list[Event]()
    vectors = opposed_vectors()
    monkeypatch.setattr(fit_module, "MAX_VECTOR_VALUES", 60 * vectors.width(markers_of(task)))
    fitted = fit(task, vectors=vectors, variants=("marked",), emit=events.append)
    assert fitted.train_texts == 60
    assert "60 of 120 training texts" in next(event.message for event in events if event.kind == "warning")


def test_whether_the_texts_of_a_pair_are_similar_is_learned_from_the_products_of_their_vectors() -> None:
    task, vectors = pair_task(), opposed_vectors()
    bag, best = (fit(task, vectors=vectors, variants=variants) for variants in (("words", "tokens"), VARIANTS))
    assert score(bag, task, task.test).metrics["accuracy"] < 0.7
    assert best.model.ngrams.variant == "marked"
    assert score(best, task, task.test).metrics["accuracy"] > 0.9
    as_one_text = [row.whole_text for row in task.test]
    assert not np.array_equal(best.model.logits(as_one_text), best.model.logits([row.divided_text for row in task.test]))


def test_the_texts_of_few_pairs_are_compared() -> None:
    task = pair_task()
    task = replace(task, train=task.train[: MIN_TEXTS - 2])
    best = fit(task, vectors=opposed_vectors())
    assert best.model.ngrams.variant == "marked"
    assert score(best, task, task.test).metrics["accuracy"] > 0.8


def test_a_text_of_a_pair_that_holds_the_character_of_the_boundary_is_not_divided_there() -> None:
    task = pair_task()
    split = [
        replace(row, text=row.text.replace(" ", PAIR_BOUNDARY), text_pair=str(row.text_pair).replace(" ", PAIR_BOUNDARY))
        for row in task.test
    ]
    model = fit(task, vectors=opposed_vectors(), variants=("marked",)).model
    assert np.array_equal(model.logits([row.divided_text for row in split]), model.logits([row.divided_text for row in task.test]))


def without_seconds(fitted: LinearFit) -> dict[str, Any]:
    return {name: value for name, value in fitted.as_dict().items() if name != "seconds"}


@pytest.mark.parametrize(
    "task", [topic_task(), topic_task(sea=60, hill=6), several_labels_task(), number_task()], ids=["even", "uneven", "sets", "numbers"]
)
def test_the_best_of_everything_tried_is_kept_and_scores_on_dev_what_is_reported(task: Task) -> None:
    events: list[Event] = []
    fitted = fit(task, emit=events.append)
    assert [event.kind for event, _ in itertools.groupby(events)] == ["start", "progress", "progress", "progress", "progress", "done"]
    decided = f"best on dev and {len(task.train)} training texts out of fold"
    assert f"{decided}: {terms_of(fitted.model.ngrams.variant)}, {fitted.model.setting}" in events[-1].message
    assert len(json.loads(json.dumps(fitted.as_dict(), allow_nan=False))["tried"]) == len(fitted.tried)
    assert score(fitted, task, task.dev).metrics[fitted.metric] == pytest.approx(fitted.score)
    assert score(fitted, task, task.test).metrics[fitted.metric] > 0.7
    first = max(fitted.tried, key=lambda tried: tried.score)
    assert (first.variant, first.setting, first.tau) == (fitted.model.ngrams.variant, fitted.model.setting, fitted.model.tau)
    assert {tried.variant for tried in fitted.tried} == {"words", "tokens", "characters", "union"}
    if task.kind == "classification":
        assert {tried.setting.scheme for tried in fitted.tried} == {"one-vs-rest"}  # of two labels


def test_messages_name_what_the_ngrams_are_of_as_the_report_does() -> None:
    events: list[Event] = []
    fit(topic_task(sea=30, hill=12), variants=("union",), emit=events.append)
    _, *progress, done = events
    assert {event.message for event in progress} == {"tokens and characters"}
    assert ": tokens and characters, " in done.message
    assert terms_of("marked") == "tokens and segments between markers"
    assert terms_of("words") == "words"


def test_dev_predictions_of_all_candidates_are_kept_once_each() -> None:
    task = topic_task(sea=30, hill=12)
    fitted = fit(task, variants=("words", "tokens"))
    scorer = DevScorer.of(task, "macro_f1")
    assert fitted.score in scorer.scores(fitted.predictions)
    assert len(np.unique(fitted.predictions, axis=0)) == len(fitted.predictions) <= len(fitted.tried) * len(TAUS)


@pytest.mark.parametrize("few", [1500, 30])
def test_the_same_task_and_seed_give_the_same_model_whatever_the_test_split_is(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "FEW_TEXTS", few)
    task = topic_task(sea=60, hill=20)
    swapped = {"sea": "hill", "hill": "sea"}
    others = (replace(task, test=tuple(replace(row, label=swapped[str(row.label)]) for row in task.test)), replace(task, test=()))
    one, *equal = (fit(each, seed=5, variants=("words", "tokens")) for each in (task, *others))
    for other in equal:
        assert without_seconds(one) == without_seconds(other)
        assert np.array_equal(one.predictions, other.predictions)
        assert np.array_equal(one.model.coefficients.weights, other.model.coefficients.weights)


def test_of_many_texts_a_sample_is_searched_and_finalists_are_fitted_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "FEW_TEXTS", 30)
    task = topic_task(sea=90, hill=60)
    sizes: list[int] = []
    plain = solvers.ClassificationSolver.fitter

    def counted(self: Any, rows: Any, targets: Any, *arguments: Any) -> Any:
        sizes.append(len(targets))
        return plain(self, rows, targets, *arguments)

    monkeypatch.setattr(solvers.ClassificationSolver, "fitter", counted)
    fitted = fit(task, c=(0.3, 1.0, 3.0, 10.0))
    assert sizes == [30] * (len(sizes) - 3) + [150] * 3
    assert fitted.train_texts == 150
    combinations = {(each.variant, each.setting.scheme, each.setting.class_weights) for each in fitted.tried}
    assert len(combinations) == fit_module.FINALISTS
    for combination in combinations:  # with growing C as long as the score grows
        walked = [each for each in fitted.tried if (each.variant, each.setting.scheme, each.setting.class_weights) == combination]
        assert [each.setting.c for each in walked] == sorted(each.setting.c for each in walked)
        scores = [each.score for each in walked]
        assert all(one < other for one, other in itertools.pairwise(scores[:-1]))


@pytest.mark.parametrize("few", [1500, 30], ids=["all texts", "a sample and finalists"])
@pytest.mark.parametrize("task", [topic_task(sea=60, hill=20, war=20), number_task()], ids=["labels", "numbers"])
def test_threads_change_neither_the_model_nor_what_was_tried(task: Task, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "FEW_TEXTS", few)
    monkeypatch.setattr(solvers, "MIN_THREADED_PRODUCTS", 0)
    one, several = (fit(task, vectors=VECTORS, c=(0.1, 1.0, 10.0, 100.0), threads=threads) for threads in (1, 3))
    assert without_seconds(one) == without_seconds(several)
    assert np.array_equal(one.predictions, several.predictions)
    assert np.array_equal(one.model.coefficients.weights, several.model.coefficients.weights)
    held_out = [out_of_fold_labels(one.model, task, seed=0, threads=threads) for threads in (1, 3)]
    assert np.array_equal(*held_out, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_matrices_of_many_dev_texts_are_kept_for_one_weight_of_text_vectors_at_a_time(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solvers, "MIN_THREADED_PRODUCTS", 0)
    monkeypatch.setattr(fit_module, "MAX_KEPT_VALUES", 0)
    task = topic_task(sea=100, hill=100, war=100)
    task, peaks = replace(task, dev=task.dev * 60), list[int]()
    fit(task, vectors=VECTORS, variants=("words",), threads=threads)  # loads modules
    for weights in ((0.5,), (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)):
        monkeypatch.setattr(fit_module, "VECTOR_WEIGHTS", weights)
        tracemalloc.start()
        fit(task, vectors=VECTORS, variants=("words",), threads=threads)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    one_span = 4 * len(task.train) * len(task.dev)
    assert peaks[1] - peaks[0] < 1.5 * one_span, [peak / one_span for peak in peaks]


@pytest.mark.parametrize("few", [1500, 30], ids=["all texts", "finalists"])
def test_progress_is_repeated_between_two_values_of_c_so_that_a_run_can_stop_there(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "FEW_TEXTS", few)
    task, events = topic_task(sea=60, hill=20, war=20), list[Event]()
    fitted = fit(task, c=(0.1, 1.0, 10.0), emit=events.append)
    repeated = [len(list(equal)) for event, equal in itertools.groupby(events) if event.kind == "progress"]
    assert sum(repeated) - len(repeated) >= len(fitted.tried)
    events.clear()
    out_of_fold_labels(fitted.model, task, seed=0, emit=events.append)
    assert [event.done for event in events] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("most", "products", "small_dev"), [("MAX_FIT_PRODUCTS", 1, 0), ("MAX_FOLD_PRODUCTS", 6, 200)])
def test_with_many_labels_or_folds_two_values_of_c_decide_which_combinations_try_all(
    most: str, products: int, small_dev: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_validation, "SMALL_DEV", small_dev)
    task, grid = topic_task(sea=20, hill=20, war=20), (0.1, 1.0, 10.0, 100.0, 1000.0)
    whole = fit(task, c=grid)
    monkeypatch.setattr(fit_module, most, products * 60**2 * 3 - 1)
    fitted = fit(task, c=grid)
    tried: dict[tuple[str, str], list[float]] = {}
    for each in fitted.tried:
        tried.setdefault((each.variant, each.setting.scheme), []).append(each.setting.c)
    refined = [values for values in tried.values() if sorted(values) == list(grid)]
    assert len(refined) == fit_module.FINALISTS
    assert all(values == [1.0, 100.0] for values in tried.values() if values not in refined)
    assert len(tried) == len({(each.variant, each.setting.scheme) for each in whole.tried})
    assert fitted.score == whole.score


def test_a_multinomial_regression_with_too_many_weights_is_not_fitted_on_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FEW_TEXTS", 30), ("MAX_MULTINOMIAL_PRODUCTS", 0), ("MAX_MULTINOMIAL_WEIGHTS", 0)):
        monkeypatch.setattr(fit_module, name, value)
    fitted = fit(topic_task(sea=60, hill=20, war=20))
    assert {each.setting.scheme for each in fitted.tried} == {"one-vs-rest"}
    assert fitted.train_texts == 100


@pytest.mark.parametrize("few", [1500, 30])
@pytest.mark.parametrize("task", [topic_task(sea=60, hill=20, war=20), number_task()], ids=["labels", "numbers"])
def test_every_weight_of_text_vectors_is_tried_and_the_model_has_the_score_of_the_best(
    task: Task, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_module, "FEW_TEXTS", few)
    products = []

    def counted(one: Any, other: Any) -> Any:
        products.append(one.shape)
        return inner_products(one, other)

    monkeypatch.setattr(fit_module, "inner_products", counted)
    fitted = fit(task, vectors=VECTORS, variants=("words", "union"))
    assert score(fitted, task, task.dev).metrics[fitted.metric] == pytest.approx(fitted.score)
    if len(task.train) <= few:
        assert {each.setting.vector_weight for each in fitted.tried} == set(VECTOR_WEIGHTS)
        of_folds = FOLDS if task.kind == "classification" else 0
        assert len(products) == 2 * (2 + of_folds), "of training and dev texts, and without each fold, once for all weights of a variant"


@pytest.mark.parametrize("weight", VECTOR_WEIGHTS)
def test_rows_with_text_vectors_have_the_coordinates_of_the_joined_matrix(weight: float) -> None:
    rows = TaskFeatures(topic_task(), corpus_vectors(VECTORS), seed=0).rows("words")
    span = Spans(rows).of(weight)
    train, dev = rows.matrices(weight).train, rows.matrices(weight).dev
    assert train.shape[1] == rows.ngrams.width + VECTORS.vectors.shape[1]
    np.testing.assert_allclose(span.train @ span.train.T, (train @ train.T).toarray(), atol=1e-4)
    np.testing.assert_allclose(span.dev @ span.train.T, (dev @ train.T).toarray(), atol=1e-4)
    part, other = span.parts
    np.testing.assert_array_equal(np.hstack([part.toarray(), other]), train.toarray())


def test_weights_of_terms_without_a_fold_do_not_depend_on_its_labels() -> None:
    task, fold = topic_task(sea=20, hill=20, war=20), np.arange(0, 60, 5)
    features, targets, weights = TaskFeatures(task, None, seed=0), solver_of(task).targets(task), np.ones(60, np.float32)
    changed = targets.copy()
    changed[fold] = (changed[fold] + 1) % 3
    before, after = (features.without("union", fold, each, weights) for each in (targets, changed))
    np.testing.assert_array_equal(before.toarray(), after.toarray())
    whole = features.rows("union", [fold])
    np.testing.assert_array_equal(whole.without_folds[0].toarray(), before.toarray())
    assert abs(whole.train - before).max() > 0.01


def test_a_logit_adjustment_is_chosen_on_dev_and_part_of_the_model() -> None:
    task = topic_task(sea=80, hill=4)
    adjusted = [each for each in fit(task, c=(1.0,), variants=("words", "tokens")).tried if each.setting.class_weights == "uniform"]
    assert all(each.tau > 0 for each in adjusted)
    model = fit(task, c=(1.0,), variants=("words",)).model
    assert np.array_equal(model.adjustment, logit_adjustments(task)[model.tau])
    texts = [row.text for row in task.dev]
    plain = replace(model, adjustment=np.zeros(2, np.float32)).logits(texts)
    np.testing.assert_allclose(model.logits(texts), plain + model.adjustment, rtol=1e-6)


@pytest.mark.parametrize("c", [0.01, 10.0])
def test_a_strongly_regularized_regression_predicts_numbers_as_far_apart_as_those_of_dev(c: float) -> None:
    task = replace(number_task(), dev=number_task().train)
    assert score(fit(task, c=(c,)), task, task.test).metrics["r2"] > 0.8


def test_a_dev_label_that_training_lacks_is_a_miss_and_no_error() -> None:
    train = (*topics({"sea": 30, "hill": 30}, seed=1), *(example(100 + number, "red green blue", "colour") for number in range(8)))
    dev = (*topics({"sea": 10, "hill": 10}, seed=2), example(50, "blue red", "colour"), example(51, "nothing", "strange"))
    task = Task(train, dev, (), ("colour", "hill", "sea"), False)
    fitted = fit(task, variants=("words",))
    scores = score(fitted, task, dev)
    assert scores.per_class["colour"]["recall"] == 1.0
    assert scores.per_class["strange"]["f1"] == 0.0
    assert scores.macro_f1 == pytest.approx(fitted.score)


def test_texts_without_a_single_term_leave_a_model_of_the_labels_frequencies() -> None:
    train = tuple(example(number, "!", "a" if number < 6 else "b") for number in range(8))
    fitted = fit(Task(train, train, (), ("a", "b"), False), variants=("words",), metric="accuracy")
    assert fitted.model.ngrams.width == 0
    assert fitted.score == 0.75
    assert (fitted.model.logits(["anything", ""]).argmax(axis=1) == 0).all()


@pytest.mark.parametrize("variant", ["words", "tokens", "characters", "union"])
def test_composed_and_decomposed_texts_are_the_same_to_every_variant(variant: str) -> None:
    words = {"a": "ọ̀rọ̀ ẹ̀kọ́ ilé", "b": "ọ̀nà ọjà omi"}
    generator = random.Random(3)
    train = tuple(
        example(number, unicodedata.normalize("NFD", " ".join(generator.choices(words[label].split(), k=4))), label)
        for number in range(20)
        for label in (["a", "b"][number % 2],)
    )
    dev = tuple(Example(row.id, unicodedata.normalize("NFC", row.text), None, row.label) for row in train)
    task = Task(train, dev, (), ("a", "b"), False)
    fitted = fit(task, variants=(variant,))
    assert fitted.score == 1.0
    assert np.array_equal(*(fitted.model.logits([row.text for row in rows]) for rows in (train, dev)))


def test_too_much_text_is_sampled_in_the_labels_proportions_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fit_module.MAX_CHARACTERS, "characters", 1500)
    events: list[Event] = []
    task = replace(topic_task(sea=80, hill=40), label_texts=texts_of_labels(("hill", "sea")))
    fitted = fit(task, variants=("characters",), emit=events.append)
    assert 30 < fitted.train_texts < 60
    (warning,) = (event.message for event in events if event.kind == "warning")
    assert f"fitted on {fitted.train_texts} of 120 training texts" in warning


@pytest.mark.slow
@pytest.mark.shared_data
@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not here")
@pytest.mark.parametrize(("name", "micro", "macro"), [("chemprot", 0.636, 0.379), ("sciie", 0.669, 0.514)])
def test_real_tasks_reach_what_was_measured_before(name: str, micro: float, macro: float) -> None:
    folder = SHARED / name
    config = TaskConfig(**{split: str(folder / f"{split}.jsonl") for split in ("train", "dev", "test")})
    task = read_task(config, seed=13)
    scores = score(fit(task, c=BaselineConfig().c, seed=13), task, task.test)
    assert scores.micro_f1 > micro
    assert scores.macro_f1 > macro


def test_a_model_that_is_fitted_again_is_that_of_training_and_dev_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "VECTOR_WEIGHTS", (0.5,))  # and so one setting
    task, texts = topic_task(sea=40, hill=40), [row.text for row in topic_task().test]
    fitted = fit(task, c=(3.0,), variants=("words",), vectors=VECTORS).model
    whole = fit(replace(task, train=(*task.train, *task.dev)), c=(3.0,), variants=("words",), vectors=VECTORS).model
    again = refit(fitted, task, seed=0)
    assert again.setting == whole.setting
    np.testing.assert_allclose(again.logits(texts) - again.adjustment, whole.logits(texts) - whole.adjustment, atol=1e-3)
    assert not np.allclose(again.logits(texts), fitted.logits(texts), atol=1e-3)


def test_a_word_of_a_label_name_counts_for_the_label() -> None:
    task = topic_task()
    label = task.labels[0]
    named = replace(task, label_texts=(Example(f"label:{label}", "quixotic", None, label),))
    before, after = (fit(each).model.logits(["quixotic"])[0] for each in (task, named))
    assert int(after.argmax()) == 0
    assert after[0] - after[1:].max() > before[0] - before[1:].max()


def test_a_search_uses_one_thread_of_blas_however_many_there_are() -> None:
    """OpenBLAS' threads wait in a loop for each other, which takes many times the CPU time on a busy machine."""
    threads: list[int] = []

    def count_threads(event: Event) -> None:
        threads.extend(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")

    with threadpool_limits(limits=2, user_api="blas"):
        fit(topic_task(), emit=count_threads)
        assert set(threads) == {1}
        assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {2}


def test_the_blas_of_scipy_is_limited_to_one_thread_also_if_it_is_loaded_later() -> None:
    """It is another library than that of NumPy. Its threads made a search of 4,169 texts 7 times as long beside one busy process."""
    code = """
from threadpoolctl import threadpool_info
from cramlm.linear.solvers import on_one_blas_thread

@on_one_blas_thread
def count():
    import scipy.linalg
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

print(count())
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert printed == "{1}\n"
