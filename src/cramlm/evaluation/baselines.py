"""TF-IDF + a linear model: what a model has to beat before it is worth anything, fitted with the same care.

    words        words, 1- and 2-grams, lower case; a word keeps its combining marks (Yoruba's tones) and may be one character long
    tokens       what white space separates, 1- and 2-grams, as written: markup such as `<<` and `[[` counts
    characters   2- to 5-grams inside words, lower case
    union        tokens and characters side by side, where that is not too slow

The linear model is logistic regression, or ridge regression where texts have numbers (linear.py). Each variant walks over the C of the
config: from `_START` up as long as the dev score grows (macro-F1; of numbers Pearson's correlation), then down as long as it does. Where
labels differ much in size, both ways of weighting them are walked (every label alike; all rows alike, unless that starts more than
`_HOPELESS` below the best of the first). The dev score chooses (on ties the smaller C, then labels alike); the model is the one fitted on
train, and test is scored once with it. Weighting matters: on SciERC it is worth 5 points of macro-F1. A walk costs a third of a
grid and finds what the grid finds (docs/log.md).

Texts are put into NFC first. Training text beyond
`_LONGEST` characters is thinned, the same share of every label, for the variants that are slow on it, with a warning.
"""

from __future__ import annotations

import functools
import math
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, assert_never

import numpy as np
import scipy.sparse
from sklearn.feature_extraction.text import TfidfVectorizer

from cramlm.config import BaselineConfig
from cramlm.evaluation.kinds import KINDS, NAMES, AnyScores, figure, metric_of
from cramlm.evaluation.leaks import score_test
from cramlm.evaluation.linear import LINEAR, Weights
from cramlm.records import Emit, Event, Example, IntArray, Task, silent

Variant: TypeAlias = Literal["words", "tokens", "characters", "union"]

STAGE = "baseline"
_VARIANTS: tuple[Variant, ...] = ("words", "tokens", "characters", "union")
_MOST_FEATURES = 300_000
_RARE = 2  # a term of fewer texts than this is dropped, once there are ...
_MANY = 1000  # ... this many texts
_START = 3.0  # the C where most tasks are best, or next to it
_HOPELESS = 0.05  # of the dev score
_UNION_BELOW = 1e8  # non-zero entries times labels of `characters`
_LONGEST: dict[Variant, int] = {"words": 100_000_000, "tokens": 100_000_000, "characters": 20_000_000, "union": 20_000_000}
_THINNING_STREAM = 0x7F1D


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """One variant at its best setting on dev.

    test_leak_free: scores on the test rows whose text is not in train, None if all are. answers: to the test rows. metric: the dev score
    that chose. tried: (weights, C, it) of every fit. seconds: all of them, and its features.
    """

    c: float
    weights: Weights
    dev: AnyScores
    test: AnyScores | None
    test_leak_free: AnyScores | None
    features: int
    train_rows: int
    seconds: float
    metric: str
    tried: tuple[tuple[Weights, float, float], ...]
    answers: tuple[str, ...] = ()

    @property
    def reached(self) -> float:
        """The score on dev that chose."""
        return self.dev.figures[self.metric]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "c": self.c,
            "weights": self.weights,
            "dev": self.dev.as_dict(),
            **({} if self.test is None else {"test": self.test.as_dict()}),
            **({} if self.test_leak_free is None else {"test_leak_free": self.test_leak_free.as_dict()}),
            "features": self.features,
            "train_rows": self.train_rows,
            "seconds": round(self.seconds, 2),
            "tried": [{"weights": weights, "c": c, f"dev_{self.metric}": reached} for weights, c, reached in self.tried],
        }


