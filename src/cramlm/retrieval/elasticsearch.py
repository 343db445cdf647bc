"""Retrieval from an Elasticsearch or OpenSearch server: the hits of the training texts are fetched once and become a corpus.

    training texts ─► _mtermvectors: terms as the index analyses them, with their document frequencies
      ─► the rarest `max_clauses` terms of each text; texts with equal terms become one query
      ─► _msearch, `batch` queries at a time, scored with statistics of all shards ─► document keys, or a `Failure`
      ─► _mget ─► documents ─► <store>/server/<key>/ ─► a corpus (passages, duplicates) ─► a ranking of its passages

    documents.jsonl   id, source, text of every document, best rank first (equal ranks: by name)
    rank.npy, query.npy, score.npy   int32, int32, float32 (documents,): best rank over all queries, the first query that gave it, its score
    report.json       queries: texts = answered + empty + failed; documents found and missing (deleted, or without text); failure reasons

Servers limit the clauses of a query (1,024 by default), and long training texts have more terms. The terms of the highest document
frequency are dropped: they add least to a score. The frequency is that of one fixed shard; a term that is not in it counts as rare.

Failed requests (429, 5xx, no connection, a failed shard, a search that timed out) are repeated after 0.5, 1, 2, ... 30 s or the delay that
the server sends. A query without a complete response is a `Failure`, never an empty result. The published folder is used until settings or
training texts change or the folder is deleted, even if the server's documents change.

Requests use the transport of Elastic's official client, without the client, which refuses servers that are not Elastic's.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from urllib.parse import quote

import numpy as np

from cramlm.config.retriever import ElasticsearchConfig
from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.errors import ArtifactError, DataError, EnvironmentFault, UsageError
from cramlm.records import Document, Emit, Event, FloatArray, silent
from cramlm.retrieval.queries import first_words
from cramlm.retrieval.ranking import MOST_FAILED, Fills, Proposal, QueryCounts, Ranking, cap_per_query
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import hash_json, write_json
from cramlm.storage.stages import shared_stage

if TYPE_CHECKING:
    from elastic_transport import Transport

STAGE: Final = "server"  # the stage that events belong to
_BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds
_DOCUMENTS: Final = 500  # per _mget

DocumentKey: TypeAlias = tuple[str, str]  # index, _id
Terms: TypeAlias = tuple[tuple[str, int], ...]  # (term, how often), sorted
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ServerHits:
    """Documents of one query, best first; empty if no document has a term of it. score: float32, > 0."""

    documents: tuple[DocumentKey, ...]
    score: FloatArray


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why there is no complete response."""

    reason: str


