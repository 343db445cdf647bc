"""Soft labels for text that has none: TF-IDF + logistic regression, fitted on the training labels, says what it makes of each passage.

A small encoder trained on some thousand labels does not recover the lexical cues that logistic regression reads off in seconds. Asked
about every retrieved passage, that model hands them on: its probabilities are targets for the classifier beside the gold labels
(objective.py), at the cost of a linear model's predictions. It is fitted on training texts and labels alone; how (variant, C, weighting of
labels) is what the baseline chose on dev.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cramlm.evaluation.baselines import Matrices, Texts, Variant, classifier, clean, represent
from cramlm.records import FloatArray, Task


def soft_labels(task: Task, texts: Sequence[str], *, variant: Variant, settings: Mapping[str, Any], seed: int) -> FloatArray:
    """(texts, labels) float32, each row a distribution over `task.labels`.

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
    fitted = classifier(settings["c"], settings["weights"], seed).fit(matrices[variant].train, labels[matrices[variant].kept])
    probabilities = np.zeros((len(texts), len(task.labels)), dtype=np.float32)
    probabilities[:, fitted.classes_] = fitted.predict_proba(matrices[variant].dev)
    sums = probabilities.sum(axis=1, keepdims=True)
    # One classifier per label may give every label 0, to a text without a single known term: then it knows nothing, and says so.
    return np.where(sums > 0, probabilities / np.maximum(sums, 1e-30), 1 / len(task.labels)).astype(np.float32)
