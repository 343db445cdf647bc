"""An experiment from the question to its table: runs what is missing, and after every run writes what is known so far.

OUT/table.md, scores.svg, results.json       the answer
OUT/runs/<labels>/<arm>/<seed>/              a run each, as `cramlm fit` leaves it
OUT/shared/                                  stages that runs have in common
OUT/draws/                                   training files of fewer labels
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cramlm.experiments.grid import Cell, Question, cells_of
from cramlm.experiments.results import CellResult, Pair, Row, draw, markdown, pairs_of, read_results, rows_of, totals_of
from cramlm.experiments.runner import run_cells, threads_of
from cramlm.records import Emit, silent
from cramlm.storage.artifacts import default_store, lock, publish_file

TABLE, PLOT, RESULTS = "table.md", "scores.svg", "results.json"


@dataclass(frozen=True, slots=True)
class Experiment:
    """What came out. failed: reasons by the name of the run."""

    question: Question
    results: tuple[CellResult, ...]
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    totals: Mapping[str, float]
    failed: Mapping[str, str]

    @property
    def table(self) -> str:
        """As Markdown."""
        return markdown(self.rows, self.pairs, self.totals, self.failed)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "question": self.question.as_dict(),
            "rows": [asdict(row) for row in self.rows],
            "pairs": [asdict(pair) for pair in self.pairs],
            "totals": dict(self.totals),
            "failed": dict(self.failed),
            "cells": [result.as_dict() for result in self.results],
        }


def compare(
    question: Question,
    *,
    out: str | Path,
    store: str | Path | None = None,
    jobs: int = 1,
    overwrite: bool = False,
    title: str = "",
    emit: Emit = silent,
    stop: Callable[[], int | None] = lambda: None,
) -> Experiment:
    """Run every cell that is not done, `jobs` at a time with their share of the cores, and write table, plot and JSON to `out`.

    A run that fails is told in the table, the others go on. overwrite: replace runs on another task in `out`.

    Raises:
        UsageError, DataError: if an arm cannot be run on this data, or `out` holds another task's runs; nothing is run then. Stopped: if
            `stop` asked for it.
        LockedError: if another process runs this experiment.
    """
    folder = Path(out)
    if (threads := threads_of(jobs)) is not None:
        question = replace(question, settings=(f"threads={threads}", *question.settings))
    with lock(folder / "experiment"):
        cells = cells_of(question, folder)
        means: dict[str, Any] = {"out": folder, "store": Path(store or default_store()), "jobs": jobs, "overwrite": overwrite}
        finished, failed = run_cells(
            cells, done=lambda cells: _write(_read(question, cells, {}, paired=False), folder, title), emit=emit, stop=stop, **means
        )
        experiment = _read(question, finished, failed)
        _write(experiment, folder, title)
    return experiment


def _read(question: Question, cells: Sequence[Cell], failed: Mapping[str, str], *, paired: bool = True) -> Experiment:
    results = read_results(cells)
    pairs = pairs_of(results) if paired else []  # seconds, with many arms and rows: at the end only
    return Experiment(question, tuple(results), tuple(rows_of(results)), tuple(pairs), totals_of(results), failed)


def _write(experiment: Experiment, folder: Path, title: str) -> None:
    publish_file(folder / TABLE, experiment.table.encode())
    publish_file(folder / RESULTS, (json.dumps(experiment.as_dict(), ensure_ascii=False, indent=1) + "\n").encode())
    if plot := draw(experiment.rows, title=title or folder.name):
        publish_file(folder / PLOT, plot.encode())
