"""Texts as hashed n-grams: the features of DSIR, and the measure of how near a slice is to the task.

    text ─► NFC, lower case ─► words (runs of letters, digits, marks; runs of other characters) ─► words and pairs of neighbours
      ─► SHA-256 modulo 10,000 ─► uint16

    <store>/ngrams/<key>/     one per part of a corpus, shared by all corpora that hold the part, and by all tasks
        buckets.bin           uint16, the n-grams of passage i are buckets[offsets[i]:offsets[i + 1]]: words first, then pairs
        offsets.npy           int64 (n + 1,);  counts.npy: int64 (buckets,), n-grams of the part per bucket

Tokens and buckets are those of the released DSIR code (nltk's WordPunctTokenizer on lower case, `sha256 mod 10000`), except where its
tokenizer breaks words: a combining mark belongs to its word (Yoruba, Hindi), and in scripts without spaces every character is a word.
About 17,000 passages of 190 words per second on one core, once per corpus; a task then reads two bytes per n-gram.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cramlm.arrays import read_array, save_array
from cramlm.artifacts import hash_json, raise_if_refused, stage
from cramlm.data.corpus import Corpus
from cramlm.data.parts import Part
from cramlm.data.words import SPACELESS
from cramlm.errors import ArtifactError
from cramlm.records import Emit, Event, IntArray, silent
from cramlm.retrieval import ngram_kernels
from cramlm.retrieval.ranking import STAGE

CODE_FORMAT: Final = 1  # raise it when the same text would give other buckets
BUCKETS: Final = 10_000
SMOOTHING: Final = 1e-8  # added to every probability, as in the released code
_BLOCK: Final = 2048  # texts hashed at a time

Doubles: TypeAlias = npt.NDArray[np.float64]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Token(NamedTuple):
    """A word (with at least one letter, digit or mark), or a run of other characters that are not space; `space` is what follows it."""

    text: str
    is_word: bool
    space: str


@dataclass(frozen=True, slots=True)
class Ngrams:
    """Buckets of the n-grams of many texts: text i has buckets[offsets[i]:offsets[i + 1]]. buckets: uint16. offsets: int64 (n + 1,)."""

    buckets: npt.NDArray[np.uint16]
    offsets: IntArray

    def sums(self, values: Doubles) -> Doubles:
        """For every text the sum of a value per n-gram; values: float64 (buckets,)."""
        return np.asarray(ngram_kernels.sum_by_text(self.buckets, self.offsets, values))


def hash_texts(texts: Sequence[str], *, buckets: int = BUCKETS) -> Ngrams:
    """The n-grams of texts in memory."""
    blocks = [_hash_block([text.encode() for text in texts[first : first + _BLOCK]], buckets) for first in range(0, len(texts), _BLOCK)]
    ends = np.cumsum([0, *(len(block.buckets) for block in blocks)])
    offsets = [block.offsets[1:] + end for block, end in zip(blocks, ends, strict=False)]
    return Ngrams(np.concatenate([np.zeros(0, np.uint16), *(block.buckets for block in blocks)]), np.concatenate([[0], *offsets]))


def count(ngrams: Ngrams, *, buckets: int = BUCKETS) -> IntArray:
    """How many n-grams fall into each bucket, int64 (buckets,)."""
    return np.bincount(ngrams.buckets, minlength=buckets)


def log_probabilities(counts: IntArray) -> Doubles:
    """ln(share of each bucket + 1e-8), float64; no n-gram at all gives ln(1e-8) everywhere."""
    return np.asarray(np.log(counts / max(counts.sum(), 1) + SMOOTHING))


def divergence(target: IntArray, other: IntArray) -> float:
    """KL(target || other) of two counts over the same buckets, in nats, with both smoothed: how badly `other` stands in for `target`."""
    shares = target / max(target.sum(), 1)
    return float(shares @ (log_probabilities(target) - log_probabilities(other)))


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
    key = {"code": CODE_FORMAT, "buckets": buckets, "content": part.content}

    def write(folder: Path) -> None:
        firsts = range(part.first, part.first + len(part), _BLOCK)
        offsets, counts, size = np.zeros(len(part) + 1, np.int64), np.zeros(buckets, np.int64), 0

        def hash_from(first: int) -> Ngrams:
            text, places = corpus.gather(np.arange(first, min(first + _BLOCK, part.first + len(part))))
            cut = text.tobytes()
            return _hash_block([cut[start:end] for start, end in zip(places[:-1].tolist(), places[1:].tolist(), strict=True)], buckets)

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

    path = stage(store / "ngrams" / hash_json(key)[:16], kind="ngrams", key=key, write=write, emit=_quiet_when_fresh(emit)).path
    try:
        offsets = np.load(path / "offsets.npy", mmap_mode="r", allow_pickle=False)
        found = np.memmap(path / "buckets.bin", dtype="<u2", mode="r") if offsets[-1] else np.zeros(0, np.uint16)
        counts = read_array(path / "counts.npy")
    except (ValueError, OSError) as error:
        raise_if_refused(error, path)
        raise ArtifactError(f"{path}: damaged n-grams ({error}); delete the folder and run again") from error
    return Ngrams(found, offsets), counts


def cut_into_tokens(text: str) -> list[Token]:
    """The tokens of a text in NFC, in order and in their own case."""
    data = (text if text.isascii() else unicodedata.normalize("NFC", text)).encode()
    classes, starts, ends = _character_classes(), np.empty(len(data), np.int64), np.empty(len(data), np.int64)
    count = ngram_kernels.find_tokens(np.frombuffer(data, np.uint8), 0, len(data), classes, starts, ends)
    places = zip(starts[:count].tolist(), ends[:count].tolist(), [*starts[1:count].tolist(), len(data)], strict=True) if count else ()
    tokens = [(data[start:end].decode(), data[end:following].decode()) for start, end, following in places]
    return [Token(token, classes[ord(token[0])] != ngram_kernels.OTHER and token.strip("_") != "", space) for token, space in tokens]


def _quiet_when_fresh(emit: Emit) -> Emit:
    """Parts may be many: that one is there already is no news."""
    return lambda event: None if event.kind == "fresh" else emit(replace(event, stage=STAGE))


def _hash_block(texts: Sequence[bytes], buckets: int) -> Ngrams:
    lowered = [_lower(text) for text in texts]
    offsets = np.cumsum([0, *map(len, lowered)], dtype=np.int64)
    text = np.frombuffer(b"".join(lowered), np.uint8)
    found, found_offsets = np.empty(2 * len(text), np.uint16), np.zeros(len(offsets), np.int64)
    size = ngram_kernels.hash_ngrams(text, offsets, _character_classes(), buckets, found, found_offsets)
    return Ngrams(found[:size].copy(), found_offsets)


def _lower(text: bytes) -> bytes:
    return text.lower() if text.isascii() else unicodedata.normalize("NFC", text.decode()).lower().encode()


@functools.cache
def _character_classes() -> npt.NDArray[np.uint8]:
    """The class of every character, uint8 (0x110000,), as `ngram_kernels` numbers them."""
    characters = [chr(code) for code in range(0x20000)]  # what lies beyond is without spaces, or selects variants of what precedes it
    classes = np.full(0x110000, ngram_kernels.OTHER, np.uint8)
    words = [character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M" for character in characters]
    classes[: len(characters)][words] = ngram_kernels.WORD
    classes[: len(characters)][[character.isspace() for character in characters]] = ngram_kernels.SPACE
    classes[0xE0100:0xE01F0] = ngram_kernels.WORD
    for first, last in re.findall("(.)(?:-(.))?", SPACELESS, re.DOTALL):
        classes[ord(first) : ord(last or first) + 1] = ngram_kernels.ALONE
    return classes


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
