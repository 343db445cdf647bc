"""Several runs side by side as plain data: scores with intervals, who is right where the other is not, costs, settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cramlm.errors import UsageError
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, main_metric
from cramlm.records import TaskKind
from cramlm.reporting.charts import Estimate
from cramlm.reporting.record import LINEAR_STAGES, Json, RunRecord, read_run, task_used
from cramlm.reporting.sections import capital, score_chart

_SPLITS = ("test", "dev")


@dataclass(frozen=True, slots=True)
class Against:
    """Rows that one of two models gets right and the other wrong, and the p of a sign test."""

    only_this: int
    only_first: int
    p: float


@dataclass(frozen=True, slots=True)
class RunScores:
    """own: the scores of the run's model by split. recommended: the model that the run's verdict recommends. against: the first run."""

    name: str
    own: Json
    recommended: str
    against: Against | None


@dataclass(frozen=True, slots=True)
class Scores:
    """main, second: metrics. first: the name of the run that the others are compared with, on `split`."""

    split: str
    main: str
    second: str
    first: str
    chart: Markup
    rows: Sequence[RunScores]


@dataclass(frozen=True, slots=True)
class Labels:
    """Scores of each label on `split`, by run. first: those of the first run."""

    split: str
    runs: Mapping[str, Json]
    first: Json


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run took. parameters: None if it is not finished."""

    parameters: int | None
    passages: int
    tokens: int
    flops: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """runs: names. foreign: True if they are not of the same task data. scores, labels: None where there is nothing to show.

    settings: the value in each run of every setting that differs, None where the run has no such setting.
    """

    runs: Sequence[str]
    foreign: bool
    unfinished: Sequence[str]
    scores: Scores | None
    labels: Labels | None
    costs: Mapping[str, Cost]
    settings: Mapping[str, Sequence[str | None]]


def compare_runs(paths: Sequence[Path]) -> Comparison:
    """Read the runs at `paths`; the first is the one that the others are compared with.

    Raises:
        ArtifactError: if one is no run, is damaged, or was written by another version. UsageError: if they are of several kinds of task.
    """
    runs = dict(zip(_names(paths), map(read_run, paths), strict=True))
    scored = {name: run for name, run in runs.items() if run.own_scores}
    tasks = [task_used(run.stages) for run in runs.values()]
    return Comparison(
        runs=list(runs),
        foreign=any(first[split] != other[split] for first in tasks for other in tasks for split in first.keys() & other.keys()),
        unfinished=[name for name in runs if name not in scored],
        scores=_scores(scored) if scored else None,
        labels=_labels(scored),
        costs={name: _cost(run) for name, run in runs.items()},
        settings=_settings(runs),
    )


def sign_test(one: int, other: int) -> float:
    """Two-sided probability of a split at least as uneven as one : other, if either were as likely."""
    from scipy.stats import binomtest

    return float(binomtest(one, one + other).pvalue) if one + other else 1.0


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of folders, as short as tells them apart."""
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _kind_of(runs: Mapping[str, RunRecord]) -> TaskKind:
    """Raises UsageError if there are several."""
    kinds = {run.config.task.kind for run in runs.values()}
    if len(kinds) > 1:
        raise UsageError(f"these runs are of several kinds of task ({', '.join(sorted(kinds))}); make a page of each kind")
    return kinds.pop()


def _split_of(runs: Mapping[str, RunRecord]) -> str:
    """test if every run has it, else dev."""
    return next((split for split in _SPLITS if all(split in run.own_scores for run in runs.values())), "dev")


def _scores(runs: Mapping[str, RunRecord]) -> Scores:
    split, kind = _split_of(runs), _kind_of(runs)
    main, second = main_metric(kind), KINDS[kind].table_metrics[0]
    estimates = [_estimate(name, run.own_scores[split], main, emphasised=True) for name, run in runs.items()]
    estimates += [_estimate(name, scores, main, emphasised=False) for name, scores in _linear_models(runs, split).items()]
    first_name, first = next(iter(runs.items()))
    return Scores(
        split=split,
        main=main,
        second=second,
        first=first_name,
        chart=score_chart(f"{capital(METRIC_NAMES[main])} on {split}, with 95 % intervals", main, estimates),
        rows=[RunScores(name, run.own_scores, _recommended(run), _against(run, first, split)) for name, run in runs.items()],
    )


def _recommended(run: RunRecord) -> str:
    return "–" if run.scores is None else str(run.scores["comparison"]["recommended"])


def _estimate(name: str, scores: Json, metric: str, *, emphasised: bool) -> Estimate:
    low, high = scores["intervals"][metric]
    return Estimate(name, scores[metric], low, high, emphasised=emphasised)


def _linear_models(runs: Mapping[str, RunRecord], split: str) -> dict[str, Json]:
    """Each linear model that is not a run of its own here, from the first run of each task that has it."""
    found: dict[str, Json] = {}
    seen: set[tuple[str, str]] = {(run.config.model, str(task_used(run.stages))) for run in runs.values()}
    several = len({task for _, task in seen}) > 1
    for name, run in runs.items():
        task = str(task_used(run.stages))
        for model in LINEAR_STAGES:
            if (model, task) not in seen and split in run.others.get(model, {}):
                seen.add((model, task))
                found[f"{model} (task of {name})" if several else f"{model} (fitted beside {name})"] = run.others[model][split]
    return found


def _against(run: RunRecord, first: RunRecord, split: str) -> Against | None:
    """None for the first run itself, for another task, and for numbers, of which none is right to the last digit."""
    if run is first or task_used(run.stages) != task_used(first.stages) or run.config.task.kind == "regression":
        return None
    right = [[line["predicted"] == line["label"] for line in each.predictions[split]] for each in (run, first)]
    mine = sum(a and not b for a, b in zip(*right, strict=True))
    theirs = sum(b and not a for a, b in zip(*right, strict=True))
    return Against(mine, theirs, sign_test(mine, theirs))


def _labels(runs: Mapping[str, RunRecord]) -> Labels | None:
    if len(runs) < 2 or _kind_of(runs) == "regression":
        return None
    if len({tuple(run.scores["labels"]) for run in runs.values() if run.scores is not None}) > 1:
        return None
    split = _split_of(runs)
    per_class = {name: run.own_scores[split]["per_class"] for name, run in runs.items()}
    return Labels(split, per_class, next(iter(per_class.values())))


def _cost(run: RunRecord) -> Cost:
    return Cost(
        parameters=(run.provenance or {}).get("parameters"),
        passages=0 if run.selection is None else run.selection["documents"]["selected"],
        tokens=sum(report["tokens"] for report in run.phases.values()),
        flops=sum(report["executed_flops"] for report in run.phases.values()),
        seconds=sum(run.seconds.values()),
    )


def _settings(runs: Mapping[str, RunRecord]) -> dict[str, Sequence[str | None]]:
    flat = [_flat(run.config.model_dump(mode="json")) for run in runs.values()]
    names = dict.fromkeys(name for each in flat for name in each)
    values = {name: [each.get(name) for each in flat] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """'phases[joint].steps' -> its value as text."""
    if isinstance(value, dict):
        return {key: text for inner, each in value.items() for key, text in _flat(each, f"{name}.{inner}".lstrip(".")).items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {key: text for place, each in enumerate(value) for key, text in _flat(each, f"{name}[{each.get('name', place)}]").items()}
    return {name: "unset" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)}
