from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.config.run import TaskConfig
from cramlm.data.task import (
    RowFormat,
    count_training,
    load_task,
    read_examples,
    read_task,
    save_task,
    split_dev,
    task_fingerprint,
    text_key,
)
from cramlm.errors import ArtifactError, DataError, UsageError
from cramlm.records import Event, Example, Scale, Task, silent
from jsonl import write_jsonl, write_labelled

ROWS = [(f"text number {n}", "ab"[n % 2]) for n in range(20)]


def read(tmp_path: Path, train: list[tuple[Any, Any]], **options: Any) -> tuple[Task, list[Event]]:
    events: list[Event] = []
    for split in ("dev", "test"):
        if isinstance(options.get(split), list):
            options[split] = write_labelled(tmp_path / f"{split}.jsonl", options[split])
    config = TaskConfig(train=write_labelled(tmp_path / "train.jsonl", train), **options)
    return read_task(config, seed=options.get("seed", 13), emit=events.append), events


def test_a_task_has_its_rows_in_order_and_sorted_labels(tmp_path: Path) -> None:
    task, events = read(tmp_path, [("x", "b"), ("y", "a"), ("z", "b"), ("w", "a")], dev=[("d", "a")], test=[("t", "b")])
    assert task.labels == ("a", "b")
    assert task.train[1] == Example("train:2", "y", None, "a")
    assert [example.id for example in (*task.dev, *task.test)] == ["dev:1", "test:1"]
    assert not task.dev_is_split_from_train
    assert events[-1].message == "4 train, 1 dev, 1 test examples, 2 labels"


def test_labels_are_strings_whatever_they_look_like(tmp_path: Path) -> None:
    assert read(tmp_path, [(f"x{n}", n % 2) for n in range(6)])[0].labels == ("0", "1")
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"x{n},007\ny{n},1\nz{n},1.0\nw{n},true\n" for n in range(3)))
    task = read_task(TaskConfig(train=str(tmp_path / "train.csv")), seed=1)
    assert task.labels == ("007", "1", "1.0", "true")


@pytest.mark.parametrize(
    ("row", "words"), [((" ", "a"), "'text' is blank"), *((("x", label), "label 'label' is empty") for label in ("", None, " "))]
)
def test_a_row_without_text_or_label_fails_by_line_or_is_skipped(tmp_path: Path, row: tuple[Any, Any], words: str) -> None:
    rows = [*ROWS, row]
    with pytest.raises(DataError, match=f"train.jsonl:21: .*{words}"):
        read(tmp_path, rows)
    task, events = read(tmp_path, rows, on_bad_row="skip")
    assert len(task.train) + len(task.dev) == 20
    warning = next(event for event in events if event.kind == "warning")
    assert warning.data["rejected"][0]["line"] == 21
    assert warning.data["split"] == "train"


@pytest.mark.parametrize("on_bad_row", ["fail", "skip"])
def test_a_file_without_labels_is_refused_with_a_remedy_that_skipping_rows_is_not(tmp_path: Path, on_bad_row: str) -> None:
    rows = [("x", ""), ("y", None), ("z", " ")]
    words = r"test.jsonl: no row has a label in column 'label'; leave the file out, or rename the column of its labels to 'label'$"
    with pytest.raises(DataError, match=words):
        read(tmp_path, ROWS, test=rows, on_bad_row=on_bad_row)
    with pytest.raises(DataError, match=r"train.jsonl: no row has a label in column 'label'; pass --label-column$"):
        read(tmp_path, rows, on_bad_row=on_bad_row)
    if on_bad_row == "skip":
        assert len(read(tmp_path, ROWS, test=[*rows, ("w", "a")], on_bad_row="skip")[0].test) == 1
    else:
        with pytest.raises(DataError, match=r"test.jsonl:1: label 'label' is empty; fix it, or pass --on-bad-row skip"):
            read(tmp_path, ROWS, test=[*rows, ("w", "a")])


def test_a_file_of_texts_with_several_labels_needs_one_row_that_has_one(tmp_path: Path) -> None:
    rows = [(f"text {number}", labels) for number, labels in enumerate([["a"], ["b"], ["a", "b"], []] * 3)]
    with pytest.raises(DataError, match=r"test.jsonl: no row has a label in column 'label'; leave the file out"):
        read(tmp_path, rows, test=[("x", []), ("y", [])], kind="multi-label")
    assert len(read(tmp_path, rows, test=[("x", []), ("y", ["b"])], kind="multi-label")[0].test) == 2


