"""Draws docs/pictures/method.svg, the method in one picture, for light and dark pages:  python docs/pictures/method.py"""

from __future__ import annotations

from html import escape
from pathlib import Path

STYLE = """
:root { --ink: #1f2933; --line: #66788a; --paper: #ffffff; --data: #dbeafe; --work: #fef3c7; --model: #dcfce7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e9ee; --line: #8fa1b3; --paper: #15191e; --data: #1e3a5f; --work: #4a3b12; --model: #173f2a; }
}
text { font: 19px system-ui, sans-serif; fill: var(--ink); text-anchor: middle; }
.small { font-size: 16px; } .name { font-weight: 600; }
rect { stroke: var(--line); stroke-width: 1.2; rx: 8px; }
.data { fill: var(--data); } .work { fill: var(--work); } .model { fill: var(--model); } .page { fill: var(--paper); stroke: none; }
path { stroke: var(--line); stroke-width: 1.6; fill: none; marker-end: url(#head); }
marker path { fill: var(--line); stroke: none; }
"""
BOXES = (  # kind, left, top, width, height, name, lines below it
    ("data", 10, 14, 180, 90, "labelled texts", ("dev and test apart",)),
    ("data", 10, 226, 180, 90, "raw text", ("as much as there is",)),
    ("data", 258, 226, 204, 90, "retrieved text", ("the best passages,", "held-out text dropped")),
    ("work", 247, 14, 226, 90, "linear models", ("n-grams, naive Bayes,", "word vectors of raw text")),
    ("work", 530, 226, 260, 90, "encoder, from scratch", ("1. on both kinds of text", "2. on the labels alone")),
    ("model", 530, 14, 260, 90, "your model", ("combines both, in a", "Hugging Face folder")),
)
ARROWS = (  # from, to, words, place of the words
    ("M190 59 H242", "", (0, 0)),
    ("M100 104 C100 180 300 150 306 221", "each text is a query", (122, 204)),
    ("M190 271 H253", "", (0, 0)),
    ("M410 226 V109", "", (0, 0)),
    ("M462 271 H525", "", (0, 0)),
    ("M473 59 H525", "", (0, 0)),
    ("M473 90 C516 110 590 140 596 221", "soft labels", (528, 186)),
    ("M710 226 V109", "", (0, 0)),
)
TITLE = (
    "Labelled texts query raw text; linear models and an encoder, which they teach, train on the labels and on what is "
    "retrieved; the model combines them."
)


def draw() -> str:
    """The picture as SVG without anything from outside."""
    boxes = [part for box in BOXES for part in _box(*box)]
    arrows = [part for path, words, place in ARROWS for part in _arrow(path, words, place)]
    head = '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    head += '<path d="M0 0L10 5L0 10z"/></marker>'

    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 330" role="img" aria-labelledby="title">',
            f'<title id="title">{escape(TITLE)}</title>',
            f"<style>{STYLE}</style>",
            f"<defs>{head}</defs>",
            '<rect class="page" width="800" height="330"/>',
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


def _box(kind: str, left: int, top: int, width: int, height: int, name: str, lines: tuple[str, ...]) -> list[str]:
    middle, first = left + width / 2, top + height / 2 - 11 * len(lines) + 6
    words = [f'<text class="name" x="{middle:g}" y="{first:g}">{escape(name)}</text>']
    words += [f'<text class="small" x="{middle:g}" y="{first + 24 + 21 * row:g}">{escape(line)}</text>' for row, line in enumerate(lines)]
    return [f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{height}"/>', *words]


def _arrow(path: str, words: str, place: tuple[int, int]) -> list[str]:
    parts = [f'<path d="{path}"/>']
    return [*parts, f'<text class="small" x="{place[0]}" y="{place[1]}">{escape(words)}</text>'] if words else parts


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), "utf-8")
