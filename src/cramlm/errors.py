"""Exceptions for users, with exit codes.

    CramError                 1   base class; raised itself only for internal errors
    ├── UsageError            2   flags, config, missing paths
    ├── DataError             3   invalid rows, files or tasks
    ├── EnvironmentFault      4   disk, permission, memory, a missing extra
    ├── ArtifactError         5   a result folder that is damaged, of another kind or of another version
    ├── DivergedError         6   loss or gradient not finite
    ├── LockedError           7   another process builds the same folder
    ├── RankLost              4   another process of a distributed training is gone; resumable from the checkpoint
    └── Stopped              75   SIGTERM (130 for SIGINT); saved and resumable

A message is one line: the object, the rule, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set


class CramError(Exception):
    """Base class; `str(error)` is the one-line message for the user."""

    exit_code = 1


class UsageError(CramError):
    """A flag, a setting or a path is invalid."""

    exit_code = 2


class DataError(CramError):
    """The data are invalid; the message names file and line."""

    exit_code = 3


class EnvironmentFault(CramError):  # noqa: N818 - EnvironmentError is a builtin
    """The environment fails: no space, no permission, no memory, a missing package."""

    exit_code = 4


class ArtifactError(CramError):
    """A result folder is damaged, incomplete, unsafe, or of another kind or version."""

    exit_code = 5


class DivergedError(CramError):
    """A loss or gradient is not finite; the step was not applied."""

    exit_code = 6


class LockedError(CramError):
    """Another process is building the same folder."""

    exit_code = 7


class RankLost(CramError):  # noqa: N818 - not a failure of this process; the run can be resumed
    """Another process of the same training was killed, is stopped or unreachable; the last checkpoint is intact."""

    exit_code = 4


class Stopped(CramError):  # noqa: N818 - not a failure; the run is saved and can be resumed
    """The run was stopped by a signal, after saving a checkpoint at the step boundary.

    `exit_code` is 75 for SIGTERM and 130 for SIGINT.
    """

    exit_code = 75

    def __init__(self, message: str, *, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def brief(value: object, limit: int = 60) -> str:
    """Return the repr of a value for a one-line message, shortened to `limit` characters."""
    text = ascii(value) if isinstance(value, bytes) else repr(value)
    return text if len(text) <= limit else text[: limit - 16] + "…" + text[-15:]


def more(names: Sequence[str]) -> str:
    """Return " (and 2 more)" for the names after the first, for a message that holds only that one."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def first_line(error: Exception) -> str:
    """Return the first line of an error of another library that is not blank, at most 200 characters; its class if it has no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun, like "1 thread" and "2,000 threads". plural: where it is not the singular with an s."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def size(count: int) -> str:
    """Return a number of bytes, like "0.4 MB", "12 MB" and "1.9 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.{0 if count >= 1e7 else 1}f} MB"


def list_fault(value: object, expected: str = "a list of strings", *, most_dimensions: int = 1) -> str:
    """Return why a value is no list, with the remedy, like "is a set; pass a list of strings"; "" if it holds others in an order.

    A string would be read as characters, a mapping as its keys, a table as names of columns, a set in no order. expected: what to pass.
    most_dimensions: of an array or a table.
    """
    if isinstance(value, str | bytes):
        return f"is one string ({brief(value, 30)}); pass {expected}"
    if isinstance(value, Mapping | Set) or not isinstance(value, Iterable):
        return f"is a {type(value).__name__}; pass {expected}"
    dimensions = len(getattr(value, "shape", (0,)))  # a polars data frame has a shape and no ndim
    return "" if 1 <= dimensions <= most_dimensions else f"has {dimensions} dimensions; pass one column of it, or {expected}"
