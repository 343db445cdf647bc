"""Batches as a function: `Batches.batch(step)` gives the same rows for the same (seed, phase, step), whenever and in whatever
order it is asked.

The path of a sequence: a pool (external or task) is an endless stream, the concatenation of one permutation per epoch, so that
every sequence has sequence numbers in it; a step takes the next so many numbers of its stream(s), packs them side by side into rows
(first-fit decreasing) and draws masks. Nothing is stored between steps but the permutation of the epoch at hand. Where sequences have
weights, an epoch is as long as without, but holds a sequence of weight w (mean 1) floor(w) or ceil(w) times, w times on average.

Counts per step are fixed, from the pools' mean lengths: a step holds about `batch_size` tokens, not exactly. In exchange the
address of a sequence is arithmetic, and resuming costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.config import PhaseConfig
from cramlm.errors import DataError
from cramlm.records import Batch, BoolArray, FloatArray, IntArray
from cramlm.training.masking import SpecialIds, mask
from cramlm.training.randomness import generator

__all__ = ["Batches", "Origin", "SpecialIds", "Stream", "TokenPool", "pack", "share"]

Origin: TypeAlias = Literal["external", "task"]
_ROUND = 8  # rows end at a multiple of this: kernels like it, and shapes repeat


@dataclass(frozen=True, slots=True)
class TokenPool:
    """Token sequences with their special tokens, end to end: sequence i is ids[offsets[i]:offsets[i + 1]].

    ids: uint16. offsets: (n + 1,) int64. labels: (n,) int64, -1 where a sequence has none. weights: (n,) float32, > 0, how often each is
    drawn in proportion to the others; None = alike. soft_labels: (n, labels) float32, probabilities that a teacher gives; None = it was
    not asked. begins: for each id, whether a word (or phrase) begins there; None where no phase asks (units.py).
    """

    ids: npt.NDArray[np.uint16]
    offsets: IntArray
    labels: IntArray
    weights: FloatArray | None = None
    soft_labels: FloatArray | None = None
    begins: BoolArray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sequence(self, index: int) -> npt.NDArray[np.uint16]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def begins_of(self, index: int) -> BoolArray:
        """Where words begin in a sequence; asked only of pools that know."""
        assert self.begins is not None, "masks of words need to know where words begin"
        return self.begins[self.offsets[index] : self.offsets[index + 1]]

    @property
    def mean_length(self) -> float:
        """Tokens per sequence drawn, special tokens included."""
        if self.weights is not None:
            return float(np.average(np.diff(self.offsets), weights=self.weights))
        return float(self.offsets[-1] - self.offsets[0]) / len(self)


def pack(
    sequences: Sequence[npt.NDArray[Any]],
    *,
    labels: IntArray,
    external: BoolArray,
    row_length: int,
    pad_id: int,
    soft_labels: FloatArray | None = None,
) -> Batch:
    """Lay sequences side by side into rows of at most `row_length` places, longest first, each into the first row with room.

    The batch numbers its sequences by where they lie, not by the order given. Rows are cut to the fullest one, rounded up to a
    multiple of 8. No masks. Deterministic: equal lengths keep their given order.
    """
    lengths = np.fromiter((len(sequence) for sequence in sequences), dtype=np.int64, count=len(sequences))
    assert len(sequences) > 0, "a batch holds at least one sequence"
    assert 0 < lengths.min() <= lengths.max() <= row_length, f"sequences of {lengths.min()} to {lengths.max()} tokens, rows of {row_length}"
    row, column, used = _first_fit_decreasing(lengths, row_length)
    rows, length = len(used), -(-int(used.max()) // _ROUND) * _ROUND

    start = row * length + column
    order = np.argsort(start)
    start, lengths = start[order], lengths[order]
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.repeat(start, lengths) + position

    token_ids = np.full(rows * length, pad_id, dtype=np.int64)
    token_ids[places] = np.concatenate([sequences[index] for index in order])
    sequence = np.full(rows * length, -1, dtype=np.int64)
    sequence[places] = np.repeat(np.arange(len(order)), lengths)
    position_in_sequence = np.zeros(rows * length, dtype=np.int64)
    position_in_sequence[places] = position
    nothing = np.zeros(0, dtype=np.int64)
    return Batch(
        token_ids=token_ids.reshape(rows, length),
        sequence=sequence.reshape(rows, length),
        position=position_in_sequence.reshape(rows, length),
        first=start,
        masked=nothing,
        mlm_labels=nothing,
        task_labels=labels[order],
        external=external[order],
        soft_labels=np.zeros((len(order), 0), dtype=np.float32) if soft_labels is None else soft_labels[order],
    )


def beside(values: Sequence[npt.NDArray[Any]], *, row_length: int) -> npt.NDArray[Any]:
    """Values of the tokens of sequences, flat, as `pack` lays out the tokens themselves; 0 in places of padding."""
    lengths = [len(each) for each in values]
    number = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    nothing = np.zeros(len(lengths), dtype=np.int64)
    layout = pack(number, labels=nothing, external=nothing > 0, row_length=row_length, pad_id=-1)
    return np.append(np.concatenate(values), np.zeros(1, values[0].dtype))[layout.token_ids.ravel()]


def _first_fit_decreasing(lengths: IntArray, row_length: int) -> tuple[IntArray, IntArray, IntArray]:
    """Row and column of each sequence, and how many places of each row are used."""
    row, column = np.empty_like(lengths), np.empty_like(lengths)
    used = np.zeros(len(lengths) + 1, dtype=np.int64)  # as many rows as could be needed; the first empty one always has room
    for index in np.argsort(-lengths, kind="stable"):
        length = lengths[index]
        home = int((used <= row_length - length).argmax())
        row[index], column[index] = home, used[home]
        used[home] += length
    return row, column, used[used > 0]


def share(batch: Batch, index: int, count: int) -> Batch:
    """The rows of a batch that one of `count` ranks computes; each row belongs to exactly one.

    Every rank gets as many rows as the others, or one more (a row costs its places, padding too), dealt so that real tokens are even as
    well: fullest first, there and back. A rank for which there is no row gets one of padding.
    """
    assert 0 <= index < count, f"rank {index} of {count}"
    if count == 1:
        return batch
    by_tokens = np.argsort(-(batch.sequence >= 0).sum(axis=1), kind="stable")
    turn, place = np.divmod(np.arange(len(by_tokens)), count)
    mine = np.sort(by_tokens[np.where(turn % 2, count - 1 - place, place) == index])
    if len(mine) == 0:
        empty = _rows(batch, np.zeros(1, dtype=np.int64), sequences=np.zeros(len(batch.first), dtype=np.bool_))
        nothing = np.zeros(0, dtype=np.int64)
        return replace(empty, masked=nothing, mlm_labels=nothing)
    taken = np.isin(batch.first // batch.token_ids.shape[1], mine)
    return _rows(batch, mine, sequences=taken)


def _rows(batch: Batch, rows: IntArray, *, sequences: BoolArray) -> Batch:
    """A batch of these rows (rising) with these of its sequences, numbered anew; the places of the others become padding."""
    length = batch.token_ids.shape[1]
    number = np.append(np.where(sequences, np.cumsum(sequences) - 1, -1), -1)  # the last entry is for padding, -1
    new_row = np.full(len(batch.token_ids), -1, dtype=np.int64)
    new_row[rows] = np.arange(len(rows))
    kept = new_row[batch.masked // length] >= 0

    def moved(places: IntArray) -> IntArray:
        there: IntArray = new_row[places // length] * length + places % length
        return there

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
    )


class Stream:
    """One pool, endlessly: epoch after epoch, each in its own order."""

    def __init__(self, pool: TokenPool, origin: Origin, *, seed: int, phase_index: int) -> None:
        self.pool, self.origin = pool, origin
        self._seed, self._phase_index = seed, phase_index
        self._epochs: dict[int, IntArray] = {}

    def positions(self, numbers: range) -> IntArray:
        """Places in the pool of consecutive sequence numbers."""
        size, number, pieces = len(self.pool), numbers.start, []
        while number < numbers.stop:
            epoch, within = divmod(number, size)
            taken = min(size - within, numbers.stop - number)
            pieces.append(self._order(epoch)[within : within + taken])
            number += taken
        return np.concatenate(pieces)

    def _order(self, epoch: int) -> IntArray:
        if epoch not in self._epochs:
            if len(self._epochs) > 1:  # a batch may straddle two epochs; older ones are not needed
                del self._epochs[next(iter(self._epochs))]
            rng = generator(self._seed, phase_index=self._phase_index, purpose=f"order of {self.origin}", index=epoch)
            weights = self.pool.weights
            self._epochs[epoch] = rng.permutation(len(self.pool) if weights is None else _drawn_once(weights, rng))
        return self._epochs[epoch]


def _drawn_once(weights: FloatArray, rng: np.random.Generator) -> IntArray:
    """As many places as there are weights, each in proportion to its weight: systematic resampling, one uniform number for all."""
    ends = np.cumsum(weights, dtype=np.float64)
    ends *= len(ends) / ends[-1]
    ends[-1] = len(ends)
    reached = np.floor(ends + rng.random()).astype(np.int64)
    return np.repeat(np.arange(len(weights)), np.concatenate([reached[:1], reached[1:] - reached[:-1]]))


class Batches:
    """The batches of one phase.

    interleaved: a cycle is `external` whole batches of external text, then `task` whole batches of task text.
    blended: every batch holds both, external : task by tokens (from mean lengths, rounded to whole sequences, at least one of each:
    a ratio beyond what one batch can hold, like 999 : 1, becomes one task sequence per batch).

    Raises:
        DataError: if a pool that the phase draws from is absent or empty.
    """

    def __init__(
        self,
        phase: PhaseConfig,
        external: TokenPool | None,
        task: TokenPool | None,
        *,
        seed: int,
        phase_index: int,
        special: SpecialIds,
    ) -> None:
        self.phase, self.special = phase, special
        self._seed, self._phase_index = seed, phase_index
        self._streams: dict[Origin, Stream] = {}
        offered: list[tuple[Origin, TokenPool | None, int]] = [("external", external, phase.external), ("task", task, phase.task)]
        for origin, pool, share in offered:
            if share == 0:
                continue
            if pool is None or len(pool) == 0:
                raise DataError(f"phase {phase.name!r} draws {origin} text but there is none; give some or set phases.{origin} = 0")
            self._streams[origin] = Stream(pool, origin, seed=seed, phase_index=phase_index)
        self._per_step = self._counts()
        asked = [stream.pool.soft_labels for stream in self._streams.values() if stream.pool.soft_labels is not None]
        self._classes = asked[0].shape[1] if asked else 0

    def batch(self, step: int) -> Batch:
        """The batch of this step, with masks wherever its MLM loss has weight. A few milliseconds for 4,096 tokens."""
        sequences: list[npt.NDArray[np.uint16]] = []
        labels, external, taught, begins = [], [], [], []
        for origin, numbers in self.drawn(step).items():
            stream = self._streams[origin]
            positions = stream.positions(numbers)
            sequences += [stream.pool.sequence(int(position)) for position in positions]
            labels.append(stream.pool.labels[positions] if origin == "task" else np.full(len(positions), -1, dtype=np.int64))
            external.append(np.full(len(positions), origin == "external"))
            soft = stream.pool.soft_labels
            taught.append(np.zeros((len(positions), self._classes), dtype=np.float32) if soft is None else soft[positions])
            begins += [stream.pool.begins_of(int(position)) for position in positions] if self.phase.needs_words else []
        batch = pack(
            sequences,
            labels=np.concatenate(labels),
            external=np.concatenate(external),
            soft_labels=np.concatenate(taught),
            row_length=self.phase.row_length,
            pad_id=self.special.pad,
        )
        where = batch.external | (self.phase.mlm_weight > 0)
        if not where.any():
            return batch
        rng = generator(self._seed, phase_index=self._phase_index, purpose="masks", index=step)
        words = beside(begins, row_length=self.phase.row_length) if begins else None
        rate = self.phase.masking.rate_at(step, self.phase.steps)
        return mask(batch, self.phase.masking, rng, self.special, where=where, begins=words, rate=rate)

    def drawn(self, step: int) -> dict[Origin, range]:
        """Sequence numbers, by origin, that this step takes from each stream."""
        if self.phase.mixing == "blended":
            return {origin: range(step * count, (step + 1) * count) for origin, count in self._per_step.items()}
        cycle, within = divmod(step, self.phase.external + self.phase.task)
        if within < self.phase.external:
            origin, turn = "external", cycle * self.phase.external + within
        else:
            origin, turn = "task", cycle * self.phase.task + within - self.phase.external
        count = self._per_step[origin]  # type: ignore[index]
        return {origin: range(turn * count, (turn + 1) * count)}  # type: ignore[dict-item]

    @property
    def sequences_per_step(self) -> float:
        """Sequences in a step; for interleaved phases the mean over a cycle."""
        return self._mean_over_cycle({origin: float(count) for origin, count in self._per_step.items()})

    @property
    def tokens_per_step(self) -> float:
        """Real tokens in a step, expected from mean lengths; for interleaved phases the mean over a cycle."""
        return self._mean_over_cycle({origin: count * self._streams[origin].pool.mean_length for origin, count in self._per_step.items()})

    def steps_for_passes(self, passes: float) -> int:
        """The fewest steps after which the task pool (the external one, if no task text is drawn) was seen `passes` times."""
        origin: Origin = "task" if self.phase.task else "external"
        turns = math.ceil(passes * len(self._streams[origin].pool) / self._per_step[origin])
        if self.phase.mixing == "blended" or turns == 0:
            return turns
        share = self.phase.task if origin == "task" else self.phase.external
        cycles, within = divmod(turns - 1, share)
        before = self.phase.external if origin == "task" else 0
        return cycles * (self.phase.external + self.phase.task) + before + within + 1

    def _counts(self) -> dict[Origin, int]:
        """Sequences of each origin in a step that draws from it."""
        phase, size = self.phase, float(self.phase.batch_size)
        lengths = {origin: stream.pool.mean_length for origin, stream in self._streams.items()}
        if phase.mixing == "interleaved" or len(lengths) == 1:
            return {origin: max(1, round(size / length if phase.batch_unit == "tokens" else size)) for origin, length in lengths.items()}
        shares = {"external": phase.external, "task": phase.task}
        # Sequences of each origin per token of the batch, so that their tokens are in the ratio of the shares.
        density = {origin: shares[origin] / (phase.external + phase.task) / length for origin, length in lengths.items()}
        if phase.batch_unit == "tokens":
            return {origin: max(1, round(size * each)) for origin, each in density.items()}
        task = min(max(1, round(size * density["task"] / sum(density.values()))), max(1, phase.batch_size - 1))
        return {"external": max(1, phase.batch_size - task), "task": task}

    def _mean_over_cycle(self, per_step: dict[Origin, float]) -> float:
        if self.phase.mixing == "blended":
            return sum(per_step.values())
        shares = {"external": self.phase.external, "task": self.phase.task}
        return sum(shares[origin] * value for origin, value in per_step.items()) / sum(shares.values())
