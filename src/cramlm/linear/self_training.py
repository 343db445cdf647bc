"""Self-training: fit `static` once more on labelled and unlabelled texts, the latter with labels that the linear models predict.

The fitted linear models together label the unlabelled texts (teacher.py). The weight of a text is the probability of its label, and the
weights of all of them add up to `UNLABELLED_WEIGHT` times the number of labelled texts. The vocabulary of TF-IDF comes from both, so that
words which no labelled text has get weights. Labels are hard: a regression that is fitted to its own probabilities stays what it is
(Scudder 1965, "Probability of error of some adaptive pattern-recognition machines"; Lee 2013, "Pseudo-label").
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cramlm.evaluation.combination import HeldOut, calibrate_on_dev
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, distinct_rows, format_metric
from cramlm.linear.files import Setting
from cramlm.linear.fit import (
    FEW_TEXTS,
    Candidate,
    DevCandidates,
    LinearFit,
    SearchSpace,
    has_too_many_characters,
    in_features_of,
    sample_texts,
)
from cramlm.linear.model import LinearModel
from cramlm.linear.solvers import SOLVERS, on_one_blas_thread
from cramlm.linear.teacher import Teacher, align_distribution, label_counts
from cramlm.records import Emit, Event, Example, FloatArray, Task, silent

UNLABELLED_WEIGHT: Final = 3.0
"""Of all unlabelled texts together, as a multiple of the number of labelled ones; 1 to 10 give equal scores (docs/log.md)."""
MAX_UNLABELLED: Final = 5000
"""Of more unlabelled texts a random sample is read: the inner products of all texts take 4 bytes for each pair."""
MAX_LOSS_INCREASE: Final = 0.1
"""In calibrated dev loss, nats per text: texts of another kind than the task's give labels that raise it."""
MAX_SCORE_DECREASE: Final = 0.05
"""In dev score. The score before is the best of hundreds of models and so a little too high, which explains a smaller decrease. A larger
one means that the labels of the unlabelled texts are wrong, mostly because rare labels are hardly ever given."""
_SAMPLE_STREAM: Final = 0x5E1F


def reads_unlabelled(task: Task) -> bool:
    """Return True if `self_trained` uses the unlabelled texts of the task: single labels, and at most `FEW_TEXTS` labelled texts."""
    return task.kind == "classification" and bool(task.unlabelled) and len(task.with_label_texts.train) <= FEW_TEXTS


def self_training_reads_seed(task: Task) -> bool:
    """Return True if `self_trained` samples the unlabelled texts, or all texts together because they are too long."""
    if not reads_unlabelled(task):
        return False
    return len(task.unlabelled) > MAX_UNLABELLED or has_too_many_characters((*task.with_label_texts.train, *task.unlabelled))


@on_one_blas_thread
def self_trained(
    fit: LinearFit, others: Mapping[str, LinearModel], task: Task, space: SearchSpace, *, stage: str, emit: Emit = silent
) -> LinearFit:
    """Return `fit` after self-training in the same variant, scheme and weights; or `fit`, if that is far better on dev.

    C is the one with the lowest calibrated dev loss: the dev score of a few rare labels would decide by chance. others: the other linear
    models of the task by name, which label the unlabelled texts together with `fit`. stage: the name under which events are emitted. The
    same arguments give the same result.
    """
    assert reads_unlabelled(task), "self-training needs unlabelled texts and single labels"
    assert isinstance(fit.model.setting, Setting), "naive Bayes reads unlabelled texts itself"
    began = time.perf_counter()
    unlabelled = sample_texts(task.unlabelled, MAX_UNLABELLED, seed=space.seed, stream=_SAMPLE_STREAM)
    emit(Event("start", stage, f"self-training on {len(unlabelled):,} of {len(task.unlabelled):,} unlabelled texts"))
    teacher = Teacher.of({**others, "static": fit.model}, task, metric=space.metric)
    learned, weights = _with_labels(task, unlabelled, teacher)
    dev = DevCandidates[Setting](task, space.metric)
    trained, candidate, loss = _fit_again(fit.model, learned, weights, dev, task, space)
    before = _dev_loss(fit.model.logits([example.divided_text for example in task.dev]), task, space.metric)
    if loss > before + MAX_LOSS_INCREASE or candidate.score < fit.score - MAX_SCORE_DECREASE:
        scores = " without, ".join(format_metric(space.metric, score) for score in (fit.score, candidate.score))
        shown = f"{METRIC_NAMES[space.metric]} on dev {scores} with it; loss {before:.2f}, {loss:.2f} nats"
        emit(Event("done", stage, f"self-training left out: {shown}"))
        result = fit
    else:
        emit(Event("done", stage, f"self-trained, {dev.message(candidate)}", data={"score": candidate.score}))
        nothing = HeldOut(np.zeros(0, dtype=np.int64), np.zeros((0, len(task.labels)), dtype=np.float32))  # of the model before
        result = replace(fit, model=trained, score=candidate.score, held_out=nothing)
    predictions = distinct_rows(np.concatenate([fit.predictions, dev.distinct_predictions()]))
    seconds = fit.seconds + time.perf_counter() - began
    return replace(result, tried=(*fit.tried, *dev.tried), predictions=predictions, seconds=seconds)


