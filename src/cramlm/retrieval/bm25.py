"""BM25 for batches: thousands of long queries against every passage, exactly.

    score(q, d) = sum over terms t of q:  count(t, q) * idf(t) * tf / (tf + k1 * (1 - b + b * length(d) / average length))
    idf(t)      = ln(1 + (N - df + 0.5) / (df + 0.5))

in float64 with exact lengths, rounded to float32; ties go to the smaller position (Lucene since version 8, and bm25s with method "lucene";
Kamphuis et al. 2020). The way of a batch:

    texts ─► terms, known ones, counted; equal queries made one
      ─► for each block of 4,096 passages (in a fixed shuffled order): impacts of the batch's postings, once for all queries
           ─► added up per query in whole numbers; what reaches the query's threshold becomes a candidate
      ─► candidates scored in float64 ─► the best `limit`

A passage is dropped only when its estimate proves that `limit` others beat it: estimates are rounded up, by less than one unit per query
word. Thresholds are first guessed from the blocks seen so far; a query whose guess turns out too high is run again without guesses.
Queries that the whole numbers cannot carry (tens of thousands of words) or whose candidates overflow (thousands of equal passages) are
scored in float64 from the start (`search_one`). So results depend on none of the batch, the block order, the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.errors import UsageError
from cramlm.records import BoolArray, Emit, Event, FloatArray, Int32Array, IntArray, silent
from cramlm.retrieval import exact_kernels, index_kernels, kernels
from cramlm.retrieval.analysis import Vocabulary
from cramlm.retrieval.index_kernels import BLOCK
from cramlm.retrieval.kernels import TILE
from cramlm.retrieval.postings import Postings
from cramlm.retrieval.vector_kernels import CHUNK

DENSE_SHARE: Final = 1 / 16  # a term in more than this share of the passages is added as rows of numbers, not posting by posting
MOST_DENSE: Final = 1000
UNITS: Final = 65_000  # of the rarest term's largest impact
MOST_WORDS: Final = 60_000  # in a query, for sums in 32 bits
MOST_SHIFT: Final = 6  # dense rows may be coarser than sparse impacts by 2 ** this
CANDIDATE_BYTES: Final = 256 << 20  # bounds the queries per pass over the index
GUESS_AFTER: Final = (1, 2, 8, 32)  # blocks

Keys: TypeAlias = npt.NDArray[np.uint64]  # score bits << 32 | ~position; see exact_kernels
Float64Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Queries:
    """Distinct queries as terms of one index: query q has term[offsets[q]:offsets[q + 1]] (ascending) with `count` in the query.

    owner: int64 (texts,), the distinct query that each text became; -1 if no term of it is in the index.
    """

    offsets: IntArray
    term: Int32Array
    count: IntArray
    owner: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, chosen: IntArray) -> Queries:
        """Some of the queries, in the order given."""
        sizes = np.diff(self.offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        place = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][chosen] - offsets[:-1], sizes)
        return Queries(offsets, self.term[place], self.count[place], np.arange(len(chosen)))

    def sums(self, values: Float64Array) -> Float64Array:
        """Per query, the sum of `values` (one per term)."""
        return np.add.reduceat(values, self.offsets[:-1]) if len(self) else np.zeros(0)


def compile_queries(postings: Postings, texts: Sequence[str]) -> Queries:
    """Texts as the index sees them: unknown terms left out, repeated terms counted, texts with equal terms and counts made one."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    vocabulary = Vocabulary()
    tokens, starts = vocabulary.tokenise(np.frombuffer(b"".join(encoded), np.uint8), ends)
    numbers = postings.find_terms(vocabulary)[tokens].astype(np.int64)
    text_of = np.repeat(np.arange(len(texts)), np.diff(starts))
    known = numbers >= 0
    pairs, counts = np.unique(text_of[known] * postings.terms + numbers[known], return_counts=True)
    terms = (pairs % max(1, postings.terms)).astype(np.int32)
    bounds = np.searchsorted(pairs, np.arange(len(texts) + 1) * postings.terms)
    owner = np.full(len(texts), -1, np.int64)
    first: dict[bytes, int] = {}
    chosen: list[int] = []
    for text in range(len(texts)):
        part = slice(bounds[text], bounds[text + 1])
        if content := terms[part].tobytes() + counts[part].tobytes():
            if content not in first:
                first[content] = len(chosen)
                chosen.append(text)
            owner[text] = first[content]
    every = Queries(bounds, terms, counts.astype(np.int64), owner)
    distinct = every.take(np.array(chosen, np.int64))
    return Queries(distinct.offsets, distinct.term, distinct.count, owner)


def norms(postings: Postings, k1: float, b: float) -> Float64Array:
    """k1 * (1 - b + b * length / average length) of every document."""
    lengths: Float64Array = postings.lengths.astype(np.float64)
    return k1 * (1.0 - b + b * lengths / postings.average_length)


def idf(postings: Postings, terms: npt.NDArray[np.integer]) -> Float64Array:
    """ln(1 + (N - df + 0.5) / (df + 0.5)), always > 0."""
    frequency: Float64Array = postings.document_frequencies[terms].astype(np.float64)
    weight: Float64Array = np.log1p((postings.documents - frequency + 0.5) / (frequency + 0.5))
    return weight


