"""Exact BM25 for batches of queries: thousands of long queries against every passage.

    score(q, d) = sum over terms t of q:  count(t, q) * idf(t) * tf / (tf + k1 * (1 - b + b * length(d) / average length))
    idf(t)      = ln(1 + (N - df + 0.5) / (df + 0.5))

(Lucene since version 8, and bm25s with method "lucene"; Kamphuis et al. 2020). An impact (what one occurrence of t in q adds to d) is
rounded once to fixed point, to 2 ** -22 (2 ** -20 for some queries of hundreds of words); sums of impacts are exact. Ties go to the smaller
position.

    texts ─► terms in the index, counted; equal queries merged (`make_queries`, with statistics summed over all segments)
      ─► for each block of 4,096 passages, in a fixed shuffled order: impacts of the batch's postings, once for all queries
           ─► sums per query; passages that reach the query's threshold become candidates (`SearchBatch.scan`, for any of the blocks)
      ─► the best `limit` candidates of all blocks (`merge`)

Thresholds are estimated from the blocks scanned so far. If the merged result shows that an estimate was too high, the query is searched
again with the proven threshold. So results do not depend on the batch, the order, the segments, the threads or the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.config.retriever import MOST_K1
from cramlm.errors import UsageError
from cramlm.io.threads import Workers
from cramlm.records import BoolArray, Emit, Event, FloatArray, Int32Array, IntArray, silent
from cramlm.retrieval.bm25 import kernels
from cramlm.retrieval.bm25.analysis import PLAIN, Analyzer, Vocabulary
from cramlm.retrieval.bm25.kernels import BLOCK, CHUNK, BlockBuffers, Candidates, QueryTerms
from cramlm.retrieval.bm25.segment import Segment
from cramlm.storage.arrays import joined, offsets_of, spread

_EXACT: Final = 24  # bytes 0..23 are lengths 0..23
_LEADING: Final = 3  # bits kept after the first one


def _decoded_lengths() -> IntArray:
    code = np.arange(256 - _EXACT, dtype=np.int64)
    exponent, fraction = code >> _LEADING, code & ((1 << _LEADING) - 1)
    above = np.where(exponent == 0, fraction, (fraction | 1 << _LEADING) << np.maximum(exponent - 1, 0))
    return np.concatenate((np.arange(_EXACT), _EXACT + above))


# int64 (256,), ascending: the document length that each byte encodes. Source: Lucene 9, SmallFloat.byte4ToInt.
LENGTHS: Final = _decoded_lengths()


def lucene_lengths(lengths: npt.NDArray[np.integer]) -> IntArray:
    """Round each length (>= 0) down to one that Lucene can store in a byte; int64, the shape of `lengths`.

    With these lengths, scores and sets equal those of Lucene's BM25Similarity and of tantivy. Exact up to 39; above, up to 1/9 too small.
    """
    return LENGTHS[np.searchsorted(LENGTHS, lengths, side="right") - 1]


Float64Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Queries:
    """Distinct queries. Query q has the terms term[offsets[q]:offsets[q + 1]] (numbers of `vocabulary`, ascending), each `count` times.

    document_frequencies: int64 (terms of the vocabulary,), over all segments; terms with 0 are in no query. owner: int64 (texts,), the
    distinct query of each text; -1 if none of its terms is in the index.
    """

    vocabulary: Vocabulary
    document_frequencies: IntArray
    offsets: IntArray
    term: Int32Array
    count: IntArray
    owner: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, chosen: IntArray) -> Queries:
        """Return some of the queries, in the given order; each is its own owner."""
        sizes = np.diff(self.offsets)[chosen]
        index = spread(self.offsets[:-1][chosen], sizes)
        return Queries(
            self.vocabulary, self.document_frequencies, offsets_of(sizes), self.term[index], self.count[index], np.arange(len(chosen))
        )

    def sums(self, values: Float64Array) -> Float64Array:
        """Return the sum of `values` (one per term of each query), float64 (queries,)."""
        return np.add.reduceat(values, self.offsets[:-1]) if len(self) else np.zeros(0)


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """Texts as term numbers: text i has token[starts[i]:starts[i + 1]]."""

    vocabulary: Vocabulary
    token: Int32Array
    starts: IntArray

    def __len__(self) -> int:
        return len(self.starts) - 1


def tokenize_texts(texts: Sequence[str], analyzer: Analyzer = PLAIN) -> TokenizedTexts:
    """Tokenize texts with a new vocabulary of their terms, numbered in order of first occurrence."""
    vocabulary = Vocabulary(analyzer)
    return TokenizedTexts(vocabulary, *vocabulary.tokenize(*joined([text.encode("utf-8", "replace") for text in texts])))


def count_in_segments(tokens: TokenizedTexts, segments: Sequence[Segment]) -> IntArray:
    """Return the document frequency of each term over some segments, int64 (terms,)."""
    frequencies = np.zeros(len(tokens.vocabulary), np.int64)
    for segment in segments:
        numbers = segment.find_terms(tokens.vocabulary)
        found = numbers >= 0
        frequencies[found] += segment.document_frequencies[numbers[found]]
    return frequencies


def make_queries(tokens: TokenizedTexts, frequencies: IntArray) -> Queries:
    """Return the distinct queries, in the order of their first text. frequencies: document frequencies in the whole index."""
    terms = max(1, len(frequencies))
    text_of = np.repeat(np.arange(len(tokens)), np.diff(tokens.starts))
    indexed = frequencies[tokens.token] > 0
    pairs, counts = np.unique(text_of[indexed] * terms + tokens.token[indexed], return_counts=True)
    term = (pairs % terms).astype(np.int32)
    bounds = np.searchsorted(pairs, np.arange(len(tokens) + 1) * terms)
    owner = np.full(len(tokens), -1, np.int64)
    first: dict[bytes, int] = {}
    chosen: list[int] = []
    for text in range(len(tokens)):
        part = slice(bounds[text], bounds[text + 1])
        if content := term[part].tobytes() + counts[part].tobytes():
            if content not in first:
                first[content] = len(chosen)
                chosen.append(text)
            owner[text] = first[content]
    every = Queries(tokens.vocabulary, frequencies, bounds, term, counts.astype(np.int64), owner)
    distinct = every.take(np.array(chosen, np.int64))
    return Queries(tokens.vocabulary, frequencies, distinct.offsets, distinct.term, distinct.count, owner)


DENSE_SHARE: Final = 1 / 16  # a term in more than this share of the passages is added as a row, not posting by posting
MAX_DENSE_TERMS: Final = 1000
TYPICAL_SHARE: Final = 0.9  # share of the queries whose rows should sum within 8 bits

# Fixed point. A query's scores are multiples of 2 ** -fraction_bits, with the first of FRACTION_BITS that fits its scores into 32 bits. At
# WIDE_UP_TO bits or fewer, impacts have WIDE_FRACTION_BITS, sums have 64 bits, and the score is the sum shifted right. Other queries have
# at most MAX_WORDS words, each at most MAX_REPEATS times (a rounding error counts once per repeat). Invariant, asserted by
# `SearchBatch._assert_no_overflow`: an impact fits 32 bits, and 8 bits in coarse units (2 ** shift, shift <= MAX_COARSE_SHIFT); the sum of
# a query, with every word rounded up to a coarse unit, fits 32 bits. kernels.GROUP rows are added in 16 bits.
FRACTION_BITS: Final = (22, 20, 16, 12, 8, 4)
WIDE_UP_TO: Final = 16
WIDE_FRACTION_BITS: Final = 26
MAX_REPEATS: Final = 100
MAX_WORDS: Final = 2000
MAX_COARSE_SHIFT: Final = 18
MAX_SCORE: Final = 2**32 - (MAX_WORDS << MAX_COARSE_SHIFT)  # rounding up to coarse units may add one unit per word
assert 0 < MAX_SCORE < 2**32
assert WIDE_UP_TO <= max(FRACTION_BITS) < WIDE_FRACTION_BITS

MAX_CACHED_BYTES: Final = 1 << 30  # the postings of a larger index are released, each block after its scan
CANDIDATE_BYTES: Final = 512 << 20  # bounds the queries per scan of the index
FIRST_SAMPLE: Final = 256  # documents of the first block, for the first estimate of the thresholds
ESTIMATE_AFTER: Final = (1, 2, 8, 32)  # blocks

Norm: TypeAlias = Literal["exact", "lucene"]
PackedHits: TypeAlias = npt.NDArray[np.uint64]  # fixed-point score << 32 | ~position


@dataclass(frozen=True, slots=True)
class Scoring:
    """Parameters of BM25. norm: document lengths, exact or in one byte as Lucene stores them."""

    k1: float = 1.2
    b: float = 0.75
    norm: Norm = "exact"

    def __post_init__(self) -> None:
        """Raise UsageError if a parameter is out of range or no number."""
        are_numbers = isinstance(self.k1, Real) and isinstance(self.b, Real)  # also those of NumPy
        if not are_numbers or not 0 <= self.k1 <= MOST_K1 or not 0 <= self.b <= 1 or self.norm not in ("exact", "lucene"):
            values = f"k1 {self.k1}, b {self.b}, norm {self.norm!r}"
            raise UsageError(
                f"BM25 needs 0 <= k1 <= {MOST_K1}, 0 <= b <= 1 and norm 'exact' or 'lucene', got {values}; correct the setting"
            )
        object.__setattr__(self, "k1", float(self.k1))  # which JSON can hold
        object.__setattr__(self, "b", float(self.b))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a whole index that scoring needs: sums over its segments."""

    documents: int
    tokens: int

    @property
    def average_length(self) -> float:
        """Terms per document; 1 for an index without terms, to avoid a division by 0."""
        return self.tokens / self.documents if self.tokens else 1.0


