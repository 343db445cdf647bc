"""Hits and documents from an Elasticsearch or OpenSearch server, for a corpus that lives there.

    texts ─► _mtermvectors: terms as the index analyses them, and how many documents hold each
      ─► the rarest `max_clauses` terms of each text; texts with equal terms made one query
      ─► _msearch, `batch` queries at a time, scored with statistics of all shards ─► keys of documents, or why there are none
    keys ─► _mget ─► documents

Servers bound the clauses of a query (1,024 by default), and a long training text has more terms than that. The most frequent ones go:
they add least to a score. How frequent a term is, one shard tells, always the same one; a term that it does not know counts as rare and
stays. A query with fewer terms is not changed.

What is busy or half answered (429, 5xx, no connection, a shard that failed, a search that timed out) is asked again, after 0.5, 1, 2, ...
30 s or as long as the server says. A query that still has no whole answer is a `Failure`, never an empty result.

Requests go through the transport of Elastic's official client, without the client: that one refuses servers which are not Elastic's.
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
from cramlm.retrieval.phrases import first_words
from cramlm.retrieval.ranking import MOST_FAILED, Proposal, QueryCounts, Ranking, cap_per_query
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import Artifact, hash_json, shared_stage

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
    """Documents of one query, best first; none if no document of the index has a term of it. score: float32, > 0."""

    documents: tuple[DocumentKey, ...]
    score: FloatArray


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no (whole) answer."""

    reason: str


