"""The loss of a step: the weighted sum of the terms of its phase.

    sum over terms and origins of  weight * mean over the term's positions or sequences of that origin

In `tlm` that is the paper's objective (Yao et al. 2022, equation 1: `mlm` on external and, times rho_2, on task text, and `classify`) and
the soft labels of a linear teacher (`distil`). rho_1 is how often external text is drawn, see batching.py. Each mean is over its own
positions or sequences, so that a term does not fade when a batch holds few of its kind. An encoder with experts adds balance_weight times
their balance, a mean over sequences (model/encoder.py), whatever `loss_scale`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cramlm.config.phase import PhaseConfig
from cramlm.config.terms import Origin
from cramlm.model.kernels.dropout import Dropout
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch
from cramlm.training import terms as terms  # registers every term
from cramlm.training.masking import SpecialIds
from cramlm.training.pools import TokenPool
from cramlm.training.terms.base import Counts, LabelTerm, Random, Sampled, TextTerm, terms_of

SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a batch. means: of each term and origin that it has, detached scalars in nats before weights; and the balance of
    experts.
    """

    total: Tensor
    means: Mapping[str, Tensor]

    def as_numbers(self) -> dict[str, float]:
        """The total (`loss`) and the means, for a log."""
        return {"loss": float(self.total.detach()), **{name: float(value) for name, value in self.means.items()}}


class Objective:
    """The terms of one phase."""

    def __init__(self, phase: PhaseConfig) -> None:
        self.phase = phase
        found = list(terms_of(phase))
        self.text_terms = [term for term in found if isinstance(term, TextTerm)]
        self.label_terms = [term for term in found if isinstance(term, LabelTerm)]
        # A term that reads some of the steps only is tried before the one that reads the rest.
        self.text_terms.sort(key=lambda term: type(term).applies is TextTerm.applies)

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """The batch of a step, with tokens to predict wherever a text term is on the text."""
        for term in self.text_terms:
            if term.of_origin(sampled.external).any() and term.applies(random):
                return replace(term.batch(sampled, special, step=step, random=random), term=term.kind)
        return sampled.packed(self.phase, special)

    def tokens_read(self, pool: TokenPool, origin: Origin, special: SpecialIds, *, random: Random) -> float:
        """Mean tokens of a sequence as it stands in a batch."""
        on = [term for term in self.text_terms if origin in term.configs]
        return on[-1].tokens_read(pool, special, random=random) if on else pool.mean_length

    def counts(self, batch: Batch | PackedBatch) -> Counts:
        """What the means of a whole step are over, by name; 0 where it has nothing of a term."""
        counts = {name: count for term in self._at(batch) for name, count in term.counts(batch).items()}
        return {**counts, SEQUENCES: len(batch.first)}

    def flops(self, model: Model, batch: Batch | PackedBatch) -> float:
        """Operations of the matrix products of the heads in a forward pass."""
        text = self._text_term(batch)
        width, slots = (
            (model.encoder_config.hidden, 1) if model.prompt is None else (model.encoder_config.embedding_width, model.prompt.slots)
        )
        labels = 2.0 * slots * len(batch.first) * width * (model.encoder_config.hidden + model.labels) if self.phase.learns_labels else 0.0
        return labels + (0.0 if text is None else text.flops(model, batch))

    def losses(self, model: Model, batch: PackedBatch, counts: Counts | None = None, *, dropout: Dropout | None = None) -> Losses:
        """The weighted losses of a batch, or its share of those of a larger one: then `counts` are the larger one's, and the shares sum up.

        loss_scale "sum": the weighted sum, as in the paper's formula. "mean": divided by the sum of the weights of the terms present, as in
        the released code: an external batch is plain MLM, a task batch (rho_2 * mlm + classify) / (rho_2 + 1).

        A head runs on every share of a batch that has work for it, so that each has gradients for the same parameters; the vocabulary head
        runs on predicted positions only, the classifier only where labels are learnt. A batch without any term has total 0 (and gradient
        0).
        """
        counts = self.counts(batch) if counts is None else counts
        text = self._text_term(batch)
        if text is not None and not any(counts[name] for name in text.weights):
            text = None
        read, made = (batch, None) if text is None else text.encoded(model, batch, dropout=dropout)
        hidden, balance = model.hidden_and_balance(read, dropout=dropout)
        labels = [term for term in self.label_terms if any(counts[name] for name in term.weights)]
        present = [weight for term in self._at(batch) for name, weight in term.weights.items() if counts[name]]
        scale = 1.0 / sum(present) if self.phase.loss_scale == "mean" and present else 1.0
        total, means = torch.zeros((), device=hidden.device), dict[str, Tensor]()
        if text is not None:
            found = text.loss(model, hidden, read, made, counts, scale=scale)
            total, means = total + found.weighted, {**means, **found.means}
        if labels:
            logits = model.task_logits(hidden, batch, dropout=dropout).float()
            for term in labels:
                found = term.loss(model, logits, batch, counts, scale=scale)
                total, means = total + found.weighted, {**means, **found.means}
        if balance is not None and counts[SEQUENCES]:
            balance = balance / counts[SEQUENCES]
            total = total + model.encoder_config.balance_weight * balance
            means["balance"] = balance.detach()
        if not present:
            total = hidden.float().sum() * 0.0
        return Losses(total, means)

    def _text_term(self, batch: Batch | PackedBatch) -> TextTerm | None:
        return next((term for term in self.text_terms if term.kind == batch.term), None)

    def _at(self, batch: Batch | PackedBatch) -> list[TextTerm | LabelTerm]:
        """The terms of this batch."""
        text = self._text_term(batch)
        return [*([] if text is None else [text]), *self.label_terms]


@functools.lru_cache(maxsize=64)
def objective_of(phase: PhaseConfig) -> Objective:
    """The terms of a phase; one object for equal phases."""
    return Objective(phase)
