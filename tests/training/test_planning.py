from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode
from training_fixtures import ENCODER, LABELS, VOCABULARY, make_batches, make_model, make_phase

from cramlm.model.model import PackedBatch
from cramlm.training.flops import count_parameters, executed_flops, paper_flops
from cramlm.training.loop import LossHistory
from cramlm.training.objective import objective_of


def test_parameters_are_counted_once_by_hand() -> None:
    count = count_parameters(make_model())
    hidden, intermediate = ENCODER.hidden, ENCODER.intermediate
    layer = 4 * hidden * hidden + 3 * hidden * intermediate
    assert count.embedding == VOCABULARY * hidden
    assert count.encoder == 2 * layer
    norms = hidden * (1 + 2 * 2 - 1 + 1)  # embedding, two per layer but the first attention's, final
    vocabulary_head = hidden * hidden + hidden + VOCABULARY
    classifier = hidden * hidden + hidden + hidden * LABELS + LABELS
    assert count.other == norms + vocabulary_head + classifier


@pytest.mark.parametrize("shape", ["modernbert", "bert"])
@pytest.mark.parametrize("changes", [{}, {"external": 0, "text_weight": 0.0}, {"label_weight": 0.0}])
def test_executed_operations_are_those_that_torch_counts(shape: str, changes: dict[str, float]) -> None:
    phase = make_phase(**changes)
    model, batch = make_model(shape=shape), PackedBatch.of(make_batches(phase).batch(0))
    with FlopCounterMode(display=False) as counter:
        objective_of(phase).losses(model, batch).total.backward()
    # torch counts no backward for the lookup, and the classifier's last layer for all sequences, as we do
    assert executed_flops(model, batch, phase) == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_the_papers_count_gives_the_papers_figure_for_its_small_scale() -> None:
    # AGNews small: 1e5 steps of 256 sequences of 128 tokens, 109M parameters; the table averages 2.74e18 over eight tasks.
    assert paper_flops(109_000_000, padded_tokens=100_000 * 256 * 128) == pytest.approx(2.14e18, rel=0.01)


def test_a_sudden_jump_of_the_loss_is_noticed_and_a_steady_fall_is_not() -> None:
    history = LossHistory()
    noise = [0.1, -0.05, 0.02, -0.1, 0.03]
    assert all(history.add(5.0 - 0.01 * step + noise[step % 5]) is None for step in range(200))
    assert history.add(9.0) is not None
