"""How every kernel is compiled: at its first call, kept on disk for the next process.

numba keeps machine code by the source of the function's own file, but kernels use each other's functions and constants across files. So the
code is kept in a folder named after the sources of all of them: an edit to any compiles all anew, and stale code is never run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config

_HERE = Path(__file__).parent


def _cache_folder() -> str:
    sources = sorted(_HERE.glob("*kernels.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return str(_HERE / "__pycache__" / f"kernels-{digest[:12]}")


def jit(function: Callable[..., Any]) -> Any:
    """The function, compiled without Python's lock, without checks of bounds, with IEEE division."""
    settings: Any = config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = before or _cache_folder()  # read while the decorator runs; where it is not writable, numba takes the user's folder
    try:
        return njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")(function)
    finally:
        settings.CACHE_DIR = before
