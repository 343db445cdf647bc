"""Building a block of an index shard, and walking through one, compiled. shard.py explains the arrays."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cramlm.records import Int32Array, IntArray
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
