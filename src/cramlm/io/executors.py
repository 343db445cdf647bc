"""Where tasks run: in this process, in several processes of this machine, or on a Ray cluster.

    executor.map("package.module:function", tasks, on_event) ─► function(task, emit) for each task ─► results, in the order of the tasks

Tasks and results are plain JSON. Large data are in files that tasks name; every task leaves a published folder, so that a task that is done
is not repeated, and two processes that run the same task do no harm. Hence results do not depend on which process ran a task, on the number
of processes, or on kills. All machines need a shared file system with equal paths; only tasks are sent.

The processes are a `concurrent.futures.ProcessPoolExecutor` with the spawn method. What it lacks is here: events while a task runs; the
error of the first task in order; one line when a worker is killed; workers that remove half-written folders when they are terminated,
ignore Ctrl-C, do not import the caller's script, and end when their parent process is gone.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, Protocol, TypeAlias

from cramlm import errors
from cramlm.errors import CramError, EnvironmentFault
from cramlm.records import Emit, Event

OnEvent: TypeAlias = Callable[[int, Event], None]
Function: TypeAlias = Callable[[Any, Emit], Any]
_Result: TypeAlias = dict[str, Any]
_CLEANING_SECONDS: Final = 10.0
_EVENT_SECONDS: Final = 0.05  # between two looks for events
RETRIES: Final = 3  # of a Ray task whose worker or machine died
_CONNECT_SECONDS: Final = 10.0


class Executor(Protocol):
    """Runs a function over tasks."""

    def map(self, function: str, tasks: Sequence[Any], *, on_event: OnEvent) -> list[Any]:
        """`function(task, emit)` for every task; the results in the order of the tasks. Safe to repeat: what is done is kept.

        function: "package.module:name". on_event: gets the number of the task and its event, in this process and thread.

        Raises:
            CramError: that of a task that failed. EnvironmentFault: a worker was killed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of this machine; with 1 everything happens in this one. A killed worker ends the call with one line."""

    workers: int = 1

    def map(self, function: str, tasks: Sequence[Any], *, on_event: OnEvent) -> list[Any]:
        return run_tasks(function, tasks, workers=self.workers, on_event=on_event)


@dataclass(frozen=True, slots=True)
class RayTasks:
    """Tasks of one core each on the Ray cluster that this process is connected to. A task whose worker dies is given to another one, up
    to `RETRIES` times. Of a task's progress only the last word is told, when it is done.
    """

    def map(self, function: str, tasks: Sequence[Any], *, on_event: OnEvent) -> list[Any]:
        import ray

        settings = {"num_cpus": 1, "max_retries": RETRIES, "scheduling_strategy": "SPREAD"}
        remote = ray.remote(_attempt).options(**settings)
        here = str(Path.cwd())  # paths in tasks may be relative to it
        waiting = {remote.remote(function, json.dumps(task), here): number for number, task in enumerate(tasks)}
        results: dict[int, Any] = {}
        try:
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                number = waiting.pop(done)
                try:
                    answer = json.loads(ray.get(done))
                except ray.exceptions.RayError as error:
                    reason = str(error).strip().partition("\n")[0]
                    raise EnvironmentFault(
                        f"Ray gave up a task ({reason}); see to its machines and run again: what is done is kept"
                    ) from error
                for event in answer["events"]:
                    on_event(number, Event(**event))
                results[number] = unwrap(answer)
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)
        return [results[number] for number in range(len(tasks))]


@contextmanager
def executor_for(ray: str | None, workers: int | None) -> Iterator[Executor]:
    """A Ray cluster if there is an address, else processes, by default one per core. Raises as `connect_ray`."""
    if ray is None:
        yield Processes(workers or available_cores())
    else:
        with connect_ray(ray) as executor:
            yield executor


@contextmanager
def connect_ray(address: str) -> Iterator[RayTasks]:
    """An executor on a Ray cluster. address: "auto" (the one this machine belongs to), host:port, or "local" (one is started here).

    Raises:
        EnvironmentFault: if Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise EnvironmentFault('Ray is not installed; run: pip install "cramlm[ray]"') from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False if address == "local" else None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise EnvironmentFault(f"no Ray cluster at {address!r} ({reason}); start one with `ray start --head`, or pass local") from error
    try:
        yield RayTasks()
    finally:
        ray.shutdown()


