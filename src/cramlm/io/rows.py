"""Types shared by the readers: requested columns, rows, rejected rows and row counts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from cramlm.config.run import OnBadRow
from cramlm.errors import DataError, brief
from cramlm.io.remote import RemoteFile

_RENAME: Final = "; rename its column to"
_NAME_WORDS: Final = 2  # names of columns with more words are rare; a header with one is perhaps a row
ColumnKind: TypeAlias = Literal["text", "label", "labels", "number", "name"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column to read. All values are strings.

    text: a string. label: a string, or a JSON scalar as it is spelled; all of one type per file. name: as label, but types may differ.
    labels: a list of labels, returned as a JSON list; in a table's cell they are separated by `separator`. number: a number as it is
    spelled; cells of a table are not validated. A missing value of an optional column, and an empty label (null, NaN), is None.

    flag: the option to pass if it is missing. like: if not empty, the name of another file that has the column; the remedy is then to
    rename the one of this file.
    """

    name: str
    kind: ColumnKind = "text"
    required: bool = True
    flag: str = "--text-column"
    separator: str = "|"
    like: str = ""


class Row(NamedTuple):
    """line: first line of the row, from 1 (parquet: number of the row). values: in the order of the requested columns."""

    line: int
    values: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that was skipped, with the reason."""

    file: str
    line: int
    reason: str


@dataclass(slots=True)
class RowCounts:
    """Row counts of one file, and the handling of bad rows. Invariant: rows_read = rows_used + len(rejected).

    on_bad_row: None = "fail", where the user cannot choose otherwise.
    """

    path: Path | RemoteFile
    on_bad_row: OnBadRow | None
    rows_read: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    label_types: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def rows_used(self) -> int:
        return self.rows_read - len(self.rejected)

    def reject(self, line: int, reason: str) -> None:
        """Skip a row that is in `rows_read` already.

        Raises:
            DataError: unless on_bad_row is "skip".
        """
        if self.on_bad_row != "skip":
            remedy = "" if has_remedy(reason) else "; fix it"
            raise DataError(f"{self.path}:{line}: {reason}{remedy}{', or pass --on-bad-row skip' if self.on_bad_row else ''}")
        self.rejected.append(Rejected(str(self.path), line, reason))

    def refuse(self, line: int, reason: str) -> None:
        """Count and skip a row that could not be parsed. Raises as `reject`."""
        self.rows_read += 1
        self.reject(line, reason)

    def check_label_type(self, column: str, line: int, kind: str, value: object) -> None:
        """Raise DataError if an earlier label of this file has another JSON type, like 1 and "1"."""
        first, first_line = self.label_types.setdefault(column, (kind, line))
        if kind != first:
            shown = str(value).lower() if isinstance(value, bool) else brief(value, 30)
            raise DataError(
                f"{self.path}:{line}: {column!r} is {shown}, a JSON {kind}, and of type {first} in line {first_line}; "
                f"write all of them as strings"
            )


def has_remedy(reason: str) -> bool:
    """Return True if the reason to reject a row says what to do."""
    return "; pass --" in reason or _RENAME in reason


def not_utf8(line: bytes, error: UnicodeDecodeError, offset: int) -> str:
    """Return the reason to reject a line that starts at this offset of its file and could not be decoded."""
    where = f"byte 0x{line[error.start]:02X} at offset {offset + error.start} of the file"
    return f"{where} is not UTF-8 (of a file in another encoding convert all of it, like iconv -f WINDOWS-1252 -t UTF-8)"


def nul_byte(line: bytes, offset: int) -> str:
    """Return the reason to reject a line with a NUL byte that starts at this offset of its file."""
    return f"NUL byte at offset {offset + line.index(0)} of the file"


def too_long(limit: int) -> str:
    """Return the reason to reject a line of more than `limit` bytes."""
    return f"the line is longer than {limit:,} bytes (max_record_bytes)"


def labels_value(values: Sequence[str]) -> str:
    """Return labels as the value of a column of kind `labels`: a JSON list."""
    return json.dumps(list(values), ensure_ascii=False)


def from_cell(cell: str, column: Column) -> str:
    """Return the value of a table's cell for a column; an empty cell has no label."""
    if column.kind != "labels":
        return cell
    return labels_value([part.strip() for part in cell.split(column.separator)] if cell.strip() else [])


def find_columns(path: Path | RemoteFile, header: Sequence[str], columns: Sequence[Column]) -> list[int | None]:
    """Return the index of each requested column in a table's header; None for a missing optional one.

    Raises:
        DataError: for a repeated name that is not blank (with both positions), or a missing column (with the existing columns, the flag
        and a hint).
    """
    indices: dict[str, int] = {}
    for index, name in enumerate(header):
        if name in indices and name.strip():  # spreadsheets write columns without a name
            raise DataError(f"{path}:1: column {name!r} occurs twice, as number {indices[name] + 1} and {index + 1}; rename one")
        indices[name] = index
    for column in columns:
        if column.required and column.name not in indices:
            raise DataError(f"{path}:1: {missing_column(column, list(header))}")
    return [indices.get(column.name) for column in columns]


def missing_column(column: Column, present: Sequence[str]) -> str:
    """Return the message for a missing column: the existing columns, a hint, and the remedy."""
    hint = ""
    if len(present) == 1:
        for separator, name in ((";", "semicolons"), (",", "commas"), ("|", "bars")):
            if separator in present[0]:
                hint = f" (columns seem separated by {name}; use commas or semicolons in .csv, tabs in .tsv)"
        if present[0].lstrip().startswith("{"):
            hint = " (this looks like JSON lines; rename it to .jsonl)"
    elif near := difflib.get_close_matches(column.name.lower(), [name.lower() for name in present], n=1):
        hint = f" (did you mean {next(name for name in present if name.lower() == near[0])!r}?)"
    if not hint and any(len(name.split()) > _NAME_WORDS for name in present):
        hint = " (the first line of a table holds the names of its columns)"
    shown = ", ".join(brief(name, 40) for name in present[:12]) + (", …" if len(present) > 12 else "")
    remedy = f"{_RENAME} that of {column.like}" if column.like else f"; pass {column.flag}"
    return f"no column {column.name!r}; found {shown or 'none'}{hint}{remedy}"
