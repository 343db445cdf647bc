"""A corpus as analyzed terms, the input of every engine in a benchmark, and exact reference scores.

    corpus ─► blocks of passages ─► term numbers (tokens.npy) ─► terms.txt, one passage a line, terms with spaces between them

The scores are computed from these terms in float64 by the BM25 formula, without an index.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

from cramlm.data.corpus import Corpus
from cramlm.retrieval.bm25.analysis import Vocabulary
from cramlm.retrieval.bm25.search import lucene_lengths

Norm: TypeAlias = Literal["exact", "lucene"]
Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
BLOCK = 8192
K1, B = 1.2, 0.75


@dataclass(frozen=True)
class Queries:
    """Queries. The first `distinct` have distinct terms; each of the others has the terms of one of these, its owner.

    number: int64 (distinct terms of all queries,), ascending within query q at offsets[q]..offsets[q + 1], and `count`, how often it
    occurs there; only for the distinct queries, without terms that are not in the corpus.
    """

    name: str
    texts: tuple[str, ...]
    terms: tuple[tuple[str, ...], ...]
    owner: Integers
    distinct: int
    offsets: Integers
    number: Integers
    count: Integers

    def sample(self, most: int) -> tuple[Queries, Integers]:
        """Return at most so many evenly spaced distinct queries with the texts that repeat them, and their numbers here."""
        chosen = np.unique(np.linspace(0, self.distinct - 1, min(most, self.distinct)).astype(np.int64))
        texts = np.concatenate((chosen, self.distinct + np.flatnonzero(np.isin(self.owner[self.distinct :], chosen))))
        sizes = np.diff(self.offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        slot = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], sizes)
        part = Queries(
            self.name,
            tuple(self.texts[text] for text in texts),
            tuple(self.terms[text] for text in texts),
            np.searchsorted(chosen, self.owner[texts]),
            len(chosen),
            offsets,
            self.number[slot],
            self.count[slot],
        )
        return part, chosen


@dataclass(frozen=True)
class TermCorpus:
    """Passage p is tokens[starts[p]:starts[p + 1]] (memory-mapped), in the order of the corpus. frequency: passages with each term."""

    lines: Path
    tokens: npt.NDArray[np.int32]
    starts: Integers
    frequency: Integers
    vocabulary: Vocabulary

    @staticmethod
    def write(corpus: Corpus, folder: Path) -> TermCorpus:
        """Analyse a corpus into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = Vocabulary()
        starts = np.zeros(len(corpus) + 1, np.int64)
        frequency, seen = np.zeros(0, np.int64), np.zeros(0, np.int64)
        with (folder / "terms.txt").open("wb") as lines, (folder / "tokens.bin").open("wb") as numbers:
            for first in range(0, len(corpus), BLOCK):
                last = min(first + BLOCK, len(corpus))
                tokens, ends = vocabulary.tokenize(*corpus.gather(np.arange(first, last)))
                missing = len(vocabulary) - len(frequency)
                frequency = np.concatenate((frequency, np.zeros(missing, np.int64)))
                seen = np.concatenate((seen, np.full(missing, -1, np.int64)))
                _count_passages(tokens, ends, first, seen, frequency)
                starts[first + 1 : last + 1] = starts[first] + ends[1:]
                numbers.write(tokens.tobytes())
                size = _line_bytes(tokens, ends, vocabulary.term_offsets)
                lines.write(_write_lines(tokens, ends, vocabulary.term_offsets, vocabulary.term_bytes, size).tobytes())
        tokens = np.memmap(folder / "tokens.bin", np.int32, "r")
        return TermCorpus(folder / "terms.txt", tokens, starts, frequency, vocabulary)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def postings(self) -> int:
        """Number of postings: distinct terms summed over passages."""
        return int(self.frequency.sum())

    def queries(self, name: str, texts: Sequence[str], *, most: int | None = None) -> Queries:
        """Texts as queries, the ones with distinct indexed terms first. most: return only so many of these.

        A text without an indexed term is omitted.
        """
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([0, *map(len, encoded)])
        numbers, starts = self.vocabulary.tokenize(np.frombuffer(b"".join(encoded), np.uint8), ends)
        offsets, letters = self.vocabulary.term_offsets, self.vocabulary.term_bytes
        distinct: dict[tuple[int, ...], list[int]] = {}
        for text in range(len(texts)):
            own = np.sort(numbers[starts[text] : starts[text + 1]])
            if key := tuple(own[own < len(self.frequency)].tolist()):
                distinct.setdefault(key, []).append(text)
        if most is not None:
            distinct = {key: same[:1] for key, same in itertools.islice(distinct.items(), most)}
        order = [same[0] for same in distinct.values()] + [text for same in distinct.values() for text in same[1:]]
        repeated = [number for number, same in enumerate(distinct.values()) for _ in same[1:]]
        terms = [
            tuple(letters[offsets[number] : offsets[number + 1]].tobytes().decode() for number in numbers[starts[text] : starts[text + 1]])
            for text in order
        ]
        counts = [np.unique(key, return_counts=True) for key in distinct]
        bounds = np.cumsum([0, *(len(values) for values, _ in counts)])
        number, count = (np.concatenate([pair[side] for pair in counts]).astype(np.int64) for side in (0, 1))
        owner = np.array([*range(len(distinct)), *repeated])
        return Queries(name, tuple(texts[text] for text in order), tuple(terms), owner, len(distinct), bounds, number, count)

    def scores(self, queries: Queries, query: Integers, position: Integers, norm: Norm) -> Floats:
        """BM25 of pairs (query, passage) in float64."""
        lengths = np.diff(self.starts)
        average = lengths.mean()
        if norm == "lucene":
            lengths = lucene_lengths(lengths)
        weight = np.log1p((len(self) - self.frequency + 0.5) / (self.frequency + 0.5))
        norms = K1 * (1 - B + B * lengths[position] / average)
        scores: npt.NDArray[np.float64] = _score(
            query, position, norms, self.tokens, self.starts, queries.offsets, queries.number, queries.count, weight
        )
        return scores