def term_weights(postings: Postings, queries: Queries) -> Float64Array:
    """idf times the count in the query, for every term of every query."""
    return idf(postings, queries.term) * queries.count


def unpack(keys: Keys) -> tuple[IntArray, FloatArray]:
    """Positions and scores of packed results."""
    position = (0xFFFFFFFF - (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)).astype(np.int64)
    return position, (keys >> np.uint64(32)).astype(np.uint32).view(np.float32)


def search(
    postings: Postings, queries: Queries, *, limit: int, k1: float, b: float, threads: int = 1, emit: Emit = silent
) -> Iterator[tuple[int, Keys]]:
    """(query, its best `limit` documents as packed keys, best first) for every distinct query in order; memory is bounded however many
    there are.

    Raises:
        UsageError: if limit, k1, b or threads is out of range.
    """
    if limit < 1 or not k1 >= 0 or not 0 <= b <= 1 or threads < 1:
        given = f"limit {limit}, k1 {k1}, b {b}, threads {threads}"
        raise UsageError(f"search needs limit >= 1, k1 >= 0, 0 <= b <= 1 and threads >= 1, got {given}; correct the setting")
    limit = min(limit, postings.documents)
    per_pass = max(TILE, CANDIDATE_BYTES // (8 * _capacity(limit)))
    norm = norms(postings, k1, b)
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(queries), per_pass):
            chosen = np.arange(first, min(first + per_pass, len(queries)))
            results = _Pass(postings, queries.take(chosen), limit, norm, threads, pool, emit).run()
            yield from zip(chosen.tolist(), results, strict=True)


def _capacity(limit: int) -> int:
    return 2 * limit + 1024


