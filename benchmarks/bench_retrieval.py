"""Batch BM25 of cramlm, bm25s, tantivy and Lucene on the same terms: CPU seconds of one core, and agreement of the results.

    python benchmarks/bench_retrieval.py                                # 421,140 real passages and a million synthetic ones
    python benchmarks/bench_retrieval.py --sample 0                     # the same with every query on both sides
    python benchmarks/bench_retrieval.py --passages 100000 --synthetic 0 --engines cramlm bm25s

Every training text of the task is a query; TLM trains on the union of the results. cramlm takes texts, finds equal queries
itself, and its time includes the analysis; the others take terms, and are timed over all texts and over the distinct queries.
cramlm searches with all queries; the others by default with a sample (`--sample`) of the distinct queries and the texts that repeat these,
and their seconds are scaled up (marked in the table). Single queries of 15 and 150 words are made from the same texts. Each
engine runs in its own process, bound to one core, after a warm-up; its figures are CPU seconds. k1 = 1.2, b = 0.75, no stop words.

Results are compared up to ties: a document that only one side returned for a query is counted if its exact float64 score differs from that
of the last returned document by more than 1e-6 (relative). tantivy and Lucene keep document lengths in one byte, so they are compared with
cramlm under `norm="lucene"`. Prints Markdown tables and, as the last line, one JSON object; writes benchmarks/results/retrieval.json, in
which a corpus that was not measured this time keeps its figures, with their date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.task import RowFormat, read_examples
from cramlm.records import Event
from retrieval_tables import print_tables
from synthetic import Bootstrap, Invented, write_corpus
from terms import Integers, Norm, Queries, TermCorpus

REAL_PASSAGES: Final = 421_140
TIE: Final = 1e-6
ENGINES: Final = ("cramlm", "bm25s", "tantivy", "lucene")
ONE_BYTE_LENGTHS: Final = ("tantivy", "lucene")
TEXTS: Final = "texts"
POOLS: Final = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class StoredResults:
    """Results of an engine on disk; see engines.TimedResults."""

    offsets: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    score: npt.NDArray[np.float32]

    @staticmethod
    def read(folder: Path, queries: str, limit: int) -> StoredResults:
        return StoredResults(
            *(np.load(folder / f"{queries}-{limit}-{name}.npy", allow_pickle=False) for name in ("offsets", "position", "score"))
        )


def main() -> None:
    """Measure on each corpus, then print the tables."""
    arguments = parse_arguments()
    target = Path(__file__).parent / "results" / "retrieval.json"
    target.parent.mkdir(exist_ok=True)
    measured: dict[str, Any] = {"benchmark": "retrieval", "task": arguments.task if arguments.data else "invented", "corpora": []}
    before = json.loads(target.read_bytes())["corpora"] if target.is_file() else []
    for corpus in corpora(arguments):
        measured["corpora"].append(measure(corpus, arguments))
        done = {each["corpus"] for each in measured["corpora"]}
        kept = [each for each in before if each["corpus"] not in done]
        target.write_text(json.dumps(measured | {"corpora": kept + measured["corpora"]}, indent=1) + "\n", "utf-8")
    print_tables(measured)
    print(json.dumps(measured))


@dataclass(frozen=True)
class Files:
    """A corpus and the engines to measure on it. every_kind: also with queries of 15 and 150 words, not only with the task's texts."""

    label: str
    paths: tuple[str, ...]
    engines: tuple[str, ...]
    every_kind: bool


def corpora(arguments: argparse.Namespace) -> list[Files]:
    """Yield the real corpus, a synthetic one, and the real one sorted by source."""
    engines, chosen, store = tuple(arguments.engines), [], arguments.store
    if arguments.data and arguments.passages:
        files = sorted((arguments.data / "corpus").glob("*.jsonl.zst"))
        files = files[: max(1, round(len(files) * min(1.0, arguments.passages / REAL_PASSAGES)))]
        chosen.append(Files("real", tuple(map(str, files)), engines, True))
        ordered = sort_by_source(files, store / f"by-source-{len(files)}.jsonl.zst")
        chosen.append(Files("real, sorted by source", (str(ordered),), ("cramlm",), False))
    if arguments.synthetic:
        files = sorted((arguments.data / "corpus").glob("*.jsonl.zst")) if arguments.data else []
        source = Bootstrap(files) if files else Invented()
        name = f"synthetic-{source.settings['kind']}-{arguments.synthetic}"
        made = write_corpus(source, arguments.synthetic, store / name)
        chosen.append(Files(f"synthetic ({source.settings['kind']})", tuple(map(str, made)), engines, True))
    return chosen


