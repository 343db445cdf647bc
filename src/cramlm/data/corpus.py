"""The raw text to retrieve from: read once, in parts, cut into passages, rid of repetitions, kept as flat arrays that open at once and
cost no memory.

    files ─► plan_parts ─► read_part, in several processes ─► <store>/parts/<key>/ ... ─► merge_parts ─► <store>/corpora/<key>/

reading.py says what a part's folder holds, merge.py what the corpus's own does. A file that is added is read alone; the corpus is then
joined anew, which reads no text. The position of a document is its place in the order of reading, for ever; neither it nor anything else
depends on the parts, on who read them or in which order.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.config.run import CorpusConfig
from cramlm.data.merge import PARTS_FOLDER, TABLE, merge_parts
from cramlm.data.parts import Part, PartIds, Sources, allow_open_parts, damage_named, decode, gather_texts, read_statistics
from cramlm.data.reading import PART_BYTES, STAGE, TELL_SECONDS, PartPlan, plan_parts, read_part
from cramlm.errors import ArtifactError
from cramlm.io.executors import Executor, Processes
from cramlm.io.remote import RemoteFile
from cramlm.io.workers import available_cores
from cramlm.records import Document, Emit, Event, Int32Array, IntArray, silent
from cramlm.storage.arrays import read_array
from cramlm.storage.artifacts import MANIFEST, hash_json, lock, open_artifact, raise_if_checking, shared_stage, wait_while_locked
from cramlm.storage.counts import count

KIND: Final = STAGE
CODE_FORMAT: Final = 4  # raise it when the same parts would give another folder
_BYTES_PER_WORKER: Final = 8e6  # a second of reading: below, starting a process costs more than it saves
_READ: Final = "cramlm.data.reading:read_task"


@dataclass(frozen=True, eq=False)
class Corpus:
    """A published corpus, memory-mapped. `fingerprint` depends on the content only: not on where folders or input lie, nor on the parts.

    parts: in order of position. source: int32 (N,), the number in `sources` of every document.
    """

    path: Path
    fingerprint: str
    statistics: dict[str, Any]
    parts: tuple[Part, ...]
    sources: Sources
    source: Int32Array
    _names: tuple[tuple[str, ...], ...]  # of each part's files

    @staticmethod
    def open(path: Path) -> Corpus:
        """Raises ArtifactError if the folder is not a whole corpus, or one of its parts is missing or damaged."""
        open_artifact(path, kind=KIND)
        with damage_named(path):
            table = json.loads((path / TABLE).read_bytes())
            statistics = read_statistics(path)
            source = np.load(path / "source.npy", mmap_mode="r", allow_pickle=False)
            parts = _open_parts(path, table["parts"])
            names = [file["name"] for file in statistics["files"]]
            ends = np.cumsum([0, *(entry["files"] for entry in table["parts"])]).tolist()
            names_of_parts = tuple(tuple(names[start:end]) for start, end in pairwise(ends))
        sources = Sources(path)
        if len(source) != sum(map(len, parts)) or source.min() < 0 or source.max() >= len(sources):
            raise ArtifactError(f"{path / 'source.npy'}: damaged, a source is not listed; delete the folder and build it again")
        return Corpus(path, table["fingerprint"], statistics, parts, sources, source, names_of_parts)

    def __len__(self) -> int:
        return len(self.source)

    def text(self, position: int) -> str:
        """The document's text, in O(its length)."""
        text = decode(self.data(position), self.parts[self._find(position)[0]].path)
        count("decoded", [text])
        return text

    def data(self, position: int) -> bytes:
        """The document's text in UTF-8."""
        number, place = self._find(position)
        part = self.parts[number]
        return part.buffer[part.offsets[place] : part.offsets[place + 1]].tobytes()

    def document(self, position: int) -> Document:
        return Document(self.ids([position])[0], self.text(position), self.sources[int(self.source[position])])

    def ids(self, positions: Iterable[int]) -> list[str]:
        """The ids of the documents at these positions, in the order given."""
        found = []
        for number, place in map(self._find, positions):
            if (ids := self._ids.get(number)) is None:
                ids = self._ids[number] = PartIds(self.parts[number].columns, self._names[number])
            found.append(ids[place])
        return found

    def words(self, positions: IntArray) -> IntArray:
        """Words of the documents at these positions, as they were counted when the corpus was read, int64."""
        return self._measured(positions, lambda part, places: part.words()[places])

    def sizes(self, positions: IntArray) -> IntArray:
        """Bytes of the documents at these positions, int64."""
        return self._measured(positions, lambda part, places: part.offsets[places + 1] - part.offsets[places])

    def _measured(self, positions: IntArray, measure: Callable[[Part, IntArray], npt.NDArray[Any]]) -> IntArray:
        positions = np.asarray(positions, np.int64)
        owner = np.searchsorted(self._firsts, positions, side="right") - 1
        values = np.empty(len(positions), np.int64)
        for number in np.unique(owner).tolist():
            part, mine = self.parts[number], owner == number
            values[mine] = measure(part, part.place(positions[mine] - part.first))
        return values

    def release(self) -> None:
        """Let the kernel take back the memory in which text that was read is kept; reading it again is as before."""
        for part in self.parts:
            part.release()

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

    @cached_property
    def _firsts(self) -> list[int]:
        return [part.first for part in self.parts]

    @cached_property
    def _ids(self) -> dict[int, PartIds]:
        return {}

    def _find(self, position: int) -> tuple[int, int]:
        """Number of the part, and of the passage in it."""
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
    """The corpus of these files: the one in the store if files (path, size, time) and config are as they were; else what is new is read.

    workers: processes that read; by default one per core, but not for less than a second's work. executor: who reads instead of them.
    Neither changes anything but the time, nor does `part_bytes`, the size up to which small files share a part.

    Raises:
        UsageError: a path is missing or holds no data. DataError: a bad row (unless skipped), repeated ids, or no document in the end.
        EnvironmentFault: a file changed while it was read, or the disk refused. LockedError: another process builds this corpus for
        longer than `wait_limit()`.
    """
    plans = plan_parts(config, part_bytes=part_bytes)
    keys = [plan.key for plan in plans]
    files = [file for part in keys for file in part["files"]]
    key = {"code": CODE_FORMAT, "config": keys[0]["config"], "files": files, "parts": [plan.name for plan in plans]}
    target = store / "corpora" / hash_json(key)[:16]

    for origin in sorted({stamp.path.where for plan in plans for stamp in plan.stamps if isinstance(stamp.path, RemoteFile)}):
        emit(Event("note", KIND, f"reading from {origin}"))

    def write(folder: Path) -> None:
        read = _read_parts(plans, store, executor or _processes(plans, store, workers), emit)
        statistics = merge_parts(plans, store, folder)
        data = {**statistics, "files": len(statistics["files"])}
        emit(Event("done", KIND, _summary(statistics), done=read, total=read, unit="MB", data=data))

    def restore() -> None:
        if (target / MANIFEST).exists() and _missing(plans, store):  # the corpus is as it was, but someone deleted parts of it
            raise_if_checking(KIND, "parts of it are missing")
            with lock(target):
                _read_parts(plans, store, executor or _processes(plans, store, workers), emit)

    wait_while_locked(restore, stage=KIND, emit=emit)
    return Corpus.open(shared_stage(target, kind=KIND, key=key, write=write, emit=emit).path)


