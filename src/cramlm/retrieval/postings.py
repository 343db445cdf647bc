"""An index on disk: flat arrays that are mapped, not read, so that opening costs nothing and many processes share one copy.

    row_offsets, row_terms, row_frequencies, large_places, large_frequencies      the index by document (`Rows`)
    block_offsets, block_terms, block_starts, postings                             the index by term within blocks (`Blocks`)
    lengths                 int32 (N,), terms of each document, repeated ones counted
    document_frequencies    int32 (V,)
    term_offsets, term_bytes                                                       the terms' UTF-8, int64 (V + 1,) and uint8
    term_keys, term_ids     uint64 and int32 (V,): hash keys ascending, and the term of each
    statistics.json         documents, terms, postings, tokens, analyzer, fingerprint of the corpus

It stores frequencies and lengths, not scores: k1, b and idf enter at query time. Both orders are kept (8 bytes per posting in all): by
term to find candidates, by document to score them exactly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.artifacts import SMALL_FILE, open_artifact
from cramlm.errors import ArtifactError
from cramlm.records import Int32Array, IntArray
from cramlm.retrieval.analysis import ANALYZER, ByteArray, Vocabulary
from cramlm.retrieval.index_kernels import BLOCK, Blocks, Rows

KIND: Final = "index"
STATISTICS: Final = "statistics.json"
TYPES: Final[dict[str, type[np.generic]]] = {
    "row_offsets": np.int64,
    "row_terms": np.int32,
    "row_frequencies": np.uint8,
    "large_places": np.int64,
    "large_frequencies": np.int64,
    "block_offsets": np.int64,
    "block_terms": np.int32,
    "block_starts": np.uint32,
    "postings": np.uint16,
    "lengths": np.int32,
    "document_frequencies": np.int32,
    "term_offsets": np.int64,
    "term_bytes": np.uint8,
    "term_keys": np.uint64,
    "term_ids": np.int32,
}
APPENDED: Final = tuple(TYPES)[:10]  # these grow by a block at a time, the others are written at the end


@dataclass(frozen=True, slots=True)
class Postings:
    """An opened index folder."""

    path: Path
    fingerprint: str
    statistics: dict[str, Any]
    rows: Rows
    blocks: Blocks
    lengths: Int32Array
    document_frequencies: Int32Array
    term_offsets: IntArray
    term_bytes: ByteArray
    term_keys: npt.NDArray[np.uint64]
    term_ids: Int32Array

    @staticmethod
    def open(path: Path) -> Postings:
        """Raises ArtifactError if the folder is not a whole index, or was made by another analyzer."""
        artifact = open_artifact(path, kind=KIND)
        if (analyzer := artifact.key.get("analyzer")) != ANALYZER:
            raise ArtifactError(f"{path}: indexed by analyzer {analyzer!r}, this cramlm has {ANALYZER!r}; build the index again")
        try:
            statistics = json.loads((path / STATISTICS).read_bytes())
            arrays = {name: _load(path / f"{name}.npy", dtype) for name, dtype in TYPES.items()}
        except (ValueError, KeyError, OSError) as error:
            raise ArtifactError(f"{path}: damaged index ({error}); delete the folder and build it again") from error
        rows = Rows(*(arrays.pop(name) for name in ("row_offsets", "row_terms", "row_frequencies", "large_places", "large_frequencies")))
        blocks = Blocks(*(arrays.pop(name) for name in ("block_offsets", "block_terms", "block_starts", "postings")))
        postings = Postings(path, artifact.fingerprint, statistics, rows, blocks, **arrays)
        postings._check()
        return postings

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @property
    def terms(self) -> int:
        return len(self.document_frequencies)

    @property
    def average_length(self) -> float:
        """Terms per document; 1 for an index without any, so that nothing is divided by 0."""
        return self.statistics["tokens"] / self.documents if self.statistics["tokens"] else 1.0

    def term(self, number: int) -> str:
        """The term as text."""
        return self.term_bytes[self.term_offsets[number] : self.term_offsets[number + 1]].tobytes().decode()

    def find_terms(self, vocabulary: Vocabulary) -> Int32Array:
        """This index's number of every term of another vocabulary; -1 where the index does not know it."""
        keys = vocabulary.keys()
        result = np.full(len(keys), -1, np.int32)
        place = np.searchsorted(self.term_keys, keys)
        open_ = np.arange(len(keys))
        while len(open_):  # a second round only for keys that several terms share
            open_ = open_[place[open_] < self.terms]
            open_ = open_[self.term_keys[place[open_]] == keys[open_]]
            numbers = self.term_ids[place[open_]]
            same = np.array([self._is(number, vocabulary, term) for number, term in zip(numbers, open_, strict=True)], np.bool_)
            result[open_[same]] = numbers[same]
            open_ = open_[~same]
            place[open_] += 1
        return result

    def _is(self, number: int, vocabulary: Vocabulary, term: int) -> bool:
        own = self.term_bytes[self.term_offsets[number] : self.term_offsets[number + 1]]
        other = vocabulary.term_bytes[vocabulary.term_offsets[term] : vocabulary.term_offsets[term + 1]]
        return np.array_equal(own, other)

    def _check(self) -> None:
        """Raises ArtifactError if the arrays' sizes do not fit together, so that the kernels never read outside of them."""
        documents, terms, postings = self.documents, self.terms, len(self.blocks.postings)
        sizes = {
            "row_offsets": (len(self.rows.offsets), documents + 1),
            "row_terms": (len(self.rows.terms), postings),
            "row_frequencies": (len(self.rows.frequencies), postings),
            "large_frequencies": (len(self.rows.large_frequencies), len(self.rows.large_places)),
            "block_offsets": (len(self.blocks.offsets), -(-documents // BLOCK) + 1),
            "block_starts": (len(self.blocks.starts), len(self.blocks.terms)),
            "term_offsets": (len(self.term_offsets), terms + 1),
            "term_keys": (len(self.term_keys), terms),
            "term_ids": (len(self.term_ids), terms),
        }
        for name, (found, expected) in sizes.items():
            if found != expected:
                raise ArtifactError(f"{self.path / name}.npy: damaged, {found} values instead of {expected}; build the index again")
        ends = {
            "row_offsets": (self.rows.offsets, postings),
            "block_offsets": (self.blocks.offsets, len(self.blocks.terms)),
            "term_offsets": (self.term_offsets, len(self.term_bytes)),
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


def _load(path: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Mapped if large; small ones are read (an empty file cannot be mapped)."""
    array = np.load(path, mmap_mode="r" if path.stat().st_size > SMALL_FILE else None, allow_pickle=False)
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{path.name} holds {array.dtype} of {array.ndim} dimensions")
    array.flags.writeable = False
    return np.asarray(array)
