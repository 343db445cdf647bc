"""Self-training: fit `static` once more on labelled and unlabelled texts, the latter with labels that the linear models predict.

The fitted linear models together label the unlabelled texts (teacher.py). The weight of a text is the probability of its label, and the
weights of all of them add up to `UNLABELLED_WEIGHT` times the number of labelled texts. The vocabulary comes from both, so that
words which no labelled text has get weights. Labels are hard: a regression that is fitted to its own probabilities stays what it is
(Scudder 1965, "Probability of error of some adaptive pattern-recognition machines"; Lee 2013, "Pseudo-label").
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from cramlm.evaluation.combination import HeldOut, calibrate_on_dev
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, DevScorer, distinct_rows, format_metric
from cramlm.linear.cross_validation import fold_predictor
from cramlm.linear.files import Setting
from cramlm.linear.fit import (
    FEW_TEXTS,
    Candidate,
    DevCandidates,
    LinearFit,
    Refitting,
    SearchSpace,
    decisive_folds,
    has_too_many_characters,
    sample_texts,
)
from cramlm.linear.model import LinearModel, beside
from cramlm.linear.solvers import Coordinates, inner_products, on_one_blas_thread
from cramlm.linear.teacher import Teacher, align_distribution, label_counts
from cramlm.records import Emit, Event, FloatArray, IntArray, Task, silent

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
    fit: LinearFit,
    others: Mapping[str, LinearModel],
    task: Task,
    space: SearchSpace,
    *,
    held_out: Mapping[str, HeldOut] | None = None,
    emit: Emit = silent,
) -> LinearFit:
    """Return `fit` after self-training in the same variant, scheme and weights; or `fit`, if that is far better on dev.

    C is the one with the lowest calibrated dev loss: the dev score of a few rare labels would decide by chance. If dev is small, so that
    `fit` predicts training texts out of fold, these texts decide with it: each is predicted after self-training without its fold. others:
    the other linear models of the task by name, which label the unlabelled texts together with `fit`. held_out: what they predict out of
    fold, by name. The same arguments give the same result.
    """
    assert reads_unlabelled(task), "self-training needs unlabelled texts and single labels"
    assert isinstance(fit.model.setting, Setting), "naive Bayes reads unlabelled texts itself"
    began = time.perf_counter()
    read = min(len(task.unlabelled), MAX_UNLABELLED)
    emit(Event("start", "static", f"self-training on {read:,} of {len(task.unlabelled):,} unlabelled texts"))
    known = held_out or {}
    evidence = {**known, "static": fit.held_out} if known.keys() == others.keys() else None
    teacher = Teacher.of({**others, "static": fit.model}, task, metric=space.metric, held_out=evidence)
    learned, weights = with_unlabelled(task, teacher, seed=space.seed)
    training = _SelfTraining(fit, learned, weights, task, space)
    trained, candidate, outputs = training.best()
    whole, dev = training.whole, training.dev
    before_on_dev = KINDS[task.kind].outputs(fit.model.logits([each.divided_text for each in task.dev]))
    before = np.concatenate([before_on_dev, training.held_out.outputs])
    losses = [calibrate_on_dev(whole, each).loss for each in (before, outputs)]
    scores = [max(each.score for each in fit.tried) if len(training.held_out.rows) else fit.score, candidate.score]
    if losses[1] > losses[0] + MAX_LOSS_INCREASE or scores[1] < scores[0] - MAX_SCORE_DECREASE:
        both = " without, ".join(format_metric(space.metric, score) for score in scores)
        shown = f"{METRIC_NAMES[space.metric]} on {dev.texts} {both} with it; loss {losses[0]:.2f}, {losses[1]:.2f} nats"
        emit(Event("done", "static", f"self-training left out: {shown}"))
        result = fit
    else:
        emit(Event("done", "static", f"self-trained, {dev.message(candidate)}", data={"score": candidate.score}))
        of_dev = DevScorer.of(task, space.metric)
        (score,) = of_dev.scores(of_dev.predictions_of_outputs(outputs[: len(task.dev)])[None]).tolist()
        result = replace(fit, model=trained, score=score, held_out=replace(training.held_out, outputs=outputs[len(task.dev) :]))
    predictions = distinct_rows(np.concatenate([fit.predictions, dev.distinct_predictions()]))
    seconds = fit.seconds + time.perf_counter() - began
    return replace(result, tried=(*fit.tried, *dev.tried), predictions=predictions, seconds=seconds)


class _SelfTraining:
    """Fits a model again on labelled and unlabelled texts, with every C.

    whole: the task with the texts that decide as dev. dev: every C as a candidate. held_out: what `fit` predicts for the training texts
    among them.
    """

    def __init__(self, fit: LinearFit, learned: Task, weights: FloatArray, task: Task, space: SearchSpace) -> None:
        """learned: the task whose training texts are those of `task`, its label texts and the unlabelled ones. weights: of them, (n,)."""
        assert isinstance(fit.model.setting, Setting)
        self._task, self._space, self._before, self._adjustment = task, space, fit.model.setting, fit.model.adjustment
        self._setting = replace(self._before, unlabelled_weight=UNLABELLED_WEIGHT)
        self._again = Refitting(fit.model, self._setting, learned, seed=space.seed, weights=weights)
        # Folds are of all training texts; of too many characters a sample is fitted.
        all_kept = len(self._again.rows.kept) == len(learned.train)
        self._folds = decisive_folds(task) if len(fit.held_out.rows) and all_kept else []
        self.held_out = fit.held_out if self._folds else HeldOut(fit.held_out.rows[:0], fit.held_out.outputs[:0])
        rows = self.held_out.rows.tolist()
        self.whole, self.dev = task.with_training_in_dev(rows), DevCandidates[Setting](task, space.metric, rows)

    def best(self) -> tuple[LinearModel, Candidate[Setting], FloatArray]:
        """Return the model of the lowest calibrated loss on the texts that decide, and its outputs for these texts, (n, labels)."""
        again = self._again
        predictors = [self._fold_predictor(fold) for fold in self._folds]
        chosen, lowest = None, math.inf
        for c in sorted(self._space.c):
            coefficients = again.fit(c)
            of_dev = again.solver.logits(self._setting.scheme, coefficients.scores(again.matrices.dev))
            logits = np.concatenate([of_dev, *(predict(c) for predict in predictors)])
            candidate = self.dev.add(again.rows.ngrams.variant, replace(self._setting, c=c), self.dev.scored(logits))
            outputs = KINDS[self._task.kind].outputs(logits + self.dev.adjustment(candidate))
            if (loss := calibrate_on_dev(self.whole, outputs).loss) < lowest:
                chosen, lowest = (candidate, coefficients, outputs), loss
        assert chosen is not None, "there is at least one C"
        candidate, coefficients, outputs = chosen
        adjustment = self.dev.adjustment(candidate)
        return again.model_of(coefficients, setting=candidate.setting, adjustment=adjustment, tau=candidate.tau), candidate, outputs

    def _fold_predictor(self, fold: IntArray) -> Callable[[float], FloatArray]:
        """Return a function from C to the logits of a fold by a model of the other folds and the unlabelled texts.

        The model before self-training, fitted without the fold, labels the unlabelled texts; the other linear models learned from the fold.
        """
        solver, targets, count = self._again.solver, self._again.targets, len(self._task.with_label_texts.train)
        texts = np.arange(len(targets))
        inside, unlabelled = np.isin(texts, fold), texts >= count
        rows = self._without(fold, targets, (~unlabelled).astype(np.float32))
        labelled = Coordinates.of(inner_products(rows[:count], rows[:count]))
        of_all = np.concatenate([labelled.rows, labelled.transform(inner_products(rows[count:], rows[:count]))])
        label = fold_predictor(solver, of_all, targets, inside | unlabelled, self._before)
        logits = label(self._before.c)[len(fold) :] + self._adjustment
        labels, weights = _labels_with_weights(KINDS[self._task.kind].outputs(logits), self._task)
        targets = np.concatenate([targets[:count], labels])
        rows = self._without(fold, targets, weights)
        in_coordinates = Coordinates.of(inner_products(rows, rows)).rows
        return fold_predictor(solver, in_coordinates, targets, inside, self._setting, weights)

    def _without(self, fold: IntArray, targets: IntArray, weights: FloatArray) -> Any:
        """Return the matrix of all texts, CSR (n, features), whose weights of terms do not depend on the labels of a fold."""
        known = self._again.rows
        rows = self._again.features.without(known.ngrams.variant, fold, targets, weights)
        return rows if known.vectors is None else beside(rows, known.vectors[0], self._setting.vector_weight)


def with_unlabelled(task: Task, teacher: Teacher, *, seed: int) -> tuple[Task, FloatArray]:
    """Return the task with unlabelled texts, to which the teacher gives labels, after the training and label texts; and the weights of all,
    (n,).
    """
    unlabelled = sample_texts(task.unlabelled, MAX_UNLABELLED, seed=seed, stream=_SAMPLE_STREAM)
    numbers, weights = _labels_with_weights(teacher.soft_labels([example.divided_text for example in unlabelled]), task)
    labels = [task.labels[number] for number in numbers.tolist()]
    learned = (*task.with_label_texts.train, *(replace(text, label=label) for text, label in zip(unlabelled, labels, strict=True)))
    return replace(task, train=learned, label_texts=()), weights


def _labels_with_weights(probabilities: FloatArray, task: Task) -> tuple[IntArray, FloatArray]:
    """Return label ids of unlabelled texts, (texts,), from their probabilities (texts, labels), and the weights of labelled and unlabelled
    texts, (n,).

    Distribution alignment adapts the mean of the probabilities to the label frequencies of the training texts.
    """
    aligned, known = align_distribution(probabilities, label_counts(task)), len(task.with_label_texts.train)
    confidence = aligned.max(axis=1)
    weights = UNLABELLED_WEIGHT * known * confidence / confidence.sum()
    return aligned.argmax(axis=1), np.concatenate([np.ones(known), weights]).astype(np.float32)
