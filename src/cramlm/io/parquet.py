"""Parquet files, read in batches of bounded size after checking the types of the columns.

A label that Hugging Face's datasets stores as the number of a name (`ClassLabel`) is read as the name, and its -1 as no label.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from cramlm.errors import DataError, brief
from cramlm.io.paths import FileStamp, check_unchanged
from cramlm.io.remote import RemoteFile
from cramlm.io.rows import Column, Row, RowCounts, find_columns, from_cell, labels_value
from cramlm.io.streams import look_like
from cramlm.storage.artifacts import hash_file
from cramlm.storage.locks import environment_faults, raise_if_refused

_BATCH_ROWS = 1024
_BATCH_BYTES = 32_000_000  # maximum of a batch if every row is the longest text of its dictionary
_BOMB_RATIO, _BOMB_BYTES = 200, 256_000_000
_MAGIC = b"PAR1"
_SHORT: Final = {"halffloat": np.float16, "float": np.float32}


class _DamagedError(ValueError):
    pass


class ParquetFile:
    """The rows of one parquet file.

    raw_bytes: bytes read so far, approximately. sha256: of the file; of a remote file, which is read in part, its version.
    """

    def __init__(self, stamp: FileStamp) -> None:
        self.stamp = stamp
        self.raw_bytes = 0
        self.sha256 = ""

    def rows(self, columns: Sequence[Column], counts: RowCounts, *, limit: int) -> Iterator[Row]:
        """Raise DataError if the file is truncated or damaged, or the type of a column is not text (dictionaries of text are)."""
        import pyarrow as pa  # 0.1 s, and most corpora are JSON lines
        import pyarrow.parquet as pq

        path = self.stamp.path
        check_unchanged(self.stamp)
        with environment_faults(path):
            self.sha256 = path.version if isinstance(path, RemoteFile) else hash_file(path)
        if not self.stamp.bytes:
            return
        _check_ends(path, self.stamp.bytes)
        try:
            with path.open("rb") as handle, contextlib.ExitStack() as stack:
                with _names_decoded():
                    file = stack.enter_context(pq.ParquetFile(handle, page_checksum_verification=True, memory_map=False))
                    schema = file.schema_arrow
                    indices = find_columns(path, schema.names, columns)
                    for column, index in zip(columns, indices, strict=True):
                        if index is not None:
                            _check_type(path, column, schema.field(index).type)
                    classes = _class_names(schema, columns)
                    names = [column.name for column, index in zip(columns, indices, strict=True) if index is not None]
                    total = max(1, file.metadata.num_rows)
                    batch_rows = _batch_rows(path, handle, file.metadata, names, size=self.stamp.bytes)
                    batches = file.iter_batches(batch_size=batch_rows, columns=names)
                for batch in batches:
                    yield from _rows_of(batch, names, columns, classes, counts, limit=limit)
                    self.raw_bytes = self.stamp.bytes * counts.rows_read // total
        except (pa.ArrowException, OSError, _DamagedError) as error:
            check_unchanged(self.stamp)  # a file that is being written is not damaged
            raise_if_refused(error, path)
            what = " ".join(str(error).split())[:120]
            raise DataError(f"{path}: damaged, row {counts.rows_read + 1} cannot be read ({what}); copy or write it again") from error
        check_unchanged(self.stamp)


def _rows_of(
    batch: Any, names: Sequence[str], columns: Sequence[Column], classes: Mapping[str, list[str]], counts: RowCounts, *, limit: int
) -> Iterator[Row]:
    """Yield the rows of a batch; count and refuse bad ones. names: of the columns that the file has. classes: `_class_names`."""
    lists = {name: _values(batch.column(name)) for name in names}
    missing = [None] * batch.num_rows
    raw_rows = zip(*(lists.get(column.name, missing) for column in columns), strict=True)
    for line, raw in enumerate(raw_rows, start=counts.rows_read + 1):
        row = _row(line, raw, columns, classes)
        if isinstance(row, str):
            counts.refuse(line, row)
        # A character has at most four bytes, so that only texts near the limit are encoded.
        elif any(value is not None and len(value) * 4 > limit and len(value.encode()) > limit for value in row.values):
            counts.refuse(line, f"the row is longer than {limit:,} bytes (max_record_bytes)")
        else:
            counts.rows_read += 1
            yield row


@contextlib.contextmanager
def _names_decoded() -> Iterator[None]:
    """Turn the error of pyarrow for a name in the metadata that is not UTF-8 into _DamagedError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise _DamagedError(f"a name in its metadata is not UTF-8: {error}") from error


def _check_ends(path: Path | RemoteFile, size: int) -> None:
    with environment_faults(path), path.open("rb") as file:
        head = file.read(512)
        file.seek(max(0, size - 4))
        tail = file.read(4)
    if not head.startswith(_MAGIC):
        found = look_like(head) or ("other data" if b"\0" in head else "text")
        raise DataError(f"{path}: named .parquet but looks like {found}; rename it")
    if tail != _MAGIC or size < 12:
        raise DataError(f"{path}: truncated after {size} bytes (its footer is missing); copy or download it again")


