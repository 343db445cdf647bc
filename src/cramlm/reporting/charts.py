"""SVG plots of the report, of `compare` and of attention heads; plot.css is their style.

Every plot has a title and a description for screen readers. Plots of the report are 380 units wide, so that their text has the size of the
page's text on a phone. Series differ in color (safe for red-green color blindness) and in dashes; lines are labelled at their ends.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal, TypeAlias
from xml.etree import ElementTree

from markupsafe import Markup

WIDTH = 380
_TOP, _BOTTOM, _LEFT, _RIGHT = 10, 34, 42, 76
_NAME_CHARACTERS = 44
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROL |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)

Anchor: TypeAlias = Literal["start", "middle", "end"]
Format: TypeAlias = Callable[[float], str]
Points: TypeAlias = Sequence[tuple[float, float]]


def clean(text: str) -> str:
    """Replace what HTML forbids: control characters by control pictures, lone surrogates by the replacement character."""
    return text.translate(_CONTROL)


@dataclass(frozen=True, slots=True)
class Line:
    """A named line. style: color and dashes. mark: (x, y, label) of a labelled point."""

    name: str
    points: Points
    style: Literal["one", "two"] = "one"
    mark: tuple[float, float, str] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval."""

    name: str
    value: float
    low: float
    high: float
    emphasised: bool = False


@dataclass(frozen=True, slots=True)
class Seeds:
    """Values of a method over seeds. values: (value, tooltip). figure: mean and deviation as text. reference: dashed line at the mean."""

    name: str
    values: Sequence[tuple[float, str]]
    mean: float
    deviation: float | None
    figure: str
    reference: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """A panel of bars. rows: for each row the (share, tooltip) of every series."""

    name: str
    summary: str
    rows: Sequence[Sequence[tuple[float, str]]]


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)


