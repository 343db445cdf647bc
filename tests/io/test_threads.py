"""Threads that end at an error of any of them, and at a signal."""

from __future__ import annotations

import threading

import pytest

from cramlm.errors import Stopped
from cramlm.io.threads import Workers
from cramlm.records import Event


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_while_a_result_is_waited_for_ends_the_calls_at_their_next_part(threads: int) -> None:
    begun, ended = threading.Event(), threading.Event()

    def stop(event: Event) -> None:
        if begun.is_set():
            raise Stopped("stopped", exit_code=75)

    def endless() -> None:
        try:
            begun.set()
            while True:
                workers.go_on()
        finally:
            ended.set()

    workers = Workers(threads, emit=stop)
    workers.emit(Event("progress", "static"))
    with pytest.raises(Stopped), workers:
        workers.start(endless)()
    assert ended.is_set()


def test_waiting_for_a_call_raises_its_error() -> None:
    def fail() -> None:
        raise ValueError("no")

    with Workers(2) as workers:
        wait, other = workers.start(fail), workers.start(lambda: 1)
        assert other() == 1
        with pytest.raises(ValueError, match="no"):
            wait()


def test_the_last_progress_event_is_repeated() -> None:
    events: list[Event] = []
    workers = Workers(1, emit=events.append)
    workers.go_on()
    for kind in ("start", "progress", "note"):
        workers.emit(Event(kind, "static"))
    workers.go_on()
    assert [event.kind for event in events] == ["start", "progress", "note", "progress"]
