"""Hashed n-grams of texts: the features of DSIR, and a measure of the distance between a selection and the task.

    text ─► NFC, lower case ─► words (runs of letters, digits, marks; runs of other characters) ─► words and pairs of neighbours
      ─► SHA-256 modulo 10,000 ─► uint16

Tokens and buckets are those of the released DSIR code (nltk's WordPunctTokenizer on lower case, `sha256 mod 10000`), except that combining
marks belong to their word (Yoruba, Hindi), and that in scripts without spaces every grapheme cluster is a token. With the same hash,
buckets are comparable with published ones. The kernel computes SHA-256 itself, because calling hashlib for every n-gram would take most of
the time. About 30,000 passages of 190 words per second on one core.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.records import IntArray
from cramlm.storage.arrays import cached_on_disk, joined
from cramlm.text import characters
from cramlm.text import ngram_kernels as kernels
from cramlm.text.characters import HAN_AND_KANA, OTHER_SPACELESS, STACKING, all_marks, blocks_of, is_letter, table_of

BUCKETS: Final = 10_000
BLOCK: Final = 2048  # texts hashed at a time
SMOOTHING: Final = 1e-8  # added to every probability, as in the released code
_UNDERSCORE: Final = (0x5F, 0x5F)

Doubles: TypeAlias = npt.NDArray[np.float64]


class Token(NamedTuple):
    """A word (with at least one letter, digit or mark), or a run of other characters; `space` is the white space after it."""

    text: str
    is_word: bool
    space: str


@dataclass(frozen=True, slots=True)
class Ngrams:
    """Buckets of the n-grams of many texts: text i has buckets[offsets[i]:offsets[i + 1]]. buckets: uint16. offsets: int64 (n + 1,)."""

    buckets: npt.NDArray[np.uint16]
    offsets: IntArray

    def sums(self, values: Doubles) -> Doubles:
        """Return for every text the sum of its n-grams' values; values: float64 (buckets,)."""
        return np.asarray(kernels.sum_by_text(self.buckets, self.offsets, values))


def hash_texts(texts: Sequence[str], *, buckets: int = BUCKETS) -> Ngrams:
    """Return the hashed n-grams of texts."""
    return hash_utf8([text.encode() for text in texts], buckets=buckets)


def hash_utf8(texts: Sequence[bytes], *, buckets: int = BUCKETS) -> Ngrams:
    """As `hash_texts`, for texts in UTF-8."""
    blocks = [hash_block(texts[first : first + BLOCK], buckets) for first in range(0, len(texts), BLOCK)]
    ends = np.cumsum([0, *(len(block.buckets) for block in blocks)])
    offsets = [block.offsets[1:] + end for block, end in zip(blocks, ends, strict=False)]
    return Ngrams(np.concatenate([np.zeros(0, np.uint16), *(block.buckets for block in blocks)]), np.concatenate([[0], *offsets]))


def count(ngrams: Ngrams, *, buckets: int = BUCKETS) -> IntArray:
    """Return the number of n-grams in each bucket, int64 (buckets,)."""
    return np.bincount(ngrams.buckets, minlength=buckets)


def log_probabilities(counts: IntArray) -> Doubles:
    """Return ln(share of each bucket + 1e-8), float64; ln(1e-8) everywhere without n-grams."""
    return np.asarray(np.log(counts / max(counts.sum(), 1) + SMOOTHING))


def divergence(target: IntArray, other: IntArray) -> float:
    """Return KL(target || other) of two smoothed distributions over the same buckets, in nats."""
    shares = target / max(target.sum(), 1)
    return float(shares @ (log_probabilities(target) - log_probabilities(other)))


def cut_into_tokens(text: str) -> list[Token]:
    """Return the tokens of a text in NFC, in order, without changing case."""
    data = (text if text.isascii() else unicodedata.normalize("NFC", text)).encode()
    classes, starts, ends = _character_classes(), np.empty(len(data), np.int64), np.empty(len(data), np.int64)
    count = kernels.find_tokens(np.frombuffer(data, np.uint8), 0, len(data), classes, starts, ends)
    spans = zip(starts[:count].tolist(), ends[:count].tolist(), [*starts[1:count].tolist(), len(data)], strict=True) if count else ()
    tokens = [(data[start:end].decode(), data[end:following].decode()) for start, end, following in spans]
    return [Token(token, classes[ord(token[0])] != kernels.OTHER and token.strip("_") != "", space) for token, space in tokens]


def hash_block(texts: Sequence[bytes], buckets: int) -> Ngrams:
    """As `hash_utf8`, in one call of the kernel."""
    text, offsets = joined([_lower(text) for text in texts])
    out, out_offsets = np.empty(2 * len(text), np.uint16), np.zeros(len(offsets), np.int64)
    size = kernels.hash_ngrams(text, offsets, _character_classes(), buckets, out, out_offsets)
    return Ngrams(out[:size].copy(), out_offsets)


def _lower(text: bytes) -> bytes:
    return text.lower() if text.isascii() else unicodedata.normalize("NFC", text.decode()).lower().encode()


@functools.cache
def _character_classes() -> npt.NDArray[np.uint8]:
    """Return the class of every code point, uint8 (0x110000,), numbered as in ngram_kernels.py."""
    (low,) = _classes()
    classes = np.full(0x110000, kernels.OTHER, np.uint8)
    classes[: len(low)] = low
    return classes


@cached_on_disk(__file__, characters.__file__, kernels.__file__)
def _classes() -> tuple[npt.NDArray[Any], ...]:
    """Return the classes below 0x110000, without those at the end that are OTHER."""
    letters = blocks_of(is_letter, range(0x20000))  # above are scripts without spaces, and variation selectors
    spaces = blocks_of(str.isspace, range(0x20000))
    kinds = [(letters, kernels.WORD), ((_UNDERSCORE,), kernels.WORD), (spaces, kernels.SPACE)]
    kinds += [(HAN_AND_KANA, kernels.ALONE), (OTHER_SPACELESS, kernels.ALONE), (all_marks(), kernels.MARK), (STACKING, kernels.STACKING)]
    classes = table_of(kinds, kernels.OTHER, 0x110000)
    return (classes[: int(np.flatnonzero(classes != kernels.OTHER)[-1]) + 1],)
