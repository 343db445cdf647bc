"""Cross-entropy over the vocabulary that makes its gradient on the way forward, a cache-sized block of places at a time.

The logits of a step (800 places x 8,192 tokens) are the largest tensor of training. The plain formula reads and writes it about eight
times, in float32; here each block is read once and its gradient written once, in the logits' own type; in bf16 on a CPU by a compiled
loop. On one core 7 ms, 11 by blocks of PyTorch's operations, and a third of the formula's memory. The sums are float32 as before; only the
gradient is rounded to the logits' type, as autocast does anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cramlm.model.kernels import cpu as compiled
from cramlm.model.kernels.torch import bits, is_compiled, numbers

_BLOCK = 1 << 19  # logits in a block on the CPU: 2 MiB of float32


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i weights[i] * -ln softmax(logits[i])[targets[i]], and the unweighted losses of each place.

    logits (M, V), targets (M,) int64, weights (M,) -> scalar and (M,), in float32. Only the scalar has a gradient, and only
    with respect to the logits.
    """
    result: tuple[Tensor, Tensor] = _WeightedCrossEntropy.apply(logits, targets, weights)  # type: ignore[no-untyped-call]
    return result


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(logits.dtype, torch.float32)
        each, gradient = torch.empty(len(logits), dtype=kind, device=logits.device), torch.empty_like(logits)
        if is_compiled(logits):
            compiled.cross_entropy(bits(logits), targets.numpy(), numbers(weights.float()), numbers(each), bits(gradient))
        else:
            _by_blocks(logits, targets, weights, each, gradient)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(each)
        return (each * weights).sum(), each

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient if grad == 1 else gradient * grad, None, None  # a 0-d factor does not change the type


def _by_blocks(logits: Tensor, targets: Tensor, weights: Tensor, each: Tensor, gradient: Tensor) -> None:
    """Fill `each` and `gradient`, in PyTorch's operations."""
    places, vocabulary = logits.shape
    block = max(1, places if logits.is_cuda else _BLOCK // vocabulary)
    for start in range(0, places, block):
        part = slice(start, start + block)
        values, target = logits[part].to(each.dtype), targets[part, None]
        probabilities = torch.softmax(values, -1)
        # ln of the sum of exponentials, from the largest logit and its probability (>= 1 / V): exact where the target's own underflows.
        log_sum = values.amax(-1) - probabilities.amax(-1).log()
        each[part] = log_sum - values.gather(1, target).squeeze(1)
        probabilities.scatter_(1, target, probabilities.gather(1, target) - 1)
        torch.mul(probabilities, weights[part, None], out=probabilities)
        gradient[part] = probabilities
