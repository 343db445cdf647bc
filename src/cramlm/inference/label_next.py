"""Choose which texts to label next: those of low margin that differ from one another (active learning).

    texts ─► without those that are labelled already or repeated ─► the 10 n with the smallest margin ─► k-means with n clusters ─► of each
    cluster the text nearest to its centre

The margin is the difference of the two highest probabilities; of a multi-label model, twice the distance of the closest probability from
0.5. Clusters are those of the model's text vectors at length 1, each text weighted by 1 - margin (Zhdanov 2019, "Diverse mini-batch active
learning", https://arxiv.org/abs/1901.05954).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import scipy.sparse

from cramlm.data.task import text_key
from cramlm.errors import UsageError
from cramlm.evaluation.kinds import KINDS
from cramlm.inference.base import BasePredictor
from cramlm.inference.linear import CombinedPredictor, LinearPredictor, divided_texts
from cramlm.inference.onnx import OnnxPredictor
from cramlm.linear.solvers import Coordinates, inner_products
from cramlm.records import Example, FloatArray, IntArray

CANDIDATES: Final = 10
"""Candidates for each text that is chosen; Zhdanov (2019) found 10 to 50 equally good."""
_FITS: Final = 3  # of k-means, from different starts
_MOST_IN_COORDINATES: Final = 12_000  # texts, whose inner products are a matrix of 600 MB


@dataclass(frozen=True, slots=True)
class ChosenText:
    """A text to label. predicted: the label or labels that the model predicts. margin: from 0 (equal
    probabilities) to 1.
    """

    example: Example
    predicted: Any
    margin: float


@dataclass(frozen=True, slots=True)
class NextTexts:
    """chosen: the smallest margin first. labelled, repeated: texts that were left out, as labelled already or as repeated in the file."""

    chosen: tuple[ChosenText, ...]
    labelled: int
    repeated: int


def label_next(
    predictor: BasePredictor,
    examples: Sequence[Example],
    count: int,
    *,
    labelled: Iterable[Example] = (),
    seed: int = 0,
    origin: str = "examples",
) -> NextTexts:
    """Choose `count` texts, or all if there are fewer; equal arguments give equal texts.

    labelled: texts that are never chosen. origin: what the examples are named in errors.

    Raises:
        UsageError: if `count` is below 1, no text is left, or the model predicts numbers or has nothing to compare texts by.
    """
    if count < 1:
        raise UsageError(f"{count} texts to choose; take at least 1")
    if predictor.kind == "regression":
        raise UsageError("a model of numbers has no margin between labels; label texts at random, or those with the most extreme numbers")
    labelled_keys = {text_key(example) for example in labelled}
    keys = [text_key(example) for example in examples]
    unlabelled = [number for number, key in enumerate(keys) if key not in labelled_keys]
    first = {keys[number]: number for number in reversed(unlabelled)}  # of equal texts
    kept = [examples[number] for number in sorted(first.values())]
    if not kept:
        raise UsageError(f"{origin}: all {len(examples):,} texts are labelled already; pass others")
    texts, pairs = _columns(kept)
    outputs = predictor.outputs(texts, pairs)
    uncertain = margins(outputs, several=predictor.kind == "multi-label")
    order = np.argsort(uncertain, kind="stable")
    candidates = order[: CANDIDATES * count]
    if len(kept) > count:
        vectors = _vectors(predictor, [kept[index] for index in candidates.tolist()])
        candidates = candidates[spread(vectors, 1 - uncertain[candidates], count, seed=seed)]
    predictions = KINDS[predictor.kind].predictions(outputs[candidates], predictor.labels)
    chosen = tuple(
        ChosenText(kept[index], _label_of(prediction), float(uncertain[index]))
        for index, prediction in zip(candidates.tolist(), predictions, strict=True)
    )
    return NextTexts(chosen, len(examples) - len(unlabelled), len(unlabelled) - len(kept))


def margins(probabilities: FloatArray, *, several: bool) -> npt.NDArray[np.float64]:
    """Return the margin of each row of probabilities (n, labels), float64 (n,). several: True if the labels are independent."""
    values = probabilities.astype(np.float64)
    if several:
        distances: npt.NDArray[np.float64] = np.abs(2 * values - 1).min(axis=1)
        return distances
    if values.shape[1] == 1:
        return np.ones(len(values))
    best = np.sort(values, axis=1)[:, -2:]
    differences: npt.NDArray[np.float64] = best[:, 1] - best[:, 0]
    return differences


def spread(vectors: Any, weights: npt.NDArray[np.float64], count: int, *, seed: int) -> IntArray:
    """Choose `count` different rows, one near the centre of each k-means cluster, ascending.

    vectors: float32 (n, d), dense or scipy CSR; n > count. weights: of the rows, (n,), >= 0.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.preprocessing import normalize

    rows = normalize(vectors)
    if scipy.sparse.issparse(rows) and len(weights) <= _MOST_IN_COORDINATES:  # the same distances, without centres of all features
        rows = Coordinates.of(inner_products(rows, rows)).rows
    kmeans = KMeans(count, random_state=seed, n_init=_FITS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct vectors than clusters
        distances = kmeans.fit(rows, sample_weight=weights + 1e-6).transform(rows)
    chosen: dict[int, None] = {}
    for cluster in range(count):
        members = np.flatnonzero(kmeans.labels_ == cluster)
        if len(members):
            chosen[int(members[np.argmin(distances[members, cluster])])] = None
    others = (row for row in range(len(weights)) if row not in chosen)  # by growing margin
    while len(chosen) < count:
        chosen[next(others)] = None
    return np.array(sorted(chosen), dtype=np.int64)


def _vectors(predictor: BasePredictor, examples: Sequence[Example]) -> Any:
    """Return the vectors by which texts are compared: of the encoder, or the features of a linear model (or one beside an ONNX graph)."""
    texts, pairs = _columns(examples)
    linear = predictor
    if isinstance(predictor, CombinedPredictor) and isinstance(predictor.encoder, OnnxPredictor) and predictor.models.linear:
        linear = next(iter(predictor.models.linear.values()))
    if isinstance(linear, LinearPredictor):
        return linear.model.features(divided_texts(texts, pairs))
    return predictor.embeddings(texts, pairs)


def _columns(examples: Sequence[Example]) -> tuple[list[str], list[str | None] | None]:
    pairs = [example.text_pair for example in examples]
    return [example.text for example in examples], None if all(pair is None for pair in pairs) else pairs


def _label_of(prediction: Any) -> Any:
    return list(prediction.labels) if hasattr(prediction, "labels") else prediction.label
