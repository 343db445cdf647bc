"""The public index: a corpus and its BM25 index in one folder, written by `cramlm index`, read by `select` and `search`.

INDEX/catalog.json     the corpus and the index in this folder, and the parameters of BM25 that they are searched with
INDEX/texts.jsonl      texts that were passed from Python
INDEX/parts, corpora, segments, indexes      the content: INDEX is a store, which `fit --store INDEX` can use too
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np
from pydantic import ValidationError

from cramlm.config.run import CorpusConfig, explain_validation_error
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.errors import ArtifactError, DataError, UsageError, brief, counted, list_fault
from cramlm.io.executors import Executor
from cramlm.io.machine import available_cores
from cramlm.io.paths import at_home, looks_like_misspelt_path, looks_like_path, require_folder, require_paths
from cramlm.records import Diacritics, Emit, FloatArray, Int32Array, IntArray, silent
from cramlm.retrieval.bm25.analysis import PLAIN, Analyzer
from cramlm.retrieval.bm25.index import BM25, Bm25Index, build_index
from cramlm.retrieval.bm25.search import Norm, Scoring
from cramlm.retrieval.ranking import best_of_hits
from cramlm.storage.artifacts import CATALOG, MANIFEST, is_index_folder, is_published, publish_file, refuse_other_files
from cramlm.storage.locks import environment_faults, lock, lock_file, wait_while_locked

TEXTS: Final = "texts.jsonl"
_STAGES: Final = ("parts", "corpora", "segments", "indexes")
_Value = TypeVar("_Value")

Source: TypeAlias = str | Path | Iterable[str | Path] | Mapping[str, str]
"""What to index: files, folders or globs; or texts, with ids as a mapping."""


class IndexSettings(TypedDict, total=False):
    """Settings of `Index.build`; those of the corpus are explained at `CorpusConfig`, those of the analysis at `Analyzer`.

    k1, b, norm: BM25, as in `Bm25Config`; they can be changed later, for a search.
    """

    text_column: str
    id_column: str
    source_column: str
    passage_words: int
    duplicates: Literal["exact", "words", "none"]
    on_bad_row: Literal["fail", "skip"]
    k1: float
    b: float
    norm: Norm
    stop_words: str | Sequence[str]
    stemmer: str
    diacritics: Diacritics


@dataclass(frozen=True, eq=False)
class Hits:
    """The best documents of each query, best first: ids, scores and positions in the corpus, a list per query.

    A query has fewer than `top_k` hits if fewer documents share a term with it.
    """

    ids: list[list[str]]
    scores: list[FloatArray]
    positions: list[IntArray]
    _corpus: Corpus = field(repr=False)

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.ids)

    def texts(self) -> list[list[str]]:
        """Return the texts of the documents, a list per query."""
        return _of_each(self.positions, partial(map, self._corpus.text))


@dataclass(frozen=True, eq=False)
class UnionHits:
    """The documents of all queries together, by best rank, then position; arrays with an element per document.

    ranks: int32, best rank over all queries, from 0. queries: int32, number of the first query that gave it. scores: float32, of it.
    """

    ids: list[str]
    scores: FloatArray
    ranks: Int32Array
    queries: Int32Array
    positions: IntArray
    _corpus: Corpus = field(repr=False)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.ids)

    def texts(self) -> list[str]:
        """Return the texts of the documents."""
        return _of_each([self.positions], partial(map, self._corpus.text))[0]


@dataclass(frozen=True, slots=True)
class ExplainedHit:
    """A document retrieved by a query. terms: shared terms with what each adds to the score, largest first."""

    rank: int
    score: float
    position: int
    id: str
    source: str
    text: str
    terms: tuple[tuple[str, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Index:
    """A BM25 index with its documents, memory-mapped: safe to share between threads and processes.

    >>> index = cramlm.Index.build({"d1": "a red ship", "d2": "a green hill"}, out="index")
    >>> index.search(["red ships"], top_k=10).ids
    [['d1']]
    """

    path: Path
    corpus: Corpus
    bm25: Bm25Index
    scoring: Scoring

    @staticmethod
    def build(
        source: Source, out: str | Path, *, workers: int | None = None, emit: Emit = silent, **settings: Unpack[IndexSettings]
    ) -> Index:
        """Build an index in the folder `out`, unless it is up to date, and open it.

        source: one path, or a list of paths, of files, folders or globs (also URLs), as for `cramlm index`: documents over 300 words are
        cut into passages, with ids like d1#0, and repeated passages are dropped. Or texts: a list, an array or a column of a table, with
        ids "0", "1", ..., or a mapping from ids to texts; they stay whole, also repeated ones, and are copied to `out`. A list of strings
        is read as paths if all of them look like paths: they exist, are URLs, or are single words with a slash or the ending of a data
        file, also a misspelt one (`corpus.jsnl`). A mapping always holds texts. workers: processes; None = one per core.

        Raises:
            UsageError: a path is missing, a setting is invalid, the strings are partly paths, `source` is a table, or `out` holds other
            files. DataError: a bad row, or no text. EnvironmentFault: the disk cannot be written, or a package is missing.
        """
        folder = at_home(out)
        scoring = Scoring(settings.get("k1", BM25.k1), settings.get("b", BM25.b), settings.get("norm", BM25.norm))
        analyzer = Analyzer.of(settings.get("stop_words", "none"), settings.get("stemmer", "none"), settings.get("diacritics", "keep"))
        columns: dict[str, Any] = {name: value for name, value in settings.items() if name in CorpusConfig.model_fields}
        if unknown := sorted(set(settings) - set(IndexSettings.__annotations__)):
            raise UsageError(f"no setting {unknown[0]!r} of an index; it has {', '.join(IndexSettings.__annotations__)}")
        if not isinstance(source, str | Path | Mapping):
            source = _flat(source, "source", "a list of strings, or a mapping from ids to texts")
        if (texts := _texts_of(source)) is not None:
            if settings.get("on_bad_row") != "skip":
                _refuse_surrogates(texts)
            files: tuple[str, ...] = (str(folder / TEXTS),)
            columns = {"passage_words": 0, "duplicates": "none"} | columns
        else:
            files = (str(source),) if isinstance(source, str | Path) else tuple(map(str, source))
        try:
            config = CorpusConfig(files=files, **columns)
        except ValidationError as error:
            raise UsageError(explain_validation_error(error)) from error

        def build_files() -> Index:
            own = () if texts is None else (TEXTS,)
            return build_catalog(config, folder, scoring=scoring, analyzer=analyzer, workers=workers, emit=emit, unfinished=own)

        return build_files() if texts is None else _with_texts(folder, texts, build_files, emit=emit)

    @staticmethod
    def open(path: str | Path) -> Index:
        """Open the index in a folder.

        Raises:
            UsageError: there is no such folder. ArtifactError: it was not written by `cramlm index`, or is damaged, or of another version.
            EnvironmentFault: its stemmer is missing.
        """
        folder = at_home(path)
        build, own = f"build it with `cramlm index FILES --out {folder}`", "pass the output folder of `cramlm index`"
        require_folder(folder, remedy=own if folder.exists() else build)
        try:
            with environment_faults(folder):
                content = (folder / CATALOG).read_bytes() if (folder / CATALOG).is_file() else b""
            catalog = json.loads(content)
            corpus, index = folder / catalog["corpus"], folder / catalog["index"]
            scoring = Scoring(**catalog.get("scoring", {}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            remedy = build if (folder / CATALOG).is_file() else own
            raise ArtifactError(f"{folder}: not an index folder (no readable {CATALOG}); {remedy}") from error
        return Index(folder, Corpus.open(corpus), Bm25Index.open(index), scoring)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.corpus)

    def __repr__(self) -> str:
        k1, b, norm = self.scoring.k1, self.scoring.b, self.scoring.norm
        return f"Index({str(self.path)!r}, {counted(len(self), 'document')}, k1={k1:g}, b={b:g}, norm={norm!r})"

    def search(self, queries: str | Sequence[str], top_k: int = 10, *, scoring: Scoring | None = None, threads: int = 1) -> Hits:
        """Return the best `top_k` documents for every query by BM25. scoring: None = with the index's own k1, b and norm.

        Raises:
            UsageError: top_k or threads is below 1, or a query is too long.
        """
        _check_top_k(top_k)
        found = self.bm25.search(_list(queries), limit=top_k, scoring=scoring or self.scoring, threads=threads)
        positions = [position.copy() for position, _ in found]  # repeated queries share theirs
        return Hits(_of_each(positions, self.corpus.ids), [score.copy() for _, score in found], positions, self.corpus)

    def union(self, queries: str | Sequence[str], top_k: int = 10, *, scoring: Scoring | None = None, threads: int = 1) -> UnionHits:
        """Return the union of the best `top_k` documents of every query. Memory: 12 bytes per document of the corpus.

        Raises:
            UsageError: as `search`.
        """
        _check_top_k(top_k)
        compiled = self.bm25.compile(_list(queries))
        first_text = dict(zip(compiled.owner[::-1].tolist(), range(len(compiled.owner) - 1, -1, -1), strict=True))
        hits = self.bm25.search_distinct(compiled, limit=top_k, scoring=scoring or self.scoring, threads=threads)
        ranking = best_of_hits(len(self), ((first_text[number], positions, scores) for number, positions, scores in hits))
        (ids,) = _of_each([ranking.position], self.corpus.ids)
        return UnionHits(ids, ranking.score, ranking.rank, ranking.query, ranking.position, self.corpus)

    def explain(self, query: str, top_k: int = 10) -> list[ExplainedHit]:
        """Return the best `top_k` documents for a query with the terms that they share."""
        hits = self.search(query, top_k)
        explained = []
        for rank, (position, score) in enumerate(zip(hits.positions[0].tolist(), hits.scores[0].tolist(), strict=True)):
            document = self.corpus.document(position)
            terms = tuple(self.bm25.explain(query, position, scoring=self.scoring))
            explained.append(ExplainedHit(rank, score, position, document.id, document.source, document.text, terms))
        return explained


def build_catalog(
    config: CorpusConfig,
    folder: Path,
    *,
    scoring: Scoring = BM25,
    analyzer: Analyzer = PLAIN,
    workers: int | None = None,
    executor: Executor | None = None,
    emit: Emit = silent,
    unfinished: Iterable[str] = (),
) -> Index:
    """Read and index a corpus in `folder`, by `workers` processes (None = one per core) or `executor`; up-to-date results are reused.

    unfinished: files of the caller that may be in the folder before there is an index.

    Raises:
        UsageError: as `Index.build`.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"workers: {workers} processes; pass 1 or more, or None for one per core")
    _refuse_other_files(folder, *unfinished)
    corpus = build_corpus(config, folder, workers=workers, executor=executor, emit=emit)
    index = build_index(corpus, folder, analyzer=analyzer, workers=workers or available_cores(), executor=executor, emit=emit)
    catalog: dict[str, Any] = {"corpus": str(corpus.path.relative_to(folder)), "index": str(index.path.relative_to(folder))}
    if scoring != BM25:
        catalog["scoring"] = asdict(scoring)
    _publish_changed(folder / CATALOG, (json.dumps(catalog, indent=1) + "\n").encode())
    return Index(folder, corpus, index, scoring)


