"""The token sequences that a phase draws from, where their words begin, and which words form phrases.

A vocabulary tells of each token whether it continues a word (`##ing`; in byte-level and SentencePiece vocabularies what lacks the space)
and whether it is text at all. Collocations are found by counts in the text that a phase reads: ERNIE's phrases without a list (Sun et al.
2019): two neighbouring words that occur `FEWEST` times together and whose normalised pointwise mutual information (Bouma 2009)

    ln( p(a b) / (p(a) p(b)) ) / -ln p(a b)

is at least `LEAST_NPMI`: 1 where neither is without the other, 0 where they meet by chance. Chains of such pairs are one phrase.
Punctuation marks take part in none. In scripts written without spaces a word is a character here, and its collocations are words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.config.phase import PhaseConfig
from cramlm.records import BoolArray, FloatArray, IntArray
from cramlm.training.masking import SpecialIds

FEWEST = 4
LEAST_NPMI = 0.4
_SPACES = ("Ġ", "▁")  # before a word, in byte-level and in SentencePiece vocabularies
_CONTINUES = "##"
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class TokenPool:
    """Token sequences with their special tokens, end to end: sequence i is ids[offsets[i]:offsets[i + 1]].

    ids: uint16, or uint32 for large vocabularies. offsets: (n + 1,) int64. labels: (n,) int64, -1 where a sequence has none. weights:
    (n,) float32, > 0, how often each is drawn in proportion to the others; None = alike. soft_labels: (n, labels) float32, probabilities
    that a teacher gives; None without one. targets: as in `Batch`; None where each text has one label. begins: for each id, True where a
    word (or phrase) begins; None where no term needs it. token_labels: for each id, uint8, how important it is (importance.py), for the
    term important_tokens. scores: for each id, float32, higher for tokens that are to be hidden first.
    """

    ids: npt.NDArray[np.unsignedinteger[Any]]
    offsets: IntArray
    labels: IntArray
    weights: FloatArray | None = None
    soft_labels: FloatArray | None = None
    begins: BoolArray | None = None
    token_labels: npt.NDArray[np.uint8] | None = None
    scores: FloatArray | None = None
    targets: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sequence(self, index: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def token_values_of(self, index: int, phase: PhaseConfig) -> npt.NDArray[Any] | None:
        """What a phase needs of each token of a sequence: token labels, scores, or where words begin; None where it needs nothing."""
        if not (phase.needs_token_labels or phase.needs_scores or phase.needs_words):
            return None
        values = self.token_labels if phase.needs_token_labels else self.scores if phase.needs_scores else self.begins
        assert values is not None, f"phase {phase.name}: the pool lacks the token labels, the scores or the words that it needs"
        return values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def mean_length(self) -> float:
        """Tokens per sequence drawn, special tokens included."""
        if self.weights is not None:
            return float(np.average(np.diff(self.offsets), weights=self.weights))
        return float(self.offsets[-1] - self.offsets[0]) / len(self)


def with_word_begins(
    phase: PhaseConfig, external: TokenPool | None, task: TokenPool | None, vocabulary: Sequence[str], special: SpecialIds
) -> tuple[TokenPool | None, TokenPool | None]:
    """The pools of a phase with the beginnings of words (or phrases) that its masks are made of; as they are, where it needs none.

    vocabulary: the tokens in order of their ids. 0.1 s for a million tokens, 1 s with phrases.
    """
    given = [pool for pool in (external, task) if pool is not None]
    if not phase.needs_words or not given:
        return external, task
    ids = np.concatenate([pool.ids for pool in given])
    opens = np.concatenate([_opens(pool) for pool in given])  # where a sequence begins
    begins: BoolArray = opens | ~_continuing(vocabulary)[ids]
    if phase.masking.kind == "phrase":
        text = np.array([any(map(str.isalnum, token.lstrip("".join(_SPACES)))) for token in vocabulary])
        text[list(special.all)] = False
        begins = _of_phrases(ids, begins, opens, text)
    pieces = iter(np.split(begins, np.cumsum([len(pool.ids) for pool in given])[:-1]))
    external, task = (None if pool is None else replace(pool, begins=next(pieces)) for pool in (external, task))
    return external, task


def _opens(pool: TokenPool) -> BoolArray:
    opens = np.zeros(len(pool.ids), dtype=np.bool_)
    opens[pool.offsets[:-1]] = True
    return opens


def _continuing(vocabulary: Sequence[str]) -> BoolArray:
    """Which tokens continue the word before them."""
    if any(token.startswith(_SPACES) for token in vocabulary):
        return np.array([token[:1].isalnum() and not token.startswith(_SPACES) for token in vocabulary])
    return np.array([token.startswith(_CONTINUES) and token != _CONTINUES for token in vocabulary])


def _of_phrases(ids: npt.NDArray[np.unsignedinteger[Any]], begins: BoolArray, opens: BoolArray, text: BoolArray) -> BoolArray:
    """`begins` without the words that continue a collocation. opens: where sequences begin. text: which tokens may take part, (V,)."""
    first = np.flatnonzero(begins)
    _, word, counts = np.unique(word_hashes(ids, first), return_inverse=True, return_counts=True)
    is_text = text[ids[first]]
    followed = np.flatnonzero(is_text[:-1] & is_text[1:] & ~opens[first[1:]])  # words before another word of their sequence
    pairs, which, together = np.unique(word[followed] * len(counts) + word[followed + 1], return_inverse=True, return_counts=True)
    one, other = np.divmod(pairs, len(counts))
    often = together >= FEWEST
    share = together[often] / len(first)
    by_chance = (counts[one[often]] / len(first)) * (counts[other[often]] / len(first))
    collocation = np.zeros(len(pairs), dtype=np.bool_)
    collocation[often] = np.log(share / by_chance) >= LEAST_NPMI * -np.log(share)
    phrases = begins.copy()
    phrases[first[followed[collocation[which]] + 1]] = False
    return phrases


def word_hashes(ids: npt.NDArray[np.unsignedinteger[Any]], first: IntArray) -> npt.NDArray[np.uint64]:
    """A 64-bit number for each word, equal for equal words; first: where each begins."""
    within = np.arange(len(ids)) - np.repeat(first, np.diff(first, append=len(ids)))
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * _FACTOR
    mixed ^= mixed >> np.uint64(29)
    mixed *= (within.astype(np.uint64) * np.uint64(2) + np.uint64(1)) * _FACTOR  # odd, so that nothing is lost
    mixed ^= mixed >> np.uint64(32)
    return np.add.reduceat(mixed, first)
