"""Compiled functions on UTF-8 bytes.

Hashed n-grams: bytes -> tokens -> buckets (SHA-256 modulo the number of buckets), and sums over them.
Windows of words: normalised bytes -> a hash per word -> the windows that a bit table contains.

NumPy's reductions and searches are not called here: loading a kernel that calls one imports scipy.linalg (0.2 CPU seconds).
"""

from __future__ import annotations

import numpy as np

from cramlm.storage.compiled import jit

# Classes of characters: SPACE separates tokens; WORD and OTHER form runs; each ALONE is a token; MARK and STACKING extend the previous WORD
# or ALONE, and STACKING also joins the next ALONE.
SPACE, WORD, OTHER, ALONE, MARK, STACKING = range(6)
_JOIN = 0x20  # between the words of a bigram
_REMEMBERED_BITS = 18
_REMEMBERED = 1 << _REMEMBERED_BITS
_FNV_START, _FNV = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
PRIME = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses no bit
_BLANK = 0x20
_WORD_QUARTERS = 4

_K = np.array(
    [
        *(0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5),
        *(0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174),
        *(0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA),
        *(0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967),
        *(0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85),
        *(0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070),
        *(0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3),
        *(0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2),
    ],
    np.uint32,
)
_START = np.array([0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], np.uint32)


@jit
def _rotate(value, bits):  # type: ignore[no-untyped-def]
    return np.uint32((value >> np.uint32(bits)) | (value << np.uint32(32 - bits)))


@jit
def _sha256_modulo(message, length, divisor, state, schedule):  # type: ignore[no-untyped-def]
    """SHA-256 of message[:length] as a big-endian number, modulo `divisor`. `message` needs 72 more bytes of space."""
    total = (length + 8) // 64 * 64 + 64
    message[length] = 0x80
    for index in range(length + 1, total):
        message[index] = 0
    bits = length * 8
    for index in range(8):
        message[total - 1 - index] = (bits >> (8 * index)) & 0xFF
    for word in range(8):
        state[word] = _START[word]
    for block in range(0, total, 64):
        for word in range(16):
            first = block + 4 * word
            schedule[word] = (
                (np.uint32(message[first]) << np.uint32(24))
                | (np.uint32(message[first + 1]) << np.uint32(16))
                | (np.uint32(message[first + 2]) << np.uint32(8))
                | np.uint32(message[first + 3])
            )
        for word in range(16, 64):
            before, late = schedule[word - 15], schedule[word - 2]
            low = _rotate(before, 7) ^ _rotate(before, 18) ^ (before >> np.uint32(3))
            high = _rotate(late, 17) ^ _rotate(late, 19) ^ (late >> np.uint32(10))
            schedule[word] = np.uint32(schedule[word - 16] + low + schedule[word - 7] + high)
        a, b, c, d = state[0], state[1], state[2], state[3]
        e, f, g, h = state[4], state[5], state[6], state[7]
        for word in range(64):
            high = _rotate(e, 6) ^ _rotate(e, 11) ^ _rotate(e, 25)
            one = np.uint32(h + high + ((e & f) ^ (~e & g)) + _K[word] + schedule[word])
            low = _rotate(a, 2) ^ _rotate(a, 13) ^ _rotate(a, 22)
            two = np.uint32(low + ((a & b) ^ (a & c) ^ (b & c)))
            h, g, f, e, d, c, b, a = g, f, e, np.uint32(d + one), c, b, a, np.uint32(one + two)
        state[0] += a
        state[1] += b
        state[2] += c
        state[3] += d
        state[4] += e
        state[5] += f
        state[6] += g
        state[7] += h
    remainder = np.uint64(0)
    for word in range(8):
        remainder = ((remainder << np.uint64(32)) | np.uint64(state[word])) % np.uint64(divisor)
    return remainder