def _flat(values: Iterable[_Value], what: str, expected: str = "a list of strings") -> list[_Value]:
    """Return the elements of a list, an array, a column of a table or an iterator.

    Raises:
        UsageError: it is no list (`errors.list_fault`). what, expected: of the message.
    """
    if fault := list_fault(values, expected):
        raise UsageError(f"the {what} {fault}")
    return list(values)


def _texts_of(source: str | Path | Sequence[str | Path] | Mapping[str, str]) -> Mapping[str, str] | None:
    """Return the texts with their ids if `source` is not paths.

    Raises:
        UsageError: there is nothing, strings are partly paths, all look like paths and one is missing, or an id is empty.
    """
    if isinstance(source, Mapping):
        texts = dict(source)
    elif isinstance(source, Path):
        return None
    elif isinstance(source, str):
        require_paths([source], remedy="check the path; pass texts as a list, or as a mapping from ids to texts")
        return None
    else:
        paths = [isinstance(each, Path) or (isinstance(each, str) and looks_like_path(each)) for each in source]
        if source and all(path or looks_like_misspelt_path(str(each)) for each, path in zip(source, paths, strict=True)):
            strings = [each for each in source if isinstance(each, str)]
            require_paths(strings, remedy="check the path; texts that look like paths are passed as a mapping from ids to texts")
            return None
        if any(paths):
            text, path = source[paths.index(False)], source[paths.index(True)]
            raise UsageError(f"{brief(str(path))} is a path, {brief(str(text))} is a text; pass only paths, or a mapping from ids to texts")
        texts = {str(number): str(each) if isinstance(each, str) else each for number, each in enumerate(source)}  # type: ignore[misc]
    for name, text in texts.items():
        for what, value in (("id", name), ("text", text)):
            if not isinstance(value, str):
                kind = type(value).__name__
                raise UsageError(f"the {what} of text {brief(name)} is not a string but {kind}; pass strings, with strings as ids")
        if not name:
            raise UsageError(f"the id of text {brief(text)} is empty; pass a string that is not empty as its id")
    if not any(text.strip() for text in texts.values()):
        raise UsageError(f"{'all texts are blank' if texts else 'no texts to index'}; pass at least one")
    return texts


