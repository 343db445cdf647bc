"""One suite over every retriever, and what is theirs alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from retrieval_fixtures import invented_texts
from selection_fixtures import write_corpus

from cramlm.config.retriever import Bm25Config, DsirConfig, RandomConfig, RetrieverConfig, UnionConfig
from cramlm.data.corpus import Corpus
from cramlm.errors import DataError
from cramlm.records import silent
from cramlm.retrieval.bm25.index import Bm25Index, build_index
from cramlm.retrieval.ranking import Proposal, QueryCounts, Ranking, cap_per_query, estimate_tokens, one_each, search_deeper, within_bound
from cramlm.retrieval.retrievers import RetrievalContext, build_retriever, take_turns

TEXTS = invented_texts(20, seed=22, words=(3, 12))
RETRIEVERS: list[RetrieverConfig] = [
    Bm25Config(top_k=12),
    Bm25Config(top_k=12, per_query=3),
    RandomConfig(max_documents=50),
    DsirConfig(max_documents=50),
    DsirConfig(max_documents=50, normalise="length"),
    UnionConfig(retrievers=(Bm25Config(top_k=12), RandomConfig(max_documents=50)), shares=(3, 1)),
]
each_retriever = pytest.mark.parametrize("config", RETRIEVERS, ids=lambda config: config.kind)
World = tuple[Corpus, Bm25Index]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    corpus = write_corpus(folder, invented_texts(300, seed=21))
    return corpus, build_index(corpus, folder / "store")


def propose(world: World, config: RetrieverConfig, texts: list[str], *, seed: int = 1, threads: int = 1) -> Proposal:
    corpus, index = world
    return build_retriever(config, RetrievalContext(corpus.store, seed, index, threads)).propose(corpus, texts, emit=silent)


@each_retriever
def test_a_ranking_names_each_document_once_sorted_by_rank_and_position(world: World, config: RetrieverConfig) -> None:
    ranking = propose(world, config, TEXTS).ranking
    assert len(ranking) == len(set(ranking.position.tolist())) > 0
    assert 0 <= ranking.position.min() <= ranking.position.max() < len(world[0])
    keys = list(zip(ranking.rank.tolist(), ranking.position.tolist(), strict=True))
    assert keys == sorted(keys)
    assert ranking.rank[0] == 0
    types = [getattr(ranking, name).dtype for name in ("position", "rank", "query", "score", "member")]
    assert types == [np.int64, np.int32, np.int32, np.float32, np.int32]


@each_retriever
def test_a_ranking_is_the_same_for_any_number_of_threads_and_any_order_of_the_texts(world: World, config: RetrieverConfig) -> None:
    # Which of two queries with equal ranks a document is credited to depends on their order, and so does a cap.
    texts = TEXTS if config.kind == "bm25" and config.per_query is not None else TEXTS[::-1]
    one, other = propose(world, config, TEXTS).ranking, propose(world, config, texts, threads=2).ranking
    assert one.position.tolist() == other.position.tolist()
    assert one.rank.tolist() == other.rank.tolist()


@each_retriever
def test_queries_are_counted_and_credited(world: World, config: RetrieverConfig) -> None:
    proposal = propose(world, config, [*TEXTS, TEXTS[0], "Привет"])
    if config.kind in ("random", "dsir"):
        assert proposal.queries.texts == 0
        assert set(proposal.ranking.query.tolist()) == {-1}
        return
    counts = proposal.queries
    assert (counts.texts, counts.distinct, counts.answered, counts.empty, counts.failed) == (22, 20, 21, 1, 0)
    assert set(proposal.ranking.query.tolist()) <= {-1, *range(20)}


def test_a_union_of_one_kind_of_turns_alternates_and_names_shared_documents_once() -> None:
    letters = one_each(np.array([10, 11, 12, 13])), one_each(np.array([20, 11, 10]))
    merged = take_turns(letters, (1, 1))
    assert merged.position.tolist() == [10, 20, 11, 12, 13]  # 11: both at their second turn, the first of them counts
    assert merged.member.tolist() == [0, 1, 0, 0, 0]
    assert merged.rank.tolist() == [0, 1, 2, 3, 4]


def test_shares_are_turns_in_proportion() -> None:
    merged = take_turns((one_each(np.arange(90)), one_each(np.arange(100, 130))), (3, 1))
    for first in range(0, 120, 4):
        assert np.bincount(merged.member[first : first + 4]).tolist() == [3, 1]


def test_a_member_gives_no_more_than_its_own_bound(world: World) -> None:
    config = UnionConfig(retrievers=(Bm25Config(top_k=12, max_tokens=500), RandomConfig(max_documents=7)))
    proposal = propose(world, config, TEXTS)
    by_words, sampled = (member.ranking for member in proposal.members)
    assert len(sampled) == 7
    costs = estimate_tokens(*world[0].gather(propose(world, Bm25Config(top_k=12), TEXTS).ranking.position)).tolist()
    assert sum(costs[: len(by_words)]) <= 500 < sum(costs[: len(by_words) + 1])
    assert set(proposal.ranking.position.tolist()) == set(by_words.position.tolist()) | set(sampled.position.tolist())


BOUNDS: list[dict[str, int]] = [{"max_documents": 20}, {"max_documents": 150}, {"max_tokens": 3000}, {"max_documents": 10**6}]


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_with_open_top_k_the_selection_is_that_of_the_deepest_search(world: World, bound: dict[str, int]) -> None:
    def slice_of(top_k: int | None) -> list[int]:
        config = Bm25Config(top_k=top_k, **bound)
        ranking = propose(world, config, TEXTS[:2]).ranking
        return ranking.position[: within_bound(ranking, world[0], config)].tolist()

    assert slice_of(None) == slice_of(len(world[0]))


@pytest.mark.parametrize(
    ("bound", "expected"),
    [({}, [50]), ({"max_documents": 20}, [50]), ({"max_documents": 150}, [50, 200]), ({"max_documents": 10**6}, [50, 200, 800])],
)
def test_a_search_goes_deeper_only_if_the_bound_is_not_filled(world: World, bound: dict[str, int], expected: list[int]) -> None:
    config = Bm25Config(**bound)
    depths = []

    def search(depth: int) -> Proposal:
        depths.append(depth)
        return propose(world, config.model_copy(update={"top_k": depth}), TEXTS[:1])

    search_deeper(search, config, world[0], None, emit=silent)
    assert depths == expected
    assert len(propose(world, Bm25Config(top_k=7, **bound), TEXTS[:1]).ranking) == 7  # a given top_k is kept


def test_at_least_one_document_is_kept_for_every_bound(world: World) -> None:
    assert within_bound(one_each(np.arange(5)), world[0], RandomConfig(max_tokens=1)) == 1
    assert within_bound(one_each(np.arange(5)), world[0], RandomConfig()) == 5
    assert within_bound(one_each(np.arange(0)), world[0], RandomConfig(max_documents=3, max_tokens=3)) == 0


@given(st.lists(st.integers(-1, 5), max_size=40), st.integers(1, 4))
def test_a_cap_keeps_the_first_documents_of_every_query(queries: list[int], most: int) -> None:
    ranking = one_each(np.arange(len(queries)))
    ranking = Ranking(ranking.position, ranking.rank, np.array(queries, np.int32), ranking.score, ranking.member)
    expected = [place for place, query in enumerate(queries) if queries[:place].count(query) < most]
    capped, left_out = cap_per_query(ranking, most)
    assert capped.position.tolist() == expected
    assert left_out == len(queries) - len(expected)


def test_a_character_of_a_script_without_spaces_is_estimated_as_a_token() -> None:
    texts = ["a" * 40, "ẹ̀kọ́", "機械学習 " + "a" * 7, "", "«x» — π", "é" * 100 + "a" * 60 + "東" * 30]
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    assert estimate_tokens(np.frombuffer(b"".join(encoded), np.uint8), offsets).tolist() == [10, 5 / 4, 4 + 8 / 4, 0, 7 / 4, 30 + 160 / 4]


@pytest.mark.parametrize("config", [RandomConfig(), DsirConfig()])
def test_another_seed_gives_another_order(world: World, config: RetrieverConfig) -> None:
    orders = [propose(world, config, TEXTS, seed=seed).ranking.position.tolist() for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(300))


def test_more_than_one_percent_of_failed_queries_is_an_error() -> None:
    QueryCounts(texts=200, distinct=198, answered=198, empty=0, failed=2).check()
    with pytest.raises(DataError, match="3 of 200 queries failed"):
        QueryCounts(texts=200, distinct=197, answered=197, empty=0, failed=3).check()
