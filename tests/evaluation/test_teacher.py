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
    soft = soft_labels(known, ["a wave and a ship", "the summit ridge", "bank", "zzz qqq"], variant=variant, settings=SETTINGS, seed=0)
    assert soft.dtype == np.float32
    np.testing.assert_allclose(soft.sum(axis=1), 1, rtol=1e-5)
    assert [known.labels[at] for at in soft[:3].argmax(axis=1)] == ["sea", "hill", "money"]
    assert soft[3].max() < soft[:3].max(axis=1).min()


def test_of_two_labels_each_passage_gets_two_probabilities() -> None:
    soft = soft_labels(task(("wave", "sea"), ("ridge", "hill")), ["wave", "ridge"], variant="words", settings=SETTINGS, seed=0)
    assert soft.shape == (2, 2)
    assert soft.argmax(axis=1).tolist() == [1, 0]