def measure(files: Files, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every engine on a corpus."""
    work = arguments.store / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    read: list[Event] = []
    began = os.times()
    corpus = build_corpus(CorpusConfig(files=files.paths), arguments.store, emit=read.append)
    seconds = None if any(event.kind == "up_to_date" for event in read) else cpu_since(began)
    say(f"{files.label}: {len(corpus):,} passages; analysing them for the peers")
    terms = TermCorpus.write(corpus, work)
    queries = [terms.queries(TEXTS, texts := task_texts(arguments))]
    if files.every_kind:
        queries += [terms.queries(f"{size} words", cut(texts, size), most=arguments.queries) for size in (15, 150)]
    sampled = [each.sample(arguments.sample // (1 if each.name == TEXTS else 4) or each.distinct) for each in queries]
    write_queries(work / "queries.json", queries)
    write_queries(work / "sample.json", [part for part, _ in sampled])
    result: dict[str, Any] = {
        "corpus": files.label,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "passages": len(corpus),
        "words": int(terms.starts[-1]),
        "postings": terms.postings,
        "terms": len(terms.frequency),
        "reading_seconds": seconds,
        "queries": {each.name: [len(each.texts), each.distinct] for each in queries},
        "sample": {part.name: [len(part.texts), part.distinct] for part, _ in sampled},
        "engines": {},
    }
    engines = result["engines"]
    for name, options in jobs(files.engines):
        engines[name] = run_engine(name, options, corpus, work, arguments)
        if name in files.engines[1:] and "missing" not in engines[name]:
            ours = "cramlm, one-byte lengths" if name in ONE_BYTE_LENGTHS else "cramlm"
            if "missing" not in engines.get(ours, {"missing": ""}):
                norm: Norm = "lucene" if name in ONE_BYTE_LENGTHS else "exact"
                folders = work / ours, work / name
                engines[name]["agreement"] = [compare(terms, *sampled[0], *folders, limit, norm) for limit in arguments.limits]
            shutil.rmtree(work / name)
    own = (StoredResults.read(work / "cramlm", TEXTS, limit) for limit in arguments.limits)
    engines["cramlm"]["unions"] = [len(np.unique(results.position)) for results in own]
    shutil.rmtree(work)
    return result


def jobs(engines: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Return name and options of each run, in order: cramlm also with two workers and with Lucene's lengths, if others need them."""
    chosen: list[tuple[str, dict[str, Any]]] = [("cramlm", {})]
    if len(engines) > 1:
        chosen.append(("cramlm, 2 workers", {"workers": 2}))
    if set(engines) & set(ONE_BYTE_LENGTHS):
        chosen.append(("cramlm, one-byte lengths", {"norm": "lucene"}))
    return chosen + [(name, {}) for name in engines if name != "cramlm"]


def run_engine(name: str, options: dict[str, Any], corpus: Corpus, work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run an engine in its own process; return its figures, or {"missing": reason}."""
    folder = work / name
    folder.mkdir()
    cores = sorted(os.sched_getaffinity(0))
    job = {
        "engine": name.split(",")[0],
        "options": options,
        "folder": str(folder),
        "index": str((work / "cramlm" if "norm" in options else folder) / "index"),
        "corpus": str(corpus.path),
        "terms": str(work / "terms.txt"),
        "queries": str(work / ("queries.json" if name.startswith("cramlm") else "sample.json")),
        "limits": [] if "workers" in options else arguments.limits,
        "cores": cores[-2:] if "workers" in options else cores[-1:],
    }
    (folder / "job.json").write_text(json.dumps(job), "utf-8")
    say(f"  {name}")
    command = [sys.executable, str(Path(__file__).parent / "engines.py"), str(folder / "job.json")]
    done = subprocess.run(command, env=os.environ | dict.fromkeys(POOLS, "1"))
    if done.returncode:
        return {"missing": f"failed with exit code {done.returncode}, see above"}
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_bytes())
    if "missing" in figures:
        say(f"    {figures['missing']}")
    return figures


def write_queries(path: Path, queries: list[Queries]) -> None:
    """Write queries for engines.py."""
    content = {each.name: {"texts": each.texts, "terms": each.terms, "distinct": each.distinct} for each in queries}
    path.write_text(json.dumps(content), "utf-8")


def compare(terms: TermCorpus, queries: Queries, chosen: Integers, ours: Path, peer: Path, limit: int, norm: Norm) -> dict[str, Any]:
    """Compare the results of cramlm and a peer, up to ties at the limit. The peer's query q is our chosen[q].

    union, peer_union: documents. only_in_one: documents of one union. unlike_pairs: (query, document) that one side returned;
    beyond_ties: those whose exact score is not within 1e-6 of the last returned one's. score_difference: largest, relative, by rank.
    """
    mine, theirs = StoredResults.read(ours, TEXTS, limit), StoredResults.read(peer, TEXTS, limit)
    query, position, last = [], [], []
    score_difference = 0.0
    owns = [slice(mine.offsets[number], mine.offsets[number + 1]) for number in chosen.tolist()]
    for number, own in enumerate(owns):
        other = slice(theirs.offsets[number], theirs.offsets[number + 1])
        unlike = np.setxor1d(mine.position[own], theirs.position[other])
        query.append(np.full(len(unlike), number))
        position.append(unlike)
        last.append(np.full(len(unlike), mine.position[own][-1]))
        shared = min(own.stop - own.start, other.stop - other.start)
        left, right = mine.score[own][:shared], theirs.score[other][:shared]
        score_difference = max(score_difference, float(np.max(np.abs(left - right) / left, initial=0)))
    pairs, unlike, cut_off = np.concatenate(query), np.concatenate(position), np.concatenate(last)
    exact = terms.scores(queries, pairs, unlike, norm)
    gap = np.abs(exact / terms.scores(queries, pairs, cut_off, norm) - 1)
    union, peer_union = np.unique(np.concatenate([mine.position[own] for own in owns])), np.unique(theirs.position)
    return {
        "limit": limit,
        "union": len(union),
        "peer_union": len(peer_union),
        "only_in_one": len(np.setxor1d(union, peer_union)),
        "unlike_pairs": len(gap),
        "beyond_ties": int((gap > TIE).sum()),
        "largest_gap": float(gap.max(initial=0)),
        "score_difference": score_difference,
    }


def task_texts(arguments: argparse.Namespace) -> list[str]:
    """Return the training texts of the task; without data as many invented ones, with as many repetitions as in ChemProt."""
    if arguments.data:
        examples = read_examples(str(arguments.data / "tasks" / arguments.task / "train.jsonl"), RowFormat())
        return [example.whole_text for example in examples]
    texts, _ = Invented(seed=2).passages(np.arange(1659), 1659)
    return [" ".join(texts[number % 1659].decode().split()[:31]) for number in range(4169)]


def cut(texts: list[str], words: int) -> list[str]:
    """Return texts of so many words: the beginnings of longer texts, or pieces of all texts in turn."""
    if beginnings := [" ".join(text.split()[:words]) for text in texts if words < 31 <= len(text.split())]:
        return beginnings
    stream = " ".join(dict.fromkeys(texts)).split()
    return [" ".join(stream[first : first + words]) for first in range(0, len(stream) - words + 1, words)]


def sort_by_source(files: list[Path], target: Path) -> Path:
    """Write the rows sorted by (source, id); return the file."""
    if not target.is_file():
        rows = []
        for file in files:
            content = zstandard.ZstdDecompressor().stream_reader(file.read_bytes()).read()
            rows += [(row["source"], row["id"], line) for line in content.splitlines() for row in [json.loads(line)]]
        rows.sort(key=lambda row: row[:2])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(zstandard.compress(b"\n".join(line for _, _, line in rows) + b"\n", 1))
    return target


def cpu_since(began: os.times_result) -> float:
    """Return the CPU seconds of this process and of its finished children."""
    now = os.times()
    return sum(now[:4]) - sum(began[:4])


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. `data` is None without a folder with corpus/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/*.jsonl.zst")
    parser.add_argument("--store", type=Path, default=Path("runs/bench-store"), help="folder for corpora")
    parser.add_argument("--task", default="chemprot")
    parser.add_argument("--passages", type=int, default=REAL_PASSAGES, help="real ones, rounded to whole files; 0: none")
    parser.add_argument("--synthetic", type=int, help="passages; 0: none. 1,000,000 by default, 100,000 invented ones without --data")
    parser.add_argument("--limits", nargs="+", type=int, default=[50, 500, 5000], metavar="K")
    parser.add_argument(
        "--sample", type=int, default=200, help="distinct texts for the others, and a quarter of it of 15 and 150 words; 0: all"
    )
    parser.add_argument("--queries", type=int, default=512, help="how many of 15 words, and of 150")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    arguments = parser.parse_args()
    arguments.engines = [name for name in ENGINES if name in arguments.engines or name == "cramlm"]
    if not list((arguments.data / "corpus").glob("*.jsonl.zst")):
        say(f"{arguments.data}: no corpus/*.jsonl.zst there; invented words instead")
        arguments.data = None
    if arguments.synthetic is None:
        arguments.synthetic = 1_000_000 if arguments.data else 100_000
    return arguments


if __name__ == "__main__":
    main()
