"""Results of a call of bench_quality.py are merged with those of earlier calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cramlm.experiments.compare import Experiment
from cramlm.experiments.grid import Arm, Grid
from cramlm.experiments.results import CellResult, Usage, pairs_of, rows_of, totals_of
from cramlm.records import silent
from quality_results import add_to, merged

TRUE = ("news", "sport") * 20
RIGHT, HALF, WRONG = TRUE, ("news",) * 40, ("sport", "news") * 20


def run(arm: str, seed: int, predictions: Sequence[str], macro_f1: float) -> CellResult:
    usage = Usage(seconds=60.0 * seed, cpu_seconds=30.0, starts=1)
    flops = {"paper": 2e12, "executed": 1e12}
    return CellResult(arm, "100", seed, {"test": {"macro_f1": macro_f1}}, usage, flops, 1000, 5, 80.0, TRUE, tuple(predictions))


def experiment(*runs: CellResult, settings: tuple[str, ...] = ()) -> Experiment:
    arms, seeds = dict.fromkeys(each.arm for each in runs), dict.fromkeys(each.seed for each in runs)
    grid = Grid(tuple(Arm(arm, arm) for arm in arms), tuple(seeds), ("100",), {"train": "train.jsonl"}, settings=settings)
    return Experiment(grid, runs, tuple(rows_of(runs)), tuple(pairs_of(runs)), totals_of(runs), {})


def add(earlier: dict[str, Any] | None, *runs: CellResult, settings: tuple[str, ...] = (), code: str = "c0ffee1") -> dict[str, Any]:
    """Merge, as read from the file."""
    return dict(json.loads(json.dumps(merged(earlier, experiment(*runs, settings=settings), code))))


def test_two_calls_give_the_result_of_one_call() -> None:
    runs = [run("tlm", 1, RIGHT, 1.0), run("tlm", 2, HALF, 0.6), run("plm", 1, WRONG, 0.0), run("plm", 2, RIGHT, 1.0)]
    tlm_1, tlm_2, plm_1, plm_2 = runs
    at_once = add(None, *runs)
    assert add(add(None, tlm_1, plm_1), tlm_2, plm_2) == at_once
    assert add(add(None, tlm_1, tlm_2), plm_1, plm_2) == at_once


def test_parallel_calls_lose_nothing(tmp_path: Path) -> None:
    target, head = tmp_path / "quality-1m.json", {"budget": "1m", "threads": 1}
    tasks = [f"task {number}" for number in range(16)]

    def call(task: str) -> None:
        add_to(target, task, "100", experiment(run("tlm", 1, HALF, 0.6)), head, code="c0ffee1", emit=silent)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, tasks))
    results = json.loads(target.read_bytes())
    assert (results["budget"], results["threads"]) == ("1m", 1)
    assert sorted(results["tasks"]) == sorted(tasks)
    assert all(results["tasks"][task] == {"100": add(None, run("tlm", 1, HALF, 0.6))} for task in tasks)


def test_a_repeated_run_replaces_the_earlier_one_and_every_run_has_the_commit_that_made_it() -> None:
    once = add(None, run("tlm", 1, WRONG, 0.0), run("tlm", 2, RIGHT, 1.0), code="c0ffee1")
    again = add(once, run("tlm", 1, HALF, 0.6), run("tlm", 3, HALF, 0.6), code="decade2")
    assert again["rows"][0]["scores"]["test macro_f1"]["values"] == [0.6, 1.0, 0.6]
    assert [(cell["seed"], cell["code"]) for cell in again["cells"]] == [(1, "decade2"), (2, "c0ffee1"), (3, "decade2")]
    del once["cells"][0]["code"]
    assert [cell["code"] for cell in add(once, run("tlm", 3, RIGHT, 1.0))["cells"]] == [None, "c0ffee1", "c0ffee1"]


def test_results_of_other_settings_are_not_merged() -> None:
    once = add(None, run("tlm", 1, RIGHT, 1.0), settings=("threads=1",))
    again = add(once, run("tlm", 2, HALF, 0.6), settings=("threads=2",))
    assert [cell["seed"] for cell in again["cells"]] == [2]


def test_a_pair_without_stored_predictions_keeps_its_comparison() -> None:
    once = add(None, run("tlm", 1, RIGHT, 1.0), run("plm", 1, WRONG, 0.0))
    del once["names"]
    for cell in once["cells"]:
        del cell["predictions"]
    again = add(once, run("tlm", 2, RIGHT, 1.0))
    assert again["pairs"] == once["pairs"]
    assert [cell["predictions"] for cell in again["cells"]] == ["", "01" * 20, ""]


def test_predictions_of_other_test_rows_are_refused() -> None:
    once = add(None, run("tlm", 1, RIGHT, 1.0))
    shorter = replace(run("tlm", 2, RIGHT[:10], 1.0), true=TRUE[:10])
    with pytest.raises(ValueError, match="tlm, seed 1: predictions of 40 test rows; there are 10 now"):
        add(once, shorter)
