"""Scoring a batch of queries block by block, compiled. bm25.py explains the search, index.py the arrays.

Impacts are whole numbers, rounded up, so that a sum of them is never under the true score, and over it by
less than one unit per query word (`slack`).
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="call-arg"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cramlm.records import IntArray
from cramlm.retrieval.index_kernels import BLOCK, PLACE, frequency_of, jit
from cramlm.retrieval.vector_kernels import CHUNK, add_rows, lowest_bit, reaching

TILE = 32  # queries whose sums (BLOCK + CHUNK words each) stay in the second-level cache
SPENT = np.uint32(0xFFFFFFFF)  # threshold of a query that gave up on this path

_IMPACT = np.uint32(0xFFFF)
_HALF = np.uint32(16)


class Plan(NamedTuple):
    """A batch of queries as the kernels read it; terms are numbered within the batch.

    Query q's sparse terms: sparse_term[sparse_offsets[q]:sparse_offsets[q + 1]], from repeated[q] on those with a count above 1.
    Rows of its dense ones: dense_row[dense_offsets[q]:dense_offsets[q + 1]], repeated by their count.
    """

    sparse_offsets: IntArray
    repeated: IntArray
    sparse_term: IntArray
    sparse_count: IntArray
    dense_offsets: IntArray
    dense_row: IntArray


@jit
def weigh_block(block, terms, first, last, rows, blocks, weight, norm, row_of_term, begin, length, impacts, dense, bound):
    """Impact of every posting of the batch's terms in this block, computed once for all queries.

    first, last (terms,): the terms' postings, from `find_runs`. weight: idf in units, float32 (terms,).
    norm: k1 * (1 - b + b * length / average), float32 (documents,).
    A term without dense row becomes a run begin, length of `impacts`: place << 16 | impact, padded to a multiple of 4 with impacts of 0
    at place BLOCK. One with a row fills it in `dense` (chunks, rows, CHUNK); `bound` (rows,) is its largest impact.
    """
    dense[:] = 0
    bound[:] = 0
    size = 0
    for i in range(len(terms)):
        row = row_of_term[i]
        begin[i] = size
        most = np.int64(0)
        for j in range(first[i], last[i]):
            place = np.int64(blocks.postings[j] & PLACE)
            document = block * BLOCK + place
            frequency = np.float32(frequency_of(blocks.postings[j], document, terms[i], rows))
            impact = np.int64(weight[i] * frequency / (frequency + norm[document])) + 1
            if row >= 0:
                dense[place >> 6, row, place & 63] = impact
                most = max(most, impact)
            else:
                impacts[size] = np.uint32((place << 16) | impact)
                size += 1
        if row >= 0:
            bound[row] = most
        while size & 3:
            impacts[size] = np.uint32(BLOCK << 16)
            size += 1
        length[i] = size - begin[i]


@jit
def score_block(
    block, documents, first_query, last_query, plan, begin, length, impacts, dense, bound, shift,
    threshold, slack, limit, candidates, candidate_count, sums,
):  # fmt: skip
    """Add up a block for queries first_query..last_query and append to `candidates` what reaches their thresholds.

    shift: dense units are 2 ** shift as large. candidates: score << 32 | ~document, unsorted. sums (TILE, BLOCK + CHUNK): room to work in.
    """
    offset = block * BLOCK
    chunks = (min(BLOCK, documents - offset) + CHUNK - 1) // CHUNK
    capacity = candidates.shape[1]
    bounds = np.empty(TILE, np.int64)
    for tile in range(first_query, last_query, TILE):
        queries = min(TILE, last_query - tile)
        for g in range(queries):
            _add_sparse(tile + g, plan, begin, length, impacts, sums[g])
            most = 0
            for j in range(plan.dense_offsets[tile + g], plan.dense_offsets[tile + g + 1]):
                most += bound[plan.dense_row[j]]
            bounds[g] = most << shift
        for chunk in range(chunks):  # by chunk, then by query: the chunk's dense rows stay in the first-level cache
            left = chunk * CHUNK
            for g in range(queries):
                query = tile + g
                least = threshold[query]
                place = g * (BLOCK + CHUNK) + left
                if reaching(sums, place, np.uint32(max(0, np.int64(least) - bounds[g]))) == 0:
                    continue
                start, end = plan.dense_offsets[query], plan.dense_offsets[query + 1]
                reached = add_rows(sums, place, dense, chunk * dense.shape[1], plan.dense_row, start, end, np.uint32(shift), least)
                if reached == 0:
                    continue
                size = candidate_count[query]
                if size + CHUNK > capacity:
                    size = _compact(candidates[query], size, limit, threshold, slack, query)
                    if size + CHUNK > capacity:
                        threshold[query] = SPENT
                        candidate_count[query] = size
                        continue
                while reached != 0:
                    i = np.int64(lowest_bit(reached))
                    reached &= reached - np.uint64(1)
                    key = (np.uint64(sums[g, left + i]) << np.uint64(32)) | np.uint64(0xFFFFFFFF - (offset + left + i))
                    candidates[query, size] = key
                    size += 1
                candidate_count[query] = size


@jit
def _add_sparse(query, plan, begin, length, impacts, sums):
    """The query's runs of postings, added up from 0."""
    sums[:] = 0
    middle, end = plan.repeated[query], plan.sparse_offsets[query + 1]
    for j in range(plan.sparse_offsets[query], middle):
        term = plan.sparse_term[j]
        for i in range(begin[term], begin[term] + length[term], 4):
            a, b, c, d = impacts[i], impacts[i + 1], impacts[i + 2], impacts[i + 3]
            sums[a >> _HALF] += a & _IMPACT
            sums[b >> _HALF] += b & _IMPACT
            sums[c >> _HALF] += c & _IMPACT
            sums[d >> _HALF] += d & _IMPACT
    for j in range(middle, end):
        term = plan.sparse_term[j]
        count = np.uint32(plan.sparse_count[j])
        for i in range(begin[term], begin[term] + length[term]):
            sums[impacts[i] >> _HALF] += (impacts[i] & _IMPACT) * count


