"""Naive Bayes with expectation-maximization: equal to scikit-learn's without passages, better with them, deterministic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.naive_bayes import MultinomialNB

from cramlm.linear import bayes
from cramlm.linear.bayes import fit_bayes
from cramlm.linear.cross_validation import FOLDS
from cramlm.linear.features import TextMatrices
from cramlm.linear.model import LinearModel
from cramlm.records import Example, Task

TOPICS = {
    "sport": ["goal", "match", "team", "referee", "stadium", "league"],
    "food": ["soup", "bread", "oven", "salt", "kitchen", "butter"],
}


def text(topic: str, random: np.random.Generator) -> str:
    return " ".join([*random.choice(TOPICS[topic], 3), *random.choice(["the", "a", "of", "and"], 3)])


def task_of(count: int, *, words: int) -> Task:
    """`count` training texts of the first `words` words of each topic, 40 dev texts of all words."""
    random = np.random.default_rng(5)
    few = [
        Example(f"train:{n}", " ".join(random.choice(TOPICS[topic][:words], 2)), None, topic)
        for n, topic in enumerate(["sport", "food"] * count)
    ]
    dev = [Example(f"dev:{n}", text(topic, random), None, topic) for n, topic in enumerate(["sport", "food"] * 20)]
    return Task(tuple(few), tuple(dev), (), ("food", "sport"), dev_is_split_from_train=False)


def passages(count: int) -> list[str]:
    random = np.random.default_rng(6)
    return [text(topic, random) for topic in ["sport", "food"] * count]


def test_without_passages_the_probabilities_are_those_of_scikit_learn() -> None:
    task = task_of(10, words=6)
    model = fit_bayes(task, [], metric="macro_f1", seed=1).model
    rows = model.ngrams.transform(TextMatrices([example.text for example in task.train]))
    labels = [str(example.label) for example in task.train]
    expected = MultinomialNB(alpha=0.01 / 30).fit(rows, labels).predict_log_proba(model.setting.scale * rows)
    np.testing.assert_allclose(model.logits([example.text for example in task.train]) - model.adjustment, expected, atol=1e-4)


def test_texts_out_of_fold_are_predicted_by_the_model_of_the_other_texts() -> None:
    task = task_of(10, words=6)
    fitted = fit_bayes(task, [], metric="macro_f1", seed=1)
    held_out, setting = fitted.held_out, fitted.model.setting
    assert sorted(held_out.rows.tolist()) == list(range(20))
    first = held_out.rows[: len(held_out.rows) // FOLDS]
    rows = fitted.model.ngrams.transform(TextMatrices([example.text for example in task.train]))
    labels = np.array([str(example.label) for example in task.train])
    other = np.setdiff1d(np.arange(20), first)
    expected = MultinomialNB(alpha=0.01 / 30).fit(rows[other], labels[other]).predict_log_proba(setting.scale * rows[first])
    found = np.log(held_out.outputs[: len(first)]) - fitted.model.adjustment
    np.testing.assert_allclose(found[:, 0] - found[:, 1], expected[:, 0] - expected[:, 1], atol=1e-3)


def test_passages_teach_words_that_no_labelled_text_has() -> None:
    task = task_of(3, words=2)
    alone = fit_bayes(task, [], metric="macro_f1", seed=1)
    assert fit_bayes(task, passages(200), metric="macro_f1", seed=1).score > alone.score + 0.1


def test_a_word_of_a_label_name_counts_for_the_label() -> None:
    task = task_of(10, words=6)
    named = replace(task, label_texts=(Example("label:food", "cuisine", None, "food"),))
    first, second = (fit_bayes(each, [], metric="macro_f1", seed=1).model.logits(["cuisine"])[0] for each in (task, named))
    food, sport = task.labels.index("food"), task.labels.index("sport")
    assert first[food] == pytest.approx(first[sport], abs=1e-4)
    assert second[food] > second[sport] + 1


def test_a_frequent_topic_of_the_raw_text_does_not_take_over() -> None:
    task = task_of(3, words=2)
    uneven = [each for each in passages(300) if "soup" in each or "bread" in each] + passages(20)
    fitted = fit_bayes(task, uneven, metric="macro_f1", seed=1)
    predicted = fitted.model.logits([example.text for example in task.dev]).argmax(axis=1)
    assert 0.3 < predicted.mean() < 0.7


@pytest.mark.parametrize(("limit", "most"), [("MAX_PASSAGES", 50), ("MAX_SOFT_LABELS", 100)])
def test_the_same_arguments_give_the_same_model_also_with_a_sample_of_the_passages(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bayes, limit, most)
    assert bayes.bayes_reads_seed(51, 0, labels=2)
    assert not bayes.bayes_reads_seed(50, 0, labels=2)
    first, second, other = (fit_bayes(task_of(3, words=2), passages(100), metric="macro_f1", seed=seed).model for seed in (1, 1, 2))
    assert np.array_equal(first.coefficients.weights, second.coefficients.weights)
    assert first.ngrams.parts[0].terms == second.ngrams.parts[0].terms
    assert not np.array_equal(first.ngrams.parts[0].weights, other.ngrams.parts[0].weights)


def test_a_saved_model_gives_the_same_logits(tmp_path: Path) -> None:
    model = fit_bayes(task_of(3, words=2), passages(20), metric="macro_f1", seed=1).model
    model.save(tmp_path)
    loaded = LinearModel.load(tmp_path)
    assert (loaded.name, loaded.setting) == ("bayes", model.setting)
    texts = ["goal soup", "", "unseen"]
    assert np.array_equal(loaded.logits(texts), model.logits(texts))


def test_texts_without_a_word_are_fitted_and_predicted() -> None:
    train = tuple(Example(f"train:{n}", "!", None, "ab"[n % 2]) for n in range(4))
    task = Task(train, (Example("dev:1", "?", None, "a"),), (), ("a", "b"), dev_is_split_from_train=False)
    assert fit_bayes(task, ["..."], metric="macro_f1", seed=1).model.logits(["..."]).shape == (1, 2)
