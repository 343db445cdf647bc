"""Token sequences: the pools that a phase samples from, where words and phrases begin, packing into rows, sharding of the rows.

The vocabulary decides whether a token continues a word: `##ing` in WordPiece, a token without the leading space in byte-level and
SentencePiece vocabularies. Phrases are collocations in the text of the phase, in place of ERNIE's list (Sun et al. 2019): two neighbouring
words that occur together at least `LEAST_PAIRS` times and whose normalised pointwise mutual information (Bouma 2009)

    ln( p(a b) / (p(a) p(b)) ) / -ln p(a b)

is at least `LEAST_NPMI`: 1 for words that only occur together, 0 for independent words. A chain of such pairs is one phrase; punctuation
is in none. In scripts written without spaces a word is a character here, so that collocations are words.

Packing puts sequences side by side in rows, without padding between them (docs/decisions/0003-packed-rows.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.config.phase import PhaseConfig
from cramlm.model.tokenizer import Tokens
from cramlm.records import Batch, BoolArray, FloatArray, IntArray
from cramlm.storage.arrays import groups_by_length
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
    often each is sampled, in proportion; None = uniform. soft_labels: as in `Batch`; None without a teacher.
    targets: as in `Batch`; None where each text has one label. For each token, or None where no term needs it: begins, bool, True
    where a word (or phrase) begins; token_labels, uint8 (terms/important_tokens.py); scores, float32, higher for tokens to hide first.
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
    """Return True for the entries of the vocabulary that continue a word."""
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
    """Return a 64-bit hash of each word. first: the position of its first token."""
    within = np.arange(len(ids)) - np.repeat(first, np.diff(first, append=len(ids)))
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * _FACTOR
    mixed ^= mixed >> np.uint64(29)
    mixed *= (within.astype(np.uint64) * np.uint64(2) + np.uint64(1)) * _FACTOR  # odd, so that nothing is lost
    mixed ^= mixed >> np.uint64(32)
    return np.add.reduceat(mixed, first)


_ROUND = 8  # rows end at a multiple of this: kernels like it, and shapes repeat


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where sequences lie in rows, which are packed by first-fit decreasing: longest first, each into the first row with room.

    shape: (R, L). order: (S,), the sequences in the order of the rows; start: (S,), the flat position of the first token of each in that
    order. filled: (N,), the flat position of each of their tokens; sequence, position: (N,), its sequence in that order, and its position
    there.
    """

    shape: tuple[int, int]
    order: IntArray
    start: IntArray
    filled: IntArray
    sequence: IntArray
    position: IntArray

    @classmethod
    def of(cls, sequences: Sequence[npt.NDArray[Any]], row_length: int, *, multiple: int = _ROUND) -> _Layout:
        """Pack sequences into rows of at most `row_length` positions. Rows have the length of the fullest one, rounded up to a `multiple`.

        Deterministic: sequences of equal length keep their order.
        """
        lengths = np.fromiter((len(sequence) for sequence in sequences), dtype=np.int64, count=len(sequences))
        assert len(sequences) > 0, "a batch holds at least one sequence"
        assert 0 < lengths.min() <= lengths.max() <= row_length, (
            f"sequences of {lengths.min()} to {lengths.max()} tokens, rows of {row_length}"
        )
        row, column, used = _first_fit_decreasing(lengths, row_length)
        length = -(-int(used.max()) // multiple) * multiple
        start = row * length + column
        order = np.argsort(start)
        start, lengths = start[order], lengths[order]
        sequence = np.repeat(np.arange(len(order)), lengths)
        position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return cls((len(used), length), order, start, start[sequence] + position, sequence, position)

    def flat(self, values: npt.NDArray[Any], *, padding: int = 0) -> npt.NDArray[Any]:
        """Return a value for each position, (R * L,). values: (N,), of the tokens in the order of the rows."""
        result = np.full(self.shape[0] * self.shape[1], padding, dtype=values.dtype)
        result[self.filled] = values
        return result

    def joined(self, values: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the values of each sequence end to end, in the order of the rows."""
        return np.concatenate([values[index] for index in self.order])


def pack(
    sequences: Sequence[npt.NDArray[Any]],
    *,
    labels: IntArray,
    external: BoolArray,
    row_length: int,
    pad_id: int,
    soft_labels: FloatArray | None = None,
    targets: FloatArray | None = None,
    multiple: int = _ROUND,
) -> Batch:
    """Pack sequences into rows, as `_Layout.of`. The batch numbers its sequences by their position in the rows, and has no masks."""
    layout = _Layout.of(sequences, row_length, multiple=multiple)
    order, nothing = layout.order, np.zeros(0, dtype=np.int64)
    return Batch(
        token_ids=layout.flat(layout.joined(sequences).astype(np.int64), padding=pad_id).reshape(layout.shape),
        sequence=layout.flat(layout.sequence, padding=-1).reshape(layout.shape),
        position=layout.flat(layout.position).reshape(layout.shape),
        first=layout.start,
        masked=nothing,
        mlm_labels=nothing,
        task_labels=labels[order],
        external=external[order],
        soft_labels=np.zeros((len(order), 0), dtype=np.float32) if soft_labels is None else soft_labels[order],
        targets=np.zeros((len(order), 0), dtype=np.float32) if targets is None else targets[order],
    )


def pack_by_length(
    sequences: Sequence[npt.NDArray[Any]] | Tokens, *, most: int, pad_id: int, padding: int | None = None
) -> Iterator[Batch]:
    """Pack all sequences, shortest first, into batches of at most `most` positions; a longer sequence is a batch of its own.

    The `task_labels` of a batch are the indices of its sequences, since packing changes their order.

    padding: how many positions of a batch may be padding; rows then end where their longest sequence does. None = any number, and rows
    end at a multiple of 8.
    """
    lengths = np.array([len(sequences[index]) for index in range(len(sequences))], dtype=np.int64)
    multiple = _ROUND if padding is None else 1
    for group in groups_by_length(lengths, most, padding=padding):
        chosen, row_length = [sequences[index] for index in group], int(lengths[group[-1]])
        external = np.zeros(len(group), dtype=np.bool_)
        yield pack(chosen, labels=group, external=external, row_length=row_length, pad_id=pad_id, multiple=multiple)


def lay_out(values: Sequence[npt.NDArray[Any]], *, row_length: int) -> npt.NDArray[Any]:
    """Arrange values of each token of the sequences, flat, as `pack` arranges the tokens; 0 for padding."""
    layout = _Layout.of(values, row_length)
    return layout.flat(layout.joined(values))


def _first_fit_decreasing(lengths: IntArray, row_length: int) -> tuple[IntArray, IntArray, IntArray]:
    """Row and column of each sequence, and the used length of each row."""
    row, column = np.empty_like(lengths), np.empty_like(lengths)
    used = np.zeros(len(lengths) + 1, dtype=np.int64)  # as many rows as could be needed; the first empty one always has space
    for index in np.argsort(-lengths, kind="stable"):
        length = lengths[index]
        fits = int((used <= row_length - length).argmax())
        row[index], column[index] = fits, used[fits]
        used[fits] += length
    return row, column, used[used > 0]


def share_of_batch(batch: Batch, index: int, count: int) -> Batch:
    """Return the rows of a batch that the rank `index` of `count` computes; each row belongs to exactly one rank.

    Numbers of rows differ by at most one, since the cost of a row includes its padding. Real tokens are balanced too: the rows, fullest
    first, are assigned to the ranks forwards, then backwards, and so on. A rank without a row gets one of padding.
    """
    assert 0 <= index < count, f"rank {index} of {count}"
    if count == 1:
        return batch
    by_tokens = np.argsort(-(batch.sequence >= 0).sum(axis=1), kind="stable")
    turn, offset = np.divmod(np.arange(len(by_tokens)), count)
    rows = np.sort(by_tokens[np.where(turn % 2, count - 1 - offset, offset) == index])
    if len(rows) == 0:
        empty = _rows(batch, np.zeros(1, dtype=np.int64), sequences=np.zeros(len(batch.first), dtype=np.bool_))
        nothing = np.zeros(0, dtype=np.int64)
        return replace(empty, masked=nothing, mlm_labels=nothing, chance=empty.chance[:0])
    return _rows(batch, rows, sequences=np.isin(batch.first // batch.token_ids.shape[1], rows))


def _rows(batch: Batch, rows: IntArray, *, sequences: BoolArray) -> Batch:
    """Return a batch of these rows (rising) with these of its sequences, renumbered; the tokens of other sequences become padding."""
    length = batch.token_ids.shape[1]
    number = np.append(np.where(sequences, np.cumsum(sequences) - 1, -1), -1)  # the last entry is for padding, -1
    new_row = np.full(len(batch.token_ids), -1, dtype=np.int64)
    new_row[rows] = np.arange(len(rows))
    kept = new_row[batch.masked // length] >= 0

    def moved(positions: IntArray) -> IntArray:
        result: IntArray = new_row[positions // length] * length + positions % length
        return result

    return Batch(
        token_ids=batch.token_ids[rows],
        sequence=number[batch.sequence[rows]],
        position=batch.position[rows],
        first=moved(batch.first[sequences]),
        masked=moved(batch.masked[kept]),
        mlm_labels=batch.mlm_labels[kept],
        task_labels=batch.task_labels[sequences],
        external=batch.external[sequences],
        soft_labels=batch.soft_labels[sequences],
        causal_from=batch.causal_from[sequences] if len(batch.causal_from) else batch.causal_from,
        candidates=batch.candidates,
        stand_for=batch.stand_for,
        chance=batch.chance[kept] if len(batch.chance) else batch.chance,
        targets=batch.targets[sequences] if len(batch.targets) else batch.targets,
        term=batch.term,
    )
