"""Vectors of tokens and words from co-occurrence counts.

Positive pointwise mutual information (PPMI) of what stands at most some positions apart, and its truncated SVD. Skip-grams with negative
sampling factorize nearly the same matrix (Levy and Goldberg 2014). Settings are those of Levy, Goldberg and Dagan 2015: counts weighted by
1 / distance, context probabilities raised to 0.75, singular vectors times the square root of the singular values.

A small encoder that trains on a few million tokens spends most of them on learning which words are similar; counts of the tokens give that
in seconds. The vocabulary head is tied to the embedding, so it starts from the same values. What it is worth: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import scipy.sparse

from cramlm.model.tokenizer import Tokens
from cramlm.records import FloatArray, Int32Array, IntArray
from cramlm.storage.compiled import jit

LARGEST: Final = 2**31 - 1  # of int32; sums are taken in 64 bits
SMOOTHING: Final = 0.75
_ITERATIONS: Final = 3
_OVERSAMPLES: Final = 10
_SMALLEST_SIZE: Final = 1e-5  # of a singular value, as a share of the largest: below are rounding errors
_ROWS: Final = 256  # rows of the PPMI matrix that are computed at a time
TOKEN_WINDOW: Final = 4
TOKEN_CONTEXTS: Final = 4096  # tokens that are counted as contexts, the most frequent; columns of the others are nearly empty


@jit
def count_contexts(ids, starts, column, weights, counts):  # type: ignore[no-untyped-def]
    """counts[a, column[b]] += weights[distance - 1] for all tokens a, b of a sequence that are at most len(weights) positions apart.

    A count stays at `LARGEST`. ids: sequences, concatenated; starts: (n + 1,), their offsets. column: the column of each token as a
    context, -1 for none.
    """
    for sequence in range(len(starts) - 1):
        for right in range(starts[sequence], starts[sequence + 1]):
            context = column[ids[right]]
            for distance in range(1, min(len(weights), right - starts[sequence]) + 1):
                left = ids[right - distance]
                if context >= 0:
                    counts[left, context] = min(counts[left, context] + weights[distance - 1], LARGEST)
                if column[left] >= 0:
                    counts[ids[right], column[left]] = min(counts[ids[right], column[left]] + weights[distance - 1], LARGEST)


@jit
def list_contexts(ids, starts, first, end, column, weights, entries):  # type: ignore[no-untyped-def]
    """Write the contexts of the tokens from `first` to `end` - 1 as (id - first, column, weight) and return their number.

    entries: int32 (3, n), n at least 2 * len(weights) for each such token. Other arguments as in `count_contexts`.
    """
    written = 0
    for sequence in range(len(starts) - 1):
        for position in range(starts[sequence], starts[sequence + 1]):
            if not first <= ids[position] < end:
                continue
            for distance in range(1, len(weights) + 1):
                for other in (position - distance, position + distance):
                    if starts[sequence] <= other < starts[sequence + 1] and column[ids[other]] >= 0:
                        entries[0, written] = ids[position] - first
                        entries[1, written] = column[ids[other]]
                        entries[2, written] = weights[distance - 1]
                        written += 1
    return written


@dataclass(frozen=True, slots=True, eq=False)
class Contexts:
    """The contexts in which tokens are counted.

    column: int64 (tokens,), the column of each token as a context, -1 for none. weights: int32 (window,), of a context by its distance.
    shares: float64 (columns,), the smoothed probability of each context.
    """

    column: IntArray
    weights: Int32Array
    shares: npt.NDArray[np.float64]


def ppmi(texts: Iterable[Tokens], token_counts: IntArray, *, contexts: int, window: int) -> tuple[FloatArray, Contexts]:
    """Positive pointwise mutual information of tokens at most `window` positions apart, (tokens, contexts) float32; and the contexts.

    token_counts: occurrences of each token, (tokens,). contexts: the number of tokens that are counted as contexts, the most frequent.
    """
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
        matrix[first : first + _ROWS] = _information(near, expected)
    return matrix, Contexts(column, weights, shares)


def _information(near: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Positive pointwise mutual information of counts and of what would be expected without association (above 0), of equal shape."""
    information: npt.NDArray[np.float64] = np.log(np.maximum(near, expected) / expected)
    return information


