"""Token importance: both rules against plain loops over single texts, the scorer, and masks by score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_fixtures import SPECIAL, make_model, make_phase, make_pool, run_phase

from cramlm.config.terms import ImportantTokens, MaskingConfig
from cramlm.model.model import Model, PackedBatch
from cramlm.training.batching import Batches
from cramlm.training.masking import mask
from cramlm.training.objective import objective_of
from cramlm.training.sequences import TokenPool, pack
from cramlm.training.terms.important_tokens import IMPORTANT, UNIMPORTANT, UNLABELLED, label_words, score_tokens

SCORER = {"terms": [{"kind": "important_tokens"}], "external": 0, "keep": "last"}
MUON = {"kind": "muon", "learning_rate": 3e-3, "muon_learning_rate": 1e-2}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model that learnt the labels."""
    model = model_of()
    run_phase(model, make_phase(external=0, text_weight=0.0, steps=60, optimizer=MUON), tmp_path_factory.mktemp("tuned"), evaluate=None)
    return model


def model_of() -> Model:
    return make_model(pooling="mean", token_classifier=True)


def pool_of_words(sequences: int = 24) -> TokenPool:
    """Texts of one- and two-token words, the first text without a label; a stop word (tokens 5 6) in most of them."""
    pool = make_pool(sequences, shortest=8, longest=14, labelled=True, seed=2)
    ids, begins = pool.ids.copy(), np.random.default_rng(1).random(len(pool.ids)) < 0.7
    for number, start in enumerate(pool.offsets[:-1]):
        if number % 4:
            ids[start + 2 : start + 4], begins[start + 2 : start + 5] = (5, 6), (True, False, True)
        begins[start : start + 2] = True
    begins[pool.offsets[1:] - 1] = True
    labels = pool.labels.copy()
    labels[0] = -1
    return replace(pool, ids=ids, begins=begins, labels=labels)


def probabilities_of(model: Model, tokens: list[int]) -> torch.Tensor:
    """Probabilities of one text alone."""
    nothing = np.zeros(1, dtype=np.int64)
    batch = pack([np.array(tokens)], labels=nothing, external=nothing > 0, row_length=len(tokens), pad_id=0)
    packed = PackedBatch.of(batch)
    with torch.no_grad():
        return torch.softmax(model.task_logits(model.hidden(packed), packed), -1)[0]


def words_of(pool: TokenPool, number: int) -> list[list[int]]:
    """Positions in the text of each word but [CLS] and [SEP]."""
    positions = np.arange(pool.offsets[number], pool.offsets[number + 1])
    words = np.split(positions, np.flatnonzero(pool.begins[positions])[1:])
    return [(word - positions[0]).tolist() for word in words[1:-1]]


def test_the_auxiliary_rule_equals_a_loop_over_single_texts(tuned: Model) -> None:
    pool, delta = pool_of_words(), 0.05
    token_labels = label_words(tuned, pool, ImportantTokens(delta=delta), SPECIAL, precision="fp32")
    used = 0
    for number in range(len(pool)):
        text, own = pool.sequence(number).tolist(), int(pool.labels[number])
        whole = probabilities_of(tuned, text)
        expected = [UNLABELLED] * len(text)
        if own >= 0 and int(whole.argmax()) == own:
            used += 1
            kept: set[int] = {0, len(text) - 1}
            for positions in words_of(pool, number):
                for position in positions:
                    expected[position] = UNIMPORTANT
                if [text[position] for position in positions] == [5, 6]:
                    continue  # in most texts
                shown = [token for position, token in enumerate(text) if position in kept or position in positions]
                if float(whole[own] - probabilities_of(tuned, shown)[own]) < delta:
                    for position in positions:
                        expected[position] = IMPORTANT
                else:
                    kept |= set(positions)
        assert token_labels[pool.offsets[number] : pool.offsets[number + 1]].tolist() == expected
    assert used > len(pool) / 2
    assert 0.05 < (token_labels == IMPORTANT).sum() / (token_labels != UNLABELLED).sum() < 0.95


