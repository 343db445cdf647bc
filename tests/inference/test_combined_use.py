"""The combination in the folder of an encoder: in Python, on the command line, over HTTP and in ONNX form."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cramlm.cli.app import app
from cramlm.errors import ArtifactError, UsageError
from cramlm.inference.combined import COMBINATION_FOLDER, CombinedModels, CombinedPredictor
from cramlm.inference.linear import LinearPredictor
from cramlm.inference.predictor import Predictor
from cramlm.serving.batching import load_model
from cramlm.storage.artifacts import MANIFEST, verify
from tiny_task import TOPICS

TEXTS = ["the old ship was near the harbour", "a path from the valley to the summit", "", "tide reef, and a stone cabin"]


@pytest.fixture(scope="module")
def finished(tiny_run: Path) -> Path:
    """A finished run of an encoder with its linear models."""
    return tiny_run / "run"


@pytest.fixture
def loose(finished: Path, tmp_path: Path) -> Path:
    """A copy of the export without its manifest, so that a test may change files."""
    folder = shutil.copytree(finished / "export", tmp_path / "export")
    (folder / MANIFEST).unlink()
    return folder


def test_the_scores_of_a_run_are_those_of_its_combination(finished: Path) -> None:
    scores = json.loads((finished / "evaluation" / "scores.json").read_bytes())
    assert list(scores["models"]) == ["tlm", "combined", "static", "tfidf"]
    assert list(scores["comparison"]["cross_fitted"]) == ["tfidf", "static", "tlm", "combined"]
    lines = [json.loads(line) for line in (finished / "evaluation" / "predictions-test-combined.jsonl").read_text("utf-8").splitlines()]
    texts = [json.loads(line)["text"] for line in (finished / "task" / "test.jsonl").read_text("utf-8").splitlines()]
    predictor = Predictor.load(finished / "export")
    assert isinstance(predictor, CombinedPredictor)
    expected = np.array([[line["probabilities"][label] for label in predictor.labels] for line in lines])
    assert np.allclose(predictor.probabilities(texts), expected, atol=1e-4)


def test_every_model_of_the_folder_has_a_predictor(finished: Path) -> None:
    export = finished / "export"
    linear = {answer: Predictor.load(export, answer=answer) for answer in ("static", "tfidf")}
    assert all(isinstance(predictor, LinearPredictor) for predictor in linear.values())
    assert isinstance(Predictor.load(export, answer="encoder"), Predictor)
    models = {**linear, "encoder": Predictor.load(export, answer="encoder"), "combined": Predictor.load(export)}
    probabilities = {name: predictor.probabilities(TEXTS) for name, predictor in models.items()}
    assert all(np.allclose(each.sum(axis=1), 1, atol=1e-5) for each in probabilities.values())
    assert len({each.tobytes() for each in probabilities.values()}) == 4


def test_a_combined_prediction_does_not_depend_on_the_other_texts(finished: Path) -> None:
    predictor = Predictor.load(finished / "export")
    together = predictor.probabilities(TEXTS)
    alone = np.concatenate([predictor.probabilities([text]) for text in TEXTS])
    assert np.allclose(together, alone, atol=1e-5)


def test_the_command_line_and_the_server_predict_as_python_does(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(text for text in TEXTS if text) + "\n", "utf-8")
    texts = [text for text in TEXTS if text]
    for answer in ("combined", "encoder", "static", "tfidf"):
        expected = Predictor.load(finished / "export", answer=answer).predict(texts)  # type: ignore[arg-type]
        result = CliRunner().invoke(app, ["predict", str(finished), str(file), "--answer", answer])
        assert result.exit_code == 0, result.output
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert [line["probabilities"] for line in lines] == [prediction.probabilities for prediction in expected]
        served = load_model(finished / "export", None, answer=answer)  # type: ignore[arg-type]
        outputs = served.compute(texts, [None] * len(texts)).probabilities
        assert [dict(zip(served.labels, row.tolist(), strict=True)) for row in outputs] == [each.probabilities for each in expected]


def test_auto_precision_gives_the_combined_labels_of_fp32(finished: Path) -> None:
    exact, auto = (Predictor.load(finished / "export", precision=precision) for precision in ("fp32", "auto"))
    assert isinstance(exact, CombinedPredictor)
    assert isinstance(auto, CombinedPredictor)
    combination = exact.models.combination
    for word in TOPICS["sea"]:
        text = f"the old {word} was near the summit"
        probabilities = exact.probabilities([text])
        tie = combination.adjustment - np.log(probabilities[0]) + np.array([1e-4, 0], dtype=np.float32)  # the first label wins narrowly
        for predictor in (exact, auto):
            predictor.models = CombinedModels(replace(combination, adjustment=tie), predictor.models.linear)
        assert auto.predict([text])[0].label == exact.predict([text])[0].label == exact.labels[0]  # type: ignore[union-attr]
        exact.models = CombinedModels(combination, exact.models.linear)


def test_a_run_is_evaluated_by_its_combination(finished: Path) -> None:
    test = finished / "task" / "test.jsonl"
    result = CliRunner().invoke(app, ["evaluate", str(finished), str(test), "--json"])
    assert result.exit_code == 0, result.output
    scores = json.loads((finished / "evaluation" / "scores.json").read_bytes())["models"]["combined"]["test"]
    assert json.loads(result.stdout)["macro_f1"] == pytest.approx(scores["macro_f1"])


def test_words_are_explained_by_the_combination(finished: Path) -> None:
    result = CliRunner().invoke(app, ["explain", str(finished), "ship, harbour and tide", "--json", "--passages", "0"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    probabilities = Predictor.load(finished / "export").predict(["ship, harbour and tide"])[0].probabilities  # type: ignore[union-attr]
    assert values["probability"] == pytest.approx(probabilities[values["label"]], abs=1e-6)


def test_the_onnx_form_has_the_same_combination(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    result = CliRunner().invoke(app, ["export", str(finished), "--out", str(tmp_path / "onnx")])
    assert result.exit_code == 0, result.output
    predictor = Predictor.load(tmp_path / "onnx")
    assert isinstance(predictor, CombinedPredictor)
    assert np.allclose(predictor.probabilities(TEXTS), Predictor.load(finished / "export").probabilities(TEXTS), atol=1e-4)


def test_the_folder_without_its_combination_is_a_plain_encoder(loose: Path) -> None:
    shutil.rmtree(loose / COMBINATION_FOLDER)
    assert isinstance(Predictor.load(loose), Predictor)
    with pytest.raises(UsageError, match=r"holds no model 'static'"):
        Predictor.load(loose, answer="static")


def test_a_damaged_combination_is_refused_in_one_line(finished: Path, loose: Path) -> None:
    assert verify(finished / "export") == 1
    file = loose / COMBINATION_FOLDER / "combination.json"
    values = json.loads(file.read_bytes())
    for content in ("", "[]", json.dumps({**values, "labels": ["one"]}), json.dumps({**values, "models": {}})):
        file.write_text(content, "utf-8")
        with pytest.raises(ArtifactError, match=r"combination\.json: damaged"):
            Predictor.load(loose)
    assert isinstance(Predictor.load(loose, answer="encoder"), Predictor)


def test_a_changed_file_of_a_published_combination_is_noticed(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished / "export", tmp_path / "export")
    file = folder / COMBINATION_FOLDER / "tfidf" / "linear.json"
    file.write_bytes(file.read_bytes().replace(b'"tau"', b'"tAu"'))
    with pytest.raises(ArtifactError, match=r"linear\.json"):
        Predictor.load(folder)
