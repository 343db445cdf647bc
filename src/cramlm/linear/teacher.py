"""Soft labels of the linear teacher: combined predictions of the fitted linear models for passages, and predictions of one of them for
the training texts, each by a fit without its fold.

A small encoder trained on a few hundred labels does not find the lexical cues that logistic regression fits in seconds; co-occurrence
vectors add which words are similar, naive Bayes the words of unlabelled texts. Their combined probabilities (evaluation/combination.py)
are targets of the encoder's classifier beside the gold labels: a distribution over the labels, a probability for each label where a text
may have several, or the number of a regression, standardized like the gold numbers. With few labels distribution alignment (Berthelot et
al. 2020) adapts their mean to the frequencies of the gold labels, because the passages were retrieved for the training texts. The other
kinds of tasks have none: independent probabilities have no common sum, numbers no frequencies.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, assert_never

import numpy as np

from cramlm.evaluation.calibration import calibrate, calibrate_labels, calibrate_numbers
from cramlm.evaluation.combination import Combination, HeldOut, combine_on_dev
from cramlm.evaluation.kinds import KINDS
from cramlm.io.threads import Workers
from cramlm.linear.cross_validation import FOLDS, fold_predictor, folds
from cramlm.linear.files import Setting
from cramlm.linear.fit import FEW_TEXTS, MAX_KEPT_VALUES, in_coordinates
from cramlm.linear.model import LinearModel
from cramlm.linear.solvers import Coordinates, inner_products, on_one_blas_thread, solver_of, worthwhile_threads
from cramlm.records import BoolArray, Emit, Event, FloatArray, IntArray, Scale, Task, TaskKind, silent

TRAINING_TEXTS_FILE: Final = "task.npy"
"""In the folder of a run's teacher: `out_of_fold_labels`."""
ALIGNMENT_PRIOR: Final = 100
"""Weight, in passages, of the gold labels' frequencies in the mean prediction of distribution alignment."""
_BLOCK: Final = 2_000_000  # characters of texts that are predicted at a time: their matrices have some 30 MB


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """The fitted linear models of a run, whose combined outputs are soft labels.

    models: by name. combination: their calibrations and weights. scale: of the training numbers.
    """

    models: Mapping[str, LinearModel]
    combination: Combination
    scale: Scale

    @classmethod
    def of(cls, models: Mapping[str, LinearModel], task: Task, *, metric: str, held_out: Mapping[str, HeldOut] | None = None) -> Teacher:
        """Combine models that were fitted on the training texts of `task`. metric: the dev score that chooses tau. held_out: what they
        predict out of fold, by name.
        """
        texts, kind = [example.divided_text for example in task.dev], KINDS[task.kind]
        outputs = {name: kind.outputs(model.logits(texts)) for name, model in models.items()}
        combination = combine_on_dev(task, outputs, metric=metric, held_out=held_out).combination
        return cls({name: models[name] for name in combination.models}, combination, task.scale)

    def soft_labels(self, texts: Sequence[str], *, threads: int = 1, emit: Emit = silent) -> FloatArray:
        """Return the targets of texts, float32 (texts, labels): probabilities, or standardized numbers.

        emit: gets progress events of the stage `teacher`.
        """
        if not texts:
            return np.zeros((0, len(self.combination.labels)), dtype=np.float32)
        block_of = np.cumsum([len(text) for text in texts]) // _BLOCK
        bounds = [0, *(np.flatnonzero(np.diff(block_of)) + 1).tolist(), len(texts)]
        parts = list[FloatArray]()
        with Workers(threads, emit=emit) as workers:
            blocks = [(first, workers.start(functools.partial(self._soft_labels, texts[first:end]))) for first, end in pairwise(bounds)]
            for first, wait in blocks:
                workers.emit(Event("progress", "teacher", "soft labels", done=first, total=len(texts), unit="texts"))
                parts.append(wait())
        return np.concatenate(parts)

    def _soft_labels(self, texts: Sequence[str]) -> FloatArray:
        kind = KINDS[self.combination.kind]
        shared = next(iter(self.models.values())).prepare(texts)
        outputs = {name: kind.outputs(model.logits_of_features(model.features(shared))) for name, model in self.models.items()}
        return self.scale.standardized(kind.outputs(self.combination.logits(outputs)))


