"""A model of sentence pairs reads pairs, one of single texts reads none, and both read the columns that they were trained on."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from commands import cramlm, error_line, printed, succeed
from cramlm.data.task import RowFormat
from cramlm.errors import UsageError
from cramlm.export.hub import published, published_settings
from cramlm.export.onnx import export_onnx
from cramlm.inference.base import SETTINGS_FILE, are_pairs
from cramlm.inference.explain import explain, log_odds
from cramlm.inference.folders import columns_of
from cramlm.inference.predictor import Predictor
from cramlm.records import Example
from cramlm.serving.batching import load_model
from jsonl import read_json, write_jsonl
from server_process import LABELS

NEEDS_PAIRS = "trained on pairs of texts; pass the second text of each"
NEEDS_NONE = "trained on single texts; leave out the second ones"
COLUMNS = ("--text-column", "premise", "--text-pair-column", "hypothesis", "--label-column", "relation")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of tfidf on pairs and on single texts, and a file of pairs, in one folder."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {"premise": f"the {word} is {here}", "hypothesis": f"a {word} is {there}", "relation": str(here == there)}
        for word in ("ship", "boat", "path", "hill", "reef", "peak")
        for here in ("wet", "dry", "old")
        for there in ("wet", "dry")
    ]
    file = write_jsonl(folder / "pairs.jsonl", rows)
    next_commands = printed("fit", "--recipe", "tfidf", "--train", file, *COLUMNS, "-o", folder / "pairs", cwd=folder).splitlines()[-3:]
    assert [line.split()[1] for line in next_commands] == ["predict", "explain", "serve"]
    assert next_commands[1].endswith('"some text" --text-pair "another text"')
    assert "Classifies pairs of texts" in (folder / "pairs/export/README.md").read_text("utf-8")
    succeed("fit", "--recipe", "tfidf", "--train", file, *COLUMNS[:2], *COLUMNS[4:], "-o", folder / "single", cwd=folder)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["pairs", "single texts"])
def encoder(request: pytest.FixtureRequest, tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """An exported encoder that says what it was trained on."""
    folder = Path(shutil.copytree(tiny_export, tmp_path_factory.mktemp("encoder") / "export"))
    task = {"text_column": "premise", "text_pair_column": "hypothesis" if request.param else None}
    (folder / "provenance.json").write_text(json.dumps({"config": {"task": task}}), "utf-8")
    return folder, request.param


@pytest.fixture(scope="module")
def graph(encoder: tuple[Path, bool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ONNX form of `encoder`; no test may change it."""
    folder, on_pairs = encoder
    probe = [Example("1", "one", "two" if on_pairs else None, None)]
    return export_onnx(folder, out=tmp_path_factory.mktemp("graph") / "onnx", texts=probe).path


def test_commands_read_the_columns_of_training_unless_others_are_named(runs: Path) -> None:
    file, columns = runs / "pairs.jsonl", {"text_column": "premise", "text_pair_column": "hypothesis", "label_column": "relation"}
    named = [word for name, column in columns.items() for word in (f"--{name.replace('_', '-')}", column)]
    assert printed("evaluate", runs / "pairs", file) == printed("evaluate", runs / "pairs", file, *named)
    assert printed("predict", runs / "pairs", file) == printed("predict", runs / "pairs", file, *named[:4])
    assert printed("predict", runs / "single", file) != printed("predict", runs / "pairs", file)
    swapped = write_jsonl(runs / "new.jsonl", [{"premise": f"a {word}", "hypothesis": f"the {word} is wet"} for word in ("ship", "path")])
    succeed("label-next", runs / "pairs", swapped, "--count", "1", "-o", runs / "next.csv")
    with (runs / "next.csv").open(newline="") as lines:
        assert next(csv.reader(lines)) == ["id", "premise", "hypothesis", "relation", "predicted", "margin"]
    other = write_jsonl(runs / "other.jsonl", [{"text": "one", "text_pair": "two"}])
    assert "no column 'premise'; found 'text', 'text_pair'; pass --text-column" in error_line(cramlm("predict", runs / "pairs", other), 3)
    printed("predict", runs / "pairs", other, "--text-column", "text", "--text-pair-column", "text_pair")


def test_attention_is_measured_on_the_texts_or_pairs_of_training(runs: Path, encoder: tuple[Path, bool], tmp_path: Path) -> None:
    folder, on_pairs = encoder
    queries = []
    for columns in ((), ("--text-pair-column", "hypothesis")):
        succeed("attention", folder, runs / "pairs.jsonl", *columns, "-o", tmp_path)
        queries.append(read_json(tmp_path / "heads.json")["export"]["queries"])
    assert (queries[0] == queries[1]) == on_pairs