class _NoAnswer(Exception):  # noqa: N818 - not for users: it is asked again, or becomes a Failure
    """pause: seconds that the server asks for. lasting: the same question will not be answered later either."""

    def __init__(self, reason: str, *, pause: float | None = None, lasting: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.pause, self.lasting = reason, pause, lasting


def search_elasticsearch(
    settings: ElasticsearchConfig,
    queries: Sequence[str],
    *,
    limit: int,
    emit: Emit = silent,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[int, ServerHits | Failure]]:
    """(number of the query, its `limit` best documents or why not), once for every query; those with equal terms follow one another, and
    groups come in the order of their first query. Memory is bounded by one batch of hits.

    Raises:
        UsageError: if the server refuses (index, field, key, size of a request). EnvironmentFault: if it cannot be reached, a key is not
        in the environment, or the package is missing.
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
        message = f"{cut:,} texts have over {settings.max_clauses:,} terms each, the server's bound; their most frequent ones were left out"
        emit(Event("note", STAGE, message))
    for number in groups.pop((), []):
        yield number, ServerHits((), np.zeros(0, np.float32))
    asked = list(groups.items())
    for first in range(0, len(asked), settings.batch):
        part = asked[first : first + settings.batch]
        for (_, numbers), hits in zip(part, server.search([terms for terms, _ in part], limit), strict=True):
            yield from ((number, hits) for number in numbers)
        done += len(part)
        emit(Event("progress", STAGE, "distinct queries asked", done=done, total=len(asked), unit="queries"))


def fetch_documents(
    settings: ElasticsearchConfig, keys: Sequence[DocumentKey], *, emit: Emit = silent, pause: Callable[[float], None] = time.sleep
) -> Iterator[tuple[DocumentKey, Document | Failure]]:
    """The documents of some hits in the order given; a Failure where one is gone or has no text. Raises as `search_elasticsearch`."""
    server = _Server(settings, pause)
    for first in range(0, len(keys), _DOCUMENTS):
        part = keys[first : first + _DOCUMENTS]
        yield from zip(part, server.fetch(part), strict=True)
        emit(Event("progress", STAGE, "documents fetched", done=first + len(part), total=len(keys), unit="documents"))


class _Server:
    """One server, one index, one text field."""

    def __init__(self, settings: ElasticsearchConfig, pause: Callable[[float], None]) -> None:
        self._settings, self._pause = settings, pause
        self._transport, self._headers = _connect(settings)
        self._index = quote(settings.index, safe="")

    def check_field(self) -> None:
        """Raises UsageError unless the text field is there, in one index: asking for terms of an unknown field would create it."""
        field = self._settings.text_field

        def ask(_: Sequence[str]) -> list[Any]:
            return [self._ask("GET", f"/{self._index}/_mapping/field/{quote(field, safe='')}")]

        (mappings,) = self._answers([field], ask, lambda answer: answer)
        if isinstance(mappings, Failure):
            raise EnvironmentFault(f"{self._settings.url}: {mappings.reason}; check retriever.url and that the server runs")
        if len(mappings) != 1:
            names = ", ".join(sorted(mappings)[:5]) or "none"
            raise UsageError(f"retriever.index {self._settings.index!r} must name one index (or its alias), and stands for {names}")
        types = {kind["type"] for entry in mappings.values() for kind in entry["mappings"].get(field, {}).get("mapping", {}).values()}
        if types != {"text"}:
            found = ", ".join(sorted(types)) or "not there"
            raise UsageError(
                f"retriever.text_field {field!r} of index {self._settings.index!r} must be of type text, is {found}; name another field"
            )

    def analyse(self, texts: Sequence[str]) -> list[dict[str, tuple[int, int]] | Failure]:
        """Term -> how often it is in the text, and how many documents have it, of each text."""
        field = self._settings.text_field
        options = {"fields": [field], "term_statistics": True, "field_statistics": False, "positions": False, "offsets": False}

        def ask(part: Sequence[str]) -> list[Any]:
            # A text that is not in the index is sent to a shard by its routing; with a fixed one, counts are always those of one shard.
            documents = [{"doc": {field: text}, **options, "routing": "0"} for text in part]
            return list(self._ask("POST", f"/{self._index}/_mtermvectors", {"docs": documents})["docs"])

        def read(answer: Any) -> dict[str, tuple[int, int]]:
            _raise_if_failed(answer)
            terms = answer.get("term_vectors", {}).get(field, {}).get("terms", {})
            return {term: (counts["term_freq"], counts.get("doc_freq", 0)) for term, counts in terms.items()}

        return self._answers(texts, ask, read)

    def search(self, queries: Sequence[Terms], limit: int) -> list[ServerHits | Failure]:
        """The best documents of each query; statistics are those of all shards, whatever shard a document is in."""
        header = {"search_type": "dfs_query_then_fetch"}

        def ask(part: Sequence[Terms]) -> list[Any]:
            lines: list[Any] = []
            for terms in part:
                query = {"bool": {"should": [self._clause(term, count) for term, count in terms]}}
                lines += [header, {"query": query, "size": limit, "_source": False, "track_total_hits": False}]
            return list(self._ask("POST", f"/{self._index}/_msearch", lines)["responses"])

        def read(answer: Any) -> ServerHits:
            _raise_if_failed(answer)
            if answer.get("timed_out") or answer["_shards"].get("failed"):
                raise _NoAnswer("only some of the shards answered")
            hits = answer["hits"]["hits"]
            return ServerHits(tuple((hit["_index"], hit["_id"]) for hit in hits), np.array([hit["_score"] for hit in hits], np.float32))

        return self._answers(queries, ask, read)

    def fetch(self, keys: Sequence[DocumentKey]) -> list[Document | Failure]:
        """The documents that stand behind some hits."""
        settings = self._settings
        fields = [field for field in (settings.text_field, settings.id_field, settings.source_field) if field]

        def ask(part: Sequence[DocumentKey]) -> list[Any]:
            documents = [{"_index": index, "_id": name, "_source": fields} for index, name in part]
            return list(self._ask("POST", "/_mget", {"docs": documents})["docs"])

        def read(answer: Any) -> Document | Failure:
            _raise_if_failed(answer)
            if not answer.get("found"):
                return Failure(f"{answer['_id']}: deleted since it was found")
            content = answer.get("_source", {})
            text, name, source = (_value(content, field) for field in (settings.text_field, settings.id_field, settings.source_field))
            if not text:
                return Failure(f"{answer['_id']}: no text in _source.{settings.text_field}")
            return Document(name or answer["_id"], text, source or answer["_index"])

        return self._answers(keys, ask, read)

    def _clause(self, term: str, count: int) -> dict[str, Any]:
        return {"term": {self._settings.text_field: {"value": term, "boost": count}}}

    def _answers(
        self, items: Sequence[_Item], ask: Callable[[Sequence[_Item]], list[Any]], read: Callable[[Any], _Result | Failure]
    ) -> list[_Result | Failure]:
        """`read` of the server's answer to every item. Those for which it is busy are asked again, without the ones that have theirs."""
        results: list[_Result | Failure] = [Failure("not asked")] * len(items)
        waiting = list(range(len(items)))
        for attempt in range(self._settings.retries + 1):
            again = []
            delay = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)
            try:
                answers = ask([items[place] for place in waiting])
                if len(answers) != len(waiting):
                    raise _NoAnswer(f"{len(answers)} answers to {len(waiting)} questions")
            except _NoAnswer as error:
                delay, again = error.pause or delay, waiting
                for place in waiting:
                    results[place] = Failure(f"{error.reason}, asked {attempt + 1} times")
            else:
                for place, answer in zip(waiting, answers, strict=True):
                    try:
                        results[place] = read(answer)
                    except _NoAnswer as error:
                        results[place] = Failure(error.reason if error.lasting else f"{error.reason}, asked {attempt + 1} times")
                        again += [] if error.lasting else [place]
            waiting = again
            if not waiting:
                break
            if attempt < self._settings.retries:
                self._pause(delay)
        return results

    def _ask(self, method: str, target: str, body: Any = None) -> Any:
        """One request. Raises _NoAnswer if it may do better later, UsageError if the server refuses."""
        from elastic_transport import TransportError

        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/x-ndjson" if isinstance(body, list) else "application/json"
        try:
            answer = self._transport.perform_request(method, target, body=body, headers={**headers, **self._headers}, max_retries=0)
        except TransportError as error:
            raise _NoAnswer(f"no answer ({type(error).__name__}: {error.message})") from error
        status, content = answer.meta.status, answer.body
        if status < 300 and isinstance(content, dict):
            return content
        if status in _BUSY or status < 300:
            wait = answer.meta.headers.get("retry-after") or ""
            raise _NoAnswer(f"busy ({status}: {_reason(content)})", pause=min(float(wait), 600.0) if wait.isdigit() else None)
        raise UsageError(f"{self._settings.url}{target} refused ({status}: {_reason(content)}); {_remedy(status)}")


