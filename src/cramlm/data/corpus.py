"""The raw text to retrieve from: read once, cut into passages, rid of repetitions, kept as flat arrays that open at once and cost no
memory.

    files ─► Reader ─► rows ─► passages of about `passage_words` ─► not blank, not seen before ─► text.bin, offsets.npy, ids.bin, ...

A published corpus folder:
    text.bin          all text, UTF-8, without separators; document i is text.bin[offsets[i]:offsets[i + 1]]
    offsets.npy       int64 (N + 1,)
    source.npy        int32 (N,), place in sources.json, a list of names
    ids.bin           all ids, UTF-8; id_offsets.npy int64 (N + 1,) as for the text
    statistics.json   what was read, left out and why, and the sha256 of every input file
    rejected.jsonl    bad rows, if `on_bad_row` is "skip" and there are any: file, line, reason

The position of a document is its place in the order of reading, for ever. Building holds about 140 bytes per document in memory
(digests of what was seen, offsets, id hashes) besides one block of text.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from cramlm.artifacts import Artifact, hash_json, open_artifact, stage
from cramlm.config import CorpusConfig
from cramlm.data.parts import Part, gather_texts
from cramlm.data.readers import Reader
from cramlm.data.rows import Column, Rejected, Row
from cramlm.data.streams import FileStamp, expand_files, name_files, stamp_file
from cramlm.data.words import count_words, cut_passages, duplicate_key
from cramlm.errors import ArtifactError, DataError
from cramlm.records import Document, Emit, Event, Int32Array, IntArray, silent

KIND = "corpus"
CODE_FORMAT = 1  # raise it when the same input would give another folder
_FLUSH_BYTES = 4 << 20
_TELL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Corpus:
    """A published corpus, memory-mapped. `fingerprint` depends on the content only, not on where the folder or the input lies."""

    path: Path
    fingerprint: str
    statistics: dict[str, Any]
    offsets: IntArray
    buffer: npt.NDArray[np.uint8]
    sources: tuple[str, ...]
    source: Int32Array
    _ids: npt.NDArray[np.uint8]
    _id_offsets: IntArray
    _part: Part

    @staticmethod
    def open(path: Path) -> Corpus:
        """Raises ArtifactError if the folder is not a whole corpus."""
        artifact = open_artifact(path, kind=KIND)
        try:
            statistics = json.loads((path / "statistics.json").read_bytes())
            sources = tuple(json.loads((path / "sources.json").read_bytes()))
            offsets = np.load(path / "offsets.npy", mmap_mode="r", allow_pickle=False)
            text = np.memmap(path / "text.bin", dtype=np.uint8, mode="r")
            content = hash_json([artifact.files[name]["sha256"] for name in ("text.bin", "offsets.npy")])
            corpus = Corpus(
                path,
                artifact.fingerprint,
                statistics,
                offsets,
                text,
                sources,
                np.load(path / "source.npy", mmap_mode="r", allow_pickle=False),
                np.memmap(path / "ids.bin", dtype=np.uint8, mode="r"),
                np.load(path / "id_offsets.npy", mmap_mode="r", allow_pickle=False),
                Part(path, artifact.fingerprint, content, 0, text, offsets, None),
            )
        except (ValueError, KeyError, OSError) as error:
            raise ArtifactError(f"{path}: damaged corpus ({error}); delete the folder and build it again") from error
        for name, offsets, end in (
            ("offsets.npy", corpus.offsets, len(corpus.buffer)),
            ("id_offsets.npy", corpus._id_offsets, len(corpus._ids)),
        ):
            if len(offsets) != len(corpus.source) + 1 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
                raise ArtifactError(f"{path / name}: damaged, the offsets do not fit the text; delete the folder and build it again")
        if corpus.source.min() < 0 or corpus.source.max() >= len(sources):
            raise ArtifactError(f"{path / 'source.npy'}: damaged, a source is not listed; delete the folder and build it again")
        return corpus

    def __len__(self) -> int:
        return len(self.source)

    def text(self, position: int) -> str:
        """The document's text, in O(its length)."""
        return self._slice(self.buffer, self.offsets, position)

    def document(self, position: int) -> Document:
        return Document(self._slice(self._ids, self._id_offsets, position), self.text(position), self.sources[self.source[position]])

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the corpus consists of, in order of position."""
        return (self._part,)

    def gather(self, positions: IntArray) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """The texts at these positions, in the order given: (uint8 (bytes,), int64 (n + 1,) where each begins), both new and writable.

        Raises:
            IndexError: if a position is not in the corpus.
        """
        positions = np.asarray(positions, np.int64)
        if len(positions) and not (positions.min() >= 0 and positions.max() < len(self)):
            raise IndexError(f"positions {positions.min()} to {positions.max()} are not all in a corpus of {len(self)} documents")
        return gather_texts(self.parts, positions)

    def __iter__(self) -> Iterator[Document]:
        return (self.document(position) for position in range(len(self)))

    def _slice(self, data: npt.NDArray[np.uint8], offsets: IntArray, position: int) -> str:
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is not in a corpus of {len(self)} documents")
        try:
            return data[offsets[position] : offsets[position + 1]].tobytes().decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self.path}: damaged, document {position} is not UTF-8; delete the folder and build it again") from error


def build_corpus(config: CorpusConfig, store: Path, *, emit: Emit = silent) -> Corpus:
    """The corpus of these files: the one in the store if files (path, size, time) and config are as they were, else read now.

    Raises:
        UsageError: a path is missing or holds no data. DataError: a bad row (unless skipped), repeated ids, or no document in the end.
        EnvironmentFault: a file changed while it was read, or the disk refused.
    """
    stamps = [stamp_file(path) for path in expand_files(config.files)]
    key = {
        "code": CODE_FORMAT,
        "config": config.model_dump(mode="json", exclude={"files"}),
        "files": [[str(stamp.path.absolute()), stamp.bytes, stamp.mtime_ns] for stamp in stamps],
    }
    target = store / "corpora" / hash_json(key)[:16]

    def write(folder: Path) -> None:
        _Builder(config, folder, emit).build(stamps)

    artifact: Artifact = stage(target, kind=KIND, key=key, write=write, emit=emit)
    return Corpus.open(artifact.path)


@dataclass(slots=True)
class _Ids:
    """96 bits of every id that users gave, to find repeated ones at the end without keeping the ids."""

    hashes: array[int] = field(default_factory=lambda: array("q"))
    checks: array[int] = field(default_factory=lambda: array("q"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    files: array[int] = field(default_factory=lambda: array("i"))

    def add(self, name: str, file: int, line: int) -> None:
        self.hashes.append(hash(name))
        self.checks.append(hash((name, "check")))
        self.lines.append(line)
        self.files.append(file)

    def check(self, files: list[str]) -> None:
        """Raises DataError with the number of repeated ids and the first two places of one."""
        pairs = np.empty(len(self.hashes), dtype=[("hash", "i8"), ("check", "i8")])
        pairs["hash"], pairs["check"] = self.hashes, self.checks
        _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
        repeated = np.flatnonzero(first[inverse] != np.arange(len(pairs)))
        if len(repeated):
            second = int(repeated[0])
            places = [f"{files[self.files[index]]}:{self.lines[index]}" for index in (int(first[inverse[second]]), second)]
            raise DataError(f"{places[1]}: id already used in {places[0]}; {len(repeated):,} ids are repeated; make them unique")


class _Builder:
    """Writes one corpus folder; used once."""

    def __init__(self, config: CorpusConfig, folder: Path, emit: Emit) -> None:
        self._config, self._folder, self._emit = config, folder, emit
        self._seen: set[bytes] = set()
        self._ids = _Ids()
        self._id_bytes: list[bytes] = []
        self._text: list[bytes] = []
        self._held = 0
        self._offsets, self._id_offsets = array("q", [0]), array("q", [0])
        self._source = array("i")
        self._sources: dict[str, int] = {}
        self._rejected: list[Rejected] = []
        self._files: list[dict[str, Any]] = []
        self._blank = self._cut = self._duplicates = self._words = 0
        self._passages_per_source: list[int] = []

    def build(self, stamps: list[FileStamp]) -> None:
        megabytes = sum(stamp.bytes for stamp in stamps) / 1e6
        self._emit(Event("start", KIND, f"reading {len(stamps)} files", total=megabytes, unit="MB"))
        names = name_files([stamp.path for stamp in stamps])
        before = 0
        with (self._folder / "text.bin").open("wb") as text_file, (self._folder / "ids.bin").open("wb") as id_file:
            for index, (stamp, name) in enumerate(zip(stamps, names, strict=True)):
                self._read(index, name, stamp, before, megabytes, (text_file, id_file))
                before += stamp.bytes
            self._flush(text_file, id_file)
        self._ids.check([str(stamp.path) for stamp in stamps])
        if not self._source:
            raise DataError(f"{stamps[0].path}: the corpus has 0 documents, every row is blank or rejected; pass files with text")
        statistics = self._save()
        rows, passages = statistics["rows"], statistics["passages"]
        summary = (
            f"{passages['kept']:,} passages, {statistics['words']:,} words, {statistics['bytes'] / 1e6:.1f} MB from {rows['read']:,} rows "
            f"({rows['rejected']:,} rejected, {rows['blank']:,} blank, {rows['cut']:,} cut, {passages['duplicates']:,} duplicates dropped)"
        )
        self._emit(Event("done", KIND, summary, done=megabytes, total=megabytes, unit="MB", data={**statistics, "files": len(stamps)}))

    def _read(self, index: int, name: str, stamp: FileStamp, before: int, megabytes: float, outputs: tuple[BinaryIO, BinaryIO]) -> None:
        config = self._config
        columns = (
            Column(config.text_column, "text"),
            Column(config.id_column, "name", required=False),
            Column(config.source_column, "name", required=False),
        )
        reader = Reader(
            stamp.path,
            columns,
            stamp=stamp,
            max_record_bytes=config.max_record_bytes,
            on_bad_row=config.on_bad_row,
            stage=KIND,
            emit=self._emit,
        )
        told = time.monotonic()
        for row in reader:
            self._add(row, index, name)
            if self._held >= _FLUSH_BYTES:
                self._flush(*outputs)
                if (now := time.monotonic()) - told >= _TELL_SECONDS:
                    told = now
                    done = (before + reader.raw_bytes) / 1e6
                    self._emit(Event("progress", KIND, f"{len(self._source):,} passages", done=done, total=megabytes, unit="MB"))
        self._rejected += reader.rejected
        self._files.append(
            {
                "name": name,
                "bytes": stamp.bytes,
                "sha256": reader.sha256,
                "rows_read": reader.rows_read,
                "rows_used": reader.rows_used,
                "rows_rejected": len(reader.rejected),
            }
        )

    def _add(self, row: Row, file: int, name: str) -> None:
        line, (text, own_id, source) = row
        assert text is not None
        document_id = own_id or f"{name}:{line}"
        if own_id:
            self._ids.add(own_id, file, line)
        words = count_words(text)
        if not words:
            self._blank += 1
            return
        spans = cut_passages(text, words, self._config.passage_words)
        if len(spans) == 1:
            self._keep(text, words, document_id, source or name)
            return
        self._cut += 1
        for part, (start, end) in enumerate(spans):
            passage, passage_id = text[start:end], f"{document_id}#{part}"
            if own_id:
                self._ids.add(passage_id, file, line)
            self._keep(passage, count_words(passage), passage_id, source or name)

    def _keep(self, text: str, words: int, document_id: str, source: str) -> None:
        key = duplicate_key(text)
        if key in self._seen:
            self._duplicates += 1
            return
        self._seen.add(key)
        data, id_data = text.encode(), document_id.encode()
        self._text.append(data)
        self._id_bytes.append(id_data)
        self._held += len(data)
        self._offsets.append(self._offsets[-1] + len(data))
        self._id_offsets.append(self._id_offsets[-1] + len(id_data))
        number = self._sources.setdefault(source, len(self._sources))
        if number == len(self._passages_per_source):
            self._passages_per_source.append(0)
        self._passages_per_source[number] += 1
        self._source.append(number)
        self._words += words

    def _flush(self, text_file: BinaryIO, id_file: BinaryIO) -> None:
        text_file.write(b"".join(self._text))
        id_file.write(b"".join(self._id_bytes))
        self._text, self._id_bytes, self._held = [], [], 0

    def _save(self) -> dict[str, Any]:
        np.save(self._folder / "offsets.npy", np.asarray(self._offsets, dtype=np.int64))
        np.save(self._folder / "id_offsets.npy", np.asarray(self._id_offsets, dtype=np.int64))
        np.save(self._folder / "source.npy", np.asarray(self._source, dtype=np.int32))
        (self._folder / "sources.json").write_text(json.dumps(list(self._sources), ensure_ascii=False, indent=1) + "\n", "utf-8")
        if self._rejected:
            with (self._folder / "rejected.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(rejected.as_dict(), ensure_ascii=False) + "\n" for rejected in self._rejected)
        statistics = self.statistics()
        (self._folder / "statistics.json").write_text(json.dumps(statistics, ensure_ascii=False, indent=1) + "\n", "utf-8")
        return statistics

    def statistics(self) -> dict[str, Any]:
        """Plain data. rows: read = used + rejected; of the used, blank ones give no passage and cut ones several. passages: made = kept
        + duplicates.
        """
        used = sum(file["rows_used"] for file in self._files)
        kept = len(self._source)
        return {
            "rows": {
                "read": used + len(self._rejected),
                "used": used,
                "rejected": len(self._rejected),
                "blank": self._blank,
                "cut": self._cut,
            },
            "passages": {"made": kept + self._duplicates, "kept": kept, "duplicates": self._duplicates},
            "words": self._words,
            "bytes": self._offsets[-1],
            "sources": dict(zip(self._sources, self._passages_per_source, strict=True)),
            "files": self._files,
        }
