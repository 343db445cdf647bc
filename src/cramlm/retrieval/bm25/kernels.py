"""Compiled kernels of BM25: building a block's postings (segment.py) and scoring a batch of queries block by block (search.py).

Scores are fixed-point integers: an impact (what a term adds to a passage) is rounded once, and everything after that is integer addition.
So a score does not depend on the order of the terms or on the split of the corpus into blocks, segments and processes.

The steps over 64 passages at once are written in LLVM's vector types, because numba's loops are 3 to 10 times as slow. LLVM maps the
vectors to the processor's registers (4 with AVX-512, 8 with AVX2, 16 with NEON). Offsets are counted in elements.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="call-arg, var-annotated"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range_slice, get_or_insert_function
from numba.extending import intrinsic

from cramlm.records import BoolArray, Int32Array, IntArray
from cramlm.storage.compiled import jit

BLOCK = 4096  # passages
SLOT_MASK = np.uint16(BLOCK - 1)  # low 12 bits of a posting: the passage's slot in its block; the high 4 bits: the term frequency
LARGE = 15  # a term frequency of at least LARGE is stored in `large_frequencies`
assert (BLOCK - 1) + (LARGE << 12) < 2**16
MAX_ENTRY_BYTES = 8  # of a dictionary entry: the step to the next term in up to 5 bytes, its number of postings in up to 2


class Blocks(NamedTuple):
    """A segment's postings, in blocks of BLOCK documents.

    Block i's dictionary is dictionary[dictionary_offsets[i]:dictionary_offsets[i + 1]]: for each of its terms, ascending, the difference
    from the previous term (-1 before the first) and the number of postings, as variable-length integers (7 bits a byte, lowest first, high
    bit set if another byte follows). Its postings (uint16, see SLOT_MASK and LARGE) start at posting_offsets[i], in the order of the
    dictionary, each term's by document. For a posting with LARGE, `large_positions` (ascending) holds its index in
    `postings`, `large_frequencies` its frequency.
    """

    dictionary_offsets: IntArray
    dictionary: npt.NDArray[np.uint8]
    posting_offsets: IntArray
    postings: npt.NDArray[np.uint16]
    large_positions: IntArray
    large_frequencies: Int32Array


@jit
def count_rows(tokens, starts, row_of, row_term, row_frequency, row_offsets):
    """Write a row (term, frequency) for each distinct term of each document, in order of occurrence; return the number of rows.

    Document i has the tokens tokens[starts[i]:starts[i + 1]] and the rows row_offsets[i]:row_offsets[i + 1]. row_of (terms,): working
    memory, -1 before and after.
    """
    size = 0
    for document in range(len(starts) - 1):
        first = size
        for i in range(starts[document], starts[document + 1]):
            term = tokens[i]
            row = row_of[term]
            if row < 0:
                row_of[term] = size
                row_term[size] = term
                row_frequency[size] = 1
                size += 1
            else:
                row_frequency[row] += 1
        for i in range(first, size):
            row_of[row_term[i]] = -1
        row_offsets[document + 1] = size
    return size


@jit
def collect_terms(row_term, counts, terms):
    """Count postings per term in `counts` (0 before), list the distinct terms in `terms`; return their number."""
    size = 0
    for i in range(len(row_term)):
        term = row_term[i]
        if counts[term] == 0:
            terms[size] = term
            size += 1
        counts[term] += 1
    return size


@jit
def invert(row_offsets, row_term, row_frequency, terms, counts, postings, dictionary, large_positions, large_frequencies):
    """Write a block's postings by (term, document) and its dictionary; return (bytes of the dictionary, number of large frequencies).

    terms: ascending. counts (all terms,): as left by `collect_terms`; 0 afterwards. large_positions: unsorted.
    """
    position = 0
    size = 0
    before = -1
    for i in range(len(terms)):
        count = counts[terms[i]]
        size = _write_number(dictionary, size, terms[i] - before)
        size = _write_number(dictionary, size, np.int64(count))
        before = terms[i]
        counts[terms[i]] = position
        position += count
    large = 0
    for document in range(len(row_offsets) - 1):
        for i in range(row_offsets[document], row_offsets[document + 1]):
            position = counts[row_term[i]]
            counts[row_term[i]] = position + 1
            postings[position] = document | (min(row_frequency[i], LARGE) << 12)
            if row_frequency[i] >= LARGE:
                large_positions[large] = position
                large_frequencies[large] = row_frequency[i]
                large += 1
    for i in range(len(terms)):
        counts[terms[i]] = 0
    return size, large


@jit
def _write_number(target, cursor, value):
    while value >= 128:
        target[cursor] = (value & 127) | 128
        value >>= 7
        cursor += 1
    target[cursor] = value
    return cursor + 1


@jit
def read_number(source, cursor):
    """Return (the variable-length integer at `cursor`, the cursor after it)."""
    value = np.int64(source[cursor])
    cursor += 1
    if value < 128:
        return value, cursor
    value &= 127
    shift = 7
    while True:
        byte = np.int64(source[cursor])
        cursor += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, cursor
        shift += 7


@jit
def first_at_least(ascending, value):
    """Equivalent to np.searchsorted, which would import scipy.linalg (0.2 CPU seconds) when the kernel is loaded."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def large_frequency(position, large_positions, large_frequencies):
    """Return the frequency of the posting at `position`, whose stored frequency is LARGE."""
    return np.int64(large_frequencies[first_at_least(large_positions, position)])


