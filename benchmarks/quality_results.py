"""What bench_quality.py knows of one task and number of labels, over several calls: other seeds and other arms of a question add up.

A run is kept with its predictions to the test rows, a character for each, so that arms of different calls are compared row by row.
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
from cramlm.storage.artifacts import lock, publish_file, wait_while_locked

CHARACTERS: Final = string.digits + string.ascii_letters
SAME: Final = ("labels", "budget", "preset", "settings")


def add_to(target: Path, task: str, labels: str, experiment: Experiment, head: Mapping[str, Any], *, code: str, emit: Emit) -> None:
    """Add `experiment`, whose runs `code` made, to the file `target`, under `head`; calls of other tasks may do so beside this one."""

    def add() -> None:
        with lock(target):
            tasks = json.loads(target.read_bytes())["tasks"] if target.exists() else {}
            experiments = tasks.setdefault(task, {})
            experiments[labels] = added(experiments.get(labels), experiment, code)
            publish_file(target, (json.dumps({**head, "tasks": tasks}, indent=1, ensure_ascii=False) + "\n").encode())

    wait_while_locked(add, stage="results", emit=emit)


def added(known: Mapping[str, Any] | None, experiment: Experiment, code: str) -> dict[str, Any]:
    """As plain JSON, `experiment` and the runs of `known` that it does not have; without these where budget or settings were others.

    Every run has the `code` that made it (None where that was not kept).

    A pair of arms without predictions on both sides (they were not always kept) stays as it was found.

    Raises:
        ValueError: if the test rows were others, or have more labels than there are characters.
    """
    grid = experiment.grid.as_dict()
    codes = {} if known is None else {(cell["arm"], cell["seed"]): cell.get("code") for cell in known["cells"]}
    codes |= {(result.arm, result.seed): code for result in experiment.results}
    if known is not None and all(known["grid"][name] == grid[name] for name in SAME):
        experiment = _together(known, experiment)
    names = sorted({name for result in experiment.results for name in (*result.true, *result.predictions)})
    if len(names) > len(CHARACTERS):
        raise ValueError(f"{len(names)} labels; predictions are kept for {len(CHARACTERS)} at the most")
    cells = [
        result.as_dict() | {"code": codes[result.arm, result.seed], "predictions": _text(result.predictions, names)}
        for result in experiment.results
    ]
    return experiment.as_dict() | {"names": names, "cells": cells}


def _together(known: Mapping[str, Any], experiment: Experiment) -> Experiment:
    have = {(result.arm, result.seed) for result in experiment.results}
    earlier = [result for result in _read(known, experiment.results) if (result.arm, result.seed) not in have]
    order = [*dict.fromkeys([*(row["arm"] for row in known["rows"]), *(result.arm for result in experiment.results)])]
    results = sorted([*earlier, *experiment.results], key=lambda result: (order.index(result.arm), result.seed))
    pairs = {frozenset((pair.arm, pair.other)): pair for pair in [*(Pair(**pair) for pair in known["pairs"]), *pairs_of(results)]}
    asked = [Arm(arm["name"], arm["source"], tuple(arm["settings"])) for arm in known["grid"]["arms"]]
    arms = {arm.name: arm for arm in [*asked, *experiment.grid.arms]}
    seeds = sorted({*known["grid"]["seeds"], *experiment.grid.seeds})
    grid = replace(experiment.grid, arms=tuple(arms.values()), seeds=tuple(seeds))
    rows = tuple(rows_of(results))
    return Experiment(grid, tuple(results), rows, tuple(pairs.values()), totals_of(results), experiment.failed)


def _text(predictions: Sequence[str], names: Sequence[str]) -> str:
    character = dict(zip(names, CHARACTERS, strict=False))
    return "".join(character[answer] for answer in predictions)


def _read(known: Mapping[str, Any], results: Sequence[CellResult]) -> Iterator[CellResult]:
    """The runs of an earlier call; what is true is the same for all, and is not kept."""
    true = next((result.true for result in results if result.true), ())
    for cell in known["cells"]:
        told = cell.get("predictions", "")
        if told and true and len(told) != len(true):
            raise ValueError(f"{cell['arm']}, seed {cell['seed']}: {len(told)} test rows were answered; there are {len(true)} now")
        predictions = tuple(known["names"][CHARACTERS.index(character)] for character in told)
        usage = None if cell["usage"] is None else Usage(**cell["usage"])
        kept = {name: value for name, value in cell.items() if name != "code"}
        yield CellResult(**kept | {"usage": usage, "predictions": predictions, "true": true if predictions else ()})
