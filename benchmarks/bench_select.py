"""CPU seconds of whole processes: `cramlm select` beside a bm25s script for the same job (select_peer.py).

    python benchmarks/bench_select.py                       # 421,140 passages, ChemProt's training texts, K = 500
    python benchmarks/bench_select.py --shards 1 --repeats 1

Both sides load their index, tokenize, search for every training text, make the union of the best K and write its texts to disk. cramlm
also drops passages that overlap the dev set that it splits off, and writes a report. The corpus is read and indexed before, once for each
side. Seconds are user + system time of the process, the smallest of `--repeats` after a first run, which compiles kernels.

Prints a table and, as the last line, one JSON object; writes benchmarks/results/select.json if the whole corpus was used.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cramlm.retrieval.index import Index

RESULTS = Path(__file__).parent / "results" / "select.json"
PEER = Path(__file__).with_name("select_peer.py")


def main() -> None:
    """Measure both sides in turn, print and write the results."""
    arguments = parse_arguments()
    train = arguments.data / "tasks" / arguments.task / "train.jsonl"
    shards = sorted((arguments.data / "corpus").glob("*.jsonl.zst"))[: arguments.shards]
    folder = arguments.store / f"select-{len(shards)}"
    index = Index.build(shards, folder / "index")
    commands = {"cramlm": lambda out: ours(folder / "index", train, arguments.top_k, out)}
    missing = {}
    if importlib.util.find_spec("bm25s") is None:
        missing["bm25s"] = "pip install 'cramlm[bench]'"
    else:
        index_peer(index, folder)
        commands["bm25s"] = lambda out: [
            sys.executable,
            str(PEER),
            "select",
            str(folder / "bm25s"),
            str(train),
            str(arguments.top_k),
            str(out),
        ]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(arguments.repeats + 1):
        for name, command in commands.items():
            out = folder / f"out-{name}"
            if out.is_dir():
                shutil.rmtree(out)
            out.unlink(missing_ok=True)
            seconds[name].append(cpu_seconds(command(out)))
    rows = {name: {"first": each[0], "cpu_seconds": min(each[1:])} for name, each in seconds.items()}
    print("| | CPU s, whole process | first run | times cramlm |\n|---|---|---|---|")
    for name, row in rows.items():
        ratio = row["cpu_seconds"] / rows["cramlm"]["cpu_seconds"]
        print(f"| {name} | {row['cpu_seconds']:.2f} | {row['first']:.2f} | {ratio:.1f} |")
    measured: dict[str, Any] = {"benchmark": "select", "task": arguments.task, "top_k": arguments.top_k, "passages": len(index)}
    measured |= {"processes": rows, "missing": missing}
    if arguments.shards is None:
        RESULTS.write_text(json.dumps(measured, indent=1) + "\n", "utf-8")
    print(json.dumps(measured))


def ours(index: Path, train: Path, top_k: int, out: Path) -> list[str]:
    """Return our command."""
    options = {"--train": train, "--index": index, "--top-k": top_k, "--out": out}
    return [sys.executable, "-m", "cramlm", "select", *(str(each) for pair in options.items() for each in pair)]


def index_peer(index: Index, folder: Path) -> None:
    """Index the same passages with bm25s, unless it is done."""
    if (folder / "bm25s").is_dir():
        return
    passages = folder / "passages.jsonl"
    with passages.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": document.text}) + "\n" for document in index.corpus)
    subprocess.run([sys.executable, str(PEER), "index", str(passages), str(folder / "unfinished")], check=True)
    (folder / "unfinished").rename(folder / "bm25s")


def cpu_seconds(command: list[str]) -> float:
    """Return user + system seconds of a process on one core."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages, those of the peer too, have their byte code on disk
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--store", type=Path, default=Path("runs/bench-store"))
    parser.add_argument("--task", default="chemprot")
    parser.add_argument("--top-k", type=int, default=500)
    parser.add_argument("--shards", type=int, help="number of corpus files to use (default: all)")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
