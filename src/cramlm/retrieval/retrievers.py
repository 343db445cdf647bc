"""Build the retriever of a config (`build_retriever`); the retrievers for BM25, random text and unions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, assert_never

import numpy as np

from cramlm.config.retriever import (
    Bm25Config,
    DenseConfig,
    DsirConfig,
    ElasticsearchConfig,
    MemberConfig,
    RandomConfig,
    RetrieverConfig,
    UnionConfig,
    unbounded,
)
from cramlm.data.corpus import Corpus
from cramlm.errors import UsageError
from cramlm.io.executors import Executor
from cramlm.records import Emit, Event, FloatArray, IntArray
from cramlm.retrieval.bm25.distributed import publish_search, run_search
from cramlm.retrieval.bm25.index import Bm25Index
from cramlm.retrieval.bm25.search import Queries, Scoring
from cramlm.retrieval.dense import DenseRetriever, OpenEncoder
from cramlm.retrieval.dsir import DsirRetriever
from cramlm.retrieval.elasticsearch import ElasticsearchRetriever
from cramlm.retrieval.queries import query_texts
from cramlm.retrieval.ranking import (
    NO_QUERIES,
    STAGE,
    Fills,
    Proposal,
    QueryCounts,
    Ranking,
    Retriever,
    best_of_hits,
    cap_per_query,
    one_each,
    search_deeper,
    within_bound,
)


@dataclass(frozen=True, slots=True)
class UnionRetriever:
    """Several retrievers whose rankings are interleaved in proportion to `shares`.

    Each member's ranking is first cut to its own bound. The document at index p of a member with share w gets the turn (p + 1) / w. The
    merged ranking is ordered by turn, then by member; a document that several members rank keeps its smallest turn. Turns are compared
    instead of ranks, because ranks of different retrievers differ in meaning (for BM25 thousands of documents have rank 0). shares:
    positive, one per member.
    """

    members: tuple[tuple[Retriever, MemberConfig], ...]
    shares: tuple[float, ...]

    @property
    def key(self) -> Mapping[str, Any]:
        return {f"member {number}": dict(member.key) for number, (member, _) in enumerate(self.members)}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit, fills: Fills | None = None) -> Proposal:
        proposals = []
        for retriever, bound in self.members:
            proposal = retriever.propose(corpus, texts, emit=emit)
            ranking = proposal.ranking.take(slice(within_bound(proposal.ranking, corpus, bound)))
            proposals.append(Proposal(ranking, proposal.queries, proposal.capped))
        ranking = take_turns([proposal.ranking for proposal in proposals], self.shares)
        queries = next((proposal.queries for proposal in proposals if proposal.queries.texts), NO_QUERIES)
        return Proposal(ranking, queries, sum(proposal.capped for proposal in proposals), tuple(proposals))


def take_turns(rankings: Sequence[Ranking], shares: Sequence[float]) -> Ranking:
    """Merge rankings as `UnionRetriever` describes; each document has a rank of its own, and the query and score of its first turn."""
    turn = np.concatenate([(np.arange(len(ranking)) + 1) / share for ranking, share in zip(rankings, shares, strict=True)])
    member = np.concatenate([np.full(len(ranking), number, np.int32) for number, ranking in enumerate(rankings)])
    position: IntArray = np.concatenate([ranking.position for ranking in rankings])
    order = np.lexsort((member, turn))
    _, first = np.unique(position[order], return_index=True)
    chosen = order[np.sort(first)]
    query = np.concatenate([ranking.query for ranking in rankings])
    score = np.concatenate([ranking.score for ranking in rankings])
    return Ranking(position[chosen], np.arange(len(chosen), dtype=np.int32), query[chosen], score[chosen], member[chosen])


@dataclass(frozen=True, slots=True)
class RandomRetriever:
    """All documents in random order. A control: what retrieval gains over it is not a gain from more text."""

    seed: int

    @property
    def key(self) -> Mapping[str, Any]:
        return {"seed": self.seed}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit, fills: Fills | None = None) -> Proposal:
        generator = np.random.default_rng([self.seed, 0x52414E44])  # a stream of random numbers that nothing else uses
        return Proposal(one_each(generator.permutation(len(corpus)).astype(np.int64)))


DistinctHits: TypeAlias = Iterator[tuple[int, IntArray, FloatArray]]
"""For each distinct query its number, positions and scores, best first."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Search in several processes or machines. folder: for intermediate files, which an interrupted search keeps. executor: runs jobs."""

    folder: Path
    executor: Executor


