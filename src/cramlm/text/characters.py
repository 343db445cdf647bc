"""Normal form, class and script of characters, for all segmentation of text.

A letter's script is the first word of its Unicode name ("CYRILLIC SMALL LETTER A"; two words for some), after NFKC has replaced fullwidth,
mathematical and other compatibility forms. Marks, digits and punctuation belong to no script. Languages are not distinguished.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.storage.arrays import cached_on_disk

Blocks: TypeAlias = tuple[tuple[int, int], ...]
"""First and last code point of each block."""

# Scripts without spaces, in which each grapheme cluster is a word. With halfwidth kana and ideographs beyond the basic plane.
HAN_AND_KANA: Final[Blocks] = (
    (0x3005, 0x3005), (0x3007, 0x3007), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F), (0x20000, 0x3FFFF),
)  # fmt: skip
OTHER_SPACELESS: Final[Blocks] = ((0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF))
"""Thai and Lao, Tibetan, Myanmar, Khmer."""
STACKING: Final[Blocks] = ((0x1039, 0x1039), (0x17D2, 0x17D2))
"""Signs of Myanmar and Khmer that stack the next consonant below the one before."""
# Scripts whose runs the BM25 analysis cuts into overlapping n-grams. With Hangul, which has spaces, but particles attached to its words;
# without Tibetan, which marks the ends of syllables.
CUT_INTO_PAIRS: Final[Blocks] = (
    (0x1100, 0x11FF), (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3021, 0x3029), (0x3031, 0x303C), (0x3040, 0x318F), (0x31A0, 0x31BF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0xA4CF), (0xA960, 0xA97F), (0xAC00, 0xD7FF), (0xF900, 0xFAFF), (0x16FE0, 0x18DFF),
    (0x1AFF0, 0x1B2FF), (0x20000, 0x3FFFF),
)  # fmt: skip
CUT_INTO_TRIPLES: Final[Blocks] = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19FF), (0x1A20, 0x1AAF), (0x1B00, 0x1B7F), (0xA980, 0xA9FF),
    (0xAA60, 0xAADF),
)  # fmt: skip
_ASCII_WITHOUT_LETTERS: Final = bytes(code for code in range(128) if not chr(code).isalpha())
_INVISIBLE: Final = frozenset(
    [0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]
)
_WITH_MARKS: Final = (*range(0x80, 0x20000), *range(0xE0000, 0xE0200))  # above are ideographs, private use and unassigned code points
_ZERO_WIDTH_SPACE: Final = "\u200b"
DIACRITICS: Final = r"[\u0300-\u036f]"
"""Pattern of the marks that `remove_diacritics` removes from decomposed text."""
_DIACRITICS: Final = re.compile(DIACRITICS)
_NAMES = {
    **dict.fromkeys(("CJK", "IDEOGRAPHIC", "OLD CHINESE"), "Han"),
    **dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HENTAIGANA", "MASU"), "Kana"),
    **dict.fromkeys(("TURNED", "ROMAN"), "Latin"),
    "NEW TAI": "New Tai Lue",
}
_TWO_WORDS = {"OLD", "NEW", "TAI", "LINEAR", "INSCRIPTIONAL"}  # first words of the names of several scripts
_NOT_SCRIPTS = {
    *("MODIFIER", "FEMININE", "MASCULINE", "MICRO", "OHM", "KELVIN", "ANGSTROM", "DOUBLE-STRUCK", "SCRIPT", "ALEF", "BET"),
    *("CARON", "TILDE", "VEDIC"),
}


def normalise(text: str) -> str:
    """Return the text in NFKC and case-folded. The second NFKC composes what case folding decomposed."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def remove_diacritics(text: str) -> str:
    """Return the text without accents, tone marks and the other marks in U+0300 to U+036F, in NFC.

    These combine with Latin, Greek and Cyrillic letters. The marks of other scripts, which write vowels, stay.
    """
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", _DIACRITICS.sub("", unicodedata.normalize("NFD", text)))


