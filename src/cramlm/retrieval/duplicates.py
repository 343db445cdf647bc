"""Near-duplicates in a selection, such as boilerplate, quotations and editions of one text. The better-ranked one is kept.

    passage ─► its word 5-grams ─► MinHash ─► LSH table of the kept passages ─► candidates ─► as many equal hashes as near-duplicates have
      ─► Jaccard similarity of the 5-grams

MinHash (Broder 1997) and the table are those of `datasketch` (extra `dedup`); the number of bands finds a pair at the threshold with a
probability of 99.9 %. Candidates are compared by their words, so that no passage is dropped by chance. About 0.3 ms per passage.

In passages that share some text, such as a footer, nearly all are candidates of each other. Their numbers of equal hashes, which estimate
the similarity, are counted in one operation, and words are compared of those whose number a near-duplicate has with probability over 1e-5.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.corpus import Corpus
from cramlm.errors import EnvironmentFault
from cramlm.text.words import segment

WORDS: Final = 5  # of a shingle
_PERMUTATIONS: Final = 128
_RECALL: Final = 0.999
_MISSED: Final = 1e-5  # probability that a near-duplicate has too few equal hashes to be compared by its words
_FIRST_ROOM: Final = 1024  # kept passages


def require_datasketch() -> None:
    """Raise EnvironmentFault with the remedy if the package is missing."""
    if importlib.util.find_spec("datasketch") is None:
        raise EnvironmentFault("near_duplicates needs the package datasketch; run: pip install 'cramlm[dedup]', or unset near_duplicates")


class NearDuplicates:
    """The kept passages; `twin` adds a passage or finds its near-duplicate."""

    def __init__(self, corpus: Corpus, threshold: float) -> None:
        """threshold: minimum Jaccard similarity of the sets of word 5-grams of near-duplicates, in (0, 1]."""
        from datasketch import MinHash, MinHashLSH

        rows, bands = bands_for(threshold)
        self._corpus, self._threshold = corpus, threshold
        self._empty: Any = MinHash(num_perm=rows * bands, seed=1, hashfunc=_crc)
        self._table: Any = MinHashLSH(num_perm=rows * bands, params=(bands, rows))
        self._kept: list[int] = []
        self._hashes: npt.NDArray[np.uint32] = np.empty((_FIRST_ROOM, rows * bands), np.uint32)  # of the kept passages, with room for more
        self._least_equal = least_equal(threshold, rows * bands)

    def twin(self, position: int, text: str) -> tuple[int, float] | None:
        """Return (position, similarity) of the first kept near-duplicate; if there is none, keep this passage and return None."""
        own = shingles(text)
        sketch = self._empty.copy()
        sketch.update_batch([shingle.encode("utf-8", "surrogatepass") for shingle in own])
        hashes = sketch.hashvalues.astype(np.uint32)  # datasketch's hashes have 32 bits
        candidates = np.array(sorted(self._table.query(sketch)), np.int64)
        equal = np.count_nonzero(self._hashes[candidates] == hashes, axis=1)
        for number in candidates[equal >= self._least_equal].tolist():
            similarity = jaccard(own, shingles(self._corpus.text(self._kept[number])))
            if similarity >= self._threshold:
                return self._kept[number], similarity
        if len(self._kept) == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.empty_like(self._hashes)])
        self._hashes[len(self._kept)] = hashes
        self._table.insert(len(self._kept), sketch)
        self._kept.append(position)
        return None


def shingles(text: str) -> set[str]:
    """Return the set of runs of 5 normalised words; a shorter text is one run. A text of symbols only is split at white space."""
    words = segment(text) or text.split()
    return {" ".join(words[start : start + WORDS]) for start in range(max(1, len(words) - WORDS + 1))}


def jaccard(one: set[str], other: set[str]) -> float:
    """Return the size of the intersection over that of the union."""
    return len(one & other) / len(one | other)


def bands_for(threshold: float) -> tuple[int, int]:
    """Return (rows, bands) of the table: the most rows with which a pair at the threshold shares a band with probability 99.9 %."""
    for rows in range(_PERMUTATIONS // 2, 1, -1):  # datasketch needs two bands
        bands = _PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= _RECALL:
            return rows, bands
    return 1, _PERMUTATIONS


def least_equal(threshold: float, hashes: int) -> int:
    """Return the number of equal hashes, of so many, that a pair at the threshold reaches with a probability of at least 1 - `_MISSED`."""
    missed = 0.0
    for equal in range(hashes + 1):
        missed += math.comb(hashes, equal) * threshold**equal * (1 - threshold) ** (hashes - equal)
        if missed > _MISSED:
            return equal
    return hashes


def _crc(shingle: bytes) -> int:
    return zlib.crc32(shingle)
