"""Folders that must not load: FAULTS 62-66."""

from __future__ import annotations

import itertools
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_fixtures
import numpy as np
import pytest
import torch

from cramlm.errors import ArtifactError
from cramlm.model.huggingface import folder as hf
from cramlm.model.model import ModelSpec, build_model
from cramlm.model.tokenizer import Tokenizer
from damaging import Marker, edit_header, edit_json, edit_tensors


@pytest.fixture(params=["bert", "modernbert-mean"])
def exported(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    encoder, head = model_fixtures.SHAPES[request.param]
    model = build_model(ModelSpec(encoder, head, vocab_size=tokenizer.vocab_size, labels=3), seed=0)
    folder = tmp_path / "model"
    hf.save_classifier(model, tokenizer, folder, labels=["a", "b", "c"], max_length=64)
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        hf.load_classifier(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "MODEL.PTH", "weights.pkl.gz", "objects.npy"])
def test_pickles_are_refused_and_never_opened(exported: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "executed"
    np.save(exported / "plain.npy", np.zeros(3))
    hf.load_classifier(exported)
    if name.endswith(".npy"):
        np.save(exported / name, np.array([Marker(marker), None]), allow_pickle=True)
    else:
        (exported / name).write_bytes(pickle.dumps(Marker(marker)))
    assert f"{name}: pickle, refused" in refused(exported)
    (exported / "model.safetensors").unlink()
    assert "pickle, refused" in refused(exported)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("file", "key"), [("config.json", "auto_map"), ("tokenizer_config.json", "trust_remote_code"), ("config.json", "custom_code")]
)
def test_keys_that_run_code_are_refused_and_nothing_is_imported(exported: Path, tmp_path: Path, file: str, key: str) -> None:
    marker = tmp_path / "executed"
    (exported / "modeling_evil.py").write_text(f"import os; os.mkdir({str(marker)!r})", "utf-8")
    value = {"AutoModelForSequenceClassification": "modeling_evil.Model"} if key == "auto_map" else True
    edit_json(exported / file, **{key: value})
    message = refused(exported)
    assert file in message
    assert key in message
    assert not marker.exists()


WRONG_TENSORS: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda tensors: tensors.pop("classifier.weight"), "'classifier.weight' is missing"),  # never replaced by a random head
    (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2)}), "'lm_head.weight' has no place"),
    (lambda tensors: tensors.update({"classifier.weight": torch.zeros(4, 32)}), "'classifier.weight' has shape (4, 32), expected (3, 32)"),
    (lambda tensors: tensors.update({"classifier.bias": torch.zeros(3).half()}), "'classifier.bias' has dtype F16, expected F32"),
    (lambda tensors: tensors.update({"classifier.bias": torch.zeros(3).double()}), "'classifier.bias' has dtype F64, expected F32"),
    (lambda tensors: tensors.update({name: tensor.half() for name, tensor in tensors.items()}), "has dtype F16, expected F32"),
    (lambda tensors: tensors["classifier.weight"][1, 5].fill_(float("nan")), "'classifier.weight' holds NaN or infinity"),
    (lambda tensors: tensors["classifier.weight"][1, 5].fill_(float("inf")), "'classifier.weight' holds NaN or infinity"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_TENSORS)
def test_a_wrong_tensor_is_named(exported: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str) -> None:
    edit_tensors(exported / "model.safetensors", change)
    assert message in refused(exported)


def test_weights_cut_anywhere_are_refused(exported: Path) -> None:
    path = exported / "model.safetensors"
    whole = path.read_bytes()
    cuts = [whole[:length] for length in (0, 1, 7, 8, 9, 100, *range(len(whole) // 16, len(whole), len(whole) // 16), len(whole) - 1)]
    for content in (*cuts, struct.pack("<Q", 2**62) + whole[8:]):  # and a header of 2^62 bytes
        path.write_bytes(content)
        assert "damaged, not a whole safetensors file" in refused(exported)


@pytest.mark.parametrize(
    "offsets",
    [
        lambda start, stop: [start - 4, stop - 4],
        lambda start, stop: [start, stop + 4],
        lambda start, stop: [stop, start],
        lambda start, stop: [0, 2**62],
    ],
    ids=["overlapping", "longer", "reversed", "2^62"],
)
def test_overlapping_or_wild_offsets_are_refused(exported: Path, offsets: Callable[[int, int], list[int]]) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["classifier.weight"]["data_offsets"] = offsets(*fields["classifier.weight"]["data_offsets"])

    edit_header(exported / "model.safetensors", change)
    assert "damaged, not a whole safetensors file" in refused(exported)


def test_the_tokenizer_of_another_model_is_refused(exported: Path, bpe_tokenizer: Tokenizer) -> None:
    content = json.loads(bpe_tokenizer.content)
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    del vocabulary[last]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if pair[0] + pair[1].removeprefix("##") != last]
    (exported / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    assert "use the tokenizer that was exported with the model" in refused(exported)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(exported: Path, file: str) -> None:
    (exported / file).unlink()
    assert f"{file}: missing" in refused(exported)
    (exported / "model.safetensors.index.json").touch()
    assert ("the weights are in several files" in refused(exported)) == (file == "model.safetensors")
    assert "No such file" in refused(exported / "absent")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_that_is_not_a_json_object_is_named(exported: Path, file: str) -> None:
    for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000):
        (exported / file).write_bytes(content)
        message = refused(exported)
        assert file in message
        assert "damaged" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("model_type", ["bert"]),
        ("hidden_size", 33),
        ("hidden_size", "32"),
        ("hidden_size", 10**12),
        ("intermediate_size", 10**9),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 1),
        ("vocab_size", 5),
        ("num_attention_heads", 0),
        ("pad_token_id", 7),
        ("architectures", ["BertForTokenClassification"]),
        ("id2label", {"0": "a", "1": "b"}),
        ("id2label", {"0": "a", "2": "b", "1": "c"}),
        ("id2label", {"0": "a", "1": "a", "2": "c"}),
        ("label2id", {"a": 2, "b": 1, "c": 0}),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_a_setting_that_this_encoder_does_not_compute_is_refused(exported: Path, key: str, value: object) -> None:
    edit_json(exported / "config.json", **{key: value})
    refused(exported)


def test_a_changed_activation_attention_norm_or_rotation_is_refused(exported: Path) -> None:
    path = exported / "config.json"
    whole = json.loads(path.read_bytes())
    keys = {"hidden_act", "hidden_activation", "layer_types", "norm_eps", "layer_norm_eps", "is_decoder", "rope_parameters"}
    for key, value in itertools.product(keys & whole.keys(), (None, "relu", {}, -3)):
        edit_json(path, **whole | {key: value})
        refused(exported)


@pytest.mark.parametrize("value", [None, 7, 65, 10**29, "64", 64.0, True])
def test_an_invalid_maximum_length_is_refused(exported: Path, value: object) -> None:
    edit_json(exported / "tokenizer_config.json", model_max_length=value)
    assert "model_max_length" in refused(exported)
