"""What the tests of published folders share: folders of two versions, and ways to fail."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cramlm.records import Event
from cramlm.storage.artifacts import publish
from cramlm.storage.locks import lock

OLD, NEW = {"version": 1}, {"version": 2}


def writer(content: str) -> Callable[[Path], None]:
    """Writes three files that all hold `content`, one of them in a subfolder with a name that is not ASCII."""

    def write(folder: Path) -> None:
        (folder / "a.txt").write_text(content)
        (folder / "größe").mkdir()
        (folder / "größe" / "b.txt").write_text(content)
        (folder / "empty.txt").touch()

    return write


def publish_version(target: Path, key: dict[str, Any]) -> None:
    publish(target, kind="thing", key=key, write=writer(f"content {key['version']}"))


def contents(target: Path) -> set[str]:
    return {path.read_text() for path in (target / "a.txt", target / "größe" / "b.txt")}


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # the child must never return into pytest
            os._exit(getattr(error, "exit_code", 99))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class ReleasedWhenWaitedFor:
    """Holds the lock of a folder, as another process that builds it would, until an event reports that someone waits for it.

    Call it as an `Emit`; `notes` are the messages of the events.
    """

    def __init__(self, target: Path) -> None:
        self.notes: list[str] = []
        self._held = contextlib.ExitStack()
        self._held.enter_context(lock(target))

    def __call__(self, event: Event) -> None:
        if event.kind == "note":
            self.notes.append(event.message)
        if event.message == "waiting for another process":
            self._held.close()


def fail_at_call(number: int, failure: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but its call `number` (from 0) runs `failure` first."""
    calls = iter(range(10**6))

    def counted(*arguments: Any) -> Any:
        if next(calls) == number:
            failure()
        return function(*arguments)

    return counted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def break_disk() -> None:
    raise OSError(5, "Input/output error")
