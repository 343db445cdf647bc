"""Masked language modeling: predict the tokens that the phase's masks hide."""

from __future__ import annotations

from cramlm.config.terms import Mlm
from cramlm.records import Batch
from cramlm.training.masking import SpecialIds
from cramlm.training.terms.base import Random, Sampled, VocabularyTerm, implements


@implements(Mlm)
class MaskedTokens(VocabularyTerm):
    """Masked positions predict the original tokens."""

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """Return the batch with the masks of this step."""
        return self.mask_batch(sampled, special, step=step, random=random)
