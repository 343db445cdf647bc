"""Scores of TLM, its controls and TF-IDF + logistic regression over tasks, seeds and numbers of labels; resumable.

    python benchmarks/bench_quality.py --data ../shared/data --budget 5m --seeds 1 2 3

Each cell is one `cramlm.fit` in its own folder, so a stopped benchmark continues where it was and a finished one only prints. With fewer
labels than all, the kept ones are a stratified draw by the seed, the same for every arm. Test is read once, at the end of each run.
Prints a table and, as the last line, one JSON object; writes benchmarks/results/quality.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cramlm import recipes
from cramlm.config import RunConfig, load_config
from cramlm.console import console_events
from cramlm.pipeline import run

ALL_TASKS = ("chemprot", "citation_intent", "sciie", "agnews_small", "sst2", "masakhanews_yor", "newsgroups20")
ARMS = ("tlm", "labels-only", "random-retrieval")
OWN_CORPUS = {"masakhanews_yor": "tasks/masakhanews_yor/raw.jsonl.zst"}


def main() -> None:
    """Run what is missing, then print and write the table."""
    arguments = parse_arguments()
    cells: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for labels in arguments.labels:
            for task in arguments.tasks:
                for arm in arguments.arms:
                    cells += list(run_cell(arguments, task=task, arm=arm, seed=seed, labels=labels))
                    write_results(arguments, cells)
    print_table(cells)
    print(json.dumps({"benchmark": "quality", "budget": arguments.budget, "cells": cells}, ensure_ascii=False))


def run_cell(arguments: argparse.Namespace, *, task: str, arm: str, seed: int, labels: str) -> Iterator[dict[str, Any]]:
    """One run, and a row for it and for each baseline that came with it (the baselines only once, with tlm)."""
    folder = arguments.out / arguments.budget / f"{task}-{labels}" / f"{arm}-{seed}"
    config = cell_config(arguments, task=task, arm=arm, seed=seed, labels=labels)
    done = (folder / "evaluation" / "scores.json").is_file()
    started, cpu_started = time.monotonic(), time.process_time()
    print(f"== {task}, {labels} labels, {arm}, seed {seed}", file=sys.stderr, flush=True)
    with console_events() as emit:
        finished = run(config, out=folder, store=arguments.store, emit=emit)
    timing = folder / "benchmark.json"
    if not done:
        spent = {"minutes": (time.monotonic() - started) / 60, "cpu_minutes": (time.process_time() - cpu_started) / 60}
        timing.write_text(json.dumps(spent), "utf-8")
    spent = json.loads(timing.read_bytes()) if timing.is_file() else {"minutes": None, "cpu_minutes": None}
    models = finished.scores["models"]
    chosen = max((name for name in models if name != arm), key=lambda name: models[name]["dev"]["macro_f1"], default=None)
    for name, scores in models.items():
        own = name == arm
        if own or arm == "tlm":
            row = {"task": task, "labels": labels, "arm": name, "seed": seed, **(spent if own else dict.fromkeys(spent))}
            row["chosen"] = own or name == chosen  # of the baselines, the one that a user would take: the best on dev
            for split in ("dev", "test", "test_leak_free"):
                if split in scores:
                    row |= {f"{split}_{key}": scores[split][key] for key in ("macro_f1", "micro_f1")}
            yield row


def cell_config(arguments: argparse.Namespace, *, task: str, arm: str, seed: int, labels: str) -> RunConfig:
    """The recipe with its defaults; only data, seed and budget differ between cells."""
    folder = arguments.data / "tasks" / task
    train = folder / "train.jsonl" if labels == "all" else drawn_labels(arguments, task=task, seed=seed, count=int(labels))
    files: dict[str, Any] = {"train": str(train), "dev": str(folder / "dev.jsonl"), "test": str(folder / "test.jsonl")}
    if arm != "labels-only":
        files["corpus"] = str(arguments.data / OWN_CORPUS.get(task, "corpus"))
        if task not in OWN_CORPUS:
            files["corpus"] += "/*.jsonl.zst"
    config = recipes.RECIPES[arm](**files, budget=arguments.budget, seed=seed)
    return load_config(config.model_dump(mode="json") | {"threads": arguments.threads, "tokens_per_second": arguments.speed})


def drawn_labels(arguments: argparse.Namespace, *, task: str, seed: int, count: int) -> Path:
    """`count` training rows, classes in their proportions (each at least one row), drawn by the seed."""
    rows = (arguments.data / "tasks" / task / "train.jsonl").read_text("utf-8").splitlines()
    by_label: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        by_label[json.loads(row)["label"]].append(row)
    generator = random.Random(seed)
    kept: list[str] = []
    for label in sorted(by_label):
        share = max(1, round(count * len(by_label[label]) / len(rows)))
        kept += generator.sample(by_label[label], min(share, len(by_label[label])))
    generator.shuffle(kept)
    target: Path = arguments.out / "data" / f"{task}-{count}-{seed}.jsonl"
    content = "\n".join(kept) + "\n"
    if not target.is_file() or target.read_text("utf-8") != content:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, "utf-8")
    return target


def print_table(cells: list[dict[str, Any]]) -> None:
    """A Markdown table, as the README shows it: test macro / micro-F1, mean over seeds, and half the range of macro-F1 between them.

    The baseline's column is the variant that is best on dev in each run. Where test rows stand in train too, a second row has the others.
    """
    columns = [*ARMS, "TF-IDF + LR"]
    groups: dict[tuple[str, str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if cell["chosen"]:
            column = cell["arm"] if cell["arm"] in ARMS else columns[-1]
            for split in ("test", "test_leak_free"):
                if f"{split}_macro_f1" in cell:
                    groups[cell["task"], cell["labels"], split][column].append(cell)
    columns = [column for column in columns if any(column in group for group in groups.values())]
    print(f"| task | labels | seeds | {' | '.join(columns)} | CPU minutes of {' / '.join(c for c in columns if c in ARMS)} |")
    print("|---" * (len(columns) + 4) + "|")
    for (task, labels, split), group in groups.items():
        name = task if split == "test" else f"{task}, rows not in train"
        scores = [_summary(group.get(column, []), split) for column in columns]
        minutes = [_mean([cell["cpu_minutes"] for cell in group[column]]) for column in columns if column in ARMS and group.get(column)]
        seeds = max(len(members) for members in group.values())
        print(f"| {name} | {labels} | {seeds} | {' | '.join(scores)} | {' / '.join(minutes)} |")


def _summary(members: list[dict[str, Any]], split: str) -> str:
    if not members:
        return ""
    macro, micro = ([100 * member[f"{split}_{key}"] for member in members] for key in ("macro_f1", "micro_f1"))
    return f"{statistics.fmean(macro):.1f} ± {(max(macro) - min(macro)) / 2:.1f} / {statistics.fmean(micro):.1f}"


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):.1f}" if known else "?"


def write_results(arguments: argparse.Namespace, cells: list[dict[str, Any]]) -> None:
    """The cells so far, for tables and pictures."""
    target = Path(__file__).parent / "results" / "quality.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"budget": arguments.budget, "threads": arguments.threads, "cells": cells}, indent=1) + "\n", "utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--store", type=Path, default=None)
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--speed", type=float, default=None, help="tokens per second to plan with; default: measured in each run")
    parser.add_argument("--tasks", nargs="+", default=list(ALL_TASKS), choices=ALL_TASKS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--labels", nargs="+", default=["all"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    arguments = parser.parse_args()
    if not (arguments.data / "tasks").is_dir():
        parser.error(f"{arguments.data}: no tasks/ there; pass --data FOLDER with tasks/NAME/*.jsonl and corpus/*.jsonl.zst")
    return arguments


if __name__ == "__main__":
    main()
