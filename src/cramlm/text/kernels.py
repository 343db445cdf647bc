"""Compiled functions on UTF-8 bytes: characters, hashes of words, and windows of words that a bit table contains.
Those of hashed n-grams are in ngram_kernels.py.

NumPy's reductions and searches are not called here: loading a kernel that calls one imports scipy.linalg (0.2 CPU seconds).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import types

from cramlm.storage.compiled import intrinsic, jit

DONE, FULL, UNKNOWN, NOT_SIMPLE = range(4)  # results of `hash_replaced_words`
FNV_START = np.uint64(0xCBF29CE484222325)
PRIME = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses no bit
_BLANK = 0x20
_LOWER_CASE = np.uint64(0x2020202020202020)  # set in the bytes of letters and digits
_ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)
_WORD_QUARTERS = 4

# Instructions that numba has no name for: 64 bytes classified at once, and bits counted. LLVM has them on every processor.
# None of them checks bounds.
WIDTH: Final = 64  # bytes classified at once, a bit each
_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_BYTES = ir.VectorType(_BYTE, WIDTH)


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any, kind: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.load(builder.bitcast(builder.gep(data, [index]), kind.as_pointer()), align=1)


def _splat(value: int) -> Any:
    return ir.Constant(_BYTES, [value] * WIDTH)


@intrinsic
def find_letters(typing: Any, text: Any, index: Any) -> Any:
    """Return a uint64 with bit i set if text[index + i] is an ASCII letter or digit, for the `WIDTH` bytes from `index` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = _load(context, builder, signature.args[0], arguments[0], arguments[1], _BYTES)
        letter = builder.icmp_unsigned("<", builder.sub(builder.or_(loaded, _splat(0x20)), _splat(ord("a"))), _splat(26))
        digit = builder.icmp_unsigned("<", builder.sub(loaded, _splat(ord("0"))), _splat(10))
        return builder.bitcast(builder.or_(letter, digit), _WORD)

    return types.uint64(text, types.int64), generate


def _find_from_128_to(end: int) -> Any:
    """Return an instruction that gives a uint64 with bit i set if 128 <= text[index + i] < end, for the `WIDTH` bytes from `index` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = _load(context, builder, signature.args[0], arguments[0], arguments[1], _BYTES)
        return builder.bitcast(builder.icmp_signed("<", loaded, _splat(end - 256)), _WORD)  # bytes from 128 on are negative

    return intrinsic(lambda typing, text, index: (types.uint64(text, types.int64), generate))


find_beyond_ascii = _find_from_128_to(256)
find_continuing = _find_from_128_to(0xC0)
"""Bytes that continue a character of UTF-8."""


@intrinsic
def count_bits(typing: Any, bits: Any) -> Any:
    """Return the number of set bits of a uint64, int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def load_word(typing: Any, text: Any, index: Any) -> Any:
    """Return the eight bytes from text[index] on as a uint64, the first one lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(context, builder, signature.args[0], arguments[0], arguments[1], _WORD)

    return types.uint64(text, types.int64), generate


@intrinsic
def trailing_zeros(typing: Any, bits: Any) -> Any:
    """Return the number of zeros below the lowest set bit of a uint64, int64; 64 without a set bit."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@jit
def character(text, index):  # type: ignore[no-untyped-def]
    """Code point and size in bytes of the character beyond ASCII at `index`; the text is valid UTF-8."""
    lead = np.int64(text[index])
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | np.int64(text[index + 1] & 0x3F), 2
    code = (lead & 0x0F) << 12 | np.int64(text[index + 1] & 0x3F) << 6 | np.int64(text[index + 2] & 0x3F)
    if lead < 0xF0:
        return code, 3
    return (code & 0x7FFF) << 6 | np.int64(text[index + 3] & 0x3F), 4


@jit
def unknown_characters(text, entry, found):  # type: ignore[no-untyped-def]
    """Write the distinct code points of a text whose entry is 0 to `found`, until it is full, and set their entry to -1; return their
    number. entry: int32 (0x200000,), so that no bytes lead out of it.
    """
    count, index = 0, 0
    while index < len(text):
        if text[index] < 0x80:
            index += 1
            continue
        code, size = character(text, index)
        if entry[code] == 0:
            if count == len(found):
                return count
            entry[code] = -1
            found[count] = code
            count += 1
        index += size
    return count