@on_one_blas_thread
def out_of_fold_labels(model: LinearModel, task: Task, *, seed: int, threads: int = 1, emit: Emit = silent) -> FloatArray:
    """Calibrated targets of the training texts, float32 (training texts, labels), each predicted by `model` fitted without its fold.

    threads: folds that are fitted at a time. emit: gets progress events of the stage `teacher`.

    They are probabilities, or standardized numbers. NaN where nothing can be predicted: the row of a text if no text outside its fold has
    its label; where texts may have several labels, a label of a text if all texts outside its fold have it, or none.
    """
    targets = solver_of(task).targets(task)
    held_out = _out_of_fold(model, task, seed=seed, threads=threads, emit=emit)
    predicted = np.isfinite(held_out)
    if predicted.any():
        held_out[predicted] = _calibrated(held_out, predicted, targets, model.kind)
    return task.scale.standardized(held_out)


def _calibrated(held_out: FloatArray, predicted: BoolArray, targets: Any, kind: TaskKind) -> FloatArray:
    """Return the outputs where `predicted` (n, labels), calibrated to their own targets; flat."""
    match kind:
        case "classification":
            rows = predicted.all(axis=1)
            calibration = calibrate(held_out[rows], targets[rows], np.zeros(held_out.shape[1]))
            return np.exp(calibration.log_probabilities(held_out[rows])).ravel()
        case "multi-label":  # one scale for all labels, so that they are calibrated like texts of a single label
            outputs = held_out[predicted][:, None]
            calibration = calibrate_labels(outputs, targets[predicted][:, None] > 0, np.zeros(1))
            return KINDS[kind].outputs(calibration.logits(outputs, kind).astype(np.float32)).ravel()
        case "regression":
            outputs = held_out[predicted][:, None]
            return calibrate_numbers(outputs, targets[predicted[:, 0]]).logits(outputs, kind).astype(np.float32).ravel()
        case _:
            assert_never(kind)


def _out_of_fold(model: LinearModel, task: Task, *, seed: int, threads: int, emit: Emit) -> FloatArray:
    """(training texts, labels): outputs for each text of a model of the same setting, fitted on the other folds and the label texts."""
    setting = model.setting
    assert isinstance(setting, Setting), "a regression is fitted again without each fold"
    solver, outputs = solver_of(task, seed=seed), KINDS[model.kind].outputs
    learned = task.with_label_texts
    texts, targets = [example.divided_text for example in learned.train], solver.targets(learned)
    counted, labels = model.prepare(texts), solver.labels(targets)
    dense = len(texts) <= FEW_TEXTS or in_coordinates(setting, len(texts), len(task.labels))
    count = len(task.train)
    fold = np.full(len(texts), -1)
    fold[:count] = folds(texts[:count], solver.strata(targets[:count]), seed)
    held_out = np.full((len(texts), len(task.labels)), np.nan, dtype=np.float32)

    def predict_fold(number: int) -> None:
        inside = fold == number
        predictable = solver.predictable(targets[~inside], targets[inside])
        if not predictable.any():
            return
        without = model if labels is None else model.weighted_by_labels(counted, labels, (~inside).astype(np.float32))
        rows = without.features(counted)
        if dense:
            products = inner_products(rows, rows[~inside])
            rows = Coordinates.of(products[~inside]).transform(products)
        predict = fold_predictor(replace(solver, go_on=workers.go_on), rows, targets, inside, setting)
        held_out[inside] = np.where(predictable, outputs(predict(setting.c) + model.adjustment), np.nan)

    large = len(texts) ** 2 > MAX_KEPT_VALUES
    threads = 1 if large else worthwhile_threads(threads, texts=len(texts), labels=len(task.labels))
    with Workers(threads, emit=emit) as workers:
        for done, wait in enumerate([workers.start(functools.partial(predict_fold, number)) for number in range(FOLDS)]):
            workers.emit(Event("progress", "teacher", "training texts", done=done, total=FOLDS, unit="folds"))
            wait()
    return held_out[:count]


def label_counts(task: Task) -> IntArray:
    """Return the number of training texts of each label of a classification, (labels,)."""
    return np.bincount(solver_of(task).targets(task), minlength=len(task.labels))


def align_distribution(probabilities: FloatArray, counts: IntArray) -> FloatArray:
    """Multiply probabilities (texts, labels) by the ratio of each label's frequency in the training texts to its mean; normalize the rows.

    counts: `label_counts`. Source: distribution alignment, Berthelot et al. 2020, "ReMixMatch".
    """
    prior = counts / counts.sum()
    mean = (probabilities.sum(axis=0) + ALIGNMENT_PRIOR * prior) / (len(probabilities) + ALIGNMENT_PRIOR)
    weighted = probabilities * np.divide(prior, mean, out=np.zeros_like(mean), where=prior > 0)
    result: FloatArray = (weighted / np.maximum(weighted.sum(axis=1, keepdims=True), 1e-30)).astype(np.float32)
    return result
