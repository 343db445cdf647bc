"""The seam of retrieval: a retriever lists the documents that suit a whole task, best first.

    corpus, training texts ─► Retriever.propose ─► Proposal (Ranking, what became of the queries) ─► filters.py: what stays

A retriever ranks and does not cut: how much of its list is kept is decided while the documents are read (filters.py), so that a
smaller slice is the beginning of a larger one and every document that is dropped is replaced by the next.
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

STAGE: Final = "selection"  # the stage that events of retrievers belong to
MOST_FAILED: Final = 0.01  # share of the queries


@dataclass(frozen=True, slots=True)
class Ranking:
    """Different documents, best first: parallel arrays sorted by (rank, position).

    position: place in the corpus, int64. rank: 0 = best, int32; several documents may share one. query: index of the training text that
    gave the rank, -1 where none was asked, int32. score: of that query, or of the document itself, float32. member: which
    retriever of a union named it, 0 elsewhere, int32.
    """

    position: IntArray
    rank: Int32Array
    query: Int32Array
    score: FloatArray
    member: Int32Array

    def __len__(self) -> int:
        return len(self.position)

    def take(self, chosen: slice | npt.NDArray[Any]) -> Ranking:
        """The documents at these places of the list, in this order."""
        return Ranking(self.position[chosen], self.rank[chosen], self.query[chosen], self.score[chosen], self.member[chosen])


@dataclass(frozen=True, slots=True)
class QueryCounts:
    """What became of the training texts as queries. texts = answered + empty + failed; distinct counts the answered ones that differ."""

    texts: int
    distinct: int
    answered: int
    empty: int
    failed: int

    def __post_init__(self) -> None:
        assert self.texts == self.answered + self.empty + self.failed

    def check(self) -> None:
        """Raises DataError if more than 1 % failed: a slice with holes must not pass for the task's."""
        if self.failed > MOST_FAILED * self.texts:
            raise DataError(
                f"{self.failed} of {self.texts} queries failed (more than {MOST_FAILED:.0%}); see the run's log, then run again"
            )


