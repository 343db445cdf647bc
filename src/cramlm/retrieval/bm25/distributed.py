"""Distributed BM25 search: jobs that read and write files, for groups of an index's segments, by processes or machines.

    <folder>/batch/             the texts, the groups of segments, the scoring: everything the jobs read besides the segments
      ─► count_job ─► <folder>/counts/<group>/    document frequency of each term of the batch in the group
      ─► summed ────► <folder>/statistics/        document frequency in the whole index
      ─► score_job ─► <folder>/hits/<group>/      for every distinct query the best `limit` passages of the group, by these statistics
      ─► `DistributedSearch.merge` ─► the best of all groups

    batch/        texts.bin, offsets.npy int64 (texts + 1,), batch.json
    counts/, statistics/    frequencies.npy int64 (terms,)
    hits/         offsets.npy int64 (queries + 1,), keys.npy uint64 (fixed-point score << 32 | ~position), fraction_bits.npy int8 (queries,)

Each group's hits are exact and scores are fixed-point integers, so the result equals that of `Bm25Index.search_distinct` for any grouping
and any workers. On one machine `Bm25Index.search_distinct` is faster: one threshold per query for all segments, and no files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.errors import ArtifactError, UsageError
from cramlm.io.executors import Executor, Processes, SummedProgress
from cramlm.records import Emit, FloatArray, IntArray, silent
from cramlm.retrieval.bm25.analysis import PLAIN, Analyzer
from cramlm.retrieval.bm25.index import Bm25Index
from cramlm.retrieval.bm25.kernels import BLOCK
from cramlm.retrieval.bm25.search import (
    PackedHits,
    Queries,
    Scoring,
    Statistics,
    TokenizedTexts,
    count_in_segments,
    make_queries,
    search_keys,
    tokenize_texts,
    unpack,
)
from cramlm.retrieval.bm25.segment import Segment, load_array
from cramlm.storage.arrays import ArrayFile, joined, offsets_of, read_array, save_array
from cramlm.storage.artifacts import MANIFEST, Artifact, hash_json, kind_of_artifact, open_artifact, verify, write_json
from cramlm.storage.locks import damage_named, environment_faults, wait_while_locked
from cramlm.storage.stages import stage

CODE_FORMAT: Final = 3  # increase when the same search gives other files
MAX_GROUPS: Final = 256  # a group has `limit` hits per query: more groups cost space and merging
FEW_SEGMENTS: Final = 64  # counting in one takes 0.02 CPU seconds for 1,659 queries of 150 words; starting a process takes 1
STAGE: Final = "search"
_NAME: Final = re.compile(r"[0-9a-f]{16}")
_BATCH: Final = "batch"
_FOLDERS: Final = {_BATCH, "counts", "statistics", "hits"}


@dataclass(frozen=True, slots=True)
class SegmentReference:
    """A segment: its folder, fingerprint, position of its first passage, and number of passages."""

    path: str
    fingerprint: str
    first: int
    documents: int


@dataclass(frozen=True, slots=True)
class DistributedSearch:
    """A published batch of texts to search for in an index."""

    folder: Path
    fingerprint: str
    limit: int
    scoring: Scoring
    totals: Statistics
    groups: tuple[tuple[SegmentReference, ...], ...]
    analyzer: Analyzer

    @staticmethod
    def open(folder: Path) -> DistributedSearch:
        """Open a batch.

        Raises:
            ArtifactError: the batch is missing or damaged.
        """
        artifact = open_artifact(folder / _BATCH, kind=_BATCH)
        with damage_named(artifact.path, "delete the folder and search again", what="damaged batch"):
            data = json.loads((artifact.path / "batch.json").read_bytes())
            groups = tuple(tuple(SegmentReference(**reference) for reference in group) for group in data["groups"])
            scoring, totals = Scoring(**data["scoring"]), Statistics(**data["totals"])
            analyzer = Analyzer.from_dict(data.get("analyzer", {}))
            return DistributedSearch(folder, artifact.fingerprint, int(data["limit"]), scoring, totals, groups, analyzer)

    def path(self, kind: str, group: int) -> Path:
        """Return the folder of a group's counts or hits."""
        return self.folder / kind / f"{group:04d}"

    def missing(self, kind: str) -> list[int]:
        """Return the groups without counts or hits."""
        return [group for group in range(len(self.groups)) if not (self.path(kind, group) / MANIFEST).exists()]

    def segments(self, group: int) -> list[tuple[int, Segment]]:
        """Open the group's segments, each with the position of its first passage.

        Raises:
            ArtifactError: a segment is damaged, or not the one that the batch was made for.
        """
        opened = []
        for reference in self.groups[group]:
            segment = Segment.open(Path(reference.path), self.analyzer)
            if segment.fingerprint != reference.fingerprint or len(segment) != reference.documents:
                raise ArtifactError(f"{reference.path}: is not the segment of search {self.folder}; build the index and search again")
            opened.append((reference.first, segment))
        return opened

    def tokens(self) -> TokenizedTexts:
        """Return the tokenized texts of the batch."""
        text = (self.folder / _BATCH / "texts.bin").read_bytes()
        offsets = read_array(self.folder / _BATCH / "offsets.npy").tolist()
        return tokenize_texts([text[start:end].decode() for start, end in pairwise(offsets)], self.analyzer)

    def queries(self) -> Queries:
        """Return the distinct queries of the batch; requires the statistics."""
        return make_queries(self.tokens(), _read(self.folder / "statistics", "frequencies", np.int64))

    def count(self, executor: Executor, emit: Emit = silent) -> Queries:
        """Count document frequencies in all groups, sum them, and return the distinct queries."""
        few = sum(map(len, self.groups)) <= FEW_SEGMENTS
        _run(self, "counts", self.missing("counts"), Processes() if few else executor, silent)
        inputs = [_open(self, "counts", group) for group in range(len(self.groups))]

        def write(folder: Path) -> None:
            frequencies = np.sum([_read(artifact.path, "frequencies", np.int64) for artifact in inputs], axis=0)
            save_array(folder / "frequencies.npy", frequencies)

        key = {"code": CODE_FORMAT, "batch": self.fingerprint, "counts": [artifact.fingerprint for artifact in inputs]}
        _stage(self.folder / "statistics", "statistics", key, write, emit)
        return self.queries()

    def score(self, groups: Sequence[int], executor: Executor, emit: Emit = silent) -> None:
        """Score some groups; requires the statistics of `count`."""
        _run(self, "hits", groups, executor, emit)

    def merge(self) -> Iterator[tuple[int, IntArray, FloatArray]]:
        """Yield (distinct query, positions, scores), best first, in the order of the queries; requires the hits of all groups.

        Raises:
            ArtifactError: hits are damaged.
        """
        parts = []
        for group in range(len(self.groups)):
            path = _open(self, "hits", group).path
            verify(path)
            parts.append((_read(path, "offsets", np.int64).tolist(), _read(path, "keys", np.uint64), _read(path, "fraction_bits", np.int8)))
        for query in range(len(parts[0][0]) - 1):
            keys: PackedHits = np.concatenate([keys[offsets[query] : offsets[query + 1]] for offsets, keys, _ in parts])
            keys.sort()
            yield query, *unpack(keys[::-1][: self.limit], int(parts[0][2][query]))


