"""The token sequences that a phase samples from, where their words begin, and which words form phrases.

The vocabulary decides whether a token continues a word: `##ing` in WordPiece, a token without the leading space in byte-level and
SentencePiece vocabularies. Phrases are collocations in the text of the phase, in place of ERNIE's list (Sun et al. 2019): two neighbouring
words that occur together at least `LEAST_PAIRS` times and whose normalised pointwise mutual information (Bouma 2009)

    ln( p(a b) / (p(a) p(b)) ) / -ln p(a b)

is at least `LEAST_NPMI`: 1 for words that only occur together, 0 for independent words. A chain of such pairs is one phrase; punctuation
is in none. In scripts written without spaces a word is a character here, so that collocations are words.
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

LEAST_PAIRS = 4
LEAST_NPMI = 0.4
_SPACES = ("Ġ", "▁")  # before a word, in byte-level and in SentencePiece vocabularies
_CONTINUES = "##"
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class TokenPool:
    """Token sequences with their special tokens, end to end: sequence i is ids[offsets[i]:offsets[i + 1]].

    ids: uint16, or uint32 for large vocabularies. offsets: (n + 1,) int64. labels: (n,) int64, -1 = none. weights: (n,) float32, > 0, how
    often each is sampled, in proportion; None = uniform. soft_labels: (n, labels) float32, a teacher's probabilities; None without a
    teacher. targets: as in `Batch`; None where each text has one label. For each token, or None where no term needs it: begins, bool, True
    where a word (or phrase) begins; token_labels, uint8 (importance.py); scores, float32, higher for tokens to hide first.
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

    @property
    def mean_length(self) -> float:
        """Tokens per sampled sequence, special tokens included."""
        if self.weights is not None:
            return float(np.average(np.diff(self.offsets), weights=self.weights))
        return float(self.offsets[-1] - self.offsets[0]) / len(self)


def with_word_begins(
    phase: PhaseConfig, external: TokenPool | None, task: TokenPool | None, vocabulary: Sequence[str], special: SpecialIds
) -> tuple[TokenPool | None, TokenPool | None]:
    """Return the pools of a phase with the begins of words (or phrases), unchanged if the phase needs none.

    vocabulary: the tokens in order of their ids. 0.1 s for a million tokens, 1 s with phrases.
    """
    pools = [pool for pool in (external, task) if pool is not None]
    if not phase.needs_words or not pools:
        return external, task
    ids = np.concatenate([pool.ids for pool in pools])
    starts = np.concatenate([_sequence_starts(pool) for pool in pools])
    begins: BoolArray = starts | ~_continues_word(vocabulary)[ids]
    if phase.masking.kind == "phrase":
        text = np.array([any(map(str.isalnum, token.lstrip("".join(_SPACES)))) for token in vocabulary])
        text[list(special.all)] = False
        begins = _phrase_begins(ids, begins, starts, text)
    pieces = iter(np.split(begins, np.cumsum([len(pool.ids) for pool in pools])[:-1]))
    external, task = (None if pool is None else replace(pool, begins=next(pieces)) for pool in (external, task))
    return external, task


def _sequence_starts(pool: TokenPool) -> BoolArray:
    starts = np.zeros(len(pool.ids), dtype=np.bool_)
    starts[pool.offsets[:-1]] = True
    return starts


def _continues_word(vocabulary: Sequence[str]) -> BoolArray:
    """Which entries of the vocabulary continue the word before them."""
    if any(token.startswith(_SPACES) for token in vocabulary):
        return np.array([token[:1].isalnum() and not token.startswith(_SPACES) for token in vocabulary])
    return np.array([token.startswith(_CONTINUES) and token != _CONTINUES for token in vocabulary])


def _phrase_begins(ids: npt.NDArray[np.unsignedinteger[Any]], begins: BoolArray, starts: BoolArray, text: BoolArray) -> BoolArray:
    """`begins` without the words that continue a collocation. starts: of sequences. text: (V,), True for tokens that phrases may have."""
    first = np.flatnonzero(begins)
    _, word, counts = np.unique(word_hashes(ids, first), return_inverse=True, return_counts=True)
    is_text = text[ids[first]]
    followed = np.flatnonzero(is_text[:-1] & is_text[1:] & ~starts[first[1:]])  # words before another word of their sequence
    pairs, which, together = np.unique(word[followed] * len(counts) + word[followed + 1], return_inverse=True, return_counts=True)
    left, right = np.divmod(pairs, len(counts))
    frequent = together >= LEAST_PAIRS
    joint = together[frequent] / len(first)
    independent = (counts[left[frequent]] / len(first)) * (counts[right[frequent]] / len(first))
    is_collocation = np.zeros(len(pairs), dtype=np.bool_)
    is_collocation[frequent] = np.log(joint / independent) >= LEAST_NPMI * -np.log(joint)
    phrases = begins.copy()
    phrases[first[followed[is_collocation[which]] + 1]] = False
    return phrases


def word_hashes(ids: npt.NDArray[np.unsignedinteger[Any]], first: IntArray) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each word. first: the position of its first token."""
    within = np.arange(len(ids)) - np.repeat(first, np.diff(first, append=len(ids)))
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * _FACTOR
    mixed ^= mixed >> np.uint64(29)
    mixed *= (within.astype(np.uint64) * np.uint64(2) + np.uint64(1)) * _FACTOR  # odd, so that nothing is lost
    mixed ^= mixed >> np.uint64(32)
    return np.add.reduceat(mixed, first)
