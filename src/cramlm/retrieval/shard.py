"""A shard of an index: the postings of a run of passages, on disk and opened.

A published shard folder (N passages, arrays as .npy):
    order.npy         int32 (N,), which passage of the run lies in each slot: they are shuffled, so that every block is a fair sample
    lengths.npy       int32 (N,), terms of the passage in each slot
    dictionary_offsets, dictionary, posting_offsets, postings, large_places, large_frequencies    see index_kernels.Blocks
    document_frequencies.npy          int32 (terms,)
    term_keys, term_ids, term_sizes, term_bytes    the terms by hash key; sizes and bytes in the order of their numbers
    statistics.json   how many documents, terms, postings, tokens; the analyzer

Everything in it depends on the run's text alone: not on the corpus around it, the other shards, or k1 and b.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.arrays import read_array
from cramlm.artifacts import SMALL_FILE, environment_faults, open_artifact
from cramlm.errors import ArtifactError
from cramlm.records import Int32Array, IntArray
from cramlm.retrieval import index_kernels
from cramlm.retrieval.analysis import ANALYZER, Vocabulary
from cramlm.retrieval.index_kernels import BLOCK, Blocks

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
        index_kernels.find_keys(
            self.term_keys, self.term_ids, self.term_offsets, self.term_bytes,
            vocabulary.keys(), vocabulary.term_offsets, vocabulary.term_bytes, result,
        )  # fmt: skip
        return result

    def frequencies(self, slot: int, terms: Int32Array) -> IntArray:
        """How often each of `terms` (this shard's numbers, -1 for none) stands in the passage in a slot."""
        order = np.argsort(terms, kind="stable")
        found = np.zeros(len(terms), np.int64)
        index_kernels.frequencies_in(slot // BLOCK, slot % BLOCK, terms[order], self.blocks, found)
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
