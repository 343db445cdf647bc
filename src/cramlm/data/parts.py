"""Parts of a corpus: planning which files form a part, reading them into Arrow files, and opening the parts.

    plan_parts(config) ─► PartPlan ─► read_part(plan, store) ─► <store>/parts/<key>/
                                          rows ─► passages of about `passage_words` ─► not blank, not seen in this part ─► columns

    part.arrow       an Arrow file of one record batch, a row per passage:
                     id (binary, UTF-8; an id that starts with byte FF is appended to the file's name) · source (int32, index in
                     sources.bin; -1 - f stands for file f of this part) · text · words (int32) · digest (16 bytes, equal for duplicates) ·
                     word_digest, if `duplicates` is "words" (16 bytes, equal for passages of the same words)
    sources.bin      names of sources, UTF-8; source_offsets.npy int64 (names + 1,), the start of each name
    own_ids.npy      uint64 (K, 2), digests of all ids in the files, also of dropped passages; own_id_lines.npy int64 (K,)
    statistics.json  for every file the counts of its rows and its sha256; a sha256 of all text
    rejected.jsonl   bad rows, if `on_bad_row` is "skip" and there are any: number of the file, line, reason

A part is a pure function of its files, so parts can be read anywhere and in any order. What is computed from text (an index, n-grams) is
computed per part and stored under `Part.content`, so that a corpus that grows reuses it. File names are not stored: their short distinct
form depends on the other files of a corpus. A file of at least 8 MB is a part of its own; consecutive smaller ones share a part of at most
32 MB. Reading holds about 150 bytes per passage of the part in memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import resource
import time
import unicodedata
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from cramlm.config.run import OPTIONAL_ID, CorpusConfig
from cramlm.errors import ArtifactError, LockedError
from cramlm.io.paths import FileStamp, stamp_inputs
from cramlm.io.readers import Reader
from cramlm.io.rows import Column, Rejected, Row
from cramlm.records import Emit, Event, Int32Array, IntArray, silent
from cramlm.storage.arrays import (
    are_offsets,
    column_numbers,
    joined,
    map_array,
    map_table,
    number_column,
    offsets_of,
    save_array,
    save_table,
    separated,
    spread,
    text_buffers,
)
from cramlm.storage.artifacts import hash_json, open_artifact, write_json
from cramlm.storage.locks import damage_named, environment_faults
from cramlm.storage.stages import stage
from cramlm.text.words import MeasuredText, cut_passages, digest

KIND: Final = "part"
PART_FILE: Final = "part.arrow"
STAGE: Final = "corpus"  # of events
CODE_FORMAT: Final = 5  # increase when the same input gives other files
PART_BYTES: Final = 32_000_000  # of files on disk, possibly compressed
REBUILD: Final = "delete the folder and build the corpus again"
NAMELESS: Final = b"\xff"  # never occurs in UTF-8
PROGRESS_SECONDS: Final = 0.2
_ALONE = 1 / 4  # a file of this share of `part_bytes` is a part of its own
_FLUSH_BYTES = 4 << 20
_TEXT_OPTION = "--text-column (where that is the column of the task, the setting corpus.text_column)"


@dataclass(frozen=True)
class PartPlan:
    """The files of one part, as they were when the part was planned."""

    config: CorpusConfig
    stamps: tuple[FileStamp, ...]

    @cached_property
    def key(self) -> dict[str, Any]:
        """Stage key: everything that the part's content depends on."""
        return {
            "code": CODE_FORMAT,
            "unicode": unicodedata.unidata_version,
            "config": self.config.model_dump(mode="json", exclude={"files"}),
            "files": [stamp.identity for stamp in self.stamps],
        }

    @cached_property
    def name(self) -> str:
        return hash_json(self.key)[:16]

    @property
    def bytes(self) -> int:
        """Size of the files on disk."""
        return sum(stamp.bytes for stamp in self.stamps)

    def folder(self, store: Path) -> Path:
        """Return the folder of the part in a store."""
        return store / "parts" / self.name


PLANS: Final = TypeAdapter(PartPlan)
"""Turns a plan into plain JSON and back, for another process."""


