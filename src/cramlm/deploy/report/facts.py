"""What a run's folder tells, read once: published stages, the log, and the task's texts again from its files.

A stage that is not there is None and the page says so. A folder that is no run, is damaged or of another format is an error, in one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from cramlm.artifacts import MANIFEST, Artifact, open_artifact
from cramlm.config import RunConfig, load_config, read_toml
from cramlm.data.task import read_task, task_fingerprint
from cramlm.errors import ArtifactError, CramError, UsageError
from cramlm.records import Example, Task

MOST_PASSAGES = 20_000  # of the selection, best first, that are searched for neighbours

Json: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class RunFacts:
    """A run as plain data.

    task: None if its files cannot be read or changed since; `task_trouble` then says which. stages: what is published, by folder name.
    passages: lines of selected.jsonl, at most MOST_PASSAGES. predictions: split -> lines of predictions-<split>.jsonl.
    phases: reports of the trained phases, by stage folder, in order. planned: the phases with their steps filled in.
    """

    path: Path
    config: RunConfig
    config_text: str
    events: tuple[Json, ...]
    stages: Mapping[str, Artifact]
    task: Task | None
    task_trouble: str
    plan: Json | None
    planned: Sequence[Json]
    baselines: Json | None
    selection: Json | None
    passages: tuple[Json, ...]
    phases: Mapping[str, Json]
    scores: Json | None
    predictions: Mapping[str, tuple[Json, ...]]
    provenance: Json | None

    @property
    def finished(self) -> bool:
        """Whether every stage, to the export, is published."""
        return self.provenance is not None

    @property
    def own_scores(self) -> Json:
        """Scores of the run's own model; empty if it was not evaluated."""
        return {} if self.scores is None else self.scores["models"].get(self.config.name, {})

    @property
    def split(self) -> str | None:
        """The split to look at errors on: test if there is one, else dev."""
        return next((split for split in ("test", "dev") if split in self.predictions), None)

    def examples(self) -> Mapping[str, Example]:
        """Every example of the task by id; empty without the task's files."""
        if self.task is None:
            return {}
        return {example.id: example for example in (*self.task.train, *self.task.dev, *self.task.test)}


def read_run(path: Path) -> RunFacts:
    """Everything that a page tells of the run at `path`.

    Raises:
        ArtifactError: if it is no run, was written by another version, or a stage is damaged. EnvironmentFault: if the disk refuses.
    """
    toml = path / "run.toml"
    if not toml.is_file():
        raise ArtifactError(f"{path}: not a run (no run.toml); pass a folder that `cramlm fit --out` wrote")
    try:
        config = load_config(read_toml(toml), origin=str(toml))
    except UsageError as error:
        raise ArtifactError(f"{path}: written by another version of cramlm ({error}); make its report with that version") from error
    phases = [f"phase-{place}-{phase.name}" for place, phase in enumerate(config.phases, start=1)]
    kinds = {name: name for name in ("baseline", "plan", "selection", "tokenizer", "schedule", "evaluation", "export")}
    kinds |= dict.fromkeys(phases, "phase")
    stages = {name: open_artifact(path / name, kind=kind) for name, kind in kinds.items() if (path / name / MANIFEST).is_file()}

    def of(stage: str, file: str) -> Json | None:
        return _checked(path / stage / file, _one) if stage in stages else None

    task, trouble = _read_task(config, stages)
    schedule = of("schedule", "schedule.json") or {}
    facts = RunFacts(
        path=path,
        config=config,
        config_text=toml.read_text("utf-8"),
        events=_events(path / "events.jsonl"),
        stages=stages,
        task=task,
        task_trouble=trouble,
        plan=of("plan", "plan.json"),
        planned=schedule.get("phases", ()),
        baselines=of("baseline", "baselines.json"),
        selection=of("selection", "report.json"),
        passages=_checked(path / "selection/selected.jsonl", lambda file: _lines(file, MOST_PASSAGES)) if "selection" in stages else (),
        phases={name: report for name in phases if (report := of(name, "phase.json")) is not None},
        scores=of("evaluation", "scores.json"),
        predictions={
            split: _checked(file, _lines)
            for split in ("dev", "test")
            if "evaluation" in stages and (file := path / "evaluation" / f"predictions-{split}.jsonl").is_file()
        },
        provenance=of("export", "provenance.json"),
    )
    if facts.scores is not None and config.name not in facts.scores["models"]:
        raise ArtifactError(f"{path}: evaluation and run.toml are of different runs; run `cramlm fit` there again")
    return facts


def _read_task(config: RunConfig, stages: Mapping[str, Artifact]) -> tuple[Task | None, str]:
    """The task as the run saw it, or None and why not."""
    try:
        task = read_task(config.task, seed=config.seed)
    except (CramError, OSError) as error:
        return None, f"the task's files cannot be read any more ({error})"
    used = next((stage.key["task"] for name in ("evaluation", "baseline") if (stage := stages.get(name)) is not None), None)
    if used is not None and task_fingerprint(task) != used:
        return None, "the task's files have changed since the run"
    return task, ""


def _events(path: Path) -> tuple[Json, ...]:
    """The log's events in order. A last line cut short by a killed run is left out; the log is for looking at, nothing rests on it."""
    events = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and {"time", "kind", "stage", "data"} <= event.keys():
                    events.append(event)
    except FileNotFoundError:
        return ()
    return tuple(events)


def _one(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _lines(path: Path, most: int | None = None) -> tuple[Json, ...]:
    with path.open(encoding="utf-8") as file:
        return tuple(json.loads(line) for line in islice(file, most))


def _checked(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged ({error}); delete its folder and run `cramlm fit` again") from error
