"""A corpus that lives on a search server: what the training texts find there is fetched once, kept, and read like any other corpus.

    training texts ─► elasticsearch.py ─► <store>/server/<key>/ ─► corpus (passages, duplicates) ─► a ranking of its passages

A published folder:
    documents.jsonl   id, source, text of every document found, best rank first (one rank: by name)
    rank.npy, query.npy, score.npy   int32, int32, float32 (documents,): best rank over all queries, the first query that gave it, its score
    report.json       queries: texts = answered + empty + failed; documents found and missing (gone, or without text); reasons of failures

The server may change while a run is resumed; what it said stays, until settings or training texts change or the folder is deleted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cramlm.config.retriever import ElasticsearchConfig
from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.errors import ArtifactError, DataError
from cramlm.records import Emit, Event, silent
from cramlm.retrieval.elasticsearch import STAGE, DocumentKey, Failure, fetch_documents, search_elasticsearch
from cramlm.retrieval.phrases import first_words
from cramlm.retrieval.ranking import MOST_FAILED, Proposal, QueryCounts, Ranking, cap_per_query
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import Artifact, hash_json, shared_stage

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
