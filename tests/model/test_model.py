from __future__ import annotations

from typing import Any, get_args

import model_fixtures
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cramlm.cli.runs import machine_lines
from cramlm.config.head import HeadConfig
from cramlm.config.run import EncoderConfig
from cramlm.model.model import Model, ModelSpec, Precision, build_model, has_bf16, resolve_precision
from cramlm.model.operations import Dropout
from cramlm.model.tokenizer import Tokenizer, Tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def built(name: str, *, seed: int = 5, vocab_size: int = 400) -> Model:
    encoder, head = model_fixtures.SHAPES[name]
    return build_model(ModelSpec(encoder, head, vocab_size=vocab_size, labels=3), seed=seed)


@pytest.fixture(params=list(model_fixtures.SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@settings(max_examples=5)
@given(per_row=st.integers(1, 7), padding=st.integers(0, 9), pad_id=st.integers(0, 399))
def test_a_sequence_does_not_see_its_neighbours_or_the_padding(tokenizer: Tokenizer, per_row: int, padding: int, pad_id: int) -> None:
    for name in model_fixtures.SHAPES:
        model = built(name)
        tokens = tokenizer.sequences(model_fixtures.sentences(12, seed=6), max_length=40, cut="truncate")
        with torch.no_grad():
            alone = model_fixtures.packed(tokens, per_row=1, padding=0)
            together = model_fixtures.packed(tokens, per_row=per_row, padding=padding, pad_id=pad_id)
            hidden_alone, hidden_together = model.hidden(alone), model.hidden(together)
            assert torch.isfinite(hidden_together).all()
            torch.testing.assert_close(
                model.task_logits(hidden_alone, alone), model.task_logits(hidden_together, together), atol=1e-5, rtol=0
            )
            second_alone, second_together = alone.first + 1, together.first + 1
            torch.testing.assert_close(
                model.mlm_logits(hidden_alone, second_alone), model.mlm_logits(hidden_together, second_together), atol=1e-5, rtol=0
            )


def test_weights_are_a_function_of_the_seed_and_do_not_use_the_global_generator(shape: str) -> None:
    state = torch.get_rng_state()
    first, second, other = built(shape), built(shape), built(shape, seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, one), two, three in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert one.dim() == 1 or not torch.equal(one, three), name


def test_initial_weights_have_the_configured_standard_deviation() -> None:
    config = EncoderConfig(layers=2, hidden=128, heads=2, intermediate=256, init_std=0.05)
    model = build_model(ModelSpec(config, HeadConfig(), vocab_size=1000, labels=2), seed=0)
    parameters = dict(model.named_parameters())
    assert parameters["encoder.word_embeddings"].std().item() == pytest.approx(0.05, rel=0.02)
    assert parameters["encoder.layers.0.qkv.weight"].std().item() == pytest.approx(0.05, rel=0.02)
    assert parameters["encoder.layers.1.output.weight"].std().item() == pytest.approx(0.05 / 2, rel=0.02)  # sqrt(2 x 2 layers)


def attention(model: Model, ids: Tensor) -> list[list[Tensor]]:
    """Of each layer and head: probabilities (n, n), as if it read the normalized embeddings of the tokens."""
    encoder: Any = model.encoder
    read = encoder.embedding_norm(encoder.word_embeddings[ids])
    cos, sin = encoder.rotation(torch.arange(len(ids))[None], encoder.rope_theta)
    probabilities = []
    for layer in encoder.layers:
        turned = []
        for part in layer.qkv(read).view(len(ids), 3, layer.heads, -1).unbind(1)[:2]:
            first, second = part.chunk(2, dim=-1)
            turned.append(torch.cat([first * cos[0] - second * sin[0], second * cos[0] + first * sin[0]], dim=-1))
        scores = torch.einsum("ihd,jhd->hij", *turned) / encoder.head_size**0.5
        probabilities.append(list(scores.softmax(-1)))
    return probabilities


def test_two_thirds_of_the_heads_attend_to_adjacent_tokens_before_training() -> None:
    config = EncoderConfig(layers=2, hidden=192, heads=6, intermediate=64, layer_init="context")
    ids = torch.arange(10, 40)
    for start in ("random", "given"):
        model = build_model(ModelSpec(config, HeadConfig(), vocab_size=300, labels=3), seed=5)
        if start == "given":
            model.set_word_embeddings(np.random.default_rng(1).normal(0, 0.04, (300, 192)).astype(np.float32))
        with torch.no_grad():
            for layer in attention(model, ids):
                for head, offset in zip(layer, (-1, 1, -2, 2), strict=False):
                    assert float(head.diagonal(offset).mean()) > 0.5, (start, offset)
                assert all(float(head.max()) < 0.2 for head in layer[4:])


@pytest.mark.parametrize("heads", [3, 4])
def test_two_heads_attend_to_the_nearest_marker_on_either_side_before_training(heads: int) -> None:
    config = EncoderConfig(layers=2, hidden=64 * heads, heads=heads, intermediate=64, layer_init="markers")
    begin, end, open_, close = 2, 3, 10, 11
    ids = torch.tensor([begin, *range(50, 58), open_, 100, 101, close, *range(200, 206), open_, 102, close, *range(300, 306), end])
    markers = [place for place, token in enumerate(ids.tolist()) if token in (begin, end, open_, close)]
    for start in ("random", "given"):
        model = build_model(ModelSpec(config, HeadConfig(), vocab_size=400, labels=3, markers=(begin, end, open_, close)), seed=5)
        if start == "given":
            model.set_word_embeddings(np.random.default_rng(1).normal(0, 0.04, (400, config.hidden)).astype(np.float32))
        with torch.no_grad():
            layers = attention(model, ids)
        to_left, to_right = (layers[0][2], layers[1][2]) if heads == 3 else layers[0][2:4]
        between = [place for place in range(len(ids)) if place not in markers]
        nearest = [(max(each for each in markers if each < place), min(each for each in markers if each > place)) for place in between]
        for side, head in enumerate((to_left, to_right)):
            shares = [float(head[place, markers_around[side]]) for place, markers_around in zip(between, nearest, strict=True)]
            assert np.mean(shares) > 0.8, (start, side)
            assert min(shares) > 0.2, (start, side)


def test_layers_initialised_from_context_predict_a_masked_token_from_its_neighbours() -> None:
    """Three kinds of tokens with similar embeddings, each masked between two of its own kind."""
    config = EncoderConfig(layers=2, hidden=96, heads=3, intermediate=64)
    random = np.random.default_rng(2)
    kinds = random.normal(0, 0.04, (3, 96))
    embeddings = (kinds[np.arange(300) % 3] + random.normal(0, 0.02, (300, 96))).astype(np.float32)
    sequences = [np.array([2, *([kind + 30, kind + 60, 4, kind + 90, kind + 120]), 3], np.uint16) for kind in range(3)]
    tokens = Tokens(np.concatenate(sequences), np.arange(0, 22, 7), np.arange(3))
    batch = model_fixtures.packed(tokens, per_row=1, padding=0)
    masked = (batch.token_ids.flatten() == 4).nonzero().squeeze(1)
    shares = {}
    for start in ("random", "context"):
        spec = ModelSpec(config.model_copy(update={"layer_init": start}), HeadConfig(), vocab_size=300, labels=3)
        model = build_model(spec, seed=5)
        model.set_word_embeddings(embeddings)
        with torch.no_grad():
            logits = model.mlm_logits(model.hidden(batch), masked)
        own = logits.softmax(-1).view(3, 100, 3).sum(1)
        shares[start] = float(own.diagonal().mean())
    assert shares["random"] < 0.4 < 0.5 < shares["context"]


def test_resetting_the_classifier_changes_nothing_else(shape: str) -> None:
    model, other = built(shape), built(shape, seed=9)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.reset_classifier(9)
    for name, parameter in model.named_parameters():
        expected = dict(other.named_parameters())[name] if name.startswith("classifier.") else before[name]
        assert torch.equal(parameter, expected), name


def test_a_reset_classifier_of_a_model_that_starts_from_context_is_the_initial_one() -> None:
    spec = ModelSpec(EncoderConfig(hidden=48, heads=3, layer_init="context"), HeadConfig(), vocab_size=300, labels=3)
    model, initial = build_model(spec, seed=5), build_model(spec, seed=5)
    with torch.no_grad():
        model.classifier.dense.weight.zero_()
    model.reset_classifier(5)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), initial.parameters(), strict=True))


