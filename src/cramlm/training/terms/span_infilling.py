"""Span infilling without a decoder (GLM, Du et al. 2022): each span of words is replaced by one [MASK] and predicted after the text.

    [CLS] the ship [MASK] the old harbour [SEP]   [MASK] left    ->    left [SEP]

The spans follow the text in order, each after a [MASK] of its own. Each of these positions predicts the next token of its span; the last
predicts [SEP]. Positions of the text attend to the whole text; positions of the spans attend to the text and to earlier span positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.config.terms import MaskingConfig, SpanInfilling
from cramlm.records import Batch, BoolArray
from cramlm.storage.arrays import evenly
from cramlm.training.masking import FlatTokens, SpecialIds, choose
from cramlm.training.sequences import TokenPool, lay_out
from cramlm.training.terms.base import Random, Sampled, VocabularyTerm, implements, token_values_of

_SAMPLE: Final = 64  # sequences


@implements(SpanInfilling)
class Spans(VocabularyTerm):
    """Positions after the text predict the tokens of its spans."""

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """Return the texts with a [MASK] for each span, followed by their spans."""
        phase, where = self.phase, self.of_origin(sampled.external)
        rate = phase.masking.rate_at(step, phase.steps)
        gapped = with_gaps(sampled.sequences, sampled.token_values, phase.masking, random("masks"), special, where=where, rate=rate)
        batch = sampled.packed(phase, special, sequences=[each.tokens for each in gapped])
        targets = lay_out([each.targets for each in gapped], row_length=phase.row_length)
        text = lay_out([np.full(len(each.tokens), each.text) for each in gapped], row_length=phase.row_length)
        return replace(batch, masked=np.flatnonzero(targets), mlm_labels=targets[targets > 0] - 1, causal_from=text[batch.first])

    def tokens_read(self, pool: TokenPool, special: SpecialIds, *, random: Random) -> float:
        """Return the tokens read per sequence, the spans after the text included; estimated from a sample of the pool."""
        sample = evenly(len(pool), _SAMPLE).tolist()
        begins = [each for number in sample if (each := token_values_of(self.phase, pool, number)) is not None]
        sequences = [pool.sequence(number) for number in sample]
        rate, everywhere = self.phase.masking.rate_at(0, None), np.ones(len(sample), dtype=np.bool_)
        gapped = with_gaps(sequences, begins, self.phase.masking, random("sample"), special, where=everywhere, rate=rate)
        return pool.mean_length * sum(len(each.tokens) for each in gapped) / sum(map(len, sequences))


@dataclass(frozen=True, slots=True)
class Gapped:
    """A sequence with its spans at the end.

    tokens: int64 (n,). targets: int64 (n,), one plus the token that each position predicts; 0 = none. text: length without the spans.
    """

    tokens: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    text: int


def with_gaps(
    sequences: Sequence[npt.NDArray[Any]],
    begins: Sequence[BoolArray],
    config: MaskingConfig,
    rng: np.random.Generator,
    special: SpecialIds,
    *,
    where: BoolArray,
    rate: float,
) -> list[Gapped]:
    """Move spans to the ends of sequences; their lengths and number are those of masks of kind `span`.

    begins: for each sequence (n,), True at the first token of a word. where: (sequences,), False for sequences to leave unchanged.
    """
    lengths = [len(sequence) for sequence in sequences]
    ids, word_begins = np.concatenate(sequences).astype(np.int64), np.concatenate(begins)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    spans = config.model_copy(update={"kind": "span"})
    hidden = np.zeros(len(ids), dtype=np.bool_)
    hidden[choose(FlatTokens(ids, owner, len(lengths), where, word_begins), spans, rng, special, rate=rate)] = True
    opens = hidden & ~np.append(False, hidden[:-1])  # [SEP] and [CLS] keep the spans of two sequences apart
    ends = np.cumsum(lengths)[:-1]
    pieces = zip(np.split(ids, ends), np.split(hidden, ends), np.split(opens, ends), strict=True)
    return [_gapped(*piece, special) for piece in pieces]


def _gapped(ids: npt.NDArray[Any], hidden: BoolArray, opens: BoolArray, special: SpecialIds) -> Gapped:
    text = np.where(opens, special.mask, ids)[~hidden | opens]
    inside, first = ids[hidden], np.flatnonzero(opens[hidden])
    end = np.insert(inside, first, special.mask)
    following = np.insert(inside, np.append(first[1:], len(inside)), special.sep) if len(first) else inside
    targets = np.concatenate([np.zeros(len(text), dtype=np.int64), following + 1])
    return Gapped(np.concatenate([text, end]), targets, len(text))
