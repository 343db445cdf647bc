from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_server import SearchServer, serving, settings
from selection_fixtures import make_task, select, selected, write_corpus

from cramlm.config.retriever import ElasticsearchConfig
from cramlm.config.run import load_config
from cramlm.data.task import read_task
from cramlm.errors import ArtifactError, DataError, UsageError
from cramlm.pipeline.context import RunContext
from cramlm.pipeline.run import run
from cramlm.pipeline.stages import text as text_stages
from cramlm.records import Event, silent
from cramlm.reporting.page import report_page
from cramlm.retrieval.elasticsearch import server_corpus
from cramlm.retrieval.retrievers import RetrievalContext, build_retriever
from jsonl import read_jsonl
from tiny_task import tiny_config, write_task

pytest.importorskip("elastic_transport", reason="needs pip install 'cramlm[elasticsearch]'")

LONG = " ".join(f"Sentence {number} speaks of the old harbour and of its boats." for number in range(80))
DOCUMENTS = {
    "kinase": {"text": "the kinase inhibits the receptor"},
    "river": {"text": "the river bank"},
    "cell": {"text": "the receptor of the cell and a kinase of the cell"},
    "harbour": {"text": LONG},
    "copy": {"text": "the river bank"},
    "held out": {"text": "seven clever owls watch the quick brown fox jump over the lazy dog every night of the year"},
}
QUERIES = ["receptor kinase", "the river", "kinase receptor", "nowhere", "harbour boats", "clever owls"]


@pytest.fixture
def server() -> Iterator[SearchServer]:
    with serving(SearchServer({name: dict(source) for name, source in DOCUMENTS.items()})) as running:
        yield running


def few_hits(server: SearchServer, **changes: Any) -> ElasticsearchConfig:
    return settings(server, **{"retries": 0, "top_k": 2} | changes)


def test_hits_become_a_corpus_and_a_ranking_of_its_passages(server: SearchServer, tmp_path: Path) -> None:
    config = few_hits(server)
    corpus = server_corpus(config, QUERIES, tmp_path)
    proposal = build_retriever(config, RetrievalContext(tmp_path, seed=1)).propose(corpus, QUERIES, emit=silent)
    assert (proposal.queries.texts, proposal.queries.distinct, proposal.queries.answered, proposal.queries.empty) == (6, 4, 5, 1)
    names = [corpus.document(position).id for position in proposal.ranking.position.tolist()]
    ranks = dict(zip(names, proposal.ranking.rank.tolist(), strict=True))
    queries = dict(zip(names, proposal.ranking.query.tolist(), strict=True))
    assert {name.partition("#")[0] for name in names} == {"kinase", "river", "cell", "harbour", "held out"}  # the copy went
    assert (ranks["kinase"], queries["kinase"]) == (0, 0)
    assert (ranks["cell"], queries["cell"]) == (1, 0)
    assert len({rank for name, rank in ranks.items() if name.startswith("harbour")}) == 1
    assert len([name for name in names if name.startswith("harbour#")]) > 1
    assert np.all(np.diff(proposal.ranking.rank) >= 0)


def test_a_selection_of_it_drops_held_out_text_and_needs_the_server_only_once(server: SearchServer, tmp_path: Path) -> None:
    held_out = "Seven clever owls watch the quick brown fox jump over the lazy dog every night of the year"
    task, config = make_task(QUERIES, dev=[held_out]), few_hits(server)
    corpus = server_corpus(config, QUERIES, tmp_path / "store")
    select((corpus, None), task, tmp_path / "out", config)
    found = {row["id"]: (row["rank"], row["query"]) for row in selected(tmp_path / "out")}
    assert (found["kinase"], found["cell"]) == ((0, 0), (1, 0))
    assert [row["id"] for row in read_jsonl(tmp_path / "out" / "dropped.jsonl")] == ["held out"]
    before = len(server.received)
    again = server_corpus(config.model_copy(update={"batch": 7, "max_documents": 2}), QUERIES, tmp_path / "store")
    assert again.fingerprint == corpus.fingerprint
    assert len(server.received) == before
    server_corpus(few_hits(server, top_k=1), QUERIES, tmp_path / "store")
    assert len(server.received) > before


