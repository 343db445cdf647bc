"""Stages: one builder at a time, nothing built twice, and a reason for what is built again."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact_fixtures import NEW, OLD, ReleasedWhenWaitedFor, contents, die, in_child, publish_version, writer
from cramlm.errors import ArtifactError, LockedError, UsageError
from cramlm.records import Event, silent
from cramlm.storage.artifacts import publish, verify
from cramlm.storage.locks import lock, lock_file, wait_limit
from cramlm.storage.stages import StagePool, borrowed_seconds, explain_difference, pooled, remove_least_recently_used, shared_stage, stage


def test_a_second_builder_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    with lock(tmp_path / "thing"):
        assert in_child(lambda: publish_locked(tmp_path / "thing")) == 7
        with pytest.raises(LockedError, match=f"pid {os.getpid()} on {socket.gethostname()}"), lock(tmp_path / "thing"):
            pass
    assert in_child(lambda: publish_locked(tmp_path / "thing")) == 0


def publish_locked(target: Path) -> None:
    stage(target, kind="thing", key=OLD, write=writer("x"), emit=silent)


def test_of_two_builders_of_a_shared_folder_one_builds_and_the_other_waits_for_it_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_version(tmp_path / "thing", OLD)
    first = ReleasedWhenWaitedFor(tmp_path / "thing")
    for limit, message in (
        ("0", r"being built by another process \(pid \d+ on [^)]+\); wait for it or stop it$"),
        ("0.01", "waited 0.01 s"),
    ):
        monkeypatch.setenv("CRAMLM_WAIT", limit)
        with pytest.raises(LockedError, match=message):
            shared_stage(tmp_path / "thing", kind="thing", key=NEW, write=must_not_run, emit=silent)
    monkeypatch.delenv("CRAMLM_WAIT")
    artifact = shared_stage(tmp_path / "thing", kind="thing", key=NEW, write=writer("content 2"), emit=first)
    assert artifact.key == NEW
    (note,) = first.notes
    assert f"waiting: {tmp_path / 'thing'}: being built by another process (pid {os.getpid()}" in note


def must_not_run(folder: Path) -> None:
    raise AssertionError("built although it was there")


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_limit_of_waiting_that_is_no_number_of_seconds_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAMLM_WAIT", value)
    with pytest.raises(UsageError, match=f"CRAMLM_WAIT='{value}' is not a number of seconds"):
        wait_limit()


def test_the_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    def hold() -> None:
        with lock(tmp_path / "thing"):
            die()

    assert in_child(hold) == -signal.SIGKILL
    assert (tmp_path / ".thing.lock").exists()
    publish_locked(tmp_path / "thing")
    assert verify(tmp_path) == 1


def test_a_stage_of_an_unchanged_key_is_not_built_again_and_another_key_names_the_setting_that_changed(tmp_path: Path) -> None:
    events: list[Event] = []
    key = {"inputs": {"sha256": "ab"}, "retriever": {"k1": 1.2, "shares": [1, 2], "limit": None}}
    built = stage(tmp_path / "thing", kind="thing", key=key, write=writer("x"), emit=events.append)
    again = stage(tmp_path / "thing", kind="thing", key=key, write=must_not_run, emit=events.append, name="selection")
    assert again.fingerprint == built.fingerprint
    changed = key | {"retriever": {"k1": 1.5, "shares": [1, 2], "limit": None}}
    stage(tmp_path / "thing", kind="thing", key=changed, write=writer("y"), emit=events.append)
    assert [(event.kind, event.stage, event.message) for event in events] == [
        ("up_to_date", "selection", "up to date"),
        ("stale", "thing", "runs again: retriever.k1 1.2 -> 1.5"),
    ]
    assert contents(tmp_path / "thing") == {"y"}


def test_a_stage_whose_folder_is_damaged_says_so_instead_of_building_over_it(tmp_path: Path) -> None:
    publish_version(tmp_path / "thing", OLD)
    (tmp_path / "thing" / "a.txt").write_text("changed")
    with pytest.raises(ArtifactError, match=r"a\.txt: damaged"):
        stage(tmp_path / "thing", kind="thing", key=OLD, write=writer("x"), emit=silent)
    assert contents(tmp_path / "thing") == {"changed", "content 1"}


keys = st.dictionaries(
    st.text(max_size=3), st.integers(0, 2) | st.dictionaries(st.text(max_size=3), st.integers(0, 2), max_size=3), max_size=3
)


@given(keys, keys)
def test_reasons_are_given_exactly_when_keys_differ(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert (explain_difference(old, new) == []) == (old == new)
    assert explain_difference(old, old) == []


def pool_in(folder: Path, *, environment: dict[str, Any] | None = None, most_bytes: int = 1_000_000) -> StagePool:
    return StagePool(folder / "pool", frozenset({"words"}), environment or {}, most_bytes)


@dataclass
class Runs:
    """Runs of one stage with a pool. made: names of the runs that built the stage."""

    folder: Path
    made: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def run(self, name: str, value: int, kind: str = "words") -> Path:
        def write(folder: Path) -> None:
            self.made.append(name)
            (folder / "sub").mkdir()
            (folder / "sub" / "numbers.bin").write_text(str(value) * 1000, "utf-8")
            (folder / "note.json").write_text(str(value), "utf-8")

        path = stage(self.folder / name / kind, kind=kind, key={"value": value}, write=write, emit=self.events.append).path
        assert (path / "sub" / "numbers.bin").read_text("utf-8") == str(value) * 1000
        return path

    def stored(self) -> list[Path]:
        return sorted(path.parent for path in (self.folder / "pool").glob("*/manifest.json"))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_runs_with_a_pool_make_an_equal_stage_once_and_count_its_time_each(runs: Runs, tmp_path: Path) -> None:
    borrowed = {}
    for name, value in (("one", 1), ("two", 1), ("three", 2)):
        with pooled(pool_in(tmp_path)) as pool:
            runs.run(name, value)
            runs.run(name, value, kind="own")
            borrowed[name] = borrowed_seconds()
            runs.run(name, value)  # up to date: neither built nor counted again
            assert pool.borrowed_seconds == borrowed[name]
    assert runs.made == ["one", "one", "two", "three", "three"]
    assert borrowed["two"] > 0 == borrowed["one"] == borrowed["three"]
    assert borrowed_seconds() == 0
    assert (tmp_path / "one/words/sub/numbers.bin").samefile(tmp_path / "two/words/sub/numbers.bin")
    assert verify(tmp_path) == 8


def test_a_text_file_edited_in_place_and_a_deleted_file_change_no_other_run(runs: Runs, tmp_path: Path) -> None:
    with pooled(pool_in(tmp_path)):
        folders = [runs.run(name, 1) for name in ("one", "two", "three")]
        (folders[0] / "note.json").write_text("9")
        (folders[1] / "sub" / "numbers.bin").unlink()
        assert verify(folders[2]) == verify(tmp_path / "pool") == 1
        runs.run("four", 1)
    assert runs.made == ["one"]


def test_inside_a_pool_another_one_is_ignored(tmp_path: Path) -> None:
    with pooled(pool_in(tmp_path)) as outer, pooled(pool_in(tmp_path / "other")) as inner:
        assert inner is outer


def test_a_pool_shares_nothing_between_different_environments(runs: Runs, tmp_path: Path) -> None:
    for name, version in (("one", "1.0"), ("two", "1.1"), ("three", "1.0")):
        with pooled(pool_in(tmp_path, environment={"numpy": version})):
            runs.run(name, 1)
    assert runs.made == ["one", "two"]


@pytest.mark.parametrize(("file", "small"), [("sub/numbers.bin", 1 << 20), ("sub/numbers.bin", 10), ("manifest.json", 1 << 20)])
def test_a_damaged_stage_of_a_pool_is_named_and_built_again(
    file: str, small: int, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cramlm.storage.artifacts.SMALL_FILE", small)
    with pooled(pool_in(tmp_path)):
        runs.run("one", 1)
        (stored,) = runs.stored()
        content = (stored / file).read_bytes()
        (stored / file).unlink()  # a hard link: the file of run "one" stays whole
        (stored / file).write_bytes(content[:-5] + b"9" + content[-4:])
        runs.run("two", 1)
        runs.run("three", 1)
    assert runs.made == ["one", "two"]
    (warning,) = (event.message for event in runs.events if event.kind == "warning")
    assert f"{stored / file}: damaged" in warning
    assert verify(tmp_path) == 4


def test_a_pool_removes_the_stages_that_were_not_used_for_the_longest_time(runs: Runs, tmp_path: Path) -> None:
    pool = pool_in(tmp_path, most_bytes=3500)  # each stage has 1,000 bytes and a manifest of some hundred
    with pooled(pool):
        for name, value in (("one", 1), ("two", 2), ("one again", 1), ("three", 3)):
            runs.run(name, value)
        assert runs.made == ["one", "two", "three"]
        assert len(runs.stored()) == 2
        runs.run("one, third time", 1)
        runs.run("two again", 2)
    assert runs.made == ["one", "two", "three", "two again"]
    beside = sorted(path.name for path in pool.folder.iterdir() if path.is_file())
    names = [path.name for path in runs.stored()]
    assert beside == sorted([*(f"{name}.json" for name in names), *(f".{name}.lock" for name in names)])
    assert verify(tmp_path) == 8


def test_a_pool_keeps_a_stage_that_another_process_uses_at_the_moment(runs: Runs, tmp_path: Path) -> None:
    with pooled(pool_in(tmp_path, most_bytes=0)):
        runs.run("one", 1)
    assert runs.stored() == []  # larger than the pool may be: only the run has it
    with pooled(pool_in(tmp_path)):
        runs.run("two", 1)
    (stored,) = runs.stored()
    with lock(stored):
        remove_least_recently_used(tmp_path / "pool", 0)
        assert runs.stored() == [stored]
    remove_least_recently_used(tmp_path / "pool", 0)
    assert list((tmp_path / "pool").iterdir()) == []


def test_a_pool_keeps_what_another_process_is_about_to_publish(tmp_path: Path) -> None:
    """The manifest is written before the folder gets its name."""
    pool = tmp_path / "pool"
    with lock(pool / "words-1"):
        unnamed = publish(pool / ".words-1.tmp-host-7-abc", kind="words", key={}, write=lambda folder: None).path
        remove_least_recently_used(pool, 0)
        assert unnamed.is_dir()
    with lock(pool / "words-1"):
        assert not unnamed.is_dir(), "of a killed process it is removed with the next lock"


def test_a_pool_removes_what_killed_builders_left(runs: Runs, tmp_path: Path) -> None:
    def die_while_building() -> None:
        with pooled(pool_in(tmp_path)):
            stage(tmp_path / "killed" / "words", kind="words", key={"value": 9}, write=lambda folder: die(), emit=silent)

    assert in_child(die_while_building) == -signal.SIGKILL
    assert list((tmp_path / "pool").glob(".*.tmp-*"))
    with pooled(pool_in(tmp_path)):
        runs.run("one", 1)
    assert not list((tmp_path / "pool").glob(".*.tmp-*"))
    assert len(list((tmp_path / "pool").glob(".*.lock"))) == 1


def test_a_lock_that_its_holder_removed_is_not_taken_for_that_of_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    with lock(target):
        handle = os.open(lock_file(target), os.O_RDWR)  # as of a process that waits
        lock_file(target).unlink()
    os.close(handle)
    with lock(target), pytest.raises(LockedError), lock(target):
        pass