def test_a_label_with_one_example_is_a_warning(tmp_path: Path) -> None:
    task, events = read(tmp_path, [*ROWS, ("alone", "rare")])
    assert "rare" in {example.label for example in task.train}
    assert [event.message.split(": ")[1][:30] for event in events if event.kind == "warning"] == ["label 'rare' has 1 training ex"]


def test_a_label_that_training_lacks_fails_or_is_ignored_and_counted(tmp_path: Path) -> None:
    test = [("t", "a"), ("u", "new"), ("v", "new")]
    with pytest.raises(DataError, match=r"test.jsonl:2: label 'new' is not among the training labels \('a', 'b'\), in 2 rows;"):
        read(tmp_path, ROWS, test=test)
    with pytest.raises(DataError, match=r"\('a', 'b'\), in 1 row; 'A ' differs from 'a' in case, Unicode form or white space only; fix"):
        read(tmp_path, ROWS, test=[("t", "A ")])
    task, events = read(tmp_path, ROWS, test=test, unseen_labels="ignore")
    assert len(task.test) == 3
    assert task.labels == ("a", "b")
    assert next(event for event in events if event.kind == "warning").data == {"split": "test", "unseen": 2}


def test_text_pairs_are_read_and_checked(tmp_path: Path) -> None:
    lines = [{"premise": f"p{n}", "hypothesis": f"h{n}", "label": "xy"[n % 2]} for n in range(8)]
    write_jsonl(tmp_path / "a.jsonl", lines)
    config = TaskConfig(train=str(tmp_path / "a.jsonl"), text_column="premise", text_pair_column="hypothesis")
    task = read_task(config, seed=1)
    number = int(task.train[0].id.removeprefix("train:")) - 1
    assert task.train[0].whole_text == f"p{number} h{number}"
    (tmp_path / "blank.jsonl").write_text('{"premise": "p", "hypothesis": " ", "label": "x"}\n')
    with pytest.raises(DataError, match=r"blank.jsonl:1: 'hypothesis' is blank"):
        read_task(config.model_copy(update={"train": str(tmp_path / "blank.jsonl")}), seed=1)
    with pytest.raises(UsageError, match=r"--text-column and --text-pair-column name the same column, .text.; pass different ones"):
        read_task(TaskConfig(train=str(tmp_path / "a.jsonl"), text_pair_column="text"), seed=1)


def test_without_dev_a_stored_and_repeatable_part_of_train_is_split_off(tmp_path: Path) -> None:
    rows = [(f"text {n}", "abc"[n % 3]) for n in range(90)]
    task, events = read(tmp_path, rows)
    assert task.dev_is_split_from_train
    assert Counter(example.label for example in task.dev) == {"a": 3, "b": 3, "c": 3}
    note = next(event for event in events if event.kind == "note")
    assert note.message == "no dev file: 9 of 90 training rows split off for dev (seed 13)"
    assert note.data["dev"] == [example.id for example in task.dev]
    assert task_fingerprint(read(tmp_path, rows)[0]) == task_fingerprint(task)
    assert split_dev([*task.train], fraction=0.1, seed=1)[1] != split_dev([*task.train], fraction=0.1, seed=2)[1]


@given(
    rows=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xyz")), min_size=4, max_size=60),
    fraction=st.floats(0.05, 0.45),
    seed=st.integers(0, 5),
)
def test_a_split_loses_no_row_shares_no_text_and_leaves_every_label_in_train(
    rows: list[tuple[str, str]], fraction: float, seed: int
) -> None:
    examples = [Example(str(n), text, None, label) for n, (text, label) in enumerate(rows)]
    try:
        train, dev = split_dev(examples, fraction=fraction, seed=seed)
    except DataError:
        return  # nothing could be spared
    assert sorted((*train, *dev), key=lambda example: int(example.id)) == examples
    assert dev
    assert {text_key(example) for example in train}.isdisjoint(text_key(example) for example in dev)
    assert {example.label for example in train} == {example.label for example in examples}


