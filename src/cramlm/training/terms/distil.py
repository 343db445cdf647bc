"""Distillation: the loss of the labels (classify.py) with the outputs of a teacher in place of gold labels (Hinton et al. 2015).

classification    cross-entropy to the teacher's distribution over the labels
multi-label       binary cross-entropy to its probability of every label, averaged over labels
regression        squared error to its number, in standard deviations of the training numbers (records.Scale)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, assert_never

import torch
from torch import Tensor
from torch.nn import functional

from cramlm.config.terms import Distil
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch, TaskKind
from cramlm.training.terms.base import Counts, LabelTerm, TermLoss, implements, on


@implements(Distil)
class SoftLabels(LabelTerm):
    """The means over external and over task sequences that have soft labels."""

    def counts(self, batch: Batch | PackedBatch) -> Mapping[str, int]:
        """Sequences with soft labels, by origin."""
        has_soft_labels: Any = (batch.soft_labels > -math.inf).any(1)  # False for NaN
        return {f"distil_{origin}": int((has_soft_labels & on(origin, batch.external)).sum()) for origin in self.configs}

    def loss(self, model: Model, logits: Tensor, batch: PackedBatch, counts: Counts, *, scale: float) -> TermLoss:
        """Soft labels of NaN, where the teacher predicts nothing, add nothing."""
        predicted = batch.soft_labels > -math.inf
        each = torch.where(predicted, soft_losses(model.kind, logits, torch.nan_to_num(batch.soft_labels)), 0.0)
        weighted, means = torch.zeros((), device=logits.device), {}
        for origin, config in self.configs.items():
            name = f"distil_{origin}"
            if counts[name]:
                mean = (each * on(origin, batch.external)[:, None]).sum() / counts.divisor(name)
                weighted = weighted + scale * config.weight * mean
                means[name] = mean.detach()
        return TermLoss(weighted, means)


def soft_losses(kind: TaskKind, logits: Tensor, soft_labels: Tensor) -> Tensor:
    """Return the part of each label in the loss of each sequence, (S, labels), for logits (S, labels), float32."""
    match kind:
        case "classification":
            return -(soft_labels * torch.log_softmax(logits, -1))
        case "multi-label":
            return functional.binary_cross_entropy_with_logits(logits, soft_labels, reduction="none") / logits.shape[1]
        case "regression":
            return (logits - soft_labels).square()
        case _:
            assert_never(kind)
