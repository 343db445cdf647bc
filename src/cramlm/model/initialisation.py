"""Initial weights of the encoder and its heads.

They are a function of (seed, name of the parameter) alone: normal(0, init_std), norms 1, biases 0, and in the modernbert shape
the matrices that end a residual branch are smaller by sqrt(2 x layers), as in transformers' ModernBert. With
`layer_init` "context" or "markers", `start_from_context` changes some of them. The order is in `model.initialise_all`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from cramlm.config.run import EncoderConfig
from cramlm.model.encoder import Encoder, ModernBertEncoder

SHARED_LENGTH: Final = 0.5
"""Length of the shared component of a token embedding, relative to the rest of the embedding."""
ROTATED_PAIRS: Final = 6
"""Rotary pairs of a head, those that turn fastest, whose phases tell neighbouring positions apart."""
PEAK: Final = 12.0
"""Initial attention score of the position that a head attends to; six tokens away it is below 4."""
COPIED: Final = 0.5
"""Length of what a head adds to a token, relative to the part of the embedding that it copies."""
MARKED: Final = 1.0
"""Length of the embedding of a marker along the markers' direction, relative to the rest of the embedding."""
MARKER_SCORE: Final = 30.0
"""Initial attention score of a marker beside a token, on the side that a head attends to; that of tokens without a marker is 0."""
MARKER_SLOPE: Final = 5.5
"""Decrease of this score when the distance grows by a factor of e."""
FAR_SIDE: Final = -5.0
"""The score of markers on the other side."""
RANDOM_REST: Final = 0.1
"""Factor of the random queries and keys of heads that attend to markers."""
_REACH: Final = 64  # the largest distance at which these scores are fitted


