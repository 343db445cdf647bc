"""Vectors from co-occurrence counts: positive pointwise mutual information (PPMI) and truncated SVD; of tokens, for an encoder.

A small encoder that trains on a few million tokens spends most of them on learning which words are similar. Counts give that in seconds:
the PPMI of tokens at most `WINDOW` positions apart, and its truncated SVD of the embedding's width. Skip-grams with negative sampling
factorize nearly the same matrix (Levy and Goldberg 2014). Settings are those of Levy, Goldberg and Dagan 2015: counts weighted by
1 / distance, context probabilities raised to 0.75, singular vectors times the square root of the singular values.
The vocabulary head is tied to the embedding, so it starts from the same values. What they are worth: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cramlm.model.tokenizer import Tokens
from cramlm.records import FloatArray, IntArray

WINDOW = 4
CONTEXTS = 4096  # tokens that are counted as contexts, the most frequent; columns of the others are nearly empty
SMOOTHING = 0.75
_ITERATIONS = 3
_OVERSAMPLES = 10
_ROWS = 256  # rows of the PPMI matrix that are computed at a time


def token_embeddings(texts: Sequence[Tokens], *, vocab_size: int, width: int, std: float, seed: int) -> FloatArray:
    """Return (vocab_size, width) float32 with standard deviation `std` over the tokens that have a context; rows of other tokens are NaN.

    The axes are rotated at random, so that none is special. Takes some seconds and vocab_size * min(vocab_size, 4096) * 4 bytes.
    """
    matrix = ppmi(texts, _token_counts(texts, vocab_size))
    has_context = matrix.any(axis=1)  # of the singular vectors, those of vanishing singular values are rounding noise in every row
    rank = min(width, *matrix.shape)
    values = np.zeros((vocab_size, width), dtype=np.float32)
    values[:, :rank] = singular_vectors(matrix, rank, seed=seed)
    rotation, _ = np.linalg.qr(np.random.default_rng([seed, 0x636F]).standard_normal((width, width)))
    values = values @ rotation.astype(np.float32)
    values[has_context] *= std / max(float(values[has_context].std()), 1e-12) if has_context.any() else 1.0
    values[~has_context] = np.nan
    return values


def _token_counts(texts: Sequence[Tokens], vocab_size: int) -> IntArray:
    """(vocab_size,): occurrences of each token in all texts."""
    return sum((np.bincount(each.ids, minlength=vocab_size) for each in texts), np.zeros(vocab_size, dtype=np.int64))


def ppmi(texts: Sequence[Tokens], token_counts: IntArray, *, contexts: int = CONTEXTS, window: int = WINDOW) -> FloatArray:
    """(tokens, contexts) float32: positive pointwise mutual information of tokens at most `window` positions apart.

    token_counts: occurrences of each token, (tokens,). contexts: the number of tokens that are counted as contexts, the most frequent.
    """
    from cramlm.linear.kernels import count_contexts  # here: imports numba, which text vectors do not need

    columns = np.argsort(-token_counts, kind="stable")[: min(contexts, int((token_counts > 0).sum()))]
    column = np.full(len(token_counts), -1, dtype=np.int64)
    column[columns] = np.arange(len(columns))
    weights = np.array([12 // distance for distance in range(1, window + 1)], dtype=np.int32)  # whole numbers: sums are exact in any order
    counts = np.zeros((len(token_counts), len(columns)), dtype=np.int32)
    for each in texts:
        count_contexts(each.ids, each.offsets, column, weights, counts)
    shares = counts.sum(axis=0, dtype=np.float64) ** SMOOTHING
    shares /= max(shares.sum(), 1.0)
    matrix: FloatArray = counts.view(np.float32)  # in place: the matrix may be large
    for first in range(0, len(counts), _ROWS):
        near = counts[first : first + _ROWS].astype(np.float64)
        expected = np.maximum(near.sum(axis=1, keepdims=True) * shares, 1e-300)
        matrix[first : first + _ROWS] = np.log(np.maximum(near, expected) / expected)
    return matrix


def singular_vectors(matrix: FloatArray, rank: int, *, seed: int) -> FloatArray:
    """(rows, rank) float32: left singular vectors times the square root of their singular values.

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
