"""Multi-label tasks and regressions on the command line, from fit to serve, compared with transformers."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import cramlm, error_line, printed, succeed
from cramlm import Predictor, recipes
from cramlm.config.run import load_config, to_toml
from cramlm.errors import ArtifactError, UsageError
from cramlm.inference.predictor import load_predictor
from cramlm.model.huggingface.config import CONFIG_FILE
from cramlm.model.huggingface.folder import load_classifier
from cramlm.records import LabelsPrediction, NumberPrediction
from cramlm.reporting.page import comparison_page, report_page
from damaging import edit_json
from jsonl import read_json, read_jsonl, write_jsonl
from server_process import serving
from tiny_task import COMMON, TOPICS, tiny_config, write_task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside transformers while it loads

KINDS = ("multi-label", "regression")
SEA, HILL = (" ".join(TOPICS[topic][:6]) for topic in ("sea", "hill"))


def rows_of(kind: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Texts of either topic, of both or of none; years that grow with the words of the sea."""
    generator = random.Random(seed)
    for _ in range(count):
        topics = [topic for topic in TOPICS if generator.random() < 0.5]
        words = [generator.choice(TOPICS[generator.choice(topics)] if topics and generator.random() < 0.8 else COMMON) for _ in range(14)]
        number = 2000 + 10 * sum(word in TOPICS["sea"] for word in words)
        yield {"text": " ".join(words), "label": topics if kind == "multi-label" else number}


def fit(folder: Path, paths: dict[str, str], kind: str) -> str:
    """Run `cramlm fit` without raw text into run/; return what it prints."""
    config = tiny_config(paths, corpus=None, retriever=None, precision="fp32", tokens_per_second=50_000.0, baseline={"c": [3.0]})
    config["encoder"]["embedding_init"] = "random"
    config["task"]["kind"] = kind
    config["phases"] = [{**config["phases"][1], "steps": 30, "evaluate_every": 30, "keep": "best"}]
    (folder / "run.toml").write_text(to_toml(load_config(config)), "utf-8")
    return printed("fit", "--config", folder / "run.toml", "--out", folder / "run", "--store", folder / "store")


