"""The loss of the labels for each kind of task; equal to that of transformers' own classes.

classification    cross-entropy of the text's label
multi-label       binary cross-entropy of every label, averaged over labels
regression        squared error of the number, in standard deviations of the training numbers (records.Scale)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from cramlm.config.terms import Classify
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch, TaskKind
from cramlm.training.terms.base import Counts, LabelTerm, TermLoss, implements


@implements(Classify)
class GoldLabels(LabelTerm):
    """The mean loss of the sequences that have a label."""

    def counts(self, batch: Batch | PackedBatch) -> Mapping[str, int]:
        """Return the number of sequences with a label."""
        return {"classify_task": int((batch.task_labels >= 0).sum())}

    def loss(self, model: Model, logits: Tensor, batch: PackedBatch, counts: Counts, *, scale: float) -> TermLoss:
        """Sequences without a label (-1) are left out."""
        config = self.configs["task"]
        mean = summed_task_loss(model.kind, logits, batch, label_smoothing=config.label_smoothing) / counts.divisor("classify_task")
        return TermLoss(scale * config.weight * mean, {"classify_task": mean.detach()})


def summed_task_loss(kind: TaskKind, logits: Tensor, batch: PackedBatch, *, label_smoothing: float) -> Tensor:
    """Return the loss of logits (S, labels), float32, summed over the sequences that have a label: a scalar."""
    match kind:
        case "classification":
            return functional.cross_entropy(logits, batch.task_labels, ignore_index=-1, label_smoothing=label_smoothing, reduction="sum")
        case "multi-label":
            each = functional.binary_cross_entropy_with_logits(logits, batch.targets, reduction="none").mean(dim=1)
        case "regression":
            each = (logits - batch.targets).square().mean(dim=1)
        case _:
            assert_never(kind)
    return torch.where(batch.task_labels >= 0, each, 0.0).sum()
