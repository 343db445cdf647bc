"""Labels' scores out of the vocabulary head, at the masks of a pattern; and the learned vectors of a soft prompt.

    score of a label  =  sum over slots of the mean, over its words there, of their vocabulary logits

The logarithm of what the vocabulary's probabilities sum up to is the same for all labels of a text, so that a softmax over the labels is
as if log-probabilities were added: PET's score for one slot (Schick and Schütze 2021), PTR's product of sub-prompts for several (Han et
al. 2021). A mean of logits is one product with the mean of the words' embeddings, so that words cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from cramlm.config import EncoderConfig
from cramlm.model.prompts import Prompt


class PromptHead(nn.Module):
    """vectors: (vectors, width of word embeddings), read as the tokens behind the vocabulary; None where there are none."""

    def __init__(self, prompt: Prompt, config: EncoderConfig) -> None:
        super().__init__()
        self.prompt = prompt
        self.vectors = nn.Parameter(torch.empty(prompt.vectors, config.embedding_width)) if prompt.vectors else None
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def words(self, embedding: Tensor) -> Tensor | None:
        """The table of embeddings to read with the vectors; None where it is the vocabulary's own."""
        return None if self.vectors is None else torch.cat([embedding, self.vectors])

    def forward(self, states: Tensor, embedding: Tensor, bias: Tensor) -> Tensor:
        """Transformed states of all masks, (S * slots, E), those of a sequence side by side -> scores (S, labels)."""
        ids, shares = self._table(embedding.device)
        words = torch.einsum("klw,we->kle", shares, embedding.index_select(0, ids))
        biases = torch.einsum("klw,w->l", shares, bias.index_select(0, ids))
        slots = states.view(-1, self.prompt.slots, states.shape[1])
        return torch.einsum("ske,kle->sl", slots, words) + biases + torch.tensor(self.prompt.shift or 0.0, device=states.device)

    def shift(self, values: Sequence[float]) -> None:
        """Add to the scores of the labels."""
        before = self.prompt.shift or (0.0,) * len(values)
        self.prompt = replace(self.prompt, shift=tuple(one + other for one, other in zip(before, values, strict=True)))

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The distinct tokens (W,), and what each counts in the mean of (slot, label, token)."""
        if device not in self._tables:
            ids = sorted({number for slots in self.prompt.ids for slot in slots for number in slot})
            shares = torch.zeros(self.prompt.slots, len(self.prompt.ids), len(ids))
            for label, slots in enumerate(self.prompt.ids):
                for slot, numbers in enumerate(slots):
                    for number in numbers:
                        shares[slot, label, ids.index(number)] += 1 / len(numbers)
            self._tables[device] = torch.tensor(ids, device=device), shares.to(device)
        return self._tables[device]
