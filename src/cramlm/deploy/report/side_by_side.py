"""Several runs on one page: scores with intervals, who is right where the other is not, costs, and which knobs differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cramlm.deploy.report.charts import Estimate, interval_chart
from cramlm.deploy.report.facts import RunFacts, read_run
from cramlm.deploy.report.markup import Cell, inline, missing, note, number, percent, power, section, table
from cramlm.deploy.report.overview import capital, chosen_baseline, duration, score_text, stage_seconds
from cramlm.errors import UsageError
from cramlm.evaluation.kinds import KINDS, NAMES, figure, is_percent, metric_of
from cramlm.records import TaskKind

_SPLITS = ("test", "dev")


def runs_page(paths: Sequence[Path]) -> tuple[str, str]:
    """(title, body) of the page of these runs; the first is the one that the others are compared with.

    Raises:
        ArtifactError: if one is no run, is damaged, or was written by another version.
    """
    runs = dict(zip(_names(paths), map(read_run, paths), strict=True))
    scored = {name: run for name, run in runs.items() if run.own_scores}
    title = f"{len(runs)} runs side by side"
    sections = [_scores(scored), _labels(scored), _costs(runs), _knobs(runs)]
    unfinished = [name for name, run in runs.items() if name not in scored]
    told = missing(f"Not evaluated yet, so without scores: {', '.join(unfinished)}.") if unfinished else ""
    foreign = len({str(_task_of(run)) for run in runs.values()}) > 1
    warned = missing("These runs are not of the same task data: their scores cannot be compared.") if foreign else ""
    head = f"<header><p class=kicker>cramlm runs</p><h1>{title}</h1>{warned}{told}</header>"
    return title, f"{head}<main>{''.join(sections)}</main><footer>Made by <code>cramlm report</code>. This file needs no network.</footer>"


def sign_test(one: int, other: int) -> float:
    """Two-sided probability of a split at least as uneven as one : other, if either were as likely."""
    total, few = one + other, min(one, other)
    return min(1.0, 2 * sum(math.comb(total, place) for place in range(few + 1)) / 2**total) if total else 1.0


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of folders, as short as tells them apart."""
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _task_of(run: RunFacts) -> Any:
    return next((run.stages[name].key["task"] for name in ("evaluation", "baseline") if name in run.stages), None)


def _kind_of(runs: Mapping[str, RunFacts]) -> TaskKind:
    """Raises UsageError if there are several."""
    kinds = {run.config.task.kind for run in runs.values()}
    if len(kinds) > 1:
        raise UsageError(f"these runs are of several kinds of task ({', '.join(sorted(kinds))}); make a page of each kind")
    return kinds.pop()


def _split_of(runs: Mapping[str, RunFacts]) -> str:
    """test if every run has it, else dev."""
    return next((split for split in _SPLITS if all(split in run.own_scores for run in runs.values())), "dev")


def _scores(runs: Mapping[str, RunFacts]) -> str:
    if not runs:
        return section("scores", "Scores", missing("None of these runs is evaluated."))
    split, kind = _split_of(runs), _kind_of(runs)
    main, second = metric_of(kind), KINDS[kind].metrics[0]
    shown = partial(figure, main)
    estimates = [_estimate(name, run.own_scores[split], main, emphasised=True) for name, run in runs.items()]
    estimates += [_estimate(name, scores, main, emphasised=False) for name, scores in _baselines(runs, split).items()]
    told = "; ".join(f"{row.name} {shown(row.value)} ({shown(row.low)} to {shown(row.high)})" for row in estimates)
    first_name, first = next(iter(runs.items()))
    rows: list[list[Cell | str]] = []
    for name, run in runs.items():
        own = run.own_scores
        leak_free = own.get("test_leak_free")
        figures = [_figure(own.get("dev"), main), *(_figure(own.get("test"), metric) for metric in (second, main))]
        rows.append([name, *figures, _figure(leak_free, main), *_against(run, first, split)])
    scored = [f"dev {NAMES[main]}", f"test {NAMES[second]}", f"test {NAMES[main]}"]
    header = ["run", *scored, "… not in train", "only this right", f"only {first_name} right", "p"]
    words = (
        f"The last columns count {split} rows that one of two models gets right and the other wrong; p is that of a sign test: how often "
        "chance alone would split them so unevenly. Of many runs, one will have a small p by chance."
    )
    return section(
        "scores",
        "Scores",
        interval_chart(f"{capital(NAMES[main])} on {split}, with 95 % intervals", told, estimates, percent=is_percent(main)),
        table("In percent, with 95 % intervals", header, rows),
        note(words),
    )


