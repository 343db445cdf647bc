"""A compiled function that counts which tokens occur near each other."""

from __future__ import annotations

from cramlm.storage.compiled import jit

LARGEST = 2**31 - 1  # of int32; sums are taken in 64 bits


@jit
def count_contexts(ids, starts, column, weights, counts):  # type: ignore[no-untyped-def]
    """counts[a, column[b]] += weights[distance - 1] for all tokens a, b of a sequence that are at most len(weights) positions apart.

    A count stays at `LARGEST`. ids: sequences, concatenated; starts: (n + 1,), their offsets. column: the column of each token as a
    context, -1 for none.
    """
    for sequence in range(len(starts) - 1):
        for right in range(starts[sequence], starts[sequence + 1]):
            context = column[ids[right]]
            for distance in range(1, min(len(weights), right - starts[sequence]) + 1):
                left = ids[right - distance]
                if context >= 0:
                    counts[left, context] = min(counts[left, context] + weights[distance - 1], LARGEST)
                if column[left] >= 0:
                    counts[ids[right], column[left]] = min(counts[ids[right], column[left]] + weights[distance - 1], LARGEST)
