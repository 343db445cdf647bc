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
import time
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b, sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from cramlm.config.run import CorpusConfig
from cramlm.errors import ArtifactError, LockedError
from cramlm.io.paths import FileStamp, RemoteFile, stamp_inputs
from cramlm.io.readers import Reader
from cramlm.io.rows import Column, Rejected, Row
from cramlm.records import Emit, Event, Int32Array, IntArray, silent
from cramlm.storage.arrays import map_table, save_array, save_table, text_buffers
from cramlm.storage.artifacts import environment_faults, hash_json, open_artifact, stage
from cramlm.text.passages import cut_passages
from cramlm.text.words import MeasuredText

KIND: Final = "part"
PART_FILE: Final = "part.arrow"
STAGE: Final = "corpus"  # the stage that a user sees
CODE_FORMAT: Final = 5  # raise it when the same input would give another folder
PART_BYTES: Final = 32_000_000  # as the files lie on disk
NAMELESS: Final = b"\xff"  # in no UTF-8
TELL_SECONDS: Final = 0.2
_ALONE = 1 / 4  # of the bytes of a part, from which a file is one of its own
_FLUSH_BYTES = 4 << 20


@dataclass(frozen=True)
class PartPlan:
    """The files of one part, as they were when it was planned."""

    config: CorpusConfig
    stamps: tuple[FileStamp, ...]

    @cached_property
    def key(self) -> dict[str, Any]:
        """All that the part's content depends on."""
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
        """Of the files, as they lie on disk."""
        return sum(stamp.bytes for stamp in self.stamps)

    def folder(self, store: Path) -> Path:
        """Where the part lies once it is read."""
        return store / "parts" / self.name

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, from which `from_dict` makes the plan again."""
        return {"config": self.config.model_dump(mode="json"), "files": [_plain(stamp) for stamp in self.stamps]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> PartPlan:
        stamps = tuple(
            FileStamp(Path(path), size, mtime_ns) if isinstance(path, str) else FileStamp.of_remote(RemoteFile(**path))
            for path, size, mtime_ns in data["files"]
        )
        return PartPlan(CorpusConfig.model_validate(data["config"]), stamps)


def plan_parts(config: CorpusConfig, *, part_bytes: int = PART_BYTES) -> list[PartPlan]:
    """The parts of a corpus in the order of reading; no file is read. The corpus does not depend on `part_bytes`. Parts of small files end
    where the hash of a path says so, so that few of them change when a file is added.

    Raises:
        UsageError: a path is missing or holds no data. EnvironmentFault: a file may not be looked at.
    """
    return [PartPlan(config, group) for group in group_files(stamp_inputs(config.files), part_bytes)]


def read_part(plan: PartPlan, store: Path, *, emit: Emit = silent) -> Path:
    """The part's folder in the store, read now unless it is there. Tells its progress in MB; safe to call from several processes.

    Raises:
        DataError: a bad row (unless skipped) or file. EnvironmentFault: a file changed since it was planned, or the disk refused.
        LockedError: another process reads this part.
    """

    def write(folder: Path) -> None:
        _PartWriter(plan, folder, emit).write()

    return stage(plan.folder(store), kind=KIND, key=plan.key, write=write, emit=silent).path


def read_task(task: dict[str, Any], emit: Emit) -> bool:
    """`read_part` for plain JSON: {"plan": PartPlan.as_dict(), "store": path}. False if another process reads that part just now."""
    try:
        read_part(PartPlan.from_dict(task["plan"]), Path(task["store"]), emit=emit)
    except LockedError:
        return False
    return True


def save_sources(folder: Path, names: Iterable[str]) -> None:
    """Write the names of sources: sources.bin, and where each begins."""
    encoded = [name.encode() for name in names]
    (folder / "sources.bin").write_bytes(b"".join(encoded))
    save_array(folder / "source_offsets.npy", np.cumsum([0, *map(len, encoded)], dtype=np.int64))


def _plain(stamp: FileStamp) -> list[Any]:
    return [asdict(stamp.path) if isinstance(stamp.path, RemoteFile) else str(stamp.path), stamp.bytes, stamp.mtime_ns]


def group_files(stamps: Sequence[FileStamp], part_bytes: int) -> Iterator[tuple[FileStamp, ...]]:
    """The files of each part, in order."""
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
    """Return True for files whose paths have a small hash, the more likely the larger the file: parts have about `part_bytes` / 2."""
    hashed = int.from_bytes(blake2b(str(stamp.identity[0]).encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")
    return hashed < 2 * stamp.bytes / part_bytes * 2**64


@dataclass(slots=True)
class _FileCounts:
    """What became of one file. rows_read = rows_used + rows_rejected; passages are those kept in the part."""

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
        self._held = 0
        self._lengths, self._id_lengths = array("q"), array("q")
        self._words, self._source = array("i"), array("i")
        self._sources: dict[str, int] = {}
        self._own_ids, self._own_id_lines = bytearray(), array("q")
        self._rejected: list[tuple[int, Rejected]] = []
        self._files: list[_FileCounts] = []

    def write(self) -> None:
        before = 0
        with self._gathered("text") as text_file, self._gathered("ids") as id_file:
            for stamp in self._plan.stamps:
                self._read(stamp, before, (text_file, id_file))
                before += stamp.bytes
            self._flush(text_file, id_file)
            self._tell(before)
            self._save(text_file, id_file)

    @contextmanager
    def _gathered(self, name: str) -> Iterator[BinaryIO]:
        """A file for text that may not fit into memory; gone when the block ends."""
        path = self._folder / f"{name}.bin"
        with path.open("w+b") as file:
            yield file
        path.unlink()

    def _read(self, stamp: FileStamp, before: int, outputs: tuple[BinaryIO, BinaryIO]) -> None:
        config = self._config
        columns = (
            Column(stamp.text_column or config.text_column, "text"),
            Column(config.id_column, "name", required=False),
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
        told = time.monotonic()
        for row in reader:
            self._add(row, counts)
            if self._held >= _FLUSH_BYTES:
                self._flush(*outputs)
                if (now := time.monotonic()) - told >= TELL_SECONDS:
                    told = now
                    self._tell(before + reader.raw_bytes)
        self._rejected += ((len(self._files) - 1, rejected) for rejected in reader.rejected)
        counts.sha256 = reader.sha256
        counts.rows_read, counts.rows_used, counts.rows_rejected = reader.rows_read, reader.rows_used, len(reader.rejected)

    def _tell(self, done: int) -> None:
        passages = len(self._source)
        message, data = f"{passages:,} passages", {"passages": passages}
        self._emit(Event("progress", STAGE, message, done=done / 1e6, total=self._plan.bytes / 1e6, unit="MB", data=data))

    def _add(self, row: Row, counts: _FileCounts) -> None:
        line, (text, own_id, source) = row
        assert text is not None
        row_id = own_id.encode() if own_id else b"%b:%d" % (NAMELESS, line)
        if own_id:
            self._note_own_id(row_id, line, counts)
        measured = MeasuredText(text)
        words = measured.count_words()
        if not words:
            counts.blank += 1
            return
        spans = cut_passages(text, words, self._config.passage_words)
        if len(spans) == 1:
            self._keep(measured, words, row_id, source, counts)
            return
        counts.cut += 1
        for number, (start, end) in enumerate(spans):
            passage, passage_id = MeasuredText(text[start:end]), b"%b#%d" % (row_id, number)
            if own_id:
                self._note_own_id(passage_id, line, counts)
            self._keep(passage, passage.count_words(), passage_id, source, counts)

    def _note_own_id(self, own_id: bytes, line: int, counts: _FileCounts) -> None:
        self._own_ids += blake2b(own_id, digest_size=16).digest()
        self._own_id_lines.append(line)
        counts.own_ids += 1

    def _keep(self, passage: MeasuredText, words: int, passage_id: bytes, source: str | None, counts: _FileCounts) -> None:
        digest = passage.duplicate_key()
        if digest in self._seen:
            counts.duplicates += 1
            return
        self._seen.add(digest)
        self._digests += digest
        if self._config.duplicates == "words":
            self._word_digests += passage.words_key()
        self._text.append(passage.data)
        self._ids.append(passage_id)
        self._held += len(passage.data)
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
        self._text, self._ids, self._held = [], [], 0

    def _save(self, text_file: BinaryIO, id_file: BinaryIO) -> None:
        import pyarrow as pa

        schema = part_schema(word_digests=self._config.duplicates == "words")
        offsets = _offsets(self._lengths)
        columns = {
            "id": _column(pa.large_binary(), _offsets(self._id_lengths), id_file),
            "source": pa.array(np.asarray(self._source, np.int32)),
            "text": _column(pa.large_string(), offsets, text_file),
            "words": pa.array(np.asarray(self._words, np.int32)),
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
                    file.write(json.dumps({**rejected.as_dict(), "file": number}, ensure_ascii=False) + "\n")
        self._text_hash.update(offsets.data)
        statistics = {"files": [asdict(counts) for counts in self._files], "text_sha256": self._text_hash.hexdigest()}
        (self._folder / "statistics.json").write_text(json.dumps(statistics, indent=1) + "\n", "utf-8")


def part_schema(*, word_digests: bool) -> Any:
    """The columns (pyarrow) of a part."""
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
    """An Arrow array of the bytes of a file, which is mapped."""
    import pyarrow as pa

    file.flush()
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if offsets[-1] else b""  # an empty file cannot be mapped
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _digest_column(digests: bytearray) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(pa.binary(16), len(digests) // 16, [None, pa.py_buffer(bytes(digests))])


def _offsets(lengths: array[int]) -> IntArray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.asarray(lengths, np.int64), out=offsets[1:])
    return offsets


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
