"""What each task's slice of the corpus costs and is: seconds, size, nearness to the task, where it came from.

    python benchmarks/bench_selection.py --data ../shared/data --top-k 50

For every task in --data, with its dev and test texts kept out: the corpus is read and indexed once (each task's own, where OWN_CORPUS
names one), then the training texts select. Seconds are CPU seconds and wall time of the selection alone, with the index there; hygiene,
report and writing included. Tokens are estimated from the characters (report.json says how); "nearer" is the KL reduction
(retrieval/report.py). Prints a table and, as the last line, one JSON object; writes benchmarks/results/selection.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from cramlm.config import CorpusConfig, TaskConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.task import read_task
from cramlm.retrieval.index import Index, build_index
from cramlm.retrieval.selection import select_documents
from cramlm.retriever_config import Bm25Config

OWN_CORPUS = {"masakhanews_yor": "tasks/masakhanews_yor/raw.jsonl.zst"}
RESULTS = Path(__file__).parent / "results" / "selection.json"


def main() -> None:
    """Select for every task, print, write."""
    arguments = parse_arguments()
    warm_up(arguments)
    opened: dict[str, tuple[Corpus, Index]] = {}
    rows = []
    for task in arguments.tasks:
        source = OWN_CORPUS.get(task, "corpus")
        if source not in opened:
            corpus = build_corpus(CorpusConfig(files=(str(arguments.data / source),)), arguments.store)
            opened[source] = corpus, build_index(corpus, arguments.store)
        rows.append(measure(arguments, task, *opened[source]))
    print_table(rows)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"top_k": arguments.top_k, "rows": rows}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(json.dumps({"benchmark": "selection", "top_k": arguments.top_k, "rows": rows}, ensure_ascii=False))


def measure(arguments: argparse.Namespace, name: str, corpus: Corpus, index: Index) -> dict[str, Any]:
    """One task's row."""
    folder = arguments.data / "tasks" / name
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "dev", "test")}
    task = read_task(TaskConfig(**files), seed=13)
    out = arguments.out / f"{name}-{arguments.top_k}-{time.time_ns()}"  # never one that is there: it would be fresh and cost nothing
    began, cpu_began = time.monotonic(), time.process_time()
    select_documents(Bm25Config(top_k=arguments.top_k), corpus, task, index=index, out=out, seed=13, threads=arguments.threads)
    wall, cpu = time.monotonic() - began, time.process_time() - cpu_began
    report = json.loads((out / "report.json").read_bytes())
    return {
        "task": name,
        "texts": report["queries"]["texts"],
        "distinct": report["queries"]["distinct"],
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(wall, 1),
        "documents": report["documents"],
        "words": report["words"],
        "tokens": report["tokens"]["estimated"],
        "kl_reduction": report["task_likeness"]["kl_reduction"],
        "sources": {source: count / report["documents"]["selected"] for source, count in list(report["sources"].items())[:4]},
    }


def warm_up(arguments: argparse.Namespace) -> None:
    """Compile what is compiled, on the smallest task."""
    task = min(arguments.tasks, key=lambda name: (arguments.data / "tasks" / name / "train.jsonl").stat().st_size)
    source = arguments.data / OWN_CORPUS.get(task, "corpus")
    file = sorted(source.glob("*.jsonl.zst"))[0] if source.is_dir() else source
    corpus = build_corpus(CorpusConfig(files=(str(file),)), arguments.store)
    measure(arguments, task, corpus, build_index(corpus, arguments.store))


def print_table(rows: list[dict[str, Any]]) -> None:
    """Markdown, a row per task."""
    names = (
        "task",
        "texts (distinct)",
        "CPU s",
        "wall s",
        "passages",
        "held-out dropped",
        "words",
        "tokens, about",
        "nearer by",
        "most from",
    )
    print(f"| {' | '.join(names)} |")
    print(f"|{'---|' * len(names)}")
    for row in rows:
        documents = row["documents"]
        cells = [
            row["task"],
            f"{row['texts']:,} ({row['distinct']:,})",
            row["cpu_seconds"],
            row["wall_seconds"],
            f"{documents['selected']:,}",
            f"{documents['dropped']:,}",
            f"{row['words'] / 1e6:.1f} M",
            f"{row['tokens'] / 1e6:.1f} M",
            f"{row['kl_reduction']:.2f}",
            ", ".join(f"{source} {100 * share:.0f} %" for source, share in row["sources"].items()),
        ]
        print(f"| {' | '.join(map(str, cells))} |")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--store", type=Path, default=Path("runs/bench-store"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-selection"))
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", help="default: all that are there")
    arguments = parser.parse_args()
    if not (arguments.data / "tasks").is_dir():
        parser.error(f"{arguments.data}: no tasks/ there; pass --data FOLDER with tasks/NAME/*.jsonl and corpus/*.jsonl.zst")
    arguments.tasks = arguments.tasks or sorted(path.parent.name for path in (arguments.data / "tasks").glob("*/train.jsonl"))
    return arguments


if __name__ == "__main__":
    main()
