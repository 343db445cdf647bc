"""Strict JSON lines: one object per line, unique keys.

Counts on the raw bytes decide whether a slow check is needed: a line with at most `MAX_DEPTH` brackets cannot be nested deeper, and a line
without `\\u` cannot have a lone surrogate. Numbers are not converted; they keep their spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from cramlm.errors import DataError, brief
from cramlm.io.rows import Column, Row, RowCounts, labels_value, missing_column, not_utf8, nul_byte, too_long
from cramlm.io.streams import Lines

MAX_DEPTH = 64
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Number(str):
    """A JSON number by its spelling."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Integer(_Number):
    __slots__ = ()


class _Float(_Number):
    __slots__ = ()


class _BadRowError(ValueError):
    pass


def read_jsonl(lines: Lines, columns: Sequence[Column], counts: RowCounts, *, limit: int) -> Iterator[Row]:
    """Yield the rows of JSON lines; blank lines are skipped."""
    decode = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_Integer, parse_float=_Float, parse_constant=_no_constant).raw_decode
    requested = [(column.name, column.kind in ("text", "name"), column) for column in columns]
    for number, offset, line in lines:
        if line is None:
            counts.refuse(number, too_long(limit))
            continue
        try:
            if (b"[" in line or line.find(b"{", 1) > 0) and line.count(b"{") + line.count(b"[") > MAX_DEPTH:
                _check_depth(line)
            if b"\0" in line:
                raise _BadRowError(nul_byte(line, offset))
            text = line.decode().strip(" \t\r\n")
            if not text:
                continue
            record, end = decode(text)
            if end != len(text):
                raise _BadRowError(f"more follows the JSON value: {brief(text[end : end + 20])}")
            if type(record) is not dict:
                raise _not_an_object(number, record, counts)
            values = []
            for name, any_string, column in requested:
                value = record.get(name)
                # The type itself: a number is an instance of str, too (`_Number`).
                if not (any_string and type(value) is str):
                    value = _spelled(value, column, record, number, counts)
                values.append(value)
            if b"\\" in line and b"\\u" in line and any(value and _SURROGATE.search(value) for value in values):
                raise _BadRowError("lone surrogate (\\ud800 to \\udfff without its other half)")
        except UnicodeDecodeError as error:
            counts.refuse(number, not_utf8(line, error, offset))
            continue
        except _BadRowError as error:
            counts.refuse(number, str(error))
            continue
        except ValueError as error:
            if number == 1 and (text == "{" or text.startswith("[")):
                raise _one_value("list" if text[0] == "[" else "object", counts) from error
            counts.refuse(number, _explain(error, lines.unterminated))
            continue
        counts.rows_read += 1
        yield Row(number, tuple(values))


def _spelled(value: Any, column: Column, record: dict[str, Any], line: int, counts: RowCounts) -> str | None:
    """Return a value of a JSON object as the string for the column."""
    if column.required and value is None and column.name not in record:
        raise _BadRowError(missing_column(column, list(record)))
    if value is None and (column.kind == "label" or not column.required):
        return None
    if column.kind == "text":
        if type(value) is not str:
            raise _BadRowError(f"{column.name!r} is not a string but {_described(value)}")
        return value
    if column.kind == "labels":
        if type(value) is not list:
            hint = 'write ["a", "b"], or [] for a text without labels'
            raise _BadRowError(f"{column.name!r} is not a list of labels but {_described(value)}; {hint}")
        return labels_value([_scalar(each, column, line, counts) for each in value])
    if column.kind == "number":
        if not isinstance(value, _Number):
            raise _BadRowError(f"{column.name!r} is not a number but {_described(value)}; write it like 3.5")
        return str(value)
    return _scalar(value, column, line, counts)


def _scalar(value: Any, column: Column, line: int, counts: RowCounts) -> str:
    """Return the string of a label or a name."""
    if isinstance(value, bool):
        kind, spelled = "boolean", "true" if value else "false"
    elif isinstance(value, str):
        kind, spelled = "integer" if isinstance(value, _Integer) else "float" if isinstance(value, _Float) else "string", str(value)
    else:
        hint = ""
        if column.kind == "label" and type(value) is list:
            key = json.dumps(column.name)
            hint = f"; write a label by itself (jq -c '.[{key}] |= first'), or for several per text pass --task-type multi-label"
        raise _BadRowError(f"{column.name!r} is neither string, number nor boolean but {_described(value)}{hint}")
    if column.kind != "name":
        counts.check_label_type(column.name, line, kind, value)
    return spelled


def _described(value: Any) -> str:
    """Return the type of a JSON value with the value, as it is spelled in JSON."""
    if value is None:
        return "null"
    shown = str(value).lower() if isinstance(value, bool) else brief(value, 30)
    return f"{_type_name(value)} ({shown})"


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, _Number):
        return "a number"
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "a string"


def _not_an_object(line: int, value: Any, counts: RowCounts) -> Exception:
    if line == 1 and isinstance(value, list):
        return _one_value("list", counts)
    return _BadRowError(f"not a JSON object but {_type_name(value)}; expected one object per line")


def _one_value(kind: str, counts: RowCounts) -> DataError:
    remedy = " (jq -c '.[]')" if kind == "list" else ""
    return DataError(f"{counts.path}:1: is one JSON {kind}, not JSON lines; write one object per line{remedy}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BadRowError(f"key {brief(key)} occurs twice")
            seen.add(key)
    return record


def _no_constant(name: str) -> NoReturn:
    raise _BadRowError(f"{name} is not JSON")


def _check_depth(line: bytes) -> None:
    depth = 0
    for match in _BRACKET.finditer(_STRING.sub(b"", line)):
        depth += 1 if match[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise _BadRowError(f"nested deeper than {MAX_DEPTH}")


def _explain(error: ValueError, cut_off: bool) -> str:
    where = f" (column {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
    what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return f"not JSON: {what}{where}" + (", and the file ends here without a newline; is it truncated?" if cut_off else "")
