"""The combination in the folder of an encoder: in Python, on the command line and over HTTP; test_moved_run.py has its ONNX form."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest

from commands import imported_by, printed
from cramlm.errors import ArtifactError, UsageError
from cramlm.inference.linear import COMBINATION_FOLDER, CombinedModels, CombinedPredictor, LinearPredictor
from cramlm.inference.predictor import Predictor
from cramlm.serving.batching import load_model
from cramlm.storage.artifacts import MANIFEST
from jsonl import read_json, read_jsonl, write_labelled
from tiny_task import TOPICS

PARTS = {"static": "static", "combined": "encoder"}  # part of the model -> part that `embed` uses
TEXTS = ["the old ship was near the harbour", "a path from the valley to the summit", "", "tide reef, and a stone cabin"]


@pytest.fixture
def loose(finished: Path, tmp_path: Path) -> Path:
    """A copy of the export without its manifest, so that a test may change files."""
    folder = shutil.copytree(finished / "export", tmp_path / "export")
    (folder / MANIFEST).unlink()
    return folder


def test_a_run_is_evaluated_and_explained_by_its_combination(finished: Path) -> None:
    predictor = Predictor.load(finished / "export")
    assert isinstance(predictor, CombinedPredictor)
    lines = read_jsonl(finished / "evaluation/predictions-test-combined.jsonl")
    texts = [row["text"] for row in read_jsonl(finished / "task/test.jsonl")]
    expected = np.array([[line["probabilities"][label] for label in predictor.labels] for line in lines])
    assert np.allclose(predictor.probabilities(texts), expected, atol=3e-4)
    scores = read_json(finished / "evaluation/scores.json")["models"]["combined"]["test"]
    evaluated = json.loads(printed("evaluate", finished, finished / "task/test.jsonl", "--json"))
    assert evaluated["macro_f1"] == pytest.approx(scores["macro_f1"])
    explained = json.loads(printed("explain", finished, TEXTS[0], "--json", "--passages", "0"))
    probabilities = predictor.predict(TEXTS[:1])[0].probabilities
    assert explained["probability"] == pytest.approx(probabilities[explained["label"]], abs=1e-6)


def test_every_model_of_the_folder_predicts_equally_in_python_on_the_command_line_and_over_http(finished: Path, tmp_path: Path) -> None:
    texts = [text for text in TEXTS if text]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", "utf-8")
    different = set()
    for model_part in ("combined", "encoder", "static", "tfidf"):
        predictor = Predictor.load(finished / "export", model_part=model_part)
        assert isinstance(predictor, LinearPredictor) == (model_part in ("static", "tfidf"))
        expected = [each.probabilities for each in predictor.predict(texts)]
        shown = printed("predict", finished, tmp_path / "texts.txt", "--model-part", model_part)
        assert [json.loads(line)["probabilities"] for line in shown.splitlines()] == expected
        served = load_model(finished / "export", None, model_part=model_part)
        outputs = served.compute(texts, [None] * len(texts)).values
        assert [dict(zip(predictor.labels, row.tolist(), strict=True)) for row in outputs] == expected
        different.add(predictor.probabilities(texts).tobytes())
    assert len(different) == 4


def test_predictions_import_nothing_that_takes_longer_and_training_not_the_compiler_of_torch(finished: Path, tmp_path: Path) -> None:
    """The compiler takes a second before the first step of every run."""
    texts = write_labelled(tmp_path / "texts.jsonl", [(f"a ship near the harbour, {count}", "sea") for count in range(3)])
    use = {part: [(name, finished, texts, "--model-part", part) for name in ("predict", "evaluate", "label-next")] for part in PARTS}
    for part, of_vectors in PARTS.items():
        use[part].append(("embed", finished, texts, "--out", tmp_path / "vectors.npy", "--model-part", of_vectors))
    short = ("--set", "phases[0].steps=1", "--set", "phases[1].steps=1")
    fit = ("fit", "--config", finished.parent / "run.toml", "--out", tmp_path / "run", "--store", finished.parent / "store", *short)
    heavy = ["transformers", "sklearn", "numba", "pyarrow"]
    assert imported_by((use["static"], [*heavy, "torch"]), (use["combined"], [*heavy, "sympy"]), ([fit], ["torch._dynamo"])) == [[], [], []]


def test_a_combined_prediction_does_not_depend_on_the_other_texts(finished: Path) -> None:
    predictor = Predictor.load(finished / "export")
    alone = np.concatenate([predictor.probabilities([text]) for text in TEXTS])
    assert np.allclose(predictor.probabilities(TEXTS), alone, atol=1e-5)


def test_a_combination_without_the_encoder_reads_whole_texts(finished: Path) -> None:
    predictor = Predictor.load(finished / "export")
    combination, long = predictor.models.combination, "ship " * 500
    linear = {name: model for name, model in combination.models.items() if name in predictor.models.linear}
    alone = CombinedModels(replace(combination, models=linear), predictor.models.linear)
    without = CombinedPredictor(predictor.encoder, alone, origin=finished / "export")
    lengths = [int(each.compute([long], [None])[1][0]) for each in (predictor, without)]
    assert [length > each.max_length for length, each in zip(lengths, (predictor, without), strict=True)] == [False, False]
    assert predictor.whole_lengths([long])[0] > predictor.max_length  # the end of the text is cut off
    assert without.whole_lengths([long])[0] == lengths[1] == 500


def test_auto_precision_gives_the_combined_labels_of_fp32(finished: Path) -> None:
    exact, auto = (Predictor.load(finished / "export", precision=precision) for precision in ("fp32", "auto"))
    models = exact.models
    for word in TOPICS["sea"]:
        text = f"the old {word} was near the summit"
        exact.models = models
        logits = np.log(exact.probabilities([text])[0])
        tie = models.combination.adjustment - logits + np.array([1e-4, 0], dtype=np.float32)  # the first label wins narrowly
        for predictor in (exact, auto):
            predictor.models = CombinedModels(replace(models.combination, adjustment=tie), predictor.models.linear)
        assert auto.predict([text])[0].label == exact.predict([text])[0].label == exact.labels[0]
        column = pandas.Series([text], index=[7])  # as after filtering the rows of a table
        auto.exact = exact.encoder
        assert [each.label for each in auto.predict(column)] == [exact.labels[0]]


def test_the_folder_without_its_combination_is_a_plain_encoder(loose: Path) -> None:
    shutil.rmtree(loose / COMBINATION_FOLDER / "bayes")  # as if the combination left it out
    with pytest.raises(UsageError, match=r"holds no model 'bayes' .*; choose the part combined or encoder or tfidf or static"):
        Predictor.load(loose, model_part="bayes")
    shutil.rmtree(loose / COMBINATION_FOLDER)
    assert isinstance(Predictor.load(loose), Predictor)
    with pytest.raises(UsageError, match=r"holds no model 'static' beside its encoder; choose the part encoder$"):
        Predictor.load(loose, model_part="static")


def test_a_damaged_combination_is_refused_in_one_line(loose: Path) -> None:
    file = loose / COMBINATION_FOLDER / "combination.json"
    values = read_json(file)
    changes = [{"format": 1}, {"labels": ["one"]}, {"models": {}}, {"adjustment": [0.0]}, {"adjustment": [float("nan")] * 2}]
    for content in ("", "[]", *(json.dumps(values | change) for change in changes)):
        file.write_text(content, "utf-8")
        with pytest.raises(ArtifactError, match=r"combination\.json: damaged"):
            Predictor.load(loose)
    assert isinstance(Predictor.load(loose, model_part="encoder"), Predictor)


@pytest.mark.parametrize("file", ["static/linear.json", "static/linear.safetensors", "static/words.json", "static/words.safetensors"])
def test_a_changed_byte_in_a_model_of_the_combination_is_found_when_it_is_loaded(finished: Path, tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(finished / "export", tmp_path / "export")
    path = folder / COMBINATION_FOLDER / file
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    for model_part in ("combined", "static"):
        with pytest.raises(ArtifactError, match=re.escape(f"{file}: damaged")):
            Predictor.load(folder, model_part=model_part)
