"""The command line: output, exit codes and one-line errors."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import cramlm, error_line, printed, start, succeed
from cramlm import Index
from cramlm.cli.app import app
from cramlm.cli.models import predicted_rows
from cramlm.cli.runs import EXTRAS
from cramlm.config.run import load_config, read_toml, to_toml
from cramlm.inference.predictor import load_predictor
from cramlm.recipes.describe import stages_of
from cramlm.records import AnyPrediction, Example
from jsonl import read_jsonl
from ranks import free_port
from server_process import PATIENCE
from tiny_task import write_task


@pytest.fixture(scope="module")
def fitted(tiny_run: Path) -> Path:
    return tiny_run


def assert_one_line(result: subprocess.CompletedProcess[str], code: int, *needles: str) -> None:
    line = error_line(result, code)
    assert all(needle in line for needle in needles), line


def test_fit_prints_the_scores_of_every_model_and_the_folder_of_the_export(fitted: Path) -> None:
    shown = printed("fit", "--config", fitted / "run.toml", "--out", fitted / "run", "--store", fitted / "store")
    rows = [line.split()[1] for line in shown.splitlines() if line.startswith(("│", "|"))]
    assert rows == ["tlm", "combined", "static", "bayes", "tfidf"]
    assert str(fitted / "run/export") in shown.replace("\n", "")
    assert [line.split()[1] for line in shown.splitlines()[-3:]] == ["predict", "explain", "serve"]


@pytest.mark.parametrize("recipe", ["tfidf", "static"])
@pytest.mark.parametrize("kind", ["classification", "multi-label", "regression"])
def test_the_commands_that_fit_proposes_take_the_model(recipe: str, kind: str, tmp_path: Path) -> None:
    rows = "".join(f"word{number % 7} and word{number % 5},{1 + number % 4}\n" for number in range(60))
    for name in ("train.csv", "test.csv", "new.csv"):
        (tmp_path / name).write_text(f"text,label\n{rows}", "utf-8")
    options = ["--corpus", "train.csv"] * (recipe == "static")
    shown = printed("fit", "--train", "train.csv", "--recipe", recipe, "--task-type", kind, *options, "-o", "my run", cwd=tmp_path)
    commands = [shlex.split(line)[1:] for line in shown.partition("next:")[2].strip().splitlines()]
    assert len(commands) > 1
    for command in commands:
        if command[0] != "serve":
            succeed(*command, cwd=tmp_path)


def test_a_dry_run_prints_stages_phases_terms_and_cost_and_writes_nothing(fitted: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    settings = ("--config", fitted / "run.toml", "--budget", "3e11flops")
    shown = printed("fit", "--dry-run", *settings, "--out", tmp_path / "run", "--store", tmp_path / "store", cwd=tmp_path)
    for part in ("Phase 1, joint", "distil", "Stages: task, baseline, plan, corpus, index, selection", "FLOPs", "nothing was written"):
        assert part in shown
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_refuses_what_the_run_would_refuse(fitted: Path, tmp_path: Path) -> None:
    settings = ("--config", fitted / "run.toml", "--set", "teacher.pair_passages=true", "--out", tmp_path / "run", "--store", tmp_path)
    for more in ((), ("--dry-run",)):
        refused = cramlm("fit", *settings, *more, cwd=tmp_path)
        assert_one_line(refused, 2, "teacher.pair_passages = true needs training texts that are pairs")


def test_a_dry_run_without_a_budget_prints_the_cost_of_its_steps(fitted: Path, tmp_path: Path) -> None:
    assert "budget" not in read_toml(fitted / "run.toml")
    shown = printed("fit", "--dry-run", "--config", fitted / "run.toml", "--set", "phases[0].steps=5", cwd=tmp_path)
    assert " 5 + " in next(line for line in shown.splitlines() if line.startswith("none "))


def test_the_stages_of_a_dry_run_are_those_of_the_run(fitted: Path, linear_runs: Path) -> None:
    for folder in (fitted / "run", linear_runs / "static", linear_runs / "bayes", linear_runs / "tfidf"):
        ran = dict.fromkeys(event["stage"] for event in read_jsonl(folder / "events.jsonl"))
        stages = stages_of(load_config(read_toml(folder / "run.toml")))
        assert [stage for stage in ran if stage != "machine" and not stage.startswith("schedule-")] == stages


def test_predict_writes_the_same_predictions_in_input_order_to_stdout_and_to_files(fitted: Path, tmp_path: Path) -> None:
    texts = "wave ship harbour sailor\nsummit ridge valley climber\n"
    lines = printed("predict", fitted / "run/export", "-", stdin=texts).splitlines()
    assert [json.loads(line)["label"] for line in lines] == ["sea", "hill"]
    (tmp_path / "new.csv").write_text("text\nwave ship harbour sailor\nsummit ridge valley climber\n", "utf-8")
    cramlm("predict", fitted / "run/export", tmp_path / "new.csv", "--out", tmp_path / "predictions.jsonl")
    predictions = [row["probabilities"] for row in read_jsonl(tmp_path / "predictions.jsonl")]
    assert predictions == [json.loads(line)["probabilities"] for line in lines]
    cramlm("predict", fitted / "run/export", tmp_path / "new.csv", "--out", tmp_path / "predictions.csv")
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text("utf-8").splitlines()))
    assert [row["label"] for row in rows] == ["sea", "hill"]
    assert [float(row["probability_sea"]) for row in rows] == [prediction["sea"] for prediction in predictions]
    cramlm("predict", fitted / "run/export", tmp_path / "new.csv", "--out", tmp_path / "predictions.tsv")
    assert list(csv.DictReader((tmp_path / "predictions.tsv").read_text("utf-8").splitlines(), delimiter="\t")) == rows
    assert printed("predict", fitted / "run/export", "-", "--out", "-", stdin=texts).splitlines() == lines


def test_the_rows_of_many_texts_are_written_before_all_texts_are_predicted(linear_runs: Path, tmp_path: Path) -> None:
    predictor, texts = load_predictor(linear_runs / "tfidf"), [f"wave ship {'summit ' * (number % 7)}" for number in range(20_000)]
    (tmp_path / "new.txt").write_text("\n".join(texts), "utf-8")
    succeed("predict", linear_runs / "tfidf", tmp_path / "new.txt", "--out", tmp_path / "predictions.jsonl")
    expected = [{"id": str(line), **asdict(prediction)} for line, prediction in enumerate(predictor.predict(texts), start=1)]
    assert read_jsonl(tmp_path / "predictions.jsonl") == expected
    predicted: list[str] = []

    def predict_some(some: list[str], pairs: list[str | None]) -> list[AnyPrediction]:
        predicted.extend(some)
        return predictor.predict(some, pairs)

    rows = predicted_rows([Example(row["id"], text, None, None) for row, text in zip(expected, texts, strict=True)], predict_some)
    assert next(rows) == expected[0]
    assert 0 < len(predicted) < len(texts) / 2
    assert [expected[0], *rows] == expected
    assert predicted == texts


def test_predictions_stand_beside_the_columns_of_a_spreadsheet_in_its_form(fitted: Path, tmp_path: Path) -> None:
    table = 'No;text;;note\r\n7;"wave ship\r\nharbour; sailor";;\r\n9;summit ridge valley climber;;"a ""b"""\r\n'
    (tmp_path / "new.csv").write_bytes(codecs.BOM_UTF8 + table.encode())
    command = ("predict", fitted / "run/export", tmp_path / "new.csv", "--keep-columns", "--out")
    succeed(*command, tmp_path / "predictions.csv")
    written = (tmp_path / "predictions.csv").read_bytes()
    assert written.startswith(codecs.BOM_UTF8 + b"No;text;note;predicted;probability_")
    rows = list(csv.DictReader(io.StringIO(written.decode("utf-8-sig"), newline=""), delimiter=";"))
    assert [row["predicted"] for row in rows] == ["sea", "hill"]
    kept = [(row["No"], row["text"], row["note"]) for row in rows]
    assert kept == [("7", "wave ship\nharbour; sailor", ""), ("9", "summit ridge valley climber", 'a "b"')]
    succeed(*command, tmp_path / "predictions.tsv", "--abstain-below", "1")
    assert "No\ttext\tnote\tpredicted\tconfidence" in (tmp_path / "predictions.tsv").read_text("utf-8-sig")
    assert_one_line(cramlm(*command, tmp_path / "predictions.jsonl"), 2, "--keep-columns writes a table")
    (tmp_path / "new.csv").write_text("text,predicted\nwave ship harbour sailor,sea\n", "utf-8")
    assert_one_line(cramlm(*command, tmp_path / "again.csv"), 2, "has a column 'predicted' already")
    (tmp_path / "new.csv").write_text("text\nwave ship, harbour\n", "utf-8")
    with_columns, without = (error_line(cramlm(*each, tmp_path / "again.csv"), 3) for each in (command, (*command[:3], "--out")))
    assert with_columns == without
    (tmp_path / "new.txt").write_text("wave ship harbour sailor\n", "utf-8")
    assert_one_line(cramlm(*command[:2], tmp_path / "new.txt", *command[3:], tmp_path / "again.csv"), 2, "not a .csv or .tsv file")
    assert not (tmp_path / "again.csv").exists()


