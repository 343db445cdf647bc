"""The tables of scores in the README and in docs/benchmarks/quality.md, from the results of bench_quality.py.

    python benchmarks/quality_tables.py rungs 2e13flops [all]
    python benchmarks/quality_tables.py means 2e13flops
    python benchmarks/quality_tables.py controls 2e13flops

rungs: macro- and micro-F1 of the models by increasing cost, by task, from results/rungs-BUDGET.json, for all numbers of labels or for one.
means: their means over development and confirmation tasks, which the README shows. controls: means of the control recipes over tasks,
from results/quality-BUDGET.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from cramlm.errors import counted
from cramlm.experiments.grid import ALL

RESULTS: Final = Path(__file__).parent / "results"
METRIC: Final = "test macro_f1"
FIRST: Final = "tlm"
RUNGS: Final = {"tfidf": "tfidf", "bayes": "bayes", "static": "static", "tlm-plain": "tlm-plain", "tlm": "tlm", "tlm combined": "combined"}
"""Arm -> column of the table of models, cheapest first."""
GROUPS: Final = {
    "development": ("chemprot", "citation_intent", "sciie", "agnews_small", "sst2", "masakhanews_yor", "newsgroups20"),
    "confirmation": ("trec", "scicite", "cr", "masakhanews_ibo"),
}
"""The tasks that settings were developed on, and those that are scored once per release."""
COUNTS: Final = ("100", "500", ALL)
"""Numbers of labels."""


def summary(measured: Mapping[str, Any]) -> str:
    """Return a Markdown table of means over tasks by arm and number of labels, with the number of tasks on which `tlm` is better."""
    tasks = measured["tasks"]
    rows = [row for experiments in tasks.values() for experiment in experiments.values() for row in experiment["rows"]]
    arms = sorted(dict.fromkeys(row["arm"] for row in rows), key=lambda arm: any(row["is_baseline"] for row in rows if row["arm"] == arm))
    counts = [labels for labels in in_order(row["labels"] for row in rows) if all(labels in experiments for experiments in tasks.values())]
    scores = {(labels, arm): _scores(tasks, labels, arm) for labels in counts for arm in arms}
    whole = [arm for arm in arms if all(len(scores[labels, arm]) == len(tasks) for labels in counts)]
    lines = [
        f"| mean of {len(tasks)} tasks ({FIRST} above on) | {' | '.join(f'{labels} labels' for labels in counts)} |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for arm in whole:
        cells = (_summary_cell(scores[labels, arm], scores[labels, FIRST] if arm != FIRST else {}) for labels in counts)
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _scores(tasks: Mapping[str, Any], labels: str, arm: str) -> dict[str, float]:
    rows = ((task, row) for task, experiments in tasks.items() for row in experiments[labels]["rows"] if row["arm"] == arm)
    return {task: row["scores"][METRIC]["mean"] for task, row in rows}


def _summary_cell(scores: Mapping[str, float], first: Mapping[str, float]) -> str:
    above = sum(first[task] > score for task, score in scores.items()) if first else None
    return f"{100 * fmean(scores.values()):.1f}" + ("" if above is None else f" ({above})")


def rungs(measured: Mapping[str, Any], only: str | None = None) -> str:
    """Return a Markdown table for each number of labels (or for `only` this one), the confirmation tasks in one of their own.

    Rows are tasks, columns the models of `RUNGS` that were measured, cells test macro- and micro-F1, means over seeds; a cell of fewer
    seeds than the task's others says so. Tasks without results for a model are omitted. The last row is the mean over tasks.
    """
    parts = []
    counts = in_order(labels for experiments in measured["tasks"].values() for labels in experiments if only in (None, labels))
    for labels, confirming in product(counts, (False, True)):
        tasks = {task: of for task, of in measured["tasks"].items() if (task in GROUPS["confirmation"]) == confirming}
        arms = {cell["arm"] for experiments in tasks.values() for cell in experiments.get(labels, {"cells": []})["cells"]}
        columns = {arm: name for arm, name in RUNGS.items() if arm in arms}
        lines = {task: line for task, experiments in tasks.items() if (line := _rung_scores(experiments.get(labels), columns)) is not None}
        if not lines:
            continue
        seeds = {task: len({cell["seed"] for cell in tasks[task][labels]["cells"]}) for task in lines}
        names = {task: task if len(set(seeds.values())) == 1 else f"{task}, {counted(seeds[task], 'seed')}" for task in lines}
        mean = [tuple(fmean(scores[metric] for scores in column) for metric in (0, 1)) for column in zip(*lines.values(), strict=True)]
        head = f"| {labels} labels, {counted(min(seeds.values()), 'seed')} | {' | '.join(columns.values())} |"
        cells = [
            f"| {names[task]} | {' | '.join(_rung_cell(*scores, of=seeds[task]) for scores in line)} |" for task, line in lines.items()
        ]
        cells.append(f"| mean of {len(lines)} | {' | '.join(f'{100 * macro:.1f} / {100 * micro:.1f}' for macro, micro in mean)} |")
        parts.append("\n".join([head, "|---" * (len(columns) + 1) + "|", *cells]))
    return "\n\n".join(parts)


def means(measured: Mapping[str, Any]) -> str:
    """Return a Markdown table: rows are models (`RUNGS`), columns numbers of labels by group of tasks, cells means of test macro- and
    micro-F1 over the seeds of `tlm`, of results without it those of `static`; a cell of fewer seeds says so. "Not measured" unless all
    tasks of the group have scores of the model. A column without that model is omitted, and so is a model that no column has.
    """
    tasks = measured["tasks"]
    arms = {cell["arm"] for experiments in tasks.values() for experiment in experiments.values() for cell in experiment["cells"]}
    first = FIRST if FIRST in arms else "static"
    columns = [(group, labels, seeds) for group in GROUPS for labels in COUNTS if (seeds := len(_seeds(tasks, group, labels, first)))]
    heads = [f"{len(GROUPS[group])} {group} tasks, {labels} labels, {counted(seeds, 'seed')}" for group, labels, seeds in columns]
    lines = [f"| macro-F1 / micro-F1 | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for arm, name in RUNGS.items():
        if arm not in arms:
            continue
        found = [(group_mean(tasks, group, labels, arm, first), seeds) for group, labels, seeds in columns]
        cells = ("not measured" if mean is None else _rung_cell(mean.macro, mean.micro, mean.seeds, of=seeds) for mean, seeds in found)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean test scores over tasks, in 0..1. seeds: of each task."""

    macro: float
    micro: float
    seeds: int


