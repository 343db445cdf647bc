"""Seconds, memory and disk space of reading, indexing, searching and selecting, for corpora of 10^5 to 10^7 passages.

    python benchmarks/bench_growth.py                                  # all sizes, about an hour; finished ones are kept
    python benchmarks/bench_growth.py --sizes 100000 --no-data

Passages are synthetic (synthetic.py): real words, with a vocabulary that keeps growing. Each step runs in its own process on
`--workers` cores (1); seconds are wall-clock time, memory is the maximum resident set of that process or of its largest worker.
A tiny corpus is processed first, so that compilation is not measured. The queries are the task's training texts, K = 500.
A size that `finished.jsonl` in --out lists with the same settings is skipped, so that a stopped run continues. The files of a size are
removed when it is finished.

The three largest sizes are fitted by a + b * N (least squares of the relative error, a and b not negative) and extrapolated to 10^8 and
10^9. Prints a table and, as the last line, one JSON object; writes docs/pictures/growth.svg, .png and growth.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import growth_report
from cramlm.config.retriever import Bm25Config
from cramlm.config.run import CorpusConfig, TaskConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.task import read_task
from cramlm.records import Example, Task
from cramlm.retrieval.bm25.index import Bm25Index, build_index
from cramlm.retrieval.retrievers import RetrievalContext
from cramlm.retrieval.selection import select_documents
from synthetic import Bootstrap, Invented, Source, write_corpus

STEPS: Final = ("generate", "read", "index", "search", "select")
LIMIT: Final = 500
WARM_UP: Final = 2000  # passages
ROOT: Final = Path(__file__).parents[1]


def main() -> None:
    """Measure the missing sizes, then fit, print and plot."""
    arguments = parse_arguments()
    if arguments.step:
        print(json.dumps(run_step(arguments)))
        return
    settings = {"format": 1, "source": source(arguments).settings, "task": arguments.task, "limit": LIMIT, "workers": arguments.workers}
    finished = arguments.out / "finished.jsonl"
    arguments.out.mkdir(parents=True, exist_ok=True)
    done = {row["passages"] for row in read_finished(finished, settings)}
    missing = [size for size in arguments.sizes if size not in done]
    for size in [WARM_UP, *missing] if missing else []:
        shutil.rmtree(arguments.out / "work", ignore_errors=True)
        steps = {step: measure(step, size, arguments) for step in STEPS}
        shutil.rmtree(arguments.out / "work")
        if size == WARM_UP:
            continue  # its compiled code is in numba's cache now
        with finished.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"passages": size, "settings": settings, "machine": machine(), "steps": steps}) + "\n")
    rows = [row for row in read_finished(finished, settings) if row["passages"] in arguments.sizes]
    growth_report.write(rows, ROOT / "docs" / "pictures")
    print(json.dumps({"benchmark": "growth", "rows": rows, "fits": growth_report.fit_all(rows)}))


def measure(step: str, size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a step in a new process and return its figures."""
    print(f"{size:,} passages: {step}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--step", step, "--sizes", str(size), "--out", str(arguments.out), "--task", arguments.task]
    command += ["--workers", str(arguments.workers), *(("--data", str(arguments.data)) if arguments.data else ("--no-data",))]
    pools = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(arguments.workers))
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=os.environ | pools)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a step in this process; its inputs are opened before the time is measured."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-arguments.workers :])
    (size,), work = arguments.sizes, arguments.out / "work"
    store, files, selection = work / "store", work / "files", work / "selection"
    run: Callable[[], Any]
    match arguments.step:
        case "generate":
            made = source(arguments)
            run, grown = (lambda: write_corpus(made, size, files)), files
        case "read":
            config = CorpusConfig(files=(str(files / "*.jsonl.zst"),))
            run, grown = (lambda: build_corpus(config, store, workers=arguments.workers)), store
        case "index":
            corpus = open_corpus(store)
            run, grown = (lambda: build_index(corpus, store, workers=arguments.workers)), store
        case "search":
            index = Bm25Index.open(next((store / "indexes").glob("[0-9a-f]*")))
            texts = [example.whole_text for example in task(arguments).train]
            list(index.search_distinct(index.compile(["a river", "é"]), limit=LIMIT))  # compile and load
            run, grown = (lambda: search(index, texts, arguments.workers)), work
        case _:
            corpus, labelled = open_corpus(store), task(arguments)
            index = Bm25Index.open(next((store / "indexes").glob("[0-9a-f]*")))
            run, grown = (lambda: select(corpus, index, labelled, selection, arguments.workers)), selection
    before = folder_bytes(grown)
    seconds, result = timed(run)
    figures = {"seconds": seconds, "peak_bytes": peak_bytes(), "bytes": folder_bytes(grown) - before}
    match result:
        case int():
            figures["documents"] = result
        case Bm25Index():
            figures["postings"] = result.statistics["postings"]
    return figures


