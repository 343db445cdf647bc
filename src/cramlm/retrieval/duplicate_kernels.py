"""Compiled kernels of near-duplicates (duplicates.py): hashes of word 5-grams, and the search for kept passages that share them."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cramlm.records import Int32Array, IntArray
from cramlm.storage.compiled import jit

WORDS = 5  # of a shingle
_START = np.uint64(0xCBF29CE484222325)
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)
_ROUNDING = 1e-6  # of a product of a threshold and a number of shingles


class Kept(NamedTuple):
    """The shingles of the kept passages: those of passage k are shingles[starts[k]:starts[k + 1]], ascending.

    The arrays are longer than their content, so that passages can be added. owner[i]: the passage of shingle i. earlier[i]: the index of
    the last equal shingle before i, -1 if there is none. repeats[i]: the number of equal shingles up to i, i included. table: hash table
    (its size is a power of two) with the index of the last of the equal shingles, -1 in empty slots. matches: 0 for every passage between
    calls.
    """

    shingles: npt.NDArray[np.uint64]
    owner: Int32Array
    earlier: Int32Array
    repeats: Int32Array
    table: Int32Array
    starts: IntArray
    matches: Int32Array


@jit
def hash_shingles(hashes, word_offsets, shingles, offsets):
    """Write the distinct shingles of each text, ascending, one text after the other.

    A text of fewer than WORDS words is one shingle; a text without words has none. hashes, word_offsets: as in `WordHashes`. shingles:
    uint64 (words,). offsets: int64 (texts + 1,), from 0.
    """
    size = 0
    for text in range(len(word_offsets) - 1):
        first, last = word_offsets[text], word_offsets[text + 1]
        begin = size
        for start in range(first, max(last - WORDS, first) + 1 if last > first else first):
            value = _START
            for index in range(start, min(start + WORDS, last)):
                value = (value ^ hashes[index]) * _PRIME
                value ^= value >> _SHIFT
            shingles[size] = value
            size += 1
        shingles[begin:size].sort()
        end = begin
        for index in range(begin, size):
            if index == begin or shingles[index] != shingles[end - 1]:
                shingles[end] = shingles[index]
                end += 1
        size = end
        offsets[text + 1] = size


@jit
def fill_table(shingles, size, table):
    """Enter the first `size` shingles into a table of -1."""
    for index in range(size):
        table[_slot(shingles[index], shingles, table)] = index


@jit
def _slot(shingle, shingles, table):
    """Return the slot of a shingle in the table, or the empty one where it belongs."""
    mask = np.uint64(len(table) - 1)
    slot = (shingle * _PRIME >> _SHIFT) & mask
    while table[slot] >= 0 and shingles[table[slot]] != shingle:
        slot = (slot + np.uint64(1)) & mask
    return slot


@jit
def find_near_duplicates(shingles, offsets, wanted, threshold, passages, kept, duplicate_of, similarities):
    """Write for each wanted text its first near-duplicate among the kept passages and their similarity; return the number of kept passages.

    A wanted text without near-duplicate (`duplicate_of` -1) is added to the kept passages. shingles, offsets: as written by
    `hash_shingles`. passages: number of kept passages before the call; the arrays of `kept` are long enough for all of the texts.
    """
    most = np.diff(offsets).max()
    slots, last, counts = np.empty(most, np.uint64), np.empty(most, np.int32), np.empty(most, np.int64)
    candidates = np.empty(len(kept.matches), np.int32)
    for text in range(len(offsets) - 1):
        if not wanted[text]:
            continue
        own = shingles[offsets[text] : offsets[text + 1]]
        size = len(own)
        for i in range(size):
            slots[i] = _slot(own[i], kept.shingles, kept.table)
            last[i] = kept.table[slots[i]]
            counts[i] = kept.repeats[last[i]] if last[i] >= 0 else 0
        least = np.int64(max(1.0, np.ceil(threshold * size - _ROUNDING)))  # shingles that a near-duplicate shares
        found = 0
        for i in np.argsort(counts[:size])[: size - least + 1]:
            node = last[i]
            while node >= 0:
                passage = kept.owner[node]
                if kept.matches[passage] == 0:
                    candidates[found] = passage
                    found += 1
                kept.matches[passage] += 1
                node = kept.earlier[node]
        best = -1
        for passage in candidates[:found]:
            matches = kept.matches[passage]
            kept.matches[passage] = 0
            if best >= 0 and passage > best:
                continue
            other = kept.shingles[kept.starts[passage] : kept.starts[passage + 1]]
            both = size + len(other)
            needed = np.int64(np.ceil(threshold / (1 + threshold) * both - _ROUNDING))
            if matches + least - 1 < needed:  # least - 1 shingles were not looked up; too few even if all of them match
                continue
            shared = _count_equal(own, other, needed)
            if shared / (both - shared) >= threshold:
                best = passage
                similarities[text] = shared / (both - shared)
        duplicate_of[text] = best
        if best < 0:
            start = kept.starts[passages]
            for i in range(size):
                node = start + i
                kept.shingles[node] = own[i]
                kept.owner[node] = passages
                kept.earlier[node] = last[i]
                kept.repeats[node] = counts[i] + 1
                # an earlier shingle of this text may have taken the empty slot
                kept.table[slots[i] if last[i] >= 0 else _slot(own[i], kept.shingles, kept.table)] = node
            passages += 1
            kept.starts[passages] = start + size
    return passages


@jit
def _count_equal(one, other, needed):
    """Return how many numbers two ascending arrays without repeats share; if fewer than `needed`, any number below `needed`."""
    shared, i, j = 0, 0, 0
    while i < len(one) and j < len(other) and shared + min(len(one) - i, len(other) - j) >= needed:
        if one[i] == other[j]:
            shared += 1
            i += 1
            j += 1
        elif one[i] < other[j]:
            i += 1
        else:
            j += 1
    return shared
