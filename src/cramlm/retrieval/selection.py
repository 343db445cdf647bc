"""The selection: the part of the corpus that a task retrieves, published as a folder.

    training texts ─► a retriever's ranking of documents ─► without held-out text and near-duplicates, up to the bound ─► selection.arrow

    selection.arrow     a row per passage in order of (rank, position), memory-mapped: position int64 · rank int32 · score float32 · query
                        int32 · weight float32 (see records.Selection) · id · source (dictionary) · text; in a union also retriever
    dropped.jsonl       position, id, source, reason; with match and example, or twin (a position) and similarity
    report.json         queries: texts = answered + empty + failed; documents: found = selected + dropped + capped + cut; drops by reason;
                        documents and words of the largest sources; rank and score profile; comparison with random text (statistics.py)

Training samples passages in proportion to their weights. The text is copied from the corpus without decoding; JSON lines are an export.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import numpy.typing as npt

from cramlm.config.retriever import RetrieverConfig, members_of
from cramlm.data.corpus import Corpus, largest_sources
from cramlm.data.task import task_fingerprint
from cramlm.errors import DataError, counted
from cramlm.records import Emit, Event, Example, FloatArray, Int32Array, IntArray, Selection, Task, count, silent
from cramlm.retrieval.bm25.distributed import remove_searches, require_only_searches
from cramlm.retrieval.duplicates import CODE_FORMAT as DUPLICATES_FORMAT
from cramlm.retrieval.duplicates import NearDuplicates
from cramlm.retrieval.ranking import (
    CHARACTERS_PER_TOKEN,
    STAGE,
    Dropped,
    Filtered,
    Proposal,
    Ranking,
    count_reasons,
    filter_ranking,
)
from cramlm.retrieval.retrievers import RetrievalContext, build_retriever, check_bounded
from cramlm.retrieval.statistics import compare_with_corpus
from cramlm.storage.arrays import check_column, column_numbers, number_column, open_table, save_table, string_column
from cramlm.storage.artifacts import Artifact, hash_json, open_artifact, write_json
from cramlm.storage.stages import stage

KIND: Final = STAGE
SELECTION_FILE: Final = "selection.arrow"
_NUMBERS: Final = {"position": np.int64, "rank": np.int32, "score": np.float32, "query": np.int32, "weight": np.float32}
_ROWS: Final = 4096  # of a record batch: bounds the memory for text while a selection is written


class SelectionTable:
    """A published selection. Opening it reads no text."""

    def __init__(self, artifact: Artifact) -> None:
        """Raise ArtifactError if the table is damaged."""
        self.artifact = artifact
        self.path = artifact.path / SELECTION_FILE
        self._table = open_table(self.path, _schema(union=False), _schema(union=True))

    @staticmethod
    def open(folder: Path) -> SelectionTable:
        """Open a selection.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        return SelectionTable(open_artifact(folder, kind=KIND))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def numbers(self) -> Selection:
        """Return the columns of numbers, without reading the text."""
        return Selection(**{name: self._array(name) for name in _NUMBERS})

    def texts(self) -> list[str]:
        """Return the texts of all passages."""
        texts: list[str] = check_column(self.path, self._table.column("text")).to_pylist()
        count("decoded", texts)
        return texts

    def text_characters(self) -> int:
        """Return the number of characters of all passages together."""
        import pyarrow.compute

        total: int = pyarrow.compute.sum(pyarrow.compute.utf8_length(check_column(self.path, self._table.column("text")))).as_py()
        return total

    def rows(self, most: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the first `most` passages as dictionaries of all columns but the weight; scores have seven digits."""
        names = [name for name in self._table.schema.names if name != "weight"]
        for batch in self._table.select(names).slice(0, most).to_batches(max_chunksize=_ROWS):
            for column in batch.columns:
                check_column(self.path, column)
            for row in batch.to_pylist():
                yield row | {"score": float(f"{row['score']:.7g}")}

    def json_lines(self) -> Iterator[str]:
        """Yield a line with a JSON object for every passage."""
        return (json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows())

    def write_parquet(self, path: Path) -> None:
        """Write id, source and text of the passages as a Parquet file that `build_corpus` can read."""
        import pyarrow.parquet as pq

        table = self._table.select(["id", "source", "text"])
        for column in table.columns:
            check_column(self.path, column)
        with path.open("wb") as file:
            pq.write_table(table, file, compression="none", use_dictionary=["source"], row_group_size=_ROWS)

    def _array(self, name: str) -> npt.NDArray[Any]:
        chunks = [column_numbers(chunk) for chunk in self._table.column(name).chunks]
        return np.concatenate([np.empty(0, _NUMBERS[name]), *chunks])


def save_selection(folder: Path, corpus: Corpus, kept: Ranking, weight: FloatArray, *, retrievers: Sequence[str]) -> None:
    """Write selection.arrow. retrievers: names of a union's members.

    Raises:
        ArtifactError: the corpus is damaged.
    """
    import pyarrow as pa

    schema = _schema(union=len(retrievers) > 1)
    numbers = Selection(kept.position, kept.rank, kept.query, kept.score, weight)
    found, first = np.unique(corpus.source[kept.position], return_index=True)
    sources = found[np.argsort(first)]  # in order of first occurrence
    names = string_column(corpus.sources[number] for number in sources.tolist())
    index = np.empty(len(corpus.sources), np.int32)
    index[sources] = np.arange(len(sources), dtype=np.int32)

    def batches() -> Iterator[Any]:
        for start in range(0, len(numbers), _ROWS):
            chosen = slice(start, start + _ROWS)
            positions = numbers.position[chosen]
            columns = {name: number_column(getattr(numbers, name)[chosen]) for name in _NUMBERS}
            columns["id"] = _text_column(corpus, *corpus.encoded_ids(positions))
            columns["source"] = pa.DictionaryArray.from_arrays(number_column(index[corpus.source[positions]]), names)
            columns["text"] = _text_column(corpus, *corpus.gather(positions))
            if len(retrievers) > 1:
                retriever_of = number_column(kept.member[chosen].astype(np.int32))
                columns["retriever"] = pa.DictionaryArray.from_arrays(retriever_of, string_column(retrievers))
            corpus.release()
            yield pa.record_batch([columns[name] for name in schema.names], schema=schema)

    save_table(folder / SELECTION_FILE, schema, batches())


def _text_column(corpus: Corpus, text: npt.NDArray[np.uint8], offsets: IntArray) -> Any:
    import pyarrow as pa

    return check_column(corpus.path, pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(text)))


def _schema(*, union: bool) -> Any:
    import pyarrow as pa

    words = pa.dictionary(pa.int32(), pa.string())
    kinds = {name: pa.from_numpy_dtype(dtype) for name, dtype in _NUMBERS.items()}
    head = [(name, kinds[name]) for name in ("position", "rank", "score", "query", "weight")]
    columns = [("position", kinds["position"]), ("id", pa.large_string()), ("source", words), *head[1:]]
    return pa.schema([*columns, *([("retriever", words)] if union else []), ("text", pa.large_string())])


CODE_FORMAT: Final = 8  # increase when the same input gives other files
_PERCENTILES: Final = (0, 1, 10, 25, 50, 75, 90, 99, 100)


def select_documents(
    config: RetrieverConfig,
    corpus: Corpus,
    task: Task,
    *,
    out: Path,
    context: RetrievalContext,
    emit: Emit = silent,
) -> Selection:
    """Select documents for a task and publish them at `out`, unless an up-to-date selection is there. Deletes the files of a distributed
    search at the end.

    Raises:
        UsageError: a retriever has no index, encoder or bound, or the folder of a distributed search holds other files. DataError: nothing
        is selected, or too many queries failed. EnvironmentFault: a package is missing. ArtifactError: the index belongs to another corpus
        or is damaged.
    """
    check_bounded(config)
    if context.distribution is not None:
        require_only_searches(context.distribution.folder)
    retriever = build_retriever(config, context)
    key = {
        "code": CODE_FORMAT,
        "unicode": unicodedata.unidata_version,
        "config": config.model_dump(mode="json"),
        "corpus": corpus.fingerprint,
        "task": {split: value for split, value in task_fingerprint(task).items() if split != "labels"},
        "held_out_ids": hash_json([example.id for example in _held_out(task)]),  # dropped.jsonl has them
        **({} if config.near_duplicates is None else {"near_duplicates": DUPLICATES_FORMAT}),
        **retriever.key,
    }

    def write(folder: Path) -> None:
        kinds = " and ".join(member.kind for member in members_of(config))
        unlabelled = f" and {len(task.unlabelled):,} unlabelled ones" if task.unlabelled else ""
        queries = counted(len(task.train), "training text") if task.labels else counted(len(task.train), "query", "queries")
        emit(Event("start", KIND, f"retrieving with {kinds} for {queries}{unlabelled}"))
        writer = _Writer(config, corpus, task, folder, emit)
        writer.write(retriever.propose(corpus, task.queries, emit=emit, fills=writer.fills))

    stage(out, kind=KIND, key=key, write=write, emit=emit)
    if context.distribution is not None:
        remove_searches(context.distribution.folder)
    return read_selection(out)


def read_selection(path: Path) -> Selection:
    """Return the columns of numbers of a published selection.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    return SelectionTable.open(path).numbers()


def _held_out(task: Task) -> list[Example]:
    return [*task.dev, *task.test]


def rank_weights(rank: Int32Array, decay: float) -> FloatArray:
    """Return 1 / (rank + 1)^decay, scaled to a mean of 1, float32."""
    weights = (rank + 1.0) ** -decay
    return np.asarray(weights / weights.mean(), np.float32)


def _count_sources(corpus: Corpus, positions: IntArray) -> list[Counter[str]]:
    """Return the selected passages and words, and the passages in the corpus, by source, in order of first occurrence."""
    numbers, first, own, counts = np.unique(corpus.source[positions], return_index=True, return_inverse=True, return_counts=True)
    words = np.zeros(len(numbers), np.int64)
    np.add.at(words, own, corpus.words(positions))
    totals = np.bincount(corpus.source)[numbers]
    order = np.argsort(first)
    names = [corpus.sources[number] for number in numbers[order].tolist()]
    return [Counter(dict(zip(names, values[order].tolist(), strict=True))) for values in (counts, words, totals)]


class _Writer:
    """Filters rankings, and writes the folder and its report of the last one; used once."""

    def __init__(self, config: RetrieverConfig, corpus: Corpus, task: Task, folder: Path, emit: Emit) -> None:
        self._corpus, self._task, self._folder, self._emit = corpus, task, folder, emit
        self._config = config
        self._kinds = [member.kind for member in members_of(config)]
        self._dropped: Counter[str] = Counter()
        self._filtered: tuple[Ranking, list[Filtered]] | None = None

    def fills(self, ranking: Ranking) -> bool:
        """Return True if the documents of a ranking reach the bound after the filter."""
        return any(part.is_full for part in self._filter(ranking))

    def _filter(self, ranking: Ranking) -> list[Filtered]:
        """Return the parts of `filter_ranking`; those of the last ranking are kept."""
        if self._filtered is None or self._filtered[0] is not ranking:
            threshold = self._config.near_duplicates
            duplicates = None if threshold is None else NearDuplicates(threshold)
            parts = filter_ranking(ranking, self._corpus, _held_out(self._task), self._config, duplicates=duplicates)
            self._filtered = ranking, list(parts)
        return self._filtered[1]

    def write(self, proposal: Proposal) -> None:
        ranking = proposal.ranking
        if not len(ranking):
            raw = f"the {counted(len(self._corpus), 'passage')} of {self._corpus.file_names}"
            what = "training texts" if self._task.labels and not self._task.unlabelled else "queries"
            raise DataError(
                f"0 documents selected: none of the {proposal.queries.texts:,} {what} shares a word with {raw}; "
                "use a corpus in their language"
            )
        indices: list[IntArray] = []
        tokens = 0.0
        with (self._folder / "dropped.jsonl").open("w", encoding="utf-8") as dropped:
            for part in self._filter(ranking):
                indices.append(part.kept)
                tokens += part.tokens
                for item in part.dropped:
                    self._drop(item, ranking, dropped)
        chosen = np.concatenate(indices)
        if not len(chosen):
            raise DataError(
                f"0 documents selected: all {self._dropped.total()} hits contain text of the dev or test set; use a larger corpus"
            )
        kept = ranking.take(chosen)
        weight = rank_weights(kept.rank, self._config.rank_decay)
        save_selection(self._folder, self._corpus, kept, weight, retrievers=self._kinds)
        self._emit_summary(self._report(proposal, kept, tokens))

    def _drop(self, dropped: Dropped, ranking: Ranking, file: TextIO) -> None:
        position = int(ranking.position[dropped.index])
        source = self._corpus.sources[int(self._corpus.source[position])]
        where = {"position": position, "id": self._corpus.ids([position])[0], "source": source}
        file.write(json.dumps({**where, "reason": dropped.reason, **dropped.details}, ensure_ascii=False) + "\n")
        self._dropped[dropped.reason] += 1

    def _report(self, proposal: Proposal, kept: Ranking, tokens: float) -> dict[str, Any]:
        found, dropped = len(proposal.ranking) + proposal.capped, self._dropped.total()
        cut = found - proposal.capped - dropped - len(kept)
        passages, words, in_corpus = _count_sources(self._corpus, kept.position)
        named = largest_sources(passages)
        report = {
            "queries": asdict(proposal.queries),
            "documents": {"found": found, "dropped": dropped, "capped": proposal.capped, "cut": cut, "selected": len(kept)},
            "words": words.total(),
            "bytes": int(self._corpus.sizes(kept.position).sum()),
            "tokens": {"estimated": round(tokens), "characters_per_token": CHARACTERS_PER_TOKEN},
            "dropped": dict(self._dropped.most_common()),
            **named,
            "source_words": {source: words[source] for source in named["sources"]},
            "corpus_sources": {source: in_corpus[source] for source in named["sources"]},
            "corpus_documents": len(self._corpus),
            **_profile(kept),
            **compare_with_corpus(self._corpus, kept.position, self._task.queries),
        }
        if proposal.members:
            report["retrievers"] = [
                {
                    "kind": kind,
                    "queries": asdict(member.queries),
                    "found": len(member.ranking),
                    "selected": int((kept.member == number).sum()),
                }
                for number, (kind, member) in enumerate(zip(self._kinds, proposal.members, strict=True))
            ]
        write_json(self._folder / "report.json", report)
        return report

    def _emit_summary(self, report: dict[str, Any]) -> None:
        documents, queries = report["documents"], report["queries"]
        selected, found = counted(documents["selected"], "passage"), counted(queries["answered"], "query", "queries")
        summary = (
            f"{selected}, {report['words']:,} words, about {report['tokens']['estimated'] / 1e6:.2f}M tokens; "
            f"{documents['dropped']:,} dropped ({count_reasons(report['dropped']) or 'no overlap with dev or test'})"
        )
        if queries["texts"]:
            summary += f"; {found} with results ({queries['distinct']:,} distinct), {queries['empty']:,} empty, "
            summary += f"{queries['failed']:,} failed"
        reduction = report["task_likeness"]["kl_reduction"]
        summary += f"; KL(task || selection) {abs(reduction):.3f} {'below' if reduction >= 0 else 'above'} that of random text"
        figures = {name: report[name] for name in ("queries", "documents", "words", "tokens", "task_likeness")}
        self._emit(Event("done", KIND, summary, data=figures))
        if queries["empty"]:
            unlike = counted(queries["empty"], "training text shares no word", "training texts share no word")
            self._emit(Event("warning", KIND, f"{unlike} with the corpus and retrieved nothing"))


def _profile(kept: Ranking) -> dict[str, dict[str, float]]:
    def percentiles(values: np.ndarray[Any, Any]) -> dict[str, float]:
        return {f"p{share}": round(float(value), 4) for share, value in zip(_PERCENTILES, np.percentile(values, _PERCENTILES), strict=True)}

    return {"rank": percentiles(kept.rank), "score": percentiles(kept.score)}
