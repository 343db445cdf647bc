"""Attention and GeGLU with their backward written out, for the CPU; PyTorch's own for CUDA.

On CPU a mini encoder spends half of its time outside matrix products. One autograd node instead of ten saves what autograd adds between
them: zero-filled gradients of slices, copies to join them, saved intermediates. The results are those of the plain formula
(tests/model/test_kernels.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor


class Rotation(NamedTuple):
    """Rotary positions: cos and sin, each (R, L, 1, head_size / 2)."""

    cos: Tensor
    sin: Tensor


def attend(qkv: Tensor, bias: Tensor, rotation: Rotation | None, heads: int) -> Tensor:
    """Multi-head attention: (R, L, 3 D) queries, keys and values side by side -> (R, L, D).

    bias (R, 1, L, L) is added to the scaled scores; `rotation` turns queries and keys first. Where the model is being exported as a graph
    the plain operations are recorded instead, which other runtimes know.
    """
    if qkv.device.type != "cpu" or torch.compiler.is_exporting():
        return attend_fused(qkv, bias, rotation, heads)
    cos, sin = rotation if rotation is not None else (None, None)
    result: Tensor = _Attend.apply(qkv, bias, cos, sin, heads)  # type: ignore[no-untyped-call]
    return result


def geglu(x: Tensor) -> Tensor:
    """gelu(value) * gate of (..., 2 I) -> (..., I); the value comes first."""
    if x.device.type != "cpu" or torch.compiler.is_exporting():
        value, gate = x.chunk(2, dim=-1)
        return F.gelu(value) * gate
    result: Tensor = _Geglu.apply(x)  # type: ignore[no-untyped-call]
    return result


def rotate(x: Tensor, rotation: Rotation, out: Tensor) -> Tensor:
    """Turn (R, L, H, head_size) by the angle of its place; pairs are (i, i + head_size / 2), as transformers pairs them."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, rotation.cos, out=out[..., :half])
    out[..., :half].addcmul_(second, rotation.sin, value=-1)
    torch.mul(second, rotation.cos, out=out[..., half:])
    out[..., half:].addcmul_(first, rotation.sin)
    return out


def attend_fused(qkv: Tensor, bias: Tensor, rotation: Rotation | None, heads: int) -> Tensor:
    """The same in PyTorch's own operations; what `attend` does on a GPU."""
    rows, length, width = qkv.shape
    size = width // 3 // heads
    query, key, value = qkv.view(rows, length, 3, heads, size).unbind(2)
    if rotation is not None:
        query, key = _rotated(query, rotation), _rotated(key, rotation)
    context = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias)
    return context.transpose(1, 2).reshape(rows, length, width // 3)


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * rotation.cos - second * rotation.sin, second * rotation.cos + first * rotation.sin], dim=-1)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int) -> Tensor:
        rows, length, width = qkv.shape
        size = width // 3 // heads
        parts = qkv.view(rows, length, 3, heads, size)
        # (3, R, H, L, size): each head's matrix contiguous, as the batched products want it; the scale goes into the queries on the way
        split = qkv.new_empty(3, rows, heads, length, size)
        if cos is None or sin is None:
            torch.mul(parts[:, :, 0], size**-0.5, out=split[0].transpose(1, 2))
            split[1].copy_(parts[:, :, 1].transpose(1, 2))
        else:
            rotate(parts[:, :, 0], Rotation(cos * size**-0.5, sin * size**-0.5), split[0].transpose(1, 2))
            rotate(parts[:, :, 1], Rotation(cos, sin), split[1].transpose(1, 2))
        split[2].copy_(parts[:, :, 2].transpose(1, 2))
        query, key, value = split.view(3, rows * heads, length, size)
        scores = torch.bmm(query, key.transpose(1, 2)).view(rows, heads, length, length).add_(bias)
        weights = torch.softmax(scores, -1)
        context = torch.bmm(weights.view(rows * heads, length, length), value)
        ctx.save_for_backward(split, weights, cos, sin)
        return context.view(rows, heads, length, size).transpose(1, 2).reshape(rows, length, width // 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        split, weights, cos, sin = ctx.saved_tensors
        _, rows, heads, length, size = split.shape
        query, key, value = split.view(3, rows * heads, length, size)
        probabilities = weights.view(rows * heads, length, length)
        d_context = grad.view(rows, length, heads, size).transpose(1, 2).reshape(rows * heads, length, size)
        d_split = torch.empty_like(split)
        d_query, d_key, d_value = d_split.view(3, rows * heads, length, size)
        torch.bmm(probabilities.transpose(1, 2), d_context, out=d_value)
        d_weights = torch.bmm(d_context, value.transpose(1, 2))
        d_scores = torch._softmax_backward_data(d_weights, probabilities, -1, probabilities.dtype)
        torch.bmm(d_scores, key, out=d_query)
        torch.bmm(d_scores.transpose(1, 2), query, out=d_key)
        d_qkv = grad.new_empty(rows, length, 3, heads, size)
        if cos is None:
            torch.mul(d_split[0].transpose(1, 2), size**-0.5, out=d_qkv[:, :, 0])
            d_qkv[:, :, 1].copy_(d_split[1].transpose(1, 2))
        else:
            rotate(d_split[0].transpose(1, 2), Rotation(cos * size**-0.5, sin * -(size**-0.5)), d_qkv[:, :, 0])
            rotate(d_split[1].transpose(1, 2), Rotation(cos, -sin), d_qkv[:, :, 1])
        d_qkv[:, :, 2].copy_(d_split[2].transpose(1, 2))
        return d_qkv.view(rows, length, 3 * heads * size), None, None, None, None


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        active = F.gelu(value)
        ctx.save_for_backward(x, active)
        return active * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, active = ctx.saved_tensors
        value, gate = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        d_value, d_gate = result.chunk(2, dim=-1)
        torch.mul(active, grad, out=d_gate)
        torch.ops.aten.gelu_backward.grad_input(grad * gate, value, approximate="none", grad_input=d_value)
        return result
