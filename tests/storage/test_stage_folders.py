"""Stages: one builder at a time, nothing built twice, and a reason for what is built again."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact_fixtures import NEW, OLD, ReleasedWhenWaitedFor, contents, die, in_child, publish_version, writer
from cramlm.errors import ArtifactError, LockedError, UsageError
from cramlm.records import Event, silent
from cramlm.storage.artifacts import borrowed_seconds, explain_difference, hash_json, lock, pooled, shared_stage, stage, verify
from cramlm.storage.locks import wait_limit


def test_a_second_builder_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    with lock(tmp_path / "thing"):
        assert in_child(lambda: publish_locked(tmp_path / "thing")) == 7
        with pytest.raises(LockedError, match=f"pid {os.getpid()} on {socket.gethostname()}"), lock(tmp_path / "thing"):
            pass
    assert in_child(lambda: publish_locked(tmp_path / "thing")) == 0


def publish_locked(target: Path) -> None:
    stage(target, kind="thing", key=OLD, write=writer("x"), emit=silent)


def test_of_two_builders_of_a_shared_folder_one_builds_and_the_other_waits_for_it(tmp_path: Path) -> None:
    publish_version(tmp_path / "thing", OLD)
    first = ReleasedWhenWaitedFor(tmp_path / "thing")
    artifact = shared_stage(tmp_path / "thing", kind="thing", key=NEW, write=writer("content 2"), emit=first)
    assert artifact.key == NEW
    assert f"waiting: {tmp_path / 'thing'}: being built by another process (pid {os.getpid()}" in first.notes[0]


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


def test_the_hash_of_json_does_not_depend_on_the_order_of_keys() -> None:
    assert hash_json({"a": 1, "b": [1, 2]}) == hash_json({"b": [1, 2], "a": 1}) != hash_json({"a": 1, "b": [2, 1]})


def test_runs_with_a_pool_make_an_equal_stage_once_and_count_its_time_each(tmp_path: Path) -> None:
    made: list[str] = []

    def run(name: str, value: int, kind: str = "words") -> Path:
        def write(folder: Path) -> None:
            made.append(name)
            (folder / "sub").mkdir()
            (folder / "sub" / "numbers.txt").write_text(str(value), "utf-8")

        return stage(tmp_path / name / kind, kind=kind, key={"value": value}, write=write, emit=silent).path

    borrowed = {}
    for name, value in (("one", 1), ("two", 1), ("three", 2)):
        with pooled(tmp_path / "pool", frozenset({"words"})) as pool:
            assert (run(name, value) / "sub" / "numbers.txt").read_text("utf-8") == str(value)
            run(name, value, kind="own")
            borrowed[name] = borrowed_seconds()
            run(name, value)  # up to date: neither built nor counted again
            assert pool.borrowed_seconds == borrowed[name]
    assert made == ["one", "one", "two", "three", "three"]
    assert borrowed["two"] > 0 == borrowed["one"] == borrowed["three"]
    assert borrowed_seconds() == 0
    assert (tmp_path / "one/words/sub/numbers.txt").samefile(tmp_path / "two/words/sub/numbers.txt")
    assert verify(tmp_path) == 8
