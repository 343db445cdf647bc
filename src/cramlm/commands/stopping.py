"""How a command that saves its work answers the first SIGTERM or Ctrl-C: at its next safe point."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cramlm.errors import Stopped
from cramlm.signals import EXIT_CODES


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], int | None]]:
    """A `stop` that turns the first SIGTERM or SIGINT into its exit code; the second signal ends the process at once."""
    received: list[int] = []

    def remember(number: int, frame: Any) -> None:
        if received:
            os._exit(128 + number)
        received.append(EXIT_CODES[number])
        if os.environ.get("RANK", "0") == "0":  # of several ranks one speaks
            print("stopping at the next safe point; once more to stop at once", file=sys.stderr)

    previous = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: received[0] if received else None
        if received:
            raise Stopped("stopped; run the same command again to continue", exit_code=received[0])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
