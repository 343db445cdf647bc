"""The equation: what one batch is worth.

    E over external x [ L_mlm(x) ]  +  E over task (x, y) [ mlm_weight * L_mlm(x) + task_weight * L_task(f(x), y) ]

(Yao et al. 2022, equation 1.) rho_2 is `mlm_weight`; rho_1 is how often external text is drawn, see batching.py. Beyond the paper,

    + teacher_weight * E over x with soft labels q [ -sum over labels of q ln f(x) ]

lets text without labels teach the classifier too (Hinton et al. 2015; the teacher is that of evaluation/teacher.py). Each term is a mean
over its own places or sequences, so that it does not fade when a batch holds few of its kind.

L_task is the cross-entropy of the text's label; in a multi-label task or a regression, what task_loss.py says.

L_mlm is the cross-entropy of the tokens that a batch asks for: masked ones, next ones (clm), those of gaps (span), or of which were marked
(marks); which is the batch's business (reading.py). With `rtd` it is the generator's, and each text adds rtd_weight times the mean over its
places of telling replaced tokens, which is what the encoder learns; the classifier then reads the text with replacements. An encoder
with experts adds balance_weight times their balance, a mean over sequences (model/moe.py), whatever `loss_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from cramlm.config import PhaseConfig
from cramlm.model.dropout import Dropout
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch
from cramlm.training.replacing import detection_losses, mark_losses, replace_tokens
from cramlm.training.task_loss import summed_task_loss
from cramlm.training.vocabulary_loss import weighted_cross_entropy

Asked: TypeAlias = Literal["mlm", "clm", "marks"]


@dataclass(frozen=True, slots=True)
class Counts:
    """What the terms of a step are means over: places predicted in external and in task text, sequences with a label, with soft labels;
    all sequences; all places of external and of task text, where replaced tokens are to be told."""

    masked_external: int
    masked_task: int
    labelled: int
    taught: int
    sequences: int = 0
    read_external: int = 0
    read_task: int = 0

    @classmethod
    def of(cls, batch: Batch | PackedBatch, phase: PhaseConfig) -> Counts:
        """Those of a whole batch; 0 where the phase gives a term no weight."""
        external = int(batch.external[batch.sequence.reshape(-1)[batch.masked]].sum())
        read_external = read_task = 0
        if phase.objective == "rtd":
            owner = batch.sequence.reshape(-1)
            read_external = int(batch.external[owner[owner >= 0]].sum())
            read_task = int((owner >= 0).sum()) - read_external if phase.mlm_weight > 0 else 0
        return cls(
            masked_external=external if phase.uses_mlm else 0,
            masked_task=len(batch.masked) - external if phase.mlm_weight > 0 else 0,
            labelled=int((batch.task_labels >= 0).sum()) if phase.uses_labels else 0,
            taught=int((batch.soft_labels.sum(1) > 0).sum()) if phase.uses_teacher else 0,
            sequences=len(batch.first),
            read_external=read_external,
            read_task=read_task,
        )


@dataclass(frozen=True, slots=True)
class Losses:
    """One batch's losses. The terms are detached scalars, in nats, before weights; None where the batch or the phase has none.

    text: what the two `mlm` terms are called in a log.
    """

    total: Tensor
    mlm_external: Tensor | None
    mlm_task: Tensor | None
    task: Tensor | None
    teacher: Tensor | None
    replaced_external: Tensor | None
    replaced_task: Tensor | None
    balance: Tensor | None
    counts: Counts
    text: Asked = "mlm"

    def terms(self) -> dict[str, float]:
        """The terms that are there, as numbers for a log."""
        terms = {f"{self.text}_external": self.mlm_external, f"{self.text}_task": self.mlm_task, "task": self.task, "teacher": self.teacher}
        terms |= {"replaced_external": self.replaced_external, "replaced_task": self.replaced_task, "balance": self.balance}
        named = {"loss": self.total, **terms}
        return {name: float(value.detach()) for name, value in named.items() if value is not None}


def losses(model: Model, batch: PackedBatch, phase: PhaseConfig, counts: Counts | None = None, *, dropout: Dropout | None = None) -> Losses:
    """The weighted losses of a batch, or its share of those of a larger one: then `counts` are the larger one's, and the shares sum up.

    loss_scale "sum": the weighted sum, as in the paper's formula. "mean": divided by the sum of the weights of the terms present, as in the
    released code: an external batch is plain MLM, a task batch (rho_2 * mlm + task) / (rho_2 + 1).

    The vocabulary head runs on masked places only, and not at all in a phase without MLM; the classifier only where labels are learnt. A
    head runs on every share of a batch that has work for it, so that each has gradients for the same parameters.
    Sequences without a label (-1) count in no classification mean. A batch without any term has total 0 (and gradient 0).
    """
    counts = counts or Counts.of(batch, phase)
    replaced = replace_tokens(model, batch, dropout=dropout) if counts.read_external or counts.read_task else None
    hidden, balance = model.hidden_and_balance(batch if replaced is None else replaced.batch, dropout=dropout)
    weighted = (
        (1.0, counts.masked_external),
        (phase.mlm_weight, counts.masked_task),
        (phase.task_weight, counts.labelled),
        (phase.teacher_weight or 0.0, counts.taught),
        (phase.rtd_weight, counts.read_external),
        (phase.rtd_weight * phase.mlm_weight, counts.read_task),
    )
    present = [weight for weight, count in weighted if count]
    scale = 1.0 / sum(present) if phase.loss_scale == "mean" and present else 1.0
    total = torch.zeros((), device=hidden.device)
    mlm_external = mlm_task = task = teacher = replaced_external = replaced_task = None
    if counts.masked_external or counts.masked_task:
        external_weight = scale / max(counts.masked_external, 1)
        task_weight = scale * phase.mlm_weight / max(counts.masked_task, 1)
        is_external = batch.external[batch.sequence.flatten()[batch.masked]]
        weights = torch.where(is_external, external_weight, task_weight)
        if phase.objective == "marks":
            each = mark_losses(model, hidden, batch, phase.marks.positive_weight)
            mlm = (each * weights).sum()
            each = each.detach()
        else:
            vocabulary = model.mlm_logits(hidden, batch.masked) if replaced is None else replaced.logits
            mlm, each = weighted_cross_entropy(vocabulary, batch.mlm_labels, weights)
        total = total + mlm
        mlm_external = (each * is_external).sum() / counts.masked_external if counts.masked_external else None
        mlm_task = (each * ~is_external).sum() / counts.masked_task if counts.masked_task else None
    if replaced is not None:
        each, is_external = detection_losses(model, hidden, replaced)
        each_weight = scale * phase.rtd_weight
        replaced_external = (each * is_external).sum() / counts.read_external if counts.read_external else None
        replaced_task = (each * ~is_external).sum() / counts.read_task if counts.read_task else None
        for term, weight in ((replaced_external, each_weight), (replaced_task, each_weight * phase.mlm_weight)):
            total = total if term is None else total + weight * term
    if counts.labelled or counts.taught:
        logits = model.task_logits(hidden, batch, dropout=dropout).float()
    if counts.labelled:
        task = summed_task_loss(model.kind, logits, batch, label_smoothing=phase.label_smoothing or 0.0) / counts.labelled
        total = total + scale * phase.task_weight * task
    if counts.taught:
        teacher = -(batch.soft_labels * torch.log_softmax(logits, -1)).sum() / counts.taught
        total = total + scale * (phase.teacher_weight or 0.0) * teacher
    if balance is not None and counts.sequences:
        balance = balance / counts.sequences
        total = total + model.encoder_config.balance_weight * balance
    if not present:
        total = hidden.float().sum() * 0.0
    is_causal = len(batch.causal_from) > 0 and phase.objective != "span"
    asked: Asked = "marks" if phase.objective == "marks" else "clm" if is_causal else "mlm"
    return Losses(
        total,
        mlm_external,
        mlm_task,
        task=None if task is None else task.detach(),
        teacher=None if teacher is None else teacher.detach(),
        replaced_external=None if replaced_external is None else replaced_external.detach(),
        replaced_task=None if replaced_task is None else replaced_task.detach(),
        balance=None if balance is None else balance.detach(),
        counts=counts,
        text=asked,
    )
