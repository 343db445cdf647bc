"""Fit linear models of a task and choose among them on dev: n-grams alone (the baseline), or with text vectors beside it (`static`).

Candidates are all combinations of a variant of n-grams, the weight of text vectors, multinomial or one-vs-rest logistic regression, uniform
or balanced class weights, C and the strength of logit adjustment; the dev score decides, on ties the earlier in this order. If dev is
small, training texts that are predicted out of fold decide together with it (cross_validation.py). With up to `FEW_TEXTS` training texts
every candidate is fitted on all of them. With more, every candidate is fitted on a sample of that size, and the best `FINALISTS` on all
texts, with growing C while the score grows (successive halving). With many labels, `SCREENED` values of C decide which combinations try
them all, and one finalist remains. The numbers of a regression are put on the least-squares line to those of dev, if dev is large enough
(calibration.py). The test split is not read.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from cramlm.evaluation.calibration import calibrate_numbers
from cramlm.evaluation.combination import HeldOut
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, DevScorer, distinct_rows, format_metric
from cramlm.evaluation.logit_adjustment import logit_adjustments, neighbouring_taus
from cramlm.io.threads import Workers
from cramlm.linear.cross_validation import fold_predictor, held_out_folds
from cramlm.linear.features import PARTS, VARIANTS, Ngrams, Terms, Variant, Vocabulary, join, normalize
from cramlm.linear.files import BayesSetting, Setting, terms_of
from cramlm.linear.model import LinearModel, beside
from cramlm.linear.solvers import Coefficients, Coordinates, inner_products, on_one_blas_thread, solver_of, worthwhile_threads
from cramlm.linear.word_vectors import CorpusVectors
from cramlm.records import PAIR_BOUNDARY, Emit, Event, Example, FloatArray, IntArray, Task, silent
from cramlm.text.markers import Markers

VECTOR_WEIGHTS: Final = (0.25, 0.5, 1.0)
"""Lengths of a text vector; the row of n-grams beside it has length 1 (docs/log.md)."""
FEW_TEXTS: Final = 1500
FINALISTS: Final = 3  # combinations of variant, vector weight, scheme and class weights
MAX_MULTINOMIAL_TEXTS: Final = 12_000  # with more, sparse matrices: the coordinates would take over half a gigabyte
MAX_MULTINOMIAL_PRODUCTS: Final = 3_000_000_000  # texts * texts * labels in coordinates: a minute for each C
MAX_MULTINOMIAL_WEIGHTS: Final = 8_000_000  # features * labels of sparse matrices: L-BFGS keeps 25 vectors of this length, 1.6 GB
MAX_FIT_PRODUCTS: Final = 100_000_000
"""Texts * texts * labels of a fit in coordinates. Of larger ones, which take seconds each, `SCREENED` values of C are tried at first, and
one finalist is fitted on all texts."""
MAX_FOLD_PRODUCTS: Final = 5_000_000
"""The same limit where each setting is also fitted without every fold: for the sum over all fits of a setting."""
SCREENED: Final = 2
MAX_KEPT_VALUES: Final = 50_000_000
"""Of the matrices of a fit: those of more than 200 MB are not kept for several fits at a time."""
MAX_CHARACTERS: Final[Mapping[Variant, int]] = {
    "words": 100_000_000,
    "tokens": 100_000_000,
    "marked": 100_000_000,
    "characters": 20_000_000,
    "union": 20_000_000,
}
"""If the training texts have more characters together, a sample is fitted that has the same share of every label."""
MAX_VECTOR_VALUES: Final = 40_000_000
"""Of the vectors of segments of all training texts, half a gigabyte in the matrix that is fitted; of more texts a sample is fitted.
At least 10,000 texts have fewer: more than `FEW_TEXTS`, so that `fit_reads_seed` need not count them."""
_FAR_BELOW: Final = 0.01  # in dev score: a larger C gains less than this on all texts
_SAMPLE_STREAM: Final = 0x7F1D


AnySetting = TypeVar("AnySetting", Setting, BayesSetting)
AnyText = TypeVar("AnyText")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[AnySetting]):
    """A fitted model: its setting, the best tau, and the score with it on the texts that decide (`DevCandidates`)."""

    variant: Variant
    setting: AnySetting
    tau: float
    score: float

    def as_dict(self) -> dict[str, Any]:
        return {"variant": self.variant, **self.setting.as_dict(), "tau": self.tau, "score": self.score}


@dataclass(frozen=True, slots=True, eq=False)
class LinearFit:
    """The chosen model. score: on dev. predictions: the distinct dev predictions of all candidates (candidates, n, ...).

    train_texts: the number of training texts that it was fitted on. held_out: what the chosen setting predicts out of fold. held_out_texts:
    how many such texts chose it together with dev.
    """

    model: LinearModel
    metric: str
    score: float
    tried: tuple[Candidate[Any], ...]
    predictions: npt.NDArray[Any]
    train_texts: int
    seconds: float
    held_out: HeldOut
    held_out_texts: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the model."""
        best = {"variant": self.model.ngrams.variant, "features": self.model.coefficients.weights.shape[0], "tau": self.model.tau}
        best |= self.model.setting.as_dict()
        tried = [each.as_dict() for each in self.tried]
        spent = {"train_texts": self.train_texts, "held_out_texts": self.held_out_texts, "seconds": round(self.seconds, 2)}
        return {"metric": self.metric, "score": self.score, **best, "vectors": self.model.vectors is not None, **spent, "tried": tried}


