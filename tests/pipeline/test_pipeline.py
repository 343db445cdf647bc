"""The whole method on a tiny task: what a run leaves, what runs again and why, and what each part may see."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from threadpoolctl import threadpool_info, threadpool_limits

from cramlm import recipes
from cramlm.config.run import RunConfig, TokenizerConfig, load_config, to_toml
from cramlm.data.task import read_task
from cramlm.errors import Stopped, UsageError
from cramlm.evaluation.kinds import KINDS
from cramlm.inference.predictor import Predictor
from cramlm.linear.model import LinearModel
from cramlm.model.tokenizer import Tokenizer, train_tokenizer
from cramlm.pipeline.context import Process, RunContext
from cramlm.pipeline.run import run
from cramlm.pipeline.stages.teacher import read_pieces
from cramlm.pipeline.stages.text import tokens_of_markers
from cramlm.planning.plan import plan
from cramlm.recipes.describe import stages_of
from cramlm.records import Event, counting
from cramlm.retrieval.selection import SelectionTable
from cramlm.storage.artifacts import hash_file, verify
from cramlm.text.markers import Markers
from jsonl import read_json, read_jsonl, write_jsonl
from tiny_task import TOPICS, quick, task_paths, tiny_config, write_task

WEIGHTS = "export/model.safetensors"


@dataclass(frozen=True)
class Finished:
    """A finished run, its store, and the data of its config."""

    run: Path
    store: Path
    config: dict[str, Any]

    def again(self, config: dict[str, Any]) -> list[Event]:
        """Fit `config` into the folder of the run; return the events."""
        return events_of(config, self.run, self.store)


@pytest.fixture(scope="module")
def finished(tiny_run: Path, session_run: Path) -> Finished:
    return Finished(tiny_run / "run", tiny_run / "store", tiny_config(task_paths(session_run / "data")))


@pytest.fixture
def copied(finished: Finished, copied_run: Path) -> Finished:
    """The same run in a folder of its own, to be changed."""
    return replace(finished, run=copied_run)


def shortened(config: dict[str, Any], steps: int = 2, **changes: Any) -> dict[str, Any]:
    """Return the config with phases of so few steps that only what surrounds training matters."""
    return {**config, "phases": [phase | {"steps": steps} for phase in config["phases"]], **changes}


def events_of(config: dict[str, Any], out: Path, store: Path) -> list[Event]:
    events: list[Event] = []
    run(load_config(config), out=out, store=store, emit=events.append)
    return events


def fit_and_stop(config: dict[str, Any], out: Path, store: Path, stage: str, *, after: int) -> None:
    """Start a run that is stopped once a phase has made so many steps."""
    seen: list[Event] = []
    boundaries = count()

    def stop() -> int | None:
        began = any(event.stage == stage and event.kind == "start" for event in seen)
        return 75 if began and next(boundaries) >= after else None

    with pytest.raises(Stopped) as stopped:
        run(load_config(config), out=out, store=store, emit=seen.append, process=Process(stop))
    assert stopped.value.exit_code == 75


def test_a_run_publishes_every_stage_and_a_model_that_learned_the_task(finished: Finished) -> None:
    folder = finished.run
    assert (folder / "run.toml").read_text("utf-8") == to_toml(load_config(finished.config))
    built = "task baseline plan selection tokenizer tokens embedding static bayes teacher schedule phase-1-joint phase-2-finetune"
    stages = [*built.split(), "logit-adjustment", "evaluation", "export"]
    assert all((folder / stage / "manifest.json").is_file() for stage in stages)
    stored = [manifest.parts[-3] for manifest in finished.store.glob("*/*/manifest.json")]
    assert {"parts", "corpora", "indexes"} <= set(stored)
    assert verify(folder) + verify(finished.store) == len(stages) + len(stored)
    scores = read_json(folder / "evaluation/scores.json")
    assert scores["models"]["tlm"]["test"]["accuracy"] > 0.8
    assert list(scores["models"]) == ["tlm", "combined", "static", "bayes", "tfidf"]
    assert all({"dev", "test", "fit"} <= set(scores["models"][name]) for name in ("static", "bayes", "tfidf"))
    assert set(scores["comparison"]["cross_fitted"]) == {"tfidf", "bayes", "static", "tlm", "combined"}
    assert scores["verdict"] == scores["comparison"]["text"]
    predictions = Predictor.load(folder / "export").predict(["wave ship harbour sailor", "summit ridge valley climber"])
    assert [prediction.label for prediction in predictions] == ["sea", "hill"]


def test_a_second_equal_call_builds_nothing_and_restores_pytorchs_number_of_threads(copied: Finished) -> None:
    before, threads = hash_file(copied.run / WEIGHTS), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        events = copied.again(copied.config)  # of a run on one thread
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert not [event for event in events if event.kind in ("start", "stale", "step") and event.stage != "task"]
    assert len([event for event in events if event.kind == "up_to_date"]) == 19
    assert hash_file(copied.run / WEIGHTS) == before


def test_a_run_parses_each_file_and_tokenizes_each_text_once(tmp_path: Path) -> None:
    done: Counter[tuple[str, str]] = Counter()

    def see(event: Event) -> None:
        if (event.stage, event.kind) == ("evaluation", "done"):  # the export is read back and compared with the model, on purpose
            done.update(counts)

    with counting() as counts:
        run(load_config(shortened(tiny_config(write_task(tmp_path / "data")))), out=tmp_path / "run", store=tmp_path / "store", emit=see)
    by_work = Counter(work for work, _ in done)
    assert by_work["parsed"] == 4
    assert by_work["tokenized"] > by_work["decoded"] == len(SelectionTable.open(tmp_path / "run/selection")) > 50
    assert {item: number for item, number in done.items() if number > 1} == {}


def test_stages_that_are_built_again_decode_the_passages_once(copied: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAMLM_STAGES_GB", "0")
    for stage in ("bayes", "teacher"):
        shutil.rmtree(copied.run / stage)
    decoded: list[int] = []

    def see(event: Event) -> None:
        if (event.stage, event.kind) == ("teacher", "done"):
            decoded.extend(number for (work, _), number in counts.items() if work == "decoded")

    with counting() as counts:
        run(load_config(copied.config), out=copied.run, store=copied.store, emit=see)
    assert set(decoded) == {1}


def test_a_changed_setting_or_test_file_rebuilds_its_stage_and_later_ones_with_a_reason(copied: Finished, tmp_path: Path) -> None:
    def again(changed: dict[str, Any]) -> tuple[set[str], dict[str, str]]:
        """The stages that are up to date, and why the others are not."""
        events = copied.again(changed)
        stale = {event.stage: event.message for event in events if event.kind == "stale"}
        return {event.stage for event in events if event.kind == "up_to_date"}, stale

    joint, finetune = copied.config["phases"]
    changed = {**copied.config, "phases": [joint, finetune | {"steps": 4}]}
    kept, stale = again(changed)
    assert "steps 16 -> 4" in stale["phase-2-finetune"]
    assert {"selection", "tokenizer", "phase-1-joint"} <= kept
    assert not kept & {"phase-2-finetune", "evaluation", "export"}
    shorter = write_jsonl(tmp_path / "test.jsonl", read_jsonl(copied.config["task"]["test"])[:10])
    kept, stale = again({**changed, "task": changed["task"] | {"test": str(shorter)}})
    assert {"baseline", "tokenizer"} <= kept
    assert "evaluation" in stale


def test_an_export_reads_the_columns_of_the_last_fit_of_equal_texts(tmp_path: Path) -> None:
    rows = [(f"{topic} {' '.join(TOPICS[topic][n : n + 3])}", topic) for n in range(9) for topic in TOPICS]

    def columns(text: str, label: str) -> list[str]:
        renamed = [dict(zip((text, label), row, strict=True)) for row in rows]
        parts = {"train": renamed[:12], "dev": renamed[12:]}
        files = {name: str(write_jsonl(tmp_path / f"{name}.jsonl", part)) for name, part in parts.items()}
        run(quick(recipes.tfidf(**files, text_column=text, label_column=label)), out=tmp_path / "run", store=tmp_path / "store")
        found = read_json(tmp_path / "run/export/provenance.json")["config"]["task"]
        return [found[name] for name in ("text_column", "label_column")]

    assert columns("text", "label") == ["text", "label"]
    assert columns("body", "topic") == ["body", "topic"]
    assert columns("text", "label") == ["text", "label"]


def test_linear_models_are_exported_with_a_small_dev_split_and_scored_on_it_without(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=60)
    files = {"train": paths["train"], "test": paths["test"], "corpus": [paths["corpus"]]}
    config = quick(recipes.static(**files))
    run(config, out=tmp_path / "run", store=tmp_path / "store")
    task = read_task(config.task, seed=config.seed)
    for stage, split, examples in (("static", "dev", task.dev), ("static-on-dev", "test", task.test)):
        model = LinearModel.load(tmp_path / "run" / stage)
        logits = model.logits([example.divided_text for example in examples])
        written = read_jsonl(tmp_path / f"run/evaluation/predictions-{split}.jsonl")
        found = [[row["probabilities"][label] for label in task.labels] for row in written]
        np.testing.assert_allclose(KINDS[task.kind].outputs(logits), found, atol=1e-5)
    fit = read_json(tmp_path / "run/static-on-dev/fit.json")
    assert (fit["train_texts"], fit["held_out_texts"]) == (len(task.train) + len(task.dev), len(task.train))
    card, page = ((tmp_path / "run" / name).read_text("utf-8") for name in ("export/README.md", "report.html"))
    assert f"Chosen on dev and {len(task.train)} training texts out of fold among" in card
    assert "chosen on dev, those of linear models also on training texts out of fold" in card
    assert f"macro-F1 on dev and {len(task.train)} training texts out of fold" in page
    assert "those of linear models also on training texts out of fold, because dev is small; test was scored once" in page
    assert re.search(rf"\b{fit['features']:,}</td>\s*<td[^>]*>{fit['train_texts']}</td>", page)
    exported = LinearModel.load(tmp_path / "run/export")
    np.testing.assert_array_equal(exported.coefficients.weights, model.coefficients.weights)
    verify(tmp_path / "run/static-on-dev")


def test_a_self_trained_model_is_exported_with_a_small_dev_split_and_unlabelled_texts(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=60)
    words = [topic[:8] for topic in (TOPICS["sea"], TOPICS["hill"])]
    texts = [f"{words[n % 2][n % 8]} {words[n % 2][n % 5]} zebra{n % 2}" for n in range(40)]
    write_jsonl(tmp_path / "more.jsonl", [{"text": text} for text in texts])
    files = {"train": paths["train"], "test": paths["test"], "corpus": [paths["corpus"]], "unlabelled": [str(tmp_path / "more.jsonl")]}
    config = quick(recipes.static(**files))
    run(config, out=tmp_path / "run", store=tmp_path / "store")
    task = read_task(config.task, seed=config.seed)
    fits = [read_json(tmp_path / f"run/{stage}/fit.json") for stage in ("static", "static-on-dev")]
    assert [fit["unlabelled_weight"] for fit in fits] == [3, 3]
    assert [fit["train_texts"] for fit in fits] == [len(task.train), len(task.train) + len(task.dev)]
    assert len(np.load(tmp_path / "run/static/held-out-rows.npy")) == len(task.train)
    assert read_json(tmp_path / "run/export/provenance.json")["task"]["unlabelled"] == len(task.unlabelled) == 40
    assert "- Unlabelled texts of the task: 40." in (tmp_path / "run/export/README.md").read_text("utf-8")
    before, after = (LinearModel.load(tmp_path / "run" / name) for name in ("static", "export"))
    assert all({"zebra0", "zebra1"} <= {term for part in model.ngrams.parts for term in part.terms} for model in (before, after))
    assert not np.array_equal(before.logits(["zebra0"]), after.logits(["zebra0"]))


@pytest.mark.parametrize(("stage", "steps", "evaluations"), [("phase-1-joint", 14, 0), ("phase-2-finetune", 10, 2)])
def test_an_interrupted_run_ends_with_the_same_bits_and_dev_predictions(
    stage: str, steps: int, evaluations: int, finished: Finished, tmp_path: Path
) -> None:
    fit_and_stop(finished.config, tmp_path / "run", finished.store, stage, after=steps)
    assert not (tmp_path / "run/export").exists()
    assert len(list((tmp_path / f"run/.work/{stage}").rglob("dev-predictions/*/*.npy"))) == evaluations
    events_of(finished.config, tmp_path / "run", finished.store)
    assert not (tmp_path / "run/.work" / stage).exists()
    for name in (WEIGHTS, "phase-2-finetune/dev-predictions.npy"):
        assert hash_file(tmp_path / "run" / name) == hash_file(finished.run / name)
    one, two = (read_json(path / "evaluation/scores.json")["comparison"] for path in (tmp_path / "run", finished.run))
    assert one == two


def test_dev_predictions_of_another_config_are_not_used(finished: Finished, tmp_path: Path) -> None:
    joint, finetune = finished.config["phases"]
    other = {**finished.config, "phases": [joint, finetune | {"evaluate_every": 1, "optimizer": {"learning_rate": 0.02}}]}
    fit_and_stop(other, tmp_path / "run", finished.store, "phase-2-finetune", after=3)
    for checkpoint in (tmp_path / "run/.work/phase-2-finetune").glob("step-*"):
        shutil.rmtree(checkpoint)  # as if it had been killed before its first one
    events_of(finished.config, tmp_path / "run", finished.store)
    name = "phase-2-finetune/dev-predictions.npy"
    assert np.array_equal(np.load(tmp_path / "run" / name), np.load(finished.run / name))


def without_teacher(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The phases of a config without their terms `distil`."""
    return [phase | {"terms": [term for term in phase["terms"] if term["kind"] != "distil"]} for phase in config["phases"]]


