"""A part of a corpus as it is opened: text that was read together, as flat arrays (reading.py says how they come about).

What is computed from text (an index, say) is computed part by part and kept under `Part.content`: a corpus that grows keeps the parts
that it had. A part stays as it was read; what a corpus leaves out of it, because an earlier part holds it, is the corpus's affair.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.reading import KIND, NAMELESS, PART_FILE, part_schema
from cramlm.errors import ArtifactError
from cramlm.records import Int32Array, IntArray
from cramlm.storage.artifacts import environment_faults, hash_json, open_artifact
from cramlm.storage.tables import map_table, text_buffers

_FILES_PER_PART: Final = 8  # open ones: the part's, and what an index opens for the same passages


class PartColumns:
    """The columns of a part, memory-mapped (reading.py); opening them reads nothing of them but the offsets of the text, when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ArtifactError if the file is not that of a part."""
        import pyarrow as pa

        self.path, self._file = path, path / PART_FILE
        table, self.mapped = map_table(self._file, part_schema(word_digests=False), part_schema(word_digests=True))
        batches = table.to_batches()
        if len(batches) > 1:
            raise ArtifactError(f"{self._file}: damaged, {len(batches)} batches; delete the folder and build the corpus again")
        self._column = batches[0].column if batches else lambda name: pa.array([], table.schema.field(name).type)

    def text(self) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """Text of all passages, UTF-8, without separators, and where each begins, int64 (passages + 1,)."""
        return self._strings("text")

    def ids(self) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """The same of ids."""
        return self._strings("id")

    def numbers(self, name: str) -> Int32Array:
        """Words or sources, int32 (passages,)."""
        numbers: Int32Array = self._column(name).to_numpy()
        return numbers

    def digests(self, name: str) -> npt.NDArray[np.uint64]:
        """A column of digests, uint64 (passages, 2)."""
        column = self._column(name)
        return (
            np.frombuffer(column.buffers()[1], np.uint64)[: 2 * len(column)].reshape(-1, 2) if len(column) else np.empty((0, 2), np.uint64)
        )

    def _strings(self, name: str) -> tuple[npt.NDArray[np.uint8], IntArray]:
        data, offsets = text_buffers(self._column(name))
        check_offsets(self._file, offsets, end=int(offsets[-1]) if offsets[-1] <= len(data) else len(data))
        return data[: offsets[-1]], offsets


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part as a corpus sees it. Kept passage i (its position in the corpus is `first + i`) is passage `kept[i]` of the part.

    fingerprint: of all that the part holds. content: equal for parts whose kept passages have the same texts in the same order.
    first: position in the corpus of the first kept passage. buffer: uint8, text of all passages of the part, UTF-8, without separators.
    offsets: int64 (passages of the part + 1,), where each begins in `buffer`. kept: int64, increasing, or None if all are kept.
    """

    path: Path
    fingerprint: str
    content: str
    first: int
    buffer: npt.NDArray[np.uint8]
    offsets: IntArray
    kept: IntArray | None
    columns: PartColumns

    @staticmethod
    def open(path: Path, *, first: int, dropped: IntArray) -> Part:
        """Raises ArtifactError if the folder is not a whole part, or has no passages with the numbers `dropped`."""
        artifact = open_artifact(path, kind=KIND)
        columns = PartColumns(path)
        buffer, offsets = columns.text()
        kept = None
        if len(dropped):
            if dropped[0] < 0 or dropped[-1] >= len(offsets) - 1:
                raise ArtifactError(f"{path}: is not the part that the corpus was built from; delete the corpus and build it again")
            kept = np.delete(np.arange(len(offsets) - 1), dropped)
        return Part(path, artifact.fingerprint, _content(path, dropped), first, buffer, offsets, kept, columns)

    def __len__(self) -> int:
        """Passages kept."""
        return len(self.offsets) - 1 if self.kept is None else len(self.kept)

    def release(self) -> None:
        """Forget the pages of the text that were read: they count as this process's memory as long as it maps them."""
        self.columns.mapped.madvise(mmap.MADV_DONTNEED)

    def words(self) -> Int32Array:
        """Words of every passage of the part, int32."""
        return self.columns.numbers("words")

    def place(self, kept: IntArray) -> IntArray:
        """Which passages of the part the kept ones with these numbers are."""
        return kept if self.kept is None else self.kept[kept]