class SummedProgress:
    """A `OnEvent` that adds up the progress of tasks that run side by side; of what else they say it hands on warnings and notes."""

    def __init__(self, stage: str, *, total: float, unit: str, emit: Emit) -> None:
        self._stage, self._total, self._unit, self._emit = stage, total, unit, emit
        self._done: dict[int, float] = {}

    def __call__(self, task: int, event: Event) -> None:
        if event.kind == "progress":
            self._done[task] = event.done
            done = sum(self._done.values())
            self._emit(Event("progress", self._stage, event.message, done=done, total=self._total, unit=self._unit))
        elif event.kind in ("warning", "note"):
            self._emit(event)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(function: str, tasks: Sequence[Any], *, workers: int, on_event: OnEvent) -> list[Any]:
    """`function(task, emit)` for every task; the results, in the order of the tasks.

    function: "package.module:name". Tasks and results are plain JSON. workers: processes; with 1 everything happens in this one.
    on_event: gets the number of the task and its event, in this process and thread.

    Raises:
        CramError: that of the first task that fails, in the order of the tasks: whatever fails later is as if it had not been begun.
        EnvironmentFault: a worker was killed.
    """
    if workers < 2 or len(tasks) < 2:
        call = import_function(function)
        return [call(task, partial(on_event, number)) for number, task in enumerate(tasks)]
    context = multiprocessing.get_context("spawn")
    events = context.SimpleQueue()
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, initializer=_begin, initargs=(events,))
    processes: list[BaseProcess] = []
    try:
        with _starting_workers():
            futures = [pool.submit(_work, function, number, task) for number, task in enumerate(tasks)]
        processes = list(pool._processes.values())  # public only as terminate_workers, from Python 3.14 on
        return _results(futures, events, on_event)
    except BrokenProcessPool as error:
        pool.shutdown()
        raise _killed(processes) from error
    except BaseException:
        _end(processes or list((pool._processes or {}).values()))
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _results(futures: Sequence[Future[_Result]], events: Any, on_event: OnEvent) -> list[Any]:
    pending = set(futures)
    failures: dict[int, Exception] = {}
    results: dict[int, Any] = {}
    limit = len(futures)  # the first task that failed: what comes after it is of no interest
    while pending & set(futures[:limit]):
        done, pending = wait(pending, _EVENT_SECONDS, return_when=FIRST_COMPLETED)
        while not events.empty():
            number, event = events.get()
            on_event(number, Event(**event))
        for number, future in enumerate(futures[:limit]):
            if future in done:
                try:
                    results[number] = unwrap(future.result())
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


def _work(function: str, number: int, task: Any) -> _Result:
    """A task in a worker."""

    def emit(event: Event) -> None:
        if _leaving.is_set():  # Python dropped the exception, as it does where a generator is finalised
            raise SystemExit
        _events.put((number, {name: getattr(event, name) for name in Event.__dataclass_fields__}))

    try:
        return run_task(import_function(function), task, emit)
    finally:
        if _leaving.is_set():
            os._exit(0)  # the pool would catch SystemExit and give the next task


def import_function(function: str) -> Function:
    """The function that "package.module:name" names."""
    module, _, name = function.partition(":")
    found: Function = getattr(importlib.import_module(module), name)
    return found


def run_task(call: Function, task: Any, emit: Emit) -> _Result:
    """What becomes of a task, result or error, as plain JSON for `unwrap`."""
    try:
        result = call(task, emit)
        json.dumps(result)
        return {"result": result}
    except CramError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception:
        return {"error": "RuntimeError", "message": f"in a worker process:\n{traceback.format_exc()}"}


def unwrap(message: _Result) -> Any:
    """The result of a task, or its error raised anew."""
    if "error" in message:
        raise getattr(errors, message["error"], RuntimeError)(message["message"])
    return message["result"]


def _attempt(function: str, task: str, folder: str) -> str:
    """In a Ray worker: the run_task of a task as JSON, with what it said."""
    os.chdir(folder)
    said: list[Event] = []

    def keep(event: Event) -> None:
        if event.kind == "progress" and said and said[-1].kind == "progress":
            said.pop()
        said.append(event)

    answer = run_task(import_function(function), json.loads(task), keep)
    return json.dumps({**answer, "events": [asdict(event) for event in said]})
