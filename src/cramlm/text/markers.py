"""Markers in texts: strings such as `<<`, `</e1>`, `[E1]` or `@GENE$` by which a task points at parts of its texts.

Tasks about relations mark the two entities in each text. The label then depends most on the words between the entities and on their
order; `Markers.segments` divides a text at its markers. The boundary of a pair of texts is a marker as well. `MarkerInserter` puts the
markers of a task into other texts.
"""

from __future__ import annotations

import functools
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cramlm.records import PAIR_BOUNDARY
from cramlm.text.words import split_runs

_TAG: Final = re.compile(r"</?[^\W\d][\w:-]*/?>|\[/?[^\W\d][\w-]*\]|@[\w-]+\$")
"""A tag, a name in square brackets, or a placeholder like `@GENE$`."""
_SYMBOL: Final = re.compile(r"""([^\w\s.,;:!?'"()–—…-])\1*""")
"""A run of one symbol that is not ASCII punctuation of sentences."""
_SENTENCE_CATEGORIES: Final = frozenset({"Po", "Pi", "Pf", "Pd"})
"""Unicode categories of punctuation of sentences in other scripts, such as the inverted question mark; brackets may be markers."""
MIN_TEXTS: Final = 20
MIN_SHARE: Final = 0.9
"""A string is a marker if it occurs equally often in at least this share of the texts."""
MAX_OCCURRENCES: Final = 2  # of a marker in a text, like `$ one entity $`
MAX_MARKERS: Final = 8  # those passed to `find` first, then the longest
MAX_KINDS: Final = 12


@dataclass(frozen=True, slots=True)
class Segment:
    """The text between two markers; "" stands for the beginning or the end of the whole."""

    before: str
    after: str
    text: str

    @property
    def words(self) -> list[str]:
        """Its words, as `split_runs` splits them."""
        return split_runs(self.text)

    @property
    def kind(self) -> tuple[str, str]:
        """The markers before and after it."""
        return self.before, self.after


@dataclass(frozen=True)
class Markers:
    """The markers of a task. kinds: the most frequent kinds of segments; each has its own columns in vectors of texts."""

    strings: tuple[str, ...]
    kinds: tuple[tuple[str, str], ...]

    @classmethod
    def find(cls, texts: Sequence[str], *, known: Sequence[str] = ()) -> Markers | None:
        """Return the markers in the texts of a task; None if there are none.

        known: markers in any number of texts, such as `PAIR_BOUNDARY` in those of pairs; others are found in `MIN_TEXTS` texts or more.
        """
        strings = (*known, *_discover(texts))[:MAX_MARKERS]
        if not strings:
            return None
        markers = cls(strings, ())
        kinds = Counter(segment.kind for text in texts for segment in markers.segments(text))
        return cls(strings, tuple(kind for kind, _ in sorted(kinds.items(), key=lambda each: (-each[1], each[0]))[:MAX_KINDS]))

    @classmethod
    def of_single(cls, texts: Sequence[tuple[str, str | None]]) -> Markers | None:
        """As `find`, from (text, second text); None if any text has a second text."""
        return None if any(second is not None for _, second in texts) else cls.find([text for text, _ in texts])

    def segments(self, text: str) -> list[Segment]:
        """Return the segments of a text in order, one more than it has markers."""
        parts = self._pattern.split(text)
        around = ["", *parts[1::2], ""]
        return list(map(Segment, around, around[1:], parts[::2]))

    @property
    def pairs(self) -> bool:
        """True if the texts are pairs."""
        return PAIR_BOUNDARY in self.strings

    def by_kind(self, texts: Sequence[str]) -> list[list[str]]:
        """Return for each of `kinds` a list with, for each text, its segments of this kind joined by spaces."""
        columns: list[list[str]] = [[] for _ in self.kinds]
        for text in texts:
            found: dict[tuple[str, str], list[str]] = {}
            for segment in self.segments(text):
                found.setdefault(segment.kind, []).append(segment.text)
            for kind, column in zip(self.kinds, columns, strict=True):
                column.append(" ".join(found.get(kind, ())))
        return columns

    def occur_in(self, text: str) -> bool:
        """Return True if the text has a marker."""
        return self._pattern.search(text) is not None

    def without_markers(self, text: str) -> list[str]:
        """Return the words of a text without its markers."""
        return split_runs(self._pattern.sub(" ", text))

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(map(re.escape, self.strings)) + ")")


