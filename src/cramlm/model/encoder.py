"""The encoder in its shapes, over packed rows: R rows of L positions, with several sequences in a row.

All compute exactly what the native classes of transformers compute for each sequence alone, because attention stays inside a sequence (a
bias of 0 inside and -inf outside, made once per batch) and positions restart with each. The padding of a row is a sequence of its own, with
finite and unused hidden states.

    bert         word + position + type embedding, norm; layers of attention and GELU feed-forward, biases, norm after each residual
    roberta      the same; positions are counted from padding id + 1, as its native class counts them
    albert       word + position + type embedding of width E, norm; a linear map to width D; one layer of bert, `layers` times
    modernbert   word embedding, norm; layers of attention with rotary positions and GeGLU, no biases, norm before each; norm at the end;
                 in all but every `global_every`-th layer, attention reaches half a window to either side
    moe          modernbert with a mixture of experts in place of the feed-forward part (`Experts`); no native class

BERT's second type embedding is never used: both halves of a pair are type 0, and exported folders have no `token_type_ids` as input. The
operations around the linear layers are in operations.py.

Mixture of experts (Switch Transformer, Fedus et al. 2022): p = softmax(router(x)) in float32, expert e = argmax p, y = p_e * expert_e(x).
Experts have no capacity limit: no token is dropped, and a text's result does not depend on its batch. A balance loss with the weight
`balance_weight` makes the router use all experts: E * sum over e of f_e P_e, with f_e the share of a sequence's tokens at expert e and P_e
its mean probability (1 if all are used evenly), averaged over layers and sequences. The original uses the shares of the whole batch; a mean
over sequences does not depend on how a batch is split over threads and ranks.

Initial weights are a function of (seed, name of the parameter) alone: normal(0, init_std), norms 1, biases 0, and in the modernbert shape
the matrices that end a residual branch are smaller by sqrt(2 x layers), as in transformers' ModernBert. With
`layer_init = "context"`, `start_from_context` changes some of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, NamedTuple, TypeAlias, assert_never

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from cramlm.config.run import EncoderConfig
from cramlm.model.operations import Dropout, Rotation, add_norm, attend, geglu, gelu, norm_of_sum


class Expert(nn.Module):
    """A gated feed-forward part, (N, D) -> (N, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.wi = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.output = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(geglu(self.wi(x)))
        return result


class Experts(nn.Module):
    """(R, L, D) -> (R, L, D) through each token's expert, and the sum over sequences of their balance loss.

    sequence: (R, L), -1 = padding, which is left out of the balance loss.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.experts))

    def forward(self, x: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        with without_autocast(x):
            probabilities = torch.softmax(F.linear(flat.float(), self.router.weight.float()), -1)
        gate, choice = probabilities.max(-1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            routed = (choice == number).nonzero().squeeze(1)
            result = result.index_add(0, routed, expert(flat.index_select(0, routed)).to(x.dtype))
        gated = result.view(x.shape) * gate.view(*x.shape[:2], 1).to(x.dtype)
        return gated, _balance(probabilities, choice, sequence.flatten())


def _balance(probabilities: Tensor, choice: Tensor, owner: Tensor) -> Tensor:
    """Return the sum over sequences of E * sum over experts of (share of tokens) * (mean probability)."""
    experts = probabilities.shape[1]
    real = (owner >= 0).nonzero().squeeze(1)
    owner = owner.index_select(0, real)
    sequences = int(owner.max()) + 1 if len(owner) else 0
    sums = torch.zeros(sequences, experts, device=owner.device)
    means = sums.index_add(0, owner, probabilities.index_select(0, real))
    shares = sums.index_add(0, owner, F.one_hot(choice.index_select(0, real), experts).float())
    lengths = shares.sum(1, keepdim=True)
    return experts * ((means / lengths) * (shares / lengths)).sum()


Shape: TypeAlias = Literal["bert", "roberta", "modernbert", "albert", "moe"]
Encoder: TypeAlias = "BertEncoder | ModernBertEncoder"


def build_encoder(config: EncoderConfig, *, vocab_size: int, pad_id: int) -> Encoder:
    """Return an encoder of the config's shape, with uninitialised weights."""
    match config.shape:
        case "bert" | "albert":
            return BertEncoder(config, vocab_size, token_types=2, first_position=0)
        case "roberta":
            return BertEncoder(config, vocab_size, token_types=1, first_position=pad_id + 1)
        case "modernbert" | "moe":
            return ModernBertEncoder(config, vocab_size)
        case _:
            assert_never(config.shape)


class Norm(nn.Module):
    """Layer norm over the last dimension, with or without a bias."""

    def __init__(self, size: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def after_sum(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """x + branch, and its norm."""
        assert self.bias is None
        return add_norm(x, branch, self.weight, self.eps)

    def of_sum(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + branch, in the precision of the residual stream and of the next linear layer."""
        assert self.bias is not None
        return norm_of_sum(x, branch, self.weight, self.bias, self.eps)


class BertLayer(nn.Module):
    """One post-norm layer; `qkv` is the stacked native query, key and value matrices."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.attention_output = nn.Linear(config.hidden, config.hidden)
        self.attention_norm = Norm(config.hidden, config.norm_eps, bias=True)
        self.intermediate = nn.Linear(config.hidden, config.intermediate)
        self.output = nn.Linear(config.intermediate, config.hidden)
        self.output_norm = Norm(config.hidden, config.norm_eps, bias=True)

    def forward(self, x: Tensor, read: Tensor, bias: Tensor, dropout: Dropout) -> tuple[Tensor, Tensor]:
        """The residual stream, and the same in the precision of linear layers -> both after this layer."""
        attended = self.attention_output(attend(self.qkv(read), bias, None, self.heads, dropout.attention()))
        x, read = self.attention_norm.of_sum(x, dropout(attended))
        changed = self.output(gelu(self.intermediate(read)))
        return self.output_norm.of_sum(x, dropout(changed))


class Rows(NamedTuple):
    """Packed rows: token ids, numbers of sequences (-1 = padding) and positions, (R, L) each; `causal_from` as of `attention_bias`."""

    token_ids: Tensor
    sequence: Tensor
    position: Tensor
    causal_from: Tensor | None = None


class BertEncoder(nn.Module):
    """Packed rows -> hidden states (R, L, D). first_position: the row of the position table for a sequence's first token.

    words: a table of word embeddings in place of the encoder's, (V, width of the embedding).
    """

    def __init__(self, config: EncoderConfig, vocab_size: int, *, token_types: int, first_position: int) -> None:
        super().__init__()
        self.first_position, self.passes, width = first_position, config.layers, config.embedding_width
        self.word_embeddings = nn.Parameter(torch.empty(vocab_size, width))
        self.position_embeddings = nn.Parameter(torch.empty(first_position + config.max_positions, width))
        self.token_type_embeddings = nn.Parameter(torch.empty(token_types, width))
        self.embedding_norm = Norm(width, config.norm_eps, bias=True)
        self.widened = nn.Linear(width, config.hidden) if config.shape == "albert" else None
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(1 if config.shape == "albert" else config.layers))

    def forward(self, rows: Rows, *, dropout: Dropout, words: Tensor | None = None) -> Tensor:
        position = rows.position + self.first_position if self.first_position else rows.position
        x = F.embedding(rows.token_ids, self.word_embeddings if words is None else words)
        x = x + F.embedding(position, self.position_embeddings) + self.token_type_embeddings[0]
        x = dropout(self.embedding_norm(x))
        if self.widened is not None:
            x = self.widened(x).to(x.dtype)
        bias, read = attention_bias(rows.sequence, compute_dtype(x), rows.position, rows.causal_from), x
        for number in range(self.passes):
            x, read = self.layers[number % len(self.layers)](x, read, bias, dropout)
        return x


class ModernBertLayer(nn.Module):
    """One pre-norm layer. `wi` gives the value, then the gate, of GeGLU; or experts replace it. The first attention has no norm."""

    def __init__(self, config: EncoderConfig, *, first: bool) -> None:
        super().__init__()
        self.heads = config.heads
        if not first:
            self.attention_norm = Norm(config.hidden, config.norm_eps, bias=False)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.attention_output = nn.Linear(config.hidden, config.hidden, bias=False)
        self.output_norm = Norm(config.hidden, config.norm_eps, bias=False)
        self.experts = Experts(config) if config.shape == "moe" else None
        if self.experts is None:
            self.wi = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
            self.output = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(
        self, x: Tensor, branch: Tensor | None, bias: Tensor, rotation: Rotation, dropout: Dropout, sequence: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual stream, and the branch to be added to it (None before the first layer) -> both after this layer, and the balance
        loss of its experts, if any.
        """
        x, read = (x, x) if branch is None else self.attention_norm.after_sum(x, branch)
        attended = self.attention_output(attend(self.qkv(read), bias, rotation, self.heads, dropout.attention()))
        x, read = self.output_norm.after_sum(x, dropout(attended))
        if self.experts is not None:
            mixed, balance = self.experts(read, sequence)
            return x, dropout(mixed), balance
        return x, dropout(self.output(geglu(self.wi(read)))), None


class ModernBertEncoder(nn.Module):
    """Packed rows -> hidden states (R, L, D) after the final norm; with experts also their balance loss, a mean over layers and a sum over
    sequences.
    """

    def __init__(self, config: EncoderConfig, vocab_size: int) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.rope_theta, self.local_theta = config.rope_theta, config.local_theta
        self.global_every, self.reach = config.global_every, config.local_window // 2
        self.word_embeddings = nn.Parameter(torch.empty(vocab_size, config.hidden))
        self.embedding_norm = Norm(config.hidden, config.norm_eps, bias=False)
        self.layers = nn.ModuleList(ModernBertLayer(config, first=index == 0) for index in range(config.layers))
        self.final_norm = Norm(config.hidden, config.norm_eps, bias=False)

    def forward(self, rows: Rows, *, dropout: Dropout, words: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = dropout(self.embedding_norm(F.embedding(rows.token_ids, self.word_embeddings if words is None else words)))
        dtype, position = compute_dtype(x), rows.position
        whole = attention_bias(rows.sequence, dtype, position, rows.causal_from), self.rotation(position, self.rope_theta)
        window = whole
        if self.global_every > 1:
            window = attention_window(whole[0], position, reach=self.reach), self.rotation(position, self.local_theta)
        branch: Any = None
        balances: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            bias, rotation = window if index % self.global_every else whole
            x, branch, balance = layer(x, branch, bias, rotation, dropout, rows.sequence)
            balances += [] if balance is None else [balance]
        normed: Tensor = self.final_norm.after_sum(x, branch)[1]
        return (normed, torch.stack(balances).mean()) if balances else normed

    def rotation(self, position: Tensor, theta: float) -> Rotation:
        """cos and sin of position x frequency for half a head, (R, L, 1, head_size / 2) each; made once and shared by layers."""
        exponent = torch.arange(0, self.head_size, 2, dtype=torch.float32, device=position.device) / self.head_size
        angle = position[..., None, None].float() * (1.0 / theta**exponent)
        return Rotation(angle.cos(), angle.sin())


def attention_bias(sequence: Tensor, dtype: torch.dtype, position: Tensor, causal_from: Tensor | None = None) -> Tensor:
    """(R, 1, L, L): 0 where two tokens belong to the same sequence, -inf elsewhere. Padding (-1) is one sequence per row.

    causal_from: (S,) or None; only a token itself and later ones attend to a token at or beyond that position of its sequence.
    """
    visible = sequence[:, None, :, None] == sequence[:, None, None, :]
    if causal_from is not None:
        start = causal_from[sequence]  # padding, -1, reads the last entry, which does not matter: it attends to itself either way
        visible = visible & ((position < start)[:, None, None, :] | (position[:, None, None, :] <= position[:, None, :, None]))
    return torch.zeros(visible.shape, dtype=dtype, device=sequence.device).masked_fill_(~visible, -math.inf)


def attention_window(bias: Tensor, position: Tensor, *, reach: int) -> Tensor:
    """(R, 1, L, L): `bias`, and -inf where two tokens of a sequence are more than `reach` apart. Padding attends to itself."""
    far = (position[:, None, :, None] - position[:, None, None, :]).abs() > reach
    return bias.masked_fill(far, -math.inf)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: autocast's where it is enabled, else the input's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if _casts(kind) else x.dtype


def _casts(device_type: str) -> bool:
    """Return True inside an autocast for this type of device; that of tensors without data (meta) has none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which products on the device of `x` are exact."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _casts(kind) else nullcontext()


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
