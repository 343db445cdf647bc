from __future__ import annotations

import math
import re
import tracemalloc
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval_fixtures import invented_texts, reference_union, results
from selection_fixtures import World, make_task, report_of, select, selected, write_corpus

from cramlm.config.retriever import Bm25Config, DsirConfig, RandomConfig, RetrieverConfig, UnionConfig
from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import build_corpus
from cramlm.errors import DataError, UsageError
from cramlm.records import Event, Example, Selection
from cramlm.retrieval.bm25.index import build_index
from cramlm.retrieval.ranking import CHARACTERS_PER_TOKEN
from cramlm.retrieval.selection import read_selection
from cramlm.retrieval.statistics import PRIOR_WORDS, WordCounts, compare_with_corpus, over_represented, random_batches
from cramlm.storage.artifacts import verify
from cramlm.text.ngrams import count, divergence, hash_texts
from jsonl import read_jsonl, write_jsonl

HELD_OUT = "the quick brown fox jumps over the lazy dog while seven clever owls watch it from above"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    corpus = write_corpus(folder, [*invented_texts(400, seed=11), f"Someone wrote: {HELD_OUT.upper()}!", "owls at night", "clever owls"])
    return corpus, build_index(corpus, folder / "store")


QUERIES = invented_texts(30, seed=12, words=(3, 10))


def test_the_union_keeps_the_best_rank_and_the_first_query_that_gave_it(world: World, tmp_path: Path) -> None:
    queries = [*QUERIES, QUERIES[3], "nowhere to be found"]
    events: list[Event] = []
    selection = select(world, make_task(queries), tmp_path / "out", Bm25Config(top_k=7), emit=events.append)
    hits = results(world[1], queries, limit=7)
    expected = reference_union([position for position, _ in found] for found in hits)
    assert list(zip(selection.rank.tolist(), selection.position.tolist(), selection.query.tolist(), strict=True)) == expected
    assert selection.score.tolist() == [hits[query][rank][1] for rank, _, query in expected]
    assert [event.message.split()[0] for event in events if event.kind == "warning"] == ["1"]  # text that retrieves nothing
    read = read_selection(tmp_path / "out")
    for name, dtype in (("position", np.int64), ("rank", np.int32), ("query", np.int32), ("score", np.float32), ("weight", np.float32)):
        assert np.array_equal(getattr(selection, name), getattr(read, name))
        assert getattr(read, name).dtype == dtype


