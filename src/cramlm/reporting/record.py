"""The run record: the contents of a run's folder as plain data (published stages, event log, copy of the task).

A missing stage is None. A folder that is not a run, is damaged, or has another format raises ArtifactError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

from cramlm.config.run import RunConfig, load_config, read_toml
from cramlm.data.task import KIND as TASK
from cramlm.data.task import load_task
from cramlm.errors import ArtifactError, UsageError
from cramlm.evaluation.confidence import ConfidenceFile
from cramlm.pipeline.run_folder import RECORD, StageRecord, read_events, read_record
from cramlm.recipes.describe import phase_stages, stages_of
from cramlm.records import COMBINED, Example, Task
from cramlm.retrieval.selection import SelectionTable
from cramlm.storage.artifacts import MANIFEST, Artifact, open_artifact

LINEAR_STAGES: Final = {"static": "static", "bayes": "bayes", "tfidf": "baseline"}
"""Name of each linear model -> the stage that fits it."""
MAX_PASSAGES = 20_000  # passages of the selection, best rank first, that are searched for nearest passages
TASK_MISSING = "the run has no copy of the task; run the same `cramlm fit` again to add it"

Json: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run as plain data.

    task: None before the run has read it. stages: published stages of `config` by folder name. stale: names of published stages of other
    settings. fits: fit.json of each exported linear model by its name. passages: rows of the selection, at most MAX_PASSAGES. phases:
    reports of the trained phases by folder name, in order. predictions: split -> predictions of the model `predictor`. confidence: of each
    model; None before the evaluation, and unless each text has one label.
    """

    path: Path
    config: RunConfig
    config_text: str
    events: tuple[Json, ...]
    stages: Mapping[str, Artifact]
    stale: tuple[str, ...]
    task: Task | None
    plan: Json | None
    fits: Mapping[str, Json]
    selection: Json | None
    passages: tuple[Json, ...]
    phases: Mapping[str, Json]
    scores: Json | None
    predictions: Mapping[str, tuple[Json, ...]]
    confidence: ConfidenceFile | None
    provenance: Json | None

    @property
    def finished(self) -> bool:
        """True if every stage including the export is published for this config."""
        return self.provenance is not None

    @property
    def models(self) -> Mapping[str, Json]:
        """Scores by model name, the model of the run first; empty before the evaluation."""
        return {} if self.scores is None else self.scores["models"]

    @property
    def own_scores(self) -> Json:
        """Scores of the model of the run; empty before the evaluation."""
        return self.models.get(self.config.name, {})

    @property
    def predictor(self) -> str:
        """Name of the model that predicts by default: the combination if the run has one."""
        return COMBINED if COMBINED in self.models else self.config.name

    @property
    def predictor_scores(self) -> Json:
        """Scores of the model that predicts by default; empty before the evaluation."""
        return self.models.get(self.predictor, {})

    @property
    def others(self) -> Mapping[str, Json]:
        """Scores of the models that do not predict by default, by name; empty before the evaluation."""
        return {name: entry for name, entry in self.models.items() if name != self.predictor}

    @property
    def cross_fitted(self) -> Mapping[str, float]:
        """Cross-fitted dev scores by model name, which the verdict compares; empty before the evaluation."""
        return {} if self.scores is None else self.scores["comparison"]["cross_fitted"]

    @property
    def split(self) -> str | None:
        """The split for the error analysis: test if there is one, else dev; None without predictions."""
        return next((split for split in ("test", "dev") if split in self.predictions), None)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds from the start of each stage to its last event, summed over all starts of the run."""
        return self._spent("time")

    @cached_property
    def cpu_seconds(self) -> Mapping[str, float]:
        """As `seconds`, of CPU time."""
        return self._spent("cpu")

    @property
    def share_outside_training(self) -> float | None:
        """Share of the CPU time of all stages that is not of a phase; None if nothing was trained."""
        total, training = sum(self.cpu_seconds.values()), sum(self.cpu_seconds.get(name, 0.0) for name in self.phases)
        return 1 - training / total if training > 0 else None

    def _spent(self, clock: str) -> Mapping[str, float]:
        last: dict[str, float] = {}  # time of the last event of each stage in this start of the run
        ended: set[str] = set()
        spent: dict[str, float] = {}
        for event in self.events:
            stage, kind, now = str(event["stage"]), event["kind"], float(event[clock])
            if kind == "start" and stage == "task":
                last.clear()
            begins = kind == "start" and (stage not in last or stage in ended)
            if stage in last and not begins:
                spent[stage] = spent.get(stage, 0.0) + now - last[stage]
            if stage in last or kind == "start":
                last[stage] = now
            if kind == "done":
                ended.add(stage)
            elif kind == "start":
                ended.discard(stage)
        return spent

    @property
    def starts(self) -> int:
        """Number of starts of the run."""
        return sum(event["stage"] == "task" and event["kind"] == "start" for event in self.events)

    def events_of(self, stage: str, kind: str) -> list[Json]:
        """Return `data` of a phase's events of one kind by increasing step; after a resume, later events replace earlier ones."""
        kept: list[Json] = []
        for event in self.events:
            if event["stage"] == stage and event["kind"] == kind and "step" in event["data"]:
                while kept and kept[-1]["step"] >= event["data"]["step"]:
                    kept.pop()
                kept.append(event["data"])
        return kept

    def examples(self) -> Mapping[str, Example]:
        """Return the examples of the task by id."""
        if self.task is None:
            return {}
        return {example.id: example for example in (*self.task.train, *self.task.dev, *self.task.test)}


