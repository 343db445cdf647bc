"""The comparison of several runs, each by the model that predicts, as plain data: scores with intervals, sign tests, costs, settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from cramlm.errors import UsageError
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, main_metric
from cramlm.records import TaskKind
from cramlm.reporting.record import LINEAR_STAGES, Json, RunRecord, read_run, task_used
from cramlm.reporting.sections import Data, capital, estimate_of, score_chart

_SPLITS = ("test", "dev")
_EVALUATED, _TRAINED_ON = (*_SPLITS, "labels"), ("train", "unlabelled")  # of the fingerprint of a task


def compare_runs(paths: Sequence[Path]) -> Data:
    """Read the runs at `paths` and compare them with the first one.

    different_data: True if the runs are evaluated on different data. different_training: True if they are trained on different texts of
    the task. scores, labels: None if there is nothing to show. settings: the values of every setting that differs, one per run, None for
    a run without it.

    Raises:
        ArtifactError: if a folder is not a run, is damaged, or was written by another version. UsageError: if the kinds of task differ.
    """
    runs = dict(zip(names_of(paths), map(read_run, paths), strict=True))
    scored = {name: run for name, run in runs.items() if run.scores is not None}
    tasks = [task for run in runs.values() if (task := task_used(run.stages))]
    return {
        "runs": list(runs),
        "different_data": any(len({task[name] for task in tasks if name in task}) > 1 for name in _EVALUATED),
        "different_training": any(len({task.get(name) for task in tasks}) > 1 for name in _TRAINED_ON),
        "unfinished": [name for name in runs if name not in scored],
        "scores": _scores(scored) if scored else None,
        "labels": _labels(scored),
        "costs": {name: _cost(run) for name, run in runs.items()},
        "settings": _settings(runs),
    }


def sign_test(one: int, other: int) -> float:
    """Return the two-sided p of a sign test: the probability of a split at least as uneven as one : other."""
    from scipy.stats import binomtest

    return float(binomtest(one, one + other).pvalue) if one + other else 1.0


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the names of folders; if they are not unique, their paths without the parts that all share at the start and the end."""
    parts = [path.resolve().parts for path in paths]
    different = set(parts)
    names = [each[-1] for each in parts]
    if len(set(names)) == len(different):
        return names
    start = _shared(each[:-1] for each in different)
    end = _shared(each[:start:-1] for each in different)
    return ["/".join(each[start : len(each) - end]) for each in parts]


def _shared(rows: Iterable[Sequence[str]]) -> int:
    """Return the length of the longest common prefix of the rows."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))


def _kind_of(runs: Mapping[str, RunRecord]) -> TaskKind:
    """Return the kind of task of all runs; raise UsageError if there are several."""
    kinds = {run.config.task.kind for run in runs.values()}
    if len(kinds) > 1:
        raise UsageError(f"these runs have different kinds of task ({', '.join(sorted(kinds))}); write a report for each kind")
    return kinds.pop()


def _split_of(runs: Mapping[str, RunRecord]) -> str:
    """Return test if every run has it, else dev."""
    return next((split for split in _SPLITS if all(split in run.predictor_scores for run in runs.values())), "dev")


def _scores(runs: Mapping[str, RunRecord]) -> Data:
    """Return the scores of the runs, and in the chart also those of their encoders and linear models.

    For each run, name: of the run and of the model that predicts. own: scores by split. recommended: the model that its verdict recommends.
    against: the sign test against the first run.
    """
    split, kind = _split_of(runs), _kind_of(runs)
    main, second = main_metric(kind), KINDS[kind].table_metrics[0]
    names = {name: f"{name}: {run.predictor}" for name, run in runs.items()}
    estimates = [estimate_of(names[name], run.predictor_scores[split], main, emphasised=True) for name, run in runs.items()]
    encoders = {
        f"{run.config.name} (fitted in {name})": run.own_scores[split] for name, run in runs.items() if run.predictor != run.config.name
    }
    others = {**encoders, **_linear_models(runs, split)}
    estimates += [estimate_of(name, scores, main, emphasised=False) for name, scores in others.items()]
    first_name, first = next(iter(runs.items()))
    return {
        "split": split,
        "kind": kind,
        "main": main,
        "second": second,
        "first": first_name,
        "chart": score_chart(f"{capital(METRIC_NAMES[main])} on {split}, with 95 % intervals", main, estimates),
        "rows": [
            {
                "name": names[name],
                "own": run.predictor_scores,
                "recommended": (run.scores or {})["comparison"]["recommended"],
                "against": _against(run, first, split),
            }
            for name, run in runs.items()
        ],
    }


def _linear_models(runs: Mapping[str, RunRecord], split: str) -> dict[str, Json]:
    """Return for each task the scores of the linear models that are not runs themselves, from the first run that fitted them."""
    scores: dict[str, Json] = {}
    seen: set[tuple[str, str]] = {(run.config.model, str(task_used(run.stages))) for run in runs.values()}
    several = len({task for _, task in seen}) > 1
    for name, run in runs.items():
        task = str(task_used(run.stages))
        for model in LINEAR_STAGES:
            if (model, task) not in seen and split in run.models.get(model, {}):
                seen.add((model, task))
                scores[f"{model} (task of {name})" if several else f"{model} (fitted in {name})"] = run.models[model][split]
    return scores


def _against(run: RunRecord, first: RunRecord, split: str) -> Data | None:
    """Return how many rows only this run and only the first run predicts correctly, and the p of a sign test.

    None for the first run itself, for other rows of the split, and for a regression.
    """
    if run is first or task_used(run.stages)[split] != task_used(first.stages)[split] or run.config.task.kind == "regression":
        return None
    correct = [[line["predicted"] == line["label"] for line in each.predictions[split]] for each in (run, first)]
    only_this = sum(a and not b for a, b in zip(*correct, strict=True))
    only_first = sum(b and not a for a, b in zip(*correct, strict=True))
    return {"only_this": only_this, "only_first": only_first, "p": sign_test(only_this, only_first)}


def _labels(runs: Mapping[str, RunRecord]) -> Data | None:
    """Return the scores of each label by run; None unless several runs have the same labels. first: the scores of the first run."""
    if len(runs) < 2 or _kind_of(runs) == "regression":
        return None
    if len({tuple(run.scores["labels"]) for run in runs.values() if run.scores is not None}) > 1:
        return None
    split = _split_of(runs)
    per_class = {name: run.predictor_scores[split]["per_class"] for name, run in runs.items()}
    return {"split": split, "runs": per_class, "first": next(iter(per_class.values()))}


def _cost(run: RunRecord) -> Data:
    return {
        "parameters": (run.provenance or {}).get("parameters"),
        "passages": 0 if run.selection is None else run.selection["documents"]["selected"],
        "tokens": sum(report["tokens"] for report in run.phases.values()),
        "flops": sum(report["executed_flops"] for report in run.phases.values()),
        "seconds": sum(run.seconds.values()),
    }


def _settings(runs: Mapping[str, RunRecord]) -> dict[str, Sequence[str | None]]:
    flat = [_flat(run.config.model_dump(mode="json")) for run in runs.values()]
    names = dict.fromkeys(name for each in flat for name in each)
    values = {name: [each.get(name) for each in flat] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Return values as text by dotted name, like 'phases[joint].steps'."""
    if isinstance(value, dict):
        return {key: text for inner, each in value.items() for key, text in _flat(each, f"{name}.{inner}".lstrip(".")).items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {key: text for number, each in enumerate(value) for key, text in _flat(each, f"{name}[{each.get('name', number)}]").items()}
    return {name: "unset" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)}
