from __future__ import annotations

import pytest
import torch
from torch import Tensor
from training_fixtures import make_batches, make_model, make_phase

from cramlm.config.run import PhaseConfig
from cramlm.model.device import Precision
from cramlm.training.objective import Losses, gradients, in_parts, objective_of


def computed(count: int, phase: PhaseConfig, *, precision: Precision = "fp32", seed: int = 3) -> tuple[Losses, dict[str, Tensor]]:
    """Losses and gradients of one batch in so many parts."""
    model, batch = make_model(), make_batches(phase).batch(0)
    found = gradients(model, in_parts(batch, count), phase, objective_of(phase).counts(batch), precision=precision, dropout_seed=seed)
    return found, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_parts_have_the_losses_and_the_gradient_of_the_whole_batch(precision: Precision, tolerance: float) -> None:
    phase = make_phase(text_weight=0.5)
    whole, expected = computed(1, phase, precision=precision)
    parts, summed = computed(3, phase, precision=precision)
    assert parts.as_numbers() == pytest.approx(whole.as_numbers(), rel=tolerance)
    assert summed.keys() == expected.keys()
    for name, gradient in summed.items():
        torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance * float(expected[name].abs().max()))


@pytest.mark.parametrize("rates", [{"dropout": 0.3}, {"attention_dropout": 0.3}])
def test_the_same_number_of_parts_gives_the_same_bits_with_dropout_too(rates: dict[str, float]) -> None:
    phase = make_phase(**rates)
    once, first = computed(2, phase, precision="bf16")
    again, second = computed(2, phase, precision="bf16")
    assert once.as_numbers() == again.as_numbers()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert computed(2, phase, precision="bf16", seed=4)[0].as_numbers() != once.as_numbers()


def test_a_batch_has_no_more_parts_than_rows() -> None:
    batch = make_batches(make_phase()).batch(0)
    assert len(in_parts(batch, 1000)) == len(batch.token_ids)
    assert sum(int((part.sequence >= 0).sum()) for part in in_parts(batch, 1000)) == batch.tokens


@pytest.mark.parametrize("rates", [{"dropout": 0.3}, {"attention_dropout": 0.3}])
def test_parts_that_hold_the_same_rows_have_different_dropout_masks(rates: dict[str, float]) -> None:
    """The loss of two equal parts is not twice that of one part."""
    phase = make_phase(**rates)
    model, batch = make_model(), make_batches(phase).batch(0)
    (part,) = in_parts(batch, 1)
    counts = objective_of(phase).counts(batch)
    losses = [float(gradients(model, parts, phase, counts, precision="fp32", dropout_seed=3).total) for parts in ([part], [part, part])]
    assert losses[1] != pytest.approx(2 * losses[0], rel=1e-6)
