"""From the training texts to the chosen slice of the corpus, and what a person may want to know about it.

Every training text is a query; a document's rank is its best over all queries, and the selection is the union of the queries' top k, sorted
by (rank, position), so that any prefix is the best slice of its size. Documents that hold a dev or test text, or share 13 words in
a row with one, are dropped and listed (data/hygiene.py). The folder:

    position.npy rank.npy query.npy score.npy    parallel arrays (records.Selection)
    selected.jsonl                               the same with id, source, query text's number and the passage itself
    dropped.jsonl                                what hygiene took out, with the reason and the words that matched
    report.json                                  queries answered, empty, failed; passages, words and bytes by source; rank and score profile
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.artifacts import open_artifact, stage
from cramlm.config import Bm25Config, RandomConfig, RetrieverConfig
from cramlm.data.corpus import Corpus
from cramlm.data.hygiene import Overlap, find_overlaps
from cramlm.data.task import task_fingerprint
from cramlm.errors import ArtifactError, DataError
from cramlm.records import Emit, Event, Selection, Task, silent
from cramlm.retrieval.index import Hits, Index

KIND = "selection"
CODE_FORMAT = 1  # raise it when the same inputs would give another selection
MOST_FAILED = 0.01  # share of queries that may fail before the selection is refused
SPARE = 1.25  # documents looked at beyond the bound, so that those that hygiene drops are replaced
_ARRAYS = ("position", "rank", "query", "score")
_PERCENTILES = (0, 10, 25, 50, 75, 90, 100)


def select_documents(
    config: RetrieverConfig,
    corpus: Corpus,
    task: Task,
    *,
    index: Index | None,
    out: Path,
    seed: int,
    threads: int = 1,
    emit: Emit = silent,
) -> Selection:
    """Publish the selection at `out`, or read the one that is there if nothing it depends on changed.

    index: needed by BM25, ignored by random. seed: used by random only. The result does not depend on `threads` or the order of rows.

    Raises:
        DataError: if nothing is selected. ArtifactError: if the index is of another corpus, or more than 1 % of the queries fail.
    """
    key = {"code": CODE_FORMAT, "retriever": config.model_dump(mode="json"), "corpus": corpus.fingerprint, "task": task_fingerprint(task)}
    if isinstance(config, RandomConfig):
        key["seed"] = seed

    def write(folder: Path) -> None:
        emit(Event("start", "selection", f"{len(task.train):,} queries over {len(corpus):,} passages"))
        match config:
            case Bm25Config():
                assert index is not None, "BM25 needs an index"
                index.check_corpus(corpus)
                hits = index.search([example.whole_text for example in task.train], limit=config.top_k, k1=config.k1, b=config.b,
                                    threads=threads, emit=emit)  # fmt: skip
                candidates, queries = best_ranks(hits), _query_report(hits)
                bound = config.max_documents
            case RandomConfig():
                candidates, queries = draw(len(corpus), config.documents, seed=seed), {"answered": 0, "empty": 0, "failed": 0}
                bound = config.documents
        chosen, dropped = _clean(candidates, corpus, task, bound=bound)
        if len(chosen) == 0:
            raise DataError(
                f"{corpus.path}: no passage shares a word with the training texts; check that corpus and task are of one language"
            )
        _write(folder, chosen, dropped, corpus, queries)
        emit(Event("done", "selection", f"{len(chosen):,} passages, {len(dropped):,} dropped for holding dev or test text"))

    stage(out, kind=KIND, key=key, write=write, emit=emit)
    return read_selection(out)


def read_selection(path: Path) -> Selection:
    """The arrays of a published selection; raises ArtifactError if it is damaged or not a selection."""
    folder = open_artifact(path, kind=KIND).path
    return Selection(*(np.load(folder / f"{name}.npy", allow_pickle=False) for name in _ARRAYS))


def best_ranks(hits: Hits) -> Selection:
    """The union of all hits: each document once, with its best rank and the first query that gave it that rank."""
    lengths = np.diff(hits.offsets)
    query = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    rank = (np.arange(len(query)) - np.repeat(hits.offsets[:-1], lengths)).astype(np.int32)
    order = np.lexsort((query, rank, hits.position))
    position = hits.position[order]
    first = np.ones(len(position), dtype=np.bool_)
    first[1:] = position[1:] != position[:-1]
    kept = order[first]
    kept = kept[np.lexsort((hits.position[kept], rank[kept]))]
    return Selection(hits.position[kept], rank[kept], query[kept], hits.score[kept])


def draw(documents: int, count: int, *, seed: int) -> Selection:
    """`count` documents without replacement, all of them if there are fewer; the rank is the order of drawing, there is no query (-1)."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    position = generator.permutation(documents)[:count].astype(np.int64)
    size = len(position)
    return Selection(position, np.arange(size, dtype=np.int32), np.full(size, -1, np.int32), np.zeros(size, np.float32))