def group_mean(tasks: Mapping[str, Any], group: str, labels: str, arm: str, first: str = FIRST) -> Mean | None:
    """Return the mean of an arm over a group of tasks and the seeds that `first` has for all of them; None if a task has no score."""
    seeds = _seeds(tasks, group, labels, first) & _seeds(tasks, group, labels, arm)
    if not seeds:
        return None
    tests = [
        [cell["scores"]["test"] for cell in tasks[task][labels]["cells"] if cell["arm"] == arm and cell["seed"] in seeds]
        for task in GROUPS[group]
    ]
    macro, micro = (fmean(fmean(test[metric] for test in of) for of in tests) for metric in ("macro_f1", "micro_f1"))
    return Mean(macro, micro, len(seeds))


def _seeds(tasks: Mapping[str, Any], group: str, labels: str, arm: str) -> set[int]:
    """Return the seeds that an arm has for every task of a group."""
    cells = [tasks.get(task, {}).get(labels, {"cells": []})["cells"] for task in GROUPS[group]]
    return set.intersection(*({cell["seed"] for cell in of if cell["arm"] == arm} for of in cells))


def _rung_cell(macro: float, micro: float, seeds: int, *, of: int) -> str:
    return f"{100 * macro:.1f} / {100 * micro:.1f}" + ("" if seeds == of else f" ({counted(seeds, 'seed')})")


def _rung_scores(experiment: Mapping[str, Any] | None, arms: Iterable[str]) -> list[tuple[float, float, int]] | None:
    """Return (macro-F1, micro-F1, number of seeds) of each arm, means over seeds; None if one is missing."""
    if experiment is None:
        return None
    tests = {arm: [cell["scores"]["test"] for cell in experiment["cells"] if cell["arm"] == arm] for arm in arms}
    if not all(tests.values()):
        return None
    return [(fmean(test["macro_f1"] for test in of), fmean(test["micro_f1"] for test in of), len(of)) for of in tests.values()]


def in_order(counts: Iterable[str]) -> list[str]:
    """Return the distinct numbers of labels in increasing order, "all" last."""
    return sorted(set(counts), key=lambda count: math.inf if count == ALL else int(count))


if __name__ == "__main__":
    printed: dict[str, Any] = {"rungs": (rungs, "rungs"), "means": (means, "rungs"), "controls": (summary, "quality")}
    table, file = printed[sys.argv[1]]
    print(table(json.loads((RESULTS / f"{file}-{sys.argv[2]}.json").read_bytes()), *sys.argv[3:]))
