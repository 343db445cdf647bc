"""Token embeddings from co-occurrence counts (PPMI and truncated SVD), and vectors of texts that average them.

A small encoder that trains on a few million tokens spends most of them on learning which words are similar. Counts give that in seconds:
the positive pointwise mutual information (PPMI) of tokens at most `WINDOW` positions apart, and its truncated SVD of the embedding's width.
Skip-grams with negative sampling factorize nearly the same matrix (Levy and Goldberg 2014). Settings are those of Levy, Goldberg and Dagan
2015: counts weighted by 1 / distance, context probabilities raised to 0.75, singular vectors times the square root of the singular values.
The vocabulary head is tied to the embedding, so it starts from the same values. What they are worth: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from cramlm.model.tokenizer import Tokens
from cramlm.records import FloatArray, IntArray

WINDOW = 4
CONTEXTS = 4096  # tokens that are counted as contexts, the most frequent; columns of the others are nearly empty
SMOOTHING = 0.75
FREQUENT = 1e-3  # a token with this share of the text has half the weight of a rare one
_ITERATIONS = 3
_OVERSAMPLES = 10
_ROWS = 256  # rows of the PPMI matrix that are computed at a time


def token_embeddings(texts: Sequence[Tokens], *, vocab_size: int, width: int, std: float, seed: int) -> FloatArray:
    """Return (vocab_size, width) float32 with standard deviation `std` over the tokens that have a context; rows of other tokens are NaN.

    The axes are rotated at random, so that none is special. Takes some seconds and vocab_size * min(vocab_size, 4096) * 4 bytes.
    """
    ppmi = _ppmi(texts, _token_counts(texts, vocab_size))
    has_context = ppmi.any(axis=1)  # of the singular vectors, those of vanishing singular values are rounding noise in every row
    rank = min(width, *ppmi.shape)
    values = np.zeros((vocab_size, width), dtype=np.float32)
    values[:, :rank] = _singular_vectors(ppmi, rank, seed)
    rotation, _ = np.linalg.qr(np.random.default_rng([seed, 0x636F]).standard_normal((width, width)))
    values = values @ rotation.astype(np.float32)
    values[has_context] *= std / max(float(values[has_context].std()), 1e-12) if has_context.any() else 1.0
    values[~has_context] = np.nan
    return values


def _token_counts(texts: Sequence[Tokens], vocab_size: int) -> IntArray:
    """(vocab_size,): occurrences of each token in all texts."""
    return sum((np.bincount(each.ids, minlength=vocab_size) for each in texts), np.zeros(vocab_size, dtype=np.int64))


def _ppmi(texts: Sequence[Tokens], token_counts: IntArray) -> FloatArray:
    """(tokens, contexts) float32: positive pointwise mutual information."""
    from cramlm.linear.kernels import count_contexts  # here: imports numba, which text vectors do not need

    columns = np.argsort(-token_counts, kind="stable")[: min(CONTEXTS, int((token_counts > 0).sum()))]
    column = np.full(len(token_counts), -1, dtype=np.int64)
    column[columns] = np.arange(len(columns))
    weights = np.array([12 // distance for distance in range(1, WINDOW + 1)], dtype=np.int32)  # whole numbers: sums are exact in any order
    counts = np.zeros((len(token_counts), len(columns)), dtype=np.int32)
    for each in texts:
        count_contexts(each.ids, each.offsets, column, weights, counts)
    contexts = counts.sum(axis=0, dtype=np.float64) ** SMOOTHING
    contexts /= max(contexts.sum(), 1.0)
    ppmi: FloatArray = counts.view(np.float32)  # in place: the matrix may be large
    for first in range(0, len(counts), _ROWS):
        near = counts[first : first + _ROWS].astype(np.float64)
        expected = np.maximum(near.sum(axis=1, keepdims=True) * contexts, 1e-300)
        ppmi[first : first + _ROWS] = np.log(np.maximum(near, expected) / expected)
    return ppmi


def _singular_vectors(matrix: FloatArray, rank: int, seed: int) -> FloatArray:
    """(rows, rank): left singular vectors times the square root of their singular values.

    Randomized SVD (Halko, Martinsson and Tropp 2011, algorithms 4.4 and 5.1) with LU between the power iterations. The bits are those of
    scikit-learn's `randomized_svd`, whose import takes 2 CPU seconds.
    """
    import scipy.linalg  # here: text vectors do not need it

    rows, columns = matrix.shape
    tall = matrix if rows >= columns else matrix.T
    basis = np.random.RandomState(seed).normal(size=(tall.shape[1], rank + _OVERSAMPLES)).astype(np.float32)
    for _ in range(_ITERATIONS):
        basis, _ = scipy.linalg.lu(tall @ basis, permute_l=True, check_finite=False)
        basis, _ = scipy.linalg.lu(tall.T @ basis, permute_l=True, check_finite=False)
    basis, _ = scipy.linalg.qr(tall @ basis, mode="economic", check_finite=False)
    left, sizes, right = scipy.linalg.svd(basis.T @ tall, full_matrices=False)
    vectors = basis @ left if rows >= columns else right.T
    largest = vectors[np.argmax(np.abs(vectors), axis=0), np.arange(vectors.shape[1])]
    result: FloatArray = (vectors * np.sign(largest))[:, :rank] * np.sqrt(sizes[:rank])
    return result


@dataclass(frozen=True, slots=True, eq=False)
class TextSpace:
    """Vectors of texts: the weighted mean of their tokens' embeddings, less the direction that all texts share.

    Smooth inverse frequency (Arora, Liang and Ma 2017): frequent tokens have lower weights. Frequencies and the shared direction are those
    of the texts given to `of`. weighted: (V, width), embeddings times weights. shared: (width, 1).
    """

    weighted: FloatArray
    shared: FloatArray

    @classmethod
    def of(cls, texts: Sequence[Tokens], embeddings: FloatArray) -> TextSpace:
        """Fit to texts. embeddings: (V, width); rows that are not finite are taken as 0."""
        counts = _token_counts(texts, len(embeddings))
        weights = FREQUENT / (FREQUENT + counts / max(counts.sum(), 1))
        width = embeddings.shape[1]
        directions = _unit(np.nan_to_num(embeddings).astype(np.float32))
        plain = cls((weights[:, None] * directions).astype(np.float32), np.zeros((width, 1), dtype=np.float32))
        scatter = sum((vectors.T @ vectors for vectors in map(plain.vectors, texts)), np.zeros((width, width), dtype=np.float32))
        return cls(plain.weighted, np.linalg.eigh(scatter)[1][:, -1:].astype(np.float32))

    def vectors(self, texts: Tokens) -> FloatArray:
        """(texts, width) float32, rows of length 1; 0 for a text none of whose tokens has an embedding."""
        token_matrix = (np.ones(len(texts.ids), dtype=np.float32), texts.ids.astype(np.int32), texts.offsets)
        averaged = _unit(scipy.sparse.csr_matrix(token_matrix, shape=(len(texts), len(self.weighted))) @ self.weighted)
        return _unit(averaged - averaged @ self.shared @ self.shared.T)


def _unit(rows: Any) -> FloatArray:
    result: FloatArray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return result