def initialise(name: str, parameter: nn.Parameter, *, seed: int, std: float) -> None:
    """Initialise a parameter by its name: norm weights 1, biases 0, matrices normal(0, std) from a generator keyed by (seed, name)."""
    with torch.no_grad():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1  # 63 bits, as `manual_seed` takes
            generator = torch.Generator().manual_seed(key)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def start_from_context(encoder: Encoder, config: EncoderConfig, markers: Sequence[int] = ()) -> None:
    """Change initial weights such that the first layers add to each token the embeddings around it, as a continuous bag of words does.

    Two thirds of the heads of every layer attend to one position: the first head to the token before each token, the second to the token
    after it, then two before, two after, and so on. The others attend to the whole sequence, as heads with random weights do. Each head
    copies a part of the width, and another part in the next layer. Token embeddings from co-occurrence then predict a masked token from
    its neighbours before the first step. With random weights, small encoders need hundreds of steps until attention is local
    (docs/log.md).

    A head attends to one relative position if its queries and keys are constant: rotary positions turn their product into a function of the
    distance, with its peak where the phases of the query say. They are constant along a direction that all token embeddings share. In the
    spirit of Trockman and Kolter 2023, "Mimetic Initialization of Self-Attention Layers".

    markers: token ids of the markers of a task. Two of the heads that would attend to the whole sequence (the first such heads, from the
    first layer on) then attend to the nearest marker on the left and on the right: the state of a token depends on the markers around
    it. Embeddings of markers have a component that no other token has, and the keys of these heads read only that.
    """
    assert isinstance(encoder, ModernBertEncoder), "other shapes have no rotary positions"
    device = encoder.word_embeddings.device
    direction, eye = _shared_direction(config.hidden, device), torch.eye(config.hidden, device=device)
    size, heads, pairs = encoder.head_size, config.heads, min(ROTATED_PAIRS, encoder.head_size // 2)
    scale = math.sqrt(PEAK * math.sqrt(size) / pairs) / _component(config.hidden, SHARED_LENGTH)
    with torch.no_grad():
        share_direction(encoder.word_embeddings, markers)
        for index in range(config.layers):
            layer: Any = encoder.layers[index]
            frequency = _frequencies(encoder, index)[:pairs].to(device)
            query, key, value = layer.qkv.weight.view(3, heads, size, config.hidden)
            output = layer.attention_output.weight.view(config.hidden, heads, size)
            for head, offset in enumerate(_offsets(heads)):
                query[head, :pairs] += scale * torch.outer((offset * frequency).cos(), direction)
                query[head, size // 2 : size // 2 + pairs] += scale * torch.outer((offset * frequency).sin(), direction)
                key[head, :pairs] += scale * direction
            for head in range(heads):
                part = eye[(head + index) % heads :: heads]
                value[head] += part
                output[:, head] += COPIED * part.T
        if markers:
            _attend_to_markers(encoder, config)


def _attend_to_markers(encoder: ModernBertEncoder, config: EncoderConfig) -> None:
    """Replace the queries and keys of the heads that attend to the nearest marker on either side."""
    device, size, heads, half = encoder.word_embeddings.device, encoder.head_size, config.heads, encoder.head_size // 2
    shared, marked = _shared_direction(config.hidden, device), _marker_direction(config.hidden, device)
    scale = size**0.25
    free = [(index, head) for index in range(config.layers) for head in range(len(_offsets(heads)), heads)]
    for (index, head), side in zip(free, (-1, 1), strict=False):
        layer: Any = encoder.layers[index]
        query, key, _ = layer.qkv.weight.view(3, heads, size, config.hidden)
        query[head] *= RANDOM_REST
        key[head] *= RANDOM_REST
        query[head] += (
            scale / _component(config.hidden, SHARED_LENGTH) * torch.outer(_nearest(_frequencies(encoder, index), side).to(device), shared)
        )
        key[head, :half] += scale / _component(config.hidden, MARKED) * marked


def _nearest(frequencies: Tensor, side: int) -> Tensor:
    """A query (2 x frequencies,) whose product with a key of ones (in the first half) d positions to its right is about
    MARKER_SCORE - MARKER_SLOPE * log |d| on the side -1 (left) or 1, and FAR_SIDE on the other: a least-squares fit.
    """
    distance = torch.arange(1, _REACH + 1, dtype=torch.float64).repeat(2)
    distance[_REACH:] *= -1
    aim = torch.where(distance * side > 0, MARKER_SCORE - MARKER_SLOPE * distance.abs().log(), FAR_SIDE)
    weight = distance.abs() ** -0.5
    weight[distance * side == -1] *= 0.1  # the step between the sides is two tokens wide
    angle = torch.outer(distance, frequencies.double())
    waves = torch.cat([angle.cos(), angle.sin()], dim=1) * weight[:, None]
    ridge = 0.03 * torch.eye(waves.shape[1], dtype=torch.float64)
    result: Tensor = torch.linalg.solve(waves.T @ waves + ridge, waves.T @ (aim * weight)).float()
    return result


def _component(width: int, length: float) -> float:
    """Return the component of a normalized embedding along a direction in which it is `length` times as long as in all others."""
    return math.sqrt(width) * length / math.sqrt(1 + length**2)


def _frequencies(encoder: ModernBertEncoder, index: int) -> Tensor:
    """Radians per token of the rotary pairs of a layer, (head size / 2,)."""
    theta = encoder.local_theta if index % encoder.global_every else encoder.rope_theta
    half = encoder.head_size // 2
    frequencies: Tensor = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    return frequencies


def share_direction(embeddings: Tensor, markers: Sequence[int] = ()) -> None:
    """Set the component of each token embedding (V, D) along the shared direction to `SHARED_LENGTH` of the length of the rest; with
    markers, that along the markers' direction to `MARKED` for them, and to 0 for all others.

    The vocabulary head has the same weights; there the shared component adds almost the same to the logits of all tokens.
    """
    direction = _shared_direction(embeddings.shape[1], embeddings.device)
    with torch.no_grad():
        embeddings -= torch.outer(embeddings @ direction, direction)
        embeddings += SHARED_LENGTH * torch.outer(embeddings.norm(dim=1), direction)
        if markers:
            direction, ids = _marker_direction(embeddings.shape[1], embeddings.device), list(markers)
            embeddings -= torch.outer(embeddings @ direction, direction)
            embeddings[ids] += MARKED * torch.outer(embeddings[ids].norm(dim=1), direction)


def remove_shared_direction(weight: Tensor) -> None:
    """Project the rows of a matrix (n, D) onto the complement of the shared direction, in which all hidden states have equal components."""
    direction = _shared_direction(weight.shape[1], weight.device)
    with torch.no_grad():
        weight -= torch.outer(weight @ direction, direction)


def _shared_direction(width: int, device: torch.device) -> Tensor:
    """Return a unit vector (D,) that is orthogonal to (1, 1, ...), which norms remove: alternating signs, 0 at the end of an odd width."""
    signs = torch.ones(width, device=device)
    signs[1::2] = -1
    if width % 2:
        signs[-1] = 0
    unit: Tensor = signs / signs.norm()
    return unit


def _marker_direction(width: int, device: torch.device) -> Tensor:
    """Return a unit vector (D,), orthogonal to (1, 1, ...) and to the shared direction: two plus signs, two minus signs and so on."""
    signs = torch.tensor([1.0, 1, -1, -1], device=device).repeat(width // 4)
    unit: Tensor = F.pad(signs / signs.norm(), (0, width % 4))
    return unit


def _offsets(heads: int) -> list[int]:
    """Return the relative positions that heads start with: -1, 1, -2, 2, ..., for two thirds of the heads, rounded down."""
    return [(number // 2 + 1) * (1 if number % 2 else -1) for number in range(2 * heads // 3)]
