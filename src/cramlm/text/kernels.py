"""Compiled functions on UTF-8 bytes.

Hashed n-grams: bytes -> tokens -> buckets (SHA-256 modulo the number of buckets), and sums over them.
Windows of words: normalised bytes -> a hash per word -> the windows that a bit table contains.

NumPy's reductions and searches are not called here: loading a kernel that calls one imports scipy.linalg (0.2 CPU seconds).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import types

from cramlm.storage.compiled import intrinsic, jit

# Classes of characters: SPACE separates tokens; WORD and OTHER form runs; each ALONE is a token; MARK and STACKING extend the previous WORD
# or ALONE, and STACKING also joins the next ALONE.
SPACE, WORD, OTHER, ALONE, MARK, STACKING = range(6)
DONE, FULL, UNKNOWN, NOT_SIMPLE = range(4)  # results of `hash_replaced_words`
_JOIN = 0x20  # between the words of a bigram
_CACHE_BITS = 18
_FNV_START, _FNV = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
PRIME = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses no bit
_BLANK = 0x20
_LOWER_CASE = np.uint64(0x2020202020202020)  # set in the bytes of letters and digits
_ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)
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
_LANES = 16  # messages hashed together: a vector of 512 bits
_BLOCK_WORDS = 16  # of 32 bits
_MOST_IN_BLOCK = 64 - 9  # bytes of a message that fits one block with its end mark and its length
_KNOWN, _WAITS = np.uint64(1 << 16), np.uint64(1 << 17)  # in the cache: the bucket is there; it is not computed yet
_START = np.array([0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], np.uint32)

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
def _rotate(value, bits):  # type: ignore[no-untyped-def]
    return np.uint32((value >> np.uint32(bits)) | (value << np.uint32(32 - bits)))


@jit
def _write_message(text, before, own, lane, schedule):  # type: ignore[no-untyped-def]
    """Write the bytes of the span `own` as the padded message of a lane, after those of the span `before` and a blank unless it is empty;
    return False if the message does not fit one block. schedule: uint32 (64 * _LANES,), word w of lane l at [w * _LANES + l].
    """
    length = own[1] - own[0]
    if before[1] > before[0]:
        length += before[1] - before[0] + 1
    if length > _MOST_IN_BLOCK:
        return False
    for word in range(_BLOCK_WORDS):
        schedule[word * _LANES + lane] = np.uint32(0)
    place = 0
    for index in range(before[0], before[1]):
        schedule[(place >> 2) * _LANES + lane] |= np.uint32(text[index]) << np.uint32(24 - 8 * (place & 3))
        place += 1
    if place:
        schedule[(place >> 2) * _LANES + lane] |= np.uint32(_JOIN) << np.uint32(24 - 8 * (place & 3))
        place += 1
    for index in range(own[0], own[1]):
        schedule[(place >> 2) * _LANES + lane] |= np.uint32(text[index]) << np.uint32(24 - 8 * (place & 3))
        place += 1
    schedule[(place >> 2) * _LANES + lane] |= np.uint32(0x80) << np.uint32(24 - 8 * (place & 3))
    schedule[(_BLOCK_WORDS - 1) * _LANES + lane] = np.uint32(8 * length)
    return True


@jit
def _compress(schedule, state):  # type: ignore[no-untyped-def]
    """Add SHA-256's compression of a block to the state of every lane; the loops over lanes become vector instructions.

    schedule: uint32 (64 * _LANES,), of which the first 16 words are read. state: uint32 (16 * _LANES,), the lower half is the state.
    """
    for word in range(_BLOCK_WORDS, 64):
        here = word * _LANES
        for lane in range(_LANES):
            before, late = schedule[here - 15 * _LANES + lane], schedule[here - 2 * _LANES + lane]
            low = _rotate(before, 7) ^ _rotate(before, 18) ^ (before >> np.uint32(3))
            high = _rotate(late, 17) ^ _rotate(late, 19) ^ (late >> np.uint32(10))
            schedule[here + lane] = np.uint32(schedule[here - 16 * _LANES + lane] + low + schedule[here - 7 * _LANES + lane] + high)
    for index in range(8 * _LANES):
        state[8 * _LANES + index] = state[index]
    for word in range(64):  # the variables a to h move by one row with each round; here the rows stay, and their roles move
        a, b, c, d = (-word & 7) * _LANES, (1 - word & 7) * _LANES, (2 - word & 7) * _LANES, (3 - word & 7) * _LANES
        e, f, g, h = (4 - word & 7) * _LANES, (5 - word & 7) * _LANES, (6 - word & 7) * _LANES, (7 - word & 7) * _LANES
        for lane in range(_LANES):
            first, fifth = state[a + lane], state[e + lane]
            high = _rotate(fifth, 6) ^ _rotate(fifth, 11) ^ _rotate(fifth, 25)
            chosen = (fifth & state[f + lane]) ^ (~fifth & state[g + lane])
            one = np.uint32(state[h + lane] + high + chosen + _K[word] + schedule[word * _LANES + lane])
            low = _rotate(first, 2) ^ _rotate(first, 13) ^ _rotate(first, 22)
            majority = (first & state[b + lane]) ^ (first & state[c + lane]) ^ (state[b + lane] & state[c + lane])
            state[d + lane] = np.uint32(state[d + lane] + one)
            state[h + lane] = np.uint32(one + low + majority)
    for index in range(8 * _LANES):
        state[index] = np.uint32(state[index] + state[8 * _LANES + index])


@jit
def _start(state):  # type: ignore[no-untyped-def]
    for word in range(8):
        for lane in range(_LANES):
            state[word * _LANES + lane] = _START[word]


@jit
def _powers_modulo(divisor):  # type: ignore[no-untyped-def]
    """Return 2^224, 2^192, ... 2^0 modulo the divisor, and the divisor, uint64 (9,)."""
    powers = np.ones(9, np.uint64)
    for word in range(6, -1, -1):
        powers[word] = (powers[word + 1] << np.uint64(32)) % np.uint64(divisor)
    powers[8] = divisor
    return powers


@jit
def _modulo(state, lane, powers):  # type: ignore[no-untyped-def]
    """Return a lane's hash as a big-endian number, modulo a divisor below 2^29. powers: `_powers_modulo` of the divisor."""
    total = np.uint64(0)
    for word in range(8):
        total += np.uint64(state[word * _LANES + lane]) * powers[word]  # the sum is below 2^64
    return total % powers[8]


