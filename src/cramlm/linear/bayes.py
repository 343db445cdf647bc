"""Semi-supervised naive Bayes: expectation-maximization on labelled texts and passages (Nigam, McCallum, Thrun and Mitchell 2000).

Each round estimates the probability of a word given a label from the labelled texts and the passages, which count with `passage_weight`
and with the label probabilities of the round before. Counts are TF-IDF rows of length 1 (Rennie, Shih, Teevan and Karger 2003), which
limits the effect of long texts and frequent words. In every round distribution alignment adapts the mean label probabilities of the
passages to the label frequencies of the training texts (linear/teacher.py); without it, a frequent topic of the raw text gets most of the
passages. Features are words, in scripts without spaces pairs or triples of characters; the tokens of the encoder's vocabulary give lower
scores (docs/log.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.evaluation.combination import HeldOut
from cramlm.evaluation.kinds import KINDS
from cramlm.linear.features import Ngrams, Vocabulary, normalize
from cramlm.linear.files import BayesSetting
from cramlm.linear.fit import DevCandidates, LinearFit, decisive_folds, sample_texts
from cramlm.linear.model import LinearModel
from cramlm.linear.solvers import Coefficients, Solver, solver_of
from cramlm.linear.teacher import align_distribution, label_counts
from cramlm.records import Emit, Event, FloatArray, IntArray, Task, silent

STAGE: Final = "bayes"
PASSAGE_WEIGHTS: Final = (0.0, 0.02, 0.1, 0.5)
SCALES: Final = (3.0, 10.0, 30.0, 100.0)
ROUNDS: Final = 6
MAX_PASSAGES: Final = 20_000
MAX_SOFT_LABELS: Final = 400_000
"""Passages times labels: with more than 20 labels fewer passages are read, since a round costs as much as there are soft labels."""
MAX_TERMS: Final = 100_000
_LENGTH: Final = 30.0  # weighted words of a text, so that `_SMOOTHING` has the meaning of a count
_SMOOTHING: Final = 0.01  # added to every count
_SAMPLE_STREAM: Final = 0x4E42


def fit_bayes(
    task: Task, passages: Sequence[str], unlabelled: Sequence[str] = (), *, metric: str, seed: int, emit: Emit = silent
) -> LinearFit:
    """Fit the model with every weight of passages and every scale, and keep the best on dev; the same arguments give the same result.

    passages: retrieved texts. unlabelled: texts of the task, which count like passages. Of more than `MAX_PASSAGES` texts together, or
    `MAX_SOFT_LABELS` divided by the number of labels, a random sample is read, of which at most half are unlabelled texts if there are
    enough passages.
    """
    assert task.kind == "classification", "naive Bayes gives a text one label"
    assert task.dev, "settings are chosen on dev"
    began = time.perf_counter()
    emit(Event("start", STAGE))
    passages = _sample(passages, unlabelled, _most_passages(len(task.labels)), seed)
    data = _Data.of(task, passages)
    candidates: DevCandidates[BayesSetting] = DevCandidates(task, metric)
    best = None
    for setting in (BayesSetting(weight, scale) for weight, scale in product(PASSAGE_WEIGHTS if passages else (0.0,), SCALES)):
        fitted = data.fit(setting)
        scored = candidates.scored(data.solver.logits("multinomial", fitted.scores(data.dev)))
        if candidates.add("unigrams", setting, scored) is candidates.best:
            best = fitted
    assert best is not None, "there is at least one setting"
    chosen = candidates.best
    assert isinstance(chosen.setting, BayesSetting)
    adjustment = candidates.adjustment(chosen)
    model = LinearModel(task.kind, task.labels, Ngrams("unigrams", (data.vocabulary,)), None, best, chosen.setting, adjustment, chosen.tau)
    emit(Event("done", STAGE, candidates.message(chosen), data={"score": chosen.score}))
    seconds = time.perf_counter() - began
    held_out = data.held_out(task, chosen.setting, adjustment)
    return LinearFit(
        model, metric, chosen.score, tuple(candidates.tried), candidates.distinct_predictions(), len(task.train), seconds, held_out
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """TF-IDF of the training texts, the passages and the dev texts.

    train: of the training and label texts, CSR (texts, terms). train_labels: their labels, one-hot, (texts, labels). passages, dev: CSR
    (texts, terms). passages_by_word: CSR (terms, passages). label_counts: training texts of each label, (labels,).
    """

    solver: Solver
    vocabulary: Vocabulary
    train: Any
    train_labels: FloatArray
    passages: Any
    passages_by_word: Any
    dev: Any
    label_counts: IntArray

    @classmethod
    def of(cls, task: Task, passages: Sequence[str]) -> _Data:
        learned, solver = task.with_label_texts, solver_of(task)
        train = [normalize(example.divided_text) for example in learned.train]
        vocabulary, frequencies = Vocabulary.fit("unigrams", [*train, *map(normalize, passages)], limit=MAX_TERMS)
        rows = vocabulary.weigh(frequencies)
        dev = vocabulary.transform([normalize(example.divided_text) for example in task.dev])
        label_rows = np.eye(len(task.labels), dtype=np.float32)[solver.targets(learned)]
        unlabelled = rows[len(train) :]
        return cls(solver, vocabulary, rows[: len(train)], label_rows, unlabelled, unlabelled.T.tocsr(), dev, label_counts(task))

    def fit(self, setting: BayesSetting, without: IntArray | None = None) -> Coefficients:
        """Learn from the labelled texts, then `ROUNDS` times from the passages, too, with the labels of the model before.

        without: indices of training texts whose words do not count.
        """
        labels = self.train_labels.copy()
        labels[[] if without is None else without] = 0
        labelled = _LENGTH * np.asarray(self.train.T @ labels)
        model = self._model(labelled, setting)
        for _ in range(ROUNDS if setting.passage_weight else 0):
            logits = self.solver.logits("multinomial", model.scores(self.passages))
            soft = align_distribution(np.exp(logits), self.label_counts)
            model = self._model(labelled + setting.passage_weight * _LENGTH * np.asarray(self.passages_by_word @ soft), setting)
        return model

    def held_out(self, task: Task, setting: BayesSetting, adjustment: FloatArray) -> HeldOut:
        """Probabilities of the training texts that decide beside a small dev set, each by a fit without its fold."""
        folds = decisive_folds(task)
        logits = [self.solver.logits("multinomial", self.fit(setting, fold).scores(self.train[fold])) + adjustment for fold in folds]
        outputs = KINDS[task.kind].outputs(np.concatenate([np.zeros((0, len(task.labels)), np.float32), *logits]))
        return HeldOut(np.concatenate([np.zeros(0, np.int64), *folds]), outputs)

    def _model(self, counts: npt.NDArray[Any], setting: BayesSetting) -> Coefficients:
        """counts: of words by label, (terms, labels)."""
        smoothed = counts.astype(np.float64) + _SMOOTHING
        log_words = np.log(smoothed / np.maximum(smoothed.sum(axis=0, keepdims=True), _SMOOTHING))
        log_prior = np.log(self.label_counts / self.label_counts.sum())
        return Coefficients((setting.scale * log_words).astype(np.float32), log_prior.astype(np.float32))


def bayes_reads_seed(passages: int, unlabelled: int, *, labels: int) -> bool:
    """Return True if `fit_bayes` samples so many texts."""
    return passages + unlabelled > _most_passages(labels)


def _most_passages(labels: int) -> int:
    return min(MAX_PASSAGES, MAX_SOFT_LABELS // max(1, labels))


def _sample(passages: Sequence[str], unlabelled: Sequence[str], most: int, seed: int) -> Sequence[str]:
    """At most `most` of both together, in their order."""
    most_unlabelled = max(most // 2, most - len(passages))
    own = sample_texts(unlabelled, most_unlabelled, seed=seed, stream=_SAMPLE_STREAM)
    return [*sample_texts(passages, most - len(own), seed=seed, stream=_SAMPLE_STREAM), *own]
