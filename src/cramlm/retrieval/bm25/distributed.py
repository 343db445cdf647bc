"""A search in two passes that run anywhere: pure functions of files, for groups of an index's shards.

    <folder>/batch/              the texts, the groups of shards, the formula: all that the passes read besides the shards
      ─► count_task ─► <folder>/counts/<group>/    in how many of the group's passages each term of the batch stands
      ─► summed ─────► <folder>/statistics/        the same for the whole index
      ─► score_task ─► <folder>/hits/<group>/      for every distinct query the best `limit` of the group's passages, by these statistics
      ─► `Passes.merge` ─► the best of all groups

    batch/        texts.bin, offsets.npy int64 (texts + 1,), batch.json
    counts/, statistics/    frequencies.npy int64 (terms,)
    hits/         offsets.npy int64 (queries + 1,), keys.npy uint64 (score in units << 32 | ~position), exponents.npy int8 (queries,): a
                  unit is 2 ** -exponent

Scores are whole numbers, and each group's list is exact: thresholds that were guessed too high are found, and the queries run again,
within the group. So the result is that of one search, whatever the shards and whoever scored them. `Index.search_distinct` is faster on
one machine: it goes through all shards with one threshold per query, and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.errors import ArtifactError
from cramlm.io.executors import Executor, Processes, SummedProgress
from cramlm.records import Emit, FloatArray, IntArray, silent
from cramlm.retrieval.bm25.analysis import ANALYZER
from cramlm.retrieval.bm25.index import Index
from cramlm.retrieval.bm25.kernels import BLOCK
from cramlm.retrieval.bm25.search import (
    Keys,
    Queries,
    Scoring,
    Statistics,
    Tokens,
    count_in_shards,
    make_queries,
    search_keys,
    tokenise_texts,
    unpack,
)
from cramlm.retrieval.bm25.segment import ArrayFile, Shard, load_array
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import MANIFEST, Artifact, environment_faults, hash_json, open_artifact, stage, verify, wait_while_locked

CODE_FORMAT: Final = 2  # raise it when the same search would give other files
MOST_GROUPS: Final = 256  # each group's hits are `limit` per query: more groups cost space and merging
FEW_SHARDS: Final = 64  # to count in one takes 0.02 CPU seconds for 1,659 queries of 150 words; to start a process 1
STAGE: Final = "search"


@dataclass(frozen=True, slots=True)
class Place:
    """A shard as a task finds it: its folder, what it must be, and the position of its first passage."""

    path: str
    fingerprint: str
    first: int
    documents: int


@dataclass(frozen=True, slots=True)
class Passes:
    """A published batch of texts for an index; cheap to open."""

    folder: Path
    fingerprint: str
    limit: int
    scoring: Scoring
    totals: Statistics
    groups: tuple[tuple[Place, ...], ...]

    @staticmethod
    def open(folder: Path) -> Passes:
        """Raises ArtifactError if the folder holds no whole batch."""
        artifact = open_artifact(folder / "batch", kind="batch")
        try:
            data = json.loads((artifact.path / "batch.json").read_bytes())
            groups = tuple(tuple(Place(**place) for place in group) for group in data["groups"])
            scoring, totals = Scoring(**data["scoring"]), Statistics(**data["totals"])
            return Passes(folder, artifact.fingerprint, int(data["limit"]), scoring, totals, groups)
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{artifact.path}: damaged batch ({error}); delete the folder and search again") from error

    def path(self, kind: str, group: int) -> Path:
        """Where a group's counts or hits lie."""
        return self.folder / kind / f"{group:04d}"

    def missing(self, kind: str) -> list[int]:
        """The groups that have no counts, or no hits."""
        return [group for group in range(len(self.groups)) if not (self.path(kind, group) / MANIFEST).exists()]

    def shards(self, group: int, *, every_byte: bool = False) -> list[tuple[int, Shard]]:
        """The group's shards, each with the position of its first passage.

        Raises:
            ArtifactError: if one is damaged, or not the one that the batch was made for.
        """
        opened = []
        for place in self.groups[group]:
            if every_byte:
                verify(Path(place.path))
            shard = Shard.open(Path(place.path))
            if shard.fingerprint != place.fingerprint or len(shard) != place.documents:
                raise ArtifactError(f"{place.path}: is not the shard that {self.folder} was made for; build the index and search again")
            opened.append((place.first, shard))
        return opened

    def tokens(self) -> Tokens:
        """The texts of the batch as terms."""
        text = (self.folder / "batch" / "texts.bin").read_bytes()
        offsets = read_array(self.folder / "batch" / "offsets.npy").tolist()
        return tokenise_texts([text[start:end].decode() for start, end in pairwise(offsets)])

    def queries(self) -> Queries:
        """The batch as distinct queries, once its statistics are there."""
        return make_queries(self.tokens(), _read(self.folder / "statistics", "frequencies", np.int64))

    def prepare(self, executor: Executor, emit: Emit = silent) -> Queries:
        """The first pass: count what is not counted yet, and sum it up."""
        few = sum(map(len, self.groups)) <= FEW_SHARDS
        _run(self, "counts", self.missing("counts"), Processes() if few else executor, silent)
        inputs = [_open(self, "counts", group) for group in range(len(self.groups))]

        def write(folder: Path) -> None:
            frequencies = np.sum([_read(artifact.path, "frequencies", np.int64) for artifact in inputs], axis=0)
            save_array(folder / "frequencies.npy", frequencies)

        key = {"code": CODE_FORMAT, "batch": self.fingerprint, "counts": [artifact.fingerprint for artifact in inputs]}
        _stage(self.folder / "statistics", "statistics", key, write, emit)
        return self.queries()

    def score(self, groups: Sequence[int], executor: Executor, emit: Emit = silent) -> None:
        """The second pass over some groups; `prepare` comes before it."""
        _run(self, "hits", groups, executor, emit)

    def merge(self) -> Iterator[tuple[int, IntArray, FloatArray]]:
        """(distinct query, positions, scores), best first, in the order of the queries, when all groups are scored.

        Raises:
            ArtifactError: if hits are damaged.
        """
        parts = []
        for group in range(len(self.groups)):
            path = _open(self, "hits", group).path
            verify(path)
            parts.append((_read(path, "offsets", np.int64).tolist(), _read(path, "keys", np.uint64), _read(path, "exponents", np.int8)))
        for query in range(len(parts[0][0]) - 1):
            keys: Keys = np.concatenate([keys[offsets[query] : offsets[query + 1]] for offsets, keys, _ in parts])
            keys.sort()
            yield query, *unpack(keys[::-1][: self.limit], int(parts[0][2][query]))


