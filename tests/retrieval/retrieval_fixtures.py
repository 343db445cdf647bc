"""What the retrieval tests share: a corpus straight from texts (repeated ones kept, unlike `build_corpus`), and BM25 by its formula."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cramlm.records import IntArray
from cramlm.retrieval.bm25.analysis import analyze
from cramlm.retrieval.bm25.index import Bm25Index, build_index
from cramlm.storage.artifacts import hash_json


class TextCorpus:
    """The part of `Corpus` that an index is built from; `cuts` are the sizes of its parts (by default there is one)."""

    def __init__(self, texts: Sequence[str], path: Path = Path("texts"), cuts: Sequence[int] = ()) -> None:
        self._texts = [text.encode() for text in texts]
        self.fingerprint = hash_json(list(texts))
        self.path = path
        bounds = list(accumulate(cuts or [len(texts)], initial=0))
        assert bounds[-1] == len(texts)
        self.parts = [TextPart(hash_json(list(texts[start:end])), end - start) for start, end in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self._texts)

    def release(self) -> None:
        """There is nothing mapped."""

    def gather(self, positions: IntArray) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """The texts at these positions, one after the other, and where each begins."""
        chosen = [self._texts[position] for position in positions.tolist()]
        return np.frombuffer(b"".join(chosen), np.uint8), np.cumsum([0, *map(len, chosen)], dtype=np.int64)


@dataclass(frozen=True)
class TextPart:
    """What an index wants to know of a part."""

    content: str
    size: int

    def __len__(self) -> int:
        return self.size


def index_texts(texts: Sequence[str], store: Path) -> Bm25Index:
    return build_index(TextCorpus(texts), store)


@functools.cache
def _terms_of_word(word: str) -> tuple[str, ...]:
    return tuple(analyze(word))


def terms_of(text: str) -> list[str]:
    """Return `analyze(text)` for text whose words do not start with a combining mark, analyzing each word once."""
    return [term for word in text.split() for term in _terms_of_word(word)]


@functools.cache
def _counts(text: str) -> Counter[str]:
    return Counter(terms_of(text))


def reference_search(texts: Sequence[str], query: str, limit: int, *, k1: float = 1.2, b: float = 0.75) -> list[tuple[int, float]]:
    """(position, score) by the formula in float64, every document scored, sorted by (-float32 score, position)."""
    documents = [_counts(text) for text in texts]
    lengths = [sum(document.values()) for document in documents]
    average = sum(lengths) / len(texts) or 1.0
    frequency = Counter(term for document in documents for term in document)
    query_counts = _counts(query)
    scored = []
    for position, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        parts = []
        for term, count in query_counts.items():
            if tf := document[term]:
                idf = math.log(1 + (len(texts) - frequency[term] + 0.5) / (frequency[term] + 0.5))
                parts.append(count * idf * tf / (tf + k1 * (1 - b + b * length / average)))
        if parts:
            scored.append((position, float(np.float32(math.fsum(parts)))))
    return sorted(scored, key=lambda hit: (-hit[1], hit[0]))[:limit]


def results(index: Bm25Index, queries: Sequence[str], **settings: object) -> list[list[tuple[int, float]]]:
    """`Bm25Index.search` as a list of (position, score) per query."""
    found = index.search(queries, **settings)
    return [list(zip(position.tolist(), score.tolist(), strict=True)) for position, score in found]


def invented_texts(count: int, *, seed: int, words: tuple[int, int] = (5, 80), alphabet: str = "", vocabulary: int = 4000) -> list[str]:
    """Texts of invented words, some common and most rare, as in a language. With an `alphabet`, its characters without any space."""
    source = random.Random(seed)
    if alphabet:
        weights = list(accumulate(1 / rank for rank in range(1, len(alphabet) + 1)))
        return ["".join(source.choices(alphabet, cum_weights=weights, k=source.randint(*words))) for _ in range(count)]
    syllables = ["ba", "co", "de", "fi", "gu", "ha", "jo", "ke", "li", "mu", "na", "or", "pe", "qui", "ra", "st", "tu", "ve", "wo", "xy"]
    language = random.Random(vocabulary)  # the same words whatever the seed
    names = sorted({"".join(language.choices(syllables, k=language.randint(1, 4))) for _ in range(vocabulary)})
    language.shuffle(names)
    weights = list(accumulate(1 / rank for rank in range(1, len(names) + 1)))
    return [" ".join(source.choices(names, cum_weights=weights, k=source.randint(*words))) for _ in range(count)]


def reference_union(found: Iterable[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Sorted (best rank, position, first query that gave this rank) of the documents that each query found, best first."""
    best: dict[int, tuple[int, int]] = {}
    for query, positions in enumerate(found):
        for rank, position in enumerate(positions):
            best[position] = min(best.get(position, (rank, query)), (rank, query))
    return sorted((rank, position, query) for position, (rank, query) in best.items())