def _fit_again(
    model: LinearModel, learned: Task, weights: FloatArray, dev: DevCandidates[Setting], task: Task, space: SearchSpace
) -> tuple[LinearModel, Candidate[Setting], float]:
    """Fit the texts of `learned`, of these weights (n,), with every C; return the model of the lowest calibrated dev loss, and that loss.

    dev: gets every C as a candidate.
    """
    assert isinstance(model.setting, Setting)
    setting, solver = replace(model.setting, unlabelled_weight=UNLABELLED_WEIGHT), SOLVERS[task.kind]
    rows, span = in_features_of(model, learned, seed=space.seed)
    targets = solver.targets(learned)[rows.kept]
    fitter = solver.fitter(span.coordinates.rows, targets, setting, outputs=len(task.labels), seed=space.seed, weights=weights[rows.kept])
    chosen, lowest = None, math.inf
    for c in sorted(space.c):
        coefficients = fitter(c)
        logits = solver.logits(setting.scheme, coefficients.scores(span.dev))
        candidate = dev.add(rows.tfidf.variant, replace(setting, c=c), dev.scored(logits))
        if (loss := _dev_loss(logits + dev.adjustment(candidate), task, space.metric)) < lowest:
            chosen, lowest = (candidate, coefficients), loss
    assert chosen is not None, "there is at least one C"
    candidate, coefficients = chosen
    trained = replace(
        model,
        tfidf=rows.tfidf,
        coefficients=span.coordinates.restore(coefficients, *rows.train_parts(setting.vector_weight)),
        setting=candidate.setting,
        adjustment=dev.adjustment(candidate),
        tau=candidate.tau,
    )
    return trained, candidate, lowest


def _with_labels(task: Task, unlabelled: Sequence[Example], teacher: Teacher) -> tuple[Task, FloatArray]:
    """Return the task with the labels of the teacher on unlabelled texts, after the training and label texts; and the weights of all, (n,).

    Distribution alignment adapts the mean of the teacher's probabilities to the label frequencies of the training texts.
    """
    probabilities = align_distribution(teacher.soft_labels([example.divided_text for example in unlabelled]), label_counts(task))
    labels = [task.labels[number] for number in probabilities.argmax(axis=1).tolist()]
    known = task.with_label_texts.train
    learned = (*known, *(replace(text, label=label) for text, label in zip(unlabelled, labels, strict=True)))
    confidence = probabilities.max(axis=1)
    weights = UNLABELLED_WEIGHT * len(known) * confidence / confidence.sum()
    return replace(task, train=learned, label_texts=()), np.concatenate([np.ones(len(known)), weights]).astype(np.float32)


def _dev_loss(logits: FloatArray, task: Task, metric: str) -> float:
    """Return the calibrated loss of dev logits (texts, labels) in nats per text."""
    return calibrate_on_dev(task, KINDS[task.kind].outputs(logits), metric=metric).loss
