"""Fit linear models of a task and choose among them on dev: TF-IDF alone (the baseline), or with text vectors beside it (`static`).

Candidates are the variants of TF-IDF, multinomial and one-vs-rest logistic regression, uniform and balanced class weights, C, and the
strength of logit adjustment; the dev score decides, on ties the earlier in this order. Up to `FEW_TEXTS` training texts every candidate is
fitted on all of them. With more, every candidate is fitted on a sample of that size, and the best `FINALISTS` on all texts, with growing C
as long as the score grows (successive halving). Test is not read here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, DevScorer, format_metric
from cramlm.evaluation.logit_adjustment import logit_adjustments
from cramlm.linear.features import VARIANTS, Terms, Tfidf, Variant, Vocabulary, join, normalized
from cramlm.linear.model import LinearModel, TextVectors, beside
from cramlm.linear.solvers import SOLVERS, ClassWeights, Coefficients, Coordinates, Fitter, Scheme, Setting, inner_products
from cramlm.records import Emit, Event, FloatArray, IntArray, Task, silent

FEW_TEXTS: Final = 1500
FINALISTS: Final = 3  # combinations of variant, scheme and class weights
MAX_MULTINOMIAL_TEXTS: Final = 12_000  # with more, one-vs-rest alone: the coordinates would take over half a gigabyte
MAX_CHARACTERS: Final[Mapping[Variant, int]] = {"words": 100_000_000, "tokens": 100_000_000, "characters": 20_000_000, "union": 20_000_000}
"""Training texts beyond so many characters are sampled, the same share of every label."""
_SAMPLE_STREAM: Final = 0x7F1D


@dataclass(frozen=True, slots=True)
class Tried:
    """One fitted model: the tau that is best on dev, and the dev score with it."""

    variant: Variant
    setting: Setting
    tau: float
    score: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        setting = {"scheme": self.setting.scheme, "class_weights": self.setting.class_weights, "c": self.setting.c}
        return {"variant": self.variant, **setting, "tau": self.tau, "score": self.score}


@dataclass(frozen=True, slots=True, eq=False)
class LinearFit:
    """The model that is best on dev, everything that was tried, and the distinct predictions of all candidates on dev (candidates, n, ...).

    train_texts: how many of the training texts it was fitted on.
    """

    model: LinearModel
    metric: str
    score: float
    tried: tuple[Tried, ...]
    predictions: npt.NDArray[Any]
    train_texts: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the model."""
        best = {"variant": self.model.tfidf.variant, "features": self.model.coefficients.weights.shape[0], "tau": self.model.tau}
        setting = self.model.setting
        best |= {"scheme": setting.scheme, "class_weights": setting.class_weights, "c": setting.c}
        tried = [each.as_dict() for each in self.tried]
        spent = {"train_texts": self.train_texts, "seconds": round(self.seconds, 2)}
        return {"metric": self.metric, "score": self.score, **best, "vectors": self.model.vectors is not None, **spent, "tried": tried}


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The training and dev texts under one variant: matrices (CSR), and which training texts the first one holds."""

    tfidf: Tfidf
    train: Any
    dev: Any
    kept: IntArray


class TaskFeatures:
    """Matrices of a task's training and dev texts by variant; vocabularies are fitted once and shared by the variants."""

    def __init__(self, task: Task, vectors: TextVectors | None, *, seed: int) -> None:
        self._train, self._dev = ([normalized(example) for example in split] for split in (task.train, task.dev))
        self._strata = SOLVERS[task.kind].strata(SOLVERS[task.kind].targets(task))
        self._seed = seed
        self._parts: dict[tuple[Terms, bytes], tuple[Vocabulary, Any, Any]] = {}
        whole = [[example.whole_text for example in split] for split in (task.train, task.dev)]
        self._vectors = None if vectors is None else tuple(vectors.of(texts) for texts in whole)

    def rows(self, variant: Variant) -> Rows:
        """The matrices under one variant, text vectors beside them if there are any."""
        kept = _sampled(self._train, self._strata, MAX_CHARACTERS[variant], self._seed)
        kinds: tuple[Terms, ...] = ("tokens", "characters") if variant == "union" else (variant,)
        parts = [self._part(kind, kept) for kind in kinds]
        train, dev = join([part[1] for part in parts]), join([part[2] for part in parts])
        if self._vectors is not None:
            train, dev = beside(train, self._vectors[0][kept]), beside(dev, self._vectors[1])
        return Rows(Tfidf(variant, tuple(part[0] for part in parts)), train, dev, kept)

    def sample(self, rows: Rows, count: int) -> Rows:
        """About `count` of the training rows, the same share of every label."""
        chosen = _share_of(self._strata[rows.kept], count / len(rows.kept), self._seed)
        return Rows(rows.tfidf, rows.train[chosen], rows.dev, rows.kept[chosen])

    def _part(self, kind: Terms, kept: IntArray) -> tuple[Vocabulary, Any, Any]:
        key = kind, kept.tobytes()
        if key not in self._parts:
            vocabulary, train = Vocabulary.fit(kind, [self._train[index] for index in kept.tolist()])
            self._parts[key] = vocabulary, train, vocabulary.transform(self._dev)
        return self._parts[key]


