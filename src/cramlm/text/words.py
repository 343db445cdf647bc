"""Segmentation into words, lengths in words, keys for equal texts, and passages. The package's docstring defines a word.

ASCII is processed by byte tables, about 5 times as fast. `segment_utf8` and `MeasuredText` also do this for texts with few other characters
(quotation marks, accented letters), if each of them can be replaced independently of its neighbours ("simple" characters).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Collection, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cramlm.storage.arrays import cached_on_disk, read_only
from cramlm.text import characters
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
_ASCII_WORDS = bytes(32 if code < 128 and not (chr(code).isalnum() or code == ord("_")) else code for code in range(256))
_ASCII = bytes(range(128))
_ASCII_SPACES = bytes(32 if code < 128 and chr(code).isspace() else code for code in range(256))
_ASCII_IN_WORD = bytes(code >= 128 or not chr(code).isspace() for code in range(256))
_SENTENCE_END: Final = re.compile(r"""[.!?…؟۔।॥።][.!?…]*["'”’»)\]]*\s+|[。！？．][」』”’）]*\s*|\n\s*\n\s*""")
_WHITE_SPACE: Final = re.compile(r"\s+")
_INSIDE_NAME: Final = re.compile(r"[!-/:-@\[-`{-~]|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # ASCII punctuation; changes of case
_LONG: Final = 1.5  # a text with more than this many times the words of a passage is cut


def segment(text: str) -> list[str]:
    """Return the normalised words of a text, in order."""
    return segment_text(text).decode("utf-8", "surrogatepass").split()


def spaced_name(name: str) -> str:
    """Return a name with spaces between its words: CompareOrContrast, rec.sport.hockey and USED_FOR are three, three and two words."""
    return " ".join(_INSIDE_NAME.sub(" ", name).split())


def segment_text(text: str) -> bytes:
    """Return the words of a text as UTF-8, separated by white space."""
    return segment_utf8(text.encode("utf-8", "surrogatepass"))


def segment_utf8(data: bytes) -> bytes:
    """As `segment_text`, for a text in UTF-8, which is decoded only if byte tables do not suffice."""
    if data.isascii():
        return data.translate(_ASCII_TO_WORDS)
    simple = None if b"\xed" in data else _simple_characters(data)  # 0xED: first byte of surrogates, and of some Hangul
    if simple is None:
        return _segment_any_script(data.decode("utf-8", "surrogatepass"))
    data = data.translate(_ASCII_TO_WORDS)
    for character in simple:
        if character.words != character.data:
            data = data.replace(character.data, character.words)
    return data


class WordHashes(NamedTuple):
    """Words of texts: a hash of each, its size in quarters of a word; text i has hashes[offsets[i]:offsets[i + 1]]."""

    hashes: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]


