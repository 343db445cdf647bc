"""Everything that can go wrong for a user, and the exit code each kind leaves.

    CramError                 1   a bug of ours, when raised as such
    ├── UsageError            2   flags, config, a path that is not there
    ├── DataError             3   a row, a file, a task that breaks a rule
    ├── EnvironmentFault      4   disk, permission, memory, a missing extra
    ├── ArtifactError         5   a folder damaged, foreign, or of another version
    ├── DivergedError         6   loss or gradient not finite
    ├── LockedError           7   another process builds the same thing
    ├── RankLost              4   a process of a training in several is gone: resumable from its checkpoint
    └── Stopped              75   SIGTERM (130 for SIGINT): saved, resumable

A message names the thing, the rule, the value and the next action, in one line.
"""

from __future__ import annotations


class CramError(Exception):
    """Base of every error that cramlm raises on purpose; `str(error)` is the one line for the user."""

    exit_code = 1


class UsageError(CramError):
    """The command, the config or a path is wrong."""

    exit_code = 2


class DataError(CramError):
    """The user's data break a rule; the message names file and line."""

    exit_code = 3


class EnvironmentFault(CramError):  # noqa: N818 - EnvironmentError is a builtin
    """The machine cannot do it: no space, no permission, no memory, a package missing."""

    exit_code = 4


class ArtifactError(CramError):
    """A published folder is damaged, incomplete, unsafe or of another version."""

    exit_code = 5


class DivergedError(CramError):
    """Training produced a number that is not finite; nothing of that step was kept."""

    exit_code = 6


class LockedError(CramError):
    """Another process is building the same folder."""

    exit_code = 7


class RankLost(CramError):  # noqa: N818 - not a failure of this process: the run continues when it is started again
    """Another process of the same training was killed, is stopped or out of reach; the last checkpoint stays."""

    exit_code = 4


class Stopped(CramError):  # noqa: N818 - not a failure: the run is saved and continues when started again
    """A signal asked the run to stop; a checkpoint was saved at the step boundary.

    `exit_code` is 75 for SIGTERM and 130 for SIGINT.
    """

    exit_code = 75

    def __init__(self, message: str, *, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def brief(value: object, limit: int = 60) -> str:
    """A value as it appears in a one-line message."""
    text = ascii(value) if isinstance(value, bytes) else repr(value)
    return text if len(text) <= limit else text[: limit - 16] + "…" + text[-15:]
