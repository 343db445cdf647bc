"""Dynamic masks: which tokens of a batch are hidden, what replaces them, what is to be predicted.

A sequence has n = max(1, round(rate * maskable tokens)) masks, instead of each token being masked with probability `rate`: the loss has
the same number of terms at every step, and no sequence is without one. Positions and replacements are sampled anew at every step (RoBERTa's
dynamic masking).

    random            n tokens
    span              runs of words of geometric length (at most 10 words), in random order until n tokens are hidden; the last is cut
    whole-word        words in random order, those whose middle lies before the n-th token: n on average, and no word hidden in part
    phrase            the same with collocations as words
    scored            the tokens with the highest scores above 0 (terms/important_tokens.py), at most n
    scored-control    as many as that, at random

Runs, words and phrases are units of tokens; one vectorised choice among units serves all kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.config.terms import MaskingConfig
from cramlm.records import Batch, BoolArray, IntArray

LONGEST_SPAN = 10  # words


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token ids that are not text. `unk` is never masked and never a random token; None if the vocabulary has none."""

    pad: int
    cls: int
    sep: int
    mask: int
    vocab_size: int
    unk: int | None = None

    @property
    def all(self) -> tuple[int, ...]:
        """The special ids in rising order, each once."""
        return tuple(sorted({self.pad, self.cls, self.sep, self.mask} | ({self.unk} if self.unk is not None else set())))


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """The tokens of a step's sequences, end to end or packed.

    ids: (N,). owner: (N,), the sequence of each token, contiguous, -1 = padding. sequences: their number S. where: (S,), which of them
    get masks; None = all. values: (N,), for span, whole-word and phrase True where a word (a collocation) begins, for scored and
    scored-control the scores, above 0 for tokens to hide; None for random.
    """

    ids: IntArray
    owner: IntArray
    sequences: int
    where: BoolArray | None = None
    values: npt.NDArray[Any] | None = None


def mask(
    batch: Batch,
    config: MaskingConfig,
    rng: np.random.Generator,
    special: SpecialIds,
    *,
    where: BoolArray | None = None,
    token_values: npt.NDArray[Any] | None = None,
    rate: float | None = None,
) -> Batch:
    """Return the batch with masks: new `token_ids`, `masked` (rising) and `mlm_labels`, everything else shared with `batch`.

    Of the chosen tokens, `mask_share` become [MASK], `random_share` a uniformly sampled ordinary token (possibly the original), the rest
    stay. Special tokens and padding are never chosen; a sequence without a maskable token (an empty text) gets no mask.

    where, token_values: as in `FlatTokens`, (S,) and (R * L,). rate: None = that of the first step.
    """
    flat = batch.token_ids.ravel()
    tokens = FlatTokens(flat, batch.sequence.ravel(), len(batch.first), where, token_values)
    chosen = choose(tokens, config, rng, special, rate=rate)
    originals = flat[chosen]

    uniform = rng.random(len(chosen))
    replaced = flat.copy()
    replaced[chosen[uniform < config.mask_share]] = special.mask
    randomised = chosen[(uniform >= config.mask_share) & (uniform < config.mask_share + config.random_share)]
    if len(randomised):
        replaced[randomised] = _random_tokens(len(randomised), rng, special)
    return replace(batch, token_ids=replaced.reshape(batch.token_ids.shape), masked=chosen, mlm_labels=originals)


