from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from cramlm.model.encoder import attention_bias
from cramlm.model.kernels import Rotation, attend, attend_fused, geglu

Attention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Rotation | None, int], torch.Tensor]


def plain_attention(qkv: torch.Tensor, bias: torch.Tensor, rotation: Rotation | None, heads: int) -> torch.Tensor:
    """The formula, a head at a time, with rotate_half as in Su et al. 2021 and transformers."""
    rows, length, width = qkv.shape
    size = width // 3 // heads
    result = torch.zeros(rows, length, width // 3, dtype=qkv.dtype)
    for head in range(heads):
        query, key, value = (qkv[..., part * width // 3 + head * size :][..., :size] for part in range(3))
        if rotation is not None:
            cos, sin = (torch.cat([table[:, :, 0], table[:, :, 0]], -1) for table in rotation)
            query, key = (x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin for x in (query, key))
        scores = query @ key.transpose(1, 2) / size**0.5 + bias[:, 0]
        result = result + torch.cat(
            [scores.softmax(-1) @ value if other == head else torch.zeros_like(value) for other in range(heads)], dim=-1
        )
    return result


@pytest.mark.parametrize("attention", [attend, attend_fused])
@pytest.mark.parametrize("rotary", [True, False])
def test_attention_and_its_gradient_equal_the_plain_formula(attention: Attention, rotary: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sequence = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
    qkv = torch.randn(2, 6, 3 * 8, generator=generator, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(2, 6, 1, 2, generator=generator, dtype=torch.float64)
    rotation = Rotation(angle.cos(), angle.sin()) if rotary else None
    bias = attention_bias(sequence, torch.float64)
    upstream = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    ours = attention(qkv, bias, rotation, 2)
    (our_gradient,) = torch.autograd.grad((ours * upstream).sum(), qkv)
    plain = plain_attention(qkv, bias, rotation, 2)
    (plain_gradient,) = torch.autograd.grad((plain * upstream).sum(), qkv)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(our_gradient, plain_gradient)


def test_geglu_and_its_gradient_equal_the_plain_formula() -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    value, gate = x.chunk(2, dim=-1)
    plain = torch.nn.functional.gelu(value) * gate
    torch.testing.assert_close(geglu(x), plain)
    upstream = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (ours,) = torch.autograd.grad((geglu(x) * upstream).sum(), x)
    (theirs,) = torch.autograd.grad((plain * upstream).sum(), x)
    torch.testing.assert_close(ours, theirs)


def test_padding_attends_to_padding_only_and_stays_finite() -> None:
    bias = attention_bias(torch.tensor([[0, 0, -1, -1], [-1, -1, -1, -1]]), torch.float32)
    qkv = torch.randn(2, 4, 3 * 8, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(attend(qkv, bias, None, 2)).all()
    assert torch.isinf(bias[0, 0, 0, 2:]).all()
    assert (bias[1] == 0).all()
