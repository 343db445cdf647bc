"""The whole method on a tiny task: what a run leaves, what runs again and why, and what each part may see."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from cramlm import recipes
from cramlm.artifacts import hash_file, verify
from cramlm.config import RunConfig, load_config, to_toml
from cramlm.deploy.predictor import Predictor
from cramlm.errors import Stopped, UsageError
from cramlm.pipeline import run
from cramlm.records import Event
from tiny_task import TOPICS, tiny_config, write_task

WEIGHTS = "export/model.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with data/, store/ and a finished run/, and the run's config data."""
    folder = tmp_path_factory.mktemp("finished")
    data = tiny_config(write_task(folder / "data"))
    run(load_config(data), out=folder / "run", store=folder / "store")
    return folder, data


@pytest.fixture
def copied(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The same in a folder of its own, to be changed; data and store are shared."""
    folder, data = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    return tmp_path, data


def events_of(config: dict[str, Any], out: Path, store: Path) -> list[Event]:
    events: list[Event] = []
    run(load_config(config), out=out, store=store, emit=events.append)
    return events


def test_a_run_leaves_every_stage_whole_and_a_model_that_learnt_the_task(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    stages = (
        "baseline",
        "plan",
        "selection",
        "teacher",
        "tokenizer",
        "embedding",
        "schedule",
        "phase-1-joint",
        "phase-2-finetune",
        "label-prior",
        "evaluation",
        "export",
    )
    assert all((folder / "run" / stage / "manifest.json").is_file() for stage in stages)
    stored = [manifest.parts[-3] for manifest in (folder / "store").glob("*/*/manifest.json")]
    assert {"parts", "corpora", "indexes"} <= set(stored)
    assert verify(folder) == len(stages) + len(stored)
    scores = json.loads((folder / "run/evaluation/scores.json").read_bytes())
    assert scores["models"]["tlm"]["test"]["accuracy"] > 0.8
    assert {"tfidf-words", "tfidf-tokens", "tfidf-characters"} <= set(scores["models"])
    predictor = Predictor.load(folder / "run/export")
    assert [answer.label for answer in predictor.predict(["wave ship harbour sailor", "summit ridge valley climber"])] == ["sea", "hill"]


def test_the_second_identical_call_finds_everything_fresh(copied: tuple[Path, dict[str, Any]], finished: tuple[Path, Any]) -> None:
    folder, config = copied
    before = hash_file(folder / "run" / WEIGHTS)
    events = events_of(config, folder / "run", finished[0] / "store")
    assert not [event for event in events if event.kind in ("start", "stale", "step") and event.stage != "task"]
    assert len([event for event in events if event.kind == "fresh"]) == 14
    assert hash_file(folder / "run" / WEIGHTS) == before


def test_a_changed_knob_reruns_its_stage_and_those_after_it_and_says_why(
    copied: tuple[Path, dict[str, Any]], finished: tuple[Path, Any]
) -> None:
    folder, config = copied
    changed = json.loads(json.dumps(config))
    changed["phases"][1]["steps"] = 12
    events = events_of(changed, folder / "run", finished[0] / "store")
    stale = {event.stage: event.message for event in events if event.kind == "stale"}
    assert "steps 16 -> 12" in stale["phase-2-finetune"]
    fresh = {event.stage for event in events if event.kind == "fresh"}
    assert {"selection", "tokenizer", "phase-1-joint"} <= fresh
    assert not fresh & {"phase-2-finetune", "evaluation", "export"}


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, config = finished
    events_of(config, tmp_path / "again", folder / "store")
    assert hash_file(tmp_path / "again" / WEIGHTS) == hash_file(folder / "run" / WEIGHTS)
    events_of({**config, "seed": 4}, tmp_path / "other", folder / "store")
    assert hash_file(tmp_path / "other" / WEIGHTS) != hash_file(folder / "run" / WEIGHTS)


def test_a_stopped_run_goes_on_and_ends_with_the_same_bits(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, config = finished
    asked = iter(range(10_000))
    with pytest.raises(Stopped) as stopped:
        run(load_config(config), out=tmp_path / "run", store=folder / "store", stop=lambda: 75 if next(asked) > 14 else None)
    assert stopped.value.exit_code == 75
    assert not (tmp_path / "run/export").exists()
    events_of(config, tmp_path / "run", folder / "store")
    assert hash_file(tmp_path / "run" / WEIGHTS) == hash_file(folder / "run" / WEIGHTS)


def test_no_dev_or_test_text_reaches_selection_tokenizer_or_training(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    secret = "zyxwvut qponmlk jihgfed cbazyxw vutsrqp onmlkji hgfedcb"
    with Path(paths["test"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": f"wave ship {secret}", "label": "sea"}) + "\n")
    with Path(paths["corpus"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": f"harbour sailor tide anchor wave ship {secret} reef gull harbour sailor"}) + "\n")
    everything = tiny_config(paths, retriever={"kind": "bm25", "top_k": 300})
    run(load_config(everything), out=tmp_path / "run", store=tmp_path / "store")
    assert "zyxwvut" in (tmp_path / "run/selection/dropped.jsonl").read_text("utf-8")
    for name in ("selection/selected.jsonl", "tokenizer/tokenizer.json", "export/tokenizer.json"):
        assert "zyxwvut" not in (tmp_path / "run" / name).read_text("utf-8")


def test_labels_only_needs_no_corpus_and_exports_no_language_model(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    config = tiny_config(paths, corpus=None, retriever=None)
    config["phases"] = config["phases"][1:]
    finished = run(load_config(config), out=tmp_path / "run", store=tmp_path / "store")
    assert (finished.export / "model.safetensors").is_file()
    assert not (finished.export / "mlm").exists()


def test_the_random_control_selects_without_looking_at_the_task(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    config = tiny_config(paths, retriever={"kind": "random", "max_documents": 30})
    finished = run(load_config(config), out=tmp_path / "run", store=tmp_path / "store")
    assert len(np.load(finished.path / "selection/position.npy")) == 30


def test_a_bert_shaped_run_exports_the_native_class(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    config = tiny_config(paths, head={"pooling": "cls"})
    config["encoder"]["shape"] = "bert"
    finished = run(load_config(config), out=tmp_path / "run", store=tmp_path / "store")
    settings = json.loads((finished.export / "config.json").read_bytes())
    assert settings["architectures"] == ["BertForSequenceClassification"]


def test_without_a_dev_file_a_seeded_part_of_train_is_split_off_and_stored(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    config = tiny_config(paths)
    del config["task"]["dev"]
    run(load_config(config), out=tmp_path / "run", store=tmp_path / "store")
    split = json.loads((tmp_path / "run/split.json").read_bytes())
    assert len(split["dev"]) == 4
    assert not set(split["dev"]) & set(split["train"])


def test_the_stored_config_gives_the_same_run(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, config = finished
    assert (folder / "run/run.toml").read_text("utf-8") == to_toml(RunConfig.model_validate(config))


def test_a_run_without_budget_or_steps_says_what_to_pass(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    config = tiny_config(paths)
    config["phases"][0]["steps"] = None
    with pytest.raises(UsageError, match="--budget"):
        run(load_config(config), out=tmp_path / "run", store=tmp_path / "store")


def test_a_budget_sets_every_open_number_and_a_second_call_keeps_the_plan(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    config = recipes.tlm(corpus=paths["corpus"], train=paths["train"], dev=paths["dev"], budget="1e11flops")
    config = config.model_copy(update={"encoder": RunConfig.model_validate(tiny_config(paths)).encoder, "threads": 1})
    first = run(config, out=tmp_path / "run", store=tmp_path / "store")
    assert (tmp_path / "run/schedule-2-finetune/schedule.json").is_file()
    assert first.scores["flops"]["executed"] == pytest.approx(1e11, rel=0.1)
    assert all(phase.steps and phase.max_length and phase.evaluate_every for phase in first.config.phases)
    second = run(config, out=tmp_path / "run", store=tmp_path / "store")
    assert second.config == first.config


def test_a_teacher_labels_passages_and_training_texts_and_only_phases_that_learn_from_it_depend_on_it(
    copied: tuple[Path, dict[str, Any]],
) -> None:
    folder, config = copied
    soft, own = (np.load(folder / f"run/teacher/{about}.npy") for about in ("passages", "task"))
    with (folder / "run/selection/selected.jsonl").open() as file:
        passages = [json.loads(line)["text"] for line in file]
    assert soft.shape == (len(passages), 2)
    np.testing.assert_allclose(soft.sum(axis=1), 1, rtol=1e-5)
    hill = np.array([sum(word in TOPICS["hill"] for word in text.split()) for text in passages])
    sea = np.array([sum(word in TOPICS["sea"] for word in text.split()) for text in passages])
    clear = abs(hill - sea) > 3
    assert ((soft[:, 0] > soft[:, 1]) == (hill > sea))[clear].mean() > 0.95
    steps = [event for event in map(json.loads, (folder / "run/events.jsonl").read_text().splitlines()) if event["kind"] == "step"]
    assert own.shape == (len(Path(config["task"]["train"]).read_text().splitlines()), 2)
    assert {"joint", "finetune"} == {event["stage"].split("-")[-1] for event in steps if "teacher" in event["data"]}
    alone = config | {"phases": [phase | {"teacher_weight": 0.0} for phase in config["phases"]]}
    assert run(load_config(alone), out=folder / "alone", store=folder / "store").scores
    assert not (folder / "alone/teacher").exists()


def test_what_dev_says_of_rare_labels_is_in_the_exported_bias_and_nothing_where_labels_count_as_trained(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    train = Path(paths["train"])
    rows = train.read_text("utf-8").splitlines()
    train.write_text("\n".join([row for row in rows if '"sea"' in row] + [row for row in rows if '"hill"' in row][:3]) + "\n", "utf-8")
    config = tiny_config(paths)
    run(load_config(config), out=tmp_path / "run", store=tmp_path / "store")
    told = json.loads((tmp_path / "run/label-prior/label-prior.json").read_bytes())
    trained = load_file(tmp_path / "run/phase-2-finetune/model.safetensors")["classifier.classifier.bias"]
    exported = load_file(tmp_path / "run" / WEIGHTS)["classifier.bias"]
    assert told["share"] > 0
    assert told["after"] > told["before"]
    np.testing.assert_allclose(exported - trained, [told["shift"]["hill"], told["shift"]["sea"]], atol=1e-6)
    scores = json.loads((tmp_path / "run/evaluation/scores.json").read_bytes())
    assert scores["models"]["tlm"]["dev"]["macro_f1"] == pytest.approx(told["after"])
    phase = json.loads((tmp_path / "run/phase-2-finetune/phase.json").read_bytes())
    assert phase["best_score"] == pytest.approx(told["after"])  # looks at dev score what would be handed on

    run(load_config({**config, "label_prior": "trained"}), out=tmp_path / "as trained", store=tmp_path / "store")
    assert not (tmp_path / "as trained/label-prior").exists()
    np.testing.assert_array_equal(load_file(tmp_path / "as trained" / WEIGHTS)["classifier.bias"], trained)


def test_a_run_leaves_pytorchs_number_of_threads_as_it_was(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, config = finished
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        events_of(config, folder / "run", folder / "store")  # on one thread, fresh throughout
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