def verify_corpora(path: Path) -> None:
    """Open every corpus at or below `path`: `artifacts.verify` checks the parts that are there, this that none is missing.

    Raises:
        ArtifactError: naming a part that is missing, damaged, or not the one that a corpus was built from.
    """
    for table in sorted(path.rglob(TABLE)):
        if (table.parent / MANIFEST).exists() and not any(".tmp-" in name for name in table.relative_to(path).parts):
            Corpus.open(table.parent)


def _open_parts(path: Path, table: Sequence[dict[str, Any]]) -> tuple[Part, ...]:
    """The parts that a corpus names.

    Raises:
        ArtifactError: naming the part that is missing, damaged, or not the one that the corpus was built from.
    """
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
    """Read those parts that are not in the store; returns the MB read."""
    missing = _missing(plans, store)
    files, all_files = (sum(len(plan.stamps) for plan in group) for group in (missing, plans))
    total = sum(plan.bytes for plan in missing)
    what = f"reading {files:,} files" if files == all_files else f"reading {files:,} of {all_files:,} files, the others are read already"
    data = {"parts": len(plans), "parts_read_already": len(plans) - len(missing)}
    emit(Event("start", KIND, what, total=total / 1e6, unit="MB", data=data))
    tasks = [{"plan": plan.as_dict(), "store": str(store)} for plan in missing]
    tell = _Teller(total / 1e6, emit)
    for plan, done in zip(missing, executor.map(_READ, tasks, tell=tell), strict=True):
        if not done:
            _wait_for(plan, store, emit)
    return total / 1e6


def _wait_for(plan: PartPlan, store: Path, emit: Emit) -> None:
    """Until the process that reads this part for another corpus is done; if it gives up, read the part here."""
    wait_while_locked(lambda: read_part(plan, store), stage=KIND, emit=emit)


class _Teller:
    """Adds up the progress of parts that are read side by side; hands on whatever else their readers say."""

    def __init__(self, total: float, emit: Emit) -> None:
        self._total, self._emit = total, emit
        self._done: dict[int, tuple[float, int]] = {}
        self._told = time.monotonic()

    def __call__(self, part: int, event: Event) -> None:
        if event.kind != "progress":
            self._emit(event)
            return
        self._done[part] = event.done, event.data["passages"]
        if (now := time.monotonic()) - self._told >= TELL_SECONDS:
            self._told = now
            done, passages = (sum(values) for values in zip(*self._done.values(), strict=True))
            self._emit(Event("progress", KIND, f"{passages:,} passages", done=done, total=self._total, unit="MB"))


def _summary(statistics: dict[str, Any]) -> str:
    rows, passages = statistics["rows"], statistics["passages"]
    duplicates = f"{passages['duplicates']:,} duplicates"
    if passages["near_duplicates"]:
        duplicates += f" and {passages['near_duplicates']:,} near-duplicates"
    return (
        f"{passages['kept']:,} passages, {statistics['words']:,} words, {statistics['bytes'] / 1e6:.1f} MB from {rows['read']:,} rows "
        f"({rows['rejected']:,} rejected, {rows['blank']:,} blank, {rows['cut']:,} cut, {duplicates} dropped)"
    )
