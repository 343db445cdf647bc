"""`python poisoned_fit.py RANK CALLS fit ...`: the command, but after so many losses those of one rank are NaN; for R10, under torchrun."""

from __future__ import annotations

import itertools
import math
import os
import sys

from torch import Tensor

import cramlm.training.terms.base as terms
from cramlm.cli.app import main


def poison(after: int) -> None:
    """From call `after` on this process computes NaN."""
    right, calls = terms.weighted_cross_entropy, itertools.count()

    def wrong(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return right(logits * math.nan if next(calls) >= after else logits, targets, weights)

    terms.weighted_cross_entropy = wrong  # type: ignore[assignment]


if __name__ == "__main__":
    rank, after = sys.argv[1:3]
    sys.argv[1:] = sys.argv[3:]
    if os.environ["RANK"] == rank:
        poison(int(after))
    main()