@jit
def frequencies_in(block, document, terms, blocks, frequencies):
    """Write the frequency of each of `terms` (ascending) in the document in a slot of a block to `frequencies`."""
    frequencies[:] = 0
    cursor, end = blocks.dictionary_offsets[block], blocks.dictionary_offsets[block + 1]
    start = blocks.posting_offsets[block]
    term = -1
    i = 0
    while cursor < end and i < len(terms):
        step, cursor = read_number(blocks.dictionary, cursor)
        count, cursor = read_number(blocks.dictionary, cursor)
        term += step
        while i < len(terms) and terms[i] < term:
            i += 1
        if i < len(terms) and terms[i] == term:
            for j in range(start, start + count):
                if np.int64(blocks.postings[j] & SLOT_MASK) == document:
                    frequency = np.int64(blocks.postings[j] >> 12)
                    frequencies[i] = (
                        frequency if frequency < LARGE else large_frequency(j, blocks.large_positions, blocks.large_frequencies)
                    )
        start += count


@jit
def find_keys(keys, ids, term_offsets, term_bytes, wanted_keys, wanted_offsets, wanted_bytes, result):
    """Write the number of each wanted term to `result`, -1 if it is missing. keys: ascending. Terms of equal keys are compared by bytes."""
    for i in range(len(wanted_keys)):
        result[i] = -1
        index = first_at_least(keys, wanted_keys[i])
        size = wanted_offsets[i + 1] - wanted_offsets[i]
        while index < len(keys) and keys[index] == wanted_keys[i]:
            start = term_offsets[ids[index]]
            if term_offsets[ids[index] + 1] - start == size:
                same = True
                for j in range(size):
                    if term_bytes[start + j] != wanted_bytes[wanted_offsets[i] + j]:
                        same = False
                        break
                if same:
                    result[i] = ids[index]
                    break
            index += 1


CHUNK = 64
GROUP = 256  # rows added in 16 bits before they are added to 32-bit sums
assert GROUP * (2**8 - 1) < 2**16  # a row holds 8 bits

_MASK = ir.IntType(CHUNK)
_WORD, _BYTE, _INDEX = ir.IntType(32), ir.IntType(8), ir.IntType(64)
_HALVES = ir.VectorType(ir.IntType(16), CHUNK)
_WORDS, _BYTES = ir.VectorType(_WORD, CHUNK), ir.VectorType(_BYTE, CHUNK)


@intrinsic
def reaching(typing, sums, offset, least):
    """Return a uint64 whose bit i is set if sums[offset + i] >= least, for 64 sums (uint32)."""

    def build(context, builder, signature, arguments):
        pointer = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        return _compare(builder, _load(builder, pointer, _WORDS), arguments[2])

    return types.uint64(sums, types.intp, types.uint32), build


@intrinsic
def reaching_with(typing, sums, offset, coarse, first_row, rows, start, end, shift, least):
    """As `reaching`, for sums plus the shifted sum of rows of `coarse` (uint8, 64 per row, counted from first_row).

    The rows are rows[start:end]. Where their sum saturates 8 bits, the bit is set (a superset of the exact result). `sums` is unchanged.
    """

    def build(context, builder, signature, arguments):
        add = get_or_insert_function(builder.module, ir.FunctionType(_BYTES, (_BYTES, _BYTES)), f"llvm.uadd.sat.v{CHUNK}i8")
        total = _sum_rows(context, builder, signature, arguments, _BYTES, lambda before, row: builder.call(add, [before, row]))
        full = builder.icmp_unsigned("==", total, ir.Constant(_BYTES, [255] * CHUNK))
        reached = _reaching_with(context, builder, signature, arguments, builder.zext(total, _WORDS))
        return builder.or_(reached, builder.bitcast(full, _MASK))

    return types.uint64(*_with_rows(sums, coarse, rows)), build