@jit
def hash_replaced_words(text, offsets, first, fold, entry, words, starts, longest, quarters, hashes, sizes, word_offsets):  # type: ignore[no-untyped-def]
    """Write hashes and sizes as `hash_words`, of texts with each ASCII byte replaced by `fold`, and each other character by
    words[starts[e]:starts[e + 1]] with its entry e. Return (the first text from `first` on that is not done, why: FULL, UNKNOWN for a
    character with entry 0, NOT_SIMPLE for one with an entry below 0), or (number of texts, DONE).

    sizes: 4 everywhere at first; word_offsets[first] is set. longest: bytes of the longest replacement.
    """
    for number in range(first, len(offsets) - 1):
        count, end = word_offsets[number], offsets[number + 1]
        index = offsets[number]
        value, pending, size = FNV_START, np.uint64(0), 0
        if count + (end - index) // 2 + 2 > len(hashes):
            return number, FULL
        while index < end:
            if size == 0 and index + WIDTH + 16 <= len(text):
                done, count = _hash_ascii_words(text, index, end, hashes, count)
                if done > 0:
                    index += done
                    continue
            byte = text[index]
            if byte < 0x80:
                folded = fold[byte]
                if folded > _BLANK:
                    value, pending, size = _add_byte(value, pending, size, folded)
                else:
                    count = _end_word(value, pending, size, hashes, count)
                    value, pending, size = FNV_START, np.uint64(0), 0
                index += 1
                continue
            code, width = character(text, index)
            own = entry[code]
            reason = DONE
            if own <= 0:
                reason = UNKNOWN if own == 0 else NOT_SIMPLE
            elif count + longest + (end - index) // 2 + 2 > len(hashes):
                reason = FULL
            if reason != DONE:
                sizes[word_offsets[number] : count + 1] = _WORD_QUARTERS
                return number, reason
            for place in range(starts[own], starts[own + 1]):
                byte = words[place]
                if byte <= _BLANK:
                    count = _end_word(value, pending, size, hashes, count)
                    value, pending, size = FNV_START, np.uint64(0), 0
                else:
                    if size == 0:
                        code = _code_point(words, place)
                        sizes[count] = quarters[code] if code < len(quarters) else _WORD_QUARTERS
                    value, pending, size = _add_byte(value, pending, size, byte)
            index += width
        word_offsets[number + 1] = _end_word(value, pending, size, hashes, count)
    return len(offsets) - 1, DONE


@jit
def _hash_ascii_words(text, index, end, hashes, count):  # type: ignore[no-untyped-def]
    """Write the hashes of the ASCII words that lie in the `WIDTH` bytes from `index` on and before `end`; return the bytes that are done
    with, 0 if the first word goes on beyond ASCII or beyond them, and the number of words. Reads at most `WIDTH` + 15 bytes.
    """
    stop = min(trailing_zeros(find_beyond_ascii(text, index)), end - index)
    letters = find_letters(text, index)
    if stop < WIDTH:
        letters &= (np.uint64(1) << np.uint64(stop)) - np.uint64(1)
    starts = letters & ~(letters << np.uint64(1))
    ends = ~letters & (letters << np.uint64(1))  # of the byte after a word
    while starts != 0:
        start = trailing_zeros(starts)
        after = min(trailing_zeros(ends), stop)
        if after >= stop and index + stop < end:  # the word may go on after these bytes
            return start, count
        starts &= starts - np.uint64(1)
        ends &= ends - np.uint64(1)
        place, length, value = index + start, after - start, FNV_START
        while length > 16:
            value = _mix(value, load_word(text, place) | _LOWER_CASE)
            place += 8
            length -= 8
        short = min(length, 8)  # of the last 16 bytes: both hashes are computed, without a branch
        value = _mix(value, (load_word(text, place) | _LOWER_CASE) & (_ALL_BITS >> np.uint64(64 - 8 * short)))
        longer = _mix(value, (load_word(text, place + 8) | _LOWER_CASE) & (_ALL_BITS >> np.uint64(64 - 8 * max(length - 8, 1))))
        hashes[count] = longer if length > 8 else value
        count += 1
    return stop, count