def test_a_command_that_gives_a_model_other_inputs_than_in_training_fails_in_one_line(runs: Path) -> None:
    file = runs / "pairs.jsonl"
    lines = error_line(cramlm("predict", runs / "pairs", "-", "--text-pair-column", "text2", stdin="one\n"), 2)
    assert "standard input: lines of text have no column 'text2'; write JSON lines" in lines
    assert NEEDS_NONE in error_line(cramlm("predict", runs / "single", file, "--text-pair-column", "hypothesis"), 2)
    assert NEEDS_NONE in error_line(cramlm("evaluate", runs / "single", file, "--text-pair-column", "hypothesis"), 2)
    assert "pass the second text, too: text_pair (--text-pair)" in error_line(cramlm("explain", runs / "pairs", "one text"), 2)
    single = cramlm("explain", runs / "single", "one text", "--text-pair", "another")
    assert "leave out the second one: text_pair (--text-pair)" in error_line(single, 2)
    assert "is a file" in error_line(cramlm("explain", runs / "pairs", "one text", "--text-pair", file), 2)
    assert "text_pair to explain is ' '" in error_line(cramlm("explain", runs / "pairs", "one text", "--text-pair", " "), 2)
    assert NEEDS_NONE in error_line(cramlm("check", file, "--text-pair-column", "hypothesis", "--model", runs / "single"), 2)


def test_predictors_of_every_kind_refuse_other_inputs_than_in_training(encoder: tuple[Path, bool], graph: Path) -> None:
    folder, on_pairs = encoder
    pairs = ["two"] if on_pairs else None
    wrong: list[Any] = [None, [None], pandas.Series([None], dtype=object)] if on_pairs else [["two"]]
    for predictor in (Predictor.load(folder), Predictor.load(graph)):
        assert predictor.predict(["one"], pairs)
        assert predictor.predict([]) == []
        series = predictor.predict(pandas.Series(["one"]), None if pairs is None else pandas.Series(pairs))
        assert series == predictor.predict(["one"], pairs)
        for others in wrong:
            with pytest.raises(UsageError, match=NEEDS_PAIRS if on_pairs else NEEDS_NONE):
                predictor.predict(["one"], others)
            with pytest.raises(UsageError, match=NEEDS_PAIRS if on_pairs else NEEDS_NONE):
                predictor.score([Example("1", "one", None if others is None else others[0], predictor.labels[0])])
        with pytest.raises(UsageError, match="pass the second text, too" if on_pairs else "leave out the second one"):
            explain(predictor, "one", text_pair=None if on_pairs else "two")
    served = load_model(folder, None)
    assert served.compute(["one"], pairs or [None]).values.shape == (1, 3)
    with pytest.raises(UsageError, match=NEEDS_PAIRS if on_pairs else NEEDS_NONE):
        served.compute(["one"], [None] if on_pairs else ["two"])


@pytest.mark.parametrize("encoder", [True], indirect=True)
def test_every_word_of_both_texts_is_explained_by_every_kind_of_predictor(runs: Path, encoder: tuple[Path, bool], graph: Path) -> None:
    folder, _ = encoder
    texts = {"text": "the boat, it is wet", "text_pair": "a boat is dry"}
    for predictor in (Predictor.load(folder), Predictor.load(graph), Predictor.load(runs / "pairs")):
        explanation = explain(predictor, texts["text"], text_pair=texts["text_pair"])
        assert (explanation.read, explanation.read_pair, explanation.text_pair) == (19, 13, "a boat is dry")
        assert [word.text for word in explanation.words if word.field == "text"] == ["the", "boat", ",", "it", "is", "wet"]
        assert [word.text for word in explanation.words if word.field == "text_pair"] == ["a", "boat", "is", "dry"]
        assert all(texts[word.field][word.start : word.stop] == word.text for word in explanation.words)
        column = predictor.labels.index(explanation.label)
        probabilities = predictor.probabilities([texts["text"]] * 2, [texts["text_pair"], "a boat is  "]).astype(np.float64)
        before, after = log_odds(probabilities, column)
        assert explanation.words[-1].contribution == pytest.approx(before - after, abs=1e-4)
        assert explanation.probability == pytest.approx(probabilities[0, column], abs=1e-5)