@intrinsic
def reaching_with_many(typing, sums, offset, coarse, first_row, rows, start, end, shift, least):
    """As `reaching_with` for any number of rows, exact, half as fast: GROUP rows are added in 16 bits, the groups in 32.

    Requires sums[offset + i] plus the shifted sum of the rows to be under 2 ** 32 (asserted by search.SearchBatch).
    """

    def build(context, builder, signature, arguments):
        *_, start, end, _, _ = arguments
        group = ir.Constant(_INDEX, GROUP)
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
    with for_range_slice(builder, start, end, ir.Constant(_INDEX, 1)) as (j, _):
        row = builder.load(_at(context, builder, signature.args[4], row_numbers, j))
        where = builder.mul(builder.add(first_row, row), ir.Constant(_INDEX, CHUNK))
        addend = _load(builder, _at(context, builder, signature.args[2], coarse, where), _BYTES)
        builder.store(add(builder.load(total), addend), total)
    return builder.load(total)


def _reaching_with(context, builder, signature, arguments, total):
    sums, offset, *_, shift, least = arguments
    pointer = _at(context, builder, signature.args[0], sums, offset)
    shifted = builder.shl(total, _spread(builder, shift))
    return _compare(builder, builder.add(_load(builder, pointer, _WORDS), shifted), least)


@intrinsic
def clear(typing, sums, offset):
    """Set 64 sums to 0."""

    def build(context, builder, signature, arguments):
        pointer = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        stored = builder.store(ir.Constant(_WORDS, None), builder.bitcast(pointer, _WORDS.as_pointer()))
        stored.align = 4
        return context.get_dummy_value()

    return types.void(sums, types.intp), build


@intrinsic
def lowest_bit(typing, mask):
    """Return the index of the lowest bit that is set; undefined for 0."""

    def build(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), build


