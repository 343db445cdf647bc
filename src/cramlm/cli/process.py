"""What the first SIGTERM or Ctrl-C does to a command that does not answer it itself: it ends by an exception, so that everything begun is
tidied up, with one line and the exit code of its kind. The second one ends the process at once.

How a command that saves its work answers the first SIGTERM or Ctrl-C: at its next safe point.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from cramlm.errors import EnvironmentFault, Stopped

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


LOAD_NO_TORCH = frozenset({"check", "config", "doctor", "index", "recipes", "search", "select", "track", "verify"})
"""Commands that run without the torch memory check."""
DEPEND_ON_THE_MODEL = frozenset({"evaluate", "explain", "predict", "push", "serve"})
"""Commands that load torch only for some models; each calls `check_address_space_of_model`."""
LEAST_ADDRESS_SPACE = 2_000_000_000
"""Bytes. Loading torch, numba and scikit-learn maps 1.2e9 on two cores; where that does not fit, C++ aborts without a word to Python."""


def check_address_space(command: str | None) -> None:
    """Raises EnvironmentFault if `ulimit -v` allows less than a command of this name maps before it does anything."""
    if command not in LOAD_NO_TORCH | DEPEND_ON_THE_MODEL:
        _check(command)


def check_address_space_of_model(model: Path, command: str) -> None:
    """Raises EnvironmentFault if `ulimit -v` allows less than torch maps and `model`, a model or a run, needs torch."""
    from cramlm.inference.onnx import GRAPH_FILE  # NumPy, which the help does not load
    from cramlm.linear import is_linear

    if not any(is_linear(folder) or (folder / GRAPH_FILE).is_file() for folder in (model, model / "export")):
        _check(command)


def _check(command: str | None) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESS_SPACE:
        raise EnvironmentFault(
            f"this process may map {most / 1e9:.1f} GB of memory (ulimit -v), and {command} needs at least "
            f"{LEAST_ADDRESS_SPACE / 1e9:.0f} GB to load torch; raise the limit, or bound resident memory with a control group instead"
        )
