"""Merge the results of several calls of bench_quality.py for a task and a number of labels: other seeds and arms are added.

A run is stored with its predictions of the test rows, a character each, so that arms of different calls are compared row by row.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cramlm.experiments.compare import Experiment
from cramlm.experiments.grid import Arm
from cramlm.experiments.results import CellResult, Pair, Usage, pairs_of, rows_of, totals_of
from cramlm.records import Emit
from cramlm.storage.artifacts import publish_file
from cramlm.storage.locks import lock, wait_while_locked

CHARACTERS: Final = string.digits + string.ascii_letters
SAME: Final = ("labels", "budget", "preset", "settings")


def add_to(target: Path, task: str, labels: str, experiment: Experiment, head: Mapping[str, Any], *, code: str, emit: Emit) -> None:
    """Add `experiment`, made by the commit `code`, to the file `target` with the fields of `head`; safe with parallel calls."""

    def add() -> None:
        with lock(target):
            tasks = json.loads(target.read_bytes())["tasks"] if target.exists() else {}
            experiments = tasks.setdefault(task, {})
            experiments[labels] = merged(experiments.get(labels), experiment, code)
            publish_file(target, (json.dumps({**head, "tasks": tasks}, indent=1, ensure_ascii=False) + "\n").encode())

    wait_while_locked(add, stage="results", emit=emit)


def merged(earlier: Mapping[str, Any] | None, experiment: Experiment, code: str) -> dict[str, Any]:
    """Return `experiment` as JSON values, with the runs of `earlier` that it does not have if budget and settings are equal.

    Every run has the commit that made it (None if unknown). A pair of arms without stored predictions keeps its earlier comparison.

    Raises:
        ValueError: if the test rows differ, or have more labels than there are characters.
    """
    grid = experiment.grid.as_dict()
    codes = {} if earlier is None else {(cell["arm"], cell["seed"]): cell.get("code") for cell in earlier["cells"]}
    codes |= {(result.arm, result.seed): code for result in experiment.results}
    if earlier is not None and all(earlier["grid"][name] == grid[name] for name in SAME):
        experiment = _combined(earlier, experiment)
    names = sorted({name for result in experiment.results for name in (*result.true, *result.predictions)})
    if len(names) > len(CHARACTERS):
        raise ValueError(f"{len(names)} labels; predictions can be stored for at most {len(CHARACTERS)}")
    cells = [
        result.as_dict() | {"code": codes[result.arm, result.seed], "predictions": _text(result.predictions, names)}
        for result in experiment.results
    ]
    return experiment.as_dict() | {"names": names, "cells": cells}


def _combined(earlier: Mapping[str, Any], experiment: Experiment) -> Experiment:
    new = {(result.arm, result.seed) for result in experiment.results}
    kept = [result for result in _read(earlier, experiment.results) if (result.arm, result.seed) not in new]
    order = [*dict.fromkeys([*(row["arm"] for row in earlier["rows"]), *(result.arm for result in experiment.results)])]
    results = sorted([*kept, *experiment.results], key=lambda result: (order.index(result.arm), result.seed))
    pairs = {frozenset((pair.arm, pair.other)): pair for pair in [*(Pair(**pair) for pair in earlier["pairs"]), *pairs_of(results)]}
    earlier_arms = [Arm(arm["name"], arm["source"], tuple(arm["settings"])) for arm in earlier["grid"]["arms"]]
    arms = {arm.name: arm for arm in [*earlier_arms, *experiment.grid.arms]}
    seeds = sorted({*earlier["grid"]["seeds"], *experiment.grid.seeds})
    grid = replace(experiment.grid, arms=tuple(arms.values()), seeds=tuple(seeds))
    rows = tuple(rows_of(results))
    return Experiment(grid, tuple(results), rows, tuple(pairs.values()), totals_of(results), experiment.failed)


def _text(predictions: Sequence[str], names: Sequence[str]) -> str:
    character = dict(zip(names, CHARACTERS, strict=False))
    return "".join(character[label] for label in predictions)


def _read(earlier: Mapping[str, Any], results: Sequence[CellResult]) -> Iterator[CellResult]:
    """Yield the runs of an earlier call; the true labels are those of `results`."""
    true = next((result.true for result in results if result.true), ())
    for cell in earlier["cells"]:
        text = cell.get("predictions", "")
        if text and true and len(text) != len(true):
            raise ValueError(f"{cell['arm']}, seed {cell['seed']}: predictions of {len(text)} test rows; there are {len(true)} now")
        predictions = tuple(earlier["names"][CHARACTERS.index(character)] for character in text)
        usage = None if cell["usage"] is None else Usage(**cell["usage"])
        kept = {name: value for name, value in cell.items() if name != "code"}
        yield CellResult(**kept | {"usage": usage, "predictions": predictions, "true": true if predictions else ()})
