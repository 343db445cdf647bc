"""Arrays as .npy files and tables as Arrow IPC files, written and read through Python's own file objects; arrays that are cached on disk
(`cached_on_disk`); offsets of ragged arrays, rows.

Python's files report a full or broken disk as OSError. NumPy passes a real file to C's stdio and loses its errors: on a full disk `np.save`
returns normally and leaves a truncated file. pyarrow is imported when a table is first written or read (0.2 CPU seconds).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import mmap
import os
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.errors import ArtifactError
from cramlm.records import IntArray
from cramlm.storage.locks import raise_if_refused


def offsets_of(sizes: npt.NDArray[Any]) -> IntArray:
    """Return the offsets of values of these sizes, one after the other: int64 (n + 1,), from 0."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def are_offsets(values: npt.NDArray[Any], *, end: int) -> bool:
    """Return True for offsets that rise from 0 to `end`. Those of a damaged file could make a kernel read out of bounds."""
    return values.ndim == 1 and len(values) > 0 and bool(values[0] == 0 and values[-1] == end and (values[1:] >= values[:-1]).all())


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view that cannot be written. A kernel is compiled once if all its calls pass such arrays, or none."""
    view = array.view()
    view.flags.writeable = False
    return view


def joined(texts: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """Return texts one after the other, uint8 (bytes,), and their offsets, int64 (n + 1,)."""
    return np.frombuffer(b"".join(texts), np.uint8), offsets_of(np.fromiter(map(len, texts), np.int64, len(texts)))


def separated(data: npt.NDArray[np.uint8], offsets: IntArray) -> list[bytes]:
    """Return the texts that `joined` put one after the other."""
    whole = data.tobytes()
    return [whole[start:end] for start, end in pairwise(offsets.tolist())]


def unit_vectors(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the rows scaled to length 1; rows of zeros stay."""
    result: npt.NDArray[np.float32] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return result


def evenly(size: int, most: int) -> IntArray:
    """Return at most `most` of the indices 0 to size - 1, evenly spaced, including the first and the last; ascending."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def spread(starts: IntArray, sizes: IntArray) -> IntArray:
    """Return the indices of all elements of the spans starts[i]..starts[i] + sizes[i], one span after the other, int64."""
    offsets = offsets_of(sizes)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)


def groups_by_length(lengths: IntArray, most: int, *, padding: int | None = None) -> Iterator[IntArray]:
    """Yield the indices of sequences, shortest first, in groups that have at most `most` elements when they are padded to their longest; a
    longer sequence is a group of its own.

    padding: how many of a group's elements may be padding; None = any number.
    """
    order: IntArray = np.argsort(lengths, kind="stable")
    sizes, start = lengths[order], 0
    while start < len(order):
        stop, padded = start + 1, 0
        while stop < len(order) and sizes[stop] * (stop + 1 - start) <= most:
            padded += (sizes[stop] - sizes[stop - 1]) * (stop - start)
            if padding is not None and padded > padding:
                break
            stop += 1
        yield order[start:stop]
        start = stop


def save_array(path: Path, values: npt.NDArray[Any]) -> None:
    """Write one array.

    Raises:
        OSError: if the file cannot be written.
    """
    values = np.ascontiguousarray(values)
    with path.open("wb") as file:
        file.write(array_header(values.dtype, values.shape))
        file.write(values.data.cast("B") if values.size else b"")


class ArrayFile:
    """A .npy file of unknown length, written piece by piece. row: the shape of an element."""

    def __init__(self, path: Path, dtype: type[np.generic], *, row: tuple[int, ...] = ()) -> None:
        self._file = path.open("wb")
        self._dtype, self._row = np.dtype(dtype), row
        self._length = 0
        self._write_header()

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write elements of the file's dtype, (n, *row)."""
        assert values.dtype == self._dtype
        assert values.shape[1:] == self._row
        self._file.write(np.ascontiguousarray(values).data)
        self._length += len(values)

    def close(self) -> None:
        """Write the length into the header."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        self._file.write(array_header(self._dtype, (self._length, *self._row)))  # of one length for any number of values


def array_header(dtype: npt.DTypeLike, shape: tuple[int, ...]) -> bytes:
    """Return the beginning of the .npy file of an array, before its values in C order."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape})
    return file.getvalue()


def array_bytes(values: npt.NDArray[Any]) -> bytes:
    """Return the content of the .npy file that `save_array` would write."""
    return array_header(values.dtype, values.shape) + values.tobytes()


def map_array(path: Path) -> npt.NDArray[Any]:
    """Return the array as a read-only memory map; an empty one, which cannot be mapped, is read.

    Raises:
        OSError: if the file cannot be read. ValueError: if the file is truncated, or an array of objects.
    """
    values: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return values.view(np.ndarray)


def read_array(path: Path) -> npt.NDArray[Any]:
    """Read the whole array into memory.

    Raises:
        OSError: if the file cannot be read. ValueError: if the file is truncated, or an array of objects.
    """
    values: npt.NDArray[Any] = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    return values


