"""BM25 for batches: thousands of long queries against every passage, exactly.

    score(q, d) = sum over terms t of q:  count(t, q) * idf(t) * tf / (tf + k1 * (1 - b + b * length(d) / average length))
    idf(t)      = ln(1 + (N - df + 0.5) / (df + 0.5))

(Lucene since version 8, and bm25s with method "lucene"; Kamphuis et al. 2020). What one occurrence of t in q adds to d is rounded once, to
2 ** -22 (2 ** -20 for some queries of hundreds of words); the rest is whole numbers. Ties go to the smaller position. The way of
a batch:

    texts ─► terms, known ones, counted; equal queries made one (queries.py, with statistics summed over all shards)
      ─► for each block of 4,096 passages, in a fixed shuffled order: impacts of the batch's postings, once for all queries
           ─► added up per query; what reaches the query's threshold becomes a candidate (`Batch.scan`, for any part of the blocks)
      ─► the best `limit` of all candidates (`Batch.merge`)

Thresholds are first guessed from the blocks seen so far. If the merged result proves a guess too high, the query is run again from what is
proven. So results depend on none of the batch, the order, the shards, the threads or the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.errors import UsageError
from cramlm.records import BoolArray, Emit, Event, FloatArray, Int32Array, IntArray, silent
from cramlm.retrieval.bm25 import kernels
from cramlm.retrieval.bm25.analysis import Vocabulary
from cramlm.retrieval.bm25.kernels import BLOCK, CHUNK, Found, Plan, Room
from cramlm.retrieval.bm25.segment import Shard

_EXACT: Final = 24  # the bytes 0..23 stand for themselves
_LEADING: Final = 3  # bits kept after the first one


def _table() -> IntArray:
    code = np.arange(256 - _EXACT, dtype=np.int64)
    exponent, fraction = code >> _LEADING, code & ((1 << _LEADING) - 1)
    above = np.where(exponent == 0, fraction, (fraction | 1 << _LEADING) << np.maximum(exponent - 1, 0))
    return np.concatenate((np.arange(_EXACT), _EXACT + above))


# int64 (256,), ascending: the length that each byte stands for. Source: Lucene 9, SmallFloat.byte4ToInt.
LENGTHS: Final = _table()


def lucene_lengths(lengths: npt.NDArray[np.integer]) -> IntArray:
    """Each length (>= 0) rounded down to one that a byte can hold; int64, the shape of `lengths`."""
    return LENGTHS[np.searchsorted(LENGTHS, lengths, side="right") - 1]


Float64Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Queries:
    """Distinct queries: query q has term[offsets[q]:offsets[q + 1]] (numbers of `vocabulary`, ascending) with `count` in the query.

    document_frequencies: int64 (terms of the vocabulary,), over all shards; 0 = unknown, and in no query. owner: int64 (texts,), the
    distinct query that each text became; -1 if no term of it is in the index.
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
        """Some of the queries, in the order given; each is its own owner."""
        sizes = np.diff(self.offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        place = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][chosen] - offsets[:-1], sizes)
        return Queries(self.vocabulary, self.document_frequencies, offsets, self.term[place], self.count[place], np.arange(len(chosen)))

    def sums(self, values: Float64Array) -> Float64Array:
        """Per query, the sum of `values` (one per term)."""
        return np.add.reduceat(values, self.offsets[:-1]) if len(self) else np.zeros(0)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Texts as term numbers: text i has token[starts[i]:starts[i + 1]]."""

    vocabulary: Vocabulary
    token: Int32Array
    starts: IntArray

    def __len__(self) -> int:
        return len(self.starts) - 1


def tokenise_texts(texts: Sequence[str]) -> Tokens:
    """A vocabulary of these texts' terms alone, numbered in the order of their first occurrence; equal for equal texts."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    vocabulary = Vocabulary()
    return Tokens(vocabulary, *vocabulary.tokenise(np.frombuffer(b"".join(encoded), np.uint8), ends))


def count_documents(vocabulary: Vocabulary, shard: Shard) -> IntArray:
    """In how many of a shard's documents each term of a batch stands, int64 (terms,)."""
    numbers = shard.find_terms(vocabulary)
    return np.where(numbers >= 0, shard.document_frequencies[numbers] if shard.terms else 0, 0).astype(np.int64)


