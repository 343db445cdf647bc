"""Shuffled-token detection (Yamaguchi et al. 2021): the tokens that masks would hide are permuted within their text, and the token head
predicts at each position whether its token changed. A token that is replaced by an equal one has not changed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cramlm.config.terms import ShuffledTokens
from cramlm.records import Batch
from cramlm.training.masking import FlatTokens, SpecialIds, choose
from cramlm.training.terms.base import Random, Sampled, TokenHeadTerm, implements


@implements(ShuffledTokens)
class ShuffledTokenDetection(TokenHeadTerm):
    """Binary classification of every token that is not special."""

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """Return the chosen tokens of each sequence in random order; `mlm_labels` are 1 where that changed the token."""
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