@jit
def _compact(keys, size, limit, threshold, slack, query):
    """Raise the query's threshold to what the limit-th best so far proves, and drop what is under it; returns how many are left."""
    if size < limit:
        return size
    best = np.int64(nth_largest(keys, size, limit) >> np.uint64(32)) - np.int64(slack[query])
    if best <= np.int64(threshold[query]):
        return size
    threshold[query] = best
    kept = 0
    for i in range(size):
        if np.int64(keys[i] >> np.uint64(32)) >= best:
            keys[kept] = keys[i]
            kept += 1
    return kept


@jit
def raise_thresholds(rank, limit, candidates, candidate_count, threshold, slack):
    """Guess thresholds from the blocks seen so far: the score at `rank` among them. `settle` finds out whether a guess was too high."""
    for query in range(len(candidate_count)):
        if threshold[query] != SPENT:
            candidate_count[query] = _compact(candidates[query], candidate_count[query], min(rank, limit), threshold, slack, query)


@jit
def settle(limit, candidates, candidate_count, threshold, slack, settled):
    """Whether each query's candidates surely hold its `limit` best; if so, drops those that surely are not among them."""
    for query in range(len(candidate_count)):
        size = candidate_count[query]
        least = np.int64(threshold[query])
        if least == SPENT or size < limit:
            settled[query] = least == 1  # nothing was ever dropped
            continue
        proven = np.int64(nth_largest(candidates[query], size, limit) >> np.uint64(32)) - np.int64(slack[query])
        settled[query] = least == 1 or least <= proven
        if settled[query]:
            candidate_count[query] = _compact(candidates[query], size, limit, threshold, slack, query)


@jit
def nth_largest(keys, size, n):
    """The n-th largest (from 1) of keys[:size]; puts larger ones before it."""
    low, high, place = 0, size - 1, n - 1
    while low < high:
        pivot = keys[(low + high) >> 1]
        i, j = low, high
        while i <= j:
            while keys[i] > pivot:
                i += 1
            while keys[j] < pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return keys[place]
