"""What a step asks of the text that it draws, by the objective of its phase: which places predict which tokens, and what each place sees.

mlm      masked tokens (masking.py)
rtd      the same, by a generator, with a number per place that says which of its guesses is taken (replacing.py)
clm      every place predicts the token after it; places see those up to themselves
hybrid   mlm or clm, drawn for each step (GPT-BERT, Charpentier and Samuel 2024, but masked tokens are predicted in their own places)
marks    nothing is hidden; of every word of a labelled text, whether it was marked (importance.py)
span     [CLS] the ship [MASK] the old harbour [SEP]   [MASK] left    ->    left [SEP]
         A span becomes one [MASK]. The spans follow at the end, in order, each behind a [MASK] of its own, and each place there predicts
         the next token of its span, [SEP] after the last. The text sees all of itself; the places at the end see it, and one another
         up to themselves. That is infilling as an encoder can do it, without a decoder: GLM's blanks (Du et al. 2022) on this stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.config import MaskingConfig, PhaseConfig
from cramlm.records import Batch, BoolArray, FloatArray, IntArray
from cramlm.training.masking import SpecialIds, choose, mask
from cramlm.training.packing import beside, pack


@dataclass(frozen=True, slots=True)
class Drawn:
    """The sequences of a step. told: for each token of each, what the phase must know of it (`TokenPool.told`); empty where it needs
    nothing. The rest as in `Batch`.
    """

    sequences: Sequence[npt.NDArray[Any]]
    told: Sequence[npt.NDArray[Any]]
    labels: IntArray
    external: BoolArray
    soft_labels: FloatArray
    targets: FloatArray


def ask(drawn: Drawn, phase: PhaseConfig, special: SpecialIds, *, step: int, chance: Callable[[str], np.random.Generator]) -> Batch:
    """The batch of a step, with something to predict wherever text has weight. chance: a generator for each purpose."""
    weighs = drawn.external | (phase.mlm_weight > 0)
    rate = phase.masking.rate_at(step, phase.steps)
    if phase.objective == "span" and weighs.any():
        gapped = with_gaps(drawn.sequences, drawn.told, phase.masking, chance("masks"), special, where=weighs, rate=rate)
        batch = _packed([each.tokens for each in gapped], drawn, phase, special)
        targets = beside([each.targets for each in gapped], row_length=phase.row_length)
        text = beside([np.full(len(each.tokens), each.text) for each in gapped], row_length=phase.row_length)
        return replace(batch, masked=np.flatnonzero(targets), mlm_labels=targets[targets > 0] - 1, causal_from=text[batch.first])
    batch = _packed(drawn.sequences, drawn, phase, special)
    where = batch.external | (phase.mlm_weight > 0)
    if not where.any():
        return batch
    if phase.objective == "clm" or (phase.objective == "hybrid" and chance("masked or causal").random() < phase.causal_share):
        return next_tokens(batch, special, where=where)
    told = beside(drawn.told, row_length=phase.row_length) if drawn.told else None
    if phase.objective == "marks":
        assert told is not None
        asked = np.flatnonzero(told)
        return replace(batch, masked=asked, mlm_labels=told[asked].astype(np.int64) - 1)
    batch = mask(batch, phase.masking, chance("masks"), special, where=where, told=told, rate=rate)
    if phase.objective != "rtd":
        return batch
    return replace(batch, chance=chance("replacements").random(len(batch.masked), dtype=np.float32))


def _packed(sequences: Sequence[npt.NDArray[Any]], drawn: Drawn, phase: PhaseConfig, special: SpecialIds) -> Batch:
    return pack(
        sequences,
        labels=drawn.labels,
        external=drawn.external,
        soft_labels=drawn.soft_labels,
        targets=drawn.targets,
        row_length=phase.row_length,
        pad_id=special.pad,
    )


def next_tokens(batch: Batch, special: SpecialIds, *, where: BoolArray) -> Batch:
    """The batch read left to right: each place of the sequences `where` (S,) predicts the token after it, if that is not [UNK].

    Nothing else is learnt of it: task labels are taken away, because a sequence's first place sees only itself.
    """
    ids, owner = batch.token_ids.ravel(), batch.sequence.ravel()
    asked = np.zeros(len(ids), dtype=np.bool_)
    asked[:-1] = (owner[:-1] >= 0) & (owner[1:] == owner[:-1]) & where[owner[:-1]]
    if special.unk is not None:
        asked[:-1] &= ids[1:] != special.unk
    masked = np.flatnonzero(asked)
    return replace(
        batch,
        masked=masked,
        mlm_labels=ids[masked + 1],
        causal_from=np.zeros(len(batch.first), dtype=np.int64),
        task_labels=np.full_like(batch.task_labels, -1),
        soft_labels=np.zeros_like(batch.soft_labels),
    )


@dataclass(frozen=True, slots=True)
class Gapped:
    """A sequence with its spans at the end. targets: what each token predicts, plus one; 0 = nothing. text: its length without the end."""

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
    """Spans taken out of the sequences `where` (one bool each); lengths and number as masks of kind `span` have them."""
    lengths = [len(sequence) for sequence in sequences]
    ids, told = np.concatenate(sequences).astype(np.int64), np.concatenate(begins)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    spans = config.model_copy(update={"kind": "span"})
    places = choose(ids, owner, spans, rng, special, sequences=len(lengths), where=where, told=told, rate=rate)
    hidden = np.zeros(len(ids), dtype=np.bool_)
    hidden[places] = True
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
