"""The loss of a step, the weighted sum of the terms of its phase; its gradient; its floating-point operations.

    sum over terms and origins of  weight * mean over the term's positions or sequences of that origin

In `tlm` that is the paper's objective (Yao et al. 2022, equation 1: `mlm` on external and, times rho_2, on task text, and `classify`) and
the soft labels of a linear teacher (`distil`). rho_1 is how often external text is sampled (batching.py). Each mean is over its own
positions or sequences, so that a term does not fade when a batch holds few of its kind. An encoder with experts adds balance_weight times
their balance, a mean over sequences (model/encoder.py), whatever `loss_scale`.

On a CPU a batch is split into as many parts as there are threads, and each part runs forward and backward in a thread of its own: most
operations are too small to be split over cores, and the loops of model/cpu_kernels.py are single-threaded (figures: docs/log.md). The
gradients are summed in the order of the parts, so that the same number of threads gives the same bits.

There are two counts of operations. The paper's, 6 x padded tokens x parameters, includes the embedding table and leaves attention out; it
is for comparison with the paper's table. The executed count is of the matrix products that run, a multiply-add as two operations, the
backward pass as twice the forward pass.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cramlm.config.phase import PhaseConfig
from cramlm.config.terms import Origin
from cramlm.model.model import Model, PackedBatch, Precision, autocast
from cramlm.model.operations import Dropout
from cramlm.records import Batch
from cramlm.training import terms as terms  # registers every term
from cramlm.training.masking import SpecialIds
from cramlm.training.sequences import TokenPool, share_of_batch
from cramlm.training.terms.base import Counts, LabelTerm, Random, Sampled, TextTerm, terms_of

SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a batch. means: of each term and origin in it, detached scalars in nats before weights; and the balance of experts."""

    total: Tensor
    means: Mapping[str, Tensor]

    def as_numbers(self) -> dict[str, float]:
        """Return the total (`loss`) and the means, for a log."""
        return {"loss": float(self.total.detach()), **{name: float(value) for name, value in self.means.items()}}


class Objective:
    """The terms of one phase."""

    def __init__(self, phase: PhaseConfig) -> None:
        self.phase = phase
        terms = list(terms_of(phase))
        self.text_terms = [term for term in terms if isinstance(term, TextTerm)]
        self.label_terms = [term for term in terms if isinstance(term, LabelTerm)]
        # A term that applies to some of the steps comes before the one that applies to the rest.
        self.text_terms.sort(key=lambda term: type(term).applies is TextTerm.applies)

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """Return the batch of a step, with the tokens to predict of the text term that applies."""
        for term in self.text_terms:
            if term.of_origin(sampled.external).any() and term.applies(random):
                batch = replace(term.batch(sampled, special, step=step, random=random), term=term.kind)
                return term.with_candidates(batch, special, random=random)
        return sampled.packed(self.phase, special)

    def tokens_read(self, pool: TokenPool, origin: Origin, special: SpecialIds, *, random: Random) -> float:
        """Mean tokens of a sequence in a batch, as its text term arranges it."""
        on = [term for term in self.text_terms if origin in term.configs]
        return on[-1].tokens_read(pool, special, random=random) if on else pool.mean_length

    def counts(self, batch: Batch | PackedBatch) -> Counts:
        """Return the number of positions or sequences of each mean of a whole step, by name; 0 where it has none."""
        counts = {name: count for term in self._terms_in(batch) for name, count in term.counts(batch).items()}
        return Counts({**counts, SEQUENCES: len(batch.first)})

    def flops(self, model: Model, batch: Batch | PackedBatch) -> float:
        """Operations of the matrix products of the heads in a forward pass."""
        text, encoder = self._text_term(batch), model.encoder_config
        of_text = 0.0 if text is None else text.flops(model, batch)
        if not self.phase.learns_labels:
            return of_text
        width, slots = (encoder.hidden, 1) if model.prompt is None else (encoder.embedding_width, model.prompt.slots)
        return 2.0 * slots * len(batch.first) * width * (encoder.hidden + model.labels) + of_text

    def losses(self, model: Model, batch: PackedBatch, counts: Counts | None = None, *, dropout: Dropout | None = None) -> Losses:
        """Return the weighted losses of a batch; with the `counts` of a larger batch its part of those losses, which the parts sum up to.

        loss_scale "sum": the weighted sum, as in the paper's formula. "mean": divided by the sum of the weights of the terms present, as in
        the released code: an external batch has the loss of MLM, a task batch (rho_2 * mlm + classify) / (rho_2 + 1).

        A head runs on every part if the whole batch needs it, so that all parts have gradients for the same parameters. A batch without any
        term has total 0 (and gradient 0).
        """
        counts = self.counts(batch) if counts is None else counts
        text = self._text_term(batch)
        if text is not None and not any(counts[name] for name in text.weights):
            text = None
        read, intermediate = (batch, None) if text is None else text.encoded(model, batch, dropout=dropout)
        hidden, balance = model.hidden_and_balance(read, dropout=dropout)
        labels = [term for term in self.label_terms if any(counts[name] for name in term.weights)]
        present = [weight for term in self._terms_in(batch) for name, weight in term.weights.items() if counts[name]]
        scale = 1.0 / sum(present) if self.phase.loss_scale == "mean" and present else 1.0
        total, means = torch.zeros((), device=hidden.device), dict[str, Tensor]()
        if text is not None:
            term_loss = text.loss(model, hidden, read, intermediate, counts, scale=scale)
            total, means = total + term_loss.weighted, {**means, **term_loss.means}
        if labels:
            logits = model.task_logits(hidden, batch, dropout=dropout).float()
            for term in labels:
                term_loss = term.loss(model, logits, batch, counts, scale=scale)
                total, means = total + term_loss.weighted, {**means, **term_loss.means}
        if balance is not None and counts[SEQUENCES]:
            balance = balance / counts.divisor(SEQUENCES)
            total = total + model.encoder_config.balance_weight * balance
            means["balance"] = balance.detach()
        if not present:
            total = hidden.float().sum() * 0.0  # 0 with a graph, for the backward pass
        return Losses(total, means)

    def _text_term(self, batch: Batch | PackedBatch) -> TextTerm | None:
        return next((term for term in self.text_terms if term.kind == batch.term), None)

    def _terms_in(self, batch: Batch | PackedBatch) -> list[TextTerm | LabelTerm]:
        text = self._text_term(batch)
        return [*([] if text is None else [text]), *self.label_terms]


