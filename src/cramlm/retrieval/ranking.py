"""The seam of retrieval: a retriever lists the documents that suit a whole task, best first.

    corpus, training texts ─► Retriever.propose ─► Proposal (Ranking, what became of the queries) ─► filters.py: what stays

A retriever ranks and does not cut: how much of its list is kept is decided while the documents are read (filters.py), so that a
smaller slice is the beginning of a larger one and every document that is dropped is replaced by the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from cramlm.data.corpus import Corpus
from cramlm.errors import DataError
from cramlm.records import Emit, FloatArray, Int32Array, IntArray

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
