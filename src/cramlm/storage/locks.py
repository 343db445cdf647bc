"""Locks on folders, temporary files, durable folder creation, and one-line errors for failures of the operating system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from cramlm.errors import ArtifactError, CramError, EnvironmentFault, LockedError, UsageError
from cramlm.records import Emit, Event

WAIT_VARIABLE: Final = "CRAMLM_WAIT"
DEFAULT_WAIT: Final = 3600.0  # seconds
LOCK_SUFFIX: Final = ".lock"
_POLL_SECONDS: Final = 0.2
_TEMPORARY: Final = re.compile(rf"(?<![^/])\.([^/]+)(?:\.tmp-[\w-]+-\d+-[0-9a-f]{{12}}|{re.escape(LOCK_SUFFIX)})(?![^/])")
_Result = TypeVar("_Result")


@contextlib.contextmanager
def lock(target: Path) -> Iterator[None]:
    """Hold the lock of `target` inside the block; the kernel releases it however the process ends.

    Raises:
        LockedError: immediately if another process holds it, naming its pid and host.
    """
    path = lock_file(target)
    with environment_faults(target):
        make_folder(target.parent)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # not truncated: it may hold the name of the process that has the lock
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise EnvironmentFault(f"{path}: cannot lock: {error.strerror}; use a file system with flock") from error
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "unknown"
            raise LockedError(f"{target}: being built by another process ({holder}); wait for it or stop it") from error
        if not os.fstat(handle).st_nlink:  # removed by its holder after it was opened here
            raise LockedError(f"{target}: was removed by another process; try again")
        with environment_faults(target):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            for leftover in leftovers(target):  # of killed builders
                shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        os.close(handle)


def lock_file(target: Path) -> Path:
    """Return the file whose lock is that of `target`. Only a process that holds the lock may remove it."""
    return target.parent / f".{target.name}{LOCK_SUFFIX}"


def wait_while_locked(build: Callable[[], _Result], *, stage: str, emit: Emit) -> _Result:
    """Return `build()`. While another process holds the lock, emit a note once and try again, for at most `wait_limit()` seconds.

    Raises:
        LockedError: after that time, with the limit in the message.
    """
    limit, began, noted = wait_limit(), time.monotonic(), False
    while True:
        try:
            return build()
        except LockedError as error:
            waited = time.monotonic() - began
            if limit == 0:
                raise
            if waited >= limit:
                raise LockedError(f"{error}; waited {limit:g} s ({WAIT_VARIABLE} sets the limit)") from error
            if not noted:
                emit(Event("note", stage, f"waiting: {error}"))
            noted = True
            emit(Event("progress", stage, "waiting for another process", done=waited, unit="s"))  # a run can be stopped here
            time.sleep(min(_POLL_SECONDS, limit))


def wait_limit() -> float:
    """Return how many seconds to wait for another process that builds a shared folder: $CRAMLM_WAIT, else one hour.

    Raises:
        UsageError: if the variable holds no such number.
    """
    return limit_in_environment(WAIT_VARIABLE, DEFAULT_WAIT, "a number of seconds, like 600; 0 does not wait")


def limit_in_environment(variable: str, default: float, meaning: str, *, finite: bool = False) -> float:
    """Return the number >= 0 in an environment variable, `default` if it is not set or empty. meaning: what the value is, for the error.

    Raises:
        UsageError: if the variable holds no such number; with `finite`, also if it is infinite.
    """
    text = os.environ.get(variable, "")
    try:
        limit = float(text) if text else default
    except ValueError:
        limit = math.nan
    if not limit >= 0 or (finite and limit == math.inf):
        raise UsageError(f"{variable}={text!r} is not {meaning}")
    return limit


@contextlib.contextmanager
def environment_faults(path: object) -> Iterator[None]:
    """Turn OSError (no space, permission, broken disk, too many files) and MemoryError into EnvironmentFault."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CramError):
            raise
        raise _fault(error, path) from error
    except MemoryError as error:
        raise EnvironmentFault(f"{published_path(path)}: out of memory; close other programs or choose a smaller setting") from error


@contextlib.contextmanager
def damage_named(path: Path, remedy: str, *, what: str = "damaged") -> Iterator[None]:
    """Turn exceptions of json, NumPy and our own checks of content into ArtifactError, those of the system as `environment_faults`.

    what: the first words of the message; the error and the remedy follow.
    """
    with environment_faults(path):
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
            raise ArtifactError(f"{path}: {what} ({error}); {remedy}") from error


def raise_if_refused(error: Exception, path: object) -> None:
    """Raise EnvironmentFault if `error` is an OSError of the operating system, such as EACCES or EIO.

    For handlers of libraries' OSErrors, which otherwise mean that the file is missing or damaged.
    """
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        raise _fault(error, path) from error


def _fault(error: OSError, path: object) -> EnvironmentFault:
    where = published_path(error.filename or path)
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return EnvironmentFault(f"{where}: a file is where a folder is needed; choose another path, or remove the file")
    return EnvironmentFault(f"{where}: {error.strerror or error}; free space or fix the permission, then run again")


def leftovers(target: Path) -> Iterator[Path]:
    """Return the temporary files and folders of `target` that are beside it."""
    return target.parent.glob(f"{glob.escape(f'.{target.name}.tmp-')}*")


def temporary_name(target: Path) -> Path:
    """Return a new name beside `target`. It holds the host and random bytes: process ids repeat between containers."""
    host = re.sub(r"[^\w-]+", "-", socket.gethostname())[:24]
    return target.parent / f".{target.name}.tmp-{host}-{os.getpid()}-{secrets.token_hex(6)}"


def published_path(path: object) -> str:
    """Return a path with the names that temporary files and folders are published under, and that of a target for its lock file."""
    text = os.fsdecode(path) if isinstance(path, bytes) else str(path)
    return _TEMPORARY.sub(r"\1", text)


@contextlib.contextmanager
def temporary_file(target: Path) -> Iterator[tuple[Path, int]]:
    """Yield (path, descriptor) of a new file beside `target`, locked until the block ends, then removed if it still has that name.

    `remove_abandoned_files` of other processes spares it because of the lock.
    """
    while True:
        path = temporary_name(target)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if _claim(path, handle):
                yield path, handle
                return
        finally:
            try:
                path.unlink(missing_ok=True)
            finally:
                os.close(handle)


def remove_abandoned_files(target: Path) -> None:
    """Delete temporary files of `target` that no process holds locked: the kernel releases a lock when its process ends."""
    for leftover in leftovers(target):
        with contextlib.suppress(OSError):
            handle = os.open(leftover, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
            finally:
                os.close(handle)


def _claim(path: Path, handle: int) -> bool:
    """Lock a new file; return False if another process removed it as abandoned before the lock was held."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)  # else a file system without locks, where nothing is removed either
    return path.exists()


def make_folder(path: Path) -> None:
    """Create the folder and its parents, each synced into its parent: a folder whose name is lost takes its content with it."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
