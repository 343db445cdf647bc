"""The exported folder of the recipes `static` and `tfidf`, used like any other; test_moved_run.py has the commands on a run."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import cramlm, error_line, imported_by, printed, succeed
from cramlm import recipes
from cramlm.errors import ArtifactError
from cramlm.inference.explain import explain
from cramlm.inference.folders import model_of
from cramlm.inference.linear import LinearPredictor
from cramlm.inference.predictor import Predictor, kind_in, load_predictor
from cramlm.linear.files import MODEL_FILE, read_setting
from cramlm.pipeline.run import run
from jsonl import read_json, read_jsonl, write_jsonl
from server_process import PATIENCE, serving
from tiny_task import TOPICS, quick

TEXT = "The old ship was near the harbour << sailor >>, on the path to the island!! ỌRỌ\u0301"
WORDS = "The old ship was near the harbour << sailor >> , on the path to the island !! ỌRỌ\u0301"


LINEAR = ("static", "bayes", "tfidf")


@pytest.fixture(params=LINEAR)
def finished(request: pytest.FixtureRequest, linear_runs: Path) -> Path:
    """A finished run of a linear recipe; its data are in ../data."""
    return linear_runs / str(request.param)


def test_another_part_than_the_linear_model_is_refused(finished: Path) -> None:
    assert load_predictor(finished, model_part=finished.name).labels == load_predictor(finished).labels
    for part in {*LINEAR, "encoder"} - {finished.name}:
        line = error_line(cramlm("predict", finished, "-", "--model-part", part, stdin="a text"), 2)
        assert line.endswith(f"leave out the part {part!r}")


def test_a_gpu_or_bf16_is_refused_for_a_model_that_is_not_in_pytorch(linear_runs: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    static = linear_runs / "static"
    for model, what in ((static, "a linear model"), (tmp_path, "an ONNX model")):
        for option, value in (("--device", "cuda"), ("--precision", "bf16")):
            line = error_line(cramlm("predict", model, "-", option, value, stdin="a text"), 2)
            assert line.endswith(f": {what} computes in its own precision on the CPU; leave out {option[2:]} {value!r}")
    succeed("predict", static, "-", "--device", "auto", "--precision", "auto", stdin="a text")


def test_a_linear_recipe_is_scored_exported_and_loaded_as_what_was_scored(finished: Path, tmp_path: Path) -> None:
    scores = read_json(finished / "evaluation/scores.json")["models"]
    assert list(scores) == {"static": ["static", "bayes", "tfidf"], "bayes": ["bayes", "tfidf"], "tfidf": ["tfidf"]}[finished.name]
    assert scores[finished.name]["test"]["accuracy"] > 0.8
    assert not list(finished.glob("phase-*"))
    texts = [row["text"] for row in read_jsonl(finished.parent / "data/test.jsonl")]
    lines = read_jsonl(finished / "evaluation/predictions-test.jsonl")
    shutil.copytree(finished / "export", tmp_path / "copy")
    for predictor in (Predictor.load(tmp_path / "copy"), load_predictor(model_of(finished)), LinearPredictor.load(finished / "export")):
        assert isinstance(predictor, LinearPredictor)
        assert [prediction.label for prediction in predictor.predict(texts)] == [line["predicted"] for line in lines]
        assert predictor.probabilities(texts) == pytest.approx(np.array([list(line["probabilities"].values()) for line in lines]), abs=1e-5)


WITHOUT_TORCH = """
import json, sys
from pathlib import Path
import cramlm
from cramlm.cli.app import app
from cramlm.export.card import model_card
from cramlm.serving.batching import load_model

texts = sys.argv[1]
for run in map(Path, sys.argv[2:]):
    app(["predict", str(run), texts], standalone_mode=False)
    app(["evaluate", str(run), texts], standalone_mode=False)
    app(["explain", str(run), "a ship"], standalone_mode=False)
    cramlm.Predictor.load(run / "export").predict(["a ship"])
    load_model(run / "export", 1)
    assert "library_name: cramlm" in model_card(json.loads((run / "export/provenance.json").read_bytes()))
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_a_fit_of_a_linear_recipe_does_not_load_torch(linear_runs: Path, tmp_path: Path) -> None:
    places = (("--out", tmp_path / name, "--store", tmp_path / "store") for name in LINEAR)
    fits = [("fit", "--config", linear_runs / name / "run.toml", *place) for name, place in zip(LINEAR, places, strict=True)]
    assert imported_by((fits, ["torch", "transformers"])) == [[]]
    for name in LINEAR:
        weights = [folder / name / "export" / "linear.safetensors" for folder in (linear_runs, tmp_path)]
        assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.faults
