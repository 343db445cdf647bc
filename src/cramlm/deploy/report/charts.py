"""Charts as inline SVG: lines, intervals, a histogram, a reliability diagram. Plain data in, markup out; report.css holds the colours.

Every chart has a title and a description that says in words what it shows, for readers who do not see it. They are drawn 380 units wide,
so that their letters are as large as the page's on a phone. Two hues that red-green blindness keeps apart carry all meaning, with
different dashes and marks; lines are named at their ends instead of in a legend.
"""

from __future__ import annotations

import html
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cramlm.deploy.report.markup import clean

WIDTH = 380
_TOP, _BOTTOM, _LEFT, _RIGHT = 10, 34, 42, 76

Points = Sequence[tuple[float, float]]
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """A named line; style: a class of report.css (one, two, quiet). mark: (x, y, words) of a point worth a word."""

    name: str
    points: Points
    style: str = "one"
    mark: tuple[float, float, str] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval."""

    name: str
    value: float
    low: float
    high: float
    emphasised: bool = False


def line_chart(title: str, description: str, lines: Sequence[Line], *, x_name: str, y_format: Format, height: int = 210) -> str:
    """Lines over a common x from 0; y spans the data."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    y_ticks = ticks(min(ys), max(ys), 4)
    low, high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)
    last = max(*xs, 1.0)
    x_of = _scale(0, last, _LEFT, WIDTH - _RIGHT)
    y_of = _scale(low, high, height - _BOTTOM, _TOP)
    parts = _grid(y_ticks, y_of, y_format)
    parts += [_text(x_of(tick), height - _BOTTOM + 16, f"{tick:,.0f}", "middle", "tick") for tick in ticks(0, last, 4) if tick <= last]
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, height - 4, x_name, "middle", "axis"))
    for line in lines:
        where = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line {line.style}" points="{where}"/>')
        if len(line.points) <= 12:
            parts += [f'<circle class="dot {line.style}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.6"/>' for x, y in line.points]
        if line.mark is not None:
            x, y, words = line.mark
            anchor, shift = ("start", 6) if x_of(x) < WIDTH * 0.55 else ("end", -6)
            above = y_of(y) - 8 if y_of(y) > _TOP + 14 else y_of(y) + 16
            parts.append(f'<circle class="ring {line.style}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="5"/>')
            parts.append(_text(x_of(x) + shift, above, words, anchor, f"label {line.style}"))
    ends = [(y_of(line.points[-1][1]), line) for line in lines]
    for y, line in _apart(ends, 13, top=_TOP + 4, bottom=height - _BOTTOM):
        parts.append(_text(x_of(line.points[-1][0]) + 6, y + 4, line.name, "start", f"label {line.style}"))
    return _svg(title, description, height, parts)


