from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_fixtures import SPECIAL, make_batches, make_phase, make_pool

from cramlm.errors import DataError
from cramlm.records import Batch
from cramlm.training.batching import Batches, Stream, derived_key, torch_seed
from cramlm.training.sequences import TokenPool, pack, pack_by_length


def same(left: Batch, right: Batch) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in Batch.__dataclass_fields__)


def sequences_of(batch: Batch) -> list[tuple[int, ...]]:
    """Token sequences with masks undone, in the batch's numbering."""
    flat = batch.token_ids.ravel().copy()
    flat[batch.masked] = batch.mlm_labels
    return [tuple(flat[batch.sequence.ravel() == number].tolist()) for number in range(len(batch.first))]


def make_sequences(lengths: list[int]) -> list[np.ndarray[Any, Any]]:
    """Sequence i holds i + 10 everywhere, so that it can be recognised."""
    return [np.full(length, index + 10, dtype=np.uint16) for index, length in enumerate(lengths)]


def pack_lengths(lengths: list[int], row_length: int) -> Batch:
    count = len(lengths)
    labels, external = np.arange(count), np.arange(count) % 2 == 0
    return pack(make_sequences(lengths), labels=labels, external=external, row_length=row_length, pad_id=0)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 200), st.integers(0, 50))
def test_batches_by_length_hold_every_sequence_once_within_the_limits_of_positions_and_padding(
    lengths: list[int], most: int, padding: int
) -> None:
    sequences, found = make_sequences(lengths), []
    for batch in pack_by_length(sequences, most=most, pad_id=0, padding=padding):
        positions = batch.token_ids.size
        assert positions <= most or len(batch.first) == 1
        assert positions - batch.tokens <= padding
        for ids, index in zip(sequences_of(batch), batch.task_labels.tolist(), strict=True):
            assert ids == tuple(sequences[index].tolist())
            found.append(index)
    assert sorted(found) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_packing_keeps_every_sequence_whole_in_one_row_with_its_label_and_origin(lengths: list[int]) -> None:
    batch = pack_lengths(lengths, 40)
    rows, length = batch.token_ids.shape
    assert length % 8 == 0
    assert length <= 40
    assert sorted(map(len, sequences_of(batch))) == sorted(lengths)
    assert (batch.token_ids[batch.sequence < 0] == 0).all()
    assert batch.tokens == sum(lengths)
    for number, sequence in enumerate(sequences_of(batch)):
        original = sequence[0] - 10
        positions = np.flatnonzero(batch.sequence.ravel() == number)
        assert set(sequence) == {sequence[0]}
        assert len(sequence) == lengths[original]
        assert batch.first[number] == positions[0]
        assert positions[-1] - positions[0] == len(positions) - 1
        assert positions[0] // length == positions[-1] // length
        assert batch.position.ravel()[positions].tolist() == list(range(len(positions)))
        assert (batch.task_labels[number], batch.external[number]) == (original, original % 2 == 0)
    assert (np.diff(batch.first) > 0).all()
    assert rows <= len(lengths)


def test_packing_is_first_fit_decreasing_into_rows_of_a_multiple_of_eight() -> None:
    # by hand: 7 | 6 | 5 -> rows [7 1] [6 2] [5 3] of 8
    batch = pack_lengths([1, 2, 3, 5, 6, 7], 8)
    assert batch.token_ids.tolist() == [[15] * 7 + [10], [14] * 6 + [11] * 2, [13] * 5 + [12] * 3]
    assert [pack_lengths(lengths, 64).token_ids.shape for lengths in ([9, 9, 9], [3])] == [(1, 32), (1, 8)]


@pytest.mark.parametrize("mixing", ["blended", "interleaved"])
@pytest.mark.parametrize("weights", [None, [1 / (rank + 1) for rank in range(90)]])
def test_a_batch_depends_on_seed_phase_and_step_and_not_on_earlier_calls(mixing: str, weights: list[float] | None) -> None:
    phase = make_phase(mixing=mixing)
    pools = make_pool(90, labelled=False, seed=1) if weights is None else weighted(weights), make_pool(40, labelled=True, seed=2)
    ordered, unordered = (Batches(phase, *pools, seed=7, phase_index=0, special=SPECIAL) for _ in range(2))
    in_order = [ordered.batch(step) for step in range(12)]
    for step in (11, 3, 7, 3, 0, 10):
        assert same(unordered.batch(step), in_order[step])
    assert not same(in_order[0], in_order[3])
    for seed, index in ((8, 0), (7, 1)):
        assert not same(Batches(phase, *pools, seed=seed, phase_index=index, special=SPECIAL).batch(0), in_order[0])


