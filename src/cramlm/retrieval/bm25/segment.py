"""A segment of a BM25 index: the postings of consecutive passages. Planning, building and opening segments.

    passages in a fixed shuffled order ─► blocks of 4,096, tokenized ─► rows (term, frequency) ─► postings by (term, slot) ─► files

A published segment folder (N passages, arrays as .npy):
    order.npy         int32 (N,), index in the segment of the passage in each slot; shuffled, so that every block is a random sample
    lengths.npy       int32 (N,), number of terms of the passage in each slot
    dictionary_offsets, dictionary, posting_offsets, postings, large_positions, large_frequencies    see kernels.Blocks
    document_frequencies.npy          int32 (terms,)
    term_keys, term_ids, term_sizes, term_bytes    the terms by hash key; sizes and bytes in the order of their numbers
    statistics.json   numbers of documents, terms, postings and tokens; the analyzer

A segment depends only on the text of its passages: not on the rest of the corpus, the other segments, k1 or b. It covers whole parts of
the corpus or a piece of one large part, at most SEGMENT_PASSAGES passages, so that its memory is bounded and a corpus that grows keeps its
segments. Building holds the vocabulary of the segment and one block in memory.
"""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from cramlm.data.corpus import Corpus
from cramlm.errors import ArtifactError
from cramlm.records import Emit, Event, Int32Array, IntArray, silent
from cramlm.retrieval.bm25 import kernels
from cramlm.retrieval.bm25.analysis import PLAIN, Analyzer, Vocabulary
from cramlm.retrieval.bm25.kernels import BLOCK, LARGE, MAX_ENTRY_BYTES, Blocks
from cramlm.storage.arrays import ArrayFile, are_offsets, offsets_of, read_array, save_array
from cramlm.storage.artifacts import SMALL_FILE, Artifact, hash_json, open_artifact, write_json
from cramlm.storage.locks import damage_named, wait_while_locked
from cramlm.storage.stages import stage

KIND: Final = "segment"
STATISTICS: Final = "statistics.json"
TYPES: Final[dict[str, type[np.generic]]] = {
    "lengths": np.int32,
    "dictionary_offsets": np.int64,
    "dictionary": np.uint8,
    "posting_offsets": np.int64,
    "postings": np.uint16,
    "large_positions": np.int64,
    "large_frequencies": np.int32,
    "order": np.int32,
    "document_frequencies": np.int32,
    "term_keys": np.uint64,
    "term_ids": np.int32,
    "term_sizes": np.uint8,
    "term_bytes": np.uint8,
}
_APPENDED: Final = tuple(TYPES)[:7]  # written block by block, the others at once
CODE_FORMAT: Final = 3  # increase when the same passages give other files
SEGMENT_PASSAGES: Final = 1 << 18  # larger segments save memory for terms, smaller ones give more work to several processes
_PROGRESS_SECONDS: Final = 0.2
_FAULT_BYTES: Final = 1 << 16  # Linux maps up to so many bytes around a page fault