def interval_chart(title: str, description: str, rows: Sequence[Estimate], *, percent: bool = True) -> str:
    """One row for each estimate, in percent if it is a share: a dot, its interval, its name above and its figure at the right."""
    top, step = 8, 34
    height = top + step * len(rows) + 26
    lows, highs = [row.low for row in rows], [row.high for row in rows]
    x_ticks = ticks(min(lows), max(highs), 4)
    x_of = _scale(min(x_ticks[0], *lows), max(x_ticks[-1], *highs), 12, WIDTH - 58)
    bottom = top + step * len(rows)
    parts = []
    for tick in x_ticks:
        parts.append(f'<line class="grid" x1="{x_of(tick):.1f}" x2="{x_of(tick):.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text(x_of(tick), bottom + 16, f"{100 * tick:.4g}" if percent else f"{tick:g}", "middle", "tick"))
    for place, row in enumerate(rows):
        y, style = top + step * place + 24, "one" if row.emphasised else "quiet"
        weight = "label strong" if row.emphasised else "label"
        parts.append(_text(12, y - 9, _brief(row.name, 44), "start", weight))
        parts.append(f'<line class="whisker {style}" x1="{x_of(row.low):.1f}" x2="{x_of(row.high):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot {style}" cx="{x_of(row.value):.1f}" cy="{y}" r="4.5"/>')
        parts.append(_text(WIDTH - 4, y + 4, f"{100 * row.value:.1f}" if percent else f"{row.value:.3f}", "end", f"{weight} figure"))
    return _svg(title, description, height, parts)


def histogram(
    title: str, description: str, edges: Sequence[float], counts: Sequence[int], *, x_name: str, x_format: Format, centred: bool = False
) -> str:
    """Bars of equal width between `edges` (one more than counts); every bar tells its figures when pointed at.

    centred: a bar stands for one whole number, its left edge, which is written under its middle.
    """
    height = 170
    right = WIDTH - 12
    y_ticks = [tick for tick in ticks(0, max(*counts, 1), 3) if tick == int(tick)]
    y_of = _scale(0, max(y_ticks[-1], *counts, 1), height - _BOTTOM, _TOP)
    wide = (right - _LEFT) / len(counts)
    parts = _grid(y_ticks, y_of, lambda value: f"{value:,.0f}", right=right)
    for place, number in enumerate(counts):
        if number:
            x, y = _LEFT + place * wide, y_of(number)
            span = x_format(edges[place]) + ("" if centred else f" to {x_format(edges[place + 1])}")
            tip = f"{span}: {number:,}"
            size = f'width="{max(wide - 1.5, 1):.1f}" height="{height - _BOTTOM - y:.1f}"'
            parts.append(f'<rect class="fill one" x="{x + 0.75:.1f}" y="{y:.1f}" {size}><title>{html.escape(tip)}</title></rect>')
    for place in range(0, len(counts) if centred else len(edges), max(1, len(counts) // 4)):
        parts.append(_text(_LEFT + (place + 0.5 * centred) * wide, height - _BOTTOM + 16, x_format(edges[place]), "middle", "tick"))
    parts.append(_text((_LEFT + right) / 2, height - 4, x_name, "middle", "axis"))
    return _svg(title, description, height, parts)


def reliability_chart(title: str, description: str, bins: Sequence[tuple[float, float, int]]) -> str:
    """(mean confidence, accuracy, rows) of each bin that holds rows, over the diagonal of perfect calibration; a dot's area is its rows."""
    height, left = 300, 58
    x_of = _scale(0, 1, left, WIDTH - 24)
    y_of = _scale(0, 1, height - _BOTTOM, _TOP)
    marks = [0, 0.25, 0.5, 0.75, 1]
    parts = _grid(marks, y_of, lambda value: f"{100 * value:.0f} %", left=left, right=WIDTH - 24)
    parts += [_text(x_of(tick), height - _BOTTOM + 16, f"{100 * tick:.0f} %", "middle", "tick") for tick in marks]
    parts.append(f'<line class="diagonal" x1="{x_of(0):.1f}" y1="{y_of(0):.1f}" x2="{x_of(1):.1f}" y2="{y_of(1):.1f}"/>')
    parts.append(_text(x_of(0.02), y_of(0.93), "right more often than it says", "start", "label faint"))
    parts.append(_text(x_of(0.98), y_of(0.05), "right less often than it says", "end", "label faint"))
    most = max(rows for _, _, rows in bins)
    for confidence, accuracy, rows in bins:
        x, y, radius = x_of(confidence), y_of(accuracy), 2.5 + 8 * math.sqrt(rows / most)
        parts.append(f'<line class="gap" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y_of(confidence):.1f}"/>')
        tip = f"{rows:,} rows: {100 * confidence:.0f} % sure, {100 * accuracy:.0f} % right"
        parts.append(f'<circle class="bubble one" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{tip}</title></circle>')
    parts.append(_text((left + WIDTH - 24) / 2, height - 4, "how sure the model is", "middle", "axis"))
    parts.append(
        f'<text class="axis" text-anchor="middle" transform="translate(10 {height / 2 - 12}) rotate(-90)">how often it is right</text>'
    )
    return _svg(title, description, height, parts)


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at or below `low` to at or above `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _grid(
    marks: Sequence[float], y_of: Callable[[float], float], y_format: Format, *, left: float = _LEFT, right: float = WIDTH - _RIGHT
) -> list[str]:
    parts = []
    for tick in marks:
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y_of(tick):.1f}" y2="{y_of(tick):.1f}"/>')
        parts.append(_text(left - 6, y_of(tick) + 4, y_format(tick), "end", "tick"))
    return parts


def _apart(ends: list[tuple[float, Line]], gap: float, *, top: float, bottom: float) -> list[tuple[float, Line]]:
    """The same, from top to bottom, moved so that labels lie at least `gap` apart."""
    placed: list[tuple[float, Line]] = []
    for y, line in sorted(ends, key=lambda end: end[0]):
        placed.append((max(y, top if not placed else placed[-1][0] + gap), line))
    excess = placed[-1][0] - bottom if placed else 0
    return [(y - excess, line) for y, line in placed] if excess > 0 else placed


def _text(x: float, y: float, words: str, anchor: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(clean(words))}</text>'


def _brief(name: str, limit: int) -> str:
    whole = " ".join(name.split())
    return whole if len(whole) <= limit else whole[: limit - 1] + "…"


def _svg(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    identity = f"chart-{zlib.crc32(f'{title}{description}{len(parts)}'.encode()):08x}"
    return (
        f'<figure class="chart"><figcaption aria-hidden="true">{html.escape(clean(title))}</figcaption>'
        f'<svg role="img" viewBox="0 0 {WIDTH} {height:.0f}" aria-labelledby="{identity}-t {identity}-d">'
        f'<title id="{identity}-t">{html.escape(clean(title))}</title><desc id="{identity}-d">{html.escape(clean(description))}</desc>'
        + "".join(parts)
        + "</svg></figure>\n"
    )
