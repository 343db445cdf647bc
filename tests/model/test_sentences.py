"""Sentence vectors from tiny encoders of transformers' own classes, made here with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from cramlm.config.retriever import DenseConfig
from cramlm.errors import ArtifactError, EnvironmentFault, UsageError
from cramlm.model.sentences import SentenceEncoder, open_sentence_encoder
from damaging import cut, edit_json

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised inside transformers while it loads

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "ship", "tide", "summit", "eagle", "reef"]
TEXTS = ["a ship", "the tide a ship reef eagle summit summit", "", "summit", "eagle " * 50]
SIZES = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}


def save_encoder(folder: Path, kind: str) -> tuple[Any, Any]:
    """A random model of this kind and its word-level tokenizer, saved in `folder` and returned."""
    import transformers

    torch.manual_seed(3)
    more = {"cls_token_id": 2, "sep_token_id": 3} if kind == "ModernBert" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, max_position_embeddings=40, pad_token_id=0, **more)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    special = {f"{name.strip('[]').lower()}_token": name for name in WORDS[:5]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=32, **special)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    save_encoder(path, "Bert")
    return path


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "MPNet", "ModernBert"])
def test_a_vector_is_the_pooled_last_state_of_the_text_with_length_one(tmp_path: Path, kind: str) -> None:
    model, tokenizer = save_encoder(tmp_path, kind)
    vectors = {pooling: SentenceEncoder(tmp_path, max_length=24, pooling=pooling).encode(TEXTS) for pooling in ("mean", "cls")}
    for number, text in enumerate(TEXTS):
        ids = torch.tensor([[*tokenizer(text)["input_ids"][:23], 3] if len(text) > 200 else tokenizer(text)["input_ids"]])
        with torch.no_grad():
            states = model(input_ids=ids).last_hidden_state[0]
        for pooling, pooled in (("mean", states.mean(0)), ("cls", states[0])):
            assert vectors[pooling].dtype == np.float32
            np.testing.assert_allclose(vectors[pooling][number], (pooled / pooled.norm()).numpy(), atol=2e-5)


def test_the_fingerprint_depends_on_content_and_settings_and_loads_nothing(folder: Path, tmp_path: Path) -> None:
    one = SentenceEncoder(folder, max_length=24, pooling="mean")
    same = open_sentence_encoder(DenseConfig(encoder=str(folder), max_length=24))
    assert one.fingerprint == same.fingerprint
    assert "_opened" not in vars(one)
    assert SentenceEncoder(folder, max_length=25, pooling="mean").fingerprint != one.fingerprint
    save_encoder(tmp_path, "Roberta")
    assert SentenceEncoder(tmp_path, max_length=24, pooling="mean").fingerprint != one.fingerprint


def test_vectors_are_computed_on_the_device_that_was_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DenseConfig(encoder=str(folder), max_length=24)
    with pytest.raises(EnvironmentFault, match="device 'cuda': PyTorch has no CUDA device here"):
        open_sentence_encoder(config, device="cuda").encode(["a"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert len(open_sentence_encoder(config, device="cpu").encode(["a"])) == 1


def test_a_folder_that_was_trained_with_another_pooling_or_is_missing_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    with pytest.raises(UsageError, match=r"retriever\.pooling = 'cls'"):
        SentenceEncoder(tmp_path, max_length=24, pooling="mean")
    SentenceEncoder(tmp_path, max_length=24, pooling="cls")
    with pytest.raises(UsageError, match="no such folder"):
        SentenceEncoder(tmp_path / "nowhere", max_length=24, pooling="mean")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        lambda folder: edit_json(folder / "config.json", auto_map={"AutoModel": "evil.Model"}),
        lambda folder: cut(folder / "model.safetensors", 0.1),
    ],
    ids=["no weights", "pickled weights", "code", "truncated"],
)
def test_a_folder_that_cannot_or_must_not_be_read_is_refused(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    save_encoder(tmp_path, "Bert")
    damage(tmp_path)
    with pytest.raises(ArtifactError, match=str(tmp_path)):
        SentenceEncoder(tmp_path, max_length=24, pooling="mean").encode(["a"])
