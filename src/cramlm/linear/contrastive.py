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
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.io.threads import ONE, Workers
from cramlm.linear.cooccurrence import prefetch
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
_PART: Final = 128  # passages of a batch whose similarities one thread computes; not by the number of threads, which would change bits
_AHEAD: Final = 4  # words whose vectors are read before they are needed
_LINE: Final = 16  # numbers of float32 in a line of the cache
_SMALLEST_VARIANCE: Final = 0.1  # as a share of the mean variance: smaller ones are rounding errors
_STREAM: Final = 0x68_61_6C_66

Texts: TypeAlias = Sequence[tuple[Int32Array, IntArray]]
"""Blocks of passages: the words of each, as rows of the vectors (any other number is a word without a vector), and their offsets."""


def training_settings() -> dict[str, float]:
    """Return the settings on which the vectors of a corpus depend, for the key of the stage."""
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
def number_words(column, offsets, words, number, texts, ends):  # type: ignore[no-untyped-def]
    """Write the distinct words of `column` to `words`, replace each by its place there, and return how many they are.

    The texts of word i, with repeats, are texts[ends[i]:ends[i + 1]]. number: int32 (all words,), -1 before and after. ends: zeros.
    """
    count = 0
    for position in range(len(column)):
        word = column[position]
        if number[word] < 0:
            number[word] = count
            words[count] = word
            count += 1
        column[position] = number[word]
        ends[column[position] + 2] += 1  # two places on: as each text is written, its word's start moves up to its end
    for word in words[:count]:
        number[word] = -1
    for place in range(1, count + 2):
        ends[place] += ends[place - 1]
    for text in range(len(offsets) - 1):
        for place in column[offsets[text] : offsets[text + 1]]:
            texts[ends[place + 1]] = text
            ends[place + 1] += 1
    return count


@jit
def add_vectors(vectors, words, weights, texts, ends, sums, first, end):  # type: ignore[no-untyped-def]
    """sums[text, first:end] = the sum of the words' weights * vectors[word, first:end] over the words of each text.

    texts, ends: the texts of each of `words`, of `number_words`. Word by word, because the sums stay in the processor's cache and the
    vectors do not.
    """
    sums[:, first:end] = 0
    scaled = np.empty(end - first, np.float32)
    for place in range(len(words)):
        ahead = np.int64(words[min(place + _AHEAD, len(words) - 1)]) * vectors.shape[1]
        for each in range(first, end, _LINE):
            prefetch(vectors, np.int64(ahead + each))
        vector, weight = vectors[words[place], first:end], weights[place]
        for each in range(len(scaled)):
            scaled[each] = weight * vector[each]
        for text in texts[ends[place] : ends[place + 1]]:
            text_sum = sums[text, first:end]
            for each in range(len(scaled)):
                text_sum[each] += scaled[each]


@partial(jit, fastmath={"reassoc", "nsz"})
def _sum_of_squares(values):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for value in values:
        total += value * value
    return total


@jit
def update_vectors(vectors, words, weights, texts, ends, of_sums, squares, rate, first, end):  # type: ignore[no-untyped-def]
    """A step of AdaGrad on the vectors of the words from `first` to `end` - 1, from the gradient of `sums` in `add_vectors`.

    squares: float32 (all words,), the accumulators.
    """
    gradient = np.empty(vectors.shape[1], np.float32)
    for place in range(first, end):
        ahead = np.int64(words[min(place + _AHEAD, end - 1)]) * vectors.shape[1]
        for each in range(0, len(gradient), _LINE):
            prefetch(vectors, np.int64(ahead + each))
        gradient[:] = 0
        for text in texts[ends[place] : ends[place + 1]]:
            of_sum = of_sums[text]
            for each in range(len(gradient)):
                gradient[each] += of_sum[each]
        gradient *= weights[place]
        word = words[place]
        squares[word] += _sum_of_squares(gradient)
        step = rate / np.sqrt(squares[word] + np.float32(1e-12))
        vector = vectors[word]
        for each in range(len(gradient)):
            vector[each] -= step * gradient[each]


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
        """Return the number of batches of an epoch; passages that do not fill a batch are left out of it."""
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