@dataclass(frozen=True, slots=True)
class RetrievalContext:
    """Resources of retrievers; results depend on `seed` alone.

    store: folder for n-grams and vectors of the corpus, shared by all tasks. index: required by BM25. distribution: None = search in this
    process with `threads` threads. open_encoder: required by dense retrieval.
    """

    store: Path
    seed: int
    index: Bm25Index | None = None
    threads: int = 1
    distribution: Distribution | None = None
    open_encoder: OpenEncoder | None = None


def build_retriever(config: RetrieverConfig, context: RetrievalContext) -> Retriever:
    """Return the retriever of a config.

    Raises:
        UsageError: BM25 has no index, or dense retrieval no encoder.
    """
    match config:
        case UnionConfig():
            members = tuple((_member(member, context), member) for member in config.retrievers)
            return UnionRetriever(members, config.shares or (1.0,) * len(members))
        case ElasticsearchConfig():
            return ElasticsearchRetriever(config, context.store)
        case _:
            return _member(config, context)


def check_bounded(config: RetrieverConfig) -> None:
    """Raise UsageError if the selection would be the whole corpus."""
    if kinds := unbounded(config):
        raise UsageError(
            f"the retriever {kinds[0]} ranks the whole corpus and needs a bound; set retriever.max_documents (select --max-documents) or "
            "retriever.max_tokens (select --select-tokens), or let a run's plan set it"
        )


def _member(config: MemberConfig, context: RetrievalContext) -> Retriever:
    match config:
        case Bm25Config():
            if context.index is None:
                raise UsageError("BM25 retrieval needs an index of the corpus; build one with build_index(corpus, store)")
            return Bm25Retriever(config, context.index, context.threads, context.distribution)
        case RandomConfig():
            return RandomRetriever(context.seed)
        case DsirConfig():
            return DsirRetriever(config, context.store, context.seed, context.threads)
        case DenseConfig():
            if context.open_encoder is None:
                raise UsageError("dense retrieval needs an encoder; pass open_encoder=open_sentence_encoder (cramlm.model.sentences)")
            return DenseRetriever(config, context.open_encoder(config), context.store)
        case _:
            assert_never(config)


@dataclass(frozen=True, slots=True)
class Bm25Retriever:
    """The union of the best documents of every training text: `top_k` of each, or as many as fill the selection if `top_k` is None."""

    config: Bm25Config
    index: Bm25Index
    threads: int
    distribution: Distribution | None = None

    @property
    def key(self) -> Mapping[str, Any]:
        return {"analyzer": self.index.analyzer.name}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit, fills: Fills | None = None) -> Proposal:
        self.index.check_corpus(corpus)

        def forward(event: Event) -> None:
            emit(replace(event, stage=STAGE))

        search = self._search(query_texts(texts, corpus, source=self.config.queries, max_words=self.config.query_words), forward)
        return search_deeper(lambda depth: self._merge(corpus, len(texts), *search(depth)), self.config, corpus, fills, emit=emit)

    def _merge(self, corpus: Corpus, texts: int, queries: Queries, hits: DistinctHits) -> Proposal:
        numbers, first_text = np.unique(queries.owner, return_index=True)
        text_of = first_text[numbers >= 0]

        # distinct queries are in the order of their first text, so that on equal ranks the smallest query is kept
        hits_of_texts = ((int(text_of[number]), positions, scores) for number, positions, scores in hits)
        ranking, capped = cap_per_query(best_of_hits(len(corpus), hits_of_texts), self.config.per_query)
        answered = int((queries.owner >= 0).sum())
        counts = QueryCounts(texts, len(queries), answered, texts - answered, 0)
        counts.check()
        return Proposal(ranking, counts, capped)

    def _search(self, texts: Sequence[str], emit: Emit) -> Callable[[int], tuple[Queries, DistinctHits]]:
        """Return a function from hits per query to the distinct queries and their hits. Verifies every byte of the index first."""
        if (distribution := self.distribution) is not None:
            return lambda depth: run_search(
                publish_search(self.index, texts, distribution.folder, limit=depth, scoring=_scoring(self.config)),
                distribution.executor,
                emit,
            )
        self.index.verify()
        queries, scoring = self.index.compile(texts), _scoring(self.config)

        def search(depth: int) -> tuple[Queries, DistinctHits]:
            return queries, self.index.search_distinct(queries, limit=depth, scoring=scoring, threads=self.threads, emit=emit)

        return search


def _scoring(config: Bm25Config) -> Scoring:
    return Scoring(config.k1, config.b, config.norm)
