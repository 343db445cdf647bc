"""An experiment as a picture that needs nothing else: a line per arm, a dot per seed, a mark at their mean; light and dark."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence

from cramlm.deploy.report.charts import ticks
from cramlm.deploy.report.markup import clean
from cramlm.experiments.grid import ALL
from cramlm.experiments.results import Row, Summary
from cramlm.experiments.tables import score_text

STYLE = """
:root { --ink: #1c2024; --quiet: #5c646d; --rule: #dedbd4; --paper: #ffffff; --one: #1763ad; --two: #b4500a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --quiet: #a0a8b1; --rule: #343a41; --paper: #1a1d21; --one: #7fbaf2; --two: #f2a25c; }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); font-variant-numeric: tabular-nums; }
.quiet { fill: var(--quiet); font-size: 12px; } .strong { font-weight: 600; } .page { fill: var(--paper); }
.grid { stroke: var(--rule); } .spread, .mean { stroke: var(--one); stroke-width: 2.5; }
.dot { fill: var(--one); fill-opacity: .45; } .two .dot { fill: var(--two); } .two .mean, .two .spread { stroke: var(--two); }
.base { stroke: var(--two); stroke-dasharray: 4 4; }
"""
_WIDTH, _STEP, _TOP, _NAME, _FIGURE = 720, 30, 34, 220, 104


def draw(rows: Sequence[Row], *, title: str) -> str:
    """SVG of macro-F1 on test (on dev, where no run has test scores); "" without rows. The baseline is a dashed line through its group."""
    metric = "test macro_f1" if any("test macro_f1" in row.scores for row in rows) else "dev macro_f1"
    shown = [row for row in rows if metric in row.scores]
    if not shown:
        return ""
    groups = [(labels, list(group)) for labels, group in itertools.groupby(shown, key=lambda row: row.labels)]
    values = [100 * value for row in shown for value in row.scores[metric].values]
    marks = ticks(min(values), max(values), 5)
    low, high = min(marks[0], *values), max(marks[-1], *values)
    several = len(groups) > 1 or groups[0][0] != ALL
    height = _TOP + _STEP * (len(shown) + several * len(groups)) + 34

    def x_of(value: float) -> float:
        return _NAME + (value - low) / ((high - low) or 1.0) * (_WIDTH - _NAME - _FIGURE)

    bottom = height - 34
    parts = [f'<line class="grid" x1="{x_of(tick):.1f}" x2="{x_of(tick):.1f}" y1="{_TOP}" y2="{bottom}"/>' for tick in marks]
    parts += [_text(x_of(tick), bottom + 16, f"{tick:g}", "middle", "quiet") for tick in marks]
    split = metric.partition(" ")[0]
    parts.append(_text((_NAME + _WIDTH - _FIGURE) / 2, height - 4, f"macro-F1 on {split}, percent", "middle", "quiet"))
    y = float(_TOP)
    for labels, group in groups:
        if several:
            parts.append(_text(12, y + 19, "all labels" if labels == ALL else f"{labels} labels", "start", "quiet"))
            y += _STEP
        for row in group:
            if row.is_baseline:
                x = x_of(100 * row.scores[metric].mean)
                parts.append(f'<line class="base" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + _STEP * len(group):.1f}"/>')
        for row in group:
            parts += _line(row, row.scores[metric], y + _STEP / 2, x_of)
            y += _STEP
    told = "; ".join(f"{row.arm} ({row.labels} labels) {score_text(row.scores[metric])}" for row in shown)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="title told">'
    naming = f'<title id="title">{_escape(title)}</title><desc id="told">{_escape(told)}</desc>'
    page = f'<rect class="page" width="{_WIDTH}" height="{height}"/>'
    return "\n".join([head, naming, f"<style>{STYLE}</style>", page, _text(12, 20, title, "start", "strong"), *parts, "</svg>\n"])


def _line(row: Row, summary: Summary, y: float, x_of: Callable[[float], float]) -> list[str]:
    mean, parts = 100 * summary.mean, []
    if summary.deviation is not None:
        ends = [min(max(x_of(mean + sign * 100 * summary.deviation), _NAME), _WIDTH - _FIGURE) for sign in (-1, 1)]
        parts.append(f'<line class="spread" stroke-opacity=".35" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(f'<line class="mean" x1="{x_of(mean):.1f}" x2="{x_of(mean):.1f}" y1="{y - 8:.1f}" y2="{y + 8:.1f}"/>')
    for value, seed in zip(summary.values, row.seeds, strict=True):
        tip = f"<title>seed {seed}: {100 * value:.1f}</title>"
        parts.append(f'<circle class="dot" cx="{x_of(100 * value):.1f}" cy="{y:.1f}" r="4.5">{tip}</circle>')
    name = row.arm if len(row.arm) <= 32 else row.arm[:31] + "…"
    words = [
        _text(12, y + 4, name, "start", "quiet" if row.is_baseline else ""),
        _text(_WIDTH - 8, y + 4, score_text(summary), "end", "strong"),
    ]
    return [f'<g class="{"two" if row.is_baseline else "one"}">', *parts, *words, "</g>"]


def _text(x: float, y: float, words: str, anchor: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(words)}</text>'


def _escape(words: str) -> str:
    return html.escape(clean(words))