def test_failed_queries_are_counted_and_too_many_end_the_search(server: SearchServer, tmp_path: Path) -> None:
    many = [f"river {number}" for number in range(200)]
    broken = {"error": {"type": "search_phase_execution_exception", "reason": "shard lost"}, "status": 400}
    server.spoil = lambda question, answer: broken if "'7'" in str(question.get("query")) else answer
    events: list[Event] = []
    server_corpus(few_hits(server, batch=100), many, tmp_path, emit=events.append)
    done = next(event for event in events if event.kind == "done" and event.stage == "server")
    assert done.data["queries"] == {"texts": 200, "distinct": 199, "answered": 199, "empty": 0, "failed": 1}
    assert done.data["failures"] == {"failed (400: search_phase_execution_exception: shard lost)": 1}
    server.spoil = lambda question, answer: broken if "'1'" in str(question.get("query")) or "'2'" in str(question) else answer
    with pytest.raises(DataError, match=r"1 of 20 queries failed \(more than 1%\): .*shard lost"):
        server_corpus(few_hits(server, batch=100), many[:20], tmp_path)


def test_a_field_without_text_and_an_index_without_a_hit_are_errors(server: SearchServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training text retrieves a document of 'articles'"):
        server_corpus(few_hits(server), ["nowhere"], tmp_path)
    for source in server.documents.values():
        source["abstract"] = source.pop("text")
    server.texts = lambda: [str(source["abstract"]) for source in server.documents.values()]
    with pytest.raises(DataError, match=r"documents cannot be read .*no text in _source.text; check retriever.text_field"):
        server_corpus(few_hits(server), QUERIES, tmp_path)


def test_query_words_truncates_long_texts(server: SearchServer, tmp_path: Path) -> None:
    corpus = server_corpus(few_hits(server, query_words=1), ["river receptor kinase", "harbour kinase"], tmp_path)
    assert {document.id.partition("#")[0] for document in corpus} == {"river", "harbour"}


def test_another_corpus_is_refused(server: SearchServer, tmp_path: Path) -> None:
    other = write_corpus(tmp_path, ["another text"])
    with pytest.raises(ArtifactError, match=r"holds .*, which is not among the hits of http://127.0.0.1"):
        build_retriever(few_hits(server), RetrievalContext(tmp_path, seed=1)).propose(other, QUERIES, emit=silent)


def test_a_run_takes_its_corpus_from_the_server(server: SearchServer, tmp_path: Path) -> None:
    data = tiny_config(write_task(tmp_path / "data"))
    server.documents = {"a": {"text": "the old ship in the harbour"}, "b": {"text": "a path to the summit"}}
    retriever = few_hits(server).model_dump(mode="json")
    with pytest.raises(UsageError, match="reads documents from its server; unset corpus"):
        load_config(data | {"retriever": retriever})
    config = load_config({name: value for name, value in data.items() if name != "corpus"} | {"retriever": retriever})
    task = read_task(config.task, seed=1, emit=silent)
    corpus = text_stages.corpus(RunContext(config, task, tmp_path / "run", tmp_path / "store", 0.0))
    assert {document.id for document in corpus} == {"a", "b"}


@pytest.mark.parametrize("model", ["static", "bayes"])
def test_a_linear_model_learns_from_the_hits(server: SearchServer, tmp_path: Path, model: str) -> None:
    paths = write_task(tmp_path / "data", documents=60)
    server.documents = {str(number): {"text": row["text"]} for number, row in enumerate(read_jsonl(Path(paths["corpus"])))}
    data = tiny_config(paths, model=model, phases=[], name=model, baseline={"c": [1.0]})
    data["retriever"] = few_hits(server, top_k=5).model_dump(mode="json")
    del data["corpus"]
    finished = run(load_config(data), out=tmp_path / "run", store=tmp_path / "store")
    assert set(finished.scores["models"]) == {"tfidf", "bayes", model}
    page = report_page(tmp_path / "run")
    assert "raw text</dt><dd><bdi>http://" in page
    assert "retriever</dt><dd><bdi title=" in page
    assert ">elasticsearch, rank_decay 0.0, top_k 5, " in page
    assert "labels only" not in page
    with pytest.raises(UsageError, match=f"model '{model}' learns from raw text, too, and needs a corpus; pass --corpus"):
        load_config({name: value for name, value in data.items() if name != "retriever"})
