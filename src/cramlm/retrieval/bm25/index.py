"""The index of a corpus: shards built once, searched together by batches of queries.

    <store>/shards/<key>/       one per run of passages (shard.py), shared by all corpora that hold the run
    <store>/indexes/<key>/      index.json: the shards of one corpus, in order, and their sums

Nothing global is stored but sums, so that a corpus that grew needs new shards only. Scores do not depend on how it is cut.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from cramlm.data.corpus import Corpus
from cramlm.errors import ArtifactError, UsageError
from cramlm.io.executors import Executor, Processes, SummedProgress
from cramlm.records import Emit, Event, FloatArray, IntArray, silent
from cramlm.retrieval.bm25 import search as bm25
from cramlm.retrieval.bm25.analysis import ANALYZER
from cramlm.retrieval.bm25.search import Queries, Scoring, Statistics, count_in_shards, make_queries, tokenise_texts
from cramlm.retrieval.bm25.segment import CODE_FORMAT, Run, Shard, build_shard, plan_runs, shard_task
from cramlm.storage.artifacts import MANIFEST, Artifact, environment_faults, hash_json, open_artifact, shared_stage, verify

KIND: Final = "index"
LISTING: Final = "index.json"
SUMS: Final = ("documents", "postings", "tokens")
BM25: Final = Scoring()

Status: TypeAlias = Literal["answered", "empty", "failed"]


@dataclass(frozen=True, slots=True)
class Hits:
    """What a batch of queries found. Query q's are position[offsets[q]:offsets[q + 1]], by (score descending, position ascending).

    offsets: int64 (Q + 1,). position: int64, place in the corpus. score: float32, > 0. status: "empty" where a query has no term that the
    index knows.
    """

    offsets: IntArray
    position: IntArray
    score: FloatArray
    status: list[Status]


class Index:
    """An opened index. Cheap to open, safe to share between threads and processes (it is never written)."""

    def __init__(self, path: Path, fingerprint: str, listing: dict[str, Any], shards: Sequence[Shard]) -> None:
        self.path, self.fingerprint, self.statistics = path, fingerprint, listing["sums"]
        firsts = accumulate((len(shard) for shard in shards), initial=0)
        self.shards = list(zip(firsts, shards, strict=False))
        self.corpus_fingerprint = str(listing["corpus"])
        self.totals = Statistics(int(self.statistics["documents"]), int(self.statistics["tokens"]))

    @staticmethod
    def open(path: Path) -> Index:
        """Raises ArtifactError if a folder is damaged, missing, of another format or by another analyzer."""
        artifact = open_artifact(path, kind=KIND)
        listing = _listing(artifact)
        shards = []
        for entry in listing["shards"]:
            shard = Shard.open(Path(os.path.normpath(path.absolute() / entry["path"])))
            if shard.fingerprint != entry["fingerprint"] or len(shard) != entry["documents"]:
                raise ArtifactError(f"{shard.path}: is not the shard that {path} was made of; build the index again")
            shards.append(shard)
        return Index(path, artifact.fingerprint, listing, shards)

    @property
    def documents(self) -> int:
        return self.totals.documents

    def verify(self) -> None:
        """Read every byte of the index. Raises ArtifactError if one is not as it was written."""
        for path in (self.path, *(shard.path for _, shard in self.shards)):
            verify(path)

    def check_corpus(self, corpus: Corpus) -> None:
        """Raises ArtifactError if this index was built over another corpus."""
        if self.corpus_fingerprint != corpus.fingerprint or self.documents != len(corpus):
            raise ArtifactError(
                f"{self.path}: is the index of corpus {self.corpus_fingerprint[:16]}, not of {corpus.path} ({corpus.fingerprint[:16]}); "
                "build the index again"
            )

    def compile(self, texts: Sequence[str]) -> Queries:
        """Texts as this index sees them; texts with equal terms are one query."""
        tokens = tokenise_texts(texts)
        return make_queries(tokens, count_in_shards(tokens, [shard for _, shard in self.shards]))

    def search(self, texts: Sequence[str], *, limit: int, scoring: Scoring = BM25, threads: int = 1, emit: Emit = silent) -> Hits:
        """The `limit` best documents for every text by BM25, as Lucene scores it (see bm25.py); repeated texts cost nothing."""
        queries = self.compile(texts)
        counts = np.zeros(len(queries) + 1, np.int64)
        positions: list[IntArray] = [np.empty(0, np.int64)]
        scores: list[FloatArray] = [np.empty(0, np.float32)]
        for number, position, score in self.search_distinct(queries, limit=limit, scoring=scoring, threads=threads, emit=emit):
            counts[number] = len(position)
            positions.append(position)
            scores.append(score)
        starts = np.concatenate(([0], np.cumsum(counts)))
        owner = queries.owner  # -1 (no known term) stands for the last count, which is 0
        offsets = np.concatenate(([0], np.cumsum(counts[owner])))
        place = np.arange(offsets[-1]) + np.repeat(starts[:-1][owner] - offsets[:-1], counts[owner])
        status: list[Status] = ["empty" if number < 0 else "answered" for number in owner.tolist()]
        return Hits(offsets, np.concatenate(positions)[place], np.concatenate(scores)[place], status)

    def search_distinct(
        self, queries: Queries, *, limit: int, scoring: Scoring = BM25, threads: int = 1, emit: Emit = silent
    ) -> Iterator[tuple[int, IntArray, FloatArray]]:
        """(number of the distinct query, positions, scores), best first, in the order of the queries; memory is bounded."""
        return bm25.search(self.shards, self.totals, queries, limit=limit, scoring=scoring, threads=threads, emit=emit)

    def explain(self, query: str, position: int, *, scoring: Scoring = BM25) -> list[tuple[str, float]]:
        """The terms that a query shares with a document and what each adds to the score, heaviest first.

        Raises:
            UsageError: if there is no document at this position.
        """
        if not 0 <= position < self.documents:
            raise UsageError(f"position {position:,} is not in an index of {self.documents:,} documents; pass one from 0 on")
        queries = self.compile([query])
        first, shard = next((first, shard) for first, shard in reversed(self.shards) if first <= position)
        weight = bm25.inverse_frequency(self.documents, queries.document_frequencies)[queries.term] * queries.count
        slot = int(np.flatnonzero(shard.order == position - first)[0])
        norm = float(bm25.length_norms(shard.lengths[slot : slot + 1], self.totals, scoring)[0])
        frequencies = shard.frequencies(slot, shard.find_terms(queries.vocabulary)[queries.term])
        parts = [
            (queries.vocabulary.term(term), share * (frequency / (frequency + norm)))
            for term, share, frequency in zip(queries.term.tolist(), weight.tolist(), frequencies.tolist(), strict=True)
            if frequency
        ]
        return sorted(parts, key=lambda part: (-part[1], part[0]))


def build_index(corpus: Corpus, store: Path, *, workers: int = 1, executor: Executor | None = None, emit: Emit = silent) -> Index:
    """The index of this corpus: what is in the store, and the rest built now, by `workers` processes or by `executor`; that changes nothing
    in it. A process takes up to 0.8 GB.

    Raises:
        ArtifactError: if what is there is damaged. EnvironmentFault: if the disk refuses.
    """
    key = {"code": CODE_FORMAT, "analyzer": ANALYZER, "corpus": corpus.fingerprint}
    target = store / "indexes" / hash_json(key)[:16]

    def write(folder: Path) -> None:
        started = time.monotonic()
        runs = plan(corpus, store)
        emit(Event("start", KIND, f"indexing {len(corpus):,} passages", total=len(corpus), unit="passages"))
        missing = missing_shards(runs, store)
        if executor is None and workers == 1:
            on_event = _summed(corpus, emit)
            for number, run in enumerate(missing):
                build_shard(corpus, run, store / "shards", emit=partial(on_event, number))
        else:
            build_shards(corpus, missing, store, executor or Processes(workers), emit=emit)
        listing = _listing_of(corpus, runs, [store / "shards" / run.name for run in runs])
        (folder / LISTING).write_text(json.dumps(listing, indent=1) + "\n", "utf-8")
        rate = len(corpus) / max(time.monotonic() - started, 1e-9)
        summary = f"{len(corpus):,} passages, {listing['sums']['postings']:,} postings in {len(runs)} shards, {rate:,.0f} passages/s"
        emit(Event("done", KIND, summary, done=len(corpus), total=len(corpus), unit="passages", data=listing["sums"]))

    return Index.open(shared_stage(target, kind=KIND, key=key, write=write, emit=emit).path)


def verify_indexes(path: Path) -> None:
    """Open every index at or below `path`: `artifacts.verify` checks the shards that are there, this that none is missing.

    Raises:
        ArtifactError: naming a shard that is missing, damaged, or not the one that an index was made of.
    """
    for listing in sorted(path.rglob(LISTING)):
        if (listing.parent / MANIFEST).exists() and not any(".tmp-" in name for name in listing.relative_to(path).parts):
            Index.open(listing.parent)


def _listing_of(corpus: Corpus, runs: Sequence[Run], paths: Sequence[Path]) -> dict[str, Any]:
    shards = [Shard.open(path) for path in paths]
    entries = [
        {
            "path": f"../../shards/{run.name}",
            "fingerprint": shard.fingerprint,
            "content": list(run.content),
            **{name: shard.statistics[name] for name in ("documents", "terms", "postings", "tokens")},
        }
        for run, shard in zip(runs, shards, strict=True)
    ]
    sums = {name: sum(entry[name] for entry in entries) for name in SUMS}
    return {"corpus": corpus.fingerprint, "sums": {**sums, "shards": len(shards)}, "shards": entries}


def plan(corpus: Corpus, store: Path) -> list[Run]:
    """The shards that an index of this corpus will have: equal for all who ask while no index is published."""
    return plan_runs(corpus, _kept(store))


def missing_shards(runs: Sequence[Run], store: Path) -> list[Run]:
    """Those that are not in the store."""
    return [run for run in runs if not (store / "shards" / run.name / MANIFEST).exists()]


def build_shards(corpus: Corpus, runs: Sequence[Run], store: Path, executor: Executor, *, emit: Emit = silent) -> None:
    """Build some shards of a published corpus. Raises as `build_index`."""
    folders = {"corpus": str(corpus.path.absolute()), "shards": str((store / "shards").absolute())}
    executor.map(
        f"{shard_task.__module__}:{shard_task.__name__}",
        [{**folders, **asdict(run)} for run in runs],
        on_event=_summed(corpus, emit),
    )


def _summed(corpus: Corpus, emit: Emit) -> SummedProgress:
    return SummedProgress(KIND, total=len(corpus), unit="passages", emit=emit)


def _kept(store: Path) -> list[tuple[str, ...]]:
    """The contents of the shards of the store's latest index; one that is not there any more is built again like any other."""
    listings = sorted((store / "indexes").glob(f"*/{LISTING}"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not listings:
        return []
    try:
        return [tuple(entry["content"]) for entry in json.loads(listings[-1].read_bytes())["shards"]]
    except (ValueError, KeyError, TypeError):
        return []


def _listing(artifact: Artifact) -> dict[str, Any]:
    path = artifact.path
    if (analyzer := artifact.key.get("analyzer")) != ANALYZER:
        raise ArtifactError(f"{path}: indexed by analyzer {analyzer!r}, this cramlm has {ANALYZER!r}; build the index again")
    try:
        with environment_faults(path):
            listing: dict[str, Any] = json.loads((path / LISTING).read_bytes())
        sums = {name: sum(entry[name] for entry in listing["shards"]) for name in SUMS}
        if any(listing["sums"][name] != value for name, value in sums.items()):
            raise ValueError("the sums do not fit the shards")
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: damaged index ({error}); delete the folder and build it again") from error
    return listing