def publish_search(index: Bm25Index, texts: Sequence[str], folder: Path, *, limit: int, scoring: Scoring) -> DistributedSearch:
    """Publish a batch of texts for an index in a subfolder of `folder`, unless it is there."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    size = -(-len(index.segments) // MAX_GROUPS)
    references = [
        asdict(SegmentReference(str(segment.path.resolve()), segment.fingerprint, first, len(segment))) for first, segment in index.segments
    ]
    groups = [references[start : start + size] for start in range(0, len(references), size)]
    settings: dict[str, Any] = {"limit": limit, "scoring": asdict(scoring), "totals": asdict(index.totals), "groups": groups}
    key = {"code": CODE_FORMAT, "analyzer": index.analyzer.name, "texts": hash_json([text.decode() for text in encoded]), **settings}
    settings |= {} if index.analyzer == PLAIN else {"analyzer": index.analyzer.as_dict()}
    target = folder / hash_json(key)[:16]

    def write(batch: Path) -> None:
        content, offsets = joined(encoded)
        (batch / "texts.bin").write_bytes(content.data)
        save_array(batch / "offsets.npy", offsets)
        write_json(batch / "batch.json", settings)

    _stage(target / _BATCH, _BATCH, key, write, silent)
    return DistributedSearch.open(target)


def require_only_searches(folder: Path) -> None:
    """Check that a folder for `publish_search` holds nothing but searches, so that `remove_searches` removes nothing else.

    Raises:
        UsageError: naming what is no search.
    """
    if (other := _other_than_searches(folder)) is not None:
        raise UsageError(
            f"{other}: is not of a distributed search, whose files {folder} is for; choose another --out, or rename {folder.name}"
        )


def holds_searches(folder: Path) -> bool:
    """Return True if a folder holds the files of distributed searches that were interrupted, and nothing else."""
    return os.path.lexists(folder) and _other_than_searches(folder) is None


def _other_than_searches(folder: Path) -> Path | None:
    with environment_faults(folder):
        if not os.path.lexists(folder):
            return None
        inside: Iterable[Path] = [folder] if folder.is_symlink() or not folder.is_dir() else folder.iterdir()
        return next((path for path in inside if not _is_search(path)), None)


def remove_searches(folder: Path) -> None:
    """Delete the searches in a folder, then the folder if nothing else is in it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    with environment_faults(folder):
        for path in folder.iterdir():
            if _is_search(path):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _is_search(path: Path) -> bool:
    """Return True for a folder as `publish_search` names it, with a published batch, or the hidden files of one that was interrupted."""
    if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    present = {each.name for each in path.iterdir() if not each.name.startswith((".batch.", ".statistics."))}
    if not present:
        return True
    try:
        return present <= _FOLDERS and kind_of_artifact(path / _BATCH) == _BATCH
    except ArtifactError:
        return False


