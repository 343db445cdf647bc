"""The README's plot of scores over the number of labels at one budget, and over minutes with all labels; a color per task.

    python benchmarks/quality_plot.py 2e13flops

Data: benchmarks/results/quality-BUDGET.json of bench_quality.py, and results/reproduce/ of reproduce/run.py for other budgets.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from quality_tables import FIRST, METRIC, RESULTS, in_order
from reproduce.tables import FOLDERS, TWIN_BUDGET

PLOT: Final = Path(__file__).parent.parent / "docs" / "pictures" / "quality.svg"
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555", "#E69F00", "#56B4E9")
STYLES: Final = {"tlm": ("o", "-"), "static": ("s", ":"), "tfidf": ("x", "--"), "TF-IDF + LR": ("+", "-.")}
"""Marker and line of each method; TF-IDF + LR is the one-vs-rest baseline of runs before there was `tfidf`."""
Curves = dict[str, dict[str, list["Point"]]]  # task -> method -> points


@dataclass(frozen=True, slots=True)
class Point:
    """Scores of a method of `STYLES`. budget: None for a linear model. mean, deviation: percent. minutes: of one core."""

    task: str
    method: str
    labels: str
    budget: str | None
    minutes: float | None
    mean: float
    deviation: float


def points(results: Path = RESULTS) -> Iterator[Point]:
    """Yield all results of `tlm` with default settings and of the linear models."""
    for path in sorted(results.glob("quality-*.json")):
        measured = json.loads(path.read_bytes())
        for task, experiments in measured["tasks"].items():
            for row in (row for experiment in experiments.values() for row in experiment["rows"]):
                if row["is_baseline"] or row["arm"] == FIRST:
                    yield _point(task, row["labels"], measured["budget"], row)
    for path in sorted(results.glob("reproduce/*-twin.json")):
        task = FOLDERS[path.stem.removesuffix("-twin")]
        for row in json.loads(path.read_bytes()):
            if row["is_baseline"]:
                yield _point(task, "all", TWIN_BUDGET, row)
            elif named := re.fullmatch(rf"{FIRST}(?:, budget=(\w+))?", row["arm"]):
                yield _point(task, "all", named[1] or TWIN_BUDGET, row)


def _point(task: str, labels: str, budget: str, row: Mapping[str, Any]) -> Point:
    score = row["scores"][METRIC]
    spread = 100 * (score["deviation"] or 0.0)
    method, of_budget = (row["arm"], None) if row["is_baseline"] else (FIRST, budget)
    return Point(task, method, labels, of_budget, row["cpu_minutes"], 100 * score["mean"], spread)


def over_labels(measured: Iterable[Point], budget: str) -> Curves:
    """Return curves over the number of labels of `tlm` at that budget and of the linear models, with at least two points.

    Tasks without a linear model are omitted.
    """
    measured = list(measured)
    curves: Curves = {}
    for task in dict.fromkeys(point.task for point in measured):
        of_task = [point for point in measured if point.task == task]
        mine = {point.labels: point for point in of_task if point.method == FIRST and point.budget == budget}
        of_method: dict[str, list[Point]] = {}
        for method in STYLES:
            there = mine if method == FIRST else {point.labels: point for point in of_task if point.method == method}
            shared = in_order(there.keys() & mine.keys())
            if len(shared) > 1:
                of_method[method] = [there[labels] for labels in shared]
        if len(of_method) > 1:
            curves[task] = of_method
    return curves


def over_minutes(measured: Iterable[Point]) -> Curves:
    """Return curves over minutes of `tlm` with all labels, and a point for each linear model, for tasks with at least two budgets.

    Repeated runs are separate points.
    """
    measured = [point for point in measured if point.labels == "all"]
    curves: Curves = {}
    for task in dict.fromkeys(point.task for point in measured):
        of_task = [point for point in measured if point.task == task]
        mine = [point for point in of_task if point.method == FIRST and point.minutes is not None]
        linear = {point.method: [point] for point in reversed(of_task) if point.method != FIRST}
        if len({point.budget for point in mine}) > 1 and linear:
            curves[task] = {FIRST: sorted(mine, key=lambda point: point.minutes or 0.0), **linear}
    return curves


def plot(measured: list[Point], budget: str, target: Path) -> None:
    """Write an SVG of the panels that have a curve.

    Raises:
        ValueError: if there is none.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "quality"
    from matplotlib import pyplot

    left, right = over_labels(measured, budget), over_minutes(measured)
    colour = dict(zip(dict.fromkeys([*left, *right]), COLOURS, strict=False))
    shown = [kind for kind, curves in (("labels", left), ("minutes", right)) if curves]
    if not shown:
        raise ValueError(f"nothing to draw: no task was run with two numbers of labels at {budget}, nor with two budgets")
    figure, axes = pyplot.subplots(1, len(shown), figsize=(5.5 * len(shown), 4.6), layout="constrained", sharey=True, squeeze=False)
    panels = dict(zip(shown, axes[0], strict=True))
    counts = in_order(point.labels for curves in left.values() for point in curves[FIRST])
    for task, curves in left.items():
        for method, curve in curves.items():
            positions = [counts.index(point.labels) for point in curve]
            means, spread = [point.mean for point in curve], [point.deviation for point in curve]
            panels["labels"].errorbar(positions, means, yerr=spread, fmt="".join(STYLES[method]), color=colour[task], capsize=3, ms=5)
    for task, curves in right.items():
        mine = curves[FIRST]
        panels["minutes"].plot([point.minutes for point in mine], [point.mean for point in mine], "o-", color=colour[task], ms=5)
        for method in sorted(curves.keys() - {FIRST}):
            panels["minutes"].axhline(curves[method][0].mean, color=colour[task], linestyle=STYLES[method][1], linewidth=1)
    if left:
        panels["labels"].set_xticks(range(len(counts)), [f"{count} labels" for count in counts])
        panels["labels"].set(title=f"{budget.removesuffix('flops')} operations")
    if right:
        panels["minutes"].set(xlabel="minutes of one core, reading and scoring included", title="all labels", xscale="log")
        axis = panels["minutes"].xaxis
        axis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(mpl.ticker.NullFormatter())
    for panel in panels.values():
        panel.set(ylabel="macro-F1 on test, percent" if panel is axes[0][0] else "")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    names = [mpl.lines.Line2D([], [], color=colour[task], label=task) for task in colour]
    there = {method for curves in (*left.values(), *right.values()) for method in curves}
    kinds = [(method, *style) for method, style in STYLES.items() if method in there]
    methods = [mpl.lines.Line2D([], [], color="black", marker=mark, linestyle=line, label=name) for name, mark, line in kinds]
    figure.legend(handles=[*names, *methods], loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    plot(list(points()), sys.argv[1], PLOT)
    print(PLOT)
