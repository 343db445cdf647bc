"""The interface of retrievers, and from a retriever's ranking to the kept documents.

    corpus, training texts ─► Retriever.propose ─► Proposal (Ranking, query counts) ─► filter_ranking ─► Kept and Dropped, in order

A retriever ranks documents and does not truncate: the bound is applied while the documents are read and filtered, so that a smaller
selection is the beginning of a larger one, and every dropped document is replaced by the next. Documents are read in chunks, which bounds
the memory and does not change the result.

**Tokens are estimated**, because the tokenizer is trained on the selection: one token per `CHARACTERS_PER_TOKEN` characters, and one per
character of a script without spaces. Measured with vocabularies of 8,192 on what three tasks retrieve: 4.36 (ChemProt), 4.00 (20
Newsgroups) and 3.66 (Yoruba news) characters a token, so an estimate is off by up to a tenth; with vocabularies of 4,096 to 30,000 it was
3.4 to 5.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from cramlm.config.retriever import Bm25Config, DenseConfig, RetrieverConfig
from cramlm.data.corpus import Corpus
from cramlm.data.decontamination import HeldOut
from cramlm.errors import DataError
from cramlm.records import Emit, Event, Example, FloatArray, Int32Array, IntArray
from cramlm.retrieval.duplicates import NearDuplicates
from cramlm.text.words import SPACELESS_CHARACTER

STAGE: Final = "selection"  # of events
MOST_FAILED: Final = 0.01  # share of the queries
CHARACTERS_PER_TOKEN: Final = 4.0
_CHUNK: Final = 4096
_SPARE: Final = 1.25  # read this many times the documents that are still needed, so that drops seldom require another chunk
_CONTINUATIONS: Final = bytes(range(0x80, 0xC0))  # UTF-8 bytes that start no character
_SPACELESS_STARTS: Final = bytes(byte for byte in range(0xE0, 0xF5) if byte != 0xE2)  # E2 starts quotation marks, dashes and symbols


@dataclass(frozen=True, slots=True)
class Ranking:
    """Distinct documents, best first: parallel arrays sorted by (rank, position).

    position: int64, in the corpus. rank: int32, 0 = best; documents may share a rank. query: int32, index of the training text that gave
    the rank, -1 if there was no query. score: float32, of that query or of the document. member: int32, index of the retriever in a union,
    else 0.
    """

    position: IntArray
    rank: Int32Array
    query: Int32Array
    score: FloatArray
    member: Int32Array

    def __len__(self) -> int:
        return len(self.position)

    def take(self, chosen: slice | npt.NDArray[Any]) -> Ranking:
        """Return the documents at these indices of the ranking, in this order."""
        return Ranking(self.position[chosen], self.rank[chosen], self.query[chosen], self.score[chosen], self.member[chosen])


@dataclass(frozen=True, slots=True)
class QueryCounts:
    """Counts of the training texts as queries. texts = answered + empty + failed; distinct: number of different answered ones."""

    texts: int
    distinct: int
    answered: int
    empty: int
    failed: int

    def __post_init__(self) -> None:
        assert self.texts == self.answered + self.empty + self.failed

    def check(self) -> None:
        """Raise DataError if more than 1 % failed: the selection would be incomplete."""
        if self.failed > MOST_FAILED * self.texts:
            raise DataError(
                f"{self.failed} of {self.texts} queries failed (more than {MOST_FAILED:.0%}); see the run's log, then run again"
            )


NO_QUERIES: Final = QueryCounts(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Result of a retriever. capped: number of documents dropped by `per_query`. members: results of a union's retrievers."""

    ranking: Ranking
    queries: QueryCounts = NO_QUERIES
    capped: int = 0
    members: tuple[Proposal, ...] = ()


class Retriever(Protocol):
    """Ranks documents for a whole task."""

    @property
    def key(self) -> Mapping[str, Any]:
        """JSON data for the stage key: what the result depends on besides config, corpus and training texts."""
        ...

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        """Rank all documents that the texts retrieve, best first. Depends only on the arguments and `key`.

        Raises:
            DataError: too many queries failed. ArtifactError: the index or stored vectors are damaged or belong to another corpus.
        """
        ...


def one_each(position: IntArray, score: FloatArray | None = None) -> Ranking:
    """Return a ranking of documents in this order, one rank each, without queries."""
    count = len(position)
    score = np.zeros(count, np.float32) if score is None else score
    return Ranking(position, np.arange(count, dtype=np.int32), np.full(count, -1, np.int32), score, np.zeros(count, np.int32))


def best_of_hits(documents: int, hits: Iterable[tuple[int, IntArray, FloatArray]]) -> Ranking:
    """Return the union of many queries' hits: each document with its best rank and the query that gave it (on ties the first).

    hits: (query, positions, scores), best first. Memory: a rank, query and score per document of the corpus.
    """
    best = np.full(documents, np.iinfo(np.int32).max, np.int32)
    query, score = np.full(documents, -1, np.int32), np.zeros(documents, np.float32)
    for number, positions, scores in hits:
        better = np.flatnonzero(np.arange(len(positions)) < best[positions])
        positions = positions[better]
        best[positions], query[positions], score[positions] = better, number, scores[better]
    hit = np.flatnonzero(query >= 0)
    hit = hit[np.lexsort((hit, best[hit]))]
    return Ranking(hit, best[hit], query[hit], score[hit], np.zeros(len(hit), np.int32))


