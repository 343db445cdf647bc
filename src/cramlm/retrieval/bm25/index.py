"""The BM25 index of a corpus: segments that are built once and searched together.

    <store>/segments/<key>/     one segment (segment.py), shared by all corpora that contain its passages
    <store>/indexes/<key>/      index.json: the segments of one corpus, in order, the sums of their statistics, the analyzer's settings

Only the sums are global, so that a corpus that grows needs only new segments. Scores do not depend on the segmentation.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from cramlm.data.corpus import Corpus
from cramlm.errors import ArtifactError, UsageError, counted
from cramlm.io.executors import Executor, Processes, SummedProgress
from cramlm.records import Emit, Event, FloatArray, IntArray, silent
from cramlm.retrieval.bm25 import search as bm25
from cramlm.retrieval.bm25.analysis import PLAIN, Analyzer
from cramlm.retrieval.bm25.search import Queries, Scoring, Statistics, count_in_segments, make_queries, tokenize_texts
from cramlm.retrieval.bm25.segment import CODE_FORMAT, PLANS, Segment, SegmentPlan, build_segment, check_analyzer, plan_segments
from cramlm.storage.artifacts import MANIFEST, Artifact, hash_json, open_artifact, published_folders, verify, write_json
from cramlm.storage.locks import damage_named, lock, wait_while_locked
from cramlm.storage.stages import raise_if_checking, shared_stage

KIND: Final = "index"
LISTING: Final = "index.json"
SUMS: Final = ("documents", "postings", "tokens")
BM25: Final = Scoring()
_BUILD: Final = "cramlm.retrieval.bm25.segment:segment_job"


class Bm25Index:
    """An opened index, read-only: safe to share between threads and processes."""

    def __init__(self, path: Path, fingerprint: str, listing: dict[str, Any], segments: Sequence[Segment]) -> None:
        self.path, self.fingerprint, self.statistics = path, fingerprint, listing["sums"]
        firsts = accumulate((len(segment) for segment in segments), initial=0)
        self.segments = list(zip(firsts, segments, strict=False))
        self.corpus_fingerprint = str(listing["corpus"])
        self.analyzer = Analyzer.from_dict(listing.get("analyzer", {}))
        self.totals = Statistics(int(self.statistics["documents"]), int(self.statistics["tokens"]))

    @staticmethod
    def open(path: Path) -> Bm25Index:
        """Open an index.

        Raises:
            ArtifactError: a folder is damaged, missing, of another format or by another analyzer. EnvironmentFault: its stemmer is missing.
        """
        artifact = open_artifact(path, kind=KIND)
        listing = _listing(artifact)
        analyzer = Analyzer.from_dict(listing.get("analyzer", {}))
        check_analyzer(artifact, analyzer)
        segments = []
        for entry in listing["segments"]:
            segment = Segment.open(Path(os.path.normpath(path.absolute() / entry["path"])), analyzer)
            if segment.fingerprint != entry["fingerprint"] or len(segment) != entry["documents"]:
                raise ArtifactError(f"{segment.path}: is not the segment that {path} was built from; build the index again")
            segments.append(segment)
        return Bm25Index(path, artifact.fingerprint, listing, segments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send an index to another process as its path."""
        return Bm25Index.open, (self.path.absolute(),)

    @property
    def documents(self) -> int:
        return self.totals.documents

    def verify(self) -> None:
        """Check every byte of the index against its hashes.

        Raises:
            ArtifactError: a file was changed.
        """
        for path in (self.path, *(segment.path for _, segment in self.segments)):
            verify(path)

    def check_corpus(self, corpus: Corpus) -> None:
        """Raise ArtifactError if this index was built from another corpus."""
        if self.corpus_fingerprint != corpus.fingerprint or self.documents != len(corpus):
            raise ArtifactError(
                f"{self.path}: is the index of corpus {self.corpus_fingerprint[:16]}, not of {corpus.path} ({corpus.fingerprint[:16]}); "
                "build the index again"
            )

    def compile(self, texts: Sequence[str]) -> Queries:
        """Return the distinct queries of texts: terms in this index, counted; texts with equal terms are one query."""
        tokens = tokenize_texts(texts, self.analyzer)
        return make_queries(tokens, count_in_segments(tokens, [segment for _, segment in self.segments]))

    def search(
        self, texts: Sequence[str], *, limit: int, scoring: Scoring = BM25, threads: int = 1, emit: Emit = silent
    ) -> list[tuple[IntArray, FloatArray]]:
        """Return (positions in the corpus int64, scores float32 > 0) of the `limit` best documents for every text by BM25 (see search.py),
        by score, then position; repeated texts are searched once.
        """
        queries = self.compile(texts)
        found = {-1: (np.empty(0, np.int64), np.empty(0, np.float32))}  # of a text without a term in the index
        for number, position, score in self.search_distinct(queries, limit=limit, scoring=scoring, threads=threads, emit=emit):
            found[number] = position, score
        return [found[owner] for owner in queries.owner.tolist()]

    def search_distinct(
        self, queries: Queries, *, limit: int, scoring: Scoring = BM25, threads: int = 1, emit: Emit = silent
    ) -> Iterator[tuple[int, IntArray, FloatArray]]:
        """Yield (number of the distinct query, positions, scores), best first, in the order of the queries; memory is bounded."""
        hits = bm25.search_keys(self.segments, self.totals, queries, limit=limit, scoring=scoring, threads=threads, emit=emit)
        return ((query, *bm25.unpack(keys, fraction_bits)) for query, fraction_bits, keys in hits)

    def explain(self, query: str, position: int, *, scoring: Scoring = BM25) -> list[tuple[str, float]]:
        """Return the terms that a query shares with a document and what each adds to the score, largest first.

        Raises:
            UsageError: there is no document at this position.
        """
        if not 0 <= position < self.documents:
            raise UsageError(f"position {position:,} is not in an index of {self.documents:,} documents; pass one from 0 on")
        queries = self.compile([query])
        first, segment = next((first, segment) for first, segment in reversed(self.segments) if first <= position)
        weight = bm25.inverse_frequency(self.documents, queries.document_frequencies)[queries.term] * queries.count
        slot = int(np.flatnonzero(segment.order == position - first)[0])
        norm = float(bm25.length_norms(segment.lengths[slot : slot + 1], self.totals, scoring)[0])
        frequencies = segment.frequencies(slot, segment.find_terms(queries.vocabulary)[queries.term])
        parts = [
            (queries.vocabulary.term(term), share * (frequency / (frequency + norm)))
            for term, share, frequency in zip(queries.term.tolist(), weight.tolist(), frequencies.tolist(), strict=True)
            if frequency
        ]
        return sorted(parts, key=lambda part: (-part[1], part[0]))


