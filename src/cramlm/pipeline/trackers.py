"""Experiment trackers: TensorBoard, Weights & Biases, MLflow or trackio (optional packages).

    event (step, evaluation) ─► scalars "phase/name" at the phase's step ─► tracker      at the end: final scores

`follow` tracks a run while it runs, `replay` sends the events.jsonl of a finished one. If a tracker fails during training, a warning is
emitted and tracking stops; the run continues. Each tracker reads project, server and keys from its own environment variables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from cramlm.config.run import RunConfig, load_config, read_toml
from cramlm.errors import EnvironmentFault, UsageError, first_line
from cramlm.evaluation.kinds import METRIC_NAMES
from cramlm.pipeline.run_folder import CONFIG, EVENTS, is_up_to_date, read_events, read_record
from cramlm.records import Emit, Event

PROJECT: Final = "cramlm"
TRACKERS: Final = ("tensorboard", "wandb", "mlflow", "trackio")
_LONGEST_PARAMETER = 500  # MLflow's limit in characters


@dataclass(frozen=True, slots=True)
class Tracker:
    """An open tracker. log: scalars by name ("phase/loss") at a step of their phase."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


@contextmanager
def follow(name: str | None, run: Path, config: RunConfig, emit: Emit) -> Iterator[Emit]:
    """Return an `emit` that also sends the scalars of each event to the tracker of this name (None = none) until the block ends.

    Raises:
        UsageError: if there is no such tracker. EnvironmentFault: if its package is missing, or it cannot start.
    """
    if name is None:
        yield emit
        return
    try:
        tracker = open_tracker(name, run, config)
    except EnvironmentFault as fault:
        raise EnvironmentFault(f"--report-to {fault}, or drop --report-to") from fault
    guarded = _Guarded(name, tracker, emit)

    def both(event: Event) -> None:
        emit(event)
        guarded.log_event(event)

    try:
        yield both
        guarded.log(final_scores(run), 0)
    finally:
        guarded.close()


def replay(name: str, run: Path, emit: Emit) -> int:
    """Send the events.jsonl of a run; return the number of points.

    Steps of other settings are left out. If a phase went back to an earlier step, because it continued from a checkpoint or was trained
    again, its later points of before are left out, too.

    Raises:
        UsageError: if there is no such tracker or no run. EnvironmentFault: if the package is missing, or the tracker fails. ArtifactError:
        if the record of the run is damaged.
    """
    if not (run / EVENTS).is_file():
        raise UsageError(f"{run}: holds no {EVENTS}; pass the folder of a run")
    config = load_config(read_toml(run / CONFIG), origin=str(run / CONFIG))
    record = read_record(run)
    kept: dict[str, list[tuple[int, bool, int, dict[str, float]]]] = {}  # by phase: step, is an evaluation, place in the log, values
    for number, event in read_events(run):
        stage, kind = event["stage"], event["kind"]
        if kind not in ("step", "evaluation") or "step" not in event["data"]:
            continue
        if record is None or number >= record.first_event or stage in record.stages:
            order, earlier = (event["data"]["step"], kind == "evaluation"), kept.setdefault(stage, [])  # an evaluation follows its step
            while earlier and earlier[-1][:2] >= order:
                earlier.pop()
            earlier.append((*order, number, scalars(Event(kind, stage, data=event["data"]))))
    points = sorted((point for of_phase in kept.values() for point in of_phase), key=lambda point: point[2])
    tracker = open_tracker(name, run, config, replaced_from=0)
    try:
        for step, _, _, values in points:
            tracker.log(values, step)
        tracker.log(final_scores(run), 0)
    except Exception as error:
        raise EnvironmentFault(f"{name}: failed ({first_line(error)}); see its own documentation") from error
    finally:
        tracker.close()
    emit(Event("done", "track", f"{len(points)} points to {name}"))
    return len(points)


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event, named "phase/name"."""
    if event.kind not in ("step", "evaluation") or "step" not in event.data:
        return {}
    values = event.data["scores"] if event.kind == "evaluation" else event.data
    prefix = f"{event.stage}/dev_" if event.kind == "evaluation" else f"{event.stage}/"
    numbers = {name: value for name, value in _leaves(values, "/") if isinstance(value, int | float) and not isinstance(value, bool)}
    return {prefix + name: float(value) for name, value in numbers.items() if name != "step"}


def final_scores(run: Path) -> dict[str, float]:
    """Dev and test scores of a finished run's models; empty if they belong to other settings than run.toml."""
    if not is_up_to_date(run, "evaluation"):
        return {}
    models = json.loads((run / "evaluation" / "scores.json").read_bytes())["models"]
    return {
        f"final/{model}/{split}_{metric}": float(scores[metric])
        for model, splits in models.items()
        for split in ("dev", "test", "test_leak_free")
        if (scores := splits.get(split)) is not None
        for metric in METRIC_NAMES
        if metric in scores
    }


