"""One function over many tasks in several processes, with the events, errors and end that one process would have.

    run_tasks ─► task, as a line of JSON ─► worker: function(task, emit) ─► events and results, as lines of JSON ─► run_tasks

Workers are fresh interpreters that import the function's module and nothing else: not the caller's script (which need not guard its main
part), not torch. They see neither Ctrl-C nor other signals to the terminal's group; they end, leaving no half-written folder, when
`run_tasks` ends them or when the process that started them is gone, however that happened. A start costs about 0.3 s of CPU time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import Any, Final, NoReturn, TypeAlias

from cramlm import errors
from cramlm.errors import CramError, EnvironmentFault
from cramlm.records import Emit, Event

Tell: TypeAlias = Callable[[int, Event], None]
Function: TypeAlias = Callable[[Any, Emit], Any]
_CLEANING_SECONDS: Final = 10.0


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(function: str, tasks: Sequence[Any], *, workers: int, tell: Tell) -> list[Any]:
    """`function(task, emit)` for every task; the results, in the order of the tasks.

    function: "package.module:name". Tasks and results are plain JSON. workers: processes; with 1 everything happens in this one.
    tell: gets the number of the task and its event, in this process and thread.

    Raises:
        CramError: that of the first task that fails, in the order of the tasks: whatever fails later is as if it had not been begun.
        EnvironmentFault: a worker was killed.
    """
    if workers < 2 or len(tasks) < 2:
        call = resolve(function)
        return [call(task, partial(tell, number)) for number, task in enumerate(tasks)]
    pool = _Pool(function, tasks, tell)
    try:
        return pool.run(min(workers, len(tasks)))
    finally:
        pool.stop()


class _Worker:
    """A process and the thread that hands on what it says; `task` is the number of the one in work."""

    def __init__(self, function: str, said: queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]]) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from cramlm.data.workers import serve; serve({function!r})"
        self.task: int | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True, encoding="utf-8"
        )
        self._said = said
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def give(self, number: int, task: Any) -> None:
        self.task = number
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone; the listener says so
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.terminate()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self) -> None:
        try:
            self.process.wait(_CLEANING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put((self, json.loads(line)))
        self._said.put((self, None))


class _Pool:
    """The workers of one call of `run_tasks`."""

    def __init__(self, function: str, tasks: Sequence[Any], tell: Tell) -> None:
        self._function, self._tasks, self._tell = function, tasks, tell
        self._said: queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._given = 0
        self._limit = len(tasks)  # the first task that failed: what comes after it is of no interest
        self._failure: Exception | None = None
        self._results: dict[int, Any] = {}

    def run(self, workers: int) -> list[Any]:
        for _ in range(workers):
            self._workers.append(_Worker(self._function, self._said))
            self._give(self._workers[-1])
        while len(self._results) < self._limit:
            worker, message = self._said.get()
            if worker.task is None or worker.task > self._limit:
                continue  # the last words of one that was ended
            if message is None:
                self._fail(worker, _killed(worker.process.wait()))
            elif "event" in message:
                self._tell(worker.task, Event(**message["event"]))
            else:
                try:
                    self._results[worker.task] = result_of(message)
                except Exception as failure:
                    self._fail(worker, failure)
                else:
                    self._give(worker)
        if self._failure is not None:
            raise self._failure
        return [self._results[number] for number in range(self._limit)]

    def stop(self) -> None:
        """End every process and wait until it has cleaned up."""
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.wait()

    def _give(self, worker: _Worker) -> None:
        worker.task = None
        if self._given < self._limit:
            worker.give(self._given, self._tasks[self._given])
            self._given += 1

    def _fail(self, worker: _Worker, failure: Exception) -> None:
        assert worker.task is not None
        self._limit, self._failure = worker.task, failure
        worker.task = None
        for number in [number for number in self._results if number > self._limit]:
            del self._results[number]
        for other in self._workers:
            if other.task is not None and other.task > self._limit:
                other.end()


def serve(function: str) -> NoReturn:
    """The life of a worker: tasks from stdin, events and results to stdout, both one JSON value per line."""
    leaving = threading.Event()

    def leave(number: int, frame: FrameType | None) -> None:
        if not leaving.is_set():  # the first time only: what cleans up is not to be disturbed
            leaving.set()
            raise SystemExit

    def answer(message: dict[str, Any]) -> None:
        if leaving.is_set():  # Python dropped the exception, as it does where a generator is finalised
            raise SystemExit
        try:
            answers.write(json.dumps(message) + "\n")
        except BrokenPipeError as error:
            raise SystemExit from error

    signal.signal(signal.SIGTERM, leave)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # whatever prints must not get between the answers
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(tasks,), daemon=True).start()
    call = resolve(function)
    try:
        while (task := tasks.get()) is not None:
            answer(outcome(call, task, lambda event: answer({"event": asdict(event)})))
    finally:
        os._exit(0)  # at once: the thread that waits for tasks holds stdin


def _receive(tasks: queue.SimpleQueue[Any]) -> None:
    for line in sys.stdin:
        tasks.put(json.loads(line))
    tasks.put(None)
    os.kill(os.getpid(), signal.SIGTERM)  # who gave the tasks is gone: the main thread stops in its work, and cleans up


def resolve(function: str) -> Function:
    """The function that "package.module:name" names."""
    module, _, name = function.partition(":")
    found: Function = getattr(importlib.import_module(module), name)
    return found


def outcome(call: Function, task: Any, emit: Emit) -> dict[str, Any]:
    """What becomes of a task, result or error, as plain JSON for `result_of`."""
    try:
        result = call(task, emit)
        json.dumps(result)
        return {"result": result}
    except CramError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception:
        return {"error": "RuntimeError", "message": f"in a worker process:\n{traceback.format_exc()}"}


def result_of(message: dict[str, Any]) -> Any:
    """The result of a task, or its error raised anew."""
    if "error" in message:
        raise getattr(errors, message["error"], RuntimeError)(message["message"])
    return message["result"]


def _killed(code: int) -> EnvironmentFault:
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    return EnvironmentFault(f"a worker process was ended {how}, short of memory? Run again, with fewer workers; what is done is kept")