@pytest.mark.parametrize("encoder", [True], indirect=True)
def test_of_a_pair_that_is_too_long_the_words_that_the_encoder_reads_are_explained(encoder: tuple[Path, bool]) -> None:
    folder, _ = encoder
    predictor = Predictor.load(folder)
    long, short = " ".join(["the ship was near the harbour"] * 20), "a path to the summit"
    for text, text_pair in ((long, short), (short, long), (long, long)):
        explanation = explain(predictor, text, text_pair=text_pair)
        assert explanation.read_pair is not None
        assert (explanation.read == len(text), explanation.read_pair == len(text_pair)) == (text is short, text_pair is short)
        column = predictor.labels.index(explanation.label)
        assert explanation.probability == pytest.approx(predictor.probabilities([text], [text_pair])[0, column], abs=1e-5)


def test_the_command_shows_which_text_a_word_is_in(runs: Path) -> None:
    arguments = ("explain", runs / "pairs", "the boat is wet", "--text-pair", "a boat is dry")
    found = json.loads(printed(*arguments, "--json"))
    assert [(word["text"], word["field"]) for word in found["words"][3:5]] == [("wet", "text"), ("a", "text_pair")]
    shown = printed(*arguments)
    assert "text: the boat is wet" in shown
    assert "text_pair: a boat is dry" in shown
    assert any(row.split()[1:4:2] == ["dry", "text_pair"] for row in shown.splitlines() if "dry" in row and "│" in row)
    single = printed("explain", runs / "single", "the boat is wet")
    assert "text_pair" not in single
    assert "text:" not in single


def test_an_onnx_copy_reads_the_columns_of_its_model_and_refuses_other_inputs(
    encoder: tuple[Path, bool], graph: Path, tmp_path: Path
) -> None:
    folder, on_pairs = encoder
    assert columns_of(graph) == columns_of(folder)
    rows = [{"premise": "a boat", "hypothesis": "a ship", "label": LABELS[0]}]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    labels = [json.loads(printed("predict", model, file))["label"] for model in (graph, folder)]
    assert labels[0] == labels[1]
    assert "accuracy" in printed("evaluate", graph, file)
    served = load_model(graph, None)
    with pytest.raises(UsageError, match=NEEDS_PAIRS if on_pairs else NEEDS_NONE):
        served.compute(["one"], [None] if on_pairs else ["two"])
    settings = read_json(graph / SETTINGS_FILE)
    assert "premise" not in json.dumps(published_settings(settings)), "names of columns are not published"
    assert are_pairs(published_settings(settings)) is on_pairs


def test_an_onnx_folder_that_does_not_say_what_it_reads_accepts_texts_and_pairs(tiny_onnx: Path, tmp_path: Path) -> None:
    settings = read_json(tiny_onnx / SETTINGS_FILE)
    copy = Path(shutil.copytree(tiny_onnx, tmp_path / "copy", ignore=shutil.ignore_patterns("manifest.json")))
    (copy / SETTINGS_FILE).write_text(
        json.dumps({name: value for name, value in settings.items() if name not in ("pairs", "config")}), "utf-8"
    )
    predictor = Predictor.load(copy)
    assert predictor.trained_on_pairs is None
    assert len(predictor.predict(["one", "two"], ["three", None])) == 2
    assert columns_of(copy) == RowFormat()


def test_the_report_shows_both_texts_of_a_mistake_one_below_the_other(tmp_path: Path) -> None:
    rows = [
        {"premise": f"ship {number}", "hypothesis": f"<boat> {number}", "relation": "ab"[number * number % 7 % 2]} for number in range(60)
    ]
    file = write_jsonl(tmp_path / "pairs.jsonl", rows)
    succeed("fit", "--recipe", "tfidf", "--train", file, *COLUMNS, "-o", tmp_path / "run", cwd=tmp_path)
    report = (tmp_path / "run/report.html").read_text("utf-8")
    assert re.search(r"<p><bdi>ship (\d+)</bdi></p>\s*<p><bdi>&lt;boat&gt; \1</bdi></p>", report)
    assert re.search(r"<div><bdi>ship (\d+)</bdi></div><div><bdi>&lt;boat&gt; \1</bdi></div>", report)


def test_the_hub_learns_that_a_model_reads_pairs_but_no_names_of_columns(encoder: tuple[Path, bool]) -> None:
    folder, on_pairs = encoder
    public = published(read_json(folder / "provenance.json"))
    assert are_pairs(public) is on_pairs
    assert "premise" not in json.dumps(public)


def test_a_model_of_other_origin_reads_texts_and_pairs(tiny_export: Path) -> None:
    predictor = Predictor.load(tiny_export)
    assert predictor.trained_on_pairs is None
    assert len(predictor.predict(["one", "two"], ["three", None])) == 2
