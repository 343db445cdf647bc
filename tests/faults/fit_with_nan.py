"""`python fit_with_nan.py RANK CALLS fit ...`: run the command, with a loss of NaN on one rank after so many calls, under torchrun."""

from __future__ import annotations

import itertools
import math
import os
import sys

from torch import Tensor

import cramlm.training.terms.base as terms
from cramlm.cli.app import main


def replace_loss(after: int) -> None:
    """Compute NaN from call `after` on in this process."""
    original, calls = terms.weighted_cross_entropy, itertools.count()

    def loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return original(logits * math.nan if next(calls) >= after else logits, targets, weights)

    terms.weighted_cross_entropy = loss


if __name__ == "__main__":
    rank, after = sys.argv[1:3]
    sys.argv[1:] = sys.argv[3:]
    if os.environ["RANK"] == rank:
        replace_loss(int(after))
    main()
