"""One function over many tasks in a pool of processes, with the events, errors and end that one process would have.

The pool is `concurrent.futures.ProcessPoolExecutor` with the spawn method. What it lacks is here: events while a task runs; the error of
the first task in order; one line when a worker is killed; workers that remove half-written folders when they are ended, do not see Ctrl-C,
do not run the caller's script (which need not guard its main part), and end when the process that started them is gone.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from types import FrameType, ModuleType
from typing import Any, Final, TypeAlias

from cramlm import errors
from cramlm.errors import CramError, EnvironmentFault
from cramlm.records import Emit, Event

Tell: TypeAlias = Callable[[int, Event], None]
Function: TypeAlias = Callable[[Any, Emit], Any]
_Outcome: TypeAlias = dict[str, Any]
_CLEANING_SECONDS: Final = 10.0
_EVENT_SECONDS: Final = 0.05  # between two looks for events


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
    context = multiprocessing.get_context("spawn")
    events = context.SimpleQueue()
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, initializer=_begin, initargs=(events,))
    processes: list[BaseProcess] = []
    try:
        with _starting_workers():
            futures = [pool.submit(_work, function, number, task) for number, task in enumerate(tasks)]
        processes = list(pool._processes.values())  # public only as terminate_workers, from Python 3.14 on
        return _results(futures, events, tell)
    except BrokenProcessPool as error:
        pool.shutdown()
        raise _killed(processes) from error
    except BaseException:
        _end(processes or list((pool._processes or {}).values()))
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _results(futures: Sequence[Future[_Outcome]], events: Any, tell: Tell) -> list[Any]:
    pending = set(futures)
    failures: dict[int, Exception] = {}
    results: dict[int, Any] = {}
    limit = len(futures)  # the first task that failed: what comes after it is of no interest
    while pending & set(futures[:limit]):
        done, pending = wait(pending, _EVENT_SECONDS, return_when=FIRST_COMPLETED)
        while not events.empty():
            number, event = events.get()
            tell(number, Event(**event))
        for number, future in enumerate(futures[:limit]):
            if future in done:
                try:
                    results[number] = result_of(future.result())
                except BrokenProcessPool:
                    raise
                except Exception as failure:
                    failures[number] = failure
        if failures and min(failures) < limit:
            limit = min(failures)
            for future in futures[limit + 1 :]:
                future.cancel()
    if failures:
        raise failures[limit]
    return [results[number] for number in range(len(futures))]


def _end(processes: Sequence[BaseProcess]) -> None:
    """End the workers and wait until they have cleaned up."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_CLEANING_SECONDS)
        if process.is_alive():
            process.kill()


def _killed(processes: Sequence[BaseProcess]) -> EnvironmentFault:
    """The error for a pool that broke; the pool has ended the workers that were left by SIGTERM."""
    codes = [process.exitcode for process in processes if process.exitcode not in (None, 0, -signal.SIGTERM)]
    code = codes[0] if codes and codes[0] is not None else -signal.SIGTERM
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    return EnvironmentFault(f"a worker process was ended {how}, short of memory? Run again, with fewer workers; what is done is kept")


@contextmanager
def _starting_workers() -> Iterator[None]:
    """Processes that are started inside the block do not import the caller's `__main__`, and never receive Ctrl-C."""
    main, mask = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_leaving = threading.Event()
_events: Any = None  # of a worker: the queue to the process that started it


def _begin(events: Any) -> None:
    """Set up a worker."""
    global _events
    _events = events
    os.setsid()  # away from the terminal's signals
    os.dup2(2, 1)  # what a worker prints must not get into the results of the command
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _leave(number: int, frame: FrameType | None) -> None:
    if not _leaving.is_set():  # the first time only: what cleans up is not to be disturbed
        _leaving.set()
        raise SystemExit


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # the main thread stops in its work, and cleans up


def _work(function: str, number: int, task: Any) -> _Outcome:
    """A task in a worker."""

    def emit(event: Event) -> None:
        if _leaving.is_set():  # Python dropped the exception, as it does where a generator is finalised
            raise SystemExit
        _events.put((number, {name: getattr(event, name) for name in Event.__dataclass_fields__}))

    try:
        return outcome(resolve(function), task, emit)
    finally:
        if _leaving.is_set():
            os._exit(0)  # the pool would catch SystemExit and give the next task


def resolve(function: str) -> Function:
    """The function that "package.module:name" names."""
    module, _, name = function.partition(":")
    found: Function = getattr(importlib.import_module(module), name)
    return found


def outcome(call: Function, task: Any, emit: Emit) -> _Outcome:
    """What becomes of a task, result or error, as plain JSON for `result_of`."""
    try:
        result = call(task, emit)
        json.dumps(result)
        return {"result": result}
    except CramError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception:
        return {"error": "RuntimeError", "message": f"in a worker process:\n{traceback.format_exc()}"}


def result_of(message: _Outcome) -> Any:
    """The result of a task, or its error raised anew."""
    if "error" in message:
        raise getattr(errors, message["error"], RuntimeError)(message["message"])
    return message["result"]
