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

The modules here have uninitialised weights; the initial ones are in initialisation.py.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias, assert_never

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from cramlm.config.run import EncoderConfig
from cramlm.model.operations import Dropout, Rotation, add_norm, attend, geglu, gelu, linear, norm_of_sum


class Expert(nn.Module):
    """A gated feed-forward part, (N, D) -> (N, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.wi = Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.output = Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(geglu(self.wi(x)))
        return result


class Experts(nn.Module):
    """(R, L, D) -> (R, L, D) through each token's expert, and the sum over sequences of their balance loss.

    sequence: (R, L), -1 = padding, which is left out of the balance loss.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.router = Linear(config.hidden, config.experts, bias=False)
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


class Linear(nn.Linear):
    """A linear layer whose product is `operations.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


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
        self.qkv = Linear(config.hidden, 3 * config.hidden)
        self.attention_output = Linear(config.hidden, config.hidden)
        self.attention_norm = Norm(config.hidden, config.norm_eps, bias=True)
        self.intermediate = Linear(config.hidden, config.intermediate)
        self.output = Linear(config.intermediate, config.hidden)
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
        self.widened = Linear(width, config.hidden) if config.shape == "albert" else None
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
        self.qkv = Linear(config.hidden, 3 * config.hidden, bias=False)
        self.attention_output = Linear(config.hidden, config.hidden, bias=False)
        self.output_norm = Norm(config.hidden, config.norm_eps, bias=False)
        self.experts = Experts(config) if config.shape == "moe" else None
        if self.experts is None:
            self.wi = Linear(config.hidden, 2 * config.intermediate, bias=False)
            self.output = Linear(config.intermediate, config.hidden, bias=False)

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