def test_one_text_many_times_is_too_little_for_a_dev_set() -> None:
    examples = [Example(f"{number}", "the same text", None, "ab"[number % 2]) for number in range(8)]
    with pytest.raises(DataError, match=r"^1 distinct text, too few to split a dev set off$"):
        split_dev(examples, fraction=0.1, seed=1)


def test_a_training_file_of_too_few_texts_for_a_dev_set_is_named_with_a_remedy(tmp_path: Path) -> None:
    remedy = "too few to split a dev set off; pass --dev FILE, or add rows with other texts"
    with pytest.raises(DataError, match=f"train.jsonl: 2 distinct texts, {remedy}, of which one label needs at least 2$"):
        read(tmp_path, [("ship", "sea"), ("Ship ", "sea"), ("ridge", "hill"), ("ridge", "hill")])
    with pytest.raises(DataError, match=f"train.jsonl: 1 distinct text, {remedy}$"):
        read(tmp_path, [("ship", 1), ("ship", 2)], kind="regression")
    with pytest.raises(DataError, match=r"train.jsonl: 1 distinct text, "):
        count_training(TaskConfig(train=str(tmp_path / "train.jsonl"), kind="regression"), seed=1)


def test_fingerprints_depend_on_content_and_order_only(tmp_path: Path) -> None:
    one = task_fingerprint(read(tmp_path, ROWS, dev=ROWS[:2])[0])
    assert set(one) == {"train", "dev", "test", "labels", "label_texts"}
    (tmp_path / "other").mkdir()
    assert task_fingerprint(read(tmp_path / "other", ROWS, dev=ROWS[:2])[0]) == one
    changed = task_fingerprint(read(tmp_path, ROWS, dev=ROWS[1::-1])[0])
    assert changed["train"] == one["train"]
    assert changed["dev"] != one["dev"]


def test_texts_to_predict_keep_order_and_need_no_label(tmp_path: Path) -> None:
    unlabelled = RowFormat(label_column=None)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert [(e.id, e.text, e.label) for e in read_examples(str(tmp_path / "a.txt"), unlabelled)] == [("1", "one", None), ("2", "two", None)]
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    with pytest.raises(DataError, match=r"b.txt:2: 'text' is blank"):
        read_examples(str(tmp_path / "b.txt"), unlabelled)
    for rows, message in (
        ([(" ", "a")], "no rows left, the only one was rejected, line 1: 'text' is blank; fix it"),
        ([], r"c.jsonl: no rows; pass a file with data"),
    ):
        with pytest.raises(DataError, match=message):
            read_examples(write_labelled(tmp_path / "c.jsonl", rows), unlabelled, on_bad_row="skip")
    with pytest.raises(DataError, match=r"all 2 were rejected, line 1: no column 'body'; found 'text', 'label'; pass --text-column$"):
        read_examples(write_labelled(tmp_path / "c.jsonl", [("x", "a")] * 2), replace(unlabelled, text_column="body"), on_bad_row="skip")
    with pytest.raises(UsageError, match="a text file has no column"):
        read_examples(str(tmp_path / "a.txt"), RowFormat())


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
rows = st.builds(Example, texts, texts, st.none() | texts, texts)
unlabelled_rows = st.builds(Example, texts, texts, st.none() | texts, st.none())
splits = st.lists(rows, max_size=4).map(tuple)
names = st.lists(texts, max_size=3).map(tuple)
scales = st.builds(Scale, st.floats(-1e9, 1e9), st.just(0.1))
kinds = st.sampled_from(["classification", "multi-label", "regression"])
unlabelled = st.lists(unlabelled_rows, max_size=2).map(tuple)


@given(st.builds(Task, splits, splits, splits, names, st.booleans(), kind=kinds, scale=scales, unlabelled=unlabelled))
def test_a_saved_task_is_loaded_unchanged(tmp_path: Path, task: Task) -> None:
    save_task(task, tmp_path, emit=silent)
    assert load_task(tmp_path) == task


def test_a_task_is_saved_again_only_if_a_row_changes(tmp_path: Path) -> None:
    events: list[Event] = []
    for text in ("one", "one", "two"):
        task = Task((Example("train:1", text, None, "a"),), (), (), ("a",), dev_is_split_from_train=True)
        save_task(task, tmp_path, emit=events.append)
    assert [event.kind for event in events] == ["up_to_date", "stale"]
    assert load_task(tmp_path).train[0].text == "two"


