from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_fixtures import SPECIAL, VOCABULARY, make_batches, make_phase, make_pool

from cramlm.config.terms import MaskingConfig
from cramlm.records import Batch
from cramlm.training.masking import LONGEST_SPAN, mask
from cramlm.training.sequences import pack


def make_batch(sequences: int = 30, *, shortest: int = 3) -> Batch:
    pool = make_pool(sequences, shortest=shortest, labelled=True, seed=5)
    texts = [pool.sequence(index) for index in range(sequences)]
    return pack(texts, labels=pool.labels, external=np.arange(sequences) % 3 == 0, row_length=32, pad_id=0)


def masked_batch(batch: Batch, config: MaskingConfig, seed: int = 0, **more: object) -> Batch:
    return mask(batch, config, np.random.default_rng(seed), SPECIAL, **more)


@given(rate=st.floats(0.01, 0.99), mask_share=st.floats(0, 0.6), random_share=st.floats(0, 0.4), seed=st.integers(0, 1000))
def test_masks_avoid_special_tokens_and_padding_and_can_be_undone(rate: float, mask_share: float, random_share: float, seed: int) -> None:
    batch = make_batch()
    masked = masked_batch(batch, MaskingConfig(rate=rate, mask_share=mask_share, random_share=random_share), seed)
    assert (np.diff(masked.masked) > 0).all()
    original = batch.token_ids.ravel()
    assert not np.isin(original[masked.masked], SPECIAL.all).any()
    restored = masked.token_ids.ravel().copy()
    restored[masked.masked] = masked.mlm_labels
    assert np.array_equal(restored, original)
    assert (np.delete(masked.token_ids.ravel(), masked.masked) == np.delete(original, masked.masked)).all()
    assert masked.first is batch.first


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.2, 0.5, 0.99])
def test_each_sequence_has_exactly_its_rounded_share_of_masks_and_at_least_one(rate: float) -> None:
    batch = make_batch()
    masked = masked_batch(batch, MaskingConfig(rate=rate))
    owner = batch.sequence.ravel()
    counts = np.bincount(owner[masked.masked], minlength=30)
    maskable = np.bincount(owner[(owner >= 0) & ~np.isin(batch.token_ids.ravel(), SPECIAL.all)], minlength=30)
    assert counts.tolist() == [max(1, round(rate * count)) for count in maskable]


def test_masks_are_uniform_over_the_positions_of_a_sequence() -> None:
    batch = make_batch(1, shortest=32)
    config = MaskingConfig(rate=0.2)
    counts = sum(np.bincount(masked_batch(batch, config, seed).masked, minlength=32) for seed in range(2000))
    # 30 maskable positions, 6 masks: 400 expected each, standard deviation 18
    assert np.abs(counts[1:31] - 400).max() < 90
    assert counts[0] == counts[31] == 0


def test_replacements_follow_the_shares_and_random_tokens_are_never_special() -> None:
    batch = make_batch(30, shortest=30)
    masked = [masked_batch(batch, MaskingConfig(rate=0.9, mask_share=0.5, random_share=0.3), seed) for seed in range(20)]
    replaced = np.concatenate([each.token_ids.ravel()[each.masked] for each in masked])
    originals = np.concatenate([each.mlm_labels for each in masked])
    assert (replaced == SPECIAL.mask).mean() == pytest.approx(0.5, abs=0.02)
    assert (replaced == originals).mean() == pytest.approx(0.2 + 0.3 / (VOCABULARY - 5), abs=0.02)
    assert set(replaced[replaced != SPECIAL.mask]) == set(range(5, VOCABULARY))


def test_unknown_tokens_are_never_masked_and_an_empty_text_gets_no_mask() -> None:
    texts = [np.array([2, 3]), np.array([2, 1, 1, 9, 3]), np.array([2, 1, 3])]
    batch = pack(texts, labels=np.zeros(3, dtype=np.int64), external=np.zeros(3, dtype=bool), row_length=16, pad_id=0)
    masked = masked_batch(batch, MaskingConfig(rate=0.9))
    assert masked.mlm_labels.tolist() == [9]


def words_of(batch: Batch, *, every: int) -> np.ndarray[Any, Any]:
    """Words of so many tokens, counted from the first token of each sequence."""
    return (batch.position.ravel() % every == 1) & (batch.sequence.ravel() >= 0)


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["whole-word", "phrase"])
def test_words_are_hidden_whole_at_the_given_rate_on_average(kind: str, rate: float) -> None:
    batch = make_batch(30, shortest=20)
    begins, config = words_of(batch, every=3), MaskingConfig(kind=kind, rate=rate)
    owner, maskable = batch.sequence.ravel(), ~np.isin(batch.token_ids.ravel(), SPECIAL.all)
    word = np.cumsum(begins)
    hidden = np.zeros((50, len(word)), dtype=bool)
    for seed, row in enumerate(hidden):
        row[masked_batch(batch, config, seed, token_values=begins).masked] = True
        assert (np.bincount(owner[row], minlength=30) > 0).all()
        assert all(len(set(row[(word == number) & maskable])) == 1 for number in np.unique(word[maskable]))
    assert hidden[:, maskable].mean() == pytest.approx(rate, abs=0.04)


def test_spans_hide_exactly_the_share_in_runs_of_words_of_geometric_length() -> None:
    batch = make_batch(30, shortest=20)
    begins = words_of(batch, every=3)
    config = MaskingConfig(kind="span", rate=0.3)
    assert np.array_equal(
        np.bincount(batch.sequence.ravel()[masked_batch(batch, config, token_values=begins).masked]),
        np.bincount(batch.sequence.ravel()[masked_batch(batch, MaskingConfig(rate=0.3)).masked]),
    )
    text = np.r_[2, np.tile(np.arange(5, 105), 2000), 3]
    row = pack([text], labels=np.zeros(1, dtype=np.int64), external=np.zeros(1, dtype=bool), row_length=len(text) + 8, pad_id=0)
    begins = row.sequence.ravel() >= 0
    masked = masked_batch(row, MaskingConfig(kind="span", rate=0.001), token_values=begins).masked
    lengths = np.array([len(run) for run in np.split(masked, np.flatnonzero(np.diff(masked) > 1) + 1)])
    shares = np.array([(lengths == length).mean() for length in range(1, LONGEST_SPAN + 1)])
    expected = np.array([0.2 * 0.8**number for number in range(9)] + [0.8**9])  # p = 1 / 5, all that would be longer cut at 10
    assert np.abs(shares - expected).max() < 0.12  # some 45 spans
    assert lengths.max() == LONGEST_SPAN


def test_the_rate_is_linear_from_the_first_step_to_the_last() -> None:
    config = MaskingConfig(rate=0.4, rate_end=0.1)
    assert [config.rate_at(step, 4) for step in range(5)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1])
    assert config.rate_at(7, None) == pytest.approx(0.25)
    assert MaskingConfig(rate=0.2).rate_at(99, 100) == 0.2
    batches = make_batches(make_phase(steps=10, masking={"rate": 0.5, "rate_end": 0.1}))
    shares = [len(batch.masked) / (batch.tokens - 2 * len(batch.first)) for batch in map(batches.batch, range(10))]
    assert shares == pytest.approx(np.linspace(0.5, 0.1, 10), abs=0.02)