@jit
def _class_and_size(text, index, classes):  # type: ignore[no-untyped-def]
    """Class and size in bytes of the character at `index`; the text is valid UTF-8."""
    first = np.int64(text[index])
    if first < 0x80:
        return classes[first], 1
    if first < 0xE0:
        return classes[((first & 0x1F) << 6) | (text[index + 1] & 0x3F)], 2
    if first < 0xF0:
        return classes[((first & 0x0F) << 12) | ((text[index + 1] & 0x3F) << 6) | (text[index + 2] & 0x3F)], 3
    code = ((first & 0x07) << 18) | ((text[index + 1] & 0x3F) << 12) | ((text[index + 2] & 0x3F) << 6) | (text[index + 3] & 0x3F)
    return classes[code], 4


@jit
def find_tokens(text, start, end, classes, starts, ends):  # type: ignore[no-untyped-def]
    """Write the tokens of text[start:end] to starts and ends: runs of one class, ALONE characters with their marks. Return their number."""
    count, running, index, stacks = 0, SPACE, start, False
    while index < end:
        kind, size = _class_and_size(text, index, classes)
        if kind >= MARK:
            stacks = kind == STACKING
            kind = running if running in (WORD, ALONE) else WORD
            joins = kind == running
        else:
            joins = kind == running and (kind != ALONE or stacks)
            stacks = False
        if not joins:
            if running != SPACE:
                ends[count - 1] = index
            if kind != SPACE:
                starts[count] = index
                count += 1
            running = kind
        index += size
    if running != SPACE:
        ends[count - 1] = end
    return count


@jit
def hash_ngrams(text, offsets, classes, buckets, out, out_offsets):  # type: ignore[no-untyped-def]
    """Write the buckets of the words, then of the bigrams, of every text to `out`; those of text i start at out_offsets[i].

    text: uint8, lower-cased UTF-8 of all texts. offsets: int64 (n + 1,). out: uint16 (2 * len(text),). A cache keyed by another 64-bit
    hash saves two in three SHA-256 computations; a collision has probability 5e-20 per compared pair.
    """
    keys, cached = np.zeros(_REMEMBERED, np.uint64), np.zeros(_REMEMBERED, np.uint16)
    longest = 0
    for number in range(len(offsets) - 1):
        longest = max(longest, offsets[number + 1] - offsets[number])
    starts, ends, hashes = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.uint64)
    message = np.empty(2 * longest + 80, np.uint8)
    state, schedule = np.empty(8, np.uint32), np.empty(64, np.uint32)
    size = 0
    out_offsets[0] = 0
    for number in range(len(offsets) - 1):
        count = find_tokens(text, offsets[number], offsets[number + 1], classes, starts, ends)
        for token in range(count):
            hashes[token] = _FNV_START
            for index in range(starts[token], ends[token]):
                hashes[token] = (hashes[token] ^ np.uint64(text[index])) * _FNV
        for words in range(1, 3):
            for token in range(words - 1, count):
                first = token - words + 1
                key = hashes[token] if words == 1 else hashes[token] * PRIME + (hashes[first] ^ (hashes[first] >> np.uint64(29)))
                key = (key ^ (key >> np.uint64(32))) * PRIME
                slot = key >> np.uint64(64 - _REMEMBERED_BITS)
                if keys[slot] != key:
                    length = 0
                    for index in range(starts[first], ends[first]):
                        message[length] = text[index]
                        length += 1
                    if words == 2:
                        message[length] = _JOIN
                        length += 1
                        for index in range(starts[token], ends[token]):
                            message[length] = text[index]
                            length += 1
                    keys[slot], cached[slot] = key, _sha256_modulo(message, length, buckets, state, schedule)
                out[size] = cached[slot]
                size += 1
        out_offsets[number + 1] = size
    return size


@jit
def sum_by_text(out, offsets, values):  # type: ignore[no-untyped-def]
    """Sum the values of every text's n-grams in their order, float64 (n,)."""
    sums = np.zeros(len(offsets) - 1, np.float64)
    for number in range(len(sums)):
        for index in range(offsets[number], offsets[number + 1]):
            sums[number] += values[out[index]]
    return sums


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
        code, size = _character(text, index)
        if entry[code] == 0:
            if count == len(found):
                return count
            entry[code] = -1
            found[count] = code
            count += 1
        index += size
    return count


