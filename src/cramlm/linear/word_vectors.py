"""Vectors of texts: the weighted mean of the vectors of their words (learned from a whole corpus: corpus_vectors.py).

Smooth inverse frequency (Arora, Liang and Ma 2017): a word has the weight `FREQUENT / (FREQUENT + its share of the corpus)`, and its vector
has no component along the direction that all passages of the corpus share. A word is a term of retrieval/bm25/terms.py.

    words.json           the words, most frequent first
    words.safetensors    vectors float16 (words, width); weights float32 (words,)
    counted.safetensors  only of a corpus: vectors float16 (words, width)
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
COUNTED_FILE: Final = "counted.safetensors"


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Vectors and weights of words. vectors: float16 (words, width). weights: float32 (words,), from the frequencies."""

    words: tuple[str, ...]
    vectors: npt.NDArray[np.float16]
    weights: FloatArray

    def of(self, texts: Sequence[str]) -> FloatArray:
        """(texts, width) float32, rows of length 1, or 0 for a text none of whose words has a vector."""
        return mean_vectors(count_words(texts, self._columns)[0], self.vectors, self.weights)

    def coverage(self, texts: Sequence[str]) -> tuple[float, float]:
        """Return the share of the words of texts that have a vector, and the share that would have one if no word had diacritics."""
        counts, bare = Counter(word for text in texts for word in split_terms(text)), {remove_diacritics(word) for word in self.words}
        known = sum(count for word, count in counts.items() if word in self._columns)
        known_bare = sum(count for word, count in counts.items() if remove_diacritics(word) in bare)
        return known / max(1, counts.total()), known_bare / max(1, counts.total())

    def width(self, markers: Markers | None) -> int:
        """Columns of `of_segments`."""
        return int(self.vectors.shape[1]) * (1 if markers is None else 1 + len(markers.kinds) + 2 * markers.pairs)

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
            parts += [first * second * np.float32(self.vectors.shape[1] ** 0.5), np.abs(first - second)]
        return np.hstack(parts) * np.float32(len(parts) ** -0.5)

    def _of_column(self, texts: Sequence[str], known: Sequence[tuple[Sequence[str], FloatArray]]) -> FloatArray:
        """As `of`. known: texts and their vectors in the same order; a column of these texts or empty ones is not computed again."""
        for others, vectors in known:
            if all(not text or text == other for text, other in zip(texts, others, strict=True)):
                return np.where(np.array([[text != ""] for text in texts]), vectors, np.float32(0))
        return self.of(texts)

    @functools.cached_property
    def _columns(self) -> Mapping[str, int]:
        return {word: column for column, word in enumerate(self.words)}

    def save(self, folder: Path) -> None:
        """Write the two files.

        Raises:
            OSError: if a file cannot be written.
        """
        _write_tensors(folder / TENSORS_FILE, {"vectors": self.vectors, "weights": self.weights})
        (folder / WORDS_FILE).write_text(json.dumps(self.words, ensure_ascii=False) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> WordVectors:
        """Read what `save` wrote.

        Raises:
            ArtifactError: if a file is missing or damaged. EnvironmentFault: if the disk fails.
        """
        words = read_file(folder / WORDS_FILE, json.loads)
        if not (isinstance(words, list) and all(isinstance(word, str) for word in words) and len(set(words)) == len(words)):
            raise ArtifactError(f"{folder / WORDS_FILE}: damaged, not a list of distinct words; {REBUILD}")
        tensors = _read_tensors(folder / TENSORS_FILE, len(words), {"vectors": "float16", "weights": "float32"})
        return cls(tuple(words), tensors["vectors"], tensors["weights"])


@dataclass(frozen=True, eq=False)
class CorpusVectors:
    """Two vectors of each word of a corpus.

    counted: from co-occurrence; near those of words that are used alike. trained: from `counted` by contrastive.py; near those of words in
    texts about the same thing.
    """

    counted: WordVectors
    trained: WordVectors

    def between(self, markers: Markers | None) -> WordVectors:
        """Return the vectors for `WordVectors.of_segments`: `counted` if a text has segments, where a single verb may tell the label."""
        return self.trained if markers is None or markers.pairs else self.counted

    def save(self, folder: Path) -> None:
        """Write the three files.

        Raises:
            OSError: if a file cannot be written.
        """
        self.trained.save(folder)
        _write_tensors(folder / COUNTED_FILE, {"vectors": self.counted.vectors})

    @classmethod
    def load(cls, folder: Path) -> CorpusVectors:
        """Read what `save` wrote.

        Raises:
            ArtifactError: if a file is missing or damaged. EnvironmentFault: if the disk fails.
        """
        trained = WordVectors.load(folder)
        counted = _read_tensors(folder / COUNTED_FILE, len(trained.words), {"vectors": "float16"})["vectors"]
        return cls(replace(trained, vectors=counted), trained)


def _write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    path.write_bytes(safetensors.numpy.save({name: np.ascontiguousarray(values) for name, values in tensors.items()}))


def _read_tensors(path: Path, words: int, types: Mapping[str, str]) -> dict[str, npt.NDArray[Any]]:
    """Tensors of these types with a row for each word.

    Raises:
        ArtifactError: if the file is missing or damaged. EnvironmentFault: if the disk fails.
    """
    tensors: dict[str, npt.NDArray[Any]] = read_file(path, safetensors.numpy.load)
    width = tensors["vectors"].shape[-1] if "vectors" in tensors else 0
    expected = {name: ((words, width) if name == "vectors" else (words,), kind) for name, kind in types.items()}
    if {name: (values.shape, str(values.dtype)) for name, values in tensors.items()} != expected:
        raise ArtifactError(f"{path}: does not fit {WORDS_FILE}; {REBUILD}")
    if not all(np.isfinite(values).all() for values in tensors.values()):
        raise ArtifactError(f"{path}: holds numbers that are not finite; {REBUILD}")
    return tensors


def mean_vectors(counts: Any, vectors: npt.NDArray[Any], weights: FloatArray) -> FloatArray:
    """Return the vectors of texts with these counts of words, CSR (texts, words): (texts, width) float32, rows of length 1 or 0."""
    in_use = np.zeros(len(vectors), dtype=bool)  # of 100,000 words a text has few; the vectors of all in float32 are 100 MB
    in_use[counts.indices] = True
    column = np.cumsum(in_use, dtype=np.int32) - 1
    entries = counts.data * weights[counts.indices], column[counts.indices], counts.indptr
    weighted = scipy.sparse.csr_matrix(entries, shape=(counts.shape[0], int(in_use.sum())))
    return unit_vectors(weighted @ vectors[in_use].astype(np.float32))