class _RequestFailed(Exception):  # noqa: N818 - internal: leads to a retry or a Failure
    """pause: delay in seconds that the server sent. permanent: a retry would fail too."""

    def __init__(self, reason: str, *, pause: float | None = None, permanent: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.pause, self.permanent = reason, pause, permanent


def search_elasticsearch(
    settings: ElasticsearchConfig,
    queries: Sequence[str],
    *,
    limit: int,
    emit: Emit = silent,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[int, ServerHits | Failure]]:
    """Yield (number of the query, its `limit` best documents or a Failure) for every query. Queries with equal terms are adjacent; groups
    are in the order of their first query. Memory is bounded by one batch of hits.

    Raises:
        UsageError: the server refuses the request (index, field, key, size). EnvironmentFault: it cannot be reached, an environment
        variable is not set, or the package is missing.
    """
    server = _Server(settings, pause)
    server.check_field()
    groups: dict[Terms, list[int]] = {}
    cut, done = 0, 0
    for first in range(0, len(queries), settings.batch):
        texts = queries[first : first + settings.batch]
        for number, terms in enumerate(server.analyse(texts), first):
            if isinstance(terms, Failure):
                yield number, terms
                continue
            kept = _rarest(terms, settings.max_clauses)
            cut += len(kept) < len(terms)
            groups.setdefault(kept, []).append(number)
    if cut:
        message = (
            f"{cut:,} texts have over {settings.max_clauses:,} terms each (retriever.max_clauses); their most frequent terms were dropped"
        )
        emit(Event("note", STAGE, message))
    for number in groups.pop((), []):
        yield number, ServerHits((), np.zeros(0, np.float32))
    distinct = list(groups.items())
    for first in range(0, len(distinct), settings.batch):
        part = distinct[first : first + settings.batch]
        for (_, numbers), hits in zip(part, server.search([terms for terms, _ in part], limit), strict=True):
            yield from ((number, hits) for number in numbers)
        done += len(part)
        emit(Event("progress", STAGE, "distinct queries searched", done=done, total=len(distinct), unit="queries"))


def fetch_documents(
    settings: ElasticsearchConfig, keys: Sequence[DocumentKey], *, emit: Emit = silent
) -> Iterator[tuple[DocumentKey, Document | Failure]]:
    """Yield the documents of some hits in the given order; a Failure where one was deleted or has no text. Raises as
    `search_elasticsearch`.
    """
    server = _Server(settings)
    for first in range(0, len(keys), _DOCUMENTS):
        part = keys[first : first + _DOCUMENTS]
        yield from zip(part, server.fetch(part), strict=True)
        emit(Event("progress", STAGE, "documents fetched", done=first + len(part), total=len(keys), unit="documents"))


class _Server:
    """One server, one index, one text field."""

    def __init__(self, settings: ElasticsearchConfig, pause: Callable[[float], None] = time.sleep) -> None:
        self._settings, self._pause = settings, pause
        self._transport, self._headers = _connect(settings)
        self._index = quote(settings.index, safe="")

    def check_field(self) -> None:
        """Raise UsageError unless the text field exists in exactly one index: requesting terms of an unknown field would create it."""
        field = self._settings.text_field

        def request(_: Sequence[str]) -> list[Any]:
            return [self._send("GET", f"/{self._index}/_mapping/field/{quote(field, safe='')}")]

        (mappings,) = self._request_all([field], request, lambda response: response)
        if isinstance(mappings, Failure):
            raise EnvironmentFault(f"{self._settings.url}: {mappings.reason}; check retriever.url and that the server runs")
        if len(mappings) != 1:
            names = ", ".join(sorted(mappings)[:5]) or "none"
            raise UsageError(f"retriever.index {self._settings.index!r} must name one index (or its alias), but matches {names}")
        types = {kind["type"] for entry in mappings.values() for kind in entry["mappings"].get(field, {}).get("mapping", {}).values()}
        if types != {"text"}:
            actual = ", ".join(sorted(types)) or "missing"
            raise UsageError(
                f"retriever.text_field {field!r} of index {self._settings.index!r} must be of type text, is {actual}; set another field"
            )

    def analyse(self, texts: Sequence[str]) -> list[dict[str, tuple[int, int]] | Failure]:
        """Return for each text: term -> (frequency in the text, document frequency)."""
        field = self._settings.text_field
        options = {"fields": [field], "term_statistics": True, "field_statistics": False, "positions": False, "offsets": False}

        def request(part: Sequence[str]) -> list[Any]:
            # A text that is not in the index goes to a shard by its routing; with a fixed one, frequencies are always those of one shard.
            documents = [{"doc": {field: text}, **options, "routing": "0"} for text in part]
            return list(self._send("POST", f"/{self._index}/_mtermvectors", {"docs": documents})["docs"])

        def read(response: Any) -> dict[str, tuple[int, int]]:
            _raise_if_failed(response)
            terms = response.get("term_vectors", {}).get(field, {}).get("terms", {})
            return {term: (counts["term_freq"], counts.get("doc_freq", 0)) for term, counts in terms.items()}

        return self._request_all(texts, request, read)

    def search(self, queries: Sequence[Terms], limit: int) -> list[ServerHits | Failure]:
        """Return the best documents of each query, scored with the statistics of all shards."""
        header, field = {"search_type": "dfs_query_then_fetch"}, self._settings.text_field

        def request(part: Sequence[Terms]) -> list[Any]:
            lines: list[Any] = []
            for terms in part:
                query = {"bool": {"should": [{"term": {field: {"value": term, "boost": count}}} for term, count in terms]}}
                lines += [header, {"query": query, "size": limit, "_source": False, "track_total_hits": False}]
            return list(self._send("POST", f"/{self._index}/_msearch", lines)["responses"])

        def read(response: Any) -> ServerHits:
            _raise_if_failed(response)
            if response.get("timed_out") or response["_shards"].get("failed"):
                raise _RequestFailed("only some of the shards responded")
            hits = response["hits"]["hits"]
            return ServerHits(tuple((hit["_index"], hit["_id"]) for hit in hits), np.array([hit["_score"] for hit in hits], np.float32))

        return self._request_all(queries, request, read)

    def fetch(self, keys: Sequence[DocumentKey]) -> list[Document | Failure]:
        """Return the documents of some hits."""
        settings = self._settings
        fields = [field for field in (settings.text_field, settings.id_field, settings.source_field) if field]

        def request(part: Sequence[DocumentKey]) -> list[Any]:
            documents = [{"_index": index, "_id": name, "_source": fields} for index, name in part]
            return list(self._send("POST", "/_mget", {"docs": documents})["docs"])

        def read(response: Any) -> Document | Failure:
            _raise_if_failed(response)
            if not response.get("found"):
                return Failure(f"{response['_id']}: deleted since the search")
            content = response.get("_source", {})
            text, name, source = (_value(content, field) for field in (settings.text_field, settings.id_field, settings.source_field))
            if not text:
                return Failure(f"{response['_id']}: no text in _source.{settings.text_field}")
            return Document(name or response["_id"], text, source or response["_index"])

        return self._request_all(keys, request, read)

    def _request_all(
        self, items: Sequence[_Item], request: Callable[[Sequence[_Item]], list[Any]], read: Callable[[Any], _Result | Failure]
    ) -> list[_Result | Failure]:
        """Return `read` of the response to every item; failed items are requested again, without the others."""
        results: list[_Result | Failure] = [Failure("not requested")] * len(items)
        waiting = list(range(len(items)))
        for attempt in range(self._settings.retries + 1):
            again = []
            delay = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)
            try:
                responses = request([items[index] for index in waiting])
                if len(responses) != len(waiting):
                    raise _RequestFailed(f"{len(responses)} responses to {len(waiting)} requests")
            except _RequestFailed as error:
                delay, again = error.pause or delay, waiting
                for index in waiting:
                    results[index] = Failure(f"{error.reason}, tried {attempt + 1} times")
            else:
                for index, response in zip(waiting, responses, strict=True):
                    try:
                        results[index] = read(response)
                    except _RequestFailed as error:
                        results[index] = Failure(error.reason if error.permanent else f"{error.reason}, tried {attempt + 1} times")
                        again += [] if error.permanent else [index]
            waiting = again
            if not waiting:
                break
            if attempt < self._settings.retries:
                self._pause(delay)
        return results

    def _send(self, method: str, target: str, body: Any = None) -> Any:
        """Send one request. Raise _RequestFailed if a retry may succeed, UsageError if the server refuses it."""
        from elastic_transport import TransportError

        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/x-ndjson" if isinstance(body, list) else "application/json"
        try:
            response = self._transport.perform_request(method, target, body=body, headers={**headers, **self._headers}, max_retries=0)
        except TransportError as error:
            raise _RequestFailed(f"no response ({type(error).__name__}: {error.message})") from error
        status, content = response.meta.status, response.body
        if status < 300 and isinstance(content, dict):
            return content
        if status in _BUSY or status < 300:
            wait = response.meta.headers.get("retry-after") or ""
            raise _RequestFailed(f"busy ({status}: {_reason(content)})", pause=min(float(wait), 600.0) if wait.isdigit() else None)
        raise UsageError(f"{self._settings.url}{target} refused ({status}: {_reason(content)}); {_remedy(status)}")