def _check_type(path: Path | RemoteFile, column: Column, kind: Any) -> None:
    import pyarrow.types as types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if column.kind == "labels" and is_list:
        kind = kind.value_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)
    scalar = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    if not (text or (scalar and column.kind != "text")):
        remedy = (
            "for several labels per text pass --task-type multi-label" if column.kind == "label" and is_list else "convert it to strings"
        )
        raise DataError(f"{path}: column {column.name!r} has the type {kind}; {remedy}, or pass {column.flag}")


def _class_names(schema: Any, columns: Sequence[Column]) -> dict[str, list[str]]:
    """Return the names of the classes of each column of labels that datasets wrote as `ClassLabel`, or as lists of them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        kinds = {column.name: features.get(column.name) for column in columns if column.kind in ("label", "labels")}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return {}
    classes = {}
    for name, kind in kinds.items():
        kind = kind[0] if isinstance(kind, list) and kind else kind  # of a list the form depends on the version of datasets
        kind = kind["feature"] if isinstance(kind, dict) and "feature" in kind else kind
        names = kind.get("names") if isinstance(kind, dict) and kind.get("_type") == "ClassLabel" else None
        if isinstance(names, list) and names and all(isinstance(each, str) for each in names) and len(set(names)) == len(names):
            classes[name] = names
    return classes


def _batch_rows(path: Path | RemoteFile, handle: Any, metadata: Any, names: Sequence[str], *, size: int) -> int:
    """Return the rows per batch that bound its memory: in a file of 500 bytes, every row can refer to one long text in a dictionary.

    Raises:
        DataError: if a column of a row group is very large and its compression ratio is implausible for text. _DamagedError: if a
        dictionary is outside of the file, which has `size` bytes.
    """
    longest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for chunk in (group.column(index) for index in range(group.num_columns)):
            if chunk.path_in_schema.split(".")[0] not in names and chunk.path_in_schema not in names:  # a list's is "label.list.element"
                continue
            unpacked, packed = chunk.total_uncompressed_size, max(1, chunk.total_compressed_size)
            if unpacked > _BOMB_BYTES and unpacked > _BOMB_RATIO * packed:
                raise DataError(f"{path}: column {chunk.path_in_schema!r} grows {unpacked // packed} times when decompressed; is it text?")
            if chunk.has_dictionary_page:
                offset = chunk.dictionary_page_offset
                if not 0 <= offset < size:
                    raise _DamagedError(f"its metadata has a dictionary at byte {offset:,} of {size:,}")
                longest = max(longest, min(unpacked, _page_size(handle, offset)))
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // longest))


def _page_size(handle: Any, offset: int) -> int:
    """Return the decompressed size of a page: the second field of its header, in Thrift's compact protocol."""
    handle.seek(offset)
    head = handle.read(16)
    index, values = 0, []
    for _ in range(2):  # kind, size: each the byte 15 (next field, an i32), then the number in groups of seven bits
        value = shift = 0
        index += 1
        while index < len(head):
            value |= (head[index] & 0x7F) << shift
            shift, index = shift + 7, index + 1
            if head[index - 1] < 0x80:
                break
        values.append(value >> 1)
    return values[1]


def _values(array: Any) -> list[Any]:
    kind = array.type
    while hasattr(kind, "value_type"):  # a list or a dictionary
        kind = kind.value_type
    if (short := _SHORT.get(str(kind))) is not None:
        return [_shortened(value, short) for value in array.to_pylist()]
    try:
        values: list[Any] = array.to_pylist()
    except UnicodeDecodeError:
        values = []
        for value in array:
            try:
                values.append(value.as_py())
            except UnicodeDecodeError as error:
                values.append(error)
    return values


def _shortened(value: Any, kind: Callable[[float], object]) -> Any:
    """Return a number of less than double precision as the double of its shortest spelling: 0.1, not 0.10000000149011612."""
    if isinstance(value, list):
        return [_shortened(each, kind) for each in value]
    return None if value is None else float(str(kind(value)))


def _row(line: int, raw: Sequence[Any], columns: Sequence[Column], classes: Mapping[str, list[str]]) -> Row | str:
    """Return the row, or the reason to reject it. classes: `_class_names`."""
    values: list[str | None] = []
    for value, column in zip(raw, columns, strict=True):
        if (names := classes.get(column.name)) is not None:
            try:
                value = _named(value, names)
            except IndexError:
                return f"{column.name!r} is {brief(value, 30)}, and the metadata of the file has names for 0 to {len(names) - 1}"
        if isinstance(value, UnicodeDecodeError):
            return f"{column.name!r} is not UTF-8"
        if value is None or (isinstance(value, float) and math.isnan(value)):
            if column.kind == "text" and column.required:
                return f"{column.name!r} is null"
            values.append(None)
        elif isinstance(value, list):
            if any(each is None for each in value):
                return f"{column.name!r} has a null among its labels"
            values.append(labels_value([_spelled(each) for each in value]))
        else:
            values.append(from_cell(_spelled(value), column))
    return Row(line, tuple(values))


def _named(value: Any, names: list[str]) -> Any:
    """Return the name of a class, or None for its number -1; a list of both; any value but an integer unchanged.

    Raises:
        IndexError: if there is no such class.
    """
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    if type(value) is not int:
        return value
    if value < -1:
        raise IndexError(value)
    return None if value == -1 else names[value]


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)
