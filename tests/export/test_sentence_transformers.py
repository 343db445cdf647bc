"""The export for sentence-transformers: its documented layout, and the vectors of the model, in every shape."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import cramlm, error_line
from cramlm.errors import UsageError
from cramlm.export.sentence_transformers import export_sentence_encoder
from cramlm.inference.predictor import Predictor
from cramlm.model.sentences import SentenceEncoder
from cramlm.model.tokenizer import Tokenizer
from cramlm.records import Example
from cramlm.storage.artifacts import verify
from jsonl import read_json
from server_process import export_tiny

SHAPES = [("bert", "cls"), ("roberta", "cls"), ("albert", "cls"), ("modernbert", "mean"), ("modernbert", "cls")]
HARD = ["[MASK] [SEP] aspirin", "Ọ̀RỌ̀ ilé \u200e kinase", "cell " * 300, "x" * 400]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, texts: list[str]) -> Callable[[str, str], tuple[Path, Path]]:
    """Returns for a shape and a pooling the folders of the model and of its sentence encoder, which no test may change."""

    @functools.cache
    def make(shape: str, pooling: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(f"{shape}-{pooling}")
        model = export_tiny(folder / "model", tokenizer, shape=shape, pooling=pooling)
        examples = [Example(str(number), text, None, None) for number, text in enumerate([*texts, *HARD])]
        return model, export_sentence_encoder(model, texts=examples).path

    return make


@pytest.mark.parametrize(("shape", "pooling"), SHAPES)
def test_the_folder_has_the_documented_layout(exported: Callable[[str, str], tuple[Path, Path]], shape: str, pooling: str) -> None:
    model, folder = exported(shape, pooling)
    assert folder == model.parent / "model-sentence-transformers"
    assert verify(folder) == 1
    modules = read_json(folder / "modules.json")
    types = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
    assert [(each["idx"], each["path"], each["type"]) for each in modules] == [(0, "", types[0]), (1, "1_Pooling", types[1])]
    modes = read_json(folder / "1_Pooling/config.json")
    assert modes["word_embedding_dimension"] == 32
    chosen = {name for name, value in modes.items() if name.startswith("pooling_mode_") and value}
    assert chosen == {{"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}[pooling]}
    assert read_json(folder / "sentence_bert_config.json") == {"max_seq_length": 48, "do_lower_case": False}
    config = read_json(folder / "config.json")
    assert config["architectures"][0].endswith("Model")
    assert "id2label" not in config


@pytest.mark.parametrize(("shape", "pooling"), SHAPES)
def test_transformers_and_the_predictor_give_the_same_vectors(
    exported: Callable[[str, str], tuple[Path, Path]], texts: list[str], shape: str, pooling: Any
) -> None:
    model, folder = exported(shape, pooling)
    inputs = [*texts[1:], *HARD]
    ours = Predictor.load(model).embeddings(inputs)
    theirs = SentenceEncoder(folder, max_length=512, pooling=pooling).encode(inputs)  # cut by the tokenizer's own limit
    assert np.allclose(ours / np.linalg.norm(ours, axis=1, keepdims=True), theirs, atol=1e-5)
    with pytest.raises(UsageError, match="the encoder pools by"):
        SentenceEncoder(folder, max_length=512, pooling="mean" if pooling == "cls" else "cls")


@pytest.mark.parametrize(("shape", "pooling"), SHAPES)
def test_sentence_transformers_gives_the_same_vectors(
    exported: Callable[[str, str], tuple[Path, Path]], texts: list[str], shape: str, pooling: str
) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing: pip install sentence-transformers")
    model, folder = exported(shape, pooling)
    inputs = [*texts[1:], *HARD]
    theirs = library.SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(inputs)
    assert np.allclose(Predictor.load(model).embeddings(inputs), theirs, atol=1e-5)


def test_a_run_has_its_sentence_encoder_beside_its_export(tiny_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(tiny_run / "run", tmp_path / "run")
    result = cramlm("export", run, "--format", "sentence-transformers")
    assert (result.returncode, result.stdout) == (0, f"{run / 'sentence-transformers'}\n")
    assert "vectors within" in result.stderr
    assert "up to date" in cramlm("export", run, "--format", "sentence-transformers").stderr


def test_what_has_no_vectors_is_refused_in_one_line(tiny_run: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    linear = tiny_run / "run/export/combination/tfidf"
    moe = export_tiny(tmp_path / "moe", tokenizer, shape="moe")
    alone = export_tiny(tmp_path / "alone", tokenizer, shape="bert", pooling="cls")
    for path, options, needle in (
        (linear, (), "a linear model, which sentence-transformers cannot load"),
        (moe, (), "no class for a mixture of experts"),
        (alone, (), "pass --texts FILE"),
        (alone, ("--int8",), "--int8 is for --format onnx"),
    ):
        assert needle in error_line(cramlm("export", path, "--format", "sentence-transformers", *options), 2)