def plan_parts(config: CorpusConfig, *, part_bytes: int = PART_BYTES) -> list[PartPlan]:
    """Plan the parts of a corpus, in reading order, without reading a file. The corpus does not depend on `part_bytes`. The hash of a path
    decides where a part of small files ends, so that few parts change when a file is added.

    Raises:
        UsageError: a path is missing or has no data. EnvironmentFault: a file cannot be accessed.
    """
    return [PartPlan(config, group) for group in group_files(stamp_inputs(config.files), part_bytes)]


def read_part(plan: PartPlan, store: Path, *, emit: Emit = silent) -> Path:
    """Read a part into the store unless it is there; return its folder. Emits progress in MB; safe to call from several processes.

    Raises:
        DataError: a bad row (unless skipped) or file. EnvironmentFault: a file changed since planning, or the disk cannot be written.
        LockedError: another process is reading this part.
    """

    def write(folder: Path) -> None:
        _PartWriter(plan, folder, emit).write()

    return stage(plan.folder(store), kind=KIND, key=plan.key, write=write, emit=silent).path


def read_part_job(task: dict[str, Any], emit: Emit) -> bool:
    """Run `read_part` on plain JSON: {"plan": that of `PLANS`, "store": path}. Return False if another process is reading the part."""
    try:
        read_part(PLANS.validate_python(task["plan"]), Path(task["store"]), emit=emit)
    except LockedError:
        return False
    return True


def save_sources(folder: Path, names: Iterable[str]) -> None:
    """Write the names of sources to sources.bin and their offsets to source_offsets.npy."""
    encoded, offsets = joined([name.encode() for name in names])
    (folder / "sources.bin").write_bytes(encoded.data)
    save_array(folder / "source_offsets.npy", offsets)


def group_files(stamps: Sequence[FileStamp], part_bytes: int) -> Iterator[tuple[FileStamp, ...]]:
    """Yield the files of each part, in order."""
    group: list[FileStamp] = []
    size = 0
    for stamp in stamps:
        alone = stamp.bytes >= _ALONE * part_bytes
        if group and (alone or size + stamp.bytes > part_bytes):
            yield tuple(group)
            group, size = [], 0
        group.append(stamp)
        size += stamp.bytes
        if alone or _ends_part(stamp, part_bytes):
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


