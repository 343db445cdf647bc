"""Predictions that are withheld below a confidence: in Python, on the command line, over HTTP, in ONNX form, and in scikit-learn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import cramlm, error_line, printed, succeed
from cramlm import CramClassifier, SelectivePrediction
from cramlm.errors import UsageError
from cramlm.evaluation.confidence import CONFIDENCE_FILE
from cramlm.inference.predictor import Predictor
from cramlm.storage.artifacts import MANIFEST
from jsonl import read_jsonl
from server_process import serving
from tiny_task import TOPICS, write_task

SURE, UNSURE = "ship harbour sailor tide anchor reef", "the old of a and near from with every"
TEXTS = [SURE, UNSURE, "summit ridge valley climber glacier"]


@pytest.fixture(scope="module")
def between(finished: Path) -> float:
    """A threshold between the confidences of `SURE` and `UNSURE`."""
    sure, unsure = (each.confidence for each in Predictor.load(finished / "export").predict_or_abstain([SURE, UNSURE], below=0.0))
    assert unsure < sure
    return (sure + unsure) / 2


def test_a_prediction_below_the_threshold_has_no_label_and_keeps_its_confidence(finished: Path, between: float) -> None:
    for model_part in ("combined", "encoder", "static", "tfidf"):
        predictor = Predictor.load(finished / "export", model_part=model_part)
        all_labels = predictor.predict_or_abstain(TEXTS, below=0.0)
        assert [each.label for each in all_labels] == [each.label for each in predictor.predict(TEXTS)]
        assert [each.probabilities for each in all_labels] == [each.probabilities for each in predictor.predict(TEXTS)]
        for below in (between, 1.0):
            some = predictor.predict_or_abstain(TEXTS, below=below)
            assert [each.confidence for each in some] == [each.confidence for each in all_labels]
            assert [each.label is None for each in some] == [each.confidence < below for each in some]
    assert all(isinstance(each, SelectivePrediction) for each in all_labels)


def test_the_curve_of_a_run_is_that_of_its_dev_texts(finished: Path) -> None:
    rows = read_jsonl(finished / "task" / "dev.jsonl")
    predictor = Predictor.load(finished / "export")
    predictions = predictor.predict_or_abstain([row["text"] for row in rows], below=0.0)
    curve = predictor.calibrated().dev
    assert curve.texts[-1] == len(rows)
    assert curve.right[-1] == sum(each.label == row["label"] for each, row in zip(predictions, rows, strict=True))
    above, at = (sum(each.confidence >= curve.thresholds[3] + margin for each in predictions) for margin in (1e-4, -1e-4))
    assert above < len(rows)
    assert above <= curve.texts[3] <= at


def test_the_command_line_writes_null_and_the_confidence(finished: Path, tmp_path: Path, between: float) -> None:
    result = succeed("predict", finished, "-", "--abstain-below", str(between), stdin=f"{SURE}\n{UNSURE}\n")
    sure, unsure = map(json.loads, result.stdout.splitlines())
    assert list(sure) == ["id", "label", "confidence", "probabilities"]
    assert sure["label"] in TOPICS
    assert unsure["label"] is None
    assert unsure["confidence"] < between < sure["confidence"]
    assert "on dev" in result.stderr
    plain = printed("predict", finished, "-", stdin=f"{SURE}\n")
    assert list(json.loads(plain)) == ["id", "label", "probabilities"]


def test_a_wanted_accuracy_chooses_the_threshold_on_dev(finished: Path) -> None:
    predictor = Predictor.load(finished / "export")
    highest = float(predictor.calibrated().dev.accuracy[predictor.calibrated().dev.texts >= 10].max())
    result = succeed("predict", finished, "-", "--abstain-at-accuracy", str(highest), stdin=f"{SURE}\n{UNSURE}\n")
    threshold = predictor.threshold(accuracy=highest)
    assert f"no label below confidence {threshold:g}" in result.stderr
    for line in map(json.loads, result.stdout.splitlines()):
        assert (line["label"] is None) == (line["confidence"] < threshold)


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        (["--abstain-below", "0.5", "--abstain-at-accuracy", "0.9"], "exclude each other"),
        (["--abstain-below", "1.5"], "--abstain-below"),
        (["--abstain-at-accuracy", "95"], "--abstain-at-accuracy"),
        (["--abstain-at-accuracy", "0"], "accuracy is 0; pass a share above 0"),
    ],
)
def test_options_that_make_no_sense_are_one_line(finished: Path, options: list[str], needle: str) -> None:
    for command in (["predict", finished, "-"], ["serve", finished, "--port", "0"]):
        assert needle in error_line(cramlm(*command, *options, stdin=SURE + "\n"), 2)


def test_a_folder_without_the_file_names_the_remedy(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished / "export", tmp_path / "export")
    (folder / MANIFEST).unlink()
    (folder / CONFIDENCE_FILE).unlink()
    for command in (["predict", folder, "-"], ["serve", folder, "--port", "0"]):
        assert "has no calibrated confidence" in error_line(cramlm(*command, "--abstain-below", "0.5", stdin=SURE + "\n"), 2)
    succeed("predict", folder, "-", stdin=SURE + "\n")
    predictor = Predictor.load(finished / "export")
    for below in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="threshold of the confidence"):
            predictor.predict_or_abstain([SURE], below=below)


def test_a_server_gives_null_and_the_confidence(finished: Path, between: float) -> None:
    expected = Predictor.load(finished / "export").predict_or_abstain(TEXTS, below=between)
    with serving(finished, "--abstain-below", str(between)) as server:
        predictions = server.post("/v1/predict", {"texts": TEXTS}).json()["predictions"]
    assert [each["label"] for each in predictions] == [each.label for each in expected]
    assert [each["confidence"] for each in predictions] == pytest.approx([each.confidence for each in expected], abs=1e-4)
    assert None in [each["label"] for each in predictions]


def test_the_onnx_form_has_the_same_confidence(finished: Path, onnx_form: Path, between: float) -> None:
    for model_part in ("combined", "encoder", "static"):
        ours, theirs = (Predictor.load(folder, model_part=model_part) for folder in (finished / "export", onnx_form))
        pairs = zip(ours.predict_or_abstain(TEXTS, below=between), theirs.predict_or_abstain(TEXTS, below=between), strict=True)
        for one, other in pairs:
            assert one.label == other.label
            assert one.confidence == pytest.approx(other.confidence, abs=1e-3)


def test_the_estimator_withholds_labels_of_any_type(tmp_path: Path) -> None:
    paths = write_task(tmp_path, documents=1)
    rows = read_jsonl(paths["train"])
    numbers = [7 if row["label"] == "sea" else 9 for row in rows]
    classifier = CramClassifier(
        recipe="tfidf", dev_fraction=0.4, settings={"baseline.c": [1.0]}, out=tmp_path / "runs", store=tmp_path / "store"
    )
    classifier.fit([row["text"] for row in rows], numbers)
    labels, confidences = classifier.predict_or_abstain(TEXTS, below=0.0)
    assert labels.tolist() == classifier.predict(TEXTS).tolist()
    assert labels.tolist()[0] == 7
    middle = float(np.median(confidences))
    labels, again = classifier.predict_or_abstain(TEXTS, below=middle)
    assert [label is None for label in labels] == (confidences < middle).tolist()
    assert (again == confidences).all()
    assert 0 <= classifier.threshold(accuracy=0.5) <= 1
