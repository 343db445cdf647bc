"""The exported folder of the recipes `static` and `tfidf`, used like any other: in Python, on the command line, over HTTP, on the hub."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cramlm import recipes
from cramlm.cli.app import app
from cramlm.config.run import RunConfig, apply_overrides, load_config
from cramlm.errors import CramError, UsageError
from cramlm.estimator import CramClassifier
from cramlm.inference.explain import explain
from cramlm.inference.linear import LinearPredictor
from cramlm.inference.predictor import Predictor, load_predictor, model_of, refuse_other_kinds
from cramlm.linear import MODEL_FILE
from cramlm.pipeline.run import run
from hub_stand_in import running_hub
from server_process import PATIENCE, serving
from tiny_task import TOPICS, write_task

TEXT = "The old ship was near the harbour << sailor >>, on the path to the island!!"


def quick(config: RunConfig) -> RunConfig:
    """The same with one C, and a small vocabulary."""
    return load_config(apply_overrides(config.model_dump(mode="json"), ["baseline.c=[3.0]", "tokenizer.vocab_size=200", "threads=1"]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs of both recipes, and the folder of their data."""
    folder = tmp_path_factory.mktemp("linear")
    paths = write_task(folder / "data", documents=40)
    task: dict[str, Any] = {name: paths[name] for name in ("train", "dev", "test")}
    made = {"static": recipes.static(corpus=[paths["corpus"]], **task), "tfidf": recipes.tfidf(**task)}
    for name, config in made.items():
        run(quick(config), out=folder / name, store=folder / "store")
    return {"data": folder / "data", **{name: folder / name for name in made}}


