"""A stand-in for Elasticsearch or OpenSearch: an HTTP server in this process that responds to the requests of the retriever, with
scores by the formula of BM25, and fails on request.

It keeps the shapes of the real responses (elastic.co's API reference, version 8 and 9; opensearch.org's, version 2), not their content.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from retrieval_fixtures import reference_search, terms_of

from cramlm.config.retriever import ElasticsearchConfig
from stand_in import listening

Response = tuple[int, Mapping[str, Any] | str, Mapping[str, str]]  # status, body, headers


@dataclasses.dataclass
class SearchServer:
    """documents: _id -> _source. `interrupt` may respond to a request (path, body) instead of the server; `received`: the requests."""

    documents: dict[str, dict[str, Any]]
    index: str = "articles"
    text_field: str = "text"
    field_type: str = "text"
    max_clauses: int = 1024
    product: str = "Elasticsearch"
    indices: tuple[str, ...] = ()
    interrupt: Callable[[str, Any], Response | None] = lambda path, body: None
    spoil: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda question, response: response
    received: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    headers: list[Mapping[str, str]] = dataclasses.field(default_factory=list)
    url: str = ""

    def respond(self, method: str, path: str, body: Any) -> Response:
        """Return the response to a request."""
        self.received.append((path, body))
        if (interrupted := self.interrupt(path, body)) is not None:
            return interrupted
        endpoint = path.rpartition("/")[2]
        if method == "GET" and path.startswith(f"/{self.index}/_mapping/field/"):
            mapping = {self.text_field: {"full_name": self.text_field, "mapping": {self.text_field: {"type": self.field_type}}}}
            known = mapping if endpoint == self.text_field else {}
            return 200, {name: {"mappings": known} for name in self.indices or (self.index,)}, {}
        if path == f"/{self.index}/_mtermvectors":
            return 200, {"docs": [self.spoil(item, self._terms(item)) for item in body["docs"]]}, {}
        if path == f"/{self.index}/_msearch":
            responses = [self.spoil(item, self._search(item)) for item in body[1::2]]
            return 200, {"took": 1, "responses": responses}, {}
        if path == "/_mget":
            return 200, {"docs": [self._get(item) for item in body["docs"]]}, {}
        return 404, {"error": {"type": "index_not_found_exception", "reason": f"no such index [{path}]"}, "status": 404}, {}

    def texts(self) -> list[str]:
        values = [source.get(self.text_field, "") for source in self.documents.values()]
        return [value if isinstance(value, str) else " ".join(value) for value in values]

    def _terms(self, item: Any) -> dict[str, Any]:
        texts = [set(terms_of(text)) for text in self.texts()]
        terms = {}
        for term, count in Counter(terms_of(item["doc"][self.text_field])).items():
            frequency = sum(term in text for text in texts)
            terms[term] = {"term_freq": count} | ({"doc_freq": frequency, "ttf": frequency} if frequency else {})
        vectors = {self.text_field: {"terms": terms}} if terms else {}
        return {"_index": self.index, "_version": 0, "found": True, "took": 1, "term_vectors": vectors}

    def _search(self, item: Any) -> dict[str, Any]:
        clauses = item["query"]["bool"]["should"]
        if len(clauses) > self.max_clauses:
            reason = f"maxClauseCount is set to {self.max_clauses}"
            return {"error": {"type": "search_phase_execution_exception", "reason": reason, "root_cause": []}, "status": 400}
        terms = [clause["term"][self.text_field] for clause in clauses]
        query = " ".join(term["value"] for term in terms for _ in range(term["boost"]))
        names = list(self.documents)
        found = reference_search(self.texts(), query, item["size"])
        hits = [{"_index": self.index, "_id": names[position], "_score": score} for position, score in found]
        shards = {"total": 2, "successful": 2, "skipped": 0, "failed": 0}
        return {"took": 1, "timed_out": False, "_shards": shards, "hits": {"max_score": None, "hits": hits}, "status": 200}

    def _get(self, item: Any) -> dict[str, Any]:
        source = self.documents.get(item["_id"])
        if source is None:
            return {"_index": item["_index"], "_id": item["_id"], "found": False}
        wanted = {name: source[name] for name in source if any(field.startswith(name) for field in item["_source"])}
        return {"_index": item["_index"], "_id": item["_id"], "found": True, "_source": wanted}


@contextmanager
def serving(server: SearchServer) -> Iterator[SearchServer]:
    """The server at `server.url`, on a port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply("GET", None)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                content = gzip.decompress(content)
            lines = "ndjson" in self.headers["content-type"]
            self._reply("POST", [json.loads(line) for line in content.splitlines()] if lines else json.loads(content))

        def _reply(self, method: str, body: Any) -> None:
            server.headers.append(dict(self.headers))
            status, response, headers = server.respond(method, self.path, body)
            content = (response if isinstance(response, str) else json.dumps(response)).encode()
            self.send_response(status)
            kind = "text/html" if isinstance(response, str) else "application/json"
            product = {"x-elastic-product": server.product} if server.product == "Elasticsearch" else {}
            for name, value in {"content-type": kind, "content-length": str(len(content)), **product, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """No lines on the terminal."""

    with listening(Handler) as server.url:
        yield server


def settings(server: SearchServer, **changes: Any) -> ElasticsearchConfig:
    return ElasticsearchConfig(**{"url": server.url, "index": server.index, "batch": 2, "timeout": 10, "retries": 3} | changes)