def ran_stages(run: Path) -> list[str]:
    """The stages of a run in its log, without those that a dry run leaves out."""
    stages = dict.fromkeys(event["stage"] for event in read_jsonl(run / "events.jsonl"))
    return [stage for stage in stages if stage != "machine" and not stage.startswith("schedule-")]


@pytest.mark.parametrize("teachers", [(), ("static",), ("bayes", "tfidf")])
def test_with_the_baselines_disabled_only_the_models_of_the_teacher_are_fitted_and_none_is_scored(
    teachers: tuple[str, ...], finished: Finished, tmp_path: Path
) -> None:
    out, config = tmp_path / "run", finished.config
    changed = {**config, "phases": config["phases"] if teachers else without_teacher(config), "baseline": {"enabled": False}}
    changed |= {"teacher": {"models": list(teachers)}} if teachers else {}
    made = load_config(shortened(changed))
    run(made, out=out, store=finished.store)
    assert stages_of(made) == ran_stages(out), "those of a dry run"
    stages = {"tfidf": "baseline", "bayes": "bayes", "static": "static"}
    assert {name for name, stage in stages.items() if (out / stage / "fit.json").is_file()} == set(teachers)
    assert (out / "teacher").exists() == bool(teachers)
    scores = read_json(out / "evaluation/scores.json")
    assert list(scores["models"]) == list(scores["comparison"]["cross_fitted"]) == ["tlm"]
    assert not list(out.rglob("*-static.jsonl")) + list(out.rglob("*-tfidf.jsonl"))
    assert all("test" not in read_json(path) for path in out.glob("*/fit.json"))