def _connect(settings: ElasticsearchConfig) -> tuple[Transport, dict[str, str]]:
    """Return the transport and the authentication header."""
    try:
        from elastic_transport import NodeConfig, Transport
        from elastic_transport.client_utils import url_to_node_config
    except ModuleNotFoundError as error:
        raise EnvironmentFault(
            "retrieval from Elasticsearch or OpenSearch needs a package; run pip install 'cramlm[elasticsearch]'"
        ) from error
    node: NodeConfig = url_to_node_config(settings.url, use_default_ports_for_scheme=True)
    node = node.replace(request_timeout=settings.timeout, http_compress=True)
    if settings.ca_certs is not None:
        node = node.replace(ca_certs=settings.ca_certs)
    headers = {}
    if settings.api_key_env is not None:
        headers["authorization"] = f"ApiKey {_secret(settings.api_key_env, 'api_key_env')}"
    elif settings.login_env is not None:
        login = base64.b64encode(_secret(settings.login_env, "login_env").encode()).decode()
        headers["authorization"] = f"Basic {login}"
    return Transport([node]), headers


def _secret(name: str, setting: str) -> str:
    if value := os.environ.get(name):
        return value
    raise EnvironmentFault(f"retriever.{setting} names the environment variable {name}, which is not set; export it")


