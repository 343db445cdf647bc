"""What the first SIGTERM or Ctrl-C does to a command that does not answer it itself: it ends by an exception, so that everything begun is
tidied up, with one line and the exit code of its kind. The second one ends the process at once.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final, NoReturn

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