def _estimate(name: str, scores: Mapping[str, Any], metric: str, *, emphasised: bool) -> Estimate:
    low, high = scores["intervals"][metric]
    return Estimate(name, scores[metric], low, high, emphasised=emphasised)


def _baselines(runs: Mapping[str, RunFacts], split: str) -> dict[str, Mapping[str, Any]]:
    """The baseline that dev chose, of the first run of each task."""
    found: dict[str, Mapping[str, Any]] = {}
    seen = set()
    for name, run in runs.items():
        chosen, task = chosen_baseline(run), str(_task_of(run))
        if chosen is not None and run.scores is not None and task not in seen and split in run.scores["models"].get(chosen, {}):
            seen.add(task)
            found[f"{chosen} (chosen on dev{f', task of {name}' if found else ''})"] = run.scores["models"][chosen][split]
    return found


def _figure(scores: Mapping[str, Any] | None, metric: str) -> Cell:
    return Cell("–") if scores is None else Cell(score_text(scores, metric), order=scores[metric])


def _against(run: RunFacts, first: RunFacts, split: str) -> list[Cell]:
    if run is first or _task_of(run) != _task_of(first) or run.config.task.kind == "regression":  # no number is right to the last digit
        return [Cell("–")] * 3
    right = [[line["predicted"] == line["label"] for line in each.predictions[split]] for each in (run, first)]
    mine = sum(a and not b for a, b in zip(*right, strict=True))
    theirs = sum(b and not a for a, b in zip(*right, strict=True))
    chance = sign_test(mine, theirs)
    return [number(mine), number(theirs), Cell("< 0.001" if chance < 0.001 else f"{chance:.3f}", order=chance)]


def _labels(runs: Mapping[str, RunFacts]) -> str:
    if (
        len(runs) < 2
        or _kind_of(runs) == "regression"
        or len({tuple(run.scores["labels"]) for run in runs.values() if run.scores is not None}) > 1
    ):
        return ""
    split = _split_of(runs)
    tables = [run.own_scores[split]["per_class"] for run in runs.values()]
    rows: list[list[Cell | str]] = [
        [label, *(percent(each[label]["f1"]) if label in each else Cell("–") for each in tables), number(tables[0][label]["support"])]
        for label in tables[0]
    ]
    return section("labels", "Label by label", table(f"F1 on {split}", ["label", *runs, "texts"], rows))


def _costs(runs: Mapping[str, RunFacts]) -> str:
    rows: list[list[Cell | str]] = []
    for name, run in runs.items():
        spent, size = sum(stage_seconds(run).values()), (run.provenance or {}).get("parameters")
        tokens = sum(report["tokens"] for report in run.phases.values())
        flops = sum(report["executed_flops"] for report in run.phases.values())
        passages = 0 if run.selection is None else run.selection["documents"]["selected"]
        cells = [Cell("–") if size is None else Cell(f"{size / 1e6:.1f} M", order=size), number(passages), number(tokens)]
        cells += [Cell(power(flops) if flops else "–", order=flops), Cell(duration(spent), order=spent)]
        rows.append([name, *cells])
    header = ["run", "parameters", "passages retrieved", "tokens trained on", "FLOPs executed", "time, all stages"]
    return section("costs", "Costs", table("What each run took", header, rows))


def _knobs(runs: Mapping[str, RunFacts]) -> str:
    flat = [_flat(run.config.model_dump(mode="json")) for run in runs.values()]
    names = list(dict.fromkeys(name for each in flat for name in each))
    rows: list[list[Cell | str]] = [
        [name, *(_value(each[name]) if name in each else Cell("–") for each in flat)]
        for name in names
        if len({each.get(name) for each in flat}) > 1
    ]
    if not rows:
        return section("knobs", "What differs", missing("Nothing: the configs are equal."))
    columns = range(len(runs) + 1)
    return section(
        "knobs", "What differs", table("Knobs that are not the same in all of them", ["knob", *runs], rows, text_columns=columns)
    )


def _value(text: str) -> Cell:
    return Cell(inline(text))


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """'phases[joint].steps' -> its value as text."""
    if isinstance(value, dict):
        return {key: text for inner, each in value.items() for key, text in _flat(each, f"{name}.{inner}".lstrip(".")).items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {key: text for place, each in enumerate(value) for key, text in _flat(each, f"{name}[{each.get('name', place)}]").items()}
    return {name: "unset" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)}