def read_run(path: Path) -> RunRecord:
    """Read the run at `path`.

    Raises:
        ArtifactError: if it is not a run, was written by another version, or a stage is damaged. EnvironmentFault: if it cannot be read.
    """
    toml = path / "run.toml"
    if not toml.is_file():
        raise ArtifactError(f"{path}: not a run (no run.toml); pass the output folder of `cramlm fit`")
    try:
        config = load_config(read_toml(toml), origin=str(toml))
    except UsageError as error:
        raise ArtifactError(f"{path}: written by another version of cramlm ({error}); write its report with that version") from error
    phases = phase_stages(config)
    kinds = {name: name for name in (*stages_of(config), *(f"{model}-on-dev" for model in LINEAR_STAGES))} | dict.fromkeys(phases, "phase")
    published = {name: open_artifact(path / name, kind=kind) for name, kind in kinds.items() if (path / name / MANIFEST).is_file()}
    record = read_record(path)
    if published and record is None:
        raise ArtifactError(f"{path}: no {RECORD}, written by an earlier version of cramlm; run the same `cramlm fit` again")
    stages = {name: artifact for name, artifact in published.items() if record is not None and record.confirms(artifact)}

    def of(stage: str, file: str) -> Json | None:
        return _checked(path / stage / file, _one) if stage in stages else None

    scores = of("evaluation", "scores.json")
    suffix = f"-{COMBINED}" if scores is not None and COMBINED in scores["models"] else ""
    return RunRecord(
        path=path,
        config=config,
        config_text=toml.read_text("utf-8"),
        events=_events(path, record, stages),
        stages=stages,
        stale=tuple(name for name in published if name not in stages),
        task=load_task(path) if TASK in stages else None,
        plan=of("plan", "plan.json"),
        fits={name: fit for name, stage in LINEAR_STAGES.items() if (fit := of(f"{name}-on-dev", "fit.json") or of(stage, "fit.json"))},
        selection=of("selection", "report.json"),
        passages=tuple(SelectionTable(stages["selection"]).rows(MAX_PASSAGES)) if "selection" in stages else (),
        phases={name: report for name in phases if (report := of(name, "phase.json")) is not None},
        scores=scores,
        predictions={
            split: _checked(file, _lines)
            for split in ("dev", "test")
            if "evaluation" in stages and (file := path / "evaluation" / f"predictions-{split}{suffix}.jsonl").is_file()
        },
        confidence=ConfidenceFile.load(path / "evaluation") if "evaluation" in stages else None,
        provenance=of("export", "provenance.json"),
    )


def task_used(stages: Mapping[str, Artifact]) -> Mapping[str, str]:
    """Return the fingerprints of the splits that a run read; without test before the evaluation, empty before the baseline."""
    return next((stage.key["task"] for name in ("evaluation", "baseline") if (stage := stages.get(name)) is not None), {})


def _events(folder: Path, record: StageRecord | None, stages: Collection[str]) -> tuple[Json, ...]:
    """Return the events of the log in order, without steps of other settings (before `record.first_event`, phases not in `stages`)."""
    first = 0 if record is None else record.first_event
    return tuple(
        event
        for number, event in read_events(folder)
        if number >= first or event["kind"] not in ("step", "evaluation") or event["stage"] in stages
    )


def _one(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _lines(path: Path) -> tuple[Json, ...]:
    with path.open(encoding="utf-8") as file:
        return tuple(map(json.loads, file))


def _checked(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged ({error}); delete its folder and run `cramlm fit` again") from error