def count_in_shards(tokens: Tokens, shards: Sequence[Shard]) -> IntArray:
    """The sum of `count_documents` over some shards, int64 (terms,)."""
    frequencies = np.zeros(len(tokens.vocabulary), np.int64)
    for shard in shards:
        frequencies += count_documents(tokens.vocabulary, shard)
    return frequencies


def make_queries(tokens: Tokens, frequencies: IntArray) -> Queries:
    """The distinct queries, in the order of their first text. frequencies: those of the terms in the whole index."""
    terms = max(1, len(frequencies))
    text_of = np.repeat(np.arange(len(tokens)), np.diff(tokens.starts))
    known = frequencies[tokens.token] > 0
    pairs, counts = np.unique(text_of[known] * terms + tokens.token[known], return_counts=True)
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


DENSE_SHARE: Final = 1 / 16  # a term in more than this share of the passages is added as rows of numbers, not posting by posting
MOST_DENSE: Final = 1000
USUAL: Final = 0.9  # share of the queries
EXPONENTS: Final = (22, 20, 16, 12, 8, 4)  # a query's scores are in units of 2 ** -the first of these that fits its words into 32 bits
WIDE_FROM: Final = 16  # queries of this exponent and under are added up in 64 bits, in units of 2 ** -WIDE, and cut to theirs at the end
WIDE: Final = 26
MOST_REPEATED: Final = 100  # so often may a word stand in other queries: what is rounded once counts so many times
MOST_SHIFT: Final = 18  # of coarse units
MOST_WORDS: Final = 2000  # in other queries: rounding up to coarse units may raise a sum by one for each
MOST_UNITS: Final = 2**32 - (MOST_WORDS << MOST_SHIFT)
# `Batch` asserts what the kernels assume: an impact fits 32 bits (of postings) and 8 bits (of a row, in coarse units); a query's sum, with
# each of its words rounded up to coarse units, fits 32 bits. Rows are added in 16 bits, kernels.GROUP at a time.
KEPT_BYTES: Final = 1 << 30  # postings of a larger index are not held in memory until the next search
CANDIDATE_BYTES: Final = 512 << 20  # bounds the queries per pass over the index
SAMPLE: Final = 256  # documents
GUESS_AFTER: Final = (1, 2, 8, 32)  # blocks

Norm: TypeAlias = Literal["exact", "lucene"]
Keys: TypeAlias = npt.NDArray[np.uint64]  # score in units << 32 | ~position


@dataclass(frozen=True, slots=True)
class Scoring:
    """The formula's free numbers. norm "lucene": document lengths as Lucene stores them, in one byte."""

    k1: float = 1.2
    b: float = 0.75
    norm: Norm = "exact"

    def __post_init__(self) -> None:
        """Raises UsageError if a number is out of range."""
        if not self.k1 >= 0 or not 0 <= self.b <= 1 or self.norm not in ("exact", "lucene"):
            given = f"k1 {self.k1}, b {self.b}, norm {self.norm!r}"
            raise UsageError(f"BM25 needs k1 >= 0, 0 <= b <= 1 and norm 'exact' or 'lucene', got {given}; correct the setting")


@dataclass(frozen=True, slots=True)
class Statistics:
    """What scoring needs to know of the whole index, and nothing else: the sums over its shards."""

    documents: int
    tokens: int

    @property
    def average_length(self) -> float:
        """Terms per document; 1 for an index without any, so that nothing is divided by 0."""
        return self.tokens / self.documents if self.tokens else 1.0


def inverse_frequency(documents: int, frequencies: IntArray) -> Float64Array:
    """ln(1 + (N - df + 0.5) / (df + 0.5)), always > 0."""
    frequency: Float64Array = frequencies.astype(np.float64)
    weight: Float64Array = np.log1p((documents - frequency + 0.5) / (frequency + 0.5))
    return weight


def length_norms(lengths: Int32Array, statistics: Statistics, scoring: Scoring) -> Float64Array:
    """k1 * (1 - b + b * length / average length) of every document."""
    counted: Float64Array = (lucene_lengths(lengths) if scoring.norm == "lucene" else lengths).astype(np.float64)
    return scoring.k1 * (1.0 - scoring.b + scoring.b * counted / statistics.average_length)


