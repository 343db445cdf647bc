"""Vectors of tokens and words from co-occurrence counts.

Positive pointwise mutual information (PPMI) of what stands at most some positions apart, and its truncated SVD. Skip-grams with negative
sampling factorize nearly the same matrix (Levy and Goldberg 2014). Settings are those of Levy, Goldberg and Dagan 2015: counts weighted by
1 / distance, context probabilities raised to 0.75, singular vectors times the square root of the singular values.

A small encoder that trains on a few million tokens spends most of them on learning which words are similar; counts of the tokens give that
in seconds. The vocabulary head is tied to the embedding, so it starts from the same values. What it is worth: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import scipy.sparse
from llvmlite import ir
from numba import types
from numba.core import cgutils

from cramlm.io.threads import ONE, Workers
from cramlm.model.tokenizer import Tokens
from cramlm.records import FloatArray, Int32Array, IntArray
from cramlm.storage.arrays import offsets_of
from cramlm.storage.compiled import intrinsic, jit

LARGEST: Final = 2**31 - 1  # of int32; sums are taken in 64 bits
SMOOTHING: Final = 0.75
_ITERATIONS: Final = 3
_OVERSAMPLES: Final = 10
_SMALLEST_SIZE: Final = 1e-5  # of a singular value, as a share of the largest: below are rounding errors
CHUNK: Final = 8_000_000  # tokens that are counted at a time
_AHEAD: Final = 16  # occurrences of a token
_ROWS: Final = 256  # rows of the PPMI matrix that are computed at a time
TOKEN_WINDOW: Final = 4
TOKEN_CONTEXTS: Final = 4096  # tokens that are counted as contexts, the most frequent; columns of the others are nearly empty


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Begin to read element `index` of the memory of a contiguous array into the cache; index: int64.

    A processor reads ahead in order, not at the places of a list, and a loop of more than some 200 instructions waits for each place.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        declare: Any = cgutils.get_or_insert_function
        instruction = declare(builder.module, kind, "llvm.prefetch.p0i8")
        options = [ir.Constant(number, value) for value in (0, 3, 1)]  # for reading, into all caches, of data
        builder.call(instruction, [builder.bitcast(builder.gep(data, [arguments[1]]), byte), *options])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@jit
def separate_columns(ids, starts, column, columns):  # type: ignore[no-untyped-def]
    """columns[i + gap * (n + 1)] = column[ids[i]] for token i, in sequence n; -1 elsewhere, before, between and after the sequences.

    columns: int16 (tokens + gap * (sequences + 1),).
    """
    sequences = len(starts) - 1
    gap = (len(columns) - starts[sequences]) // (sequences + 1)
    for sequence in range(sequences):
        shift = gap * (sequence + 1)
        columns[starts[sequence] + shift - gap : starts[sequence] + shift] = -1
        for position in range(starts[sequence], starts[sequence + 1]):
            columns[position + shift] = column[ids[position]]
    columns[len(columns) - gap :] = -1


@jit
def count_contexts(ids, starts, columns, weights, counts, share, shares):  # type: ignore[no-untyped-def]
    """counts[a, column[b]] += weights[distance - 1] for all tokens a, b of a sequence that are at most len(weights) positions apart.

    Only for a with a % shares == share, so that calls with other shares may run at the same time. A count stays at `LARGEST`. ids:
    sequences, concatenated, less than 2^31 tokens; starts: (n + 1,), their offsets. columns: of `separate_columns`, len(weights) apart.

    Positions are sorted by token, because a row of counts then stays in the processor's cache, which the matrix is far too large for.
    """
    gap = len(weights)
    is_own = np.zeros(len(counts), np.bool_)
    is_own[share::shares] = True
    ends = np.zeros(len(counts) + 1, np.int64)
    for token in ids:
        if is_own[token]:
            ends[token + 1] += 1
    for token in range(len(counts)):
        ends[token + 1] += ends[token]
    positions = np.empty(ends[-1], np.int32)
    for sequence in range(len(starts) - 1):
        shift = gap * (sequence + 1)
        for position in range(starts[sequence], starts[sequence + 1]):
            token = ids[position]
            if is_own[token]:
                positions[ends[token]] = position + shift
                ends[token] += 1
    first = 0
    for token in range(len(counts)):  # each end is the next token's start, moved by its own tokens
        row = counts[token]
        for number in range(first, ends[token]):
            ahead = np.int64(positions[min(number + _AHEAD, len(positions) - 1)])
            prefetch(columns, ahead - gap)
            prefetch(columns, ahead + gap)
            near = columns[positions[number] - gap : positions[number] + gap + 1]
            for distance in range(1, gap + 1):
                for context in (near[gap - distance], near[gap + distance]):
                    if context >= 0:
                        row[context] = min(row[context] + weights[distance - 1], LARGEST)
        first = ends[token]


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


def ppmi(
    texts: Iterable[Tokens], token_counts: IntArray, *, contexts: int, window: int, workers: Workers = ONE
) -> tuple[FloatArray, Contexts]:
    """Positive pointwise mutual information of tokens at most `window` positions apart, (tokens, contexts) float32; and the contexts.

    token_counts: occurrences of each token, (tokens,). contexts: the number of tokens that are counted as contexts, the most frequent; less
    than 2^15.
    """
    columns = np.argsort(-token_counts, kind="stable")[: min(contexts, int((token_counts > 0).sum()))]
    column = np.full(len(token_counts), -1, dtype=np.int64)
    column[columns] = np.arange(len(columns))
    weights = np.array([12 // distance for distance in range(1, window + 1)], dtype=np.int32)  # whole numbers: sums are exact in any order
    counts = np.zeros((len(token_counts), len(columns)), dtype=np.int32)
    for ids, offsets in _chunks(texts):
        separated = np.empty(len(ids) + window * len(offsets), np.int16)
        separate_columns(ids, offsets, column, separated)
        inputs = ids, offsets, separated, weights, counts
        workers.all(partial(count_contexts, *inputs, share, workers.threads) for share in range(workers.threads))
    shares = counts.sum(axis=0, dtype=np.float64) ** SMOOTHING
    shares /= max(shares.sum(), 1.0)
    matrix: FloatArray = counts.view(np.float32)  # in place: the matrix may be large

    def inform(first: int) -> None:
        near = counts[first : first + _ROWS].astype(np.float64)
        expected = np.maximum(near.sum(axis=1, keepdims=True) * shares, 1e-300)
        matrix[first : first + _ROWS] = _information(near, expected)

    workers.all(partial(inform, first) for first in range(0, len(counts), _ROWS))
    return matrix, Contexts(column, weights, shares)


def _chunks(texts: Iterable[Tokens]) -> Iterator[tuple[npt.NDArray[Any], IntArray]]:
    """Yield texts together, as ids and offsets, until they have `CHUNK` tokens."""
    waiting: list[Tokens] = []
    for each in texts:
        waiting.append(each)
        if sum(len(one.ids) for one in waiting) >= CHUNK:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(texts: Sequence[Tokens]) -> tuple[npt.NDArray[Any], IntArray]:
    return np.concatenate([each.ids for each in texts]), offsets_of(np.concatenate([np.diff(each.offsets) for each in texts]))


def _information(near: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Positive pointwise mutual information of counts and of what would be expected without association (above 0), of equal shape."""
    information: npt.NDArray[np.float64] = np.log(np.maximum(near, expected) / expected)
    return information


