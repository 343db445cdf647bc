"""The tables of scores in the README and in docs/benchmarks/quality.md, from the results of bench_quality.py.

    python benchmarks/quality_tables.py 2e13flops
    python benchmarks/quality_tables.py rungs 2e13flops
    python benchmarks/quality_tables.py means 2e13flops

The first call prints a summary of means, a table for each number of labels (rows are arms, columns tasks, cells test macro-F1), and the
commits that made the runs. The second prints macro- and micro-F1 of the models by increasing cost, from results/rungs-BUDGET.json (with
`linear` in place of `rungs`, of the linear models alone, from results/linear-BUDGET.json); the third their means over development and
confirmation tasks, which the README shows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from cramlm.experiments.grid import ALL
from cramlm.experiments.results import Summary, score_text

RESULTS: Final = Path(__file__).parent / "results"
SIGNIFICANT: Final = 0.05
METRIC: Final = "test macro_f1"
FIRST: Final = "tlm"
RUNGS: Final = {"tfidf": "tfidf", "bayes": "bayes", "static": "static", "tlm-plain": "tlm-plain", "tlm": "tlm", "tlm combined": "combined"}
"""Arm -> column of the table of models, cheapest first."""
GROUPS: Final = {
    "development": ("chemprot", "citation_intent", "sciie", "agnews_small", "sst2", "masakhanews_yor", "newsgroups20"),
    "confirmation": ("trec", "scicite", "cr", "masakhanews_ibo"),
}
"""The tasks that settings were developed on, and those that are scored once per release."""
Run = tuple[str, str, int]  # number of labels, task, seed


def tables(measured: Mapping[str, Any]) -> str:
    """Return Markdown tables; * marks a difference to `tlm` with p < 0.05, corrected for all arms of that task and number of labels."""
    tasks = measured["tasks"]
    counts = in_order(labels for experiments in tasks.values() for labels in experiments)
    of_count = {labels: {task: experiments[labels] for task, experiments in tasks.items() if labels in experiments} for labels in counts}
    return "\n\n".join("\n".join(_table(experiments, labels)) for labels, experiments in of_count.items())


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


def rungs(measured: Mapping[str, Any]) -> str:
    """Return a Markdown table for each number of labels, the confirmation tasks in one of their own.

    Rows are tasks, columns the models of `RUNGS` that were measured, cells test macro- and micro-F1, means over seeds; a cell of fewer
    seeds than the task's others says so. Tasks without results for a model are omitted. The last row is the mean over tasks.
    """
    parts = []
    counts = in_order(labels for experiments in measured["tasks"].values() for labels in experiments)
    for labels, confirming in product(counts, (False, True)):
        tasks = {task: of for task, of in measured["tasks"].items() if (task in GROUPS["confirmation"]) == confirming}
        arms = {cell["arm"] for experiments in tasks.values() for cell in experiments.get(labels, {"cells": []})["cells"]}
        columns = {arm: name for arm, name in RUNGS.items() if arm in arms}
        lines = {task: line for task, experiments in tasks.items() if (line := _rung_scores(experiments.get(labels), columns)) is not None}
        if not lines:
            continue
        seeds = {task: len({cell["seed"] for cell in tasks[task][labels]["cells"]}) for task in lines}
        names = {task: task if len(set(seeds.values())) == 1 else f"{task}, {_count_of(seeds[task])}" for task in lines}
        mean = [tuple(fmean(scores[metric] for scores in column) for metric in (0, 1)) for column in zip(*lines.values(), strict=True)]
        head = f"| {labels} labels, {_count_of(min(seeds.values()))} | {' | '.join(columns.values())} |"
        cells = [
            f"| {names[task]} | {' | '.join(_rung_cell(*scores, of=seeds[task]) for scores in line)} |" for task, line in lines.items()
        ]
        cells.append(f"| mean of {len(lines)} | {' | '.join(f'{100 * macro:.1f} / {100 * micro:.1f}' for macro, micro in mean)} |")
        parts.append("\n".join([head, "|---" * (len(columns) + 1) + "|", *cells]))
    return "\n\n".join(parts)


def means(measured: Mapping[str, Any]) -> str:
    """Return a Markdown table: rows are models (`RUNGS`), columns numbers of labels by group of tasks, cells means of test macro- and
    micro-F1 over the seeds of `tlm`; a cell of fewer seeds says so. "Not measured" unless all tasks of the group have scores of the model.
    A column without `tlm` is omitted.
    """
    tasks = measured["tasks"]
    columns = [(group, labels) for group in GROUPS for labels in ("100", "500", ALL) if _group_seeds(tasks, GROUPS[group], labels)]
    heads = [
        f"{len(GROUPS[group])} {group} tasks, {labels} labels, {_count_of(len(_group_seeds(tasks, GROUPS[group], labels)))}"
        for group, labels in columns
    ]
    lines = [f"| macro-F1 / micro-F1 | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for arm, name in RUNGS.items():
        cells = (_group_mean(tasks, GROUPS[group], labels, arm) for group, labels in columns)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _group_seeds(tasks: Mapping[str, Any], group: Iterable[str], labels: str, arm: str = FIRST) -> set[int]:
    """Return the seeds that `arm` has for every task of a group."""
    cells = [tasks.get(task, {}).get(labels, {"cells": []})["cells"] for task in group]
    return set.intersection(*({cell["seed"] for cell in of if cell["arm"] == arm} for of in cells))


def _group_mean(tasks: Mapping[str, Any], group: Iterable[str], labels: str, arm: str) -> str:
    found = [tasks.get(task, {}).get(labels, {"cells": []})["cells"] for task in group]
    wanted = _group_seeds(tasks, group, labels)
    seeds = wanted & _group_seeds(tasks, group, labels, arm)
    if not seeds:
        return "not measured"
    tests = [[cell["scores"]["test"] for cell in cells if cell["arm"] == arm and cell["seed"] in seeds] for cells in found]
    macro, micro = (fmean(fmean(test[metric] for test in of) for of in tests) for metric in ("macro_f1", "micro_f1"))
    return _rung_cell(macro, micro, len(seeds), of=len(wanted))


def _rung_cell(macro: float, micro: float, seeds: int, *, of: int) -> str:
    return f"{100 * macro:.1f} / {100 * micro:.1f}" + ("" if seeds == of else f" ({_count_of(seeds)})")


def _rung_scores(experiment: Mapping[str, Any] | None, arms: Iterable[str]) -> list[tuple[float, float, int]] | None:
    """Return (macro-F1, micro-F1, number of seeds) of each arm, means over seeds; None if one is missing."""
    if experiment is None:
        return None
    tests = {arm: [cell["scores"]["test"] for cell in experiment["cells"] if cell["arm"] == arm] for arm in arms}
    if not all(tests.values()):
        return None
    return [(fmean(test["macro_f1"] for test in of), fmean(test["micro_f1"] for test in of), len(of)) for of in tests.values()]


def commits(measured: Mapping[str, Any]) -> str:
    """Return a sentence that lists the commits with their runs; labels and tasks only if several commits made the runs of an arm."""
    made: dict[str, dict[str, set[Run]]] = {}  # commit -> arm -> where
    everywhere: dict[str, set[Run]] = {}
    for task, experiments in measured["tasks"].items():
        for labels, experiment in experiments.items():
            for cell in experiment["cells"]:
                run = (labels, task, cell["seed"])
                made.setdefault(cell.get("code") or "a commit that was not kept", {}).setdefault(cell["arm"], set()).add(run)
                everywhere.setdefault(cell["arm"], set()).add(run)
    return f"Runs of {'; of '.join(f'{code}: {_arms(arms, everywhere)}' for code, arms in made.items())}."


def _arms(of: Mapping[str, set[Run]], everywhere: Mapping[str, set[Run]]) -> str:
    where: dict[str, list[str]] = {}
    for arm, runs in of.items():
        where.setdefault("" if runs == everywhere[arm] else f" ({_describe(runs, everywhere[arm])})", []).append(arm)
    return ", ".join(", ".join(arms) + runs for runs, arms in where.items())


def _describe(runs: set[Run], every: set[Run]) -> str:
    """Return text like `100 labels; 500 labels of news, films with seed 2`; tasks and seeds only if there are others."""
    parts = []
    for labels in in_order(labels for labels, _, _ in runs):
        some, there = ({(task, seed) for at, task, seed in those if at == labels} for those in (runs, every))
        tasks = [_seeds(task, some, there) for task in dict.fromkeys(task for task, _ in sorted(some))]
        parts.append(f"{labels} labels" + ("" if some == there else f" of {', '.join(tasks)}"))
    return "; ".join(parts)


def _seeds(task: str, some: set[tuple[str, int]], there: set[tuple[str, int]]) -> str:
    mine, all_ = (sorted(seed for at, seed in those if at == task) for those in (some, there))
    return task if mine == all_ else f"{task} with seed{'s' * (len(mine) > 1)} {' and '.join(map(str, mine))}"


def in_order(counts: Iterable[str]) -> list[str]:
    """Return the distinct numbers of labels in increasing order, "all" last."""
    return sorted(set(counts), key=lambda count: math.inf if count == ALL else int(count))


def _table(experiments: Mapping[str, Any], labels: str) -> Iterator[str]:
    rows = {(task, row["arm"]): row for task in experiments for row in experiments[task]["rows"]}
    here = [task for task in experiments if (task, FIRST) in rows]
    arms = sorted(dict.fromkeys(arm for task in here for of, arm in rows if of == task), key=lambda arm: _is_baseline(rows, arm))
    seeds = {task: len(rows[task, FIRST]["seeds"]) for task in here}
    names = {task: task if len(set(seeds.values())) == 1 else f"{task}, {_count_of(seeds[task])}" for task in here}
    yield f"| {labels} labels | {' | '.join(names.values())} | mean | CPU minutes | operations |"
    yield "|---" * (len(here) + 4) + "|"
    for arm in arms:
        across = [(task, rows.get((task, arm))) for task in here]
        cells = [
            "" if row is None else f"{score_text(Summary(**row['scores'][METRIC]))}{_star(experiments[task], arm)}" for task, row in across
        ]
        fewer = {len(row["seeds"]) for task, row in across if row is not None and len(row["seeds"]) != seeds[task]}
        name = ", ".join([arm, *(_count_of(count) for count in sorted(fewer))])
        yield f"| {name} | {' | '.join([*cells, *_means([row for _, row in across])])} |"


def _count_of(seeds: int) -> str:
    return f"{seeds} seed{'s' * (seeds > 1)}"


def _is_baseline(rows: Mapping[tuple[str, str], Mapping[str, Any]], arm: str) -> bool:
    return any(row["is_baseline"] for (_, name), row in rows.items() if name == arm)


def _means(rows: list[Mapping[str, Any] | None]) -> tuple[str, str, str]:
    """Return means of score, minutes and operations over the tasks; empty if one is missing. ≥: the time of a killed start is missing."""
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        return "", "", ""
    score = f"{100 * fmean(row['scores'][METRIC]['mean'] for row in present):.1f}"
    if any(row["cpu_minutes"] is None for row in present):
        return score, "", ""
    operations = f"{fmean(row['executed_flops'] for row in present):.1e}".replace("+", "")
    at_least = "" if all(row["complete"] for row in present) else "≥ "
    return score, f"{at_least}{fmean(row['cpu_minutes'] for row in present):.1f}", operations


def _star(experiment: Mapping[str, Any], arm: str) -> str:
    pairs = (pair for pair in experiment["pairs"] if {pair["arm"], pair["other"]} == {arm, FIRST})
    return "*" if any(pair["p_holm"] < SIGNIFICANT for pair in pairs) else ""


if __name__ == "__main__":
    if sys.argv[1] in ("rungs", "linear", "means"):
        file = f"{'linear' if sys.argv[1] == 'linear' else 'rungs'}-{sys.argv[2]}.json"
        print((means if sys.argv[1] == "means" else rungs)(json.loads((RESULTS / file).read_bytes())))
        sys.exit()
    results = json.loads((RESULTS / f"quality-{sys.argv[1]}.json").read_bytes())
    print(f"{summary(results)}\n\n{tables(results)}\n\n{commits(results)}")