def search(
    shards: Sequence[tuple[int, Shard]],
    statistics: Statistics,
    queries: Queries,
    *,
    limit: int,
    scoring: Scoring,
    threads: int = 1,
    emit: Emit = silent,
) -> Iterator[tuple[int, IntArray, FloatArray]]:
    """(query, positions, scores) of the best `limit` documents of every distinct query, best first, in the order of the queries.

    shards: each with the position of its first passage. Memory is bounded however many queries there are.

    Raises:
        UsageError: if limit or threads is out of range.
    """
    for query, exponent, keys in search_keys(shards, statistics, queries, limit=limit, scoring=scoring, threads=threads, emit=emit):
        yield query, *unpack(keys, exponent)


def search_keys(
    shards: Sequence[tuple[int, Shard]],
    statistics: Statistics,
    queries: Queries,
    *,
    limit: int,
    scoring: Scoring,
    threads: int = 1,
    emit: Emit = silent,
) -> Iterator[tuple[int, int, Keys]]:
    """`search`, with (query, exponent of its unit, keys). With the statistics of a whole index and some of its shards, the best keys of
    all parts together are those of the whole: an exponent does not depend on the shards.
    """
    if limit < 1 or threads < 1:
        raise UsageError(f"search needs limit >= 1 and threads >= 1, got limit {limit}, threads {threads}; correct the setting")
    limit = min(limit, statistics.documents)
    per_pass = max(64, CANDIDATE_BYTES // (8 * _capacity(limit) * threads))
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(queries), per_pass):
            chosen = np.arange(first, min(first + per_pass, len(queries)))
            results = _search(shards, statistics, queries.take(chosen), limit, scoring, threads, pool, emit)
            for query, (exponent, keys) in zip(chosen.tolist(), results, strict=True):
                yield query, exponent, keys
    if sum(shard.mapped_bytes for _, shard in shards) > KEPT_BYTES:
        for _, shard in shards:
            shard.release()


def _search(
    shards: Sequence[tuple[int, Shard]],
    statistics: Statistics,
    queries: Queries,
    limit: int,
    scoring: Scoring,
    threads: int,
    pool: ThreadPoolExecutor,
    emit: Emit,
) -> list[tuple[int, Keys]]:
    results: list[tuple[int, Keys]] = [(0, np.empty(0, np.uint64))] * len(queries)
    for exponent, chosen in split_by_size(queries, statistics):
        pending, least, guess = chosen, np.ones(len(chosen), np.uint32), True
        while len(pending):
            batch = Batch(shards, statistics, queries.take(pending), limit, scoring, exponent)
            shares = [batch.blocks[number::threads] for number in range(threads)]
            tell = _progress(emit, len(queries), len(batch.blocks))
            parts = list(
                pool.map(lambda share, batch=batch, least=least, guess=guess, tell=tell: batch.scan(share, least, guess, tell), shares)
            )
            keys, least = merge(parts, limit)
            for query, best in zip(pending.tolist(), keys, strict=True):
                results[query] = exponent, best
            again = least > 0
            pending, least, guess = pending[again], least[again], False
    return results


def merge(parts: Sequence[Found], limit: int) -> tuple[list[Keys], npt.NDArray[np.uint32]]:
    """(the best `limit` of each query over all parts, best first; where a guessed threshold may have cost one of them, the score that is
    proven, else 0).
    """
    count = len(parts[0].sizes)
    keys: list[Keys] = []
    again = np.zeros(count, np.uint32)
    highest = np.max([part.threshold for part in parts], axis=0)
    for query in range(count):
        found = np.concatenate([part.candidates[query, : part.sizes[query]] for part in parts])
        found.sort()
        best = found[::-1][:limit]
        proven = int(best[-1] >> np.uint64(32)) if len(best) == limit else 1
        if highest[query] > proven:
            again[query] = proven
        keys.append(best)
    return keys, again


