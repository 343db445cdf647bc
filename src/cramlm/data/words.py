"""Text made comparable: words, a key for exact duplicates, and passages of a bearable length.

Three jobs share one notion of a letter here. `normal_words` (used to look for held-out text) and `duplicate_key` (used to drop repeated
passages) keep letters, digits and combining marks, folded by NFKC and case; everything else separates or vanishes. Scripts that put no
spaces between words (Han, kana, Thai, Lao, Khmer, Myanmar, Tibetan) count every character as a word of its own in `normal_words`, and
every two characters as one in `count_words`, which measures length. ASCII takes a path through byte tables: about 5 times as fast, and
most text is ASCII. `MeasuredText` takes text with a few other characters (quotation marks, an accent here and there) by the same path.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Collection, Iterator
from hashlib import blake2b
from typing import NamedTuple

# Blocks of scripts written without spaces; halfwidth kana and the ideographs beyond the basic plane included.
SPACELESS = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9f\U00020000-\U0003ffff"
)
_SPACELESS_CHARACTER = re.compile(f"[{SPACELESS}]")
_SENTENCE_END = re.compile(r"""[.!?…؟۔।॥።][.!?…]*["'”’»)\]]*\s+|[。！？．][」』”’）]*\s*|\n\s*\n\s*""")
_ASCII_OTHER = bytes(code for code in range(128) if not chr(code).isalnum())
_ASCII_TO_SPACE = bytes(32 if code < 128 and not chr(code).isalnum() else code for code in range(256))
_ASCII_TO_WORDS = _ASCII_TO_SPACE.lower()
_ASCII = bytes(range(128))
_ASCII_LOWER = bytes(range(256)).lower()
_ASCII_IN_WORD = bytes(code >= 128 or not chr(code).isspace() for code in range(256))
_LONG = 1.5  # a document is cut when it has more than this many times the words of a passage


