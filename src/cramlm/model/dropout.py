"""Dropout without a global generator: which activations fall is a function of (seed, number of the call in the pass, place in the tensor).

So the shares of a batch can be computed side by side in threads, and nothing has to be kept for the backward pass: it draws the same
again. On a CPU a place's number is hashed (numba_kernels.py); elsewhere PyTorch draws, from a generator of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cramlm.model import numba_kernels as compiled
from cramlm.model.kernels import bits, is_compiled, numbers

_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive calls over the seeds


class Dropout:
    """The dropout of one forward pass: call it wherever activations may fall, always in the same order."""

    def __init__(self, rate: float, seed: int) -> None:
        assert 0 <= rate < 1
        self.rate, self._seed, self._calls = rate, seed, 0

    def __call__(self, x: Tensor) -> Tensor:
        """x, each number with probability `rate` 0 and else divided by 1 - rate."""
        if self.rate == 0:
            return x
        self._calls += 1
        seed = (self._seed + self._calls * _GOLDEN) % 2**63
        if x.device.type == "cpu" and (is_compiled(x) or x.dtype == torch.float32):
            result: Tensor = _Dropped.apply(x, self.rate, seed)  # type: ignore[no-untyped-call]
            return result
        drawn = torch.rand(x.shape, generator=torch.Generator(x.device).manual_seed(seed), device=x.device)
        return x * (drawn >= self.rate) / (1 - self.rate)


def no_dropout() -> Dropout:
    """What a pass without training takes."""
    return Dropout(0.0, 0)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, seed: int) -> Tensor:
        ctx.rate, ctx.seed = rate, seed
        return _drop(x, rate, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _drop(grad, ctx.rate, ctx.seed), None, None


def _drop(x: Tensor, rate: float, seed: int) -> Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    least, scale = np.uint32(round(rate * 2**32)), np.float32(1 / (1 - rate))
    high, low = np.uint32(seed >> 32), np.uint32(seed & 0xFFFFFFFF)
    if x.dtype == torch.bfloat16:
        compiled.drop_bits(bits(x.view(-1)), high, low, least, scale, bits(result.view(-1)))
    else:
        compiled.drop_numbers(numbers(x.view(-1)), high, low, least, scale, numbers(result.view(-1)))
    return result
