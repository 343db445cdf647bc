"""Measure the selection of each task: seconds, size, KL divergence from the task, sources.

    python benchmarks/bench_selection.py --data ../shared/data --top-k 50
    python benchmarks/bench_selection.py --data ../shared/data --corpus-files 1 --retrievers bm25 dsir random --set max_tokens=1M

For every task in --data: the corpus is read and indexed once (the task's own corpus if OWN_CORPUS has one), then passages are selected
for the training texts, without overlap with dev and test. Seconds are CPU seconds and wall-clock time of the selection with an existing
index, including decontamination, report and writing. Tokens are estimated from the characters (see report.json); KL
reduction is defined in retrieval/statistics.py. --retrievers lists kinds; each gets the --set settings that it has. DSIR and random need a
limit; the default is the size of the previous selection of the same task.

Prints a table and, as the last line, one JSON object; a run over the whole corpus with BM25 alone writes benchmarks/results/selection.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from cramlm.config.retriever import RETRIEVER, RetrieverConfig, unbounded, with_kind
from cramlm.config.run import CorpusConfig, TaskConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.task import read_task
from cramlm.model.sentences import open_sentence_encoder
from cramlm.retrieval.bm25.index import Bm25Index, build_index
from cramlm.retrieval.retrievers import RetrievalContext
from cramlm.retrieval.selection import select_documents

OWN_CORPUS = {"masakhanews_yor": "tasks/masakhanews_yor/raw.jsonl.zst"}
RESULTS = Path(__file__).parent / "results" / "selection.json"


def main() -> None:
    """Select passages for every task; print and write the results."""
    arguments = parse_arguments()
    warm_up(arguments)
    opened: dict[str, tuple[Corpus, Bm25Index]] = {}
    rows: list[dict[str, Any]] = []
    for task in arguments.tasks:
        source = OWN_CORPUS.get(task, "corpus")
        if source not in opened:
            corpus = build_corpus(CorpusConfig(files=corpus_files(arguments, source)), arguments.store)
            opened[source] = corpus, build_index(corpus, arguments.store)
        for kind in arguments.retrievers:
            rows.append(measure(arguments, task, kind, *opened[source], like=rows[-1] if rows and rows[-1]["task"] == task else None))
    print_table(rows)
    if arguments.corpus_files is None and arguments.retrievers == ["bm25"]:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"top_k": arguments.top_k, "rows": rows}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(json.dumps({"benchmark": "selection", "top_k": arguments.top_k, "rows": rows}, ensure_ascii=False))


def corpus_files(arguments: argparse.Namespace, source: str) -> tuple[str, ...]:
    """Return the file, or the first `--corpus-files` files of a folder."""
    path = arguments.data / source
    return (str(path),) if path.is_file() else tuple(map(str, sorted(path.glob("*.jsonl.zst"))[: arguments.corpus_files]))


def retriever_config(arguments: argparse.Namespace, kind: str, like: dict[str, Any] | None) -> RetrieverConfig:
    """Return a config of this kind with the overrides; without a limit, use the size of the row `like`."""
    settings = {"top_k": arguments.top_k} | dict(setting.partition("=")[::2] for setting in arguments.set)
    config = RETRIEVER.validate_python(with_kind(settings, kind))
    if unbounded(config) and like is not None:
        return config.model_copy(update={"max_tokens": like["tokens"]})
    return config


def measure(
    arguments: argparse.Namespace, name: str, kind: str, corpus: Corpus, index: Bm25Index, *, like: dict[str, Any] | None
) -> dict[str, Any]:
    """Select passages for a task and return the row of the table. like: an earlier row, for the limit."""
    folder = arguments.data / "tasks" / name
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "dev", "test")}
    task = read_task(TaskConfig(**files), seed=13)
    config = retriever_config(arguments, kind, like)
    out = arguments.out / f"{name}-{kind}-{arguments.top_k}-{time.time_ns()}"  # always a new folder
    began, cpu_began = time.monotonic(), time.process_time()
    context = RetrievalContext(arguments.store, 13, index, arguments.threads, open_encoder=open_sentence_encoder)
    select_documents(config, corpus, task, out=out, context=context)
    wall, cpu = time.monotonic() - began, time.process_time() - cpu_began
    report = json.loads((out / "report.json").read_bytes())
    return {
        "task": name,
        "retriever": kind,
        "texts": report["queries"]["texts"],
        "distinct": report["queries"]["distinct"],
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(wall, 1),
        "documents": report["documents"],
        "words": report["words"],
        "bytes": report["bytes"],
        "tokens": report["tokens"]["estimated"],
        "kl_reduction": report["task_likeness"]["kl_reduction"],
        "sources": {source: count / report["documents"]["selected"] for source, count in list(report["sources"].items())[:4]},
    }


def warm_up(arguments: argparse.Namespace) -> None:
    """Compile the kernels on the smallest task."""
    task = min(arguments.tasks, key=lambda name: (arguments.data / "tasks" / name / "train.jsonl").stat().st_size)
    files = corpus_files(arguments, OWN_CORPUS.get(task, "corpus"))[:1]
    corpus = build_corpus(CorpusConfig(files=files), arguments.store)
    index, like = build_index(corpus, arguments.store), None
    for kind in arguments.retrievers:
        like = measure(arguments, task, kind, corpus, index, like=like)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table with a row per task and retriever."""
    names = (
        "task",
        "retriever",
        "texts (distinct)",
        "CPU s",
        "wall s",
        "passages",
        "dropped (held-out text)",
        "words",
        "MB",
        "tokens, about",
        "KL reduction",
        "largest sources",
    )
    print(f"| {' | '.join(names)} |")
    print(f"|{'---|' * len(names)}")
    for row in rows:
        documents = row["documents"]
        cells = [
            row["task"],
            row["retriever"],
            f"{row['texts']:,} ({row['distinct']:,})",
            row["cpu_seconds"],
            row["wall_seconds"],
            f"{documents['selected']:,}",
            f"{documents['dropped']:,}",
            f"{row['words'] / 1e6:.1f} M",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['tokens'] / 1e6:.1f} M",
            f"{row['kl_reduction']:.2f}",
            ", ".join(f"{source} {100 * share:.0f} %" for source, share in row["sources"].items()),
        ]
        print(f"| {' | '.join(map(str, cells))} |")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--store", type=Path, default=Path("runs/bench-store"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-selection"))
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--retrievers", nargs="+", default=["bm25"], help="kinds; bm25 first if the others are to select as much text")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE", help="settings of the retrievers, like max_tokens=1M")
    parser.add_argument("--corpus-files", type=int, help="number of corpus files to use (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", help="default: all in --data")
    arguments = parser.parse_args()
    if not (arguments.data / "tasks").is_dir():
        parser.error(f"{arguments.data}: no tasks/ there; pass --data FOLDER with tasks/NAME/*.jsonl and corpus/*.jsonl.zst")
    arguments.tasks = arguments.tasks or sorted(path.parent.name for path in (arguments.data / "tasks").glob("*/train.jsonl"))
    return arguments


if __name__ == "__main__":
    main()