def fold(text: str) -> str:
    """Case and compatibility forms removed: NFKC, then casefold (for ASCII both are `lower`)."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def normal_words(text: str) -> list[str]:
    """The words that comparisons see: runs of letters, digits and marks, folded; one character each in scripts without spaces."""
    return normal_bytes(text).decode("utf-8", "surrogatepass").split()


def normal_bytes(text: str) -> bytes:
    """The same words as UTF-8 with spaces between them, one or more."""
    if text.isascii():
        return text.encode().translate(_ASCII_TO_WORDS)
    data = text.encode("utf-8", "surrogatepass")
    foreign = None if b"\xed" in data else _few_foreign(data)  # where lone surrogates begin, and some Hangul
    if foreign is None:
        return _words_of_any_script(text)
    data = data.translate(_ASCII_TO_WORDS)
    for character in foreign:
        if character.words != character.data:
            data = data.replace(character.data, character.words)
    return data


def _words_of_any_script(text: str) -> bytes:
    folded = fold(text)
    spaced = folded.encode("utf-8", "surrogatepass").translate(_ASCII_TO_SPACE)
    if folded.isascii():
        return spaced
    letters = _separators().sub(" ", spaced.decode("utf-8", "surrogatepass"))
    if _SPACELESS_CHARACTER.search(letters):
        letters = _SPACELESS_CHARACTER.sub(r" \g<0> ", letters)
    return letters.encode("utf-8", "surrogatepass")


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
        data = self.data
        if self._foreign is None:
            return _count_words_of_any_script(self.text)
        for character in self._foreign:
            if character.is_space:
                data = data.replace(character.data, b" ")
        # One byte per character of the text, 1 in words, as one large number: its bits that follow a 0 begin a word.
        in_word = int.from_bytes(data.translate(_ASCII_IN_WORD), "little")
        return (in_word & ~(in_word << 8)).bit_count()

    def duplicate_key(self) -> bytes:
        """As the function of that name."""
        if self._foreign is None:
            letters = _letters_of_any_script(self.text)
        else:
            letters = self.data.translate(_ASCII_LOWER, _ASCII_OTHER)
            for character in self._foreign:
                if character.letters != character.data:
                    letters = letters.replace(character.data, character.letters)
        return blake2b(letters or self.text.strip().encode(), digest_size=16).digest()


def duplicate_key(text: str) -> bytes:
    """16 bytes, equal for texts that differ only in case, spacing and punctuation; texts without any letter or digit compare as they
    are.
    """
    return MeasuredText(text).duplicate_key()


def count_words(text: str) -> int:
    """Length in words: runs between white space; in scripts without spaces two characters are one word (one more per run that holds
    both).
    """
    return MeasuredText(text).count_words()


def cut_passages(text: str, words: int, passage_words: int) -> list[tuple[int, int]]:
    """Where to cut a text of `words` words into passages of about `passage_words`: spans (start, end) in order, edge white space left out.

    One span (the whole text, untouched) if the text is not over 1.5 times that long. Cuts fall at the sentence end nearest to the even
    division; a sentence longer than half a passage may be cut between words, and a run without spaces between characters (never before
    a combining mark). The spans hold every character of the text that is not white space, once.
    """
    if words <= _LONG * passage_words:
        return [(0, len(text))]
    pieces = max(2, round(words / passage_words))
    segments = list(_segments(text, words / pieces / 2))
    goal = sum(weight for _, weight in segments) / pieces  # the parts' words, each rounded up, may exceed the whole's
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
    """Ends of the places where a cut may fall, each with the words since the one before: sentences, or the words or characters of long
    ones.
    """
    for start, end in _between(text, 0, len(text), _SENTENCE_END):
        weight = count_words(text[start:end])
        if weight <= longest:
            yield end, weight
            continue
        for word_start, word_end in _between(text, start, end, re.compile(r"\s+")):
            weight = count_words(text[word_start:word_end])
            if weight <= longest:
                yield word_end, weight
                continue
            step, place = max(2, int(longest)), word_start
            while place < word_end:
                following = min(place + step, word_end)
                while following < word_end and unicodedata.category(text[following])[0] == "M":
                    following += 1
                yield following, weight * (following - place) / (word_end - word_start)
                place = following


def _between(text: str, start: int, end: int, separator: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    place = start
    for match in separator.finditer(text, start, end):
        if match.end() > place:
            yield place, match.end()
            place = match.end()
    if place < end:
        yield place, end


class _Foreign(NamedTuple):
    """A character beyond ASCII that stands for itself, whatever is around it. letters: what of it `duplicate_key` sees. words: what
    `normal_words` sees.
    """

    data: bytes
    letters: bytes
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
    folded = fold(character)
    if _joins(character) or _joins(unicodedata.normalize("NFKC", character)[0]) or _SPACELESS_CHARACTER.search(character):
        return None
    if fold(folded) != folded:
        return None  # else the order in which characters are replaced would matter
    return _Foreign(character.encode(), _letters_of_any_script(character), _words_of_any_script(character), character.isspace())


def _joins(character: str) -> bool:
    """True for every character that NFKC may join with the one before it or move, and for some others."""
    code = ord(character)
    beyond_basic_plane = code > 0xFFFF and not 0x1F000 <= code < 0x1FB00
    return beyond_basic_plane or 0x1100 <= code < 0x1200 or unicodedata.category(character)[0] == "M"


def _letters_of_any_script(text: str) -> bytes:
    folded = fold(text)
    letters = folded.encode().translate(None, _ASCII_OTHER)
    return letters if folded.isascii() else _separators().sub("", letters.decode()).encode()


def _count_words_of_any_script(text: str) -> int:
    words = len(text.split())
    if text.isascii() or not _SPACELESS_CHARACTER.search(text):
        return words
    characters = len(_SPACELESS_CHARACTER.findall(text))
    bare_runs = sum(1 for run in text.split() if _SPACELESS_CHARACTER.match(run))
    return words - bare_runs + (characters + 1) // 2


@functools.cache
def _separators() -> re.Pattern[str]:
    """Runs of non-ASCII characters that are neither letters, digits nor marks: punctuation, symbols, spaces, controls."""
    junk = [chr(code) for code in range(0x80, 0x10000) if unicodedata.category(chr(code)) not in _KEPT]
    return re.compile("[" + "".join(map(re.escape, junk)) + "\U0001f000-\U0001faff\U000e0000-\U000e00ff]+")


# Letters, marks, numbers; and what this Python's Unicode does not know yet (unassigned, private use), which may be letters.
_KEPT = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Cn", "Co", "Cs"})
