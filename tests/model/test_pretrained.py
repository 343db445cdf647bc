"""Folders that others saved, as starting weights: what transformers computes from them is what our model computes, before and after."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_fixtures
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cramlm.config.head import HeadConfig
from cramlm.config.run import EncoderConfig
from cramlm.errors import ArtifactError
from cramlm.model.huggingface import folder as hf
from cramlm.model.huggingface.pretrained import open_pretrained
from cramlm.model.huggingface.weights import LoadedWeights, load_pretrained_weights
from cramlm.model.model import Model, ModelSpec, build_model
from cramlm.model.tokenizer import Tokenizer
from damaging import edit_json, edit_tensors
from pretrained_folders import Shape, write_pretrained

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised inside transformers while it loads

LOCAL = {"local_attention": 8, "global_attn_every_n_layers": 3}
TEXTS = model_fixtures.sentences(24, seed=4, longest=22)
SHAPES: list[Shape] = ["bert", "roberta", "modernbert", "albert"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A language model of each shape; ModernBERT's with layers that see a window, as the published ones have them."""
    root = tmp_path_factory.mktemp("pretrained")
    return {
        "bert": write_pretrained(root / "bert", "bert", TEXTS, kind="ForPreTraining"),
        "roberta": write_pretrained(root / "roberta", "roberta", TEXTS, type_vocab_size=1),
        "modernbert": write_pretrained(root / "modernbert", "modernbert", TEXTS, layers=4, **LOCAL),
        "albert": write_pretrained(root / "albert", "albert", TEXTS, kind="ForPreTraining", embedding_size=16, hidden_act="gelu"),
        "xlm-roberta": write_pretrained(root / "xlm-roberta", "roberta", TEXTS, type_vocab_size=1),
    }


def opened(folder: Path, *, labels: int = 3) -> tuple[Model, Any, LoadedWeights]:
    pretrained = open_pretrained(folder)
    tokenizer = pretrained.tokenizer
    spec = ModelSpec(pretrained.encoder, pretrained.head, vocab_size=tokenizer.vocab_size, labels=labels, pad_id=tokenizer.pad_id)
    model = build_model(spec, seed=1)
    return model, tokenizer, load_pretrained_weights(model, pretrained)


def vocabulary_logits(model: Model, tokenizer: Any, texts: list[str]) -> np.ndarray[Any, Any]:
    """At every token, one text after the other."""
    batch = model_fixtures.packed(tokenizer.sequences(texts, max_length=40, cut="truncate"), per_row=3, pad_id=tokenizer.pad_id)
    with torch.no_grad():
        return model.mlm_logits(model.hidden(batch), (batch.sequence.flatten() >= 0).nonzero().squeeze(1)).numpy()