@jit
def hash_replaced_words(text, offsets, first, fold, entry, words, starts, longest, quarters, hashes, sizes, word_offsets, simple):  # type: ignore[no-untyped-def]
    """Write hashes and sizes as `hash_words`, of texts with each ASCII byte replaced by `fold`, and each other character by
    words[starts[e]:starts[e + 1]] with its entry e. Return the first text from `first` on that has an unknown character (entry 0), or for
    which `hashes` is too small.

    sizes: 4 everywhere at first; word_offsets[first] is set. A text with a character that is not simple (entry below 0) gets no words.
    longest: bytes of the longest replacement.
    """
    for number in range(first, len(offsets) - 1):
        count, end = word_offsets[number], offsets[number + 1]
        word_offsets[number + 1] = count
        index = offsets[number]
        value, inside = _FNV_START, np.int64(0)
        if count + (end - index) // 2 + 2 > len(hashes):
            return number
        while index < end:
            byte = text[index]
            if byte < 0x80:  # without branches, because the ends of words cannot be predicted
                folded = fold[byte]
                continues = np.int64(folded > _BLANK)
                hashes[count] = value * PRIME
                count += inside & (1 - continues)
                rotated = ((value << np.uint64(7)) | (value >> np.uint64(57))) ^ np.uint64(folded)
                value = rotated if continues else _FNV_START
                inside = continues
                index += 1
                continue
            code, size = _character(text, index)
            own = entry[code]
            if own < 0:
                simple[number] = False
                break
            if own == 0 or count + longest + (end - index) // 2 + 2 > len(hashes):
                sizes[word_offsets[number] : count + 1] = _WORD_QUARTERS
                return number
            for place in range(starts[own], starts[own + 1]):
                byte = words[place]
                if byte <= _BLANK:
                    hashes[count] = value * PRIME
                    count += inside
                    value, inside = _FNV_START, np.int64(0)
                else:
                    if inside == 0:
                        code = _code_point(words, place)
                        sizes[count] = quarters[code] if code < len(quarters) else _WORD_QUARTERS
                    value = ((value << np.uint64(7)) | (value >> np.uint64(57))) ^ np.uint64(byte)
                    inside = np.int64(1)
            index += size
        if simple[number]:
            hashes[count] = value * PRIME
            word_offsets[number + 1] = count + inside
        else:
            sizes[word_offsets[number] : count + 1] = _WORD_QUARTERS
    return len(offsets) - 1


@jit
def count_characters(text, offsets, quarters, characters, spaceless):  # type: ignore[no-untyped-def]
    """Write the number of characters of every text, and of those in scripts without spaces: those whose size in `quarters` is below 4."""
    for number in range(len(offsets) - 1):
        start, end = offsets[number], offsets[number + 1]
        continuing, special = np.int64(0), np.int64(0)
        for index in range(start, end):
            byte = text[index]
            continuing += np.int64((byte & 0xC0) == 0x80)
            special += np.int64((byte >= 0xE0) & (byte != 0xE2))  # E2 starts quotation marks, dashes and symbols
        characters[number] = end - start - continuing
        spaceless[number] = 0
        if special == 0:
            continue
        index = start
        while index < end:
            if text[index] < 0xE0:
                index += 1
                continue
            code, size = _character(text, index)
            if code < len(quarters) and quarters[code] < _WORD_QUARTERS:
                spaceless[number] += 1
            index += size


@jit
def _character(text, index):  # type: ignore[no-untyped-def]
    """Code point and size in bytes of the character beyond ASCII at `index`."""
    lead = np.int64(text[index])
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | np.int64(text[index + 1] & 0x3F), 2
    code = (lead & 0x0F) << 12 | np.int64(text[index + 1] & 0x3F) << 6 | np.int64(text[index + 2] & 0x3F)
    if lead < 0xF0:
        return code, 3
    return (code & 0x7FFF) << 6 | np.int64(text[index + 3] & 0x3F), 4


