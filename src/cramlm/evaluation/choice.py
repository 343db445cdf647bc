"""Choose among candidate predictions on dev, and compare choosers on equal terms.

A method that tries many settings reports the largest of many noisy dev scores, which is the more too high the more it tries.
`cross_fitted` removes that: the candidate is chosen on one half of dev and scored on the other, both ways, over several splits; methods are
scored on the same halves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.labels import RULES
from cramlm.evaluation.kinds import KINDS
from cramlm.records import FloatArray, IntArray, TaskKind

TAUS: Final = tuple(tenth / 10 for tenth in range(11))
"""Strengths of logit adjustment that are tried (Menon et al. 2021): the share of the log prior that is subtracted from the logits."""
SPLITS: Final = 20
_SPLIT_STREAM: Final = 0x5B17
_AT_ONCE: Final = 4_000_000  # predictions scored at a time

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class DevScorer:
    """Scores of many candidates' predictions on the same labelled texts, equal to those of `Kind.score`.

    Predictions of one candidate are, by kind of task, label ids int16 (n,), labels chosen bool (n, labels), or numbers float32 (n,).
    truth: the same for the true labels, with ids or columns beyond `labels` for labels that training does not have.
    """

    kind: TaskKind
    metric: str
    truth: npt.NDArray[Any]
    labels: int

    @classmethod
    def of(cls, kind: TaskKind, true: Sequence[str], labels: Sequence[str], metric: str) -> DevScorer:
        """For texts whose labels (of `Example`) are `true`."""
        match kind:
            case "classification":
                names = [*labels, *sorted(set(true) - set(labels))]
                ids = {name: number for number, name in enumerate(names)}
                return cls(kind, metric, np.array([ids[label] for label in true], dtype=np.int16), len(labels))
            case "multi-label":
                sets = [RULES[kind].names(label) for label in true]
                names = [*labels, *sorted({name for each in sets for name in each} - set(labels))]
                columns = {name: number for number, name in enumerate(names)}
                truth = np.zeros((len(true), len(names)), dtype=np.bool_)
                for row, each in enumerate(sets):
                    truth[row, [columns[name] for name in each]] = True
                return cls(kind, metric, truth, len(labels))
            case "regression":
                return cls(kind, metric, np.array([float(label) for label in true], dtype=np.float64), 1)

    def predictions(self, logits: FloatArray) -> npt.NDArray[Any]:
        """What a candidate with these logits (n, labels) predicts: by its outputs, whose float32 may round close logits to a tie."""
        outputs = KINDS[self.kind].outputs(logits)
        match self.kind:
            case "classification":
                ids: npt.NDArray[Any] = outputs.argmax(axis=1).astype(np.int16)
                return ids
            case "multi-label":
                return np.asarray(outputs >= 0.5)
            case "regression":
                return outputs[:, 0]

    def scores(self, predictions: npt.NDArray[Any], rows: IntArray | None = None) -> Scores:
        """The metric of every candidate (m, n, ...) on some rows (None: all), float64 (m,)."""
        chosen = slice(None) if rows is None else rows
        truth, step = self.truth[chosen], max(1, _AT_ONCE // max(1, self.truth.size))
        parts = [self._scores(predictions[start : start + step][:, chosen], truth) for start in range(0, len(predictions), step)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _scores(self, predictions: npt.NDArray[Any], truth: npt.NDArray[Any]) -> Scores:
        match self.kind:
            case "classification":
                return _label_scores(predictions, truth, self.metric)
            case "multi-label":
                return _set_scores(predictions, truth, self.metric)
            case "regression":
                return _number_scores(predictions.astype(np.float64), truth, self.metric)


def logit_adjustments(
    kind: TaskKind, trained_on: Sequence[str], labels: Sequence[str], taus: Sequence[float] = TAUS
) -> dict[float, FloatArray]:
    """What is added to the logits (labels,) for each tau: minus tau times the log prior of each label in training, with mean 0.

    Numbers have no prior: their only adjustment is 0.
    """
    judge = KINDS[kind]
    if not judge.has_prior:
        return {0.0: np.zeros(len(labels), dtype=np.float32)}
    rarity = judge.rarity(trained_on, labels)
    return {tau: (tau * rarity).astype(np.float32) for tau in taus}


def cross_fitted(scorer: DevScorer, methods: Mapping[str, npt.NDArray[Any]], *, seed: int, splits: int = SPLITS) -> dict[str, Scores]:
    """Scores of each method, candidates (m, n, ...), on `2 * splits` halves of dev, each with the candidate that is best on the other half.

    Halves keep the labels' proportions and are the same for every method, so that differences between methods are paired.
    """
    found: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(splits):
        for chosen_on, scored_on in _both_ways(_half(scorer, seed, number)):
            for name, predictions in methods.items():
                best = int(np.argmax(scorer.scores(predictions, chosen_on)))
                found[name].append(float(scorer.scores(predictions[best : best + 1], scored_on)[0]))
    return {name: np.array(scores) for name, scores in found.items()}


def _both_ways(half: npt.NDArray[np.bool_]) -> tuple[tuple[IntArray, IntArray], tuple[IntArray, IntArray]]:
    one, other = np.flatnonzero(half), np.flatnonzero(~half)
    return (one, other), (other, one)


def _half(scorer: DevScorer, seed: int, number: int) -> npt.NDArray[np.bool_]:
    """One half of dev, of every label as many texts as of the other half, up to one."""
    random = np.random.Generator(np.random.Philox(key=[seed, _SPLIT_STREAM + number]))
    order = random.permutation(len(scorer.truth))
    if scorer.kind == "classification":
        order = order[np.argsort(scorer.truth[order], kind="stable")]
    half = np.zeros(len(order), dtype=np.bool_)
    half[order[number % 2 :: 2]] = True
    return half


def _label_scores(predictions: npt.NDArray[Any], truth: npt.NDArray[Any], metric: str) -> Scores:
    hits = predictions == truth
    if metric != "macro_f1":
        return np.asarray(hits.mean(axis=1), dtype=np.float64)
    candidates, names = len(predictions), int(max(truth.max(initial=0), predictions.max(initial=0))) + 1
    row = np.arange(candidates)[:, None] * names
    said = np.bincount((row + predictions).ravel(), minlength=candidates * names).reshape(candidates, names)
    right = np.bincount((row + truth)[hits], minlength=candidates * names).reshape(candidates, names)
    return _mean_f1(right, said + np.bincount(truth, minlength=names))


def _set_scores(predictions: npt.NDArray[Any], truth: npt.NDArray[Any], metric: str) -> Scores:
    unseen = truth.shape[1] - predictions.shape[2]
    if unseen:
        predictions = np.concatenate([predictions, np.zeros((*predictions.shape[:2], unseen), dtype=np.bool_)], axis=2)
    if metric == "subset_accuracy":
        return np.asarray((predictions == truth).all(axis=2).mean(axis=1), dtype=np.float64)
    right = (predictions & truth).sum(axis=1)
    involved = predictions.sum(axis=1) + truth.sum(axis=0)
    return _mean_f1(right, involved) if metric == "macro_f1" else 2 * right.sum(axis=1) / np.maximum(involved.sum(axis=1), 1)


def _mean_f1(right: npt.NDArray[Any], involved: npt.NDArray[Any]) -> Scores:
    """Macro-F1 of (candidates, labels) counts over the labels that occur in the truth or the predictions."""
    f1 = np.divide(2.0 * right, involved, out=np.zeros(right.shape), where=involved > 0)
    return np.asarray(f1.sum(axis=1) / np.maximum((involved > 0).sum(axis=1), 1))


def _number_scores(predictions: Scores, truth: Scores, metric: str) -> Scores:
    if metric == "r2":
        spread = float(np.square(truth - truth.mean()).sum())
        return 1 - np.square(predictions - truth).sum(axis=1) / spread if spread > 0 else np.zeros(len(predictions))
    if metric == "spearman":
        from scipy.stats import rankdata

        predictions, truth = rankdata(predictions, axis=1), rankdata(truth)
    x, y = predictions - predictions.mean(axis=1, keepdims=True), truth - truth.mean()
    lengths = np.sqrt(np.square(x).sum(axis=1) * np.square(y).sum())
    correlations: Scores = np.divide(x @ y, lengths, out=np.zeros(len(x)), where=lengths > 1e-12)
    return correlations
