"""Runs share stages through the store: equal inputs give linked files, changed ones a new stage."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cramlm.config.run import load_config
from cramlm.errors import UsageError
from cramlm.pipeline.run import run
from cramlm.pipeline.sharing import SHARED, stages_limit
from cramlm.pipeline.stages.teacher import SOFT_LABELS
from cramlm.records import Event
from cramlm.storage.artifacts import hash_file, verify
from tiny_task import tiny_config, write_task

ALL = set(SHARED) - {SOFT_LABELS} | {"teacher"}  # names of stages: events have that of the whole stage


NO_PATHS = dict.fromkeys(("train", "dev", "test", "corpus"), "")


def short_config(paths: dict[str, str], **changes: Any) -> dict[str, Any]:
    """Return a config with phases of two steps: only what surrounds training matters."""
    config = tiny_config(paths, tokens_per_second=1e6, baseline={"c": [3.0]})
    for phase in config["phases"]:
        phase["steps"] = 2
    return config | changes


@dataclass
class Store:
    """A store and runs that use it, each in its own folder."""

    folder: Path
    paths: dict[str, str]
    runs: int = 0
    events: list[Event] = field(default_factory=list)

    def fit(self, **changes: Any) -> Path:
        """Run a config in a new folder."""
        self.runs += 1
        self.events = []
        config = load_config(short_config(self.paths, **changes))
        return run(config, out=self.folder / f"run-{self.runs}", store=self.folder / "store", emit=self.events.append).path

    def reused(self) -> set[str]:
        """Return the stages that the last run took from the store."""
        return {event.stage for event in self.events if event.message.startswith("reused from another run")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, write_task(tmp_path / "data", documents=60))


def test_a_stage_starts_once_and_ends_once(store: Store) -> None:
    store.fit()
    for kind in ("start", "done"):
        counts = Counter(event.stage for event in store.events if event.kind == kind)
        assert set(counts.values()) == {1}, counts


def test_an_equal_run_in_another_folder_links_what_precedes_training_and_trains_the_same_weights(store: Store) -> None:
    first = store.fit()
    assert store.reused() == set()
    second = store.fit()
    assert store.reused() == ALL
    for stage in ALL - {"teacher"}:
        manifests = [json.loads((folder / stage / "manifest.json").read_bytes()) for folder in (first, second)]
        assert manifests[0] == manifests[1]
        for file in manifests[0]["files"]:
            assert (first / stage / file).samefile(second / stage / file) == (Path(file).suffix not in (".json", ".jsonl"))
    assert hash_file(first / "export/model.safetensors") == hash_file(second / "export/model.safetensors")
    assert not any(event.kind in ("stale", "warning") and event.stage in ALL for event in store.events)
    verify(store.folder)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"seed": 4}, ALL - {"embedding"}),
        ({"threads": 2}, set()),
        ({"retriever": {"kind": "bm25", "top_k": 20, "k1": 0.5}}, {"baseline", "static"}),
        ({"tokenizer": {"vocab_size": 150}}, ALL - {"tokenizer", "tokens", "embedding", "teacher"}),
        ({"teacher": {"passage_share": 0.25}}, ALL - {"teacher"}),
        ({"budget": "1e13flops"}, ALL - {"selection"}),  # another bound, the same passages
        ({"name": "other", "phases": [short_config(NO_PATHS)["phases"][0] | {"external": 1, "steps": 3}]}, ALL),  # another recipe
    ],
)
def test_a_changed_setting_builds_the_stages_that_depend_on_it(changes: dict[str, Any], same: set[str], store: Store) -> None:
    store.fit()
    store.fit(**changes)
    assert store.reused() == same


@pytest.mark.parametrize(
    ("name", "same"),
    [("train", set()), ("dev", {"tokenizer", "embedding"}), ("test", ALL - {"selection", "tokens"}), ("corpus", {"baseline"})],
)
def test_a_changed_text_of_the_task_or_the_corpus_builds_the_stages_that_read_it(name: str, same: set[str], store: Store) -> None:
    store.fit()
    file = Path(store.paths[name])
    file.write_text(file.read_text("utf-8").replace("wave", "billow", 1), "utf-8")
    store.fit()
    assert store.reused() == same


def test_the_stages_of_another_seed_are_those_that_it_would_build_itself(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.fit()
    shared = store.fit(seed=4)
    monkeypatch.setenv("CRAMLM_STAGES_GB", "0")
    alone = store.fit(seed=4)
    for stage in ALL:
        hashes = [{path.name: hash_file(path) for path in (folder / stage).iterdir()} for folder in (shared, alone)]
        for name in ("manifest.json", "fit.json"):  # with seconds
            hashes = [{**each, name: ""} for each in hashes]
        assert hashes[0] == hashes[1], stage
    assert hash_file(shared / "export/model.safetensors") == hash_file(alone / "export/model.safetensors")


def test_a_seed_that_samples_texts_is_part_of_what_is_shared(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cramlm.linear.fit.FEW_TEXTS", 30)
    monkeypatch.setattr("cramlm.linear.bayes.MAX_PASSAGES", 20)
    store.fit()
    store.fit(seed=4)
    assert store.reused() == {"selection", "tokenizer", "tokens"}


def test_no_stage_is_shared_with_a_limit_of_zero(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAMLM_STAGES_GB", "0")
    store.fit()
    store.fit()
    assert store.reused() == set()
    assert not (store.folder / "store/stages").exists()


@pytest.mark.parametrize("value", ["much", "-1", "inf", "nan"])
def test_a_limit_that_is_no_size_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAMLM_STAGES_GB", value)
    with pytest.raises(UsageError, match="CRAMLM_STAGES_GB"):
        stages_limit()


def test_a_store_that_cannot_be_written_is_named_and_the_run_goes_on(store: Store) -> None:
    (store.folder / "store").mkdir()
    (store.folder / "store/stages").write_text("in the way", "utf-8")
    store.fit()
    (note,) = (event.message for event in store.events if "not shared" in event.message)
    assert f"{store.folder / 'store/stages'}: " in note
    assert (store.folder / "run-1/export").is_dir()