def singular_vectors(matrix: FloatArray, rank: int, *, seed: int) -> tuple[FloatArray, FloatArray]:
    """Left singular vectors times the square root of their singular values, (rows, rank) float32; and the projection that takes a row of
    the matrix to its vector, (columns, rank) float32.

    Randomized SVD (Halko, Martinsson and Tropp 2011, algorithms 4.4 and 5.1) with LU between the power iterations. The bits are those of
    scikit-learn's `randomized_svd`, whose import takes 2 CPU seconds.
    """
    import scipy.linalg  # here: a forecast does not need it

    rows, columns = matrix.shape
    tall = matrix if rows >= columns else matrix.T
    basis = np.random.RandomState(seed).normal(size=(tall.shape[1], rank + _OVERSAMPLES)).astype(np.float32)
    for _ in range(_ITERATIONS):
        basis, _ = scipy.linalg.lu(tall @ basis, permute_l=True, check_finite=False)
        basis, _ = scipy.linalg.lu(tall.T @ basis, permute_l=True, check_finite=False)
    basis, _ = scipy.linalg.qr(tall @ basis, mode="economic", check_finite=False)
    left, sizes, right = scipy.linalg.svd(basis.T @ tall, full_matrices=False)
    of_rows, of_columns = (basis @ left, right.T) if rows >= columns else (right.T, basis @ left)
    signs = np.sign(of_rows[np.argmax(np.abs(of_rows), axis=0), np.arange(of_rows.shape[1])])
    roots = np.sqrt(sizes[:rank])
    inverse = np.where(sizes[:rank] > _SMALLEST_SIZE * sizes[0], 1 / np.maximum(roots, np.finfo(np.float32).tiny), 0)
    return (of_rows * signs)[:, :rank] * roots, ((of_columns * signs)[:, :rank] * inverse).astype(np.float32)


def token_embeddings(texts: Sequence[Tokens], *, vocab_size: int, width: int, std: float, seed: int) -> FloatArray:
    """Return (vocab_size, width) float32 with standard deviation `std` over the tokens that have a context; rows of other tokens are NaN.

    The axes are rotated at random, so that none is special. Takes some seconds and vocab_size * min(vocab_size, 4096) * 4 bytes.
    """
    matrix, _ = ppmi(texts, count_tokens(texts, vocab_size), contexts=TOKEN_CONTEXTS, window=TOKEN_WINDOW)
    has_context = matrix.any(axis=1)  # of the singular vectors, those of vanishing singular values are rounding noise in every row
    rank = min(width, *matrix.shape)
    values = np.zeros((vocab_size, width), dtype=np.float32)
    values[:, :rank], _ = singular_vectors(matrix, rank, seed=seed)
    rotation, _ = np.linalg.qr(np.random.default_rng([seed, 0x636F]).standard_normal((width, width)))
    values = values @ rotation.astype(np.float32)
    values[has_context] *= std / max(float(values[has_context].std()), 1e-12) if has_context.any() else 1.0
    values[~has_context] = np.nan
    return values


def count_tokens(texts: Sequence[Tokens], vocab_size: int) -> IntArray:
    """(vocab_size,): occurrences of each token in all texts."""
    return sum((np.bincount(each.ids, minlength=vocab_size) for each in texts), np.zeros(vocab_size, dtype=np.int64))


def rare_rows(texts: Sequence[tuple[Int32Array, IntArray]], first: int, end: int, contexts: Contexts) -> Any:
    """Rows of `ppmi` of the words from `first` to `end` - 1, CSR (end - first, contexts) float32. As a context they are one with `end`."""
    column = np.append(contexts.column, np.full(end - first, contexts.column[first]))
    shape = end - first, len(contexts.shares)
    counts = scipy.sparse.csr_matrix(shape, dtype=np.int32)
    for ids, offsets in texts:
        rare = int(((ids >= first) & (ids < end)).sum())
        entries = np.empty((3, 2 * len(contexts.weights) * rare), np.int32)
        rows, columns, weights = entries[:, : list_contexts(ids, offsets, first, end, column, contexts.weights, entries)]
        counts = counts + scipy.sparse.csr_matrix((weights, (rows, columns)), shape=shape)
    sums = np.asarray(counts.sum(axis=1, dtype=np.float64)).ravel()
    expected = np.repeat(sums, np.diff(counts.indptr)) * contexts.shares[counts.indices]
    information = _information(counts.data, expected)
    return scipy.sparse.csr_matrix((information.astype(np.float32), counts.indices, counts.indptr), shape=shape)
