"""Word vectors of a corpus trained so that the mean over one half of a passage is near that of its other half, and far from other passages.

Co-occurrence counts say which words are used alike; labels follow what a text is about, which both halves of a passage share. The loss is
the cross-entropy of finding a passage's second half among those of a batch by cosine similarity, and its first half by the second
(InfoNCE; van den Oord, Li and Vinyals 2018). A word that both halves have is left out of one of them, so that the halves must be found by
words that are used alike, not by equal ones. Rows are updated by AdaGrad with one accumulator a word (Duchi, Hazan and Singer 2011).

Afterwards directions in which the halves of a passage differ are shortened (`equalize`), so that a linear model of few texts, which is
regularized alike in all directions, uses those that tell texts apart. Figures: docs/log.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.linear.features import count_columns
from cramlm.linear.word_vectors import mean_vectors
from cramlm.records import FloatArray, Int32Array, IntArray
from cramlm.storage.arrays import offsets_of
from cramlm.storage.compiled import jit

BATCH: Final = 512  # passages
MIN_BATCHES: Final = 10
"""The vectors of a corpus with fewer passages than this many batches stay as they are."""
MAX_PASSAGES: Final = 420_000
"""Of a larger corpus, a random sample of this size is trained on."""
MIN_WORDS: Final = 10
"""A shorter passage is not trained on."""
MIN_WEIGHT: Final = 0.1
"""Of a word that is trained; more frequent words, half of a text, keep their vectors."""
EPOCHS: Final = 2
LEARNING_RATE: Final = 0.2  # of rows of length 1; decays to 0 linearly
TEMPERATURE: Final = 0.15
EQUALIZED_PASSAGES: Final = 40_000
EXPONENT: Final = -0.25
"""Of the covariance of the differences of halves; -0.5 would make them equally long in all directions."""
_SMALLEST_VARIANCE: Final = 0.1  # as a share of the mean variance: smaller ones are rounding errors
_STREAM: Final = 0x68_61_6C_66

Texts: TypeAlias = Sequence[tuple[Int32Array, IntArray]]
"""Blocks of passages: the words of each, as rows of the vectors (any other number is a word without a vector), and their offsets."""


def training_settings() -> dict[str, float]:
    """What the vectors of a corpus depend on."""
    return {
        "batch": BATCH,
        "min_batches": MIN_BATCHES,
        "max_passages": MAX_PASSAGES,
        "min_words": MIN_WORDS,
        "min_weight": MIN_WEIGHT,
        "epochs": EPOCHS,
        "learning_rate": LEARNING_RATE,
        "temperature": TEMPERATURE,
        "equalized_passages": EQUALIZED_PASSAGES,
        "exponent": EXPONENT,
    }


@jit
def split_halves(ids, starts, numbers, is_trained, is_there, column, offsets):  # type: ignore[no-untyped-def]
    """Write the words of the first halves of all passages, then of the second ones, to `column`, and their offsets.

    A word that both halves of a passage have is left out of the first one if its number plus that of the passage is odd, else of the second
    one. ids, starts: the passages, concatenated. is_trained: bool (words,); other words are left out, and numbers that are not of words.
    is_there: bool (words,), False before and after.
    """
    written = 0
    count = len(starts) - 1
    for half in range(2):
        for passage in range(count):
            bounds = starts[passage], (starts[passage] + starts[passage + 1]) // 2, starts[passage + 1]
            others = ids[bounds[1 - half] : bounds[2 - half]]
            for word in others:
                if 0 <= word < len(is_there):
                    is_there[word] = True
            for word in ids[bounds[half] : bounds[half + 1]]:
                if 0 <= word < len(is_trained) and is_trained[word] and (not is_there[word] or (word + numbers[passage]) % 2 == half):
                    column[written] = word
                    written += 1
            for word in others:
                if 0 <= word < len(is_there):
                    is_there[word] = False
            offsets[half * count + passage + 1] = written


@jit
def number_words(column, words, number):  # type: ignore[no-untyped-def]
    """Write the distinct words of `column` to `words`, replace each by its place there, and return how many they are.

    number: int32 (all words,), -1 before and after.
    """
    count = 0
    for position in range(len(column)):
        word = column[position]
        if number[word] < 0:
            number[word] = count
            words[count] = word
            count += 1
        column[position] = number[word]
    for word in words[:count]:
        number[word] = -1
    return count


@jit
def add_rows(rows, weights, column, offsets, sums):  # type: ignore[no-untyped-def]
    """sums[text] = the sum of weights[word] * rows[word] over the words of each text."""
    for text in range(len(offsets) - 1):
        sums[text] = 0
        for word in column[offsets[text] : offsets[text + 1]]:
            for each in range(rows.shape[1]):
                sums[text, each] += weights[word] * rows[word, each]


@jit
def add_gradients(of_sums, weights, column, offsets, of_rows):  # type: ignore[no-untyped-def]
    """Write the gradient of `rows` in `add_rows` to `of_rows`, from that of `sums`."""
    of_rows[:] = 0
    for text in range(len(offsets) - 1):
        for word in column[offsets[text] : offsets[text + 1]]:
            for each in range(of_rows.shape[1]):
                of_rows[word, each] += weights[word] * of_sums[text, each]


@jit
def update_rows(vectors, words, of_rows, squares, rate):  # type: ignore[no-untyped-def]
    """A step of AdaGrad on the vectors of `words`, whose gradients are `of_rows`. squares: float32 (all words,), the accumulators."""
    for place in range(len(words)):
        word = words[place]
        for each in range(vectors.shape[1]):
            squares[word] += of_rows[place, each] * of_rows[place, each]
        step = rate / np.sqrt(squares[word] + np.float32(1e-12))
        for each in range(vectors.shape[1]):
            vectors[word, each] -= step * of_rows[place, each]


class Halves:
    """The halves of random passages of a corpus in batches, without frequent words and without those that both halves have.

    weights: (words,), of a word in the mean over a text.
    """

    def __init__(self, texts: Texts, weights: FloatArray, *, seed: int) -> None:
        lengths = np.concatenate([np.diff(offsets) for _, offsets in texts]) if texts else np.zeros(0, np.int64)
        self._random = np.random.Generator(np.random.Philox(key=[seed, _STREAM]))
        self._passages = self._random.permutation(np.flatnonzero(lengths >= MIN_WORDS))[:MAX_PASSAGES]
        self._texts, self._is_trained, self._is_there = texts, weights >= MIN_WEIGHT, np.zeros(len(weights), np.bool_)
        self._firsts = offsets_of(np.array([len(offsets) - 1 for _, offsets in texts], np.int64))

    def __len__(self) -> int:
        """The number of batches of an epoch; passages that do not fill a batch are left out of it."""
        return len(self._passages) // BATCH

    @property
    def passages(self) -> int:
        """The number of passages of an epoch."""
        return len(self) * BATCH

    def epoch(self) -> Iterator[tuple[Int32Array, IntArray]]:
        """Words and offsets of the first halves of the passages of a batch, then of the second ones, in a new order at each call."""
        order = self._random.permutation(self._passages)
        for number in range(len(self)):
            yield self._halves(order[number * BATCH : (number + 1) * BATCH])

    def _halves(self, passages: IntArray) -> tuple[Int32Array, IntArray]:
        blocks = np.searchsorted(self._firsts, passages, side="right") - 1
        parts = []
        for block, row in zip(blocks.tolist(), (passages - self._firsts[blocks]).tolist(), strict=True):
            ids, offsets = self._texts[block]
            parts.append(ids[offsets[row] : offsets[row + 1]])
        ids, starts = np.concatenate(parts), offsets_of(np.array([len(part) for part in parts], np.int64))
        column, offsets = np.empty(len(ids), np.int32), np.zeros(2 * len(passages) + 1, np.int64)
        split_halves(ids, starts, passages, self._is_trained, self._is_there, column, offsets)
        return column[: offsets[-1]], offsets


def train_on_halves(halves: Halves, vectors: FloatArray, weights: FloatArray) -> Iterator[float]:
    """Train `vectors`, (words, width) of length 1, in place for `EPOCHS`; yield the loss of each batch in nats."""
    squares, number = np.zeros(len(vectors), np.float32), np.full(len(vectors), -1, np.int32)
    sums = np.empty((2 * BATCH, vectors.shape[1]), np.float32)
    batches = itertools.chain.from_iterable(halves.epoch() for _ in range(EPOCHS))
    for done, (column, offsets) in enumerate(batches):
        words = np.empty(len(column), np.int32)
        words = words[: number_words(column, words, number)]
        rows = vectors[words]  # beside each other: a text then reads less memory
        add_rows(rows, weights[words], column, offsets, sums)
        loss, of_sums = loss_of_halves(sums)
        add_gradients(of_sums, weights[words], column, offsets, rows)
        update_rows(vectors, words, rows, squares, np.float32(LEARNING_RATE * (1 - done / (EPOCHS * len(halves)))))
        yield loss


def loss_of_halves(sums: FloatArray) -> tuple[float, FloatArray]:
    """The mean loss of a batch in nats and its gradient. sums: (2 * n, width), of the first halves of n passages, then the second ones."""
    lengths = np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.float32(1e-6))
    units = sums / lengths
    count = len(sums) // 2
    first, second = units[:count], units[count:]
    similarities = first @ second.T / np.float32(TEMPERATURE)
    exponentials = np.exp(similarities - similarities.max())
    by_first = exponentials / exponentials.sum(axis=1, keepdims=True)
    by_second = exponentials / exponentials.sum(axis=0, keepdims=True)
    pairs = np.arange(count)
    loss = -float(np.log(by_first[pairs, pairs] * by_second[pairs, pairs]).mean()) / 2
    of_similarities = (by_first + by_second) / 2
    of_similarities[pairs, pairs] -= 1
    of_similarities /= np.float32(TEMPERATURE * count)
    of_units = np.vstack([of_similarities @ second, of_similarities.T @ first])
    return loss, (of_units - units * (of_units * units).sum(axis=1, keepdims=True)) / lengths


def equalize(halves: Halves, vectors: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the vectors with the directions shortened in which the halves of a passage differ.

    Rows are multiplied by the covariance of these differences to the power `EXPONENT`.
    """
    scatter: npt.NDArray[Any] = np.zeros((vectors.shape[1],) * 2, np.float64)
    for column, offsets in itertools.islice(halves.epoch(), EQUALIZED_PASSAGES // BATCH):
        rows = mean_vectors(count_columns(column, offsets, len(vectors)), vectors, weights)
        differences = rows[:BATCH] - rows[BATCH:]
        scatter += differences.T @ differences
    if not scatter.any():  # every word is frequent
        return vectors
    variances, axes = np.linalg.eigh(scatter)
    bounded = np.maximum(variances, _SMALLEST_VARIANCE * variances.mean())
    equalized: FloatArray = vectors @ ((axes * bounded**EXPONENT) @ axes.T).astype(np.float32)
    return equalized
