"""How every kernel is compiled: at its first call, kept on disk for the next process.

numba keeps machine code by the source of the function's own file, but kernels use each other's functions and constants across files. So the
code is kept in a folder named after the sources of all kernels beside it: an edit to any compiles all anew, and stale code is never run.
That folder lies in $NUMBA_CACHE_DIR, else in __pycache__ beside the kernels; where that cannot be written, in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config


@functools.cache
def _cache_folder(folder: Path, chosen: str) -> str | None:
    """Where the machine code of the kernels in `folder` is kept; None if nothing can be written. chosen: by the user, may be empty."""
    sources = sorted(folder.glob("*kernels.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    for place in _places(folder, chosen):
        kept = place / f"kernels-{digest[:12]}"
        try:
            kept.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=kept).close()
        except OSError:
            continue
        return str(kept)
    return None


def _places(folder: Path, chosen: str) -> Iterator[Path]:
    if chosen:
        yield Path(chosen)
    yield folder / "__pycache__"
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cramlm" / "kernels"


def jit(function: Callable[..., Any], *, fastmath: set[str] | bool = False, inline: bool = False) -> Any:
    """The function, compiled without Python's lock, without checks of bounds, with IEEE division.

    fastmath: what LLVM may assume of floating-point numbers, by its own flag names. inline: pasted into its callers before compilation.
    """
    settings: Any = config
    before = settings.CACHE_DIR
    kept = _cache_folder(Path(function.__code__.co_filename).parent, before)
    settings.CACHE_DIR = kept or before  # read while the decorator runs
    try:
        options: dict[str, Any] = {"inline": "always"} if inline else {"nogil": True, "cache": kept is not None}
        return njit(boundscheck=False, error_model="numpy", fastmath=fastmath, **options)(function)
    finally:
        settings.CACHE_DIR = before