@dataclass(frozen=True, slots=True, eq=False)
class VariantRows:
    """The training and dev texts under one variant of n-grams.

    train, dev: CSR (n, terms) and (m, terms), rows of length 1. vectors: of the same texts, (n, width) and (m, width); None without text
    vectors. kept: the training texts that `train` holds. without_folds: `TaskFeatures.without` each held-out fold; empty for
    numbers, since `train` does not depend on them.
    """

    ngrams: Ngrams
    train: Any
    dev: Any
    vectors: tuple[FloatArray, FloatArray] | None
    kept: IntArray
    without_folds: tuple[Any, ...] = ()

    def matrices(self, vector_weight: float) -> Matrices:
        """Return the rows with text vectors of this length beside them, if there are any."""
        if self.vectors is None:
            return Matrices(self.train, self.dev)
        return Matrices(*(beside(rows, vectors, vector_weight) for rows, vectors in zip((self.train, self.dev), self.vectors, strict=True)))

    @property
    def values(self) -> int:
        """Number of values in the matrices of the training texts."""
        return int(self.train.nnz) + (0 if self.vectors is None else self.vectors[0].size)


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """What regressions are fitted on, and the dev rows that they predict: features, or coordinates of the space of the training rows.

    train, dev: (n, width) and (m, width). without_folds: the rows of `VariantRows.without_folds`, each in coordinates of their own. parts:
    the matrices of the features of the training rows, which are side by side.
    """

    train: Any
    dev: Any
    without_folds: tuple[FloatArray, ...] = ()
    coordinates: Coordinates | None = None
    parts: tuple[Any, ...] = ()

    def restore(self, fitted: Coefficients) -> Coefficients:
        """Convert a model that was fitted on `train` to one of the features."""
        return fitted if self.coordinates is None else self.coordinates.restore(fitted, *self.parts)