def train_on_halves(halves: Halves, vectors: FloatArray, weights: FloatArray, *, workers: Workers = ONE) -> Iterator[float]:
    """Train `vectors`, (words, width) of length 1, in place for `EPOCHS`; yield the loss of each batch in nats.

    The number of threads changes no bit, if products of matrices use one thread each.
    """
    squares = np.zeros(len(vectors), np.float32)
    sums = np.empty((2 * BATCH, vectors.shape[1]), np.float32)
    batches = _numbered(halves, len(vectors))
    following = workers.start(partial(next, batches, None))
    done = 0
    while (batch := following()) is not None:
        following = workers.start(partial(next, batches, None))  # while this batch is trained on
        words, *of_words = batch
        inputs = vectors, words, weights[words], *of_words
        workers.ranges(vectors.shape[1], partial(add_vectors, *inputs, sums))
        loss, of_sums = loss_of_halves(sums, workers=workers)
        rate = np.float32(LEARNING_RATE * (1 - done / (EPOCHS * len(halves))))
        workers.ranges(len(words), partial(update_vectors, *inputs, of_sums, squares, rate))
        done += 1
        yield loss


def _numbered(halves: Halves, count: int) -> Iterator[tuple[Int32Array, Int32Array, IntArray]]:
    """The batches of all epochs: their distinct words, and the texts of each with the offsets of these (`number_words`)."""
    number = np.full(count, -1, np.int32)
    for column, offsets in itertools.chain.from_iterable(halves.epoch() for _ in range(EPOCHS)):
        words, texts, ends = np.empty(len(column), np.int32), np.empty(len(column), np.int32), np.zeros(len(column) + 2, np.int64)
        distinct = number_words(column, offsets, words, number, texts, ends)
        yield words[:distinct], texts, ends


def loss_of_halves(sums: FloatArray, *, workers: Workers = ONE) -> tuple[float, FloatArray]:
    """Return the mean loss of a batch in nats and its gradient. sums: (2 * n, width), first halves of n passages, then second halves."""
    lengths = np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.float32(1e-6))
    units = sums / lengths
    count = len(sums) // 2
    first, second = units[:count], units[count:]
    exponentials = np.empty((count, count), np.float32)
    of_first = np.empty_like(first)

    def compare(rows: slice) -> FloatArray:
        exponentials[rows] = np.exp(first[rows] @ second.T / np.float32(TEMPERATURE))  # at most e^(1 / TEMPERATURE)
        column_sums: FloatArray = exponentials[rows].sum(axis=0)
        return column_sums

    parts = [slice(start, start + _PART) for start in range(0, count, _PART)]
    column_sums = sum(workers.all(partial(compare, part) for part in parts), np.zeros(count, np.float32))

    def differentiate(rows: slice) -> tuple[float, FloatArray]:
        by_first = exponentials[rows] / exponentials[rows].sum(axis=1, keepdims=True)
        by_second = exponentials[rows] / column_sums
        places = np.arange(len(by_first))
        pairs = places, places + rows.start
        loss = -float(np.log(by_first[pairs] * by_second[pairs]).sum()) / (2 * count)
        of_similarities = (by_first + by_second) / 2
        of_similarities[pairs] -= 1
        of_similarities /= np.float32(TEMPERATURE * count)
        of_first[rows] = of_similarities @ second
        of_second: FloatArray = of_similarities.T @ first[rows]
        return loss, of_second

    losses, of_seconds = zip(*workers.all(partial(differentiate, part) for part in parts), strict=True)
    of_units = np.vstack([of_first, sum(of_seconds[1:], of_seconds[0])])
    return sum(losses), (of_units - units * (of_units * units).sum(axis=1, keepdims=True)) / lengths


def equalize(halves: Halves, vectors: FloatArray, weights: FloatArray, *, workers: Workers = ONE) -> FloatArray:
    """Return the vectors with the directions shortened in which the halves of a passage differ.

    Rows are multiplied by the covariance of these differences to the power `EXPONENT`.
    """

    def scatter_of(column: Int32Array, offsets: IntArray) -> npt.NDArray[np.float32]:
        rows = mean_vectors(count_columns(column, offsets, len(vectors)), vectors, weights)
        differences = rows[:BATCH] - rows[BATCH:]
        product: npt.NDArray[np.float32] = differences.T @ differences
        return product

    batches = itertools.islice(halves.epoch(), EQUALIZED_PASSAGES // BATCH)
    scatters = workers.all(partial(scatter_of, *batch) for batch in batches)
    scatter: npt.NDArray[Any] = sum(scatters, np.zeros((vectors.shape[1],) * 2, np.float64))
    if not scatter.any():  # every word is frequent
        return vectors
    variances, axes = np.linalg.eigh(scatter)
    bounded = np.maximum(variances, _SMALLEST_VARIANCE * variances.mean())
    equalized: FloatArray = vectors @ ((axes * bounded**EXPONENT) @ axes.T).astype(np.float32)
    return equalized
