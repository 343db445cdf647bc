"""Threads that search, fit linear models, count words and train word vectors in parallel.

Matrix products, compiled kernels, liblinear and most of NumPy release the interpreter's lock. With one thread a call runs only when its
result is read, so that unused results are not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from itertools import pairwise
from threading import Event as Flag
from types import TracebackType
from typing import Final, Self, TypeVar

from cramlm.records import Emit, Event, silent

_Result = TypeVar("_Result")
_REPEAT_SECONDS: Final = 0.5
_RANGES: Final = 2  # ranges per thread, so that no thread waits long for another


class Workers:
    """A pool that runs at most `threads` calls at a time; a context manager.

    At the end of the block, calls that have not begun are dropped; running ones are waited for, and end at their next `go_on`. emit: gets
    the events of `Workers.emit`, and the last progress event again twice a second while a result is waited for: after a signal, a run stops
    at the next progress event, by an error that ends the block.
    """

    def __init__(self, threads: int, *, emit: Emit = silent) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._emit, self._ended = emit, Flag()
        self._last: Event | None = None

    def emit(self, event: Event) -> None:
        """Emit an event; call it in the thread that waits for results."""
        if event.kind == "progress":
            self._last = event
        self._emit(event)

    def _repeat(self) -> None:
        if self._last is not None:
            self._emit(self._last)

    @property
    def parallel(self) -> bool:
        """False with one thread."""
        return self._pool is not None

    def start(self, call: Callable[[], _Result]) -> Callable[[], _Result]:
        """Start a call; return a function that waits for its result."""
        if self._pool is None:
            return call
        future = self._pool.submit(call)

        def wait() -> _Result:
            while not wait_for([future], timeout=_REPEAT_SECONDS).done:
                self._repeat()
            return future.result()

        return wait

    def all(self, calls: Iterable[Callable[[], _Result]]) -> list[_Result]:
        """Run calls and return their results in order."""
        started = [self.start(call) for call in calls]
        return [result() for result in started]

    def ranges(self, count: int, call: Callable[[int, int], object]) -> None:
        """Run call(first, end) for ranges that together cover range(count)."""
        bounds = (
            [count * number // (_RANGES * self.threads) for number in range(_RANGES * self.threads + 1)] if self.parallel else [0, count]
        )
        self.all(partial(call, first, end) for first, end in pairwise(bounds))

    def go_on(self) -> None:
        """Raise CancelledError, or the error of `emit`, if calls must end; a long call runs this between its parts."""
        if self._pool is None:
            self._repeat()
        elif self._ended.is_set():
            raise CancelledError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._pool is not None:
            self._ended.set()
            self._pool.shutdown(cancel_futures=True)


ONE: Final = Workers(1)
"""The calling thread alone."""
