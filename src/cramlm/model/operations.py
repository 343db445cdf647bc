"""The operations around the linear layers: attention, plain and gated GELU, residual sums with their norms, cross-entropy, dropout.

On a CPU, in bf16 and in float32 where a gradient is needed, each is one autograd node over compiled loops (cpu_kernels.py): a mini encoder
in bf16 would otherwise spend half of its time outside matrix products. Elsewhere they are PyTorch's own operations, with equal values
(tests/model/test_operations.py). So are in float32 the norm of a sum (BERT's) and the layout of attention without rotation; on a CPU
without a gradient attention is SDPA, which stores no scores and takes half the time at 250 tokens.

Cross-entropy over the vocabulary computes its gradient in the forward pass, one position at a time. The logits of a step (800 positions x
8,192 tokens) are the largest tensor of training; the plain formula reads and writes them about eight times in float32, the compiled loop
reads each position once and writes its gradient once, in the type of the logits: 7 ms on one core, and a third of the formula's memory.

Dropout has no global generator: the mask is a function of (seed, part of the batch, number of the call in the pass, element's index). Hence
the parts of a batch can run in parallel threads, and the backward pass recomputes the mask instead of storing it. On a CPU the element's
index is hashed with a 64-bit key (cpu_kernels.py). The key is seed, part and call mixed by splitmix64, because keys that differ in few bits
could give the same mask in another order. Elsewhere PyTorch samples from a generator that is seeded with the key, or from one generator
for all calls of a pass, seeded with the first key, as a CUDA graph needs it (training/capture.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor


class Mask(NamedTuple):
    """A dropout mask: each element is 0 with probability `rate`, else 1 / (1 - rate), a function of (key, index in memory order).

    generator: None, or on a GPU the generator to sample from in place of the key.
    """

    rate: float
    key: int  # 64 bits
    generator: torch.Generator | None = None


class Rotation(NamedTuple):
    """Rotary positions: cos and sin, each (R, L, 1, head_size / 2), float32 at least."""

    cos: Tensor
    sin: Tensor


def attend(qkv: Tensor, bias: Tensor, rotation: Rotation | None, heads: int, mask: Mask | None = None) -> Tensor:
    """Multi-head attention: (R, L, 3 D) queries, keys and values side by side -> (R, L, D).

    bias (R, 1, L, L) is added to the scaled scores; `rotation` turns queries and keys first; `mask` is the dropout of the probabilities
    (R, H, L, L), None = none.
    """
    if is_compiled(qkv):
        cos, sin = rotation if rotation is not None else (None, None)
        result: Tensor = _Attend.apply(qkv, bias, cos, sin, heads, mask)  # type: ignore[no-untyped-call]
        return result
    if qkv.device.type == "cpu" and qkv.dtype == torch.float32 and mask is None:
        return _attend_without_gradient(qkv, bias, rotation, heads)
    return attend_fused(qkv, bias, rotation, heads, mask)


def drop(x: Tensor, mask: Mask, *, out: Tensor | None = None) -> Tensor:
    """x times the mask; on a CPU without a gradient. out: a contiguous tensor like x, may be x; None = a new one."""
    rate, key, generator = mask
    if not hashes(x):
        generator = generator or torch.Generator(x.device).manual_seed(key)
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= rate
        return torch.div(x * kept, 1 - rate, out=out)
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    settings = np.uint32(key >> 32), np.uint32(key & 0xFFFFFFFF), np.uint32(round(rate * 2**32)), np.float32(1 / (1 - rate))
    compiled().drop(memory(x.view(-1)), *settings, memory(out.view(-1)))
    return out


def hashes(x: Tensor) -> bool:
    """Return True if the mask of this tensor is hashed from indices (cpu_kernels.py), False if PyTorch samples it."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32)


@functools.cache
def compiled() -> ModuleType:
    """Return cpu_kernels.py, imported at the first call: with numba that takes half a second, and predictions in fp32 use none of it."""
    from cramlm.model import cpu_kernels

    return cpu_kernels


def is_compiled(x: Tensor) -> bool:
    """Return True if the loops of cpu_kernels.py compute a function of this tensor: on a CPU, in bf16, or in float32 with a gradient."""
    is_float32_trained = x.dtype == torch.float32 and x.requires_grad and torch.is_grad_enabled()
    return (x.dtype == torch.bfloat16 or is_float32_trained) and x.device.type == "cpu"


