"""What the first SIGTERM or Ctrl-C does to a command that does not answer it itself: it ends by an exception, so that everything begun is
tidied up, with one line and the exit code of its kind. The second one ends the process at once.

How a command that saves its work answers the first SIGTERM or Ctrl-C: at its next safe point.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

from cramlm.errors import Stopped

EXIT_CODES: Final[dict[int, int]] = {signal.SIGTERM: 75, signal.SIGINT: 130}


class Interrupted(BaseException):
    """Not a KeyboardInterrupt, which typer would end without a word; not an Exception, which libraries catch."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped by a signal, nothing is half; run the same command again to continue")
        self.exit_code = EXIT_CODES[number]


def interrupt_at_signals() -> None:
    """From now on; call it in the main thread."""
    for number in EXIT_CODES:
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted(number)


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