def native_vocabulary_logits(folder: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    import transformers

    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=40, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        return model(**inputs).logits.numpy()[inputs["attention_mask"].numpy().astype(bool)]


@pytest.mark.parametrize("shape", [*SHAPES, "xlm-roberta"])
def test_a_pretrained_language_model_gives_the_logits_of_transformers_also_after_an_export(
    folders: dict[str, Path], shape: str, tmp_path: Path
) -> None:
    if shape == "xlm-roberta":  # RoBERTa by another name
        edit_json(folders[shape] / "config.json", model_type=shape)
    theirs = native_vocabulary_logits(folders[shape], TEXTS)
    model, tokenizer, loaded = opened(folders[shape])
    assert loaded.mlm_head
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(vocabulary_logits(model, tokenizer, TEXTS), theirs, atol=1e-4, rtol=0)
    hf.save_mlm(model, tokenizer, tmp_path, max_length=48)
    np.testing.assert_allclose(native_vocabulary_logits(tmp_path, TEXTS), theirs, atol=1e-4, rtol=0)
    copy, _, _ = hf.load_mlm(tmp_path, head=model.head_config, labels=3, seed=0)
    np.testing.assert_array_equal(vocabulary_logits(copy, tokenizer, TEXTS), vocabulary_logits(model, tokenizer, TEXTS))


@pytest.mark.parametrize("shape", SHAPES)
def test_an_exported_classifier_with_a_foreign_tokenizer_predicts_the_same_in_transformers(
    folders: dict[str, Path], shape: str, tmp_path: Path
) -> None:
    import transformers

    model, tokenizer, _ = opened(folders[shape])
    hf.save_classifier(model, tokenizer, tmp_path, labels=("a", "b", "c"), max_length=32)
    native = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    native_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    odd = ["", "[MASK] <mask> [SEP] </s>", "日本語 naïve  two spaces", "x" * 300]
    texts, pairs = [*TEXTS, *odd], [*reversed(TEXTS), *odd]
    sequences = tokenizer.sequences(texts, pairs, max_length=32, cut="truncate")
    inputs = native_tokenizer(texts, pairs, padding=True, truncation=True, return_tensors="pt")
    ids = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    assert [sequences[index].tolist() for index in range(len(texts))] == ids
    single = tokenizer.sequences(texts, max_length=32, cut="truncate")
    assert [single[index].tolist() for index in range(len(texts))] == native_tokenizer(texts, truncation=True)["input_ids"]
    loaded = hf.load_classifier(tmp_path)
    batch = model_fixtures.packed(sequences, per_row=2, pad_id=tokenizer.pad_id)
    with torch.no_grad():
        theirs = native(**inputs).logits.numpy()
        ours = loaded.model.task_logits(loaded.model.hidden(batch), batch).numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_encoder_saved_alone_in_half_precision_gets_a_new_head(shape: Shape, tmp_path: Path) -> None:
    settings = {"modernbert": LOCAL, "albert": {"embedding_size": 16, "hidden_act": "gelu"}}.get(shape, {})
    folder = write_pretrained(tmp_path / "encoder", shape, TEXTS, kind="Model", **settings)
    tensors = load_file(folder / "model.safetensors")
    old = {name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta") for name in tensors}
    save_file(
        {old[name]: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )  # as the oldest BERTs were converted
    model, tokenizer, loaded = opened(folder)
    assert not loaded.mlm_head
    sizes = {"vocab_size": model.vocab_size, "labels": 3, "pad_id": tokenizer.pad_id}
    other = build_model(ModelSpec(model.encoder_config, model.head_config, **sizes), seed=1)
    saved = ("encoder.", "classifier.dense") if shape in ("bert", "albert") else "encoder."
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)) != name.startswith(saved), name


def test_rows_beyond_the_tokenizers_last_id_are_dropped(tmp_path: Path) -> None:
    folder = write_pretrained(tmp_path / "padded", "bert", TEXTS, vocab_size=384)
    model, tokenizer, _ = opened(folder)
    assert model.vocab_size == tokenizer.vocab_size < 384
    theirs = native_vocabulary_logits(folder, TEXTS)[:, : tokenizer.vocab_size]
    np.testing.assert_allclose(vocabulary_logits(model, tokenizer, TEXTS), theirs, atol=1e-4, rtol=0)


def test_an_exported_folder_can_be_the_start(folders: dict[str, Path], tmp_path: Path) -> None:
    encoder = EncoderConfig(layers=2, hidden=32, heads=4, intermediate=48, max_positions=64)
    tokenizer = open_pretrained(folders["bert"]).tokenizer
    model = build_model(ModelSpec(encoder, HeadConfig(), vocab_size=tokenizer.vocab_size, labels=2, pad_id=tokenizer.pad_id), seed=7)
    hf.save_mlm(model, tokenizer, tmp_path, max_length=64)
    copy, _, loaded = opened(tmp_path, labels=2)
    assert loaded.mlm_head
    assert open_pretrained(tmp_path).encoder == encoder
    for name, parameter in model.named_parameters():
        assert name.startswith("classifier.") or torch.equal(parameter, copy.get_parameter(name)), name


def test_a_vocabulary_that_two_bytes_cannot_number_is_read(folders: dict[str, Path]) -> None:
    content = json.loads((folders["bert"] / "tokenizer.json").read_bytes())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"word{number}": number for number in range(len(vocabulary), 100_000)}
    tokenizer = Tokenizer(json.dumps(content))
    sequences = tokenizer.sequences(["word99999 water", "word65537"], max_length=16, cut="truncate")
    assert sequences.ids.dtype == np.uint32
    assert [sequences[0].tolist()[1], sequences[1].tolist()[1]] == [99_999, 65_537]
    assert tokenizer.sequences(["word99999"], ["word70000"], max_length=8, cut="truncate")[0].tolist()[3] == 70_000