@functools.cache
def _has_slow_mkl() -> bool:
    """Return True on AMD's processors with AVX-512: MKL, PyTorch's library for products in float32, does not use it there."""
    capabilities = torch.cpu.get_capabilities()
    return str(capabilities.get("cpu_name", "")).startswith("AMD") and bool(capabilities.get("avx512_f"))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K) weight (N, K)^T + bias (N,) or None.

    Without a gradient on a CPU, oneDNN computes it in bf16, and in float32 where MKL is slow: 250 instead of 113 GFLOP/s on a core
    (docs/log.md). oneDNN keeps some 0.6 MB of code for each number of rows that it has seen; they are padded to few numbers.
    """
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    is_bf16 = x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
    if not is_bf16 and not (x.dtype == torch.float32 and _has_slow_mkl()):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    padded = F.pad(rows, (0, 0, 0, _padded(len(rows)) - len(rows)))
    result: Tensor = F.linear(padded, weight, bias) if is_bf16 else torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return result[: len(rows)].view(*x.shape[:-1], len(weight))


def _padded(rows: int) -> int:
    """Return the next power of two from 32 to 256, then the next multiple of 256."""
    return max(32, 1 << (rows - 1).bit_length()) if rows <= 256 else -(-rows // 256) * 256


def gelu(x: Tensor) -> Tensor:
    """x Phi(x)."""
    if not is_compiled(x):
        return F.gelu(x)
    result: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return result


def geglu(x: Tensor) -> Tensor:
    """gelu(value) * gate of (..., 2 I) -> (..., I); the value comes first."""
    if not is_compiled(x):
        value, gate = x.chunk(2, dim=-1)
        return F.gelu(value) * gate
    result: Tensor = _Geglu.apply(x)  # type: ignore[no-untyped-call]
    return result


def add_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + branch, and its layer norm times weight, all (..., D): the residual stream and the input of the next linear layer."""
    if not is_compiled(branch):
        total = x + branch
        return total, F.layer_norm(total, weight.shape, weight, None, eps)
    both: tuple[Tensor, Tensor] = _AddNorm.apply(x, branch, weight, eps)  # type: ignore[no-untyped-call]
    return both


