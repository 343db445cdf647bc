"""Causal language modeling: predict the next token, left to right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cramlm.config.terms import Causal
from cramlm.records import Batch, BoolArray
from cramlm.training.masking import SpecialIds
from cramlm.training.terms.base import Random, Sampled, VocabularyTerm, implements, without_labels


@implements(Causal)
class NextTokens(VocabularyTerm):
    """Every position predicts the token after it, in a `share` of the steps."""

    def applies(self, random: Random) -> bool:
        """Return True in a random `share` of the steps."""
        share: float = next(iter(self.configs.values())).share
        return share == 1.0 or random("masked or causal").random() < share

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """Return the batch without masks; each position attends to itself and to earlier ones."""
        batch = sampled.packed(self.phase, special)
        return next_tokens(batch, special, where=self.of_origin(batch.external))


def next_tokens(batch: Batch, special: SpecialIds, *, where: BoolArray) -> Batch:
    """Return the batch with causal attention. where: (S,), True for the sequences that predict the next token, unless that is [UNK].

    The batch has no task labels, because the first position of a sequence attends only to itself.
    """
    ids, owner = batch.token_ids.ravel(), batch.sequence.ravel()
    predicts = np.zeros(len(ids), dtype=np.bool_)
    predicts[:-1] = (owner[:-1] >= 0) & (owner[1:] == owner[:-1]) & where[owner[:-1]]
    if special.unk is not None:
        predicts[:-1] &= ids[1:] != special.unk
    masked = np.flatnonzero(predicts)
    causal_from = np.zeros(len(batch.first), dtype=np.int64)
    return without_labels(replace(batch, masked=masked, mlm_labels=ids[masked + 1], causal_from=causal_from))