@pytest.fixture(scope="module", params=KINDS)
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A kind of task, and a folder with data/, run.toml and the run of `cramlm fit --config` in run/."""
    kind, folder = request.param, tmp_path_factory.mktemp("kind")
    paths = write_task(folder / "data", documents=10)
    for seed, (split, count) in enumerate((("train", 48), ("dev", 16), ("test", 16))):
        write_jsonl(paths[split], rows_of(kind, count, seed))
    shown = fit(folder, paths, kind)
    metric = {"multi-label": "macro-F1", "regression": "Pearson"}[kind]
    verdict = next(line for line in shown.splitlines() if "(cross-fitted on dev: tfidf " in line)
    assert metric in verdict
    return kind, folder


def test_the_model_learns_and_evaluate_gives_the_scores_that_fit_reported(fitted: tuple[str, Path]) -> None:
    kind, folder = fitted
    scores = read_json(folder / "run/evaluation/scores.json")
    assert scores["kind"] == kind
    for model, part in (("tlm", "encoder"), ("combined", "combined"), ("tfidf", "tfidf")):
        reported = scores["models"][model]["test"]
        assert reported["macro_f1" if kind == "multi-label" else "pearson"] > 0.7
        again = json.loads(printed("evaluate", folder / "run/export", folder / "data/test.jsonl", "--model-part", part, "--json"))
        for name in ("subset_accuracy", "macro_f1", "micro_f1") if kind == "multi-label" else ("pearson", "spearman", "rmse", "r2"):
            assert again[name] == pytest.approx(reported[name], abs=1e-5), name
    words = printed("evaluate", folder / "run/export", folder / "data/test.jsonl").splitlines()[-1]
    names = ["subset accuracy", "micro-F1", "macro-F1"] if kind == "multi-label" else ["RMSE", "R²", "Spearman", "Pearson"]
    assert re.findall(r"([^\W\d]\S*(?: \w+)?) -?\d", words) == names
    report = (folder / "run/report.html").read_text("utf-8")
    assert all(f"test {name}" in report for name in names)


def test_a_task_of_a_single_label_that_some_texts_have_is_fitted_and_scored(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=10)
    for split in ("train", "dev", "test"):
        rows = read_jsonl(paths[split])
        rows = [{**row, "label": ["sea"] if row["label"] == "sea" else []} for row in rows]
        write_jsonl(paths[split], rows)
    fit(tmp_path, paths, "multi-label")
    scores = read_json(tmp_path / "run/evaluation/scores.json")["models"]
    for name in ("tfidf", "tlm"):
        assert list(scores[name]["test"]["per_class"]) == ["sea"]
        assert scores[name]["test"]["macro_f1"] == pytest.approx(scores[name]["test"]["micro_f1"])
    (prediction,) = Predictor.load(tmp_path / "run/export").predict([SEA])
    assert isinstance(prediction, LabelsPrediction)
    assert set(prediction.probabilities) == {"sea"}


def test_the_encoder_learns_from_the_linear_models_predictions_for_held_out_training_texts(fitted: tuple[str, Path]) -> None:
    kind, folder = fitted
    soft = np.load(folder / "run/teacher/task.npy")
    gold = [row["label"] for row in read_jsonl(folder / "data/train.jsonl")]
    if kind == "multi-label":
        assert ((soft > 0.5) == [["hill" in label, "sea" in label] for label in gold]).mean() > 0.8
    else:
        assert (soft.mean(), soft.std()) == pytest.approx((0, 1), abs=0.2)
        assert np.corrcoef(soft[:, 0], gold)[0, 1] > 0.7
    steps = [event for event in read_jsonl(folder / "run/events.jsonl") if event["kind"] == "step"]
    assert {"classify_task", "distil_task"} <= set(steps[-1]["data"])
    described = {"multi-label": "logistic regression on weighted n-grams", "regression": "ridge regression on weighted n-grams"}[kind]
    assert f"Linear teacher: {described}" in (folder / "run/export/README.md").read_text("utf-8")


def test_predict_and_predictor_return_sets_of_labels_or_numbers(fitted: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = fitted
    (tmp_path / "new.txt").write_text(f"{SEA}\n{HILL}\n", "utf-8")
    lines = [json.loads(line) for line in printed("predict", folder / "run/export", tmp_path / "new.txt").splitlines()]
    predictions = Predictor.load(folder / "run/export").predict([SEA, HILL])
    if kind == "multi-label":
        assert ["sea" in lines[0]["labels"], "hill" in lines[1]["labels"]] == [True, True]
        assert all(isinstance(each, LabelsPrediction) and set(each.probabilities) == {"sea", "hill"} for each in predictions)
        assert [list(each.labels) for each in predictions] == [line["labels"] for line in lines]
    else:
        assert [line.keys() for line in lines] == [{"id", "value"}] * 2
        assert lines[0]["value"] > lines[1]["value"]
        assert predictions == [NumberPrediction(line["value"]) for line in lines]
        with pytest.raises(UsageError, match="a number, which has no probability"):
            Predictor.load(folder / "run/export").probabilities([SEA])


def test_the_combination_averages_the_calibrated_outputs_of_its_models(fitted: tuple[str, Path]) -> None:
    kind, folder = fitted
    description = read_json(folder / "run/export/combination/combination.json")
    losses = {name: model["dev_loss"] for name, model in description["models"].items()}
    weights = {name: np.exp((min(losses.values()) - loss) / 0.1) for name, loss in losses.items()}
    expected: Any = np.float64(description["adjustment"]) * sum(weights.values())
    for name, model in description["models"].items():
        outputs = Predictor.load(folder / "run/export", model_part=name).outputs([SEA, HILL], None).astype(np.float64)
        logits = np.log(outputs / (1 - outputs)) if kind == "multi-label" else outputs
        expected = expected + weights[name] * (model["scale"] * logits + model["shift"])
    expected = expected / sum(weights.values())
    found = Predictor.load(folder / "run/export").outputs([SEA, HILL], None)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-expected)) if kind == "multi-label" else expected, rtol=1e-4)


def test_transformers_gives_the_same_logits_and_its_pipeline_the_same_predictions(fitted: tuple[str, Path]) -> None:
    import transformers

    kind, folder = fitted
    export = folder / "run/export"
    native = transformers.AutoModelForSequenceClassification.from_pretrained(export)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    assert native.config.problem_type == {"multi-label": "multi_label_classification", "regression": "regression"}[kind]
    with torch.no_grad():
        theirs = native(**tokenizer([SEA, HILL], return_tensors="pt", padding=True)).logits.numpy()
    predictions = Predictor.load(export, model_part="encoder").predict([SEA, HILL])
    pipeline = transformers.pipeline("text-classification", model=native, tokenizer=tokenizer, device="cpu", top_k=None)
    if kind == "multi-label":
        ours = [[each.probabilities[name] for name in ("hill", "sea")] for each in predictions]
        np.testing.assert_allclose(1 / (1 + np.exp(-theirs)), ours, atol=1e-5)
        scores = [{each["label"]: each["score"] for each in row} for row in pipeline([SEA, HILL])]
        assert scores == [pytest.approx(dict(each.probabilities), abs=1e-5) for each in predictions]
    else:
        ours = [[each.value] for each in predictions]
        np.testing.assert_allclose(theirs, ours, rtol=1e-6)
        assert [row[0] for row in pipeline([SEA, HILL])] == [{"label": "label", "score": pytest.approx(row[0], rel=1e-6)} for row in ours]


def test_the_report_and_the_card_show_the_metrics_of_the_kind(fitted: tuple[str, Path]) -> None:
    kind, folder = fitted
    page, card = report_page(folder / "run"), (folder / "run/export/README.md").read_text("utf-8")
    name = {"multi-label": "macro-F1", "regression": "Pearson"}[kind]
    assert f"dev {name}" in page
    assert f"this is a {kind} task" in page
    assert f"dev {name}" in card
    for text, words in ((card, "class weights"), (page, "class weights"), (page, "tau of logit adjustment")):
        assert (words in text) == (kind != "regression"), words
    compared = comparison_page([folder / "run", folder / "run"])
    assert name in compared
    assert ("In percent" in compared) == ("only this correct" in compared) == (kind != "regression")
    assert re.search(r"Labels: loss</title><desc[^>]*>(\S+)", page)[1] == ("Squared" if kind == "regression" else "Cross-entropy")


def test_an_operation_that_a_kind_does_not_have_is_refused_in_one_line(fitted: tuple[str, Path]) -> None:
    kind, folder = fitted
    data, export = folder / "data", folder / "run/export"
    refused = f"is for texts of one label each, and this is a {kind} task; "
    for command in (("serve", export, "--abstain-below", "0.5"), ("predict", export, data / "test.jsonl", "--abstain-below", "0.5")):
        assert refused in error_line(cramlm(*command), 2)
    with pytest.raises(UsageError, match="the term 'important_tokens' needs tasks with one label per text"):
        recipes.selective_masking(train="", corpus="c.jsonl", kind=kind)


def test_labels_that_a_row_lacks_or_should_not_have_are_suspicious(fitted: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = fitted
    command = ("--task-type", kind, "--model", folder / "run")
    if kind == "regression":
        assert "finds wrong labels, and this is a regression task" in error_line(cramlm("check", folder / "data/train.jsonl", *command), 2)
        return
    rows = [*read_jsonl(folder / "data/train.jsonl"), {"text": f"{SEA} gull captain", "label": ["hill"]}]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    result = cramlm("check", train, *command, "--json")
    assert "predicted out of fold by the linear model" in result.stderr
    wrong = [each for each in json.loads(result.stdout)["suspicious_labels"] if each["location"] == f"{train}:{len(rows)}"]
    assert [(each["label"], each["given"], each["probability"] > 0.5) for each in wrong if each["label"] == "sea"] == [("sea", False, True)]
    shown = cramlm("check", folder / "data/train.jsonl", *command)
    assert "probabilities out of fold of 48 texts are those of the run's teacher" in shown.stderr
    shown = cramlm("check", train, *command)
    assert re.search(
        rf"{train}:{len(rows)}: notice: suspicious-label: label 'sea' is not given, and has probability \d+% out", shown.stdout
    )
    single = write_jsonl(tmp_path / "single.jsonl", [{"text": "a b", "label": "sea"}, {"text": "c", "label": "hill"}])
    message = "the model is of a multi-label task, and the file is read as one of classification; pass --task-type multi-label"
    assert message in error_line(cramlm("check", single, "--model", folder / "run", "--task-type", "classification"), 2)


def test_the_server_predicts_what_predict_prints_and_documents_it(fitted: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = fitted
    (tmp_path / "new.txt").write_text(f"{SEA}\n{HILL}\n", "utf-8")
    expected = [json.loads(line) for line in printed("predict", folder / "run", tmp_path / "new.txt").splitlines()]
    with serving(folder / "run") as server:
        found = server.post("/v1/predict", {"texts": [SEA, HILL]}).json()["predictions"]
        description = server.client.get("/openapi.json").json()
    assert found == [{**{name: value for name, value in row.items() if name != "id"}, "truncated": False} for row in expected]
    documented = [schema["properties"] for name, schema in description["components"]["schemas"].items() if name.endswith("OfText")]
    assert documented[0].keys() == found[0].keys()


@pytest.mark.skipif(importlib.util.find_spec("onnx") is None, reason="no onnx: pip install 'cramlm[onnx]'")
def test_the_onnx_form_predicts_what_the_model_predicts(fitted: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = fitted
    succeed("export", folder / "run", "--format", "onnx", "-o", tmp_path / "onnx")
    for part in ("combined", "encoder"):
        expected = Predictor.load(folder / "run/export", model_part=part).outputs([SEA, HILL], None)
        predictor = load_predictor(tmp_path / "onnx", model_part=part)
        np.testing.assert_allclose(predictor.outputs([SEA, HILL], None), expected, rtol=1e-4, atol=1e-4)
        assert isinstance(predictor.predict([SEA])[0], LabelsPrediction if kind == "multi-label" else NumberPrediction)
    shown = succeed("export", folder / "run", "--int8", "-o", tmp_path / "int8").stderr
    assert ("int8 gives the same labels for" if kind == "multi-label" else "int8 differs by at most") in shown


def test_explain_gives_the_change_of_a_labels_log_odds_or_of_the_number_without_each_word(fitted: tuple[str, Path]) -> None:
    kind, folder = fitted
    predictor = Predictor.load(folder / "run/export")
    words = SEA.split()
    without = [" ".join([*words[:index], *words[index + 1 :]]) for index in range(len(words))]
    outputs = predictor.outputs([SEA, *without], None).astype(np.float64)
    if kind == "regression":
        explained = json.loads(printed("explain", folder / "run", SEA, "--json"))
        assert (explained["value"], explained["probability"]) == (outputs[0, 0], None)
        expected = outputs[0, 0] - outputs[1:, 0]
    else:
        explained = json.loads(printed("explain", folder / "run", SEA, "--label", "hill", "--json"))
        assert explained["label"] == "hill"
        odds = np.log(outputs[:, 0] / (1 - outputs[:, 0]))
        expected = odds[0] - odds[1:]
        assert "choose one of 'hill', 'sea'" in error_line(cramlm("explain", folder / "run", SEA, "--label", "valley"), 2)
    np.testing.assert_allclose([word["contribution"] for word in explained["words"]], expected, rtol=1e-3, atol=1e-3)
    assert "largest contributions" in printed("explain", folder / "run", SEA)


def test_recipes_are_compared_by_the_metric_of_the_kind_on_samples_that_have_every_label(fitted: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = fitted
    files = [item for split in ("train", "dev", "test") for item in (f"--{split}", folder / f"data/{split}.jsonl")]
    (tmp_path / "run.toml").write_text((folder / "run.toml").read_text("utf-8").replace("= 30\n", "= 4\n"), "utf-8")  # steps
    arms = f"tfidf,{tmp_path / 'run.toml'}"
    options = ("--recipes", arms, "--task-type", kind, "--labels", "12,30", *("--seed", "1") * 2)
    succeed("compare", *options, *files, "--out", tmp_path / "c")
    table = (tmp_path / "c/table.md").read_text("utf-8")
    header, *rows = [line for line in table.splitlines() if line.startswith("| ")]
    names = "test macro-F1 | test micro-F1 |" if kind == "multi-label" else "test Pearson | test Spearman |"
    assert f"| arm | labels | seeds | {names} difference to the first (95 %), p |" in header
    assert [row.split(" | ")[0] for row in rows] == ["| tfidf", "| run", "| run combined"] * 2
    results = read_json(tmp_path / "c/results.json")
    scores = read_json(tmp_path / "c/runs/30/run/1/evaluation/scores.json")["models"]["run"]["test"]
    main = "macro_f1" if kind == "multi-label" else "pearson"
    assert results["rows"][4]["scores"][f"test {main}"]["mean"] == scores[main]
    assert results["pairs"][0]["kind"] == kind
    samples = {file.name.split("-")[1]: read_jsonl(file) for file in (tmp_path / "c/subsamples").glob("*/train-*")}
    assert {row["text"] for row in samples["12"]} < {row["text"] for row in samples["30"]}
    assert len(samples["12"]) == 12
    if kind == "multi-label":
        assert {name for row in samples["12"] for name in row["label"]} == set(TOPICS)
    ET.fromstring((tmp_path / "c/scores.svg").read_text("utf-8"))


def test_texts_to_label_next_are_chosen_for_several_labels_and_not_for_numbers(fitted: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = fitted
    (tmp_path / "new.txt").write_text("a ship\nthe old summit\nneither of them\nin the harbour\n", "utf-8")
    command = ("label-next", folder / "run", tmp_path / "new.txt", "-n", "2", "-o", tmp_path / "next.jsonl")
    if kind == "regression":
        assert "no margin between labels" in error_line(cramlm(*command), 2)
        return
    succeed(*command)
    rows = read_jsonl(tmp_path / "next.jsonl")
    assert len(rows) == 2
    assert all(row["label"] is None and isinstance(row["predicted"], list) for row in rows)
    for name in ("next.csv", "next.tsv"):
        refused = error_line(cramlm(*command[:-1], tmp_path / name), 2)
        assert "an empty cell means no label" in refused
        assert refused.endswith("pass -o FILE.jsonl")
        assert not (tmp_path / name).exists()
    unfilled = cramlm("fit", "--train", tmp_path / "next.jsonl", "--task-type", kind, "--recipe", "tfidf", "-o", tmp_path / "run")
    assert f"{tmp_path / 'next.jsonl'}:1: 'label' is not a list of labels but null" in error_line(unfilled, 3)


def test_a_foreign_problem_type_or_a_regression_of_several_numbers_is_refused(fitted: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = fitted
    shutil.copytree(folder / "run/export", tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / CONFIG_FILE, problem_type={"multi-label": "regression", "regression": "ranking"}[kind])
    with pytest.raises(ArtifactError, match="a regression of 2 numbers" if kind == "multi-label" else "problem_type is 'ranking'"):
        load_classifier(tmp_path)


def test_a_wrong_kind_is_one_line_of_the_right_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label": ["x"]}\n{"text": "b", "label": []}\n')
    fit = ("fit", "--recipe", "labels-only", "--train", tmp_path / "train.jsonl", "--out", tmp_path / "run")
    for command, code, message in (
        (fit, 3, r"train.jsonl:1: .*--task-type multi-label"),
        (("check", tmp_path / "train.jsonl"), 3, r"all 2 were rejected, line 1: .*--task-type multi-label"),
        ((*fit, "--set", "task.kind=tagging"), 2, r"kind: Input should be 'classification', 'multi-label' or 'regression'"),
        ((*fit, "--set", "task.kind=regression"), 3, r"train.jsonl:1: 'label' is not a number but a list"),
    ):
        assert re.search(message, error_line(cramlm(*command), code))