def fit_linear(
    task: Task,
    *,
    c: Sequence[float],
    metric: str,
    seed: int,
    stage: str,
    vectors: TextVectors | None = None,
    variants: Sequence[Variant] = VARIANTS,
    emit: Emit = silent,
) -> LinearFit:
    """Fit every candidate and keep the best on dev; the same arguments give the same result.

    c: inverse regularizations to try. metric: the dev score that decides. stage: the name under which events are emitted.
    """
    assert task.dev, "candidates are chosen on dev"
    began = time.perf_counter()
    features, grid = TaskFeatures(task, vectors, seed=seed), sorted(c)
    emit(Event("start", stage, total=len(variants), unit="variants"))
    search = _Search(task, metric, seed)
    finals = _Search(task, metric, seed) if len(task.train) > FEW_TEXTS else search
    rows: dict[Variant, Rows] = {}
    for done, variant in enumerate(variants):
        emit(Event("progress", stage, variant, done=done, total=len(variants), unit="variants"))
        rows[variant] = features.rows(variant)
        if len(rows[variant].kept) < len(task.train):
            shown = f"{len(rows[variant].kept):,} of {len(task.train):,} training texts, the same share of each label, to save time"
            emit(Event("warning", stage, f"{variant}: fitted on {shown}"))
        search.try_all(rows[variant] if finals is search else features.sample(rows[variant], FEW_TEXTS), grid)
    for finalist in search.best_schemes(FINALISTS) if finals is not search else ():
        emit(
            Event(
                "progress",
                stage,
                f"{finalist.variant}, {finalist.setting.scheme}",
                done=len(variants),
                total=len(variants),
                unit="variants",
            )
        )
        finals.try_growing(rows[finalist.variant], finalist.setting, [value for value in grid if value >= finalist.setting.c])
    search = finals
    best = search.best
    fit = LinearFit(
        LinearModel(
            task.kind, task.labels, best.rows.tfidf, vectors, best.coefficients, best.tried.setting, best.adjustment, best.tried.tau
        ),
        metric,
        best.tried.score,
        tuple(search.tried),
        np.unique(np.concatenate(search.predictions), axis=0),
        len(best.rows.kept),
        time.perf_counter() - began,
    )
    adjusted = f", logit adjustment tau = {best.tried.tau:g}" if KINDS[task.kind].has_prior else ""
    score = f"{METRIC_NAMES[metric]} {format_metric(metric, best.tried.score)}"
    message = f"best on dev: {best.tried.variant}, {best.tried.setting}{adjusted}: {score}"
    emit(Event("done", stage, message, done=len(variants), total=len(variants), unit="variants", data={"score": best.tried.score}))
    return fit


@dataclass(frozen=True, slots=True, eq=False)
class _Best:
    rows: Rows
    tried: Tried
    coefficients: Coefficients
    adjustment: FloatArray