class _Pass:
    """One batch's way through the index; used once."""

    def __init__(
        self, postings: Postings, queries: Queries, limit: int, norm: Float64Array, threads: int, pool: ThreadPoolExecutor, emit: Emit
    ) -> None:
        self._postings, self._queries, self._limit, self._norm, self._emit = postings, queries, limit, norm, emit
        self._pool, self._threads = pool, threads
        self._weights = term_weights(postings, queries)
        share = max(TILE, -(-len(queries) // (threads * TILE)) * TILE)  # whole tiles
        self._ranges = [(first, min(first + share, len(queries))) for first in range(0, len(queries), share)]

    def run(self) -> list[Keys]:
        results: list[Keys | None] = [None] * len(self._queries)
        plan = _Plan(self._postings, self._queries)
        pending = np.flatnonzero(plan.fits)
        for guesses in (GUESS_AFTER, ()):
            if len(pending):
                pending = self._estimate(pending, guesses, results)
        exact = [query for query, keys in enumerate(results) if keys is None]
        for query, keys in zip(exact, self._pool.map(self._search_one, exact), strict=True):
            results[query] = keys
        return [keys for keys in results if keys is not None]

    def _estimate(self, chosen: IntArray, guesses: tuple[int, ...], results: list[Keys | None]) -> IntArray:
        """Run some queries by whole numbers; fills in what is proven, returns what has to run again."""
        queries = self._queries.take(chosen)
        part = _Pass(self._postings, queries, self._limit, self._norm, self._threads, self._pool, self._emit)
        return chosen[part._estimate_all(guesses, chosen, results)]

    def _estimate_all(self, guesses: tuple[int, ...], names: IntArray, results: list[Keys | None]) -> BoolArray:
        plan = _Plan(self._postings, self._queries)
        count, limit = len(self._queries), self._limit
        candidates = np.empty((count, _capacity(limit)), np.uint64)
        sizes, threshold = np.zeros(count, np.int64), np.ones(count, np.uint32)
        self._scan(plan, guesses, candidates, sizes, threshold)
        settled = np.zeros(count, np.bool_)
        kernels.settle(limit, candidates, sizes, threshold, plan.slack, settled)
        sizes[~settled] = 0
        offsets, rows, vocabulary = self._queries.offsets, self._postings.rows, self._postings.terms

        def rescore(first: int, last: int) -> None:
            exact_kernels.rescore(
                first, last, offsets, plan.local, self._weights, plan.terms, vocabulary, rows, self._norm, candidates, sizes
            )

        self._together(rescore, self._ranges)
        for query in np.flatnonzero(settled).tolist():
            results[names[query]] = np.sort(candidates[query, : sizes[query]])[::-1][:limit].copy()
        return ~settled

    def _scan(self, plan: _Plan, guesses: tuple[int, ...], candidates: Keys, sizes: IntArray, threshold: npt.NDArray[np.uint32]) -> None:
        postings, blocks, documents = self._postings, self._postings.blocks, self._postings.documents
        norm = self._norm.astype(np.float32)
        terms = len(plan.terms)
        first, last = np.empty(terms, np.int64), np.empty(terms, np.int64)
        begin, length = np.zeros(terms, np.int64), np.zeros(terms, np.int64)
        numbers = len(blocks.offsets) - 1
        largest = int(np.diff(postings.rows.offsets[np.minimum(np.arange(numbers + 1) * BLOCK, documents)]).max())
        impacts = np.empty(largest + 4 * terms, np.uint32)
        dense = np.empty((BLOCK // CHUNK, plan.dense_rows, CHUNK), np.uint16)
        bound = np.empty(plan.dense_rows, np.int64)
        room = [np.empty((TILE, BLOCK + CHUNK), np.uint32) for _ in self._ranges]
        order = np.random.default_rng(0).permutation(numbers)
        for done, block in enumerate(order.tolist(), 1):
            index_kernels.find_runs(plan.terms, block, postings.rows, blocks, first, last)
            kernels.weigh_block(
                block,
                plan.terms,
                first,
                last,
                postings.rows,
                blocks,
                plan.weight,
                norm,
                plan.row_of_term,
                begin,
                length,
                impacts,
                dense,
                bound,
            )

            def score(start: int, end: int, sums: npt.NDArray[np.uint32], block: int = block) -> None:
                kernels.score_block(
                    block, documents, start, end, plan.queries, begin, length, impacts, dense, bound, plan.shift,
                    threshold, plan.slack, self._limit, candidates, sizes, sums,
                )  # fmt: skip

            tasks = [(start, end, room[i]) for i, (start, end) in enumerate(self._ranges)]
            self._together(score, tasks)
            if done in guesses and done < numbers:
                expected = self._limit * done / numbers
                rank = int(expected + 4 * expected**0.5 + 5)
                kernels.raise_thresholds(rank, self._limit, candidates, sizes, threshold, plan.slack)
            self._emit(Event("progress", "search", f"{len(self._queries):,} distinct queries", done=done, total=numbers, unit="blocks"))

    def _search_one(self, query: int) -> Keys:
        part = slice(self._queries.offsets[query], self._queries.offsets[query + 1])
        keys = np.empty(2 * self._limit + BLOCK, np.uint64)
        rows, blocks = self._postings.rows, self._postings.blocks
        size = exact_kernels.search_one(self._queries.term[part], self._weights[part], rows, blocks, self._norm, self._limit, keys)
        return np.sort(keys[:size])[::-1].copy()

    def _together(self, work: Callable[..., None], tasks: Sequence[tuple[object, ...]]) -> None:
        if len(tasks) == 1:
            work(*tasks[0])
        else:
            for future in [self._pool.submit(work, *task) for task in tasks]:
                future.result()


class _Plan:
    """How a batch's terms are weighed: which are dense, in which units, and the order of each query's terms for the kernel."""

    def __init__(self, postings: Postings, queries: Queries) -> None:
        self.terms, self.local = np.unique(queries.term, return_inverse=True)
        local = self.local
        weight = idf(postings, self.terms)
        frequency = postings.document_frequencies[self.terms]
        dense = np.flatnonzero(frequency > postings.documents * DENSE_SHARE)
        dense = dense[np.argsort(-frequency[dense], kind="stable")][:MOST_DENSE]
        self.dense_rows = max(1, len(dense))
        self.row_of_term = np.full(len(self.terms), -1, np.int64)
        self.row_of_term[dense] = np.arange(len(dense))
        units = UNITS / weight.max(initial=1e-9)
        is_dense = self.row_of_term[local] >= 0
        count = queries.count.astype(np.float64)
        words, dense_words = queries.sums(count), queries.sums(np.where(is_dense, count, 0.0))
        highest = queries.sums(np.where(is_dense, count * weight[local] * units, 0.0))
        room = 65_535 - 2 * dense_words  # for what a query's dense rows add up to, in 16 bits
        self.fits = (words <= MOST_WORDS) & (room > 0) & (highest <= room * 2**MOST_SHIFT)
        self.shift = int(np.ceil(np.log2(np.max(highest[self.fits] / room[self.fits], initial=1.0))))
        self.weight = (weight * units * np.where(self.row_of_term >= 0, 0.5**self.shift, 1.0)).astype(np.float32)
        # An estimate is over the true score by less than a unit per word, a large one for dense words; 5 % and 2 more cover float32.
        self.slack = np.ceil(1.05 * (words - dense_words + dense_words * 2**self.shift) + 2).astype(np.int64)
        self._order(queries, local, is_dense)

    def _order(self, queries: Queries, local: IntArray, is_dense: BoolArray) -> None:
        query = np.repeat(np.arange(len(queries)), np.diff(queries.offsets))
        sparse = np.flatnonzero(~is_dense)
        sparse = sparse[np.lexsort((queries.count[sparse] > 1, query[sparse]))]
        dense = np.repeat(np.flatnonzero(is_dense), queries.count[is_dense])
        numbers = np.arange(len(queries) + 1)
        sparse_offsets = np.searchsorted(query[sparse], numbers)
        once = np.bincount(query[sparse][queries.count[sparse] == 1], minlength=len(queries))
        self.queries = kernels.Plan(
            sparse_offsets,
            sparse_offsets[:-1] + once,
            local[sparse],
            queries.count[sparse],
            np.searchsorted(query[dense], numbers),
            self.row_of_term[local[dense]],
        )
