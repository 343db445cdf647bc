from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from search_server import Response, SearchServer, serving, settings

from cramlm.config.retriever import ElasticsearchConfig
from cramlm.errors import EnvironmentFault, UsageError
from cramlm.records import Document, Event
from cramlm.retrieval.elasticsearch import Failure, ServerHits, fetch_documents, search_elasticsearch

pytest.importorskip("elastic_transport", reason="needs pip install 'cramlm[elasticsearch]'")

DOCUMENTS = {
    "a": {"text": "the kinase inhibits the receptor", "source": "journal"},
    "b": {"text": "the river bank", "source": "atlas"},
    "c": {"text": ["aspirin reduces pain", "the dose of aspirin"]},
    "d": {"text": "the receptor of the cell and the kinase of the cell"},
    "e": {"title": "nothing here"},
}


@pytest.fixture
def server() -> Iterator[SearchServer]:
    with serving(SearchServer({name: dict(source) for name, source in DOCUMENTS.items()})) as running:
        yield running


@pytest.fixture
def pauses() -> list[float]:
    return []


def search(server: SearchServer, queries: list[str], pauses: list[float], *, limit: int = 10, **changes: Any) -> dict[int, Any]:
    """Names of the documents by query, or the reason of its failure; every query must be answered once."""
    responses: dict[int, Any] = {}
    for number, hits in search_elasticsearch(settings(server, **changes), queries, limit=limit, pause=pauses.append):
        assert number not in responses
        responses[number] = hits.reason if isinstance(hits, Failure) else [name for _, name in hits.documents]
    assert sorted(responses) == list(range(len(queries)))
    return responses


def requests(server: SearchServer, endpoint: str) -> list[Any]:
    return [body for path, body in server.received if path.endswith(endpoint)]


def test_every_query_gets_its_documents_best_first_and_equal_queries_are_sent_once(server: SearchServer, pauses: list[float]) -> None:
    queries = ["receptor kinase", "aspirin", "unheard of", "KINASE  receptor", "river", ""]
    assert search(server, queries, pauses) == {0: ["a", "d"], 1: ["c"], 2: ["d", "c"], 3: ["a", "d"], 4: ["b"], 5: []}
    assert [len(body) // 2 for body in requests(server, "_msearch")] == [2, 2]
    assert pauses == []
    header, body = requests(server, "_msearch")[0][:2]
    assert header == {"search_type": "dfs_query_then_fetch"}  # the statistics of all shards
    assert (body["size"], body["_source"]) == (10, False)
    server.product = "OpenSearch"
    assert search(server, ["river"], pauses) == {0: ["b"]}


def test_scores_come_with_the_documents_and_repeated_terms_count(server: SearchServer) -> None:
    (_, once), (_, twice) = search_elasticsearch(settings(server), ["aspirin pain", "aspirin aspirin pain pain"], limit=5)
    idf, norm = math.log1p(4.5 / 1.5), 1.2 * (0.25 + 0.75 * 7 / (26 / 5))
    assert once.score.tolist() == pytest.approx([idf * 2 / (2 + norm) + idf * 1 / (1 + norm)], rel=0.2)
    assert twice.score.tolist() == pytest.approx([2 * once.score[0]])


def test_of_a_query_with_too_many_terms_the_rarest_are_kept(server: SearchServer, pauses: list[float]) -> None:
    server.max_clauses = 3
    events: list[Event] = []
    query = "the receptor of the river bank unknown"  # the: 4 documents, receptor 2, of 2, river 1, bank 1, unknown 0
    responses = list(search_elasticsearch(settings(server, max_clauses=3), [query], limit=5, emit=events.append, pause=pauses.append))
    assert isinstance(responses[0][1], ServerHits)
    (lines,) = requests(server, "_msearch")
    assert [clause["term"]["text"]["value"] for clause in lines[1]["query"]["bool"]["should"]] == ["bank", "river", "unknown"]
    assert [event.message for event in events if event.kind == "note"] == [
        "1 texts have over 3 terms each (retriever.max_clauses); their most frequent terms were dropped"
    ]


def test_a_query_that_the_server_refuses_is_a_failure_with_its_reason_at_once(server: SearchServer, pauses: list[float]) -> None:
    server.max_clauses = 2
    responses = search(server, ["river bank unknown", "aspirin"], pauses, max_clauses=1024)
    assert responses == {0: "failed (400: search_phase_execution_exception: maxClauseCount is set to 2)", 1: ["c"]}
    assert pauses == []


BUSY: Response = (429, {"error": {"type": "es_rejected_execution_exception", "reason": "queue is full"}, "status": 429}, {})


@pytest.mark.parametrize(
    ("busy", "expected"),
    [(BUSY, [0.5, 1.0]), ((503, "<html>no upstream</html>", {}), [0.5, 1.0]), ((502, {}, {"retry-after": "7"}), [7.0, 7.0])],
    ids=["queue full", "proxy", "retry-after"],
)
def test_requests_to_a_busy_server_are_repeated_after_increasing_pauses(
    server: SearchServer, pauses: list[float], busy: Response, expected: list[float]
) -> None:
    server.interrupt = lambda path, body: busy if path.endswith("_msearch") and len(requests(server, "_msearch")) <= 2 else None
    assert search(server, ["river", "aspirin"], pauses) == {0: ["b"], 1: ["c"]}
    assert pauses == expected


def test_only_failed_queries_are_repeated(server: SearchServer, pauses: list[float]) -> None:
    def reject_once(question: Any, response: dict[str, Any]) -> dict[str, Any]:
        first = len(requests(server, "_msearch")) == 1
        return {"error": {"type": "es_rejected_execution_exception"}, "status": 429} if first and "river" in str(question) else response

    server.spoil = lambda question, response: reject_once(question, response) if "query" in question else response
    assert search(server, ["river", "aspirin"], pauses) == {0: ["b"], 1: ["c"]}
    assert [len(body) // 2 for body in requests(server, "_msearch")] == [2, 1]


UNREADABLE = {"_index": "articles", "error": {"reason": "immense"}}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({"timed_out": True}, "only some of the shards responded, tried 4 times"),
        ({"_shards": {"total": 2, "successful": 1, "failed": 1}}, "only some of the shards responded, tried 4 times"),
        (UNREADABLE, "failed (no status: None: immense), tried 4 times"),
    ],
    ids=["time", "shard", "text that the server cannot analyse"],
)
def test_a_partial_or_unreadable_response_is_a_failure(
    server: SearchServer, pauses: list[float], response: dict[str, Any], message: str
) -> None:
    def spoil(question: Any, right: dict[str, Any]) -> dict[str, Any]:
        sent = question if response is UNREADABLE else question.get("query")
        return right if "river" not in str(sent) else response if response is UNREADABLE else right | response

    server.spoil = spoil
    assert search(server, ["river", "aspirin"], pauses) == {0: message, 1: ["c"]}
    assert pauses == [0.5, 1.0, 2.0]


