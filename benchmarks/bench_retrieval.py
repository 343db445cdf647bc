"""Batch BM25 beside bm25s (numba) on the same terms: seconds of one core, and whether both found the same.

    python benchmarks/bench_retrieval.py --data ../shared/data --task chemprot --passages 421140

Every training text of the task is a query. Both sides score with Lucene's formula (k1 = 1.2, b = 0.75) on the terms of our analyzer, in one
process and one thread, after a first query that compiles what numba compiles. Ours includes turning the queries into terms; bm25s gets
them as ids. bm25s is timed on the distinct queries, which ours finds by itself. Times are the process's CPU seconds. Prints a table and,
as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.config import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.task import read_examples
from cramlm.retrieval.analysis import analyze
from cramlm.retrieval.index import build_index

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import bm25s
    from bm25s.tokenization import Tokenized

WARM_UP = "cells of the river bank"


def main() -> None:
    """Index, search with both, compare, print."""
    arguments = parse_arguments()
    rows: list[dict[str, Any]] = []
    corpus, corpus_seconds = timed(lambda: build_corpus(CorpusConfig(files=corpus_files(arguments)), arguments.store))
    index, index_seconds = timed(lambda: build_index(corpus, arguments.store))
    print(
        f"{len(corpus):,} passages; read in {corpus_seconds:.1f} and indexed in {index_seconds:.1f} CPU seconds (less if they were there)"
    )

    examples = read_examples(str(arguments.data / "tasks" / arguments.task / "train.jsonl"), label_column="label")
    queries = [example.whole_text for example in examples]
    peer, vocabulary = peer_index(corpus)
    distinct = {tuple(sorted(analyze(query))) for query in queries}  # entity markers vanish: many texts are one query
    asked = [[vocabulary[term] for term in terms if term in vocabulary] for terms in sorted(distinct)]
    for limit in arguments.limits:
        index.search([WARM_UP], limit=limit)
        peer.retrieve([asked[0]], k=limit, show_progress=False, n_threads=0)
        hits, ours = timed(lambda limit=limit: index.search(queries, limit=limit))
        (positions, scores), theirs = timed(lambda limit=limit: peer.retrieve(asked, k=limit, show_progress=False, n_threads=0))
        union, peer_union = set(hits.position.tolist()), set(positions[scores > 0].tolist())
        rows.append(
            {
                "limit": limit,
                "queries": len(queries),
                "distinct": len(distinct),
                "cramlm_seconds": round(ours, 3),
                "bm25s_seconds": round(theirs, 3),
                "ratio": round(theirs / ours, 2),
                "union": len(union),
                "only_in_one": len(union ^ peer_union),
            }
        )
    print_table(rows)
    print(json.dumps({"benchmark": "retrieval", "task": arguments.task, "passages": len(corpus), "rows": rows}))


def peer_index(corpus: Corpus) -> tuple[Any, dict[str, int]]:
    """bm25s over the same passages and terms, and the ids of the terms."""
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(term, len(vocabulary)) for term in analyze(corpus.text(position))] for position in range(len(corpus))]
    peer = bm25s.BM25(method="lucene", k1=1.2, b=0.75, backend="numba")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.index(Tokenized(ids=ids, vocab=vocabulary), show_progress=False)
    return peer, vocabulary


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and its CPU seconds."""
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def print_table(rows: list[dict[str, Any]]) -> None:
    """Markdown, a row per K."""
    print("| K | queries (distinct) | cramlm, CPU s | bm25s numba, CPU s | ratio | union | passages in one union only |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (row["limit"], f"{row['queries']:,} ({row['distinct']:,})", row["cramlm_seconds"], row["bm25s_seconds"], row["ratio"])
        print(f"| {' | '.join(map(str, cells))} | {row['union']:,} | {row['only_in_one']} |")


def corpus_files(arguments: argparse.Namespace) -> tuple[str, ...]:
    """As many shards as hold the passages asked for; the shards are about equal."""
    shards = sorted(map(str, (arguments.data / "corpus").glob("*.jsonl.zst")))
    wanted = int(np.ceil(len(shards) * min(1.0, arguments.passages / 421_140)))
    return tuple(shards[: max(1, wanted)])


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--store", type=Path, default=Path("runs/bench-store"))
    parser.add_argument("--task", default="chemprot")
    parser.add_argument("--passages", type=int, default=100_000, help="rounded up to whole shards")
    parser.add_argument("--limits", nargs="+", type=int, default=[50, 500])
    arguments = parser.parse_args()
    if not (arguments.data / "corpus").is_dir():
        parser.error(f"{arguments.data}: no corpus/ there; pass --data FOLDER with tasks/NAME/*.jsonl and corpus/*.jsonl.zst")
    return arguments


if __name__ == "__main__":
    main()
