"""The folder of a run: its name, its record, its events, and the check that it belongs to the same task.

    run.toml        the config of the last call
    stages.json     the record of the last call: hashes of the keys of the stages that it built or kept (`StageRecord`)
    events.jsonl    the events of all calls
    usage.json      the cost of each call, in an experiment

A published stage that is not in the record comes from a call with other settings, or from an interrupted one, and does not belong to
run.toml. `stages.stage` alone decides what is up to date; the record stores its decisions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from cramlm.config.run import RunConfig, TaskConfig, load_config, read_toml, to_toml
from cramlm.data.task import KIND as TASK
from cramlm.data.task import load_task, task_fingerprint
from cramlm.errors import ArtifactError, UsageError, brief
from cramlm.io.remote import is_remote
from cramlm.records import Emit, Event, Task
from cramlm.storage.artifacts import MANIFEST, Artifact, hash_json, open_artifact, publish_file, refuse_other_files
from cramlm.storage.locks import lock, lock_file, wait_while_locked

RUNS: Final = Path("runs")
CONFIG, RECORD, EVENTS, EXPORT, USAGE = "run.toml", "stages.json", "events.jsonl", "export", "usage.json"
_KEYED_BY_TASK: Final = (TASK, "evaluation", "baseline")  # stages whose key holds the task's fingerprint
_NAMELESS: Final = re.compile(r"(train|training|data)(?![a-z]).*", re.IGNORECASE)  # a task with such a file is named after the folder
_LONGEST_NAME: Final = 60
_MOST_LABELS: Final = 4


@dataclass(frozen=True, slots=True)
class StageRecord:
    """The record of the last call in a run's folder. config: sha256 of run.toml. train: training file, a local one as an absolute path.
    first_event: number of lines in events.jsonl when this config was first run here. stages: sha256 of each key, by folder name.
    """

    config: str
    train: str
    first_event: int
    stages: Mapping[str, str]

    @property
    def finished(self) -> bool:
        """Return True if the last call completed all stages."""
        return EXPORT in self.stages

    def confirms(self, artifact: Artifact) -> bool:
        """Return True if the last call built or kept this stage."""
        return self.stages.get(artifact.path.name) == hash_json(artifact.key)


def begin_record(folder: Path, config: RunConfig) -> Callable[[Artifact], None]:
    """Write run.toml and an empty record; return a function that adds a stage of this run to it. The caller holds the lock of the run."""
    toml = to_toml(config).encode()
    digest, earlier = hashlib.sha256(toml).hexdigest(), None
    with suppress(ArtifactError):
        earlier = read_record(folder)
    first = earlier.first_event if earlier is not None and earlier.config == digest else _count_lines(folder / EVENTS)
    stages: dict[str, str] = {}
    record = StageRecord(digest, train_path(config.task), first, stages)

    def write() -> None:
        publish_file(folder / RECORD, (json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n").encode())

    def confirm(artifact: Artifact) -> None:
        if artifact.path.parent == folder:  # others are in the store
            stages[artifact.path.name] = hash_json(artifact.key)
            write()

    write()  # before run.toml: the record of another config is ignored
    publish_file(folder / CONFIG, toml)
    return confirm


@dataclass(slots=True)
class EventLog:
    """events.jsonl of a run: a JSON line per event except progress. Events before `begin` are buffered, since the folder may be refused.

    time: Unix time. cpu: CPU seconds of the process and its finished children since it started.
    """

    _buffered: list[str] = field(default_factory=list)
    _path: Path | None = None

    def begin(self, folder: Path) -> None:
        """Write the buffered events to this folder, and all further ones."""
        self._path = folder / EVENTS
        self._append("".join(["\n" if _is_truncated(self._path) else "", *self._buffered]))

    def around(self, emit: Emit) -> Emit:
        """Return an `Emit` that logs each event and calls `emit`."""

        def both(event: Event) -> None:
            if event.kind != "progress":
                clocks = {"time": round(time.time(), 3), "cpu": round(sum(os.times()[:4]), 2)}
                line = json.dumps({**clocks, **asdict(event)}, ensure_ascii=False) + "\n"
                if self._path is None:
                    self._buffered.append(line)
                else:
                    self._append(line)
            emit(event)

        return both

    def _append(self, lines: str) -> None:
        assert self._path is not None
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)


def _is_truncated(log: Path) -> bool:
    """Return True if the last line of a log has no end, because its writer was killed. Reads one byte: the log of a night is long."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return file.read(1) not in (b"", b"\n")
    except FileNotFoundError:
        return False


