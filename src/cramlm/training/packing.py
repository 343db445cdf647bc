"""Token sequences side by side in rows, without padding between them; and the rows dealt over ranks and threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.records import Batch, BoolArray, FloatArray, IntArray

_ROUND = 8  # rows end at a multiple of this: kernels like it, and shapes repeat


def pack(
    sequences: Sequence[npt.NDArray[Any]],
    *,
    labels: IntArray,
    external: BoolArray,
    row_length: int,
    pad_id: int,
    soft_labels: FloatArray | None = None,
    targets: FloatArray | None = None,
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
        targets=np.zeros((len(order), 0), dtype=np.float32) if targets is None else targets[order],
    )


def lay_out(values: Sequence[npt.NDArray[Any]], *, row_length: int) -> npt.NDArray[Any]:
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


def shard(batch: Batch, index: int, count: int) -> Batch:
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
        return replace(empty, masked=nothing, mlm_labels=nothing, chance=empty.chance[:0])
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
        causal_from=batch.causal_from[sequences] if len(batch.causal_from) else batch.causal_from,
        chance=batch.chance[kept] if len(batch.chance) else batch.chance,
        targets=batch.targets[sequences] if len(batch.targets) else batch.targets,
        term=batch.term,
    )
