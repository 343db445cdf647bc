"""Run a table of the paper, or its scaled-down twin, and write docs/reproduction.md anew.

    python benchmarks/reproduce/run.py 4 --data ../shared/data                 # the twin of table 4, on the tasks that are here
    python benchmarks/reproduce/run.py 4 --tasks scierc --seeds 1 2 3 --scale 0.05
    python benchmarks/reproduce/run.py 4 --paper                               # at the paper's size: GPUs, days
    python benchmarks/reproduce/run.py 4 --print                               # only say the commands

Each task of a table is an experiment of `cramlm compare`, so a stopped one goes on. Results: benchmarks/results/reproduce/.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cramlm.console import console_events
from cramlm.experiments.compare import compare
from cramlm.experiments.grid import Question
from reproduce.page import PAGE, RESULTS, page
from reproduce.tables import FOLDERS, TABLES, TWIN_SCALE, Table, arms_of_table, command


def main() -> None:
    """Run what is asked, then write the page."""
    arguments = parse_arguments()
    twin = None if arguments.paper else arguments.scale
    for number in TABLES if "all" in arguments.tables else arguments.tables:
        table = TABLES[number]
        for task in [task for task in table.here if not arguments.tasks or task in arguments.tasks]:
            if arguments.print:
                print(f"table {number}, {task}: {command(table, task, twin=twin)}")
            else:
                run(arguments, table, task, twin)
    if not arguments.print:
        PAGE.write_text(page(), "utf-8")
        print(PAGE)


def run(arguments: argparse.Namespace, table: Table, task: str, twin: float | None) -> None:
    """One task of a table; its rows go into the results."""
    size = "paper" if twin is None else f"twin-{twin:g}"
    out, folder = arguments.out / f"table-{table.number}" / f"{task}-{size}", arguments.data / "tasks" / FOLDERS[task]
    arms = arms_of_table(table, task, twin=twin, data=arguments.data, out=out, init=arguments.init)
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "dev", "test")}
    settings = () if arguments.threads is None else (f"threads={arguments.threads}",)
    corpus = (f"{arguments.data}/corpus/*.jsonl.zst",)
    question = Question(arms, tuple(arguments.seeds), ("all",), files, corpus=corpus, init=arguments.init, settings=settings)
    with console_events() as emit:
        found = compare(question, out=out, store=arguments.store, jobs=arguments.jobs, title=f"table {table.number}, {task}", emit=emit)
    print(found.table)
    RESULTS.mkdir(parents=True, exist_ok=True)
    told = {key: value for key, value in found.as_dict().items() if key in ("rows", "pairs", "totals", "failed")}
    name = f"table-{table.number}-{task}{'-paper' if twin is None else ''}.json"
    (RESULTS / name).write_text(json.dumps({"scale": twin, **told}, ensure_ascii=False, indent=1) + "\n", "utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tables", nargs="*", default="all", choices=["all", *TABLES], metavar="TABLE", help="numbers, like 3 4 (default: all)"
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--store", type=Path, default=None)
    parser.add_argument("--tasks", nargs="+", default=None, choices=list(FOLDERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--scale", type=float, default=TWIN_SCALE, help="of the twin: share of the paper's steps")
    parser.add_argument("--paper", action="store_true", help="the paper's size instead of a twin")
    parser.add_argument("--init", default=None, help="checkpoint for the row of the pretrained model in table 2")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--print", action="store_true", help="say the commands, run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
