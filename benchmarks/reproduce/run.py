"""Run tables of the paper at small scale (or at its size), and write docs/benchmarks/reproduction.md.

    python benchmarks/reproduce/run.py 4 --data ../shared/data                 # table 4 at small scale, on the available tasks
    python benchmarks/reproduce/run.py 3 4 --tasks scierc --seeds 1 2 3
    python benchmarks/reproduce/run.py 4 --paper                               # at the paper's size: GPUs, days
    python benchmarks/reproduce/run.py 4 --print                               # only print the commands

Each task is one experiment of `cramlm compare` over the rows of all requested tables, so that a stopped one continues and a row of
several tables runs once. Results: benchmarks/results/reproduce/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from cramlm.cli.console import console_events
from cramlm.experiments.compare import compare
from cramlm.experiments.grid import Grid
from reproduce.page import PAGE, RESULTS, page
from reproduce.tables import FOLDERS, TABLES, TWIN_BUDGET, Table, arms_of, command

KEPT: Final = ("arm", "seeds", "is_baseline", "scores", "cpu_minutes", "paper_flops", "executed_flops", "passages", "parameters")
"""Fields of a row that are kept in the repository."""


def main() -> None:
    """Run the requested tables, then write the page."""
    arguments = parse_arguments()
    tables = [TABLES[number] for number in (TABLES if "all" in arguments.tables else arguments.tables)]
    for task in [task for task in FOLDERS if not arguments.tasks or task in arguments.tasks]:
        requested = [table for table in tables if task in table.here]
        if arguments.print:
            print(*(f"table {table.number}, {task}: {command(table, task, paper=arguments.paper)}" for table in requested), sep="\n")
        elif requested:
            run(arguments, requested, task)
    if not arguments.print:
        PAGE.write_text(page(), "utf-8")
        print(PAGE)


def run(arguments: argparse.Namespace, tables: Sequence[Table], task: str) -> None:
    """Run the rows of these tables on a task; add them to the results of other tables."""
    size = "paper" if arguments.paper else "twin"
    out, folder = arguments.out / f"{task}-{size}", arguments.data / "tasks" / FOLDERS[task]
    arms = arms_of(tables, task, paper=arguments.paper, data=arguments.data, out=out, init=arguments.init)
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "dev", "test")}
    settings = () if arguments.threads is None else (f"threads={arguments.threads}",)
    corpus, budget = (f"{arguments.data}/corpus/*.jsonl.zst",), None if arguments.paper else TWIN_BUDGET
    grid = Grid(arms, tuple(arguments.seeds), ("all",), files, corpus, arguments.init, budget, settings=settings)
    with console_events() as emit:
        experiment = compare(grid, out=out, store=arguments.store, jobs=arguments.jobs, title=f"the paper's tables, {task}", emit=emit)
    print(experiment.table)
    keep(RESULTS / f"{task}-{size}.json", [asdict(row) for row in experiment.rows])


def keep(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows to the file; they replace rows of the same arm."""
    older = json.loads(path.read_bytes()) if path.is_file() else []
    kept = [{name: row[name] for name in KEPT} for row in rows]
    new = {row["arm"] for row in kept}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*(row for row in older if row["arm"] not in new), *kept], ensure_ascii=False, indent=1) + "\n", "utf-8")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tables", nargs="*", default="all", choices=["all", *TABLES], metavar="TABLE", help="numbers, like 3 4 (default: all)"
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--store", type=Path, default=None)
    parser.add_argument("--tasks", nargs="+", default=None, choices=list(FOLDERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--paper", action="store_true", help="the paper's size instead of a twin")
    parser.add_argument("--init", default=None, help="checkpoint for the row of the pretrained model in table 2")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--print", action="store_true", help="say the commands, run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
