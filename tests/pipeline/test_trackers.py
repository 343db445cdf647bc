"""Experiment trackers: the real libraries, each skipped where it is not installed (TensorBoard is, for developers)."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cramlm.config.run import RunConfig, load_config
from cramlm.errors import EnvironmentFault, UsageError
from cramlm.pipeline.run_folder import begin_record
from cramlm.pipeline.trackers import follow, open_tracker, replay
from cramlm.records import Event, silent
from cramlm.storage.artifacts import publish
from jsonl import write_jsonl
from tiny_task import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")  # raised inside the trackers

PATHS = {name: f"{name}.jsonl" for name in ("train", "dev", "test", "corpus")}
EVENTS = [
    Event("start", "phase-1-joint"),
    Event("step", "phase-1-joint", data={"step": 5, "loss": 3.5, "mlm": 3.0, "learning_rate": {"muon": 0.01}}),
    Event("step", "phase-1-joint", data={"step": 10, "loss": 2.5}),
    Event("step", "phase-1-joint", data={"step": 10, "loss": 2.25}),  # once more, after a stop
    Event("evaluation", "phase-1-joint", data={"step": 10, "best": True, "scores": {"macro_f1": 0.75}}),
]


@pytest.fixture
def config() -> RunConfig:
    return load_config(tiny_config(PATHS))


@pytest.fixture
def run(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a run that trackers read. Trackers write below `tmp_path`."""
    folder = tmp_path / "mine"
    folder.mkdir()
    confirm = begin_record(folder, config)
    lines = [{"time": 1.0, "kind": event.kind, "stage": event.stage, "message": "", "data": event.data} for event in EVENTS]
    write_jsonl(folder / "events.jsonl", lines)
    test = {"accuracy": 0.5, "macro_f1": 0.5, "micro_f1": 0.5}
    baseline = {"c": 1.0, "weights": "balanced", "dev": test, "features": 7, "seconds": 0.1, "tried": []}
    models = {"tlm": {"test": test, "dev": None}, "tfidf-words": baseline}
    scores = json.dumps({"models": models}).encode()
    write = lambda target: (target / "scores.json").write_bytes(scores)  # noqa: E731
    confirm(publish(folder / "evaluation", kind="evaluation", key={"format": 1}, write=write))
    for name, value in (
        ("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}"),
        ("MLFLOW_ALLOW_FILE_STORE", "true"),
        ("WANDB_MODE", "offline"),
        ("WANDB_SILENT", "true"),
        ("TRACKIO_DIR", str(tmp_path / "trackio")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return folder


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


EXPECTED = {
    "phase-1-joint/loss": [(5, 3.5), (10, 2.25)],
    "phase-1-joint/mlm": [(5, 3.0)],
    "phase-1-joint/dev_macro_f1": [(10, 0.75)],
    "final/tlm/test_accuracy": [(0, 0.5)],
    "final/tfidf-words/dev_accuracy": [(0, 0.5)],
}


def test_tensorboard_gets_the_events_of_a_run_and_no_scores_of_other_settings(run: Path, config: RunConfig) -> None:
    pytest.importorskip("tensorboard")
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"time": 2.0, "kind": "st')  # by a process that was killed
    assert replay("tensorboard", run, silent) == 3
    found = tensorboard_scalars(run)
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert found["phase-1-joint/learning_rate/muon"][0][0] == 5
    shutil.rmtree(run / "tensorboard")
    begin_record(run, config.model_copy(update={"seed": 99}))
    replay("tensorboard", run, silent)
    assert not [name for name in tensorboard_scalars(run) if name.startswith("final/")]


def test_steps_of_other_settings_and_of_a_longer_training_before_are_not_sent(run: Path, config: RunConfig) -> None:
    pytest.importorskip("tensorboard")
    log = run / "events.jsonl"

    def losses(losses: dict[int, float]) -> None:
        events = [
            {"time": 3.0, "kind": "step", "stage": "phase-1-joint", "message": "", "data": {"step": n, "loss": losses[n]}} for n in losses
        ]
        write_jsonl(log, [*map(json.loads, log.read_text("utf-8").splitlines()), *events])

    def tracked() -> list[tuple[int, float]]:
        shutil.rmtree(run / "tensorboard", ignore_errors=True)
        replay("tensorboard", run, silent)
        return tensorboard_scalars(run)["phase-1-joint/loss"]

    losses({5: 1.5})  # trained again on other texts, so far for 5 steps
    assert tracked() == [(5, 1.5)]
    assert "phase-1-joint/dev_macro_f1" not in tensorboard_scalars(run)
    begin_record(run, config.model_copy(update={"seed": 99}))
    losses({3: 0.5})
    assert tracked() == [(3, 0.5)]


def test_tensorboard_has_each_point_once_after_the_same_command_again(run: Path, config: RunConfig) -> None:
    pytest.importorskip("tensorboard")
    with follow("tensorboard", run, config, silent) as emit:
        for event in EVENTS:
            emit(event)
    for _ in range(2):
        replay("tensorboard", run, silent)
        found = tensorboard_scalars(run)
        assert {name: found[name] for name in EXPECTED} == EXPECTED


def test_a_running_fit_is_tracked(run: Path, config: RunConfig) -> None:
    pytest.importorskip("tensorboard")
    events: list[Event] = []
    with follow("tensorboard", run, config, events.append) as emit:
        for event in EVENTS:
            emit(event)
    assert events == EVENTS
    assert tensorboard_scalars(run)["phase-1-joint/loss"] == [(5, 3.5), (10, 2.5), (10, 2.25)]


def test_mlflow_gets_scalars_and_settings(run: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    replay("mlflow", run, silent)
    (found,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("cramlm").experiment_id])
    for name, points in EXPECTED.items():
        history = mlflow.MlflowClient().get_metric_history(found.info.run_id, name)
        assert [(point.step, point.value) for point in history] == points
    assert found.data.params["task.train"] == "train.jsonl"
    assert found.info.run_name == "mine"


def test_trackio_gets_scalars(run: Path, tmp_path: Path) -> None:
    import sqlite3

    pytest.importorskip("trackio")
    replay("trackio", run, silent)
    with sqlite3.connect(next((tmp_path / "trackio").rglob("cramlm.db"))) as database:
        rows = [(step, json.loads(metrics)) for step, metrics in database.execute("select step, metrics from metrics order by id")]
    for name, points in EXPECTED.items():
        assert [(step, metrics[name]) for step, metrics in rows if name in metrics] == points


def test_weights_and_biases_works_offline(run: Path) -> None:
    pytest.importorskip("wandb")
    replay("wandb", run, silent)
    (log,) = (run / "wandb").glob("offline-run-*/*.wandb")
    assert b"phase-1-joint/loss" in log.read_bytes()


def test_a_missing_tracker_package_gives_one_line_with_the_command(run: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # None: importing it raises ImportError
    with pytest.raises(EnvironmentFault, match=r"^wandb: .*; pip install wandb$"):
        replay("wandb", run, silent)
    with (
        pytest.raises(EnvironmentFault, match=r"^--report-to wandb: .*; pip install wandb, or drop --report-to$"),
        follow("wandb", run, config, silent),
    ):
        pass
    with pytest.raises(UsageError, match="tensorboard, wandb, mlflow, trackio"):
        open_tracker("visdom", run, config)
    with pytest.raises(UsageError, match="holds no events"):
        replay("tensorboard", run / "evaluation", silent)


def test_a_failing_tracker_gives_a_warning_and_the_run_continues(run: Path, config: RunConfig) -> None:
    pytest.importorskip("tensorboard")
    events: list[Event] = []
    with follow("tensorboard", run, config, events.append) as emit:
        emit(Event("step", "phase-1-joint", data={"step": 10**30, "loss": 1.0}))  # no 64-bit step: the library raises
        emit(EVENTS[1])
    assert [event.kind for event in events] == ["step", "warning", "step"]
    assert "cramlm track RUN tensorboard" in events[1].message
    assert not [thread for thread in threading.enumerate() if "Writer" in type(thread).__name__], "it is closed"
