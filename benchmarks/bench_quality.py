"""Scores of TLM, its controls and the linear models over tasks, seeds and numbers of labels; resumable.

    python benchmarks/bench_quality.py --data ../shared/data --budget 5m --seeds 1 2 3

One `cramlm compare` (docs/guides/experiments.md) for each task and number of labels. Prints the tables and, last, a JSON object.
The results are added to results/quality-BUDGET.json, which keeps those of earlier calls for other tasks, numbers of labels, seeds and arms.
Every run has the commit that made it; all runs of a folder (--out) must be made by the same commit.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import cramlm
from cramlm.cli.console import console_events
from cramlm.errors import UsageError
from cramlm.experiments.compare import Experiment, compare
from cramlm.experiments.grid import Grid, arms_of, read_counts
from quality_code import claim, code_of
from quality_results import add_to
from quality_tables import RESULTS

ALL_TASKS = ("chemprot", "citation_intent", "sciie", "agnews_small", "sst2", "masakhanews_yor", "newsgroups20")
ARMS = ("tlm", "tlm-plain", "labels-only", "random-retrieval")
CONFIRMATION_TASKS = ("trec", "scicite", "cr", "masakhanews_ibo")
"""No setting is chosen on these: run them once for a table."""
OWN_CORPUS = {"masakhanews_yor": "tasks/masakhanews_yor/raw.jsonl.zst", "masakhanews_ibo": "confirm/masakhanews_ibo/raw.jsonl.zst"}


def main() -> None:
    """Run the missing cells, then print and write the tables."""
    arguments = parse_arguments()
    code = code_of(Path(cramlm.__file__).parents[2])
    try:
        claim(arguments.out / arguments.budget, code)
    except UsageError as error:
        raise SystemExit(f"bench_quality.py: error: {error}") from None
    measured: dict[str, dict[str, Experiment]] = {}
    for task, labels in product(arguments.tasks, read_counts(",".join(arguments.labels))):
        out = arguments.out / arguments.budget / f"{task}-{labels}"
        grid = grid_of(arguments, task, labels)
        with console_events() as emit:
            experiment = compare(grid, out=out, store=arguments.store, jobs=arguments.jobs, title=f"{task}, {labels} labels", emit=emit)
        measured.setdefault(task, {})[labels] = experiment
        target = arguments.results or RESULTS / f"quality-{arguments.budget}.json"
        head = {"budget": arguments.budget, "threads": arguments.threads}
        with console_events() as emit:
            add_to(target, task, labels, experiment, head, code=code, emit=emit)
    for task, experiments in measured.items():
        for labels, experiment in experiments.items():
            print(f"\n### {task}, {labels} labels\n\n{experiment.table}")
    print(json.dumps({"benchmark": "quality", "budget": arguments.budget, "tasks": plain(measured)}, ensure_ascii=False))


def grid_of(arguments: argparse.Namespace, task: str, labels: str) -> Grid:
    """Return the grid of a task: recipes with default settings."""
    folder = arguments.data / ("confirm" if task in CONFIRMATION_TASKS else "tasks") / task
    corpus = str(arguments.data / OWN_CORPUS[task]) if task in OWN_CORPUS else f"{arguments.data}/corpus/*.jsonl.zst"
    options = {"threads": arguments.threads, "tokens_per_second": arguments.speed}
    return Grid(
        arms=arms_of(arguments.arms),
        seeds=tuple(arguments.seeds),
        labels=(labels,),
        task={split: str(folder / f"{split}.jsonl") for split in ("train", "dev", "test")},
        corpus=(corpus,),
        init=arguments.init,
        budget=arguments.budget,
        rest_unlabelled=arguments.rest_unlabelled,
        settings=tuple(f"{name}={value}" for name, value in options.items() if value is not None),
    )


def plain(measured: dict[str, dict[str, Experiment]]) -> dict[str, dict[str, Any]]:
    """Task -> number of labels -> grid, rows, pairs and runs."""
    return {task: {labels: experiment.as_dict() for labels, experiment in experiments.items()} for task, experiments in measured.items()}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--store", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=None, help="results file (default: benchmarks/results/quality-BUDGET.json)")
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs")
    parser.add_argument("--speed", type=float, default=None, help="tokens per second for the plan (default: measured in each run)")
    parser.add_argument("--init", default=None, help="checkpoint for the arms that start from one")
    parser.add_argument("--tasks", nargs="+", default=list(ALL_TASKS), choices=(*ALL_TASKS, *CONFIRMATION_TASKS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="recipes or config files")
    parser.add_argument("--labels", nargs="+", default=["all"])
    parser.add_argument("--rest-unlabelled", action="store_true", help="use the training rows that are not sampled, as unlabelled texts")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    arguments = parser.parse_args()
    if not (arguments.data / "tasks").is_dir():
        parser.error(f"{arguments.data}: no folder tasks/; pass --data FOLDER with tasks/NAME/*.jsonl and corpus/*.jsonl.zst")
    return arguments


if __name__ == "__main__":
    main()
