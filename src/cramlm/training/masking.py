"""Dynamic masks: which places of a packed batch are hidden, what stands there instead, what is to be predicted.

The number of masks of a sequence is exact, max(1, round(rate * maskable tokens)), instead of a coin per token: the loss has the
same number of terms at every step, and no sequence is without one. Which places, and what replaces them, is drawn anew at every
step (RoBERTa's dynamic masking).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cramlm.config import MaskingConfig
from cramlm.records import Batch, BoolArray, IntArray


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


def mask(batch: Batch, config: MaskingConfig, rng: np.random.Generator, special: SpecialIds, *, where: BoolArray | None = None) -> Batch:
    """The batch with masks drawn: new `token_ids`, `masked` (rising) and `mlm_labels`, everything else shared with `batch`.

    Writing the labels back to the masked places restores the original. Special and padding places are never chosen. A sequence
    with no maskable token at all (an empty text) gets none. Of the chosen tokens, `mask_share` become [MASK] and `random_share` an
    ordinary token drawn uniformly (it may be the original one); the rest stay.

    where: (S,) which sequences get masks; None = all.
    """
    flat = batch.token_ids.ravel()
    owner = batch.sequence.ravel()
    maskable = (owner >= 0) & ~np.isin(flat, special.all)
    if where is not None:
        maskable &= where[owner]  # owner -1 (padding) reads the last entry, but is not maskable anyway
    places = np.flatnonzero(maskable)
    chosen = _choose(places, owner[places], sequences=len(batch.first), rate=config.rate, rng=rng)
    originals = flat[chosen]

    fate = rng.random(len(chosen))
    replaced = flat.copy()
    replaced[chosen[fate < config.mask_share]] = special.mask
    random_places = chosen[(fate >= config.mask_share) & (fate < config.mask_share + config.random_share)]
    if len(random_places):
        replaced[random_places] = _random_tokens(len(random_places), rng, special)
    return replace(batch, token_ids=replaced.reshape(batch.token_ids.shape), masked=chosen, mlm_labels=originals)


def _choose(places: IntArray, owner: IntArray, *, sequences: int, rate: float, rng: np.random.Generator) -> IntArray:
    """Of each owner's places the exact count, uniformly: sort by (owner, random key) and take the first so many of each owner."""
    available = np.bincount(owner, minlength=sequences)
    count = np.minimum(np.maximum(1, np.rint(rate * available).astype(np.int64)), available)
    order = np.lexsort((rng.random(len(places)), owner))
    start_of_owner = np.cumsum(available) - available
    turn = np.arange(len(places)) - start_of_owner[owner[order]]
    return np.sort(places[order[turn < count[owner[order]]]])


def _random_tokens(count: int, rng: np.random.Generator, special: SpecialIds) -> IntArray:
    """Uniform over the ids that are not special: draw from as many numbers as there are, and step over each special id."""
    tokens = rng.integers(0, special.vocab_size - len(special.all), size=count)
    for forbidden in special.all:
        tokens += tokens >= forbidden
    return tokens
