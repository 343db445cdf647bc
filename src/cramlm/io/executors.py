"""Where tasks run: in this process, in several processes of this machine, or on a Ray cluster.

    executor.map("package.module:function", tasks, on_event) ─► function(task, emit) for each task ─► results, in the order of the tasks

Tasks and results are plain JSON. Large data are in files that tasks name; every task leaves a published folder, so that a task that is done
is not repeated, and two processes that run the same task do no harm. Hence results do not depend on which process ran a task, on the number
of processes, or on kills. All machines need a shared file system with equal paths; only tasks are sent.

Each process is a `concurrent.futures.ProcessPoolExecutor` of one worker with the spawn method, so that a worker that is killed ends no
other. What it lacks is here: events while a task runs; the error of the first task in order; one line when a worker is killed; workers that
remove half-written folders when they are terminated, ignore Ctrl-C, do not import the caller's script, and end when their parent process is
gone.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, Protocol, TypeAlias

from cramlm import errors
from cramlm.errors import CramError, EnvironmentFault, first_line
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
    """Run tasks in `workers` processes of this machine; with 1, and in a worker of `multiprocessing.Pool`, `map` runs them in this process.

    remedy: what the error of a killed worker advises.
    """

    workers: int = 1
    remedy: str = "run again with fewer workers; finished tasks are kept"

    def map(self, function: str, tasks: Sequence[Any], *, on_event: OnEvent) -> list[Any]:
        """As `Executor.map`; raises the error of the first failed task in order."""
        if self.workers < 2 or len(tasks) < 2 or multiprocessing.current_process().daemon:  # which may have no children
            call = import_function(function)
            return [call(task, partial(on_event, number)) for number, task in enumerate(tasks)]
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        # The error of the first failed task is raised, so that no task after a failed one is begun.
        before_failures = itertools.takewhile(lambda number: number < min(failures, default=len(tasks)), range(len(tasks)))
        with closing(self.outcomes(function, tasks, on_event=on_event, numbers=before_failures)) as outcomes:
            for number, outcome in outcomes:
                (failures if isinstance(outcome, Exception) else results)[number] = outcome
                if failures and all(earlier in results for earlier in range(min(failures))):
                    raise failures[min(failures)]
        return [results[number] for number in range(len(tasks))]

    def outcomes(
        self, function: str, tasks: Sequence[Any], *, on_event: OnEvent, numbers: Iterable[int] | None = None
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield the number of each task and its result or error, as soon as it is done, whatever happens to the others. A worker that is
        killed is replaced; the error of its task is an EnvironmentFault. Closing the generator ends the workers.

        numbers: the tasks to begin, in order; None = all.
        """
        waiting = iter(range(len(tasks)) if numbers is None else numbers)
        workers = [_Worker() for _ in range(min(self.workers, len(tasks)))]
        idle = list(workers)
        running: dict[Future[_Result], tuple[int, _Worker]] = {}
        try:
            while True:
                while idle and (number := next(waiting, None)) is not None:
                    worker = idle.pop()
                    running[worker.submit(function, number, tasks[number])] = number, worker
                if not running:
                    return
                done, _ = wait(running, _EVENT_SECONDS, return_when=FIRST_COMPLETED)
                for _, worker in running.values():
                    worker.pass_events(on_event)
                for future in done:
                    number, worker = running.pop(future)
                    outcome: Any
                    try:
                        outcome = unwrap(future.result())
                    except BrokenProcessPool:
                        worker.close()
                        outcome = EnvironmentFault(f"a worker process was ended {worker.ended}, possibly out of memory; {self.remedy}")
                    except Exception as failure:
                        outcome = failure
                    idle.append(worker)
                    yield number, outcome
        except BaseException:
            _end([worker.process for worker in workers if worker.process is not None])
            raise
        finally:
            for worker in workers:
                worker.close()


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
                    remedy = "check its machines and run again; finished tasks are kept"
                    raise EnvironmentFault(f"Ray could not finish a task ({first_line(error)}); {remedy}") from error
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
        remedy = "start one with `ray start --head`, or pass local"
        raise EnvironmentFault(f"no Ray cluster at {address!r} ({first_line(error)}); {remedy}") from error
    try:
        yield RayTasks()
    finally:
        ray.shutdown()


class SummedProgress:
    """An `OnEvent` that emits the summed progress of concurrent tasks, and their warnings and notes.

    count: a number in the data of the tasks' events whose sum is the message; without it, the message is that of the last event.
    seconds: least time between two events of progress, and before the first.
    """

    def __init__(self, stage: str, *, total: float, unit: str, emit: Emit, count: str = "", seconds: float = 0.0) -> None:
        self._stage, self._total, self._unit, self._emit = stage, total, unit, emit
        self._count, self._seconds = count, seconds
        self._latest: dict[int, Event] = {}
        self._reported = time.monotonic()

    def __call__(self, task: int, event: Event) -> None:
        if event.kind in ("warning", "note"):
            self._emit(event)
        if event.kind != "progress":
            return
        self._latest[task] = event
        if (now := time.monotonic()) - self._reported >= self._seconds:
            self._reported = now
            events = self._latest.values()
            message = f"{sum(each.data[self._count] for each in events):,} {self._count}" if self._count else event.message
            done = sum(each.done for each in events)
            self._emit(Event("progress", self._stage, message, done=done, total=self._total, unit=self._unit))


class _Worker:
    """A process that runs one task at a time: started by the first, and again by the next after it was killed."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self._context = multiprocessing.get_context("spawn")
        self._pool: ProcessPoolExecutor | None = None
        self._events: Any = None  # of this process alone: it may be killed while it holds the lock of the queue

    def submit(self, function: str, number: int, task: Any) -> Future[_Result]:
        if self.process is not None and not self.process.is_alive():
            self.close()
        if self._pool is None:
            self._events = self._context.SimpleQueue()
            self._pool = ProcessPoolExecutor(1, self._context, initializer=_begin, initargs=(self._events,))
        with _starting_workers():
            future = self._pool.submit(_work, function, number, task)
        (self.process,) = self._pool._processes.values()  # public only as terminate_workers, from Python 3.14 on
        return future

    def pass_events(self, on_event: OnEvent) -> None:
        while not self._events.empty():
            number, event = self._events.get()
            on_event(number, Event(**event))

    def close(self) -> None:
        """Wait for the end of the process, which has no task or was killed."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    @property
    def ended(self) -> str:
        """What ended the process of a pool that is closed."""
        code = -signal.SIGTERM if self.process is None or self.process.exitcode is None else self.process.exitcode
        return f"by signal {-code}" if code < 0 else f"with code {code}"


def _end(processes: Sequence[BaseProcess]) -> None:
    """Terminate the workers and wait for their cleanup."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_CLEANING_SECONDS)
        if process.is_alive():
            process.kill()


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


_working, _leaving = threading.Event(), threading.Event()  # in a worker: it has a task; it was told to end
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
    if not _working.is_set():
        os._exit(0)  # nothing is to be cleaned up, and the pool might catch SystemExit and wait for the next task
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

    _working.set()
    try:
        try:
            return run_task(import_function(function), task, emit)
        finally:
            _working.clear()
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
