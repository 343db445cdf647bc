"""Logit adjustment chosen on dev.

Training weighs every text alike, so that a model prefers frequent labels; macro-F1 weighs every label alike. tau times the log of each
label's frequency in training is subtracted from its logit, and dev decides tau: none, all, or between. It moves into the classifier's
bias, so that an exported model needs nothing but its weights. Where a text has several labels the log-odds of each label are used, which
lowers the threshold of rare ones.

The same choice is made at every evaluation on dev while labels are learnt. Scored without it, the weights that prefer frequent labels least
would win, whatever the others know (docs/log.md).

Source: Menon et al. 2021, "Long-tail learning via logit adjustment", post-hoc adjustment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.evaluation.choice import TAUS, DevScorer, logit_adjustments
from cramlm.evaluation.evaluate import predict_logits, sequences_of
from cramlm.evaluation.kinds import KINDS
from cramlm.model.device import Precision
from cramlm.model.model import Model
from cramlm.model.tokenizer import Tokenizer
from cramlm.records import FloatArray, Scale, Task, TaskKind


@dataclass(frozen=True, slots=True, eq=False)
class Adjustment:
    """The tau that is best on dev, the smallest of equal ones.

    values: added to the logits, float32 (labels,); in a classification their mean is 0. before, after: the dev score with tau = 0 and with
    `tau`. figures: all scores on dev with `tau`, by name. predictions: on dev with every tau tried, (taus, n, ...).
    """

    tau: float
    values: FloatArray
    before: float
    after: float
    figures: Mapping[str, float]
    predictions: npt.NDArray[Any]


def adjust_on_dev(
    model: Model,
    tokenizer: Tokenizer,
    task: Task,
    *,
    max_length: int,
    precision: Precision,
    metric: str,
    taus: Sequence[float] = TAUS,
    scale: Scale = Scale(),  # noqa: B008 - immutable
) -> Adjustment:
    """As `choose_adjustment`, for the predictions of `model` on the task's dev texts. scale: of a model that has not yet taken its number's
    unit.

    Raises:
        DivergedError: if the model's numbers are not finite.
    """
    sequences = sequences_of(tokenizer, task.dev, max_length=max_length, prompt=model.prompt)
    logits = predict_logits(model, sequences, precision=precision, pad_id=tokenizer.pad_id)
    logits = logits * np.float32(scale.spread) + np.float32(scale.mean)
    true, trained_on = ([str(example.label) for example in split] for split in (task.dev, task.train))
    return choose_adjustment(logits, true, task.labels, trained_on=trained_on, metric=metric, kind=task.kind, taus=taus)


def choose_adjustment(
    logits: FloatArray,
    true: Sequence[str],
    labels: Sequence[str],
    *,
    trained_on: Sequence[str],
    metric: str,
    kind: TaskKind = "classification",
    taus: Sequence[float] = TAUS,
) -> Adjustment:
    """The tau that gives dev's highest `metric`.

    logits: (n, labels) of dev, whose labels are `true`. trained_on: the labels of the training texts; one more of each label is counted.
    """
    judge, scorer = KINDS[kind], DevScorer.of(kind, true, labels, metric)
    adjustments = logit_adjustments(kind, trained_on, labels, taus)
    predictions = np.stack([scorer.predictions(logits + values) for values in adjustments.values()])
    scores = scorer.scores(predictions)
    best = int(np.argmax(scores))
    tau, values = list(adjustments.items())[best]
    outputs = judge.outputs((logits + values).astype(np.float32))
    figures = judge.score(true, judge.spelled(outputs, labels), labels).figures
    return Adjustment(tau, values, float(scores[0]), float(scores[best]), figures, predictions)