def _connect(settings: ElasticsearchConfig) -> tuple[Transport, dict[str, str]]:
    """The transport, and the header that proves who asks."""
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
    """At most so many terms, those in the fewest documents (on ties by spelling), sorted by spelling, each with its count in the text."""
    kept = sorted(terms, key=lambda term: (terms[term][1], term))[:most]
    return tuple((term, terms[term][0]) for term in sorted(kept))


def _raise_if_failed(answer: Any) -> None:
    """Raises _NoAnswer for an item that has an error: a queue is full, a shard moves, or the query itself is refused."""
    if "error" in answer:
        status = answer.get("status")  # _mtermvectors and _mget give none
        raise _NoAnswer(f"failed ({status or 'no status'}: {_reason(answer)})", lasting=status is not None and status not in _BUSY)


def _reason(content: Any) -> str:
    """What the server says, on one line."""
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
    """A field of a document's source, dotted or nested; several values are joined by line breaks."""
    if field is None:
        return None
    if field not in content:
        head, _, rest = field.partition(".")
        return _value(content[head], rest) if rest and isinstance(content.get(head), dict) else None
    value = content[field]
    values = value if isinstance(value, list) else [value]
    return "\n".join(str(one) for one in values if one is not None) or None


KIND: Final = STAGE
CODE_FORMAT: Final = 1  # raise it when the same answers would give another folder
_WAYS: Final = {"batch", "timeout", "retries", "api_key_env", "login_env", "ca_certs"}  # how to ask, not what
_BOUNDS: Final = {"max_documents", "max_tokens", "per_query", "near_duplicates", "rank_decay"}  # what is kept of the answer, later
_ARRAYS: Final = {"rank": np.int32, "query": np.int32, "score": np.float32}