@dataclass(frozen=True, slots=True, eq=False)
class Baselines:
    """Every variant that was fitted, and the name of the one that is best on dev (on ties the first)."""

    chosen: Variant
    variants: Mapping[Variant, Fitted]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; variants are named "tfidf-words" and so on, to stand beside models."""
        variants = {f"tfidf-{name}": fitted.as_dict() for name, fitted in self.variants.items()}
        return {"chosen": f"tfidf-{self.chosen}", "variants": variants, "seconds": round(self.seconds, 2)}


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """TF-IDF of the splits (scipy CSR, rows of length 1) under one vocabulary. kept: the training rows that train holds."""

    train: Any
    dev: Any
    test: Any
    kept: IntArray


def fit_baselines(task: Task, config: BaselineConfig, *, seed: int, emit: Emit = silent) -> Baselines:
    """Fit every variant; same task, config and seed, same result. 20 Newsgroups takes about a minute on one core, most tasks seconds."""
    assert task.dev, "variants and C are chosen on dev"
    began = time.perf_counter()
    linear, kind = LINEAR[task.kind], KINDS[task.kind]
    targets = linear.targets(task)
    train, dev, test = ([clean(example) for example in split] for split in (task.train, task.dev, task.test))
    texts = Texts(train, dev, test, linear.strata(targets))
    variants: dict[Variant, Fitted] = {}
    matrices: dict[Variant, Matrices] = {}
    emit(Event("start", STAGE, kind.baseline, total=len(_VARIANTS), unit="variants"))
    for done, variant in enumerate(_VARIANTS):
        emit(Event("progress", STAGE, variant, done=done, total=len(_VARIANTS), unit="variants"))
        started = time.perf_counter()
        if variant == "union" and matrices["characters"].train.nnz * len(task.labels) > _UNION_BELOW:
            emit(Event("note", STAGE, "union of tokens and characters left out: too slow for so much text and so many labels"))
            continue
        matrices[variant] = represent(variant, texts, matrices, seed=seed)
        kept = len(matrices[variant].kept)
        if kept < len(task.train):
            message = f"{variant}: fitted on {kept:,} of {len(task.train):,} training texts, the same share of each label, to save time"
            emit(Event("warning", STAGE, message))
        variants[variant] = _fit(task, targets, matrices[variant], config, seed=seed, started=started)
    chosen = max(variants, key=lambda name: variants[name].reached)
    best = variants[chosen]
    metric = best.metric
    data: dict[str, Any] = {
        name: {f"dev_{metric}": fitted.reached, "c": fitted.c, "weights": fitted.weights} for name, fitted in variants.items()
    }
    message = f"best: {chosen}, C = {best.c:g}, {best.weights}, dev {NAMES[metric]} {figure(metric, best.reached)}"
    emit(Event("done", STAGE, message, done=len(_VARIANTS), total=len(_VARIANTS), unit="variants", data=data))
    return Baselines(chosen, variants, time.perf_counter() - began)


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """What is compared, cleaned; labels are what a part of train keeps in proportion, as ids."""

    train: Sequence[str]
    dev: Sequence[str]
    test: Sequence[str]
    labels: IntArray


def clean(example: Example) -> str:
    return unicodedata.normalize("NFC", example.whole_text)


def represent(variant: Variant, texts: Texts, known: Mapping[Variant, Matrices], *, seed: int) -> Matrices:
    """TF-IDF of all splits; the vocabulary and the weights come from train alone."""
    if variant == "union":
        tokens, characters = known["tokens"], known["characters"]
        parts = ((tokens.train[characters.kept], characters.train), (tokens.dev, characters.dev), (tokens.test, characters.test))
        train, dev, test = (scipy.sparse.hstack(pair, format="csr") * np.sqrt(0.5) for pair in parts)
        return Matrices(train, dev, test, characters.kept)
    kept = _thinned(texts, _LONGEST[variant], seed)
    vectorizer = _vectorizer(variant, texts=len(kept))
    try:
        train = vectorizer.fit_transform([texts.train[index] for index in kept])
    except ValueError:  # scikit-learn's "empty vocabulary": no text holds a term of this kind
        train, dev, test = (scipy.sparse.csr_matrix((rows, 1)) for rows in (len(kept), len(texts.dev), len(texts.test)))
        return Matrices(train, dev, test, kept)
    dev, test = (
        vectorizer.transform(split) if split else scipy.sparse.csr_matrix((0, train.shape[1])) for split in (texts.dev, texts.test)
    )
    return Matrices(train, dev, test, kept)


def _thinned(texts: Texts, longest: int, seed: int) -> IntArray:
    """Training rows to fit on, in order: all of them, or of every label the same share so that they come to about `longest` characters."""
    share = longest / max(1, sum(map(len, texts.train)))
    rows = np.arange(len(texts.train))
    if share >= 1:
        return rows
    random = np.random.Generator(np.random.Philox(key=[seed, _THINNING_STREAM]))
    chosen = []
    for label in np.unique(texts.labels):
        of_label = rows[texts.labels == label]
        chosen.append(random.permutation(of_label)[: math.ceil(share * len(of_label))])
    return np.sort(np.concatenate(chosen))


def _vectorizer(variant: Variant, *, texts: int) -> TfidfVectorizer:
    common = {"sublinear_tf": True, "min_df": _RARE if texts >= _MANY else 1, "max_features": _MOST_FEATURES}
    match variant:
        case "words":
            return TfidfVectorizer(token_pattern=word_pattern(), ngram_range=(1, 2), lowercase=True, **common)
        case "tokens":
            return TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), lowercase=False, **common)
        case "characters":
            return TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), lowercase=True, **common)
        case "union":
            raise AssertionError("the union is made of two others")
        case _:
            assert_never(variant)


@functools.cache
def word_pattern() -> str:
    """A regular expression of words in any script: letters and digits with the marks that combine with them, of which Python's \\w knows
    nothing (it cuts 'ọ̀rọ̀' at each tone), and joiners inside them.
    """
    marks = "".join(f"{chr(first)}-{chr(last)}" for first, last in _runs(lambda code: unicodedata.category(chr(code)).startswith("M")))
    return rf"\w[\w{marks}\u200c\u200d]*"


def _runs(belongs: Any) -> Iterator[tuple[int, int]]:
    """First and last of each run of code points that belong."""
    first = None
    for code in range(sys.maxunicode + 2):
        inside = code <= sys.maxunicode and belongs(code)
        if inside and first is None:
            first = code
        elif not inside and first is not None:
            yield first, code - 1
            first = None


def _fit(task: Task, targets: Any, matrices: Matrices, config: BaselineConfig, *, seed: int, started: float) -> Fitted:
    linear, score, metric = LINEAR[task.kind], KINDS[task.kind].score, metric_of(task.kind)
    known = targets[matrices.kept]
    best: tuple[float, AnyScores, float, Weights, Any] | None = None
    tried = []

    def reached(weights: Weights, c: float) -> float:
        nonlocal best
        model = linear.fit(matrices.train, known, c=c, weights=weights, seed=seed)
        answers = linear.predict(model, matrices.dev, task.labels)
        dev = score([str(example.label) for example in task.dev], answers, task.labels)
        here = dev.figures[metric]
        tried.append((weights, c, here))
        if best is None or (here, -c) > (best[0], -best[2]):
            best = (here, dev, c, weights, model)
        return here

    for weights in linear.weightings(known):
        least = -math.inf if best is None else best[0] - _HOPELESS
        _walk(sorted(config.c), functools.partial(reached, weights), least=least)
    assert best is not None
    _, dev, c, weights, model = best
    test = leak_free = None
    predicted: list[str] = []
    if task.test:
        predicted = linear.predict(model, matrices.test, task.labels)
        test, leak_free = score_test(task, predicted)
    return Fitted(
        c=c,
        weights=weights,
        dev=dev,
        test=test,
        test_leak_free=leak_free,
        features=matrices.train.shape[1],
        train_rows=len(matrices.kept),
        seconds=time.perf_counter() - started,
        metric=metric,
        tried=tuple(tried),
        answers=tuple(predicted),
    )


def _walk(grid: Sequence[float], reached: Callable[[float], float], *, least: float) -> None:
    """Ask about the C nearest to `_START`; unless that is below `least`, about larger ones while the answer grows, then smaller."""
    start = min(range(len(grid)), key=lambda place: abs(math.log(grid[place] / _START)))
    here = reached(grid[start])
    if here < least:
        return
    for way in (grid[start + 1 :], grid[:start][::-1]):
        last = here
        for c in way:
            if (now := reached(c)) <= last:
                break
            last = now
