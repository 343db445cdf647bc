"""A shard of an index: the postings of a run of passages, on disk and opened.

A published shard folder (N passages, arrays as .npy):
    order.npy         int32 (N,), which passage of the run lies in each slot: they are shuffled, so that every block is a fair sample
    lengths.npy       int32 (N,), terms of the passage in each slot
    dictionary_offsets, dictionary, posting_offsets, postings, large_places, large_frequencies    see kernels.Blocks
    document_frequencies.npy          int32 (terms,)
    term_keys, term_ids, term_sizes, term_bytes    the terms by hash key; sizes and bytes in the order of their numbers
    statistics.json   how many documents, terms, postings, tokens; the analyzer

Everything in it depends on the run's text alone: not on the corpus around it, the other shards, or k1 and b.

Building shards: a run of passages in, a shard folder out.

    passages in a fixed shuffled order ─► a block of 4,096 tokenised ─► rows (term, frequency) ─► postings by (term, passage) ─► files

Building holds the vocabulary of the run and one block in memory. A run is a number of whole parts of the corpus, or a piece of one large
part, and has at most SHARD passages; so what a shard costs is bounded, and a corpus that grew keeps its shards.
"""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.corpus import Corpus
from cramlm.errors import ArtifactError
from cramlm.records import Emit, Event, Int32Array, IntArray, silent
from cramlm.retrieval.bm25 import kernels
from cramlm.retrieval.bm25.analysis import ANALYZER, Vocabulary
from cramlm.retrieval.bm25.kernels import BLOCK, MANY, MOST_ENTRY_BYTES, Blocks
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import SMALL_FILE, environment_faults, hash_json, open_artifact, stage, wait_while_locked

KIND: Final = "shard"
STATISTICS: Final = "statistics.json"
TYPES: Final[dict[str, type[np.generic]]] = {
    "lengths": np.int32,
    "dictionary_offsets": np.int64,
    "dictionary": np.uint8,
    "posting_offsets": np.int64,
    "postings": np.uint16,
    "large_places": np.int64,
    "large_frequencies": np.int32,
    "order": np.int32,
    "document_frequencies": np.int32,
    "term_keys": np.uint64,
    "term_ids": np.int32,
    "term_sizes": np.uint8,
    "term_bytes": np.uint8,
}
APPENDED: Final = tuple(TYPES)[:7]  # these grow by a block at a time, the others are written once


