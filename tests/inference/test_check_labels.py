"""`cramlm check --model`: rows with a wrong label are found at their file and line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import cramlm, error_line, succeed
from cramlm.data.task import RowFormat
from cramlm.data.validation import read_labelled
from cramlm.inference.label_errors import contradicted_labels, find_suspicious_rows, suspicious_labels
from cramlm.records import Event, FloatArray
from cramlm.storage.artifacts import MANIFEST
from jsonl import read_jsonl, write_jsonl, write_labelled

WRONG = 7  # a line whose label is swapped


@pytest.fixture
def corrupted(tiny_run: Path, tmp_path: Path) -> Path:
    """The training file of the run with one wrong label."""
    rows = read_jsonl(tiny_run / "data/train.jsonl")
    rows[WRONG - 1] = {"text": "ship harbour sailor tide anchor reef gull captain island", "label": "hill"}
    return write_jsonl(tmp_path / "train.jsonl", rows)


def found(model: Path, train: Path) -> tuple[list[Any], list[Event]]:
    events: list[Event] = []
    return find_suspicious_rows(model, read_labelled(str(train), RowFormat()), emit=events.append), events


def test_a_wrong_label_is_the_most_suspicious_one_at_its_line(finished: Path, corrupted: Path) -> None:
    rows, _ = found(finished, corrupted)
    assert rows[0].location == f"{corrupted}:{WRONG}"
    assert (rows[0].label, rows[0].suggested) == ("hill", "sea")
    assert rows[0].label_probability < 0.3 < 0.7 < rows[0].suggested_probability
    result = cramlm("check", corrupted, "--model", finished, "--json")
    listed = json.loads(result.stdout)["suspicious_labels"]
    assert listed == [row.as_dict() for row in rows]
    printed = cramlm("check", corrupted, "--model", finished).stdout
    assert f"{corrupted}:{WRONG}: notice: suspicious-label: label 'hill' has probability" in printed
    assert "suspicious_labels" not in json.loads(cramlm("check", corrupted, "--json").stdout)


def test_the_probabilities_of_the_teacher_are_those_of_a_new_fit(tiny_run: Path, finished: Path, tmp_path: Path) -> None:
    rows, events = found(finished, tiny_run / "data/train.jsonl")
    assert "those of the run's teacher" in events[-1].message
    without = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(without / "teacher")
    again, events = found(without, tiny_run / "data/train.jsonl")
    assert "predicted out of fold by the linear model" in events[-1].message
    assert {row.location for row in again} == {row.location for row in rows}


def test_an_exported_model_uses_its_linear_model(finished: Path, corrupted: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(finished / "export", tmp_path / "model")
    assert found(copied, corrupted)[0][0].location == f"{corrupted}:{WRONG}"
    assert found(copied / "combination" / "tfidf", corrupted)[0][0].location == f"{corrupted}:{WRONG}"
    (copied / MANIFEST).unlink()
    shutil.rmtree(copied / "combination")
    assert "holds no linear model" in error_line(cramlm("check", corrupted, "--model", copied), 2)


def test_what_makes_no_sense_is_one_line(finished: Path, corrupted: Path, tmp_path: Path) -> None:
    several = write_labelled(tmp_path / "several.jsonl", [("a b", ["sea"]), ("c d", [])])
    strange = write_labelled(tmp_path / "strange.jsonl", [("a b", "sea"), ("c d", "lake")])
    for arguments, code, needle in (
        ((several, "--model", finished, "--task-type", "multi-label"), 2, "pass --task-type classification"),
        ((strange, "--model", finished), 3, "'sea'); drop the row, or pass a model of these labels"),
        ((corrupted, "--model", tmp_path), 5, str(tmp_path)),
    ):
        assert needle in error_line(cramlm("check", *arguments), code)


def test_columns_and_kind_of_task_are_those_of_the_run(tmp_path: Path) -> None:
    lines = [f"{'sea ship' if number % 2 else 'hill path'} {number}\t{'wet+blue' if number % 2 else 'dry'}" for number in range(20)]
    train = tmp_path / "train.tsv"
    train.write_text("\n".join(["body\ttopics", *lines, "sea ship\tdry"]), "utf-8")
    columns = ("--text-column", "body", "--label-column", "topics", "--label-separator", "+", "--task-type", "multi-label")
    succeed("fit", "--recipe", "tfidf", *columns, "--set", "threads=1", "--train", train, "-o", tmp_path / "run")
    result = json.loads(cramlm("check", train, "--model", tmp_path / "run", "--json").stdout)
    assert {row["location"] for row in result["suspicious_labels"]} == {f"{train}:22"}
    assert "found 'body', 'topics'; pass --text-column" in error_line(cramlm("check", train), 3)


def test_a_model_of_numbers_is_refused_without_advice_that_does_not_help(tmp_path: Path) -> None:
    train = write_labelled(tmp_path / "train.jsonl", [(f"text {number} {number % 3}", number % 3) for number in range(20)])
    fit = ("fit", "--recipe", "tfidf", "--task-type", "regression", "--set", "baseline.c=[3.0]", "--set", "threads=1")
    succeed(*fit, "--train", train, "-o", tmp_path / "run")
    for kind in ("classification", "regression"):
        refused = error_line(cramlm("check", train, "--model", tmp_path / "run", "--task-type", kind), 2)
        assert refused.endswith("this is a regression task; leave out --model")
    assert "reading" not in cramlm("check", train, "--model", tmp_path / "run").stderr


def test_in_a_run_of_naive_bayes_its_regression_predicts_the_texts_out_of_fold(linear_runs: Path, tmp_path: Path) -> None:
    train = linear_runs / "data/train.jsonl"
    assert found(linear_runs / "bayes", train)[0] == found(linear_runs / "tfidf", train)[0]
    alone = shutil.copytree(linear_runs / "bayes/export", tmp_path / "alone")
    needle = "holds no linear model to predict training texts out of fold (tfidf or static)"
    assert needle in error_line(cramlm("check", train, "--model", alone), 2)


def rows(*values: tuple[float, ...]) -> FloatArray:
    return np.array(values, dtype=np.float32)


def test_a_text_is_suspicious_if_another_label_is_at_least_as_probable_as_for_the_texts_that_have_it() -> None:
    probabilities = rows((0.9, 0.1), (0.7, 0.3), (0.2, 0.8), (0.1, 0.9), (0.15, 0.85))
    labels = np.array([0, 0, 1, 1, 0])  # thresholds: (0.9 + 0.7 + 0.15) / 3 = 0.583 and 0.85
    assert suspicious_labels(probabilities, labels) == [(4, 1)]
    assert suspicious_labels(probabilities[:4], labels[:4]) == []


def test_the_threshold_of_a_label_is_its_own_mean_so_that_rare_labels_are_found() -> None:
    probabilities = rows(*[(0.9, 0.1)] * 8, (0.75, 0.25), (0.72, 0.28), (0.7, 0.3))
    labels = np.array([0] * 8 + [1, 1, 0])  # the model gives label 1 at most 0.3: its threshold is 0.265, that of label 0 is 0.878
    assert suspicious_labels(probabilities, labels) == []  # label 1 is confident for row 10, but less probable than its own label
    softer = rows(*[(0.9, 0.1)] * 8, (0.75, 0.25), (0.72, 0.28), (0.2, 0.3))
    assert [row for row, _ in suspicious_labels(softer, labels)] == [10]


def test_the_largest_margin_comes_first() -> None:
    probabilities = rows((0.4, 0.6), (0.05, 0.95), (0.2, 0.8), *[(0.8, 0.2)] * 9, *[(0.45, 0.55)] * 3)
    labels = np.array([0] * 12 + [1] * 3)
    assert [row for row, _ in suspicious_labels(probabilities, labels)] == [1, 2, 0]


@given(st.integers(0, 50))
def test_texts_that_were_not_predicted_are_left_out(seed: int) -> None:
    random = np.random.default_rng(seed)
    probabilities = random.dirichlet(np.ones(3), size=40).astype(np.float32)
    labels = random.integers(0, 3, 40)
    missing = random.random(40) < 0.3
    probabilities[missing] = np.nan
    found = suspicious_labels(probabilities, labels)
    kept = np.flatnonzero(~missing)
    again = suspicious_labels(probabilities[kept], labels[kept])
    assert found == [(int(kept[row]), suggested) for row, suggested in again]
    assert all(suggested != labels[row] and probabilities[row, suggested] > probabilities[row, labels[row]] for row, suggested in found)


def test_of_several_labels_each_is_suspicious_by_itself_if_given_or_missing() -> None:
    probabilities = rows((0.9, 0.1), (0.8, 0.2), (0.1, 0.9), (0.2, 0.7), (0.96, np.nan), (0.05, 0.4))
    has = np.array([[1, 0], [1, 0], [0, 1], [0, 1], [0, 1], [1, 0]], dtype=bool)
    assert contradicted_labels(probabilities, has) == [(4, 0), (5, 0)], "label 0 is missing in row 4 and given in row 5"