def test_a_carriage_return_in_a_cell_does_not_end_its_row(fitted: Path, tmp_path: Path) -> None:
    rows = [["text", "note"], ["wave ship\rharbour sailor", "a\rb"], ["summit ridge valley climber", "\r"]]
    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    succeed("predict", fitted / "run/export", tmp_path / "new.csv", "--keep-columns", "--out", tmp_path / "predictions.csv")
    with (tmp_path / "predictions.csv").open(newline="") as file:
        assert [row[:2] for row in csv.reader(file)] == rows


@pytest.mark.parametrize("name", ["predictions.parquet", "predictions.jsonl.gz", "predictions.csv.zst", "predictions.xlsx"])
def test_rows_are_not_written_in_another_format_than_the_name_of_the_file_says(fitted: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "new.txt").write_text("wave ship harbour sailor\n", "utf-8")
    for command in ("predict", "label-next"):
        result = cramlm(command, fitted / "run/export", tmp_path / "new.txt", "--out", tmp_path / name)
        assert_one_line(result, 2, name, ".jsonl", ".csv")
    assert_one_line(cramlm("passages", fitted / "run", "--out", tmp_path / name), 2, name, ".jsonl")
    assert not (tmp_path / name).exists()


def test_predictions_have_the_ids_of_the_file_also_if_one_repeats(fitted: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("id,text\nb7,wave ship harbour sailor\nb7,summit ridge valley climber\n,ridge valley\n", "utf-8")
    lines = printed("predict", fitted / "run/export", tmp_path / "new.csv").splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["b7", "b7", "4"]
    (tmp_path / "new.jsonl").write_text('{"id": 5, "key": "k", "text": "wave ship harbour sailor"}\n', "utf-8")
    assert json.loads(printed("predict", fitted / "run/export", tmp_path / "new.jsonl"))["id"] == "5"
    assert json.loads(printed("predict", fitted / "run/export", tmp_path / "new.jsonl", "--id-column", "key"))["id"] == "k"
    assert_one_line(cramlm("predict", fitted / "run/export", tmp_path / "new.jsonl", "--id-column", "nr"), 3, "'nr'", "--id-column")


def test_options_that_a_recipe_does_not_use_are_named(fitted: Path, tmp_path: Path) -> None:
    train, corpus = fitted / "data/train.jsonl", fitted / "data/corpus.jsonl"
    options = ("fit", "--recipe", "tfidf", "--train", train, "--out", tmp_path / "run")
    text = "the recipe tfidf reads labelled texts only: {} not used"
    shown = cramlm(*options, "--corpus", corpus, "--unlabelled", corpus, "--preset", "tiny", "--device", "cpu").stderr
    assert text.format("--corpus and --unlabelled are") in shown
    assert "the recipe tfidf trains no encoder: --preset and --device are not used" in shown
    assert text.format("--corpus is") in cramlm(*options, "--corpus", corpus).stderr
    assert "not used" not in cramlm(*options).stderr


def test_a_held_out_file_with_another_column_than_the_training_file_is_to_be_renamed(tmp_path: Path) -> None:
    rows = "".join(f"ship {number},{'sea' if number % 2 else 'hill'}\n" for number in range(20))
    train, other, lines = (tmp_path / name for name in ("train.csv", "other.csv", "other.jsonl"))
    train.write_text(f"body,label\n{rows}", "utf-8")
    other.write_text(f"text,label\n{rows}", "utf-8")
    lines.write_text('{"text": "ship", "label": "sea"}\n', "utf-8")
    remedy = f"no column 'body'; found 'text', 'label'; rename its column to that of the training file ({train})"
    options = ("--text-column", "body")
    for file, place in ((other, f"{other}:1: {remedy}"), (lines, f"{lines}:1: {remedy}, or pass --on-bad-row skip")):
        for option in ("--dev", "--test"):
            fit = ("fit", "--recipe", "tfidf", "--train", train, option, file, *options, "-o", tmp_path / "run")
            assert error_line(cramlm(*fit), 3) == place
        assert remedy in cramlm("check", train, file, *options).stderr
    assert "pass --text-column" in error_line(cramlm("fit", "--recipe", "tfidf", "--train", train, "-o", tmp_path / "run"), 3)


def test_a_missing_column_of_json_lines_has_one_remedy(fitted: Path, tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text('{"body": "wave ship"}\n', "utf-8")
    line = cramlm("predict", fitted / "run/export", tmp_path / "new.jsonl").stderr.strip()
    assert line.endswith("no column 'text'; found 'body'; pass --text-column")


def test_a_label_in_an_error_can_be_passed_as_it_is_printed(tmp_path: Path) -> None:
    rows = "".join(f"{'rose' if number % 2 else 'bread'} {number},{'garden  beds' if number % 2 else 'food'}\n" for number in range(20))
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}", "utf-8")
    succeed("fit", "--train", tmp_path / "train.csv", "--recipe", "tfidf", "--set", "baseline.c=[3.0]", "-o", tmp_path / "run")
    assert "'garden  beds'" in error_line(cramlm("explain", tmp_path / "run", "a rose", "--label", "garden"), 2)
    succeed("explain", tmp_path / "run", "a rose", "--label", "garden  beds")


def test_an_error_of_several_lines_is_printed_as_one(tmp_path: Path) -> None:
    for name in ("two\nlines", "two\u2028lines", "two \r\n\n  lines"):
        result = cramlm("verify", tmp_path / name)
        assert len(result.stderr.splitlines()) == 1
        assert "two lines: no such folder" in result.stderr


def test_evaluate_refuses_an_unseen_label_unless_it_is_ignored(fitted: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("text,label\nwave ship,sea\nridge valley,lake\n", "utf-8")
    assert_one_line(cramlm("evaluate", fitted / "run/export", tmp_path / "new.csv"), 3, "new.csv:3", "'lake'", "--unseen-labels")
    (tmp_path / "near.csv").write_text("text,label\nwave ship,Sea\n", "utf-8")
    near = "none of the model's ('hill', 'sea'); 'Sea' differs from 'sea' in case, Unicode form or white space only; drop the row"
    assert_one_line(cramlm("evaluate", fitted / "run/export", tmp_path / "near.csv"), 3, "near.csv:2", near)
    (tmp_path / "near.csv").write_text(f"text,label\nwave ship,sea\nridge valley,{'long' * 1000}\n", "utf-8")
    assert len(error_line(cramlm("evaluate", fitted / "run/export", tmp_path / "near.csv"), 3)) < 400
    result = cramlm("evaluate", fitted / "run/export", tmp_path / "new.csv", "--unseen-labels", "ignore", "--json")
    assert json.loads(result.stdout)["accuracy"] == 0.5


def test_evaluate_takes_a_run_or_its_export_and_gives_the_scores_that_fit_reported(fitted: Path) -> None:
    run, test = fitted / "run", fitted / "data/test.jsonl"
    scores = json.loads(printed("evaluate", run, test, "--json"))
    reported = json.loads((run / "evaluation/scores.json").read_bytes())["models"]["tlm"]["test"]
    assert scores["macro_f1"] == pytest.approx(reported["macro_f1"])
    assert json.loads(printed("evaluate", run / "export", test, "--json")) == scores


def test_index_select_and_search_share_one_folder(fitted: Path, tmp_path: Path) -> None:
    index, train = tmp_path / "index", fitted / "data/train.jsonl"
    succeed("index", fitted / "data/corpus.jsonl", "--out", index)
    out = ("--out", tmp_path / "selection", "--jsonl", tmp_path / "s.jsonl")
    succeed("select", "--train", train, "--index", index, "--top-k", "5", *out)
    first = json.loads((tmp_path / "s.jsonl").read_text("utf-8").splitlines()[0])
    assert list(first) == ["position", "id", "source", "rank", "score", "query", "text"]
    assert first["rank"] == 0
    assert printed("passages", tmp_path / "selection") == (tmp_path / "s.jsonl").read_text("utf-8")
    assert len(printed("passages", fitted / "run").splitlines()) > 5
    inside = cramlm("passages", tmp_path / "selection", "--out", tmp_path / "selection/passages.jsonl")
    assert_one_line(inside, 2, "write the file outside")
    foreign = cramlm("select", "--train", train, "--index", index, "--out", fitted / "data")
    assert_one_line(foreign, 2, "would be replaced")
    assert train.is_file()
    found = printed("search", index, "lighthouse captain", "-k", "3", "--json").splitlines()
    assert len(found) == 3
    assert {term for term, _ in json.loads(found[0])["terms"]} <= {"lighthouse", "captain"}
    assert printed("search", index, "xylophone") == ""


def test_config_prints_toml_that_fit_reads(tmp_path: Path) -> None:
    train = write_task(tmp_path)["train"]
    result = cramlm("config", "--train", train, "--set", "phases[0].steps=7", "--set", "retriever.k1=1.5")
    data = tomllib.loads(result.stdout)
    assert data["task"]["train"] == train
    terms = [{term["kind"]: term for term in phase["terms"]} for phase in data["phases"]]
    assert [term["classify"]["label_smoothing"] for term in terms] == [0.0, 0.2]  # 18 texts a label, without those for dev
    assert data["teacher"]["align_distribution"]
    assert tomllib.loads(cramlm("config").stdout)["phases"][1]["terms"][1]["kind"] == "distil"  # of typical data
    assert data["phases"][0]["steps"] == 7
    assert to_toml(load_config(data)) == result.stdout
    more = ("--unlabelled", "more.txt", "--device", "cuda")
    data = tomllib.loads(printed("config", "--train", train, *more))
    assert (data["task"]["unlabelled"], data["device"]) == (["more.txt"], "cuda")
    assert "unlabelled: more.txt" in printed("recipes", "show", "tlm", "--train", train, *more)
    assert "(got 'gpu')" in error_line(cramlm("plan", "5m", *more[:3], "gpu"), 2)


def test_version_and_doctor_print_versions_and_hardware() -> None:
    assert printed("--version") == f"cramlm {metadata.version('cramlm')}\n"
    assert all(name in printed("doctor") for name in ("torch", "bf16", "memory", "store"))
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(\w+)\]", " ".join(EXTRAS.values()))) == extras.keys() - {"bench", "docs", "notebook"}


@pytest.mark.parametrize(
    ("arguments", "code", "needles"),
    [
        (["fit"], 2, ["--train"]),
        (["fit", "--train", "missing.jsonl"], 2, ["--corpus"]),
        (["fit", "--train", "missing.jsonl", "--recipe", "labels-only"], 2, ["missing.jsonl"]),
        (["fit", "--train", "x", "--corpus", "y", "--recipe", "magic"], 2, ["magic", "labels-only"]),
        (["fit", "--train", "x", "--corpus", "y", "--budget", "soon"], 2, ["soon", "20m"]),
        (["fit", "--train", "train.jsonl", "--corpus", "y", "--set", "phases[0].stepz=5"], 2, ["stepz"]),
        (["fit", "--train", "train.jsonl", "--corpus", "y", "--set", "phases[9].steps=5"], 2, ["phases[9].steps"]),
        (["fit", "--dry-run", "--recipe", "static", "--train", "train.jsonl", "--corpus", "missing.txt"], 2, ["missing.txt: no such file"]),
        (["fit", "--config", "missing.toml"], 2, ["missing.toml"]),
        (["fit", "--config", "flat.toml", "--corpus", "raw.jsonl"], 2, ["flat.toml: corpus is a table of settings (got 'raw.jsonl')"]),
        (["fit", "--config", "flat.toml", "--on-bad-row", "skip"], 2, ["flat.toml: corpus is a table of settings (got 'raw.jsonl')"]),
        (
            ["check", "train.jsonl", "--corpus", "raw.jsonl", "--set", "corpus=x"],
            2,
            ["--set corpus: check has only the settings of corpus"],
        ),
        (["fit", "--train", "train.jsonl", "--corpus", "y", "--set", "task.kind=x"], 2, ["task.kind: Input should be"]),
        (["check", "train.jsonl", "--label-separator", ";"], 2, ["label_separator ';'", "--task-type multi-label"]),
        (["sample-data", "data", "--seed", "-1"], 2, ["'--seed'", "greater than or equal to 0"]),
        (["select", "--queries", "x", "--index", "y", "-o", "z", "--seed", "4294967296"], 2, ["'--seed'", "4294967295"]),
        (["label-next", "missing", "x", "--seed", "-1"], 2, ["'--seed'", "greater than or equal to 0"]),
        (["fit", "--nonsense"], 2, ["--nonsense"]),
        (["predict", "missing", "-"], 2, ["missing"]),
        (["evaluate", "missing", "x", "--unseen-labels", "ingore"], 2, ["--unseen-labels", "'ingore'", "ignore"]),
        (["search", "missing", "query"], 2, ["missing", "cramlm index"]),
        (["verify", "missing"], 2, ["missing: no such folder"]),
        (["verify", "train.jsonl"], 2, ["train.jsonl: is a file; pass a run, a corpus"]),
        (["report", "missing"], 2, ["missing: no such folder"]),
        (["report", "train.jsonl"], 2, ["train.jsonl: is a file"]),
        *((["report", "finished", "-o", name], 2, [f"{name}: the report is a page of HTML", ".html or .htm"]) for name in ("x.txt", "x")),
        (["predict", "finishd", "-"], 2, ["finishd: no such folder (near: finished); pass a run"]),
        (
            ["fit", "--recipe", "plm", "--base-model", "missing", "--train", "train.jsonl"],
            2,
            ["missing: no such folder; --base-model takes"],
        ),
        (["predict", "some words", "-"], 2, ["some words: no such folder; pass a run, or the folder of a model"]),
        (["predict", "me/topics", "train.jsonl"], 2, ["hf download me/topics --local-dir topics"]),
        (["fit", "--recipe", "tfidf", "--train", "train.jsonl", "-o", "-"], 2, ["-: is standard input or output, and --out is a folder"]),
        (["sample-data", "-"], 2, ["-: is standard input or output, and DIR is a folder"]),
        (["predict", "missing", "it's a text"], 2, ["echo 'it'\"'\"'s a text' | cramlm predict missing -"]),
        (["predict", "missing", "my data.csv"], 2, ["missing: no such folder"]),
        (["serve", "missing", "--max-texts", "0"], 2, ["'--max-texts'", "greater than or equal to 1"]),
        (["serve", "missing", "--max-wait", "0"], 2, ["'--max-wait'", "greater than or equal to 0.001"]),
        (["explain", "missing", "-"], 2, ["-: explain reads one text from the command line"]),
        (["explain", "missing", "train.jsonl"], 2, ["train.jsonl: is a file", "cramlm predict"]),
        (["explain", "missing", "misspelt.csv"], 2, ["misspelt.csv: no such file, and explain reads one text", "cramlm predict"]),
        (["explain", "missing", "a text", "--text-pair", "data/x.JSON.gz"], 2, ["data/x.JSON.gz: no such file, and explain reads"]),
        (["explain", "missing", "in misspelt.csv"], 2, ["missing: no such folder"]),
        (["explain", "missing", "cramlm.org"], 2, ["missing: no such folder"]),
        (["search", "missing", "train.jsonl"], 2, ["train.jsonl: is a file; pass it with --queries"]),
        (["search", "missing", "a text", "--id-column", "key"], 2, ["--id-column are columns of a file of queries; pass --queries"]),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(arguments: list[str], code: int, needles: list[str], tmp_path: Path) -> None:
    write_task(tmp_path, documents=1)
    (tmp_path / "finished").mkdir()
    (tmp_path / "flat.toml").write_text("corpus = 'raw.jsonl'\ntask = {train = 'train.jsonl'}\n")
    result = cramlm(*arguments, cwd=tmp_path, stdin="a text\n")
    assert_one_line(result, code, *needles)


@pytest.mark.parametrize(
    "command",
    [
        "fit --recipe tfidf --train FILE",
        "fit --recipe static --train TRAIN --corpus FILE",
        "plan 1m --recipe labels-only --train FILE",
        "config --recipe labels-only --train FILE",
        "compare --recipes tfidf --train FILE --seed 1",
        "select --train FILE --index RUN -o out",
        "select --queries FILE --index RUN -o out",
        "predict RUN FILE",
        "evaluate RUN FILE",
        "embed RUN FILE -o vectors.npy",
        "label-next RUN FILE",
        "attention RUN FILE",
        "index FILE -o out",
        "search INDEX --queries FILE",
    ],
)
def test_an_error_about_a_file_names_only_options_that_the_command_has(fitted: Path, tmp_path: Path, command: str) -> None:
    group: Any = typer.main.get_command(app)
    options = {option for parameter in group.commands[command.split()[0]].params for option in parameter.opts}
    files = {"FILE": tmp_path / "bad.jsonl", "TRAIN": fitted / "data/train.jsonl", "RUN": fitted / "run", "INDEX": tmp_path / "index"}
    if command.startswith("search"):
        Index.build(["a text"], out=files["INDEX"])
    for text in ('{"text": "one", "label": "sea"}\n{"text"', '{"body": "one", "topic": "sea"}\n'):
        files["FILE"].write_text(text, "utf-8")
        line = error_line(cramlm(*(files.get(word, word) for word in command.split()), cwd=tmp_path), 3)
        assert "bad.jsonl:" in line
        assert set(re.findall(r"--[a-z-]+", line)) <= options, line
        assert ("--on-bad-row" in line) == ("--on-bad-row" in options), line


@pytest.mark.parametrize(
    "command",
    [
        "predict run FILE -o",
        "embed run FILE -o",
        "label-next run data/corpus.jsonl --labelled FILE -o",
        "search store --queries FILE --run",
        "select --index store -o OUT --train data/train.jsonl --test FILE --jsonl",
    ],
)
def test_a_file_that_is_read_or_that_cramlm_verifies_is_not_replaced(fitted: Path, tmp_path: Path, command: str) -> None:
    file, inside = tmp_path / "texts.parquet", Path("run/export/mlm/texts.parquet")
    file.write_bytes(b"mine")
    words = command.replace("FILE", str(file)).replace("OUT", str(tmp_path / "out")).split()
    replaced, within = (error_line(cramlm(*words, out, cwd=fitted), 2) for out in (file, inside))
    assert replaced == f"{file}: is the file to read, which would be replaced; pass another file to write"
    assert within == f"{inside}: is inside a folder whose files cramlm verifies; write the file outside of it"
    assert file.read_bytes() == b"mine"


def test_attention_writes_no_files_into_a_model_and_does_not_replace_its_texts(fitted: Path, tmp_path: Path) -> None:
    before = sorted((fitted / "run/export").iterdir())
    line = error_line(cramlm("attention", "run", "data/train.jsonl", "-o", "run/export", cwd=fitted), 2)
    assert line.startswith("run/export/heads.md: is inside a folder whose files cramlm verifies")
    assert sorted((fitted / "run/export").iterdir()) == before
    texts = tmp_path / "heads.json"
    texts.write_text('{"text": "mine"}\n', "utf-8")
    assert "is the file to read" in error_line(cramlm("attention", "run", texts, "-o", tmp_path, cwd=fitted), 2)


@pytest.mark.parametrize("command", ["search store --queries FILE --run", "report run -o"])
def test_a_dash_is_no_file_where_nothing_can_be_written_to_standard_output(fitted: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "queries.txt").write_text("ship\n", "utf-8")
    words = command.replace("FILE", str(tmp_path / "queries.txt")).split()
    assert error_line(cramlm(*words, "-", cwd=fitted), 2).startswith("-: standard output cannot be written here")


def test_any_text_is_printed_as_utf_8_in_a_locale_of_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "ок,да\nну,нет\n" * 3, "utf-8")
    encode: Any = io.TextIOWrapper.reconfigure
    out, _ = start("check", tmp_path / "train.csv", prepare=lambda: encode(sys.stdout, encoding="latin-1")).communicate(timeout=PATIENCE)
    assert "да 50.0%" in out


def test_a_reader_that_ends_before_the_output_is_no_error(fitted: Path) -> None:
    child = start("passages", fitted / "run")
    child.stdout.close()
    assert (child.wait(PATIENCE), child.stderr.read()) == (0, "")
    child.stderr.close()


@pytest.mark.slow
def test_with_several_ranks_only_the_first_reads_the_training_file_and_reports_its_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cramlm", "fit", "--recipe", "labels-only", "--train", "train.jsonl", "--out", "run"]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for folder in (tmp_path / "0", tmp_path / "1"):
        folder.mkdir()
    (tmp_path / "0/train.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "b"}\n', "utf-8")
    ranks = []
    for rank in (0, 1):
        environment = {**os.environ, **place, "RANK": str(rank)}
        ranks.append(subprocess.Popen(command, cwd=tmp_path / str(rank), env=environment, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 3], errors
    assert "train.jsonl:2" in errors[0]
    assert "cramlm: error" not in errors[1]


@pytest.mark.faults
def test_sigterm_saves_and_exits_75_and_the_same_command_finishes(fitted: Path, tmp_path: Path) -> None:
    arguments = ["fit", "--config", fitted / "run.toml", "--out", tmp_path / "run", "--store", fitted / "store"]
    arguments += ["--set", "phases[0].checkpoint_every=10"]
    for steps in (100, 1_000, 10_000):  # the signal may come after the last step
        longer = [*arguments, "--set", f"phases[0].steps={steps}"]
        process = start(*longer)
        while process.poll() is None and not list((tmp_path / "run/.work").glob("phase-1-joint/step-*/manifest.json")):  # published ones
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
        if process.returncode:
            break
        shutil.rmtree(tmp_path / "run")
    assert process.returncode == 75, errors
    assert errors.strip().splitlines()[-1].startswith("cramlm: error: ")
    assert "resuming from step" in succeed(*longer).stderr


def test_a_second_builder_of_a_run_exits_7_and_names_the_first(fitted: Path) -> None:
    from cramlm.storage.locks import lock

    with lock(fitted / "run" / "run"):
        result = cramlm("fit", "--config", fitted / "run.toml", "--out", fitted / "run", "--store", fitted / "store")
    assert_one_line(result, 7, f"pid {os.getpid()}")


def test_plan_shows_sizes_and_costs_and_budgets_that_are_too_small(fitted: Path) -> None:
    files = ("--train", fitted / "data/train.jsonl", "--dev", fitted / "data/dev.jsonl", "--corpus", fitted / "data/corpus.jsonl")
    narrow = ("encoder.hidden=32", "encoder.intermediate=32", "encoder.heads=2", "tokenizer.vocab_size=200")  # a step of it is counted
    fixed = ("tokens_per_second=40000", "threads=1", *narrow)
    settings = ("--preset", "tiny", *(word for setting in fixed for word in ("--set", setting)))
    small, five_minutes, operations = map(json.loads, printed("plan", "2s", "5m", "3e13flops", *files, *settings, "--json").splitlines())
    assert small["refused"].endswith("s or more")
    assert five_minutes["seconds"] == pytest.approx(300, rel=0.1)
    assert operations["flops"] == pytest.approx(3e13, rel=0.1)
    assert [phase["name"] for phase in five_minutes["phases"]] == ["joint", "finetune"]
    assert five_minutes["disk"] > 0
    assert "60m" in printed("plan", "60m", *settings)
    assert_one_line(cramlm("plan", "20m", "--preset", "huge"), 2, "'huge'", "bert-large")


@pytest.mark.faults
def test_a_command_below_the_address_space_of_torch_gives_one_line_and_exit_code_4(fitted: Path, tmp_path: Path) -> None:
    for command in (("predict", fitted / "run", fitted / "data/test.jsonl"), ("fit", "--config", fitted / "run.toml", "--out", "out")):
        limited = ["bash", "-c", f"ulimit -v 1000000 && exec {shlex.join([sys.executable, '-m', 'cramlm', *map(str, command)])}"]
        result = subprocess.run(limited, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
        assert_one_line(result, 4, f"{command[0]} needs at least 2.0 GB to load torch")


@pytest.mark.faults
def test_a_fit_beyond_the_memory_limit_gives_one_line_and_exit_code_4(fitted: Path, tmp_path: Path) -> None:
    def leave_one_gigabyte() -> None:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 10**9, resource.RLIM_INFINITY))

    large = ("tokens_per_second=none", "encoder.hidden=65536", "baseline.enabled=false")  # does not even fit to be measured
    settings = [word for setting in large for word in ("--set", setting)]
    files = ("--config", fitted / "run.toml", "--out", tmp_path / "run", "--store", fitted / "store")
    process = start("fit", *files, *settings, prepare=leave_one_gigabyte)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4, errors
    assert "out of memory" in errors.strip().splitlines()[-1]
