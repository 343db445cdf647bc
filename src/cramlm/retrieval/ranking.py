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
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.config.retriever import Bm25Config, DenseConfig, RetrieverConfig
from cramlm.data.corpus import Corpus
from cramlm.data.decontamination import HeldOut
from cramlm.errors import DataError
from cramlm.records import Emit, Event, Example, FloatArray, Int32Array, IntArray
from cramlm.retrieval.duplicates import NearDuplicates
from cramlm.storage.arrays import read_only
from cramlm.text import kernels
from cramlm.text.words import word_sizes

STAGE: Final = "selection"  # of events
MOST_FAILED: Final = 0.01  # share of the queries
CHARACTERS_PER_TOKEN: Final = 4.0
_CHUNK: Final = 4096
_SPARE: Final = 1.25  # read this many times the documents that are still needed, so that drops seldom require another chunk


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


Fills: TypeAlias = Callable[[Ranking], bool]
"""Return True if a ranking has enough documents for the selection."""


class Retriever(Protocol):
    """Ranks documents for a whole task."""

    @property
    def key(self) -> Mapping[str, Any]:
        """JSON data for the stage key: what the result depends on besides config, corpus and training texts."""
        ...

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit, fills: Fills | None = None) -> Proposal:
        """Rank all documents that the texts retrieve, best first. Depends only on the arguments and `key`.

        fills: whether a ranking fills the selection after documents were dropped; None = if it exceeds the bound of the config.

        Raises:
            DataError: too many queries failed. ArtifactError: the index or stored vectors are damaged or belong to another corpus.
        """
        ...


def of_parts(emit: Emit) -> Emit:
    """Return an `emit` for stages of parts of a corpus: for events of the selection, without "up_to_date", since there may be many."""
    return lambda event: None if event.kind == "up_to_date" else emit(replace(event, stage=STAGE))


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
class Dropped:
    """A dropped document. index: in the ranking. reason: a few words. details: JSON data, what it matched."""

    index: int
    reason: str
    details: Mapping[str, str | int | float]


_COUNTED: Final = {
    "shares 13 words": "sharing 13 words with a dev or test text",
    "contains the whole text": "containing a whole dev or test text",
    "near-duplicate": "nearly equal to another passage",
}


def count_reasons(dropped: Mapping[str, int]) -> str:
    """Return the numbers of dropped documents by reason, as users read them; empty if there are none."""
    return ", ".join(f"{number:,} {_COUNTED.get(reason, reason)}" for reason, number in dropped.items())


@dataclass(frozen=True, slots=True)
class Filtered:
    """A part of a ranking after the filter.

    kept: int64, indices in the ranking, ascending. tokens: estimated, of the kept documents. is_full: the bound is reached with this part.
    """

    kept: IntArray
    tokens: float
    dropped: tuple[Dropped, ...]
    is_full: bool


def estimate_tokens(text: npt.NDArray[np.uint8], offsets: IntArray) -> npt.NDArray[np.float64]:
    """Estimate the number of tokens of texts text[offsets[i]:offsets[i + 1]] (UTF-8) with a vocabulary trained on such text.

    Exact multiples of 1/4, so that sums do not depend on their order.
    """
    characters, spaceless = np.empty(len(offsets) - 1, np.int64), np.empty(len(offsets) - 1, np.int64)
    kernels.count_characters(read_only(text), offsets, word_sizes(), characters, spaceless)
    return np.asarray((characters - spaceless) / CHARACTERS_PER_TOKEN + spaceless)


