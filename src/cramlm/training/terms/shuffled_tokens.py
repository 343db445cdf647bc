"""Shuffled-token detection: tell which tokens stand in another token's position (Yamaguchi et al. 2021).

The tokens that masks would hide trade positions within their text instead. A token that meets an equal one has not moved.
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
from cramlm.training.masking import SpecialIds, choose
from cramlm.training.terms.base import Counts, PositionTerm, Random, Sampled, TermLoss, implements


@implements(ShuffledTokens)
class ShuffledTokenDetection(PositionTerm):
    """The token head tells at every position but the special ones whether its token was moved there."""

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """The chosen tokens of each sequence in random order; `mlm_labels` are 1 where that changed the token."""
        batch, masking, rng = sampled.packed(self.phase, special), self.phase.masking, random("masks")
        ids, owner, where = batch.token_ids.ravel(), batch.sequence.ravel(), self.of_origin(batch.external)
        settings: dict[str, Any] = {"sequences": len(batch.first), "where": where, "token_values": sampled.packed_values(self.phase)}
        chosen = choose(ids, owner, masking, rng, special, rate=masking.rate_at(step, self.phase.steps), **settings)
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
