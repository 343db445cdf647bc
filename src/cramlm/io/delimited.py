"""Strict CSV and TSV, with the physical line of every row.

The separator of a CSV file is a comma; where the header has none, it is a semicolon (as spreadsheets write it in countries with decimal
commas) or a tab that the header has. A first line like `sep=;`, as Excel has it, names the separator.
A field that starts with a quote ends at the next quote that is not doubled, and may contain separators and newlines; in other fields a
quote is an ordinary character. Every record has as many fields as the header. Nothing is converted: `NA`, `007` and `1.0` are strings. If
the header ends in CRLF (or CR), such newlines inside quotes become LF, so that converting line ends changes no text. An unclosed quote is
an error even with `--on-bad-row skip`, because rows cannot be distinguished from text after it. So is, between tabs, a quoted field over
lines that would all be whole rows if quotes were ordinary characters, as they are in GLUE's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cramlm.errors import DataError, brief
from cramlm.io.rows import Column, Row, RowCounts, find_columns, from_cell, not_utf8, nul_byte, too_long
from cramlm.io.streams import Lines

_TAB: Final = "\t"
_QUOTED: Final = re.compile(r'([^"]*+(?:""[^"]*+)*+)("?)')  # the rest of a quoted field, and its closing quote if that is in this line
_QUOTE_ALL: Final = """if quotes belong to the texts, quote all fields: sed 's/\\r$//; s/"/""/g; s/[^\\t]*/"&"/g'"""


def read_delimited(lines: Lines, columns: Sequence[Column], counts: RowCounts, *, separators: str, limit: int) -> Iterator[Row]:
    """Yield the rows of a table with a header line; empty lines are skipped. separators: the first one that the header has is used."""
    records = _records(lines, counts, separators=separators, limit=limit)
    header = next(records, None)
    if header is None:
        return
    if header[2]:
        raise DataError(f"{counts.path}:{header[0]}: the header cannot be read: {header[2]}; fix it")
    indices = find_columns(counts.path, header[1], columns)
    width, requested = len(header[1]), list(zip(indices, columns, strict=True))
    for line, fields, fault in records:
        if fault is None and len(fields) != width:
            fault = f"{len(fields)} fields, expected {width}"
            fault += " (is a text with a separator unquoted?)" if len(fields) > width else ""
        if fault is not None:
            counts.refuse(line, fault)
            continue
        counts.rows_read += 1
        yield Row(line, tuple(None if index is None else from_cell(fields[index], column) for index, column in requested))


def read_named_columns(lines: Lines, counts: RowCounts, *, separators: str, limit: int) -> Iterator[dict[str, str]]:
    """Yield the cells of every row by the name of their column; columns without a name are left out."""
    records = _records(lines, counts, separators=separators, limit=limit)
    _, header, _ = next(records)
    find_columns(counts.path, header, ())
    for line, fields, fault in records:
        if fault is not None or len(fields) != len(header):
            counts.refuse(line, fault or f"{len(fields)} fields, expected {len(header)}")
        yield {name: cell for name, cell in zip(header, fields, strict=True) if name.strip()}


def separator_of(lines: Lines, separators: str) -> str:
    """Return the separator of a table by its header."""
    header = next((line for _, _, line in lines if line and line != b"\r"), b"").decode(errors="replace")
    return _declared(header) or _separator_of(header, separators)


def _records(lines: Lines, counts: RowCounts, *, separators: str, limit: int) -> Iterator[tuple[int, list[str], str | None]]:
    """Yield (first line, fields, error or None) of every record."""
    newline: str | None = None  # text of a line end inside quotes, if the header ended in CR or CRLF
    separator = ""  # found in the first line that is not empty
    width = 0  # fields of the header
    record: _Record | None = None  # with a quote that is open
    for number, offset, raw in lines:
        if raw is None:
            if record is not None:
                raise _never_closed(counts, record.opened, separator, limit)
            yield number, [], too_long(limit)
            continue
        carriage_return = raw.endswith(b"\r")
        if newline is None:
            newline = "\n" if carriage_return else ""
        try:
            text, fault = raw.decode(), None
        except UnicodeDecodeError as error:
            text, fault = raw.decode(errors="replace"), not_utf8(raw, error, offset)
        if b"\0" in raw:
            fault = nul_byte(raw, offset)
        body = text[:-1] if carriage_return else text
        if record is None:
            if not body:
                continue
            if not separator and (separator := _declared(body) or ""):
                continue
            separator = separator or _separator_of(body, separators)
            if '"' not in body:  # most lines
                fields = body.split(separator)
                width = width or len(fields)
                yield number, fields, fault
                continue
            record = _Record(number)
        record.fault = record.fault or fault
        record.size += len(raw) + 1
        if record.opened and record.size > limit:
            raise _never_closed(counts, record.opened, separator, limit)
        record.whole_lines = record.whole_lines and body.count(separator) == width - 1
        record.add(body, number, separator, line_end="\n" if newline or not carriage_return else "\r\n")
        if not record.opened:
            if record.whole_lines and record.line < number and separator == _TAB and width > 1:
                whole = f"a quoted field ends in line {number}, but each of these lines alone has {width} fields"
                raise DataError(f"{counts.path}:{record.line}: {whole}; {_QUOTE_ALL}; otherwise write .jsonl")
            width = width or len(record.fields)
            yield record.line, record.fields, record.fault
            record = None
    if record is not None:
        raise _never_closed(counts, record.opened, separator)


@dataclass(slots=True)
class _Record:
    """A record with quotes, as far as it is read. line: its first one. quoted: pieces of the open field. opened: the line in which that
    field begins; 0 if none is open. size: in bytes. whole_lines: each line has as many fields as the header if quotes are ordinary
    characters.
    """

    line: int
    fields: list[str] = field(default_factory=list)
    fault: str | None = None
    quoted: list[str] = field(default_factory=list)
    opened: int = 0
    size: int = 0
    whole_lines: bool = True

    def add(self, body: str, number: int, separator: str, *, line_end: str) -> None:
        """Read the next line. line_end: belongs to the text if the line ends inside quotes."""
        index = 0
        while True:
            if self.opened or body.startswith('"', index):
                match = _QUOTED.match(body, index if self.opened else index + 1)
                assert match is not None, "the pattern also matches nothing"
                self.quoted.append(match[1].replace('""', '"'))
                if not match[2]:
                    self.quoted.append(line_end)
                    self.opened = self.opened or number
                    return
                self.fields.append("".join(self.quoted))
                self.quoted, self.opened, index = [], 0, match.end()
                end = _end_of_field(body, separator, index)
                if index < end:
                    hint = f"quotes inside are doubled{f'; {_QUOTE_ALL}' if separator == _TAB else ''}"
                    after = f"{brief(body[index : index + 12])} follows the closing quote of field {len(self.fields)}"
                    self.fault = self.fault or f"{after} ({hint})"
            else:
                end = _end_of_field(body, separator, index)
                self.fields.append(body[index:end])
            if end == len(body):
                return
            index = end + len(separator)
            if index == len(body):
                self.fields.append("")
                return


def _end_of_field(body: str, separator: str, index: int) -> int:
    """Return the index of the first separator from `index` on; the length of the line if there is none."""
    end = body.find(separator, index)
    return len(body) if end < 0 else end


def _declared(line: str) -> str | None:
    """Return the separator that a first line like `sep=;` names, None for another line."""
    found = re.fullmatch(r'"?sep=([^\w"])"?\r?', line)
    return found and found[1]


def _separator_of(header: str, separators: str) -> str:
    """Return the first of `separators` that the header has outside of quotes; the first one if it has none."""
    unquoted = re.sub(r'"[^"]*"?', "", header)
    return next((separator for separator in separators if separator in unquoted), separators[0])


def _never_closed(counts: RowCounts, opened: int, separator: str, limit: int | None = None) -> DataError:
    where = "never closed" if limit is None else f"not closed within {limit:,} bytes (max_record_bytes)"
    remedy = _QUOTE_ALL if separator == _TAB else "double it if it belongs to the text"
    return DataError(f"{counts.path}:{opened}: the quote opened in this line is {where}; close it, or {remedy}")