def _clean(candidates: Selection, corpus: Corpus, task: Task, *, bound: int | None) -> tuple[Selection, list[Overlap]]:
    """The best `bound` candidates that hold no dev or test text, and what was dropped on the way."""
    if bound is not None and bound < len(candidates):
        candidates = _take(candidates, np.arange(min(len(candidates), int(bound * SPARE) + 100)))
    documents = ((int(position), corpus.text(int(position))) for position in candidates.position)
    dropped = list(find_overlaps(documents, [*task.dev, *task.test]))
    clean = ~np.isin(candidates.position, [overlap.position for overlap in dropped])
    return _take(candidates, np.flatnonzero(clean)[:bound]), dropped


def _take(selection: Selection, places: np.ndarray[Any, np.dtype[np.int64]]) -> Selection:
    return Selection(selection.position[places], selection.rank[places], selection.query[places], selection.score[places])


def _query_report(hits: Hits) -> dict[str, int]:
    counts = Counter(hits.status)
    report = {name: counts.get(name, 0) for name in ("answered", "empty", "failed")}
    if report["failed"] > MOST_FAILED * len(hits.status):
        raise ArtifactError(f"{report['failed']} of {len(hits.status)} queries failed; build the index again")
    return report


def _write(folder: Path, chosen: Selection, dropped: list[Overlap], corpus: Corpus, queries: Mapping[str, int]) -> None:
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(chosen, name), allow_pickle=False)
    passages: Counter[str] = Counter()
    words = size = 0
    with (folder / "selected.jsonl").open("w", encoding="utf-8") as file:
        for position, rank, query, score in zip(*(getattr(chosen, name).tolist() for name in _ARRAYS), strict=True):
            document = corpus.document(position)
            passages[document.source] += 1
            words += len(document.text.split())
            size += len(document.text.encode())
            row = {"position": position, "id": document.id, "source": document.source, "rank": rank, "score": round(score, 5)}
            file.write(json.dumps({**row, "query": query, "text": document.text}, ensure_ascii=False) + "\n")
    with (folder / "dropped.jsonl").open("w", encoding="utf-8") as file:
        for overlap in dropped:
            row = {"position": overlap.position, "id": corpus.document(overlap.position).id, "reason": overlap.reason}
            file.write(json.dumps({**row, "match": overlap.match, "example": overlap.split_example_id}, ensure_ascii=False) + "\n")
    profile = {
        name: dict(zip(map(str, _PERCENTILES), np.percentile(getattr(chosen, name), _PERCENTILES).round(4).tolist(), strict=True))
        for name in ("rank", "score")
    }
    report = {
        "queries": {"read": sum(queries.values()), **queries},
        "documents": len(chosen),
        "dropped": len(dropped),
        "words": words,
        "bytes": size,
        "sources": dict(passages.most_common()),
        "percentiles": profile,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