class _Search:
    """What was tried so far on one task."""

    def __init__(self, task: Task, metric: str, seed: int) -> None:
        self._solver, self._outputs, self._seed = SOLVERS[task.kind], len(task.labels), seed
        self._targets = self._solver.targets(task)
        self._adjustments = logit_adjustments(task)
        self._scorer = DevScorer.of(task, metric)
        self.tried: list[Tried] = []
        self.predictions: list[npt.NDArray[Any]] = []
        self._best: _Best | None = None

    @property
    def best(self) -> _Best:
        assert self._best is not None, "at least one candidate is fitted"
        return self._best

    def best_schemes(self, count: int) -> list[Tried]:
        """The best candidate of each variant, scheme and class weights, best first, `count` of them."""
        found: dict[tuple[str, str, str], Tried] = {}
        for tried in sorted(self.tried, key=lambda each: -each.score):
            found.setdefault((tried.variant, tried.setting.scheme, tried.setting.class_weights), tried)
        return list(found.values())[:count]

    def try_all(self, rows: Rows, grid: Sequence[float]) -> None:
        """Every scheme with every C, on the few rows of one variant."""
        coordinates = Coordinates.of(inner_products(rows.train, rows.train))
        dev = coordinates.transform(inner_products(rows.dev, rows.train))
        for scheme, class_weights in self._solver.schemes(self._targets[rows.kept]):
            # Coordinate descent (one-vs-rest) passes over all entries: it gets the matrix that has fewer.
            reduced = scheme != "one-vs-rest" or coordinates.rows.size < rows.train.nnz
            fitter = self._fitter(coordinates.rows if reduced else rows.train, rows, scheme, class_weights)
            for c in grid:
                setting = Setting(scheme, class_weights, c)
                self._try(rows, setting, fitter(c), dev if reduced else rows.dev, coordinates if reduced else None)

    def try_growing(self, rows: Rows, setting: Setting, grid: Sequence[float]) -> None:
        """One scheme on all rows of a variant, with growing C as long as the dev score grows."""
        coordinates, train, dev = None, rows.train, rows.dev
        if setting.scheme == "multinomial" and len(rows.kept) <= MAX_MULTINOMIAL_TEXTS:
            coordinates = Coordinates.of(inner_products(rows.train, rows.train))
            train, dev = coordinates.rows, coordinates.transform(inner_products(rows.dev, rows.train))
        fitter = self._fitter(train, rows, setting.scheme, setting.class_weights)
        last = -math.inf
        for c in grid:
            score = self._try(rows, Setting(setting.scheme, setting.class_weights, c), fitter(c), dev, coordinates)
            if score <= last:
                break
            last = score

    def _fitter(self, train: Any, rows: Rows, scheme: Scheme, class_weights: ClassWeights) -> Fitter:
        return self._solver.fitter(train, self._targets[rows.kept], scheme, class_weights, outputs=self._outputs, seed=self._seed)

    def _try(self, rows: Rows, setting: Setting, fitted: Coefficients, dev: Any, coordinates: Coordinates | None) -> float:
        logits = self._solver.logits(setting.scheme, fitted.scores(dev))
        taus = tuple(self._adjustments)
        predictions = np.stack([self._scorer.predictions(logits + self._adjustments[tau]) for tau in taus])
        scores = self._scorer.scores(predictions)
        place = int(np.argmax(scores))
        tried = Tried(rows.tfidf.variant, setting, taus[place], float(scores[place]))
        self.tried.append(tried)
        self.predictions.append(np.unique(predictions, axis=0))
        if self._best is None or tried.score > self._best.tried.score:
            coefficients = fitted if coordinates is None else coordinates.restore(fitted, rows.train)
            self._best = _Best(rows, tried, coefficients, self._adjustments[tried.tau])
        return tried.score


def _sampled(texts: Sequence[str], strata: IntArray, limit: int, seed: int) -> IntArray:
    """Training rows to fit on, in order: all, or the same share of every stratum so that they have about `limit` characters together."""
    return _share_of(strata, limit / max(1, sum(map(len, texts))), seed)


def _share_of(strata: IntArray, share: float, seed: int) -> IntArray:
    """Places of a random share of every stratum, in order, at least one of each; all where the share is 1 or more."""
    rows = np.arange(len(strata))
    if share >= 1:
        return rows
    random = np.random.Generator(np.random.Philox(key=[seed, _SAMPLE_STREAM]))
    chosen = []
    for stratum in np.unique(strata):
        of_stratum = rows[strata == stratum]
        chosen.append(random.permutation(of_stratum)[: math.ceil(share * len(of_stratum))])
    return np.sort(np.concatenate(chosen))
