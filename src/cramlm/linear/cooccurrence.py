"""Counting which tokens stand near which: a compiled loop over plain arrays.

Token embeddings to start from, out of the company that tokens keep in the text at hand.

A small encoder that sees a few million tokens spends most of them on learning which words are alike. Counting says so in seconds: the
positive pointwise mutual information of tokens at most `WINDOW` places apart, and its best approximation of the embedding's width
(Levy and Goldberg 2014: what skip-grams with negative sampling approach; their settings from Levy, Goldberg and Dagan 2015: neighbours
weighted by 1 / distance, their probabilities raised to 0.75, singular vectors times the square root of their values). The vocabulary head
is tied to the embedding, so that it starts with the same knowledge. What it is worth: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from cramlm.model.tokenizer import Tokens
from cramlm.records import FloatArray, IntArray
from cramlm.storage.compiled import jit


def _count_neighbours(ids, starts, column, weights, counts):  # type: ignore[no-untyped-def]
    """counts[a, column[b]] += weights[distance - 1] for all tokens a, b of a sequence that are at most len(weights) places apart.

    ids: end to end; starts: (n + 1,), where sequences begin. column: a place in the table for each token as a neighbour, -1 for none.
    """
    for sequence in range(len(starts) - 1):
        for right in range(starts[sequence], starts[sequence + 1]):
            there = column[ids[right]]
            for distance in range(1, min(len(weights), right - starts[sequence]) + 1):
                left = ids[right - distance]
                if there >= 0:
                    counts[left, there] += weights[distance - 1]
                if column[left] >= 0:
                    counts[ids[right], column[left]] += weights[distance - 1]


count_neighbours: Any = jit(_count_neighbours)


WINDOW = 4
NEIGHBOURS = 4096  # tokens that are counted as neighbours, the most frequent: the others' columns hold next to nothing
SMOOTHING = 0.75
FREQUENT = 1e-3  # a token of this share of the text counts half
_ITERATIONS = 3
_ROWS = 256  # that are weighed at a time


def token_embeddings(texts: Sequence[Tokens], *, vocab_size: int, width: int, std: float, seed: int) -> FloatArray:
    """(vocab_size, width) float32 with standard deviation `std` over tokens that were seen beside others; rows of the rest are NaN.

    The axes are turned by a random rotation, so that none is special. Takes vocab_size x min(vocab_size, 4096) x 4 bytes, some seconds.
    """
    information = _information(texts, _occurrences(texts, vocab_size))
    known = information.any(axis=1)  # not judged by the result: vectors of vanishing singular values are rounding noise in any row
    rank = min(width, *information.shape)
    values = np.zeros((vocab_size, width), dtype=np.float32)
    values[:, :rank] = _singular_vectors(information, rank, seed)
    turn, _ = np.linalg.qr(np.random.default_rng([seed, 0x636F]).standard_normal((width, width)))
    values = values @ turn.astype(np.float32)
    values[known] *= std / max(float(values[known].std()), 1e-12) if known.any() else 1.0
    values[~known] = np.nan
    return values


def _occurrences(texts: Sequence[Tokens], vocab_size: int) -> IntArray:
    """(vocab_size,): how often each token stands in all the texts."""
    return sum((np.bincount(each.ids, minlength=vocab_size) for each in texts), np.zeros(vocab_size, dtype=np.int64))


def _information(texts: Sequence[Tokens], seen: IntArray) -> FloatArray:
    """(tokens, neighbours) float32: positive pointwise mutual information."""
    columns = np.argsort(-seen, kind="stable")[: min(NEIGHBOURS, int((seen > 0).sum()))]
    column = np.full(len(seen), -1, dtype=np.int64)
    column[columns] = np.arange(len(columns))
    weights = np.array([12 // distance for distance in range(1, WINDOW + 1)], dtype=np.int32)  # whole numbers: sums are exact in any order
    counts = np.zeros((len(seen), len(columns)), dtype=np.int32)
    for each in texts:
        count_neighbours(each.ids, each.offsets, column, weights, counts)
    neighbours = counts.sum(axis=0, dtype=np.float64) ** SMOOTHING
    neighbours /= max(neighbours.sum(), 1.0)
    information: FloatArray = counts.view(np.float32)  # in place: the table may be large
    for first in range(0, len(counts), _ROWS):
        near = counts[first : first + _ROWS].astype(np.float64)
        expected = np.maximum(near.sum(axis=1, keepdims=True) * neighbours, 1e-300)
        information[first : first + _ROWS] = np.log(np.maximum(near, expected) / expected)
    return information


def _singular_vectors(matrix: FloatArray, rank: int, seed: int) -> FloatArray:
    """(rows, rank): left singular vectors times the square root of their values."""
    from sklearn.utils.extmath import randomized_svd  # a second to import

    vectors, sizes, _ = randomized_svd(matrix, rank, n_iter=_ITERATIONS, random_state=seed)
    result: FloatArray = vectors * np.sqrt(sizes)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class TextSpace:
    """Where texts lie: their tokens averaged, frequent ones for less, and what all texts share taken out.

    (Smooth inverse frequency: Arora, Liang and Ma 2017.) What is frequent and what is shared is learnt from some texts, and then fixed.
    """

    weighted: FloatArray
    shared: FloatArray

    @classmethod
    def of(cls, texts: Sequence[Tokens], embeddings: FloatArray) -> TextSpace:
        """Learnt from these texts. embeddings: (V, width); tokens whose row is not finite count as nothing."""
        seen = _occurrences(texts, len(embeddings))
        weights = FREQUENT / (FREQUENT + seen / max(seen.sum(), 1))
        width = embeddings.shape[1]
        units = _unit(np.nan_to_num(embeddings).astype(np.float32))
        plain = cls((weights[:, None] * units).astype(np.float32), np.zeros((width, 1), dtype=np.float32))
        scatter = sum((vectors.T @ vectors for vectors in map(plain.vectors, texts)), np.zeros((width, width), dtype=np.float32))
        return cls(plain.weighted, np.linalg.eigh(scatter)[1][:, -1:].astype(np.float32))

    def vectors(self, texts: Tokens) -> FloatArray:
        """(texts, width) float32, rows of length 1; 0 for a text without a single known token."""
        places = (np.ones(len(texts.ids), dtype=np.float32), texts.ids.astype(np.int32), texts.offsets)
        averaged = _unit(scipy.sparse.csr_matrix(places, shape=(len(texts), len(self.weighted))) @ self.weighted)
        return _unit(averaged - averaged @ self.shared @ self.shared.T)


def _unit(rows: Any) -> FloatArray:
    result: FloatArray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return result
