"""A strict, streaming reader of all formats: rows of strings with line numbers.

    path ─► paths.stamp_file ─► ByteStream (gzip, zstd) ─► Lines ─► jsonl | delimited | paragraphs ─► Row
                            └─► ParquetFile ──────────────────────────────────────────────────────► Row

About 180 MB of JSON lines per second on one core.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cramlm.config.run import OnBadRow
from cramlm.errors import DataError, UsageError, brief
from cramlm.io.delimited import read_delimited, read_named_columns, separator_of
from cramlm.io.formats import file_format
from cramlm.io.jsonl import read_jsonl
from cramlm.io.parquet import ParquetFile
from cramlm.io.paths import STDIN, FileStamp, stamp_input
from cramlm.io.rows import Column, Row, RowCounts, not_utf8, nul_byte, too_long
from cramlm.io.streams import ByteStream, Lines
from cramlm.records import Emit, Event, count, silent

MAX_RECORD_BYTES = 16_000_000
MANY_LINES: Final = 50
"""A text file of so many lines without a blank one is perhaps one of a text per line, and not of paragraphs."""
_SEPARATORS: Final = {"csv": ",;\t", "tsv": "\t"}


class Reader:
    """The rows of one file; iterate once: `for row in reader`.

    A text file has one column of any name: its paragraphs (separated by blank lines), or with `txt_rows = "lines"` its lines. After the
    last row `counts` and `sha256` are those of the file, and a warning was emitted if rows were rejected or there
    were none. on_bad_row: None = "fail" with errors that do not advise --on-bad-row, for commands without it.
    """

    def __init__(
        self,
        path: str | Path,
        columns: Sequence[Column],
        *,
        max_record_bytes: int = MAX_RECORD_BYTES,
        on_bad_row: OnBadRow | None = None,
        txt_rows: str = "paragraphs",
        stamp: FileStamp | None = None,
        stage: str = "read",
        emit: Emit = silent,
    ) -> None:
        assert txt_rows in ("paragraphs", "lines")
        self.stamp = stamp or _only(stamp_input(path))
        self.path = self.stamp.path
        self.columns = tuple(columns)
        self._limit = max_record_bytes
        self._txt_rows = txt_rows
        self._stage, self._emit = stage, emit
        self.counts = RowCounts(self.path, on_bad_row)
        self._format, compression = ("stdin", None) if str(self.path) == STDIN else file_format(self.path)
        self._stream: ByteStream | ParquetFile = (
            ParquetFile(self.stamp) if self._format == "parquet" else ByteStream(self.stamp, compression=compression)
        )

    @property
    def raw_bytes(self) -> int:
        """Bytes of the file on disk read so far."""
        return self._stream.raw_bytes

    @property
    def sha256(self) -> str:
        return self._stream.sha256

    def reject(self, row: Row, reason: str) -> None:
        """Reject a row after it was yielded: raise DataError with its line, or skip it, by `on_bad_row`."""
        self.counts.reject(row.line, reason)

    def __iter__(self) -> Iterator[Row]:
        """Raise DataError for a bad row or a file without rows (unless skipped) or a damaged file, EnvironmentFault if the file changes."""
        count("parsed", [str(self.path)])
        yield from self._rows()
        if self.counts.rows_read == 0:
            what = "only a header" if self._format in ("csv", "tsv") and self._stream.raw_bytes else "it is empty"
            if (rule := self.counts.on_bad_row) != "skip":
                remedy = ", or for a corpus --on-bad-row skip" if rule else ""
                raise DataError(f"{self.path}: no rows, {what}; pass a file with data{remedy}")
            self._emit(Event("warning", self._stage, f"{self.path}: no rows, {what}; skipped"))
        if isinstance(self._stream, ByteStream) and self._stream.looks_like_a_bomb:
            ratio = self._stream.text_bytes // max(1, self._stream.raw_bytes)
            self._emit(Event("warning", self._stage, f"{self.path}: grew {ratio} times when decompressed; is it text?"))
        if rejected := self.counts.rejected:
            part = f"{len(rejected):,} of {self.counts.rows_read:,} rows rejected"
            message = f"{self.path}: {part}, first line {rejected[0].line}: {rejected[0].reason}"
            self._emit(Event("warning", self._stage, message, data={"rejected": [asdict(each) for each in rejected]}))

    def _rows(self) -> Iterator[Row]:
        stream = self._stream
        if isinstance(stream, ParquetFile):
            return stream.rows(self.columns, self.counts, limit=self._limit)
        blocks, format_ = stream.blocks(), self._format
        if format_ == "stdin":
            first = next(blocks, b"")
            format_ = "jsonl" if first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{") else "txt"
            blocks = itertools.chain([first], blocks)
        lines = Lines(blocks, limit=self._limit)
        match format_:
            case "jsonl":
                return read_jsonl(lines, self.columns, self.counts, limit=self._limit)
            case "csv" | "tsv":
                return read_delimited(lines, self.columns, self.counts, separators=_SEPARATORS[format_], limit=self._limit)
            case _:
                return self._text_rows(lines)

    def _text_rows(self, lines: Lines) -> Iterator[Row]:
        for column in self.columns[1:]:
            if column.required:
                if self._format == "stdin":
                    raise UsageError(f"standard input: lines of text have no column {column.name!r}; write JSON lines, or pass a file")
                raise UsageError(f"{self.path}: a text file has no column {column.name!r}; use .jsonl, .csv, .tsv or .parquet")
        others = (None,) * (len(self.columns) - 1)
        for line, text in self._paragraphs(lines) if self._txt_rows == "paragraphs" else self._decoded(lines):
            if line == 1 and self._txt_rows == "lines" and _is_header(text, self.columns[0].name):
                raise DataError(
                    f"{self.path}:1: {brief(text, 40)} looks like the header of a table, and a text is expected in each line; "
                    f"pass the table as a .csv or .tsv file, or write JSON lines"
                )
            self.counts.rows_read += 1
            yield Row(line, (text, *others))

    def _paragraphs(self, lines: Lines) -> Iterator[tuple[int, str]]:
        begun, size, is_divided = 0, 0, False
        held: list[str] = []
        for line, text in self._decoded(lines):
            if not text.strip():
                is_divided = True
                if held:
                    yield begun, "\n".join(held)
                held, size = [], 0
            elif size <= self._limit:  # else the rest of a paragraph that was refused
                begun, size = begun if held else line, size + len(text) + 1
                held.append(text)
                if size > self._limit:
                    longer = f"the paragraph is longer than {self._limit:,} characters (max_record_bytes)"
                    self.counts.refuse(begun, f"{longer}; if each line is a text, write blank lines between them (sed G)")
                    held = []
        if held:
            if len(held) >= MANY_LINES and not is_divided:
                advice = "if each line is a text, write blank lines between them (sed G)"
                self._emit(
                    Event("warning", self._stage, f"{self.path}: no line is blank, so its {len(held):,} lines are one text; {advice}")
                )
            yield begun, "\n".join(held)

    def _decoded(self, lines: Lines) -> Iterator[tuple[int, str]]:
        for number, offset, line in lines:
            if line is None:
                self.counts.refuse(number, too_long(self._limit))
            elif b"\0" in line:
                self.counts.refuse(number, nul_byte(line, offset))
            else:
                try:
                    yield number, line.removesuffix(b"\r").decode()
                except UnicodeDecodeError as error:
                    self.counts.refuse(number, not_utf8(line, error, offset))


@dataclass(frozen=True, slots=True)
class Table:
    """All of a local .csv or .tsv file. rows: the cells of columns with a name. marked: the file begins with a byte order mark."""

    path: str
    rows: list[dict[str, str]]
    separator: str
    marked: bool

    @classmethod
    def read(cls, path: str) -> Table:
        """Read a file.

        Raises:
            UsageError: the path is missing, or no local .csv or .tsv file. DataError: as `Reader`.
        """
        stamp = _only(stamp_input(path))
        format_, compression = ("stdin", None) if path == STDIN else file_format(stamp.path)
        if format_ not in _SEPARATORS or not isinstance(stamp.path, Path):
            raise UsageError(f"{path}: not a .csv or .tsv file on this machine; only the columns of such a file are kept")

        content, separators = list(ByteStream(stamp, compression=compression).blocks()), _SEPARATORS[format_]

        def lines() -> Lines:
            return Lines(iter(content), limit=MAX_RECORD_BYTES)

        rows = list(read_named_columns(lines(), RowCounts(stamp.path, None), separators=separators, limit=MAX_RECORD_BYTES))
        return cls(path, rows, separator_of(lines(), separators), b"".join(content[:1]).startswith(codecs.BOM_UTF8))


def _is_header(line: str, text_column: str) -> bool:
    """Return True if a line names the column of texts beside other columns."""
    for separator in _SEPARATORS["csv"]:
        names = [name.removeprefix('"').removesuffix('"') for name in line.split(separator)]
        if len(names) > 1 and text_column in names and all(name == name.strip() for name in names):
            return True
    return False


def _only(stamps: list[FileStamp]) -> FileStamp:
    if len(stamps) > 1:
        raise UsageError(f"{stamps[0].path} and {len(stamps) - 1} more: several files, expected one")
    return stamps[0]
