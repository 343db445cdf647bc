from __future__ import annotations

import numpy as np
import pytest

from cramlm.evaluation.baselines import Variant
from cramlm.evaluation.teacher import SoftLabels, Vectors, aligned, soft_labels
from cramlm.records import Example, Task

TOPICS = {"sea": "wave ship tide harbour sail", "hill": "ridge summit valley climb slope", "money": "euro bank loan price market"}


def rows_of(labels: tuple[str, ...], count: int) -> list[tuple[str, str]]:
    """Two words of a topic and a word of its own, so that no text is another's twin."""
    rows = []
    for at in range(count):
        for label in labels:
            words = TOPICS[label].split()
            rows.append((f"{words[at % 5]} {words[at * 2 % 5]} own{label}{at}", label))
    return rows


def examples(rows: list[tuple[str, str]]) -> tuple[Example, ...]:
    return tuple(Example(str(number), text, None, label) for number, (text, label) in enumerate(rows))


def asked(
    rows: list[tuple[str, str]], texts: list[str], variant: Variant = "words", seed: int = 0, vectors: Vectors | None = None
) -> SoftLabels:
    task = Task(examples(rows), examples(rows), (), tuple(sorted({label for _, label in rows})), False)
    return soft_labels(task, texts, variant=variant, weights="rows alike", c=10.0, seed=seed, vectors=vectors)


@pytest.mark.parametrize("variant", ["words", "tokens", "characters", "union"])
def test_a_passage_gets_the_label_whose_words_it_holds_and_one_without_known_words_gets_no_certainty(variant: Variant) -> None:
    soft = asked(rows_of(("sea", "hill", "money"), 10), ["a wave and a ship", "the summit ridge", "bank loan", "zzz qqq"], variant).asked
    assert soft.dtype == np.float32
    np.testing.assert_allclose(soft.sum(axis=1), 1, rtol=1e-5)
    assert soft[:3].argmax(axis=1).tolist() == [2, 0, 1]
    assert soft[3].max() < soft[:3].max(axis=1).min()


def test_a_training_text_is_labelled_by_a_model_that_has_not_seen_it() -> None:
    wrong = ("wave ship tide harbour", "hill")  # its own label would teach the model that fits it too
    soft = asked([*rows_of(("hill", "sea"), 10), wrong], [], seed=3)
    assert soft.own.shape == (21, 2)
    assert soft.own[20].argmax() == 1
    assert soft.asked.shape == (0, 2)


def test_one_sentence_with_other_words_marked_is_held_out_together() -> None:
    # Each sentence stands twice under one label; a model that had seen its twin would know it, one that had not cannot.
    rows = [(text, label) for at in range(12) for label in [("sea", "hill")[at % 2]] for text in (f"[[w{at}]] v{at}", f"w{at} [[v{at}]]")]
    own = asked(rows, [], variant="characters").own
    right = own.argmax(axis=1) == np.array([label == "sea" for _, label in rows])
    assert right.mean() < 0.7


def test_held_out_labels_are_the_same_for_the_same_seed() -> None:
    first, second = (asked(rows_of(("sea", "hill"), 6), ["ship"], seed=5) for _ in range(2))
    assert np.array_equal(first.own, second.own)
    assert np.array_equal(first.asked, second.asked)


def test_certainty_is_that_of_texts_held_out() -> None:
    rows, turned = rows_of(("sea", "hill"), 30), np.random.default_rng(1).random(60) < 0.25
    wrong = [(text, {"sea": "hill", "hill": "sea"}[label] if turn else label) for (text, label), turn in zip(rows, turned, strict=True)]
    clear, noisy = (asked(each, ["wave ship tide"]) for each in (rows, wrong))
    assert clear.power > 1, "a regularised model of clear texts is less sure than it may be"
    assert clear.own.max(axis=1).mean() > 0.95
    assert 0.6 < noisy.own.max(axis=1).mean() < 0.9, "a quarter of the labels is wrong"


def test_vectors_tell_of_words_that_no_training_text_holds() -> None:
    rows = rows_of(("sea", "hill"), 10)
    towards = {"sea": [1.0, 0.0], "hill": [0.0, 1.0]}
    known = np.array([towards[label] for _, label in rows], dtype=np.float32)
    vectors = Vectors(known, known, np.array([towards["sea"]], dtype=np.float32))
    assert asked(rows, ["lighthouse"], vectors=vectors).asked[0, 1] > 0.8
    assert asked(rows, ["lighthouse"]).asked[0, 1] == pytest.approx(0.5, abs=0.1)


def test_a_label_with_a_single_text_is_no_trouble() -> None:
    soft = asked([("wave", "sea"), ("ridge", "hill"), ("ship", "sea")], [])
    assert np.isfinite(soft.own).all()


def test_many_passages_hold_each_label_about_as_often_as_the_training_texts_do() -> None:
    foreign = np.random.default_rng(0).dirichlet([8.0, 1.0, 1.0], 5000).astype(np.float32)  # four fifths for the first label
    clear = np.array([[0.001, 0.998, 0.001]], dtype=np.float32)
    answers = aligned(np.concatenate([foreign, clear]), np.array([30, 50, 20]))
    np.testing.assert_allclose(answers.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(answers.mean(axis=0), [0.3, 0.5, 0.2], atol=0.15)
    assert answers[-1, 1] > 0.99, "what is clear stays clear"
    assert np.array_equal(aligned(np.full((500, 2), 0.5, np.float32), np.array([7, 7])), np.full((500, 2), 0.5, np.float32))


def test_a_handful_of_passages_keep_their_answers() -> None:
    answers = np.array([[0.9, 0.1], [0.8, 0.2]], dtype=np.float32)
    np.testing.assert_allclose(aligned(answers, np.array([10, 10])), answers, atol=0.01)


def test_a_label_without_a_training_text_is_given_to_no_passage() -> None:
    answers = aligned(np.full((50, 3), 1 / 3, np.float32), np.array([10, 0, 10]))
    np.testing.assert_allclose(answers, np.tile([0.5, 0, 0.5], (50, 1)), atol=1e-6)
