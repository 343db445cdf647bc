"""Text from data made fit for a page: cleaned, on one line, or cut to the part that matters.

Characters that HTML cannot hold are shown as the pictures Unicode has for them. Of a long text a part is shown and the rest opens on
demand, up to `MOST_CHARACTERS`. Escaping is done by the templates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cramlm.retrieval.bm25.analysis import analyze
from cramlm.text.words import word_pattern

LABEL_CHARACTERS = 80
SHOWN_CHARACTERS = 320
MOST_CHARACTERS = 6000
_LEAD = 60  # characters shown before the first mark
_BLANK_LINES = re.compile(r"\n\s*\n")
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROL |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)


@dataclass(frozen=True, slots=True)
class Brief:
    """A short text on one line. whole: the text if `shown` is not all of it, else empty."""

    shown: str
    whole: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an excerpt, marked or not."""

    text: str
    marked: bool


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text in three parts, of which the middle is shown at once.

    characters_before, characters_after: lengths of the folded parts; 0 where there is none. left_out: characters that are not in any part.
    """

    before: Sequence[Piece]
    shown: Sequence[Piece]
    after: Sequence[Piece]
    characters_before: int
    characters_after: int
    left_out: int


def clean(text: str) -> str:
    """Replace what HTML forbids: control characters by their pictures, lone surrogates by a replacement character."""
    return text.translate(_CONTROL)


def brief(text: str, limit: int = LABEL_CHARACTERS) -> Brief:
    """Put a short piece of data (a label, a name) on one line of at most `limit` characters."""
    whole = " ".join(clean(text).split()) or "(blank)"
    return Brief(whole, "") if len(whole) <= limit else Brief(f"{whole[: limit - 1]}…", whole[:MOST_CHARACTERS])


def excerpt(text: str, terms: Collection[str] = (), limit: int = SHOWN_CHARACTERS, most: int = MOST_CHARACTERS) -> Excerpt:
    """Cut a text from data and mark the words that are among `terms` (of the analyser).

    Of a long text about `limit` characters are shown, those with most marks (the first, without marks); the parts hold `most` in all.
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
    """Spans of the words all of whose terms are among `terms`, in order."""
    known: dict[str, bool] = {}
    spans = []
    for match in re.finditer(word_pattern(), text) if terms else ():
        word = match[0]
        if word not in known:
            found = analyze(word)
            known[word] = bool(found) and all(term in terms for term in found)
        if known[word]:
            spans.append(match.span())
    return spans


def _window(text: str, marks: Sequence[tuple[int, int]], limit: int) -> tuple[int, int]:
    """Where the part to show begins and ends: the first `limit` characters with most marks, cut between words where there are any."""
    best, start = sum(end <= limit for _, end in marks), 0
    for place, (first, _) in enumerate(marks):
        if (held := sum(end <= first + limit - _LEAD for _, end in marks[place:])) > best:
            best, start = held, max(0, first - _LEAD)
    start = min(start, max(0, len(text) - limit))
    if start:
        space = text.find(" ", start, start + _LEAD)
        start = start if space < 0 else space + 1
    end = text.rfind(" ", start + limit // 2, start + limit) if start + limit < len(text) else len(text)
    return start, min(start + limit, len(text)) if end < 0 else end


def _pieces(text: str, marks: Sequence[tuple[int, int]], start: int, end: int) -> list[Piece]:
    """text[start:end] with the marks that lie in it."""
    pieces = []
    for first, last in marks:
        if start <= first and last <= end:
            pieces += [Piece(text[start:first], False), Piece(text[first:last], True)]
            start = last
    return [*pieces, Piece(text[start:end], False)]
