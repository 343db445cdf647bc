"""From parts to one corpus: which passages repeat an earlier part's, what the whole holds, and its fingerprint.

    digests of all parts, in the order of reading ─► first of each ─► the others are left out, as numbers per part ─► the corpus folder

    corpus.json       fingerprint; the parts in order: folder, fingerprint, files, passages kept and passages left out
    dropped.npy       int64, the numbers of the passages left out in their part, part after part
    source.npy        int32 (N,), place among the names in sources.bin (UTF-8; source_offsets.npy: where each begins), a name for each
                      source in the order of the first kept passage
    statistics.json   what was read, left out and why, and the sha256 of every input file
    rejected.jsonl    bad rows, if there are any: file, line, reason

No text is read. 10 million passages with ids of their own take 0.4 GB and 5 CPU seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.parts import PartColumns, Sources, damage_named, read_statistics
from cramlm.data.reading import KIND as PART
from cramlm.data.reading import PartPlan, save_sources
from cramlm.errors import DataError
from cramlm.io.streams import FileStamp, name_files
from cramlm.records import BoolArray, Int32Array, IntArray
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import hash_json, open_artifact

TABLE: Final = "corpus.json"
MOST_SOURCES: Final = 100  # that statistics name: a source may be the address of a single page
PARTS_FOLDER: Final = Path("../../parts")  # as seen from a corpus: a store can be moved as a whole
_Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Input:
    """One part to be joined. first_file: number of its first file in the corpus; files: what statistics.json says of each."""

    path: Path
    fingerprint: str
    first_file: int
    files: list[dict[str, Any]]

    @property
    def passages(self) -> int:
        return sum(file["passages"] for file in self.files)

    def digests(self, name: str) -> _Digests:
        """A column of digests, copied: parts may be more than files can be open."""
        return PartColumns(self.path).digests(name).copy()

    def array(self, name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = read_array(self.path / f"{name}.npy")
        return values


def merge_parts(plans: Sequence[PartPlan], store: Path, folder: Path) -> dict[str, Any]:
    """Write the corpus of these parts, all of which are in the store, to `folder`; returns its statistics.

    The passages kept are those that reading all files in order, in one go, would keep: of equal ones the first and, if the config drops
    those of the same words too, of these the first.

    Raises:
        DataError: ids are repeated, or no document is left. ArtifactError: a part is damaged.
    """
    stamps = [stamp for plan in plans for stamp in plan.stamps]
    first_files = accumulate((len(plan.stamps) for plan in plans), initial=0)
    inputs = [_open_input(plan, store, first_file) for plan, first_file in zip(plans, first_files, strict=False)]
    _check_ids(inputs, stamps)
    digests: _Digests = np.concatenate([part.digests("digest") for part in inputs])
    if not len(digests):
        raise DataError(f"{stamps[0].path}: the corpus has 0 documents, every row is blank or rejected; pass files with text")
    keep = np.ones(len(digests), np.bool_)
    keep[repetitions(digests)[0]] = False
    distinct = int(keep.sum())
    if plans[0].config.duplicates == "words":
        word_digests: _Digests = np.concatenate([part.digests("word_digest") for part in inputs])
        keep[repetitions(word_digests)[0]] = False  # all that are equal have the same words: the first of them is the first of these
    return _Merger(inputs, stamps, folder, keep, near_duplicates=distinct - int(keep.sum())).write(digests)


def repetitions(digests: _Digests) -> tuple[IntArray, IntArray]:
    """Rows of an (N, 2) array that an earlier row equals: their numbers, ascending, and for each the number of the first such row.

    Sorts by one column and looks at the other only where the first repeats: about 0.2 s per million rows.
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
    with damage_named(path):
        files = read_statistics(path)["files"]
    assert len(files) == len(plan.stamps)
    return _Input(path, fingerprint, first_file, files)


def _check_ids(inputs: Sequence[_Input], stamps: Sequence[FileStamp]) -> None:
    """Raises DataError with the number of repeated ids and the first two places of one."""
    again, first = repetitions(np.concatenate([part.array("own_ids") for part in inputs]))
    if not len(again):
        return
    ends = np.cumsum([file["own_ids"] for part in inputs for file in part.files])
    lines = np.concatenate([part.array("own_id_lines") for part in inputs])
    places = [f"{stamps[int(np.searchsorted(ends, number, side='right'))].path}:{lines[number]}" for number in (first[0], again[0])]
    raise DataError(f"{places[1]}: id already used in {places[0]}; {len(again):,} ids are repeated; make them unique")


class _Merger:
    """Writes one corpus folder; used once. `keep`: which passages of all parts, one part after the other, are kept. `near_duplicates`: how
    many are left out for their words alone.
    """

    def __init__(
        self, inputs: Sequence[_Input], stamps: Sequence[FileStamp], folder: Path, keep: BoolArray, *, near_duplicates: int
    ) -> None:
        self._inputs, self._stamps, self._folder, self._keep = inputs, stamps, folder, keep
        self._near_duplicates = near_duplicates
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
        _write_json(self._folder / "statistics.json", statistics)
        names = [hashlib.sha256((self._folder / name).read_bytes()) for name in ("source.npy", "sources.bin", "source_offsets.npy")]
        hashes = [hashed.hexdigest() for hashed in (self._texts, self._lengths, self._ids, *names)]
        _write_json(self._folder / TABLE, {"fingerprint": hash_json([hashes, statistics]), "parts": table})
        return statistics

    def _add(self, part: _Input, keep: BoolArray, digests: _Digests, source: Int32Array) -> None:
        """Count one part's kept passages; writes their sources' numbers to `source`."""
        columns = PartColumns(part.path)
        lengths = np.diff(columns.text()[1])[keep]
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
        for place in np.argsort(first).tolist():  # a source's number is the order in which it first appears
            own = int(local[place])
            name = names[own] if own >= 0 else self._names[part.first_file - own - 1]
            numbers[place] = number = self._sources.setdefault(name, len(self._sources))
            if number == len(self._passages_per_source):
                self._passages_per_source.append(0)
            self._passages_per_source[number] += int(counts[place])
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
        """Plain data. rows: read = used + rejected; of the used, blank ones give no passage and cut ones several. passages: made = kept
        + duplicates + near_duplicates.
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
            "words": self._words,
            "bytes": self._bytes,
            **largest(Counter(dict(zip(self._sources, self._passages_per_source, strict=True)))),
            "files": [
                {"name": name, **{key: file[key] for key in ("bytes", "sha256", "rows_read", "rows_used", "rows_rejected")}}
                for name, file in zip(self._names, files, strict=True)
            ],
        }


def largest(passages: Counter[str]) -> dict[str, Any]:
    """Plain JSON: passages of the `MOST_SOURCES` largest sources, and how many others and passages of theirs there are."""
    named = dict(passages.most_common(MOST_SOURCES))
    others = {"sources": len(passages) - len(named), "passages": passages.total() - sum(named.values())}
    return {"sources": named, "other_sources": others}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8")
