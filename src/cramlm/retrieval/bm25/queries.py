"""Texts -> distinct queries, as an index sees them: unknown terms left out, repeated ones counted, equal queries made one.

    texts ─► `tokenise_texts` ─► `count_documents` in every shard, summed ─► `make_queries`

Counting is the first of the two passes over an index, scoring (bm25.py) the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.records import Int32Array, IntArray
from cramlm.retrieval.bm25.analysis import Vocabulary
from cramlm.retrieval.bm25.segment import Shard

Float64Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Queries:
    """Distinct queries: query q has term[offsets[q]:offsets[q + 1]] (numbers of `vocabulary`, ascending) with `count` in the query.

    document_frequencies: int64 (terms of the vocabulary,), over all shards; 0 = unknown, and in no query. owner: int64 (texts,), the
    distinct query that each text became; -1 if no term of it is in the index.
    """

    vocabulary: Vocabulary
    document_frequencies: IntArray
    offsets: IntArray
    term: Int32Array
    count: IntArray
    owner: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, chosen: IntArray) -> Queries:
        """Some of the queries, in the order given; each is its own owner."""
        sizes = np.diff(self.offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        place = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][chosen] - offsets[:-1], sizes)
        return Queries(self.vocabulary, self.document_frequencies, offsets, self.term[place], self.count[place], np.arange(len(chosen)))

    def sums(self, values: Float64Array) -> Float64Array:
        """Per query, the sum of `values` (one per term)."""
        return np.add.reduceat(values, self.offsets[:-1]) if len(self) else np.zeros(0)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Texts as term numbers: text i has token[starts[i]:starts[i + 1]]."""

    vocabulary: Vocabulary
    token: Int32Array
    starts: IntArray

    def __len__(self) -> int:
        return len(self.starts) - 1


def tokenise_texts(texts: Sequence[str]) -> Tokens:
    """A vocabulary of these texts' terms alone, numbered in the order of their first occurrence; equal for equal texts."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    vocabulary = Vocabulary()
    return Tokens(vocabulary, *vocabulary.tokenise(np.frombuffer(b"".join(encoded), np.uint8), ends))


def count_documents(vocabulary: Vocabulary, shard: Shard) -> IntArray:
    """In how many of a shard's documents each term of a batch stands, int64 (terms,)."""
    numbers = shard.find_terms(vocabulary)
    return np.where(numbers >= 0, shard.document_frequencies[numbers] if shard.terms else 0, 0).astype(np.int64)


def count_in_shards(tokens: Tokens, shards: Sequence[Shard]) -> IntArray:
    """The sum of `count_documents` over some shards, int64 (terms,)."""
    frequencies = np.zeros(len(tokens.vocabulary), np.int64)
    for shard in shards:
        frequencies += count_documents(tokens.vocabulary, shard)
    return frequencies


def make_queries(tokens: Tokens, frequencies: IntArray) -> Queries:
    """The distinct queries, in the order of their first text. frequencies: those of the terms in the whole index."""
    terms = max(1, len(frequencies))
    text_of = np.repeat(np.arange(len(tokens)), np.diff(tokens.starts))
    known = frequencies[tokens.token] > 0
    pairs, counts = np.unique(text_of[known] * terms + tokens.token[known], return_counts=True)
    term = (pairs % terms).astype(np.int32)
    bounds = np.searchsorted(pairs, np.arange(len(tokens) + 1) * terms)
    owner = np.full(len(tokens), -1, np.int64)
    first: dict[bytes, int] = {}
    chosen: list[int] = []
    for text in range(len(tokens)):
        part = slice(bounds[text], bounds[text + 1])
        if content := term[part].tobytes() + counts[part].tobytes():
            if content not in first:
                first[content] = len(chosen)
                chosen.append(text)
            owner[text] = first[content]
    every = Queries(tokens.vocabulary, frequencies, bounds, term, counts.astype(np.int64), owner)
    distinct = every.take(np.array(chosen, np.int64))
    return Queries(tokens.vocabulary, frequencies, distinct.offsets, distinct.term, distinct.count, owner)