def test_no_dev_or_test_text_reaches_selection_tokenizer_or_training(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=60)
    secret = "zyxwvut qponmlk jihgfed cbazyxw vutsrqp onmlkji hgfedcb"
    with Path(paths["test"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": f"wave ship {secret}", "label": "sea"}) + "\n")
    with Path(paths["corpus"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": f"harbour sailor tide anchor wave ship {secret} reef gull harbour sailor"}) + "\n")
    everything = shortened(tiny_config(paths, retriever={"kind": "bm25", "top_k": 300}))
    run(load_config(everything), out=tmp_path / "run", store=tmp_path / "store")
    assert "zyxwvut" in (tmp_path / "run/selection/dropped.jsonl").read_text("utf-8")
    for name in ("selection/selection.arrow", "tokenizer/tokenizer.json", "export/tokenizer.json"):
        assert b"zyxwvut" not in (tmp_path / "run" / name).read_bytes()


def test_the_threads_of_a_run_are_also_those_of_matrix_products_outside_of_training(tmp_path: Path) -> None:
    config = tiny_config(write_task(tmp_path / "data", documents=10), corpus=None, retriever=None)  # on one thread
    threads: set[int] = set()

    def count_threads(event: Event) -> None:
        if event.stage in ("baseline", "tokenizer", "evaluation"):
            threads.update(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")

    with threadpool_limits(limits=2, user_api="blas"):
        tuning = load_config(shortened(config | {"phases": config["phases"][1:]}))
        run(tuning, out=tmp_path / "run", store=tmp_path / "store", emit=count_threads)
    assert threads == {1}


def tiny_settings(data: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config that decide its size and the speed that it is planned with."""
    config = load_config(data)
    return {name: getattr(config, name) for name in ("encoder", "tokenizer", "threads", "baseline", "tokens_per_second")}


def test_a_budget_sets_all_open_settings_and_a_second_call_keeps_the_plan(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=60)
    config = recipes.tlm(corpus=paths["corpus"], train=paths["train"], dev=paths["dev"], budget="4e9flops")
    config = config.model_copy(update=tiny_settings(tiny_config(paths, baseline={"c": [3.0]})))
    joint, finetune = config.phases
    config = config.model_copy(update={"phases": (joint.model_copy(update={"batch_size": 512}), finetune)})
    seen: list[Event] = []
    first = run(config, out=tmp_path / "run", store=tmp_path / "store", emit=seen.append)
    schedules = [read_json(tmp_path / f"run/{name}/schedule.json") for name in ("schedule", "schedule-2-finetune")]
    steps = [schedule["phases"][1]["steps"] for schedule in schedules]
    again = [event.message for event in seen if event.message.startswith("planned again: finetune")]
    assert [message.rpartition("; ")[2] for message in again] == ([f"at the start: {steps[0]} steps"] if steps[0] != steps[1] else [])
    assert first.scores["flops"]["executed"] == pytest.approx(4e9, rel=0.1)
    assert all(phase.steps and phase.max_length and phase.evaluate_every for phase in first.config.phases)
    second = run(config, out=tmp_path / "run", store=tmp_path / "store")
    assert second.config == first.config


def test_the_steps_change_with_the_encoder_and_the_speed(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    recipe = recipes.labels_only(train=paths["train"], dev=paths["dev"], budget="3e9flops")
    narrow = recipe.model_copy(update=tiny_settings(tiny_config(paths, baseline={"c": [3.0], "enabled": False})))

    def steps(config: RunConfig, folder: str) -> tuple[int | None, list[str]]:
        events: list[Event] = []
        phases = run(config, out=tmp_path / folder, store=tmp_path / "store", emit=events.append).config.phases
        return phases[-1].steps, [event.message for event in events if event.stage == "schedule" and event.kind == "stale"]

    wide = narrow.model_copy(update={"encoder": narrow.encoder.model_copy(update={"hidden": 64})})
    many, _ = steps(narrow, "run")
    fewer, reasons = steps(wide, "run")
    assert reasons == ["runs again: encoder.hidden 32 -> 64"]
    assert fewer < many
    slow, fast = (wide.model_copy(update={"budget": "7m", "tokens_per_second": speed}) for speed in (40.0, 80.0))
    few, _ = steps(slow, "run")
    more, reasons = steps(fast, "run")
    assert reasons == ["runs again: tokens_per_second 40.0 -> 80.0"]
    assert more > few


@pytest.mark.parametrize("changed", ["corpus", "test"])
def test_a_run_on_more_text_is_planned_again(tmp_path: Path, changed: str) -> None:
    paths = write_task(tmp_path / "data")
    data = tiny_config(paths, budget="60s")
    data["phases"][0]["steps"] = None

    def planned() -> tuple[int, list[str]]:
        config, events = load_config(data), list[Event]()
        plan(RunContext(config, read_task(config.task, seed=1), tmp_path / "run", tmp_path / "store", time.monotonic(), events.append))
        stored = read_json(tmp_path / "run/plan/plan.json")
        return stored["cost"]["disk"], [event.message for event in events]

    before, _ = planned()
    assert planned() == (before, ["up to date"]), "the plan of equal texts is kept"
    rows = Path(paths[changed]).read_text("utf-8")
    Path(paths[changed]).write_text(rows * 40, "utf-8")
    after, messages = planned()
    assert after > before
    assert any("texts" in message for message in messages)


def test_a_budget_of_operations_reads_the_speed_that_an_earlier_run_measured_in_the_last_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cramlm.planning.plan._FORECAST_SECONDS", 0.01)
    paths = write_task(tmp_path / "data", documents=60)
    tiny = load_config(tiny_config(paths))
    store, times = tmp_path / "store", iter(range(9))

    def how(budget: str, **changes: Any) -> str:
        recipe = recipes.tlm(corpus=paths["corpus"], train=paths["train"], dev=paths["dev"], budget=budget)
        config = recipe.model_copy(update={"encoder": tiny.encoder, "tokenizer": tiny.tokenizer, "threads": 1, **changes})
        events: list[Event] = []
        plan(RunContext(config, read_task(config.task, seed=1), tmp_path / f"run-{next(times)}", store, time.monotonic(), events.append))
        return next(event.message for event in events if event.kind == "start")

    measured, read = "measuring the training speed", "using the training speed that an earlier run measured on this machine"
    assert how("5e10flops") == measured
    assert [how("5e10flops"), how("7e10flops")] == [read, read]
    assert how("7e10flops", encoder=tiny.encoder.model_copy(update={"layers": 2})) == measured
    assert how("10s") == measured
    for file in (store / "speeds").iterdir():
        os.utime(file, (0, time.time() - 90_000))
    assert how("5e10flops") == measured
    for file in (store / "speeds").iterdir():
        file.write_text("{}", "utf-8")
    assert how("5e10flops") == measured


def test_the_teacher_labels_pieces_of_passages_and_training_texts(finished: Finished) -> None:
    folder = finished.run
    soft, own = (np.load(folder / f"teacher/{about}.npy") for about in ("passages-32", "task"))
    selected = SelectionTable.open(folder / "selection").texts()
    passages = Tokenizer.load(folder / "tokenizer").pieces(selected, max_length=32)[1]
    assert soft.shape == (len(passages), 2)
    np.testing.assert_allclose(soft.sum(axis=1), 1, rtol=1e-5)
    hill, sea = (np.array([sum(word in TOPICS[topic] for word in text.split()) for text in passages]) for topic in ("hill", "sea"))
    clear = abs(hill - sea) > 3
    assert ((soft[:, 0] > soft[:, 1]) == (hill > sea))[clear].mean() > 0.95
    assert own.shape == (len(read_jsonl(finished.config["task"]["train"])), 2)
    steps = [event for event in read_jsonl(folder / "events.jsonl") if event["kind"] == "step"]
    distilled = {event["stage"] for event in steps if {"distil_external", "distil_task"} & set(event["data"])}
    assert distilled == {"phase-1-joint", "phase-2-finetune"}


def write_marked_task(folder: Path) -> dict[str, str]:
    """As `write_task`, with the first and the second word of each text marked."""
    paths = write_task(folder)
    for split in ("train", "dev", "test"):
        rows = read_jsonl(paths[split])
        for row in rows:
            first, second, *rest = row["text"].split()
            row["text"] = " ".join(["[[", first, "]]", *rest[:2], "<<", second, ">>", *rest[2:]])
        write_jsonl(Path(paths[split]), rows)
    return paths


def test_pieces_of_passages_get_the_markers_of_a_task_about_relations(tmp_path: Path) -> None:
    config = shortened(tiny_config(write_marked_task(tmp_path / "data")), teacher={"mark_passages": True, "models": ["tfidf"]})
    events_of(config, tmp_path / "run", tmp_path / "store")
    tokenizer, teacher = Tokenizer.load(tmp_path / "run/tokenizer"), tmp_path / "run/teacher"
    pieces, soft = read_pieces(teacher, 32), np.load(teacher / "passages-32.npy")
    assert len(pieces) == len(soft) == len(pieces.source) > 50
    opened, closed = (tokenizer.vocabulary.index(marker) for marker in ("[[", "]]"))
    for number in range(len(pieces)):
        places = [int(np.flatnonzero(pieces[number] == token)[0]) for token in (opened, closed)]
        assert places[1] == places[0] + 2, "one word between them, as in the training texts"
    assert (np.diff(pieces.offsets) <= 32).all()


def test_pieces_that_an_encoder_labels_have_no_markers(tmp_path: Path) -> None:
    config = tiny_config(write_marked_task(tmp_path / "data"))
    joint, tuning = config["phases"]
    distilled = {"name": "distilled", "terms": [{"kind": "distil", "on": "external", "teacher": tuning["name"]}], "external": 1, "task": 0}
    phases = [joint, tuning | {"start_from": "start"}, {**distilled, "start_from": "start", "keep": "last", "max_length": 32}]
    for marked in (False, True):
        teacher = {"mark_passages": marked, "models": ["tfidf"]}
        events_of(shortened({**config, "phases": phases}, teacher=teacher), tmp_path / f"marked-{marked}", tmp_path / "store")
    assert read_pieces(tmp_path / "marked-True/teacher", 32) is not None
    first, second = (load_file(tmp_path / f"marked-{marked}/phase-3-distilled/model.safetensors") for marked in (False, True))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_markers_need_a_task_about_relations(tmp_path: Path) -> None:
    unmarked = shortened(tiny_config(write_task(tmp_path / "plain")), teacher={"mark_passages": True})
    with pytest.raises(UsageError, match="mark_passages = true needs single texts with markers"):
        events_of(unmarked, tmp_path / "other", tmp_path / "store")


def test_pieces_of_passages_become_pairs_of_halves_in_a_task_of_pairs(tmp_path: Path) -> None:
    plain = write_task(tmp_path / "plain")
    paths = write_task(tmp_path / "data")
    for split in ("train", "dev", "test"):
        rows = read_jsonl(paths[split])
        halves = [(row["text"].split()[::2], row["text"].split()[1::2]) for row in rows]
        pairs = [{**row, "text": " ".join(one), "second": " ".join(other)} for row, (one, other) in zip(rows, halves, strict=True)]
        write_jsonl(Path(paths[split]), pairs)

    def config(paths: dict[str, str], **task: Any) -> dict[str, Any]:
        tiny = shortened(tiny_config(paths), teacher={"pair_passages": True, "models": ["tfidf"]})
        return {**tiny, "task": tiny["task"] | task, "encoder": tiny["encoder"] | {"layer_init": "markers"}}

    events_of(config(paths, text_pair_column="second"), tmp_path / "run", tmp_path / "store")
    tokenizer, teacher = Tokenizer.load(tmp_path / "run/tokenizer"), tmp_path / "run/teacher"
    pairs, soft = read_pieces(teacher, 32), np.load(teacher / "passages-32.npy")
    assert len(pairs) == len(soft) == len(pairs.source) > 50
    assert (np.diff(pairs.offsets) <= 32).all()
    passages = SelectionTable.open(tmp_path / "run/selection").texts()
    passage_of = [set(tokenizer.encode([passage]).ids.tolist()) for passage in passages]
    own = []
    for number, source in enumerate(pairs.source.tolist()):
        assert np.flatnonzero(pairs[number] == tokenizer.sep_id).size == 2
        first, second = np.split(pairs[number][1:-1], np.flatnonzero(pairs[number][1:-1] == tokenizer.sep_id))
        assert set(first.tolist()) <= passage_of[source]
        own.append(set(second[1:].tolist()) <= passage_of[source])
    assert 0.35 < np.mean(own) < 0.75
    with pytest.raises(UsageError, match="pair_passages = true needs training texts that are pairs"):
        events_of(config(plain), tmp_path / "other", tmp_path / "store")


def test_layers_start_at_the_markers_of_the_training_texts(tmp_path: Path) -> None:
    def config(paths: dict[str, str]) -> dict[str, Any]:
        tiny = shortened(tiny_config(paths))
        return {**tiny, "encoder": {**tiny["encoder"], "layer_init": "markers"}}

    events_of(config(write_marked_task(tmp_path / "data")), tmp_path / "run", tmp_path / "store")
    with pytest.raises(UsageError, match='layer_init = "markers" needs single texts with markers'):
        events_of(config(write_task(tmp_path / "plain")), tmp_path / "other", tmp_path / "store")


def test_tokens_of_markers_are_those_that_occur_mostly_in_them(tmp_path: Path) -> None:
    texts = [f"[[ ship ]] has a @harbour$ and another harbour {number}" for number in range(30)]
    markers = Markers.find(texts)
    assert set(markers.strings) == {"[[", "]]", "@harbour$"}
    train_tokenizer(texts, TokenizerConfig(vocab_size=200), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    tokens = {tokenizer.vocabulary[token] for token in tokens_of_markers(markers, texts, tokenizer)}
    assert tokens == {"[CLS]", "[SEP]", "[[", "]]", "@", "$"}, "half of the harbours are outside"


def test_a_piece_has_the_mean_of_its_soft_label_and_that_of_its_passage(copied: Finished) -> None:
    folder = copied.run
    default = np.load(folder / "teacher/passages-32.npy")
    labels = {}
    for share in (0.0, 1.0):
        copied.again(shortened(copied.config, teacher={"passage_share": share}))
        labels[share] = np.load(folder / "teacher/passages-32.npy")
    np.testing.assert_allclose(default, (labels[0.0] + labels[1.0]) / 2, atol=1e-6)
    passages = SelectionTable.open(folder / "selection").texts()
    source = Tokenizer.load(folder / "tokenizer").pieces(passages, max_length=32)[0].source
    first = np.searchsorted(source, source)
    assert len(passages) < len(source), "some passages have several pieces"
    np.testing.assert_allclose(labels[1.0], labels[1.0][first], atol=1e-6)
    assert abs(labels[0.0] - labels[0.0][first]).max() > 0.01


def test_distribution_alignment_is_a_setting_of_the_teacher(copied: Finished) -> None:
    plain = np.load(copied.run / "teacher/passages-32.npy")
    events = copied.again(shortened(copied.config, teacher={"align_distribution": True}))
    stale = {event.stage: event.message for event in events if event.kind == "stale"}
    assert "teacher.align_distribution false -> true" in stale["teacher"]
    aligned = np.load(copied.run / "teacher/passages-32.npy")
    shift = np.log(aligned[:, 0] / aligned[:, 1]) - np.log(plain[:, 0] / plain[:, 1])
    assert plain.mean(axis=0)[0] < 0.5  # half of the training texts have either label
    assert shift.min() > 0
    np.testing.assert_allclose(shift, shift.mean(), rtol=1e-2)


def test_the_logit_adjustment_is_in_the_exported_bias_unless_disabled(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=60)
    train = Path(paths["train"])
    rows = train.read_text("utf-8").splitlines()
    train.write_text("\n".join([row for row in rows if '"sea"' in row] + [row for row in rows if '"hill"' in row][:3]) + "\n", "utf-8")
    config = tiny_config(paths)
    config["encoder"]["embedding_init"] = "cooccurrence"  # encoders that start nearer to the teacher need no adjustment
    run(load_config(config), out=tmp_path / "run", store=tmp_path / "store")
    adjustment = read_json(tmp_path / "run/logit-adjustment/logit-adjustment.json")
    trained = load_file(tmp_path / "run/phase-2-finetune/model.safetensors")["classifier.classifier.bias"]
    exported = load_file(tmp_path / "run" / WEIGHTS)["classifier.bias"]
    assert adjustment["tau"] > 0
    assert adjustment["after"] > adjustment["before"]
    np.testing.assert_allclose(exported - trained, [adjustment["values"]["hill"], adjustment["values"]["sea"]], atol=1e-6)
    scores = read_json(tmp_path / "run/evaluation/scores.json")
    assert scores["models"]["tlm"]["dev"]["macro_f1"] == pytest.approx(adjustment["after"])
    phase = read_json(tmp_path / "run/phase-2-finetune/phase.json")
    assert phase["best_score"] == pytest.approx(adjustment["after"])  # evaluations during training have the adjustment too

    run(load_config({**config, "logit_adjustment": "none"}), out=tmp_path / "as trained", store=tmp_path / "store")
    assert not (tmp_path / "as trained/logit-adjustment").exists()
    np.testing.assert_array_equal(load_file(tmp_path / "as trained" / WEIGHTS)["classifier.bias"], trained)


def test_unlabelled_texts_are_queries_and_passages_of_every_stage_that_reads_raw_text(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=60)
    rows = [{"text": f"{TOPICS['sea'][n % 12]} and zebra{n} on a {TOPICS['hill'][n % 7]}"} for n in range(30)]
    write_jsonl(tmp_path / "more.jsonl", rows)
    config = shortened(tiny_config(paths))
    config["task"]["unlabelled"] = [str(tmp_path / "more.jsonl")]
    run(load_config(config), out=tmp_path / "run", store=tmp_path / "store")

    folder = tmp_path / "run"
    assert read_json(folder / "selection/report.json")["queries"]["texts"] == 40 + 30
    retrieved = len(SelectionTable.open(folder / "selection"))
    assert len(np.load(folder / "tokens/passages-offsets.npy")) - 1 == retrieved + 30
    assert len(np.load(next((folder / "teacher").glob("passages-*.npy")))) >= retrieved + 30
    assert "zebra7" in read_json(folder / "bayes/linear.json")["terms"]["unigrams"]
    assert read_json(folder / "baseline/fit.json")["train_texts"] == 40
    assert read_json(folder / "static/fit.json")["unlabelled_weight"] == 3

    events = events_of(config | {"task": tiny_config(paths)["task"]}, folder, tmp_path / "store")
    of_kind = {kind: {event.stage for event in events if event.kind == kind} for kind in ("up_to_date", "stale")}
    assert "baseline" in of_kind["up_to_date"]
    assert {"task", "selection", "bayes", "static", "phase-1-joint"} <= of_kind["stale"]


def test_a_recipe_that_reads_no_raw_text_ignores_unlabelled_texts_and_a_config_without_corpus_is_refused() -> None:
    assert recipes.tfidf(train="", unlabelled=["more.txt"]).task.unlabelled == ()
    with_corpus = recipes.static(train="", corpus="raw.txt", unlabelled=["more.txt"])
    assert with_corpus.task.unlabelled == ("more.txt",)
    data = recipes.tfidf(train="").model_dump(mode="json")
    with pytest.raises(UsageError, match="unlabelled texts are added to retrieved ones, but there is no corpus; pass --corpus"):
        load_config(data | {"task": data["task"] | {"unlabelled": ["more.txt"]}})
