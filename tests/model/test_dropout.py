from __future__ import annotations

import pytest
import torch

from cramlm.model.dropout import Dropout

KINDS = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_share_of_the_numbers_falls_and_the_rest_grows_so_that_the_mean_stays(kind: torch.dtype, rate: float) -> None:
    x = torch.ones(200, 1000, dtype=kind)
    result = Dropout(rate, 7)(x)
    fallen = result == 0
    assert float(fallen.double().mean()) == pytest.approx(rate, abs=0.004)
    assert float(fallen.double().mean(0).max()) < rate + 0.2  # no column falls as a whole
    torch.testing.assert_close(result[~fallen], torch.full_like(result[~fallen], 1 / (1 - rate)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_falls_where_the_number_fell(kind: torch.dtype) -> None:
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).to(kind).requires_grad_()
    result = Dropout(0.3, 5)(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(gradient * x.detach(), result.detach())


def test_calls_of_a_pass_and_seeds_draw_apart_and_a_pass_can_be_repeated() -> None:
    x = torch.ones(100, 100)
    one = Dropout(0.5, 3)
    first, second = one(x), one(x)
    again, other = Dropout(0.5, 3), Dropout(0.5, 4)
    assert torch.equal(again(x), first)
    assert torch.equal(again(x), second)
    for different in (second, other(x)):
        both = float(((first == 0) & (different == 0)).float().mean())
        assert both == pytest.approx(0.25, abs=0.03)  # independent


def test_a_rate_of_zero_is_the_identity() -> None:
    x = torch.ones(3)
    assert Dropout(0.0, 1)(x) is x
