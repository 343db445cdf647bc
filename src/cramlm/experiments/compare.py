"""Run an experiment: every cell of a grid that is not finished, one after the other or in parallel processes.

OUT/table.md, scores.svg, results.json       results, written again after every run
OUT/runs/<labels>/<arm>/<seed>/              the run of a cell, as `cramlm fit` writes it
OUT/subsamples/                              training files with fewer rows

Linear models, selection, tokenizer, token embeddings and soft labels come from the store (`shared_stages`). A stage with equal inputs
is made once, and its time is added to every run that uses it, so that equal budgets stay equal. Corpora and indexes are read before the
first run starts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from cramlm.config.retriever import uses_bm25
from cramlm.config.run import load_config
from cramlm.data.corpus import build_corpus
from cramlm.errors import CramError, EnvironmentFault, Stopped, counted
from cramlm.experiments.grid import Cell, Grid, cells_of, check_arms
from cramlm.experiments.results import (
    CellResult,
    Pair,
    Row,
    markdown,
    measure_usage,
    pairs_of,
    read_results,
    rows_of,
    scores_plot,
    totals_of,
)
from cramlm.io.executors import Processes
from cramlm.io.machine import available_cores, trim_memory
from cramlm.io.paths import at_home
from cramlm.pipeline.run_folder import RECORD, read_record
from cramlm.records import Emit, Event, silent
from cramlm.retrieval.bm25.analysis import Analyzer
from cramlm.retrieval.bm25.index import build_index
from cramlm.storage.artifacts import publish_file, refuse_other_files
from cramlm.storage.locks import lock, lock_file
from cramlm.storage.stages import borrowed_seconds, default_store

TABLE, PLOT, RESULTS = "table.md", "scores.svg", "results.json"
Failure: TypeAlias = tuple[str, int]
"""The error message of a run, and its exit code."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """The results of a grid. failed: error message by the name of the cell. exit_code: of the first failed run; 0 if none failed."""

    grid: Grid
    results: tuple[CellResult, ...]
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    totals: Mapping[str, float]
    failed: Mapping[str, str]
    exit_code: int = 0

    @property
    def table(self) -> str:
        """The table in Markdown."""
        return markdown(self.rows, self.pairs, self.totals, self.failed)

    def as_dict(self) -> dict[str, Any]:
        return {
            "grid": self.grid.as_dict(),
            "rows": [asdict(row) for row in self.rows],
            "pairs": [asdict(pair) for pair in self.pairs],
            "totals": dict(self.totals),
            "failed": dict(self.failed),
            "cells": [result.as_dict() for result in self.results],
        }


def compare(
    grid: Grid,
    *,
    out: str | Path,
    store: str | Path | None = None,
    jobs: int = 1,
    overwrite: bool = False,
    title: str = "",
    emit: Emit = silent,
    stop: Callable[[], int | None] = lambda: None,
) -> Experiment:
    """Run every cell that is not finished, `jobs` in parallel with an equal share of the cores; write table, plot and JSON to `out`.

    A failed run is listed in the table and does not stop the others. overwrite: replace runs on another task in `out`.

    Raises:
        UsageError, DataError: before any run, if an arm does not fit the data, or `out` holds runs on another task, or other
        files. Stopped: if `stop` returns an exit code; the same call continues. LockedError: if another process runs this experiment.
    """
    folder = at_home(out)
    if (threads := threads_of(jobs)) is not None:
        grid = replace(grid, settings=(f"threads={threads}", *grid.settings))
    check_arms(grid)
    refuse_other_files(folder, own=(RESULTS, lock_file(folder / "experiment").name), what="experiment of cramlm")
    with lock(folder / "experiment"):
        try:
            cells = cells_of(grid, folder)
        except CramError:
            own = lock_file(folder / "experiment")
            if list(folder.iterdir()) == [own]:
                own.unlink()
                folder.rmdir()
            raise
        finished, failures = run_cells(
            cells,
            store=at_home(store or default_store()),
            jobs=jobs,
            overwrite=overwrite,
            emit=emit,
            stop=stop,
            after_each=lambda cells: _write(_read(grid, cells, {}, paired=False), folder, title),
        )
        failed = {name: message for name, (message, _) in failures.items()}
        experiment = replace(_read(grid, finished, failed), exit_code=next((code for _, code in failures.values()), 0))
        _write(experiment, folder, title)
    return experiment


def _read(grid: Grid, cells: Sequence[Cell], failed: Mapping[str, str], *, paired: bool = True) -> Experiment:
    results = read_results(cells, predictions=paired)
    pairs = pairs_of(results) if paired else []  # takes seconds with many arms and rows
    return Experiment(grid, tuple(results), tuple(rows_of(results)), tuple(pairs), totals_of(results), failed)


def _write(experiment: Experiment, folder: Path, title: str) -> None:
    publish_file(folder / TABLE, experiment.table.encode())
    publish_file(folder / RESULTS, (json.dumps(experiment.as_dict(), ensure_ascii=False, indent=1) + "\n").encode())
    if plot := scores_plot(experiment.rows, title=title or folder.name):
        publish_file(folder / PLOT, plot.encode())
    else:
        (folder / PLOT).unlink(missing_ok=True)  # of an earlier call


_RUN: Final = "cramlm.experiments.compare:run_cell"


def run_cells(
    cells: Sequence[Cell],
    *,
    store: Path,
    jobs: int,
    overwrite: bool,
    emit: Emit,
    stop: Callable[[], int | None],
    after_each: Callable[[Sequence[Cell]], None],
) -> tuple[list[Cell], dict[str, Failure]]:
    """Run the unfinished cells; return the finished cells, and the failures of the others by name.

    after_each: called after each run with the finished cells.

    Raises:
        UsageError: before any run, if a folder holds a run on another task and `overwrite` is False. Stopped: if `stop` returns an exit
        code; the same call continues.
    """
    reasons = _unfinished(cells, store, overwrite=overwrite, emit=emit, stop=stop)
    waiting = [cell for cell in cells if reasons[cell.name] is not None]
    emit(Event("note", "experiment", f"{counted(len(cells), 'run')}, {len(cells) - len(waiting)} finished"))
    for cell in waiting:
        if (record := read_record(cell.folder)) is not None and record.finished:
            emit(Event("note", "experiment", f"{cell.name}: runs again, because {reasons[cell.name]}"))
    if waiting:
        _read_corpora(waiting, store, emit)
    tasks = [_task(cell, store, overwrite) for cell in waiting]
    failed: dict[str, Failure] = {}

    def finish(cell: Cell, failure: Failure | None) -> None:
        reasons[cell.name] = None if failure is None else failure[0]
        if failure is not None:
            failed[cell.name] = failure
            emit(Event("warning", "experiment", f"{cell.name}: {failure[0]}"))
        after_each(finished())

    def finished() -> list[Cell]:
        return [cell for cell in cells if reasons[cell.name] is None]

    if jobs == 1:
        for number, (cell, task) in enumerate(zip(waiting, tasks, strict=True), start=1):
            emit(Event("note", "experiment", f"run {number} of {len(waiting)}: {cell.name}"))
            finish(cell, run_cell(task, emit, stop=stop))
    else:
        began = time.monotonic()

        def report(number: int, event: Event) -> None:
            if (code := stop()) is not None:  # ends the other processes, whose runs continue from their last checkpoints
                raise Stopped("stopped; run the same command again to continue", exit_code=code)
            if event.kind == "done" and event.stage == "evaluation":
                minutes = (time.monotonic() - began) / 60
                emit(Event("note", "experiment", f"{waiting[number].name}: {event.message} ({minutes:.1f} minutes since the start)"))

        fewer = f"with fewer --jobs add --set threads={threads_of(jobs)}, so that finished runs are kept"
        processes = Processes(jobs, remedy=f"run the same command again to continue it; {fewer}")
        with closing(processes.outcomes(_RUN, tasks, on_event=report)) as outcomes:
            for number, outcome in outcomes:
                if isinstance(outcome, EnvironmentFault):  # of a killed process; `run_cell` returns those of runs
                    outcome = f"{waiting[number].folder}: {outcome}", outcome.exit_code
                elif isinstance(outcome, Exception):
                    raise outcome
                finish(waiting[number], outcome)
    return finished(), {cell.name: failed[cell.name] for cell in cells if cell.name in failed}


def run_cell(task: dict[str, Any], emit: Emit, *, stop: Callable[[], int | None] | None = None) -> Failure | None:
    """Run a cell; return None, or how it failed. `task` and the result are plain JSON values for another process.

    Raises:
        Stopped: if `stop` returns an exit code.
    """
    from cramlm.pipeline.context import Process, shared_stages
    from cramlm.pipeline.run import run
    from cramlm.training.ranks import never

    folder = Path(task["folder"])
    try:
        config = load_config(task["config"])
        with measure_usage(folder, config) as usage, shared_stages(Path(task["store"]), config, emit=emit):
            try:
                run(config, out=folder, overwrite=task["overwrite"], store=task["store"], emit=emit, process=Process(stop or never))
            finally:
                usage.borrowed_seconds += borrowed_seconds()
        trim_memory()  # for the next run
    except Stopped:
        raise
    except CramError as error:
        return str(error), error.exit_code
    return None


def _unfinished(
    cells: Sequence[Cell], store: Path, *, overwrite: bool, emit: Emit, stop: Callable[[], int | None]
) -> dict[str, str | None]:
    """Return by the cell's name why its run is not finished (`pipeline.unfinished`), None if every stage is up to date."""
    reasons: dict[str, str | None] = {}
    for cell in cells:
        if not (cell.folder / RECORD).is_file():
            reasons[cell.name] = "not started"
            continue
        from cramlm.pipeline.run import unfinished  # imports much that this process needs for nothing else if `jobs` > 1

        if (code := stop()) is not None:
            raise Stopped("stopped; run the same command again to continue", exit_code=code)
        reasons[cell.name] = unfinished(cell.config, out=cell.folder, store=store, overwrite=overwrite)
        emit(Event("progress", "experiment", "checked", done=len(reasons), total=len(cells), unit="runs"))
    return reasons


def _task(cell: Cell, store: Path, overwrite: bool) -> dict[str, Any]:
    paths = {"folder": str(cell.folder), "store": str(store)}
    return {"config": cell.config.model_dump(mode="json"), "overwrite": overwrite, **paths}


def threads_of(jobs: int) -> int | None:
    """Return the number of threads of each of `jobs` parallel runs; None (the default of a run) for one."""
    return None if jobs == 1 else max(1, available_cores() // jobs)


def _read_corpora(cells: Sequence[Cell], store: Path, emit: Emit) -> None:
    """Build the corpora and indexes of the cells, outside of the budgets of their runs."""
    configs = [cell.config for cell in cells]
    for files in dict.fromkeys(config.corpus for config in configs if config.corpus is not None):
        corpus = build_corpus(files, store, emit=emit)
        searched = [config for config in configs if config.corpus == files and uses_bm25(config.retriever)]
        for diacritics in sorted({config.diacritics for config in searched}):
            build_index(corpus, store, analyzer=Analyzer(diacritics=diacritics), emit=emit)