def test_every_parameter_is_in_exactly_one_group(shape: str) -> None:
    model = built(shape)
    groups = model.parameter_groups()
    names = [*groups.matrix, *groups.decayed, *groups.undecayed]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all(name.startswith("encoder.layers.") and parameter.dim() == 2 for name, parameter in groups.matrix.items())
    assert all(parameter.dim() == 1 for parameter in groups.undecayed.values())
    assert "encoder.word_embeddings" in groups.decayed


def test_dropout_is_an_argument_and_not_a_state(shape: str, tokenizer: Tokenizer) -> None:
    model = built(shape)
    batch = model_fixtures.packed(tokenizer.sequences(model_fixtures.sentences(5), max_length=30, cut="truncate"), per_row=2)
    with torch.no_grad():
        without = model.hidden(batch)
        assert torch.equal(model.train().hidden(batch), model.eval().hidden(batch))
        one = model.hidden(batch, dropout=Dropout(0.2, 1))
        assert not torch.equal(one, without)
        assert torch.equal(model.hidden(batch, dropout=Dropout(0.2, 1)), one)


def test_autocast_computes_in_bf16_close_to_float32_and_gradients_stay_float32(shape: str, tokenizer: Tokenizer) -> None:
    model = built(shape)
    batch = model_fixtures.packed(tokenizer.sequences(model_fixtures.sentences(8), max_length=30, cut="truncate"), per_row=2)
    full = model.task_logits(model.hidden(batch), batch)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(batch)
        half = model.task_logits(hidden, batch)
        vocabulary = model.mlm_logits(hidden, batch.first + 1)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), full, atol=0.05, rtol=0.05)
    (half.float().logsumexp(-1).sum() + vocabulary.float().logsumexp(-1).sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all(), name


def test_the_packed_gradient_equals_the_gradient_of_each_sequence_alone(shape: str, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.sequences(model_fixtures.sentences(8, seed=2), max_length=30, cut="truncate")
    gradients = []
    for per_row in (1, 3):
        model = built(shape)
        batch = model_fixtures.packed(tokens, per_row=per_row)
        hidden = model.hidden(batch)
        loss = model.task_logits(hidden, batch).logsumexp(-1).sum() + model.mlm_logits(hidden, batch.first + 1).logsumexp(-1).sum()
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("capabilities", [{"avx512_bf16": False}, {"avx512_bf16": True}, {"amx_bf16": True}, {}], ids=str)
def test_the_precision_of_a_device_is_that_of_its_hardware(capabilities: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    gpu = {"is_available": True, "is_bf16_supported": True, "device_count": 1}  # which computes in bf16
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    lines = dict(machine_lines())  # of `cramlm doctor`
    assert lines["device"] == "Some GPU (cuda:0) (--device auto)"
    assert lines["bf16"] == "supported by the device"
    assert has_bf16(CPU) == any(capabilities.values())
    for explicit in get_args(Precision):
        assert resolve_precision(explicit, CPU) == resolve_precision(explicit, CUDA) == explicit
    assert resolve_precision("auto", CPU) == ("bf16" if any(capabilities.values()) else "fp32")
    assert resolve_precision("auto", CUDA) == "bf16"
