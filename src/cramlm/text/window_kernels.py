"""Windows of words, compiled: normalised bytes -> a hash per word -> the windows that a bit table lets pass."""

from __future__ import annotations

import numpy as np

from cramlm.storage.compiled import jit

_FNV_START, _FNV = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
PRIME = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word's bits are lost
_SPACE = 0x20
_WORD = 4  # quarters of a word


@jit
def hash_words(data, offsets, quarters, hashes, sizes, word_offsets):  # type: ignore[no-untyped-def]
    """A hash and the size of every word, those of text i at [word_offsets[i]:word_offsets[i + 1]]; returns how many there are.

    data: uint8, UTF-8 words with at least one space between two. offsets: int64 (n + 1,). quarters: uint8, the size of a word by its first
    character; 4 for characters beyond the table. hashes, sizes: uint64 and uint8, room for half of the bytes and one a text.
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
                if not inside:
                    code = _character(data, place)
                    sizes[count] = quarters[code] if code < len(quarters) else _WORD
                value = (value ^ np.uint64(byte)) * _FNV
                inside = True
        if inside:
            hashes[count] = value * PRIME
            count += 1
        word_offsets[text + 1] = count
    return count


@jit
def _character(data, place):  # type: ignore[no-untyped-def]
    """The code point of the character of three or four bytes that begins here; of a shorter one its first byte."""
    byte = np.int64(data[place])
    if byte < 0xE0:
        return byte
    code = (byte & 0x0F) << 12 | np.int64(data[place + 1] & 0x3F) << 6 | np.int64(data[place + 2] & 0x3F)
    return code if byte < 0xF0 else (code & 0x7FFF) << 6 | np.int64(data[place + 3] & 0x3F)


@jit
def _window_ends(sizes, most, ends):  # type: ignore[no-untyped-def]
    """The end of the shortest run of at least this size from every word on; returns how many words have one."""
    following, size = 0, 0
    for place in range(len(sizes)):
        while size < most:
            if following == len(sizes):
                return place
            size += sizes[following]
            following += 1
        ends[place] = following
        size -= sizes[place]
    return len(sizes)


@jit
def collect_windows(hashes, sizes, word_offsets, least, most, windows, length, whole, text, start):  # type: ignore[no-untyped-def]
    """The windows by which a text is found: of one of size `most` or more the shortest run of at least this size from every word on, of
    a smaller one the whole text if its size is at least `least`. Returns how many; there is at most one a word.

    windows: their hashes, the sum of word * prime^(words after it), modulo 2^64. length: in words. whole: True for all of a small text.
    text, start: the text, and the word in it with which the window begins.
    """
    count = 0
    ends = np.empty(len(hashes), np.int64)
    for number in range(len(word_offsets) - 1):
        origin, words = word_offsets[number], word_offsets[number + 1] - word_offsets[number]
        own = sizes[origin : origin + words]
        found = _window_ends(own, most, ends)
        is_small = found == 0
        if is_small and np.sum(own) >= least:
            ends[0], found = words, 1
        for first in range(found):
            value = hashes[origin + first]
            for place in range(first + 1, ends[first]):
                value = value * PRIME + hashes[origin + place]
            windows[count], length[count], whole[count] = value, ends[first] - first, is_small
            text[count], start[count] = number, first
            count += 1
    return count


@jit
def set_bits(windows, tables, bits, first, shift):  # type: ignore[no-untyped-def]
    """Mark windows in their tables, by the upper bits of their hashes, which every word reaches.

    bits: uint64, all tables; table t begins at bits[first[t]] and has 2^(64 - shift[t]) bits.
    """
    for number in range(len(windows)):
        slot = windows[number] >> shift[tables[number]]
        bits[first[tables[number]] + np.int64(slot >> np.uint64(6))] |= np.uint64(1) << (slot & np.uint64(63))


@jit
def find_windows(hashes, sizes, word_offsets, most, bits, first, shift, text, start, length, window):  # type: ignore[no-untyped-def]
    """Windows that may be held-out ones, text by text; in a text first those of whole small texts, by length and first word, then those of
    size `most`. Returns how many there are, which may be more than there is room for: the rest are not written.

    Tables as in `set_bits`: table 0 holds the windows of size `most`, table n the small texts of n words; first[t] is -1 where there is
    none. A window's hash is the difference of two of the text's beginnings, so that windows do not wait for one another.
    """
    count, room = 0, len(window)
    begun = np.zeros(np.max(np.diff(word_offsets)) + 1, np.uint64)  # of the first n words
    ends, values = np.empty(len(begun), np.int64), np.empty(len(begun), np.uint64)
    powers = np.ones(most + 1, np.uint64)
    for number in range(most):
        powers[number + 1] = powers[number] * PRIME
    for number in range(len(word_offsets) - 1):
        origin, words = word_offsets[number], word_offsets[number + 1] - word_offsets[number]
        for place in range(words):
            begun[place + 1] = begun[place] * PRIME + hashes[origin + place]
        for run in range(1, min(len(first) - 1, words) + 1):
            if first[run] < 0:
                continue
            table, by, power = first[run], shift[run], powers[run]
            for place in range(words - run + 1):
                value = begun[place + run] - begun[place] * power
                slot = value >> by
                if (bits[table + np.int64(slot >> np.uint64(6))] >> (slot & np.uint64(63))) & np.uint64(1):
                    if count < room:
                        text[count], start[count], length[count], window[count] = number, place, run, value
                    count += 1
        if first[0] < 0:
            continue
        table, by = first[0], shift[0]
        windows = _window_ends(sizes[origin : origin + words], most, ends)
        for place in range(windows):
            end = ends[place]
            values[place] = begun[end] - begun[place] * powers[end - place]
        for place in range(windows):
            value = values[place]
            slot = value >> by
            if (bits[table + np.int64(slot >> np.uint64(6))] >> (slot & np.uint64(63))) & np.uint64(1):
                if count < room:
                    text[count], start[count], length[count], window[count] = number, place, ends[place] - place, value
                count += 1
    return count
