"""What every reader shares: the columns that are asked for, the rows that come back, and the counts of rows refused."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from cramlm.config.run import OnBadRow
from cramlm.errors import DataError, brief
from cramlm.io.paths import RemoteFile

ColumnKind: TypeAlias = Literal["text", "label", "labels", "number", "name"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column to read.

    text: must hold a string. label: a string, or any JSON scalar by its exact spelling, but of one type in the whole file. name: a
    string or any scalar by its spelling, types may mix. A missing value of an optional column is None; so is an empty label (null,
    NaN), for the caller to refuse. labels: a list of what a label may be, as the text of a JSON list; in a table's cell they stand between
    separators. number: its spelling (a table's cell as it is, for the caller to refuse).
    """

    name: str
    kind: ColumnKind = "text"
    required: bool = True
    flag: str = "--text-column"
    separator: str = "|"


class Row(NamedTuple):
    """`line`: number of the line the row begins at, from 1 (parquet: number of the row). `values`: in the order of the columns."""

    line: int
    values: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that was left out, and why."""

    file: str
    line: int
    reason: str

    def as_dict(self) -> dict[str, str | int]:
        return {"file": self.file, "line": self.line, "reason": self.reason}


@dataclass(slots=True)
class RowCounts:
    """Counts the rows of one file; decides what happens to a bad one. rows_read = rows_used + len(rejected), always."""

    path: Path | RemoteFile
    on_bad_row: OnBadRow
    rows_read: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    label_types: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def rows_used(self) -> int:
        return self.rows_read - len(self.rejected)

    def reject(self, line: int, reason: str) -> None:
        """Leave out a row that was counted as read.

        Raises:
            DataError: unless bad rows are to be skipped.
        """
        if self.on_bad_row == "fail":
            raise DataError(f"{self.path}:{line}: {reason}; fix it, or pass --on-bad-row skip")
        self.rejected.append(Rejected(str(self.path), line, reason))

    def refuse(self, line: int, reason: str) -> None:
        """Leave out a row that could not even be read."""
        self.rows_read += 1
        self.reject(line, reason)

    def same_type(self, column: str, line: int, kind: str, value: object) -> None:
        """Raises DataError if the labels of this file had another JSON type before: 1 and "1" in one column are hardly both meant."""
        first, first_line = self.label_types.setdefault(column, (kind, line))
        if kind != first:
            raise DataError(
                f"{self.path}:{line}: {column!r} is a JSON {kind} ({brief(value, 30)}) but a {first} in line {first_line}; "
                f"write all of them as strings"
            )


def in_list(values: Sequence[str]) -> str:
    """Labels as the value of a column of kind `labels`."""
    return json.dumps(list(values), ensure_ascii=False)


def from_cell(cell: str, column: Column) -> str:
    """What a cell of a table means to a column; an empty one holds no label."""
    if column.kind != "labels":
        return cell
    return in_list([part.strip() for part in cell.split(column.separator)] if cell.strip() else [])


def find_columns(path: Path | RemoteFile, header: Sequence[str], columns: Sequence[Column]) -> list[int | None]:
    """Where each wanted column stands in a table's header; None for an optional one that is not there.

    Raises:
        DataError: for a repeated name (both positions), or a missing column (the columns there are, the flag, a hint).
    """
    places: dict[str, int] = {}
    for place, name in enumerate(header):
        if name in places:
            raise DataError(f"{path}:1: column {name!r} is there twice, as number {places[name] + 1} and {place + 1}; rename one")
        places[name] = place
    for column in columns:
        if column.required and column.name not in places:
            raise DataError(f"{path}:1: {missing_column(column, list(header))}")
    return [places.get(column.name) for column in columns]


def missing_column(column: Column, present: Sequence[str]) -> str:
    """Why a column cannot be found, the columns there are, and what to do."""
    hint = ""
    if len(present) == 1:
        for separator, name in ((";", "semicolons"), ("\t", "tabs"), (",", "commas"), ("|", "bars")):
            if separator in present[0]:
                hint = f" (columns seem separated by {name}: use commas, or .tsv for tabs)"
        if present[0].lstrip().startswith("{"):
            hint = " (this looks like JSON lines: rename it to .jsonl)"
    elif near := difflib.get_close_matches(column.name.lower(), [name.lower() for name in present], n=1):
        hint = f" (did you mean {next(name for name in present if name.lower() == near[0])!r}?)"
    shown = ", ".join(brief(name, 40) for name in present[:12]) + (", …" if len(present) > 12 else "")
    return f"no column {column.name!r}; found {shown or 'none'}{hint}; pass {column.flag}"