@jit
def hash_words(data, offsets, quarters, hashes, sizes, word_offsets):  # type: ignore[no-untyped-def]
    """Write a hash and the size of every word, those of text i at [word_offsets[i]:word_offsets[i + 1]]; return the number of words.

    The hash rotates and XORs bytes, in half of the time of FNV; ASCII words of up to nine letters have different ones.

    data: uint8, UTF-8 words separated by white space. offsets: int64 (n + 1,). quarters: uint8, size of a word by its first character; 4
    above the table. hashes, sizes: uint64 and uint8, of length at least (bytes / 2 + texts).
    """
    count = 0
    word_offsets[0] = 0
    for text in range(len(offsets) - 1):
        value, inside = _FNV_START, False
        for index in range(offsets[text], offsets[text + 1]):
            byte = data[index]
            if byte <= _BLANK:  # any white space; other separators were replaced
                if inside:
                    hashes[count] = value * PRIME
                    count += 1
                    value, inside = _FNV_START, False
            else:
                if not inside:
                    code = _code_point(data, index)
                    sizes[count] = quarters[code] if code < len(quarters) else _WORD_QUARTERS
                value = ((value << np.uint64(7)) | (value >> np.uint64(57))) ^ np.uint64(byte)
                inside = True
        if inside:
            hashes[count] = value * PRIME
            count += 1
        word_offsets[text + 1] = count
    return count


@jit
def _code_point(data, index):  # type: ignore[no-untyped-def]
    """Code point of the character of three or four bytes at `index`; the first byte of shorter characters."""
    byte = np.int64(data[index])
    if byte < 0xE0:
        return byte
    code = (byte & 0x0F) << 12 | np.int64(data[index + 1] & 0x3F) << 6 | np.int64(data[index + 2] & 0x3F)
    return code if byte < 0xF0 else (code & 0x7FFF) << 6 | np.int64(data[index + 3] & 0x3F)


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

    windows: hashes, the sum of word * prime^(words after it) modulo 2^64. length: in words. whole: True for a whole small text. text,
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
            value = hashes[origin + first]
            for index in range(first + 1, ends[first]):
                value = value * PRIME + hashes[origin + index]
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
def find_windows(hashes, sizes, word_offsets, most, bits, first, shift, text, start, length, window):  # type: ignore[no-untyped-def]
    """Write the windows whose bit is set, text by text; within a text first those of whole small texts, by length and first word, then
    those of size `most`. Return their number; those that exceed the length of `window` are not written.

    Tables as in `set_bits`: table 0 has the windows of size `most`, table n the small texts of n words; first[t] is -1 without a table. A
    window's hash is the difference of two prefix hashes, so that windows are independent of one another.
    """
    count, limit = 0, len(window)
    longest = 0
    for number in range(len(word_offsets) - 1):
        longest = max(longest, word_offsets[number + 1] - word_offsets[number])
    begun = np.zeros(longest + 1, np.uint64)  # of the first n words
    ends, values = np.empty(len(begun), np.int64), np.empty(len(begun), np.uint64)
    powers = np.ones(most + 1, np.uint64)
    for number in range(most):
        powers[number + 1] = powers[number] * PRIME
    for number in range(len(word_offsets) - 1):
        origin, words = word_offsets[number], word_offsets[number + 1] - word_offsets[number]
        for index in range(words):
            begun[index + 1] = begun[index] * PRIME + hashes[origin + index]
        for run in range(1, min(len(first) - 1, words) + 1):
            if first[run] < 0:
                continue
            table, by, power = first[run], shift[run], powers[run]
            for index in range(words - run + 1):
                value = begun[index + run] - begun[index] * power
                slot = value >> by
                if (bits[table + np.int64(slot >> np.uint64(6))] >> (slot & np.uint64(63))) & np.uint64(1):
                    if count < limit:
                        text[count], start[count], length[count], window[count] = number, index, run, value
                    count += 1
        if first[0] < 0:
            continue
        table, by = first[0], shift[0]
        windows = _window_ends(sizes[origin : origin + words], most, ends)
        for index in range(windows):
            end = ends[index]
            values[index] = begun[end] - begun[index] * powers[end - index]
        for index in range(windows):
            value = values[index]
            slot = value >> by
            if (bits[table + np.int64(slot >> np.uint64(6))] >> (slot & np.uint64(63))) & np.uint64(1):
                if count < limit:
                    text[count], start[count], length[count], window[count] = number, index, ends[index] - index, value
                count += 1
    return count