def cap_per_query(ranking: Ranking, most: int | None) -> tuple[Ranking, int]:
    """Return the ranking with at most `most` documents per query, the best ones, and the number of dropped documents."""
    if most is None:
        return ranking, 0
    order = np.argsort(ranking.query, kind="stable")
    grouped = ranking.query[order]
    first = np.flatnonzero(np.concatenate(([True], grouped[1:] != grouped[:-1]))) if len(grouped) else np.zeros(0, np.int64)
    within = np.arange(len(grouped)) - np.repeat(first, np.diff(np.append(first, len(grouped))))
    kept = np.sort(order[within < most])
    return ranking.take(kept), len(ranking) - len(kept)


@dataclass(frozen=True, slots=True)
class Bound:
    """Maximum size of a selection: documents, estimated tokens; None = unlimited."""

    documents: int | None = None
    tokens: int | None = None


def bound_of(config: RetrieverConfig) -> Bound:
    """Return the bound in a retriever's config."""
    return Bound(config.max_documents, config.max_tokens)


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept document. index: in the ranking. tokens: estimated."""

    index: int
    tokens: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """A dropped document. index: in the ranking. reason: a few words. details: JSON data, what it matched."""

    index: int
    reason: str
    details: Mapping[str, str | int | float]


def estimate_tokens(data: bytes) -> float:
    """Estimate the number of tokens of a text (UTF-8) with a vocabulary trained on such text."""
    if data.isascii():
        return len(data) / CHARACTERS_PER_TOKEN
    characters = len(data.translate(None, _CONTINUATIONS))
    spaceless = len(SPACELESS_CHARACTER.findall(data.decode())) if _may_be_spaceless(data) else 0
    return (characters - spaceless) / CHARACTERS_PER_TOKEN + spaceless


def _may_be_spaceless(data: bytes) -> bool:
    return len(data.translate(None, _SPACELESS_STARTS)) < len(data)


def filter_ranking(
    ranking: Ranking, corpus: Corpus, held_out: Sequence[Example], bound: Bound, *, duplicates: NearDuplicates | None = None
) -> Iterator[Kept | Dropped]:
    """Yield kept and dropped documents in order, until the bound is reached. Drops documents with held-out text and near-duplicates. At
    least one document is kept, however long.
    """
    held_out_texts = HeldOut(held_out)
    kept, tokens, start = 0, 0.0, 0
    while start < len(ranking) and kept != bound.documents:
        size = _CHUNK if bound.documents is None else int(_SPARE * (bound.documents - kept)) + 100
        chunk = range(start, min(start + min(size, _CHUNK), len(ranking)))
        positions = ranking.position[chunk.start : chunk.stop]
        texts = dict(_read_texts(corpus, np.sort(positions)))
        overlaps = {overlap.position: overlap for overlap in held_out_texts.find(texts.items())}
        for index, position in zip(chunk, positions.tolist(), strict=True):
            text = texts[position]
            if (overlap := overlaps.get(position)) is not None:
                yield Dropped(index, overlap.reason, {"match": overlap.match, "example": overlap.split_example_id})
                continue
            if duplicates is not None and (twin := duplicates.twin(position, text.decode())) is not None:
                yield Dropped(index, "near-duplicate", {"twin": twin[0], "similarity": round(twin[1], 4)})
                continue
            cost = estimate_tokens(text)
            if kept and bound.tokens is not None and tokens + cost > bound.tokens:
                return
            yield Kept(index, cost)
            kept, tokens = kept + 1, tokens + cost
            if kept == bound.documents:
                return
        start = chunk.stop
        corpus.release()


def within_bound(ranking: Ranking, corpus: Corpus, bound: Bound) -> int:
    """Return how many documents from the beginning of the ranking fit the bound, without dropping any; at least one if there are any."""
    count = len(ranking) if bound.documents is None else min(len(ranking), bound.documents)
    if bound.tokens is None:
        return count
    tokens = 0.0
    for start in range(0, count, _CHUNK):
        texts = dict(_read_texts(corpus, np.sort(ranking.position[start : min(start + _CHUNK, count)])))
        for index, position in enumerate(ranking.position[start : min(start + _CHUNK, count)].tolist(), start):
            tokens += estimate_tokens(texts[position])
            if index and tokens > bound.tokens:
                return index
    return count


def _read_texts(corpus: Corpus, positions: IntArray) -> Iterator[tuple[int, bytes]]:
    """Return (position, UTF-8) of passages."""
    text, offsets = corpus.gather(positions)
    data, ends = text.tobytes(), offsets.tolist()
    return ((position, data[start:end]) for position, (start, end) in zip(positions.tolist(), pairwise(ends), strict=True))


def search_deeper(search: Callable[[int], Proposal], config: Bm25Config | DenseConfig, corpus: Corpus, *, emit: Emit) -> Proposal:
    """Search with increasing numbers of documents per query (`config.depths`) until the union exceeds the bound; return the last result.

    A union is sorted by rank, so that the selection is the same for every depth that exceeds the bound.
    """
    proposal = search(config.depths[0])
    for depth, next_depth in pairwise(config.depths):
        size = len(proposal.ranking)
        if size < depth or size == len(corpus) or within_bound(proposal.ranking, corpus, bound_of(config)) < size:
            break  # all documents are found, or the bound is reached
        message = f"{depth} passages per text give {size:,} different passages, fewer than planned; searching {next_depth:,} per text"
        emit(Event("start", STAGE, message))
        proposal = search(next_depth)
    return proposal