class Plot:
    """An SVG image to which text, lines, shapes and axes are added."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[ElementTree.Element] = []

    def text(self, x: float, y: float, words: str, anchor: Anchor, style: str) -> None:
        self._add("text", style, x=x, y=y, text_anchor=anchor).text = clean(words)

    def line(self, style: str, x: tuple[float, float], y: tuple[float, float]) -> None:
        self._add("line", style, x1=x[0], x2=x[1], y1=y[0], y2=y[1])

    def path(self, style: str, points: Points) -> None:
        self._add("polyline", style, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def circle(self, style: str, x: float, y: float, radius: float, tip: str = "") -> None:
        self._tip(self._add("circle", style, cx=x, cy=y, r=radius), tip)

    def box(self, style: str, x: tuple[float, float], y: tuple[float, float], tip: str = "") -> None:
        self._tip(self._add("rect", style, x=x[0], y=y[0], width=x[1] - x[0], height=y[1] - y[0]), tip)

    def x_axis(self, values: Sequence[float], x_of: Scale, form: Format, *, bottom: float, grid_from: float | None = None) -> None:
        """Tick labels below `bottom`; with `grid_from`, grid lines from there to `bottom`."""
        for value in values:
            if grid_from is not None:
                self.line("grid", (x_of(value), x_of(value)), (grid_from, bottom))
            self.text(x_of(value), bottom + 16, form(value), "middle", "tick")

    def x_name(self, words: str, x_of: Scale) -> None:
        self.text((x_of.start + x_of.end) / 2, self.height - 4, words, "middle", "axis")

    def y_axis(self, values: Sequence[float], y_of: Scale, form: Format, *, left: float, right: float) -> None:
        """Grid lines from `left` to `right`, tick labels to the left of them."""
        for value in values:
            self.line("grid", (left, right), (y_of(value), y_of(value)))
            self.text(left - 6, y_of(value) + 4, form(value), "end", "tick")

    def y_name(self, words: str, y: float) -> None:
        self._add("text", "axis", text_anchor="middle", transform=f"translate(10 {y:g}) rotate(-90)").text = clean(words)

    def figure(self, title: str, description: str) -> Markup:
        """Return a figure with a caption for an HTML page that includes plot.css."""
        figure = ElementTree.Element("figure", {"class": "chart"})
        ElementTree.SubElement(figure, "figcaption", {"aria-hidden": "true"}).text = clean(title)
        figure.append(self._svg(title, description))
        return Markup(ElementTree.tostring(figure, encoding="unicode", short_empty_elements=False))

    def file(self, title: str, description: str) -> str:
        """Return the content of an SVG file including its style."""
        svg = self._svg(title, description)
        svg.set("xmlns", "http://www.w3.org/2000/svg")
        style = ElementTree.Element("style")
        style.text = stylesheet()
        page = ElementTree.Element("rect", {"class": "page", "width": _number(self.width), "height": _number(self.height)})
        svg[2:2] = [style, page]
        return ElementTree.tostring(svg, encoding="unicode") + "\n"

    def _svg(self, title: str, description: str) -> ElementTree.Element:
        # Unique in a page, and the same whenever the page is written.
        identity = f"chart-{zlib.crc32(f'{title}{description}{len(self._parts)}'.encode('utf-8', 'replace')):08x}"
        box, labels = f"0 0 {self.width:g} {self.height:.0f}", f"{identity}-t {identity}-d"
        svg = ElementTree.Element("svg", {"role": "img", "viewBox": box, "aria-labelledby": labels})
        ElementTree.SubElement(svg, "title", {"id": f"{identity}-t"}).text = clean(title)
        ElementTree.SubElement(svg, "desc", {"id": f"{identity}-d"}).text = clean(description)
        svg.extend(self._parts)
        return svg

    def _add(self, tag: str, style: str, **attributes: str | float) -> ElementTree.Element:
        named = {name.replace("_", "-"): value if isinstance(value, str) else _number(value) for name, value in attributes.items()}
        self._parts.append(ElementTree.Element(tag, {"class": style, **named}))
        return self._parts[-1]

    def _tip(self, element: ElementTree.Element, tip: str) -> None:
        if tip:
            ElementTree.SubElement(element, "title").text = clean(tip)


def stylesheet() -> str:
    """Return the content of plot.css."""
    return resources.files("cramlm.reporting").joinpath("plot.css").read_text("utf-8")


def line_chart(title: str, description: str, lines: Sequence[Line], *, x_name: str, y_format: Format, largest: float = math.inf) -> Markup:
    """Plot lines over a common x axis from 0; the y axis spans the data. largest: the largest possible value."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    y_ticks = ticks(min(ys), max(ys), 4, limits=(-math.inf, largest))
    height = 210
    bottom, last = height - _BOTTOM, max(*xs, 1.0)
    x_of = Scale(0, last, _LEFT, WIDTH - _RIGHT)
    y_of = Scale(min(y_ticks[0], *ys), max(y_ticks[-1], *ys), bottom, _TOP)
    plot = Plot(WIDTH, height)
    plot.y_axis(y_ticks, y_of, y_format, left=_LEFT, right=WIDTH - _RIGHT)
    plot.x_axis([tick for tick in ticks(0, last, 4) if tick <= last and tick == int(tick)], x_of, _count, bottom=bottom)
    plot.x_name(x_name, x_of)
    for line in lines:
        points = [(x_of(x), y_of(y)) for x, y in line.points]
        plot.path(f"line {line.style}", points)
        for x, y in points if len(points) <= 12 else ():
            plot.circle(f"dot {line.style}", x, y, 2.6)
        if line.mark is not None:
            x, y, words = x_of(line.mark[0]), y_of(line.mark[1]), line.mark[2]
            plot.circle(f"ring {line.style}", x, y, 5)
            above = y - 8 if y > _TOP + 14 else y + 16
            if x < WIDTH * 0.55:
                plot.text(x + 6, above, words, "start", f"label {line.style}")
            else:
                plot.text(x - 6, above, words, "end", f"label {line.style}")
    ends = [(y_of(line.points[-1][1]), line) for line in lines]
    for y, line in _apart(ends, 13, top=_TOP + 4, bottom=bottom):
        plot.text(x_of(line.points[-1][0]) + 6, y + 4, line.name, "start", f"label {line.style}")
    return plot.figure(title, description)


def interval_chart(title: str, description: str, rows: Sequence[Estimate], *, percent: bool = True) -> Markup:
    """Plot a row per estimate: a dot with its interval, the name above, the value at the right; in percent if `percent`."""
    top, step = 8, 34
    bottom = top + step * len(rows)
    lows, highs = [row.low for row in rows], [row.high for row in rows]
    x_ticks = ticks(min(lows), max(highs), 4, limits=(0, 1) if percent else (-math.inf, math.inf))
    x_of = Scale(min(x_ticks[0], *lows), max(x_ticks[-1], *highs), 12, WIDTH - 58)
    plot = Plot(WIDTH, bottom + 26)
    plot.x_axis(x_ticks, x_of, lambda tick: f"{100 * tick:.4g}" if percent else f"{tick:g}", bottom=bottom, grid_from=top)
    for index, row in enumerate(rows):
        y, style = top + step * index + 24, "one" if row.emphasised else "other"
        weight = "label strong" if row.emphasised else "label"
        plot.text(12, y - 9, _brief(row.name, _NAME_CHARACTERS), "start", weight)
        plot.line(f"interval {style}", (x_of(row.low), x_of(row.high)), (y, y))
        plot.circle(f"dot {style}", x_of(row.value), y, 4.5)
        plot.text(WIDTH - 4, y + 4, f"{100 * row.value:.1f}" if percent else f"{row.value:.3f}", "end", weight)
    return plot.figure(title, description)