def test_the_fingerprint_is_that_of_config_weights_and_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (copy / name).write_bytes((folders["bert"] / name).read_bytes())
    assert open_pretrained(copy).fingerprint == open_pretrained(folders["bert"]).fingerprint
    edit_tensors(copy / "model.safetensors", lambda tensors: tensors["bert.pooler.dense.bias"].add_(1))
    assert open_pretrained(copy).fingerprint != open_pretrained(folders["bert"]).fingerprint


def change_config(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **{key: value})


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder / "model.safetensors", change)


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps([1]))


def sharded(folder: Path) -> None:
    only_pickled(folder)
    (folder / "model.safetensors.index.json").touch()


def in_a_run(folder: Path) -> None:
    export = folder / "export"
    export.mkdir()
    for file in [*folder.glob("*.*")]:
        file.rename(export / file.name)


QUERY = "bert.encoder.layer.0.attention.self.query.weight"
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (in_a_run, "folder: is a run; pass the weights that it exported: --base-model "),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: missing; --base-model takes a folder with"),
    (lambda folder: (folder / "config.json").unlink(), "config.json: missing"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: missing"),
    (only_pickled, "pytorch_model.bin: pickle, refused"),
    (sharded, "model.safetensors.index.json: the weights are in several files, and only model.safetensors is read; load the model with"),
    (change_config("model_type", ["bert"]), "model_type is ['bert']; pretrained weights may be"),
    (change_config("model_type", "gpt2"), "model_type is 'gpt2'; pretrained weights may be of the shapes bert, roberta, "),
    (change_config("hidden_act", "relu"), "hidden_act is 'relu', this encoder computes 'gelu'"),
    (change_config("position_embedding_type", "relative_key"), "position_embedding_type is 'relative_key'"),
    (change_config("is_decoder", True), "is_decoder is True"),
    (change_config("tie_word_embeddings", False), "tie_word_embeddings is False"),
    (change_config("auto_map", {"AutoModel": "x.Y"}), "would run code"),
    (change_config("hidden_size", 64), "has shape"),
    (change_config("num_hidden_layers", 3), "is missing"),
    (change_config("num_hidden_layers", 1), "has no place in this model"),
    (change_config("vocab_size", 20), "pass both of one model"),
    (change_tensors(lambda tensors: tensors.pop(QUERY)), f"tensor '{QUERY}' is missing, which config.json describes"),
    (change_tensors(lambda tensors: tensors[QUERY][0].fill_(float("nan"))), "holds NaN or infinity"),
    (change_tensors(lambda tensors: tensors.update({QUERY: tensors[QUERY].int()})), "has dtype I32"),
    (change_tensors(lambda tensors: tensors.update({"bert.adapter.weight": torch.zeros(2)})), "'bert.adapter.weight' has no place"),
    (
        change_tensors(lambda tensors: tensors.update({"cls.predictions.decoder.weight": torch.zeros(300, 32)})),
        "is not the token embedding",
    ),
]


@pytest.mark.parametrize(("damage", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(
    folders: dict[str, Path], tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = Path(shutil.copytree(folders["bert"], tmp_path / "folder"))
    damage(folder)
    with pytest.raises(ArtifactError) as caught:
        opened(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