@jit
def _mix(value, bytes_of_word):  # type: ignore[no-untyped-def]
    value = (value ^ bytes_of_word) * PRIME
    return value ^ (value >> np.uint64(32))


@jit
def _add_byte(value, pending, size, byte):  # type: ignore[no-untyped-def]
    """Return the state of a word's hash after one more byte: the hash of full groups of eight bytes, the bytes after them, all bytes."""
    pending |= np.uint64(byte) << np.uint64(8 * (size & 7))
    size += 1
    if size & 7 == 0:
        return _mix(value, pending), np.uint64(0), size
    return value, pending, size


@jit
def _end_word(value, pending, size, hashes, count):  # type: ignore[no-untyped-def]
    """Write the hash of a word, unless it has no bytes; return the number of words."""
    if size == 0:
        return count
    hashes[count] = _mix(value, pending) if size & 7 else value
    return count + 1


@jit
def count_characters(text, offsets, quarters, characters, spaceless):  # type: ignore[no-untyped-def]
    """Write the number of characters of every text, and of those in scripts without spaces: those whose size in `quarters` is below 4."""
    for number in range(len(offsets) - 1):
        start, end = offsets[number], offsets[number + 1]
        characters[number], spaceless[number] = end - start, 0
        index, beyond = start, False
        while index + WIDTH <= end:
            continuing = find_continuing(text, index)
            characters[number] -= count_bits(continuing)
            beyond |= continuing != 0
            index += WIDTH
        while index < end:
            is_continuing = (text[index] & 0xC0) == 0x80
            characters[number] -= np.int64(is_continuing)
            beyond |= is_continuing
            index += 1
        special = np.int64(0)
        if beyond:
            for index in range(start, end):
                byte = text[index]
                special += np.int64((byte >= 0xE0) & (byte != 0xE2))  # E2 starts quotation marks, dashes and symbols
        if special == 0:
            continue
        index = start
        while index < end:
            if text[index] < 0xE0:
                index += 1
                continue
            code, size = character(text, index)
            if code < len(quarters) and quarters[code] < _WORD_QUARTERS:
                spaceless[number] += 1
            index += size


@jit
def hash_words(data, offsets, quarters, hashes, sizes, word_offsets):  # type: ignore[no-untyped-def]
    """Write a hash and the size of every word, those of text i at [word_offsets[i]:word_offsets[i + 1]]; return the number of words.

    The hash mixes eight bytes at a time; words of up to eight bytes have different ones.

    data: uint8, UTF-8 words separated by white space. offsets: int64 (n + 1,). quarters: uint8, size of a word by its first character; 4
    above the table. hashes, sizes: uint64 and uint8, of length at least (bytes / 2 + texts).
    """
    count = 0
    word_offsets[0] = 0
    for text in range(len(offsets) - 1):
        value, pending, size = FNV_START, np.uint64(0), 0
        for index in range(offsets[text], offsets[text + 1]):
            byte = data[index]
            if byte <= _BLANK:  # any white space; other separators were replaced
                count = _end_word(value, pending, size, hashes, count)
                value, pending, size = FNV_START, np.uint64(0), 0
            else:
                if size == 0:
                    code = _code_point(data, index)
                    sizes[count] = quarters[code] if code < len(quarters) else _WORD_QUARTERS
                value, pending, size = _add_byte(value, pending, size, byte)
        count = _end_word(value, pending, size, hashes, count)
        word_offsets[text + 1] = count
    return count


@jit
def _code_point(data, index):  # type: ignore[no-untyped-def]
    """Code point of the character of three or four bytes at `index`; the first byte of shorter characters."""
    byte = np.int64(data[index])
    return byte if byte < 0xE0 else character(data, index)[0]


