"""The copy of a task that a run keeps: what is read back is what was kept, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.data.task import load_task, save_task
from cramlm.errors import ArtifactError
from cramlm.records import Event, Example, Scale, Task, silent

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
rows = st.builds(Example, texts, texts, st.none() | texts, texts)
splits = st.lists(rows, max_size=4).map(tuple)


@given(splits, splits, splits, st.lists(texts, max_size=3).map(tuple), st.booleans(), st.floats(-1e9, 1e9))
def test_what_is_kept_is_read_back_as_it_was(
    tmp_path: Path,
    train: tuple[Example, ...],
    dev: tuple[Example, ...],
    test: tuple[Example, ...],
    labels: tuple[str, ...],
    split: bool,
    mean: float,
) -> None:
    task = Task(train, dev, test, labels, split, kind="regression", scale=Scale(mean, 0.1))
    save_task(task, tmp_path, emit=silent)
    assert load_task(tmp_path) == task


def test_it_is_written_again_when_a_row_changes_and_not_otherwise(tmp_path: Path) -> None:
    events: list[Event] = []
    for text in ("one", "one", "two"):
        task = Task((Example("train:1", text, None, "a"),), (), (), ("a",), dev_is_split_from_train=True)
        save_task(task, tmp_path, emit=events.append)
    assert [event.kind for event in events] == ["up_to_date", "stale"]
    assert load_task(tmp_path).train[0].text == "two"


def test_a_damaged_or_missing_copy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such folder"):
        load_task(tmp_path)
    save_task(Task((Example("train:1", "one", None, "a"),), (), (), ("a",), dev_is_split_from_train=True), tmp_path, emit=silent)
    (tmp_path / "task/train.jsonl").write_text("{}\n", "utf-8")
    with pytest.raises(ArtifactError, match=r"train\.jsonl: damaged"):
        load_task(tmp_path)