def is_letter(character: str) -> bool:
    """Return True for letters and numbers of any kind, as `str.isalnum`."""
    return unicodedata.category(character)[0] in "LN"


def is_mark(character: str) -> bool:
    """Return True for marks that combine with the character before them."""
    return unicodedata.category(character)[0] == "M"


def is_invisible(character: str) -> bool:
    """Return True for characters that are removed without ending a word: joiners, soft hyphens, variation selectors, enclosing marks.

    A zero-width space ends a word.
    """
    category = unicodedata.category(character)
    return ord(character) in _INVISIBLE or category == "Me" or (category == "Cf" and character != _ZERO_WIDTH_SPACE)


def is_unknown(character: str) -> bool:
    """Return True for code points unassigned in this Python's Unicode, of private use, and for surrogates."""
    return unicodedata.category(character) in ("Cn", "Co", "Cs")


def within(code: int, blocks: Blocks) -> bool:
    """Return True if a code point is in one of the blocks."""
    return any(first <= code <= last for first, last in blocks)


def blocks_of(belongs: Callable[[str], bool], codes: Iterable[int]) -> Blocks:
    """Return the runs of the code points (in ascending order) whose character satisfies `belongs`."""
    members = [code for code in codes if belongs(chr(code))]
    breaks = [index for index, (code, following) in enumerate(pairwise(members), 1) if following != code + 1]
    return tuple((members[first], members[last - 1]) for first, last in pairwise([0, *breaks, len(members)]) if last > first)


def codes_of(blocks: Blocks) -> Iterator[int]:
    """Yield every code point of the blocks."""
    for first, last in blocks:
        yield from range(first, last + 1)


def character_set(*blocks: Blocks) -> str:
    """Return the blocks as the inside of a regular expression's character set."""
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for part in blocks for first, last in part)


def all_marks() -> Blocks:
    """Return all marks of Unicode."""
    return tuple((first, last) for first, last in _marks_and_invisible()[0].tolist())


def all_invisible() -> Blocks:
    """Return all characters beyond ASCII for which `is_invisible` is True."""
    return tuple((first, last) for first, last in _marks_and_invisible()[1].tolist())


@cached_on_disk(__file__)
def _marks_and_invisible() -> tuple[npt.NDArray[Any], ...]:
    """Return the blocks of marks and of invisible characters, int64 (blocks, 2)."""
    return tuple(np.array(blocks_of(belongs, _WITH_MARKS), np.int64) for belongs in (is_mark, is_invisible))


def table_of(values: Sequence[tuple[Blocks, int]], default: int, size: int) -> npt.NDArray[np.uint8]:
    """Return an array uint8 (size,): for each code point the value of its blocks, or the default."""
    table = np.full(size, default, np.uint8)
    for blocks, value in values:
        for first, last in blocks:
            table[first : last + 1] = value
    return table


def count_scripts(texts: Iterable[str]) -> Counter[str]:
    """Count the letters of each script, over all texts."""
    counts: Counter[str] = Counter()
    for text in texts:
        if text.isascii():
            counts["Latin"] += len(text.encode().translate(None, _ASCII_WITHOUT_LETTERS))
        else:
            counts.update(filter(None, map(_script, text)))
    return +counts


def main_script(texts: Iterable[str]) -> str | None:
    """Return the script with the most letters; None for texts without letters."""
    counts = count_scripts(texts)
    return counts.most_common(1)[0][0] if counts else None


@functools.lru_cache(maxsize=100_000)
def _script(character: str) -> str | None:
    plain = unicodedata.normalize("NFKC", character)[:1]
    if not plain.isalpha():
        return None
    words = unicodedata.name(plain, "").removeprefix("VERTICAL ").split(" ")
    first = " ".join(words[:2]) if words[0] in _TWO_WORDS else words[0]
    return None if not first or first in _NOT_SCRIPTS else _NAMES.get(first, first.title())