def test_neither_the_commands_nor_python_nor_the_server_load_torch_or_need_its_address_space(linear_runs: Path) -> None:
    runs = [str(linear_runs / name) for name in LINEAR]
    for each in runs:  # the first `explain` of a run indexes its passages, for which Arrow reserves a gigabyte of address space
        succeed("explain", each, "a ship")
    words = shlex.join([sys.executable, "-c", WITHOUT_TORCH, str(linear_runs / "data/test.jsonl"), *runs])
    result = subprocess.run(["bash", "-c", f"ulimit -v 1900000 && exec {words}"], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    printed = result.stdout.splitlines()
    assert {json.loads(line)["label"] for line in printed[:16]} <= set(TOPICS)
    assert printed[-1] == "[]"


def test_explanations_of_linear_models_have_word_spans(finished: Path) -> None:
    explanation = explain(Predictor.load(finished / "export"), TEXT)
    assert all(TEXT[word.start : word.stop] == word.text for word in explanation.words)
    assert " ".join(word.text for word in explanation.words) == WORDS
    assert (explanation.read, explanation.label) == (len(TEXT), "sea")
    assert {word.text: word.contribution for word in explanation.words}["harbour"] > 0


def test_the_server_computes_linear_models_without_truncation(linear_runs: Path) -> None:
    texts = ["ship " * 3000, "a path to the summit"]
    expected = Predictor.load(linear_runs / "static/export").probabilities(texts)
    with serving(linear_runs / "static") as server:
        assert any(line.endswith("2 labels, whole texts") for line in server.lines)
        predictions = server.post("/v1/predict", {"texts": texts}).json()["predictions"]
    assert [list(prediction["probabilities"].values()) for prediction in predictions] == pytest.approx(expected, abs=1e-6)
    assert [prediction["truncated"] for prediction in predictions] == [False, False]


def test_a_linear_model_has_no_onnx_form(linear_runs: Path, tmp_path: Path) -> None:
    refused = cramlm("export", linear_runs / "static", "--format", "onnx", "--out", tmp_path / "onnx")
    assert "a linear model has no ONNX form" in error_line(refused, 2)
    assert not (tmp_path / "onnx").exists()


def test_the_card_describes_the_fit_and_the_comparison(finished: Path) -> None:
    card = (finished / "export/README.md").read_text("utf-8")
    fit = read_json(finished / "evaluation/scores.json")["models"][finished.name]["fit"]
    for phrase in (
        *("library_name: cramlm", f"**{finished.name}** (this model)", "cross-fitted", "Texts are not truncated.", "40 labelled texts"),
        f"{'TF-IDF' if finished.name == 'bayes' else 'n-grams'} of {fit['variant']}, {read_setting(fit)}",
        f"logit adjustment tau = {fit['tau']:g}",
        f"{fit['features']:,} columns",
    ):
        assert phrase in card
    assert "None" not in card


def fit_several_labels(rows: list[dict[str, Any]], folder: Path) -> Path:
    """Return the export of a run on rows with lists of labels, which are in train.jsonl."""
    train = write_jsonl(folder / "train.jsonl", rows)
    return run(quick(recipes.tfidf(train=str(train), kind="multi-label")), out=folder / "run").export


def test_a_linear_model_of_several_labels_is_loaded_as_such(tmp_path: Path) -> None:
    words = [(topic, word, other) for topic in TOPICS for word in TOPICS[topic] for other in "ab"]
    rows = [{"text": f"{word} {other}", "label": [topic] if other == "a" else list(TOPICS)} for topic, word, other in words]
    export = fit_several_labels(rows, tmp_path)
    assert Predictor.load(export).kind == "multi-label"
    assert kind_in(export) == "multi-label"


def test_several_labels_are_not_written_to_a_cell_that_cannot_be_read_again(tmp_path: Path) -> None:
    rows = [{"text": f"{word} {number}", "label": [word, "a|b"][: number % 2 + 1]} for word in ("ship", "hill") for number in range(8)]
    export = fit_several_labels(rows, tmp_path)
    refused = error_line(cramlm("predict", export, tmp_path / "train.jsonl", "-o", tmp_path / "out.csv"), 2)
    assert "label 'a|b' contains |, which separates the labels of a cell; pass -o FILE.jsonl" in refused
    assert not (tmp_path / "out.csv").exists()
    succeed("predict", export, tmp_path / "train.jsonl", "-o", tmp_path / "out.jsonl")


def test_several_labels_in_a_cell_have_the_separator_of_the_training_file(tmp_path: Path) -> None:
    labels = ["a|b", "ship;a|b", "hill", ""]
    lines = [f"{'ship' if number % 4 == 1 else 'hill'} {number},{labels[number % 4]}" for number in range(24)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *lines, ""]), "utf-8")
    options = ("--task-type", "multi-label", "--label-separator", ";", "--recipe", "tfidf", "--set", "baseline.c=[3.0]")
    succeed("fit", "--train", tmp_path / "train.csv", *options, "-o", tmp_path / "run")
    copied = Path(shutil.copytree(tmp_path / "run/export", tmp_path / "copied/model"))
    for model in (tmp_path / "run", copied):
        succeed("predict", model, tmp_path / "train.csv", "-o", tmp_path / "out.jsonl")
        expected = [row["labels"] for row in read_jsonl(tmp_path / "out.jsonl")]
        assert ["a|b", "ship"] in map(sorted, expected)
        succeed("predict", model, tmp_path / "train.csv", "-o", tmp_path / "out.csv")
        assert [row["labels"] for row in csv.DictReader((tmp_path / "out.csv").read_text("utf-8").splitlines())] == list(
            map(";".join, expected)
        )
        succeed("predict", model, tmp_path / "train.csv", "--keep-columns", "-o", tmp_path / "beside.csv")
        column = ("--text-column", "text", "--label-column", "predicted", "--json")
        assert json.loads(printed("evaluate", model, tmp_path / "beside.csv", *column))["macro_f1"] == 1


def test_a_folder_that_is_damaged_is_refused_in_one_line(linear_runs: Path, tmp_path: Path) -> None:
    shutil.copytree(linear_runs / "static/export", tmp_path / "copy")
    (tmp_path / "copy" / MODEL_FILE).write_text("{}", "utf-8")
    with pytest.raises(ArtifactError) as caught:
        Predictor.load(tmp_path / "copy")
    assert "\n" not in str(caught.value)