@jit
def _sha256_modulo(message, length, powers, schedule, state):  # type: ignore[no-untyped-def]
    """SHA-256 of message[:length] as a big-endian number, modulo the divisor of `powers`. `message` needs 72 more bytes of space."""
    total = (length + 8) // 64 * 64 + 64
    message[length] = 0x80
    for index in range(length + 1, total):
        message[index] = 0
    for index in range(8):
        message[total - 1 - index] = (8 * length >> (8 * index)) & 0xFF
    _start(state)
    for block in range(0, total, 64):
        for word in range(_BLOCK_WORDS):
            schedule[word * _LANES] = np.uint32(0)
            for index in range(4):
                schedule[word * _LANES] |= np.uint32(message[block + 4 * word + index]) << np.uint32(24 - 8 * index)
        _compress(schedule, state)
    return _modulo(state, 0, powers)


@jit
def _character(text, index):  # type: ignore[no-untyped-def]
    """Code point and size in bytes of the character beyond ASCII at `index`; the text is valid UTF-8."""
    lead = np.int64(text[index])
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | np.int64(text[index + 1] & 0x3F), 2
    code = (lead & 0x0F) << 12 | np.int64(text[index + 1] & 0x3F) << 6 | np.int64(text[index + 2] & 0x3F)
    if lead < 0xF0:
        return code, 3
    return (code & 0x7FFF) << 6 | np.int64(text[index + 3] & 0x3F), 4


@jit
def _hash_long(text, before, own, message, powers, schedule, state):  # type: ignore[no-untyped-def]
    """Return the bucket of a message that does not fit one block. before, own: as of `_write_message`."""
    length = 0
    for index in range(before[0], before[1]):
        message[length] = text[index]
        length += 1
    if length:
        message[length] = _JOIN
        length += 1
    for index in range(own[0], own[1]):
        message[length] = text[index]
        length += 1
    return _sha256_modulo(message, length, powers, schedule, state)


