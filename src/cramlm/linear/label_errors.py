"""Texts whose label is probably wrong, by probabilities that were predicted out of fold (confident learning).

Source: Northcutt, Jiang and Chuang 2021, "Confident Learning: Estimating Uncertainty in Dataset Labels", JAIR 70. A label is *confident*
for a text if its probability is at least the mean probability of that label over the texts that have it (equation 2), so that a label that
the model predicts with low probabilities is not compared with one that it predicts with high ones. A text is suspicious if its most
probable confident label is another, more probable one (an off-diagonal entry of the confident joint, equation 1). The texts are ranked by
the margin between both labels. The package cleanlab has this rule (`filter_by="confident_learning"`) and others; these lines need no
package.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cramlm.records import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class SuspiciousLabel:
    """A text, by its row, with its label and a more probable one, both by their ids, and their probabilities."""

    row: int
    label: int
    suggested: int
    label_probability: float
    suggested_probability: float


def suspicious_labels(probabilities: FloatArray, labels: IntArray) -> list[SuspiciousLabel]:
    """Return the suspicious texts, the most suspicious first.

    probabilities: (n, labels), out of fold; rows of 0 are left out. labels: the label id of each text, (n,).
    """
    given = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    predicted = probabilities.sum(axis=1) > 0
    counts = np.bincount(labels[predicted], minlength=probabilities.shape[1])
    sums = np.bincount(labels[predicted], weights=given[predicted], minlength=probabilities.shape[1])
    thresholds = np.divide(sums, counts, out=np.full(len(counts), np.inf), where=counts > 0)
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    suggested = confident.argmax(axis=1)
    highest = confident[np.arange(len(labels)), suggested]
    rows = np.flatnonzero(predicted & (highest > given) & (suggested != labels))
    ranked = rows[np.argsort((given - highest)[rows], kind="stable")]
    return [SuspiciousLabel(row, int(labels[row]), int(suggested[row]), float(given[row]), float(highest[row])) for row in ranked.tolist()]
