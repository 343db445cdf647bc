"""The decorator that compiles kernels at their first call and keeps the machine code on disk for the next process.

numba invalidates machine code by the source file of the function alone, but kernels use functions and constants of other files. So the code
is kept in a folder named after the kernel's file and the files beside it that it imports: an edit to any of them compiles anew.
That folder is in $NUMBA_CACHE_DIR, else in __pycache__ beside the kernels; if that is not writable, in the user's cache folder.
"""

from __future__ import annotations

import ast
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


def jit(function: Callable[..., Any], *, fastmath: set[str] | bool = False, inline: bool = False) -> Any:
    """Compile the function without Python's lock, without bounds checks, with IEEE division.

    fastmath: what LLVM may assume about floating-point numbers, by its own flag names. inline: pasted into its callers before compilation.
    """
    settings: Any = config
    before = settings.CACHE_DIR
    folder = _cache_folder(Path(function.__code__.co_filename), before)
    settings.CACHE_DIR = folder or before  # read while the decorator runs
    try:
        options: dict[str, Any] = {"inline": "always"} if inline else {"nogil": True, "cache": folder is not None}
        return njit(boundscheck=False, error_model="numpy", fastmath=fastmath, **options)(function)
    finally:
        settings.CACHE_DIR = before


@functools.cache
def _cache_folder(file: Path, chosen: str) -> str | None:
    """Return the folder for the machine code of a file's kernels; None if nothing is writable. chosen: by the user, may be empty."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sorted(_sources(file)))).hexdigest()
    for parent in _parent_folders(file.parent, chosen):
        folder = parent / f"kernels-{digest[:12]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return str(folder)
    return None


def _sources(file: Path) -> set[Path]:
    """Return the file and the files of its folder that it imports, directly or not."""
    sources, pending = {file}, [file]
    while pending:
        for node in ast.walk(ast.parse(pending.pop().read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported = {file.with_name(f"{name.rpartition('.')[2]}.py") for name in names}
            new = {path for path in imported - sources if path.is_file()}
            sources |= new
            pending += new
    return sources


def _parent_folders(folder: Path, chosen: str) -> Iterator[Path]:
    if chosen:
        yield Path(chosen)
    yield folder / "__pycache__"
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cramlm" / "kernels"