def build_index(
    corpus: Corpus,
    store: Path,
    *,
    analyzer: Analyzer = PLAIN,
    workers: int = 1,
    executor: Executor | None = None,
    emit: Emit = silent,
) -> Bm25Index:
    """Build the index of a corpus, or open it if it is in the store.

    Segments in the store are reused; missing ones are built by `workers` processes or by `executor`, with the same result. A process uses
    up to 0.8 GB.

    Raises:
        ArtifactError: an existing segment or index is damaged. EnvironmentFault: the disk cannot be written.
    """
    key = {"code": CODE_FORMAT, "analyzer": analyzer.name, "corpus": corpus.fingerprint}
    target = store / "indexes" / hash_json(key)[:16]

    def build(plans: Sequence[SegmentPlan], passages: int) -> None:
        on_event = SummedProgress(KIND, total=passages, unit="passages", emit=emit)
        if executor is None and workers == 1:
            for number, plan in enumerate(plans):
                build_segment(corpus, plan, store / "segments", emit=partial(on_event, number))
        else:
            folders = {"corpus": str(corpus.path.absolute()), "segments": str((store / "segments").absolute())}
            tasks = [{**folders, "plan": PLANS.dump_python(plan, mode="json")} for plan in plans]
            (executor or Processes(workers)).map(_BUILD, tasks, on_event=on_event)

    def write(folder: Path) -> None:
        started = time.monotonic()
        plans = plan_segments(corpus, _latest_segments(store), analyzer=analyzer)
        emit(Event("start", KIND, f"indexing {counted(len(corpus), 'passage')}", total=len(corpus), unit="passages"))
        build(_missing(plans, store), len(corpus))
        listing = _listing_of(corpus, plans, [store / "segments" / plan.name for plan in plans], analyzer)
        write_json(folder / LISTING, listing)
        rate = len(corpus) / max(time.monotonic() - started, 1e-9)
        size = f"{counted(len(corpus), 'passage')}, {counted(listing['sums']['postings'], 'posting')} in {counted(len(plans), 'segment')}"
        summary = f"{size}, {rate:,.0f} passages/s"
        emit(Event("done", KIND, summary, done=len(corpus), total=len(corpus), unit="passages", data=listing["sums"]))

    def restore() -> None:
        if not (target / MANIFEST).exists() or not (missing := _missing(_listed_plans(target, analyzer), store)):
            return
        raise_if_checking(KIND, "segments of it are missing")
        with lock(target):
            passages = sum(plan.count for plan in missing)
            emit(Event("start", KIND, f"building {counted(len(missing), 'missing segment')} again", total=passages, unit="passages"))
            build(_missing(missing, store), passages)

    wait_while_locked(restore, stage=KIND, emit=emit)
    return Bm25Index.open(shared_stage(target, kind=KIND, key=key, write=write, emit=emit).path)