def _refuse_surrogates(texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        for what, value in (("id", name), ("text", text)):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"the {what} of text {brief(name)} has a lone surrogate, as character {error.start + 1}; remove it"
                ) from error


def _with_texts(folder: Path, texts: Mapping[str, str], build: Callable[[], Index], *, emit: Emit) -> Index:
    """Write texts as JSON lines, and return `build()`, while no other process that calls this replaces them.

    A file that has the texts is not written again: its time is part of what tells whether the index is up to date.
    """
    content = b"".join(_json_line({"id": name, "text": text}) for name, text in texts.items())
    path = folder / TEXTS

    def check() -> None:
        _refuse_other_files(folder, *([TEXTS] if _holds(path, content) else []))

    def save_and_build() -> Index:
        check()
        _publish_changed(path, content)
        return build()

    def build_alone() -> Index:
        with lock(path):
            return save_and_build()

    try:
        check()  # before the lock puts a file there
    except UsageError:
        if not lock_file(path).exists():  # otherwise perhaps the texts of another process
            raise
    if _holds(path, content) and not os.access(folder, os.W_OK):  # a read-only disk
        return save_and_build()
    return wait_while_locked(build_alone, stage="index", emit=emit)


def _json_line(row: dict[str, str]) -> bytes:
    """Return a row as a JSON line in UTF-8, of the size that the limit of a row is for. A lone surrogate is escaped: its row is rejected
    when it is read.
    """
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(row) + "\n").encode()


