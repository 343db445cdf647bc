"""The planner: what it leaves alone, what it sets, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.errors import UsageError
from cramlm.recipes import finetune_phase, joint_phase
from cramlm.retriever_config import Bm25Config, RandomConfig, RetrieverConfig, UnionConfig
from cramlm.training.budget import (
    DROPOUT,
    FEWEST_TOKENS,
    UNPLANNED_DOCUMENTS,
    Sizes,
    Speed,
    finetune_passes,
    plan_phases,
    plan_selection,
    row_length,
)

SIZES = Sizes(train_examples=4000, train_tokens=200_000, dev_tokens=50_000, test_tokens=100_000, external_tokens=500_000)
SPEED = Speed(joint=10_000, finetune=12_000)


@given(st.floats(60, 7200), st.floats(1_000, 100_000))
def test_planned_phases_fill_the_time_and_never_exceed_it(seconds: float, rate: float) -> None:
    speed = Speed(joint=rate, finetune=1.2 * rate)
    try:
        joint, finetune = plan_phases([joint_phase(), finetune_phase()], sizes=SIZES, speed=speed, seconds=seconds, rows=128)
    except UsageError:
        assert seconds * rate < 20 * 4096 / 0.7  # only a budget that buys fewer than 20 steps is refused
        return
    assert joint.steps is not None
    assert finetune.steps is not None
    spent = joint.steps * 4096 / speed.joint + finetune.steps * 32 * 50 / speed.finetune
    assert spent <= seconds * 1.001
    assert spent >= seconds - 2 * 4096 / speed.joint - 2 * 1600 / speed.finetune


def test_numbers_set_by_hand_stay() -> None:
    fixed = joint_phase().model_copy(update={"steps": 7, "max_length": 64, "dropout": 0.3, "evaluate_every": 3})
    planned, _ = plan_phases([fixed, finetune_phase()], sizes=SIZES, speed=SPEED, seconds=300, rows=128)
    assert planned == fixed


def test_passes_become_steps_of_the_text_that_a_phase_reads() -> None:
    phase = finetune_phase().model_copy(update={"passes": 2.0, "batch_size": 50})
    (planned,) = plan_phases([phase], sizes=SIZES, speed=SPEED, seconds=None, rows=128)
    assert planned.steps == 160


def test_a_phase_over_text_without_steps_or_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="--budget"):
        plan_phases([joint_phase()], sizes=SIZES, speed=SPEED, seconds=None, rows=128)


def test_a_hopeless_budget_is_refused_naming_the_phase() -> None:
    with pytest.raises(UsageError, match=r"phase '(joint|finetune)'.*longer --budget"):
        plan_phases([joint_phase(), finetune_phase()], sizes=SIZES, speed=SPEED, seconds=4, rows=128)


def test_labels_are_dropped_out_only_where_they_are_passed_over_often() -> None:
    few = Sizes(train_examples=100, train_tokens=5_000, dev_tokens=5_000, test_tokens=0, external_tokens=500_000)
    (often,) = plan_phases([finetune_phase()], sizes=few, speed=SPEED, seconds=300, rows=128)
    joint, seldom = plan_phases([joint_phase(), finetune_phase()], sizes=SIZES, speed=SPEED, seconds=60, rows=128)
    assert (often.dropout, joint.dropout, seldom.dropout) == (DROPOUT, 0.0, 0.0)


def test_fewer_labels_are_passed_over_more_often_within_bounds() -> None:
    assert [finetune_passes(examples) for examples in (1, 100, 2000, 4000, 10**6)] == [60, 60, 20, 10, 10]


@pytest.mark.parametrize("retriever", [Bm25Config(), RandomConfig(), UnionConfig(retrievers=(Bm25Config(), RandomConfig()))])
def test_every_retriever_is_bounded_to_the_text_that_the_budget_reads_five_times(retriever: RetrieverConfig) -> None:
    planned = plan_selection(retriever, seconds=270, tokens_per_second=10_000)
    assert (planned.max_tokens, planned.max_documents) == (540_000, None)
    assert plan_selection(retriever, seconds=1, tokens_per_second=10_000).max_tokens == FEWEST_TOKENS


@pytest.mark.parametrize("bound", [{"max_documents": 5}, {"max_tokens": 7_000}])
def test_a_bound_set_by_hand_stays(bound: dict[str, int]) -> None:
    for retriever in (Bm25Config(**bound), RandomConfig(**bound)):
        assert plan_selection(retriever, seconds=270, tokens_per_second=10_000) == retriever


def test_without_a_budget_only_what_would_be_the_whole_corpus_is_bounded() -> None:
    both = UnionConfig(retrievers=(Bm25Config(), RandomConfig()))
    small = UnionConfig(retrievers=(Bm25Config(), RandomConfig(max_documents=9)))
    planned = [
        plan_selection(retriever, seconds=None, tokens_per_second=10_000) for retriever in (Bm25Config(), RandomConfig(), both, small)
    ]
    assert [retriever.max_documents for retriever in planned] == [None, UNPLANNED_DOCUMENTS, UNPLANNED_DOCUMENTS, None]


def test_rows_hold_nearly_every_training_text_whole() -> None:
    assert row_length(np.array([10] * 99 + [500]), longest=512) == 64
    assert row_length(np.full(10, 100), longest=512) == 128
    assert row_length(np.full(10, 1000), longest=512) == 256
    assert row_length(np.full(10, 1000), longest=64) == 64
