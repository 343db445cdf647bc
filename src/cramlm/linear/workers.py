"""Threads that fit linear models side by side.

Matrix products, liblinear and most of NumPy leave the interpreter's lock to other threads. With one thread a call is made when its result
is asked for, so that nothing is computed that is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

_Result = TypeVar("_Result")


class Workers:
    """At most `threads` calls at a time. At the end of the block calls that did not begin are dropped, and the others waited for."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def start(self, call: Callable[[], _Result]) -> Callable[[], _Result]:
        """Start a call; return a function that waits for its result."""
        return call if self._pool is None else self._pool.submit(call).result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
