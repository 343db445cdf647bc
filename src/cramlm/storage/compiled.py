"""The decorators of compiled functions: kernels, compiled at their first call, and instructions.

The machine code of kernels is on disk for the next process. numba invalidates it by the source file of the function alone, but kernels use
functions and constants of other files. So the code is kept in a folder named after the kernel's file and the files beside it that it
imports: an edit to any of them compiles anew. That folder is in $NUMBA_CACHE_DIR, else in __pycache__ beside the kernels; if that is not
writable, in the user's cache folder.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import extending, njit
from numba.core import config, types
from numba.core.caching import FunctionCache
from numba.core.runtime.nrt import rtsys

from cramlm.storage.arrays import cache_folders


def jit(function: Callable[..., Any], *, fastmath: set[str] | bool = False, inline: bool = False) -> Any:
    """Compile the function without Python's lock, without bounds checks, with IEEE division.

    fastmath: what LLVM may assume about floating-point numbers, by its own flag names. inline: pasted into its callers before compilation.
    """
    settings: Any = config
    cache_of: Any = _Cache
    before = settings.CACHE_DIR
    folder = _cache_folder(Path(function.__code__.co_filename), before)
    settings.CACHE_DIR = folder or before  # read while the decorator runs
    try:
        options: dict[str, Any] = {"inline": "always"} if inline else {"nogil": True}
        kernel: Any = njit(boundscheck=False, error_model="numpy", fastmath=fastmath, **options)(function)
        if folder is not None and not inline:
            kernel._cache = cache_of(function)
        if not inline:
            kernel.get_call_template = functools.partial(_call_template, kernel.get_call_template)
        return kernel
    finally:
        settings.CACHE_DIR = before


def intrinsic(define: Callable[..., Any]) -> Any:
    """Return numba's intrinsic; its type in numba has the first parameter, which callers do not pass."""
    return extending.intrinsic(define)


def _call_template(template: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
    """Compile a call in another kernel for the types of its arguments: numba would compile another function for a constant argument."""
    plain: Any = types.unliteral
    return template([plain(kind) for kind in arguments], {name: plain(kind) for name, kind in keywords.items()})


class _Cache(FunctionCache):
    """numba's cache of machine code, without loading numba's compiler first (0.4 CPU seconds), which only compiling needs."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function of a signature, None if it is not in the cache."""
        numba: Any = self
        rtsys.initialize(target_context)  # memory management of arrays
        with numba._guard_against_spurious_io_errors():
            return numba._load_overload(sig, target_context)


@functools.cache
def _cache_folder(file: Path, chosen: str) -> str | None:
    """Return the folder for the machine code of a file's kernels; None if nothing is writable. chosen: by the user, may be empty."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sorted(_sources(file)))).hexdigest()
    for parent in cache_folders(file.parent, chosen):
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
        for node in ast.parse(pending.pop().read_bytes()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported = {file.with_name(f"{name.rpartition('.')[2]}.py") for name in names}
            new = {path for path in imported - sources if path.is_file()}
            sources |= new
            pending += new
    return sources
