"""HTML from plain values. Whatever comes from data goes through `inline` or `passage`, and only there does it become markup.

Text from data is escaped, set apart from the direction of the text around it (<bdi>), rid of characters that HTML cannot hold
(shown as the pictures Unicode has for them), and cut where it is long: the rest opens on demand, up to `MOST_CHARACTERS`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cramlm.retrieval.analysis import analyze

SHOWN_CHARACTERS = 320
MOST_CHARACTERS = 6000
_LABEL_CHARACTERS = 80
_LEAD = 60  # characters shown before the first mark
_WORD = re.compile(r"\w+")
_BLANK_LINES = re.compile(r"\n\s*\n")
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROL |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table. markup: HTML. order: what sorting compares, where the text would not do. bar: 0..1, drawn behind."""

    markup: str
    order: float | None = None
    bar: float | None = None


def clean(text: str) -> str:
    """The text without what HTML forbids: control characters become their pictures, lone surrogates a replacement character."""
    return text.translate(_CONTROL)


def attribute(text: str) -> str:
    """For between double quotes."""
    return html.escape(clean(text))


def inline(text: str, *, limit: int = _LABEL_CHARACTERS) -> str:
    """A short piece of data (a label, a name) on one line; what exceeds `limit` characters is in its tooltip."""
    whole = " ".join(clean(text).split()) or "(blank)"
    if len(whole) <= limit:
        return f"<bdi>{html.escape(whole)}</bdi>"
    return f'<bdi title="{html.escape(whole[:MOST_CHARACTERS])}">{html.escape(whole[: limit - 1])}…</bdi>'


def passage(text: str, *, terms: Collection[str] = (), limit: int = SHOWN_CHARACTERS, most: int = MOST_CHARACTERS) -> str:
    """A text from data; words that are among `terms` (of the analyser) are marked. Of a long one about `limit` characters are shown, those
    with most marks (the first, without marks); what is before and after opens on demand, `most` characters in all.
    """
    whole = _BLANK_LINES.sub("\n", clean(text).strip())
    shown, left_out = whole[:most], max(0, len(whole) - most)
    marks = _marks(shown, terms)
    if len(whole) <= limit * 1.2:
        return f"<bdi>{_marked(shown, marks, 0, len(shown))}</bdi>"
    start, end = _window(shown, marks, limit)
    before = f"<details class=rest><summary>{start:,} characters before …</summary>" if start else ""
    after = f"<details class=rest><summary>… {len(whole) - end:,} more characters</summary>"
    cut = f' <span class="quiet">… and {left_out:,} characters more, left out here</span>' if left_out else ""
    return (
        (f"{before}<bdi>{_marked(shown, marks, 0, start)}</bdi></details> " if start else "")
        + f"<bdi>{_marked(shown, marks, start, end)}</bdi>"
        + (f"{after}<bdi>{_marked(shown, marks, end, len(shown))}</bdi>{cut}</details>" if end < len(whole) else "")
    )


def number(value: float, decimals: int = 0) -> Cell:
    """A figure with thousands separated."""
    return Cell(f"{value:,.{decimals}f}", order=float(value))


def percent(share: float, decimals: int = 1, *, bar: bool = False) -> Cell:
    """A share in percent, with a bar if asked."""
    return Cell(f"{100 * share:.{decimals}f} %", order=float(share), bar=float(share) if bar else None)


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[Cell | str]], *, text_columns: Collection[int] = (0,), tools: bool = True
) -> str:
    """A table whose strings are data and whose Cells are markup; sorted by a click on a header, filtered where it is long.

    text_columns: which are left-aligned and sort as text; the others hold figures. tools: whether sorting makes sense.
    """
    lines = [list(row) for row in rows]
    kinds = ["text" if place in text_columns else "figure" for place in range(len(header))]
    head = "".join(f'<th scope="col" class="{kind}">{html.escape(name)}</th>' for name, kind in zip(header, kinds, strict=True))
    body = "".join("<tr>" + "".join(map(_cell, row, kinds)) + "</tr>\n" for row in lines)
    classes = "tools" if tools and len(lines) > 2 else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{attribute(caption)}"><table class="{classes}">'
        f"<caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values (markup) as a definition list."""
    return "<dl class=facts>" + "".join(f"<div><dt>{html.escape(name)}</dt><dd>{value}</dd></div>" for name, value in pairs) + "</dl>"


def section(identity: str, heading: str, *parts: str) -> str:
    """A part of the page that the navigation leads to."""
    return f'<section id="{identity}"><h2>{html.escape(heading)}</h2>\n' + "\n".join(part for part in parts if part) + "\n</section>\n"


def missing(sentence: str) -> str:
    """Says what a run does not hold, in place of an empty box."""
    return f'<p class="missing">{html.escape(sentence)}</p>'


def power(value: float) -> str:
    """A large figure as 1.7 × 10¹²."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits} × 10<sup>{int(exponent)}</sup>"


def note(sentence: str) -> str:
    """A sentence of our own under a figure or table."""
    return f'<p class="note">{html.escape(sentence)}</p>'


def _cell(cell: Cell | str, kind: str) -> str:
    if isinstance(cell, str):
        return f'<td class="{kind}">{inline(cell)}</td>'
    order = "" if cell.order is None else f' data-order="{cell.order:.10g}"'
    if cell.bar is None:
        return f'<td class="{kind}"{order}>{cell.markup}</td>'
    width = min(max(cell.bar, 0.0), 1.0)
    return f'<td class="{kind} bar"{order}><i style="--share:{width:.4f}"></i><span>{cell.markup}</span></td>'


def _marks(text: str, terms: Collection[str]) -> list[tuple[int, int]]:
    """Spans of the words all of whose terms are among `terms`, in order."""
    known: dict[str, bool] = {}
    spans = []
    for match in _WORD.finditer(text) if terms else ():
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


def _marked(text: str, marks: Sequence[tuple[int, int]], start: int, end: int) -> str:
    """text[start:end], escaped, with the marks that lie in it."""
    parts = []
    for first, last in marks:
        if start <= first and last <= end:
            parts += [html.escape(text[start:first]), "<mark>", html.escape(text[first:last]), "</mark>"]
            start = last
    return "".join(parts) + html.escape(text[start:end])
