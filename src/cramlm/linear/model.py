"""A linear classifier of text as plain data: n-grams, optional text vectors, coefficients, logit adjustment.

    linear.json                      kind, labels, variant, how it was fitted, the terms of each vocabulary in the order of their columns
    linear.safetensors               coefficients, weights of the terms
    words.json, words.safetensors    only with text vectors (word_vectors.py)

Prediction needs NumPy and SciPy, not torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.numpy
import scipy.sparse

from cramlm.errors import ArtifactError
from cramlm.linear.features import PARTS, Ngrams, TextMatrices, Vocabulary
from cramlm.linear.files import MODEL_FILE, NAIVE_BAYES, REBUILD, WEIGHTS_FILE, BayesSetting, Setting, read_file, read_setting
from cramlm.linear.solvers import SOLVERS, Coefficients
from cramlm.linear.word_vectors import WordVectors
from cramlm.records import BoolArray, Diacritics, FloatArray, LinearName, TaskKind
from cramlm.text.characters import remove_diacritics
from cramlm.text.markers import Markers

FORMAT: Final = 4
_BATCH: Final = 4096
_SCHEMES: Final[Mapping[TaskKind, tuple[str, ...]]] = {
    "classification": ("multinomial", "one-vs-rest", NAIVE_BAYES),
    "multi-label": ("one-vs-rest",),
    "regression": ("ridge",),
}


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    """A fitted linear model.

    adjustment: added to the logits, float32 (labels,). tau: strength of the logit adjustment (evaluation/logit_adjustment.py). diacritics:
    "remove" if the model was fitted on texts without diacritics.
    """

    kind: TaskKind
    labels: tuple[str, ...]
    ngrams: Ngrams
    vectors: WordVectors | None
    coefficients: Coefficients
    setting: Setting | BayesSetting
    adjustment: FloatArray
    tau: float
    diacritics: Diacritics = "keep"

    @property
    def name(self) -> LinearName:
        """The name of this kind of model in tables of scores."""
        if isinstance(self.setting, BayesSetting):
            return "bayes"
        return "tfidf" if self.vectors is None else "static"

    def prepare(self, texts: Sequence[str]) -> TextMatrices:
        """Return the texts as the model reads them."""
        return TextMatrices([remove_diacritics(text) for text in texts] if self.diacritics == "remove" else texts)

    def features(self, texts: Sequence[str] | TextMatrices) -> Any:
        """Return the feature matrix, scipy CSR float32 (texts, features).

        texts: strings, or the result of `prepare`, which models with the same setting of diacritics can share.
        """
        texts = texts if isinstance(texts, TextMatrices) else self.prepare(texts)
        rows = self.ngrams.transform(texts)
        if self.vectors is None:
            return rows
        assert isinstance(self.setting, Setting), "naive Bayes has no text vectors"
        return beside(rows, self.vectors.of_segments(texts.texts, self.ngrams.markers), self.setting.vector_weight)

    def weighted_by_labels(self, texts: TextMatrices, labels: BoolArray, weights: FloatArray) -> LinearModel:
        """Return the model with weights of terms by the labels of these texts (features.py), for which its coefficients are to be fitted.

        labels: which texts have which, (n, labels). weights: of the texts, (n,).
        """
        parts = tuple(part.weighted_by_labels(texts.frequencies(part), labels, weights) for part in self.ngrams.parts)
        return replace(self, ngrams=Ngrams(self.ngrams.variant, parts))

    def logits(self, texts: Sequence[str]) -> FloatArray:
        """Return adjusted logits, float32 (texts, labels); for a regression the predicted numbers, (texts, 1).

        For a classification they are log-probabilities up to a constant per text.
        """
        parts = [self.logits_of_features(self.features(texts[start : start + _BATCH])) for start in range(0, max(len(texts), 1), _BATCH)]
        return np.concatenate(parts)

    def logits_of_features(self, rows: Any) -> FloatArray:
        """As `logits`, from the matrix that `features` returned."""
        scheme = self.setting.scheme if isinstance(self.setting, Setting) else "multinomial"
        logits: FloatArray = SOLVERS[self.kind](len(self.labels)).logits(scheme, self.coefficients.scores(rows)) + self.adjustment
        return logits

    def save(self, folder: Path) -> None:
        """Write the files of the model.

        Raises:
            OSError: if a file cannot be written.
        """
        description = {
            "format": FORMAT,
            "kind": self.kind,
            "labels": list(self.labels),
            "variant": self.ngrams.variant,
            "vectors": self.vectors is not None,
            **self.setting.as_dict(),
            "tau": self.tau,
            "terms": {part.kind: list(part.terms) for part in self.ngrams.parts},
        }
        if self.diacritics == "remove":
            description["diacritics"] = self.diacritics
        if (markers := self.ngrams.markers) is not None:
            description["markers"] = {"strings": markers.strings, "kinds": markers.kinds}
        tensors = {"weights": self.coefficients.weights, "bias": self.coefficients.bias, "adjustment": self.adjustment}
        tensors |= {f"idf.{part.kind}": part.weights for part in self.ngrams.parts}
        if self.vectors is not None:
            self.vectors.save(folder)
        contiguous = {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in tensors.items()}
        (folder / WEIGHTS_FILE).write_bytes(safetensors.numpy.save(contiguous))
        (folder / MODEL_FILE).write_text(json.dumps(description, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> LinearModel:
        """Read what `save` wrote.

        Raises:
            ArtifactError: if a file is missing or damaged, or the files do not fit together. EnvironmentFault: if the disk fails.
        """
        stored, tensors = _read_description(folder / MODEL_FILE), read_file(folder / WEIGHTS_FILE, safetensors.numpy.load)
        try:
            markers = _read_markers(stored["markers"]) if stored["variant"] == "marked" else None
            parts = tuple(
                Vocabulary(kind, tuple(terms), _vector(tensors, f"idf.{kind}", len(terms)), markers if kind == "segments" else None)
                for kind, terms in stored["terms"].items()
            )
            ngrams, vectors, width = Ngrams(stored["variant"], parts), None, 0
            if stored["vectors"]:
                vectors = WordVectors.load(folder)
                width = vectors.width(markers)
            outputs = len(stored["labels"])
            weights = tensors["weights"]
            _check(weights.shape == (ngrams.width + width, outputs), "weights")
            coefficients = Coefficients(weights, _vector(tensors, "bias", outputs))
            adjustment = _vector(tensors, "adjustment", outputs)
            _check(all(values.dtype == np.float32 and np.isfinite(values).all() for values in tensors.values()), "a number")
            return cls(
                stored["kind"],
                tuple(stored["labels"]),
                ngrams,
                vectors,
                coefficients,
                read_setting(stored),
                adjustment,
                float(stored["tau"]),
                "remove" if stored.get("diacritics") == "remove" else "keep",
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ArtifactError(f"{folder}: {MODEL_FILE} and {WEIGHTS_FILE} do not fit together ({error}); {REBUILD}") from error


def beside(rows: Any, vectors: FloatArray, weight: float) -> Any:
    """Return rows of n-grams (CSR, of length 1) with text vectors (n, width) of length 1 times `weight` as further columns, CSR float32."""

    def some(part: slice) -> Any:
        columns = scipy.sparse.csr_matrix(np.float32(weight) * vectors[part])  # needs five times the memory of a dense matrix meanwhile
        return scipy.sparse.hstack([rows[part], columns], format="csr", dtype=np.float32)

    parts = [some(slice(start, start + _BATCH)) for start in range(0, max(len(vectors), 1), _BATCH)]
    return parts[0] if len(parts) == 1 else scipy.sparse.vstack(parts, format="csr")


def kind_of_linear(folder: Path) -> TaskKind:
    """Return the kind of task of the linear model in a folder.

    Raises:
        ArtifactError: if its description is damaged.
    """
    kind: TaskKind = _read_description(folder / MODEL_FILE)["kind"]
    return kind


def _read_description(path: Path) -> Mapping[str, Any]:
    description: Mapping[str, Any] = read_file(path, json.loads)
    try:
        labels, terms, kinds = description["labels"], description["terms"], tuple(SOLVERS)
        strings = len(labels) > 0 and all(_are_distinct_strings(each) for each in (labels, *terms.values()))
        known = description["kind"] in kinds and description["variant"] in PARTS and description["scheme"] in _SCHEMES[description["kind"]]
        fits = tuple(terms) == PARTS[description["variant"]] and isinstance(description["vectors"], bool)
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: damaged, not the description of a linear model; {REBUILD}") from error
    if description.get("format") != FORMAT:
        raise ArtifactError(f"{path}: format {description.get('format')!r}, this version reads {FORMAT}; {REBUILD}")
    if not (strings and known and fits):
        raise ArtifactError(f"{path}: labels, terms, kind, variant or scheme have values that are not allowed; {REBUILD}")
    return description


def _read_markers(stored: Any) -> Markers:
    kinds = tuple((before, after) for before, after in stored["kinds"])
    _check(_are_distinct_strings(stored["strings"]) and all(stored["strings"]), "the markers")
    _check(all(isinstance(mark, str) for kind in kinds for mark in kind), "the kinds of segments")
    return Markers(tuple(stored["strings"]), kinds)


def _are_distinct_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values) and len(set(values)) == len(values)


def _vector(tensors: Mapping[str, FloatArray], name: str, length: int) -> FloatArray:
    _check(tensors[name].shape == (length,), name)
    return tensors[name]


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} has a wrong shape or value")
