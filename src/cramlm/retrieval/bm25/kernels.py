"""Scoring a batch of queries block by block, compiled. bm25.py explains the search, index_kernels.py the arrays.

Scores are whole numbers: what a term adds to a passage is rounded once, to a unit of about 2e-7, and everything after that is integer
addition, so that neither the order of the terms nor the cut of the corpus into blocks, shards and processes can change a score.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="call-arg, var-annotated"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cramlm.records import BoolArray, IntArray
from cramlm.retrieval.bm25.index_kernels import BLOCK, MANY, PLACE, large_frequency, read_number
from cramlm.retrieval.bm25.vector_kernels import CHUNK, clear, lowest_bit, reaching, reaching_with, reaching_with_many
from cramlm.storage.compiled import jit

UNROLLED = 4  # postings added per turn
_1, _2, _3 = np.uint64(1), np.uint64(2), np.uint64(3)  # places of unsigned type, so that numba does not ask whether they count from the end


class Plan(NamedTuple):
    """A batch of queries as the kernels read it; terms are numbered within the batch.

    Query q's sparse terms: sparse_term[sparse_offsets[q]:sparse_offsets[q + 1]], from repeated[q] on those with a count above 1.
    Rows of its dense ones: dense_row[dense_offsets[q]:dense_offsets[q + 1]], repeated by their count; many_dense[q] if their coarse impacts
    may add up to more than 8 bits.
    """

    sparse_offsets: IntArray
    repeated: IntArray
    sparse_term: IntArray
    sparse_count: IntArray
    dense_offsets: IntArray
    dense_row: IntArray
    many_dense: BoolArray


class Room(NamedTuple):
    """Where a block's weighed postings lie; made once, filled anew for every block.

    A sparse term is a run begin, length of `places` and `impacts`, padded to a multiple of UNROLLED with impacts of 0 at place BLOCK. A
    dense one is a row of `exact` (rows, BLOCK) and, in coarse units rounded up, of `coarse` (chunks, rows, CHUNK); `bound` (rows,) is its
    largest coarse impact. sums (BLOCK + CHUNK,) are 0 between queries.
    """

    begin: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    places: npt.NDArray[np.uint16]
    impacts: npt.NDArray[np.uint32]
    exact: npt.NDArray[np.uint32]
    coarse: npt.NDArray[np.uint8]
    bound: IntArray
    sums: npt.NDArray[np.uint32]


class Found(NamedTuple):
    """What a batch has found so far. candidates (queries, capacity): score << 32 | ~position, unsorted, sizes[q] of them; threshold: the
    least score that still counts.
    """

    candidates: npt.NDArray[np.uint64]
    sizes: IntArray
    threshold: npt.NDArray[np.uint32]


@jit
def weigh_block(block, blocks, number, weight, norm, row_of_term, shift, room):
    """Impact of every posting of the batch's terms in this block, computed once for all queries.

    number (terms of the shard,): the term's number in the batch, or -1. weight: idf in units, float64 (terms of the batch,). norm: k1 *
    (1 - b + b * length / average), float64, for the block's places. shift: a coarse unit is 2 ** shift units.
    """
    exact, coarse, bound = room.exact, room.coarse, room.bound  # named once: reaching into a tuple in a loop costs more than the loop
    begin, length, places, impacts = room.begin, room.length, room.places, room.impacts
    postings, dictionary = blocks.postings, blocks.dictionary
    exact[:] = 0
    coarse[:] = 0
    bound[:] = 0
    length[:] = 0
    place, end = blocks.dictionary_offsets[block], blocks.dictionary_offsets[block + 1]
    start = blocks.posting_offsets[block]
    size = np.uint64(0)
    term = -1
    while place < end:
        step, place = read_number(dictionary, place)
        count, place = read_number(dictionary, place)
        term += step
        i = number[term]
        if i >= 0:
            unit = weight[i]
            highest = np.uint16(0)
            first = np.uint64(start)
            after = size + np.uint64(count)
            for j in range(np.uint64(count)):
                posting = postings[first + j]
                highest = max(highest, posting)
                tf = np.float64(posting >> 12)
                at = posting & PLACE
                places[size + j] = at
                impacts[size + j] = np.uint32(unit * (tf / (tf + norm[at])) + 0.5)
            if highest >> 12 == MANY:
                for j in range(np.uint64(count)):
                    if postings[first + j] >> 12 == MANY:
                        tf = np.float64(large_frequency(first + j, blocks.large_places, blocks.large_frequencies))
                        impacts[size + j] = np.uint32(unit * (tf / (tf + norm[places[size + j]])) + 0.5)
            row = row_of_term[i]
            if row >= 0:
                most = np.uint32(0)
                for j in range(size, after):
                    at = np.uint64(places[j])
                    exact[row, at] = impacts[j]
                    coarse[at >> np.uint64(6), row, at & np.uint64(63)] = (impacts[j] >> shift) + np.uint32(1)
                    most = max(most, impacts[j])
                bound[row] = (most >> shift) + np.uint32(1)
            else:
                begin[i] = size
                size = after
                while size & _3:
                    places[size] = BLOCK
                    impacts[size] = 0
                    size += _1
                length[i] = size - begin[i]
        start += count


@jit
def score_block(first_query, last_query, plan, shift, limit, position, room, found):
    """Add up a block for queries first_query..last_query and append to the candidates what reaches their thresholds.

    position: int64, the place in the corpus of each of the block's documents, or of the first of them only: the others are left out.
    """
    candidates, sizes, threshold = found.candidates, found.sizes, found.threshold
    sums, places, impacts, begin, length = room.sums, room.places, room.impacts, room.begin, room.length
    exact, coarse, bound = room.exact, room.coarse, room.bound
    sparse_offsets, repeated, sparse_term, sparse_count = plan.sparse_offsets, plan.repeated, plan.sparse_term, plan.sparse_count
    dense_offsets, dense_row = plan.dense_offsets, plan.dense_row
    chunks = (len(position) + CHUNK - 1) // CHUNK
    capacity, rows = candidates.shape[1], coarse.shape[1]
    for query in range(first_query, last_query):
        for j in range(sparse_offsets[query], repeated[query]):
            first = begin[sparse_term[j]]
            for i in range(first, first + length[sparse_term[j]], np.uint64(UNROLLED)):
                sums[places[i]] += impacts[i]
                sums[places[i + _1]] += impacts[i + _1]
                sums[places[i + _2]] += impacts[i + _2]
                sums[places[i + _3]] += impacts[i + _3]
        for j in range(repeated[query], sparse_offsets[query + 1]):
            first = begin[sparse_term[j]]
            for i in range(first, first + length[sparse_term[j]]):
                sums[places[i]] += impacts[i] * np.uint32(sparse_count[j])
        start, end = dense_offsets[query], dense_offsets[query + 1]
        most = np.int64(0)
        for j in range(start, end):
            most += bound[dense_row[j]]
        least = threshold[query]
        many = plan.many_dense[query]
        size = sizes[query]
        for chunk in range(chunks):
            left = chunk * CHUNK
            reached = reaching(sums, left, np.uint32(max(0, np.int64(least) - (most << shift))))
            if reached != 0 and start < end:
                if many:
                    reached = reaching_with_many(sums, left, coarse, chunk * rows, dense_row, start, end, shift, least)
                else:
                    reached = reaching_with(sums, left, coarse, chunk * rows, dense_row, start, end, shift, least)
            if reached != 0:
                if size + CHUNK > capacity:
                    size = _keep_best(candidates[query], size, limit, threshold, query)
                    least = threshold[query]
                while reached != 0:
                    i = left + np.int64(lowest_bit(reached))
                    reached &= reached - _1
                    score = sums[i]
                    for j in range(start, end):
                        score += exact[dense_row[j], i]
                    if score >= least:
                        candidates[query, size] = (np.uint64(score) << np.uint64(32)) | np.uint64(0xFFFFFFFF - position[i])
                        size += 1
            clear(sums, left)
        for chunk in range(chunks, BLOCK // CHUNK):
            clear(sums, chunk * CHUNK)
        sizes[query] = size


@jit
def score_block_wide(plan, drop, limit, position, room, found):
    """As `score_block` for queries of any length, all of whose terms are sparse: sums of 64 bits, of which scores leave out `drop`."""
    capacity = found.candidates.shape[1]
    sums = np.zeros(BLOCK + 1, np.uint64)
    for query in range(len(found.sizes)):
        for j in range(plan.sparse_offsets[query], plan.sparse_offsets[query + 1]):
            first = room.begin[plan.sparse_term[j]]
            for i in range(first, first + room.length[plan.sparse_term[j]]):
                sums[room.places[i]] += np.uint64(room.impacts[i]) * np.uint64(plan.sparse_count[j])
        size = found.sizes[query]
        for i in range(len(position)):
            score = sums[i] >> np.uint64(drop)
            if score >= found.threshold[query]:
                if size == capacity:
                    size = _keep_best(found.candidates[query], size, limit, found.threshold, query)
                found.candidates[query, size] = (score << np.uint64(32)) | np.uint64(0xFFFFFFFF - position[i])
                size += 1
        found.sizes[query] = size
        sums[:] = 0


@jit
def _keep_best(keys, size, limit, threshold, query):
    """Keep the query's `limit` best candidates, raise its threshold to the last of them; returns how many are left."""
    if size < limit:
        return size
    threshold[query] = max(threshold[query], np.uint32(nth_largest(keys, size, limit) >> np.uint64(32)))
    return limit


@jit
def raise_thresholds(rank, found):
    """Guess thresholds from the blocks seen so far: the score at `rank` among them."""
    for query in range(len(found.sizes)):
        size = found.sizes[query]
        if size >= rank:
            keys = found.candidates[query]
            least = max(found.threshold[query], np.uint32(nth_largest(keys, size, rank) >> np.uint64(32)))
            found.threshold[query] = least
            kept = 0
            for i in range(size):
                if np.uint32(keys[i] >> np.uint64(32)) >= least:
                    keys[kept] = keys[i]
                    kept += 1
            found.sizes[query] = kept


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