def read_events(folder: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line number from 0, event) of the log of a run; nothing without a log. Lines that killed processes truncated are skipped."""
    try:
        with (folder / EVENTS).open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file):
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and {"time", "kind", "stage", "data"} <= event.keys():
                    yield number, event
    except FileNotFoundError:
        return


def read_record(folder: Path) -> StageRecord | None:
    """Return the record of the last call; None if there is none.

    Raises:
        ArtifactError: if it is damaged.
    """
    path = folder / RECORD
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        record = StageRecord(str(data["config"]), str(data["train"]), int(data["first_event"]), dict(data["stages"]))
        toml = (folder / CONFIG).read_bytes()
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: damaged ({error}); run `cramlm fit` there again, which rewrites it") from error
    return record if hashlib.sha256(toml).hexdigest() == record.config else StageRecord(record.config, record.train, record.first_event, {})


def is_up_to_date(folder: Path, name: str) -> bool:
    """Return True if this stage of a run is published and belongs to run.toml."""
    record = read_record(folder)
    return record is not None and (folder / name / MANIFEST).is_file() and record.confirms(open_artifact(folder / name, kind=name))


def folder_for(config: RunConfig, task: Task, *, emit: Emit) -> Path:
    """Return runs/<task>-<recipe>-<n>: the newest one with this config and task, which the same call continues; else a new one.

    A new folder contains run.toml on return, so that no other process takes it.
    """
    stem = f"{name_of_task(config.task.train)}-{_plain(config.name) or 'run'}"
    numbered = re.compile(rf"{re.escape(stem)}-(\d+)")

    def choose() -> Path:
        with lock(RUNS / "runs"):
            numbers = sorted(int(match[1]) for path in RUNS.iterdir() if (match := numbered.fullmatch(path.name)) is not None)
            for number in reversed(numbers):
                if _is_of(RUNS / f"{stem}-{number}", config, task):
                    emit(Event("note", "run", f"{RUNS / f'{stem}-{number}'} (continued)"))
                    return RUNS / f"{stem}-{number}"
            folder = RUNS / f"{stem}-{numbers[-1] + 1 if numbers else 1}"
            publish_file(folder / CONFIG, to_toml(config).encode())
            emit(Event("note", "run", f"{folder} (new)"))
            return folder

    return wait_while_locked(choose, stage="run", emit=emit)


def refuse_other_folder(folder: Path) -> None:
    """Refuse a folder with files that no run wrote: stages with their names would replace them.

    Raises:
        UsageError: if it is one.
    """
    refuse_other_files(folder, own=(CONFIG, RECORD, USAGE, lock_file(folder / "run").name), what="run of cramlm")


def refuse_other_task(folder: Path, config: RunConfig, task: Task) -> None:
    """Refuse a folder with a run on another task, whose labels and weights would be replaced.

    Tasks are the same if kind and labels are equal, and the training texts or their file. A file with new rows is the same task.

    Raises:
        UsageError: if it is another one. ArtifactError: if the folder is damaged.
    """
    old, new = _fingerprint_of(folder), task_fingerprint(task)
    if old is None:
        return
    remedy = "pass another --out, or --overwrite to replace that run"
    if (kind := old.get("kind", "classification")) != task.kind:  # the default kind is not in a fingerprint
        raise UsageError(f"{folder}: holds a run on a {kind} task, and {config.task.train} is read as a {task.kind} task; {remedy}")
    if old["labels"] != new["labels"]:
        labels = f" ({_brief_labels(load_task(folder))})" if (folder / TASK / MANIFEST).is_file() else ""
        raise UsageError(f"{folder}: holds a run with other labels{labels}, {config.task.train} has {_brief_labels(task)}; {remedy}")
    if old["train"] == new["train"]:
        return
    train = None
    with suppress(ArtifactError):  # a damaged record is rewritten by this call
        train = None if (record := read_record(folder)) is None else record.train
    if train != train_path(config.task):
        raise UsageError(f"{folder}: holds a run on other training texts ({train or 'of another file'}); {remedy}")


def name_of_task(train: str) -> str:
    """Return a short name for a task: that of its training file, or of the folder if the file is just called train."""
    path = re.sub(r"[?#].*", "", train.partition("://")[2]) if is_remote(train) else _absolute(train)
    *folders, file = [part for part in path.split("/") if part] or [""]
    stem = file.partition(".")[0]
    chosen = folders[-1] if folders and (not stem or _NAMELESS.fullmatch(stem)) else stem
    return _plain(chosen) or "task"


def _plain(name: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", name).strip("-.")[:_LONGEST_NAME]


def _is_of(folder: Path, config: RunConfig, task: Task) -> bool:
    try:
        if load_config(read_toml(folder / CONFIG)) != config:
            return False
        fingerprint = _fingerprint_of(folder)
    except (UsageError, ArtifactError):  # no run, of another version, or damaged
        return False
    return fingerprint is None or fingerprint == task_fingerprint(task)


def _fingerprint_of(folder: Path) -> Mapping[str, str] | None:
    """Fingerprint of the task whose results are in the folder; None if there are none."""
    for name in _KEYED_BY_TASK:
        if (folder / name / MANIFEST).is_file():
            fingerprint: Mapping[str, str] = open_artifact(folder / name, kind=name).key["task"]
            return fingerprint
    return None


def train_path(task: TaskConfig) -> str:
    """Return the training file, a local one as an absolute path."""
    return task.train if is_remote(task.train) else _absolute(task.train)


def _absolute(path: str) -> str:
    """Absolute path without resolving links."""
    return os.path.normpath(Path(path).absolute())


def _brief_labels(task: Task) -> str:
    if task.kind == "regression":
        return f"numbers named {brief(task.labels[0])}"
    shown = ", ".join(brief(label) for label in task.labels[:_MOST_LABELS])
    return f"{shown} and {len(task.labels) - _MOST_LABELS} more" if len(task.labels) > _MOST_LABELS else shown


def _count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)
