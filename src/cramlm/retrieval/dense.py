"""Dense retrieval: the passages whose sentence embeddings have the largest cosine similarity to a training text's.

    passages ─► encoder, in blocks ─► <store>/embeddings/<key>/vectors.npy, one per part of the corpus ─┐
    training texts ─► encoder ─► vectors ──────────────────────► inner products, block by block ─► best top_k of each ─► union

The encoder is passed in (retrieval imports no torch): a function from texts to vectors of length 1, with a fingerprint of everything they
depend on. The search is exact. It holds the best `top_k` of `_QUERIES` texts and one block of vectors, and reads the vectors once per
`_QUERIES` texts; 421,140 passages of 384 numbers are 650 MB on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.config.retriever import DenseConfig
from cramlm.data.corpus import Corpus
from cramlm.data.parts import Part
from cramlm.records import Emit, Event, FloatArray, IntArray
from cramlm.retrieval.queries import query_texts
from cramlm.retrieval.ranking import STAGE, Fills, Proposal, QueryCounts, best_of_hits, cap_per_query, of_parts, search_deeper
from cramlm.storage.arrays import ArrayFile, map_array
from cramlm.storage.artifacts import hash_json
from cramlm.storage.locks import damage_named
from cramlm.storage.stages import shared_stage

CODE_FORMAT: Final = 1  # increase when the same encoder gives other vectors
_PASSAGES: Final = 4096  # vectors multiplied at a time
_QUERIES: Final = 1024
_ENCODED: Final = 512  # passages encoded at a time

PackedScores: TypeAlias = npt.NDArray[np.uint64]


class TextEncoder(Protocol):
    """Texts -> vectors."""

    @property
    def fingerprint(self) -> str:
        """Equal for encoders that give equal vectors."""
        ...

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return float32 (n, d), each row of length 1; n >= 1."""
        ...


OpenEncoder: TypeAlias = Callable[[DenseConfig], TextEncoder]


@dataclass(frozen=True, slots=True)
class DenseRetriever:
    """The union of the passages nearest to each training text: `top_k` of each, or as many as fill the selection. Score: the cosine."""

    config: DenseConfig
    encoder: TextEncoder
    store: Path

    @property
    def key(self) -> Mapping[str, Any]:
        return {"encoder": self.encoder.fingerprint}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit, fills: Fills | None = None) -> Proposal:
        config = self.config
        query_of = query_texts(texts, corpus, source=config.queries, max_words=config.query_words)
        first_text: dict[str, int] = {}
        for number, text in enumerate(query_of):
            if text.strip():
                first_text.setdefault(text, number)
        distinct = list(first_text)
        answered = sum(1 for text in query_of if text in first_text)
        counts = QueryCounts(len(texts), len(distinct), answered, len(texts) - answered, 0)
        if not distinct:
            return Proposal(best_of_hits(len(corpus), ()), counts)
        vectors = [embed_part(corpus, part, self.encoder, self.store, prefix=config.passage_prefix, emit=emit) for part in corpus.parts]
        parts = [(part.first, own) for part, own in zip(corpus.parts, vectors, strict=True)]
        queries = self.encoder.encode([config.query_prefix + text for text in distinct])
        numbers = list(first_text.values())

        def search(depth: int) -> Proposal:
            hits = ((numbers[query], *unpack(keys)) for query, keys in nearest(queries, parts, limit=depth, emit=emit))
            ranking, capped = cap_per_query(best_of_hits(len(corpus), hits), config.per_query)
            return Proposal(ranking, counts, capped)

        return search_deeper(search, config, corpus, fills, emit=emit)


def embed_part(corpus: Corpus, part: Part, encoder: TextEncoder, store: Path, *, prefix: str, emit: Emit) -> FloatArray:
    """Return the vectors of a part's passages, float32 (n, d), memory-mapped; encode them unless they are in the store.

    Raises:
        ArtifactError: stored vectors are damaged.
    """
    key = {"code": CODE_FORMAT, "content": part.content, "encoder": encoder.fingerprint, "prefix": prefix}

    def write(folder: Path) -> None:
        file: ArrayFile | None = None
        for start in range(0, len(part), _ENCODED):
            stop = min(start + _ENCODED, len(part))
            block = encoder.encode([prefix + corpus.text(part.first + number) for number in range(start, stop)])
            file = file or ArrayFile(folder / "vectors.npy", np.float32, row=block.shape[1:])
            file.append(block)
            emit(Event("progress", STAGE, "encoding", done=part.first + stop, total=len(corpus), unit="passages"))
        (file or ArrayFile(folder / "vectors.npy", np.float32, row=(0,))).close()

    path = shared_stage(store / "embeddings" / hash_json(key)[:16], kind="embeddings", key=key, write=write, emit=of_parts(emit)).path
    with damage_named(path, "delete the folder and run again", what="damaged vectors"):
        return map_array(path / "vectors.npy")


def nearest(queries: FloatArray, parts: Sequence[tuple[int, FloatArray]], *, limit: int, emit: Emit) -> Iterator[tuple[int, PackedScores]]:
    """Yield (query, packed scores of the `limit` passages with the largest inner products, best first; ties by position) in order.

    queries: float32 (q, d). parts: (position of the first passage, vectors (n, d)).
    """
    for start in range(0, len(queries), _QUERIES):
        block = queries[start : start + _QUERIES]
        best = np.zeros((len(block), 0), np.uint64)
        for first, vectors in parts:
            for start_of_block in range(0, len(vectors), _PASSAGES):
                scores = block @ vectors[start_of_block : start_of_block + _PASSAGES].T
                best = _largest(np.concatenate([best, pack(scores, first + start_of_block)], axis=1), limit)
        emit(Event("progress", STAGE, "queries compared", done=start + len(block), total=len(queries), unit="queries"))
        yield from enumerate(np.sort(best, axis=1)[:, ::-1], start)


def pack(scores: FloatArray, first: int) -> PackedScores:
    """Pack the scores of passages first, first + 1, ... into uint64 that sort by (score, then smaller position); same shape."""
    bits = np.ascontiguousarray(scores, np.float32).view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))  # integers in the order of the floats
    positions = np.arange(first, first + scores.shape[-1], dtype=np.uint64)
    return np.asarray((ordered.astype(np.uint64) << np.uint64(32)) | (np.uint64(0xFFFFFFFF) - positions), np.uint64)


def unpack(keys: PackedScores) -> tuple[IntArray, FloatArray]:
    """Return (positions, scores) of packed scores."""
    ordered = (keys >> np.uint64(32)).astype(np.uint32)
    bits = np.where(ordered >> 31, ordered & np.uint32((1 << 31) - 1), ~ordered)
    return (np.uint64(0xFFFFFFFF) - (keys & np.uint64(0xFFFFFFFF))).astype(np.int64), bits.view(np.float32)


def _largest(keys: PackedScores, limit: int) -> PackedScores:
    return keys if keys.shape[1] <= limit else np.partition(keys, keys.shape[1] - limit, axis=1)[:, -limit:]
