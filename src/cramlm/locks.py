"""The right to build a folder, held by one process; names that outlive a loss of power; an operating system's refusals in one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from cramlm.errors import CramError, EnvironmentFault, LockedError

_WAIT_SECONDS = 0.2
_Result = TypeVar("_Result")


@contextlib.contextmanager
def lock(target: Path) -> Iterator[None]:
    """Hold the right to build `target`; the kernel gives it back however the process ends.

    Raises:
        LockedError: at once, naming pid and host of the holder.
    """
    with environment_faults(target):
        make_folder(target.parent)
        path = target.parent / f".{target.name}.lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise EnvironmentFault(f"{path}: cannot lock: {error.strerror}; use a file system with flock") from error
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "unknown"
            raise LockedError(f"{target}: being built by another process ({holder}); wait for it or stop it") from error
        with environment_faults(target):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            remove_leftovers(target)
        yield
    finally:
        os.close(handle)


def wait_while_locked(build: Callable[[], _Result], tell: Callable[[str], None]) -> _Result:
    """`build()`, tried again for as long as another process builds the same; `tell` is told so once."""
    told = False
    while True:
        try:
            return build()
        except LockedError as error:
            if not told:
                tell(str(error))
            told = True
            time.sleep(_WAIT_SECONDS)


def remove_leftovers(target: Path) -> None:
    """Delete temporary folders that a killed builder of `target` left; call only under its lock."""
    for leftover in leftovers(target):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def environment_faults(path: object) -> Iterator[None]:
    """Turn an operating system's refusal (no space, permission, broken disk, too many files) into one line with exit code 4."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CramError):
            raise
        raise _fault(error, path) from error
    except MemoryError as error:
        raise EnvironmentFault(f"{path}: out of memory; close other programs or choose a smaller setting") from error


def raise_if_refused(error: Exception, path: object) -> None:
    """For a handler that takes an OSError for a missing or damaged file, as libraries mean it: raises EnvironmentFault if it is the
    operating system's own refusal, which says nothing about the file.
    """
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        raise _fault(error, path) from error


def _fault(error: OSError, path: object) -> EnvironmentFault:
    where = error.filename or path
    return EnvironmentFault(f"{where}: {error.strerror or error}; free space or fix the permission, then run again")


def leftovers(target: Path) -> Iterator[Path]:
    """What killed builders and writers of `target` left beside it."""
    return target.parent.glob(f"{glob.escape(f'.{target.name}.tmp-')}*")


def make_folder(path: Path) -> None:
    """Make it with those above it, each synced into its own parent: what is published in a folder whose name is lost is lost."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        fsync(path.parent)


def fsync(path: Path) -> None:
    """A file's content, or a folder's names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
