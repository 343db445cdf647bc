"""Distillation: cross-entropy to the label probabilities of a teacher (Hinton et al. 2015)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cramlm.config.terms import Distil
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch
from cramlm.training.terms.base import Counts, LabelTerm, TermLoss, implements


@implements(Distil)
class SoftLabels(LabelTerm):
    """The means over external and over task sequences that have soft labels."""

    def counts(self, batch: Batch | PackedBatch) -> Counts:
        """Sequences with soft labels, by origin."""
        has_soft_labels: Any = (batch.soft_labels > -math.inf).any(1)  # False for NaN
        external, task = int((has_soft_labels & batch.external).sum()), int((has_soft_labels & ~batch.external).sum())
        return {f"distil_{origin}": external if origin == "external" else task for origin in self.configs}

    def loss(self, model: Model, logits: Tensor, batch: PackedBatch, counts: Counts, *, scale: float) -> TermLoss:
        """Soft labels of NaN (a sequence without a teacher's prediction) add nothing."""
        each = -(torch.nan_to_num(batch.soft_labels) * torch.log_softmax(logits, -1))
        weighted, means = torch.zeros((), device=logits.device), {}
        for origin, config in self.configs.items():
            name = f"distil_{origin}"
            if counts[name]:
                mean = (each * (batch.external if origin == "external" else ~batch.external)[:, None]).sum() / counts[name]
                weighted = weighted + scale * config.weight * mean
                means[name] = mean.detach()
        return TermLoss(weighted, means)
