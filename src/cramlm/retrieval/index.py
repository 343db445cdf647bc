"""The index of a corpus: built once, searched by batches of queries.

    corpus.buffer ─► a block of 4,096 passages tokenised ─► rows (term, frequency) ─► postings by (term, passage) ─► appended to files

Building holds the vocabulary and one block in memory, whatever the size of the corpus. The block size is part of the format; scores and
results do not depend on it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.artifacts import hash_json, stage
from cramlm.data.corpus import Corpus
from cramlm.errors import ArtifactError
from cramlm.records import Emit, Event, FloatArray, IntArray, silent
from cramlm.retrieval import bm25, index_kernels
from cramlm.retrieval.analysis import ANALYZER, Vocabulary
from cramlm.retrieval.index_kernels import BLOCK, MANY_IN_ROW
from cramlm.retrieval.postings import APPENDED, KIND, STATISTICS, TYPES, ArrayFile, Postings

CODE_FORMAT: Final = 1  # raise it when the same corpus would give another folder
K1: Final = 1.2
B: Final = 0.75
_TELL_SECONDS = 0.2

Status: TypeAlias = Literal["answered", "empty", "failed"]


@dataclass(frozen=True, slots=True)
class Hits:
    """What a batch of queries found. Query q's are position[offsets[q]:offsets[q + 1]], by (score descending, position ascending).

    offsets: int64 (Q + 1,). position: int64, place in the corpus. score: float32, > 0. status: "empty" where a query has no term that the
    index knows.
    """

    offsets: IntArray
    position: IntArray
    score: FloatArray
    status: list[Status]


class Index:
    """An opened index. Cheap to open, safe to share between threads and processes (it is never written)."""

    def __init__(self, postings: Postings) -> None:
        self.postings = postings
        self.path = postings.path
        self.fingerprint = postings.fingerprint
        self.statistics = postings.statistics

    @staticmethod
    def open(path: Path) -> Index:
        """Raises ArtifactError if the folder is damaged, of another format or by another analyzer."""
        return Index(Postings.open(path))

    @property
    def documents(self) -> int:
        return self.postings.documents

    @property
    def corpus_fingerprint(self) -> str:
        return str(self.statistics["corpus"])

    def check_corpus(self, corpus: Corpus) -> None:
        """Raises ArtifactError if this index was built over another corpus."""
        if self.corpus_fingerprint != corpus.fingerprint or self.documents != len(corpus):
            raise ArtifactError(
                f"{self.path}: is the index of corpus {self.corpus_fingerprint[:16]}, not of {corpus.path} ({corpus.fingerprint[:16]}); "
                "build the index again"
            )

    def search(self, queries: Sequence[str], *, limit: int, k1: float = K1, b: float = B, threads: int = 1, emit: Emit = silent) -> Hits:
        """The `limit` best documents for every query by BM25, as Lucene scores it (see bm25.py); repeated queries cost nothing."""
        compiled = self.compile(queries)
        counts = np.zeros(len(compiled) + 1, np.int64)
        positions: list[IntArray] = [np.empty(0, np.int64)]
        scores: list[FloatArray] = [np.empty(0, np.float32)]
        for number, position, score in self.search_distinct(compiled, limit=limit, k1=k1, b=b, threads=threads, emit=emit):
            counts[number] = len(position)
            positions.append(position)
            scores.append(score)
        starts = np.concatenate(([0], np.cumsum(counts)))
        owner = compiled.owner  # -1 (no known term) stands for the last count, which is 0
        offsets = np.concatenate(([0], np.cumsum(counts[owner])))
        place = np.arange(offsets[-1]) + np.repeat(starts[:-1][owner] - offsets[:-1], counts[owner])
        status: list[Status] = ["empty" if number < 0 else "answered" for number in owner.tolist()]
        return Hits(offsets, np.concatenate(positions)[place], np.concatenate(scores)[place], status)

    def compile(self, texts: Sequence[str]) -> bm25.Queries:
        """Texts as this index sees them; texts with equal terms are one query."""
        return bm25.compile_queries(self.postings, texts)

    def search_distinct(
        self, queries: bm25.Queries, *, limit: int, k1: float = K1, b: float = B, threads: int = 1, emit: Emit = silent
    ) -> Iterator[tuple[int, IntArray, FloatArray]]:
        """(number of the distinct query, positions, scores), best first, in the order of the queries; memory is bounded."""
        for number, keys in bm25.search(self.postings, queries, limit=limit, k1=k1, b=b, threads=threads, emit=emit):
            yield number, *bm25.unpack(keys)

    def explain(self, query: str, position: int, *, k1: float = K1, b: float = B) -> list[tuple[str, float]]:
        """The terms that a query shares with a document and what each adds to the score, heaviest first."""
        postings = self.postings
        compiled = bm25.compile_queries(postings, [query])
        weights = bm25.term_weights(postings, compiled)
        norm = float(bm25.norms(postings, k1, b)[position])
        parts = []
        for term, weight in zip(compiled.term.tolist(), weights.tolist(), strict=True):
            if frequency := int(index_kernels.frequency_in_row(term, position, postings.rows)):
                parts.append((postings.term(term), weight * (frequency / (frequency + norm))))
        return sorted(parts, key=lambda part: (-part[1], part[0]))


def build_index(corpus: Corpus, store: Path, *, emit: Emit = silent) -> Index:
    """The index of this corpus: the one in the store if there is one, else built now.

    Raises:
        ArtifactError: if the one that is there is damaged. EnvironmentFault: if the disk refuses.
    """
    key = {"code": CODE_FORMAT, "analyzer": ANALYZER, "corpus": corpus.fingerprint}
    target = store / "indexes" / hash_json(key)[:16]

    def write(folder: Path) -> None:
        _Builder(corpus, folder, emit).build()

    return Index.open(stage(target, kind=KIND, key=key, write=write, emit=emit).path)


class _Builder:
    """Writes one index folder; used once."""

    def __init__(self, corpus: Corpus, folder: Path, emit: Emit) -> None:
        self._corpus, self._folder, self._emit = corpus, folder, emit
        self._vocabulary = Vocabulary()
        self._document_frequencies = np.zeros(0, np.int32)
        self._counts = np.zeros(0, np.int32)  # per term; 0 between blocks
        self._seen = np.zeros(0, np.int64)  # per term; -1 between blocks
        self._postings = self._tokens = self._dictionary = 0

    def build(self) -> None:
        documents = len(self._corpus)
        self._emit(Event("start", KIND, f"indexing {documents:,} passages", total=documents, unit="passages"))
        started = told = time.monotonic()
        assert documents < 1 << 32, "results pack a position into 32 bits"
        files = {name: ArrayFile(self._folder / f"{name}.npy", TYPES[name]) for name in APPENDED}
        files["row_offsets"].append(np.zeros(1, np.int64))
        files["block_offsets"].append(np.zeros(1, np.int64))
        for first in range(0, documents, BLOCK):
            last = min(first + BLOCK, documents)
            self._add_block(first, last, files)
            if (now := time.monotonic()) - told >= _TELL_SECONDS:
                told = now
                self._emit(Event("progress", KIND, f"{len(self._vocabulary):,} terms", done=last, total=documents, unit="passages"))
        for file in files.values():
            file.close()
        self._save_terms()
        statistics = {
            "documents": documents,
            "terms": len(self._vocabulary),
            "postings": self._postings,
            "tokens": self._tokens,
            "analyzer": ANALYZER,
            "corpus": self._corpus.fingerprint,
        }
        (self._folder / STATISTICS).write_text(json.dumps(statistics, indent=1) + "\n", "utf-8")
        rate = documents / max(time.monotonic() - started, 1e-9)
        summary = f"{documents:,} passages, {len(self._vocabulary):,} terms, {self._postings:,} postings, {rate:,.0f} passages/s"
        self._emit(Event("done", KIND, summary, done=documents, total=documents, unit="passages", data=statistics))

    def _add_block(self, first: int, last: int, files: dict[str, ArrayFile]) -> None:
        offsets = np.asarray(self._corpus.offsets[first : last + 1])
        text = np.asarray(self._corpus.buffer[offsets[0] : offsets[-1]])
        tokens, starts = self._vocabulary.tokenise(text, offsets - offsets[0])
        self._grow()
        row_terms, row_frequencies = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.int32)
        row_offsets = np.zeros(last - first + 1, np.int64)
        size = index_kernels.count_rows(tokens, starts, self._seen, row_terms, row_frequencies, row_offsets)
        row_terms, row_frequencies = row_terms[:size], row_frequencies[:size]
        assert size < 1 << 32, "block_starts are uint32"
        terms = np.empty(size, np.int32)
        terms = np.sort(terms[: index_kernels.collect_terms(row_terms, self._counts, terms)])
        self._document_frequencies[terms] += self._counts[terms]
        term_starts, postings = np.empty(len(terms), np.uint32), np.empty(size, np.uint16)
        sorted_terms, sorted_frequencies = np.empty(size, np.int32), np.empty(size, np.int32)
        index_kernels.invert(
            row_offsets, row_terms, row_frequencies, terms, self._counts, term_starts, postings, sorted_terms, sorted_frequencies
        )
        large = np.flatnonzero(sorted_frequencies >= MANY_IN_ROW)
        self._dictionary += len(terms)
        files["row_offsets"].append(self._postings + row_offsets[1:])
        files["row_terms"].append(sorted_terms)
        files["row_frequencies"].append(np.minimum(sorted_frequencies, MANY_IN_ROW).astype(np.uint8))
        files["large_places"].append(self._postings + large)
        files["large_frequencies"].append(sorted_frequencies[large].astype(np.int64))
        files["block_offsets"].append(np.array([self._dictionary], np.int64))
        files["block_terms"].append(terms)
        files["block_starts"].append(term_starts)
        files["postings"].append(postings)
        files["lengths"].append(np.diff(starts).astype(np.int32))
        self._postings += size
        self._tokens += len(tokens)

    def _grow(self) -> None:
        if (missing := len(self._vocabulary) - len(self._counts)) > 0:
            extra = missing + len(self._counts) // 2
            self._counts = np.concatenate([self._counts, np.zeros(extra, np.int32)])
            self._seen = np.concatenate([self._seen, np.full(extra, -1, np.int64)])
            self._document_frequencies = np.concatenate([self._document_frequencies, np.zeros(extra, np.int32)])

    def _save_terms(self) -> None:
        vocabulary = self._vocabulary
        keys = vocabulary.keys()
        order = np.argsort(keys, kind="stable")
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "document_frequencies": self._document_frequencies[: len(vocabulary)],
            "term_offsets": vocabulary.term_offsets,
            "term_bytes": vocabulary.term_bytes,
            "term_keys": keys[order],
            "term_ids": order.astype(np.int32),
        }
        for name, array in arrays.items():
            np.save(self._folder / f"{name}.npy", array, allow_pickle=False)