class TaskFeatures:
    """Matrices of a task's training and dev texts by variant; terms are counted once for all variants that have them.

    weights: of the training texts, (n,); None = 1.
    """

    def __init__(
        self,
        task: Task,
        vectors: CorpusVectors | None,
        *,
        seed: int,
        markers: Markers | None = None,
        weights: FloatArray | None = None,
    ) -> None:
        whole = [[example.divided_text for example in split] for split in (task.train, task.dev)]
        self._train, self._dev = ([normalize(text) for text in texts] for texts in whole)
        self._solver = solver_of(task)
        self._targets = self._solver.targets(task)
        self._strata, self._labels = self._solver.strata(self._targets), self._solver.labels(self._targets)
        self._weights = np.ones(len(task.train), np.float32) if weights is None else weights
        self._seed = seed
        self._parts: dict[tuple[Terms, bytes], tuple[Vocabulary, Any, Any]] = {}
        self._markers, self._word_vectors, self._whole = markers, vectors, whole

    @property
    def vector_weights(self) -> tuple[float, ...]:
        """The weights of text vectors to try; 0 if there are none."""
        return (0.0,) if self._word_vectors is None else VECTOR_WEIGHTS

    @functools.cached_property
    def _vectors(self) -> tuple[FloatArray, FloatArray] | None:
        """Return the vectors of whole texts, of train and of dev."""
        if self._word_vectors is None:
            return None
        train, dev = map(self._word_vectors.trained.of, self._whole)
        return train, dev

    def _vectors_under(self, variant: Variant, kept: IntArray) -> tuple[FloatArray, FloatArray] | None:
        if variant != "marked" or self._word_vectors is None:
            return None if self._vectors is None else (self._vectors[0][kept], self._vectors[1])
        train, dev = self._whole
        texts = [train[index] for index in kept.tolist()]
        vectors = self._word_vectors.between(self._markers)
        return vectors.of_segments(texts, self._markers), vectors.of_segments(dev, self._markers)

    def kept(self, variant: Variant) -> IntArray:
        """Indices of the training texts that are fitted, ascending."""
        kept = _share_of(self._strata, MAX_CHARACTERS[variant] / max(1, sum(map(len, self._train))), self._seed)
        if variant != "marked" or self._word_vectors is None:
            return kept
        most = MAX_VECTOR_VALUES // self._word_vectors.trained.width(self._markers)
        return kept[_share_of(self._strata[kept], most / len(kept), self._seed)]

    def rows(self, variant: Variant, folds: Sequence[IntArray] = ()) -> VariantRows:
        """The matrices under one variant. folds: indices of training texts, for `VariantRows.without_folds`; then all are kept."""
        kept = self.kept(variant)
        parts = self._parts_of(variant, kept)
        vocabularies = self._weighted(parts, self._targets[kept], self._weights[kept])
        train, dev = (join([each.weigh(part[split]) for each, part in zip(vocabularies, parts, strict=True)]) for split in (1, 2))
        without_folds = tuple(self.without(variant, fold, self._targets, self._weights) for fold in folds if self._labels is not None)
        return VariantRows(Ngrams(variant, vocabularies), train, dev, self._vectors_under(variant, kept), kept, without_folds)

    def without(self, variant: Variant, fold: IntArray, targets: Any, weights: FloatArray) -> Any:
        """Return the matrix of all training texts under a variant; the labels of a fold do not count for the weights of the terms.

        targets, weights: of the training texts, (n, ...) and (n,).
        """
        parts = self._parts_of(variant, self.kept(variant))
        counted = weights.copy()
        counted[fold] = 0
        return join([each.weigh(part[1]) for each, part in zip(self._weighted(parts, targets, counted), parts, strict=True)])

    def _weighted(self, parts: Sequence[tuple[Vocabulary, Any, Any]], targets: Any, weights: FloatArray) -> tuple[Vocabulary, ...]:
        """Return the vocabularies with weights by the labels of the training texts; with idf if targets are numbers."""
        labels = self._solver.labels(targets)
        if labels is None:
            return tuple(vocabulary for vocabulary, _, _ in parts)
        return tuple(vocabulary.weighted_by_labels(train, labels, weights) for vocabulary, train, _ in parts)

    def _parts_of(self, variant: Variant, kept: IntArray) -> list[tuple[Vocabulary, Any, Any]]:
        return [self._part(kind, kept) for kind in PARTS[variant]]

    def sample(self, rows: VariantRows, count: int) -> VariantRows:
        """About `count` of the training rows, the same share of every label; without those of folds."""
        chosen = _share_of(self._strata[rows.kept], count / len(rows.kept), self._seed)
        vectors = None if rows.vectors is None else (rows.vectors[0][chosen], rows.vectors[1])
        return VariantRows(rows.ngrams, rows.train[chosen], rows.dev, vectors, rows.kept[chosen])

    def _part(self, kind: Terms, kept: IntArray) -> tuple[Vocabulary, Any, Any]:
        """Return the vocabulary, and the frequencies of its terms in the kept training texts and in the dev texts."""
        key = kind, kept.tobytes()
        if key not in self._parts:
            vocabulary, train = Vocabulary.fit(kind, [self._train[index] for index in kept.tolist()], self._markers)
            self._parts[key] = vocabulary, train, vocabulary.frequencies(self._dev)
        return self._parts[key]


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The space of settings to search. c: inverse regularizations. metric: the dev score that decides. seed: of samples and solvers."""

    c: tuple[float, ...]
    metric: str
    seed: int
    variants: tuple[Variant, ...] = VARIANTS


def fit_reads_seed(task: Task) -> bool:
    """Return True if `fit_linear` reads the seed: to sample texts, or in liblinear, which fits more than `FEW_TEXTS`."""
    texts = task.with_label_texts.train
    return len(texts) > FEW_TEXTS or has_too_many_characters(texts)


def has_too_many_characters(texts: Iterable[Example]) -> bool:
    """Return True if a variant samples these training texts because they are too long together."""
    return sum(len(normalize(text.divided_text)) for text in texts) > min(MAX_CHARACTERS.values())


def decisive_folds(task: Task) -> list[IntArray]:
    """Return the indices of the training texts of each fold that is scored together with a small dev set (`held_out_folds`).

    Empty if the models are fitted on a sample of the texts, or if one fit takes seconds.
    """
    learned, solver = task.with_label_texts.train, solver_of(task)
    if len(learned) > FEW_TEXTS or len(learned) ** 2 * len(task.labels) > MAX_FIT_PRODUCTS or has_too_many_characters(learned):
        return []
    return held_out_folds(task.train, solver.strata(solver.targets(task)), dev_texts=len(task.dev))


def markers_of(task: Task) -> Markers | None:
    """Return the markers of the training texts; of pairs their boundary is one."""
    known = [PAIR_BOUNDARY] if any(example.text_pair is not None for example in task.train) else []
    return Markers.find([normalize(example.divided_text) for example in task.train], known=known)


@on_one_blas_thread
def fit_linear(
    task: Task, space: SearchSpace, *, stage: str, vectors: CorpusVectors | None = None, threads: int = 1, emit: Emit = silent
) -> LinearFit:
    """Fit every candidate and keep the best on dev; the same arguments give the same result, with any number of threads.

    vectors: text vectors beside n-grams. stage: the name under which events are emitted. threads: models that are fitted at a time.
    """
    assert task.dev, "candidates are chosen on dev"
    fitted_texts = min(len(task.with_label_texts.train), FEW_TEXTS)
    threads = worthwhile_threads(threads, texts=fitted_texts, labels=len(task.labels))
    with Workers(threads, emit=emit) as workers:
        return _fit_linear(task, space, stage, vectors, workers)


def _fit_linear(task: Task, space: SearchSpace, stage: str, vectors: CorpusVectors | None, workers: Workers) -> LinearFit:
    began = time.perf_counter()
    learned, markers = task.with_label_texts, markers_of(task)
    features, grid = TaskFeatures(learned, vectors, seed=space.seed, markers=markers), sorted(space.c)
    variants = [variant for variant in space.variants if variant != "marked" or markers is not None]
    few = len(learned.train) <= FEW_TEXTS
    all_kept = few and all(len(features.kept(variant)) == len(learned.train) for variant in variants)
    folds = decisive_folds(task) if all_kept else []
    search = _Search(task, space, workers, folds)
    screened = search.screened(grid)
    progress: dict[str, Any] = {"total": len(variants), "unit": "variants"}
    workers.emit(Event("start", stage, **progress))

    def emit_finalist(finalist: Candidate[Setting]) -> None:
        workers.emit(Event("progress", stage, f"{terms_of(finalist.variant)}, {finalist.setting.scheme}", done=len(variants), **progress))

    # Every combination on a few texts, with the screened values of C.
    rows: dict[Variant, VariantRows] = {}
    few_rows: dict[Variant, VariantRows] = {}
    for done, variant in enumerate(variants):
        workers.emit(Event("progress", stage, terms_of(variant), done=done, **progress))
        rows[variant] = tried = features.rows(variant, folds)
        few_rows[variant] = tried if few else features.sample(tried, FEW_TEXTS)
        search.collect()
        search.start_all(few_rows[variant], features.vector_weights, screened)
        if len(tried.kept) < len(learned.train):
            kept, whole = int((tried.kept < len(task.train)).sum()), len(task.train)  # without the texts of label names
            shown = f"{kept:,} of {whole:,} training texts, the same share of each label, to save time"
            workers.emit(Event("warning", stage, f"{terms_of(variant)}: fitted on {shown}"))
    search.collect()
    if screened != grid:  # the best ones with the other values
        for finalist in search.best_schemes(FINALISTS, few_rows):
            emit_finalist(finalist)
            search.start(few_rows[finalist.variant], finalist.setting, [c for c in grid if c not in screened])
        search.collect()
    if not few:  # the best ones on all texts, with growing C
        finalists = search.best_schemes(FINALISTS if screened == grid else 1, rows)
        search = _Search(task, space, workers, held_out=[])
        for finalist in finalists:
            emit_finalist(finalist)
            search.start(rows[finalist.variant], finalist.setting, [c for c in grid if c >= finalist.setting.c], growing=True)
        search.collect()
    best = search.dev.best
    workers.emit(Event("done", stage, search.dev.message(best), done=len(variants), data={"score": best.score}, **progress))
    return search.best_fit(vectors, began)


@on_one_blas_thread
def refit(
    model: LinearModel, task: Task, *, seed: int, with_unlabelled: Callable[[Task], tuple[Task, FloatArray]] | None = None
) -> LinearModel:
    """Fit the setting of a model of few texts again, on the training and the dev texts.

    with_unlabelled: takes a task, and returns it with labelled and unlabelled texts as training texts, the latter with a label, and their
    weights, (n,).
    """
    assert isinstance(model.setting, Setting), "naive Bayes reads passages as well"
    whole = replace(task, train=(*task.train, *task.dev), dev=task.dev[:1])
    learned, weights = (whole.with_label_texts, None) if with_unlabelled is None else with_unlabelled(whole)
    again = Refitting(model, model.setting, learned, seed=seed, weights=weights)
    (adjustment,) = logit_adjustments(whole, (model.tau,)).values()
    return again.model_of(again.fit(model.setting.c), adjustment=adjustment)


class Refitting:
    """Fits a model again on the training texts of a task, in its variant, markers and text vectors.

    solver, features, targets, rows, matrices: of these texts. fit: from C to coefficients in coordinates.
    """

    def __init__(self, model: LinearModel, setting: Setting, learned: Task, *, seed: int, weights: FloatArray | None = None) -> None:
        """weights: of the training texts, (n,); None = 1."""
        self._model, self.solver = model, solver_of(learned, seed=seed)
        vectors = None if model.vectors is None else CorpusVectors(model.vectors, model.vectors)
        self.features = TaskFeatures(learned, vectors, seed=seed, markers=model.ngrams.markers, weights=weights)
        self.targets, self.rows = self.solver.targets(learned), self.features.rows(model.ngrams.variant)
        self.matrices, kept = Spans(self.rows).of(setting.vector_weight), self.rows.kept
        self.fit = self.solver.fitter(self.matrices.train, self.targets[kept], setting, None if weights is None else weights[kept])

    def model_of(self, fitted: Coefficients, **changed: Any) -> LinearModel:
        """Return the model with what `fit` returned, and with other values of these fields."""
        return replace(self._model, ngrams=self.rows.ngrams, coefficients=self.matrices.restore(fitted), **changed)


def in_coordinates(setting: Setting, texts: int, outputs: int) -> bool:
    """Return True if a model of more than `FEW_TEXTS` texts is fitted in the coordinates of their span, as those of few texts are."""
    small = texts <= MAX_MULTINOMIAL_TEXTS and texts**2 * outputs <= MAX_MULTINOMIAL_PRODUCTS
    return setting.scheme == "multinomial" and small


class ScoredPredictions(NamedTuple):
    """predictions: of the dev and held-out texts, (taus, n, ...). scores: (taus,), with held-out texts averaged over neighbouring taus."""

    predictions: npt.NDArray[Any]
    scores: npt.NDArray[np.float64]


class DevCandidates(Generic[AnySetting]):
    """Dev scores and predictions of the models of one search, each with the tau that suits it.

    held_out: indices of training texts that are predicted out of fold; they are scored together with the dev texts, after them. best: the
    candidate with the highest score on both. dev_score: its score on dev.
    """

    def __init__(self, task: Task, metric: str, held_out: Sequence[int] = ()) -> None:
        self._scorer = DevScorer.of(task.with_training_in_dev(held_out), metric)
        self._adjustments, self._metric, self._dev, self._held_out = logit_adjustments(task), metric, len(task.dev), len(held_out)
        self._neighbours = neighbouring_taus(tuple(self._adjustments)) if held_out else np.eye(len(self._adjustments))
        self._has_prior = KINDS[task.kind].has_prior
        self._predictions: list[npt.NDArray[Any]] = []
        self._dev_scorer = DevScorer.of(task, metric)
        self.tried: list[Candidate[AnySetting]] = []
        self.best: Candidate[AnySetting]
        self.dev_score: float

    def scored(self, logits: FloatArray) -> ScoredPredictions:
        """The predictions and scores of a model's logits of the dev and held-out texts, (n, labels), with every tau."""
        predictions = np.stack([self._scorer.predictions(logits + adjustment) for adjustment in self._adjustments.values()])
        return ScoredPredictions(predictions, self._neighbours @ self._scorer.scores(predictions))

    def add(self, variant: Variant, setting: AnySetting, scored: ScoredPredictions) -> Candidate[AnySetting]:
        """Add a model with its predictions; `best` becomes the model if it is better than all before."""
        predictions, scores = scored
        index = int(np.argmax(scores))
        candidate = Candidate(variant, setting, tuple(self._adjustments)[index], float(scores[index]))
        if not self.tried or candidate.score > self.best.score:
            self.best = candidate
            self.dev_score = float(self._dev_scorer.scores(predictions[index : index + 1, : self._dev])[0])
        self.tried.append(candidate)
        self._predictions.append(distinct_rows(predictions[:, : self._dev]))
        return candidate

    def adjustment(self, candidate: Candidate[AnySetting]) -> FloatArray:
        """Return the adjustment of the logits by the candidate's tau, float32 (labels,)."""
        return self._adjustments[candidate.tau]

    def distinct_predictions(self) -> npt.NDArray[Any]:
        """The distinct dev predictions of all candidates and values of tau, (predictions, n, ...)."""
        return distinct_rows(np.concatenate(self._predictions))

    def message(self, candidate: Candidate[AnySetting]) -> str:
        """Return the message about the chosen candidate."""
        adjusted = f", logit adjustment tau = {candidate.tau:g}" if self._has_prior else ""
        score = f"{METRIC_NAMES[self._metric]} {format_metric(self._metric, candidate.score)}"
        return f"best on {self.texts}: {terms_of(candidate.variant)}, {candidate.setting}{adjusted}: {score}"

    @property
    def texts(self) -> str:
        """The texts that decide, for messages."""
        return f"dev and {self._held_out:,} training texts out of fold" if self._held_out else "dev"


