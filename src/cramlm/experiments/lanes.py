"""The cells of an experiment run one after the other, or several at a time in processes of their own; what is done is not run again.

All runs take baseline, selection, tokenizer and the teacher's labels from one pool (artifacts.pooled): what is equal is made once, and what
it took counts for every run, so that equal budgets stay equal. Corpus and index are read before the first run begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from cramlm.artifacts import MANIFEST, borrowed_seconds, pooled
from cramlm.config import load_config, to_toml
from cramlm.data.corpus import build_corpus
from cramlm.data.workers import available_cores, run_tasks
from cramlm.errors import CramError, Stopped
from cramlm.experiments.grid import Cell
from cramlm.experiments.spending import spending
from cramlm.records import Emit, Event
from cramlm.retrieval.index import build_index
from cramlm.retriever_config import Bm25Config, members_of

POOLED: Final = frozenset({"baseline", "selection", "tokenizer", "teacher"})
_RUN: Final = "cramlm.experiments.lanes:run_cell"


def is_done(cell: Cell) -> bool:
    """Whether its run is finished under the very config that is asked."""
    written = cell.folder / "run.toml"
    finished = (cell.folder / "export" / MANIFEST).is_file() and (cell.folder / "evaluation" / MANIFEST).is_file()
    return finished and written.is_file() and written.read_text("utf-8") == to_toml(cell.config)


def run_cells(
    cells: Sequence[Cell],
    *,
    out: Path,
    store: Path,
    jobs: int,
    emit: Emit,
    stop: Callable[[], int | None],
    done: Callable[[], None],
) -> dict[str, str]:
    """Run what is not done; `done` is called after each. Returns why cells failed, by name: the others are run all the same.

    Raises:
        Stopped: if `stop` asked for it; the same call goes on from there.
    """
    waiting = [cell for cell in cells if not is_done(cell)]
    emit(Event("note", "experiment", f"{len(cells)} runs, {len(cells) - len(waiting)} of them done"))
    if waiting:
        _read_corpora(waiting, store, emit)
    tasks = [_task(cell, out, store, jobs) for cell in waiting]
    failed: dict[str, str] = {}

    def finish(cell: Cell, failure: str | None) -> None:
        if failure is not None:
            failed[cell.name] = failure
            emit(Event("warning", "experiment", f"{cell.name}: {failure}"))
        done()

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
    return failed


def run_cell(task: dict[str, Any], emit: Emit, *, stop: Callable[[], int | None] | None = None) -> str | None:
    """One run; why it failed, or None. Plain JSON in and out, so that it can be another process's.

    Raises:
        Stopped: if `stop` asked for it.
    """
    from cramlm.pipeline import run
    from cramlm.training.loop import never

    folder = Path(task["folder"])
    try:
        with spending(folder) as spent, pooled(Path(task["pool"]), POOLED):
            try:
                run(load_config(task["config"]), out=folder, store=task["store"], emit=emit, stop=stop or never)
            finally:
                spent.borrowed_seconds += borrowed_seconds()
    except Stopped:
        raise
    except CramError as error:
        return str(error)
    return None


def _task(cell: Cell, out: Path, store: Path, jobs: int) -> dict[str, Any]:
    return {"config": cell.config.model_dump(mode="json"), "folder": str(cell.folder), "pool": str(out / "shared"), "store": str(store)}


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