def hash_words(words: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> WordHashes:
    """Hash the words of texts words[offsets[i]:offsets[i + 1]] that `segment_utf8` returned."""
    from cramlm.text import kernels  # here: imports numba, which words of single texts do not need

    capacity, word_offsets = len(words) // 2 + len(offsets), np.zeros(len(offsets), np.int64)
    hashes, sizes = np.empty(capacity, np.uint64), np.empty(capacity, np.uint8)
    count = kernels.hash_words(words, offsets, word_sizes(), hashes, sizes, word_offsets)
    return WordHashes(hashes[:count], sizes[:count], word_offsets)


def hash_block(text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> WordHashes:
    """Hash the words of texts text[offsets[i]:offsets[i + 1]] (valid UTF-8), as `hash_words` of `segment_utf8`."""
    return _replacements().hash_words(text, offsets)


class _Replacements:
    """A table for the kernel of the result of `segment` for each simple character; it grows with the characters of the texts."""

    def __init__(self) -> None:
        self._entry = np.zeros(0x200000, np.int32)  # 0 unknown, -1 not simple, else the number of the replacement
        self._entry[:128] = 1
        self._words, self._offsets = np.zeros(0, np.uint8), np.zeros(2, np.int64)
        self._longest = 0

    def _learn(self, text: npt.NDArray[np.uint8]) -> None:
        """Add the unknown characters of a text."""
        from cramlm.text import kernels

        found = np.empty(256, np.int64)
        while count := kernels.unknown_characters(text, self._entry, found):
            new: list[bytes] = []
            for code in found[:count].tolist():
                simple = None if 0xD800 <= code < 0xE000 or code > 0x10FFFF else _simple_character(chr(code))
                self._entry[code] = -1 if simple is None else len(self._offsets) - 1 + len(new)
                new += [] if simple is None else [simple.words]
            self._longest = max([self._longest, *map(len, new)])
            self._words = np.concatenate((self._words, np.frombuffer(b"".join(new), np.uint8)))
            self._offsets = np.concatenate((self._offsets, self._offsets[-1] + np.cumsum([len(words) for words in new], dtype=np.int64)))

    def hash_words(self, text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> WordHashes:
        """As `hash_block`."""
        from cramlm.text import kernels

        text, fold = read_only(text), np.frombuffer(_ASCII_TO_WORDS, np.uint8)
        ends = np.zeros(len(offsets), np.int64)
        hashes = np.empty(len(text) // 2 + len(offsets) + 1024, np.uint64)
        sizes = np.full(len(hashes), QUARTERS, np.uint8)
        done = 0
        while True:
            replacements = (fold, self._entry, read_only(self._words), self._offsets, self._longest)
            done, reason = kernels.hash_replaced_words(text, offsets, done, *replacements, word_sizes(), hashes, sizes, ends)
            if reason == kernels.DONE:
                return WordHashes(hashes[: ends[-1]], sizes[: ends[-1]], ends)
            own = text[offsets[done] : offsets[done + 1]]
            if reason == kernels.UNKNOWN:
                self._learn(own)
            elif reason == kernels.FULL:
                hashes, sizes = _enlarge(hashes, sizes, self._longest * len(own))
            else:
                words = np.frombuffer(segment_utf8(own.tobytes()), np.uint8)
                found = hash_words(words, np.array([0, len(words)]))
                end = int(ends[done]) + len(found.hashes)
                if end > len(hashes):
                    hashes, sizes = _enlarge(hashes, sizes, len(found.hashes))
                hashes[ends[done] : end], sizes[ends[done] : end] = found.hashes, found.sizes
                done += 1
                ends[done] = end


_replacements: Final = functools.cache(_Replacements)


def _enlarge(
    hashes: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint8], words: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
    """Return both arrays at least twice as long, with space for at least `words` more words."""
    more = len(hashes) + words
    return np.append(hashes, np.empty(more, np.uint64)), np.append(sizes, np.full(more, QUARTERS, np.uint8))


def _segment_any_script(text: str) -> bytes:
    runs = _runs(text)
    if SPACELESS_CHARACTER.search(runs):
        runs = _clusters().sub(r" \g<0> ", runs)
    return runs.encode("utf-8", "surrogatepass")


def _runs(text: str) -> str:
    """Normalise, remove invisible characters, and replace all but letters, digits and marks by white space."""
    normal = normalise(text)
    spaced = normal.encode("utf-8", "surrogatepass").translate(_ASCII_TO_SPACE).decode("utf-8", "surrogatepass")
    return spaced if normal.isascii() else _separators().sub(" ", _invisible().sub("", spaced))


@functools.cache
def word_sizes() -> npt.NDArray[np.uint8]:
    """Return the size of a word of `segment` in quarters of a word, by its first character, uint8 (0x40000,); above: 4.

    A character of Han or kana is half a word, a cluster of other scripts without spaces a quarter. In the parallel treebanks of Universal
    Dependencies (PUD, 1,000 sentences) Chinese has 1.74 characters and Thai 4.04 clusters per English word.
    """
    return table_of([(OTHER_SPACELESS, 1), (HAN_AND_KANA, 2)], QUARTERS, 0x40000)


class MeasuredText:
    """A text and its UTF-8 bytes, to count its words and to compute its keys."""

    __slots__ = ("_has_single_spaces", "_simple", "data", "text")

    def __init__(self, text: str) -> None:
        """`text`: without lone surrogates."""
        self.text = text
        self.data = text.encode()
        self._has_single_spaces = False  # known by `count_words`: nothing to collapse
        self._simple: Collection[_SimpleCharacter] | None = ()  # None if characters beyond ASCII are many or not simple
        if not text.isascii():
            self._simple = _simple_characters(self.data)

    def count_words(self) -> int:
        """As the function `count_words`."""
        if self._simple is None:
            return _count_words_of_any_script(self.text)
        # One byte per character, 1 inside words, as one large integer: neighbours differ at the start and at the end of a word.
        characters = self._with_ascii_spaces().translate(_ASCII_IN_WORD)
        in_word = int.from_bytes(characters, "little")
        words = (in_word ^ in_word << 8).bit_count() >> 1
        self._has_single_spaces = len(characters) - in_word.bit_count() == words - 1
        return words

    def duplicate_key(self) -> bytes:
        """Return 16 bytes that are equal for texts equal in Unicode NFC with white space collapsed."""
        return digest(self._collapsed())

    def words_key(self) -> bytes:
        """Return 16 bytes that are equal for texts with the same words (`segment`); without words as `duplicate_key`."""
        return digest(b" ".join(segment_text(self.text).split()) or self._collapsed())

    def _collapsed(self) -> bytes:
        if self._simple is None or (self._simple and not unicodedata.is_normalized("NFC", self.text)):
            return unicodedata.normalize("NFC", " ".join(self.text.split())).encode()
        data = self._with_ascii_spaces().translate(_ASCII_SPACES)
        if self._has_single_spaces:
            return data
        while b"  " in data:
            data = data.replace(b"  ", b" ")
        return data.strip(b" ")

    def _with_ascii_spaces(self) -> bytes:
        data = self.data
        for character in self._simple or ():
            if character.is_space:
                data = data.replace(character.data, b" ")
        return data


def count_words(text: str) -> int:
    """Return the length in words: runs between white space; in scripts without spaces the sum of `word_sizes`, rounded up.

    A run with both counts as one word more, unless it starts with a cluster. The text is not normalised for this.
    """
    return MeasuredText(text).count_words()


def split_runs(text: str) -> list[str]:
    """Return the runs between white space; in scripts without spaces each grapheme cluster is one."""
    return text.split() if text.isascii() else _clusters().sub(r" \g<0> ", text).split()


def split_words(text: str) -> list[str]:
    """Return the words that `word_pattern` finds."""
    if text.isascii():  # runs of letters, digits and underscores, in a fraction of the time of the expression
        return text.encode().translate(_ASCII_WORDS).decode().split()
    return re.findall(word_pattern(), text)


@functools.cache
def word_pattern() -> str:
    """Return a regular expression for words in any script: letters and digits with combining marks and joiners; in scripts without spaces
    each grapheme cluster is one.

    Python's \\w does not include marks: it cuts 'ọ̀rọ̀' at each tone.
    """
    letter, mark = rf"[^\W{character_set(HAN_AND_KANA, OTHER_SPACELESS)}]", rf"[{character_set(all_marks())}\u200c\u200d]"
    return rf"{letter}+(?:{mark}+{letter}*)*|(?=\w){_clusters().pattern}"


def splits_cluster(text: str, index: int) -> bool:
    """Return True if a cut before this index (> 0) would separate a character from its marks or a stacked consonant from its base."""
    return is_mark(text[index]) or (within(ord(text[index - 1]), STACKING) and SPACELESS_CHARACTER.match(text[index]) is not None)


class _SimpleCharacter(NamedTuple):
    """A character beyond ASCII that `segment` replaces independently of its neighbours, by `words`."""

    data: bytes
    words: bytes
    is_space: bool


def _simple_characters(data: bytes) -> Collection[_SimpleCharacter] | None:
    """Return the distinct characters beyond ASCII; None if they are more than a tenth of the bytes, or if one is not simple."""
    beyond = data.translate(None, _ASCII)
    if len(beyond) * 10 > len(data):
        return None
    found = []
    for character in set(beyond.decode()):
        if (simple := _simple_character(character)) is None:
            return None
        found.append(simple)
    return found


@functools.cache
def _simple_character(character: str) -> _SimpleCharacter | None:
    """Return None for characters of scripts without spaces, and if NFKC may compose it with the one before (marks, parts of Hangul)."""
    normal = normalise(character)
    forms = (character, unicodedata.normalize("NFKC", character), normal)
    if any(_joins(form[0]) for form in forms) or SPACELESS_CHARACTER.search(character):
        return None
    if normalise(normal) != normal:
        return None  # the order of replacements would matter
    return _SimpleCharacter(character.encode(), _segment_any_script(character), character.isspace())


def _joins(character: str) -> bool:
    """Return True for every character that NFKC may compose with the one before it or reorder, and for some others."""
    code = ord(character)
    beyond_basic_plane = code > 0xFFFF and not 0x1F000 <= code < 0x1FB00
    return beyond_basic_plane or 0x1100 <= code < 0x1200 or is_mark(character)


def digest(data: bytes) -> bytes:
    """Return the digest by which passages and ids are compared, 16 bytes."""
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
    """Return patterns of the first character of a cluster: in Han and kana; in other scripts without spaces (not if stacked)."""
    han_and_kana, others = (
        character_set(blocks_of(lambda one: is_letter(one) or is_unknown(one), codes_of(blocks)))
        for blocks in (HAN_AND_KANA[:-1], OTHER_SPACELESS)  # the last block, beyond the basic plane, has only ideographs
    )
    return re.compile(f"[{han_and_kana}{character_set(HAN_AND_KANA[-1:])}]"), re.compile(f"(?<![{character_set(STACKING)}])[{others}]")


@functools.cache
def _separators() -> re.Pattern[str]:
    """Return a pattern of characters beyond ASCII that separate words: punctuation, symbols, spaces, controls.

    Code points unknown to this Python may be letters of a later Unicode version, so they do not separate words.
    """
    (separating,) = _separating()
    blocks = tuple((first, last) for first, last in separating.tolist())
    return re.compile(f"[{character_set(blocks, ((0x1F000, 0x1FAFF), (0xE0000, 0xE00FF)))}]+")


@cached_on_disk(__file__, characters.__file__)
def _separating() -> tuple[npt.NDArray[np.int64], ...]:
    """Return the blocks of separators of the basic plane, int64 (blocks, 2)."""
    separating = blocks_of(lambda one: not (is_letter(one) or is_mark(one) or is_unknown(one)), range(0x80, 0x10000))
    return (np.array(separating, np.int64),)


@functools.cache
def _invisible() -> re.Pattern[str]:
    return re.compile(f"[{character_set(all_invisible())}]+")


@functools.cache
def _clusters() -> re.Pattern[str]:
    """Return a pattern of grapheme clusters in scripts without spaces: a character, its marks, and stacked consonants."""
    spaceless, marks = character_set(HAN_AND_KANA, OTHER_SPACELESS), character_set(all_marks())
    return re.compile(f"[{spaceless}](?:[{marks}]|(?<=[{character_set(STACKING)}])[{spaceless}])*")


def cut_passages(text: str, words: int, passage_words: int) -> list[tuple[int, int]]:
    """Return spans (start, end) that cut a text of `words` words into passages of about `passage_words`, without white space at the edges.

    Texts up to 1.5 times that length are one span, unchanged. Cuts are at the sentence ends nearest to an even division; a sentence longer
    than half a passage may be cut between words, and a run without spaces between grapheme clusters. Every character except white space is
    in exactly one span.
    """
    if words <= _LONG * passage_words:
        return [(0, len(text))]
    pieces = max(2, round(words / passage_words))
    segments = list(_segments(text, words / pieces / 2))
    goal = sum(weight for _, weight in segments) / pieces  # words are rounded up per segment, so their sum may exceed `words`
    spans: list[tuple[int, int]] = []
    start, done, total, target = 0, 0, 0.0, goal
    for end, weight in segments:
        if done > start and abs(total + weight - target) >= abs(total - target):
            spans.append((start, done))
            start = done
            target += goal
        done, total = end, total + weight
    spans.append((start, len(text)))
    stripped = []
    for begin, end in spans:
        piece = text[begin:end]
        if kept := piece.strip():
            begin += len(piece) - len(piece.lstrip())
            stripped.append((begin, begin + len(kept)))
    return stripped


def _segments(text: str, longest: float) -> Iterator[tuple[int, float]]:
    """Yield (end, words) of the segments between possible cuts: sentences, or words or clusters of long sentences."""
    for start, end in _between(text, 0, len(text), _SENTENCE_END):
        weight = count_words(text[start:end])
        if weight <= longest:
            yield end, weight
            continue
        for word_start, word_end in _between(text, start, end, _WHITE_SPACE):
            weight = count_words(text[word_start:word_end])
            if weight <= longest:
                yield word_end, weight
                continue
            step, begin = max(2, int(longest)), word_start
            while begin < word_end:
                following = min(begin + step, word_end)
                while following < word_end and splits_cluster(text, following):
                    following += 1
                yield following, weight * (following - begin) / (word_end - word_start)
                begin = following


def _between(text: str, start: int, end: int, separator: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    begin = start
    for match in separator.finditer(text, start, end):
        if match.end() > begin:
            yield begin, match.end()
            begin = match.end()
    if begin < end:
        yield begin, end