def inverse_frequency(documents: int, frequencies: IntArray) -> Float64Array:
    """Return ln(1 + (N - df + 0.5) / (df + 0.5)), always > 0."""
    frequency: Float64Array = frequencies.astype(np.float64)
    weight: Float64Array = np.log1p((documents - frequency + 0.5) / (frequency + 0.5))
    return weight


def length_norms(lengths: Int32Array, statistics: Statistics, scoring: Scoring) -> Float64Array:
    """Return k1 * (1 - b + b * length / average length) of every document."""
    scored: Float64Array = (lucene_lengths(lengths) if scoring.norm == "lucene" else lengths).astype(np.float64)
    return scoring.k1 * (1.0 - scoring.b + scoring.b * scored / statistics.average_length)


def search_keys(
    segments: Sequence[tuple[int, Segment]],
    statistics: Statistics,
    queries: Queries,
    *,
    limit: int,
    scoring: Scoring,
    threads: int = 1,
    emit: Emit = silent,
) -> Iterator[tuple[int, int, PackedHits]]:
    """Yield (query, fraction bits, packed hits) of the best `limit` documents of every distinct query, best first, in the order of the
    queries. With the statistics of a whole index and some of its segments, the best hits of all groups of segments are those of the whole
    index: fraction bits do not depend on the segments.

    segments: each with the position of its first passage. Memory is bounded for any number of queries.

    Raises:
        UsageError: limit or threads is out of range.
    """
    if limit < 1 or threads < 1:
        raise UsageError(f"search needs limit >= 1 and threads >= 1, got limit {limit}, threads {threads}; correct the setting")
    limit = min(limit, statistics.documents)
    per_scan = max(64, CANDIDATE_BYTES // (8 * _capacity(limit) * threads))
    with Workers(threads) as workers:
        for first in range(0, len(queries), per_scan):
            chosen = np.arange(first, min(first + per_scan, len(queries)))
            results = _search(segments, statistics, queries.take(chosen), limit, scoring, workers, emit)
            for query, (fraction_bits, keys) in zip(chosen.tolist(), results, strict=True):
                yield query, fraction_bits, keys


def _search(
    segments: Sequence[tuple[int, Segment]],
    statistics: Statistics,
    queries: Queries,
    limit: int,
    scoring: Scoring,
    workers: Workers,
    emit: Emit,
) -> list[tuple[int, PackedHits]]:
    results: list[tuple[int, PackedHits]] = [(0, np.empty(0, np.uint64))] * len(queries)
    for fraction_bits, chosen in split_by_size(queries, statistics):
        pending, least, estimate = chosen, np.ones(len(chosen), np.uint32), True
        while len(pending):
            batch = SearchBatch(segments, statistics, queries.take(pending), limit, scoring, fraction_bits)
            on_block = _progress(emit, len(queries), len(batch.blocks), workers)
            scan = partial(batch.scan, least=least, estimate=estimate, on_block=on_block)
            parts = workers.all(partial(scan, batch.blocks[number :: workers.threads]) for number in range(workers.threads))
            hits, least = merge(parts, limit)
            for query, best in zip(pending.tolist(), hits, strict=True):
                results[query] = fraction_bits, best
            again = least > 0
            pending, least, estimate = pending[again], least[again], False
    return results


def merge(parts: Sequence[Candidates], limit: int) -> tuple[list[PackedHits], npt.NDArray[np.uint32]]:
    """Return (the best `limit` hits of each query over all parts, best first; the threshold to search a query again with, or 0).

    A query is searched again where an estimated threshold was above its last hit's score and may have excluded a hit.
    """
    count = len(parts[0].sizes)
    hits: list[PackedHits] = []
    again = np.zeros(count, np.uint32)
    highest = np.max([part.threshold for part in parts], axis=0)
    for query in range(count):
        keys = np.concatenate([part.keys[query, : part.sizes[query]] for part in parts])
        keys.sort()
        best = keys[::-1][:limit]
        proven = int(best[-1] >> np.uint64(32)) if len(best) == limit else 1
        if highest[query] > proven:
            again[query] = proven
        hits.append(best)
    return hits, again


def unpack(hits: PackedHits, fraction_bits: int) -> tuple[IntArray, FloatArray]:
    """Return (positions int64, scores float32)."""
    position = 0xFFFFFFFF - (hits & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return position, ((hits >> np.uint64(32)).astype(np.float64) * 2.0**-fraction_bits).astype(np.float32)


def split_by_size(queries: Queries, statistics: Statistics) -> Iterator[tuple[int, IntArray]]:
    """Yield (fraction bits, queries): the most fraction bits with which no score of the query can overflow 32 bits. Depends on the query
    and the statistics alone, not on the batch.

    Raises:
        UsageError: a query does not fit even with the fewest fraction bits.
    """
    weight = inverse_frequency(statistics.documents, queries.document_frequencies)[queries.term]
    highest, words = queries.sums(weight * queries.count), queries.sums(queries.count.astype(np.float64))
    most = np.maximum.reduceat(queries.count, queries.offsets[:-1]) if len(queries) else np.zeros(0, np.int64)
    taken = np.zeros(len(queries), np.bool_)
    for fraction_bits in FRACTION_BITS:
        short = (most <= MAX_REPEATS) & (words <= MAX_WORDS) | (fraction_bits <= WIDE_UP_TO)
        fits = ~taken & short & (highest * 2.0**fraction_bits + words <= MAX_SCORE)
        if fits.any():
            yield fraction_bits, np.flatnonzero(fits)
        taken |= fits
    if not taken.all():
        raise UsageError(f"a query of {int(words[~taken].max()):,} words is too long to search with; cut the text")


def _capacity(limit: int) -> int:
    return 2 * limit + 1024


class SearchBatch:
    """A batch of queries with equal fraction bits: term weights, and the scan of any of an index's blocks."""

    def __init__(
        self,
        segments: Sequence[tuple[int, Segment]],
        statistics: Statistics,
        queries: Queries,
        limit: int,
        scoring: Scoring,
        fraction_bits: int,
    ) -> None:
        self._segments, self._statistics, self._queries, self._limit, self._scoring = segments, statistics, queries, limit, scoring
        self._documents = sum(len(segment) for _, segment in segments)  # of these segments only: thresholds are estimated for them
        terms, local = np.unique(queries.term, return_inverse=True)
        self._terms = terms
        frequency = queries.document_frequencies[terms]
        self._drop = WIDE_FRACTION_BITS - fraction_bits if fraction_bits <= WIDE_UP_TO else None
        self._weight = inverse_frequency(statistics.documents, frequency) * 2.0 ** (fraction_bits + (self._drop or 0))
        self._choose_dense(frequency, local)
        self._order(local)
        self._assert_no_overflow(local)
        blocks = [(number, block) for number, (_, segment) in enumerate(segments) for block in range(-(-len(segment) // BLOCK))]
        self.blocks = [blocks[i] for i in np.random.default_rng(0).permutation(len(blocks)).tolist()]

    def scan(
        self,
        blocks: Sequence[tuple[int, int]],
        least: npt.NDArray[np.uint32],
        estimate: bool,
        on_block: Callable[[], None] = lambda: None,
    ) -> Candidates:
        """Return the candidates of all queries in some blocks (segment, block): the best `limit` of those that score at least `least`, if
        `estimate` is False; else those that also reach an estimated threshold. Thread-safe. on_block: called after every block.
        """
        queries = self._queries
        capacity = _capacity(self._limit)
        candidates = Candidates(np.empty((len(queries), capacity), np.uint64), np.zeros(len(queries), np.int64), least.copy())
        numbers: dict[int, tuple[Int32Array, Float64Array]] = {}
        buffers = self._allocate(blocks)
        release = sum(segment.mapped_bytes for _, segment in self._segments) > MAX_CACHED_BYTES
        seen = 0
        for done, (number, block) in enumerate(blocks, 1):
            first, segment = self._segments[number]
            if number not in numbers:
                numbers[number] = self._numbers_of(segment), length_norms(segment.lengths, self._statistics, self._scoring)
            number_of, norm = numbers[number]
            slots = slice(block * BLOCK, min((block + 1) * BLOCK, len(segment)))
            kernels.weigh_block(block, segment.blocks, number_of, self._weight, norm[slots], self._row_of_term, self._shift, buffers)
            position = first + segment.order[slots].astype(np.int64)
            if self._drop is None:
                if estimate and done == 1:  # a few documents first, so that not every document of the first block becomes a candidate
                    sample = position[:FIRST_SAMPLE]
                    kernels.score_block(self._query_terms, self._shift, self._limit, sample, buffers, candidates)
                    self._estimate(len(sample), candidates)
                    candidates.sizes[:] = 0
                kernels.score_block(self._query_terms, self._shift, self._limit, position, buffers, candidates)
            else:
                kernels.score_block_wide(self._query_terms, self._drop, self._limit, position, buffers, candidates)
            if release:
                segment.release(block)
            seen += len(position)
            if estimate and done in ESTIMATE_AFTER and done < len(blocks):
                self._estimate(seen, candidates)
            on_block()
        return candidates

    def _estimate(self, seen: int, candidates: Candidates) -> None:
        """Raise the thresholds to a score that more than `limit` of all documents very probably reach, given the documents seen so far."""
        expected = self._limit * seen / self._documents
        kernels.raise_thresholds(min(self._limit, int(expected + 4 * expected**0.5 + 5)), candidates)

    def _numbers_of(self, segment: Segment) -> Int32Array:
        """Return the number in the batch of every term of a segment, or -1."""
        result = np.full(segment.terms, -1, np.int32)
        in_segment = segment.find_terms(self._queries.vocabulary)[self._terms]
        present = np.flatnonzero(in_segment >= 0)
        result[in_segment[present]] = present
        return result

    def _allocate(self, blocks: Sequence[tuple[int, int]]) -> BlockBuffers:
        most = max(
            (int(np.diff(self._segments[segment][1].blocks.posting_offsets[block : block + 2])[0]) for segment, block in blocks), default=0
        )
        terms, rows = len(self._terms), max(1, self._rows)
        size = most + kernels.UNROLLED * terms
        return BlockBuffers(
            np.zeros(terms, np.uint64), np.zeros(terms, np.uint64), np.empty(size, np.uint16), np.empty(size, np.uint32),
            np.empty((rows, BLOCK), np.uint32), np.empty((BLOCK // CHUNK, rows, CHUNK), np.uint8), np.empty(rows, np.int64),
            np.zeros(BLOCK + CHUNK, np.uint32),
        )  # fmt: skip

    def _choose_dense(self, frequency: IntArray, local: IntArray) -> None:
        """Choose the terms that become rows, and the coarse unit: the finest in which the rows of nearly every query sum within 8 bits;
        for longer queries the finest in which a row fits 8 bits, since rounding up adds one unit per row.
        """
        dense = np.flatnonzero(frequency > self._statistics.documents * DENSE_SHARE) if self._drop is None else np.empty(0, np.int64)
        dense = dense[np.argsort(-frequency[dense], kind="stable")][:MAX_DENSE_TERMS]
        self._row_of_term = np.full(len(self._terms), -1, np.int64)
        self._row_of_term[dense] = np.arange(len(dense))
        highest = self._queries.sums(np.where(self._row_of_term[local] >= 0, self._queries.count * self._weight[local], 0.0))
        finest = int(np.ceil(np.log2(max(self._weight[dense].max(initial=0.0) / 250, 1.0))))
        typical = int(np.ceil(np.log2(max(np.quantile(highest, TYPICAL_SHARE) / 200, 1.0))))  # 200, not 255: room for rounding up
        self._rows, self._shift = len(dense), np.uint32(max(finest, typical) if typical <= MAX_COARSE_SHIFT else finest)

    def _order(self, local: IntArray) -> None:
        """Order each query's terms for the kernels: sparse ones, those of count 1 first; dense ones, repeated by their count."""
        queries = self._queries
        query = np.repeat(np.arange(len(queries)), np.diff(queries.offsets))
        is_dense: BoolArray = self._row_of_term[local] >= 0
        sparse = np.flatnonzero(~is_dense)
        sparse = sparse[np.lexsort((queries.count[sparse] > 1, query[sparse]))]
        dense = np.repeat(np.flatnonzero(is_dense), queries.count[is_dense])
        coarse = np.where(is_dense, queries.count * self._most_coarse[local], 0.0)
        numbers = np.arange(len(queries) + 1)
        sparse_offsets = np.searchsorted(query[sparse], numbers)
        once = np.bincount(query[sparse][queries.count[sparse] == 1], minlength=len(queries))
        self._query_terms = QueryTerms(
            sparse_offsets,
            sparse_offsets[:-1] + once,
            local[sparse],
            queries.count[sparse],
            np.searchsorted(query[dense], numbers),
            self._row_of_term[local[dense]],
            queries.sums(coarse) > 254,
        )

    @property
    def _most_coarse(self) -> Float64Array:
        """Upper bound of each term's coarse impact: an impact is at most the rounded weight."""
        coarse: Float64Array = np.floor((self._weight + 0.5) / 2.0**self._shift) + 1
        return coarse

    def _assert_no_overflow(self, local: IntArray) -> None:
        """Assert that no integer of the kernels can overflow in this batch (see the constants)."""
        assert self._weight.max(initial=0.0) < 2**32 - 1
        if self._drop is not None:
            return  # sums have 64 bits; `split_by_size` ensures that scores fit 32 bits
        is_dense = self._row_of_term >= 0
        assert self._shift <= MAX_COARSE_SHIFT
        assert self._most_coarse[is_dense].max(initial=0.0) < 2**8
        impact: Float64Array = np.where(is_dense, self._most_coarse * 2.0**self._shift, self._weight + 0.5)
        assert self._queries.sums(self._queries.count * impact[local]).max(initial=0.0) < 2**32


def _progress(emit: Emit, queries: int, total: int, workers: Workers) -> Callable[[], None]:
    """Return a function to call after every block, from any thread."""
    done = 0

    def on_block() -> None:
        nonlocal done
        workers.go_on()
        done += 1  # a race may lose a count: this is a progress bar
        emit(Event("progress", "search", f"{queries:,} distinct queries", done=done, total=total, unit="blocks"))

    return on_block
