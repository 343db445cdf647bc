"""Run one engine of bench_retrieval.py: build an index from text on disk, search it, write the figures.

    python benchmarks/engines.py JOB.json

The job has the engine, the paths of the corpus and its terms, and the queries. Every engine uses equal terms: bm25s, tantivy and Lucene
read texts of terms with spaces between them, which is the cheapest text to analyse; cramlm reads the original texts. All use BM25 with
k1 = 1.2, b = 0.75. Seconds are CPU seconds of the process (tantivy, Lucene: of the searching thread). Writes `figures.json` and, per
batch of queries and limit, the results of each distinct query.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import lucene_peer

WARM_UP = 3  # queries
JAVA_WARM_UP = 400


@dataclass(frozen=True)
class Batch:
    """Queries and their limit. The first `distinct` are distinct, the others repeat these."""

    name: str
    limit: int
    texts: list[str]
    terms: list[list[str]]
    distinct: int


@dataclass(frozen=True)
class TimedResults:
    """Results of the distinct queries (see lucene_peer.LuceneResults); CPU seconds for these, and for all queries with repetitions."""

    offsets: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    score: npt.NDArray[np.float32]
    distinct_seconds: float
    all_seconds: float


class Engine(Protocol):
    """`build` returns CPU seconds and a version or note; `search` yields one TimedResults per batch, in order."""

    def build(self) -> tuple[float, str]: ...

    def search(self, batches: Sequence[Batch]) -> Iterator[TimedResults]: ...


@dataclass
class Cramlm:
    """cramlm on a corpus that is built already. It merges equal queries itself, so both times are for all texts."""

    corpus: Path
    index: Path
    options: dict[str, Any]

    def build(self) -> tuple[float, str]:
        from cramlm.data.corpus import Corpus
        from cramlm.retrieval.bm25.index import build_index

        workers = self.options.get("workers", 1)
        clock = time.perf_counter if workers > 1 else time.process_time
        began = clock()
        self._index = build_index(Corpus.open(self.corpus), self.index, workers=workers)
        return clock() - began, ""

    def search(self, batches: Sequence[Batch]) -> Iterator[TimedResults]:
        for batch in batches:
            self._search([*batch.texts[:WARM_UP], "é"], batch.limit)  # with a non-ASCII text, which loads the Unicode table
            began = time.process_time()
            owner, results = self._search(batch.texts, batch.limit)
            seconds = time.process_time() - began
            chosen = [results[number] for number in owner[: batch.distinct].tolist()]
            offsets = np.cumsum([0, *(len(position) for position, _ in chosen)])
            position, score = (np.concatenate(side) for side in zip(*chosen, strict=True))
            yield TimedResults(offsets, position.astype(np.int64), score.astype(np.float32), seconds, seconds)

    def _search(self, texts: list[str], limit: int) -> tuple[Any, list[Any]]:
        from cramlm.retrieval.bm25.search import Scoring

        queries, scoring = self._index.compile(texts), Scoring(norm=self.options.get("norm", "exact"))
        return queries.owner, [results for _, *results in self._index.search_distinct(queries, limit=limit, scoring=scoring)]


@dataclass
class Bm25s:
    """bm25s with its numba back end. Building includes its own tokenizer, splitting at spaces only."""

    terms: Path
    index: Path

    def build(self) -> tuple[float, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import bm25s

        began = time.process_time()
        lines = self.terms.read_text("utf-8").split("\n")[:-1]
        tokenized = bm25s.tokenize(lines, lower=False, token_pattern=r"[^ ]+", stopwords=None, show_progress=False)
        del lines
        self._engine = bm25s.BM25(method="lucene", k1=1.2, b=0.75, backend="numba")
        self._engine.index(tokenized, show_progress=False)
        del tokenized
        self._engine.save(self.index, show_progress=False)
        seconds = time.process_time() - began
        gc.collect()
        return seconds, bm25s.__version__

    def search(self, batches: Sequence[Batch]) -> Iterator[TimedResults]:
        for batch in batches:
            queries = [self._engine.get_tokens_ids(terms) for terms in batch.terms]
            self._search(queries[:WARM_UP], batch.limit)
            began = time.process_time()
            positions, scores = self._search(queries[: batch.distinct], batch.limit)
            distinct_seconds = time.process_time() - began
            for first in range(batch.distinct, len(queries), 500):
                self._search(queries[first : first + 500], batch.limit)
            all_seconds = time.process_time() - began
            good = scores > 0
            offsets = np.concatenate(([0], np.cumsum(good.sum(axis=1))))
            yield TimedResults(offsets, positions[good].astype(np.int64), scores[good], distinct_seconds, all_seconds)

    def _search(self, queries: list[list[int]], limit: int) -> Any:
        limit = min(limit, self._engine.scores["num_docs"])
        return self._engine.retrieve(queries, k=limit, n_threads=0, show_progress=False)


@dataclass
class Tantivy:
    """tantivy, one writing thread, one segment where its merges allow. A repeated term is a boost: 3 times as fast as repeated clauses."""

    terms: Path
    index: Path

    def build(self) -> tuple[float, str]:
        import tantivy

        self._tantivy = tantivy
        builder = tantivy.SchemaBuilder().add_text_field("terms", tokenizer_name="terms", index_option="freq")
        self._schema = builder.add_integer_field("number", fast=True).build()
        self.index.mkdir(parents=True)
        engine = tantivy.Index(self._schema, path=str(self.index))
        engine.register_tokenizer("terms", tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build())
        began = time.process_time()
        writer = engine.writer(heap_size=4_000_000_000, num_threads=1)
        with self.terms.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines):
                writer.add_document(tantivy.Document(number=number, terms=line))
        writer.commit()
        writer.wait_merging_threads()
        seconds = time.process_time() - began
        engine.reload()
        self._searcher = engine.searcher()
        return seconds, f"{importlib.metadata.version('tantivy')}, {self._searcher.num_segments} segment(s)"

    def search(self, batches: Sequence[Batch]) -> Iterator[TimedResults]:
        for batch in batches:
            for terms in batch.terms[:WARM_UP]:
                self._search(terms, batch.limit)
            hits, seconds = [], []
            for number, terms in enumerate(batch.terms):
                began = time.thread_time()
                matches = self._search(terms, batch.limit)
                seconds.append(time.thread_time() - began)
                if number < batch.distinct:
                    positions = self._searcher.fast_field_values("number", [address for _, address in matches])
                    hits.append((np.array(positions, np.int64), np.array([score for score, _ in matches], np.float32)))
            offsets = np.cumsum([0, *(len(position) for position, _ in hits)])
            position, score = (np.concatenate(side) for side in zip(*hits, strict=True))
            yield TimedResults(
                offsets, position, (score / 2.2).astype(np.float32), sum(seconds[: batch.distinct]), sum(seconds)
            )  # its formula has the factor k1 + 1

    def _search(self, terms: list[str], limit: int) -> Any:
        query, clauses = self._tantivy.Query, []
        for term, count in Counter(terms).items():
            clause = query.term_query(self._schema, "terms", term, "freq")
            clauses.append((self._tantivy.Occur.Should, clause if count == 1 else query.boost_query(clause, count)))
        return self._searcher.search(query.boolean_query(clauses), limit, count=False).hits


@dataclass
class Lucene:
    """Lucene in a Java process, merged into one segment; building without start-up, compiler and garbage collector."""

    terms: Path
    index: Path

    def build(self) -> tuple[float, str]:
        self._lucene = lucene_peer.Lucene.compile(self.index.parent / "lucene")
        version, _, seconds = self._lucene.index(self.terms, self.index)
        return seconds, version

    def search(self, batches: Sequence[Batch]) -> Iterator[TimedResults]:
        queries = [(batch.terms, batch.limit) for batch in batches]
        for batch, results in zip(batches, self._lucene.search(self.index, queries, warm_up=JAVA_WARM_UP), strict=True):
            last = results.offsets[batch.distinct]
            yield TimedResults(
                results.offsets[: batch.distinct + 1],
                results.position[:last],
                results.score[:last],
                float(results.seconds[: batch.distinct].sum()),
                float(results.seconds.sum()),
            )


def make_engine(job: dict[str, Any], index: Path) -> Engine:
    """Return the engine of a job."""
    terms = Path(job["terms"])
    match job["engine"]:
        case "cramlm":
            return Cramlm(Path(job["corpus"]), index, dict(job["options"]))
        case "bm25s":
            return Bm25s(terms, index)
        case "tantivy":
            return Tantivy(terms, index)
        case "lucene":
            return Lucene(terms, index)
        case name:
            raise ValueError(f"no engine is called {name}")


def main() -> None:
    """Run a job."""
    job = json.loads(Path(sys.argv[1]).read_bytes())
    os.sched_setaffinity(0, job["cores"])
    folder = Path(job["folder"])
    figures: dict[str, Any] = {"engine": job["engine"], "searches": []}
    try:
        engine = make_engine(job, index := Path(job["index"]))
        figures["build_seconds"], figures["note"] = engine.build()
        figures["bytes"] = sum(path.stat().st_size for path in index.rglob("*") if path.is_file())
        figures["build_peak_megabytes"] = peak_megabytes()
        batches = [
            Batch(name, limit, queries["texts"], queries["terms"], queries["distinct"])
            for name, queries in json.loads(Path(job["queries"]).read_bytes()).items()
            for limit in job["limits"]
        ]
        for batch, results in zip(batches, engine.search(batches), strict=True):
            for name in ("offsets", "position", "score"):
                np.save(folder / f"{batch.name}-{batch.limit}-{name}.npy", getattr(results, name), allow_pickle=False)
            seconds = {"distinct_seconds": results.distinct_seconds, "all_seconds": results.all_seconds}
            figures["searches"].append({"queries": batch.name, "limit": batch.limit, **seconds})
        figures["peak_megabytes"] = peak_megabytes()
    except ModuleNotFoundError as error:
        figures["missing"] = f"no package {error.name}: pip install 'cramlm[bench]'"
    except FileNotFoundError as error:
        figures["missing"] = str(error)
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


def peak_megabytes() -> float:
    """Return the maximum resident memory of this process or of its child (getrusage of a child includes the parent's)."""
    (own,) = (int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024


if __name__ == "__main__":
    main()