def verify_indexes(path: Path) -> None:
    """Check that no index at or below `path` lacks a segment; `artifacts.verify` checks the segments that exist.

    Raises:
        ArtifactError: a segment is missing, damaged, or not the one that an index was built from.
    """
    for folder in published_folders(path, holding=LISTING):
        Bm25Index.open(folder)


def _listing_of(corpus: Corpus, plans: Sequence[SegmentPlan], paths: Sequence[Path], analyzer: Analyzer) -> dict[str, Any]:
    segments = [Segment.open(path, analyzer) for path in paths]
    entries = [
        {
            "path": f"../../segments/{plan.name}",
            "fingerprint": segment.fingerprint,
            "content": list(plan.content),
            **{name: segment.statistics[name] for name in ("documents", "terms", "postings", "tokens")},
        }
        for plan, segment in zip(plans, segments, strict=True)
    ]
    sums = {name: sum(entry[name] for entry in entries) for name in SUMS}
    settings = {} if analyzer == PLAIN else {"analyzer": analyzer.as_dict()}
    return {"corpus": corpus.fingerprint, **settings, "sums": {**sums, "segments": len(segments)}, "segments": entries}


def _missing(plans: Sequence[SegmentPlan], store: Path) -> list[SegmentPlan]:
    return [plan for plan in plans if not (store / "segments" / plan.name / MANIFEST).exists()]


def _listed_plans(path: Path, analyzer: Analyzer) -> list[SegmentPlan]:
    """Return the plans of the segments of a published index. Raises ArtifactError if the index is damaged."""
    entries = _listing(open_artifact(path, kind=KIND))["segments"]
    firsts = accumulate((entry["documents"] for entry in entries), initial=0)
    return [
        SegmentPlan(first, entry["documents"], tuple(entry["content"]), analyzer) for first, entry in zip(firsts, entries, strict=False)
    ]


def _latest_segments(store: Path) -> list[tuple[str, ...]]:
    """Return the contents of the segments of the store's latest index, or nothing if that index is incomplete.

    Temporary folders of indexes that other processes build are ignored. A segment that was deleted is listed, too; it is built again.
    """
    listings = sorted((store / "indexes").glob(f"[!.]*/{LISTING}"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not listings:
        return []
    try:
        return [tuple(entry["content"]) for entry in json.loads(listings[-1].read_bytes())["segments"]]
    except (ValueError, KeyError, TypeError):
        return []


def _listing(artifact: Artifact) -> dict[str, Any]:
    path = artifact.path
    with damage_named(path, "delete the folder and build it again", what="damaged index"):
        listing: dict[str, Any] = json.loads((path / LISTING).read_bytes())
        sums = {name: sum(entry[name] for entry in listing["segments"]) for name in SUMS}
        if any(listing["sums"][name] != value for name, value in sums.items()):
            raise ValueError("the sums do not fit the segments")
    return listing
