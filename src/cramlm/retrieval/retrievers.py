"""From a config to its retriever: the one place that knows them all. BM25's own retriever is here, too: the rest of it is the index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from cramlm.data.corpus import Corpus
from cramlm.errors import UsageError
from cramlm.records import Emit, Event, FloatArray, IntArray
from cramlm.retrieval.analysis import ANALYZER
from cramlm.retrieval.bm25 import Scoring
from cramlm.retrieval.dsir import DsirRetriever
from cramlm.retrieval.index import Index
from cramlm.retrieval.phrases import texts_to_ask
from cramlm.retrieval.random import RandomRetriever
from cramlm.retrieval.ranking import STAGE, Proposal, QueryCounts, Retriever, best_of_hits, cap_per_query
from cramlm.retrieval.server_corpus import ElasticsearchRetriever
from cramlm.retrieval.union import UnionRetriever
from cramlm.retrieval.winnow import Bound
from cramlm.retriever_config import (
    Bm25Config,
    DsirConfig,
    ElasticsearchConfig,
    MemberConfig,
    RandomConfig,
    RetrieverConfig,
    UnionConfig,
    unbounded,
)


@dataclass(frozen=True, slots=True)
class Means:
    """What retrievers work with. store: where what is computed from the corpus for all tasks is kept."""

    index: Index | None
    store: Path
    seed: int
    threads: int = 1


def build_retriever(config: RetrieverConfig, means: Means) -> Retriever:
    """The retriever that a config describes.

    Raises:
        UsageError: if BM25 has no index, or a retriever that lists the whole corpus has no bound.
    """
    match config:
        case UnionConfig():
            parts = [_member(member, means) for member in config.retrievers]
            bounds = [bound_of(member) for member in config.retrievers]
            shares = config.shares or (1.0,) * len(parts)
            return UnionRetriever(tuple(zip(parts, bounds, strict=True)), shares)
        case ElasticsearchConfig():
            return ElasticsearchRetriever(config, means.store)
        case _:
            return _member(config, means)


def bound_of(config: RetrieverConfig) -> Bound:
    """How much of its list a retriever may give."""
    return Bound(config.max_documents, config.max_tokens)


def check_bounded(config: RetrieverConfig) -> None:
    """Raises UsageError if the slice would be the whole corpus."""
    if kinds := unbounded(config):
        raise UsageError(
            f"the retriever {kinds[0]} lists the whole corpus and needs a bound; set retriever.max_documents or retriever.max_tokens, "
            "or let a run's plan set it"
        )


def _member(config: MemberConfig, means: Means) -> Retriever:
    match config:
        case Bm25Config():
            if means.index is None:
                raise UsageError("BM25 retrieval needs an index of the corpus; build one with build_index(corpus, store)")
            return Bm25Retriever(config, means.index, means.threads)
        case RandomConfig():
            return RandomRetriever(means.seed)
        case DsirConfig():
            return DsirRetriever(config, means.store, means.seed, means.threads)
        case _:
            assert_never(config)


@dataclass(frozen=True, slots=True)
class Bm25Retriever:
    """The union of the best `top_k` documents of every training text."""

    config: Bm25Config
    index: Index
    threads: int

    @property
    def key(self) -> Mapping[str, Any]:
        return {"analyzer": ANALYZER}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        self.index.check_corpus(corpus)
        self.index.verify()  # every byte: a damaged index must not choose documents
        compiled = self.index.compile(texts_to_ask(texts, corpus, of=self.config.queries, most_words=self.config.query_words))
        numbers, first_text = np.unique(compiled.owner, return_index=True)
        text_of = first_text[numbers >= 0]

        def tell(event: Event) -> None:
            emit(replace(event, stage=STAGE))

        def hits() -> Iterator[tuple[int, IntArray, FloatArray]]:
            """Distinct queries come in the order of their first text, so that on equal ranks the smallest query stays."""
            config = self.config
            for number, positions, scores in self.index.search_distinct(
                compiled, limit=config.top_k, scoring=Scoring(config.k1, config.b, config.norm), threads=self.threads, emit=tell
            ):
                yield int(text_of[number]), positions, scores

        ranking, capped = cap_per_query(best_of_hits(len(corpus), hits()), self.config.per_query)
        answered = int((compiled.owner >= 0).sum())
        counts = QueryCounts(len(texts), len(compiled), answered, len(texts) - answered, 0)
        counts.check()
        return Proposal(ranking, counts, capped)
