"""Soft labels: what the fitted linear models predict together for passages, and one of them for training texts that it was not fitted on.

A small encoder trained on a few hundred labels does not find the lexical cues that logistic regression fits in seconds; co-occurrence
vectors add which words are similar, naive Bayes the words of unlabelled texts. Their combined probabilities (evaluation/combination.py)
are targets of the encoder's classifier beside the gold labels. With few labels their mean can be aligned with the frequencies of the gold
labels (distribution alignment, Berthelot et al. 2020), because the passages were retrieved for the training texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cramlm.evaluation.calibration import calibrate
from cramlm.evaluation.combination import Combination, combine_on_dev
from cramlm.evaluation.kinds import KINDS
from cramlm.linear.features import TextMatrices
from cramlm.linear.files import Setting
from cramlm.linear.fit import FEW_TEXTS, MAX_MULTINOMIAL_TEXTS
from cramlm.linear.model import LinearModel
from cramlm.linear.solvers import SOLVERS, Coordinates, inner_products, on_one_blas_thread
from cramlm.records import FloatArray, IntArray, Task

FOLDS: Final = 5
TRAINING_TEXTS_FILE: Final = "task.npy"
"""In the folder of a run's teacher: `out_of_fold_labels`."""
ALIGNMENT_PRIOR: Final = 100
"""Weight, in passages, of the gold labels' frequencies in the mean prediction that is aligned with them."""
_FOLD_STREAM: Final = 0x666F  # separates these folds from other random choices with the same seed


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """The fitted linear models of a run, whose combined probabilities are soft labels.

    models: by name. combination: their calibrations and weights.
    """

    models: Mapping[str, LinearModel]
    combination: Combination

    @classmethod
    def of(cls, models: Mapping[str, LinearModel], task: Task, *, metric: str) -> Teacher:
        """Combine classification models that were fitted on the training texts of `task`. metric: the dev score that chooses tau."""
        texts = [example.divided_text for example in task.dev]
        probabilities = {name: _probabilities(model, model.logits(texts)) for name, model in models.items()}
        combination = combine_on_dev(task, probabilities, metric=metric).combination
        return cls({name: models[name] for name in combination.models}, combination)

    def soft_labels(self, texts: Sequence[str]) -> FloatArray:
        """Distributions over the labels, float32 (texts, labels)."""
        if not texts:
            return np.zeros((0, len(self.combination.labels)), dtype=np.float32)
        shared = TextMatrices(texts)
        probabilities = {name: _probabilities(model, model.logits_of_shared(shared)) for name, model in self.models.items()}
        return KINDS["classification"].outputs(self.combination.logits(probabilities))


def _probabilities(model: LinearModel, logits: FloatArray) -> FloatArray:
    assert model.kind == "classification", "soft labels are distributions over labels"
    return KINDS[model.kind].outputs(logits)


@on_one_blas_thread
def out_of_fold_labels(model: LinearModel, task: Task, *, seed: int) -> FloatArray:
    """Calibrated probabilities of the training texts, float32 (training texts, labels), each predicted by `model` fitted without its fold.

    A row is NaN if no text outside the fold has the label of its text.
    """
    assert model.kind == "classification", "soft labels are distributions over labels"
    targets = SOLVERS[model.kind].targets(task)
    held_out = _out_of_fold(model, task, seed=seed)
    predicted = np.isfinite(held_out).all(axis=1)
    calibration = calibrate(held_out[predicted], targets[predicted], np.zeros(len(task.labels)))
    held_out[predicted] = np.exp(calibration.log_probabilities(held_out[predicted]))
    return held_out


def _out_of_fold(model: LinearModel, task: Task, *, seed: int) -> FloatArray:
    """(training texts, labels): each text predicted by a model of the same setting, fitted on the other folds and the label texts."""
    setting = model.setting
    assert isinstance(setting, Setting), "a regression is fitted again without each fold"
    solver, outputs = SOLVERS[model.kind], KINDS[model.kind].outputs
    learned = task.with_label_texts
    texts, targets = [example.divided_text for example in learned.train], solver.targets(learned)
    rows: Any = model.features(texts)
    dense = len(texts) <= FEW_TEXTS or (setting.scheme == "multinomial" and len(texts) <= MAX_MULTINOMIAL_TEXTS)
    if dense:
        rows = Coordinates.of(inner_products(rows, rows)).rows
    count = len(task.train)
    fold = np.full(len(texts), -1)
    fold[:count] = folds(texts[:count], targets[:count], seed)
    probabilities = np.full((len(texts), len(task.labels)), np.nan, dtype=np.float32)
    for number in range(FOLDS):
        inside = fold == number
        present = np.bincount(targets[~inside], minlength=len(task.labels)) > 0
        if not inside.any() or present.sum() < 2:
            continue
        fitter = solver.fitter(rows[~inside], targets[~inside], setting.scheme, setting.class_weights, outputs=len(task.labels), seed=seed)
        logits = solver.logits(setting.scheme, fitter(setting.c).scores(rows[inside])) + model.adjustment
        if setting.class_weights == "uniform":
            logits = logits + _prior_correction(targets, targets[~inside], len(task.labels))
        # A label without a text outside the fold would get probability 0 against its own gold label.
        probabilities[inside] = np.where(present[targets[inside]][:, None], outputs(logits), np.nan)
    return probabilities[:count]


def _prior_correction(labels: IntArray, outside: IntArray, count: int) -> FloatArray:
    """Logits, (labels,), that replace the label frequencies outside a fold by those of all training texts.

    Removing a fold makes the labels that are frequent in it rarer among the other texts. The intercepts follow these frequencies, which
    lowers the probability of each text's own label; with strong regularization this effect is larger than that of the words.
    """
    whole, part = (np.bincount(each, minlength=count) / len(each) for each in (labels, outside))
    correction: FloatArray = np.log(np.divide(whole, part, out=np.ones(count), where=(whole > 0) & (part > 0))).astype(np.float32)
    return correction


def folds(texts: Sequence[str], labels: IntArray, seed: int) -> IntArray:
    """Return a random fold for every text; every fold has its share of every label.

    Texts with equal letters and digits (one sentence in which other entities are marked) are in the same fold, because one would reveal
    the label of the other.
    """
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault("".join(filter(str.isalnum, text.casefold())), len(numbers)) for text in texts]
    label_of = np.zeros(len(numbers), dtype=np.int64)
    label_of[groups] = labels
    order = np.random.Generator(np.random.Philox(key=[seed, _FOLD_STREAM])).permutation(len(numbers))
    order = order[np.argsort(label_of[order], kind="stable")]
    fold = np.empty(len(numbers), dtype=np.int64)
    fold[order] = np.arange(len(numbers)) % FOLDS
    return fold[groups]


def label_counts(task: Task) -> IntArray:
    """Training texts of each label of a classification, (labels,)."""
    return np.bincount(SOLVERS["classification"].targets(task), minlength=len(task.labels))


def aligned(probabilities: FloatArray, counts: IntArray) -> FloatArray:
    """Rows (texts, labels) times the ratio of each label's frequency in the training texts to its mean in the rows, normalized again.

    counts: `label_counts`.
    """
    prior = counts / counts.sum()
    mean = (probabilities.sum(axis=0) + ALIGNMENT_PRIOR * prior) / (len(probabilities) + ALIGNMENT_PRIOR)
    weighted = probabilities * np.divide(prior, mean, out=np.zeros_like(mean), where=prior > 0)
    result: FloatArray = (weighted / np.maximum(weighted.sum(axis=1, keepdims=True), 1e-30)).astype(np.float32)
    return result