def _publish_changed(path: Path, content: bytes) -> None:
    """Write a file unless it has this content: an index that is up to date may be on a read-only disk."""
    if not _holds(path, content):
        publish_file(path, content)


def _holds(path: Path, content: bytes) -> bool:
    with environment_faults(path):
        return path.is_file() and path.read_bytes() == content


def _refuse_other_files(folder: Path, *unfinished: str) -> None:
    """Check that an index in this folder is beside no files of the user, and replaces none. unfinished: files of an interrupted call.

    Raises:
        UsageError: if the folder has other files, but neither the catalog of an index nor a published corpus or part.
    """
    with environment_faults(folder):
        if is_index_folder(folder):
            return
        own = [name for name in ("parts", "corpora") if any(is_published(file.parent) for file in (folder / name).glob(f"*/{MANIFEST}"))]
        begun = [name for name in _STAGES if (folder / name).is_dir() and not any((folder / name).glob("[!.]*"))]
    refuse_other_files(folder, own=own, what="index of cramlm", unfinished=(*begun, *unfinished))
    if os.path.lexists(folder / CATALOG):
        raise UsageError(f"{folder / CATALOG}: is not the catalog of an index, and would be replaced; rename it, or pass another folder")


def _check_top_k(top_k: int) -> None:
    if not hasattr(top_k, "__index__"):
        raise UsageError(f"top_k is {brief(top_k)}, not a whole number; pass the number of documents per query")
    if top_k < 1:
        raise UsageError(f"top_k is {top_k}, the number of documents per query; pass 1 or more")


def _list(queries: str | Sequence[str]) -> list[str]:
    if isinstance(queries, Mapping):
        raise UsageError("queries is a mapping, whose keys would be searched for; pass list(queries.values()), or list(queries)")
    listed = [queries] if isinstance(queries, str) else _flat(queries, "queries argument")
    for number, query in enumerate(listed):
        if not isinstance(query, str):
            raise UsageError(f"query {number} is not a string but {type(query).__name__}; convert it, or leave it out")
    return listed


def _of_each(positions: Sequence[IntArray], read: Callable[[list[int]], Iterable[str]]) -> list[list[str]]:
    """Return what `read` returns for the documents at these positions, a list per query; every document is read once."""
    distinct, inverse = np.unique(np.concatenate([np.empty(0, np.int64), *positions]), return_inverse=True)
    values = list(read(distinct.tolist()))
    flat = (values[number] for number in inverse.tolist())
    return [list(islice(flat, len(each))) for each in positions]
