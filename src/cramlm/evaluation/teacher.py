"""Soft labels: logistic regression, fitted on the training labels, says what it makes of a text.

A small encoder trained on some thousand labels does not recover the lexical cues that logistic regression reads off in seconds; with a
hundred labels it does not even see the words that matter, while the company that words keep in the retrieved text tells which are alike.
So a linear model over both, TF-IDF and averaged embeddings of the tokens, is asked about every retrieved passage, and about every training
text while that was held out of the fit. Its probabilities are targets for the classifier beside the gold labels (objective.py), at the cost
of some linear fits. It knows training texts and labels alone; how it is fitted (variant, C, weighting of labels) is what the baseline chose
on dev. How sure it is, is set by the texts held out: probabilities are raised to the power that makes those of the gold labels most likely.
Passages were found for the training texts, so that their labels should be about as frequent: a teacher of a hundred texts that gives half
of a foreign corpus to one label is wrong about most of it. Its answers can be aligned, once, with the gold labels' frequencies
(distribution alignment, Berthelot et al. 2020).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import scipy.sparse

from cramlm.evaluation.baselines import Matrices, Texts, Variant, clean, represent
from cramlm.evaluation.linear import Weights, fit_classifier
from cramlm.evaluation.metrics import score
from cramlm.records import FloatArray, IntArray, Task

FOLDS: Final = 5
VECTORS_WEIGHT: Final = 0.5  # length of a text's vector beside TF-IDF's 1 (docs/log.md)
ALIGNED_AFTER: Final = 100  # passages that tell as much of the labels' frequency as we believe beforehand: a handful stay as they are
POWERS: Final = tuple(0.25 * step for step in range(2, 49))
_FOLD_STREAM: Final = 0x666F  # keeps this draw apart from others with the same seed


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """(texts, width) float32, rows of length 1 or 0: of the training texts, of dev, and of the texts that are asked about."""

    train: FloatArray
    dev: FloatArray
    asked: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class SoftLabels:
    """Distributions over `task.labels`, float32.

    asked: (texts, labels). own: (training texts, labels), each by a model that was fitted without that text and its fold; rows of 0 for
    texts that the baseline leaves out to save time. dev_macro_f1: of the teacher itself. power: what its probabilities were raised to.
    """

    asked: FloatArray
    own: FloatArray
    dev_macro_f1: float
    power: float


def soft_labels(
    task: Task,
    texts: Sequence[str],
    *,
    variant: Variant,
    weights: Weights,
    c: float,
    seed: int,
    vectors: Vectors | None = None,
    align: bool = False,
) -> SoftLabels:
    """What the linear model makes of `texts` and of the training texts.

    variant, weights, c: the baseline's choice. vectors: of the texts; None = TF-IDF alone. align: see `aligned`.
    """
    label_ids = {label: number for number, label in enumerate(task.labels)}
    labels = np.array([label_ids[str(example.label)] for example in task.train])
    train, dev = ([clean(example) for example in split] for split in (task.train, task.dev))
    given = Texts(train, dev, [unicodedata.normalize("NFC", text) for text in texts], labels)
    known = _features(variant, given, vectors, seed)
    true = labels[known.kept]

    def fitted(rows: Any = slice(None)) -> Any:
        return fit_classifier(known.train[rows], true[rows], c=c, weights=weights, seed=seed)

    model = fitted()
    predicted = [task.labels[label] for label in model.predict(known.dev)]
    reached = score([str(example.label) for example in task.dev], predicted, task.labels).macro_f1
    held_out = np.zeros((len(true), len(task.labels)), dtype=np.float32)
    fold = _folds([train[row] for row in known.kept], true, seed)
    for number in range(FOLDS):
        inside = fold == number
        if inside.any() and len(set(true[~inside])) > 1:
            held_out[inside] = _probabilities(fitted(~inside), known.train[inside], len(task.labels))
    power = _power(held_out, true)
    own = np.zeros((len(labels), len(task.labels)), dtype=np.float32)
    own[known.kept] = _raised(held_out, power)
    asked = _raised(_probabilities(model, known.test, len(task.labels)), power)
    if align:
        asked = aligned(asked, np.bincount(true, minlength=len(task.labels)))
    return SoftLabels(asked, own, reached, power)


def _features(variant: Variant, texts: Texts, vectors: Vectors | None, seed: int) -> Matrices:
    """TF-IDF of train, dev and the texts asked about (as `test`), and their vectors beside it."""
    matrices: dict[Variant, Matrices] = {}
    parts: tuple[Variant, ...] = ("tokens", "characters", "union") if variant == "union" else (variant,)
    for part in parts:
        matrices[part] = represent(part, texts, matrices, seed=seed)
    known = matrices[variant]
    if vectors is None:
        return known

    def beside(matrix: Any, rows: FloatArray) -> Any:
        return scipy.sparse.hstack([matrix, scipy.sparse.csr_matrix(VECTORS_WEIGHT * rows)], format="csr")

    train = beside(known.train, vectors.train[known.kept])
    return Matrices(train, beside(known.dev, vectors.dev), beside(known.test, vectors.asked), known.kept)


def _folds(texts: Sequence[str], labels: IntArray, seed: int) -> IntArray:
    """A fold for every text, drawn by the seed, each with its share of every label. Texts of the same letters (one sentence with other
    words marked in it) go together: else the one would answer for the other.
    """
    same: dict[str, int] = {}
    groups = [same.setdefault("".join(filter(str.isalnum, text.casefold())), len(same)) for text in texts]
    label_of = np.zeros(len(same), dtype=np.int64)
    label_of[groups] = labels
    order = np.random.Generator(np.random.Philox(key=[seed, _FOLD_STREAM])).permutation(len(same))
    order = order[np.argsort(label_of[order], kind="stable")]
    fold = np.empty(len(same), dtype=np.int64)
    fold[order] = np.arange(len(same)) % FOLDS
    return fold[groups]


def _power(probabilities: FloatArray, labels: IntArray) -> float:
    """The power that makes the labels of held-out texts most likely; 1 where nobody was asked."""
    asked = probabilities.sum(axis=1) > 0
    if not asked.any():
        return 1.0

    def surprise(power: float) -> float:
        given = _raised(probabilities[asked], power)
        return float(-np.log(np.maximum(given[np.arange(len(given)), labels[asked]], 1e-6)).mean())

    return min(POWERS, key=surprise)


def _raised(probabilities: FloatArray, power: float) -> FloatArray:
    """Rows to a power, summing to 1 again; rows of 0 stay."""
    logs = np.log(np.maximum(probabilities, 1e-9)) * power
    raised = np.exp(logs - logs.max(axis=1, keepdims=True, initial=-np.inf))
    raised /= raised.sum(axis=1, keepdims=True)
    result: FloatArray = np.where(probabilities.sum(axis=1, keepdims=True) > 0, raised, 0).astype(np.float32)
    return result


def aligned(probabilities: FloatArray, gold: IntArray) -> FloatArray:
    """Rows (texts, labels), each label times how much more frequent it is in `gold`, its number of training texts, than in the mean of the
    rows; they sum to 1 again.
    """
    prior = gold / gold.sum()
    mean = (probabilities.sum(axis=0) + ALIGNED_AFTER * prior) / (len(probabilities) + ALIGNED_AFTER)
    weighed = probabilities * np.divide(prior, mean, out=np.zeros_like(mean), where=prior > 0)
    result: FloatArray = (weighed / np.maximum(weighed.sum(axis=1, keepdims=True), 1e-30)).astype(np.float32)
    return result


def _probabilities(fitted: Any, about: Any, labels: int) -> FloatArray:
    probabilities = np.zeros((about.shape[0], labels), dtype=np.float32)
    if len(probabilities) == 0:
        return probabilities
    probabilities[:, fitted.classes_] = fitted.predict_proba(about)
    sums = probabilities.sum(axis=1, keepdims=True)
    # One classifier per label may give every label 0, to a text without a single known term: then it knows nothing, and says so.
    return np.where(sums > 0, probabilities / np.maximum(sums, 1e-30), 1 / labels).astype(np.float32)
