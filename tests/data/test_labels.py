"""Labels of the three kinds of task: what files may write, what is refused and how, and what training learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cramlm.config.run import OnBadRow, TaskConfig, load_config
from cramlm.data.labels import RULES, format_number
from cramlm.data.task import RowFormat, read_examples, read_task, split_dev
from cramlm.data.validation import check_files, count_repetitions, describe, files_of_task, read_labelled
from cramlm.errors import DataError, UsageError
from cramlm.records import Scale, TaskKind
from jsonl import write_labelled


def jsonl(path: Path, labels: list[Any]) -> str:
    return write_labelled(path, ((f"text {number}", label) for number, label in enumerate(labels)))


def labels_of(path: str | Path, kind: TaskKind, separator: str = "|", on_bad_row: OnBadRow = "fail") -> list[str | None]:
    row_format = RowFormat(kind=kind, label_separator=separator)
    return [example.label for example in read_examples(str(path), row_format, on_bad_row=on_bad_row)]


def test_several_labels_are_a_set_however_the_file_writes_them(tmp_path: Path) -> None:
    expected = ['["b", "ä"]', "[]", '["b"]']
    assert labels_of(jsonl(tmp_path / "a.jsonl", [["ä", "b"], [], ["b"]]), "multi-label") == expected
    (tmp_path / "a.csv").write_text("text,label\none,ä | b\ntwo,\nthree,b\n", "utf-8")
    assert labels_of(tmp_path / "a.csv", "multi-label") == expected
    (tmp_path / "a.tsv").write_text("text\tlabel\none\tä;b\ntwo\t\nthree\tb\n", "utf-8")
    assert labels_of(tmp_path / "a.tsv", "multi-label", separator=";") == expected
    texts = ["one", "two", "three"]
    pq.write_table(pa.table({"text": texts, "label": [["ä", "b"], [], ["b"]]}), tmp_path / "lists.parquet")
    pq.write_table(pa.table({"text": texts, "label": ["b|ä", "", "b"]}), tmp_path / "cells.parquet")
    assert labels_of(tmp_path / "lists.parquet", "multi-label") == labels_of(tmp_path / "cells.parquet", "multi-label") == expected


@pytest.mark.parametrize("separator", ["|", ","])
@pytest.mark.parametrize("cell", ["['sea', 'hill']", '["sea"]', "[]", "[1, 2]"])
def test_a_cell_that_holds_a_list_as_text_is_refused(cell: str, separator: str, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(f"text\tlabel\none\t[b] c\ntwo\t[1]\nthree\t{cell}\n", "utf-8")
    with pytest.raises(
        DataError, match=r"a\.tsv:4: 'label' is a list written as text \(.*\); write a\|b, or lists in \.jsonl or \.parquet"
    ):
        labels_of(tmp_path / "a.tsv", "multi-label", separator=separator)


def test_equal_numbers_have_equal_labels_in_any_notation(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\none,3\ntwo, -1e3\nthree,.5\nfour,-0.0\n", "utf-8")
    assert labels_of(tmp_path / "a.csv", "regression") == ["3.0", "-1000.0", "0.5", "0.0"]
    assert labels_of(jsonl(tmp_path / "a.jsonl", [3, -1e3, 0.5]), "regression") == ["3.0", "-1000.0", "0.5"]
    pq.write_table(pa.table({"text": ["one", "two"], "label": [3, -1000]}), tmp_path / "a.parquet")
    assert labels_of(tmp_path / "a.parquet", "regression") == ["3.0", "-1000.0"]


@pytest.mark.parametrize(
    ("kind", "label", "reason"),
    [
        (
            "classification",
            ["a"],
            r"a list \(\['a'\]\); write a label by itself \(jq .*, or for several per text pass --task-type multi-label; fix it, or",
        ),
        ("multi-label", "a", r"'label' is not a list of labels but a string \('a'\); write \[\"a\", \"b\"\], or \[\] for a text without"),
        ("multi-label", None, "not a list of labels but null"),
        ("multi-label", ["a", " "], "holds an empty label among 'a,  '"),
        ("multi-label", ["a", "b", "a"], "holds the label 'a' twice"),
        ("multi-label", ["a", ["b"]], "neither string, number nor boolean but a list"),
        ("regression", "3.5", r"'label' is not a number but a string \('3.5'\); write it like 3.5"),
        ("regression", ["3.5"], "not a number but a list"),
        ("regression", True, "not a number but a boolean"),
        ("regression", 1e31, "its absolute value is over 1e.30"),
    ],
)
def test_an_invalid_label_is_refused_with_file_and_line(kind: TaskKind, label: Any, reason: str, tmp_path: Path) -> None:
    good: Any = {"classification": "a", "multi-label": ["a"], "regression": 1.5}[kind]
    path = jsonl(tmp_path / "bad.jsonl", [good, label, good])
    with pytest.raises(DataError, match=rf"bad\.jsonl:2: .*{reason}"):
        labels_of(path, kind)
    assert len(labels_of(path, kind, on_bad_row="skip")) == 2


@pytest.mark.parametrize("cell", ["n/a", "nan", "inf", '"3,5"', "1_000", "", "0x10", "１"])
def test_a_cell_that_is_no_finite_number_is_refused(cell: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(f"text,label\none,1\ntwo,{cell}\n", "utf-8")
    with pytest.raises(DataError, match=r"bad\.csv:3: 'label' is not a number .*; write it like 3.5 or -1e3; fix it"):
        labels_of(tmp_path / "bad.csv", "regression")


@pytest.mark.parametrize(
    ("kind", "labels", "reason"),
    [
        ("multi-label", [[], [], []], "no row has a label"),
        ("multi-label", [["a|b"], ["b|c"], ["c"]], "less than twice each; is --label-separator the file's"),
        ("multi-label", [["a"]], "1 training row"),
        ("multi-label", [["a"], ["a"]], r"every row has the labels \('a'\); .* add rows without them \(an empty list\) or with others"),
        ("multi-label", [["b", "a"], ["a", "b"]], r"every row has the labels \('a', 'b'\); "),
        ("regression", [2, 2.0, 2], "every row has the number 2.0"),
        ("regression", [2], "1 training row; a regression needs more"),
        ("regression", [1.7e9, 1.7e9 + 1, 1.7e9 + 2], r"train\.jsonl: the mean of the numbers, 1700000001, is more than 1,000,000 "),
        ("regression", [-1e7, -1e7 + 2], "spread of 1, too much .*; subtract the mean from all numbers"),
        ("classification", ["a"], "1 training row"),
        ("classification", ["a", "a"], "every row has the label 'a'"),
        ("classification", [str(n / 7) for n in range(10)], "10 labels for 10 rows .* these look like numbers or ids"),
        ("classification", [1.5, 2.5, 3.5], "learn numbers with --task-type regression"),
    ],
)
def test_training_rows_that_no_model_can_learn_from_are_refused(kind: Any, labels: list[Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=reason):
        read_task(TaskConfig(train=jsonl(tmp_path / "train.jsonl", labels), kind=kind), seed=1)


def test_numbers_with_a_mean_far_above_their_spread_are_read_where_single_precision_has_enough_digits(tmp_path: Path) -> None:
    seconds = [1.7e9 + 86_400 * day for day in range(30)]
    task = read_task(TaskConfig(train=jsonl(tmp_path / "train.jsonl", seconds), kind="regression"), seed=1)
    in_single_precision = np.array([str(each.label) for each in task.train], np.float64).astype(np.float32)
    assert len(set(in_single_precision.tolist())) == len(task.train)


def test_labels_that_are_not_in_train_are_refused(tmp_path: Path) -> None:
    train, test = jsonl(tmp_path / "train.jsonl", [["a", "b"], ["b"], [], ["a"]] * 3), jsonl(tmp_path / "test.jsonl", [["a", "c"], []])
    config = TaskConfig(train=train, test=test, kind="multi-label")
    with pytest.raises(DataError, match=r"test\.jsonl:1: label 'c' is not among the training labels \('a', 'b'\), in 1 row;"):
        read_task(config, seed=1)
    task = read_task(config.model_copy(update={"unseen_labels": "ignore"}), seed=1)
    assert (task.kind, task.labels, len(task.dev)) == ("multi-label", ("a", "b"), 1)
    rules = RULES["multi-label"]
    ids, targets = rules.targets(['["a", "b"]', "[]", '["b"]'], task.labels, task.scale)
    assert ids.tolist() == [0, 0, 0]
    assert targets.tolist() == [[1, 1], [0, 0], [0, 1]]
    assert rules.plain('["a", "b"]') == ["a", "b"]


def test_number_targets_are_scaled_by_the_training_rows(tmp_path: Path) -> None:
    values = [1.0, 2.5, 7.0, 100.0]
    train, dev = jsonl(tmp_path / "train.jsonl", values), jsonl(tmp_path / "dev.jsonl", [1e6])
    task = read_task(TaskConfig(train=train, dev=dev, kind="regression"), seed=1)
    assert (task.labels, task.scale) == (("label",), Scale(float(np.mean(values)), float(np.std(values))))
    _, targets = RULES["regression"].targets([str(each.label) for each in task.train], task.labels, task.scale)
    np.testing.assert_allclose(targets[:, 0], (np.array(values) - np.mean(values)) / np.std(values), rtol=1e-6)


def test_without_strata_a_dev_split_is_random_and_keeps_equal_texts_together(tmp_path: Path) -> None:
    examples = read_examples(jsonl(tmp_path / "a.jsonl", [number / 7 for number in range(40)]), RowFormat(kind="regression"))
    twice = [*examples, *examples]
    train, dev = split_dev(twice, fraction=0.2, seed=1, stratum=RULES["regression"].stratum)
    assert len(dev) == 16
    assert not {example.text for example in train} & {example.text for example in dev}
    assert dev != split_dev(twice, fraction=0.2, seed=2, stratum=RULES["regression"].stratum)[1]


def test_check_reports_unusual_labels_and_numbers(tmp_path: Path) -> None:
    train = read_labelled(jsonl(tmp_path / "train.jsonl", [["a", "b"], ["b"], [], ["b"], ["b"], ["b"]]), RowFormat(kind="multi-label"))
    test = read_labelled(jsonl(tmp_path / "test.jsonl", [["c"]]), RowFormat(kind="multi-label"))
    assert describe(train)["labels"] == {"b": 5, "a": 1}
    rules = {finding.rule for finding in check_files(train, [test])}
    assert rules >= {"rare-label", "unseen-label", "missing-label", "leak"}
    numbers = read_labelled(jsonl(tmp_path / "numbers.jsonl", [1, 2, 4]), RowFormat(kind="regression"))
    far = read_labelled(jsonl(tmp_path / "far.jsonl", [9]), RowFormat(kind="regression"))
    assert (describe(numbers)["labels"], describe(numbers)["numbers"]) == ({}, (1.0, 2.0, 4.0))
    assert "number 9.0 is outside those of the training rows (1 to 4)" in [finding.message for finding in check_files(numbers, [far])]
    assert "equal-numbers" in {finding.rule for finding in check_files(numbers, [far])}
    assert "equal-numbers" not in {finding.rule for finding in check_files(numbers, [numbers])}


def test_a_text_with_two_numbers_is_a_conflict(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("text,label\nsame,1\nsame,1.0\nother,2\nother,3\nthird,4\n", "utf-8")
    task = read_task(TaskConfig(train=str(path), dev=str(path), kind="regression"), seed=1)
    found = count_repetitions(task)
    assert (found.train, found.conflicting) == (2, 1)
    assert files_of_task(task)[0].kind == "regression"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"dev_metric": "accuracy"},
            "dev_metric 'accuracy' is not a metric of task.kind 'regression'; choose one of pearson, spearman, r2",
        ),
        ({"head": {"kind": "prompt", "pooling": "cls"}}, "head.kind 'prompt' predicts one label; with task.kind 'regression' set"),
        (
            {"phases": [{"name": "a", "terms": [{"kind": "important_tokens"}]}]},
            "the term 'important_tokens' needs tasks with one label per text",
        ),
        ({"teacher": {"align_distribution": True}}, "teacher.align_distribution needs tasks with one label per text"),
        ({"phases": [{"name": "a", "terms": [{"kind": "classify", "label_smoothing": 0.1}]}]}, "set label_smoothing = 0"),
    ],
)
def test_a_config_that_does_not_fit_the_kind_of_task_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load_config({"task": {"train": "a", "kind": "regression"}, "phases": [{"name": "a", "terms": [{"kind": "classify"}]}], **changes})


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((1000130.5, 1000204.25, 1000280.0), "numbers from 1000130.5 to 1000280, mean 1000204.9, spread 61.03"),
        ((1.0, 2.0, 4.0), "numbers from 1 to 4, mean 2.33333, spread 1.247"),
        ((-5e-9, 0.0, 5e-9), "numbers from -5e-09 to 5e-09, mean 0, spread 4.082e-09"),
    ],
)
def test_numbers_that_differ_little_are_shown_with_the_digits_that_differ(numbers: tuple[float, ...], words: str) -> None:
    assert RULES["regression"].summarize([format_number(number) for number in numbers], ["label"]) == words
