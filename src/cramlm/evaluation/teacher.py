"""Soft labels: TF-IDF + logistic regression, fitted on the training labels, says what it makes of a text.

A small encoder trained on some thousand labels does not recover the lexical cues that logistic regression reads off in seconds. Asked
about every retrieved passage, and about every training text while that was held out of the fit, the linear model hands them on: its
probabilities are targets for the classifier beside the gold labels (objective.py), at the cost of a few linear fits. It knows training
texts and labels alone; how (variant, C, weighting of labels) is what the baseline chose on dev.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cramlm.evaluation.baselines import Matrices, Texts, Variant, classifier, clean, represent
from cramlm.records import FloatArray, IntArray, Task

FOLDS: Final = 5
_FOLD_STREAM: Final = 0x666F  # keeps this draw apart from others with the same seed


@dataclass(frozen=True, slots=True, eq=False)
class SoftLabels:
    """Distributions over `task.labels`, float32.

    asked: (texts, labels). own: (training texts, labels), each by a model that was fitted without that text and its fold; rows of 0 for
    texts that the baseline leaves out to save time. (0, labels) where it was not wanted.
    """

    asked: FloatArray
    own: FloatArray


def soft_labels(
    task: Task, texts: Sequence[str], *, own: bool = False, variant: Variant, settings: Mapping[str, Any], seed: int
) -> SoftLabels:
    """What the linear model makes of `texts`, and, with `own`, of the training texts.

    variant, settings: the baseline's choice and its entry in `Baselines.as_dict()` ("c", "weights").
    """
    label_ids = {label: number for number, label in enumerate(task.labels)}
    labels = np.array([label_ids[str(example.label)] for example in task.train])
    asked = [unicodedata.normalize("NFC", text) for text in texts]
    given = Texts([clean(example) for example in task.train], asked, [], labels)
    matrices: dict[Variant, Matrices] = {}
    parts: tuple[Variant, ...] = ("tokens", "characters", "union") if variant == "union" else (variant,)
    for part in parts:
        matrices[part] = represent(part, given, matrices, seed=seed)
    known, kept = matrices[variant], matrices[variant].kept
    true = labels[kept]

    def answers(rows: Any, about: Any) -> FloatArray:
        return _probabilities(
            classifier(settings["c"], settings["weights"], seed).fit(known.train[rows], true[rows]), about, len(task.labels)
        )

    held_out = np.zeros((len(labels) if own else 0, len(task.labels)), dtype=np.float32)
    if own:
        fold = _folds(true, seed)
        for number in range(FOLDS):
            inside = fold == number
            if inside.any() and len(set(true[~inside])) > 1:
                held_out[kept[inside]] = answers(~inside, known.train[inside])
    return SoftLabels(answers(np.ones(len(true), dtype=np.bool_), known.dev), held_out)


def _folds(labels: IntArray, seed: int) -> IntArray:
    """A fold for every row, drawn by the seed, each with its share of every label."""
    order = np.random.Generator(np.random.Philox(key=[seed, _FOLD_STREAM])).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(labels), dtype=np.int64)
    fold[order] = np.arange(len(labels)) % FOLDS
    return fold


def _probabilities(fitted: Any, about: Any, labels: int) -> FloatArray:
    if about.shape[0] == 0:
        return np.zeros((0, labels), dtype=np.float32)
    probabilities = np.zeros((about.shape[0], labels), dtype=np.float32)
    probabilities[:, fitted.classes_] = fitted.predict_proba(about)
    sums = probabilities.sum(axis=1, keepdims=True)
    # One classifier per label may give every label 0, to a text without a single known term: then it knows nothing, and says so.
    return np.where(sums > 0, probabilities / np.maximum(sums, 1e-30), 1 / labels).astype(np.float32)
