"""Signals and the memory limit of the process.

The first SIGTERM or Ctrl-C stops a command: one that can resume at its next checkpoint (`stop_on_signals`), any other at once by an
exception, which removes temporary files (`interrupt_at_signals`). The second signal ends the process.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from cramlm.errors import EnvironmentFault, Stopped, size

EXIT_CODES: Final[dict[int, int]] = {signal.SIGTERM: 75, signal.SIGINT: 130}


class Interrupted(BaseException):
    """A signal. Not a KeyboardInterrupt, which typer handles without a message; not an Exception, which libraries catch."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped by a signal, no file is incomplete; run the same command again to continue")
        self.exit_code = EXIT_CODES[number]


def interrupt_at_signals() -> None:
    """Raise `Interrupted` in the main thread at the first SIGTERM or SIGINT; call it in the main thread."""
    for number in EXIT_CODES:
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted(number)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the exit code of the first SIGTERM or SIGINT, None before; the second signal ends the process.

    Raises:
        Stopped: at the end of the block, if a signal arrived.
    """
    received: list[int] = []

    def record(number: int, frame: Any) -> None:
        if received:
            os._exit(128 + number)
        received.append(EXIT_CODES[number])
        if os.environ.get("RANK", "0") == "0":
            print("stopping after the next checkpoint; repeat the signal to stop at once", file=sys.stderr)

    previous = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: received[0] if received else None
        if received:
            raise Stopped("stopped; run the same command again to continue", exit_code=received[0])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


WITHOUT_TORCH = frozenset({"check", "config", "doctor", "index", "recipes", "sample-data", "search", "select", "track", "verify"})
"""Commands that run without the torch memory check."""
TORCH_BY_MODEL = frozenset({"embed", "evaluate", "explain", "label-next", "predict", "push", "serve"})
"""Commands that import torch only for some models; each calls `check_address_space_of_model`."""
_YOUNG_OBJECTS: Final = 200_000  # of the cycle collector: with Python's 700 to 2,000, imports alone start hundreds of collections
MIN_ADDRESS_SPACE = 2_000_000_000
"""Bytes. Importing torch, numba and scikit-learn maps 1.2e9 on two cores; under a lower limit C++ aborts without a Python exception."""


_ALLOCATION_FAILED: Final = re.compile("can't allocate memory|out of memory")  # of torch on a CPU
_PRIMITIVE_FAILED: Final = re.compile("could not create a (primitive|memory)")  # of oneDNN, also for other reasons


def collect_cycles_seldom(command: str | None) -> None:
    """Let Python's cycle collector run at fewer allocations in commands that end soon, a fifteenth of whose time it takes."""
    if command in WITHOUT_TORCH | TORCH_BY_MODEL - {"serve"}:
        gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


def print_any_text() -> None:
    """Let standard output take any text, whatever the locale: files and pipes get UTF-8, a terminal of another encoding escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding=None if sys.stdout.isatty() else "utf-8", errors="backslashreplace")


def end_without_collection() -> None:
    """Let the process end without a search of all objects for cycles: after importing torch it takes 0.3 CPU seconds and frees memory that
    the system takes back anyway.
    """
    atexit.register(gc.freeze)  # the first that is registered is called last


def check_address_space(command: str | None) -> None:
    """Raise EnvironmentFault if the limit on the address space (`ulimit -v`) is too low for a command that imports torch."""
    if command not in WITHOUT_TORCH | TORCH_BY_MODEL:
        _check(command)


def check_address_space_of_model(model: Path, command: str) -> None:
    """Raise EnvironmentFault if the limit on the address space is too low for torch and `model`, a model or a run, needs torch."""
    from cramlm.inference.onnx import GRAPH_FILE  # here: imports NumPy
    from cramlm.linear.files import is_linear

    if not any(is_linear(folder) or (folder / GRAPH_FILE).is_file() for folder in (model, model / "export")):
        _check(command)


def is_out_of_memory(error: Exception) -> bool:
    """Return True for a RuntimeError of torch that reports a failed allocation; torch has a class of its own for CUDA only."""
    if not isinstance(error, RuntimeError):
        return False
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return bool(_ALLOCATION_FAILED.search(str(error)) or (is_limited and _PRIMITIVE_FAILED.search(str(error))))


def _check(command: str | None) -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
        raise EnvironmentFault(
            f"this process may map {size(limit)} of memory (ulimit -v), and {command} needs at least "
            f"{size(MIN_ADDRESS_SPACE)} to load torch; raise the limit, or limit resident memory with a control group instead"
        )
