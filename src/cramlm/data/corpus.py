"""The corpus to retrieve from: files read once, in parts (parts.py), cut into passages, deduplicated, and memory-mapped.

    files ─► plan_parts ─► read_part, in several processes ─► <store>/parts/<key>/ ... ─► merge_parts ─► <store>/corpora/<key>/

    corpus.json       fingerprint; the parts in order: folder, fingerprint, numbers of files, kept and dropped passages
    dropped.npy       int64, indices of the dropped passages in their part, part after part
    source.npy        int32 (N,), index of each passage's source in sources.bin (UTF-8; source_offsets.npy: offsets), in the order of the
                      sources' first kept passages
    statistics.json   counts of rows and passages, reasons of drops, and the sha256 of every input file
    rejected.jsonl    bad rows, if there are any: file, line, reason

An added file is read alone; the corpus is then merged again, without reading text: 0.4 GB and 5 CPU seconds for 10 million passages with
ids of their own. A document's position is its index in reading order. Positions and everything else do not depend on the parts, or on the
processes that read them.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.config.run import CorpusConfig
from cramlm.data.parts import KIND as PART
from cramlm.data.parts import (
    NAMELESS,
    PART_BYTES,
    PLANS,
    PROGRESS_SECONDS,
    REBUILD,
    STAGE,
    Part,
    PartColumns,
    PartIds,
    PartPlan,
    Sources,
    allow_open_parts,
    by_part,
    decode,
    gather_texts,
    plan_parts,
    read_part,
    read_statistics,
    save_sources,
)
from cramlm.errors import ArtifactError, DataError, brief, counted, size
from cramlm.io.executors import Executor, Processes, SummedProgress
from cramlm.io.machine import available_cores
from cramlm.io.paths import FileStamp, files_left_out, name_files
from cramlm.io.remote import RemoteFile
from cramlm.records import BoolArray, Document, Emit, Event, Int32Array, IntArray, count, silent
from cramlm.storage.arrays import map_array, offsets_of, read_array, save_array, separated, spread
from cramlm.storage.artifacts import MANIFEST, hash_json, open_artifact, published_folders, write_json
from cramlm.storage.locks import damage_named, lock, wait_while_locked
from cramlm.storage.stages import raise_if_checking, shared_stage
from cramlm.text.words import digest

KIND: Final = STAGE
CODE_FORMAT: Final = 4  # increase when the same parts give other files
TABLE: Final = "corpus.json"
MAX_RESIDENT_BYTES: Final = 1 << 30
MOST_SOURCES: Final = 100  # named in statistics: a source may be the URL of a single page
PARTS_FOLDER: Final = Path("../../parts")  # relative to a corpus, so that a store can be moved
_BYTES_PER_WORKER: Final = 8e6  # a second of reading: for less, starting a process costs more than it saves
_READ: Final = "cramlm.data.parts:read_part_job"
_Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A published corpus, memory-mapped. `fingerprint` depends on the content only: not on paths or parts.

    parts: in order of position. source: int32 (N,), index in `sources` of every document.
    """

    path: Path
    fingerprint: str
    statistics: dict[str, Any]
    parts: tuple[Part, ...]
    sources: Sources
    source: Int32Array
    _file_names: tuple[tuple[str, ...], ...]  # of each part

    @staticmethod
    def open(path: Path) -> Corpus:
        """Open a corpus.

        Raises:
            ArtifactError: the corpus or one of its parts is missing or damaged.
        """
        open_artifact(path, kind=KIND)
        with damage_named(path, REBUILD):
            table = json.loads((path / TABLE).read_bytes())
            statistics = read_statistics(path)
            source = map_array(path / "source.npy")
            parts = _open_parts(path, table["parts"])
            names = [file["name"] for file in statistics["files"]]
            ends = np.cumsum([0, *(entry["files"] for entry in table["parts"])]).tolist()
            names_of_parts = tuple(tuple(names[start:end]) for start, end in pairwise(ends))
        sources = Sources(path)
        if len(source) != sum(map(len, parts)) or source.min() < 0 or source.max() >= len(sources):
            raise ArtifactError(f"{path / 'source.npy'}: damaged, a source is not listed; delete the folder and build it again")
        return Corpus(path, table["fingerprint"], statistics, parts, sources, source, names_of_parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """A corpus is sent to another process as its path."""
        return Corpus.open, (self.path.absolute(),)

    @property
    def store(self) -> Path:
        """Folder of the store that holds the corpus."""
        return self.path.parent.parent

    @property
    def file_names(self) -> str:
        """The files that it was read from, for messages."""
        first, *others = (file["name"] for file in self.statistics["files"])
        return f"{first} and {counted(len(others), 'other file')}" if others else str(first)

    def __len__(self) -> int:
        return len(self.source)

    def text(self, position: int) -> str:
        """Return the document's text."""
        text = decode(self.data(position), self.parts[self._find(position)[0]].path)
        count("decoded", [text])
        return text

    def data(self, position: int) -> bytes:
        """Return the document's text in UTF-8."""
        number, index = self._find(position)
        part = self.parts[number]
        return part.buffer[part.offsets[index] : part.offsets[index + 1]].tobytes()

    def document(self, position: int) -> Document:
        return Document(self.ids([position])[0], self.text(position), self.sources[int(self.source[position])])

    def ids(self, positions: Iterable[int]) -> list[str]:
        """Return the ids of the documents at these positions, in the given order."""
        return [decode(own, self.path) for own in separated(*self.encoded_ids(np.fromiter(positions, np.int64)))]

    def encoded_ids(self, positions: IntArray) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """Return the ids of the documents at these positions as `gather` returns their texts; damaged ones may not be UTF-8.

        Raises:
            IndexError: a position is not in the corpus.
        """
        self._check_positions(positions)
        sizes, found = np.empty(len(positions), np.int64), []
        for number, mine, indices in by_part(self.parts, positions):
            if (ids := self._ids.get(number)) is None:
                ids = self._ids[number] = PartIds(
                    self.parts[number].columns, self._file_names[number], own_ids_repeat=bool(self.statistics.get("repeated_ids"))
                )
            data, ends = ids.take(indices)
            sizes[mine] = np.diff(ends)
            found.append((mine, data))
        offsets = offsets_of(sizes)
        result = np.empty(offsets[-1], np.uint8)
        for mine, data in found:
            result[spread(offsets[mine], sizes[mine])] = data
        return result, offsets

    def words(self, positions: IntArray) -> IntArray:
        """Return the number of words of the documents at these positions, int64."""
        return self._per_document(positions, lambda part, indices: part.columns.numbers("words")[indices])

    def sizes(self, positions: IntArray) -> IntArray:
        """Return the size in bytes of the documents at these positions, int64."""
        return self._per_document(positions, lambda part, indices: part.offsets[indices + 1] - part.offsets[indices])

    def _per_document(self, positions: IntArray, measure: Callable[[Part, IntArray], npt.NDArray[Any]]) -> IntArray:
        values = np.empty(len(positions), np.int64)
        for number, mine, indices in by_part(self.parts, np.asarray(positions, np.int64)):
            values[mine] = measure(self.parts[number], indices)
        return values

    def release(self) -> None:
        """Drop the resident pages of the memory-mapped text, if it has more than `MAX_RESIDENT_BYTES`: mapping them again costs more than
        copying the text.
        """
        if sum(part.buffer.nbytes for part in self.parts) > MAX_RESIDENT_BYTES:
            for part in self.parts:
                part.release()

    def gather(self, positions: IntArray) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """Return the concatenated texts at these positions, uint8 (bytes,), and their offsets, int64 (n + 1,), as new arrays.

        Raises:
            IndexError: a position is not in the corpus.
        """
        positions = np.asarray(positions, np.int64)
        self._check_positions(positions)
        return gather_texts(self.parts, positions)

    def _check_positions(self, positions: IntArray) -> None:
        if len(positions) and not (positions.min() >= 0 and positions.max() < len(self)):
            raise IndexError(f"positions {positions.min()} to {positions.max()} are not all in a corpus of {len(self)} documents")

    def __iter__(self) -> Iterator[Document]:
        return (self.document(position) for position in range(len(self)))

    @cached_property
    def _firsts(self) -> list[int]:
        return [part.first for part in self.parts]

    @cached_property
    def _ids(self) -> dict[int, PartIds]:
        return {}

    def _find(self, position: int) -> tuple[int, int]:
        """Return (number of the part, index of the passage in it)."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is not in a corpus of {len(self)} documents")
        number = bisect_right(self._firsts, position) - 1
        part = self.parts[number]
        return number, position - part.first if part.kept is None else int(part.kept[position - part.first])


def build_corpus(
    config: CorpusConfig,
    store: Path,
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    part_bytes: int = PART_BYTES,
    emit: Emit = silent,
) -> Corpus:
    """Build the corpus of these files, or open the one in the store if files (path, size, time) and config are unchanged. Only parts that
    are not in the store are read.

    workers: processes that read; None = one per core, but none for less than a second of reading. executor: used instead of `workers`.
    part_bytes: size up to which small files share a part. None of these changes the result.

    Raises:
        UsageError: a path is missing or has no data. DataError: a bad row (unless skipped), repeated ids, or no document is left.
        EnvironmentFault: a file changed while it was read, or the disk cannot be written. LockedError: another process builds this corpus
        for longer than `wait_limit()`.
    """
    plans = plan_parts(config, part_bytes=part_bytes)
    keys = [plan.key for plan in plans]
    files = [file for part in keys for file in part["files"]]
    key = {"code": CODE_FORMAT, "config": keys[0]["config"], "files": files, "parts": [plan.name for plan in plans]}
    target = store / "corpora" / hash_json(key)[:16]

    for origin in sorted({stamp.path.where for plan in plans for stamp in plan.stamps if isinstance(stamp.path, RemoteFile)}):
        emit(Event("note", KIND, f"reading from {origin}"))

    def write(folder: Path) -> None:
        if others := files_left_out(config.files):
            described = next((file for file in others if file.suffix.lower() == ".json"), None)
            like = str(others[0]) if described is None else f"{described} (a .json file is read if it is passed by name)"
            emit(Event("note", KIND, f"left out by name: {counted(len(others), 'file')}, like {like}"))
        read = _read_parts(plans, store, executor or _processes(plans, store, workers), emit)
        statistics = merge_parts(plans, store, folder)
        data = {**statistics, "files": len(statistics["files"])}
        emit(Event("done", KIND, _summary(statistics), done=read, total=read, unit="MB", data=data))

    def restore() -> None:
        if (target / MANIFEST).exists() and _missing(plans, store):  # parts of an existing corpus were deleted
            raise_if_checking(KIND, "parts of it are missing")
            with lock(target):
                _read_parts(plans, store, executor or _processes(plans, store, workers), emit)

    wait_while_locked(restore, stage=KIND, emit=emit)
    return Corpus.open(shared_stage(target, kind=KIND, key=key, write=write, emit=emit).path)


def verify_corpora(path: Path) -> None:
    """Open every corpus at or below `path`: `artifacts.verify` checks existing parts, this that none is missing.

    Raises:
        ArtifactError: a part is missing, damaged, or not the one that a corpus was built from.
    """
    for folder in published_folders(path, holding=TABLE):
        Corpus.open(folder)


def _open_parts(path: Path, table: Sequence[dict[str, Any]]) -> tuple[Part, ...]:
    """Open the parts of a corpus. Raises ArtifactError if a part is missing, damaged, or not the one that the corpus was built from."""
    allow_open_parts(len(table))
    dropped = read_array(path / "dropped.npy")
    parts: list[Part] = []
    first = start = 0
    for entry in table:
        folder = Path(os.path.normpath(path.absolute() / PARTS_FOLDER / entry["folder"]))
        if not folder.is_dir():
            raise ArtifactError(f"{folder}: missing, a part of the corpus {path}; build the corpus again, the other parts are kept")
        end = start + entry["dropped"]
        part = Part.open(folder, first=first, dropped=dropped[start:end])
        if part.fingerprint != entry["fingerprint"]:
            raise ArtifactError(f"{folder}: is not the part that {path} was built from; delete that corpus and build it again")
        parts.append(part)
        first, start = first + len(part), end
    return tuple(parts)


def _missing(plans: Sequence[PartPlan], store: Path) -> list[PartPlan]:
    return [plan for plan in plans if not (plan.folder(store) / MANIFEST).exists()]


def _processes(plans: Sequence[PartPlan], store: Path, workers: int | None) -> Processes:
    if workers is None:
        total = sum(plan.bytes for plan in _missing(plans, store))
        workers = min(available_cores(), max(1, int(total // _BYTES_PER_WORKER)))
    return Processes(workers)


def _read_parts(plans: Sequence[PartPlan], store: Path, executor: Executor, emit: Emit) -> float:
    """Read the parts that are not in the store; return the MB read."""
    missing = _missing(plans, store)
    files, all_files = (sum(len(plan.stamps) for plan in group) for group in (missing, plans))
    total = sum(plan.bytes for plan in missing)
    what = counted(files, "file") if files == all_files else f"{files:,} of {all_files:,} files, the others are read already"
    data = {"parts": len(plans), "parts_read_already": len(plans) - len(missing)}
    emit(Event("start", KIND, f"reading {what}", total=total / 1e6, unit="MB", data=data))
    tasks = [{"plan": PLANS.dump_python(plan, mode="json"), "store": str(store)} for plan in missing]
    progress = SummedProgress(KIND, total=total / 1e6, unit="MB", emit=emit, count="passages", seconds=PROGRESS_SECONDS)
    for plan, done in zip(missing, executor.map(_READ, tasks, on_event=progress), strict=True):
        if not done:  # another process is reading this part
            wait_while_locked(partial(read_part, plan, store), stage=KIND, emit=emit)
    return total / 1e6


def _summary(statistics: dict[str, Any]) -> str:
    rows, passages = statistics["rows"], statistics["passages"]
    duplicates = counted(passages["duplicates"], "duplicate")
    if passages["near_duplicates"]:
        duplicates += f" and {counted(passages['near_duplicates'], 'near-duplicate')}"
    return (
        f"{counted(passages['kept'], 'passage')}, {counted(statistics['words'], 'word')}, {size(statistics['bytes'])} "
        f"from {counted(rows['read'], 'row')} "
        f"({rows['rejected']:,} rejected, {rows['blank']:,} blank, {rows['cut']:,} split, {duplicates} dropped)"
        + (f"; {repeated:,} ids repeat in other files: every id is FILE/ID" if (repeated := statistics.get("repeated_ids")) else "")
    )


@dataclass(frozen=True, slots=True)
class _Input:
    """A part to merge. first_file: number of its first file in the corpus. files: their entries in statistics.json."""

    path: Path
    fingerprint: str
    first_file: int
    files: list[dict[str, Any]]

    @property
    def passages(self) -> int:
        return sum(file["passages"] for file in self.files)

    def digests(self, name: str) -> _Digests:
        """Return a copy of a column of digests: there may be more parts than files can be open."""
        return PartColumns(self.path).digests(name).copy()

    def nameless(self) -> BoolArray:
        """Return a mask of the passages of rows without id."""
        data, offsets = PartColumns(self.path).strings("id")
        return np.asarray(data[offsets[:-1]] == NAMELESS[0])

    def ids_with(self, character: str) -> BoolArray:
        """Return a mask of the passages with an ASCII character in their id."""
        data, offsets = PartColumns(self.path).strings("id")
        mask = np.zeros(self.passages, np.bool_)
        mask[np.searchsorted(offsets, np.flatnonzero(data == ord(character)), side="right") - 1] = True
        return mask

    def ids(self, chosen: BoolArray) -> Iterator[bytes]:
        """Yield the ids of some passages, as the part has them."""
        data, offsets = PartColumns(self.path).strings("id")
        return (data[offsets[index] : offsets[index + 1]].tobytes() for index in np.flatnonzero(chosen).tolist())

    def array(self, name: str) -> npt.NDArray[Any]:
        return read_array(self.path / f"{name}.npy")


def merge_parts(plans: Sequence[PartPlan], store: Path, folder: Path) -> dict[str, Any]:
    """Write the corpus of these parts (all in the store) to `folder`; return its statistics.

    Of equal passages the first in reading order is kept and, if the config says so, of passages with the same words. If ids are repeated in
    different files, every id is preceded by the name of its file.

    Raises:
        DataError: ids are repeated in one file, an id is that of a row without id, or no document is left. ArtifactError: a part is
        damaged.
    """
    stamps = [stamp for plan in plans for stamp in plan.stamps]
    first_files = accumulate((len(plan.stamps) for plan in plans), initial=0)
    inputs = [_open_input(plan, store, first_file) for plan, first_file in zip(plans, first_files, strict=False)]
    repeated_ids = _count_repeated_ids(inputs, stamps)
    digests: _Digests = np.concatenate([part.digests("digest") for part in inputs])
    if not len(digests):
        raise DataError(f"{stamps[0].path}: the corpus has 0 documents, every row is blank or rejected; pass files with text")
    keep = np.ones(len(digests), np.bool_)
    if plans[0].config.duplicates != "none":
        keep[repetitions(digests)[0]] = False
    distinct = int(keep.sum())
    if plans[0].config.duplicates == "words":
        word_digests: _Digests = np.concatenate([part.digests("word_digest") for part in inputs])
        keep[repetitions(word_digests)[0]] = False  # equal passages also have equal words, so the first one of them is kept
    if not repeated_ids:  # else ids are FILE/ID
        _refuse_ids_of_nameless_rows(inputs, stamps, keep)
    return _Merger(inputs, stamps, folder, keep, near_duplicates=distinct - int(keep.sum()), repeated_ids=repeated_ids).write(digests)


def repetitions(digests: _Digests) -> tuple[IntArray, IntArray]:
    """Find rows of an (N, 2) array that equal an earlier row: their indices, ascending, and for each the index of the first equal row.

    Sorts by one column and compares the other only where the first repeats: about 0.2 s per million rows.
    """
    order = np.argsort(digests[:, 0])
    column = digests[order, 0]
    equal = column[1:] == column[:-1]
    involved = np.zeros(len(order), np.bool_)
    involved[1:] |= equal
    involved[:-1] |= equal
    candidates = np.sort(order[involved])
    rows = digests[candidates]
    by_row = np.lexsort((rows[:, 1], rows[:, 0]))  # stable: equal rows stay in order
    candidates, rows = candidates[by_row], rows[by_row]
    new = np.ones(len(rows), np.bool_)
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    first = candidates[np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))]
    again, first = candidates[~new], first[~new]
    by_number = np.argsort(again)
    return again[by_number], first[by_number]


def _open_input(plan: PartPlan, store: Path, first_file: int) -> _Input:
    path = plan.folder(store)
    fingerprint = open_artifact(path, kind=PART).fingerprint
    with damage_named(path, REBUILD):
        files = read_statistics(path)["files"]
    assert len(files) == len(plan.stamps)
    return _Input(path, fingerprint, first_file, files)


def _count_repeated_ids(inputs: Sequence[_Input], stamps: Sequence[FileStamp]) -> int:
    """Return how many ids were used in an earlier file.

    Raises:
        DataError: ids are repeated in one file; with their number and the first two lines of one.
    """
    digests: _Digests = np.concatenate([part.array("own_ids") for part in inputs])
    count = len(repetitions(digests)[0])
    if not count:
        return 0
    lines = np.concatenate([part.array("own_id_lines") for part in inputs])
    ends = np.cumsum([0, *(file["own_ids"] for part in inputs for file in part.files)]).tolist()
    for stamp, (start, end) in zip(stamps, pairwise(ends), strict=True):
        again, first = repetitions(digests[start:end])
        if len(again):
            where = [f"{stamp.path}:{lines[start + number]}" for number in (first[0], again[0])]
            raise DataError(f"{where[1]}: id already used in {where[0]}; {len(again):,} ids are repeated in this file; make them unique")
    return count


def _refuse_ids_of_nameless_rows(inputs: Sequence[_Input], stamps: Sequence[FileStamp], keep: BoolArray) -> None:
    """Check that no kept passage has an id of its own that a kept passage of a row without id gets: FILE:LINE or FILE:LINE#PASSAGE.

    Raises:
        DataError: naming the id and the lines of both rows.
    """
    kept = list(zip(inputs, np.split(keep, np.cumsum([part.passages for part in inputs])[:-1]), strict=True))
    if not any(file["own_ids"] for part in inputs for file in part.files) or not any((part.nameless() & mask).any() for part, mask in kept):
        return
    # First the ids of rows that have one which are written like those of rows without: FILE:... with the name of a file of the corpus.
    numbers = {name.encode("utf-8", "surrogateescape"): number for number, name in enumerate(name_files([stamp.path for stamp in stamps]))}
    suspects: dict[tuple[int, bytes], tuple[_Input, bytes]] = {}  # by the file's number and the id in a part that would get this id
    for part, mask in kept:
        for own in part.ids(mask & ~part.nameless() & part.ids_with(":")):
            name, _, line = own.rpartition(b":")
            if name in numbers:
                suspects[numbers[name], NAMELESS + b":" + line] = part, own
    # Then the rows without id of these files.
    files = [number for number, _ in suspects]
    for part, mask in kept if suspects else ():
        file_of = part.first_file + np.repeat(np.arange(len(part.files)), [file["passages"] for file in part.files])
        derived = mask & part.nameless() & np.isin(file_of, files)
        for number, nameless in zip(file_of[derived].tolist(), part.ids(derived), strict=True):
            if (suspect := suspects.get((number, nameless))) is not None:
                number_of_line = nameless[len(NAMELESS) + 1 :].partition(b"#")[0].decode()
                where, shown = _line_of_id(*suspect, stamps), brief(decode(suspect[1], suspect[0].path))
                also = f"{stamps[number].path}:{number_of_line}, a row without id"
                raise DataError(f"{where}: the id {shown} is also that of {also}; give that row an id of its own")


def _line_of_id(part: _Input, own_id: bytes, stamps: Sequence[FileStamp]) -> str:
    """Return file:line of an id that a row of a part has of its own."""
    own_digest = np.frombuffer(digest(own_id), np.uint64)
    index = int(np.flatnonzero((part.array("own_ids") == own_digest).all(axis=1))[0])
    file = int(np.searchsorted(np.cumsum([file["own_ids"] for file in part.files]), index, side="right"))
    return f"{stamps[part.first_file + file].path}:{part.array('own_id_lines')[index]}"


class _Merger:
    """Writes one corpus folder; used once. keep: mask over the passages of all parts, in order. near_duplicates: number of passages that
    are dropped only because their words are equal. repeated_ids: number of ids that an earlier file has.
    """

    def __init__(
        self,
        inputs: Sequence[_Input],
        stamps: Sequence[FileStamp],
        folder: Path,
        keep: BoolArray,
        *,
        near_duplicates: int,
        repeated_ids: int,
    ) -> None:
        self._inputs, self._stamps, self._folder, self._keep = inputs, stamps, folder, keep
        self._near_duplicates, self._repeated_ids = near_duplicates, repeated_ids
        self._names = name_files([stamp.path for stamp in stamps])
        self._sources: dict[str, int] = {}
        self._passages_per_source: list[int] = []
        self._words = self._bytes = 0
        # One hash per kind of content, so that the fingerprint does not depend on where one part ends and the next begins.
        self._texts, self._lengths, self._ids = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()

    def write(self, digests: _Digests) -> dict[str, Any]:
        start = first = 0
        source = np.empty(int(self._keep.sum()), np.int32)
        dropped: list[IntArray] = []
        table = []
        for part in self._inputs:
            end = start + part.passages
            keep = self._keep[start:end]
            count = int(keep.sum())
            self._add(part, keep, digests[start:end], source[first : first + count])
            dropped.append(np.flatnonzero(~keep))
            sizes = {"files": len(part.files), "kept": count, "dropped": len(keep) - count}
            table.append({"folder": part.path.name, "fingerprint": part.fingerprint, **sizes})
            start, first = end, first + count
        assert start == len(digests)
        assert first == len(source)
        save_array(self._folder / "dropped.npy", np.concatenate(dropped))
        save_array(self._folder / "source.npy", source)
        self._write_rejected()
        statistics = self._statistics()
        save_sources(self._folder, self._sources)
        write_json(self._folder / "statistics.json", statistics)
        names = [hashlib.sha256((self._folder / name).read_bytes()) for name in ("source.npy", "sources.bin", "source_offsets.npy")]
        hashes = [hashed.hexdigest() for hashed in (self._texts, self._lengths, self._ids, *names)]
        write_json(self._folder / TABLE, {"fingerprint": hash_json([hashes, statistics]), "parts": table})
        return statistics

    def _add(self, part: _Input, keep: BoolArray, digests: _Digests, source: Int32Array) -> None:
        """Count a part's kept passages and write their source numbers to `source`."""
        columns = PartColumns(part.path)
        lengths = np.diff(columns.strings("text")[1])[keep]
        self._words += int(columns.numbers("words")[keep].sum(dtype=np.int64))
        self._bytes += int(lengths.sum())
        self._texts.update(digests[keep].data)
        self._lengths.update(lengths.data)
        self._ids.update(part.array("own_ids").data)
        names = Sources(part.path)
        local, first, inverse, counts = np.unique(
            columns.numbers("source")[keep], return_index=True, return_inverse=True, return_counts=True
        )
        numbers = np.empty(len(local), np.int32)
        for index in np.argsort(first).tolist():  # sources are numbered in order of first appearance
            own = int(local[index])
            name = names[own] if own >= 0 else self._names[part.first_file - own - 1]
            numbers[index] = number = self._sources.setdefault(name, len(self._sources))
            if number == len(self._passages_per_source):
                self._passages_per_source.append(0)
            self._passages_per_source[number] += int(counts[index])
        source[:] = numbers[inverse]

    def _write_rejected(self) -> None:
        if not any(file["rows_rejected"] for part in self._inputs for file in part.files):
            return
        with (self._folder / "rejected.jsonl").open("w", encoding="utf-8") as out:
            for part in self._inputs:
                if any(file["rows_rejected"] for file in part.files):
                    with (part.path / "rejected.jsonl").open(encoding="utf-8") as lines:
                        for line in lines:
                            row = json.loads(line)
                            row["file"] = str(self._stamps[part.first_file + row["file"]].path)
                            out.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _statistics(self) -> dict[str, Any]:
        """Return statistics.json. rows: read = used + rejected; of the used, blank ones give no passage and cut ones several. passages:
        made = kept + duplicates + near_duplicates.
        """
        files = [file for part in self._inputs for file in part.files]
        total = {name: sum(file[name] for file in files) for name in files[0] if name != "sha256"}
        kept = int(self._keep.sum())
        made = total["passages"] + total["duplicates"]
        return {
            "rows": {
                "read": total["rows_read"],
                "used": total["rows_used"],
                "rejected": total["rows_rejected"],
                "blank": total["blank"],
                "cut": total["cut"],
            },
            "passages": {
                "made": made,
                "kept": kept,
                "duplicates": made - kept - self._near_duplicates,
                "near_duplicates": self._near_duplicates,
            },
            **({"repeated_ids": self._repeated_ids} if self._repeated_ids else {}),
            "words": self._words,
            "bytes": self._bytes,
            **largest_sources(Counter(dict(zip(self._sources, self._passages_per_source, strict=True)))),
            "files": [
                {"name": name, **{key: file[key] for key in ("bytes", "sha256", "rows_read", "rows_used", "rows_rejected")}}
                for name, file in zip(self._names, files, strict=True)
            ],
        }


def largest_sources(passages: Counter[str]) -> dict[str, Any]:
    """Return JSON data: passages of the `MOST_SOURCES` largest sources, and the numbers of other sources and their passages."""
    named = dict(passages.most_common(MOST_SOURCES))
    others = {"sources": len(passages) - len(named), "passages": passages.total() - sum(named.values())}
    return {"sources": named, "other_sources": others}
