"""Words: the segmentation, how long a text is in words, and keys for texts of equal words. The package's docstring says what a word is.

ASCII takes a path through byte tables: about 5 times as fast, and most text is ASCII. `segment_utf8` and `MeasuredText` take text with a
few other characters (quotation marks, an accent here and there) by the same path.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Collection
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cramlm.text.characters import (
    HAN_AND_KANA,
    OTHER_SPACELESS,
    STACKING,
    all_invisible,
    all_marks,
    blocks_of,
    character_set,
    codes_of,
    is_letter,
    is_mark,
    is_unknown,
    normalise,
    table_of,
    within,
)

QUARTERS: Final = 4  # of a word
SPACELESS_CHARACTER: Final = re.compile(f"[{character_set(HAN_AND_KANA, OTHER_SPACELESS)}]")
_ASCII_TO_SPACE = bytes(32 if code < 128 and not chr(code).isalnum() else code for code in range(256))
_ASCII_TO_WORDS = _ASCII_TO_SPACE.lower()
_ASCII = bytes(range(128))
_ASCII_SPACES = bytes(32 if code < 128 and chr(code).isspace() else code for code in range(256))
_ASCII_IN_WORD = bytes(code >= 128 or not chr(code).isspace() for code in range(256))


def segment(text: str) -> list[str]:
    """The words of a text, normalised, in order."""
    return segment_text(text).decode("utf-8", "surrogatepass").split()


def segment_text(text: str) -> bytes:
    """The same words as UTF-8 with white space between them."""
    return segment_utf8(text.encode("utf-8", "surrogatepass"))


def segment_utf8(data: bytes) -> bytes:
    """As `segment_text`, of a text in UTF-8, which is decoded only if it needs more than byte tables."""
    if data.isascii():
        return data.translate(_ASCII_TO_WORDS)
    foreign = None if b"\xed" in data else _few_foreign(data)  # where lone surrogates begin, and some Hangul
    if foreign is None:
        return _segment_any_script(data.decode("utf-8", "surrogatepass"))
    data = data.translate(_ASCII_TO_WORDS)
    for character in foreign:
        if character.words != character.data:
            data = data.replace(character.data, character.words)
    return data


def _segment_any_script(text: str) -> bytes:
    runs = _runs(text)
    if SPACELESS_CHARACTER.search(runs):
        runs = _clusters().sub(r" \g<0> ", runs)
    return runs.encode("utf-8", "surrogatepass")


def _runs(text: str) -> str:
    """The text normalised, without invisible characters, white space where no letter, digit or mark is."""
    normal = normalise(text)
    spaced = normal.encode("utf-8", "surrogatepass").translate(_ASCII_TO_SPACE).decode("utf-8", "surrogatepass")
    return spaced if normal.isascii() else _separators().sub(" ", _invisible().sub("", spaced))


@functools.cache
def word_sizes() -> npt.NDArray[np.uint8]:
    """How many quarters of a word a word of `segment` counts for, by its first character, uint8 (0x40000,); beyond: 4.

    A character of Han or kana is half a word, a cluster of the other scripts without spaces a quarter. In the parallel treebanks of
    Universal Dependencies (PUD, 1,000 sentences) Chinese has 1.74 characters and Thai 4.04 clusters for each word of the English.
    """
    return table_of([(OTHER_SPACELESS, 1), (HAN_AND_KANA, 2)], QUARTERS, 0x40000)


class MeasuredText:
    """A text, its bytes, and how many words and which letters it has."""

    __slots__ = ("_foreign", "data", "text")

    def __init__(self, text: str) -> None:
        """`text`: without lone surrogates."""
        self.text = text
        self.data = text.encode()
        self._foreign: Collection[_Foreign] | None = ()  # kinds of characters beyond ASCII; None if they are many or hard
        if not text.isascii():
            self._foreign = _few_foreign(self.data)

    def count_words(self) -> int:
        """As the function of that name."""
        if self._foreign is None:
            return _count_words_of_any_script(self.text)
        # One byte per character of the text, 1 in words, as one large number: its bits that follow a 0 begin a word.
        in_word = int.from_bytes(self._with_ascii_spaces().translate(_ASCII_IN_WORD), "little")
        return (in_word & ~(in_word << 8)).bit_count()

    def duplicate_key(self) -> bytes:
        """16 bytes, equal for texts that are equal in Unicode NFC and with white space collapsed."""
        return _digest(self._collapsed())

    def words_key(self) -> bytes:
        """16 bytes, equal for texts with the same words (`segment`); for texts without any as `duplicate_key`."""
        return _digest(b" ".join(segment_text(self.text).split()) or self._collapsed())

    def _collapsed(self) -> bytes:
        if self._foreign is None or not unicodedata.is_normalized("NFC", self.text):
            return unicodedata.normalize("NFC", " ".join(self.text.split())).encode()
        data = self._with_ascii_spaces().translate(_ASCII_SPACES)
        while b"  " in data:
            data = data.replace(b"  ", b" ")
        return data.strip(b" ")

    def _with_ascii_spaces(self) -> bytes:
        data = self.data
        for character in self._foreign or ():
            if character.is_space:
                data = data.replace(character.data, b" ")
        return data


def duplicate_key(text: str) -> bytes:
    """As the method of that name."""
    return MeasuredText(text).duplicate_key()


def count_words(text: str) -> int:
    """Length in words: runs between white space; in scripts without spaces the sizes of the clusters (`word_sizes`), added and rounded up.

    A run that holds both counts once more, unless it begins with a cluster. Clusters are counted as the text stands, not normalised.
    """
    return MeasuredText(text).count_words()


@functools.cache
def word_pattern() -> str:
    """A regular expression of words in any script: letters and digits with the marks that combine with them, which Python's \\w does not
    include (it cuts 'ọ̀rọ̀' at each tone), and joiners inside them.
    """
    return rf"\w[\w{character_set(all_marks())}\u200c\u200d]*"


def splits_cluster(text: str, place: int) -> bool:
    """Whether a cut before this place, not the first, would part a character from its marks or from the consonant above it."""
    return is_mark(text[place]) or (within(ord(text[place - 1]), STACKING) and SPACELESS_CHARACTER.match(text[place]) is not None)


class _Foreign(NamedTuple):
    """A character beyond ASCII that stands for itself, whatever is around it. words: what `segment` makes of it."""

    data: bytes
    words: bytes
    is_space: bool


def _few_foreign(data: bytes) -> Collection[_Foreign] | None:
    """The distinct characters beyond ASCII of a text; None if they are more than a tenth of it, or one needs its neighbours to be read."""
    beyond = data.translate(None, _ASCII)
    if len(beyond) * 10 > len(data):
        return None
    found = []
    for character in set(beyond.decode()):
        if (foreign := _foreign(character)) is None:
            return None
        found.append(foreign)
    return found


@functools.cache
def _foreign(character: str) -> _Foreign | None:
    """None for characters of scripts without spaces, and for those that NFKC may join with the one before (marks, parts of Hangul)."""
    normal = normalise(character)
    forms = (character, unicodedata.normalize("NFKC", character), normal)
    if any(_joins(form[0]) for form in forms) or SPACELESS_CHARACTER.search(character):
        return None
    if normalise(normal) != normal:
        return None  # else the order in which characters are replaced would matter
    return _Foreign(character.encode(), _segment_any_script(character), character.isspace())


def _joins(character: str) -> bool:
    """True for every character that NFKC may join with the one before it or move, and for some others."""
    code = ord(character)
    beyond_basic_plane = code > 0xFFFF and not 0x1F000 <= code < 0x1FB00
    return beyond_basic_plane or 0x1100 <= code < 0x1200 or is_mark(character)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _count_words_of_any_script(text: str) -> int:
    runs = text.split()
    if not SPACELESS_CHARACTER.search(text):
        return len(runs)
    han_and_kana, others = _cluster_starts()
    quarters = 2 * len(han_and_kana.findall(text)) + len(others.findall(text))
    with_spaces = sum(1 for run in runs if not (han_and_kana.match(run) or others.match(run)))
    return with_spaces + -(-quarters // QUARTERS)


@functools.cache
def _cluster_starts() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Letters and digits with which a cluster begins, of Han and kana and of the other scripts without spaces: all but stacked ones."""
    han_and_kana, others = (
        character_set(blocks_of(lambda one: is_letter(one) or is_unknown(one), codes_of(blocks)))
        for blocks in (HAN_AND_KANA[:-1], OTHER_SPACELESS)  # the last block, beyond the basic plane, holds nothing but ideographs
    )
    return re.compile(f"[{han_and_kana}{character_set(HAN_AND_KANA[-1:])}]"), re.compile(f"(?<![{character_set(STACKING)}])[{others}]")


@functools.cache
def _separators() -> re.Pattern[str]:
    """Runs of characters beyond ASCII that part words: punctuation, symbols, spaces, controls. What this Python's Unicode does not know
    may be a letter of a later version, and parts nothing.
    """
    parting = blocks_of(lambda one: not (is_letter(one) or is_mark(one) or is_unknown(one)), range(0x80, 0x10000))
    return re.compile(f"[{character_set(parting, ((0x1F000, 0x1FAFF), (0xE0000, 0xE00FF)))}]+")


@functools.cache
def _invisible() -> re.Pattern[str]:
    return re.compile(f"[{character_set(all_invisible())}]+")


@functools.cache
def _clusters() -> re.Pattern[str]:
    """Grapheme clusters of scripts without spaces: a character, its marks, and the consonants stacked below it in Khmer and Myanmar."""
    spaceless, marks = character_set(HAN_AND_KANA, OTHER_SPACELESS), character_set(all_marks())
    return re.compile(f"[{spaceless}](?:[{marks}]|(?<=[{character_set(STACKING)}])[{spaceless}])*")
