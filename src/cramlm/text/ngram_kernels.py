"""Compiled functions for hashed n-grams: UTF-8 bytes -> tokens -> buckets (SHA-256 modulo the number of buckets), and sums over them.

As in kernels.py, NumPy's reductions and searches are not called.
"""

from __future__ import annotations

import numpy as np

from cramlm.storage.compiled import jit
from cramlm.text.kernels import FNV_START, PRIME, character

# Classes of characters: SPACE separates tokens; WORD and OTHER form runs; each ALONE is a token; MARK and STACKING extend the previous WORD
# or ALONE, and STACKING also joins the next ALONE.
SPACE, WORD, OTHER, ALONE, MARK, STACKING = range(6)
_JOIN = 0x20  # between the words of a bigram
_CACHE_BITS = 18
_FNV = np.uint64(0x100000001B3)

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
    code, size = character(text, index)
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
            value = FNV_START
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
