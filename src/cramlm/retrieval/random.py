"""The control: documents drawn without looking at the task, so that a gain of retrieval can be told from a gain of more text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cramlm.data.corpus import Corpus
from cramlm.records import Emit, IntArray
from cramlm.retrieval.ranking import Proposal, one_each


@dataclass(frozen=True, slots=True)
class RandomRetriever:
    """All documents of the corpus in an order that the seed draws."""

    seed: int

    @property
    def key(self) -> Mapping[str, Any]:
        return {"seed": self.seed}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        return Proposal(one_each(draw_documents(len(corpus), len(corpus), seed=self.seed)))


def draw_documents(documents: int, count: int, *, seed: int) -> IntArray:
    """Positions of min(count, documents) different documents in the order drawn; a shorter draw is the beginning of a longer one."""
    generator = np.random.default_rng([seed, 0x52414E44])  # the stream is this purpose's own
    return generator.permutation(documents)[:count].astype(np.int64)