class PartIds:
    """The ids of one part's passages; opened only where ids are wanted."""

    def __init__(self, columns: PartColumns, names: Sequence[str]) -> None:
        """`names`: of the part's files, in order.

        Raises:
            ArtifactError: if what there is does not fit together.
        """
        path = columns.path
        self._path, self._names = path, names
        with damage_named(path):
            counts = [file["passages"] for file in read_statistics(path)["files"]]
        self._ids, self._offsets = columns.ids()
        if len(counts) != len(names) or sum(counts) != len(self._offsets) - 1:
            raise ArtifactError(f"{path}: is not the part that the corpus was built from; delete the corpus and build it again")
        self._ends = np.cumsum(counts)

    def __getitem__(self, place: int) -> str:
        data = self._ids[self._offsets[place] : self._offsets[place + 1]].tobytes()
        if data.startswith(NAMELESS):
            return self._names[int(np.searchsorted(self._ends, place, side="right"))] + decode(data[len(NAMELESS) :], self._path)
        return decode(data, self._path)


class Sources:
    """The names of sources by their numbers, memory-mapped: what `reading.save_sources` wrote."""

    def __init__(self, path: Path) -> None:
        """Raises ArtifactError if what there is does not fit together."""
        self._path = path
        with damage_named(path):
            self._offsets = np.load(path / "source_offsets.npy", mmap_mode="r", allow_pickle=False)
            self._names = map_bytes(path / "sources.bin")
        check_offsets(path / "source_offsets.npy", self._offsets, end=len(self._names))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):  # also what ends an iteration
            raise IndexError(f"source {number} is not among {len(self)}")
        return decode(self._names[self._offsets[number] : self._offsets[number + 1]].tobytes(), self._path)


def gather_texts(parts: tuple[Part, ...], positions: IntArray) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """The texts at these positions, one after the other, and where each begins: uint8 (bytes,), int64 (n + 1,).

    Passages that lie side by side are copied as one block: 4 GB per second for ranges, 1.4 for scattered passages of 1 kB.
    """
    positions = np.asarray(positions, np.int64)
    owner = np.searchsorted(np.array([part.first for part in parts]), positions, side="right") - 1
    starts, ends = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
    for number in np.unique(owner).tolist():
        mine = np.flatnonzero(owner == number)
        place = parts[number].place(positions[mine] - parts[number].first)
        starts[mine], ends[mine] = parts[number].offsets[place], parts[number].offsets[place + 1]
    offsets = np.zeros(len(positions) + 1, np.int64)
    np.cumsum(ends - starts, out=offsets[1:])
    begins = np.ones(len(positions), np.bool_)
    begins[1:] = (starts[1:] != ends[:-1]) | (owner[1:] != owner[:-1])
    runs = np.flatnonzero(begins)
    text = np.empty(offsets[-1], np.uint8)
    target, sources = text.data, [part.buffer.data for part in parts]
    places = np.append(offsets[runs], offsets[-1]).tolist()
    for number, start, (place, end) in zip(owner[runs].tolist(), starts[runs].tolist(), pairwise(places), strict=True):
        target[place:end] = sources[number][start : start + end - place]
    return text, offsets


def decode(data: bytes, part: Path) -> str:
    """Text or id of a passage of this part."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{part}: damaged, a passage is not UTF-8; delete the folder and build the corpus again") from error


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """What a damaged folder makes numpy and json raise, as an ArtifactError; what the system refuses, as an EnvironmentFault."""
    with environment_faults(path):
        try:
            yield
        except (ValueError, KeyError, TypeError, EOFError) as error:
            raise ArtifactError(f"{path}: damaged ({error}); delete the folder and build the corpus again") from error


def read_statistics(path: Path) -> dict[str, Any]:
    """The file statistics.json of a part or a corpus."""
    statistics: dict[str, Any] = json.loads((path / "statistics.json").read_bytes())
    return statistics


def map_bytes(path: Path) -> npt.NDArray[np.uint8]:
    """A file's bytes without reading them; a file of no bytes cannot be mapped, but may be there."""
    return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)


def check_offsets(path: Path, offsets: IntArray, *, end: int) -> None:
    """Raises ArtifactError unless the offsets rise from 0 to `end`."""
    if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise ArtifactError(f"{path}: damaged, the offsets do not fit the text; delete the folder and build the corpus again")


def allow_open_parts(count: int) -> None:
    """Let this process hold so many parts open: Linux starts processes with a limit of 1,024 files, far below what it permits them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count * _FILES_PER_PART + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _content(path: Path, dropped: IntArray) -> str:
    with damage_named(path):
        text = str(read_statistics(path)["text_sha256"])
    return hash_json([text, hashlib.sha256(dropped.tobytes()).hexdigest()])