def test_queries_of_a_batch_without_a_response_fail_and_the_others_succeed(server: SearchServer, pauses: list[float]) -> None:
    server.interrupt = lambda path, body: BUSY if path.endswith("_msearch") and "river" in str(body) else None
    responses = search(server, ["river", "bank", "aspirin"], pauses)
    assert responses[0] == responses[1] == "busy (429: es_rejected_execution_exception: queue is full), tried 4 times"
    assert responses[2] == ["c"]


def test_documents_come_in_order_with_their_own_ids_and_sources(server: SearchServer) -> None:
    server.documents["b"]["text"], server.documents["b"]["doi"] = "the river bank", "10/b"
    keys = [("articles", name) for name in ("c", "b", "gone", "e")]
    found = list(fetch_documents(settings(server, id_field="doi", source_field="source"), keys))
    assert [key for key, _ in found] == keys
    assert [document for _, document in found] == [
        Document("c", "aspirin reduces pain\nthe dose of aspirin", "articles"),
        Document("10/b", "the river bank", "atlas"),
        Failure("gone: deleted since the search"),
        Failure("e: no text in _source.text"),
    ]


def test_fields_may_be_nested_or_dotted() -> None:
    documents = {"a": {"body": {"text": "the river"}}, "b": {"body.text": "the bank"}, "c": {"body": "flat"}}
    with serving(SearchServer(documents, text_field="body.text")) as server:
        found = [document for _, document in fetch_documents(settings(server, text_field="body.text"), [("i", name) for name in "abc"])]
    assert found[:2] == [Document("a", "the river", "i"), Document("b", "the bank", "i")]
    assert isinstance(found[2], Failure)


