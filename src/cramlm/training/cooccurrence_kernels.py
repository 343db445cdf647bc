"""Counting which tokens stand near which: a compiled loop over plain arrays."""

from __future__ import annotations

from typing import Any

from cramlm.compiled import jit


def _count_neighbours(ids, starts, column, weights, counts):  # type: ignore[no-untyped-def]
    """counts[a, column[b]] += weights[distance - 1] for all tokens a, b of a sequence that are at most len(weights) places apart.

    ids: end to end; starts: (n + 1,), where sequences begin. column: a place in the table for each token as a neighbour, -1 for none.
    """
    for sequence in range(len(starts) - 1):
        for right in range(starts[sequence], starts[sequence + 1]):
            there = column[ids[right]]
            for distance in range(1, min(len(weights), right - starts[sequence]) + 1):
                left = ids[right - distance]
                if there >= 0:
                    counts[left, there] += weights[distance - 1]
                if column[left] >= 0:
                    counts[ids[right], column[left]] += weights[distance - 1]


count_neighbours: Any = jit(_count_neighbours)