def save_table(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    """Write record batches of one schema (pyarrow) as an uncompressed Arrow IPC file.

    Raises:
        OSError: if the file cannot be written.
    """
    import pyarrow as pa

    with path.open("wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def open_table(path: Path, *schemas: Any) -> Any:
    """As `map_table`, but return the table only."""
    return map_table(path, *schemas)[0]


def map_table(path: Path, *schemas: Any) -> tuple[Any, mmap.mmap]:
    """Return the table (pyarrow) of an Arrow IPC file, and its memory map. Call `check_column` before reading a column of text.

    Raises:
        ArtifactError: if it is not a complete Arrow file with one of these schemas and without nulls.
        EnvironmentFault: if it cannot be read.
    """
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # ValueError for an empty file
        table = pa.ipc.open_file(pa.py_buffer(mapped), options=pa.ipc.IpcReadOptions(use_threads=False)).read_all()
        table.validate()
        columns = ", ".join(table.schema.names)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: missing; the folder was written by another version of cramlm, build it again") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_if_refused(error, path)
        raise _damaged(path, error) from error
    if table.schema not in schemas:
        raise _damaged(path, f"its columns are {columns}")
    if any(column.null_count for column in table.columns):
        raise _damaged(path, "a column holds nulls")
    return table, mapped


def check_column(path: Path, column: Any) -> Any:
    """Return the column after checking its offsets and that its text is UTF-8; reading values of a damaged column is not memory-safe.

    Raises:
        ArtifactError: if it is damaged.
    """
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowException as error:
        raise _damaged(path, error) from error
    return column


def number_column(values: npt.NDArray[Any]) -> Any:
    """Return an Arrow array over the memory of an array of numbers. `pyarrow.array` imports pandas where it is installed (0.3 CPU s)."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def string_column(texts: Iterable[str]) -> Any:
    """Return an Arrow array of strings, less than 2 GB in all. `pyarrow.array` imports pandas as in `number_column`."""
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(encoded), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))])


def column_numbers(column: Any) -> npt.NDArray[Any]:
    """Return the numbers of an Arrow array without nulls, or of a chunk of one. No copy."""
    dtype = column.type.to_pandas_dtype()
    numbers: npt.NDArray[Any] = np.frombuffer(column.buffers()[1] or b"", dtype)[column.offset : column.offset + len(column)]
    return numbers


def text_buffers(column: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return (bytes, offsets) of a chunk of large strings or binaries: value i is bytes[offsets[i]:offsets[i + 1]]. No copy, no check."""
    if not len(column):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = column.buffers()
    own = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8), own


def _damaged(path: Path, reason: object) -> ArtifactError:
    return ArtifactError(f"{path}: damaged ({' '.join(str(reason).split())[:120]}); delete the folder and build it again")


Arrays: TypeAlias = tuple[npt.NDArray[Any], ...]
_DIGEST: Final = 32  # bytes of SHA-256, at the beginning of a file


def cached_on_disk(*sources: str) -> Callable[[Callable[[], Arrays]], Callable[[], Arrays]]:
    """Return a decorator for a slow function without arguments whose arrays depend on these source files and on Python's Unicode alone.

    The next process reads the arrays from the folder that also holds the machine code of kernels (compiled.py). A file that is missing,
    damaged or cannot be written only costs time.
    """

    def decorate(compute: Callable[[], Arrays]) -> Callable[[], Arrays]:
        @functools.cache
        def load_or_compute() -> Arrays:
            content = b"".join(Path(source).read_bytes() for source in sources)
            digest = hashlib.sha256(unicodedata.unidata_version.encode() + content).hexdigest()
            name = f"{compute.__name__.strip('_')}-{digest[:12]}.tables"
            folders = list(cache_folders(Path(sources[0]).parent, os.environ.get("NUMBA_CACHE_DIR", "")))
            for folder in folders:
                if (arrays := _read_cached(folder / name)) is not None:
                    return arrays
            arrays = compute()
            any(_write_cached(folder / name, arrays) for folder in folders)
            return arrays

        return load_or_compute

    return decorate


def cache_folders(folder: Path, chosen: str) -> Iterator[Path]:
    """Yield folders to keep what is computed from the source files in `folder`, best first. chosen: by the user, may be empty."""
    if chosen:
        yield Path(chosen)
    yield folder / "__pycache__"
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cramlm" / "kernels"


def _read_cached(path: Path) -> Arrays | None:
    """Return the arrays of a file, None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, body = content[:_DIGEST], content[_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        return None
    file, arrays = io.BytesIO(body), []
    while file.tell() < len(body):
        arrays.append(np.lib.format.read_array(file, allow_pickle=False))
    return tuple(arrays)


def _write_cached(path: Path, arrays: Arrays) -> bool:
    """Write arrays; return False if the file cannot be written."""
    body = b"".join(map(array_bytes, arrays))
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(hashlib.sha256(body).digest() + body)
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        return False
    return True
