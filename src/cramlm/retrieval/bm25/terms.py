"""The terms of a text for BM25, in plain Python; imports no numba, which predictions for single texts do not need.

A text is normalised by NFKC and casefold; its words are runs of letters, digits and marks. Runs of scripts without spaces become
overlapping character n-grams: pairs for Han, kana, hangul and related scripts, triples for Thai, Lao, Khmer, Myanmar and related ones (a
shorter run is one term). Invisible characters (joiners, variation selectors, soft hyphens) are removed without ending a word; a zero-width
space ends it. A term is cut before the first character that starts at its 64th byte or later, which bounds its size.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from typing import Final

from cramlm.text.characters import CUT_INTO_PAIRS, CUT_INTO_TRIPLES, is_invisible, is_letter, is_mark, normalise, within
from cramlm.text.words import segment

ANALYZER: Final = f"words-ngrams-1 unicode-{unicodedata.unidata_version}"
"""Changes when a text may have other terms."""
SEPARATOR, WORD, PAIRS, TRIPLES, MARK, IGNORED = range(6)
"""Kinds of code points."""
MAX_TERM_BYTES: Final = 64
"""A term ends before the first character that starts at this byte or later."""


def split_terms(text: str) -> list[str]:
    """Return the terms of a text in order, with repeats."""
    if text.isascii():  # a sixth of the time, since no character needs a look-up of its kind
        return [word[start : start + MAX_TERM_BYTES] for word in segment(text) for start in range(0, len(word), MAX_TERM_BYTES)]
    terms: list[str] = []
    run: list[str] = []
    kind = SEPARATOR
    for character in normalise(text):
        here = _kind_of(character)
        if here == IGNORED:
            continue
        if here == MARK:
            here = kind or WORD
        if here != kind:
            terms += _terms_of_run(run, kind)
            run, kind = [], here
        if here != SEPARATOR:
            run.append(character)
    return terms + _terms_of_run(run, kind)


def kind_of(character: str) -> int:
    """Return the kind of a character of a folded text: separator, ignored, or part of a word or of a run that is cut into n-grams."""
    if is_invisible(character):
        return IGNORED
    if not (is_letter(character) or is_mark(character)):
        return SEPARATOR
    if within(ord(character), CUT_INTO_PAIRS):
        return PAIRS
    if within(ord(character), CUT_INTO_TRIPLES):
        return TRIPLES
    return MARK if is_mark(character) else WORD


_kind_of: Final = functools.lru_cache(maxsize=4096)(kind_of)


def _terms_of_run(run: Sequence[str], kind: int) -> list[str]:
    if not run:
        return []
    if kind == WORD:
        pieces, length = [""], 0
        for character in run:
            if length >= MAX_TERM_BYTES:
                pieces.append("")
                length = 0
            pieces[-1] += character
            length += len(character.encode())
        return pieces
    size = 2 if kind == PAIRS else 3
    return ["".join(run[start : start + size]) for start in range(max(1, len(run) - size + 1))]