@dataclass(frozen=True, slots=True)
class Shard:
    """An opened shard folder. Slots are counted within it; `order` turns them into places within its run of passages."""

    path: Path
    fingerprint: str
    statistics: dict[str, Any]
    blocks: Blocks
    lengths: Int32Array
    order: Int32Array
    document_frequencies: Int32Array
    term_keys: npt.NDArray[np.uint64]
    term_ids: Int32Array
    term_offsets: IntArray
    term_bytes: npt.NDArray[np.uint8]

    @staticmethod
    def open(path: Path) -> Shard:
        """Raises ArtifactError if the folder is not a whole shard, or was made by another analyzer."""
        artifact = open_artifact(path, kind=KIND)
        if (analyzer := artifact.key.get("analyzer")) != ANALYZER:
            raise ArtifactError(f"{path}: indexed by analyzer {analyzer!r}, this cramlm has {ANALYZER!r}; build the index again")
        try:
            with environment_faults(path):
                statistics = json.loads((path / STATISTICS).read_bytes())
                arrays = {name: load_array(path / f"{name}.npy", dtype) for name, dtype in TYPES.items()}
        except (ValueError, KeyError) as error:
            raise ArtifactError(f"{path}: damaged index ({error}); delete the folder and build it again") from error
        blocks = Blocks(*(arrays.pop(name) for name in Blocks._fields))
        offsets = np.concatenate(([0], np.cumsum(arrays.pop("term_sizes"), dtype=np.int64)))
        shard = Shard(path, artifact.fingerprint, statistics, blocks, term_offsets=offsets, **arrays)
        shard._check()
        return shard

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def terms(self) -> int:
        return len(self.document_frequencies)

    @property
    def mapped_bytes(self) -> int:
        """Size of the postings and their dictionary."""
        return self.blocks.postings.nbytes + self.blocks.dictionary.nbytes

    def release(self) -> None:
        """Forget the pages of the postings that were read: they count as this process's memory as long as it maps them."""
        for array in (self.blocks.postings, self.blocks.dictionary):
            mapped = getattr(array.base, "_mmap", array.base)  # small arrays are not mapped
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def find_terms(self, vocabulary: Vocabulary) -> Int32Array:
        """This shard's number of every term of another vocabulary; -1 where the shard does not know it."""
        result = np.empty(len(vocabulary), np.int32)
        kernels.find_keys(
            self.term_keys, self.term_ids, self.term_offsets, self.term_bytes,
            vocabulary.keys(), vocabulary.term_offsets, vocabulary.term_bytes, result,
        )  # fmt: skip
        return result

    def frequencies(self, slot: int, terms: Int32Array) -> IntArray:
        """How often each of `terms` (this shard's numbers, -1 for none) stands in the passage in a slot."""
        order = np.argsort(terms, kind="stable")
        found = np.zeros(len(terms), np.int64)
        kernels.frequencies_in(slot // BLOCK, slot % BLOCK, terms[order], self.blocks, found)
        result = np.empty_like(found)
        result[order] = found
        return result

    def _check(self) -> None:
        """Raises ArtifactError if the arrays' sizes do not fit together, so that the kernels never read outside of them."""
        documents, terms = len(self), self.terms
        numbers = -(-documents // BLOCK) + 1
        sizes = {
            "order": (len(self.order), documents),
            "dictionary_offsets": (len(self.blocks.dictionary_offsets), numbers),
            "posting_offsets": (len(self.blocks.posting_offsets), numbers),
            "large_frequencies": (len(self.blocks.large_frequencies), len(self.blocks.large_places)),
            "term_sizes": (len(self.term_offsets), terms + 1),
            "term_keys": (len(self.term_keys), terms),
            "term_ids": (len(self.term_ids), terms),
        }
        for name, (found, expected) in sizes.items():
            if found != expected:
                raise ArtifactError(f"{self.path / name}.npy: damaged, {found} values instead of {expected}; build the index again")
        ends = {
            "dictionary_offsets": (self.blocks.dictionary_offsets, len(self.blocks.dictionary)),
            "posting_offsets": (self.blocks.posting_offsets, len(self.blocks.postings)),
            "term_sizes": (self.term_offsets, len(self.term_bytes)),
        }
        for name, (offsets, end) in ends.items():
            if offsets[0] != 0 or offsets[-1] != end or (offsets[1:] < offsets[:-1]).any():
                raise ArtifactError(f"{self.path / name}.npy: damaged, the offsets do not fit; build the index again")


class ArrayFile:
    """A one-dimensional .npy file of unknown length, written piece by piece."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self._file = path.open("wb")
        self._dtype = np.dtype(dtype)
        self._length = 0
        self._header()

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write more values; they must have the file's type."""
        assert values.dtype == self._dtype
        self._file.write(np.ascontiguousarray(values).data)
        self._length += len(values)

    def close(self) -> None:
        """Write the length into the header."""
        self._file.seek(0)
        self._header()
        self._file.close()

    def _header(self) -> None:
        # numpy pads the header so that it has one length for any number of values.
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def load_array(path: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Of one dimension, not writable: mapped if large; small ones are read (an empty file cannot be mapped).

    Raises:
        ValueError: if it is no such array.
    """
    mapped = path.stat().st_size > SMALL_FILE
    array = np.load(path, mmap_mode="r", allow_pickle=False) if mapped else read_array(path)
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{path.name} holds {array.dtype} of {array.ndim} dimensions")
    array.flags.writeable = False
    return np.asarray(array)


CODE_FORMAT: Final = 2  # raise it when the same run would give another folder
SHARD: Final = 1 << 18  # passages; larger shards save memory of terms, smaller ones more work for several processes
_TELL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Run:
    """The passages first..first + count of a corpus; `content` identifies their text: the parts' and which piece of them it is."""

    first: int
    count: int
    content: tuple[str, ...]

    @property
    def key(self) -> dict[str, Any]:
        """What a shard of it depends on."""
        return {"code": CODE_FORMAT, "analyzer": ANALYZER, "content": list(self.content)}

    @property
    def name(self) -> str:
        """Its shard's folder, within the folder of shards."""
        return hash_json(self.key)[:16]


def plan_runs(corpus: Corpus, kept: Sequence[tuple[str, ...]] = ()) -> list[Run]:
    """The corpus cut into runs. `kept`: the contents of earlier runs, in order; as many as still fit the beginning of the corpus stay."""
    parts = [(part.content, len(part)) for part in corpus.parts if len(part)]
    runs: list[Run] = []
    number = 0
    while runs_left := kept[len(runs) :]:
        content = runs_left[0]
        taken = parts[number : number + len(content)]
        is_piece = bool(taken) and content[0].startswith(f"{taken[0][0]}:")  # of a large part, which is cut alike again
        if not is_piece and tuple(name for name, _ in taken) != content:
            break
        runs += _cut(_end(runs), taken)
        number += len(content)
    held: list[tuple[str, int]] = []
    for part in parts[number:]:
        if held and sum(size for _, size in held) + part[1] > SHARD:
            runs += _cut(_end(runs), held)
            held = []
        held.append(part)
    return runs + (_cut(_end(runs), held) if held else [])


def _end(runs: list[Run]) -> int:
    return runs[-1].first + runs[-1].count if runs else 0


def _cut(first: int, parts: Sequence[tuple[str, int]]) -> list[Run]:
    """One run, or equal pieces of a part that is too large for one."""
    count = sum(size for _, size in parts)
    if count <= SHARD:
        return [Run(first, count, tuple(name for name, _ in parts))]
    ((name, _),) = parts
    pieces = -(-count // SHARD)
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    return [Run(first + start, end - start, (f"{name}:{number}/{pieces}",)) for number, (start, end) in enumerate(pairwise(bounds), 1)]


def build_shard(corpus: Corpus, run: Run, shards: Path, *, emit: Emit = silent) -> Path:
    """The shard of a run, in the folder `shards`: the one that is there, else built now.

    Raises:
        ArtifactError: if the one that is there is damaged. EnvironmentFault: if the disk refuses.
    """
    target = shards / run.name

    def write(folder: Path) -> None:
        _Builder(corpus, run, folder, emit).build()

    stage(target, kind=KIND, key=run.key, write=write, emit=emit)
    corpus.release()
    return target


def shard_task(task: dict[str, Any], emit: Emit) -> None:
    """`build_shard` for plain JSON: {"corpus": folder, "shards": folder, "first": ..., "count": ..., "content": [...]}. What another
    process builds just now is waited for.
    """
    corpus = Corpus.open(Path(task["corpus"]))
    run = Run(task["first"], task["count"], tuple(task["content"]))
    wait_while_locked(lambda: build_shard(corpus, run, Path(task["shards"]), emit=emit), stage="index", emit=emit)


class _Builder:
    """Writes one shard folder; used once."""

    def __init__(self, corpus: Corpus, run: Run, folder: Path, emit: Emit) -> None:
        self._corpus, self._run, self._folder, self._emit = corpus, run, folder, emit
        self._vocabulary = Vocabulary()
        self._document_frequencies = np.zeros(0, np.int32)
        self._counts = np.zeros(0, np.int32)  # per term; 0 between blocks
        self._seen = np.zeros(0, np.int32)  # per term; -1 between blocks
        self._postings = self._tokens = self._dictionary = 0

    def build(self) -> None:
        run = self._run
        order = np.random.default_rng(0).permutation(run.count).astype(np.int32)
        files = {name: ArrayFile(self._folder / f"{name}.npy", TYPES[name]) for name in APPENDED}
        for name in ("dictionary_offsets", "posting_offsets"):
            files[name].append(np.zeros(1, np.int64))
        told = time.monotonic()
        for first in range(0, run.count, BLOCK):
            slots = order[first : first + BLOCK]
            self._add_block(run.first + slots.astype(np.int64), files)
            if (now := time.monotonic()) - told >= _TELL_SECONDS:
                told = now
                done = first + len(slots)
                self._emit(Event("progress", KIND, f"{len(self._vocabulary):,} terms", done=done, total=run.count, unit="passages"))
        for file in files.values():
            file.close()
        save_array(self._folder / "order.npy", order)
        self._save_terms()
        statistics = {
            "documents": run.count,
            "terms": len(self._vocabulary),
            "postings": self._postings,
            "tokens": self._tokens,
            "analyzer": ANALYZER,
        }
        (self._folder / STATISTICS).write_text(json.dumps(statistics, indent=1) + "\n", "utf-8")

    def _add_block(self, positions: npt.NDArray[np.int64], files: dict[str, ArrayFile]) -> None:
        text, offsets = self._corpus.gather(positions)
        tokens, starts = self._vocabulary.tokenise(text, offsets)
        self._grow()
        row_terms, row_frequencies = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.int32)
        row_offsets = np.zeros(len(positions) + 1, np.int64)
        size = kernels.count_rows(tokens, starts, self._seen, row_terms, row_frequencies, row_offsets)
        row_terms, row_frequencies = row_terms[:size], row_frequencies[:size]
        terms = np.empty(size, np.int32)
        terms = np.sort(terms[: kernels.collect_terms(row_terms, self._counts, terms)])
        self._document_frequencies[terms] += self._counts[terms]
        postings, dictionary = np.empty(size, np.uint16), np.empty(MOST_ENTRY_BYTES * len(terms), np.uint8)
        room = int((row_frequencies >= MANY).sum())
        places, frequencies = np.empty(room, np.int64), np.empty(room, np.int32)
        written, _ = kernels.invert(row_offsets, row_terms, row_frequencies, terms, self._counts, postings, dictionary, places, frequencies)
        by_place = np.argsort(places)
        files["large_places"].append(self._postings + places[by_place])
        files["large_frequencies"].append(frequencies[by_place])
        files["dictionary"].append(dictionary[:written])
        files["postings"].append(postings)
        files["lengths"].append(np.diff(starts).astype(np.int32))
        self._dictionary += written
        self._postings += size
        self._tokens += len(tokens)
        files["dictionary_offsets"].append(np.array([self._dictionary], np.int64))
        files["posting_offsets"].append(np.array([self._postings], np.int64))

    def _grow(self) -> None:
        if (missing := len(self._vocabulary) - len(self._counts)) > 0:
            extra = missing + len(self._counts) // 2
            self._counts = np.concatenate([self._counts, np.zeros(extra, np.int32)])
            self._seen = np.concatenate([self._seen, np.full(extra, -1, np.int32)])
            self._document_frequencies = np.concatenate([self._document_frequencies, np.zeros(extra, np.int32)])

    def _save_terms(self) -> None:
        vocabulary = self._vocabulary
        keys = vocabulary.keys()
        order = np.argsort(keys, kind="stable")
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "document_frequencies": self._document_frequencies[: len(vocabulary)],
            "term_keys": keys[order],
            "term_ids": order.astype(np.int32),
            "term_sizes": np.diff(vocabulary.term_offsets).astype(np.uint8),
            "term_bytes": vocabulary.term_bytes,
        }
        for name, array in arrays.items():
            save_array(self._folder / f"{name}.npy", array)
