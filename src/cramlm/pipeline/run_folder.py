"""A run's folder as a whole: which one a run gets, whose results are in it, and which of its stages belong together.

    run.toml        the config of the last call
    stages.json     the stages that this call found up to date or built, as hashes of their keys (`Record`)
    events.jsonl    the events of all calls

A stage that is published but not recorded is of an earlier call with other settings, or of a call that was stopped: it says nothing about
run.toml. What is up to date is decided in one place, by `artifacts.stage`; the record holds what it decided.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from cramlm.config.run import RunConfig, TaskConfig, load_config, read_toml, to_toml
from cramlm.data.task import KIND as TASK
from cramlm.data.task import load_task, task_fingerprint
from cramlm.errors import ArtifactError, UsageError, brief
from cramlm.io.paths import is_remote
from cramlm.records import Emit, Event, Task
from cramlm.storage.artifacts import MANIFEST, Artifact, hash_json, lock, open_artifact, publish_file, wait_while_locked

RUNS: Final = Path("runs")
CONFIG, RECORD, EVENTS, EXPORT = "run.toml", "stages.json", "events.jsonl", "export"
_KEYED_BY_TASK: Final = (TASK, "evaluation", "baseline")  # stages whose key holds the task's fingerprint
_NAMELESS: Final = re.compile(r"(train|training|data)(?![a-z]).*", re.IGNORECASE)  # files that are named after their folder
_LONGEST_NAME: Final = 60
_MOST_LABELS: Final = 4


@dataclass(frozen=True, slots=True)
class Record:
    """What the last call did in a run's folder. config: sha256 of run.toml. train: the training file, local ones as absolute paths.
    first_event: lines that events.jsonl had when this config was first run here. stages: sha256 of the key, by folder name.
    """

    config: str
    train: str
    first_event: int
    stages: Mapping[str, str]

    @property
    def finished(self) -> bool:
        """Return True if the last call went through all stages."""
        return EXPORT in self.stages

    def confirms(self, artifact: Artifact) -> bool:
        """Return True if the last call found this stage up to date, or built it."""
        return self.stages.get(artifact.path.name) == hash_json(artifact.key)


class Recorder:
    """Writes the record of a call, stage by stage. `begin` makes one."""

    def __init__(self, folder: Path, record: Record) -> None:
        self._folder, self._record, self._stages = folder, record, dict(record.stages)

    @staticmethod
    def begin(folder: Path, config: RunConfig) -> Recorder:
        """Write run.toml and an empty record; call only under the lock of the run."""
        toml = to_toml(config).encode()
        digest = hashlib.sha256(toml).hexdigest()
        known = None
        with suppress(ArtifactError):
            known = read_record(folder)
        first = known.first_event if known is not None and known.config == digest else _count_lines(folder / EVENTS)
        recorder = Recorder(folder, Record(digest, _place_of(config.task), first, {}))
        recorder._write()  # before run.toml: a record of another config confirms nothing
        publish_file(folder / CONFIG, toml)
        return recorder

    def confirm(self, artifact: Artifact) -> None:
        """Add a stage of this run; stages in the store belong to no run."""
        if artifact.path.parent == self._folder:
            self._stages[artifact.path.name] = hash_json(artifact.key)
            self._write()

    def _write(self) -> None:
        record = {**asdict(self._record), "stages": self._stages}
        publish_file(self._folder / RECORD, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


@dataclass(slots=True)
class EventLog:
    """events.jsonl of a run: a JSON line for each event but progress. Events before `begin` are held back: the folder may be refused."""

    _held: list[str] = field(default_factory=list)
    _path: Path | None = None

    def begin(self, folder: Path) -> None:
        """Write to this folder from now on, first what was held back."""
        self._path = folder / EVENTS
        self._append("".join(self._held))

    def around(self, emit: Emit) -> Emit:
        """Return an `Emit` that logs an event and passes it on."""

        def both(event: Event) -> None:
            if event.kind != "progress":
                line = json.dumps({"time": round(time.time(), 3), **asdict(event)}, ensure_ascii=False) + "\n"
                if self._path is None:
                    self._held.append(line)
                else:
                    self._append(line)
            emit(event)

        return both

    def _append(self, lines: str) -> None:
        assert self._path is not None
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)


def read_record(folder: Path) -> Record | None:
    """Return the record of the last call in a run's folder; None if there is none.

    Raises:
        ArtifactError: if it is damaged.
    """
    path = folder / RECORD
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        record = Record(str(data["config"]), str(data["train"]), int(data["first_event"]), dict(data["stages"]))
        toml = (folder / CONFIG).read_bytes()
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: damaged ({error}); run `cramlm fit` there again, which writes it anew") from error
    return record if hashlib.sha256(toml).hexdigest() == record.config else Record(record.config, record.train, record.first_event, {})


def is_up_to_date(folder: Path, name: str) -> bool:
    """Return True if the stage in this folder of a run is published and belongs to run.toml."""
    record = read_record(folder)
    return record is not None and (folder / name / MANIFEST).is_file() and record.confirms(open_artifact(folder / name, kind=name))


def folder_for(config: RunConfig, task: Task, *, root: Path = RUNS, emit: Emit) -> Path:
    """Return ROOT/<task>-<recipe>-<n>: the newest one with this config and task, so that an equal call continues; else a new one.

    A new folder holds run.toml when this returns, so that no other process takes it.
    """
    stem = f"{name_of_task(config.task.train)}-{_plain(config.name) or 'run'}"
    numbered = re.compile(rf"{re.escape(stem)}-(\d+)")

    def choose() -> Path:
        with lock(root / "runs"):
            numbers = sorted(int(match[1]) for path in root.iterdir() if (match := numbered.fullmatch(path.name)) is not None)
            for number in reversed(numbers):
                if _is_of(root / f"{stem}-{number}", config, task):
                    emit(Event("note", "run", f"{root / f'{stem}-{number}'} (continued)"))
                    return root / f"{stem}-{number}"
            folder = root / f"{stem}-{numbers[-1] + 1 if numbers else 1}"
            publish_file(folder / CONFIG, to_toml(config).encode())
            emit(Event("note", "run", f"{folder} (new)"))
            return folder

    return wait_while_locked(choose, stage="run", emit=emit)


def refuse_other_task(folder: Path, config: RunConfig, task: Task) -> None:
    """Refuse a folder that holds a run on another task: its labels and weights would be replaced.

    The task is the same if kind and labels are, and the training texts or the name of their file. A file that grew is the same task.

    Raises:
        UsageError: if it is another one. ArtifactError: if the folder is damaged.
    """
    there, here = _fingerprint_of(folder), task_fingerprint(task)
    if there is None:
        return
    remedy = "pass another --out, or --overwrite to replace that run"
    if any(there.get(name) != here.get(name) for name in ("kind", "labels")):
        old = f" ({_answers(load_task(folder))})" if (folder / TASK / MANIFEST).is_file() else ""
        raise UsageError(f"{folder}: holds a run with other labels{old}, {config.task.train} has {_answers(task)}; {remedy}")
    if there["train"] == here["train"]:
        return
    place = None
    with suppress(ArtifactError):  # of a damaged record the next one takes the place
        place = None if (record := read_record(folder)) is None else record.train
    if place != _place_of(config.task):
        raise UsageError(f"{folder}: holds a run on other training texts ({place or 'of another file'}); {remedy}")


def name_of_task(train: str) -> str:
    """Return a short name for a task: its training file's, or that of the folder where the file is just called train."""
    place = re.sub(r"[?#].*", "", train.partition("://")[2]) if is_remote(train) else _absolute(train)
    *folders, file = [part for part in place.split("/") if part] or [""]
    stem = file.partition(".")[0]
    chosen = folders[-1] if folders and (not stem or _NAMELESS.fullmatch(stem)) else stem
    return _plain(chosen) or "task"


