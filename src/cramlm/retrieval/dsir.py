"""DSIR: data selection by importance resampling (Xie, Santurkar, Ma, Liang 2023), as its released code computes it.

With p the share of every bucket of hashed n-grams (text/ngrams.py) among the training texts, q the same over the whole corpus, and c(x)
the counts of a passage x:

    w(x) = sum over buckets of c(x) * (ln(p + 1e-8) - ln(q + 1e-8))        k passages are sampled without replacement, in proportion to
                                                                          exp w: the k largest of w(x) + g, g from Gumbel(0, 1)

All passages are ranked by w + g, so that a smaller selection is the beginning of a larger one. Weights differ by hundreds, Gumbel noise by
a few: the sample is nearly the order of w. As w is a sum, it depends on the length: for a narrow task w is negative for most passages and
short ones win whatever their topic (figures in docs/concepts/retrieval.md). `normalise = "length"` scales w to the average length, unlike
the released code.

The hashed n-grams are stored per part of the corpus, for all corpora with the part and all tasks:

    <store>/ngrams/<key>/     buckets.bin: uint16, the n-grams of passage i are buckets[offsets[i]:offsets[i + 1]], words first, then pairs
                              offsets.npy: int64 (n + 1,); counts.npy: int64 (buckets,), n-grams of the part per bucket
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from cramlm.config.retriever import DsirConfig
from cramlm.data.corpus import Corpus
from cramlm.data.parts import Part
from cramlm.errors import DataError
from cramlm.io.threads import Workers
from cramlm.records import Emit, Event, IntArray
from cramlm.retrieval.ranking import STAGE, Fills, Proposal, of_parts, one_each
from cramlm.storage.arrays import map_array, read_array, save_array, separated
from cramlm.storage.artifacts import hash_json
from cramlm.storage.locks import damage_named
from cramlm.storage.stages import shared_stage
from cramlm.text.ngrams import BLOCK, Doubles, Ngrams, count, hash_block, hash_texts, log_probabilities


@dataclass(frozen=True, slots=True)
class DsirRetriever:
    """All passages of the corpus in sampled order; the score is the log importance weight."""

    config: DsirConfig
    store: Path
    seed: int
    threads: int

    @property
    def key(self) -> Mapping[str, Any]:
        return {"seed": self.seed}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit, fills: Fills | None = None) -> Proposal:
        buckets = self.config.buckets
        target = count(hash_texts(texts, buckets=buckets), buckets=buckets)
        if not target.any():
            raise DataError("0 n-grams in the training texts: they have no characters, and DSIR has no target distribution")
        parts = [part_ngrams(corpus, part, self.store, buckets=buckets, threads=self.threads, emit=emit) for part in corpus.parts]
        raw = np.sum([counts for _, counts in parts], axis=0)
        gain = log_probabilities(target) - log_probabilities(raw)
        weights = np.concatenate([ngrams.sums(gain) for ngrams, _ in parts])
        if self.config.normalise == "length":
            lengths = np.concatenate([np.diff(ngrams.offsets) for ngrams, _ in parts])
            weights *= lengths.mean() / np.maximum(lengths, 1)
        order = resample(weights, seed=self.seed)
        return Proposal(one_each(order, weights[order].astype(np.float32)))


def resample(log_weights: Doubles, *, seed: int) -> IntArray:
    """Return all indices in the order of sampling without replacement in proportion to exp(log_weights); ties by index."""
    noise = np.random.default_rng([seed, 0x44534952]).gumbel(size=len(log_weights))  # this purpose's own stream
    return np.argsort(-(log_weights + noise), kind="stable").astype(np.int64)


CODE_FORMAT: Final = 2  # increase when the same text gives other buckets

Item = TypeVar("Item")
Result = TypeVar("Result")


def part_ngrams(corpus: Corpus, part: Part, store: Path, *, buckets: int, threads: int, emit: Emit) -> tuple[Ngrams, IntArray]:
    """Return the n-grams of a part of the corpus, memory-mapped, and their counts per bucket; hash them unless they are in the store.

    Raises:
        ArtifactError: stored n-grams are damaged.
    """
    key = {"code": CODE_FORMAT, "unicode": unicodedata.unidata_version, "buckets": buckets, "content": part.content}

    def write(folder: Path) -> None:
        firsts = range(part.first, part.first + len(part), BLOCK)
        offsets, counts, size = np.zeros(len(part) + 1, np.int64), np.zeros(buckets, np.int64), 0

        def hash_from(first: int) -> Ngrams:
            return hash_block(separated(*corpus.gather(np.arange(first, min(first + BLOCK, part.first + len(part))))), buckets)

        with (folder / "buckets.bin").open("wb") as file:
            for first, block in zip(firsts, in_order(hash_from, firsts, threads=threads), strict=True):
                place, done = first - part.first, len(block.offsets) - 1
                offsets[place + 1 : place + 1 + done] = size + block.offsets[1:]
                counts += np.bincount(block.buckets, minlength=buckets)
                size += len(block.buckets)
                file.write(block.buckets.astype("<u2").tobytes())
                emit(Event("progress", STAGE, "hashing n-grams", done=first + done, total=len(corpus), unit="passages"))
        save_array(folder / "offsets.npy", offsets)
        save_array(folder / "counts.npy", counts)

    path = shared_stage(store / "ngrams" / hash_json(key)[:16], kind="ngrams", key=key, write=write, emit=of_parts(emit)).path
    with damage_named(path, "delete the folder and run again", what="damaged n-grams"):
        offsets = map_array(path / "offsets.npy")
        found = np.memmap(path / "buckets.bin", dtype="<u2", mode="r") if offsets[-1] else np.zeros(0, np.uint16)
        return Ngrams(found, offsets), read_array(path / "counts.npy")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], *, threads: int) -> Iterator[Result]:
    """Yield function(item) of every item in order, computed by threads; at most 2 * threads results wait."""
    with Workers(threads) as workers:
        waiting: deque[Callable[[], Result]] = deque()
        for item in items:
            waiting.append(workers.start(partial(function, item)))
            if len(waiting) > 2 * threads:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()
