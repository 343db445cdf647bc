"""Replaced-token detection (ELECTRA, Clark et al. 2020): masked tokens are replaced by samples of a small generator, and the encoder
classifies every token as original or replaced.

The generator's distribution is sampled with one uniform number per position from the batch (`chance`), so that a step does not depend on
how it is split over threads and ranks. A sample that equals the original token counts as original. No gradient flows through the samples.
Label terms read the text with its replacements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cramlm.config.terms import ReplacedTokens
from cramlm.model.encoder import Rows
from cramlm.model.model import Model, PackedBatch
from cramlm.model.operations import Dropout, no_dropout, weighted_cross_entropy
from cramlm.records import Batch
from cramlm.training.masking import SpecialIds
from cramlm.training.terms.base import Counts, PositionTerm, Random, Sampled, TermLoss, implements, on

_BLOCK = 1 << 20  # probabilities in memory at a time
_UNIT = 1 << 32  # fixed-point scale of a probability: sums of integers are exact, in any order, on any device


@implements(ReplacedTokens)
class ReplacedTokenDetection(PositionTerm):
    """The generator predicts masked tokens; the token head classifies every token as original or replaced."""

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights of the generator's means and of detection, by origin."""
        detection = {f"detection_{origin}": config.weight * config.detection_weight for origin, config in self.configs.items()}
        return {**super().weights, **detection}

    def counts(self, batch: Batch | PackedBatch) -> Mapping[str, int]:
        """Masked positions, and all positions, by origin."""
        owner = batch.sequence.reshape(-1)
        external = batch.external[owner[owner >= 0]]
        return {**super().counts(batch), **{f"detection_{origin}": int(on(origin, external).sum()) for origin in self.configs}}

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """New masks at every step, with a uniform number for each to sample the replacement."""
        batch = self.mask_batch(sampled, special, step=step, random=random)
        return replace(batch, chance=random("replacements").random(len(batch.masked), dtype=np.float32))

    def encoded(self, model: Model, batch: PackedBatch, *, dropout: Dropout | None) -> tuple[PackedBatch, Replaced]:
        """Return the batch with replaced tokens."""
        replaced = replace_tokens(model, batch, dropout=dropout)
        return replaced.batch, replaced

    def loss(self, model: Model, hidden: Tensor, batch: PackedBatch, intermediate: Any, counts: Counts, *, scale: float) -> TermLoss:
        """Cross-entropy of the generator, and of detection."""
        replaced: Replaced = intermediate
        total, means = torch.zeros((), device=hidden.device), {}
        if any(counts[f"{self.kind}_{origin}"] for origin in self.configs):
            weights, of = self.position_weights(batch, counts, scale=scale)
            generator, each = weighted_cross_entropy(replaced.logits, batch.mlm_labels, weights)
            total, means = total + generator, self.means(each, of, counts)
        each, is_external = detection_losses(model, hidden, replaced)
        for origin in self.configs:
            name = f"detection_{origin}"
            if counts[name]:
                mean = (each * on(origin, is_external)).sum() / counts.divisor(name)
                total = total + scale * self.weights[name] * mean
                means[name] = mean.detach()
        return TermLoss(total, means)

    def flops(self, model: Model, batch: Batch | PackedBatch) -> float:
        """Return the operations of the generator's encoder and vocabulary head, and of detection."""
        if not len(batch.masked):
            return 0.0
        rows, length = batch.token_ids.shape
        config, width = model.encoder_config, model.head_config.generator or 0
        layers = sum(parameter.numel() for name, parameter in model.named_parameters() if name.startswith("generator.encoder.layers."))
        head = 2.0 * len(batch.masked) * width * (width + model.vocab_size) + 2.0 * config.embedding_width * width * model.vocab_size
        attention = 2.0 * 2 * config.layers * rows * length * length * config.hidden
        detection = 2.0 * int((batch.sequence >= 0).sum()) * config.hidden * (config.hidden + 1)
        return head + 2.0 * layers * rows * length + attention * width / config.hidden + detection


@dataclass(frozen=True, slots=True)
class Replaced:
    """batch: with replaced tokens. logits: the generator's, (M, V). is_replaced: (R * L,), True where a token is not the original."""

    batch: PackedBatch
    logits: Tensor
    is_replaced: Tensor


def replace_tokens(model: Model, batch: PackedBatch, *, dropout: Dropout | None = None) -> Replaced:
    """Replace the masked tokens of a batch by samples of the generator."""
    rows = Rows(batch.token_ids, batch.sequence, batch.position)
    logits = model.generator(model.encoder.word_embeddings, rows, batch.masked, dropout=dropout or no_dropout())
    tokens = batch.token_ids.flatten().clone()
    is_replaced = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    samples = sample_tokens(logits.detach(), batch.chance)
    tokens[batch.masked], is_replaced[batch.masked] = samples, samples != batch.mlm_labels
    return Replaced(replace(batch, token_ids=tokens.view(batch.token_ids.shape)), logits, is_replaced)


def sample_tokens(logits: Tensor, chance: Tensor) -> Tensor:
    """Return a token for each row of logits (M, V) from their softmax, by inversion at `chance` (M,) in [0, 1); (M,) int64."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    block = max(1, _BLOCK // logits.shape[1])
    for start in range(0, len(logits), block):
        part = slice(start, start + block)
        ends = (torch.softmax(logits[part].float(), -1).double() * _UNIT).long().cumsum(-1)
        point = (chance[part].double() * ends[:, -1]).long()
        tokens[part] = torch.searchsorted(ends, point[:, None], right=True).squeeze(1)
    return tokens


def detection_losses(model: Model, hidden: Tensor, replaced: Replaced) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of detection at every real token, in nats, and whether each is of external text; both (T,)."""
    owner = replaced.batch.sequence.flatten()
    real = (owner >= 0).nonzero().squeeze(1)
    logits = model.place_head(hidden.index_select(0, real))
    each = functional.binary_cross_entropy_with_logits(logits, replaced.is_replaced[real].float(), reduction="none")
    return each, replaced.batch.external[owner[real]]