def _rarest(terms: Mapping[str, tuple[int, int]], most: int) -> Terms:
    """Return the `most` terms of the lowest document frequency (ties: by spelling), sorted by spelling, with their counts in the text."""
    kept = sorted(terms, key=lambda term: (terms[term][1], term))[:most]
    return tuple((term, terms[term][0]) for term in sorted(kept))


def _raise_if_failed(response: Any) -> None:
    """Raise _RequestFailed for an item with an error: a full queue, a moving shard, or a refused query."""
    if "error" in response:
        status = response.get("status")  # _mtermvectors and _mget give none
        raise _RequestFailed(f"failed ({status or 'no status'}: {_reason(response)})", permanent=status is not None and status not in _BUSY)


def _reason(content: Any) -> str:
    """Return the server's error message on one line."""
    error = content.get("error", content) if isinstance(content, dict) else content
    causes = error.get("root_cause") or [error] if isinstance(error, dict) else [error]
    parts = [f"{cause.get('type')}: {cause.get('reason')}" if isinstance(cause, dict) else str(cause) for cause in causes[:1]]
    return " ".join(" ".join(parts).split())[:200] or "no reason given"


def _remedy(status: int) -> str:
    match status:
        case 401 | 403:
            return "set retriever.api_key_env or retriever.login_env to an environment variable with a key that may read the index"
        case 404:
            return "check retriever.index"
        case 413:
            return "lower retriever.batch"
        case _:
            return "check the retriever's settings"


def _value(content: Any, field: str | None) -> str | None:
    """Return a field of a document's source, dotted or nested; several values are joined by line breaks."""
    if field is None:
        return None
    if field not in content:
        head, _, rest = field.partition(".")
        return _value(content[head], rest) if rest and isinstance(content.get(head), dict) else None
    value = content[field]
    values = value if isinstance(value, list) else [value]
    return "\n".join(str(one) for one in values if one is not None) or None


KIND: Final = STAGE
CODE_FORMAT: Final = 1  # increase when the same responses give other files
_CONNECTION: Final = {"batch", "timeout", "retries", "api_key_env", "login_env", "ca_certs"}  # does not change the hits
_BOUNDS: Final = {"max_documents", "max_tokens", "per_query", "near_duplicates", "rank_decay"}  # applied to the hits later
_ARRAYS: Final = {"rank": np.int32, "query": np.int32, "score": np.float32}


def server_corpus(settings: ElasticsearchConfig, texts: Sequence[str], store: Path, *, emit: Emit = silent) -> Corpus:
    """Build a corpus of everything that the texts retrieve; the server is queried unless the store has the hits.

    Raises:
        DataError: more than 1 % of the queries failed, or nothing was found. Otherwise as `search_elasticsearch`.
    """
    hits = _hits_folder(settings, texts, store, emit)
    return build_corpus(CorpusConfig(files=(str(hits / "documents.jsonl"),)), store, emit=emit)


@dataclass(frozen=True, slots=True)
class ElasticsearchRetriever:
    """The union of the best `top_k` documents of every training text, scored by the server; for the corpus of `server_corpus`. The passages
    of a long document share its rank.
    """

    settings: ElasticsearchConfig
    store: Path

    @property
    def key(self) -> Mapping[str, Any]:
        return {}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit, fills: Fills | None = None) -> Proposal:
        """See `Retriever`. Raises ArtifactError for any corpus but that of `server_corpus`."""
        folder = _hits_folder(self.settings, texts, self.store, emit)
        report = json.loads((folder / "report.json").read_bytes())
        rank, query, score = (read_array(folder / f"{name}.npy") for name in _ARRAYS)
        with (folder / "documents.jsonl").open(encoding="utf-8") as lines:
            number_of = {json.loads(line)["id"]: number for number, line in enumerate(lines)}
        ids = corpus.ids(range(len(corpus)))
        names = [name if name in number_of else name.rpartition("#")[0] for name in ids]  # x#0: a passage of x
        if unknown := set(names) - set(number_of):
            raise ArtifactError(f"{corpus.path}: holds {min(unknown)!r}, which is not among the hits of {self.settings.url}; run again")
        document = np.array([number_of[name] for name in names], np.int64)
        order = np.lexsort((np.arange(len(document)), rank[document]))
        document = document[order]
        ranking = Ranking(order, rank[document], query[document], score[document], np.zeros(len(document), np.int32))
        counts = QueryCounts(**report["queries"])
        counts.check()
        ranking, capped = cap_per_query(ranking, self.settings.per_query)
        return Proposal(ranking, counts, capped)


