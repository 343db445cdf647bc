"""Shuffled-token detection (Yamaguchi et al. 2021): the tokens that masks would hide are permuted within their text, and the token head
predicts at each position whether its token changed. A token that is replaced by an equal one has not changed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional

from cramlm.config.terms import ShuffledTokens
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch
from cramlm.training.masking import FlatTokens, SpecialIds, choose
from cramlm.training.terms.base import Counts, PositionTerm, Random, Sampled, TermLoss, implements


@implements(ShuffledTokens)
class ShuffledTokenDetection(PositionTerm):
    """Binary classification of every token that is not special."""

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """The chosen tokens of each sequence in random order; `mlm_labels` are 1 where that changed the token."""
        batch, masking, rng = sampled.packed(self.phase, special), self.phase.masking, random("masks")
        ids, owner, where = batch.token_ids.ravel(), batch.sequence.ravel(), self.of_origin(batch.external)
        tokens = FlatTokens(ids, owner, len(batch.first), where, sampled.packed_values(self.phase))
        chosen = choose(tokens, masking, rng, special, rate=masking.rate_at(step, self.phase.steps))
        order = np.lexsort((rng.random(len(chosen)), owner[chosen]))  # sequences stay together, in a random order within
        shuffled = ids.copy()
        shuffled[chosen[np.argsort(owner[chosen], kind="stable")]] = ids[chosen[order]]
        predicts = np.flatnonzero((owner >= 0) & where[owner] & ~np.isin(ids, special.all))
        labels = (shuffled != ids)[predicts].astype(np.int64)
        return replace(batch, token_ids=shuffled.reshape(batch.token_ids.shape), masked=predicts, mlm_labels=labels)

    def loss(self, model: Model, hidden: Tensor, batch: PackedBatch, made: Any, counts: Counts, *, scale: float) -> TermLoss:
        """Binary cross-entropy."""
        weights, is_external = self.position_weights(batch, counts, scale=scale)
        logits = model.place_head(hidden.index_select(0, batch.masked))
        each = functional.binary_cross_entropy_with_logits(logits, batch.mlm_labels.float(), reduction="none")
        return TermLoss((each * weights).sum(), self.means(each.detach(), is_external, counts))

    def flops(self, model: Model, batch: Batch | PackedBatch) -> float:
        """Of the token head."""
        hidden = model.encoder_config.hidden
        return 2.0 * len(batch.masked) * hidden * (hidden + 1)
