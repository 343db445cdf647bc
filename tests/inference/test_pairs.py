"""A model of sentence pairs reads pairs, one of single texts reads none, and both read the columns that they were trained on."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest

from commands import cramlm, error_line, printed, succeed
from cramlm.errors import UsageError
from cramlm.export.hub import published
from cramlm.export.onnx import export_onnx
from cramlm.inference.base import are_pairs
from cramlm.inference.explain import explain
from cramlm.inference.predictor import Predictor
from cramlm.records import Example
from cramlm.serving.batching import load_model
from jsonl import write_jsonl

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
    assert [line.split()[1] for line in next_commands] == ["predict", "evaluate", "serve"]
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


def test_a_command_that_gives_a_model_other_inputs_than_in_training_fails_in_one_line(runs: Path) -> None:
    file = runs / "pairs.jsonl"
    assert "'text2'; use .jsonl" in error_line(cramlm("predict", runs / "pairs", "-", "--text-pair-column", "text2", stdin="one\n"), 2)
    assert NEEDS_NONE in error_line(cramlm("predict", runs / "single", file, "--text-pair-column", "hypothesis"), 2)
    assert NEEDS_NONE in error_line(cramlm("evaluate", runs / "single", file, "--text-pair-column", "hypothesis"), 2)
    assert "explain reads one text" in error_line(cramlm("explain", runs / "pairs", "one text"), 2)
    check = ["check", file, "--text-column", "premise", "--label-column", "relation", "--model", runs / "pairs"]
    assert NEEDS_PAIRS in error_line(cramlm(*check), 2)


def test_predictors_of_every_kind_refuse_other_inputs_than_in_training(encoder: tuple[Path, bool], tmp_path: Path) -> None:
    folder, on_pairs = encoder
    pairs = ["two"] if on_pairs else None
    probe = [Example("1", "one", "two" if on_pairs else None, None)]
    graph = export_onnx(folder, out=tmp_path / "onnx", texts=probe).path
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
        if on_pairs:
            with pytest.raises(UsageError, match="explain reads one text"):
                explain(predictor, "one")
    served = load_model(folder, None)
    assert served.compute(["one"], pairs or [None]).probabilities.shape == (1, 3)
    with pytest.raises(UsageError, match=NEEDS_PAIRS if on_pairs else NEEDS_NONE):
        served.compute(["one"], [None] if on_pairs else ["two"])


def test_the_hub_learns_that_a_model_reads_pairs_but_no_names_of_columns(encoder: tuple[Path, bool]) -> None:
    folder, on_pairs = encoder
    public = published(json.loads((folder / "provenance.json").read_bytes()))
    assert are_pairs(public) is on_pairs
    assert "premise" not in json.dumps(public)


def test_a_model_of_other_origin_reads_texts_and_pairs(tiny_export: Path) -> None:
    predictor = Predictor.load(tiny_export)
    assert predictor.trained_on_pairs is None
    assert len(predictor.predict(["one", "two"], ["three", None])) == 2