def open_tracker(name: str, run: Path, config: RunConfig, *, replaced_from: int | None = None) -> Tracker:
    """Open a tracker; raise UsageError or EnvironmentFault like `follow`.

    replaced_from: points of earlier calls that TensorBoard keeps in the run's folder are replaced from this step on (None = all are kept);
    the other trackers make a new run for each call.
    """
    if name not in TRACKERS:
        raise UsageError(f"tracker {name!r}: is not one of {', '.join(TRACKERS)}; choose one of them")
    openers: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {
        "tensorboard": partial(_tensorboard, purge_step=replaced_from),
        "wandb": _wandb,
        "mlflow": _mlflow,
        "trackio": _trackio,
    }
    try:
        return openers[name](run, config.model_dump(mode="json"))
    except ImportError as error:
        raise EnvironmentFault(f"{name}: {first_line(error)}; pip install {name}") from error
    except Exception as error:
        raise EnvironmentFault(f"{name}: cannot start ({first_line(error)}); see its own documentation") from error


class _Guarded:
    """A tracker that gets nothing more after its first error."""

    def __init__(self, name: str, tracker: Tracker, emit: Emit) -> None:
        self._name, self._tracker, self._emit = name, tracker, emit
        self._works = True

    def log_event(self, event: Event) -> None:
        if values := scalars(event):
            self.log(values, event.data["step"])

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._try(lambda: self._tracker.log(values, step))

    def close(self) -> None:
        if self._works:
            self._try(self._tracker.close)
            return
        with suppress(Exception):  # its threads would go on writing; the error was reported
            self._tracker.close()

    def _try(self, call: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            call()
        except Exception as error:  # any error of four libraries and their networks: the run must continue
            self._works = False
            remedy = f"the run continues without it; later: cramlm track RUN {self._name}"
            self._emit(Event("warning", "track", f"{self._name} failed ({first_line(error)}); {remedy}"))


def _tensorboard(run: Path, config: dict[str, Any], *, purge_step: int | None) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=purge_step)
    writer.add_text("config", f"```json\n{json.dumps(config, indent=1, ensure_ascii=False)}\n```")

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def _wandb(run: Path, config: dict[str, Any]) -> Tracker:
    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    opened = wandb.init(project=project, name=run.name, dir=str(run), config=config)
    steps: set[str] = set()

    def log(values: Mapping[str, float], step: int) -> None:
        phases = {name.partition("/")[0] for name in values} - {"final"}
        for phase in sorted(phases - steps):
            opened.define_metric(f"{phase}/step")
            opened.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
            steps.add(phase)
        opened.log({**values, **{f"{phase}/step": step for phase in phases}})

    return Tracker(log, opened.finish)


def _mlflow(run: Path, config: dict[str, Any]) -> Tracker:
    import mlflow

    if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
        mlflow.set_experiment(PROJECT)
    mlflow.start_run(run_name=run.name)
    mlflow.log_params({name: str(value)[:_LONGEST_PARAMETER] for name, value in _leaves(config, ".")})
    return Tracker(lambda values, step: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


def _trackio(run: Path, config: dict[str, Any]) -> Tracker:
    import trackio

    trackio.init(project=PROJECT, name=run.name, config=config, embed=False)
    return Tracker(lambda values, step: trackio.log(dict(values), step=step), trackio.finish)


def _leaves(value: Any, separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its path, like phases.0.steps."""
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else None
    if inside is None:
        yield prefix, value
        return
    for name, inner in inside:
        yield from _leaves(inner, separator, f"{prefix}{separator}{name}" if prefix else str(name))
