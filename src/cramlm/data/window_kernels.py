"""Windows of words, compiled: normalised bytes -> a hash per word -> the windows that a bit table lets pass."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_FNV_START, _FNV = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
PRIME = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word's bits are lost
_SPACE = 0x20
_jit: Any = numba.njit(cache=True, nogil=True, error_model="numpy")


@_jit
def hash_words(data, offsets, hashes, word_offsets):  # type: ignore[no-untyped-def]
    """A hash of every word, the words of text i at hashes[word_offsets[i]:word_offsets[i + 1]]; returns how many there are.

    data: uint8, words with at least one space between two. offsets: int64 (n + 1,). hashes: uint64, room for half of the bytes and one
    a text.
    """
    count = 0
    word_offsets[0] = 0
    for text in range(len(offsets) - 1):
        value, inside = _FNV_START, False
        for place in range(offsets[text], offsets[text + 1]):
            byte = data[place]
            if byte <= _SPACE:  # white space of any kind: nothing else that is not a letter is left
                if inside:
                    hashes[count] = value * PRIME
                    count += 1
                    value, inside = _FNV_START, False
            else:
                value = (value ^ np.uint64(byte)) * _FNV
                inside = True
        if inside:
            hashes[count] = value * PRIME
            count += 1
        word_offsets[text + 1] = count
    return count


@_jit
def collect_windows(hashes, word_offsets, lengths, windows, text, start):  # type: ignore[no-untyped-def]
    """Every window of lengths[i] words of text i: its hash, the text, the word it begins with. Returns how many.

    The hash is the sum of word * prime^(words after it), modulo 2^64.
    """
    count = 0
    for number in range(len(lengths)):
        for first in range(word_offsets[number], word_offsets[number + 1] - lengths[number] + 1):
            value = hashes[first]
            for place in range(first + 1, first + lengths[number]):
                value = value * PRIME + hashes[place]
            windows[count], text[count], start[count] = value, number, first - word_offsets[number]
            count += 1
    return count


@_jit
def set_bits(windows, lengths, bits, first, shift):  # type: ignore[no-untyped-def]
    """Mark windows in the tables of their lengths, by the upper bits of their hashes, which every word reaches.

    bits: uint64, all tables; that of a length begins at bits[first[length]] and has 2^(64 - shift[length]) bits.
    """
    for number in range(len(windows)):
        slot = windows[number] >> shift[lengths[number]]
        bits[first[lengths[number]] + np.int64(slot >> np.uint64(6))] |= np.uint64(1) << (slot & np.uint64(63))


@_jit
def find_windows(hashes, word_offsets, bits, first, shift, text, start, length, window):  # type: ignore[no-untyped-def]
    """Windows that the table of their length may hold, text by text, then by length, then by first word. Returns how many there are,
    which may be more than there is room for: the rest are not written.

    Tables as in `set_bits`; first[length] is -1 where there is none. A window's hash is the difference of two of the text's beginnings, so
    that windows do not wait for one another.
    """
    count, room = 0, len(window)
    begun = np.zeros(np.max(np.diff(word_offsets)) + 1, np.uint64)  # of the first n words
    for number in range(len(word_offsets) - 1):
        origin, words = word_offsets[number], word_offsets[number + 1] - word_offsets[number]
        for place in range(words):
            begun[place + 1] = begun[place] * PRIME + hashes[origin + place]
        power = np.uint64(1)
        for size in range(1, min(len(first) - 1, words) + 1):
            power *= PRIME
            if first[size] < 0:
                continue
            table, by = first[size], shift[size]
            for place in range(words - size + 1):
                value = begun[place + size] - begun[place] * power
                slot = value >> by
                if (bits[table + np.int64(slot >> np.uint64(6))] >> (slot & np.uint64(63))) & np.uint64(1):
                    if count < room:
                        text[count], start[count], length[count], window[count] = number, place, size, value
                    count += 1
    return count