def _at(context, builder, array_type, array, offset):
    """Return a pointer to an element of a C-contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def _load(builder, pointer, vector):
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = vector.element.width // 8
    return loaded


def _spread(builder, word):
    """Return a vector that repeats a 32-bit number."""
    lane = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(lane, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, None))


def _compare(builder, values, least):
    return builder.bitcast(builder.icmp_unsigned(">=", values, _spread(builder, least)), _MASK)


UNROLLED = 4  # postings added per iteration
_1, _2, _3 = np.uint64(1), np.uint64(2), np.uint64(3)  # unsigned: numba then omits the check for negative indices


class QueryTerms(NamedTuple):
    """The terms of a batch of queries; terms are numbered within the batch.

    Sparse terms of query q: sparse_term[sparse_offsets[q]:sparse_offsets[q + 1]]; those from repeated[q] on have a count above 1. Rows of
    its dense terms: dense_row[dense_offsets[q]:dense_offsets[q + 1]], repeated by their count. many_dense[q]: their coarse impacts may sum
    to more than 8 bits.
    """

    sparse_offsets: IntArray
    repeated: IntArray
    sparse_term: IntArray
    sparse_count: IntArray
    dense_offsets: IntArray
    dense_row: IntArray
    many_dense: BoolArray


class BlockBuffers(NamedTuple):
    """The impacts of a block's postings; allocated once and filled for every block.

    A sparse term has `length` entries from `begin` in `slots` and `impacts`, padded to a multiple of UNROLLED with impacts of 0 in slot
    BLOCK. A dense term has a row in `exact` (rows, BLOCK) and, in coarse units rounded up, in `coarse` (chunks, rows, CHUNK); `bound`
    (rows,) is its largest coarse impact. sums (BLOCK + CHUNK,): 0 between queries.
    """

    begin: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    slots: npt.NDArray[np.uint16]
    impacts: npt.NDArray[np.uint32]
    exact: npt.NDArray[np.uint32]
    coarse: npt.NDArray[np.uint8]
    bound: IntArray
    sums: npt.NDArray[np.uint32]


class Candidates(NamedTuple):
    """Candidates of each query. keys (queries, capacity): score << 32 | ~position, unsorted, the first sizes[q] valid. threshold: minimum
    score of a candidate.
    """

    keys: npt.NDArray[np.uint64]
    sizes: IntArray
    threshold: npt.NDArray[np.uint32]


@jit
def weigh_block(block, blocks, number, weight, norm, row_of_term, shift, buffers):
    """Compute the impact of every posting of the batch's terms in this block, once for all queries.

    number (terms of the segment,): the term's number in the batch, or -1. weight: fixed-point idf, float64 (terms of the batch,). norm: k1
    * (1 - b + b * length / average), float64, for the block's slots. shift: a coarse unit is 2 ** shift.
    """
    exact, coarse, bound = buffers.exact, buffers.coarse, buffers.bound  # local names: attribute access in a loop is slow in numba
    begin, length, slots, impacts = buffers.begin, buffers.length, buffers.slots, buffers.impacts
    postings, dictionary = blocks.postings, blocks.dictionary
    exact[:] = 0
    coarse[:] = 0
    bound[:] = 0
    length[:] = 0
    cursor, end = blocks.dictionary_offsets[block], blocks.dictionary_offsets[block + 1]
    start = blocks.posting_offsets[block]
    size = np.uint64(0)
    term = -1
    while cursor < end:
        step, cursor = read_number(dictionary, cursor)
        count, cursor = read_number(dictionary, cursor)
        term += step
        i = number[term]
        if i >= 0:
            idf = weight[i]
            highest = np.uint16(0)
            first = np.uint64(start)
            after = size + np.uint64(count)
            for j in range(np.uint64(count)):
                posting = postings[first + j]
                highest = max(highest, posting)
                tf = np.float64(posting >> 12)
                at = posting & SLOT_MASK
                slots[size + j] = at
                impacts[size + j] = np.uint32(idf * (tf / (tf + norm[at])) + 0.5)
            if highest >> 12 == LARGE:
                for j in range(np.uint64(count)):
                    if postings[first + j] >> 12 == LARGE:
                        tf = np.float64(large_frequency(np.int64(first + j), blocks.large_positions, blocks.large_frequencies))
                        impacts[size + j] = np.uint32(idf * (tf / (tf + norm[slots[size + j]])) + 0.5)
            row = row_of_term[i]
            if row >= 0:
                most = np.uint32(0)
                for j in range(size, after):
                    at = np.uint64(slots[j])
                    exact[row, at] = impacts[j]
                    coarse[at >> np.uint64(6), row, at & np.uint64(63)] = (impacts[j] >> shift) + np.uint32(1)
                    most = max(most, impacts[j])
                bound[row] = (most >> shift) + np.uint32(1)
            else:
                begin[i] = size
                size = after
                while size & _3:
                    slots[size] = BLOCK
                    impacts[size] = 0
                    size += _1
                length[i] = size - begin[i]
        start += count


@jit
def score_block(query_terms, shift, limit, position, buffers, candidates):
    """Score a block for all queries and append documents that reach their thresholds to the candidates.

    position: int64, corpus positions of the block's documents, or of the first of them: the others are ignored.
    """
    keys, sizes, threshold = candidates.keys, candidates.sizes, candidates.threshold
    sums, slots, impacts, begin, length = buffers.sums, buffers.slots, buffers.impacts, buffers.begin, buffers.length
    exact, coarse, bound = buffers.exact, buffers.coarse, buffers.bound
    sparse_offsets, repeated = query_terms.sparse_offsets, query_terms.repeated
    sparse_term, sparse_count = query_terms.sparse_term, query_terms.sparse_count
    dense_offsets, dense_row = query_terms.dense_offsets, query_terms.dense_row
    chunks = (len(position) + CHUNK - 1) // CHUNK
    capacity, rows = keys.shape[1], coarse.shape[1]
    found, scores = np.empty(BLOCK, np.uint16), np.empty(BLOCK, np.uint32)
    for query in range(len(sizes)):
        for j in range(sparse_offsets[query], repeated[query]):
            first = begin[sparse_term[j]]
            for i in range(first, first + length[sparse_term[j]], np.uint64(UNROLLED)):
                sums[slots[i]] += impacts[i]
                sums[slots[i + _1]] += impacts[i + _1]
                sums[slots[i + _2]] += impacts[i + _2]
                sums[slots[i + _3]] += impacts[i + _3]
        for j in range(repeated[query], sparse_offsets[query + 1]):
            first = begin[sparse_term[j]]
            for i in range(first, first + length[sparse_term[j]]):
                sums[slots[i]] += impacts[i] * np.uint32(sparse_count[j])
        start, end = dense_offsets[query], dense_offsets[query + 1]
        most = np.int64(0)
        for j in range(start, end):
            most += bound[dense_row[j]]
        least = threshold[query]
        many = query_terms.many_dense[query]
        size = sizes[query]
        count = np.uint64(0)
        for chunk in range(chunks):
            left = chunk * CHUNK
            reached = reaching(sums, left, np.uint32(max(0, np.int64(least) - (most << shift))))
            if reached != 0 and start < end:
                if many:
                    reached = reaching_with_many(sums, left, coarse, chunk * rows, dense_row, start, end, shift, least)
                else:
                    reached = reaching_with(sums, left, coarse, chunk * rows, dense_row, start, end, shift, least)
            while reached != 0:
                slot = left + np.int64(lowest_bit(reached))
                reached &= reached - _1
                found[count] = slot
                scores[count] = sums[slot]
                count += _1
            clear(sums, left)
        for chunk in range(chunks, BLOCK // CHUNK):
            clear(sums, chunk * CHUNK)
        j = start if count > 0 else end
        while j < end:  # row by row: the rows of all queries together are larger than the cache
            row = dense_row[j]
            times = np.uint32(0)
            while j < end and dense_row[j] == row:
                times += np.uint32(1)
                j += 1
            values = exact[row]
            for i in range(count):
                scores[i] += values[np.uint64(found[i])] * times
        for i in range(count):
            if scores[i] >= least:
                if size == capacity:
                    size = _keep_best(keys[query], size, limit, threshold, query)
                    least = threshold[query]
                keys[query, size] = (np.uint64(scores[i]) << np.uint64(32)) | np.uint64(0xFFFFFFFF - position[found[i]])
                size += 1
        sizes[query] = size


@jit
def score_block_wide(query_terms, drop, limit, position, buffers, candidates):
    """As `score_block`, for queries of any length whose terms are all sparse: sums of 64 bits, shifted right by `drop` bits at the end."""
    capacity = candidates.keys.shape[1]
    sums = np.zeros(BLOCK + 1, np.uint64)
    for query in range(len(candidates.sizes)):
        for j in range(query_terms.sparse_offsets[query], query_terms.sparse_offsets[query + 1]):
            first = buffers.begin[query_terms.sparse_term[j]]
            for i in range(first, first + buffers.length[query_terms.sparse_term[j]]):
                sums[buffers.slots[i]] += np.uint64(buffers.impacts[i]) * np.uint64(query_terms.sparse_count[j])
        size = candidates.sizes[query]
        for i in range(len(position)):
            score = sums[i] >> np.uint64(drop)
            if score >= candidates.threshold[query]:
                if size == capacity:
                    size = _keep_best(candidates.keys[query], size, limit, candidates.threshold, query)
                candidates.keys[query, size] = (score << np.uint64(32)) | np.uint64(0xFFFFFFFF - position[i])
                size += 1
        candidates.sizes[query] = size
        sums[:] = 0


@jit
def _keep_best(keys, size, limit, threshold, query):
    """Keep the query's `limit` best candidates and raise its threshold to the last of them; return how many are left."""
    if size < limit:
        return size
    threshold[query] = max(threshold[query], np.uint32(nth_largest(keys, size, limit) >> np.uint64(32)))
    return limit


@jit
def raise_thresholds(rank, candidates):
    """Raise thresholds to the score at `rank` among the candidates so far."""
    for query in range(len(candidates.sizes)):
        size = candidates.sizes[query]
        if size >= rank:
            keys = candidates.keys[query]
            least = max(candidates.threshold[query], np.uint32(nth_largest(keys, size, rank) >> np.uint64(32)))
            candidates.threshold[query] = least
            kept = 0
            for i in range(size):
                if np.uint32(keys[i] >> np.uint64(32)) >= least:
                    keys[kept] = keys[i]
                    kept += 1
            candidates.sizes[query] = kept


@jit
def nth_largest(keys, size, n):
    """Return the n-th largest (from 1) of keys[:size]; moves the larger keys before it (quickselect)."""
    low, high, index = 0, size - 1, n - 1
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
        if index <= j:
            high = j
        elif index >= i:
            low = i
        else:
            break
    return keys[index]
