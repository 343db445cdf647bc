"""Texts in patterns, labels' scores at their masks, and the words that are chosen for labels."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cramlm.config.head import PromptConfig
from cramlm.config.phase import PhaseConfig
from cramlm.config.run import EncoderConfig
from cramlm.config.terms import Classify, Mlm
from cramlm.errors import ArtifactError, UsageError
from cramlm.evaluation.prediction import predict_logits, predict_logits_fast
from cramlm.model.huggingface.folder import load_classifier, save_prompted
from cramlm.model.model import Model, ModelSpec, build_model
from cramlm.model.prompts import Prompt, association, choose_words, head_of, longest_text, read_passages, read_texts, resolve_prompt
from cramlm.model.tokenizer import Tokenizer, Tokens
from cramlm.training.masking import SpecialIds, mask
from cramlm.training.objective import executed_flops, gradients, in_parts, objective_of
from cramlm.training.sequences import pack
from damaging import edit_json

LONG = "aspirin reduces pain of rats " * 30


def prompt_of(tokenizer: Tokenizer, *patterns: str, vectors: int = 0, words: tuple[str, ...] = ("pain", "water")) -> Prompt:
    slots = patterns[0].count("{mask}")
    config = PromptConfig(patterns=patterns, words={word: (word,) * slots for word in words})
    return resolve_prompt(config, [config.words_of(word) for word in words], tokenizer, vectors=vectors)


def shown(tokenizer: Tokenizer, tokens: Tokens) -> list[str]:
    return [" ".join(tokenizer.token(number) if number < tokenizer.vocab_size else "*" for number in ids) for ids in tokens]


def test_every_text_is_in_every_pattern_and_only_the_text_is_truncated(tokenizer: Tokenizer) -> None:
    prompt = prompt_of(tokenizer, "{mask} of {text}", "{text} the {mask} cell", vectors=2)
    tokens = read_texts(prompt, tokenizer, ["water", LONG], None, max_length=12)
    assert shown(tokenizer, tokens) == [
        "[CLS] * * [MASK] of water [SEP]",
        "[CLS] * * water the [MASK] cell [SEP]",
        "[CLS] * * [MASK] of aspirin reduces pain of rats aspirin [SEP]",
        "[CLS] * * aspirin reduces pain of rats the [MASK] cell [SEP]",
    ]
    assert tokens.source.tolist() == [0, 0, 1, 1]
    assert longest_text(prompt, tokenizer, 12) == 6
    assert len(read_texts(prompt, tokenizer, [], None, max_length=12)) == 0


def test_a_mask_in_a_text_is_text_and_an_empty_text_leaves_the_pattern(tokenizer: Tokenizer) -> None:
    tokens = read_texts(prompt_of(tokenizer, "{mask} {text}"), tokenizer, ["[MASK] water", ""], None, max_length=16)
    assert [int((ids == tokenizer.mask_id).sum()) for ids in tokens] == [1, 1]
    assert shown(tokenizer, tokens)[1] == "[CLS] [MASK] [SEP]"


def test_of_a_pair_the_longer_half_is_cut_first(tokenizer: Tokenizer) -> None:
    prompt = prompt_of(tokenizer, "{text_a} {mask} {text_b}")
    tokens = read_texts(prompt, tokenizer, [LONG, "water"], ["river bank", None], max_length=9)
    assert shown(tokenizer, tokens) == ["[CLS] aspirin reduces pain of [MASK] river bank [SEP]", "[CLS] water [MASK] [SEP]"]
    with pytest.raises(UsageError, match="read one text, not a pair"):
        read_texts(prompt_of(tokenizer, "{text} {mask}"), tokenizer, ["water"], ["river"], max_length=9)


def test_entities_between_markers_are_repeated_in_the_pattern(tokenizer: Tokenizer) -> None:
    prompt = prompt_of(tokenizer, "{text} the {mask} {entity_1} {mask} the {mask} {entity_2}")
    text = "<< the kinase >> inhibits [[ receptor protein ]]"
    (one, other) = shown(tokenizer, read_texts(prompt, tokenizer, [text, "water"], None, max_length=64))
    assert one.endswith("the [MASK] receptor protein [MASK] the [MASK] the kinase [SEP]")
    assert other == "[CLS] water the [MASK] [MASK] the [MASK] [SEP]"
    assert prompt.slots == 3


def test_long_passages_become_pieces_in_the_patterns_in_turn(tokenizer: Tokenizer) -> None:
    prompt = prompt_of(tokenizer, "{mask} {text}", "{text} the {mask}")
    tokens = read_passages(prompt, tokenizer, tokenizer.encode(["water", LONG]), max_length=64)
    assert shown(tokenizer, tokens)[0] == "[CLS] [MASK] water [SEP]"
    assert tokens.source.tolist() == [0, 1, 1, 1]
    assert tokens.lengths.max() <= 64
    positions = [np.flatnonzero(ids == tokenizer.mask_id).tolist() for ids in tokens]
    assert positions == [[1], [len(tokens[1]) - 2], [1], [len(tokens[3]) - 2]]
    kept = [number for ids in tokens for number in ids.tolist() if number not in (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)]
    assert len(kept) == 1 + 150 + 2  # and "the" twice


def prompted_model(tokenizer: Tokenizer, prompt: Prompt) -> Model:
    encoder = EncoderConfig(layers=2, hidden=32, heads=4, intermediate=48, max_positions=64, init_std=0.3)
    return build_model(ModelSpec(encoder, head_of(prompt), vocab_size=tokenizer.vocab_size, labels=2, prompt=prompt), seed=5)


def test_scores_do_not_depend_on_masked_or_unprompted_text_in_the_batch(tokenizer: Tokenizer) -> None:
    prompt = prompt_of(tokenizer, "{mask} {text}", vectors=2)
    model = prompted_model(tokenizer, prompt)
    special = SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.vocab_size, tokenizer.unk_id)
    labelled = read_texts(prompt, tokenizer, ["aspirin reduces pain", "the river bank"], None, max_length=16)
    plain = tokenizer.sequences(["water of the river", "protein acts strongly on cell"], max_length=16, cut="truncate")
    labels, soft_labels = np.array([0, 1, -1, -1]), np.zeros((4, 2), np.float32)
    batch = pack([*labelled, *plain], labels=labels, external=labels < 0, row_length=16, pad_id=0, soft_labels=soft_labels)
    phase = PhaseConfig(name="joint", external=1, task=1, terms=(Mlm(), Classify()), max_length=16, dropout=0.0)
    masked = mask(batch, phase.masking, np.random.default_rng(3), special, where=batch.external, rate=0.5)
    (whole,) = in_parts(masked, 1)
    with torch.no_grad():
        scores = model.task_logits(model.hidden(whole), whole).numpy()
    alone = predict_logits(model, labelled, precision="fp32")
    np.testing.assert_allclose(scores[~masked.external][np.argsort(masked.task_labels[~masked.external])], alone, atol=1e-5)
    assert (scores[masked.external] == 0).all()

    everywhere = mask(batch, phase.masking, np.random.default_rng(3), special, rate=0.99)
    assert (everywhere.token_ids[everywhere.token_ids >= tokenizer.vocab_size]).size == 4  # vectors are never hidden
    masked = replace(masked, term="mlm")
    counts = objective_of(phase).counts(masked)
    one = gradients(model, in_parts(masked, 1), phase, counts, precision="fp32", dropout_seed=0)
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    several = gradients(model, in_parts(masked, 3), phase, counts, precision="fp32", dropout_seed=0)
    torch.testing.assert_close(several.total, one.total)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get(name), atol=1e-5, rtol=1e-4)
    assert "prompt_head.vectors" in expected
    frozen = phase.model_copy(update={"trains": "vectors"})
    assert executed_flops(model, masked, frozen) < executed_flops(model, masked, phase)


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_scores_of_patterns_are_averaged_also_for_close_labels(fast: bool, tokenizer: Tokenizer) -> None:
    prompt = prompt_of(tokenizer, "{mask} {text}", "{text} {mask}")
    model = prompted_model(tokenizer, prompt)
    texts = ["aspirin reduces pain", "the river", "water", "kinase inhibits receptor protein of the cell"]
    logits = predict_logits(model, read_texts(prompt, tokenizer, texts, None, max_length=16), precision="fp32")
    each = []
    for pattern in prompt.patterns:
        single = prompted_model(tokenizer, replace(prompt, patterns=(pattern,)))
        each.append(predict_logits(single, read_texts(single.prompt, tokenizer, texts, None, max_length=16), precision="fp32"))
    np.testing.assert_allclose(logits, np.mean(each, axis=0), atol=1e-5)
    model.add_to_logits(np.array([0.5, -0.5], np.float32))
    shifted = predict_logits(model, read_texts(prompt, tokenizer, texts, None, max_length=16), precision="fp32")
    np.testing.assert_allclose(shifted - logits, np.tile([0.5, -0.5], (4, 1)), atol=1e-5)
    model.add_to_logits(np.array([-0.5, 0.5], np.float32))
    if fast:
        quick = predict_logits_fast(model, read_texts(prompt, tokenizer, texts, None, max_length=16))
        assert quick.argmax(1).tolist() == logits.argmax(1).tolist()


def test_words_are_chosen_by_log_odds_over_their_standard_error_each_for_one_label(tokenizer: Tokenizer) -> None:
    texts = ["aspirin reduces pain the"] * 6 + ["river bank water the"] * 5 + ["river kinase the"] * 5
    owners = np.array([0] * 6 + [1] * 5 + [2] * 5)
    tokens = tokenizer.sequences(texts, max_length=32, cut="truncate")
    words = choose_words(tokens, owners, ("dose", "place", "protein"), tokenizer, count=2)
    assert set(words[0]) < {"aspirin", "reduces", "pain"}
    assert set(words[1]) == {"bank", "water"}
    assert words[2][0] == "kinase"

    def z(k: float, n: float, others: float, total: float) -> float:
        cells = (k + 0.5, n - k + 0.5, others + 0.5, total - others + 0.5)
        return (math.log(cells[0] / cells[1]) - math.log(cells[2] / cells[3])) / math.sqrt(sum(1 / cell for cell in cells))

    candidates = np.array([tokenizer.vocabulary.index(word) for word in ("river", "the", "kinase")])
    expected = [[z(0, 6, 10, 10), z(6, 6, 10, 10), z(0, 6, 5, 10)], [z(5, 5, 5, 11), z(5, 5, 11, 11), z(0, 5, 5, 11)]]
    np.testing.assert_allclose(association(tokens, owners, candidates, labels=3)[:2], expected, atol=1e-8)

    labels, many = [f"l{number}" for number in range(250)], np.arange(300) % 250
    same = tokenizer.sequences(["the"] * 300, max_length=8, cut="truncate")
    with pytest.raises(UsageError, match=r"none of which is left for label 'l\d+'"):
        choose_words(same, many, labels, tokenizer, count=1)


def test_words_with_vowels_written_as_marks_are_chosen(tokenizer: Tokenizer) -> None:
    texts = ["वाक्य the water"] * 6 + ["अंग्रेज़ी the water"] * 6
    tokens = tokenizer.sequences(texts, max_length=32, cut="truncate")
    assert choose_words(tokens, np.repeat([0, 1], 6), ("one", "two"), tokenizer, count=1) == [("वाक्य",), ("अंग्रेज़ी",)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, this cramlm reads 1"),
        ({"vectors": 7}, r"tensor 'vectors' has shape \(3, 32\), expected \(7, 32\)"),
        ({"patterns": ["{text}"]}, "has no {mask}"),
        ({"labels": ["a"]}, "labels or vectors"),
        ({"words": {"a": [["pain"]], "b": [["kinases"]]}}, "'kinases' is 2 tokens"),
        ({"shift": [0.5]}, "shift"),
        (None, "prompt.safetensors: missing"),
    ],
)
def test_an_exported_prompt_is_read_unchanged_or_refused(
    change: dict[str, Any] | None, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompt = prompt_of(tokenizer, "{mask} of {text}", vectors=3)
    model = prompted_model(tokenizer, prompt)
    save_prompted(model, tokenizer, tmp_path, labels=("a", "b"), max_length=32)
    loaded = load_classifier(tmp_path)
    assert (loaded.labels, loaded.model.prompt, loaded.max_length) == (("a", "b"), prompt, 32)
    assert all(torch.equal(one, loaded.model.get_parameter(name)) for name, one in model.named_parameters())
    if change is None:
        (tmp_path / "prompt.safetensors").unlink()
    else:
        edit_json(tmp_path / "prompt.json", **change)
    with pytest.raises(ArtifactError, match=message):
        load_classifier(tmp_path)
