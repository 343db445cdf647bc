"""Draws docs/pictures/method.svg, the method in one picture, for light and dark pages:  python docs/pictures/method.py"""

from __future__ import annotations

from html import escape
from pathlib import Path

STYLE = """
:root { --ink: #1f2933; --line: #66788a; --paper: #ffffff; --data: #dbeafe; --work: #fef3c7; --model: #dcfce7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e9ee; --line: #8fa1b3; --paper: #15191e; --data: #1e3a5f; --work: #4a3b12; --model: #173f2a; }
}
text { font: 15px system-ui, sans-serif; fill: var(--ink); text-anchor: middle; }
.small { font-size: 12.5px; } .name { font-weight: 600; }
rect { stroke: var(--line); stroke-width: 1.2; rx: 8px; }
.data { fill: var(--data); } .work { fill: var(--work); } .model { fill: var(--model); } .page { fill: var(--paper); stroke: none; }
path { stroke: var(--line); stroke-width: 1.6; fill: none; marker-end: url(#head); }
marker path { fill: var(--line); stroke: none; }
"""
BOXES = (  # kind, left, top, width, height, name, lines below it
    ("data", 20, 30, 190, 86, "labelled texts", ("dev and test stay apart",)),
    ("data", 20, 200, 190, 86, "raw text", ("as much as there is",)),
    ("work", 270, 200, 170, 86, "index", ("BM25 over passages",)),
    ("data", 520, 200, 180, 86, "slice", ("passages of the best ranks,", "held-out text dropped")),
    ("work", 520, 30, 180, 100, "phase 1: both", ("masked words of both,", "labels of the task")),
    ("work", 740, 30, 170, 100, "phase 2: labels", ("the best on dev is kept",)),
    ("model", 740, 200, 170, 86, "your model", ("a plain folder, scored", "beside TF-IDF")),
)
ARROWS = (  # from, to, words, place of the words
    ("M210 243 H266", "", (0, 0)),
    ("M440 243 H516", "best ranks", (478, 234)),
    ("M115 116 C115 160 355 150 355 196", "each text is a query", (330, 148)),
    ("M210 73 H516", "1", (497, 64)),
    ("M610 200 V134", "ρ₁", (627, 172)),
    ("M700 80 H736", "", (0, 0)),
    ("M825 130 V196", "", (0, 0)),
)
TITLE = "Labelled texts query an index of raw text; slice and task train one encoder, then the labels alone; out comes a model."


def draw() -> str:
    """The picture as SVG without anything from outside."""
    boxes = [part for box in BOXES for part in _box(*box)]
    arrows = [part for path, words, place in ARROWS for part in _arrow(path, words, place)]
    head = '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    head += '<path d="M0 0L10 5L0 10z"/></marker>'

    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 930 310" role="img" aria-labelledby="title">',
            f'<title id="title">{escape(TITLE)}</title>',
            f"<style>{STYLE}</style>",
            f"<defs>{head}</defs>",
            '<rect class="page" width="930" height="310"/>',
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


def _box(kind: str, left: int, top: int, width: int, height: int, name: str, lines: tuple[str, ...]) -> list[str]:
    middle, first = left + width / 2, top + height / 2 - 9 * len(lines) + 5
    words = [f'<text class="name" x="{middle:g}" y="{first:g}">{escape(name)}</text>']
    words += [f'<text class="small" x="{middle:g}" y="{first + 19 + 17 * row:g}">{escape(line)}</text>' for row, line in enumerate(lines)]
    return [f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{height}"/>', *words]


def _arrow(path: str, words: str, place: tuple[int, int]) -> list[str]:
    drawn = [f'<path d="{path}"/>']
    return [*drawn, f'<text class="small" x="{place[0]}" y="{place[1]}">{escape(words)}</text>'] if words else drawn


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), "utf-8")
