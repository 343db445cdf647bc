"""Runs whose raw text is written with other diacritics than the task's texts."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from cramlm.config.run import load_config
from cramlm.inference.predictor import Predictor
from cramlm.pipeline.run import Run, run
from cramlm.records import Event
from cramlm.retrieval.selection import SelectionTable
from tiny_task import tiny_config, write_task

ACUTE = "\u0301"


def accented(text: str) -> str:
    """The text with an acute accent on each a, e, i and o."""
    return unicodedata.normalize("NFC", "".join(letter + ACUTE if letter in "aeio" else letter for letter in text))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A task without diacritics, raw text with them."""
    paths = write_task(tmp_path_factory.mktemp("data"))
    corpus = Path(paths["corpus"])
    rows = [json.loads(line) for line in corpus.read_text("utf-8").splitlines()]
    lines = (json.dumps({**row, "text": accented(row["text"])}, ensure_ascii=False) for row in rows)
    corpus.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return paths


@pytest.fixture(scope="module")
def finished(paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("removed")
    return run(load_config(tiny_config(paths, diacritics="remove")), out=folder / "run", store=folder / "store")


def text_of(paths: dict[str, str]) -> str:
    return str(json.loads(Path(paths["test"]).read_text("utf-8").splitlines()[0])["text"])


def test_texts_with_and_without_diacritics_retrieve_and_are_predicted_alike(finished: Run, paths: dict[str, str]) -> None:
    assert len(SelectionTable.open(finished.path / "selection")) > 20
    text = text_of(paths)
    assert accented(text) != text
    for part in ("combined", "encoder", "static", "bayes", "tfidf"):
        predictor = Predictor.load(finished.export, model_part=part)
        np.testing.assert_array_equal(predictor.outputs([accented(text)], None), predictor.outputs([text], None), err_msg=part)
    static = Predictor.load(finished.export, model_part="static")
    np.testing.assert_array_equal(static.embeddings([accented(text)]), static.embeddings([text]))


def test_the_exported_tokenizer_removes_them_without_cramlm(finished: Run, paths: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished.export)
    text = text_of(paths)
    assert tokenizer(accented(text))["input_ids"] == tokenizer(text)["input_ids"]


def test_a_run_that_keeps_them_retrieves_little_and_warns(paths: dict[str, str], tmp_path: Path) -> None:
    events: list[Event] = []
    config = tiny_config(paths, model="static", phases=[])
    run(load_config(config), out=tmp_path / "run", store=tmp_path / "store", emit=events.append)
    (warning,) = [event.message for event in events if event.kind == "warning" and event.stage == "static"]
    assert "100% without diacritics: the two are written differently; try --set diacritics=remove" in warning


def test_the_same_diacritics_in_both_give_no_warning(tmp_path: Path) -> None:
    events: list[Event] = []
    config = tiny_config(write_task(tmp_path / "data"), model="static", phases=[])
    run(load_config(config), out=tmp_path / "run", store=tmp_path / "store", emit=events.append)
    assert not [event for event in events if event.kind == "warning" and event.stage == "static"]
