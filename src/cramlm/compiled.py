"""How every kernel is compiled: at its first call, kept on disk for the next process.

numba keeps machine code by the source of the function's own file, but kernels use each other's functions and constants across files. So the
code is kept in a folder named after the sources of all kernels beside it: an edit to any compiles all anew, and stale code is never run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config


def _cache_folder(folder: Path) -> str:
    sources = sorted(folder.glob("*kernels.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return str(folder / "__pycache__" / f"kernels-{digest[:12]}")


def jit(function: Callable[..., Any], *, fastmath: set[str] | bool = False, inline: bool = False) -> Any:
    """The function, compiled without Python's lock, without checks of bounds, with IEEE division.

    fastmath: what LLVM may assume of floating-point numbers, by its own flag names. inline: pasted into its callers before compilation.
    """
    settings: Any = config
    before = settings.CACHE_DIR
    folder = Path(function.__code__.co_filename).parent
    settings.CACHE_DIR = before or _cache_folder(folder)  # read while the decorator runs; where it is not writable, numba takes the user's
    try:
        options: dict[str, Any] = {"inline": "always"} if inline else {"nogil": True, "cache": True}
        return njit(boundscheck=False, error_model="numpy", fastmath=fastmath, **options)(function)
    finally:
        settings.CACHE_DIR = before
