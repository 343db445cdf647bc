"""Soft labels of passages, and of training texts out of fold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from linear_fixtures import TOPICS, example, number_task, several_labels_task, word_vectors

from cramlm.evaluation.kinds import KINDS
from cramlm.linear import teacher as linear_teacher
from cramlm.linear.features import Ngrams, TextMatrices, Variant, Vocabulary, normalize
from cramlm.linear.files import Scheme, Setting
from cramlm.linear.fit import SearchSpace, fit_linear
from cramlm.linear.model import LinearModel, beside
from cramlm.linear.solvers import Coefficients, solver_of
from cramlm.linear.teacher import FOLDS, Teacher, align_distribution, folds, label_counts, out_of_fold_labels
from cramlm.linear.word_vectors import WordVectors
from cramlm.records import Example, FloatArray, Scale, Task

Rows = list[tuple[str, str]]


def rows_of(labels: tuple[str, ...], count: int) -> Rows:
    """Two words of a topic and a word of its own, so that no text equals another."""
    rows = []
    for at in range(count):
        for label in labels:
            words = TOPICS[label]
            rows.append((f"{words[at % 5]} {words[at * 2 % 5]} own{label}{at}", label))
    return rows


def task_of(rows: Rows) -> Task:
    examples = tuple(example(number, *row) for number, row in enumerate(rows))
    return Task(examples, examples, (), tuple(sorted({label for _, label in rows})), False)


def model_of(
    task: Task, variant: Variant = "words", scheme: Scheme = "multinomial", vectors: WordVectors | None = None, c: float = 10.0
) -> LinearModel:
    """A model of one setting, fitted on all training texts, without logit adjustment."""
    texts = [normalize(row.text) for row in task.train]
    kinds: Any = ("tokens", "characters") if variant == "union" else (variant,)
    ngrams = Ngrams(variant, tuple(Vocabulary.fit(kind, texts)[0] for kind in kinds))
    rows = ngrams.transform(TextMatrices(texts))
    rows = rows if vectors is None else beside(rows, vectors.of(texts), 0.5)
    solver, setting = solver_of(task), Setting(scheme, "uniform", c, 0.0 if vectors is None else 0.5)
    fitted = solver.fitter(rows, solver.targets(task), setting)(c)
    return LinearModel("classification", task.labels, ngrams, vectors, fitted, setting, np.zeros(len(task.labels), np.float32), 0.0)


class SoftLabels(NamedTuple):
    passages: FloatArray
    training_texts: FloatArray


def soft_labels(model: LinearModel, task: Task, passages: list[str], *, seed: int) -> SoftLabels:
    teacher = Teacher.of({model.name: model}, task, metric="macro_f1")
    return SoftLabels(teacher.soft_labels(passages), out_of_fold_labels(model, task, seed=seed))


def soft(rows: Rows, passages: list[str], *, seed: int = 0, **options: Any) -> SoftLabels:
    task = task_of(rows)
    return soft_labels(model_of(task, **options), task, passages, seed=seed)


@pytest.mark.parametrize("scheme", ["multinomial", "one-vs-rest"])
@pytest.mark.parametrize("variant", ["words", "tokens", "characters", "union"])
def test_a_passage_has_the_label_of_its_words_and_one_without_known_words_no_certain_label(variant: Variant, scheme: Scheme) -> None:
    passages = ["a wave and a ship", "the summit ridge", "bank loan", "zzz qqq"]
    found = soft(rows_of(("sea", "hill", "money"), 10), passages, variant=variant, scheme=scheme).passages
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    assert found[:3].argmax(axis=1).tolist() == [2, 0, 1]
    assert found[3].max() < found[:3].max(axis=1).min()


def test_a_training_text_is_predicted_by_a_model_that_was_not_fitted_on_it() -> None:
    wrong = ("wave ship tide harbour", "hill")  # a model that was fitted on it would predict its label
    found = soft([*rows_of(("hill", "sea"), 10), wrong], [], seed=3)
    assert found.training_texts.shape == (21, 2)
    assert found.training_texts[20].argmax() == 1
    assert found.passages.shape == (0, 2)


def test_equal_sentences_with_other_markup_are_in_one_fold() -> None:
    rows = [(text, label) for at in range(12) for label in [("sea", "hill")[at % 2]] for text in (f"[[w{at}]] v{at}", f"w{at} [[v{at}]]")]
    found = soft(rows, [], variant="characters").training_texts
    right = found.argmax(axis=1) == np.array([label == "sea" for _, label in rows])
    assert right.mean() < 0.7, "the other text of the pair would tell the label"


def test_every_fold_holds_its_share_of_every_label() -> None:
    labels = np.array([0] * 50 + [1] * 25 + [2] * 5)
    fold = folds([f"text {number}" for number in range(80)], labels, seed=1)
    for label, size in ((0, 10), (1, 5), (2, 1)):
        assert np.bincount(fold[labels == label], minlength=FOLDS).tolist() == [size] * FOLDS


def test_sharpness_is_that_of_texts_out_of_fold() -> None:
    rows, turned = rows_of(("sea", "hill"), 30), np.random.default_rng(1).random(60) < 0.25
    wrong = [(text, {"sea": "hill", "hill": "sea"}[label] if turn else label) for (text, label), turn in zip(rows, turned, strict=True)]
    clear, noisy = (soft(each, ["wave ship tide"]) for each in (rows, wrong))
    assert clear.training_texts.max(axis=1).mean() > 0.95
    assert 0.6 < noisy.training_texts.max(axis=1).mean() < 0.9, "a quarter of the labels is wrong"


def test_regularization_does_not_decide_the_confidence_of_soft_labels() -> None:
    """Dev chooses C by a score that does not depend on the scale of the logits."""
    others = {"sea": "hill", "hill": "money", "money": "sea"}
    rows = rows_of(tuple(others), 30)
    noisy = [(text, others[label] if number // 3 % 4 == 0 else label) for number, (text, label) in enumerate(rows)]
    confidences = [soft(noisy, ["wave ship tide"], c=c).training_texts.max(axis=1).mean() for c in (1e-4, 1.0)]
    assert confidences[0] == pytest.approx(confidences[1], abs=0.03)
    assert 0.6 < confidences[0] < 0.9, "a quarter of the labels is wrong"


@pytest.mark.parametrize("scheme", ["multinomial", "one-vs-rest"])
def test_a_text_whose_label_no_other_text_has_has_no_soft_label(scheme: Scheme) -> None:
    """Outside its fold its label does not occur: a model without it would give the gold label probability 0."""
    rows = [*rows_of(("hill", "sea"), 10), ("euro bank", "money")]
    found = soft(rows, ["euro bank loan", "wave"], scheme=scheme)
    assert np.isnan(found.training_texts[20]).all()
    np.testing.assert_allclose(found.training_texts[:20].sum(axis=1), 1, rtol=1e-5)
    assert found.passages[0].argmax() == 1, "the label stays one of the model's"
    twice = soft([*rows[:20], ("euro <bank>", "money"), ("<euro> bank", "money")], [], scheme=scheme).training_texts  # in one fold
    assert np.isnan(twice[20:]).all()
    gold = np.array([task_of(rows).labels.index(label) for _, label in rows])
    assert (found.training_texts[np.arange(20), gold[:20]] > 0.01).all()


def test_two_texts_with_two_labels_have_no_out_of_fold_prediction() -> None:
    found = soft([("wave", "sea"), ("ridge", "hill")], ["wave"])
    assert np.isnan(found.training_texts).all()
    assert np.isfinite(found.passages).all()


def test_the_models_logit_adjustment_is_part_of_its_soft_labels() -> None:
    task = task_of(rows_of(("hill", "sea"), 10))
    model = model_of(task)
    adjusted = replace(model, adjustment=np.array([0.3, -0.3], dtype=np.float32), tau=1.0)
    plain, shifted = (soft_labels(each, task, ["zzz"], seed=1) for each in (model, adjusted))
    assert plain.passages[0, 0] == pytest.approx(0.5, abs=0.01)
    assert shifted.passages[0, 0] > 0.6
    odds = [np.log(each.training_texts[:, 0] / each.training_texts[:, 1]).mean() for each in (plain, shifted)]
    assert odds[1] > odds[0] + 0.5


def test_soft_labels_are_those_of_the_combination_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(rows_of(("hill", "sea"), 20))
    words, characters = model_of(task), replace(model_of(task, "characters"), tau=0.5)
    teacher = Teacher.of({"tfidf": words, "static": characters}, task, metric="macro_f1")
    assert sum(teacher.combination.weights.values()) == pytest.approx(1)
    texts = ["wave ship", "ridge summit", "zzz"]
    outputs = {name: KINDS["classification"].outputs(model.logits(texts)) for name, model in teacher.models.items()}
    expected = KINDS["classification"].outputs(teacher.combination.logits(outputs))
    np.testing.assert_allclose(teacher.soft_labels(texts), expected, rtol=1e-6)
    monkeypatch.setattr(linear_teacher, "_BLOCK", 12)  # characters: a block for each text
    done: list[int | None] = []
    in_blocks = teacher.soft_labels([*texts, ""], threads=2, emit=lambda event: done.append(event.done))
    np.testing.assert_allclose(in_blocks[:3], expected, rtol=1e-5)
    assert done == [0, 1, 2]
    assert label_counts(task).tolist() == [20, 20]


def test_a_model_with_a_far_higher_dev_loss_does_not_teach() -> None:
    task = task_of(rows_of(("hill", "sea"), 20))
    good = model_of(task)
    reverse = Coefficients(-good.coefficients.weights, -good.coefficients.bias)
    teacher = Teacher.of({"tfidf": good, "static": replace(good, coefficients=reverse)}, task, metric="macro_f1")
    assert list(teacher.models) == ["tfidf"]
    assert teacher.soft_labels(["wave ship"]).argmax() == 1


def test_vectors_predict_the_label_of_words_that_no_training_text_has() -> None:
    """The vector of `river` is that of `water`, which stands for one of the labels."""
    vectors = word_vectors({"water": 0, "river": 0, "kinase": 1, "protein": 1, "cell": 2})
    rows = [(f"{word} own{number}", label) for number in range(10) for word, label in (("water", "sea"), ("kinase", "cell"))]
    assert soft(rows, ["river"], vectors=vectors).passages[0, 1] > 0.8
    assert soft(rows, ["river"]).passages[0, 1] == pytest.approx(0.5, abs=0.1)


def test_aligned_soft_labels_have_the_frequencies_of_the_training_labels() -> None:
    foreign = np.random.default_rng(0).dirichlet([8.0, 1.0, 1.0], 5000).astype(np.float32)  # four fifths for the first label
    clear = np.array([[0.001, 0.998, 0.001]], dtype=np.float32)
    found = align_distribution(np.concatenate([foreign, clear]), np.array([30, 50, 20]))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(found.mean(axis=0), [0.3, 0.5, 0.2], atol=0.15)
    assert found[-1, 1] > 0.99, "what is clear stays clear"
    assert np.array_equal(align_distribution(np.full((500, 2), 0.5, np.float32), np.array([7, 7])), np.full((500, 2), 0.5, np.float32))
    few = np.array([[0.9, 0.1], [0.8, 0.2]], dtype=np.float32)
    np.testing.assert_allclose(align_distribution(few, np.array([10, 10])), few, atol=0.01)
    without_text = align_distribution(np.full((50, 3), 1 / 3, np.float32), np.array([10, 0, 10]))  # a label without a training text
    np.testing.assert_allclose(without_text, np.tile([0.5, 0, 0.5], (50, 1)), atol=1e-6)


def test_a_label_with_one_text_is_predicted_out_of_fold_from_the_words_of_its_name() -> None:
    task = task_of([*rows_of(("sea", "hill"), 10), ("quixotic story", "other")])
    model = model_of(task)
    single = len(task.train) - 1
    assert out_of_fold_labels(model, task, seed=0)[single].tolist() == pytest.approx([np.nan] * 3, nan_ok=True)
    named = replace(task, label_texts=(Example("label:other", "quixotic", None, "other"),))
    predicted = out_of_fold_labels(model, named, seed=0)
    assert len(predicted) == len(task.train)
    assert int(predicted[single].argmax()) == task.labels.index("other")


def fitted(task: Task, metric: str) -> LinearModel:
    return fit_linear(task, SearchSpace((10.0,), metric, seed=0, variants=("words",)), stage="static").model


def test_where_texts_have_several_labels_each_label_has_a_probability_of_its_own_in_and_out_of_fold() -> None:
    task = several_labels_task()
    model = fitted(task, "macro_f1")
    soft = Teacher.of({"tfidf": model}, task, metric="macro_f1").soft_labels(["w0 w2", "w1"])
    assert ((soft > 0.5) == [[True, False, True], [False, True, False]]).all()
    held_out = out_of_fold_labels(model, task, seed=0)
    assert held_out.dtype == np.float32
    assert ((held_out > 0.5) == (solver_of(task).targets(task) > 0)).mean() > 0.95
    noise = np.random.default_rng(2).random(len(task.train)) < 0.3
    wrong = [
        replace(row, label='["a", "b"]' if row.label == "[]" else "[]") if turn else row
        for row, turn in zip(task.train, noise, strict=True)
    ]
    unsure = out_of_fold_labels(model, replace(task, train=tuple(wrong)), seed=0)
    assert np.abs(unsure - 0.5).mean() < np.abs(held_out - 0.5).mean() - 0.1, "calibrated to the texts of the other folds"


def test_a_label_that_no_text_or_every_text_outside_the_fold_has_is_not_predicted_for_a_text() -> None:
    task = several_labels_task()
    labels = ['["a"]'] * (len(task.train) - 1) + ['["a", "c"]']
    rows = tuple(replace(row, label=label) for row, label in zip(task.train, labels, strict=True))
    held_out = out_of_fold_labels(fitted(task, "macro_f1"), replace(task, train=rows), seed=0)
    assert np.isnan(held_out[:, :2]).all(), "every text has the label a and none b"
    assert np.isnan(held_out[-1, 2]), "no text outside its fold has the label c"
    assert 0 < np.isnan(held_out[:, 2]).sum() < len(rows) / 2


def test_soft_labels_of_numbers_are_standardized_like_the_gold_numbers() -> None:
    task = replace(number_task(), scale=Scale(mean=103.5, spread=2.0))
    model = fitted(task, "pearson")
    teacher = Teacher.of({"tfidf": model}, task, metric="pearson")
    numbers = teacher.combination.logits({"tfidf": model.logits(["w0", "w1 w2"])})
    np.testing.assert_allclose(teacher.soft_labels(["w0", "w1 w2"]), (numbers - 103.5) / 2, rtol=1e-5)
    gold = np.array([float(str(row.label)) for row in task.train])
    held_out = out_of_fold_labels(model, task, seed=0)
    assert held_out.shape == (len(gold), 1)
    assert np.abs(held_out[:, 0] - (gold - 103.5) / 2).mean() < 0.3
    assert np.isnan(out_of_fold_labels(model, replace(task, train=task.train[:1]), seed=0)).all()
