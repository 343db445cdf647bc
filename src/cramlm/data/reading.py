"""From input files to the parts of a corpus: each a pure function of its files, so that parts can be read anywhere, in any order.

    plan_parts(config) ─► PartPlan ─► read_part(plan, store) ─► <store>/parts/<key>/
                                          rows ─► passages of about `passage_words` ─► not blank, not seen in this part ─► arrays

    part.arrow       an Arrow file of one record batch, a row per passage:
                     id (binary, UTF-8; one that starts with the byte FF follows the name of the file) · source (int32, place among the
                     names in sources.bin; -1 - f stands for file f of this part) · text · words (int32) · digest (16 bytes, equal for
                     duplicates) · word_digest, if `duplicates` is "words" (16 bytes, equal for passages of the same words)
    sources.bin      the names of sources, UTF-8; source_offsets.npy int64 (names + 1,), where each name begins
    own_ids.npy      uint64 (K, 2), digests of all ids that users gave, also of passages left out; own_id_lines.npy int64 (K,)
    statistics.json  what became of the rows of every file, and its sha256; a sha256 of all text
    rejected.jsonl   bad rows, if `on_bad_row` is "skip" and there are any: number of the file, line, reason

File names are not stored: which name is short and distinct depends on the other files of a corpus. A file of 8 MB or more is a part of its
own; smaller ones that follow one another share a part of at most 32 MB. Reading holds about 150 bytes per passage of the part in memory.
On other machines: `for plan in plan_parts(config)[shard::shards]: read_part(plan, store)`, then `build_corpus` joins what is there.
"""

from __future__ import annotations

import json
import time
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b, sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from cramlm.config.run import CorpusConfig
from cramlm.errors import LockedError
from cramlm.io.paths import stamp_inputs
from cramlm.io.readers import Reader
from cramlm.io.remote import RemoteFile
from cramlm.io.rows import Column, Rejected, Row
from cramlm.io.streams import FileStamp
from cramlm.records import Emit, Event, IntArray, silent
from cramlm.storage.arrays import save_array
from cramlm.storage.artifacts import hash_json, stage
from cramlm.storage.tables import save_table
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
    data = mmap(file.fileno(), 0, access=ACCESS_READ) if offsets[-1] else b""  # an empty file cannot be mapped
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _digest_column(digests: bytearray) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(pa.binary(16), len(digests) // 16, [None, pa.py_buffer(bytes(digests))])


def _offsets(lengths: array[int]) -> IntArray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.asarray(lengths, np.int64), out=offsets[1:])
    return offsets
