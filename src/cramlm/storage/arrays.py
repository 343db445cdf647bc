"""Arrays as .npy files, written and read by Python's own files.

NumPy hands a real file to C's stdio and forgets what goes wrong there: on a full disk `np.save` returns as if all were well and leaves a
file cut short, which would then be published; on a broken one `np.load` calls the file damaged.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def save_array(path: Path, values: npt.NDArray[Any]) -> None:
    """Write one array.

    Raises:
        OSError: if the disk refuses.
    """
    values = np.ascontiguousarray(values)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
        file.write(values.data.cast("B") if values.size else b"")


def array_bytes(values: npt.NDArray[Any]) -> bytes:
    """The content of the .npy file that `save_array` writes."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(values), allow_pickle=False)
    return file.getvalue()


def map_array(path: Path) -> npt.NDArray[Any]:
    """The array, memory-mapped and not writable; an empty one, which cannot be mapped, is read.

    Raises:
        OSError: if the disk refuses. ValueError: if it is not a whole .npy file, or one of objects.
    """
    values: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return values.view(np.ndarray)


def read_array(path: Path) -> npt.NDArray[Any]:
    """The whole array, in memory of its own.

    Raises:
        OSError: if the disk refuses. ValueError: if it is not a whole .npy file, or one of objects.
    """
    values: npt.NDArray[Any] = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    return values