@pytest.fixture(params=["static", "tfidf"])
def finished(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Path:
    return runs[request.param]


def cramlm(*arguments: str | Path) -> str:
    """What a command prints; its error, if it ends in one."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_every_loader_loads_the_scored_model(finished: Path, runs: dict[str, Path]) -> None:
    texts = [json.loads(line)["text"] for line in (runs["data"] / "test.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (finished / "evaluation/predictions-test.jsonl").read_text().splitlines()]
    for predictor in (Predictor.load(finished / "export"), load_predictor(model_of(finished)), LinearPredictor.load(finished / "export")):
        assert isinstance(predictor, LinearPredictor)
        predictions = predictor.predict(texts)
        assert [prediction.label for prediction in predictions] == [line["predicted"] for line in lines]  # type: ignore[union-attr]
        assert predictor.probabilities(texts) == pytest.approx(np.array([list(line["probabilities"].values()) for line in lines]), abs=1e-5)


WITHOUT_TORCH = """
import sys
from pathlib import Path
import cramlm
from cramlm.cli.app import app
from cramlm.serving.batching import load_model

run, texts = Path(sys.argv[1]), sys.argv[2]
app(["predict", str(run), texts], standalone_mode=False)
app(["evaluate", str(run), texts], standalone_mode=False)
app(["explain", str(run), "a ship"], standalone_mode=False)
cramlm.Predictor.load(run / "export").predict(["a ship"])
load_model(run / "export", 1)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_neither_the_commands_nor_python_nor_the_server_load_torch_or_need_its_address_space(finished: Path, runs: dict[str, Path]) -> None:
    # The first `explain` of a run indexes its passages, for which Arrow reserves a gigabyte of address space.
    assert CliRunner().invoke(app, ["explain", str(finished), "a ship"]).exit_code == 0
    words = shlex.join([sys.executable, "-c", WITHOUT_TORCH, str(finished), str(runs["data"] / "test.jsonl")])
    result = subprocess.run(["bash", "-c", f"ulimit -v 1900000 && exec {words}"], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    printed = result.stdout.splitlines()
    assert {json.loads(line)["label"] for line in printed[:16]} <= set(TOPICS)
    assert printed[-1] == "[]"


def test_evaluate_takes_the_run_and_gives_its_scores(finished: Path, runs: dict[str, Path]) -> None:
    scores = json.loads((finished / "evaluation/scores.json").read_bytes())["models"][finished.name]["test"]
    again = json.loads(cramlm("evaluate", finished, runs["data"] / "test.jsonl", "--json"))
    assert again == scores


def test_explanations_of_linear_models_have_word_spans(finished: Path) -> None:
    predictor = Predictor.load(finished / "export")
    explanation = explain(predictor, TEXT)
    assert all(TEXT[word.start : word.stop] == word.text for word in explanation.words)
    words = "The old ship was near the harbour << sailor >> , on the path to the island !!"
    assert " ".join(word.text for word in explanation.words) == words
    assert explanation.read == len(TEXT)
    by_word = {word.text: word.contribution for word in explanation.words}
    assert by_word["harbour"] > 0
    assert explanation.label == "sea"


def test_word_spans_keep_combining_marks(finished: Path) -> None:
    text = "ỌRỌ\u0301 ile\u0301 3mg"
    spans = Predictor.load(finished / "export").word_spans(text)
    assert [text[start:stop] for start, stop in spans] == ["ỌRỌ\u0301", "ile\u0301", "3mg"]


def test_an_explained_run_shows_its_nearest_passages(runs: dict[str, Path]) -> None:
    found = {name: json.loads(cramlm("explain", runs[name], "ship near the harbour", "--json")) for name in ("static", "tfidf")}
    assert found["static"]["passages"]
    assert found["tfidf"]["passages"] == []


def test_the_server_computes_linear_models_without_truncation(finished: Path) -> None:
    texts = ["ship " * 3000, "a path to the summit"]
    predictor = Predictor.load(finished / "export")
    with serving(finished) as server:
        assert any(line.endswith("2 labels, whole texts") for line in server.lines)
        response = server.post("/v1/predict", {"texts": texts})
        assert response.status_code == 200, response.text
        predictions = response.json()["predictions"]
    assert [list(prediction["probabilities"].values()) for prediction in predictions] == pytest.approx(
        predictor.probabilities(texts), abs=1e-6
    )
    assert [prediction["truncated"] for prediction in predictions] == [False, False]


def test_onnx_export_of_a_linear_model_is_an_error(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a linear model has no ONNX form") as caught:
        cramlm("export", finished, "--format", "onnx", "--out", tmp_path / "onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "onnx").exists()


def test_verify_and_report_take_the_run(finished: Path, tmp_path: Path) -> None:
    assert "folders verified" in cramlm("verify", finished)
    assert "verified" in cramlm("verify", finished / "export")
    cramlm("report", finished, "--out", tmp_path / "page.html")
    assert "How the linear models were fitted" in (tmp_path / "page.html").read_text("utf-8")


def test_a_pushed_linear_model_predicts_equally_without_folder_names(finished: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_right", "HF_HUB_DISABLE_XET": "1", "HF_HOME": os.devnull}
        command = [sys.executable, "-m", "cramlm", "push", str(finished), "owner/mine", "--language", "en"]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=PATIENCE)
        assert result.returncode == 0, result.stderr
        files = hub.repositories["owner/mine"].files
    assert {MODEL_FILE, "linear.safetensors", "README.md", "provenance.json"} <= set(files)
    assert "manifest.json" not in files
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    texts = ["ship", "summit"]
    assert (Predictor.load(tmp_path).probabilities(texts) == Predictor.load(finished / "export").probabilities(texts)).all()
    card = files["README.md"].decode()
    assert "after `hf download owner/mine --local-dir my-model`" in card
    assert "\nlanguage: en\n" in card
    sent = b"".join(data for name, data in files.items() if name in ("README.md", "provenance.json")).decode()
    assert str(finished.parent) not in sent


def test_the_card_describes_the_fit_and_the_comparison(runs: dict[str, Path]) -> None:
    for name in ("static", "tfidf"):
        card = (runs[name] / "export/README.md").read_text("utf-8")
        scores = json.loads((runs[name] / "evaluation/scores.json").read_bytes())
        fit = scores["models"][name]["fit"]
        assert "library_name: cramlm" in card
        assert f"**{name}** (this model)" in card
        assert f"TF-IDF of {fit['variant']}, {fit['class_weights']} class weights, C = 3, logit adjustment tau = {fit['tau']:g}" in card
        assert f"{fit['features']:,} columns" in card
        assert "cross-fitted" in card
        assert "Texts are not truncated." in card
        assert "None" not in card
    assert "| tfidf |" in (runs["static"] / "export/README.md").read_text("utf-8")


def test_a_copied_folder_needs_nothing_of_its_run(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "export", tmp_path / "copy")
    texts = ["ship harbour", "summit ridge"]
    assert (Predictor.load(tmp_path / "copy").probabilities(texts) == Predictor.load(finished / "export").probabilities(texts)).all()
    assert json.loads(cramlm("explain", tmp_path / "copy", "ship", "--json"))["passages"] == []


def test_the_estimator_fits_linear_models(runs: dict[str, Path], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (runs["data"] / "train.jsonl").read_text().splitlines()]
    texts, labels = [row["text"] for row in rows], [2 if row["label"] == "sea" else 1 for row in rows]
    settings = {"baseline.c": [3.0], "tokenizer.vocab_size": 200, "threads": 1}
    for recipe in ("static", "tfidf"):
        classifier = CramClassifier(recipe=recipe, corpus=runs["data"] / "corpus.jsonl", settings=settings, store=tmp_path / "store")
        classifier.fit(texts, labels)
        assert classifier.score(texts, labels) > 0.9
        assert classifier.predict_proba(texts).sum(axis=1) == pytest.approx(np.ones(len(texts)), abs=1e-5)
        saved = classifier.save(tmp_path / recipe)
        assert (Predictor.load(saved).probabilities(texts) == classifier.predict_proba(texts)).all()


def test_multi_label_models_predict_but_are_not_served(tmp_path: Path) -> None:
    words = [(topic, word, other) for topic in TOPICS for word in TOPICS[topic] for other in "ab"]
    rows = [{"text": f"{word} {other}", "label": [topic] if other == "a" else list(TOPICS)} for topic, word, other in words]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    config = quick(recipes.tfidf(train=str(tmp_path / "train.jsonl"), kind="multi-label"))
    export = run(config, out=tmp_path / "run", store=tmp_path / "store").export
    assert Predictor.load(export).kind == "multi-label"
    with pytest.raises(UsageError, match="multi-label"):
        refuse_other_kinds(export, "cramlm serve", "use cramlm predict")


def test_a_folder_that_is_damaged_is_refused_in_one_line(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "export", tmp_path / "copy")
    (tmp_path / "copy" / MODEL_FILE).write_text("{}", "utf-8")
    for use in (lambda: Predictor.load(tmp_path / "copy"), lambda: cramlm("explain", tmp_path / "copy", "ship")):
        with pytest.raises(CramError) as caught:
            use()
        assert "\n" not in str(caught.value)
