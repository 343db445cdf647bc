"""Text vectors: in Python, and `cramlm embed`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from commands import cramlm, error_line, printed
from cramlm.cli import models
from cramlm.errors import UsageError
from cramlm.inference.predictor import Predictor
from cramlm.model.huggingface.folder import load_classifier
from cramlm.model.operations import no_dropout
from jsonl import write_jsonl

TEXTS = ["the old ship was near the harbour", "a path from the valley", "tide reef, and a stone cabin in the old forest by the sea", "sea"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("texts") / "texts.jsonl", ({"text": text} for text in TEXTS))


def test_vectors_are_the_input_of_the_classifier_in_the_order_of_the_texts(finished: Path) -> None:
    predictor = Predictor.load(finished / "export", model_part="encoder")
    vectors = predictor.embeddings(TEXTS)
    assert (vectors.dtype, vectors.shape) == (np.float32, (4, 32))
    alone = np.concatenate([predictor.embeddings([text]) for text in TEXTS])
    assert np.allclose(vectors, alone, atol=1e-5)
    model = load_classifier(finished / "export").model
    with torch.no_grad():
        logits = model.classifier(torch.from_numpy(vectors), dropout=no_dropout()).numpy()
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    assert np.allclose(odds / odds.sum(axis=1, keepdims=True), predictor.probabilities(TEXTS), atol=1e-5)
    assert (Predictor.load(finished / "export").embeddings(TEXTS) == vectors).all()
    assert predictor.embeddings([]).shape == (0, 32)


def test_the_files_hold_the_vectors_in_order(finished: Path, file: Path, tmp_path: Path) -> None:
    for model_part in ("encoder", "static"):
        expected = Predictor.load(finished / "export", model_part=model_part).embeddings(TEXTS)
        array, table = tmp_path / f"{model_part}.npy", tmp_path / f"{model_part}.parquet"
        shown = printed("embed", finished, file, "-o", array, "--model-part", model_part)
        assert f"4 vectors of {expected.shape[1]} numbers" in shown
        assert (np.load(array) == expected).all()
        printed("embed", finished, file, "--out", table, "--model-part", model_part, "--normalize")
        read = pq.read_table(table)
        assert read.column("id").to_pylist() == ["1", "2", "3", "4"]
        rows = np.array(read.column("embedding").to_pylist(), dtype=np.float32)
        assert np.allclose(rows, expected / np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-9), atol=1e-6)


def test_vectors_of_many_texts_are_written_a_part_at_a_time(
    finished: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, table, ids = tmp_path / "vectors.npy", tmp_path / "vectors.parquet", ["1", "2", "3", "4"]
    expected = Predictor.load(finished / "export", model_part="static").embeddings(TEXTS)
    monkeypatch.setattr(models, "_AT_ONCE", 3)
    for out in (array, table):
        printed("embed", finished, file, "-o", out, "--model-part", "static")
    assert (np.load(array) == expected).all()
    read = pq.ParquetFile(table)
    assert read.num_row_groups == 2
    assert read.read().column("id").to_pylist() == ids
    assert read.read().column("embedding").to_pylist() == expected.tolist()


def test_what_has_no_vectors_is_one_line(finished: Path, file: Path, tmp_path: Path) -> None:
    tfidf = finished / "export/combination/tfidf"
    for path, out, code, needle in (
        (finished, "vectors.csv", 2, ".npy or .parquet"),
        (tfidf, "vectors.NPY", 2, "tfidf has no text vectors"),
        (tmp_path, "vectors.npy", 5, "holds no exported model"),
    ):
        assert needle in error_line(cramlm("embed", path, file, "-o", tmp_path / out), code)
    static = finished / "export/combination/static"
    command = ("embed", static, file, "-o", tmp_path / "vectors.npy", "--model-part")
    assert "is a linear model without an encoder" in error_line(cramlm(*command, "encoder"), 2)
    assert "4 vectors" in printed(*command, "static")
    with pytest.raises(UsageError, match="texts is one string"):
        Predictor.load(finished / "export").embeddings("one text")