@functools.lru_cache(maxsize=64)
def objective_of(phase: PhaseConfig) -> Objective:
    """Return the terms of a phase; one object for equal phases."""
    return Objective(phase)


def in_parts(batch: Batch, count: int, device: torch.device | str = "cpu") -> list[PackedBatch]:
    """Split the rows of a batch into at most `count` parts, on a device."""
    count = min(count, len(batch.token_ids))
    return [PackedBatch.of(share_of_batch(batch, number, count), device) for number in range(count)]


def gradients(
    model: Model, parts: Sequence[PackedBatch], phase: PhaseConfig, counts: Counts, *, precision: Precision, dropout_seed: int
) -> Losses:
    """Compute the gradient of the parts together into every parameter's `grad`; return their losses, detached.

    counts: of the whole step. Dropout masks are a function of `dropout_seed` and the part.
    """
    if len(parts) == 1:
        computed = losses_of(model, parts[0], phase, counts, precision, dropout_of(phase, dropout_seed))
        computed.total.backward()  # type: ignore[no-untyped-call]
        return Losses(computed.total.detach(), computed.means)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def of_part(number: int) -> tuple[Losses, Sequence[Tensor | None]]:
        # Returned, not added to `grad` by a backward pass: the threads would add in any order.
        losses = losses_of(model, parts[number], phase, counts, precision, dropout_of(phase, dropout_seed, part=number))
        return losses, torch.autograd.grad(losses.total, trained, allow_unused=True)

    results = list(_threads(len(parts), os.getpid()).map(of_part, range(len(parts))))
    for parameter, *of_parts in zip(trained, *(gradient for _, gradient in results), strict=True):
        for gradient in of_parts:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return summed([losses for losses, _ in results])


def dropout_of(phase: PhaseConfig, seed: int, *, part: int = 0, generator: torch.Generator | None = None) -> Dropout:
    """Return the dropout of a pass over one part of a batch of the phase."""
    return Dropout(phase.dropout or 0.0, seed, attention_rate=phase.attention_dropout, part=part, generator=generator)


def losses_of(model: Model, part: PackedBatch, phase: PhaseConfig, counts: Counts, precision: Precision, dropout: Dropout) -> Losses:
    """Return the losses of a part in a precision, with their gradient."""
    # Without the cache of cast weights: all threads would share it, and no weight is cast twice here.
    with autocast(part.token_ids.device, precision, cache=False):
        return objective_of(phase).losses(model, part, counts, dropout=dropout)


def summed(parts: Sequence[Losses]) -> Losses:
    """Return the losses of a batch from those of its parts; detached."""
    names = dict.fromkeys(name for part in parts for name in part.means)
    means = {name: torch.stack([part.means[name] for part in parts if name in part.means]).sum() for name in names}
    return Losses(torch.stack([part.total.detach() for part in parts]).sum(), means)


@functools.cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Threads whose operations run on one core each. process: part of the cache key, because a forked process inherits no threads."""
    del process
    return ThreadPoolExecutor(count, "gradients", initializer=torch.set_num_threads, initargs=(1,))


BACKWARD_AND_FORWARD = 3  # backward is two products for every one of forward


def count_parameters(model: Model) -> int:
    """Return the number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def paper_flops(parameters: int, *, padded_tokens: int) -> float:
    """6 x padded tokens x parameters (Yao et al. 2022, section 4.1, whose table counts padding)."""
    return 6.0 * padded_tokens * parameters


def executed_flops(model: Model, batch: Batch | PackedBatch, phase: PhaseConfig) -> float:
    """Operations of the matrix products of one update on this batch, the optimizer's own left out.

    Encoder matrices and attention run on all positions, with padding; the vocabulary head on masked positions, the classifier once per
    sequence.
    """
    rows, length = batch.token_ids.shape
    hidden, layers = model.encoder_config.hidden, model.encoder_config.layers
    encoder = 2.0 * model.matmul_parameters * rows * length
    attention = 2.0 * 2 * layers * rows * length * length * hidden
    times = BACKWARD_AND_FORWARD if phase.trains == "all" else BACKWARD_AND_FORWARD - 1  # no gradients of weights
    return times * (encoder + attention + objective_of(phase).flops(model, batch))