def norm_of_sum(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the layer norm of x + branch, (..., D), in the precision of the residual stream and of the next linear layer."""
    if branch.dtype == x.dtype or not is_compiled(branch):
        normed = F.layer_norm(x + branch, weight.shape, weight, bias, eps)
        return normed, normed
    both: tuple[Tensor, Tensor] = _NormOfSum.apply(x, branch, weight, bias, eps)  # type: ignore[no-untyped-call]
    return both


def rotate(x: Tensor, rotation: Rotation, out: Tensor) -> Tensor:
    """Rotate (R, L, H, head_size) by the angle of its position; pairs are (i, i + head_size / 2), as in transformers."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, rotation.cos, out=out[..., :half])
    out[..., :half].addcmul_(second, rotation.sin, value=-1)
    torch.mul(second, rotation.cos, out=out[..., half:])
    out[..., half:].addcmul_(first, rotation.sin)
    return out


def attend_fused(qkv: Tensor, bias: Tensor, rotation: Rotation | None, heads: int, mask: Mask | None = None) -> Tensor:
    """`attend` in PyTorch's own operations, for GPUs.

    With a mask the probabilities are computed one operation at a time: SDPA's dropout samples from the global generator, which is a state.
    """
    rows, length, width = qkv.shape
    size = width // 3 // heads
    query, key, value = qkv.view(rows, length, 3, heads, size).unbind(2)
    if rotation is not None:
        query, key = _rotated(query, rotation), _rotated(key, rotation)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if mask is None:
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    else:
        probabilities = torch.softmax(query * size**-0.5 @ key.transpose(-1, -2) + bias, -1)
        context = drop(probabilities, mask) @ value
    return context.transpose(1, 2).reshape(rows, length, width // 3)


def _attend_without_gradient(qkv: Tensor, bias: Tensor, rotation: Rotation | None, heads: int) -> Tensor:
    """`attend` by SDPA, whose backward pass on a CPU is slow; queries and keys are rotated together, into new memory."""
    rows, length, width = qkv.shape
    size = width // 3 // heads
    parts = qkv.view(rows, length, 3 * heads, size).transpose(1, 2)
    turned, value = parts[:, : 2 * heads], parts[:, 2 * heads :]
    if rotation is not None:
        turned = qkv.new_empty(turned.shape)
        rotate(parts[:, : 2 * heads].transpose(1, 2), rotation, turned.transpose(1, 2))
    context = F.scaled_dot_product_attention(turned[:, :heads], turned[:, heads:], value, attn_mask=bias)
    return context.transpose(1, 2).reshape(rows, length, width // 3)


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * rotation.cos - second * rotation.sin, second * rotation.cos + first * rotation.sin], dim=-1).to(x.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, mask: Mask | None) -> Tensor:
        rows, length, width = qkv.shape
        size = width // 3 // heads
        parts = qkv.view(rows, length, 3, heads, size)
        # (3, R, H, L, size): each head's matrix contiguous, as the batched products want it; the scale goes into the queries on the way
        split = qkv.new_empty(3, rows, heads, length, size)
        if cos is None or sin is None:
            torch.mul(parts[:, :, 0], size**-0.5, out=split[0].transpose(1, 2))
            split[1].copy_(parts[:, :, 1].transpose(1, 2))
            split[2].copy_(parts[:, :, 2].transpose(1, 2))
        else:
            compiled().split_heads(matrix(qkv), matrix(cos), matrix(sin), np.float32(size**-0.5), memory(split))
        query, key, value = split.view(3, rows * heads, length, size)
        scores = torch.bmm(query, key.transpose(1, 2)).view(rows, heads, length, length).add_(bias)
        weights = torch.softmax(scores, -1)
        dropped = weights if mask is None else drop(weights, mask)
        context = torch.bmm(dropped.view(rows * heads, length, length), value)
        ctx.save_for_backward(split, weights, cos, sin)
        ctx.mask = mask  # recomputed in the backward pass
        return context.view(rows, heads, length, size).transpose(1, 2).reshape(rows, length, width // 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        split, weights, cos, sin = ctx.saved_tensors
        mask: Mask | None = ctx.mask
        _, rows, heads, length, size = split.shape
        query, key, value = split.view(3, rows * heads, length, size)
        probabilities = weights.view(rows * heads, length, length)
        d_context = grad.view(rows, length, heads, size).transpose(1, 2).reshape(rows * heads, length, size)
        d_split = torch.empty_like(split)
        d_query, d_key, d_value = d_split.view(3, rows * heads, length, size)
        dropped = probabilities if mask is None else drop(probabilities, mask)
        torch.bmm(dropped.transpose(1, 2), d_context, out=d_value)
        d_weights = torch.bmm(d_context, value.transpose(1, 2))
        if mask is not None:
            drop(d_weights, mask, out=d_weights)
        d_scores = torch._softmax_backward_data(d_weights, probabilities, -1, probabilities.dtype)
        torch.bmm(d_scores, key, out=d_query)
        torch.bmm(d_scores.transpose(1, 2), query, out=d_key)
        d_qkv = grad.new_empty(rows, length, 3, heads, size)
        if cos is None:
            torch.mul(d_split[0].transpose(1, 2), size**-0.5, out=d_qkv[:, :, 0])
            d_qkv[:, :, 1].copy_(d_split[1].transpose(1, 2))
            d_qkv[:, :, 2].copy_(d_split[2].transpose(1, 2))
        else:
            compiled().merge_heads(memory(d_split), matrix(cos), matrix(sin), np.float32(size**-0.5), memory(d_qkv.view(rows * length, -1)))
        return d_qkv.view(rows, length, 3 * heads * size), None, None, None, None, None


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        result = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        compiled().geglu_forward(matrix(x), matrix(result))
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        compiled().geglu_backward(matrix(x), matrix(grad.contiguous()), matrix(result))
        return result


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        result = torch.empty_like(x)
        compiled().gelu_forward(memory(x.view(-1)), memory(result.view(-1)))
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        compiled().gelu_backward(memory(x.view(-1)), memory(grad.contiguous().view(-1)), memory(result.view(-1)))
        return result


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normed, moments = torch.empty_like(x), torch.empty_like(branch), x.new_empty(2, x.numel() // x.shape[-1])
        read = (matrix(x), matrix(branch), memory(weight), np.float32(eps))
        compiled().add_norm_forward(*read, matrix(total), matrix(normed), *memory(moments))
        ctx.save_for_backward(total, moments, weight)
        return total, normed

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, d_normed: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, moments, weight = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(total), torch.zeros_like(weight)
        d_branch = d_x if d_normed.dtype == d_x.dtype else torch.empty_like(total, dtype=d_normed.dtype)
        saved, upstream = (matrix(total), *memory(moments), memory(weight)), (matrix(d_total.contiguous()), matrix(d_normed.contiguous()))
        compiled().add_norm_backward(*saved, *upstream, matrix(d_x), matrix(d_branch), memory(d_weight))
        return d_x, d_branch, d_weight, None


class _NormOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, rounded, moments = torch.empty_like(x), torch.empty_like(branch), x.new_empty(2, x.numel() // x.shape[-1])
        read = (matrix(x), matrix(branch), memory(weight), memory(bias), np.float32(eps))
        compiled().norm_of_sum_forward(*read, matrix(normed), matrix(rounded), *memory(moments))
        ctx.save_for_backward(x, branch, moments, weight)
        return normed, rounded

    @staticmethod
    def backward(ctx: Any, d_normed: Tensor, d_rounded: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        x, branch, moments, weight = ctx.saved_tensors
        d_x, d_branch, d_weight, d_bias = torch.empty_like(x), torch.empty_like(branch), torch.zeros_like(weight), torch.zeros_like(weight)
        saved = (matrix(x), matrix(branch), *memory(moments), memory(weight))
        upstream = (matrix(d_normed.contiguous()), matrix(d_rounded.contiguous()))
        compiled().norm_of_sum_backward(*saved, *upstream, matrix(d_x), matrix(d_branch), memory(d_weight), memory(d_bias))
        return d_x, d_branch, d_weight, d_bias, None


def memory(x: Tensor) -> npt.NDArray[Any]:
    """Return the memory of a contiguous tensor, as cpu_kernels.py reads it: float32, or the 16 bits of bf16."""
    assert x.is_contiguous()
    if x.dtype == torch.bfloat16:
        bits: npt.NDArray[np.uint16] = x.detach().view(torch.int16).numpy().view(np.uint16)
        return bits
    assert x.dtype == torch.float32
    numbers: npt.NDArray[np.float32] = x.detach().numpy()
    return numbers


def matrix(x: Tensor) -> npt.NDArray[Any]:
    """`memory` of a tensor (..., D) as a matrix of rows of D elements."""
    return memory(x.view(-1, x.shape[-1]))


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i weights[i] * -ln softmax(logits[i])[targets[i]], and the unweighted loss of each position.

    logits (M, V), targets (M,) int64, weights (M,) -> scalar and (M,), in float32. Only the scalar has a gradient, and only
    with respect to the logits.
    """
    if not is_compiled(logits):  # a GPU has memory for the plain formula, and torch.compile can fuse it
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        return (losses * weights).sum(), losses.detach()
    both: tuple[Tensor, Tensor] = _WeightedCrossEntropy.apply(logits, targets, weights)  # type: ignore[no-untyped-call]
    return both


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        each, gradient = torch.empty(len(logits)), torch.empty_like(logits)
        compiled().cross_entropy(memory(logits), targets.numpy(), memory(weights.float()), memory(each), memory(gradient))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(each)
        return (each * weights).sum(), each

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        if grad == 1:  # nearly always: spares a copy of the largest tensor
            return gradient, None, None
        return gradient * grad, None, None  # a 0-d factor does not change the type


_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_LOW_64_BITS = 2**64 - 1
_ATTENTION = 2**63  # larger than any number of a call


def splitmix64(state: int) -> int:
    """Return the 64-bit output that follows `state` (Steele, Lea and Flood 2014; constants of Vigna's splitmix64.c)."""
    z = (state + _GOLDEN) & _LOW_64_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LOW_64_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LOW_64_BITS
    return z ^ (z >> 31)


class Dropout:
    """The dropout of one forward pass over one part of a batch; the order of the calls determines the masks.

    rate: of activations. attention_rate: of attention probabilities. The masks of each have their own keys: neither rate changes the
    other's masks. generator: None, or a generator of the GPU that all masks are sampled from, in the order of the calls.
    """

    def __init__(
        self, rate: float, seed: int, *, attention_rate: float = 0.0, part: int = 0, generator: torch.Generator | None = None
    ) -> None:
        assert 0 <= rate < 1
        assert 0 <= attention_rate < 1
        self.rate, self.attention_rate, self._generator = rate, attention_rate, generator
        self._keys, self._attention_keys = _keys(seed, part), _keys(seed, part, _ATTENTION)

    def __call__(self, x: Tensor) -> Tensor:
        """x with each element set to 0 with probability `rate`, the others divided by 1 - rate."""
        if self.rate == 0:
            return x
        mask = Mask(self.rate, next(self._keys), self._generator)
        if not hashes(x):
            return drop(x, mask)
        result: Tensor = _Dropped.apply(x, mask)  # type: ignore[no-untyped-call]
        return result

    def attention(self) -> Mask | None:
        """Return the mask of the next layer's attention probabilities; None at a rate of 0."""
        return Mask(self.attention_rate, next(self._attention_keys), self._generator) if self.attention_rate else None


def no_dropout() -> Dropout:
    """Dropout of rate 0, for a pass without training."""
    return Dropout(0.0, 0)


def _keys(*numbers: int) -> Iterator[int]:
    """Return an endless sequence of keys, one for each call."""
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