def singular_vectors(matrix: FloatArray, rank: int, *, seed: int, threads: int = 1) -> tuple[FloatArray, FloatArray]:
    """Left singular vectors times the square root of their singular values, (rows, rank) float32; and the projection that takes a row of
    the matrix to its vector, (columns, rank) float32.

    Randomized SVD (Halko, Martinsson and Tropp 2011, algorithms 4.4 and 5.1) with LU between the power iterations. The bits are those of
    scikit-learn's `randomized_svd`, whose import takes 2 CPU seconds, and depend on the number of threads.
    """
    import scipy.linalg  # here: a forecast does not need it; before the limit: its BLAS is not NumPy's, and only a loaded one is limited
    from threadpoolctl import threadpool_limits

    rows, columns = matrix.shape
    tall = matrix if rows >= columns else matrix.T
    basis = np.random.RandomState(seed).normal(size=(tall.shape[1], rank + _OVERSAMPLES)).astype(np.float32)
    with threadpool_limits(limits=threads, user_api="blas"):
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


def token_embeddings(texts: Sequence[Tokens], *, vocab_size: int, width: int, std: float, seed: int, workers: Workers = ONE) -> FloatArray:
    """Return (vocab_size, width) float32 with standard deviation `std` over the tokens that have a context; rows of other tokens are NaN.

    The axes are rotated at random, so that none is special. Takes some seconds and vocab_size * min(vocab_size, 4096) * 4 bytes.
    """
    matrix, _ = ppmi(texts, count_tokens(texts, vocab_size), contexts=TOKEN_CONTEXTS, window=TOKEN_WINDOW, workers=workers)
    has_context = matrix.any(axis=1)  # of the singular vectors, those of vanishing singular values are rounding noise in every row
    rank = min(width, *matrix.shape)
    values = np.zeros((vocab_size, width), dtype=np.float32)
    values[:, :rank], _ = singular_vectors(matrix, rank, seed=seed, threads=workers.threads)
    rotation, _ = np.linalg.qr(np.random.default_rng([seed, 0x636F]).standard_normal((width, width)))
    values = values @ rotation.astype(np.float32)
    values[has_context] *= std / max(float(values[has_context].std()), 1e-12) if has_context.any() else 1.0
    values[~has_context] = np.nan
    return values


def count_tokens(texts: Sequence[Tokens], vocab_size: int) -> IntArray:
    """(vocab_size,): occurrences of each token in all texts."""
    return sum((np.bincount(each.ids, minlength=vocab_size) for each in texts), np.zeros(vocab_size, dtype=np.int64))


def rare_rows(texts: Sequence[tuple[Int32Array, IntArray]], first: int, end: int, contexts: Contexts, *, workers: Workers = ONE) -> Any:
    """Rows of `ppmi` of the words from `first` to `end` - 1, CSR (end - first, contexts) float32. As a context they are one with `end`."""
    column = np.append(contexts.column, np.full(end - first, contexts.column[first]))
    shape = end - first, len(contexts.shares)

    def count(ids: Int32Array, offsets: IntArray) -> Any:
        rare = int(((ids >= first) & (ids < end)).sum())
        entries = np.empty((3, 2 * len(contexts.weights) * rare), np.int32)
        rows, columns, weights = entries[:, : list_contexts(ids, offsets, first, end, column, contexts.weights, entries)]
        return scipy.sparse.csr_matrix((weights, (rows, columns)), shape=shape)

    counts = sum(workers.all(partial(count, *block) for block in texts), scipy.sparse.csr_matrix(shape, dtype=np.int32))
    sums = np.asarray(counts.sum(axis=1, dtype=np.float64)).ravel()
    expected = np.repeat(sums, np.diff(counts.indptr)) * contexts.shares[counts.indices]
    information = _information(counts.data, expected)
    return scipy.sparse.csr_matrix((information.astype(np.float32), counts.indices, counts.indptr), shape=shape)
