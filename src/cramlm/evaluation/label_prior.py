"""How much the frequency of a label counts in an answer.

Training asks about every text alike, so that a model prefers frequent labels; macro-F1 asks about every label alike. A share of the log of
each label's frequency in training is taken from its logit, and dev says which share is best: none, all, or between. One number, chosen as
the checkpoint is chosen; it moves into the classifier's bias, so that an exported model needs nothing but its weights. Where a text has
several labels it is the log-odds of each (kinds.py), which moves the threshold of rare ones down.

Source: Menon et al. 2021, "Long-tail learning via logit adjustment", post-hoc adjustment; the share is their tau.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cramlm.evaluation.kinds import KINDS
from cramlm.records import FloatArray, TaskKind

SHARES: Final = tuple(tenth / 10 for tenth in range(11))


@dataclass(frozen=True, slots=True, eq=False)
class PriorShift:
    """What is added to the logits, float32 (labels,); in a classification its mean is 0. before, after: the dev score with share 0 and with
    `share`.
    """

    share: float
    shift: FloatArray
    before: float
    after: float


def choose_shift(
    logits: FloatArray,
    true: Sequence[str],
    labels: Sequence[str],
    *,
    trained_on: Sequence[str],
    choose_by: str,
    kind: TaskKind = "classification",
) -> PriorShift:
    """The share that gives dev's highest `choose_by`, the smallest of equal ones.

    logits: (n, labels) of dev, whose labels are `true`. trained_on: the labels of the training texts; one more of each label is counted.
    """
    judge = KINDS[kind]
    rarity = judge.rarity(trained_on, labels)

    def reached(share: float) -> float:
        outputs = judge.outputs((logits + share * rarity).astype(np.float32))
        return judge.score(true, judge.spelled(outputs, labels), labels).figures[choose_by]

    scores = [reached(share) for share in SHARES]
    best = int(np.argmax(scores))
    return PriorShift(SHARES[best], (SHARES[best] * rarity).astype(np.float32), scores[0], scores[best])
