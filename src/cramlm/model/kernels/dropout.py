"""Dropout without a global generator: the mask is a function of (seed, part of the batch, number of the call in the pass, element's index).

Hence the parts of a batch can run in parallel threads, and the backward pass recomputes the mask instead of storing it. On a CPU the
element's index is hashed with a 64-bit key (cpu.py); elsewhere PyTorch samples from a generator seeded with the key. The key is seed, part
and call mixed by splitmix64, because keys that differ in few bits could give the same mask in another order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cramlm.model.kernels.torch import Mask, drop, hashes

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_LOW_64_BITS = 2**64 - 1
_ATTENTION = 2**63  # larger than any number of a call


def splitmix64(state: int) -> int:
    """The 64-bit output that follows `state` (Steele, Lea and Flood 2014; constants of Vigna's splitmix64.c)."""
    z = (state + _GOLDEN) & _LOW_64_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LOW_64_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LOW_64_BITS
    return z ^ (z >> 31)


class Dropout:
    """The dropout of one forward pass over one part of a batch; the order of the calls determines the masks.

    rate: of activations. attention_rate: of attention probabilities. The masks of each have their own keys: neither rate changes the
    other's masks.
    """

    def __init__(self, rate: float, seed: int, *, attention_rate: float = 0.0, part: int = 0) -> None:
        assert 0 <= rate < 1
        assert 0 <= attention_rate < 1
        self.rate, self.attention_rate = rate, attention_rate
        self._keys, self._attention_keys = _keys(seed, part), _keys(seed, part, _ATTENTION)

    def __call__(self, x: Tensor) -> Tensor:
        """x with each element set to 0 with probability `rate`, the others divided by 1 - rate."""
        if self.rate == 0:
            return x
        mask = Mask(self.rate, next(self._keys))
        if not hashes(x):
            return drop(x, mask)
        result: Tensor = _Dropped.apply(x, mask)  # type: ignore[no-untyped-call]
        return result

    def attention(self) -> Mask | None:
        """The mask of the next layer's attention probabilities; None at a rate of 0."""
        return Mask(self.attention_rate, next(self._attention_keys)) if self.attention_rate else None


def no_dropout() -> Dropout:
    """Dropout of rate 0, for a pass without training."""
    return Dropout(0.0, 0)


def _keys(*numbers: int) -> Iterator[int]:
    """An endless sequence of keys, one for each call."""
    base = functools.reduce(lambda state, number: splitmix64(state ^ number), numbers, 0)
    return (splitmix64(base ^ call) for call in itertools.count())


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return drop(x, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return drop(grad, ctx.mask), None
