"""Self-training on unlabelled texts: it learns their words, is refused where it harms, and is a model like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cramlm.linear import fit as fit_module
from cramlm.linear import self_training
from cramlm.linear.corpus_vectors import WIDTH
from cramlm.linear.cross_validation import SMALL_DEV
from cramlm.linear.fit import MAX_VECTOR_VALUES, LinearFit, SearchSpace, fit_linear, fit_reads_seed
from cramlm.linear.model import LinearModel
from cramlm.linear.self_training import reads_unlabelled, self_trained, self_training_reads_seed
from cramlm.records import Event, Example, Task
from cramlm.text.markers import MAX_KINDS

WORDS = {"sport": ["goal", "match", "team", "referee", "stadium", "league"], "food": ["soup", "bread", "oven", "salt", "kitchen", "butter"]}
SPACE = SearchSpace((1.0, 10.0, 100.0), "macro_f1", seed=1, variants=("words",))


def texts(count: int, words: dict[str, list[str]], seed: int) -> list[tuple[str, str]]:
    """`count` texts of each label with their labels, three words each."""
    random = np.random.default_rng(seed)
    return [(" ".join(random.choice(words[label], 3)), label) for label in list(words) * count]


def examples(pairs: list[tuple[str, str]], *, labelled: bool = True) -> tuple[Example, ...]:
    return tuple(Example(f"row:{number}", text, None, label if labelled else None) for number, (text, label) in enumerate(pairs))


def task(unlabelled: tuple[Example, ...]) -> Task:
    """Three training texts of each label with half of the words; dev texts with all words."""
    few = {label: words[:3] for label, words in WORDS.items()}
    train, dev = examples(texts(3, few, seed=1)), examples(texts(30, WORDS, seed=2))
    return Task(train, dev, (), ("food", "sport"), dev_is_split_from_train=False, unlabelled=unlabelled)


def unlabelled(count: int) -> tuple[Example, ...]:
    return examples(texts(count, WORDS, seed=3), labelled=False)


def trained(given: Task, space: SearchSpace = SPACE) -> tuple[LinearFit, LinearFit, list[Event]]:
    """The model before and after self-training, and its events."""
    events: list[Event] = []
    before = fit_linear(given, space, stage="static")
    return before, self_trained(before, {}, given, space, emit=events.append), events


def test_unlabelled_texts_teach_words_that_no_labelled_text_has() -> None:
    before, after, _ = trained(task(unlabelled(300)))
    assert after.score > before.score + 0.05
    known = {term for part in after.model.ngrams.parts for term in part.terms}
    assert {"stadium", "kitchen"} <= known
    assert not {"stadium", "kitchen"} & {term for part in before.model.ngrams.parts for term in part.terms}
    assert after.model.setting.unlabelled_weight == self_training.UNLABELLED_WEIGHT
    assert len(after.tried) == len(before.tried) + len(SPACE.c)


def test_texts_with_which_the_model_is_far_worse_on_dev_are_left_out() -> None:
    """Texts in which words of one label go with words of the other teach the wrong label."""
    crossed = {"sport": [*WORDS["sport"][:3], *WORDS["food"][3:]], "food": [*WORDS["food"][:3], *WORDS["sport"][3:]]}
    before, after, events = trained(task(examples(texts(200, crossed, seed=4), labelled=False)))
    assert after.model is before.model
    assert after.score == before.score
    assert len(after.tried) == len(before.tried) + len(SPACE.c)
    assert events[-1].message.startswith("self-training left out: macro-F1 on dev and 6 training texts out of fold ")


def test_a_large_dev_set_decides_alone() -> None:
    given = replace(task(unlabelled(50)), dev=examples(texts(SMALL_DEV, WORDS, seed=2)))
    before, after, events = trained(given)
    assert after.model is not before.model
    assert len(after.held_out.rows) == 0
    assert events[-1].message.startswith("self-trained, best on dev: ")


def test_training_texts_are_predicted_without_what_they_taught_about_unlabelled_texts() -> None:
    """A label of one training text is unknown without it, though the model has given this label to unlabelled texts."""
    words = WORDS | {"music": ["violin"]}
    train = (*task(()).train, Example("row:6", "violin", None, "music"))
    more = examples([*texts(40, WORDS, seed=3), *[("violin", "music")] * 20], labelled=False)
    given = replace(task(more), train=train, labels=("food", "music", "sport"), dev=examples(texts(8, words, seed=2)))
    before, after, _ = trained(given)
    assert after.model is not before.model
    assert after.model.logits(["violin"]).argmax() == 1
    assert sorted(after.held_out.rows.tolist()) == list(range(7))
    assert after.held_out.outputs[after.held_out.rows == 6].argmax() != 1


def test_the_result_is_a_function_of_the_arguments_and_a_sample_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = task(unlabelled(60))
    assert not self_training_reads_seed(given)
    whole = trained(given)[1].model.coefficients.weights
    np.testing.assert_array_equal(whole, trained(given)[1].model.coefficients.weights)
    monkeypatch.setattr(self_training, "MAX_UNLABELLED", 20)
    assert self_training_reads_seed(given)
    sampled = trained(given)[1].model.coefficients.weights
    np.testing.assert_array_equal(sampled, trained(given)[1].model.coefficients.weights)
    other = trained(given, replace(SPACE, seed=2))[1].model.coefficients.weights
    assert sampled.shape != other.shape or not np.array_equal(sampled, other)


def test_labelled_and_unlabelled_texts_of_too_many_characters_together_are_a_sample_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    given, space = task(unlabelled(60)), replace(SPACE, variants=("characters",))
    characters = sum(len(example.text) for example in (*given.train, *given.unlabelled))
    monkeypatch.setitem(fit_module.MAX_CHARACTERS, "characters", characters)
    assert not self_training_reads_seed(given)
    one, other = (trained(given, replace(space, seed=seed))[1].model.coefficients.weights for seed in (1, 2))
    np.testing.assert_array_equal(one, other)
    monkeypatch.setitem(fit_module.MAX_CHARACTERS, "characters", characters // 2)
    assert not fit_reads_seed(given), "the labelled texts alone are not sampled"
    assert self_training_reads_seed(given)
    one, other = (trained(given, replace(space, seed=seed))[1].model.coefficients.weights for seed in (1, 2))
    assert one.shape != other.shape or not np.array_equal(one, other)
    assert not self_training_reads_seed(replace(given, kind="multi-label")), "there is no self-training"


def test_vectors_of_segments_are_sampled_by_the_seed_only_where_more_texts_are_fitted_than_self_training_reads() -> None:
    widest = WIDTH * (1 + MAX_KINDS + 2)
    assert MAX_VECTOR_VALUES // widest >= fit_module.FEW_TEXTS + self_training.MAX_UNLABELLED


def test_a_self_trained_model_predicts_the_same_after_it_was_saved_and_loaded(tmp_path: Path) -> None:
    model = trained(task(unlabelled(50)))[1].model
    model.save(tmp_path)
    loaded = LinearModel.load(tmp_path)
    assert loaded.setting == model.setting
    dev = [text for text, _ in texts(10, WORDS, seed=5)]
    np.testing.assert_array_equal(loaded.logits(dev), model.logits(dev))


def test_only_single_labels_and_few_labelled_texts_are_self_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    given = task(unlabelled(5))
    assert reads_unlabelled(given)
    assert not reads_unlabelled(task(()))
    assert not reads_unlabelled(replace(given, kind="multi-label"))
    monkeypatch.setattr(self_training, "FEW_TEXTS", 5)
    assert not reads_unlabelled(given)
