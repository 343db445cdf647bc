"""Compiled tokenizer of BM25: from bytes to term numbers. `terms.split_terms` defines the terms.

`_canonicalise` rewrites a non-ASCII document as UTF-8 in which the bytes of terms are [a-z0-9] and >= 0x80 and all others are separators;
n-grams are written out. `_tokenize_bytes` splits such bytes (or ASCII text) at separators and numbers the terms by an open hash table. A
document is processed completely or not at all, so that the caller can enlarge an array and continue with the same document.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="assignment"

from __future__ import annotations

import numpy as np

from cramlm.retrieval.bm25.terms import IGNORED, MARK, MAX_TERM_BYTES, PAIRS, SEPARATOR, TRIPLES, WORD
from cramlm.storage.compiled import jit

# Kinds of code points are the low 3 bits of an entry in the table, these are flags.
STARTS_COMBINED, ENDS_COMBINED, NEEDS_CONTEXT, FOLDS = 8, 16, 32, 64
EXPANSION_SHIFT = 7

DONE, TOKENS_FULL, SCRATCH_FULL, VOCABULARY_FULL, NEEDS_NORMALISING = range(5)

CANONICAL_GROWTH = 16  # maximum of bytes written per byte read: characters such as U+3300 fold to several kana, written out as pairs
_EXACT_BYTES = 7  # terms up to this size are their own key: their bytes, and their length in the top byte

_KIND = np.uint32(7)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PRIME = np.uint64(0x100000001B3)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_LONG = np.uint64(1 << 63)


@jit
def tokenize(
    text, offsets, first, last, normalised, codes, expansions, fold,
    keys, ids, term_bytes, term_offsets, state, tokens, starts, scratch, canonical,
):  # fmt: skip
    """Write the term numbers of documents `first` to `last` to `tokens`, their ends to `starts`; return (first document left, reason).

    canonical: a read-only view of `scratch`.
    """
    for document in range(first, last):
        start, end = offsets[document], offsets[document + 1]
        seen = np.uint8(0)
        for i in range(start, end):
            seen |= text[i]
        if seen < 128:
            reason = _tokenize_bytes(text, start, end, fold, keys, ids, term_bytes, term_offsets, state, tokens)
        else:
            if CANONICAL_GROWTH * (end - start) + 64 > len(scratch):
                return document, SCRATCH_FULL
            written = _canonicalise(text, start, end, normalised, codes, expansions, fold, scratch)
            if written < 0:
                return document, NEEDS_NORMALISING
            reason = _tokenize_bytes(canonical, 0, written, fold, keys, ids, term_bytes, term_offsets, state, tokens)
        if reason != DONE:
            return document, reason
        starts[document + 1] = state[1]
    return last, DONE


@jit
def number_terms(text, offsets, first, fold, keys, ids, term_bytes, term_offsets, state, tokens, starts):
    """As `tokenize`, for terms text[offsets[i]:offsets[i + 1]] from `first` on, whose bytes are those of terms."""
    for term in range(first, len(offsets) - 1):
        reason = _tokenize_bytes(text, offsets[term], offsets[term + 1], fold, keys, ids, term_bytes, term_offsets, state, tokens)
        if reason != DONE:
            return term, reason
        starts[term + 1] = state[1]
    return len(offsets) - 1, DONE


@jit
def _tokenize_bytes(source, start, end, fold, keys, ids, term_bytes, term_offsets, state, tokens):
    terms, count = state[0], state[1]
    capacity = min(len(keys) // 2, len(term_offsets) - 1)
    mask = np.uint64(len(keys) - 1)
    term = np.empty(MAX_TERM_BYTES + 4, np.uint8)
    size = 0
    packed = np.uint64(0)
    mixed = np.uint64(0)
    for i in range(start, end + 1):
        byte = fold[source[i]] if i < end else np.uint8(0)
        if byte != 0 and (size < MAX_TERM_BYTES or (byte & 0xC0) == 0x80):
            term[size] = byte
            size += 1
            packed = (packed << np.uint64(8)) | np.uint64(byte)
            mixed = (mixed ^ np.uint64(byte)) * _PRIME
            continue
        if size > 0:
            if size <= _EXACT_BYTES:  # noqa: SIM108 - two shapes of key
                key = packed | (np.uint64(size) << np.uint64(56))
            else:
                key = ((mixed ^ (mixed >> np.uint64(29))) * _MIX) | _LONG
            slot = _slot(key) & mask
            while True:
                found = keys[slot]
                if found == key:
                    number = ids[slot]
                    if size <= _EXACT_BYTES or _same(term, size, term_bytes, term_offsets[number], term_offsets[number + 1]):
                        break
                elif found == 0:
                    place = term_offsets[terms]
                    if terms >= capacity or place + size > len(term_bytes):
                        state[0] = terms
                        return VOCABULARY_FULL
                    number = np.int32(terms)
                    keys[slot] = key
                    ids[slot] = number
                    for j in range(size):
                        term_bytes[place + j] = term[j]
                    terms += 1
                    term_offsets[terms] = place + size
                    break
                slot = (slot + np.uint64(1)) & mask
            if count == len(tokens):
                state[0] = terms
                return TOKENS_FULL
            tokens[count] = number
            count += 1
            size = 0
            packed = np.uint64(0)
            mixed = np.uint64(0)
        if byte != 0:  # the first character beyond the limit starts the next term
            term[0] = byte
            size = 1
            packed = np.uint64(byte)
            mixed = np.uint64(byte) * _PRIME
    state[0] = terms
    state[1] = count
    return DONE


@jit
def _slot(key):
    product = key * _GOLDEN
    return product ^ (product >> np.uint64(32))


@jit
def _same(term, size, term_bytes, start, end):
    if end - start != size:
        return False
    for j in range(size):  # noqa: SIM110 - numba compiles the loop
        if term[j] != term_bytes[start + j]:
            return False
    return True


@jit
def rehash(keys, ids, new_keys, new_ids):
    """Move every entry into a larger table."""
    mask = np.uint64(len(new_keys) - 1)
    for i in range(len(keys)):
        if keys[i] != 0:
            slot = _slot(keys[i]) & mask
            while new_keys[slot] != 0:
                slot = (slot + np.uint64(1)) & mask
            new_keys[slot] = keys[i]
            new_ids[slot] = ids[i]


@jit
def _canonicalise(text, start, end, normalised, codes, expansions, fold, out):
    """Rewrite text[start:end] into `out`; return the bytes written, or -1 if unicodedata must normalise it first (see NEEDS_CONTEXT)."""
    written, run, length, before, earlier = 0, SEPARATOR, 0, np.int64(0), np.int64(0)
    ends_combined = False
    i = start
    while i < end:
        lead = np.int64(text[i])
        if lead < 0x80:
            i += 1
            ends_combined = False
            byte = fold[lead]
            if byte != 0 and run == WORD:
                out[written] = byte
                written += 1
            else:
                kind = WORD if byte != 0 else SEPARATOR
                written, run, length, before, earlier = _step(out, written, run, length, before, earlier, np.int64(byte), kind)
            continue
        if lead < 0xE0:
            code = ((lead & 0x1F) << 6) | (text[i + 1] & 0x3F)
            i += 2
        elif lead < 0xF0:
            code = ((lead & 0x0F) << 12) | (np.int64(text[i + 1] & 0x3F) << 6) | (text[i + 2] & 0x3F)
            i += 3
        else:
            code = ((lead & 0x07) << 18) | (np.int64(text[i + 1] & 0x3F) << 12) | (np.int64(text[i + 2] & 0x3F) << 6) | (text[i + 3] & 0x3F)
            i += 4
        entry = np.int64(codes[code])
        if not normalised:
            if entry & NEEDS_CONTEXT or (ends_combined and entry & STARTS_COMBINED):
                return -1
            ends_combined = (entry & ENDS_COMBINED) != 0
            if entry & FOLDS:
                place = entry >> EXPANSION_SHIFT
                for j in range(place + 1, place + 1 + expansions[place]):
                    folded = np.int64(expansions[j])
                    kind = np.int64(codes[folded] & _KIND)
                    written, run, length, before, earlier = _step(out, written, run, length, before, earlier, folded, kind)
                continue
        written, run, length, before, earlier = _step(out, written, run, length, before, earlier, code, entry & 7)
    return _close(out, written, run, length, before, earlier)


@jit
def _step(out, written, run, length, before, earlier, code, kind):
    """Add one folded character to the run. before, earlier: the run's last two characters. length: of the run."""
    if kind == IGNORED:
        return written, run, length, before, earlier
    if kind == MARK:
        kind = run if run != SEPARATOR else WORD
    if kind != run:
        written = _close(out, written, run, length, before, earlier)
        run, length = kind, 0
    if kind == WORD:
        written = _put(out, written, code)
    elif kind == PAIRS:
        if length >= 1:
            written = _put(out, _put(out, written, before), code)
            out[written] = 32
            written += 1
        before = code
        length += 1
    elif kind == TRIPLES:
        if length >= 2:
            written = _put(out, _put(out, _put(out, written, earlier), before), code)
            out[written] = 32
            written += 1
        earlier, before = before, code
        length += 1
    return written, run, length, before, earlier


@jit
def _close(out, written, run, length, before, earlier):
    """End a run; a run too short for an n-gram is one term."""
    if run == SEPARATOR:
        return written
    if run == TRIPLES and length == 2:
        written = _put(out, written, earlier)
    if (run == PAIRS and length == 1) or (run == TRIPLES and (length == 1 or length == 2)):
        written = _put(out, written, before)
    out[written] = 32
    return written + 1


@jit
def _put(out, written, code):
    if code < 0x80:
        out[written] = code
        return written + 1
    if code < 0x800:
        out[written] = 0xC0 | (code >> 6)
        out[written + 1] = 0x80 | (code & 0x3F)
        return written + 2
    if code < 0x10000:
        out[written] = 0xE0 | (code >> 12)
        out[written + 1] = 0x80 | ((code >> 6) & 0x3F)
        out[written + 2] = 0x80 | (code & 0x3F)
        return written + 3
    out[written] = 0xF0 | (code >> 18)
    out[written + 1] = 0x80 | ((code >> 12) & 0x3F)
    out[written + 2] = 0x80 | ((code >> 6) & 0x3F)
    out[written + 3] = 0x80 | (code & 0x3F)
    return written + 4
