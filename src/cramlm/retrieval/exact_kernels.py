"""BM25 in float64: the definition that every search result follows, compiled.

The score of a document is the sum over the query's terms, in ascending number, of weight * (tf / (tf + norm)), rounded to float32; weight
is idf times the count in the query. Results are ordered by (score descending, position ascending), packed into one integer: bits of the
score << 32 | ~position.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="assignment"

from __future__ import annotations

import numpy as np

from cramlm.retrieval.index_kernels import BLOCK, PLACE, find_runs, frequency_of, jit, row_frequency
from cramlm.retrieval.kernels import nth_largest


@jit
def _pack(score, document):
    bits = np.uint64(np.float32(score).view(np.uint32))
    return (bits << np.uint64(32)) | np.uint64(0xFFFFFFFF - document)


@jit
def rescore(first_query, last_query, offsets, query_term, query_weight, terms, vocabulary, rows, norm, candidates, candidate_count):
    """Replace the estimates of queries first_query..last_query by true scores, block by block, so that a block's rows are read once for
    all.

    terms: the batch's, ascending; query_term counts within them. vocabulary: how many terms the index has.
    """
    capacity = candidates.shape[1]
    documents = len(rows.offsets) - 1
    number = np.full(vocabulary, -1, np.int32)
    for i in range(len(terms)):
        number[terms[i]] = i
    order, bounds = _by_block(first_query, last_query, candidates, candidate_count, (documents + BLOCK - 1) // BLOCK)
    weights = np.zeros(len(terms), np.float64)
    row_start = np.empty(BLOCK, np.int64)
    row_end = np.empty(BLOCK, np.int64)
    known = np.empty(0, np.int32)
    share = np.empty(0, np.float64)
    for block in range(len(bounds) - 1):
        if bounds[block] == bounds[block + 1]:
            continue
        size = rows.offsets[min(documents, (block + 1) * BLOCK)] - rows.offsets[block * BLOCK]
        if size > len(known):
            known = np.empty(size, np.int32)
            share = np.empty(size, np.float64)
        row_start[:] = -1
        used = 0
        current = -1
        for at in range(bounds[block], bounds[block + 1]):
            query, i = order[at] // capacity, order[at] % capacity
            if query != current:
                if current >= 0:
                    for j in range(offsets[current], offsets[current + 1]):
                        weights[query_term[j]] = 0.0
                for j in range(offsets[query], offsets[query + 1]):
                    weights[query_term[j]] = query_weight[j]
                current = query
            document = _document(candidates[query, i])
            local = document - block * BLOCK
            if row_start[local] < 0:  # the part of the row that the batch knows, made when first asked for
                row_start[local] = used
                for place in range(rows.offsets[document], rows.offsets[document + 1]):
                    if number[rows.terms[place]] >= 0:
                        frequency = np.float64(row_frequency(place, rows))
                        known[used] = number[rows.terms[place]]
                        share[used] = frequency / (frequency + norm[document])
                        used += 1
                row_end[local] = used
            score = 0.0
            for j in range(row_start[local], row_end[local]):
                score += weights[known[j]] * share[j]  # adding 0 for terms of other queries is quicker than asking
            candidates[query, i] = _pack(score, document)
        for j in range(offsets[current], offsets[current + 1]):
            weights[query_term[j]] = 0.0


@jit
def _by_block(first_query, last_query, candidates, candidate_count, blocks):
    """Candidates (query * capacity + place) ordered by block, then query; and where each block's begin."""
    capacity = candidates.shape[1]
    bounds = np.zeros(blocks + 1, np.int64)
    for query in range(first_query, last_query):
        for i in range(candidate_count[query]):
            bounds[_document(candidates[query, i]) // BLOCK + 1] += 1
    bounds = np.cumsum(bounds)
    cursor = bounds.copy()
    order = np.empty(bounds[-1], np.int64)
    for query in range(first_query, last_query):
        for i in range(candidate_count[query]):
            block = _document(candidates[query, i]) // BLOCK
            order[cursor[block]] = query * capacity + i
            cursor[block] += 1
    return order, bounds


@jit
def _document(key):
    return np.int64(0xFFFFFFFF) - np.int64(key & np.uint64(0xFFFFFFFF))


@jit
def search_one(terms, weights, rows, blocks, norm, limit, keys):
    """The `limit` best documents for one query by scoring every posting; returns how many, packed in keys[:n], unsorted.

    keys: room for 2 * limit + BLOCK.
    """
    sums = np.zeros(BLOCK, np.float64)
    first = np.empty(len(terms), np.int64)
    last = np.empty(len(terms), np.int64)
    size = 0
    least = np.uint64(0)
    for block in range(len(blocks.offsets) - 1):
        find_runs(terms, block, rows, blocks, first, last)
        for i in range(len(terms)):
            for j in range(first[i], last[i]):
                place = np.int64(blocks.postings[j] & PLACE)
                document = block * BLOCK + place
                frequency = np.float64(frequency_of(blocks.postings[j], document, terms[i], rows))
                sums[place] += weights[i] * (frequency / (frequency + norm[document]))
        for place in range(BLOCK):
            if sums[place] > 0.0:
                key = _pack(sums[place], block * BLOCK + place)
                sums[place] = 0.0
                if key > least:
                    keys[size] = key
                    size += 1
        if size > 2 * limit:
            least = nth_largest(keys, size, limit)  # keys differ, and it leaves the larger ones in front
            size = limit
    if size > limit:
        nth_largest(keys, size, limit)
        size = limit
    return size
