"""Packing of token sequences into rows without padding between them, and sharding of the rows over ranks and threads."""

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
    """Pack sequences into rows of at most `row_length` positions by first-fit decreasing: longest first, each into the first row with room.

    The batch numbers its sequences by their position in the rows. Rows have the length of the fullest one, rounded up to a multiple of 8.
    The batch has no masks. Deterministic: sequences of equal length keep their order.
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
    filled = np.repeat(start, lengths) + position

    token_ids = np.full(rows * length, pad_id, dtype=np.int64)
    token_ids[filled] = np.concatenate([sequences[index] for index in order])
    sequence = np.full(rows * length, -1, dtype=np.int64)
    sequence[filled] = np.repeat(np.arange(len(order)), lengths)
    position_in_sequence = np.zeros(rows * length, dtype=np.int64)
    position_in_sequence[filled] = position
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
    """Arrange values of each token of the sequences, flat, as `pack` arranges the tokens; 0 for padding."""
    lengths = [len(each) for each in values]
    number = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    nothing = np.zeros(len(lengths), dtype=np.int64)
    layout = pack(number, labels=nothing, external=nothing > 0, row_length=row_length, pad_id=-1)
    return np.append(np.concatenate(values), np.zeros(1, values[0].dtype))[layout.token_ids.ravel()]


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


def shard(batch: Batch, index: int, count: int) -> Batch:
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
    """A batch of these rows (rising) with these of its sequences, renumbered; the tokens of other sequences become padding."""
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
        chance=batch.chance[kept] if len(batch.chance) else batch.chance,
        targets=batch.targets[sequences] if len(batch.targets) else batch.targets,
        term=batch.term,
    )