def _ends_part(stamp: FileStamp, part_bytes: int) -> bool:
    """Return True for files whose paths have a small hash, with probability proportional to size: parts have about `part_bytes` / 2."""
    hashed = int.from_bytes(blake2b(str(stamp.identity[0]).encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")
    return hashed < 2 * stamp.bytes / part_bytes * 2**64


@dataclass(slots=True)
class _FileCounts:
    """Counts of one file. rows_read = rows_used + rows_rejected; passages: those kept in the part."""

    bytes: int
    sha256: str = ""
    rows_read: int = 0
    rows_used: int = 0
    rows_rejected: int = 0
    blank: int = 0
    cut: int = 0
    passages: int = 0
    duplicates: int = 0
    own_ids: int = 0


class _PartWriter:
    """Writes one part's folder; used once."""

    def __init__(self, plan: PartPlan, folder: Path, emit: Emit) -> None:
        self._plan, self._config, self._folder, self._emit = plan, plan.config, folder, emit
        self._seen: set[bytes] = set()
        self._text_hash = sha256()
        self._digests = bytearray()
        self._word_digests = bytearray()
        self._text: list[bytes] = []
        self._ids: list[bytes] = []
        self._buffered = 0
        self._lengths, self._id_lengths = array("q"), array("q")
        self._words, self._source = array("i"), array("i")
        self._sources: dict[str, int] = {}
        self._own_ids, self._own_id_lines = bytearray(), array("q")
        self._rejected: list[tuple[int, Rejected]] = []
        self._files: list[_FileCounts] = []

    def write(self) -> None:
        done = 0
        with self._spool("text") as text_file, self._spool("ids") as id_file:
            for stamp in self._plan.stamps:
                self._read(stamp, done, (text_file, id_file))
                done += stamp.bytes
            self._flush(text_file, id_file)
            self._emit_progress(done)
            self._save(text_file, id_file)

    @contextmanager
    def _spool(self, name: str) -> Iterator[BinaryIO]:
        """A temporary file for data that may not fit into memory."""
        path = self._folder / f"{name}.bin"
        with path.open("w+b") as file:
            yield file
        path.unlink()

    def _read(self, stamp: FileStamp, before: int, outputs: tuple[BinaryIO, BinaryIO]) -> None:
        config = self._config
        columns = (
            Column(stamp.text_column or config.text_column, "text", flag=_TEXT_OPTION),
            Column(config.id_column, "name", required=config.id_column != OPTIONAL_ID, flag="--id-column"),
            Column(config.source_column, "name", required=False),
        )
        reader = Reader(
            str(stamp.path),
            columns,
            stamp=stamp,
            max_record_bytes=config.max_record_bytes,
            on_bad_row=config.on_bad_row,
            stage=STAGE,
            emit=self._emit,
        )
        counts = _FileCounts(stamp.bytes)
        self._files.append(counts)
        reported = time.monotonic()
        for row in reader:
            self._add(row, counts)
            if self._buffered >= _FLUSH_BYTES:
                self._flush(*outputs)
                if (now := time.monotonic()) - reported >= PROGRESS_SECONDS:
                    reported = now
                    self._emit_progress(before + reader.raw_bytes)
        rows = reader.counts
        self._rejected += ((len(self._files) - 1, rejected) for rejected in rows.rejected)
        counts.sha256 = reader.sha256
        counts.rows_read, counts.rows_used, counts.rows_rejected = rows.rows_read, rows.rows_used, len(rows.rejected)

    def _emit_progress(self, done: int) -> None:
        passages = len(self._source)
        message, data = f"{passages:,} passages", {"passages": passages}
        self._emit(Event("progress", STAGE, message, done=done / 1e6, total=self._plan.bytes / 1e6, unit="MB", data=data))

    def _add(self, row: Row, counts: _FileCounts) -> None:
        line, (text, own_id, source) = row
        assert text is not None
        row_id = own_id.encode() if own_id else b"%b:%d" % (NAMELESS, line)
        if own_id:
            self._record_id(row_id, line, counts)
        measured = MeasuredText(text)
        words = measured.count_words()
        if not words:
            counts.blank += 1
            return
        spans = cut_passages(text, words, self._config.passage_words) if self._config.passage_words else [(0, len(text))]
        if len(spans) == 1:
            self._keep(measured, words, row_id, source, counts)
            return
        counts.cut += 1
        for number, (start, end) in enumerate(spans):
            passage, passage_id = MeasuredText(text[start:end]), b"%b#%d" % (row_id, number)
            if own_id:
                self._record_id(passage_id, line, counts)
            self._keep(passage, passage.count_words(), passage_id, source, counts)

    def _record_id(self, own_id: bytes, line: int, counts: _FileCounts) -> None:
        self._own_ids += digest(own_id)
        self._own_id_lines.append(line)
        counts.own_ids += 1

    def _keep(self, passage: MeasuredText, words: int, passage_id: bytes, source: str | None, counts: _FileCounts) -> None:
        key = passage.duplicate_key()
        if key in self._seen and self._config.duplicates != "none":
            counts.duplicates += 1
            return
        self._seen.add(key)
        self._digests += key
        if self._config.duplicates == "words":
            self._word_digests += passage.words_key()
        self._text.append(passage.data)
        self._ids.append(passage_id)
        self._buffered += len(passage.data)
        self._lengths.append(len(passage.data))
        self._id_lengths.append(len(passage_id))
        self._source.append(self._sources.setdefault(source, len(self._sources)) if source else -len(self._files))
        self._words.append(words)
        counts.passages += 1

    def _flush(self, text_file: BinaryIO, id_file: BinaryIO) -> None:
        text = b"".join(self._text)
        self._text_hash.update(text)
        text_file.write(text)
        id_file.write(b"".join(self._ids))
        self._text, self._ids, self._buffered = [], [], 0

    def _save(self, text_file: BinaryIO, id_file: BinaryIO) -> None:
        import pyarrow as pa

        schema = part_schema(word_digests=self._config.duplicates == "words")
        offsets = offsets_of(np.asarray(self._lengths, np.int64))
        columns = {
            "id": _column(pa.large_binary(), offsets_of(np.asarray(self._id_lengths, np.int64)), id_file),
            "source": number_column(np.asarray(self._source, np.int32)),
            "text": _column(pa.large_string(), offsets, text_file),
            "words": number_column(np.asarray(self._words, np.int32)),
            "digest": _digest_column(self._digests),
            "word_digest": _digest_column(self._word_digests),
        }
        save_table(self._folder / PART_FILE, schema, [pa.record_batch([columns[name] for name in schema.names], schema=schema)])
        save_array(self._folder / "own_ids.npy", np.frombuffer(self._own_ids, np.uint64).reshape(-1, 2))
        save_array(self._folder / "own_id_lines.npy", np.asarray(self._own_id_lines, np.int64))
        save_sources(self._folder, self._sources)
        if self._rejected:
            with (self._folder / "rejected.jsonl").open("w", encoding="utf-8") as file:
                for number, rejected in self._rejected:
                    file.write(json.dumps({**asdict(rejected), "file": number}, ensure_ascii=False) + "\n")
        self._text_hash.update(offsets.data)
        statistics = {"files": [asdict(counts) for counts in self._files], "text_sha256": self._text_hash.hexdigest()}
        write_json(self._folder / "statistics.json", statistics)


def part_schema(*, word_digests: bool) -> Any:
    """Return the pyarrow schema of a part."""
    import pyarrow as pa

    columns = [
        ("id", pa.large_binary()),
        ("source", pa.int32()),
        ("text", pa.large_string()),
        ("words", pa.int32()),
        ("digest", pa.binary(16)),
    ]
    return pa.schema([*columns, ("word_digest", pa.binary(16))] if word_digests else columns)


def _column(kind: Any, offsets: IntArray, file: BinaryIO) -> Any:
    """Return an Arrow array over the memory-mapped bytes of a file."""
    import pyarrow as pa

    file.flush()
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if offsets[-1] else b""  # an empty file cannot be mapped
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _digest_column(digests: bytearray) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(pa.binary(16), len(digests) // 16, [None, pa.py_buffer(bytes(digests))])


_SCATTERED: Final = 1 << 18  # bytes between passages
_FILES_PER_PART: Final = 9  # open files: the part's and its index segment's


class PartColumns:
    """The columns of a part, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Open part.arrow in the folder `path`.

        Raises:
            ArtifactError: the file is damaged.
        """
        import pyarrow as pa

        self.path, self._file = path, path / PART_FILE
        table, self.mapped = map_table(self._file, part_schema(word_digests=False), part_schema(word_digests=True))
        batches = table.to_batches()
        if len(batches) > 1:
            raise ArtifactError(f"{self._file}: damaged, {len(batches)} batches; {REBUILD}")
        with damage_named(path, REBUILD):
            self._descriptor = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._column = batches[0].column if batches else lambda name: pa.array([], table.schema.field(name).type)

    def strings(self, name: str) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """Return the column "text" or "id": UTF-8 without separators, uint8 (bytes,), and its offsets, int64 (passages + 1,)."""
        data, offsets = text_buffers(self._column(name))
        check_offsets(self._file, offsets, end=int(offsets[-1]))  # Arrow has compared the end with the data
        return data[: offsets[-1]], offsets

    def numbers(self, name: str) -> Int32Array:
        """Return the column "words" or "source", int32 (passages,)."""
        numbers: Int32Array = column_numbers(self._column(name))
        return numbers

    def digests(self, name: str) -> npt.NDArray[np.uint64]:
        """Return a column of digests, uint64 (passages, 2)."""
        column = self._column(name)
        return (
            np.frombuffer(column.buffers()[1], np.uint64)[: 2 * len(column)].reshape(-1, 2) if len(column) else np.empty((0, 2), np.uint64)
        )

    @cached_property
    def text_start(self) -> int:
        """Offset in the file of the bytes of the text."""
        return int(self.strings("text")[0].ctypes.data - np.frombuffer(self.mapped, np.uint8).ctypes.data)

    def read_text(self, start: int, target: memoryview) -> None:
        """Fill `target` with the text from byte `start` on, from the file: no page of it is mapped.

        Raises:
            OSError: the file cannot be read. ArtifactError: the file has been truncated.
        """
        done = 0
        while done < len(target) and (size := os.preadv(self._descriptor, [target[done:]], self.text_start + start + done)):
            done += size
        if done < len(target):
            raise ArtifactError(f"{self._file}: damaged, its text ends after {start + done} bytes; delete the folder and build it again")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of an opened corpus. Kept passage i, at position `first + i` of the corpus, is passage `kept[i]` of the part.

    fingerprint: of the whole part. content: equal for parts whose kept passages have the same texts in the same order. buffer: uint8, UTF-8
    of all passages of the part, without separators. offsets: int64 (passages of the part + 1,), in `buffer`. kept: int64, increasing, or
    None if all are kept.
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
        """Open a part without the passages `dropped`.

        Raises:
            ArtifactError: the part is damaged, or does not have these passages.
        """
        artifact = open_artifact(path, kind=KIND)
        columns = PartColumns(path)
        buffer, offsets = columns.strings("text")
        kept = None
        if len(dropped):
            if dropped[0] < 0 or dropped[-1] >= len(offsets) - 1:
                raise ArtifactError(f"{path}: is not the part that the corpus was built from; delete the corpus and build it again")
            kept = np.delete(np.arange(len(offsets) - 1), dropped)
        return Part(path, artifact.fingerprint, _content(path, dropped), first, buffer, offsets, kept, columns)

    def __len__(self) -> int:
        """Return the number of kept passages."""
        return len(self.offsets) - 1 if self.kept is None else len(self.kept)

    def release(self) -> None:
        """Drop the resident pages of the memory-mapped text."""
        start = self.columns.text_start // mmap.PAGESIZE * mmap.PAGESIZE
        if end := len(self.buffer):
            self.columns.mapped.madvise(mmap.MADV_DONTNEED, start, self.columns.text_start - start + end)

    def index_of(self, kept: IntArray) -> IntArray:
        """Return the indices in the part of these kept passages."""
        return kept if self.kept is None else self.kept[kept]


class PartIds:
    """The ids of a part's passages."""

    def __init__(self, columns: PartColumns, names: Sequence[str], *, own_ids_repeat: bool = False) -> None:
        """`names`: of the part's files, in order. own_ids_repeat: precede the ids in the files by the file's name and a slash.

        Raises:
            ArtifactError: the columns do not fit the names or statistics.
        """
        path = columns.path
        self._path, self._names, self._own_ids_repeat = path, names, own_ids_repeat
        with damage_named(path, REBUILD):
            counts = [file["passages"] for file in read_statistics(path)["files"]]
        self._ids, self._offsets = columns.strings("id")
        if len(counts) != len(names) or sum(counts) != len(self._offsets) - 1:
            raise ArtifactError(f"{path}: is not the part that the corpus was built from; delete the corpus and build it again")
        self._ends = np.cumsum(counts)

    def take(self, indices: IntArray) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """Return the UTF-8 of the ids of these passages, and their offsets."""
        starts, sizes = self._offsets[indices], self._offsets[indices + 1] - self._offsets[indices]
        offsets = offsets_of(sizes)
        data = self._ids[spread(starts, sizes)]
        if not self._own_ids_repeat and not (data == NAMELESS[0]).any():
            return data, offsets
        return joined([self._name(*each).encode() for each in zip(indices.tolist(), separated(data, offsets), strict=True)])

    def _name(self, index: int, own: bytes) -> str:
        if own.startswith(NAMELESS):
            return self._file_of(index) + decode(own[len(NAMELESS) :], self._path)
        name = decode(own, self._path)
        return f"{self._file_of(index)}/{name}" if self._own_ids_repeat else name

    def _file_of(self, index: int) -> str:
        return self._names[int(np.searchsorted(self._ends, index, side="right"))]


class Sources:
    """Names of sources by number, memory-mapped, as written by `save_sources`."""

    def __init__(self, path: Path) -> None:
        """Raise ArtifactError if the files are damaged."""
        self._path = path
        with damage_named(path, REBUILD):
            self._offsets = map_array(path / "source_offsets.npy")
            self._names = map_bytes(path / "sources.bin")
        check_offsets(path / "source_offsets.npy", self._offsets, end=len(self._names))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):  # IndexError also ends an iteration
            raise IndexError(f"source {number} is not among {len(self)}")
        return decode(self._names[self._offsets[number] : self._offsets[number + 1]].tobytes(), self._path)


def by_part(parts: Sequence[Part], positions: IntArray) -> Iterator[tuple[int, IntArray, IntArray]]:
    """Yield for each part with documents at these positions: its number, where they are in `positions`, and their indices in the part."""
    owner = np.searchsorted(np.array([part.first for part in parts]), positions, side="right") - 1
    for number in np.unique(owner).tolist():
        mine = np.flatnonzero(owner == number)
        yield number, mine, parts[number].index_of(positions[mine] - parts[number].first)


def gather_texts(parts: tuple[Part, ...], positions: IntArray) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """Return the concatenated texts at these positions, uint8 (bytes,), and their offsets, int64 (n + 1,).

    Passages are read in the order of the corpus. Adjacent ones are copied as one block: 4 GB per second for ranges, 1.4 for scattered
    passages of 1 kB. With gaps of more than `_SCATTERED` bytes on average they are read from the files, which takes a third of the time: a
    page fault maps 64 kB.

    Raises:
        EnvironmentFault: a file cannot be read. ArtifactError: a file has been truncated.
    """
    owner, starts, ends = (np.empty(len(positions), np.int64) for _ in range(3))
    for number, mine, indices in by_part(parts, positions):
        owner[mine], starts[mine], ends[mine] = number, parts[number].offsets[indices], parts[number].offsets[indices + 1]
    offsets = offsets_of(ends - starts)
    order = np.argsort(positions, kind="stable")
    begins = np.ones(len(positions), np.bool_)
    begins[1:] = (starts[order[1:]] != ends[order[:-1]]) | (owner[order[1:]] != owner[order[:-1]]) | (np.diff(order) != 1)
    runs = np.flatnonzero(begins)
    first, last = order[runs], order[np.append(runs, len(order))[1:] - 1]
    text = np.empty(offsets[-1], np.uint8)
    target, sources = text.data, [part.buffer.data for part in parts]
    spans = list(zip(*(span.tolist() for span in (owner[first], starts[first], offsets[first], offsets[last + 1])), strict=True))
    before = offsets_of(np.array([len(part.buffer) for part in parts]))[owner]
    span = (before + ends).max(initial=0) - (before + starts).min(initial=np.iinfo(np.int64).max)
    if span - offsets[-1] > _SCATTERED * len(runs):
        for number, start, begin, end in spans:
            with environment_faults(parts[number].path):
                parts[number].columns.read_text(start, target[begin:end])
    else:
        for number, start, begin, end in spans:
            target[begin:end] = sources[number][start : start + end - begin]
    return text, offsets


def decode(data: bytes, part: Path) -> str:
    """Decode the text or id of a passage of a part; raise ArtifactError if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{part}: damaged, a passage is not UTF-8; {REBUILD}") from error


def read_statistics(path: Path) -> dict[str, Any]:
    """Read statistics.json of a part or a corpus."""
    statistics: dict[str, Any] = json.loads((path / "statistics.json").read_bytes())
    return statistics


def map_bytes(path: Path) -> npt.NDArray[np.uint8]:
    """Memory-map a file's bytes; an empty file, which cannot be mapped, gives an empty array."""
    return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)


def check_offsets(path: Path, offsets: IntArray, *, end: int) -> None:
    """Raise ArtifactError unless the offsets increase from 0 to `end`."""
    if not are_offsets(offsets, end=end):
        raise ArtifactError(f"{path}: damaged, the offsets do not fit the text; {REBUILD}")


def allow_open_parts(count: int) -> None:
    """Raise this process's soft limit of open files (often 1,024) so that it can open `count` parts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count * _FILES_PER_PART + 1024
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _content(path: Path, dropped: IntArray) -> str:
    with damage_named(path, REBUILD):
        text = str(read_statistics(path)["text_sha256"])
    return hash_json([text, hashlib.sha256(dropped.tobytes()).hexdigest()])