def choose(
    tokens: FlatTokens, config: MaskingConfig, rng: np.random.Generator, special: SpecialIds, *, rate: float | None = None
) -> IntArray:
    """Choose the positions to hide, rising. rate: as in `mask`."""
    ids, owner, values = tokens.ids, tokens.owner, tokens.values
    maskable = (owner >= 0) & (ids < special.vocab_size) & ~np.isin(ids, special.all)  # vectors of a prompt have ids beyond
    if tokens.where is not None:
        maskable &= tokens.where[owner]  # owner -1 (padding) reads the last entry, but is not maskable anyway
    positions = np.flatnonzero(maskable)
    owner = owner[positions]
    available = np.bincount(owner, minlength=tokens.sequences)
    count = np.minimum(np.maximum(1, np.rint((rate or config.rate) * available).astype(np.int64)), available)
    if config.kind == "random":
        return positions[_first_of_each(rng.random(len(positions)), owner, count)]
    assert values is not None, f"masks of kind {config.kind!r} need word begins or scores"
    values = values[positions]
    if config.is_scored:
        count = np.minimum(count, np.maximum(1, np.bincount(owner[values > 0], minlength=tokens.sequences)))
        keys = -values if config.kind == "scored" else rng.random(len(positions))
        return positions[_first_of_each(keys, owner, count)]
    unit = _units(positions, owner, values)
    if config.kind == "span":
        unit = _runs(unit, owner, config.mean_span, rng)
    return positions[_hidden(unit, owner, count, rng, cut=config.kind == "span")]


def _first_of_each(keys: npt.NDArray[np.floating[Any]], owner: IntArray, count: IntArray) -> IntArray:
    """Return the indices, ascending, of the `count` elements of each owner with the lowest keys. owner: ascending."""
    order = np.lexsort((keys, owner))
    available = np.bincount(owner, minlength=len(count))
    start_of_owner = np.cumsum(available) - available
    rank = np.arange(len(order)) - start_of_owner[owner[order]]
    return np.sort(order[rank < count[owner[order]]])


def _units(positions: IntArray, owner: IntArray, begins: BoolArray) -> IntArray:
    """Return the unit of each position, numbered in order. A unit begins where `begins` is True, and after every gap between positions."""
    apart = np.ones(len(positions), dtype=np.bool_)
    apart[1:] = begins[1:] | (np.diff(positions) > 1) | (np.diff(owner) != 0)
    return np.cumsum(apart) - 1


def _runs(unit: IntArray, owner: IntArray, mean: float, rng: np.random.Generator) -> IntArray:
    """Join neighbouring units into runs of geometric length with this mean, at most `LONGEST_SPAN`; return the run of each position."""
    if len(unit) == 0:
        return unit
    first = np.flatnonzero(np.diff(unit, prepend=-1))
    begins = rng.random(len(first)) < 1.0 / mean
    begins |= np.diff(owner[first], prepend=-1) != 0
    index = np.arange(len(first))
    begins |= (index - np.maximum.accumulate(np.where(begins, index, 0))) % LONGEST_SPAN == 0
    return (np.cumsum(begins) - 1)[unit]


def _hidden(unit: IntArray, owner: IntArray, count: IntArray, rng: np.random.Generator, *, cut: bool) -> BoolArray:
    """Return True for the positions to hide: units in random order until the count of their owner is reached.

    cut: only the first positions of the last unit, so that the count is exact; otherwise whole units, those whose middle lies within the
    count, and always the first.
    """
    if len(unit) == 0:
        return np.zeros(0, dtype=np.bool_)
    sizes = np.bincount(unit)
    first = np.cumsum(sizes) - sizes
    owners = owner[first]
    order = np.lexsort((rng.random(len(sizes)), owners))
    ends = np.cumsum(sizes[order])
    before = np.empty_like(sizes)
    opens = np.diff(owners[order], prepend=-1) != 0  # the first unit of each owner
    before[order] = ends - sizes[order] - np.maximum.accumulate(np.where(opens, ends - sizes[order], 0))
    if cut:
        exact: BoolArray = before[unit] + np.arange(len(unit)) - first[unit] < count[owner]
        return exact
    whole: BoolArray = (before + sizes / 2 <= count[owners]) | (before == 0)
    return whole[unit]


def _random_tokens(count: int, rng: np.random.Generator, special: SpecialIds) -> IntArray:
    """Uniform over the ids that are not special: sample from as many numbers as there are, and step over each special id."""
    tokens = rng.integers(0, special.vocab_size - len(special.all), size=count)
    for forbidden in special.all:
        tokens += tokens >= forbidden
    return tokens
