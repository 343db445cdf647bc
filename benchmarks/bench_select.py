"""CPU seconds of whole processes: `cramlm select` beside programs with bm25s and Lucene for the same job.

The programs are select_peer.py and lucene/LuceneSelect.java (for which lucene/fetch_jar.py fetches a jar).

    python benchmarks/bench_select.py                       # 421,140 passages, ChemProt's training texts, K = 500
    python benchmarks/bench_select.py --corpus-files 1 --repeats 1
    python benchmarks/bench_select.py --synthetic 10000000  # cramlm alone on synthetic passages; 20 GB of disk

All load their index, tokenize, search for every training text, make the union of the best K and write its texts to disk. cramlm
also drops passages that overlap the dev set that it splits off, and writes a report; Lucene reads and writes lines instead of JSON, and
keeps the lengths of passages in one byte. The corpus is read and indexed before, once for each side. Seconds are user + system time of
the process, the smallest of `--repeats` after a first run, which compiles kernels; memory is the largest maximum resident set of the runs.

Prints a table and, as the last line, one JSON object; writes benchmarks/results/select.json if the whole corpus was used, and its entry
`synthetic` with --synthetic.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramlm.retrieval.index import Index
from lucene_peer import Lucene
from synthetic import Bootstrap, write_corpus

RESULTS = Path(__file__).parent / "results" / "select.json"
PEER = Path(__file__).with_name("select_peer.py")


def main() -> None:
    """Measure both sides in turn, print and write the results."""
    arguments = parse_arguments()
    train = arguments.data / "tasks" / arguments.task / "train.jsonl"
    files = sorted((arguments.data / "corpus").glob("*.jsonl.zst"))[: arguments.corpus_files]
    folder, label = arguments.store / f"select-{len(files)}", "real"
    if arguments.synthetic:
        source = Bootstrap(files)
        files = write_corpus(source, arguments.synthetic, arguments.store / f"synthetic-{source.settings['kind']}-{arguments.synthetic}")
        folder, label = arguments.store / f"select-synthetic-{arguments.synthetic}", f"synthetic ({source.settings['kind']})"
    build = [sys.executable, "-m", "cramlm", "index", *map(str, files), "--out", str(folder / "index")]
    subprocess.run(build, check=True)  # not in this process: the memory of a child includes its parent's at the start
    commands: dict[str, Callable[[Path], list[str]]] = {"cramlm": lambda out: ours(folder / "index", train, arguments.top_k, out)}
    missing = {}
    for name, peer in {"bm25s": bm25s_command, "Lucene": lucene_command}.items() if not arguments.synthetic else ():
        try:
            commands[name] = peer(folder, train, arguments.top_k)
        except (FileNotFoundError, ModuleNotFoundError) as error:
            missing[name] = str(error)
    runs: dict[str, list[Usage]] = {name: [] for name in commands}
    for _ in range(arguments.repeats + 1):
        for name, command in commands.items():
            out = folder / f"out-{name}"
            if out.is_dir():
                shutil.rmtree(out)
            out.unlink(missing_ok=True)
            runs[name].append(run(command(out)))
    rows = {
        name: {
            "first": each[0].cpu_seconds,
            "cpu_seconds": min(usage.cpu_seconds for usage in each[1:]),
            "seconds": min(usage.seconds for usage in each[1:]),
            "peak_megabytes": max(usage.peak_megabytes for usage in each),
        }
        for name, each in runs.items()
    }
    print("| | CPU s, whole process | first run | times cramlm | s | peak MB |\n|---|---|---|---|---|---|")
    for name, row in rows.items():
        ratio = row["cpu_seconds"] / rows["cramlm"]["cpu_seconds"]
        cells = [
            f"{row['cpu_seconds']:.2f}",
            f"{row['first']:.2f}",
            f"{ratio:.1f}",
            f"{row['seconds']:.1f}",
            f"{row['peak_megabytes']:,.0f}",
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    passages = len(Index.open(folder / "index"))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured: dict[str, Any] = {"benchmark": "select", "corpus": label, "date": date, "passages": passages}
    measured |= {"task": arguments.task, "top_k": arguments.top_k, "processes": rows, "missing": missing}
    if arguments.corpus_files is None:
        save(measured, synthetic=bool(arguments.synthetic))
    print(json.dumps(measured))


def save(measured: dict[str, Any], *, synthetic: bool) -> None:
    """Write the results; those on synthetic passages are an entry beside the others."""
    before: dict[str, Any] = json.loads(RESULTS.read_bytes()) if RESULTS.is_file() else {}
    kept = {name: value for name, value in before.items() if name == "synthetic"}
    content = before | {"synthetic": measured} if synthetic else measured | kept
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def ours(index: Path, train: Path, top_k: int, out: Path) -> list[str]:
    """Return our command."""
    options = {"--train": train, "--index": index, "--top-k": top_k, "--out": out}
    return [sys.executable, "-m", "cramlm", "select", *(str(each) for pair in options.items() for each in pair)]


def bm25s_command(folder: Path, train: Path, top_k: int) -> Callable[[Path], list[str]]:
    """Index the passages with bm25s, unless it is done; return its command for an output file. Raises ModuleNotFoundError without bm25s."""
    if importlib.util.find_spec("bm25s") is None:
        raise ModuleNotFoundError("pip install 'cramlm[bench]'")
    peer = [sys.executable, str(PEER)]
    if not (folder / "bm25s").is_dir():
        passages = folder / "passages.jsonl"
        with passages.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": document.text}) + "\n" for document in Index.open(folder / "index").corpus)
        index_once([*peer, "index", str(passages)], folder / "bm25s")
        passages.unlink()
    return lambda out: [*peer, "select", str(folder / "bm25s"), str(train), str(top_k), str(out)]


def lucene_command(folder: Path, train: Path, top_k: int) -> Callable[[Path], list[str]]:
    """Index the passages with Lucene, unless it is done; return its command. Raises FileNotFoundError without Java or Lucene's jar."""
    lucene = Lucene.compile(folder / "lucene-program", "LuceneSelect")
    queries = folder / "queries.txt"
    write_lines((json.loads(line)["text"] for line in train.read_text("utf-8").split("\n") if line), queries)
    if not (folder / "lucene").is_dir():
        passages = folder / "passages.txt"
        write_lines((document.text for document in Index.open(folder / "index").corpus), passages)
        index_once(lucene.command("index", passages), folder / "lucene")
        passages.unlink()
    return lambda out: lucene.command("select", folder / "lucene", queries, top_k, out)


def index_once(command: list[str], folder: Path) -> None:
    """Run an indexing command with an unfinished folder as its last argument, and give it its name when it is complete."""
    unfinished = folder.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    subprocess.run([*command, str(unfinished)], check=True, stdout=subprocess.DEVNULL)
    unfinished.rename(folder)


def write_lines(texts: Iterable[str], path: Path) -> None:
    """Write one text per line, with a space for every line break or other white space."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(" ".join(text.split()) + "\n" for text in texts)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process used: user + system seconds, wall-clock seconds, maximum resident set."""

    cpu_seconds: float
    seconds: float
    peak_megabytes: float


def run(command: list[str]) -> Usage:
    """Run a process with one thread per library."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages, those of the peer too, have their byte code on disk
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Usage(used.ru_utime + used.ru_stime, time.perf_counter() - began, used.ru_maxrss / 1024)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--store", type=Path, default=Path("runs/bench-store"))
    parser.add_argument("--task", default="chemprot")
    parser.add_argument("--top-k", type=int, default=500)
    parser.add_argument("--corpus-files", type=int, help="number of corpus files to use (default: all)")
    parser.add_argument("--synthetic", type=int, default=0, metavar="N", help="so many synthetic passages instead, without the peer")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