@dataclass(frozen=True, slots=True, eq=False)
class _Fitted:
    """A fitted model with its predictions. held_out: logits of the held-out texts by the models fitted without them, (h, labels)."""

    setting: Setting
    coefficients: Coefficients
    dev: ScoredPredictions
    held_out: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Started:
    """A setting that is being fitted with several C, in order."""

    rows: VariantRows
    matrices: Matrices
    growing: bool
    wait: Callable[[], list[_Fitted]]


class _Search:
    """The regressions that were fitted so far on one task.

    `start*` fit models in other threads, `collect` waits for them and compares them in the order in which they were started, so that the
    number of threads changes nothing.
    """

    def __init__(self, task: Task, space: SearchSpace, workers: Workers, held_out: Sequence[IntArray]) -> None:
        """held_out: indices of the training texts of each fold that is predicted beside dev, all of which must be fitted."""
        self._task, self._metric = task, space.metric
        self._held_out_rows = np.concatenate([np.zeros(0, np.int64), *held_out])
        self._solver = solver_of(task, seed=space.seed, go_on=workers.go_on)
        self._targets = self._solver.targets(task.with_label_texts)
        self._held_out = [np.isin(np.arange(len(self._targets)), fold) for fold in held_out]
        self._dev_numbers = DevScorer.of(task, space.metric).truth if task.kind == "regression" else None
        self._spans: Spans | None = None
        self._workers, self._started = workers, list[_Started]()
        self.dev: DevCandidates[Setting] = DevCandidates(task, space.metric, self._held_out_rows.tolist())
        self._best: tuple[VariantRows, Coefficients, FloatArray]  # the rows of `dev.best`, its coefficients, and its held-out logits

    def screened(self, grid: Sequence[float]) -> Sequence[float]:
        """The values of C that are tried first: all, or `SCREENED` of them if a setting takes seconds."""
        products = min(len(self._targets), FEW_TEXTS) ** 2 * self._solver.outputs
        most = MAX_FOLD_PRODUCTS // (1 + len(self._held_out)) if self._held_out else MAX_FIT_PRODUCTS
        return grid if products <= most else _middle(grid, SCREENED)

    def best_fit(self, vectors: CorpusVectors | None, began: float) -> LinearFit:
        """The best model, of a task with these text vectors. began: when the search did, in seconds of `perf_counter`."""
        (rows, coefficients, held_out), best, task = self._best, self.dev.best, self._task
        ngrams, adjustment = rows.ngrams, self.dev.adjustment(best)
        used = None if vectors is None else vectors.between(ngrams.markers)
        model = LinearModel(task.kind, task.labels, ngrams, used, coefficients, best.setting, adjustment, best.tau)
        return LinearFit(
            model,
            self._metric,
            self.dev.dev_score,
            tuple(self.dev.tried),
            self.dev.distinct_predictions(),
            train_texts=int((rows.kept < len(task.train)).sum()),  # without those of label names
            seconds=time.perf_counter() - began,
            held_out=HeldOut(self._held_out_rows, KINDS[task.kind].outputs(held_out + adjustment)),
            held_out_texts=len(self._held_out_rows),
        )

    def best_schemes(self, count: int, rows: Mapping[Variant, VariantRows]) -> list[Candidate[Setting]]:
        """The best candidate of each variant and setting with any C, best first, at most `count`; without those too large for `rows`."""
        best: dict[tuple[str, Setting], Candidate[Setting]] = {}
        for tried in sorted(self.dev.tried, key=lambda each: -each.score):
            best.setdefault((tried.variant, replace(tried.setting, c=0.0)), tried)
        return [each for each in best.values() if self._can_fit(rows[each.variant], each.setting)][:count]

    def _can_fit(self, rows: VariantRows, setting: Setting) -> bool:
        """False for a multinomial regression of too many texts, features and labels. One-vs-rest fits one label after another."""
        small = rows.ngrams.width * self._solver.outputs <= MAX_MULTINOMIAL_WEIGHTS
        return setting.scheme != "multinomial" or small or in_coordinates(setting, len(rows.kept), self._solver.outputs)

    def start_all(self, rows: VariantRows, vector_weights: Sequence[float], grid: Sequence[float]) -> None:
        """Every weight of text vectors and scheme with every C, on the few rows of one variant."""
        for weight in vector_weights:
            for scheme, class_weights in self._solver.schemes(self._targets[rows.kept]):
                self.start(rows, Setting(scheme, class_weights, grid[0], weight), grid)

    def start(self, rows: VariantRows, setting: Setting, grid: Sequence[float], *, growing: bool = False) -> None:
        """One weight of text vectors and scheme with every C, on the few rows of one variant.

        growing: on all rows, with growing C as long as the dev score grows and is not far below the best.
        """
        if growing and not in_coordinates(setting, len(rows.kept), self._solver.outputs):
            self._make_room(rows.values)
            matrices = rows.matrices(setting.vector_weight)
        else:
            matrices = self._in_coordinates(rows, setting.vector_weight)
        fits = self._workers.start(lambda: self._fit(rows, matrices, setting, grid, growing=growing))
        self._started.append(_Started(rows, matrices, growing, fits))

    def collect(self) -> None:
        """Wait for all models that were started, and compare them."""
        while self._started:
            started = self._started.pop(0)
            last = -math.inf
            for fitted in started.wait():
                score = self._add(started, fitted)
                if started.growing and self._stops(score, last):
                    break  # another thread fitted more before it could know
                last = score

    def _in_coordinates(self, rows: VariantRows, vector_weight: float) -> Matrices:
        """The rows in coordinates. What the last call computed is shared with this one where the rows are the same."""
        if self._spans is None or self._spans.rows is not rows:
            self._spans = Spans(rows)  # frees the matrices of other rows
        if not self._spans.holds(vector_weight):
            self._make_room(len(rows.kept) * (len(rows.kept) + rows.dev.shape[0]))
        return self._spans.of(vector_weight)

    def _make_room(self, values: int) -> None:
        """Before matrices of so many values are made: collect the models on earlier ones, which frees them, if both are too many."""
        if values > MAX_KEPT_VALUES or not self._workers.parallel:
            self.collect()

    def _fit(self, rows: VariantRows, matrices: Matrices, setting: Setting, grid: Sequence[float], *, growing: bool) -> list[_Fitted]:
        """Fit the training rows with each C.

        Runs in a thread of the pool. The best score so far is a lower bound of the one that `collect` compares with, so that no model is
        missing that `collect` reads.
        """
        fitter = self._solver.fitter(matrices.train, self._targets[rows.kept], setting)
        folds = zip(matrices.without_folds or [matrices.train] * len(self._held_out), self._held_out, strict=True)
        predictors = [fold_predictor(self._solver, each, self._targets, inside, setting) for each, inside in folds]
        models, last = list[_Fitted](), -math.inf
        for c in grid:
            self._workers.go_on()
            coefficients = fitter(c)
            scores, held_out = coefficients.scores(matrices.dev), [predict(c) for predict in predictors]
            if self._dev_numbers is not None:  # a strong regularization suits correlations, and shrinks all numbers towards their mean
                line = calibrate_numbers(scores, self._dev_numbers)
                scale = np.float32(line.scale)
                coefficients = Coefficients(coefficients.weights * scale, coefficients.bias * scale + line.shift)
                scores, held_out = scores * scale + line.shift, [each * scale + line.shift for each in held_out]
            of_held_out = np.concatenate([np.zeros((0, self._solver.outputs), np.float32), *held_out])
            scored = self.dev.scored(np.concatenate([self._solver.logits(setting.scheme, scores), of_held_out]))
            models.append(_Fitted(replace(setting, c=c), coefficients, scored, of_held_out))
            score = float(scored.scores.max())
            if growing and self._stops(score, last):
                break
            last = score
        return models

    def _stops(self, score: float, last: float) -> bool:
        """True if a larger C is not worth a try after this score and the one before."""
        best = self.dev.best.score if self.dev.tried else -math.inf
        return score <= last or score < best - _FAR_BELOW

    def _add(self, started: _Started, fitted: _Fitted) -> float:
        candidate = self.dev.add(started.rows.ngrams.variant, fitted.setting, fitted.dev)
        if candidate is self.dev.best:
            self._best = started.rows, started.matrices.restore(fitted.coefficients), fitted.held_out
        return candidate.score


