"""Replaced-token detection: a generator's guesses stand where tokens were masked; the encoder tells which tokens are not the text's.

Which guess is taken is drawn from the generator's distribution by one number per place that the batch brings along, so that a step does not
depend on how it is dealt over threads and ranks. A guess that is right counts as the text's own. No gradient flows through the guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from cramlm.model.dropout import Dropout, no_dropout
from cramlm.model.model import Model, PackedBatch

_BLOCK = 1 << 20  # probabilities that are summed up at a time
_PARTS = 1 << 32  # of a probability, so that their sums are whole numbers: exact, in any order, on any device


@dataclass(frozen=True, slots=True)
class Replaced:
    """batch: with guesses at its masked places. logits: the generator's, (M, V). wrong: where a token is not the text's, (R * L,)."""

    batch: PackedBatch
    logits: Tensor
    wrong: Tensor


def replace_tokens(model: Model, batch: PackedBatch, *, dropout: Dropout | None = None) -> Replaced:
    """Let the generator guess the masked tokens of a batch."""
    rows = (batch.token_ids, batch.sequence, batch.position)
    logits = model.generator(model.encoder.word_embeddings, *rows, batch.masked, dropout=dropout or no_dropout())
    tokens = batch.token_ids.flatten().clone()
    wrong = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    guesses = drawn(logits.detach(), batch.chance)
    tokens[batch.masked], wrong[batch.masked] = guesses, guesses != batch.mlm_labels
    return Replaced(replace(batch, token_ids=tokens.view(batch.token_ids.shape)), logits, wrong)


def drawn(logits: Tensor, chance: Tensor) -> Tensor:
    """A token for each row of logits (M, V) from their softmax, as the numbers `chance` (M,) in [0, 1) fall; (M,) int64."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    block = max(1, _BLOCK // logits.shape[1])
    for start in range(0, len(logits), block):
        part = slice(start, start + block)
        ends = (torch.softmax(logits[part].float(), -1).double() * _PARTS).long().cumsum(-1)
        point = (chance[part].double() * ends[:, -1]).long()
        tokens[part] = torch.searchsorted(ends, point[:, None], right=True).squeeze(1)
    return tokens


def detection_losses(model: Model, hidden: Tensor, replaced: Replaced) -> tuple[Tensor, Tensor]:
    """Cross-entropy of 'was this token replaced?' at every real place, in nats, and whether each is a place of external text; both (T,)."""
    owner = replaced.batch.sequence.flatten()
    real = (owner >= 0).nonzero().squeeze(1)
    logits = model.place_head(hidden.index_select(0, real))
    each = functional.binary_cross_entropy_with_logits(logits, replaced.wrong[real].float(), reduction="none")
    return each, replaced.batch.external[owner[real]]


def mark_losses(model: Model, hidden: Tensor, batch: PackedBatch, positive_weight: float) -> Tensor:
    """Cross-entropy of 'was this token marked?' at the places that a batch asks about, in nats; marked ones weigh more. (M,)."""
    marked = batch.mlm_labels.float()
    logits = model.place_head(hidden.index_select(0, batch.masked))
    each = functional.binary_cross_entropy_with_logits(logits, marked, reduction="none")
    return each * (1.0 + (positive_weight - 1.0) * marked)
