"""Near-duplicates in a selection, such as boilerplate, quotations and editions of one text. The better-ranked one is kept.

    passages ─► their distinct word 5-grams ("shingles", by 64-bit hashes) ─► kept passages that share a rare one ─► Jaccard similarity

The search is exact: a passage of n shingles shares at least t * n of them with a near-duplicate of similarity t, so one of any
n - ceil(t * n) + 1 (prefix filter; Chaudhuri, Ganti and Kaushik 2006). The shingles that the fewest kept passages have are looked up, so
that passages which share only a footer are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from cramlm.records import BoolArray, IntArray
from cramlm.storage.arrays import offsets_of
from cramlm.text.words import hash_block

CODE_FORMAT: Final = 2  # increase when the same passages have other near-duplicates
_HASHED: Final = 128  # texts hashed at a time: their hashes take up to four times the memory of the text
_PER_SHINGLE: Final = ("shingles", "owner", "earlier", "repeats")


class NearDuplicates:
    """The kept passages; `find` adds passages, or finds their near-duplicates. Some 7 kB per kept passage of 200 words."""

    def __init__(self, threshold: float) -> None:
        """threshold: minimum Jaccard similarity of the sets of word 5-grams of near-duplicates, in (0, 1]."""
        from cramlm.retrieval.duplicate_kernels import Kept

        self._threshold = threshold
        self._positions: list[int] = []
        shingles, passages = np.empty(0, np.uint64), np.zeros(0, np.int32)
        none = np.empty(0, np.int32)
        self._kept = Kept(shingles, none, none, none, np.full(2, -1, np.int32), np.zeros(1, np.int64), passages)

    def find(
        self, positions: IntArray, text: npt.NDArray[np.uint8], offsets: IntArray, wanted: BoolArray
    ) -> Iterator[tuple[int, int, float]]:
        """Yield (index, position of the first kept near-duplicate, similarity) of the wanted texts that have one; the others are kept.

        positions: of texts text[offsets[i]:offsets[i + 1]] (UTF-8), at least one.
        """
        for first in range(0, len(positions), _HASHED):
            part = slice(first, first + _HASHED)
            ends = offsets[first : first + _HASHED + 1]
            found = self._find(positions[part], text[ends[0] : ends[-1]], ends - ends[0], wanted[part])
            yield from ((first + index, twin, similarity) for index, twin, similarity in found)

    def _find(
        self, positions: IntArray, text: npt.NDArray[np.uint8], offsets: IntArray, wanted: BoolArray
    ) -> Iterator[tuple[int, int, float]]:
        from cramlm.retrieval.duplicate_kernels import find_near_duplicates

        shingles, own = shingles_of(text, offsets)
        self._grow(len(positions), len(shingles))
        duplicate_of, similarities = np.full(len(positions), -1, np.int64), np.zeros(len(positions))
        find_near_duplicates(shingles, own, wanted, self._threshold, len(self._positions), self._kept, duplicate_of, similarities)
        self._positions += positions[wanted & (duplicate_of < 0)].tolist()
        for index in np.flatnonzero(duplicate_of >= 0).tolist():
            yield index, self._positions[duplicate_of[index]], float(similarities[index])

    def _grow(self, passages: int, shingles: int) -> None:
        from cramlm.retrieval.duplicate_kernels import fill_table

        kept, count = self._kept, len(self._positions)
        used = int(kept.starts[count])
        if count + passages > len(kept.matches):
            more = passages + count
            kept = kept._replace(
                starts=np.concatenate((kept.starts, np.zeros(more, np.int64))), matches=np.zeros(len(kept.matches) + more, np.int32)
            )
        if used + shingles > len(kept.shingles):
            more = shingles + used // 2
            arrays = ((name, getattr(kept, name)[:used]) for name in _PER_SHINGLE)
            kept = kept._replace(**{name: np.concatenate((old, np.empty(more, old.dtype))) for name, old in arrays})
        if 2 * (used + shingles) > len(kept.table):
            table = np.full(1 << (2 * (used + shingles)).bit_length(), -1, np.int32)
            fill_table(kept.shingles, used, table)
            kept = kept._replace(table=table)
        self._kept = kept


def shingles_of(text: npt.NDArray[np.uint8], offsets: IntArray) -> tuple[npt.NDArray[np.uint64], IntArray]:
    """Return the hashes of the distinct runs of 5 words of each text, ascending, and their offsets.

    A shorter text is one run; so is a text without words, like one of symbols, with white space collapsed.
    """
    from cramlm.retrieval.duplicate_kernels import hash_shingles

    words = hash_block(text, offsets)
    shingles, own = np.empty(len(words.hashes), np.uint64), np.zeros(len(offsets), np.int64)
    hash_shingles(words.hashes, words.offsets, shingles, own)
    sizes = np.diff(own)
    wordless = np.flatnonzero(sizes == 0)
    if not len(wordless):
        return shingles[: own[-1]], own
    parts = [" ".join(text[offsets[index] : offsets[index + 1]].tobytes().decode().split()) for index in wordless.tolist()]
    hashes = [int.from_bytes(blake2b(part.encode(), digest_size=8).digest(), "big") for part in parts]
    sizes[wordless] = 1
    return np.insert(shingles[: own[-1]], own[wordless], np.array(hashes, np.uint64)), offsets_of(sizes)