@pytest.mark.parametrize("mixing", ["blended", "interleaved"])
def test_a_pool_is_sampled_evenly(mixing: str) -> None:
    batches = make_batches(make_phase(mixing=mixing, batch_unit="sequences", batch_size=9), task=40)
    task_batches = [batch for batch in map(batches.batch, range(120)) if not batch.external.all()][:40]
    seen = Counter(text for batch in task_batches for text in itertools.compress(sequences_of(batch), ~batch.external))
    per_step = int((~task_batches[0].external).sum())
    pool = make_pool(40, labelled=True, seed=2)
    # 40 steps of k sequences are k whole epochs, though single steps straddle two.
    assert seen == Counter({tuple(pool.sequence(index).tolist()): per_step for index in range(40)})


def test_interleaved_cycles_have_exactly_the_ratio_in_whole_batches_external_first() -> None:
    batches = make_batches(make_phase(mixing="interleaved", external=3, task=2))
    kinds = ["".join(sorted({"TE"[external] for external in batch.external.tolist()})) for batch in map(batches.batch, range(15))]
    assert "".join(kinds) == "EEETT" * 3  # "ET" would be of both


@pytest.mark.parametrize(("external", "task"), [(1, 1), (4, 1), (1, 3)])
def test_blended_batches_hold_both_origins_in_the_ratio_of_tokens(external: int, task: int) -> None:
    batches = make_batches(make_phase(external=external, task=task, batch_size=2000), external=500, task=500)
    tokens = np.zeros(2)  # of task and of external text
    for batch in map(batches.batch, range(20)):
        tokens += np.bincount(batch.external[batch.sequence[batch.sequence >= 0]], minlength=2)
    assert tokens[1] / tokens[0] == pytest.approx(external / task, rel=0.06)
    assert tokens.sum() / 20 == pytest.approx(2000, rel=0.03)
    rare = make_batches(make_phase(external=999 * external, task=task))
    assert all((~rare.batch(step).external).sum() == 1 for step in range(5))


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_a_batch_counted_in_sequences_has_exactly_that_many(size: int) -> None:
    alone = make_batches(make_phase(external=0, text_weight=0.0, batch_unit="sequences", batch_size=size))
    assert [len(alone.batch(step).first) for step in range(4)] == [size] * 4
    both = make_batches(make_phase(batch_unit="sequences", batch_size=size))
    assert len(both.batch(0).first) == max(size, 2)


def test_labels_are_on_task_text_and_masks_only_on_text_with_a_term() -> None:
    batch = make_batches(make_phase(text_weight=0.0)).batch(0)
    assert ((batch.task_labels >= 0) == ~batch.external).all()
    masked_sequences = batch.sequence.ravel()[batch.masked]
    assert batch.external[masked_sequences].all()
    assert set(masked_sequences) == set(np.flatnonzero(batch.external))
    labels_only = make_batches(make_phase(external=0, text_weight=0.0)).batch(0)
    assert len(labels_only.masked) == 0
    assert SPECIAL.mask not in labels_only.token_ids


def test_a_phase_that_samples_from_an_empty_pool_names_it() -> None:
    nothing = TokenPool(np.zeros(0, dtype=np.uint16), np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))
    for external in (nothing, None):
        with pytest.raises(DataError, match="samples external text"):
            Batches(make_phase(), external, make_pool(4, labelled=True), seed=0, phase_index=0, special=SPECIAL)


def weighted(weights: list[float]) -> TokenPool:
    return replace(make_pool(len(weights), labelled=False), weights=np.array(weights, np.float32))


@given(st.lists(st.floats(0.0625, 9, width=32), min_size=1, max_size=30), st.integers(0, 5))
def test_an_epoch_holds_a_sequence_as_often_as_its_weight_rounded_down_or_up(weights: list[float], seed: int) -> None:
    share = np.array(weights) * len(weights) / np.sum(weights)
    sampled = Stream(weighted(weights), "external", seed=seed, phase_index=0).indices(range(len(weights)))
    counts = np.bincount(sampled, minlength=len(weights))
    assert (np.floor(share - 1e-4) <= counts).all()
    assert (counts <= np.ceil(share + 1e-4)).all()


def test_keys_differ_by_every_argument_and_are_pinned() -> None:
    keys = {
        derived_key(seed, phase_index=phase, purpose=purpose, index=index)
        for seed, phase, purpose, index in itertools.product((0, 1), (0, 1), ("masks", "order of task"), (0, 1))
    }
    assert len(keys) == 16
    # First 16 bytes, little-endian, of sha256("cramlm/13/0/masks/5") by coreutils' sha256sum.
    pinned = int.from_bytes(bytes.fromhex("11e06a3723202be0f1e24c40f89cc5bd"), "little")
    assert derived_key(13, phase_index=0, purpose="masks", index=5) == pinned
    assert 0 <= torch_seed(13, phase_index=0, purpose="dropout", index=5) < 2**63