def filter_ranking(
    ranking: Ranking, corpus: Corpus, held_out: Sequence[Example], bound: RetrieverConfig, *, duplicates: NearDuplicates | None
) -> Iterator[Filtered]:
    """Yield kept and dropped documents in order, until the bound is reached: `max_documents` or `max_tokens`, estimated. Drops documents
    with held-out text and near-duplicates. At least one document is kept, however long.
    """
    held_out_texts = HeldOut(held_out)
    kept, tokens, start = 0, 0.0, 0
    while start < len(ranking):
        size = _CHUNK if bound.max_documents is None else int(_SPARE * (bound.max_documents - kept)) + 100
        chunk = range(start, min(start + min(size, _CHUNK), len(ranking)))
        positions = ranking.position[chunk.start : chunk.stop]
        text, offsets = corpus.gather(positions)
        costs = estimate_tokens(text, offsets)
        dropped = {start + overlap.position: overlap for overlap in held_out_texts.find_in(range(len(chunk)), text, offsets)}
        part = [
            Dropped(index, overlap.reason, {"match": overlap.match, "example": overlap.split_example_id})
            for index, overlap in dropped.items()
        ]
        if duplicates is not None:
            wanted = np.ones(len(chunk), np.bool_)
            wanted[[index - start for index in dropped]] = False
            part += [
                Dropped(start + number, "near-duplicate", {"twin": twin, "similarity": round(similarity, 4)})
                for number, twin, similarity in duplicates.find(positions, text, offsets, wanted)
            ]
        part.sort(key=lambda each: each.index)
        is_kept = np.ones(len(chunk), np.bool_)
        is_kept[[each.index - start for each in part]] = False
        indices, end = _within(np.flatnonzero(is_kept), costs, kept, tokens, bound)
        stop = chunk.stop if end is None else start + end
        added = float(costs[indices].sum())
        yield Filtered(indices + start, added, tuple(each for each in part if each.index < stop), is_full=end is not None)
        kept, tokens, start = kept + len(indices), tokens + added, chunk.stop
        corpus.release()
        if end is not None:
            return


def _within(
    indices: IntArray, costs: npt.NDArray[np.float64], kept: int, tokens: float, bound: RetrieverConfig
) -> tuple[IntArray, int | None]:
    """Return the indices of a chunk that the bound allows, and the index of the chunk at which it is reached, None if it is not."""
    end: int | None = None
    if bound.max_tokens is not None:
        over = np.flatnonzero(tokens + np.cumsum(costs[indices]) > bound.max_tokens)
        over = over[over + kept > 0]  # at least one document is kept
        if len(over):
            end, indices = int(indices[over[0]]), indices[: over[0]]
    if bound.max_documents is not None and kept + len(indices) >= bound.max_documents:
        indices = indices[: bound.max_documents - kept]
        end = int(indices[-1]) + 1
    return indices, end


def within_bound(ranking: Ranking, corpus: Corpus, bound: RetrieverConfig) -> int:
    """Return how many documents from the beginning of the ranking fit the bound, without dropping any; at least one if there are any."""
    count = len(ranking) if bound.max_documents is None else min(len(ranking), bound.max_documents)
    if bound.max_tokens is None:
        return count
    tokens = 0.0
    for start in range(0, count, _CHUNK):
        positions = ranking.position[start : min(start + _CHUNK, count)]
        sums = tokens + np.cumsum(estimate_tokens(*corpus.gather(positions)))
        over = np.flatnonzero(sums > bound.max_tokens)
        over = over[over + start > 0]
        if len(over):
            return start + int(over[0])
        tokens = float(sums[-1])
    return count


def search_deeper(
    search: Callable[[int], Proposal], config: Bm25Config | DenseConfig, corpus: Corpus, fills: Fills | None, *, emit: Emit
) -> Proposal:
    """Search with increasing numbers of documents per query (`config.depths`) until the union fills the selection; return the last result.

    A union is sorted by rank, so that the selection is the same for every depth that fills it. fills: as in `Retriever.propose`.
    """
    if fills is None:

        def fills(ranking: Ranking) -> bool:
            return within_bound(ranking, corpus, config) < len(ranking)

    proposal = search(config.depths[0])
    for depth, next_depth in pairwise(config.depths):
        size = len(proposal.ranking)
        found = size + proposal.capped
        if found < depth or found == len(corpus) or fills(proposal.ranking):
            break  # all documents are found, or the selection is full
        message = f"{depth} passages per text give {size:,} different passages, fewer than planned; searching {next_depth:,} per text"
        emit(Event("start", STAGE, message))
        proposal = search(next_depth)
    return proposal
