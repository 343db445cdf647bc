"""The slice of the corpus that a task asks for, published as a folder.

    training texts ─► queries ─► the best top_k documents of each ─► union, each with its best rank ─► sorted by (rank, position)
      ─► without passages that hold dev or test text ─► cut to max_documents ─► selected.jsonl

    selected.jsonl      position, id, source, rank, score, query, text; one document per line, in order
    dropped.jsonl       position, id, source, reason, match, example: what was left out because it holds held-out text
    report.json         queries: texts = answered + empty + failed; documents: found = selected + dropped + cut; sources; ranks and scores
    position.npy, rank.npy, query.npy, score.npy      the same order as arrays (`Selection`)

Where a bound on the documents is set, a quarter more is looked at, so that dropped ones are replaced by the next best.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, assert_never

import numpy as np

from cramlm.artifacts import open_artifact, stage, verify
from cramlm.config import Bm25Config, RandomConfig, RetrieverConfig
from cramlm.data.corpus import Corpus
from cramlm.data.hygiene import find_overlaps
from cramlm.data.task import task_fingerprint
from cramlm.data.words import count_words
from cramlm.errors import ArtifactError, DataError, UsageError
from cramlm.records import Document, Emit, Event, Int32Array, Selection, Task, silent
from cramlm.retrieval.analysis import ANALYZER
from cramlm.retrieval.index import Index
from cramlm.retrieval.random import draw_documents

KIND: Final = "selection"
CODE_FORMAT: Final = 1  # raise it when the same input would give another folder
MOST_FAILED: Final = 0.01  # share of the queries
SPARE: Final = 1.25
_ARRAYS: Final = {"position": np.int64, "rank": np.int32, "query": np.int32, "score": np.float32}
_PERCENTILES: Final = (0, 1, 10, 25, 50, 75, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class QueryCounts:
    """What became of the training texts as queries. texts = answered + empty + failed; distinct counts the answered ones that differ."""

    texts: int
    distinct: int
    answered: int
    empty: int
    failed: int

    def __post_init__(self) -> None:
        assert self.texts == self.answered + self.empty + self.failed

    def check(self) -> None:
        """Raises DataError if more than 1 % failed: a slice with holes must not pass for the task's."""
        if self.failed > MOST_FAILED * self.texts:
            raise DataError(
                f"{self.failed} of {self.texts} queries failed (more than {MOST_FAILED:.0%}); see the run's log, then run again"
            )


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
    """Choose documents for the task and publish them at `out`; what is there and fresh is kept. The result does not depend on `threads`.

    Raises:
        DataError: if nothing is selected, or too many queries failed. ArtifactError: if the index belongs to another corpus or is damaged.
    """
    key: dict[str, Any] = {
        "code": CODE_FORMAT,
        "config": config.model_dump(mode="json"),
        "corpus": corpus.fingerprint,
        "task": {split: value for split, value in task_fingerprint(task).items() if split != "labels"},
    }
    match config:
        case Bm25Config():
            if index is None:
                raise UsageError("BM25 retrieval needs an index of the corpus; build one with build_index(corpus, store)")
            index.check_corpus(corpus)
            key["analyzer"] = ANALYZER
        case RandomConfig(documents=None):
            raise UsageError("the random control needs a number of documents; set retriever.documents, or let a run's plan set it")
        case RandomConfig():
            key["seed"] = seed
        case _:
            assert_never(config)

    def write(folder: Path) -> None:
        match config:
            case Bm25Config():
                assert index is not None
                emit(Event("start", KIND, f"searching with {len(task.train):,} training texts, top {config.top_k}"))
                chosen, counts = _search(config, index, task, threads=threads, emit=emit)
                counts.check()
                bound = config.max_documents
            case RandomConfig():
                assert config.documents is not None
                emit(Event("start", KIND, f"drawing {config.documents:,} documents"))
                chosen, counts = _draw(_with_spare(config.documents), corpus, seed=seed), QueryCounts(0, 0, 0, 0, 0)
                bound = config.documents
            case _:
                assert_never(config)
        _Writer(corpus, task, folder, emit).write(chosen, counts, bound)

    stage(out, kind=KIND, key=key, write=write, emit=emit)
    return read_selection(out)


def read_selection(path: Path) -> Selection:
    """A published selection.

    Raises:
        ArtifactError: if it is damaged, or the folder holds something else.
    """
    open_artifact(path, kind=KIND)
    try:
        arrays = {name: np.load(path / f"{name}.npy", allow_pickle=False) for name in _ARRAYS}
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path}: damaged selection ({error}); delete the folder and select again") from error
    return Selection(**arrays)


def _search(config: Bm25Config, index: Index, task: Task, *, threads: int, emit: Emit) -> tuple[Selection, QueryCounts]:
    """The union over all training texts. Holds one rank, query and score per document of the corpus, whatever the number of queries."""
    verify(index.path)  # every byte: a damaged index must not choose documents
    compiled = index.compile([example.whole_text for example in task.train])
    numbers, first_text = np.unique(compiled.owner, return_index=True)
    text_of = first_text[numbers >= 0]
    answered = int((compiled.owner >= 0).sum())
    best = np.full(index.documents, np.iinfo(np.int32).max, np.int32)
    query, score = np.full(index.documents, -1, np.int32), np.zeros(index.documents, np.float32)

    def tell(event: Event) -> None:
        emit(replace(event, stage=KIND))

    # Distinct queries come in the order of their first text, so that on equal ranks the smallest query stays.
    for number, positions, scores in index.search_distinct(
        compiled, limit=config.top_k, k1=config.k1, b=config.b, threads=threads, emit=tell
    ):
        better = np.flatnonzero(np.arange(len(positions)) < best[positions])
        positions = positions[better]
        best[positions], query[positions], score[positions] = better, text_of[number], scores[better]
    found = np.flatnonzero(query >= 0)
    found = found[np.lexsort((found, best[found]))]
    counts = QueryCounts(len(task.train), len(compiled), answered, len(task.train) - answered, 0)
    return Selection(found, best[found], query[found], score[found]), counts


