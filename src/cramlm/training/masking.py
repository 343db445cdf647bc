"""Dynamic masks: which places of a packed batch are hidden, what stands there instead, what is to be predicted.

The number of masks of a sequence is n = max(1, round(rate * maskable tokens)), instead of a coin per token: the loss has the
same number of terms at every step, and no sequence is without one. Which places, and what replaces them, is drawn anew at every
step (RoBERTa's dynamic masking).

    random       n places
    span         words in runs whose lengths are geometric (at most 10 words), in random order until n places are hidden; the last is cut
    whole-word   words in random order, those whose middle lies before the n-th place: n on the mean, and no word hidden in part
    phrase       the same with collocations as words
    scored       the tokens that a phase before learnt to find (importance.py), those with scores above 0, best first; at most n
    scored-control    as many as that, at random

A run of words is what lies between two coins that fell on one side, so all kinds are one choice among units, without a loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.config.terms import MaskingConfig
from cramlm.records import Batch, BoolArray, FloatArray, IntArray

LONGEST_SPAN = 10  # words


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token ids that are not text. `unk` is never masked and never drawn as a random token; None if the vocabulary has none."""

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
    """The batch with masks drawn: new `token_ids`, `masked` (rising) and `mlm_labels`, everything else shared with `batch`.

    Writing the labels back to the masked places restores the original. Special and padding places are never chosen. A sequence
    with no maskable token at all (an empty text) gets none. Of the chosen tokens, `mask_share` become [MASK] and `random_share` an
    ordinary token drawn uniformly (it may be the original one); the rest stay.

    where: (S,) which sequences get masks; None = all. token_values: (R * L,) for span, whole-word and phrase True where a word (a
    collocation) begins; for scored and scored-control the tokens' scores, above 0 for those to hide. rate: None = the config's at the first
    step.
    """
    flat = batch.token_ids.ravel()
    chosen = choose(
        flat, batch.sequence.ravel(), config, rng, special, sequences=len(batch.first), where=where, token_values=token_values, rate=rate
    )
    originals = flat[chosen]

    fate = rng.random(len(chosen))
    replaced = flat.copy()
    replaced[chosen[fate < config.mask_share]] = special.mask
    random_places = chosen[(fate >= config.mask_share) & (fate < config.mask_share + config.random_share)]
    if len(random_places):
        replaced[random_places] = _random_tokens(len(random_places), rng, special)
    return replace(batch, token_ids=replaced.reshape(batch.token_ids.shape), masked=chosen, mlm_labels=originals)


def choose(
    ids: IntArray,
    owner: IntArray,
    config: MaskingConfig,
    rng: np.random.Generator,
    special: SpecialIds,
    *,
    sequences: int,
    where: BoolArray | None = None,
    token_values: npt.NDArray[Any] | None = None,
    rate: float | None = None,
) -> IntArray:
    """The places to hide, rising, among flat token ids (N,); owner (N,) is the sequence of each, -1 = none, each in one piece. Otherwise as
    `mask`.
    """
    maskable = (owner >= 0) & (ids < special.vocab_size) & ~np.isin(ids, special.all)  # vectors of a prompt have ids beyond
    if where is not None:
        maskable &= where[owner]  # owner -1 (padding) reads the last entry, but is not maskable anyway
    places = np.flatnonzero(maskable)
    owner = owner[places]
    available = np.bincount(owner, minlength=sequences)
    count = np.minimum(np.maximum(1, np.rint((rate or config.rate) * available).astype(np.int64)), available)
    if config.kind == "random":
        return _single(places, owner, available, count, rng)
    assert token_values is not None, f"masks of kind {config.kind!r} need to know more of the tokens than their ids"
    if config.is_scored:
        count = np.minimum(count, np.maximum(1, np.bincount(owner[token_values[places] > 0], minlength=sequences)))
        return _single(places, owner, available, count, rng, scores=token_values[places] if config.kind == "scored" else None)
    unit = _units(places, owner, token_values[places])
    if config.kind == "span":
        unit = _runs(unit, owner, config.mean_span, rng)
    return places[_hidden(unit, owner, count, rng, cut=config.kind == "span")]


def _single(
    places: IntArray,
    owner: IntArray,
    available: IntArray,
    count: IntArray,
    rng: np.random.Generator,
    *,
    scores: FloatArray | None = None,
) -> IntArray:
    """Of each owner's places the exact count, uniformly: sort by (owner, random key) and take the first so many of each owner. With scores
    those of the highest.
    """
    order = np.lexsort((rng.random(len(places)) if scores is None else -scores, owner))
    start_of_owner = np.cumsum(available) - available
    turn = np.arange(len(places)) - start_of_owner[owner[order]]
    return np.sort(places[order[turn < count[owner[order]]]])


def _units(places: IntArray, owner: IntArray, begins: BoolArray) -> IntArray:
    """A number for each place, rising and equal within a unit: one begins where `begins` says so, and after every gap between places."""
    apart = np.ones(len(places), dtype=np.bool_)
    apart[1:] = begins[1:] | (np.diff(places) > 1) | (np.diff(owner) != 0)
    return np.cumsum(apart) - 1


def _runs(unit: IntArray, owner: IntArray, mean: float, rng: np.random.Generator) -> IntArray:
    """Neighbouring units joined into runs of geometric length with this mean, at most `LONGEST_SPAN`: the same numbering, of runs."""
    if len(unit) == 0:
        return unit
    first = np.flatnonzero(np.diff(unit, prepend=-1))
    begins = rng.random(len(first)) < 1.0 / mean
    begins |= np.diff(owner[first], prepend=-1) != 0
    turn = np.arange(len(first))
    begins |= (turn - np.maximum.accumulate(np.where(begins, turn, 0))) % LONGEST_SPAN == 0
    return (np.cumsum(begins) - 1)[unit]


def _hidden(unit: IntArray, owner: IntArray, count: IntArray, rng: np.random.Generator, *, cut: bool) -> BoolArray:
    """Which places (one unit number and owner each) are hidden: units in random order until their owner's count is reached.

    cut: the last unit gives its first places only, so that the count is exact; else units are hidden whole, those whose middle lies within
    the count, and always the first.
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
        taken: BoolArray = before[unit] + np.arange(len(unit)) - first[unit] < count[owner]
        return taken
    whole: BoolArray = (before + sizes / 2 <= count[owners]) | (before == 0)
    return whole[unit]


def _random_tokens(count: int, rng: np.random.Generator, special: SpecialIds) -> IntArray:
    """Uniform over the ids that are not special: draw from as many numbers as there are, and step over each special id."""
    tokens = rng.integers(0, special.vocab_size - len(special.all), size=count)
    for forbidden in special.all:
        tokens += tokens >= forbidden
    return tokens