@jit
def _class_and_size(text, index, classes):  # type: ignore[no-untyped-def]
    """Class and size in bytes of the character at `index`."""
    if text[index] < 0x80:
        return classes[text[index]], 1
    code, size = _character(text, index)
    return classes[code], size


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
    hash saves two in three SHA-256 computations; a collision has probability 5e-20 per compared pair. The others wait until there are
    `_LANES` of them, which are computed together.
    """
    cache = np.zeros(1 << _CACHE_BITS, np.uint64)  # by the upper bits of a key: its other bits, then _KNOWN or _WAITS, then the bucket
    longest = 0
    for number in range(len(offsets) - 1):
        longest = max(longest, offsets[number + 1] - offsets[number])
    starts, ends, hashes = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.uint64)
    message = np.empty(2 * longest + 80, np.uint8)
    state, schedule = np.empty(16 * _LANES, np.uint32), np.zeros(64 * _LANES, np.uint32)
    powers = _powers_modulo(buckets)
    slots, positions = np.empty(_LANES, np.int64), np.empty(_LANES, np.int64)
    size, waiting = 0, 0
    out_offsets[0] = 0
    for number in range(len(offsets) - 1):
        count = find_tokens(text, offsets[number], offsets[number + 1], classes, starts, ends)
        for token in range(count):
            value = _FNV_START
            for index in range(starts[token], ends[token]):
                value = (value ^ np.uint64(text[index])) * _FNV
            hashes[token] = value
        for words in range(1, 3):
            for token in range(words - 1, count):
                first = token - words + 1
                key = hashes[token] if words == 1 else hashes[token] * PRIME + (hashes[first] ^ (hashes[first] >> np.uint64(29)))
                key = (key ^ (key >> np.uint64(32))) * PRIME
                slot, rest = np.int64(key >> np.uint64(64 - _CACHE_BITS)), key << np.uint64(_CACHE_BITS)
                if cache[slot] & _WAITS or waiting == _LANES:
                    _hash_waiting(waiting, slots, positions, powers, schedule, state, cache, out)
                    waiting = 0
                if cache[slot] ^ rest ^ _KNOWN < _KNOWN:  # the same key, with its bucket: nothing else is left
                    out[size] = np.uint16(cache[slot])
                else:
                    before = starts[first], ends[first] if words == 2 else starts[first]
                    if _write_message(text, before, (starts[token], ends[token]), waiting, schedule):
                        cache[slot], slots[waiting], positions[waiting] = rest | _WAITS, slot, size
                        waiting += 1
                    else:
                        _hash_waiting(waiting, slots, positions, powers, schedule, state, cache, out)
                        waiting = 0
                        bucket = _hash_long(text, before, (starts[token], ends[token]), message, powers, schedule, state)
                        cache[slot], out[size] = rest | _KNOWN | bucket, bucket
                size += 1
        out_offsets[number + 1] = size
    _hash_waiting(waiting, slots, positions, powers, schedule, state, cache, out)
    return size


@jit
def _hash_waiting(waiting, slots, positions, powers, schedule, state, cache, out):  # type: ignore[no-untyped-def]
    """Write the buckets of the messages in the first lanes to their slots of the cache and their positions in `out`."""
    if waiting == 0:
        return
    _start(state)
    _compress(schedule, state)
    for lane in range(waiting):
        bucket = _modulo(state, lane, powers)
        cache[slots[lane]] ^= _WAITS | _KNOWN | bucket
        out[positions[lane]] = bucket


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
def hash_replaced_words(text, offsets, first, fold, entry, words, starts, longest, quarters, hashes, sizes, word_offsets):  # type: ignore[no-untyped-def]
    """Write hashes and sizes as `hash_words`, of texts with each ASCII byte replaced by `fold`, and each other character by
    words[starts[e]:starts[e + 1]] with its entry e. Return (the first text from `first` on that is not done, why: FULL, UNKNOWN for a
    character with entry 0, NOT_SIMPLE for one with an entry below 0), or (number of texts, DONE).

    sizes: 4 everywhere at first; word_offsets[first] is set. longest: bytes of the longest replacement.
    """
    for number in range(first, len(offsets) - 1):
        count, end = word_offsets[number], offsets[number + 1]
        index = offsets[number]
        value, pending, size = _FNV_START, np.uint64(0), 0
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
                    value, pending, size = _FNV_START, np.uint64(0), 0
                index += 1
                continue
            code, width = _character(text, index)
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
                    value, pending, size = _FNV_START, np.uint64(0), 0
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
        place, length, value = index + start, after - start, _FNV_START
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
            code, size = _character(text, index)
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
        value, pending, size = _FNV_START, np.uint64(0), 0
        for index in range(offsets[text], offsets[text + 1]):
            byte = data[index]
            if byte <= _BLANK:  # any white space; other separators were replaced
                count = _end_word(value, pending, size, hashes, count)
                value, pending, size = _FNV_START, np.uint64(0), 0
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
    return byte if byte < 0xE0 else _character(data, index)[0]


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
