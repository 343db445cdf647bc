"""Text from data for an HTML page: cleaned, shortened to one line, or shortened to an excerpt with marked words.

Characters that HTML forbids are replaced by Unicode's control pictures. An excerpt has two folded parts, `MAX_CHARACTERS` in all. The
templates escape the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cramlm.retrieval.bm25.analysis import analyze
from cramlm.text.words import word_pattern

LABEL_CHARACTERS = 80
SHOWN_CHARACTERS = 320
MAX_CHARACTERS = 6000
_LEAD = 60  # characters shown before the first marked word
_BLANK_LINES = re.compile(r"\n\s*\n")
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROL |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)


@dataclass(frozen=True, slots=True)
class Brief:
    """A short text on one line. whole: the complete text if `shown` is shortened, else empty."""

    shown: str
    whole: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an excerpt; a marked part is a word."""

    text: str
    marked: bool


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text in three parts; the first and the last are folded.

    characters_before, characters_after: lengths of the folded parts. left_out: number of characters that are in no part.
    """

    before: Sequence[Piece]
    shown: Sequence[Piece]
    after: Sequence[Piece]
    characters_before: int
    characters_after: int
    left_out: int


def clean(text: str) -> str:
    """Replace what HTML forbids: control characters by control pictures, lone surrogates by the replacement character."""
    return text.translate(_CONTROL)


def brief(text: str, limit: int = LABEL_CHARACTERS) -> Brief:
    """Shorten a label or a name to one line of at most `limit` characters."""
    whole = " ".join(clean(text).split()) or "(blank)"
    return Brief(whole, "") if len(whole) <= limit else Brief(f"{whole[: limit - 1]}…", whole[:MAX_CHARACTERS])


def excerpt(text: str, terms: Collection[str] = (), limit: int = SHOWN_CHARACTERS, most: int = MAX_CHARACTERS) -> Excerpt:
    """Shorten a text and mark the words whose terms (of the BM25 analysis) are in `terms`.

    The part of about `limit` characters with most marked words is shown; all parts together have at most `most` characters.
    """
    whole = _BLANK_LINES.sub("\n", clean(text).strip())
    kept = whole[:most]
    marks = _marks(kept, terms)
    if len(whole) <= limit * 1.2:
        return Excerpt((), _pieces(kept, marks, 0, len(kept)), (), 0, 0, 0)
    start, end = _window(kept, marks, limit)
    before, shown, after = (_pieces(kept, marks, *span) for span in ((0, start), (start, end), (end, len(kept))))
    return Excerpt(before, shown, after, start, len(whole) - end, len(whole) - len(kept))


def _marks(text: str, terms: Collection[str]) -> list[tuple[int, int]]:
    """Return the spans of the words all of whose terms are in `terms`, in order."""
    is_marked: dict[str, bool] = {}
    spans = []
    for match in re.finditer(word_pattern(), text) if terms else ():
        word = match[0]
        if word not in is_marked:
            analyzed = analyze(word)
            is_marked[word] = bool(analyzed) and all(term in terms for term in analyzed)
        if is_marked[word]:
            spans.append(match.span())
    return spans


def _window(text: str, marks: Sequence[tuple[int, int]], limit: int) -> tuple[int, int]:
    """Return start and end of the part to show: the first `limit` characters with most marked words, cut at a space if there is one."""
    best, start = sum(end <= limit for _, end in marks), 0
    for index, (first, _) in enumerate(marks):
        if (count := sum(end <= first + limit - _LEAD for _, end in marks[index:])) > best:
            best, start = count, max(0, first - _LEAD)
    start = min(start, max(0, len(text) - limit))
    if start:
        space = text.find(" ", start, start + _LEAD)
        start = start if space < 0 else space + 1
    end = text.rfind(" ", start + limit // 2, start + limit) if start + limit < len(text) else len(text)
    return start, min(start + limit, len(text)) if end < 0 else end


def _pieces(text: str, marks: Sequence[tuple[int, int]], start: int, end: int) -> list[Piece]:
    """Split text[start:end] into pieces at the marked words inside it."""
    pieces = []
    for first, last in marks:
        if start <= first and last <= end:
            pieces += [Piece(text[start:first], False), Piece(text[first:last], True)]
            start = last
    return [*pieces, Piece(text[start:end], False)]
