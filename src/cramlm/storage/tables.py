"""Arrays that take long to compute and depend on the source and on Python's Unicode alone, kept on disk for the next process.

They lie where the machine code of kernels does (compiled.py). A file that is missing, damaged or cannot be written only costs time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Arrays: TypeAlias = tuple[npt.NDArray[Any], ...]
_DIGEST: Final = 32  # bytes of SHA-256, at the beginning of a file


def stored(*sources: str) -> Callable[[Callable[[], Arrays]], Callable[[], Arrays]]:
    """Return a decorator for a function without arguments whose arrays depend on these source files and on Python's Unicode alone."""

    def decorate(compute: Callable[[], Arrays]) -> Callable[[], Arrays]:
        @functools.cache
        def load_or_compute() -> Arrays:
            content = b"".join(Path(source).read_bytes() for source in sources)
            digest = hashlib.sha256(unicodedata.unidata_version.encode() + content).hexdigest()
            name = f"{compute.__name__.strip('_')}-{digest[:12]}.tables"
            folders = list(cache_folders(Path(sources[0]).parent, os.environ.get("NUMBA_CACHE_DIR", "")))
            for folder in folders:
                if (arrays := _load(folder / name)) is not None:
                    return arrays
            arrays = compute()
            any(_save(folder / name, arrays) for folder in folders)
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


def _load(path: Path) -> Arrays | None:
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


def _save(path: Path, arrays: Arrays) -> bool:
    """Write arrays; return False if the disk refuses."""
    body = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(body, np.ascontiguousarray(array), allow_pickle=False)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(hashlib.sha256(body.getvalue()).digest() + body.getvalue())
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        return False
    return True
