"""DSIR: data selection by importance resampling (Xie, Santurkar, Ma, Liang 2023), as its released code computes it.

With p the share of every bucket of hashed n-grams (text/ngrams.py) among the training texts, q the same over the whole corpus, and c(x) the
counts of a passage x:

    w(x) = sum over buckets of c(x) * (ln(p + 1e-8) - ln(q + 1e-8))        k passages are drawn without replacement, in proportion to exp w
                                                                          the k largest of w(x) + g, g from Gumbel(0, 1)

So all passages are ranked by w + g at once, and a smaller slice is the beginning of a larger one. Weights of whole passages differ by
hundreds, Gumbel noise by a few: the draw is nearly the order of w. As w is a sum, it depends on the length: where the task is narrow, w
is negative for most passages and short ones win whatever they are about (docs/retrieval.md has figures). `normalise = "length"`
scales w to the average length, which the released code does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.config.retriever import DsirConfig
from cramlm.data.corpus import Corpus
from cramlm.errors import DataError
from cramlm.records import Emit, IntArray
from cramlm.retrieval.ngrams import corpus_ngrams
from cramlm.retrieval.ranking import Proposal, one_each
from cramlm.text.ngrams import Doubles, count, hash_texts, log_probabilities


@dataclass(frozen=True, slots=True)
class DsirRetriever:
    """All passages of the corpus in the order drawn; the score is the log of the importance weight."""

    config: DsirConfig
    store: Path
    seed: int
    threads: int

    @property
    def key(self) -> Mapping[str, Any]:
        return {"seed": self.seed}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        buckets = self.config.buckets
        target = count(hash_texts(texts, buckets=buckets), buckets=buckets)
        if not target.any():
            raise DataError("0 n-grams in the training texts: they hold no characters; DSIR has nothing to aim at")
        parts = list(corpus_ngrams(corpus, self.store, buckets=buckets, threads=self.threads, emit=emit))
        raw = np.sum([counts for _, counts in parts], axis=0)
        gain = log_probabilities(target) - log_probabilities(raw)
        weights = np.concatenate([ngrams.sums(gain) for ngrams, _ in parts])
        if self.config.normalise == "length":
            lengths = np.concatenate([np.diff(ngrams.offsets) for ngrams, _ in parts])
            weights *= lengths.mean() / np.maximum(lengths, 1)
        order = resample(weights, seed=self.seed)
        return Proposal(one_each(order, weights[order].astype(np.float32)))


def resample(log_weights: Doubles, *, seed: int) -> IntArray:
    """All places in the order of a draw without replacement in proportion to exp(log_weights); ties by place."""
    noise = np.random.default_rng([seed, 0x44534952]).gumbel(size=len(log_weights))  # the stream is this purpose's own
    return np.argsort(-(log_weights + noise), kind="stable").astype(np.int64)
