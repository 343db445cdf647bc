"""Building an index block and looking things up in it, compiled. index.py explains the arrays."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from cramlm.records import Int32Array, IntArray

BLOCK = 4096  # passages
PLACE = np.uint16(BLOCK - 1)  # low bits of a posting: the passage's place in its block; the high 4 bits are the term frequency
MANY = 15  # a frequency of this or more is spelt out in the passage's row only
MANY_IN_ROW = 255  # a frequency of this or more is spelt out in the list of large ones only

jit = njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


class Rows(NamedTuple):
    """The index by document: terms ascending in each row, with their frequency.

    offsets: int64 (N + 1,). terms: int32 (postings,). frequencies: uint8, 255 = look in `large_frequencies` where
    `large_places` (ascending) holds the place.
    """

    offsets: IntArray
    terms: Int32Array
    frequencies: npt.NDArray[np.uint8]
    large_places: IntArray
    large_frequencies: IntArray


class Blocks(NamedTuple):
    """The index by term, within blocks of BLOCK documents.

    offsets: int64 (blocks + 1,), where a block's dictionary begins. terms: int32, the dictionaries, ascending in each block. starts:
    uint32, where a term's postings begin, counted from the block's first. postings: uint16, by (block, term, document), see PLACE and
    MANY. A block's postings begin where its first document's row does: both hold each pair (document, term) once.
    """

    offsets: IntArray
    terms: Int32Array
    starts: npt.NDArray[np.uint32]
    postings: npt.NDArray[np.uint16]


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
    for term in row_term:
        if counts[term] == 0:
            terms[size] = term
            size += 1
        counts[term] += 1
    return size


@jit
def invert(row_offsets, row_term, row_frequency, terms, counts, starts, postings, sorted_term, sorted_frequency):
    """Postings of a block by (term, document), and its rows again with ascending terms.

    `counts` (all terms,) is as `collect_terms` left it, and 0 afterwards; `starts` (terms,) is filled.
    """
    place = 0
    for i in range(len(terms)):
        starts[i] = place
        count = counts[terms[i]]
        counts[terms[i]] = place
        place += count
    documents = len(row_offsets) - 1
    document_of = np.empty(len(row_term), np.uint16)
    frequency_of = np.empty(len(row_term), np.int32)
    for document in range(documents):
        for i in range(row_offsets[document], row_offsets[document + 1]):
            place = counts[row_term[i]]
            counts[row_term[i]] = place + 1
            document_of[place] = document
            frequency_of[place] = row_frequency[i]
            postings[place] = document | (min(row_frequency[i], MANY) << 12)
    cursor = row_offsets[:-1].copy()
    for i in range(len(terms)):
        term = terms[i]
        counts[term] = 0
        end = starts[i + 1] if i + 1 < len(terms) else len(row_term)
        for j in range(starts[i], end):
            place = cursor[document_of[j]]
            cursor[document_of[j]] = place + 1
            sorted_term[place] = term
            sorted_frequency[place] = frequency_of[j]


@jit
def frequency_of(posting, document, term, rows):
    """The term frequency that a posting stands for."""
    frequency = np.int64(posting >> 12)
    return frequency if frequency < MANY else frequency_in_row(term, document, rows)


@jit
def frequency_in_row(term, document, rows):
    """Term frequency by binary search in the document's row; 0 if it is not there."""
    low, high = rows.offsets[document], rows.offsets[document + 1]
    end = high
    while low < high:
        middle = (low + high) >> 1
        if rows.terms[middle] < term:
            low = middle + 1
        else:
            high = middle
    if low == end or rows.terms[low] != term:
        return 0
    return row_frequency(low, rows)


@jit
def row_frequency(place, rows):
    """Term frequency at a place of the rows."""
    if rows.frequencies[place] < MANY_IN_ROW:
        return np.int64(rows.frequencies[place])
    return rows.large_frequencies[np.searchsorted(rows.large_places, place)]


@jit
def find_runs(terms, block, rows, blocks, first, last):
    """Where each of `terms` (ascending) lies in `blocks.postings` for one block: first and last (exclusive), equal if it is absent.

    Few terms are looked up one by one, many by walking both lists.
    """
    low, high = blocks.offsets[block], blocks.offsets[block + 1]
    documents = len(rows.offsets) - 1
    base = rows.offsets[block * BLOCK]
    search = len(terms) * 16 < high - low
    j = low
    for i in range(len(terms)):
        term = terms[i]
        if search:
            upper = high
            while j < upper:
                middle = (j + upper) >> 1
                if blocks.terms[middle] < term:
                    j = middle + 1
                else:
                    upper = middle
        else:
            while j < high and blocks.terms[j] < term:
                j += 1
        if j < high and blocks.terms[j] == term:
            first[i] = base + blocks.starts[j]
            last[i] = base + blocks.starts[j + 1] if j + 1 < high else rows.offsets[min(documents, (block + 1) * BLOCK)]
        else:
            first[i] = 0
            last[i] = 0