@njit(cache=True)
def _count_passages(tokens, starts, first, seen, frequency):  # type: ignore[no-untyped-def]
    for passage in range(len(starts) - 1):
        for slot in range(starts[passage], starts[passage + 1]):
            if seen[tokens[slot]] != first + passage:
                seen[tokens[slot]] = first + passage
                frequency[tokens[slot]] += 1


@njit(cache=True)
def _line_bytes(tokens, starts, term_offsets):  # type: ignore[no-untyped-def]
    size = 0
    for slot in range(len(tokens)):
        size += term_offsets[tokens[slot] + 1] - term_offsets[tokens[slot]] + 1
    for passage in range(len(starts) - 1):
        size += starts[passage] == starts[passage + 1]
    return size


@njit(cache=True)
def _write_lines(tokens, starts, term_offsets, term_bytes, size):  # type: ignore[no-untyped-def]
    lines = np.empty(size, np.uint8)
    filled = 0
    for passage in range(len(starts) - 1):
        for slot in range(starts[passage], starts[passage + 1]):
            for byte in range(term_offsets[tokens[slot]], term_offsets[tokens[slot] + 1]):
                lines[filled] = term_bytes[byte]
                filled += 1
            lines[filled] = 32
            filled += 1
        if starts[passage] == starts[passage + 1]:
            filled += 1
        lines[filled - 1] = 10
    return lines


@njit(cache=True)
def _score(query, position, norms, tokens, starts, offsets, number, count, weight):  # type: ignore[no-untyped-def]
    scores = np.zeros(len(query))
    for pair in range(len(query)):
        passage = tokens[starts[position[pair]] : starts[position[pair] + 1]]
        for slot in range(offsets[query[pair]], offsets[query[pair] + 1]):
            frequency = 0
            for token in passage:
                frequency += token == number[slot]
            scores[pair] += count[slot] * weight[number[slot]] * frequency / (frequency + norms[pair])
    return scores
