"""Several processes do what one would: order, events, errors; and none outlives its use."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cramlm.errors import DataError, EnvironmentFault
from cramlm.io.executors import Processes, SummedProgress
from cramlm.records import Emit, Event


def work(task: dict[str, Any], emit: Emit) -> Any:
    """What the tasks of these tests do, here or in a worker."""
    emit(Event("note", "test", str(task), data={"pid": os.getpid()}))
    time.sleep(task.get("sleep", 0))
    match task["do"]:
        case "square":
            return task["value"] ** 2
        case "print":
            print("this must not reach the results")
            return "printed"
        case "refuse":
            raise DataError(f"row {task['value']} is bad")
        case "break":
            return 1 // 0
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "mark":
            Path(task["value"]).touch()
    return None


WORK = f"{__name__}:work"


def silent(number: int, event: Event) -> None:
    pass


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_events_have_the_number_of_their_task(workers: int) -> None:
    tasks = [{"do": "square", "value": value, "sleep": 0.05 * (value == 0)} for value in range(8)]
    seen: list[tuple[int, Event]] = []
    assert Processes(workers).map(WORK, tasks, on_event=lambda number, event: seen.append((number, event))) == [n**2 for n in range(8)]
    assert sorted(number for number, _ in seen) == list(range(8))
    assert all(event.message == str(tasks[number]) for number, event in seen)
    assert (os.getpid() in {event.data["pid"] for _, event in seen}) == (workers == 1)


@pytest.mark.parametrize(("count", "message"), [("", "the last"), ("rows", "1,300 rows")])
def test_the_progress_of_concurrent_tasks_is_summed_and_only_their_warnings_and_notes_are_passed_on(count: str, message: str) -> None:
    seen: list[Event] = []
    progress = SummedProgress("test", total=10, unit="MB", emit=seen.append, count=count)
    rarely = SummedProgress("test", total=10, unit="MB", emit=seen.append, count=count, seconds=1e9)
    for on_event in (progress, rarely):
        on_event(0, Event("progress", "task", "first", done=1, data={"rows": 100}))
        on_event(1, Event("start", "task", "starts"))
        on_event(1, Event("warning", "task", "beware"))
        on_event(1, Event("progress", "task", "second", done=2, data={"rows": 1000}))
        on_event(0, Event("progress", "task", "the last", done=3, data={"rows": 300}))
    assert [event.done for event in seen if event.kind == "progress"] == [1, 3, 5]
    assert [event.kind for event in seen] == ["progress", "warning", "progress", "progress", "warning"]
    assert seen[3] == Event("progress", "test", message, done=5, total=10, unit="MB")


def test_a_worker_of_a_pool_which_may_start_no_processes_runs_the_tasks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert Processes(2).map(WORK, [{"do": "square", "value": value} for value in range(3)], on_event=silent) == [0, 1, 4]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_of_the_first_failed_task_is_raised(workers: int, tmp_path: Path) -> None:
    tasks = [
        {"do": "square", "value": 1, "sleep": 0.2},
        {"do": "refuse", "value": 1, "sleep": 0.2},
        {"do": "refuse", "value": 2},
        *({"do": "mark", "value": str(tmp_path / f"{n}"), "sleep": 0.1} for n in range(30)),
    ]
    with pytest.raises(DataError, match=r"^row 1 is bad$"):
        Processes(workers).map(WORK, tasks, on_event=silent)
    assert len(list(tmp_path.iterdir())) < 30  # what comes after it is not begun, or stopped


@pytest.mark.parametrize(
    ("do", "error", "message"),
    [("break", RuntimeError, r"(?s)Traceback.*ZeroDivisionError"), ("die", EnvironmentFault, r"ended by signal 9.*out of memory")],
)
def test_an_internal_error_has_its_traceback_and_a_killed_worker_is_an_environment_fault(
    do: str, error: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message):
        Processes(2).map(WORK, [{"do": "print"}, {"do": do}], on_event=silent)
    assert capfd.readouterr().out == ""  # output of workers is kept out of stdout


def test_outcomes_come_when_they_are_there_and_a_killed_worker_ends_no_other_task() -> None:
    tasks = [{"do": "square", "value": 3, "sleep": 0.5}, {"do": "die"}, {"do": "refuse", "value": 2}, {"do": "square", "value": 4}]
    found = list(Processes(2, remedy="try").outcomes(WORK, tasks, on_event=silent))
    assert found[0][0] == 1
    shown = [str(outcome) for _, outcome in sorted(found, key=lambda each: each[0])]
    assert shown == ["9", "a worker process was ended by signal 9, possibly out of memory; try", "row 2 is bad", "16"]


@pytest.mark.faults
def test_a_worker_may_be_killed_after_another_task_has_failed() -> None:
    later = [{"do": "square", "value": 1, "sleep": 86_400}] * 30
    with pytest.raises(EnvironmentFault, match=r"ended by signal 9"):  # and no error in a thread of the pool, which pytest would report
        Processes(2).map(WORK, [{"do": "die", "sleep": 0.5}, {"do": "refuse", "value": 2}, *later], on_event=silent)


@pytest.mark.faults
def test_workers_end_if_the_caller_fails() -> None:
    pids: list[int] = []

    def refuse(number: int, event: Event) -> None:
        pids.append(event.data["pid"])
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - the one above
        Processes(2).map(WORK, [{"do": "square", "value": 1, "sleep": 86_400}] * 2, on_event=refuse)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


SCRIPT = """
import sys
from test_executors import WORK
from cramlm.io.executors import Processes, SummedProgress
tasks = [{"do": "square", "value": 1, "sleep": 86_400}] * 2
Processes(2).map(WORK, tasks, on_event=lambda number, event: print(event.data["pid"], flush=True))
"""


@pytest.mark.faults
def test_workers_end_if_their_parent_is_killed_and_need_no_main_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, "utf-8")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as script:
        pids = [int(script.stdout.readline()) for _ in range(2)]
        script.kill()
    for pid in pids:
        for _ in range(12_000):
            if not is_running(pid):
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"worker {pid} is left")


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
