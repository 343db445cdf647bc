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
from cramlm.io.machine import available_cores
from cramlm.records import Emit, Event

OnEvent: TypeAlias = Callable[[int, Event], None]
Function: TypeAlias = Callable[[Any, Emit], Any]
_Result: TypeAlias = dict[str, Any]
_CLEANING_SECONDS: Final = 10.0
_EVENT_SECONDS: Final = 0.05  # between two polls for events
RETRIES: Final = 3  # of a Ray task after its worker or machine died
_CONNECT_SECONDS: Final = 10.0


class Executor(Protocol):
    """Interface: run a function over tasks."""

    def map(self, function: str, tasks: Sequence[Any], *, on_event: OnEvent) -> list[Any]:
        """Return the results of `function(task, emit)` for every task, in order. Safe to repeat: finished tasks are not repeated.

        function: "package.module:name". on_event: called with the number of a task and its event, in this process and thread.

        Raises:
            CramError: the error of a failed task. EnvironmentFault: if a worker was killed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Processes:
    """Run tasks in `workers` processes of this machine; with 1, and in a worker of `multiprocessing.Pool`, in this process. Raises the
    error of the first failed task in order.
    """

    workers: int = 1

    def map(self, function: str, tasks: Sequence[Any], *, on_event: OnEvent) -> list[Any]:
        if self.workers < 2 or len(tasks) < 2 or multiprocessing.current_process().daemon:  # which may have no children
            call = import_function(function)
            return [call(task, partial(on_event, number)) for number, task in enumerate(tasks)]
        context = multiprocessing.get_context("spawn")
        events = context.SimpleQueue()
        pool = ProcessPoolExecutor(min(self.workers, len(tasks)), context, initializer=_begin, initargs=(events,))
        processes: dict[int, BaseProcess] = {}

        def submit(number: int) -> Future[_Result]:
            with _starting_workers():
                future = pool.submit(_work, function, number, tasks[number])
            processes.update(pool._processes)  # public only as terminate_workers, from Python 3.14 on
            return future

        try:
            return _results(submit, len(tasks), 2 * self.workers, events, on_event)
        except BrokenProcessPool as error:
            pool.shutdown()
            raise _killed(list(processes.values())) from error
        except BaseException:
            _end(list(processes.values()))
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class RayTasks:
    """Run tasks of one core each on the Ray cluster that this process is connected to.

    A task whose worker dies is retried up to `RETRIES` times. Events are passed on when a task is done; of its progress only the last.
    """

    def map(self, function: str, tasks: Sequence[Any], *, on_event: OnEvent) -> list[Any]:
        import ray

        settings = {"num_cpus": 1, "max_retries": RETRIES, "scheduling_strategy": "SPREAD"}
        remote = ray.remote(_run_in_ray).options(**settings)
        here = str(Path.cwd())  # paths in tasks may be relative to it
        waiting = {remote.remote(function, json.dumps(task), here): number for number, task in enumerate(tasks)}
        results: dict[int, Any] = {}
        try:
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                number = waiting.pop(done)
                try:
                    message = json.loads(ray.get(done))
                except ray.exceptions.RayError as error:
                    reason = str(error).strip().partition("\n")[0]
                    raise EnvironmentFault(
                        f"Ray could not finish a task ({reason}); check its machines and run again; finished tasks are kept"
                    ) from error
                for event in message["events"]:
                    on_event(number, Event(**event))
                results[number] = unwrap(message)
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)
        return [results[number] for number in range(len(tasks))]


@contextmanager
def executor_for(ray: str | None, workers: int | None) -> Iterator[Executor]:
    """Yield an executor on a Ray cluster if there is an address, else on processes, by default one per core. Raises as `connect_ray`."""
    if ray is None:
        yield Processes(workers or available_cores())
    else:
        with connect_ray(ray) as executor:
            yield executor


@contextmanager
def connect_ray(address: str) -> Iterator[RayTasks]:
    """Yield an executor on a Ray cluster. address: "auto" (the cluster of this machine), host:port, or "local" (start one here).

    Raises:
        EnvironmentFault: if Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise EnvironmentFault('Ray is not installed; run: pip install "cramlm[ray]"') from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray itself retries for minutes
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
    """An `OnEvent` that emits the summed progress of concurrent tasks, and their warnings and notes."""

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