def _plain(name: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", name).strip("-.")[:_LONGEST_NAME]


def _is_of(folder: Path, config: RunConfig, task: Task) -> bool:
    try:
        if load_config(read_toml(folder / CONFIG)) != config:
            return False
        there = _fingerprint_of(folder)
    except (UsageError, ArtifactError):  # no run, of another version, or damaged: it stays as it is
        return False
    return there is None or there == task_fingerprint(task)


def _fingerprint_of(folder: Path) -> Mapping[str, str] | None:
    """Of the task whose results lie in the folder; None if there are none."""
    for name in _KEYED_BY_TASK:
        if (folder / name / MANIFEST).is_file():
            fingerprint: Mapping[str, str] = open_artifact(folder / name, kind=name).key["task"]
            return fingerprint
    return None


def _place_of(task: TaskConfig) -> str:
    return task.train if is_remote(task.train) else _absolute(task.train)


def _absolute(path: str) -> str:
    """As the user named it, from the root: links stay."""
    return os.path.normpath(Path(path).absolute())


def _answers(task: Task) -> str:
    if task.kind == "regression":
        return f"numbers named {brief(task.labels[0])}"
    shown = ", ".join(brief(label) for label in task.labels[:_MOST_LABELS])
    return f"{shown} and {len(task.labels) - _MOST_LABELS} more" if len(task.labels) > _MOST_LABELS else shown


def _count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)