def run_search(
    search: DistributedSearch, executor: Executor, emit: Emit = silent
) -> tuple[Queries, Iterator[tuple[int, IntArray, FloatArray]]]:
    """Return the distinct queries and the results of `Bm25Index.search_distinct` for them. Groups that were scored before are reused."""
    queries = search.count(executor, emit)
    search.score(search.missing("hits"), executor, emit)
    return queries, search.merge()


def count_job(task: dict[str, Any], emit: Emit) -> None:
    """Count document frequencies in a group: {"folder": of the search, "group": number}."""
    search, group = DistributedSearch.open(Path(task["folder"])), int(task["group"])

    def write(folder: Path) -> None:
        frequencies = count_in_segments(search.tokens(), [segment for _, segment in search.segments(group)])
        save_array(folder / "frequencies.npy", frequencies)

    _stage(search.path("counts", group), "counts", _key(search, group), write, emit)


def score_job(task: dict[str, Any], emit: Emit) -> None:
    """Score a group: {"folder": of the search, "group": number}. Checks every byte of its segments first."""
    search, group = DistributedSearch.open(Path(task["folder"])), int(task["group"])

    def write(folder: Path) -> None:
        queries = search.queries()
        sizes, fraction_bits = np.zeros(len(queries), np.int64), np.zeros(len(queries), np.int8)
        packed = ArrayFile(folder / "keys.npy", np.uint64)
        for reference in search.groups[group]:
            verify(Path(reference.path))
        segments = search.segments(group)
        for query, bits, keys in search_keys(segments, search.totals, queries, limit=search.limit, scoring=search.scoring, emit=emit):
            sizes[query], fraction_bits[query] = len(keys), bits
            packed.append(keys)
        packed.close()
        save_array(folder / "offsets.npy", offsets_of(sizes))
        save_array(folder / "fraction_bits.npy", fraction_bits)

    _stage(search.path("hits", group), "hits", _key(search, group), write, emit)


_JOBS: Final = {"counts": f"{__name__}:count_job", "hits": f"{__name__}:score_job"}


def _key(search: DistributedSearch, group: int) -> dict[str, Any]:
    return {"code": CODE_FORMAT, "batch": search.fingerprint, "group": group}


def _run(search: DistributedSearch, kind: str, groups: Sequence[int], executor: Executor, emit: Emit) -> None:
    blocks = sum(-(-reference.documents // BLOCK) for group in groups for reference in search.groups[group])
    tasks = [{"folder": str(search.folder.absolute()), "group": group} for group in groups]
    executor.map(_JOBS[kind], tasks, on_event=SummedProgress(STAGE, total=blocks, unit="blocks", emit=emit))


def _stage(target: Path, kind: str, key: dict[str, Any], write: Any, emit: Emit) -> Artifact:
    """Publish a stage, or wait while another process publishes it."""
    return wait_while_locked(lambda: stage(target, kind=kind, key=key, write=write, emit=silent), stage=STAGE, emit=emit)


def _open(search: DistributedSearch, kind: str, group: int) -> Artifact:
    artifact = open_artifact(search.path(kind, group), kind=kind)
    if artifact.key.get("batch") != search.fingerprint:
        raise ArtifactError(f"{artifact.path}: belongs to another search; delete {search.folder} and search again")
    return artifact


def _read(folder: Path, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    with damage_named(folder, "delete the folder and search again"):
        return load_array(folder / f"{name}.npy", dtype)