def histogram(
    title: str, description: str, edges: Sequence[float], counts: Sequence[int], *, x_name: str, x_format: Format, whole: bool = False
) -> Markup:
    """Plot bars of equal width between `edges` (one more than counts), with tooltips.

    whole: the edges are integers, and a bar has the integers from its left edge to below its right one. If that is one, its tick label is
    below its center.
    """
    centred = whole and edges[1] - edges[0] == 1
    height, right = 170, WIDTH - 12
    bottom = height - _BOTTOM
    y_ticks = [tick for tick in ticks(0, max(*counts, 1), 3) if tick == int(tick)]
    y_of = Scale(0, max(y_ticks[-1], *counts, 1), bottom, _TOP)
    x_of = Scale(0, len(counts), _LEFT, right)
    plot = Plot(WIDTH, height)
    plot.y_axis(y_ticks, y_of, _count, left=_LEFT, right=right)
    for index, number in enumerate(counts):
        if number:
            span = x_format(edges[index]) + ("" if centred else f" to {x_format(edges[index + 1] - whole)}")
            left = x_of(index) + 0.75
            plot.box("fill one", (left, max(x_of(index + 1) - 0.75, left + 1)), (y_of(number), bottom), f"{span}: {number:,}")
    for index in range(0, len(counts) if centred else len(edges), max(1, len(counts) // 4)):
        plot.text(x_of(index + 0.5 * centred), bottom + 16, x_format(edges[index]), "middle", "tick")
    plot.x_name(x_name, x_of)
    return plot.figure(title, description)


def reliability_chart(title: str, description: str, bins: Sequence[tuple[float, float, int]]) -> Markup:
    """Plot (mean confidence, accuracy, rows) of each bin with rows, and the diagonal of perfect calibration; the area is the rows."""
    height, left, right = 300, 58, WIDTH - 24
    x_of, y_of = Scale(0, 1, left, right), Scale(0, 1, height - _BOTTOM, _TOP)
    axis = [0, 0.25, 0.5, 0.75, 1]
    plot = Plot(WIDTH, height)
    plot.y_axis(axis, y_of, _percent, left=left, right=right)
    plot.x_axis(axis, x_of, _percent, bottom=height - _BOTTOM)
    plot.line("diagonal", (x_of(0), x_of(1)), (y_of(0), y_of(1)))
    plot.text(x_of(0.02), y_of(0.93), "underconfident", "start", "label faint")
    plot.text(x_of(0.98), y_of(0.05), "overconfident", "end", "label faint")
    most = max(rows for _, _, rows in bins)
    for confidence, accuracy, rows in bins:
        x, y = x_of(confidence), y_of(accuracy)
        plot.line("gap one", (x, x), (y, y_of(confidence)))
        tip = f"{rows:,} rows: confidence {100 * confidence:.0f} %, accuracy {100 * accuracy:.0f} %"
        plot.circle("bubble one", x, y, 2.5 + 8 * math.sqrt(rows / most), tip)
    plot.x_name("confidence", x_of)
    plot.y_name("accuracy", height / 2 - 12)
    return plot.figure(title, description)


def seeds_chart(title: str, description: str, groups: Sequence[tuple[str, Sequence[Seeds]]], *, x_name: str, largest: float) -> str:
    """Return an SVG file with a row per method: a dot per seed, mean and standard deviation; groups have a heading unless it is "".

    The mean of a reference is a dashed line through its group. largest: the largest possible value.
    """
    width, step, top, name_width, figure_width = 720, 30, 34, 220, 104
    values = [value for _, rows in groups for row in rows for value, _ in row.values]
    x_ticks = ticks(min(values), max(values), 5, limits=(-math.inf, largest))
    x_of = Scale(min(x_ticks[0], *values), max(x_ticks[-1], *values), name_width, width - figure_width)
    bottom = top + step * sum(len(rows) + (name != "") for name, rows in groups)
    plot = Plot(width, bottom + 34)
    plot.text(12, 20, title, "start", "strong")
    plot.x_axis(x_ticks, x_of, lambda tick: f"{tick:g}", bottom=bottom, grid_from=top)
    plot.x_name(x_name, x_of)
    y = float(top)
    for name, rows in groups:
        if name:
            plot.text(12, y + 19, name, "start", "axis")
            y += step
        for row in rows:
            if row.reference:
                plot.line("reference two", (x_of(row.mean), x_of(row.mean)), (y, y + step * len(rows)))
        for row in rows:
            _seeds(plot, row, y + step / 2, x_of)
            y += step
    return plot.file(title, description)


def bar_panels(title: str, description: str, panels: Sequence[Bars], *, series: tuple[str, str], row_names: Sequence[str]) -> str:
    """Return an SVG file with panels side by side over common rows; each row has a bar for each of two series."""
    panel_width, left, step, top = 300, 70, 26, 64
    bottom = top + step * len(row_names)
    plot = Plot(left + panel_width * len(panels) + 10, bottom + 34)
    plot.text(12, 20, title, "start", "strong")
    for x, hue, name in zip((190, 290), ("one", "two"), series, strict=True):
        plot.box(f"fill {hue}", (x, x + 12), (10, 22))
        plot.text(x + 18, 20, name, "start", "label")
    for index, name in enumerate(row_names):
        plot.text(left - 10, top + step * index + 17, name, "end", "axis")
    for index, panel in enumerate(panels):
        start = left + panel_width * index
        x_of = Scale(0, 1, start, start + panel_width - 50)
        plot.text(start, 42, _brief(panel.name, _NAME_CHARACTERS), "start", "label")
        plot.text(start, 57, panel.summary, "start", "axis")
        plot.x_axis([0, 0.5, 1], x_of, _percent, bottom=bottom, grid_from=top)
        for row, bars in enumerate(panel.rows):
            for hue, number, (share, tip) in zip(("one", "two"), (0, 1), bars, strict=True):
                y = top + step * row + 4 + 9 * number
                end = max(x_of(share), start + 1) if share else start  # a small share is visible
                plot.box(f"fill {hue}", (start, end), (y, y + 8), tip)
    return plot.file(title, description)


def ticks(low: float, high: float, count: int, *, limits: tuple[float, float] = (-math.inf, math.inf)) -> list[float]:
    """Return ticks from at or below `low` to at or above `high`, with a step of 1, 2 or 5 times a power of ten; about `count`.

    limits: of the values that are possible; ticks beyond them are left out.
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [round(number * step, 12) for number in range(first, last + 1)]
    return [value for value in values if limits[0] <= value <= limits[1]]


def _seeds(plot: Plot, row: Seeds, y: float, x_of: Scale) -> None:
    hue = "two" if row.reference else "one"
    if row.deviation is not None:
        low, high = (min(max(x_of(row.mean + sign * row.deviation), x_of.start), x_of.end) for sign in (-1, 1))
        plot.line(f"spread {hue}", (low, high), (y, y))
    plot.line(f"mean {hue}", (x_of(row.mean), x_of(row.mean)), (y - 8, y + 8))
    for value, tip in row.values:
        plot.circle(f"seed {hue}", x_of(value), y, 4.5, tip)
    plot.text(12, y + 4, _brief(row.name, 32), "start", "axis" if row.reference else "label")
    plot.text(plot.width - 8, y + 4, row.figure, "end", "strong")


def _apart(ends: list[tuple[float, Line]], gap: float, *, top: float, bottom: float) -> list[tuple[float, Line]]:
    """Return the labels from top to bottom, moved so that they are at least `gap` apart."""
    placed: list[tuple[float, Line]] = []
    for y, line in sorted(ends, key=lambda end: end[0]):
        placed.append((max(y, top if not placed else placed[-1][0] + gap), line))
    excess = placed[-1][0] - bottom if placed else 0
    return [(y - excess, line) for y, line in placed] if excess > 0 else placed


def _brief(name: str, limit: int) -> str:
    """Shorten a name to `limit` characters in its middle: long names of runs often differ at their ends."""
    whole, end = " ".join(name.split()), limit // 2
    return whole if len(whole) <= limit else f"{whole[: limit - 1 - end]}…{whole[-end:]}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
