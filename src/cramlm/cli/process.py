"""Signals, memory limit, garbage collection and standard output of the process of a command.

The first SIGTERM or Ctrl-C stops a command: at its next checkpoint if it can resume (`stop_on_signals`), otherwise at once with an
exception, so that temporary files are removed (`interrupt_at_signals`). The second signal ends the process.
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
    """Yield a function that returns the exit code of the first SIGTERM or SIGINT, None before; a second signal ends the process.

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
"""Commands that import torch only for some models; they call `check_address_space_of_model`."""
_ALLOCATIONS: Final = 200_000  # between garbage collections; with Python's 700 to 2,000, imports alone start hundreds of them
MIN_ADDRESS_SPACE = 2_000_000_000
"""Bytes. Importing torch, numba and scikit-learn maps 1.2e9 on two cores; under a lower limit C++ aborts without a Python exception."""


_ALLOCATION_FAILED: Final = re.compile("can't allocate memory|out of memory")  # torch's messages on a CPU
_PRIMITIVE_FAILED: Final = re.compile("could not create a (primitive|memory)")  # a message of oneDNN, which also has other causes


def collect_garbage_less_often(command: str | None) -> None:
    """Run Python's garbage collector less often in short commands, where it takes a fifteenth of the time, and in `fit`, where it takes
    half a second and training collects before each phase (`trim_memory`).
    """
    if command in WITHOUT_TORCH | TORCH_BY_MODEL - {"serve"} | {"fit"}:
        gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])


def allow_any_text() -> None:
    """Make standard output accept any text in any locale: write UTF-8 to files and pipes, escape what a terminal cannot show."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding=None if sys.stdout.isatty() else "utf-8", errors="backslashreplace")


def skip_last_collection() -> None:
    """Skip the garbage collection at the end of the process.

    After torch is imported it takes 0.3 CPU seconds, and the system frees the memory anyway.
    """
    atexit.register(gc.freeze)  # registered first, called last


def check_address_space(command: str | None) -> None:
    """Raise EnvironmentFault if the limit on the address space (`ulimit -v`) is too low for a command that imports torch."""
    if command not in WITHOUT_TORCH | TORCH_BY_MODEL:
        _check_limit(command)


def check_address_space_of_model(model: Path, command: str) -> None:
    """Raise EnvironmentFault if `model` (a model or a run) needs torch and the limit on the address space is too low for it."""
    from cramlm.inference.onnx import GRAPH_FILE  # here: imports NumPy
    from cramlm.linear.files import is_linear

    if not any(is_linear(folder) or (folder / GRAPH_FILE).is_file() for folder in (model, model / "export")):
        _check_limit(command)


def is_out_of_memory(error: Exception) -> bool:
    """Return True for a RuntimeError of torch that reports a failed allocation; torch has a class of its own for CUDA only."""
    if not isinstance(error, RuntimeError):
        return False
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return bool(_ALLOCATION_FAILED.search(str(error)) or (is_limited and _PRIMITIVE_FAILED.search(str(error))))


def _check_limit(command: str | None) -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
        raise EnvironmentFault(
            f"this process may map {size(limit)} of memory (ulimit -v), and {command} needs at least "
            f"{size(MIN_ADDRESS_SPACE)} to load torch; raise the limit, or limit resident memory with a control group instead"
        )
