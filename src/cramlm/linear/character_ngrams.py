"""Counts of the character n-grams of words, compiled.

In plain Python they are most of the time of a matrix of characters (features.py): a passage has a hundred distinct words, each of some
thirty n-grams. An n-gram is its own hash key, in two integers of 64 bits, so that the counts are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from cramlm.records import Int32Array, IntArray
from cramlm.storage.arrays import offsets_of, read_only
from cramlm.storage.compiled import jit

_BITS: Final = 21  # of a character: three fit in one integer of a key
_MOST: Final = 5  # characters of an n-gram: three and two, and the size
_BLOCK: Final = 4096  # words that are counted at a time
_LEAST_PLACES: Final = 1 << 12


@jit
def _key(points, start, size):  # type: ignore[no-untyped-def]
    first, second = np.uint64(0), np.uint64(size) << np.uint64(2 * _BITS)
    for place in range(min(size, 3)):
        first |= np.uint64(points[start + place]) << np.uint64(_BITS * place)
    for place in range(3, size):
        second |= np.uint64(points[start + place]) << np.uint64(_BITS * (place - 3))
    return first, second


@jit
def _find(first, second, keys, ids):  # type: ignore[no-untyped-def]
    """The place of a key in the table, or the empty place (id -1) where it belongs."""
    mixed = (first ^ (second * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
    place = np.int64(mixed >> np.uint64(32)) & (len(ids) - 1)
    while ids[place] >= 0 and (keys[place, 0] != first or keys[place, 1] != second):
        place = (place + 1) & (len(ids) - 1)
    return place


@jit
def _add(points, starts, keys, ids):  # type: ignore[no-untyped-def]
    """Add n-gram i, points[starts[i]:starts[i + 1]], with the number i. A longer or empty one, which no word has, is left out."""
    for ngram in range(len(starts) - 1):
        size = starts[ngram + 1] - starts[ngram]
        if 0 < size <= _MOST:
            first, second = _key(points, starts[ngram], size)
            place = _find(first, second, keys, ids)
            keys[place, 0], keys[place, 1], ids[place] = first, second, ngram


@jit
def _count(points, starts, shortest, longest, number, new, keys, ids, columns, offsets):  # type: ignore[no-untyped-def]
    """Write the number of each n-gram of the words to `columns`, by size and by place, and their offsets; return how many are new.

    points: uint32, the characters of the words, with a space on either side; starts: their offsets. shortest, longest: characters of an
    n-gram. new: int64 (n, 2); start and size of each n-gram that is not in the table, which gets the numbers from `number` on. Without
    room in it, such n-grams are left out.
    """
    written, added = 0, 0
    for word in range(len(starts) - 1):
        begin, end = starts[word], starts[word + 1]
        for size in range(shortest, min(longest, end - begin) + 1):
            for start in range(begin, end - size + 1):
                first, second = _key(points, start, size)
                place = _find(first, second, keys, ids)
                if ids[place] < 0:
                    if len(new) == 0:
                        continue
                    keys[place, 0], keys[place, 1], ids[place] = first, second, number + added
                    new[added, 0], new[added, 1] = start, size
                    added += 1
                columns[written] = ids[place]
                written += 1
        offsets[word + 1] = written
    return added


class NgramTable:
    """Numbered n-grams: those of a vocabulary, or those of the words so far in the order of their first occurrence.

    sizes: the characters of an n-gram, at most 5.
    """

    def __init__(self, sizes: range, ngrams: Sequence[str] = ()) -> None:
        assert sizes[-1] <= _MOST, f"n-grams of {sizes[-1]} characters, at most {_MOST}"
        self.sizes, self.ngrams = sizes, list(ngrams)
        self._make_places(len(self.ngrams))

    def _make_places(self, count: int) -> None:
        """Make a table that is at most half full with `count` n-grams."""
        places = max(_LEAST_PLACES, 1 << (2 * count - 1).bit_length())
        self._keys, self._ids = np.zeros((places, 2), np.uint64), np.full(places, -1, np.int32)
        _add(*_points(self.ngrams), self._keys, self._ids)

    def count(self, words: Sequence[str], *, grow: bool) -> tuple[Int32Array, IntArray]:
        """Return the numbers of the n-grams of each word with a space on either side, and their offsets (words + 1,).

        grow: n-grams that are not in the table are added to it; otherwise they are left out, and threads may share the table.
        """
        columns, sizes = list[Int32Array](), list[IntArray]()
        for first in range(0, len(words), _BLOCK):
            padded = [f" {word} " for word in words[first : first + _BLOCK]]
            points, starts = _points(padded)
            room = len(self.sizes) * len(points)
            if grow and 2 * (len(self.ngrams) + room) > len(self._ids):
                self._make_places(2 * (len(self.ngrams) + room))
            new, found, offsets = np.empty((room if grow else 0, 2), np.int64), np.empty(room, np.int32), np.zeros(len(starts), np.int64)
            table = (len(self.ngrams), new, self._keys, self._ids)
            added = _count(points, starts, self.sizes[0], self.sizes[-1], *table, found, offsets)
            text = "".join(padded)
            self.ngrams += [text[start : start + size] for start, size in new[:added].tolist()]
            columns.append(found[: offsets[-1]].copy())
            sizes.append(np.diff(offsets))
        return np.concatenate(columns or [np.zeros(0, np.int32)]), offsets_of(np.concatenate(sizes or [np.zeros(0, np.int64)]))


def _points(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], IntArray]:
    """Return the characters of texts, one after the other, uint32, and their offsets."""
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    return read_only(points), offsets_of(np.fromiter(map(len, texts), np.int64, len(texts)))