def test_a_task_whose_unlabelled_texts_have_other_ids_is_saved_again(tmp_path: Path) -> None:
    for name in ("1", "2"):
        own = (Example(f"unlabelled:{name}", "one", None, None),)
        save_task(Task((), (), (), (), dev_is_split_from_train=True, unlabelled=own), tmp_path, emit=silent)
        assert load_task(tmp_path).unlabelled == own


def test_a_damaged_or_missing_saved_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such folder"):
        load_task(tmp_path)
    save_task(Task((Example("train:1", "one", None, "a"),), (), (), ("a",), dev_is_split_from_train=True), tmp_path, emit=silent)
    (tmp_path / "task/train.jsonl").write_text("{}\n", "utf-8")
    with pytest.raises(ArtifactError, match=r"train\.jsonl: damaged"):
        load_task(tmp_path)


def test_unlabelled_texts_are_distinct_and_none_is_the_text_of_a_labelled_row(tmp_path: Path) -> None:
    rows = [("New text", None), ("new  TEXT", None), ("text number 3", None), ("of dev", None), ("another", None)]
    files = [write_labelled(tmp_path / f"more-{number}.jsonl", part) for number, part in enumerate((rows[:3], rows[3:]))]
    task, events = read(tmp_path, ROWS, dev=[("of dev", "a")], unlabelled=tuple(files))
    assert [(example.id, example.text, example.label) for example in task.unlabelled] == [
        ("unlabelled:1", "New text", None),
        ("unlabelled:2", "another", None),
    ]
    assert task.queries[-2:] == ["New text", "another"]
    assert len(task.queries) == len(ROWS) + 2
    assert "3 of 5 unlabelled texts left out" in "".join(event.message for event in events)
    assert "2 unlabelled texts" in events[-1].message


def test_unlabelled_texts_are_a_part_of_the_fingerprint_of_their_own(tmp_path: Path) -> None:
    plain, _ = read(tmp_path, ROWS)
    more, _ = read(tmp_path, ROWS, unlabelled=(write_labelled(tmp_path / "more.jsonl", [("new", None)]),))
    assert task_fingerprint(plain) == {name: value for name, value in task_fingerprint(more).items() if name != "unlabelled"}


def test_the_words_of_a_label_name_are_a_text_of_that_label(tmp_path: Path) -> None:
    labels = ("rec.sport.hockey", "CompareOrContrast", "USED_FOR", "HTMLText", "Sci/Tech", "体育", "7", "--")
    rows = [(f"text {label} {n}", label) for label in labels for n in range(3)]
    task, _ = read(tmp_path, rows)
    texts = {example.label: example.text for example in task.label_texts}
    assert texts == {
        "CompareOrContrast": "Compare Or Contrast",
        "HTMLText": "HTML Text",
        "Sci/Tech": "Sci Tech",
        "USED_FOR": "USED FOR",
        "rec.sport.hockey": "rec sport hockey",
        "体育": "体育",
    }
    assert task.with_label_texts.train == (*task.train, *task.label_texts)
    save_task(task, tmp_path / "run", emit=silent)
    assert load_task(tmp_path / "run") == task


def test_label_names_are_no_texts_if_the_setting_is_off_or_texts_have_several_labels(tmp_path: Path) -> None:
    assert read(tmp_path, ROWS, label_names=False)[0].label_texts == ()
    assert read(tmp_path, [(text, [label]) for text, label in ROWS], kind="multi-label")[0].label_texts == ()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("text number 3", None), ("text number 3", None)], "all 2 unlabelled texts are those of labelled rows"),
        ([("fine", None), (" ", None)], "more.jsonl:2: 'text' is blank"),
    ],
)
def test_unlabelled_files_without_new_text_or_with_a_bad_row_are_refused(tmp_path: Path, rows: list[tuple[Any, Any]], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(tmp_path, ROWS, unlabelled=(write_labelled(tmp_path / "more.jsonl", rows),))
    with pytest.raises(UsageError, match="cannot come from standard input"):
        read(tmp_path, ROWS, unlabelled=("-",))
