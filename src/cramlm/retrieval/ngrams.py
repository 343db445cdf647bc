"""The hashed n-grams of a corpus, made once and kept.

    <store>/ngrams/<key>/     one per part of a corpus, shared by all corpora that hold the part, and by all tasks
        buckets.bin           uint16, the n-grams of passage i are buckets[offsets[i]:offsets[i + 1]]: words first, then pairs
        offsets.npy           int64 (n + 1,);  counts.npy: int64 (buckets,), n-grams of the part per bucket

What an n-gram is says text/ngrams.py. A task reads two bytes for each.
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from cramlm.data.corpus import Corpus
from cramlm.data.parts import Part
from cramlm.errors import ArtifactError
from cramlm.records import Emit, Event, IntArray, silent
from cramlm.retrieval.ranking import STAGE
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import hash_json, raise_if_refused, shared_stage
from cramlm.text.ngrams import BLOCK, BUCKETS, Ngrams, hash_block

CODE_FORMAT: Final = 2  # raise it when the same text would give other buckets

Item = TypeVar("Item")
Result = TypeVar("Result")


def corpus_ngrams(
    corpus: Corpus, store: Path, *, buckets: int = BUCKETS, threads: int = 1, emit: Emit = silent
) -> Iterator[tuple[Ngrams, IntArray]]:
    """(n-grams, their counts per bucket) of every part of the corpus in order, from the store or hashed now; memory-mapped.

    Raises:
        ArtifactError: if what the store holds is damaged.
    """
    for part in corpus.parts:
        yield _part_ngrams(corpus, part, store, buckets, threads, emit)


def _part_ngrams(corpus: Corpus, part: Part, store: Path, buckets: int, threads: int, emit: Emit) -> tuple[Ngrams, IntArray]:
    key = {"code": CODE_FORMAT, "unicode": unicodedata.unidata_version, "buckets": buckets, "content": part.content}

    def write(folder: Path) -> None:
        firsts = range(part.first, part.first + len(part), BLOCK)
        offsets, counts, size = np.zeros(len(part) + 1, np.int64), np.zeros(buckets, np.int64), 0

        def hash_from(first: int) -> Ngrams:
            text, places = corpus.gather(np.arange(first, min(first + BLOCK, part.first + len(part))))
            cut = text.tobytes()
            return hash_block([cut[start:end] for start, end in zip(places[:-1].tolist(), places[1:].tolist(), strict=True)], buckets)

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

    path = shared_stage(store / "ngrams" / hash_json(key)[:16], kind="ngrams", key=key, write=write, emit=_quiet_when_fresh(emit)).path
    try:
        offsets = np.load(path / "offsets.npy", mmap_mode="r", allow_pickle=False)
        found = np.memmap(path / "buckets.bin", dtype="<u2", mode="r") if offsets[-1] else np.zeros(0, np.uint16)
        counts = read_array(path / "counts.npy")
    except (ValueError, OSError) as error:
        raise_if_refused(error, path)
        raise ArtifactError(f"{path}: damaged n-grams ({error}); delete the folder and run again") from error
    return Ngrams(found, offsets), counts


def _quiet_when_fresh(emit: Emit) -> Emit:
    """Parts may be many: that one is there already is no news."""
    return lambda event: None if event.kind == "fresh" else emit(replace(event, stage=STAGE))


def in_order(function: Callable[[Item], Result], items: Iterable[Item], *, threads: int) -> Iterator[Result]:
    """function(item) of every item in order, several at a time; at most twice as many results as threads wait."""
    if threads == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
