"""Near-duplicates in a selection: boilerplate, quotations, editions of one text. The better-ranked one stays.

    passage ─► its word 5-grams ─► MinHash ─► banded table of those that stay ─► candidates ─► Jaccard of the 5-grams themselves

MinHash and its table are those of `datasketch` (extra `dedup`): Broder 1997, with as many bands as find a pair at the threshold in
more than 99.9 of 100 cases. Each candidate is compared by its words, so that nothing is dropped by chance. About 0.3 ms a passage.
"""

from __future__ import annotations

import importlib.util
import zlib
from typing import Any, Final

from cramlm.data.corpus import Corpus
from cramlm.errors import EnvironmentFault
from cramlm.text.words import segment

WORDS: Final = 5  # of a shingle
_PERMUTATIONS: Final = 128
_RECALL: Final = 0.999


def require_datasketch() -> None:
    """Raises EnvironmentFault, with the command that helps, if the package is missing."""
    if importlib.util.find_spec("datasketch") is None:
        raise EnvironmentFault("near_duplicates needs the package datasketch; run: pip install 'cramlm[dedup]', or unset the setting")


class NearDuplicates:
    """The passages that stay, to be asked with each that may."""

    def __init__(self, corpus: Corpus, threshold: float) -> None:
        """threshold: Jaccard similarity of the sets of word 5-grams from which two passages are one, in (0, 1]."""
        from datasketch import MinHash, MinHashLSH

        rows, bands = bands_for(threshold)
        self._corpus, self._threshold = corpus, threshold
        self._empty: Any = MinHash(num_perm=rows * bands, seed=1, hashfunc=_crc)
        self._table: Any = MinHashLSH(num_perm=rows * bands, params=(bands, rows))
        self._kept: list[int] = []

    def twin(self, position: int, text: str) -> tuple[int, float] | None:
        """(position, similarity) of the first that stayed and is the same; None if there is none, and then this one stays."""
        own = shingles(text)
        sketch = self._empty.copy()
        sketch.update_batch([shingle.encode("utf-8", "surrogatepass") for shingle in own])
        for number in sorted(self._table.query(sketch)):
            similarity = jaccard(own, shingles(self._corpus.text(self._kept[number])))
            if similarity >= self._threshold:
                return self._kept[number], similarity
        self._table.insert(len(self._kept), sketch)
        self._kept.append(position)
        return None


def shingles(text: str) -> set[str]:
    """The different runs of 5 words, normalised; a shorter text is one run. Text without words (symbols only) is cut at white space."""
    words = segment(text) or text.split()
    return {" ".join(words[start : start + WORDS]) for start in range(max(1, len(words) - WORDS + 1))}


def jaccard(one: set[str], other: set[str]) -> float:
    """Common members over all members."""
    return len(one & other) / len(one | other)


def bands_for(threshold: float) -> tuple[int, int]:
    """(rows, bands) of the table: the most rows with which a pair at the threshold shares a band in 99.9 % of all cases."""
    for rows in range(_PERMUTATIONS, 1, -1):
        bands = _PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= _RECALL:
            return rows, bands
    return 1, _PERMUTATIONS


def _crc(shingle: bytes) -> int:
    return zlib.crc32(shingle)
