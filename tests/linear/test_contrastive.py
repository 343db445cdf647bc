"""Word vectors trained on the halves of passages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from cramlm.io.threads import Workers
from cramlm.linear import contrastive
from cramlm.linear.contrastive import Halves, equalize, loss_of_halves, train_on_halves
from cramlm.linear.features import count_columns
from cramlm.linear.word_vectors import mean_vectors
from cramlm.records import FloatArray, Int32Array, IntArray
from cramlm.storage.arrays import offsets_of, unit_vectors

WIDTH = 16


def block(passages: Sequence[Sequence[int]]) -> tuple[Int32Array, IntArray]:
    return np.concatenate([np.array(each, np.int32) for each in passages]), offsets_of(np.array(list(map(len, passages)), np.int64))


def topics(count: int) -> list[tuple[Int32Array, IntArray]]:
    """Passages of 12 words in two blocks: words 0 to 19 are of one topic, 20 to 39 of the other, word 40 is in all."""
    rng = np.random.default_rng(0)
    passages = [[40, *rng.integers(0, 20, 10) + 20 * (number % 2), 40] for number in range(count)]
    return [block(passages[: count // 3]), block(passages[count // 3 :])]


def words(count: int) -> FloatArray:
    return unit_vectors(np.random.default_rng(1).standard_normal((count, WIDTH)).astype(np.float32))


@pytest.fixture
def batches_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrastive, "BATCH", 8)


def test_halves_have_no_frequent_word_and_a_common_word_in_one_of_them_only(batches_of_eight: None) -> None:
    weights = np.ones(12, np.float32)
    weights[0] = contrastive.MIN_WEIGHT / 2
    passage = [0, 1, 2, 3, 4, 12, 0, 5, 2, 6, 7, 8]  # 12 has no vector, 2 is in both halves
    halves = Halves([block([[9, 10, 11]] * 3), block([passage] * 8)], weights, seed=0)
    assert len(halves) == 1, "short passages are not trained on"
    ((column, offsets),) = halves.epoch()
    found = [column[first:end].tolist() for first, end in itertools.pairwise(offsets)]
    assert sorted(map(tuple, zip(map(tuple, found[:8]), map(tuple, found[8:]), strict=True))) == sorted(
        [((1, 2, 3, 4), (5, 6, 7, 8)), ((1, 3, 4), (5, 2, 6, 7, 8))] * 4
    )


def test_epochs_have_every_passage_in_another_order_and_depend_on_the_seed(batches_of_eight: None) -> None:
    def passages(seed: int) -> list[tuple[int, ...]]:
        halves = Halves(texts, np.ones(41, np.float32), seed=seed)
        return [tuple(column.tolist()) for _ in range(2) for column, _ in halves.epoch()]

    texts = topics(32)
    found = passages(1)
    assert len(found) == 8
    assert found[:4] != found[4:]
    assert found == passages(1)
    assert found != passages(2)


def test_the_loss_and_its_gradient_are_those_of_torch() -> None:
    sums = np.random.default_rng(2).standard_normal((2 * 6, WIDTH)).astype(np.float32)
    loss, gradient = loss_of_halves(sums)
    expected = torch.tensor(sums, requires_grad=True)
    first, second = torch.nn.functional.normalize(expected, dim=1).chunk(2)
    similarities, pairs = first @ second.T / contrastive.TEMPERATURE, torch.arange(6)
    losses = [torch.nn.functional.cross_entropy(each, pairs) for each in (similarities, similarities.T)]
    total = torch.stack(losses).mean()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, expected.grad, atol=1e-5)


def test_training_brings_words_of_a_topic_together_and_leaves_untrained_ones(batches_of_eight: None) -> None:
    weights = np.ones(42, np.float32)
    weights[40] = contrastive.MIN_WEIGHT / 2
    before = words(42)  # no passage has word 41
    vectors = before.copy()
    losses = list(train_on_halves(Halves(topics(800), weights, seed=0), vectors, weights))
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:20])
    directions = unit_vectors(vectors)
    within, between = directions[:20] @ directions[:20].T, directions[:20] @ directions[20:40].T
    assert within.mean() > 0.5
    assert between.mean() < 0
    assert np.array_equal(vectors[40:], before[40:])


def test_the_number_of_threads_changes_no_bit(batches_of_eight: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrastive, "_PART", 3)
    weights = np.linspace(0.2, 1, 41, dtype=np.float32)

    def trained(workers: Workers) -> FloatArray:
        vectors = words(41)
        list(train_on_halves(Halves(topics(100), weights, seed=0), vectors, weights, workers=workers))
        return equalize(Halves(topics(100), weights, seed=0), vectors, weights, workers=workers)

    with Workers(3) as workers, threadpool_limits(1):
        assert np.array_equal(trained(workers), trained(Workers(1)))


def test_equalized_vectors_differ_less_between_the_halves_of_a_passage_than_between_topics(batches_of_eight: None) -> None:
    vectors = words(40)
    vectors[:, 0] = np.where(np.arange(40) < 20, 0.3, -0.3)  # the topic
    vectors[:, 1] *= 4  # differs from word to word
    weights, texts = np.ones(40, np.float32), topics(800)
    halves = Halves(texts, weights, seed=0)
    column, offsets = next(halves.epoch())

    def ratio(of: FloatArray) -> float:
        rows = mean_vectors(count_columns(column, offsets, 40), of, weights)
        first, second = rows[:8], rows[8:]
        is_first_topic = column[offsets[:8]] < 20
        between = rows[:8][is_first_topic].mean(axis=0) - rows[:8][~is_first_topic].mean(axis=0)
        return float((between**2).sum() / ((first - second) ** 2).sum(axis=1).mean())

    assert ratio(equalize(halves, vectors, weights)) > 1.2 * ratio(vectors)