@dataclass(frozen=True, slots=True)
class Segment:
    """An opened segment. Slots are numbered within it; `order` maps a slot to the index of its passage in the segment."""

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
    def open(path: Path, analyzer: Analyzer = PLAIN) -> Segment:
        """Open a segment with the terms of this analyzer.

        Raises:
            ArtifactError: the folder is incomplete or damaged, or was made by another analyzer.
        """
        artifact = open_artifact(path, kind=KIND)
        check_analyzer(artifact, analyzer)
        with damage_named(path, "delete the folder and build it again", what="damaged index"):
            statistics = json.loads((path / STATISTICS).read_bytes())
            arrays = {name: load_array(path / f"{name}.npy", dtype) for name, dtype in TYPES.items()}
        blocks = Blocks(*(arrays.pop(name) for name in Blocks._fields))
        offsets = offsets_of(arrays.pop("term_sizes"))
        segment = Segment(path, artifact.fingerprint, statistics, blocks, term_offsets=offsets, **arrays)
        segment._check()
        return segment

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def terms(self) -> int:
        return len(self.document_frequencies)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the postings and their dictionary."""
        return self.blocks.postings.nbytes + self.blocks.dictionary.nbytes

    def release(self, block: int) -> None:
        """Drop the resident pages of the memory-mapped postings of a block."""
        blocks = self.blocks
        for array, offsets in ((blocks.postings, blocks.posting_offsets), (blocks.dictionary, blocks.dictionary_offsets)):
            mapped = getattr(array.base, "_mmap", array.base)  # small arrays are not mapped
            start, end = (int(offset) * array.itemsize for offset in offsets[block : block + 2])
            if isinstance(mapped, mmap.mmap) and start < end:
                header = len(mapped) - array.nbytes
                start = max(0, (header + start) // mmap.PAGESIZE * mmap.PAGESIZE - _FAULT_BYTES)
                mapped.madvise(mmap.MADV_DONTNEED, start, header + end + _FAULT_BYTES - start)

    def find_terms(self, vocabulary: Vocabulary) -> Int32Array:
        """Return this segment's number of every term of a vocabulary, int32 (terms,); -1 if the term is not in the segment."""
        result = np.empty(len(vocabulary), np.int32)
        kernels.find_keys(
            self.term_keys, self.term_ids, self.term_offsets, self.term_bytes,
            vocabulary.keys(), vocabulary.term_offsets, vocabulary.term_bytes, result,
        )  # fmt: skip
        return result

    def frequencies(self, slot: int, terms: Int32Array) -> IntArray:
        """Return the frequency of each of `terms` (this segment's numbers, -1 = none) in the passage in a slot."""
        order = np.argsort(terms, kind="stable")
        frequencies = np.zeros(len(terms), np.int64)
        kernels.frequencies_in(slot // BLOCK, slot % BLOCK, terms[order], self.blocks, frequencies)
        result = np.empty_like(frequencies)
        result[order] = frequencies
        return result

    def _check(self) -> None:
        """Raise ArtifactError if the sizes of the arrays do not fit together: the kernels must not read out of bounds."""
        documents, terms = len(self), self.terms
        numbers = -(-documents // BLOCK) + 1
        sizes = {
            "order": (len(self.order), documents),
            "dictionary_offsets": (len(self.blocks.dictionary_offsets), numbers),
            "posting_offsets": (len(self.blocks.posting_offsets), numbers),
            "large_frequencies": (len(self.blocks.large_frequencies), len(self.blocks.large_positions)),
            "term_sizes": (len(self.term_offsets), terms + 1),
            "term_keys": (len(self.term_keys), terms),
            "term_ids": (len(self.term_ids), terms),
        }
        for name, (size, expected) in sizes.items():
            if size != expected:
                raise ArtifactError(f"{self.path / name}.npy: damaged, {size} values instead of {expected}; build the index again")
        ends = {
            "dictionary_offsets": (self.blocks.dictionary_offsets, len(self.blocks.dictionary)),
            "posting_offsets": (self.blocks.posting_offsets, len(self.blocks.postings)),
            "term_sizes": (self.term_offsets, len(self.term_bytes)),
        }
        for name, (offsets, end) in ends.items():
            if not are_offsets(offsets, end=end):
                raise ArtifactError(f"{self.path / name}.npy: damaged, the offsets do not fit; build the index again")


def check_analyzer(artifact: Artifact, analyzer: Analyzer) -> None:
    """Raise ArtifactError if a segment or index was built by another analyzer."""
    if (built_by := artifact.key.get("analyzer")) != analyzer.name:
        raise ArtifactError(f"{artifact.path}: indexed by analyzer {built_by!r}, this cramlm has {analyzer.name!r}; build the index again")


def load_array(path: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Open a read-only array of one dimension: memory-mapped if it is large, read if it is small (an empty file cannot be mapped).

    Raises:
        ValueError: the file holds another dtype or number of dimensions.
    """
    mapped = path.stat().st_size > SMALL_FILE
    array = np.load(path, mmap_mode="r", allow_pickle=False) if mapped else read_array(path)
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{path.name} holds {array.dtype} of {array.ndim} dimensions")
    array.flags.writeable = False
    return np.asarray(array)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Passages first..first + count of a corpus. content: identifies their text by parts, or by a piece of a part."""

    first: int
    count: int
    content: tuple[str, ...]
    analyzer: Analyzer = PLAIN

    @property
    def key(self) -> dict[str, Any]:
        """Stage key of the segment."""
        return {"code": CODE_FORMAT, "analyzer": self.analyzer.name, "content": list(self.content)}

    @property
    def name(self) -> str:
        """Name of the segment's folder."""
        return hash_json(self.key)[:16]


PLANS: Final = TypeAdapter(SegmentPlan)
"""Turns a plan into plain JSON and back, for another process."""


def plan_segments(corpus: Corpus, earlier: Sequence[tuple[str, ...]] = (), *, analyzer: Analyzer = PLAIN) -> list[SegmentPlan]:
    """Cut a corpus into segments. earlier: `content` of an earlier index's segments, in order; those that cover the beginning of the corpus
    are kept. The others are about equally large, so that several processes build them in equal time.
    """
    parts = [(part.content, len(part)) for part in corpus.parts if len(part)]
    segments: list[tuple[int, tuple[str, ...]]] = []
    number = 0
    while remaining := earlier[len(segments) :]:
        content = remaining[0]
        covered = parts[number : number + len(content)]
        is_piece = bool(covered) and content[0].startswith(f"{covered[0][0]}:")  # of a large part, which is cut in the same way again
        if not is_piece and tuple(name for name, _ in covered) != content:
            break
        segments += _cut(covered)
        number += len(content)
    group: list[tuple[str, int]] = []
    left = sum(size for _, size in parts[number:])
    share = left / max(1, -(-left // SEGMENT_PASSAGES))
    for part in parts[number:]:
        size = sum(size for _, size in group)
        if group and (size >= share or size + part[1] > SEGMENT_PASSAGES):
            segments += _cut(group)
            group = []
        group.append(part)
    segments += _cut(group) if group else []
    firsts = accumulate((count for count, _ in segments), initial=0)
    return [SegmentPlan(first, count, content, analyzer) for first, (count, content) in zip(firsts, segments, strict=False)]


def _cut(parts: Sequence[tuple[str, int]]) -> list[tuple[int, tuple[str, ...]]]:
    """Return (passages, content) of one segment, or of segments of equal size for a part that is too large for one."""
    count = sum(size for _, size in parts)
    if count <= SEGMENT_PASSAGES:
        return [(count, tuple(name for name, _ in parts))]
    ((name, _),) = parts
    pieces = -(-count // SEGMENT_PASSAGES)
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    return [(end - start, (f"{name}:{number}/{pieces}",)) for number, (start, end) in enumerate(pairwise(bounds), 1)]


def build_segment(corpus: Corpus, plan: SegmentPlan, segments: Path, *, emit: Emit = silent) -> Path:
    """Build a segment in the folder `segments` unless it is there; return its path.

    Raises:
        ArtifactError: the existing segment is damaged. EnvironmentFault: the disk cannot be written.
    """
    target = segments / plan.name

    def write(folder: Path) -> None:
        _Builder(corpus, plan, folder, emit).build()

    stage(target, kind=KIND, key=plan.key, write=write, emit=emit)
    corpus.release()
    return target


def segment_job(task: dict[str, Any], emit: Emit) -> None:
    """Run `build_segment` on plain JSON: {"corpus": folder, "segments": folder, "plan": that of `PLANS`}. Waits while another process
    builds the same segment.
    """
    corpus = Corpus.open(Path(task["corpus"]))
    plan = PLANS.validate_python(task["plan"])
    wait_while_locked(lambda: build_segment(corpus, plan, Path(task["segments"]), emit=emit), stage="index", emit=emit)


class _Builder:
    """Writes one segment folder; used once."""

    def __init__(self, corpus: Corpus, plan: SegmentPlan, folder: Path, emit: Emit) -> None:
        self._corpus, self._plan, self._folder, self._emit = corpus, plan, folder, emit
        self._vocabulary = Vocabulary(plan.analyzer)
        self._document_frequencies = np.zeros(0, np.int32)
        self._counts = np.zeros(0, np.int32)  # per term; 0 between blocks
        self._row_of = np.zeros(0, np.int32)  # per term; -1 between blocks
        self._postings = self._tokens = self._dictionary = 0

    def build(self) -> None:
        plan = self._plan
        order = np.random.default_rng(0).permutation(plan.count).astype(np.int32)
        files = {name: ArrayFile(self._folder / f"{name}.npy", TYPES[name]) for name in _APPENDED}
        for name in ("dictionary_offsets", "posting_offsets"):
            files[name].append(np.zeros(1, np.int64))
        reported = time.monotonic()
        for first in range(0, plan.count, BLOCK):
            slots = order[first : first + BLOCK]
            self._add_block(plan.first + slots.astype(np.int64), files)
            if (now := time.monotonic()) - reported >= _PROGRESS_SECONDS:
                reported = now
                done = first + len(slots)
                self._emit(Event("progress", KIND, f"{len(self._vocabulary):,} terms", done=done, total=plan.count, unit="passages"))
        for file in files.values():
            file.close()
        save_array(self._folder / "order.npy", order)
        self._save_terms()
        statistics = {
            "documents": plan.count,
            "terms": len(self._vocabulary),
            "postings": self._postings,
            "tokens": self._tokens,
            "analyzer": plan.analyzer.name,
        }
        write_json(self._folder / STATISTICS, statistics)

    def _add_block(self, positions: npt.NDArray[np.int64], files: dict[str, ArrayFile]) -> None:
        text, offsets = self._corpus.gather(positions)
        tokens, starts = self._vocabulary.tokenize(text, offsets)
        self._grow()
        row_terms, row_frequencies = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.int32)
        row_offsets = np.zeros(len(positions) + 1, np.int64)
        size = kernels.count_rows(tokens, starts, self._row_of, row_terms, row_frequencies, row_offsets)
        row_terms, row_frequencies = row_terms[:size], row_frequencies[:size]
        terms = np.empty(size, np.int32)
        terms = np.sort(terms[: kernels.collect_terms(row_terms, self._counts, terms)])
        self._document_frequencies[terms] += self._counts[terms]
        postings, dictionary = np.empty(size, np.uint16), np.empty(MAX_ENTRY_BYTES * len(terms), np.uint8)
        large = int((row_frequencies >= LARGE).sum())
        large_positions, large_frequencies = np.empty(large, np.int64), np.empty(large, np.int32)
        written, _ = kernels.invert(
            row_offsets, row_terms, row_frequencies, terms, self._counts, postings, dictionary, large_positions, large_frequencies
        )
        by_position = np.argsort(large_positions)
        files["large_positions"].append(self._postings + large_positions[by_position])
        files["large_frequencies"].append(large_frequencies[by_position])
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
            self._row_of = np.concatenate([self._row_of, np.full(extra, -1, np.int32)])
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
