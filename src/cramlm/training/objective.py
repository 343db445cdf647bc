"""The equation: what one batch is worth.

    E over external x [ L_mlm(x) ]  +  E over task (x, y) [ mlm_weight * L_mlm(x) + task_weight * L_task(f(x), y) ]

(Yao et al. 2022, equation 1.) rho_2 is `mlm_weight`; rho_1 is how often external text is drawn, see batching.py. Each of the
three terms is a mean over its own places or sequences, so that a term does not fade when a batch holds few of its kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cramlm.config import PhaseConfig
from cramlm.model.model import Model, PackedBatch


@dataclass(frozen=True, slots=True)
class Losses:
    """One batch's losses. The terms are detached scalars, in nats, before weights; None where the batch or the phase has none.

    masked_external, masked_task: places predicted. labelled: sequences classified.
    """

    total: Tensor
    mlm_external: Tensor | None
    mlm_task: Tensor | None
    task: Tensor | None
    masked_external: int
    masked_task: int
    labelled: int

    def terms(self) -> dict[str, float]:
        """The terms that are there, as numbers for a log."""
        named = {"loss": self.total, "mlm_external": self.mlm_external, "mlm_task": self.mlm_task, "task": self.task}
        return {name: float(value) for name, value in named.items() if value is not None}


def losses(model: Model, batch: PackedBatch, phase: PhaseConfig) -> Losses:
    """The weighted losses of a batch.

    loss_scale "sum": the weighted sum, as in the paper's formula. "mean": divided by the sum of the weights of the terms present, as in the
    released code: an external batch is plain MLM, a task batch (rho_2 * mlm + task) / (rho_2 + 1).

    The vocabulary head runs on masked places only, and not at all in a phase without MLM; the classifier only where labels are learnt.
    Sequences without a label (-1) count in no classification mean. A batch without any term has total 0 (and gradient 0).
    """
    hidden = model.hidden(batch, dropout=phase.dropout)
    weighted: list[tuple[float, Tensor]] = []

    mlm_external = mlm_task = None
    masked_external = masked_task = 0
    if phase.uses_mlm and batch.masked.numel() > 0:
        each = functional.cross_entropy(model.mlm_logits(hidden, batch.masked).float(), batch.mlm_labels, reduction="none")
        is_external = batch.external[batch.sequence.flatten()[batch.masked]]
        masked_external = int(is_external.sum())
        masked_task = len(each) - masked_external
        # A product and a sum over all places rather than an index: its gradient needs no scatter, and is the same on every device.
        if masked_external:
            mlm_external = (each * is_external).sum() / masked_external
            weighted.append((1.0, mlm_external))
        if masked_task and phase.mlm_weight > 0:
            mlm_task = (each * ~is_external).sum() / masked_task
            weighted.append((phase.mlm_weight, mlm_task))

    task = None
    labelled = int((batch.task_labels >= 0).sum()) if phase.uses_labels else 0
    if labelled:
        logits = model.task_logits(hidden, batch, dropout=phase.classifier_dropout).float()
        task = functional.cross_entropy(logits, batch.task_labels, ignore_index=-1, label_smoothing=phase.label_smoothing)
        weighted.append((phase.task_weight, task))

    if weighted:
        total = torch.stack([weight * term for weight, term in weighted]).sum()
        if phase.loss_scale == "mean":
            total = total / sum(weight for weight, _ in weighted)
    else:
        total = hidden.float().sum() * 0.0
    return Losses(
        total=total,
        mlm_external=_detached(mlm_external),
        mlm_task=_detached(mlm_task),
        task=_detached(task),
        masked_external=masked_external,
        masked_task=masked_task,
        labelled=labelled,
    )


def _detached(term: Tensor | None) -> Tensor | None:
    return None if term is None else term.detach()