def test_the_gradient_rule_labels_the_words_with_the_largest_first_order_loss(tuned: Model) -> None:
    pool = pool_of_words()
    token_labels = label_words(tuned, pool, ImportantTokens(rule="gradient", share=0.3), SPECIAL, precision="fp32")
    original = tuned.encoder.word_embeddings.detach().clone()
    checked = 0
    for number in range(1, len(pool)):
        text, own = pool.sequence(number).tolist(), int(pool.labels[number])
        of_text = token_labels[pool.offsets[number] : pool.offsets[number + 1]]
        if len(set(text)) < len(text) or (of_text == UNLABELLED).all():
            continue  # a finite difference of a row of the table is that of a position only where no token is there twice
        fall = []
        words = [positions for positions in words_of(pool, number) if [text[position] for position in positions] != [5, 6]]
        for positions in words:
            logs = []
            for step in (0.01, -0.01):
                with torch.no_grad():
                    rows = [text[position] for position in positions]
                    tuned.encoder.word_embeddings[rows] += step * (original[SPECIAL.mask] - original[rows])
                    logs.append(float(torch.log(probabilities_of(tuned, text)[own])))
                    tuned.encoder.word_embeddings.copy_(original)
            fall.append((logs[1] - logs[0]) / 0.02)
        best = np.argsort(-np.array(fall))[: max(1, round(0.3 * len(words)))]
        if all(abs(fall[index]) > 1e-3 for index in best) and len(set(np.round(fall, 3))) == len(fall):
            expected = {position for index in best if fall[index] > 0 for position in words[index]}
            assert set(np.flatnonzero(of_text == IMPORTANT).tolist()) == expected
            checked += 1
    assert checked > 3


def test_only_labelled_tokens_are_in_the_loss_and_important_ones_weigh_more() -> None:
    pool = pool_of_words()
    token_labels = np.where(np.isin(pool.ids, SPECIAL.all), UNLABELLED, UNIMPORTANT + (pool.ids % 3 == 0)).astype(np.uint8)
    phase = make_phase(**SCORER)
    batch = Batches(phase, None, replace(pool, token_labels=token_labels), seed=1, phase_index=0, special=SPECIAL).batch(0)
    flat = batch.token_ids.ravel()
    assert not np.isin(flat[batch.masked], SPECIAL.all).any()
    assert len(batch.masked) == batch.tokens - 2 * len(batch.first)
    assert np.array_equal(batch.mlm_labels, flat[batch.masked] % 3 == 0)
    model, packed = model_of(), PackedBatch.of(batch)
    logits = model.place_head(model.hidden(packed)[packed.masked])
    weight = torch.tensor(3.0)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, packed.mlm_labels.float(), pos_weight=weight)
    result = objective_of(phase).losses(model, packed)
    assert float(result.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert result.as_numbers().keys() == {"loss", "important_tokens_task"}


def test_a_scorer_finds_important_tokens_in_other_text(tmp_path: Path) -> None:
    pool = make_pool(80, labelled=True, seed=2)
    token_labels = np.where(np.isin(pool.ids, SPECIAL.all), UNLABELLED, UNIMPORTANT + (pool.ids < 20)).astype(np.uint8)
    phase, model = make_phase(**SCORER, steps=50, optimizer=MUON), model_of()
    batches = Batches(phase, None, replace(pool, token_labels=token_labels), seed=1, phase_index=0, special=SPECIAL)
    run_phase(model, phase, tmp_path, batches=batches, evaluate=None)
    other = make_pool(50, labelled=False, seed=9)
    scores = score_tokens(model, other, precision="fp32")
    real = ~np.isin(other.ids, SPECIAL.all)
    assert ((scores > 0) == (other.ids < 20))[real].mean() > 0.95


def test_scored_masks_are_the_best_tokens_above_zero_and_the_control_hides_as_many() -> None:
    pool = make_pool(30, shortest=12, labelled=True, seed=5)
    texts = [pool.sequence(number) for number in range(30)]
    batch = pack(texts, labels=pool.labels, external=np.zeros(30, dtype=bool), row_length=32, pad_id=0)
    flat, owner = batch.token_ids.ravel(), batch.sequence.ravel()
    scores = np.random.default_rng(3).normal(-0.8, 1, len(flat)).astype(np.float32)
    config = MaskingConfig(kind="scored", scores_of="scorer", rate=0.15)
    masked = mask(batch, config, np.random.default_rng(0), SPECIAL, token_values=scores)
    for number in range(30):
        positions = np.flatnonzero((owner == number) & ~np.isin(flat, SPECIAL.all))
        most = max(1, round(0.15 * len(positions)))
        above = max(1, min(most, int((scores[positions] > 0).sum())))
        best = positions[np.argsort(-scores[positions])[:above]]
        assert sorted(best.tolist()) == masked.masked[owner[masked.masked] == number].tolist()
    control = config.model_copy(update={"kind": "scored-control"})
    other = mask(batch, control, np.random.default_rng(0), SPECIAL, token_values=scores)
    assert np.bincount(owner[other.masked]).tolist() == np.bincount(owner[masked.masked]).tolist()
    assert not np.array_equal(other.masked, masked.masked)