@jit
def _window_ends(sizes, most, ends):  # type: ignore[no-untyped-def]
    """Write the end of the shortest run of size >= `most` from every word; return the number of words with such a run."""
    following, size = 0, 0
    for index in range(len(sizes)):
        while size < most:
            if following == len(sizes):
                return index
            size += sizes[following]
            following += 1
        ends[index] = following
        size -= sizes[index]
    return len(sizes)


@jit
def collect_windows(hashes, sizes, word_offsets, least, most, windows, length, whole, text, start):  # type: ignore[no-untyped-def]
    """Write the windows that identify a text: from every word the shortest run of size >= `most`; of smaller texts the whole text, if its
    size is >= `least`. Return their number, at most one per word.

    windows: hashes, the sum of those of the words modulo 2^64. length: in words. whole: True for a whole small text. text,
    start: index of the text, and of the window's first word in it.
    """
    count = 0
    ends = np.empty(len(hashes), np.int64)
    for number in range(len(word_offsets) - 1):
        origin, words = word_offsets[number], word_offsets[number + 1] - word_offsets[number]
        own = sizes[origin : origin + words]
        windows_of_text = _window_ends(own, most, ends)
        is_small = windows_of_text == 0
        total = 0
        for index in range(len(own)):
            total += own[index]
        if is_small and total >= least:
            ends[0], windows_of_text = words, 1
        for first in range(windows_of_text):
            value = np.uint64(0)
            for index in range(first, ends[first]):
                value += hashes[origin + index]
            windows[count], length[count], whole[count] = value, ends[first] - first, is_small
            text[count], start[count] = number, first
            count += 1
    return count


@jit
def set_bits(windows, tables, bits, first, shift):  # type: ignore[no-untyped-def]
    """Set the bits of windows in their tables, by the upper bits of their hashes, which depend on every word.

    bits: uint64, all tables; table t begins at bits[first[t]] and has 2^(64 - shift[t]) bits.
    """
    for number in range(len(windows)):
        slot = windows[number] >> shift[tables[number]]
        bits[first[tables[number]] + np.int64(slot >> np.uint64(6))] |= np.uint64(1) << (slot & np.uint64(63))


@jit
def _has_bit(window, table, bits, first, shift):  # type: ignore[no-untyped-def]
    """Return True if the bit of a window is set in a table (see `set_bits`); False if there is no such table."""
    if first[table] < 0:
        return False
    slot = window >> shift[table]
    return (bits[first[table] + np.int64(slot >> np.uint64(6))] >> (slot & np.uint64(63))) & np.uint64(1) != 0


@jit
def find_windows(hashes, sizes, word_offsets, most, anchor, stride, bits, first, shift, text, start, length, window):  # type: ignore[no-untyped-def]
    """Write the windows whose bit is set, text by text; of those with the same first word longer ones later. Return their number; those
    that exceed the length of `window` are not written.

    Tables as in `set_bits`: table 0 has the windows of size `most`, table n < `most` the small texts of n words, and table `most` every run
    of `anchor` words of both; first[t] is -1 without a table. No window has fewer than `anchor` + `stride` - 1 words, so that it has a run
    that begins at a multiple of `stride`: only these runs are looked up in all of the text.
    """
    count, limit = 0, len(window)
    anchors, by = first[most], shift[most]
    for number in range(len(word_offsets) - 1):
        origin, end = word_offsets[number], word_offsets[number + 1]
        for place in range(origin, end - anchor + 1, stride):
            value = np.uint64(0)
            for index in range(place, place + anchor):
                value += hashes[index]
            slot = value >> by
            if not (bits[anchors + np.int64(slot >> np.uint64(6))] >> (slot & np.uint64(63))) & np.uint64(1):
                continue
            for begin in range(max(origin, place - stride + 1), place + 1):
                value, size = np.uint64(0), 0
                for index in range(begin, end):
                    value += hashes[index]
                    size += sizes[index]
                    words = index + 1 - begin
                    if _has_bit(value, 0 if size >= most else words, bits, first, shift):
                        if count < limit:
                            text[count], start[count], length[count], window[count] = number, begin - origin, words, value
                        count += 1
                    if size >= most:
                        break
    return count