def search(index: Bm25Index, texts: list[str], threads: int) -> int:
    """Return the number of documents in the union of all results."""
    selected = np.zeros(index.documents, np.bool_)
    for _, positions, _ in index.search_distinct(index.compile(texts), limit=LIMIT, threads=threads):
        selected[positions] = True
    return int(selected.sum())


def select(corpus: Corpus, index: Bm25Index, labelled: Task, out: Path, threads: int) -> int:
    """Return the number of selected documents; includes decontamination and writing."""
    config = Bm25Config(top_k=LIMIT)
    return len(select_documents(config, corpus, labelled, out=out, context=RetrievalContext(corpus.store, 1, index, threads)))


def source(arguments: argparse.Namespace) -> Source:
    """Return the source of the passages."""
    return Bootstrap(sorted((arguments.data / "corpus").glob("*.jsonl.zst"))) if arguments.data else Invented()


def task(arguments: argparse.Namespace) -> Task:
    """Return the task; without data, 1,659 training texts of 31 invented words and a hundred held-out ones."""
    if arguments.data:
        files = {split: str(arguments.data / "tasks" / arguments.task / f"{split}.jsonl") for split in ("train", "dev", "test")}
        return read_task(TaskConfig(**files), seed=1)
    texts, _ = Invented(seed=2).passages(np.arange(1759), 1759)
    examples = [Example(str(i), " ".join(text.decode().split()[:31]), None, "ab"[i % 2]) for i, text in enumerate(texts)]
    return Task(tuple(examples[:1659]), tuple(examples[1659:]), (), ("a", "b"), dev_is_split_from_train=False)


def open_corpus(store: Path) -> Corpus:
    """Return the only corpus of a store."""
    return Corpus.open(next((store / "corpora").glob("[0-9a-f]*")))


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return wall-clock seconds and the result."""
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def peak_bytes() -> int:
    """Return the maximum resident memory of this process or of its largest worker (getrusage of a child includes the parent's)."""
    (own,) = (int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def machine() -> dict[str, Any]:
    """Return the processor, its cores and the memory of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"processor": model, "cores": os.cpu_count(), "memory_gigabytes": round(memory / 1e9, 1)}


def read_finished(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows with these settings, by size."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    same = {row["passages"]: row for row in rows if row["settings"] == settings}
    return [same[size] for size in sorted(same)]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. `data` is None with --no-data, or if the folder is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[100_000, 300_000, 1_000_000, 3_000_000, 10_000_000], metavar="N")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/*.jsonl.zst")
    parser.add_argument("--no-data", action="store_true", help="invented words instead of a real corpus and task")
    parser.add_argument("--task", default="chemprot")
    parser.add_argument("--workers", type=int, default=1, help="cores to use")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-growth"), help="finished.jsonl; and work/ while it runs, 3 kB a passage"
    )
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.no_data or not list((arguments.data / "corpus").glob("*.jsonl.zst")):
        arguments.data = None
    return arguments


if __name__ == "__main__":
    main()
