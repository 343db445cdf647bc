"""A synthetic corpus of any size for benchmarks, deterministic, in files that `cramlm` reads.

    python benchmarks/synthetic.py --data ../shared/data --passages 1000000 --out runs/synthetic-1m
    python benchmarks/synthetic.py --no-data --passages 100000 --out runs/synthetic-100k

Two kinds. *bootstrap*: passages of 40 to 276 words (158 on average), each made of runs of 20 to 44 consecutive words from one neighbourhood
of a real corpus, so that a passage has one subject. A real corpus has new words at any size, a bootstrapped one would not.
So every word that occurs at most 10 times in the source is replaced by a pseudo-word sampled from an unbounded Zipf law, whose exponent is
the inverse of the source's Heaps exponent and whose offset gives as many different words as were replaced. `corpus.json` beside the files
has both. (Fitted on 421,140 real passages: exponent 0.547; different terms after 71 million: 515,000 real, 524,000 synthetic; exponent 0.50
from 100 to 400 million; 47 and 50 % of them occur once.) *invented*: all words are sampled from such a law, for machines without the data.

Passage j is a pure function of (settings, j), made from hashes. `--order topics` writes passages in the order of j, so that neighbours come
from one source, as in a corpus of several collections; `--order shuffled` writes the same passages in random order.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from cramlm.retrieval.bm25.analysis import Vocabulary

Order: TypeAlias = Literal["topics", "shuffled"]
Integers: TypeAlias = npt.NDArray[np.int64]
Hashes: TypeAlias = npt.NDArray[np.uint64]

FORMAT: Final = 1  # increase it when equal settings give other passages
FILE_PASSAGES: Final = 100_000
BATCH: Final = 8192
FEWEST_WORDS, MOST_WORDS = 40, 276
RUN_WORDS: Final = 30
RARE: Final = 10
NEIGHBOURHOOD: Final = 1024  # passages of the source
SLOTS: Final = 4096  # random numbers that a passage may use for one purpose
HEAPS_ENGLISH: Final = 0.6  # for invented text; `corpus.json` of a bootstrapped corpus has the real one
TOPICS: Final = 64
COMMON: Final = 300  # invented words that belong to no topic


class Source(Protocol):
    """Makes passages. `settings` identify them; `describe` adds what was measured."""

    @property
    def settings(self) -> dict[str, Any]: ...

    def describe(self) -> dict[str, Any]: ...

    def passages(self, numbers: Integers, total: int) -> tuple[list[bytes], list[str]]:
        """Return the texts (UTF-8, escaped for JSON) of passages `numbers` out of `total`, and the name of the source of each."""
        ...


def write_corpus(source: Source, passages: int, out: Path, *, order: Order = "shuffled", level: int = 1) -> list[Path]:
    """Write files of 100,000 passages to `out`, unless it has files of the same settings. Memory is bounded."""
    settings = {"format": FORMAT, "passages": passages, "order": order, **source.settings}
    note = out / "corpus.json"
    files = [out / f"synthetic-{number:04d}.jsonl.zst" for number in range(-(-passages // FILE_PASSAGES))]
    if note.is_file() and json.loads(note.read_bytes())["settings"] == settings:
        return files
    out.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    numbers = np.arange(passages) if order == "topics" else np.random.default_rng(source.settings["seed"]).permutation(passages)
    began = time.process_time()
    for path, first in zip(files, range(0, passages, FILE_PASSAGES), strict=True):
        with path.open("wb") as file, zstandard.ZstdCompressor(level=level).stream_writer(file) as writer:
            for part in _batches(numbers[first : first + FILE_PASSAGES]):
                writer.write(b"".join(_lines(*source.passages(part, passages), part)))
    seconds = time.process_time() - began
    note.write_text(json.dumps({"settings": settings, **source.describe(), "cpu_seconds": round(seconds, 2)}, indent=1) + "\n", "utf-8")
    return files


def _batches(numbers: Integers) -> Iterator[Integers]:
    return (numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH))


def _lines(texts: list[bytes], sources: list[str], numbers: Integers) -> Iterator[bytes]:
    for text, source, number in zip(texts, sources, numbers.tolist(), strict=True):
        yield b'{"id":"s%d","source":"%b","text":"%b"}\n' % (number, source.encode(), text)


class Bootstrap:
    """Passages from the words of a real corpus (JSON lines, zstd), which is read before the first passage is made."""

    def __init__(self, files: list[Path], *, seed: int = 1, most: int | None = None) -> None:
        self._seed, self._files, self._most = seed, files, most

    @property
    def settings(self) -> dict[str, Any]:
        files = [[path.name, path.stat().st_size] for path in self._files]
        return {"kind": "bootstrap", "seed": self._seed, "source": files, "source_passages": self._most}

    @functools.cached_property
    def _real(self) -> RealText:
        return RealText.read(self._files, self._most)

    def describe(self) -> dict[str, Any]:
        real = self._real
        return {
            "source_words": len(real.word) - 1,
            "heaps_exponent": round(real.heaps, 4),
            "zipf_exponent_of_new_words": round(1 / real.heaps, 4),
            "zipf_offset_of_new_words": round(real.new_words.offset),
            "replaced_share_of_words": round(len(real.rare) / (len(real.word) - 1), 5),
            "replaced_types": real.rare_types,
        }

    def passages(self, numbers: Integers, total: int) -> tuple[list[bytes], list[str]]:
        """See `Source`."""
        real, most = self._real, len(self._real.order) - 1
        words = _lengths(self._seed, numbers)
        runs = np.maximum(1, np.rint(words / RUN_WORDS).astype(np.int64))
        owner = np.repeat(np.arange(len(numbers)), runs)
        number, slot = numbers[owner], _counting(runs)
        size = words[owner] * (slot + 1) // runs[owner] - words[owner] * slot // runs[owner]
        centre = np.minimum((numbers * (most + 1) + most // 2) // total, most)
        near = np.rint((uniform(self._seed, 1, number, slot) - 0.5) * min(NEIGHBOURHOOD, most)).astype(np.int64)
        passage = real.order[np.clip(centre[owner] + near, 0, most)]
        choices = np.maximum(1, real.first_word[passage + 1] - real.first_word[passage] - size + 1)
        first = real.first_word[passage] + (uniform(self._seed, 2, number, slot) * choices).astype(np.int64)
        first = np.minimum(first, len(real.word) - 1 - size)
        texts = self._assemble(number, slot, first, first + size, runs)
        return texts, [real.names[passage] for passage in real.order[centre].tolist()]

    def _assemble(self, number: Integers, slot: Integers, first: Integers, last: Integers, runs: Integers) -> list[bytes]:
        """Return passages of runs[p] runs each; run i has words first[i]..last[i] of the source. Rare words are replaced."""
        real = self._real
        low = np.searchsorted(real.rare, first)
        rare = np.searchsorted(real.rare, last) - low
        run, nth = np.repeat(np.arange(len(first)), rare), _counting(rare)
        words = real.rare[low[run] + nth]
        pseudo_words = spell(real.new_words.sample(uniform(self._seed, 3, number[run], slot[run] * 64 + nth)), prefix=b"zq")
        # A run with r rare words is r + 1 pieces of text, each but the last followed by a pseudo-word.
        starts = np.cumsum(rare + 1) - (rare + 1)
        begin, end = np.empty((2, len(first) + len(run)), np.int64)
        begin[starts], end[starts + rare] = real.word[first], real.word[last]
        before = starts[run] + nth
        begin[before + 1], end[before] = real.word[words + 1], real.word[words]
        pieces = [real.text[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        for piece, word in zip(before.tolist(), pseudo_words.tobytes().translate(None, b"\0").split(b" ")[:-1], strict=True):
            pieces[piece] += word + b" "
        ends = np.concatenate((starts, [len(pieces)]))[np.cumsum([0, *runs])].tolist()
        return [b"".join(pieces[a:b])[:-1] for a, b in itertools.pairwise(ends)]


@dataclass(frozen=True)
class RealText:
    """The words of a source and the growth of its vocabulary.

    text: words separated by single spaces, escaped as in JSON. word: uint32 (W + 1,), its starts in `text`. first_word: (M + 1,)
    of each passage. names: (M,) its source. order: passages sorted by source and id. rare: ascending numbers of the words that are a single
    term with at most `RARE` occurrences; rare_types: number of such terms. heaps: slope of log(different terms) over log(terms) by least
    squares over the last nine tenths, in the order of the files. new_words: the law of the pseudo-words that replace the rare words.
    """

    text: bytes
    word: npt.NDArray[np.uint32]
    first_word: Integers
    names: list[str]
    order: Integers
    rare: Integers
    rare_types: int
    heaps: float
    new_words: ZipfLaw

    @staticmethod
    def read(files: list[Path], most: int | None) -> RealText:
        texts: list[bytes] = []
        names: list[str] = []
        ids: list[str] = []
        for row in itertools.islice(_rows(files), most):
            texts.append(json.dumps(" ".join(row["text"].split()), ensure_ascii=False)[1:-1].encode())
            names.append(row["source"])
            ids.append(row["id"])
        first_word = np.cumsum([0, *(text.count(b" ") + 1 for text in texts)])
        text = b" ".join(texts) + b" "
        assert len(text) < 1 << 32, "positions in the text are uint32"
        word = np.zeros(int(first_word[-1]) + 1, np.uint32)
        size, filled = 1 << 24, 1
        for start in range(0, len(text), size):
            spaces = np.flatnonzero(np.frombuffer(text, np.uint8, min(size, len(text) - start), start) == ord(" "))
            word[filled : filled + len(spaces)] = spaces + start + 1
            filled += len(spaces)
        order = np.array(sorted(range(len(ids)), key=lambda passage: (names[passage], ids[passage])))
        heaps, rare, rare_types = _vocabulary(text, word, first_word)
        law = ZipfLaw.of_heaps(heaps, samples=len(rare), different=rare_types)
        return RealText(text, word, first_word, names, order, rare, rare_types, heaps, law)


def _rows(files: list[Path]) -> Iterator[dict[str, str]]:
    for path in files:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            yield from map(json.loads, io.TextIOWrapper(stream, encoding="utf-8"))


def _vocabulary(text: bytes, word: npt.NDArray[np.uint32], first_word: Integers) -> tuple[float, Integers, int]:
    """Return `heaps`, `rare` and `rare_types` of a source."""
    vocabulary, buffer = Vocabulary(), np.frombuffer(text, np.uint8)
    single = np.full(len(word) - 1, -1, np.int32)
    counts = np.zeros(0, np.int64)
    growth = []
    for first, last in itertools.pairwise([*first_word[:-1:4096].tolist(), int(first_word[-1])]):
        offsets = word[first : last + 1].astype(np.int64)
        tokens, starts = vocabulary.tokenize(buffer[offsets[0] : offsets[-1]], offsets - offsets[0])
        alone = np.flatnonzero(np.diff(starts) == 1)
        single[first + alone] = tokens[starts[alone]]
        counts = np.concatenate((counts, np.zeros(len(vocabulary) - len(counts), np.int64)))
        counts += np.bincount(tokens, minlength=len(vocabulary))
        growth.append((counts.sum(), len(vocabulary)))
    terms, different = np.log([point for point in growth if point[0] >= 0.1 * growth[-1][0]]).T
    heaps = float(np.polyfit(terms, different, 1)[0]) if len(terms) > 1 else HEAPS_ENGLISH
    rare = np.flatnonzero((single >= 0) & (counts <= RARE)[single])
    return heaps, rare, len(np.unique(single[rare]))


class Invented:
    """Passages of pseudo-words by one Zipf-Mandelbrot law; half of the rarer words belong to one of 64 topics."""

    def __init__(self, *, seed: int = 1, heaps: float = HEAPS_ENGLISH, offset: float = 60.0) -> None:
        self._seed, self._law = seed, ZipfLaw(1 / heaps - 1, offset)

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": "invented", "seed": self._seed, "tail": self._law.tail, "offset": self._law.offset}

    def describe(self) -> dict[str, Any]:
        return {"heaps_exponent": round(1 / (self._law.tail + 1), 4)}

    def passages(self, numbers: Integers, total: int) -> tuple[list[bytes], list[str]]:
        """See `Source`."""
        words = _lengths(self._seed, numbers)
        number, slot = np.repeat(numbers, words), _counting(words)
        topic = np.minimum(numbers * TOPICS // total, TOPICS - 1)
        rank = self._law.sample(uniform(self._seed, 1, number, slot)) - int(self._law.offset)
        of_topic = (rank >= COMMON) & (uniform(self._seed, 2, number, slot) < 0.5)
        word = np.where(of_topic, 2 * ((rank - COMMON) // TOPICS * TOPICS + np.repeat(topic, words)) + 1, 2 * rank)
        letters = spell(word)
        letters[np.cumsum(words) - 1, -4] = ord("\n")
        texts = letters.tobytes().translate(None, b"\0").split(b"\n")[:-1]
        return texts, [f"topic-{name}" for name in topic.tolist()]


@dataclass(frozen=True)
class ZipfLaw:
    """Whole numbers x >= offset with P(X >= x) = (offset / x) ** tail: Zipf's law with exponent tail + 1 and no largest number.

    n samples have about n ** (1 / (tail + 1)) different values: Heaps' law.
    """

    tail: float
    offset: float

    @staticmethod
    def of_heaps(heaps: float, *, samples: int, different: int) -> ZipfLaw:
        """Return the law with Heaps exponent `heaps` and `different` different values in `samples` samples."""
        tail = 1 / heaps - 1
        low, high = 1.0, 1e12
        for _ in range(100):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if ZipfLaw(tail, middle).expected_different(samples) < different else (low, middle)
        return ZipfLaw(tail, low)

    def expected_different(self, samples: int) -> float:
        """Return the expected number of different values in so many samples."""
        edges = np.geomspace(self.offset, self.offset * 1e14, 20_001)
        middle = np.sqrt(edges[1:] * edges[:-1])
        chance = self.tail / self.offset * (middle / self.offset) ** (-self.tail - 1)
        return float((-np.expm1(-samples * chance) * np.diff(edges)).sum())

    def sample(self, uniform_numbers: npt.NDArray[np.float64]) -> Integers:
        """Return a value for each number in (0, 1] (inverse transform sampling)."""
        return np.minimum(self.offset * uniform_numbers ** (-1 / self.tail), 1e15).astype(np.int64)


def uniform(seed: int, purpose: int, numbers: Integers, slots: Integers) -> npt.NDArray[np.float64]:
    """Return a number in (0, 1] for each (passage, slot), a pure function of the four arguments, by the mixing of SplitMix64."""
    with np.errstate(over="ignore"):
        mixed: Hashes = (numbers * SLOTS + slots).astype(np.uint64) + np.uint64(seed << 8 | purpose) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53


def spell(numbers: Integers, *, prefix: bytes = b"") -> npt.NDArray[np.uint8]:
    """Return (words, letters): each number (0 <= number < 1e16) as distinct syllables and a space; unused letters are 0.

    Four letters are two digits in base 100; the last digit comes first.
    """
    letters = np.zeros((len(numbers), 6), np.uint32)
    letters[:, 0] = np.frombuffer(prefix.ljust(4, b"\0"), np.uint32)
    letters[:, -1] = ord(" ")
    rows, left = np.arange(len(numbers)), numbers
    for column in range(1, 5):
        letters[rows, column] = np.where(left < 10_000, _LAST[left % 10_000], _INNER[left % 10_000])
        more = left >= 10_000
        if not more.any():
            break
        rows, left = rows[more], left[more] // 10_000
    return letters.view(np.uint8)


def _syllables() -> npt.NDArray[np.uint8]:
    one = np.array([[ord(consonant), ord(vowel)] for consonant in "bcdfghklmnprstvwzyjx" for vowel in "aeiou"], np.uint8)
    low = np.arange(10_000)
    return np.concatenate((one[low % 100], one[low // 100]), axis=1)


_INNER: Final = _syllables().view(np.uint32).ravel()
_LAST: Final = np.where(np.arange(10_000) < 100, _INNER & 0xFFFF, _INNER)


def _counting(sizes: Integers) -> Integers:
    """Return 0, 1, ... sizes[0] - 1, 0, 1, ... sizes[1] - 1, and so on."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _lengths(seed: int, numbers: Integers) -> Integers:
    """Return the number of words of each passage."""
    return np.ceil(uniform(seed, 0, numbers, np.zeros_like(numbers)) * (MOST_WORDS - FEWEST_WORDS + 1)).astype(np.int64) + FEWEST_WORDS - 1


def main() -> None:
    """Write one corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with corpus/*.jsonl.zst")
    parser.add_argument("--no-data", action="store_true", help="invented words instead of a real corpus")
    parser.add_argument("--source-passages", type=int, help="use only so many of the real ones")
    parser.add_argument("--order", choices=("topics", "shuffled"), default="shuffled")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    files = sorted((arguments.data / "corpus").glob("*.jsonl.zst"))
    if not files and not arguments.no_data:
        parser.error(f"{arguments.data}: no corpus/*.jsonl.zst there; pass --data FOLDER, or --no-data")
    source: Source = (
        Invented(seed=arguments.seed) if arguments.no_data else Bootstrap(files, seed=arguments.seed, most=arguments.source_passages)
    )
    files = write_corpus(source, arguments.passages, arguments.out, order=arguments.order)
    print(f"{arguments.passages:,} passages in {len(files)} files: {arguments.out}", file=sys.stderr)
    print((arguments.out / "corpus.json").read_text("utf-8"))


if __name__ == "__main__":
    main()