@pytest.mark.parametrize(
    ("of_server", "of_config", "message"),
    [
        ({}, {"text_field": "body"}, "text_field 'body' .* must be of type text, is missing"),
        ({}, {"index": "missing"}, "404: index_not_found_exception: no such index.*check retriever.index"),
        ({"indices": ("articles-1", "articles-2")}, {}, r"must name one index .*matches articles-1, articles-2"),
        ({"field_type": "keyword"}, {}, "must be of type text, is keyword"),
        (
            {"interrupt": lambda path, body: (401, {"error": {"type": "security_exception", "reason": "missing"}, "status": 401}, {})},
            {},
            r"401: security_exception: missing.*api_key_env or retriever.login_env",
        ),
    ],
    ids=["no field", "no index", "two indices", "keyword", "refused key"],
)
def test_a_wrong_name_or_key_is_refused_before_any_query(
    server: SearchServer, pauses: list[float], of_server: dict[str, Any], of_config: dict[str, str], message: str
) -> None:
    for name, value in of_server.items():
        setattr(server, name, value)
    with pytest.raises(UsageError, match=message):
        search(server, ["river"], pauses, **of_config)
    assert (len(server.received), pauses) == (1, [])


def test_an_unreachable_server_is_named(pauses: list[float]) -> None:
    with pytest.raises(EnvironmentFault, match=r"http://127.0.0.1:9: no response \(ConnectionError.*check retriever.url"):
        list(search_elasticsearch(ElasticsearchConfig(url="http://127.0.0.1:9", index="a", retries=1), ["x"], limit=1, pause=pauses.append))
    assert pauses == [0.5]


@pytest.mark.parametrize(("setting", "header"), [("api_key_env", "ApiKey a:secret"), ("login_env", "Basic YTpzZWNyZXQ=")])
def test_secrets_come_from_the_environment(
    server: SearchServer, pauses: list[float], monkeypatch: pytest.MonkeyPatch, setting: str, header: str
) -> None:
    with pytest.raises(EnvironmentFault, match=f"retriever.{setting} names .* SEARCH_SECRET, which is not set"):
        search(server, ["river"], pauses, **{setting: "SEARCH_SECRET"})
    monkeypatch.setenv("SEARCH_SECRET", "a:secret")
    assert search(server, ["river"], pauses, **{setting: "SEARCH_SECRET"}) == {0: ["b"]}
    assert {name.lower(): value for name, value in server.headers[-1].items()}["authorization"] == header


@pytest.mark.parametrize(
    "wrong", [{"url": "https://me:secret@host:9200"}, {"url": "host:9200"}, {"top_k": 10_001}, {"api_key_env": "A", "login_env": "B"}]
)
def test_settings_that_would_leak_or_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ElasticsearchConfig(**{"url": "https://host:9200", "index": "articles"} | wrong)


def test_without_the_package_one_line_says_what_to_install(server: SearchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "elastic_transport", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'cramlm\[elasticsearch\]'"):
        list(search_elasticsearch(settings(server), ["river"], limit=1))


@pytest.mark.skipif("ELASTICSEARCH_URL" not in os.environ, reason="needs a server in $ELASTICSEARCH_URL that may be written to")
def test_a_real_server_responds_like_the_stand_in() -> None:
    """Writes and deletes the index cramlm-contract-test."""
    from elastic_transport import NodeConfig, Transport
    from elastic_transport.client_utils import url_to_node_config

    node: NodeConfig = url_to_node_config(os.environ["ELASTICSEARCH_URL"], use_default_ports_for_scheme=True)
    transport, index = Transport([node]), "cramlm-contract-test"
    json_headers = {"content-type": "application/json", "accept": "application/json"}
    bulk = [line for name, source in DOCUMENTS.items() for line in ({"index": {"_index": index, "_id": name}}, source)]
    mapping = {"mappings": {"properties": {"text": {"type": "text", "analyzer": "whitespace"}}}, "settings": {"number_of_shards": 2}}
    transport.perform_request("DELETE", f"/{index}", headers=json_headers)
    try:
        transport.perform_request("PUT", f"/{index}", body=mapping, headers=json_headers)
        transport.perform_request("POST", "/_bulk?refresh=true", body=bulk, headers=json_headers | {"content-type": "application/x-ndjson"})
        config = ElasticsearchConfig(url=os.environ["ELASTICSEARCH_URL"], index=index)
        queries = ["receptor kinase", "aspirin", "river", "nowhere", "aspirin aspirin pain"]
        real = dict(search_elasticsearch(config, queries, limit=10))
        with serving(SearchServer(dict(DOCUMENTS), index=index)) as server:
            expected = dict(search_elasticsearch(settings(server), queries, limit=10))
        for number in range(len(queries)):
            found, known = real[number], expected[number]
            assert set(found.documents) == set(known.documents)
        keys = [(index, name) for name in ("c", "b", "gone", "e")]
        assert [type(document) for _, document in fetch_documents(config, keys)] == [Document, Document, Failure, Failure]
    finally:
        transport.perform_request("DELETE", f"/{index}", headers=json_headers)
