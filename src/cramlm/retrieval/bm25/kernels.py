"""Scoring a batch of queries block by block, compiled. bm25.py explains the search, Blocks the arrays.

Scores are whole numbers: what a term adds to a passage is rounded once, to a unit of about 2e-7, and everything after that is integer
addition, so that neither the order of the terms nor the cut of the corpus into blocks, shards and processes can change a score.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="call-arg, var-annotated"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.cgutils import alloca_once_value, for_range_slice, get_or_insert_function
from numba.extending import intrinsic

from cramlm.records import BoolArray, Int32Array, IntArray
from cramlm.storage.compiled import jit

BLOCK = 4096  # passages
PLACE = np.uint16(BLOCK - 1)  # low bits of a posting: the passage's place in its block; the high 4 bits are the term frequency
MANY = 15  # a frequency of this or more is spelt out in `large_frequencies` only
MOST_ENTRY_BYTES = 8  # of a dictionary: the step to the next term in up to 5 bytes, its postings in up to 2


class Blocks(NamedTuple):
    """A shard's postings, within blocks of BLOCK documents.

    Block i's dictionary is dictionary[dictionary_offsets[i]:dictionary_offsets[i + 1]]: for each of its terms, ascending, the step from
    the term before (the first: from -1) and the number of postings, as variable-length integers (7 bits a byte, lowest first, the high
    bit: goes on). Its postings begin at posting_offsets[i], in the order of the dictionary, each term's by document: uint16, see PLACE
    and MANY. Where a posting says MANY, `large_places` (ascending) holds its place in `postings`, `large_frequencies` the frequency.
    """

    dictionary_offsets: IntArray
    dictionary: npt.NDArray[np.uint8]
    posting_offsets: IntArray
    postings: npt.NDArray[np.uint16]
    large_places: IntArray
    large_frequencies: Int32Array


@jit
def count_rows(tokens, starts, seen, row_term, row_frequency, row_offsets):
    """Distinct terms of each document with their frequency, in order of occurrence; returns how many.

    `seen` (terms,) is -1 throughout, before and after.
    """
    size = 0
    for document in range(len(starts) - 1):
        first = size
        for i in range(starts[document], starts[document + 1]):
            term = tokens[i]
            place = seen[term]
            if place < 0:
                seen[term] = size
                row_term[size] = term
                row_frequency[size] = 1
                size += 1
            else:
                row_frequency[place] += 1
        for i in range(first, size):
            seen[row_term[i]] = -1
        row_offsets[document + 1] = size
    return size


@jit
def collect_terms(row_term, counts, terms):
    """Count postings per term in `counts` (all 0 before), list the distinct terms; returns how many."""
    size = 0
    for i in range(len(row_term)):
        term = row_term[i]
        if counts[term] == 0:
            terms[size] = term
            size += 1
        counts[term] += 1
    return size


@jit
def invert(row_offsets, row_term, row_frequency, terms, counts, postings, dictionary, large_places, large_frequencies):
    """Postings of a block by (term, document), and its dictionary; returns (bytes of the dictionary, how many large frequencies, unsorted).

    terms: ascending. `counts` (all terms,) is as `collect_terms` left it, and 0 afterwards.
    """
    place = 0
    size = 0
    before = -1
    for i in range(len(terms)):
        count = counts[terms[i]]
        size = _write_number(dictionary, size, terms[i] - before)
        size = _write_number(dictionary, size, count)
        before = terms[i]
        counts[terms[i]] = place
        place += count
    large = 0
    for document in range(len(row_offsets) - 1):
        for i in range(row_offsets[document], row_offsets[document + 1]):
            place = counts[row_term[i]]
            counts[row_term[i]] = place + 1
            postings[place] = document | (min(row_frequency[i], MANY) << 12)
            if row_frequency[i] >= MANY:
                large_places[large] = place
                large_frequencies[large] = row_frequency[i]
                large += 1
    for i in range(len(terms)):
        counts[terms[i]] = 0
    return size, large


@jit
def _write_number(target, place, value):
    while value >= 128:
        target[place] = (value & 127) | 128
        value >>= 7
        place += 1
    target[place] = value
    return place + 1


@jit
def read_number(source, place):
    """(the variable-length integer at `place`, the place after it)."""
    value = np.int64(source[place])
    place += 1
    if value < 128:
        return value, place
    value &= 127
    shift = 7
    while True:
        byte = np.int64(source[place])
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7


@jit
def large_frequency(place, large_places, large_frequencies):
    """Frequency of the posting at `place`, which says MANY."""
    return np.int64(large_frequencies[np.searchsorted(large_places, place)])


@jit
def frequencies_in(block, document, terms, blocks, found):
    """How often each of `terms` (ascending) stands in the document at a place of a block, into `found`."""
    found[:] = 0
    place, end = blocks.dictionary_offsets[block], blocks.dictionary_offsets[block + 1]
    start = blocks.posting_offsets[block]
    term = -1
    i = 0
    while place < end and i < len(terms):
        step, place = read_number(blocks.dictionary, place)
        count, place = read_number(blocks.dictionary, place)
        term += step
        while i < len(terms) and terms[i] < term:
            i += 1
        if i < len(terms) and terms[i] == term:
            for j in range(start, start + count):
                if np.int64(blocks.postings[j] & PLACE) == document:
                    frequency = np.int64(blocks.postings[j] >> 12)
                    found[i] = frequency if frequency < MANY else large_frequency(j, blocks.large_places, blocks.large_frequencies)
        start += count


@jit
def find_keys(keys, ids, term_offsets, term_bytes, wanted_keys, wanted_offsets, wanted_bytes, result):
    """For each wanted term its number in `ids`, -1 if it is not there. keys: ascending, equal ones next to each other.

    Terms are compared byte by byte, so that a shared key is never an error.
    """
    for i in range(len(wanted_keys)):
        result[i] = -1
        place = np.searchsorted(keys, wanted_keys[i])
        size = wanted_offsets[i + 1] - wanted_offsets[i]
        while place < len(keys) and keys[place] == wanted_keys[i]:
            start = term_offsets[ids[place]]
            if term_offsets[ids[place] + 1] - start == size:
                same = True
                for j in range(size):
                    if term_bytes[start + j] != wanted_bytes[wanted_offsets[i] + j]:
                        same = False
                        break
                if same:
                    result[i] = ids[place]
                    break
            place += 1


CHUNK = 64
GROUP = 256  # rows whose sum fits 16 bits
assert GROUP * (2**8 - 1) < 2**16

_MASK = ir.IntType(CHUNK)
_WORD, _BYTE, _PLACE = ir.IntType(32), ir.IntType(8), ir.IntType(64)
_HALVES = ir.VectorType(ir.IntType(16), CHUNK)
_WORDS, _BYTES = ir.VectorType(_WORD, CHUNK), ir.VectorType(_BYTE, CHUNK)


@intrinsic
def reaching(typing, sums, place, least):
    """Bit i of the result (uint64): whether sums[place + i] >= least, for 64 of them (uint32)."""

    def build(context, builder, signature, arguments):
        pointer = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        return _compare(builder, _load(builder, pointer, _WORDS), arguments[2])

    return types.uint64(sums, types.intp, types.uint32), build


@intrinsic
def reaching_with(typing, sums, place, coarse, first_row, rows, start, end, shift, least):
    """As `reaching`, for the sums plus rows of `coarse` (uint8, 64 a row, counted from first_row), each sum of rows shifted left.

    The rows are rows[start:end]. Where their sum leaves 8 bits the bit is set, whatever it is. The sums stay as they are.
    """

    def build(context, builder, signature, arguments):
        add = get_or_insert_function(builder.module, ir.FunctionType(_BYTES, (_BYTES, _BYTES)), f"llvm.uadd.sat.v{CHUNK}i8")
        total = _sum_rows(context, builder, signature, arguments, _BYTES, lambda before, row: builder.call(add, [before, row]))
        full = builder.icmp_unsigned("==", total, ir.Constant(_BYTES, [255] * CHUNK))
        reached = _reaching_with(context, builder, signature, arguments, builder.zext(total, _WORDS))
        return builder.or_(reached, builder.bitcast(full, _MASK))

    return types.uint64(*_with_rows(sums, coarse, rows)), build


@intrinsic
def reaching_with_many(typing, sums, place, coarse, first_row, rows, start, end, shift, least):
    """As `reaching_with`, for any number of rows: GROUP rows are added in 16 bits, groups in 32; half as fast.

    sums[place + i] plus the shifted sum of the rows must be under 2 ** 32.
    """

    def build(context, builder, signature, arguments):
        *_, start, end, _, _ = arguments
        group = ir.Constant(_PLACE, GROUP)
        total = alloca_once_value(builder, ir.Constant(_WORDS, None))
        with for_range_slice(builder, start, end, group) as (first, _):
            last = builder.add(first, group)
            last = builder.select(builder.icmp_signed("<", last, end), last, end)
            within = (*arguments[:5], first, last, *arguments[7:])
            halves = _sum_rows(
                context, builder, signature, within, _HALVES, lambda before, row: builder.add(before, builder.zext(row, _HALVES))
            )
            builder.store(builder.add(builder.load(total), builder.zext(halves, _WORDS)), total)
        return _reaching_with(context, builder, signature, arguments, builder.load(total))

    return types.uint64(*_with_rows(sums, coarse, rows)), build


def _with_rows(sums, coarse, rows):
    return sums, types.intp, coarse, types.intp, rows, types.intp, types.intp, types.uint32, types.uint32


def _sum_rows(context, builder, signature, arguments, vector, add):
    _, _, coarse, first_row, row_numbers, start, end, _, _ = arguments
    total = alloca_once_value(builder, ir.Constant(vector, None))
    with for_range_slice(builder, start, end, ir.Constant(_PLACE, 1)) as (j, _):
        row = builder.load(_at(context, builder, signature.args[4], row_numbers, j))
        where = builder.mul(builder.add(first_row, row), ir.Constant(_PLACE, CHUNK))
        addend = _load(builder, _at(context, builder, signature.args[2], coarse, where), _BYTES)
        builder.store(add(builder.load(total), addend), total)
    return builder.load(total)


def _reaching_with(context, builder, signature, arguments, total):
    sums, place, *_, shift, least = arguments
    pointer = _at(context, builder, signature.args[0], sums, place)
    units = builder.shl(total, _spread(builder, shift))
    return _compare(builder, builder.add(_load(builder, pointer, _WORDS), units), least)


@intrinsic
def clear(typing, sums, place):
    """Set 64 sums to 0."""

    def build(context, builder, signature, arguments):
        pointer = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        stored = builder.store(ir.Constant(_WORDS, None), builder.bitcast(pointer, _WORDS.as_pointer()))
        stored.align = 4
        return context.get_dummy_value()

    return types.void(sums, types.intp), build


@intrinsic
def lowest_bit(typing, mask):
    """Number of the lowest bit that is set; undefined for 0."""

    def build(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), build


def _at(context, builder, array_type, array, place):
    """Pointer to an element of a C-contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [place])


def _load(builder, pointer, vector):
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = vector.element.width // 8
    return loaded


def _spread(builder, word):
    """A 32-bit number in every lane."""
    lane = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(lane, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, None))


def _compare(builder, values, least):
    return builder.bitcast(builder.icmp_unsigned(">=", values, _spread(builder, least)), _MASK)


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
