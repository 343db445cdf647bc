"""An experiment from the question to its table: runs what is missing, and after every run writes what is known so far.

OUT/table.md, scores.svg, results.json       the answer
OUT/runs/<labels>/<arm>/<seed>/              a run each, as `cramlm fit` leaves it
OUT/shared/                                  stages that runs have in common
OUT/draws/                                   training files of fewer labels
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from cramlm.config.retriever import Bm25Config, members_of
from cramlm.config.run import load_config
from cramlm.data.corpus import build_corpus
from cramlm.errors import CramError, Stopped
from cramlm.experiments.grid import Cell, Question, cells_of
from cramlm.experiments.results import CellResult, Pair, Row, draw, markdown, pairs_of, read_results, rows_of, spending, totals_of
from cramlm.io.executors import available_cores, run_tasks
from cramlm.pipeline.run_folder import RECORD, read_record
from cramlm.records import Emit, Event, silent
from cramlm.retrieval.bm25.index import build_index
from cramlm.storage.artifacts import borrowed_seconds, default_store, lock, pooled, publish_file

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


POOLED: Final = frozenset({"task", "baseline", "selection", "tokenizer", "tokens", "embedding", "static", "teacher"})
_RUN: Final = "cramlm.experiments.compare:run_cell"


def run_cells(
    cells: Sequence[Cell],
    *,
    out: Path,
    store: Path,
    jobs: int,
    overwrite: bool,
    emit: Emit,
    stop: Callable[[], int | None],
    done: Callable[[Sequence[Cell]], None],
) -> tuple[list[Cell], dict[str, str]]:
    """Run what is not done; `done` is called after each with the cells that are. Returns these, and why others failed, by name: a failure
    does not keep the rest from being run.

    Raises:
        UsageError: if a folder holds a run on another task, unless `overwrite`; nothing is run then. Stopped: if `stop` asked for it; the
        same call goes on from there.
    """
    reasons = _check(cells, store, overwrite=overwrite, emit=emit, stop=stop)
    waiting = [cell for cell in cells if reasons[cell.name] is not None]
    emit(Event("note", "experiment", f"{len(cells)} runs, {len(cells) - len(waiting)} of them done"))
    for cell in waiting:
        if (record := read_record(cell.folder)) is not None and record.finished:
            emit(Event("note", "experiment", f"{cell.name} runs again: {reasons[cell.name]}"))
    if waiting:
        _read_corpora(waiting, store, emit)
    tasks = [_task(cell, out, store, overwrite) for cell in waiting]
    failed: dict[str, str] = {}

    def finish(cell: Cell, failure: str | None) -> None:
        reasons[cell.name] = failure
        if failure is not None:
            failed[cell.name] = failure
            emit(Event("warning", "experiment", f"{cell.name}: {failure}"))
        done(finished())

    def finished() -> list[Cell]:
        return [cell for cell in cells if reasons[cell.name] is None]

    if jobs == 1:
        for number, (cell, task) in enumerate(zip(waiting, tasks, strict=True), start=1):
            emit(Event("note", "experiment", f"run {number} of {len(waiting)}: {cell.name}"))
            finish(cell, run_cell(task, emit, stop=stop))
    else:
        began = time.monotonic()

        def tell(number: int, event: Event) -> None:
            if event.kind == "done" and event.stage == "evaluation":
                minutes = (time.monotonic() - began) / 60
                emit(Event("note", "experiment", f"{waiting[number].name}: {event.message} (after {minutes:.1f} minutes in all)"))

        for cell, failure in zip(waiting, run_tasks(_RUN, tasks, workers=jobs, tell=tell), strict=True):
            finish(cell, failure)
    return finished(), failed


def run_cell(task: dict[str, Any], emit: Emit, *, stop: Callable[[], int | None] | None = None) -> str | None:
    """One run; why it failed, or None. Plain JSON in and out, so that it can be another process's.

    Raises:
        Stopped: if `stop` asked for it.
    """
    from cramlm.pipeline.run import run
    from cramlm.training.loop import never

    folder = Path(task["folder"])
    try:
        config = load_config(task["config"])
        with spending(folder, config) as spent, pooled(Path(task["pool"]), POOLED):
            try:
                run(config, out=folder, overwrite=task["overwrite"], store=task["store"], emit=emit, stop=stop or never)
            finally:
                spent.borrowed_seconds += borrowed_seconds()
    except Stopped:
        raise
    except CramError as error:
        return str(error)
    return None


def _check(cells: Sequence[Cell], store: Path, *, overwrite: bool, emit: Emit, stop: Callable[[], int | None]) -> dict[str, str | None]:
    """By the cell's name what its run has still to do (`pipeline.unfinished`), None if it is finished and every stage is up to date."""
    reasons: dict[str, str | None] = {}
    for cell in cells:
        if not (cell.folder / RECORD).is_file():
            reasons[cell.name] = "it has not begun"
            continue
        from cramlm.pipeline.run import unfinished  # loads torch, which an experiment of several processes has no other use for here

        if (code := stop()) is not None:
            raise Stopped("stopped; run the same command again to continue", exit_code=code)
        reasons[cell.name] = unfinished(cell.config, out=cell.folder, store=store, overwrite=overwrite)
        emit(Event("progress", "experiment", "checked", done=len(reasons), total=len(cells), unit="runs"))
    return reasons


def _task(cell: Cell, out: Path, store: Path, overwrite: bool) -> dict[str, Any]:
    places = {"folder": str(cell.folder), "pool": str(out / "shared"), "store": str(store)}
    return {"config": cell.config.model_dump(mode="json"), "overwrite": overwrite, **places}


def threads_of(jobs: int) -> int | None:
    """Cores for each of several runs at a time; None = as a run alone decides."""
    return None if jobs == 1 else max(1, available_cores() // jobs)


def _read_corpora(cells: Sequence[Cell], store: Path, emit: Emit) -> None:
    """Corpora and indexes that the cells need, before any budget begins to run."""
    wanted = {str(cell.config.corpus): cell.config.corpus for cell in cells if cell.config.corpus is not None}
    searched = {
        str(cell.config.corpus)
        for cell in cells
        if cell.config.retriever is not None and any(isinstance(member, Bm25Config) for member in members_of(cell.config.retriever))
    }
    for name, config in wanted.items():
        corpus = build_corpus(config, store, emit=emit)
        if name in searched:
            build_index(corpus, store, emit=emit)