def server_corpus(settings: ElasticsearchConfig, texts: Sequence[str], store: Path, *, emit: Emit = silent) -> Corpus:
    """Everything that the texts find, as a corpus; asked of the server unless the store has it.

    Raises:
        DataError: if more than 1 % of the queries failed, or nothing is found. Otherwise as elasticsearch.py.
    """
    answers = _answers(settings, texts, store, emit)
    return build_corpus(CorpusConfig(files=(str(answers.path / "documents.jsonl"),)), store, emit=emit)


@dataclass(frozen=True, slots=True)
class ElasticsearchRetriever:
    """The union of the best `top_k` documents of every training text, as a server scores them; for the corpus of `server_corpus`.

    The passages of a long document share its rank.
    """

    settings: ElasticsearchConfig
    store: Path

    @property
    def key(self) -> Mapping[str, Any]:
        return {}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        """See `Retriever`. Raises ArtifactError if the corpus is another one."""
        answers = _answers(self.settings, texts, self.store, emit)
        report = json.loads((answers.path / "report.json").read_bytes())
        rank, query, score = (read_array(answers.path / f"{name}.npy") for name in _ARRAYS)
        with (answers.path / "documents.jsonl").open(encoding="utf-8") as lines:
            places = {json.loads(line)["id"]: place for place, line in enumerate(lines)}
        names = [name if (name := document.id) in places else name.rpartition("#")[0] for document in corpus]  # x#0: a passage of x
        if unknown := set(names) - set(places):
            raise ArtifactError(f"{corpus.path}: holds {min(unknown)!r}, which is not among what {self.settings.url} found; run again")
        place = np.array([places[name] for name in names], np.int64)
        order = np.lexsort((np.arange(len(place)), rank[place]))
        place = place[order]
        ranking = Ranking(order, rank[place], query[place], score[place], np.zeros(len(place), np.int32))
        counts = QueryCounts(**report["queries"])
        counts.check()
        ranking, capped = cap_per_query(ranking, self.settings.per_query)
        return Proposal(ranking, counts, capped)


def _answers(settings: ElasticsearchConfig, texts: Sequence[str], store: Path, emit: Emit) -> Artifact:
    """The published folder: the one in the store, or made now."""
    asked = settings.model_dump(mode="json", exclude=_WAYS | _BOUNDS)
    key = {"code": CODE_FORMAT, "settings": asked, "texts": hash_json(list(texts))}

    def write(folder: Path) -> None:
        emit(Event("start", STAGE, f"asking {settings.url} with {len(texts):,} training texts, top {settings.top_k}"))
        most = settings.query_words
        best, counts, reasons = _search(settings, texts if most is None else [first_words(text, most) for text in texts], emit)
        _write(settings, best, counts, reasons, folder, emit)

    return shared_stage(store / "server" / hash_json(key)[:16], kind=KIND, key=key, write=write, emit=emit)


def _search(
    settings: ElasticsearchConfig, texts: Sequence[str], emit: Emit
) -> tuple[dict[DocumentKey, tuple[int, int, float]], QueryCounts, Counter[str]]:
    """Best (rank, query, score) of every document found, the smallest query on equal ranks; what became of the queries; why some failed."""
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
                    f"{reasons.most_common(1)[0][0]}; see that the server is well, lower retriever.batch, then run again"
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
            if (known := best.get(document)) is None or (rank, number) < known[:2]:
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
        raise DataError(f"{settings.url}: no training text finds a document in {settings.index!r}; use an index in the task's language")
    for column, (name, dtype) in enumerate(_ARRAYS.items()):
        save_array(folder / f"{name}.npy", np.array([best[key][column] for key in kept], dtype))
    report = {
        "queries": asdict(counts),
        "documents": {"found": len(order), "missing": missing.total()},
        "failures": dict((reasons + missing).most_common(20)),
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    summary = f"{len(kept):,} documents from {settings.url}; {missing.total()} missing, {counts.failed} queries failed"
    emit(Event("done", STAGE, summary, data=report))
