"""Heads of a known pattern are counted by the paper's definition; counts of real ones agree with transformers'."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch

from cramlm.config.head import HeadConfig
from cramlm.config.run import EncoderConfig, TokenizerConfig
from cramlm.experiments.attention import HeadShares, head_shares, heads_plot, markdown, measure_heads, plain
from cramlm.model.huggingface.folder import save_mlm
from cramlm.model.model import Model, ModelSpec, build_model
from cramlm.model.tokenizer import Tokenizer, train_tokenizer
from cramlm.records import Example, silent

TEXTS = ["the sea was calm. a ship came in", "hills. and more hills, near the sea", "calm. calm. calm.", "one"]
PAIRS = [None, None, None, "more ships. near hills"]
EXAMPLES = [Example("", text, pair, None) for text, pair in zip(TEXTS, PAIRS, strict=True)]
SHAPES = [
    EncoderConfig(shape="bert", layers=2, hidden=32, heads=4, intermediate=32, max_positions=32),
    EncoderConfig(shape="modernbert", layers=2, hidden=32, heads=4, intermediate=32, max_positions=32),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS * 20, TokenizerConfig(vocab_size=80), folder)
    return Tokenizer.load(folder)


def build(encoder: EncoderConfig, tokenizer: Tokenizer) -> Model:
    head = HeadConfig(pooling="cls")
    return build_model(ModelSpec(encoder, head, vocab_size=tokenizer.vocab_size, labels=2, pad_id=tokenizer.pad_id), seed=1)


@pytest.mark.parametrize("encoder", SHAPES, ids=lambda encoder: encoder.shape)
def test_shares_are_those_of_the_attention_weights_that_transformers_gives(
    encoder: EncoderConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoModelForMaskedLM

    model = build(encoder, tokenizer)
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.qkv.weight.mul_(8)  # far from uniform, so that no maximum hangs on rounding
    save_mlm(model, tokenizer, tmp_path, max_length=32)
    native = AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    found = head_shares(model, tokenizer, EXAMPLES, max_length=32)
    special_ids = {tokenizer.cls_id, tokenizer.sep_id, tokenizer.vocabulary.index(".")}
    neighbour, special, queries = np.zeros((2, 4)), np.zeros((2, 4)), 0
    for ids in tokenizer.sequences(TEXTS, PAIRS, max_length=32, cut="truncate"):
        with torch.no_grad():
            weights = native(torch.from_numpy(ids.astype(np.int64))[None], output_attentions=True).attentions
        best = torch.stack(weights)[:, 0].argmax(-1).numpy()  # (layers, heads, queries)
        neighbour += (np.abs(best - np.arange(len(ids))) == 1).sum(-1)
        special += np.isin(ids[best], list(special_ids)).sum(-1)
        queries += len(ids)
    assert found.queries == queries
    assert found.neighbour == pytest.approx(neighbour / queries)
    assert found.special == pytest.approx(special / queries)


def test_positional_and_vertical_heads_are_counted_separately(tokenizer: Tokenizer) -> None:
    model = build(SHAPES[0], tokenizer)
    with torch.no_grad():
        model.encoder.word_embeddings.zero_()
        model.encoder.token_type_embeddings.zero_()
        places = torch.zeros(32, 32)
        angle = torch.arange(32) * 0.6
        places[:, 0], places[:, 1] = angle.cos(), angle.sin()  # a circle: a turned place is the next one
        places[0, 2] = 4.0  # the first token alone has this
        model.encoder.position_embeddings.copy_(places)
        model.encoder.embedding_norm.weight.fill_(1)
        qkv = model.encoder.layers[0].qkv
        qkv.weight.zero_()
        turn = torch.tensor([[0.8253, -0.5646], [0.5646, 0.8253]])  # by 0.6
        qkv.weight[0:2, 0:2] = turn * 50
        qkv.weight[32:34, 0:2] = torch.eye(2) * 50
        qkv.bias[8] = 50.0
        qkv.weight[40, 2] = 50.0
    found = head_shares(model, tokenizer, [Example("1", "the sea was calm a ship came in", None, None)] * 2, max_length=32)
    assert found.special[0, 1] == 1.0
    assert found.vertical[0].tolist()[1]
    assert found.neighbour[0, 0] > 0.6 > found.neighbour[0, 1]


def test_the_table_and_the_picture_show_models_side_by_side(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folders = [tmp_path / "one/1", tmp_path / "two/1"]
    for folder, encoder in zip(folders, SHAPES, strict=True):
        save_mlm(build(encoder, tokenizer), tokenizer, folder, max_length=32)
    found = measure_heads(folders, EXAMPLES, max_length=64, emit=silent)
    assert list(found) == ["one", "two"], "named as in a report of several runs"
    sure = HeadShares(np.array([[0.9, 0.2], [0.95, 0.0]]), np.array([[0.0, 0.9], [0.0, 0.91]]), 10)
    table = markdown({"one": sure})
    assert "| 1 | 1 of 2 (50 %) | 0 of 2 (0 %) |" in table
    assert "| all | 2 of 4 (50 %) | 1 of 4 (25 %) |" in table
    assert r"| layer | a\|b, positional | a\|b, vertical |" in markdown({"a|b": sure})
    assert plain({"one": sure})["one"]["positional"] == 0.5
    ET.fromstring(heads_plot(found))


def test_a_share_of_zero_has_no_bar_and_a_small_one_a_visible_bar() -> None:
    none, one, half = np.zeros(1000), np.zeros(1000), np.zeros(1000)
    one[0], half[:500] = 1.0, 1.0
    shares = HeadShares(np.array([half, none]), np.array([none, one]), 10)
    bars = [box for box in ET.fromstring(heads_plot({"run": shares})).iter("{http://www.w3.org/2000/svg}rect") if len(box)]
    assert [(float(bar.attrib["width"]), bar[0].text) for bar in bars] == [
        (125.0, "500 of 1000 (50 %)"),
        (0.0, "0 of 1000 (0 %)"),
        (0.0, "0 of 1000 (0 %)"),
        (1.0, "1 of 1000 (0 %)"),
    ]