def _draw(documents: int, corpus: Corpus, *, seed: int) -> Selection:
    position = draw_documents(len(corpus), documents, seed=seed)
    count = len(position)
    return Selection(position, np.arange(count, dtype=np.int32), np.full(count, -1, np.int32), np.zeros(count, np.float32))


def _with_spare(bound: int) -> int:
    return int(SPARE * bound) + 100


def _take(selection: Selection, chosen: slice | np.ndarray[Any, Any]) -> Selection:
    return Selection(selection.position[chosen], selection.rank[chosen], selection.query[chosen], selection.score[chosen])


class _Writer:
    """Leaves out held-out text, writes the folder and its report; used once."""

    def __init__(self, corpus: Corpus, task: Task, folder: Path, emit: Emit) -> None:
        self._corpus, self._task, self._folder, self._emit = corpus, task, folder, emit

    def write(self, found: Selection, counts: QueryCounts, bound: int | None) -> None:
        if not len(found):
            raise DataError(
                f"0 documents selected: none of the {counts.texts} training texts shares a word with {self._corpus.path}; "
                "use a corpus in the task's language"
            )
        looked_at = found if bound is None else _take(found, slice(_with_spare(bound)))
        dropped = self._drop_held_out(looked_at)
        kept = _take(looked_at, np.flatnonzero(~np.isin(looked_at.position, dropped))[:bound])
        if not len(kept):
            raise DataError(f"0 documents selected: all {len(dropped)} found hold text of the dev or test set; use a larger corpus")
        for name, dtype in _ARRAYS.items():
            np.save(self._folder / f"{name}.npy", np.asarray(getattr(kept, name), dtype), allow_pickle=False)
        cut = len(found) - len(dropped) - len(kept)
        documents = {"found": len(found), "dropped": len(dropped), "cut": cut, "selected": len(kept)}
        report = {"queries": asdict(counts), "documents": documents, **self._write_texts(kept), **_profile(kept)}
        (self._folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
        summary = f"{len(kept):,} documents, {report['words']:,} words; {len(dropped)} dropped for held-out text"
        if counts.texts:
            summary += (
                f"; {counts.answered:,} queries answered ({counts.distinct:,} distinct), {counts.empty} empty, {counts.failed} failed"
            )
        self._emit(Event("done", KIND, summary, data={"queries": asdict(counts), "documents": documents, "words": report["words"]}))
        if counts.empty:
            self._emit(Event("warning", KIND, f"{counts.empty} training texts share no word with the corpus and retrieved nothing"))

    def _drop_held_out(self, looked_at: Selection) -> np.ndarray[Any, Any]:
        """Positions of documents that hold dev or test text; writes dropped.jsonl."""
        texts = ((position, self._corpus.text(position)) for position in np.sort(looked_at.position).tolist())
        positions = []
        with (self._folder / "dropped.jsonl").open("w", encoding="utf-8") as file:
            for overlap in find_overlaps(texts, [*self._task.dev, *self._task.test]):
                document = self._corpus.document(overlap.position)
                _write_line(
                    file,
                    position=overlap.position,
                    id=document.id,
                    source=document.source,
                    reason=overlap.reason,
                    match=overlap.match,
                    example=overlap.split_example_id,
                )
                positions.append(overlap.position)
        return np.array(positions, np.int64)

    def _write_texts(self, kept: Selection) -> dict[str, Any]:
        """Writes selected.jsonl; returns words, bytes and documents per source (most first)."""
        words = size = 0
        sources: Counter[str] = Counter()
        with (self._folder / "selected.jsonl").open("w", encoding="utf-8") as file:
            for position, rank, query, score, document in self._lines(kept):
                _write_line(
                    file,
                    position=position,
                    id=document.id,
                    source=document.source,
                    rank=rank,
                    score=float(f"{score:.7g}"),
                    query=query,
                    text=document.text,
                )
                words += count_words(document.text)
                size += len(document.text.encode())
                sources[document.source] += 1
        return {"words": words, "bytes": size, "sources": dict(sources.most_common())}

    def _lines(self, kept: Selection) -> Iterator[tuple[int, int, int, float, Document]]:
        for position, rank, query, score in zip(
            kept.position.tolist(), kept.rank.tolist(), kept.query.tolist(), kept.score.tolist(), strict=True
        ):
            yield position, rank, query, score, self._corpus.document(position)


def _profile(kept: Selection) -> dict[str, dict[str, float]]:
    def percentiles(values: Int32Array | np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, float]:
        return {f"p{share}": round(float(value), 4) for share, value in zip(_PERCENTILES, np.percentile(values, _PERCENTILES), strict=True)}

    return {"rank": percentiles(kept.rank), "score": percentiles(kept.score)}


def _write_line(file: Any, **fields: Any) -> None:
    file.write(json.dumps(fields, ensure_ascii=False) + "\n")