class MarkerInserter:
    """Inserts the markers of a task into texts without markers.

    The markers, and the numbers of words between them, are those of a randomly sampled text of the task. Of some random positions the one
    is chosen whose marked words are rarest in the texts, or occur as marked words in the task, because entities are seldom common words.
    """

    def __init__(self, markers: Markers, texts: Sequence[str]) -> None:
        """texts: those of the task."""
        self._markers = markers
        segments = [found for text in texts if len(found := markers.segments(text)) > 1]
        self._patterns = [([each.after for each in found[:-1]], [len(each.text.split()) for each in found[1:-1]]) for found in segments]
        inside = [each.text.lower().split() for found in segments for each in found[1:-1:2]]
        self._known = frozenset(word for words in inside if len(words) <= _MARKED_WORDS for word in words)

    def insert(self, texts: Sequence[str], *, seed: int) -> list[str]:
        """Return the texts with markers; words are separated by single spaces.

        A text that already has markers is returned unchanged; one that is too short for the sampled patterns gets none.
        """
        rng, words = random.Random(seed), [text.split() for text in texts]
        counts = Counter(word for text in words for word in {word.lower() for word in text})
        return [
            text if self._markers.occur_in(text) else self._with_markers(own, counts, len(texts), rng)
            for text, own in zip(texts, words, strict=True)
        ]

    def _with_markers(self, words: list[str], counts: Counter[str], total: int, rng: random.Random) -> str:
        for _ in range(_TRIES):
            markers, between = rng.choice(self._patterns)
            if sum(between) <= len(words):
                break
        else:
            return " ".join(words)
        starts = [rng.randint(0, len(words) - sum(between)) for _ in range(_POSITIONS)]
        start = max(starts, key=lambda each: self._fitness(words, each, between, counts, total))
        result, position = words[:start], start
        for marker, length in zip(markers, [*between, 0], strict=True):
            result += [marker, *words[position : position + length]]
            position += length
        return " ".join(result + words[position:])

    def _fitness(self, words: list[str], start: int, between: list[int], counts: Counter[str], total: int) -> float:
        """Return the sum over the marked segments of the mean score of their words.

        The score of a word is its negative log frequency in the texts, in nats, doubled if the task marks the word.
        """
        fitness, position = 0.0, start
        for number, length in enumerate(between):
            if number % 2 == 0 and 0 < length <= _MARKED_WORDS:
                for word in map(str.lower, words[position : position + length]):
                    score = math.log(total / counts[word]) if any(map(str.isalnum, word)) else -_SYMBOL_PENALTY
                    fitness += score * (1 + (word in self._known)) / length
            position += length
        return fitness


_MARKED_WORDS: Final = 4
"""The words between markers 1 and 2, 3 and 4, ... are marked words if they are at most this many."""
_TRIES: Final = 6  # patterns that are sampled for a text before it is left without markers
_POSITIONS: Final = 8  # random positions that are compared for a text
_SYMBOL_PENALTY: Final = 3.0  # nats, for a word without letters and digits


def _may_mark(string: str) -> bool:
    return string[0].isascii() or unicodedata.category(string[0]) not in _SENTENCE_CATEGORIES


def _discover(texts: Sequence[str]) -> list[str]:
    """Return the strings that occur equally often in most texts, longest first; none for fewer than `MIN_TEXTS` texts."""
    if len(texts) < MIN_TEXTS:
        return []
    counts: Counter[tuple[str, int]] = Counter()
    for text in texts:
        candidates = [found[0] for found in (*_TAG.finditer(text), *_SYMBOL.finditer(text))]
        counts.update(Counter(filter(_may_mark, candidates)).items())
    frequent = {string for (string, times), count in counts.items() if times <= MAX_OCCURRENCES and count >= MIN_SHARE * len(texts)}
    whole = (string for string in frequent if not any(string in other for other in frequent - {string}))
    return sorted(whole, key=lambda string: (-len(string), string))
