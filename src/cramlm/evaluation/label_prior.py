"""How much the frequency of a label counts in an answer.

Training asks about every text alike, so that a model prefers frequent labels; macro-F1 asks about every label alike. A share of the log of
each label's frequency in training is taken from its logit, and dev says which share is best: none, all, or between. One number, chosen as
the checkpoint is chosen; it moves into the classifier's bias, so that an exported model needs nothing but its weights. Where a text has
several labels it is the log-odds of each (kinds.py), which moves the threshold of rare ones down.

The same choice is made at every look at dev while labels are learnt: what is scored are the weights as they would be handed on. Scored
without it, the weights that prefer frequent labels least would win, whatever the others know (docs/log.md).

Source: Menon et al. 2021, "Long-tail learning via logit adjustment", post-hoc adjustment; the share is their tau.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cramlm.evaluation.evaluate import predict_logits, sequences_of
from cramlm.evaluation.kinds import KINDS
from cramlm.model.device import Precision
from cramlm.model.model import Model
from cramlm.model.tokenization import Tokenizer
from cramlm.records import FloatArray, Task, TaskKind

SHARES: Final = tuple(tenth / 10 for tenth in range(11))


@dataclass(frozen=True, slots=True, eq=False)
class PriorShift:
    """What is added to the logits, float32 (labels,); in a classification its mean is 0. before, after: the dev score with share 0 and with
    `share`. figures: all of dev's with `share`, by name.
    """

    share: float
    shift: FloatArray
    before: float
    after: float
    figures: Mapping[str, float]


def shift_on_dev(model: Model, tokenizer: Tokenizer, task: Task, *, max_length: int, precision: Precision, choose_by: str) -> PriorShift:
    """As `choose_shift`, for what `model` makes of the task's dev texts.

    Raises:
        DivergedError: if the model's numbers are not finite.
    """
    sequences = sequences_of(tokenizer, task.dev, max_length=max_length, prompt=model.prompt)
    logits = predict_logits(model, sequences, precision=precision, pad_id=tokenizer.pad_id)
    true, trained_on = ([str(example.label) for example in split] for split in (task.dev, task.train))
    return choose_shift(logits, true, task.labels, trained_on=trained_on, choose_by=choose_by, kind=task.kind)


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

    def reached(share: float) -> Mapping[str, float]:
        outputs = judge.outputs((logits + share * rarity).astype(np.float32))
        return judge.score(true, judge.spelled(outputs, labels), labels).figures

    figures = [reached(share) for share in SHARES]
    scores = [each[choose_by] for each in figures]
    best = int(np.argmax(scores))
    return PriorShift(SHARES[best], (SHARES[best] * rarity).astype(np.float32), scores[0], scores[best], figures[best])
