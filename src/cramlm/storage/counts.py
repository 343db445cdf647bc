"""Counts of the work that a run should do once: files parsed, texts decoded, texts tokenized. Costs nothing unless `counting` is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal, TypeAlias

Work: TypeAlias = Literal["parsed", "decoded", "tokenized"]
_COUNTS: Final[ContextVar[Counter[tuple[Work, str]] | None]] = ContextVar("counts", default=None)


@contextmanager
def counting() -> Iterator[Counter[tuple[Work, str]]]:
    """Count until the block ends, in this thread: how often each item (a file, a text) was worked on."""
    counts: Counter[tuple[Work, str]] = Counter()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


def count(work: Work, items: Iterable[str]) -> None:
    """Note that this was done to these items."""
    if (counts := _COUNTS.get()) is not None:
        counts.update((work, item) for item in items)
