"""From a config to its retriever: the one place that knows them all. BM25's own retriever is here, too: the rest of it is the index."""

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
from cramlm.retrieval.bm25.analysis import ANALYZER
from cramlm.retrieval.bm25.distributed import Passes, publish_passes, search_in_passes
from cramlm.retrieval.bm25.index import Index
from cramlm.retrieval.bm25.search import Queries, Scoring
from cramlm.retrieval.dense import DenseRetriever, OpenEncoder
from cramlm.retrieval.dsir import DsirRetriever
from cramlm.retrieval.elasticsearch import ElasticsearchRetriever
from cramlm.retrieval.phrases import texts_to_ask
from cramlm.retrieval.ranking import (
    NOT_ASKED,
    STAGE,
    Bound,
    Proposal,
    QueryCounts,
    Ranking,
    Retriever,
    best_of_hits,
    bound_of,
    cap_per_query,
    one_each,
    widen,
    within_bound,
)


@dataclass(frozen=True, slots=True)
class UnionRetriever:
    """members: each with its own bound. shares: as many positive numbers."""

    members: tuple[tuple[Retriever, Bound], ...]
    shares: tuple[float, ...]

    @property
    def key(self) -> Mapping[str, Any]:
        return {f"member {number}": dict(member.key) for number, (member, _) in enumerate(self.members)}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        proposals = []
        for retriever, bound in self.members:
            proposal = retriever.propose(corpus, texts, emit=emit)
            ranking = proposal.ranking.take(slice(within_bound(proposal.ranking, corpus, bound)))
            proposals.append(Proposal(ranking, proposal.queries, proposal.capped))
        ranking = take_turns([proposal.ranking for proposal in proposals], self.shares)
        asked = next((proposal.queries for proposal in proposals if proposal.queries.texts), NOT_ASKED)
        return Proposal(ranking, asked, sum(proposal.capped for proposal in proposals), tuple(proposals))


def take_turns(rankings: Sequence[Ranking], shares: Sequence[float]) -> Ranking:
    """One ranking of all documents, a rank each; query and score are the naming member's."""
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
    """All documents of the corpus in an order that the seed draws."""

    seed: int

    @property
    def key(self) -> Mapping[str, Any]:
        return {"seed": self.seed}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        return Proposal(one_each(draw_documents(len(corpus), len(corpus), seed=self.seed)))


def draw_documents(documents: int, count: int, *, seed: int) -> IntArray:
    """Positions of min(count, documents) different documents in the order drawn; a shorter draw is the beginning of a longer one."""
    generator = np.random.default_rng([seed, 0x52414E44])  # the stream is this purpose's own
    return generator.permutation(documents)[:count].astype(np.int64)


Hits: TypeAlias = Iterator[tuple[int, IntArray, FloatArray]]
"""For each distinct query its number, positions and scores."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A search by several processes or machines. folder: its files, kept when it is interrupted. executor: runs the jobs."""

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
    index: Index | None = None
    threads: int = 1
    distribution: Distribution | None = None
    open_encoder: OpenEncoder | None = None


def build_retriever(config: RetrieverConfig, context: RetrievalContext) -> Retriever:
    """The retriever that a config describes.

    Raises:
        UsageError: if BM25 has no index, or a retriever that lists the whole corpus has no bound.
    """
    match config:
        case UnionConfig():
            parts = [_member(member, context) for member in config.retrievers]
            bounds = [bound_of(member) for member in config.retrievers]
            shares = config.shares or (1.0,) * len(parts)
            return UnionRetriever(tuple(zip(parts, bounds, strict=True)), shares)
        case ElasticsearchConfig():
            return ElasticsearchRetriever(config, context.store)
        case _:
            return _member(config, context)


def check_bounded(config: RetrieverConfig) -> None:
    """Raises UsageError if the slice would be the whole corpus."""
    if kinds := unbounded(config):
        raise UsageError(
            f"the retriever {kinds[0]} lists the whole corpus and needs a bound; set retriever.max_documents or retriever.max_tokens, "
            "or let a run's plan set it"
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
    """The union of the best documents of every training text: `top_k` of each, as many as fill the slice where that is open."""

    config: Bm25Config
    index: Index
    threads: int
    distribution: Distribution | None = None

    @property
    def key(self) -> Mapping[str, Any]:
        return {"analyzer": ANALYZER}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        self.index.check_corpus(corpus)

        asked = _asked(self.config, corpus, texts)

        def tell(event: Event) -> None:
            emit(replace(event, stage=STAGE))

        search = self._search(asked, tell)
        return widen(lambda depth: self._best(corpus, len(texts), *search(depth)), self.config, corpus, emit=emit)

    def _best(self, corpus: Corpus, texts: int, compiled: Queries, found: Hits) -> Proposal:
        numbers, first_text = np.unique(compiled.owner, return_index=True)
        text_of = first_text[numbers >= 0]

        # distinct queries come in the order of their first text, so that on equal ranks the smallest query stays
        hits = ((int(text_of[number]), positions, scores) for number, positions, scores in found)
        ranking, capped = cap_per_query(best_of_hits(len(corpus), hits), self.config.per_query)
        answered = int((compiled.owner >= 0).sum())
        counts = QueryCounts(texts, len(compiled), answered, texts - answered, 0)
        counts.check()
        return Proposal(ranking, counts, capped)

    def _search(self, texts: Sequence[str], emit: Emit) -> Callable[[int], tuple[Queries, Hits]]:
        """Depth -> distinct queries and what each found. Every byte of the index is read before: damaged, it must not choose documents."""
        if (distribution := self.distribution) is not None:
            return lambda depth: search_in_passes(
                _passes(self.config, self.index, texts, depth, distribution.folder), distribution.executor, emit
            )
        self.index.verify()
        compiled, scoring = self.index.compile(texts), _scoring(self.config)

        def search(depth: int) -> tuple[Queries, Hits]:
            return compiled, self.index.search_distinct(compiled, limit=depth, scoring=scoring, threads=self.threads, emit=emit)

        return search


def _asked(config: Bm25Config, corpus: Corpus, texts: Sequence[str]) -> Sequence[str]:
    return texts_to_ask(texts, corpus, of=config.queries, most_words=config.query_words)


def _passes(config: Bm25Config, index: Index, texts: Sequence[str], depth: int, folder: Path) -> Passes:
    return publish_passes(index, texts, folder, limit=depth, scoring=_scoring(config))


def _scoring(config: Bm25Config) -> Scoring:
    return Scoring(config.k1, config.b, config.norm)