NOT_ASKED: Final = QueryCounts(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A retriever's answer. capped: documents that were left out because their query had enough. members: of a union, each one's part."""

    ranking: Ranking
    queries: QueryCounts = NOT_ASKED
    capped: int = 0
    members: tuple[Proposal, ...] = ()


class Retriever(Protocol):
    """Chooses documents for a whole task."""

    @property
    def key(self) -> Mapping[str, Any]:
        """What the result depends on besides config, corpus and training texts: plain JSON for the stage's key."""
        ...

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        """Every document that the texts give a reason to choose, best first. Depends on nothing but the arguments and `key`.

        Raises:
            DataError: if too many queries failed. ArtifactError: if a prepared part is damaged or belongs to another corpus.
        """
        ...


def one_each(position: IntArray, score: FloatArray | None = None) -> Ranking:
    """A ranking of documents in this order, a rank each, found without queries."""
    count = len(position)
    score = np.zeros(count, np.float32) if score is None else score
    return Ranking(position, np.arange(count, dtype=np.int32), np.full(count, -1, np.int32), score, np.zeros(count, np.int32))


def best_of_hits(documents: int, hits: Iterable[tuple[int, IntArray, FloatArray]]) -> Ranking:
    """The union of many queries' hits, each document with its best rank and the query that gave it, on ties the query that came first.

    hits: (query, positions, scores), best first. Holds one rank, query and score per document of the corpus, whatever the number of
    queries.
    """
    best = np.full(documents, np.iinfo(np.int32).max, np.int32)
    query, score = np.full(documents, -1, np.int32), np.zeros(documents, np.float32)
    for number, positions, scores in hits:
        better = np.flatnonzero(np.arange(len(positions)) < best[positions])
        positions = positions[better]
        best[positions], query[positions], score[positions] = better, number, scores[better]
    found = np.flatnonzero(query >= 0)
    found = found[np.lexsort((found, best[found]))]
    return Ranking(found, best[found], query[found], score[found], np.zeros(len(found), np.int32))


def cap_per_query(ranking: Ranking, most: int | None) -> tuple[Ranking, int]:
    """The ranking with at most so many documents credited to each query, the best ones, and how many were left out."""
    if most is None:
        return ranking, 0
    order = np.argsort(ranking.query, kind="stable")
    grouped = ranking.query[order]
    first = np.flatnonzero(np.concatenate(([True], grouped[1:] != grouped[:-1]))) if len(grouped) else np.zeros(0, np.int64)
    within = np.arange(len(grouped)) - np.repeat(first, np.diff(np.append(first, len(grouped))))
    kept = np.sort(order[within < most])
    return ranking.take(kept), len(ranking) - len(kept)


CHARACTERS_PER_TOKEN: Final = 4.0
_CHUNK: Final = 4096
_SPARE: Final = 1.25  # read this many times the documents that are still wanted, so that dropped ones seldom cost another chunk
_CONTINUATIONS: Final = bytes(range(0x80, 0xC0))  # bytes that begin no character
_SPACELESS_STARTS: Final = bytes(byte for byte in range(0xE0, 0xF5) if byte != 0xE2)  # E2 begins quotation marks, dashes and symbols


@dataclass(frozen=True, slots=True)
class Bound:
    """How much to keep: documents, estimated tokens; None = all."""

    documents: int | None = None
    tokens: int | None = None


def bound_of(config: RetrieverConfig) -> Bound:
    """How much of its list a retriever may give."""
    return Bound(config.max_documents, config.max_tokens)


@dataclass(frozen=True, slots=True)
class Kept:
    """place: in the ranking. tokens: estimated."""

    place: int
    tokens: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """reason: a few words. details: plain JSON, what it matched."""

    place: int
    reason: str
    details: Mapping[str, str | int | float]


def estimate_tokens(data: bytes) -> float:
    """About how many tokens a vocabulary made for this kind of text (UTF-8) will cut it into."""
    if data.isascii():
        return len(data) / CHARACTERS_PER_TOKEN
    characters = len(data.translate(None, _CONTINUATIONS))
    alone = len(SPACELESS_CHARACTER.findall(data.decode())) if _may_be_spaceless(data) else 0
    return (characters - alone) / CHARACTERS_PER_TOKEN + alone


def _may_be_spaceless(data: bytes) -> bool:
    return len(data.translate(None, _SPACELESS_STARTS)) < len(data)


def winnow(
    ranking: Ranking, corpus: Corpus, held_out: Sequence[Example], bound: Bound, *, duplicates: NearDuplicates | None = None
) -> Iterator[Kept | Dropped]:
    """What stays and what is dropped, in order; ends when the bound is reached. At least one document stays, however long."""
    forbidden = HeldOut(held_out)
    kept, tokens, start = 0, 0.0, 0
    while start < len(ranking) and kept != bound.documents:
        wanted = _CHUNK if bound.documents is None else int(_SPARE * (bound.documents - kept)) + 100
        chunk = range(start, min(start + min(wanted, _CHUNK), len(ranking)))
        positions = ranking.position[chunk.start : chunk.stop]
        texts = dict(_read(corpus, np.sort(positions)))
        overlaps = {overlap.position: overlap for overlap in forbidden.find(texts.items())}
        for place, position in zip(chunk, positions.tolist(), strict=True):
            text = texts[position]
            if (overlap := overlaps.get(position)) is not None:
                yield Dropped(place, overlap.reason, {"match": overlap.match, "example": overlap.split_example_id})
                continue
            if duplicates is not None and (twin := duplicates.twin(position, text.decode())) is not None:
                yield Dropped(place, "near-duplicate", {"twin": twin[0], "similarity": round(twin[1], 4)})
                continue
            cost = estimate_tokens(text)
            if kept and bound.tokens is not None and tokens + cost > bound.tokens:
                return
            yield Kept(place, cost)
            kept, tokens = kept + 1, tokens + cost
            if kept == bound.documents:
                return
        start = chunk.stop
        corpus.release()


def within_bound(ranking: Ranking, corpus: Corpus, bound: Bound) -> int:
    """How many documents from the beginning of the ranking fit; nothing is dropped here, and one always fits."""
    count = len(ranking) if bound.documents is None else min(len(ranking), bound.documents)
    if bound.tokens is None:
        return count
    tokens = 0.0
    for start in range(0, count, _CHUNK):
        texts = dict(_read(corpus, np.sort(ranking.position[start : min(start + _CHUNK, count)])))
        for place, position in enumerate(ranking.position[start : min(start + _CHUNK, count)].tolist(), start):
            tokens += estimate_tokens(texts[position])
            if place and tokens > bound.tokens:
                return place
    return count


def _read(corpus: Corpus, positions: IntArray) -> Iterator[tuple[int, bytes]]:
    """(position, UTF-8) of passages in the order of the corpus."""
    text, offsets = corpus.gather(positions)
    data, ends = text.tobytes(), offsets.tolist()
    return ((position, data[start:end]) for position, (start, end) in zip(positions.tolist(), pairwise(ends), strict=True))


def widen(ask: Callable[[int], Proposal], config: Bm25Config | DenseConfig, corpus: Corpus, *, emit: Emit) -> Proposal:
    """What `ask` finds with the first of `config.depths` whose union is more than the slice may hold, else with the last."""
    proposal = ask(config.depths[0])
    for narrow, wide in pairwise(config.depths):
        found = len(proposal.ranking)
        if found < narrow or found == len(corpus) or within_bound(proposal.ranking, corpus, bound_of(config)) < found:
            break  # nothing more to find, or nothing more to keep
        emit(Event("start", STAGE, f"{narrow} for each text are {found:,} different passages, fewer than planned: {wide:,} for each"))
        proposal = ask(wide)
    return proposal