class Spans:
    """The rows of one variant in coordinates, (n, n) and (m, n), with any weight of text vectors; the last ones are kept.

    The inner products of rows with text vectors of weight w beside them are those of the rows of n-grams, which are computed once, and w^2
    times those of the vectors.
    """

    def __init__(self, rows: VariantRows) -> None:
        self.rows = rows
        self._products: list[FloatArray] | None = None  # of the rows of n-grams, if they are needed again
        self._last: tuple[float, Matrices] | None = None

    def holds(self, vector_weight: float) -> bool:
        """Return True if `of` need not compute it."""
        return self._last is not None and self._last[0] == vector_weight

    def of(self, vector_weight: float) -> Matrices:
        """The rows with text vectors of this weight."""
        if self._last is not None and self._last[0] == vector_weight:
            return self._last[1]
        self._last = None  # frees its matrices first
        dev, train, *without_folds = self._inner_products(vector_weight)
        coordinates, of_folds = Coordinates.of(train), tuple(Coordinates.of(each).rows for each in without_folds)
        parts = (self.rows.train,) if self.rows.vectors is None else (self.rows.train, np.float32(vector_weight) * self.rows.vectors[0])
        matrices = Matrices(coordinates.rows, coordinates.transform(dev), of_folds, coordinates, parts)
        self._last = vector_weight, matrices
        return matrices

    def _inner_products(self, vector_weight: float) -> list[FloatArray]:
        """Return the inner products of dev rows with training rows, (m, n), of the training rows, and of those without each fold, (n, n);
        new arrays.
        """
        rows = self.rows
        if rows.vectors is None:
            return self._of_terms()
        if self._products is None:
            self._products = self._of_terms()
        of_dev, of_train = (np.float32(vector_weight) ** 2 * (vectors @ rows.vectors[0].T) for vectors in reversed(rows.vectors))
        dev, *train = self._products
        return [dev + of_dev, *(each + of_train for each in train)]

    def _of_terms(self) -> list[FloatArray]:
        rows = self.rows
        return [inner_products(rows.dev, rows.train), *(inner_products(each, each) for each in (rows.train, *rows.without_folds))]


def _middle(grid: Sequence[float], count: int) -> list[float]:
    """`count` values of a grid, at equal distances from its ends and from one another."""
    return sorted({grid[round((each + 1) / (count + 1) * (len(grid) - 1))] for each in range(count)})


def sample_texts(texts: Sequence[AnyText], most: int, *, seed: int, stream: int) -> Sequence[AnyText]:
    """At most `most` random texts, in their order. stream: separates choices with the same seed."""
    if len(texts) <= most:
        return texts
    random = np.random.Generator(np.random.Philox(key=[seed, stream]))
    return [texts[index] for index in np.sort(random.permutation(len(texts))[:most]).tolist()]


def _share_of(strata: IntArray, share: float, seed: int) -> IntArray:
    """Indices of a random share of every stratum, ascending, at least one of each; all if the share is 1 or more."""
    rows = np.arange(len(strata))
    if share >= 1:
        return rows
    random = np.random.Generator(np.random.Philox(key=[seed, _SAMPLE_STREAM]))
    chosen = []
    for stratum in np.unique(strata):
        of_stratum = rows[strata == stratum]
        chosen.append(random.permutation(of_stratum)[: math.ceil(share * len(of_stratum))])
    return np.sort(np.concatenate(chosen))