def _hits_folder(settings: ElasticsearchConfig, texts: Sequence[str], store: Path, emit: Emit) -> Path:
    """Return the published folder of hits; query the server unless it is in the store."""
    relevant = settings.model_dump(mode="json", exclude=_CONNECTION | _BOUNDS)
    key = {"code": CODE_FORMAT, "settings": relevant, "texts": hash_json(list(texts))}

    def write(folder: Path) -> None:
        emit(Event("start", STAGE, f"searching {settings.url} with {len(texts):,} training texts, top {settings.top_k}"))
        best, counts, reasons = _search(settings, [first_words(text, settings.query_words) for text in texts], emit)
        _write(settings, best, counts, reasons, folder, emit)

    return shared_stage(store / "server" / hash_json(key)[:16], kind=KIND, key=key, write=write, emit=emit).path


def _search(
    settings: ElasticsearchConfig, texts: Sequence[str], emit: Emit
) -> tuple[dict[DocumentKey, tuple[int, int, float]], QueryCounts, Counter[str]]:
    """Return the best (rank, query, score) of every document (ties: the smallest query), the query counts, and the failure reasons."""
    best: dict[DocumentKey, tuple[int, int, float]] = {}
    reasons: Counter[str] = Counter()
    answered = empty = distinct = 0
    last: object = None
    for number, hits in search_elasticsearch(settings, texts, limit=settings.top_k, emit=emit):
        if isinstance(hits, Failure):
            reasons[hits.reason] += 1
            if reasons.total() > MOST_FAILED * len(texts):
                raise DataError(
                    f"{settings.url}: {reasons.total()} of {len(texts)} queries failed (more than {MOST_FAILED:.0%}): "
                    f"{reasons.most_common(1)[0][0]}; check the server, lower retriever.batch, then run again"
                )
            continue
        if not hits.documents:
            empty += 1
            continue
        answered += 1
        if hits is last:
            continue  # equal terms, equal hits
        last, distinct = hits, distinct + 1
        for rank, (document, score) in enumerate(zip(hits.documents, hits.score.tolist(), strict=True)):
            if (previous := best.get(document)) is None or (rank, number) < previous[:2]:
                best[document] = rank, number, score
    return best, QueryCounts(len(texts), distinct, answered, empty, reasons.total()), reasons


def _write(
    settings: ElasticsearchConfig,
    best: Mapping[DocumentKey, tuple[int, int, float]],
    counts: QueryCounts,
    reasons: Counter[str],
    folder: Path,
    emit: Emit,
) -> None:
    order = sorted(best, key=lambda document: (best[document][0], document))
    kept: list[DocumentKey] = []
    missing: Counter[str] = Counter()
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for key, document in fetch_documents(settings, order, emit=emit):
            if isinstance(document, Failure):
                missing[document.reason] += 1
                continue
            file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")
            kept.append(key)
    if missing.total() > MOST_FAILED * len(order):
        raise DataError(
            f"{settings.url}: {missing.total()} of {len(order)} documents cannot be read (more than {MOST_FAILED:.0%}): "
            f"{missing.most_common(1)[0][0]}; check retriever.text_field"
        )
    if not kept:
        raise DataError(f"{settings.url}: no training text retrieves a document of {settings.index!r}; use an index in the task's language")
    for column, (name, dtype) in enumerate(_ARRAYS.items()):
        save_array(folder / f"{name}.npy", np.array([best[key][column] for key in kept], dtype))
    report = {
        "queries": asdict(counts),
        "documents": {"found": len(order), "missing": missing.total()},
        "failures": dict((reasons + missing).most_common(20)),
    }
    write_json(folder / "report.json", report)
    summary = f"{len(kept):,} documents from {settings.url}; {missing.total()} missing, {counts.failed} queries failed"
    emit(Event("done", STAGE, summary, data=report))
