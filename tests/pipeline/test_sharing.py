"""Runs share stages through the store: equal inputs give linked files, changed ones a new stage."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cramlm.config.run import load_config
from cramlm.errors import Stopped, UsageError
from cramlm.pipeline.context import SHARED, stages_limit
from cramlm.pipeline.run import run
from cramlm.pipeline.stages.teacher import SOFT_LABELS
from cramlm.records import Emit, Event
from cramlm.storage.artifacts import hash_file, verify
from jsonl import read_json
from tiny_task import task_paths, tiny_config, write_task

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
        return self._run(self.events.append, changes)

    def build(self, **changes: Any) -> Path:
        """Run a config in a new folder up to the first phase."""

        def until_training(event: Event) -> None:
            self.events.append(event)
            if event.stage.startswith("phase-"):
                raise Stopped("the stages before training are built", exit_code=75)

        with pytest.raises(Stopped):
            self._run(until_training, changes)
        return self.folder / f"run-{self.runs}"

    def _run(self, emit: Emit, changes: dict[str, Any]) -> Path:
        self.runs += 1
        self.events.clear()
        config = load_config(short_config(self.paths, **changes))
        return run(config, out=self.folder / f"run-{self.runs}", store=self.folder / "store", emit=emit).path

    def reused(self) -> set[str]:
        """Return the stages that the last run took from the store."""
        return {event.stage for event in self.events if event.message.startswith("reused from another run")}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store after a run in run-1; a test may only add runs of the same config."""
    folder = tmp_path_factory.mktemp("first")
    store = Store(folder, write_task(folder / "data", documents=60))
    store.fit()
    return store


@pytest.fixture
def store(first: Store, tmp_path: Path) -> Store:
    """A copy of `first` that one test may change."""
    shutil.copytree(first.folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run-*"))
    return Store(tmp_path, task_paths(tmp_path / "data"))


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store(tmp_path, write_task(tmp_path / "data", documents=60))


def test_a_stage_starts_once_and_ends_once(first: Store) -> None:
    for kind in ("start", "done"):
        counts = Counter(event.stage for event in first.events if event.kind == kind)
        assert set(counts.values()) == {1}, counts
    assert first.reused() == set()


def test_an_equal_run_in_another_folder_links_what_precedes_training_and_trains_the_same_weights(first: Store) -> None:
    again = Store(first.folder, first.paths, runs=1)
    one, two = first.folder / "run-1", again.fit()
    assert again.reused() == ALL
    for stage in ALL - {"teacher"}:
        manifests = [read_json(folder / stage / "manifest.json") for folder in (one, two)]
        assert manifests[0] == manifests[1]
        for file in manifests[0]["files"]:
            assert (one / stage / file).samefile(two / stage / file) == (Path(file).suffix not in (".json", ".jsonl"))
    assert hash_file(one / "export/model.safetensors") == hash_file(two / "export/model.safetensors")
    assert not any(event.kind in ("stale", "warning") and event.stage in ALL for event in again.events)
    verify(first.folder)


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
    store.build(**changes)
    assert store.reused() == same


@pytest.mark.parametrize(
    ("name", "same"),
    [("train", set()), ("dev", {"tokenizer", "embedding"}), ("test", ALL - {"selection", "tokens"}), ("corpus", {"baseline"})],
)
def test_a_changed_text_of_the_task_or_the_corpus_builds_the_stages_that_read_it(name: str, same: set[str], store: Store) -> None:
    file = Path(store.paths[name])
    file.write_text(file.read_text("utf-8").replace("wave", "billow", 1), "utf-8")
    store.build()
    assert store.reused() == same


def test_another_version_of_a_stage_builds_it_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cramlm.pipeline.stages.linear._VERSION", 0)
    store.build()
    assert store.reused() == ALL - {"baseline", "bayes", "static"}


def test_with_a_limit_of_zero_a_run_builds_the_stages_itself_that_another_seed_shares(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = store.build(seed=4)
    before = set((store.folder / "store/stages").iterdir())
    monkeypatch.setenv("CRAMLM_STAGES_GB", "0")
    alone = store.build(seed=4)
    assert store.reused() == set()
    assert set((store.folder / "store/stages").iterdir()) <= before
    for stage in ALL:
        hashes = [{path.name: hash_file(path) for path in (folder / stage).iterdir()} for folder in (shared, alone)]
        for name in ("manifest.json", "fit.json"):  # with seconds
            hashes = [{**each, name: ""} for each in hashes]
        assert hashes[0] == hashes[1], stage


def test_a_seed_that_samples_texts_is_part_of_what_is_shared(empty: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cramlm.linear.fit.FEW_TEXTS", 30)
    monkeypatch.setattr("cramlm.linear.bayes.MAX_PASSAGES", 20)
    empty.build()
    empty.build(seed=4)
    assert empty.reused() == {"selection", "tokenizer", "tokens"}


@pytest.mark.parametrize("value", ["much", "-1", "inf", "nan"])
def test_a_limit_that_is_no_size_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAMLM_STAGES_GB", value)
    with pytest.raises(UsageError, match="CRAMLM_STAGES_GB"):
        stages_limit()


def test_a_store_that_cannot_be_written_is_named_and_the_run_goes_on(empty: Store) -> None:
    (empty.folder / "store").mkdir()
    (empty.folder / "store/stages").write_text("in the way", "utf-8")
    empty.build()
    (note,) = (event.message for event in empty.events if "not shared" in event.message)
    assert f"{empty.folder / 'store/stages'}: " in note
    assert (empty.folder / "run-1/teacher").is_dir()