def test_the_folder_holds_texts_in_order_and_a_report_whose_sums_agree(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    selection = select(world, make_task([*QUERIES, QUERIES[0], "nowhere"]), out, Bm25Config(top_k=5))
    rows, report = selected(out), report_of(out)
    assert [row["position"] for row in rows] == selection.position.tolist()
    first = world[0].document(rows[0]["position"])
    assert list(rows[0]) == ["position", "id", "source", "rank", "score", "query", "text"]
    assert (rows[0]["id"], rows[0]["source"], rows[0]["text"]) == (first.id, first.source, first.text)
    assert report["queries"] == {"texts": 32, "distinct": 30, "answered": 31, "empty": 1, "failed": 0}
    documents = report["documents"]
    assert documents["found"] == documents["cut"] + documents["capped"] + documents["dropped"] + documents["selected"]
    assert sum(report["sources"].values()) == documents["selected"] == len(rows)
    assert report["bytes"] == sum(len(row["text"].encode()) for row in rows)
    assert report["words"] == sum(len(row["text"].split()) for row in rows) == sum(report["source_words"].values())
    assert report["corpus_sources"] == {"even": 202, "odd": 201}
    assert report["other_sources"] == {"sources": 0, "passages": 0}
    assert report["corpus_documents"] == 403
    assert report["task_likeness"]["kl_reduction"] > 0
    assert report["rank"]["p0"] == 0
    assert verify(out) == 1


def test_another_version_of_unicode_reads_hashes_and_selects_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CorpusConfig(files=(str(write_jsonl(tmp_path / "corpus.jsonl", ({"text": text} for text in QUERIES))),))
    events: list[Event] = []
    for version in ("14.0.0", "99.0.0", "99.0.0"):
        monkeypatch.setattr(unicodedata, "unidata_version", version)
        corpus = build_corpus(config, tmp_path / "store")
        select((corpus, None), make_task(QUERIES), tmp_path / "out", DsirConfig(max_documents=3), emit=events.append)
    for kind in ("parts", "corpora", "ngrams"):
        assert len(list((tmp_path / "store" / kind).glob("*/manifest.json"))) == 2, kind
    repeated = [event.message for event in events if event.kind in ("stale", "up_to_date")]
    assert repeated == ["runs again: unicode 14.0.0 -> 99.0.0", "up to date"]


def test_a_report_lists_the_sources_of_most_passages_and_counts_the_others(tmp_path: Path) -> None:
    rows = [{"source": f"https://example.org/{n % 150}", "text": f"Number {n} of many."} for n in range(160)]
    corpus = build_corpus(CorpusConfig(files=(str(write_jsonl(tmp_path / "corpus.jsonl", rows)),)), tmp_path / "store")
    select((corpus, None), make_task(["Number 1"]), tmp_path / "out", RandomConfig(max_documents=160))
    report = report_of(tmp_path / "out")
    assert {source: count for source, count in report["sources"].items() if count > 1} == {f"https://example.org/{n}": 2 for n in range(10)}
    assert set(report["sources"]) == set(report["source_words"]) == set(report["corpus_sources"])
    assert (len(report["sources"]), report["other_sources"]) == (100, {"sources": 50, "passages": 50})


def test_both_halves_of_a_pair_are_searched_for(world: World, tmp_path: Path) -> None:
    selection = select(world, make_task(["night"], pair="clever"), tmp_path / "out", Bm25Config(top_k=5))
    assert {401, 402} <= set(selection.position.tolist())


@pytest.mark.parametrize("held_out", [0, 30])
def test_a_search_goes_deeper_until_documents_fill_the_selection_after_caps_and_drops(tmp_path: Path, held_out: int) -> None:
    """Both queries find the 60 shared documents first, which are the first query's; 50 documents per query are searched first."""
    shared = [f"xeno u{number} v{number} w{number}" for number in range(60)]
    corpus = write_corpus(tmp_path, [*shared, *(f"{word} number {number}" for word in ("alpha", "beta") for number in range(100))])
    world, queries = (corpus, build_index(corpus, tmp_path / "store")), ["xeno alpha", "xeno beta"]
    config = Bm25Config(max_documents=40) if held_out else Bm25Config(max_documents=10, per_query=5)
    task = make_task(queries, dev=shared[:held_out])
    selection = select(world, task, tmp_path / "open", config)
    deepest = select(world, task, tmp_path / "given", config.model_copy(update={"top_k": len(corpus)}))
    assert len(selection) == config.max_documents
    assert selection.position.tolist() == deepest.position.tolist()


def test_bounds_and_caps_keep_the_best_ranked_and_the_others_are_counted(world: World, tmp_path: Path) -> None:
    def part(name: str, **bounds: int) -> tuple[Selection, dict[str, Any]]:
        selection = select(world, make_task(QUERIES), tmp_path / name, Bm25Config(top_k=9, **bounds))
        return selection, report_of(tmp_path / name)

    whole, _ = part("whole")
    few, report = part("documents", max_documents=40)
    assert few.position.tolist() == whole.position[:40].tolist()
    assert report["documents"]["cut"] == len(whole) - 40
    short, report = part("tokens", max_tokens=2000)
    assert short.position.tolist() == whole.position[: len(short)].tolist()
    tokens = [len(world[0].text(position)) / CHARACTERS_PER_TOKEN for position in whole.position.tolist()]
    assert sum(tokens[: len(short)]) <= 2000 < sum(tokens[: len(short) + 1])
    assert report["tokens"] == {"estimated": round(sum(tokens[: len(short)])), "characters_per_token": CHARACTERS_PER_TOKEN}
    capped, report = part("capped", per_query=2)
    queries = whole.query.tolist()
    kept = [place for place, query in enumerate(queries) if queries[:place].count(query) < 2]
    assert capped.position.tolist() == whole.position[kept].tolist()
    counts = {"found": len(whole), "dropped": 0, "capped": len(whole) - len(capped), "cut": 0, "selected": len(capped)}
    assert report["documents"] == counts


def test_weights_fall_with_the_rank_and_have_a_mean_of_one(world: World, tmp_path: Path) -> None:
    even = select(world, make_task(QUERIES), tmp_path / "even", Bm25Config(top_k=9))
    assert even.weight.tolist() == [1.0] * len(even)
    falling = select(world, make_task(QUERIES), tmp_path / "falling", Bm25Config(top_k=9, rank_decay=0.5))
    assert falling.position.tolist() == even.position.tolist()
    assert falling.weight.mean() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(falling.weight / falling.weight[0], 1 / np.sqrt(falling.rank + 1), rtol=1e-6)


def test_a_union_records_the_retriever_of_each_document(world: World, tmp_path: Path) -> None:
    config = UnionConfig(retrievers=(Bm25Config(top_k=3), RandomConfig()), max_documents=60)
    selection = select(world, make_task(QUERIES), tmp_path / "out", config)
    rows, report = selected(tmp_path / "out"), report_of(tmp_path / "out")
    assert [row["retriever"] for row in rows[:6]] == ["bm25", "random"] * 3
    assert [part["kind"] for part in report["retrievers"]] == ["bm25", "random"]
    assert sum(part["selected"] for part in report["retrievers"]) == len(selection) == 60
    assert selection.rank.tolist() == list(range(len(selection)))
    assert report["queries"]["answered"] == 30


@pytest.mark.parametrize("config", [Bm25Config(top_k=400, max_documents=5), RandomConfig(max_documents=402)])
def test_dropped_documents_are_replaced_by_the_next(world: World, tmp_path: Path, config: RetrieverConfig) -> None:
    selection = select(world, make_task([HELD_OUT, *QUERIES], dev=(HELD_OUT,)), tmp_path / "out", config)
    assert 400 not in selection.position
    assert len(selection) == (5 if config.kind == "bm25" else 402)


def test_documents_with_held_out_text_are_left_out_and_listed(world: World, tmp_path: Path) -> None:
    task = make_task(["clever owls watch the lazy dog"], dev=(HELD_OUT,))
    selection = select(world, task, tmp_path / "out", Bm25Config(top_k=10))
    assert 400 not in selection.position
    dropped = read_jsonl(tmp_path / "out" / "dropped.jsonl")
    assert [(row["position"], row["id"], row["example"]) for row in dropped] == [(400, "d400", "dev-0")]
    assert dropped[0]["reason"]
    assert dropped[0]["match"] in HELD_OUT
    assert report_of(tmp_path / "out")["dropped"] == {dropped[0]["reason"]: 1}


@pytest.mark.parametrize("split", ["dev", "test"])
def test_a_selection_is_made_again_if_a_held_out_example_has_another_id(world: World, tmp_path: Path, split: str) -> None:
    for name in ("1", "3"):
        task = replace(make_task(["clever owls watch the lazy dog"]), **{split: (Example(name, HELD_OUT, None, "a"),)})
        selection = select(world, task, tmp_path / "out", Bm25Config(top_k=10))
        assert 400 not in selection.position
        assert [row["example"] for row in read_jsonl(tmp_path / "out" / "dropped.jsonl")] == [name]


def test_a_selection_is_made_once_and_reports_why_it_is_made_again(world: World, tmp_path: Path) -> None:
    events: list[Event] = []
    task, out = make_task(QUERIES), tmp_path / "out"
    select(world, task, out, Bm25Config(top_k=3), emit=events.append)
    select(world, task, out, Bm25Config(top_k=3), seed=99, emit=events.append)  # BM25 samples nothing
    select(world, task, out, Bm25Config(top_k=4), emit=events.append)
    kinds = [event.kind for event in events if event.kind != "progress"]
    assert kinds == ["start", "done", "up_to_date", "stale", "start", "done"]
    assert {event.stage for event in events} == {"selection"}
    assert next(event.message for event in events if event.kind == "stale") == "runs again: config.top_k 3 -> 4"


@pytest.mark.parametrize(
    ("config", "queries", "error", "message"),
    [
        (
            Bm25Config(),
            ["ничего общего", "совсем"],
            DataError,
            "none of the 2 training texts shares a word with the [0-9]+ passages of [^/]+[.]jsonl",
        ),
        (RandomConfig(), QUERIES, UsageError, r"random ranks the whole corpus.*max_tokens"),
        (UnionConfig(retrievers=(Bm25Config(), RandomConfig())), QUERIES, UsageError, r"random ranks the whole corpus.*max_tokens"),
    ],
    ids=["a task in another language", "no bound", "a member without a bound"],
)
def test_a_selection_that_cannot_be_made_is_an_error_and_leaves_no_folder(
    world: World, tmp_path: Path, config: RetrieverConfig, queries: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        select(world, make_task(queries), tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_the_error_about_texts_without_labels_that_retrieve_nothing_calls_them_queries(world: World, tmp_path: Path) -> None:
    texts = replace(make_task(["ничего общего", "совсем"]), labels=())
    with pytest.raises(DataError, match=r"none of the 2 queries shares a word with .*; use a corpus in their language"):
        select(world, texts, tmp_path / "out", Bm25Config())


def test_bm25_without_an_index_and_a_corpus_of_held_out_text_only_are_errors(world: World, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs an index"):
        select((world[0], None), make_task(["owls"]), tmp_path / "out", Bm25Config())
    held_out, task = write_corpus(tmp_path, [HELD_OUT]), make_task(["owls"], dev=(HELD_OUT,))
    with pytest.raises(DataError, match="all 1 hits contain text of the dev or test set"):
        select((held_out, None), task, tmp_path / "out", RandomConfig(max_documents=100))


SEA = ["the tide and the harbour and a ship in the reef", "a sailor on the ship saw the reef and the tide", "the harbour of the sailor"]
OTHER = invented_texts(120, seed=41)


def test_a_selection_with_the_task_s_words_is_nearer_to_it_than_random_text(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [*OTHER, *SEA])
    report = compare_with_corpus(corpus, np.arange(120, 123), ["a ship at the reef", "sailor and tide"])
    likeness = report["task_likeness"]
    assert likeness["kl_reduction"] > 1
    assert likeness["kl_reduction"] == pytest.approx(likeness["kl_random"] - likeness["kl_selection"], abs=2e-4)
    expected = divergence(count(hash_texts(["a ship at the reef", "sailor and tide"])), count(hash_texts(SEA)))
    assert likeness["kl_selection"] == pytest.approx(expected, abs=1e-4)
    assert {"the", "ship", "harbour"} <= {row["word"] for row in report["over_represented"]}


def test_a_selection_less_like_the_task_than_random_text_is_said_to_be_above_it(tmp_path: Path) -> None:
    events: list[Event] = []
    world = write_corpus(tmp_path, [*OTHER[:20], *(f"{text} {number}" for text in SEA for number in range(20))]), None
    task = make_task(["a ship at the reef", "sailor and tide"])
    select(world, task, tmp_path / "out", RandomConfig(max_documents=4), emit=events.append, seed=10)
    assert report_of(tmp_path / "out")["task_likeness"]["kl_reduction"] < 0
    (done,) = [event.message for event in events if event.kind == "done"]
    assert re.search(r"KL\(task \|\| selection\) 0\.\d{3} above that of random text$", done)


def words_of(counts: dict[str, int]) -> WordCounts:
    text = " ".join(word for word, count in counts.items() for _ in range(count)).encode()
    return WordCounts.of(np.frombuffer(text, np.uint8), np.array([0, len(text)]))


def test_the_whole_corpus_is_no_nearer_than_random_text(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, OTHER)
    report = compare_with_corpus(corpus, np.random.default_rng(1).permutation(120), OTHER[:3])
    assert report["task_likeness"]["kl_reduction"] == 0
    assert report["task_likeness"]["random_passages"] == 120
    assert report["over_represented"] == []


def test_the_random_sample_has_as_much_text_as_the_selection(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [*OTHER, " ".join(OTHER[:6])])
    report = compare_with_corpus(corpus, np.array([120]), OTHER[:3])  # as long as six others
    assert 3 <= report["task_likeness"]["random_passages"] <= 12


def test_the_random_sample_needs_8_bytes_per_position() -> None:
    tracemalloc.start()
    try:
        first = next(random_batches(1_000_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(first)) == len(first) < 1000
    assert peak < 10_000_000  # an array of 8 MB; a list of as many numbers takes 40
    assert sorted(position for batch in random_batches(1_300) for position in batch) == list(range(1_300))


def test_log_odds_are_the_hand_calculated_ones_with_a_prior_of_pooled_counts() -> None:
    own, other = (words_of({"reef": 30, "the": 70, "7": 9}), words_of({"reef": 5, "the": 95}))
    (row,) = over_represented(own, other)
    prior = PRIOR_WORDS * 35 / 209
    first, second = 30 + prior, 5 + prior
    log_odds = math.log(first / (109 + PRIOR_WORDS - first)) - math.log(second / (100 + PRIOR_WORDS - second))
    assert (row["word"], row["selection"], row["random"]) == ("reef", 30, 5)
    assert row["log_odds"] == pytest.approx(log_odds, abs=1e-3)
    assert row["z"] == pytest.approx(log_odds / math.sqrt(1 / first + 1 / second), abs=0.05)
