"""Vectors of texts: the weighted mean of the vectors of their words (learned from a whole corpus: cooccurrence.py).

Smooth inverse frequency (Arora, Liang and Ma 2017): a word has the weight `FREQUENT / (FREQUENT + its share of the corpus)`; from the mean
of the weighted directions the direction is removed that all passages of the corpus share. A word is a term of retrieval/bm25/terms.py.

    words.json           the words, most frequent first
    words.safetensors    directions float16 (words, width), rows of length 1; weights float32 (words,); shared float32 (width,)
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import scipy.sparse

from cramlm.errors import ArtifactError
from cramlm.linear.features import count_words
from cramlm.linear.files import REBUILD, read_file
from cramlm.records import PAIR_BOUNDARY, FloatArray
from cramlm.retrieval.bm25.terms import split_terms
from cramlm.storage.arrays import unit_vectors
from cramlm.text.characters import remove_diacritics
from cramlm.text.markers import Markers

FREQUENT: Final = 5e-5
"""A word with this share of the corpus has half the weight of a rare one."""
WORDS_FILE: Final = "words.json"
TENSORS_FILE: Final = "words.safetensors"


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Directions and weights of words. directions: float16 (words, width), rows of length 1. weights: float32 (words,). shared: float32
    (width,), of length 1 or 0.
    """

    words: tuple[str, ...]
    directions: npt.NDArray[np.float16]
    weights: FloatArray
    shared: FloatArray

    def of(self, texts: Sequence[str]) -> FloatArray:
        """(texts, width) float32, rows of length 1, or 0 for a text none of whose words has a vector."""
        return self.of_counts(count_words(texts, self._columns)[0])

    def coverage(self, texts: Sequence[str]) -> tuple[float, float]:
        """The share of the words of texts that have a vector, and the share that would have one if no word had diacritics."""
        counts, bare = Counter(word for text in texts for word in split_terms(text)), {remove_diacritics(word) for word in self.words}
        known = sum(count for word, count in counts.items() if word in self._columns)
        known_bare = sum(count for word, count in counts.items() if remove_diacritics(word) in bare)
        return known / max(1, counts.total()), known_bare / max(1, counts.total())

    def width(self, markers: Markers | None) -> int:
        """Columns of `of_segments`."""
        return len(self.shared) * (1 if markers is None else 1 + len(markers.kinds) + 2 * markers.pairs)

    def of_segments(self, texts: Sequence[str], markers: Markers | None) -> FloatArray:
        """As `of`, with the vectors of the segments of each kind beside those of the whole texts; both halves have the same length.

        Of pairs also the products of the two texts' vectors, which measure their similarity, and the absolute differences.
        """
        whole = self.of(texts)
        if markers is None:
            return whole
        halves: list[tuple[list[str], FloatArray]] = []
        if markers.pairs:
            columns = [[text.partition(PAIR_BOUNDARY)[half] for text in texts] for half in (0, 2)]
            halves = [(column, self.of(column)) for column in columns]
        parts = [whole, unit_vectors(np.hstack([self._of_column(column, halves) for column in markers.by_kind(texts)]))]
        if markers.pairs:
            (_, first), (_, second) = halves
            parts += [first * second * np.float32(len(self.shared) ** 0.5), np.abs(first - second)]
        return np.hstack(parts) * np.float32(len(parts) ** -0.5)

    def _of_column(self, texts: Sequence[str], known: Sequence[tuple[Sequence[str], FloatArray]]) -> FloatArray:
        """As `of`. known: texts and their vectors in the same order; a column of these texts or empty ones is not computed again."""
        for others, vectors in known:
            if all(not text or text == other for text, other in zip(texts, others, strict=True)):
                return np.where(np.array([[text != ""] for text in texts]), vectors, np.float32(0))
        return self.of(texts)

    def of_counts(self, counts: Any) -> FloatArray:
        """The vectors of texts with these counts of words, CSR (texts, words)."""
        in_use = np.zeros(len(self.words), dtype=bool)  # of 100,000 words a text has few; the directions of all in float32 are 100 MB
        in_use[counts.indices] = True
        column = np.cumsum(in_use, dtype=np.int32) - 1
        entries = counts.data * self.weights[counts.indices], column[counts.indices], counts.indptr
        weighted = scipy.sparse.csr_matrix(entries, shape=(counts.shape[0], int(in_use.sum())))
        averaged = unit_vectors(weighted @ self.directions[in_use].astype(np.float32))
        return unit_vectors(averaged - np.outer(averaged @ self.shared, self.shared))

    @functools.cached_property
    def _columns(self) -> Mapping[str, int]:
        return {word: column for column, word in enumerate(self.words)}

    def save(self, folder: Path) -> None:
        """Write the two files.

        Raises:
            OSError: if the disk refuses.
        """
        tensors = {"directions": self.directions, "weights": self.weights, "shared": self.shared}
        (folder / TENSORS_FILE).write_bytes(
            safetensors.numpy.save({name: np.ascontiguousarray(values) for name, values in tensors.items()})
        )
        (folder / WORDS_FILE).write_text(json.dumps(self.words, ensure_ascii=False) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> WordVectors:
        """Read what `save` wrote.

        Raises:
            ArtifactError: if a file is missing or damaged. EnvironmentFault: if the disk fails.
        """
        words = read_file(folder / WORDS_FILE, json.loads)
        tensors = read_file(folder / TENSORS_FILE, safetensors.numpy.load)
        if not (isinstance(words, list) and all(isinstance(word, str) for word in words) and len(set(words)) == len(words)):
            raise ArtifactError(f"{folder / WORDS_FILE}: damaged, not a list of distinct words; {REBUILD}")
        width = tensors["shared"].shape[-1] if "shared" in tensors else 0
        shapes = {"directions": (len(words), width), "weights": (len(words),), "shared": (width,)}
        expected = {name: (shape, "float16" if name == "directions" else "float32") for name, shape in shapes.items()}
        if {name: (values.shape, str(values.dtype)) for name, values in tensors.items()} != expected:
            raise ArtifactError(f"{folder / TENSORS_FILE}: does not fit {WORDS_FILE}; {REBUILD}")
        if not all(np.isfinite(values).all() for values in tensors.values()):
            raise ArtifactError(f"{folder / TENSORS_FILE}: holds numbers that are not finite; {REBUILD}")
        return cls(tuple(words), tensors["directions"], tensors["weights"], tensors["shared"])
