"""Document lengths as Lucene keeps them: one byte each, so that passages of 152 to 167 terms weigh the same.

With these lengths in place of the exact ones, scores and sets equal those of Lucene's BM25Similarity (and of tantivy, which copied the
code). Exact up to 39; above that the distance from 24 keeps its 4 leading bits, so that a length is read back as up to 1/9 too small.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cramlm.records import IntArray

_EXACT: Final = 24  # the bytes 0..23 stand for themselves
_LEADING: Final = 3  # bits kept after the first one


def _table() -> IntArray:
    code = np.arange(256 - _EXACT, dtype=np.int64)
    exponent, fraction = code >> _LEADING, code & ((1 << _LEADING) - 1)
    above = np.where(exponent == 0, fraction, (fraction | 1 << _LEADING) << np.maximum(exponent - 1, 0))
    return np.concatenate((np.arange(_EXACT), _EXACT + above))


# int64 (256,), ascending: the length that each byte stands for. Source: Lucene 9, SmallFloat.byte4ToInt.
LENGTHS: Final = _table()


def lucene_lengths(lengths: npt.NDArray[np.integer]) -> IntArray:
    """Each length (>= 0) rounded down to one that a byte can hold; int64, the shape of `lengths`."""
    return LENGTHS[np.searchsorted(LENGTHS, lengths, side="right") - 1]
