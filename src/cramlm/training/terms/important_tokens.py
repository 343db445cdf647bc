"""Token importance (Gu et al. 2020): classify tokens of labelled texts by importance to the label, to score text for masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional

from cramlm.config.terms import ImportantTokens
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch
from cramlm.training.masking import SpecialIds
from cramlm.training.terms.base import Counts, PositionTerm, Random, Sampled, TermLoss, implements


@implements(ImportantTokens)
class TokenImportance(PositionTerm):
    """The token head learns the token labels of training/importance.py."""

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """Nothing is masked; `mlm_labels` are 1 for important tokens, 0 for others."""
        batch, values = sampled.packed(self.phase, special), sampled.packed_values(self.phase)
        assert values is not None, f"phase {self.phase.name}: its texts come without token labels"
        labelled = np.flatnonzero(values)
        return replace(batch, masked=labelled, mlm_labels=values[labelled].astype(np.int64) - 1)

    def loss(self, model: Model, hidden: Tensor, batch: PackedBatch, made: Any, counts: Counts, *, scale: float) -> TermLoss:
        """Binary cross-entropy; important tokens have the weight `positive_weight`."""
        positive_weight: float = self.configs["task"].positive_weight
        weights, is_external = self.position_weights(batch, counts, scale=scale)
        important = batch.mlm_labels.float()
        logits = model.place_head(hidden.index_select(0, batch.masked))
        each = functional.binary_cross_entropy_with_logits(logits, important, reduction="none")
        each = each * (1.0 + (positive_weight - 1.0) * important)
        return TermLoss((each * weights).sum(), self.means(each.detach(), is_external, counts))

    def flops(self, model: Model, batch: Batch | PackedBatch) -> float:
        """Of the token head."""
        hidden = model.encoder_config.hidden
        return 2.0 * len(batch.masked) * hidden * (hidden + 1)