def unpack(keys: Keys, exponent: int) -> tuple[IntArray, FloatArray]:
    """Positions and scores."""
    position = 0xFFFFFFFF - (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return position, ((keys >> np.uint64(32)).astype(np.float64) * 2.0**-exponent).astype(np.float32)


def split_by_size(queries: Queries, statistics: Statistics) -> Iterator[tuple[int, IntArray]]:
    """(exponent of the unit, the queries for it): the finest unit in which no score can leave 32 bits. It is the query's own affair."""
    weight = inverse_frequency(statistics.documents, queries.document_frequencies)[queries.term]
    highest, words = queries.sums(weight * queries.count), queries.sums(queries.count.astype(np.float64))
    most = np.maximum.reduceat(queries.count, queries.offsets[:-1]) if len(queries) else np.zeros(0, np.int64)
    taken = np.zeros(len(queries), np.bool_)
    for exponent in EXPONENTS:
        short = (most <= MOST_REPEATED) & (words <= MOST_WORDS) | (exponent <= WIDE_FROM)
        fits = ~taken & short & (highest * 2.0**exponent + words <= MOST_UNITS)
        if fits.any():
            yield exponent, np.flatnonzero(fits)
        taken |= fits
    if not taken.all():
        raise UsageError(f"a query of {int(words[~taken].max()):,} words is too long to search with; cut the text")


def _capacity(limit: int) -> int:
    return 2 * limit + 1024


class Batch:
    """A batch of queries against an index: how its terms are weighed, and the scan of any of the blocks."""

    def __init__(
        self, shards: Sequence[tuple[int, Shard]], statistics: Statistics, queries: Queries, limit: int, scoring: Scoring, exponent: int
    ) -> None:
        self._shards, self._statistics, self._queries, self._limit, self._scoring = shards, statistics, queries, limit, scoring
        self._documents = sum(len(shard) for _, shard in shards)  # of these shards: thresholds are guessed for them alone
        terms, local = np.unique(queries.term, return_inverse=True)
        self._terms = terms
        frequency = queries.document_frequencies[terms]
        self._drop = WIDE - exponent if exponent <= WIDE_FROM else None
        self._weight = inverse_frequency(statistics.documents, frequency) * 2.0 ** (exponent + (self._drop or 0))
        self._choose_dense(frequency, local)
        self._order(local)
        self._assert_no_overflow(local)
        places = [(number, block) for number, (_, shard) in enumerate(shards) for block in range(-(-len(shard) // BLOCK))]
        self.blocks = [places[i] for i in np.random.default_rng(0).permutation(len(places)).tolist()]

    def scan(
        self,
        blocks: Sequence[tuple[int, int]],
        least: npt.NDArray[np.uint32],
        guess: bool,
        tell: Callable[[], None] = lambda: None,
    ) -> Found:
        """The candidates of all queries in some blocks (shard, block): at least the best `limit` of them, but for what scores under
        `least`, and what a guess missed. Safe to call in several threads.
        """
        queries = self._queries
        capacity = _capacity(self._limit)
        found = Found(np.empty((len(queries), capacity), np.uint64), np.zeros(len(queries), np.int64), least.copy())
        numbers: dict[int, tuple[Int32Array, Float64Array]] = {}
        room = self._room(blocks)
        seen = 0
        for done, (number, block) in enumerate(blocks, 1):
            first, shard = self._shards[number]
            if number not in numbers:
                numbers[number] = self._numbers_of(shard), length_norms(shard.lengths, self._statistics, self._scoring)
            number_of, norm = numbers[number]
            slots = slice(block * BLOCK, min((block + 1) * BLOCK, len(shard)))
            kernels.weigh_block(block, shard.blocks, number_of, self._weight, norm[slots], self._row_of_term, self._shift, room)
            position = first + shard.order[slots].astype(np.int64)
            if self._drop is None:
                if guess and done == 1:  # a few documents first, so that not every document of the first block becomes a candidate
                    kernels.score_block(0, len(queries), self._plan, self._shift, self._limit, position[:SAMPLE], room, found)
                    self._guess(len(position[:SAMPLE]), found)
                    found.sizes[:] = 0
                kernels.score_block(0, len(queries), self._plan, self._shift, self._limit, position, room, found)
            else:
                kernels.score_block_wide(self._plan, self._drop, self._limit, position, room, found)
            seen += len(position)
            if guess and done in GUESS_AFTER and done < len(blocks):
                self._guess(seen, found)
            tell()
        return found

    def _guess(self, seen: int, found: Found) -> None:
        """Raise the thresholds to where, by the documents seen so far, surely more than `limit` of all will lie above."""
        expected = self._limit * seen / self._documents
        kernels.raise_thresholds(min(self._limit, int(expected + 4 * expected**0.5 + 5)), found)

    def _numbers_of(self, shard: Shard) -> Int32Array:
        """For every term of a shard its number in the batch, or -1."""
        result = np.full(shard.terms, -1, np.int32)
        found = shard.find_terms(self._queries.vocabulary)[self._terms]
        there = np.flatnonzero(found >= 0)
        result[found[there]] = there
        return result

    def _room(self, blocks: Sequence[tuple[int, int]]) -> Room:
        most = max(
            (int(np.diff(self._shards[shard][1].blocks.posting_offsets[block : block + 2])[0]) for shard, block in blocks), default=0
        )
        terms, rows = len(self._terms), max(1, self._rows)
        size = most + kernels.UNROLLED * terms
        return Room(
            np.zeros(terms, np.uint64), np.zeros(terms, np.uint64), np.empty(size, np.uint16), np.empty(size, np.uint32),
            np.empty((rows, BLOCK), np.uint32), np.empty((BLOCK // CHUNK, rows, CHUNK), np.uint8), np.empty(rows, np.int64),
            np.zeros(BLOCK + CHUNK, np.uint32),
        )  # fmt: skip

    def _choose_dense(self, frequency: IntArray, local: IntArray) -> None:
        """Which terms become rows, and the coarse unit: the finest in which the rows of nearly every query add up within 8 bits; where the
        queries are too long for that, the finest in which a row fits 8 bits, as what is rounded up counts once for each row.
        """
        dense = np.flatnonzero(frequency > self._statistics.documents * DENSE_SHARE) if self._drop is None else np.empty(0, np.int64)
        dense = dense[np.argsort(-frequency[dense], kind="stable")][:MOST_DENSE]
        self._row_of_term = np.full(len(self._terms), -1, np.int64)
        self._row_of_term[dense] = np.arange(len(dense))
        highest = self._queries.sums(np.where(self._row_of_term[local] >= 0, self._queries.count * self._weight[local], 0.0))
        finest = int(np.ceil(np.log2(max(self._weight[dense].max(initial=0.0) / 250, 1.0))))
        usual = int(np.ceil(np.log2(max(np.quantile(highest, USUAL) / 200, 1.0))))  # the rest is for rounding up, term by term
        self._rows, self._shift = len(dense), np.uint32(max(finest, usual) if usual <= MOST_SHIFT else finest)

    def _order(self, local: IntArray) -> None:
        """Each query's terms for the kernel: sparse ones, those of count 1 first; dense ones, repeated by their count."""
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
        self._plan = Plan(
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
        """The largest coarse impact that each term of the batch may have; an impact is its weight at most, rounded."""
        coarse: Float64Array = np.floor((self._weight + 0.5) / 2.0**self._shift) + 1
        return coarse

    def _assert_no_overflow(self, local: IntArray) -> None:
        """Assert that no integer type of the kernels can overflow in this batch (see the constants)."""
        assert self._weight.max(initial=0.0) < 2**32 - 1
        if self._drop is not None:
            return  # sums of 64 bits; that scores fit 32 bits is the condition in `split_by_size`
        is_dense = self._row_of_term >= 0
        assert self._shift <= MOST_SHIFT
        assert self._most_coarse[is_dense].max(initial=0.0) < 2**8
        impact: Float64Array = np.where(is_dense, self._most_coarse * 2.0**self._shift, self._weight + 0.5)
        assert self._queries.sums(self._queries.count * impact[local]).max(initial=0.0) < 2**32


def _progress(emit: Emit, queries: int, total: int) -> Callable[[], None]:
    """A function to call once per block, from any thread."""
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1  # two threads may count as one: this is a progress bar
        emit(Event("progress", "search", f"{queries:,} distinct queries", done=done, total=total, unit="blocks"))

    return tell
