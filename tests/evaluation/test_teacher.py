from __future__ import annotations

import numpy as np
import pytest

from cramlm.evaluation.baselines import Variant
from cramlm.evaluation.teacher import soft_labels
from cramlm.records import Example, Task

SETTINGS = {"c": 10.0, "weights": "rows alike"}


def task(*rows: tuple[str, str]) -> Task:
    train = tuple(Example(str(number), text, None, label) for number, (text, label) in enumerate(rows))
    return Task(train, train, (), tuple(sorted({label for _, label in rows})), False)


@pytest.mark.parametrize("variant", ["words", "tokens", "characters", "union"])
def test_a_passage_gets_the_label_whose_words_it_holds_and_one_without_known_words_gets_no_certainty(variant: Variant) -> None:
    known = task(("wave ship", "sea"), ("ship tide", "sea"), ("summit ridge", "hill"), ("ridge meadow", "hill"), ("euro bank", "money"))
    soft = soft_labels(
        known, ["a wave and a ship", "the summit ridge", "bank", "zzz qqq"], variant=variant, settings=SETTINGS, seed=0
    ).asked
    assert soft.dtype == np.float32
    np.testing.assert_allclose(soft.sum(axis=1), 1, rtol=1e-5)
    assert [known.labels[at] for at in soft[:3].argmax(axis=1)] == ["sea", "hill", "money"]
    assert soft[3].max() < soft[:3].max(axis=1).min()


def test_of_two_labels_each_passage_gets_two_probabilities() -> None:
    soft = soft_labels(task(("wave", "sea"), ("ridge", "hill")), ["wave", "ridge"], variant="words", settings=SETTINGS, seed=0).asked
    assert soft.shape == (2, 2)
    assert soft.argmax(axis=1).tolist() == [1, 0]


def test_a_training_text_is_labelled_by_a_model_that_has_not_seen_it() -> None:
    rows = [("wave ship tide", "sea"), ("ridge summit valley", "hill")] * 10
    wrong = ("wave ship tide harbour", "hill")  # its own label would teach the model that fits it too
    soft = soft_labels(task(*rows, wrong), [], own=True, variant="words", settings=SETTINGS, seed=3)
    assert soft.own.shape == (21, 2)
    np.testing.assert_allclose(soft.own.sum(axis=1), 1, rtol=1e-5)
    assert soft.own[:20].argmax(axis=1).tolist() == [1, 0] * 10
    assert soft.own[20].argmax() == 1
    assert soft.asked.shape == (0, 2)


def test_held_out_labels_are_the_same_for_the_same_seed_and_absent_where_nobody_wants_them() -> None:
    known = task(*[("wave ship", "sea"), ("ship tide", "sea"), ("summit ridge", "hill"), ("ridge meadow", "hill")] * 3)
    first, second = (soft_labels(known, ["ship"], own=True, variant="words", settings=SETTINGS, seed=5) for _ in range(2))
    assert np.array_equal(first.own, second.own)
    assert len(soft_labels(known, ["ship"], variant="words", settings=SETTINGS, seed=5).own) == 0


def test_a_label_with_a_single_text_is_no_trouble() -> None:
    soft = soft_labels(task(("wave", "sea"), ("ridge", "hill"), ("ship", "sea")), [], own=True, variant="words", settings=SETTINGS, seed=0)
    assert np.isfinite(soft.own).all()
