"""Where tasks run: in this process, in several processes of this machine, or on a Ray cluster.

    executor.map("package.module:function", tasks, tell) ─► function(task, emit) for each, somewhere ─► results, in the order of the tasks

Tasks and results are plain JSON. What is large is in files that tasks name; every task leaves a published folder, so that one done is not
done again, and two that do the same do no harm. Hence no result depends on who worked, how many there were, or how often one was killed.
All machines see the same files under the same paths (a shared file system); nothing is sent but tasks.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from cramlm.errors import EnvironmentFault
from cramlm.io.workers import Tell, available_cores, outcome, resolve, result_of, run_tasks
from cramlm.records import Emit, Event

RETRIES: Final = 3  # of a Ray task whose worker or machine died
_CONNECT_SECONDS: Final = 10.0


class Executor(Protocol):
    """Runs a function over tasks."""

    def map(self, function: str, tasks: Sequence[Any], *, tell: Tell) -> list[Any]:
        """`function(task, emit)` for every task; the results in the order of the tasks. Safe to repeat: what is done is kept.

        function: "package.module:name". tell: gets the number of the task and its event, in this process and thread.

        Raises:
            CramError: that of a task that failed. EnvironmentFault: a worker was killed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of this machine (io/workers.py); with 1 everything happens in this one. A killed worker ends the call with one line."""

    workers: int = 1

    def map(self, function: str, tasks: Sequence[Any], *, tell: Tell) -> list[Any]:
        return run_tasks(function, tasks, workers=self.workers, tell=tell)


@dataclass(frozen=True, slots=True)
class RayTasks:
    """Tasks of one core each on the Ray cluster that this process is connected to. A task whose worker dies is given to another one, up
    to `RETRIES` times. Of a task's progress only the last word is told, when it is done.
    """

    def map(self, function: str, tasks: Sequence[Any], *, tell: Tell) -> list[Any]:
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
                    tell(number, Event(**event))
                results[number] = result_of(answer)
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


class Tally:
    """A `Tell` that adds up the progress of tasks that run side by side; of what else they say it hands on warnings and notes."""

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


def _attempt(function: str, task: str, folder: str) -> str:
    """In a Ray worker: the outcome of a task as JSON, with what it said."""
    os.chdir(folder)
    said: list[Event] = []

    def keep(event: Event) -> None:
        if event.kind == "progress" and said and said[-1].kind == "progress":
            said.pop()
        said.append(event)

    answer = outcome(resolve(function), json.loads(task), keep)
    return json.dumps({**answer, "events": [asdict(event) for event in said]})