def publish_passes(index: Index, texts: Sequence[str], folder: Path, *, limit: int, scoring: Scoring) -> Passes:
    """The batch of these texts for an index, in a folder of its own within `folder`: the one that is there, else published now."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    size = -(-len(index.shards) // MOST_GROUPS)
    places = [asdict(Place(str(shard.path.resolve()), shard.fingerprint, first, len(shard))) for first, shard in index.shards]
    groups = [places[start : start + size] for start in range(0, len(places), size)]
    settings = {"limit": limit, "scoring": asdict(scoring), "totals": asdict(index.totals), "groups": groups}
    key = {"code": CODE_FORMAT, "analyzer": ANALYZER, "texts": hash_json([text.decode() for text in encoded]), **settings}
    target = folder / hash_json(key)[:16]

    def write(batch: Path) -> None:
        (batch / "texts.bin").write_bytes(b"".join(encoded))
        save_array(batch / "offsets.npy", np.cumsum([0, *map(len, encoded)], dtype=np.int64))
        (batch / "batch.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")

    _stage(target / "batch", "batch", key, write, silent)
    return Passes.open(target)


def search_in_passes(passes: Passes, executor: Executor, emit: Emit = silent) -> tuple[Queries, Iterator[tuple[int, IntArray, FloatArray]]]:
    """The distinct queries and `Index.search_distinct`'s results for them: what is scored already is merged, the rest is scored now."""
    queries = passes.prepare(executor, emit)
    passes.score(passes.missing("hits"), executor, emit)
    return queries, passes.merge()


def count_task(task: dict[str, Any], emit: Emit) -> None:
    """The first pass over a group: {"folder": of the passes, "group": number}."""
    passes, group = Passes.open(Path(task["folder"])), int(task["group"])

    def write(folder: Path) -> None:
        frequencies = count_in_shards(passes.tokens(), [shard for _, shard in passes.shards(group)])
        save_array(folder / "frequencies.npy", frequencies)

    _stage(passes.path("counts", group), "counts", _key(passes, group), write, emit)


def score_task(task: dict[str, Any], emit: Emit) -> None:
    """The second pass over a group: {"folder": of the passes, "group": number}. Every byte of its shards is checked first."""
    passes, group = Passes.open(Path(task["folder"])), int(task["group"])

    def write(folder: Path) -> None:
        queries = passes.queries()
        sizes, exponents = np.zeros(len(queries), np.int64), np.zeros(len(queries), np.int8)
        found = ArrayFile(folder / "keys.npy", np.uint64)
        shards = passes.shards(group, every_byte=True)
        for query, exponent, keys in search_keys(shards, passes.totals, queries, limit=passes.limit, scoring=passes.scoring, emit=emit):
            sizes[query], exponents[query] = len(keys), exponent
            found.append(keys)
        found.close()
        save_array(folder / "offsets.npy", np.concatenate(([0], np.cumsum(sizes))))
        save_array(folder / "exponents.npy", exponents)

    _stage(passes.path("hits", group), "hits", _key(passes, group), write, emit)


_TASKS: Final = {"counts": f"{__name__}:count_task", "hits": f"{__name__}:score_task"}


def _key(passes: Passes, group: int) -> dict[str, Any]:
    return {"code": CODE_FORMAT, "batch": passes.fingerprint, "group": group}


def _run(passes: Passes, kind: str, groups: Sequence[int], executor: Executor, emit: Emit) -> None:
    blocks = sum(-(-place.documents // BLOCK) for group in groups for place in passes.groups[group])
    tasks = [{"folder": str(passes.folder.absolute()), "group": group} for group in groups]
    executor.map(_TASKS[kind], tasks, on_event=SummedProgress(STAGE, total=blocks, unit="blocks", emit=emit))


def _stage(target: Path, kind: str, key: dict[str, Any], write: Any, emit: Emit) -> Artifact:
    """Published by whoever comes first."""
    return wait_while_locked(lambda: stage(target, kind=kind, key=key, write=write, emit=silent), stage=STAGE, emit=emit)


def _open(passes: Passes, kind: str, group: int) -> Artifact:
    artifact = open_artifact(passes.path(kind, group), kind=kind)
    if artifact.key.get("batch") != passes.fingerprint:
        raise ArtifactError(f"{artifact.path}: belongs to another batch; delete {passes.folder} and search again")
    return artifact


def _read(folder: Path, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    try:
        with environment_faults(folder):
            return load_array(folder / f"{name}.npy", dtype)
    except ValueError as error:
        raise ArtifactError(f"{folder}: damaged ({error}); delete the folder and search again") from error
