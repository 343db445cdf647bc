"""Vectors from co-occurrence counts: of tokens, for an encoder, and of the words of a whole corpus, for all tasks.

Positive pointwise mutual information (PPMI) of what stands at most some positions apart, and its truncated SVD. Skip-grams with negative
sampling factorize nearly the same matrix (Levy and Goldberg 2014). Settings are those of Levy, Goldberg and Dagan 2015: counts weighted by
1 / distance, context probabilities raised to 0.75, singular vectors times the square root of the singular values.

Tokens: a small encoder that trains on a few million tokens spends most of them on learning which words are similar; counts give that in
seconds. The vocabulary head is tied to the embedding, so it starts from the same values.

Words: the vector of a word that no labelled text has is close to those of similar words that labelled texts have; the passages retrieved
for one task are too few to learn such vectors. The most frequent words are factorized; the row of a rarer one is multiplied by the
projection that takes a row to its vector (folding-in; Berry, Dumais and O'Brien 1995), for a fraction of the time and memory. No label and
no task decides anything here: passages that equal a dev or test text are counted like all others. `<store>/word-vectors/<key>/` holds the
files of `WordVectors`. Settings of both, and what they are worth: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import scipy.sparse

from cramlm.data.corpus import MAX_RESIDENT_BYTES, Corpus
from cramlm.linear.features import count_columns
from cramlm.linear.word_vectors import FREQUENT, WordVectors
from cramlm.model.tokenizer import Tokens
from cramlm.records import Diacritics, Emit, Event, FloatArray, Int32Array, IntArray, silent
from cramlm.retrieval.bm25.analysis import PLAIN, Analyzer, Vocabulary
from cramlm.storage.arrays import unit_vectors
from cramlm.storage.artifacts import Artifact, hash_json, shared_stage
from cramlm.storage.compiled import jit

LARGEST: Final = 2**31 - 1  # of int32; sums are taken in 64 bits
SMOOTHING: Final = 0.75
_ITERATIONS: Final = 3
_OVERSAMPLES: Final = 10
_SMALLEST_SIZE: Final = 1e-5  # of a singular value, as a share of the largest: below are rounding errors
_ROWS: Final = 256  # rows of the PPMI matrix that are computed at a time
TOKEN_WINDOW: Final = 4
TOKEN_CONTEXTS: Final = 4096  # tokens that are counted as contexts, the most frequent; columns of the others are nearly empty

KIND: Final = "word-vectors"
CODE_FORMAT: Final = 1  # increase when the same corpus gives other files
WIDTH: Final = 256
WORD_WINDOW: Final = 8
FACTORIZED_WORDS: Final = 32_768  # the most frequent
MAX_WORDS: Final = 131_072
WORD_CONTEXTS: Final = 8192  # words that are counted as contexts, the most frequent
MIN_COUNT: Final = 3
"""A rarer word has no vector."""
MIN_FOLDED_COUNT: Final = 10
"""A word that is neither factorized nor this frequent has no vector."""
MAX_BYTES: Final = 600_000_000
"""Of a larger corpus, passages at equal distances are counted."""
_SHARED_PASSAGES: Final = 20_000  # that the shared direction is taken from
_BLOCK: Final = 20_000  # passages that are read at a time
_FACTORIZING: Final = 1.1e-7  # seconds per element of the matrix, on one core: 30 s for all words and contexts
_COUNTING: Final = 1e-7  # seconds per byte: words, their contexts, those of rarer words, the shared direction
_BYTES_PER_WORD: Final = 5.5  # of text, with what separates words
_FACTORS: Final = 4 * 4 * WIDTH  # bytes per word while the matrix is factorized: about four matrices of float32 (words, WIDTH)
_OVERHEAD: Final = 60e6  # kernels, and the vocabulary of all words


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


def forecast_word_vectors(corpus_bytes: int) -> tuple[float, int]:
    """The seconds of one core and the resident bytes that `count_word_vectors` takes for this much text, roughly.

    A text of n bytes has about 5.6 sqrt(n) words that are factorized, up to `FACTORIZED_WORDS`. The mapped text is resident, too, unless
    the corpus is so large that it releases it.
    """
    counted, words = min(corpus_bytes, MAX_BYTES), min(FACTORIZED_WORDS, int(5.6 * corpus_bytes**0.5))
    elements = words * min(words, WORD_CONTEXTS)
    mapped = corpus_bytes if corpus_bytes <= MAX_RESIDENT_BYTES else 0
    memory = 4 * elements + 4 * counted / _BYTES_PER_WORD + _FACTORS * words + mapped + (_OVERHEAD if corpus_bytes else 0)
    return _FACTORIZING * elements + _COUNTING * counted, round(memory)


def build_word_vectors(corpus: Corpus, store: Path, *, diacritics: Diacritics = "keep", emit: Emit = silent) -> Artifact:
    """Return the word vectors of a corpus from the store; count the corpus if they are missing there.

    diacritics: "remove" = of words without them; the vectors are for texts without them.

    Raises:
        ArtifactError: if those in the store are damaged. EnvironmentFault: if the disk cannot be written.
    """
    settings = {
        "width": WIDTH,
        "window": WORD_WINDOW,
        "factorized": FACTORIZED_WORDS,
        "words": MAX_WORDS,
        "contexts": WORD_CONTEXTS,
        "min_count": MIN_COUNT,
        "min_folded_count": MIN_FOLDED_COUNT,
        "frequent": FREQUENT,
    }
    analyzer = Analyzer(diacritics=diacritics)
    key = {"code": CODE_FORMAT, "terms": analyzer.name, "corpus": corpus.fingerprint, "bytes": MAX_BYTES, **settings}

    def write(folder: Path) -> None:
        count_word_vectors(corpus, analyzer, emit=emit).save(folder)

    return shared_stage(store / KIND / hash_json(key)[:16], kind=KIND, key=key, write=write, emit=emit)


def count_word_vectors(corpus: Corpus, analyzer: Analyzer = PLAIN, *, emit: Emit = silent) -> WordVectors:
    """Count the words of a corpus and factorize the counts; the same corpus gives the same vectors up to rounding."""
    vocabulary, texts = _read_words(corpus, analyzer, emit)
    counts = sum((np.bincount(ids, minlength=len(vocabulary)) for ids, _ in texts), np.zeros(len(vocabulary), np.int64))
    chosen = np.argsort(-counts, kind="stable")[:MAX_WORDS]
    chosen = chosen[counts[chosen] >= np.where(np.arange(len(chosen)) < FACTORIZED_WORDS, MIN_COUNT, MIN_FOLDED_COUNT)]
    words, total = tuple(vocabulary.term(number) for number in chosen.tolist()), int(counts.sum())
    if not words:
        return WordVectors((), np.zeros((0, WIDTH), np.float16), np.zeros(0, np.float32), np.zeros(WIDTH, np.float32))
    emit(Event("note", KIND, f"factorizing the co-occurrences of {len(words):,} words"))
    number = np.full(len(vocabulary), len(words), np.int32)  # one number for all words without a vector
    number[chosen] = np.arange(len(words), dtype=np.int32)
    for ids, _ in texts:
        np.take(number, ids, out=ids)
    directions = _directions(texts, counts[chosen], total)
    weights = (FREQUENT / (FREQUENT + counts[chosen] / total)).astype(np.float32)
    vectors = WordVectors(words, directions, weights, np.zeros(WIDTH, np.float32))
    passages = sum(len(offsets) - 1 for _, offsets in texts)
    emit(Event("done", KIND, f"vectors of {len(words):,} words, from {total:,} words of {passages:,} passages"))
    return WordVectors(words, directions, weights, _shared_direction(vectors, texts))


def _read_words(corpus: Corpus, analyzer: Analyzer, emit: Emit) -> tuple[Vocabulary, list[tuple[Int32Array, IntArray]]]:
    """The vocabulary, and for each block of passages the numbers of its words and their offsets."""
    size = sum(int(part.offsets[-1]) for part in corpus.parts)
    positions = np.arange(0, len(corpus), max(1, -(-size // MAX_BYTES)))
    progress: dict[str, Any] = {"total": len(positions), "unit": "passages"}
    emit(Event("start", KIND, "counting the words of the corpus", **progress))
    vocabulary, texts = Vocabulary(analyzer), []
    for first in range(0, len(positions), _BLOCK):
        texts.append(vocabulary.tokenize(*corpus.gather(positions[first : first + _BLOCK])))
        corpus.release()
        emit(Event("progress", KIND, done=min(first + _BLOCK, len(positions)), **progress))
    return vocabulary, texts


def _directions(texts: Sequence[tuple[Int32Array, IntArray]], counts: IntArray, total: int) -> npt.NDArray[np.float16]:
    """Rows of length 1, (words, WIDTH) float16. texts: numbers of words; `len(counts)` stands for every other word."""
    frequent = counts[:FACTORIZED_WORDS]
    others = len(frequent)  # the id of every word that is not factorized
    tokens = (Tokens(np.minimum(ids, others).view(np.uint32), offsets, np.arange(len(offsets) - 1)) for ids, offsets in texts)
    matrix, contexts = ppmi(tokens, np.append(frequent, total - frequent.sum()), contexts=WORD_CONTEXTS, window=WORD_WINDOW)
    rank = min(WIDTH, *matrix.shape)
    vectors, projection = singular_vectors(matrix, rank, seed=0)
    del matrix  # up to a gigabyte
    values = np.zeros((len(counts), WIDTH), dtype=np.float32)
    values[:others, :rank] = vectors[:others]
    if len(counts) > others:
        values[others:, :rank] = rare_rows(texts, others, len(counts), contexts) @ projection
    return unit_vectors(values).astype(np.float16)


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


def _shared_direction(vectors: WordVectors, texts: Sequence[tuple[Int32Array, IntArray]]) -> FloatArray:
    """The direction with the largest sum of squares over some passages, float32 (WIDTH,)."""
    step = max(1, sum(len(offsets) - 1 for _, offsets in texts) // _SHARED_PASSAGES)
    scatter = np.zeros((WIDTH, WIDTH), dtype=np.float32)
    for ids, offsets in texts:
        columns = np.where(ids < len(vectors.words), ids, np.int32(-1))
        rows = vectors.of_counts(count_columns(columns, offsets, len(vectors.words))[::step])
        scatter += rows.T @ rows
    return np.linalg.eigh(scatter)[1][:, -1].astype(np.float32)