def _results(submit: Callable[[int], Future[_Result]], count: int, window: int, events: Any, on_event: OnEvent) -> list[Any]:
    """Return the results of tasks 0 to `count` - 1, of which at most `window` are submitted at a time.

    No future is cancelled: up to Python 3.11, `concurrent.futures` fails in its own thread if a worker dies while a cancelled task waits.
    """
    pending: dict[Future[_Result], int] = {}
    failures: dict[int, Exception] = {}
    results: dict[int, Any] = {}
    limit = count  # the first failed task; later tasks do not matter
    submitted = 0
    while submitted < limit or any(number < limit for number in pending.values()):
        while submitted < limit and len(pending) < window:
            pending[submit(submitted)] = submitted
            submitted += 1
        done, _ = wait(pending, _EVENT_SECONDS, return_when=FIRST_COMPLETED)
        while not events.empty():
            number, event = events.get()
            on_event(number, Event(**event))
        for future in done:
            number = pending.pop(future)
            try:
                results[number] = unwrap(future.result())
            except BrokenProcessPool:
                raise
            except Exception as failure:
                failures[number] = failure
        limit = min(failures, default=limit)
    if failures:
        raise failures[limit]
    return [results[number] for number in range(count)]


def _end(processes: Sequence[BaseProcess]) -> None:
    """Terminate the workers and wait for their cleanup."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_CLEANING_SECONDS)
        if process.is_alive():
            process.kill()


def _killed(processes: Sequence[BaseProcess]) -> EnvironmentFault:
    """Return the error for a broken pool, which has terminated its remaining workers by SIGTERM."""
    codes = [process.exitcode for process in processes if process.exitcode not in (None, 0, -signal.SIGTERM)]
    code = codes[0] if codes and codes[0] is not None else -signal.SIGTERM
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    return EnvironmentFault(
        f"a worker process was ended {how}, possibly out of memory; run again with fewer workers; finished tasks are kept"
    )


@contextmanager
def _starting_workers() -> Iterator[None]:
    """Inside the block, new processes do not import the caller's `__main__` and ignore Ctrl-C."""
    main, mask = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_leaving = threading.Event()
_events: Any = None  # in a worker: the queue of events to the parent process


def _begin(events: Any) -> None:
    """Initialise a worker."""
    global _events
    _events = events
    os.setsid()  # detach from the terminal's signals
    os.dup2(2, 1)  # output of a worker must not mix with the command's results
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _leave(number: int, frame: FrameType | None) -> None:
    if not _leaving.is_set():  # only once, to not interrupt the cleanup
        _leaving.set()
        raise SystemExit


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent process"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # the main thread stops and cleans up


def _work(function: str, number: int, task: Any) -> _Result:
    """Run a task in a worker."""

    def emit(event: Event) -> None:
        if _leaving.is_set():  # Python ignores SystemExit while it finalises a generator
            raise SystemExit
        _events.put((number, {name: getattr(event, name) for name in Event.__dataclass_fields__}))

    try:
        return run_task(import_function(function), task, emit)
    finally:
        if _leaving.is_set():
            os._exit(0)  # the pool would catch SystemExit and run the next task


def import_function(function: str) -> Function:
    """Return the function "package.module:name"."""
    module, _, name = function.partition(":")
    result: Function = getattr(importlib.import_module(module), name)
    return result


def run_task(call: Function, task: Any, emit: Emit) -> _Result:
    """Run a task; return its result or error as plain JSON for `unwrap`."""
    try:
        result = call(task, emit)
        json.dumps(result)
        return {"result": result}
    except CramError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception:
        return {"error": "RuntimeError", "message": f"in a worker process:\n{traceback.format_exc()}"}


def unwrap(message: _Result) -> Any:
    """Return the result of a task, or raise its error."""
    if "error" in message:
        raise getattr(errors, message["error"], RuntimeError)(message["message"])
    return message["result"]


def _run_in_ray(function: str, task: str, folder: str) -> str:
    """Run a task in a Ray worker; return its result or error, and its events, as JSON."""
    os.chdir(folder)
    events: list[Event] = []

    def keep(event: Event) -> None:
        if event.kind == "progress" and events and events[-1].kind == "progress":
            events.pop()
        events.append(event)

    message = run_task(import_function(function), json.loads(task), keep)
    return json.dumps({**message, "events": [asdict(event) for event in events]})
