"""Markers in texts: strings such as `<<`, `</e1>`, `[E1]` or `@GENE$` by which a task points at parts of its texts.

Tasks about relations mark the two entities in each text. The label then depends most on the words between the entities and on their
order; `Markers.segments` divides a text at its markers. The boundary of a pair of texts is a marker as well.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cramlm.records import PAIR_BOUNDARY
from cramlm.text.words import split_runs

_TAG: Final = re.compile(r"</?[^\W\d][\w:-]*/?>|\[/?[^\W\d][\w-]*\]|@[\w-]+\$")
"""A tag, a name in square brackets, or a placeholder like `@GENE$`."""
_SYMBOL: Final = re.compile(r"""([^\w\s.,;:!?'"()–—…-])\1*""")
"""A run of one symbol that is not punctuation of sentences."""
MIN_TEXTS: Final = 20
MIN_SHARE: Final = 0.9
"""A marker occurs equally often in at least this share of the texts."""
MAX_OCCURRENCES: Final = 2  # in a text: `$ one entity $`
MAX_MARKERS: Final = 8  # the known and the longest of the others
MAX_KINDS: Final = 12


@dataclass(frozen=True, slots=True)
class Segment:
    """The text between two markers; "" stands for the beginning or the end of the whole."""

    before: str
    after: str
    text: str

    @property
    def words(self) -> list[str]:
        """As `split_runs`."""
        return split_runs(self.text)

    @property
    def kind(self) -> tuple[str, str]:
        """The markers around it."""
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

    def segments(self, text: str) -> list[Segment]:
        """The segments of a text in order, one more than it has markers."""
        parts = self._pattern.split(text)
        around = ["", *parts[1::2], ""]
        return list(map(Segment, around, around[1:], parts[::2]))

    @property
    def pairs(self) -> bool:
        """True if the texts are pairs."""
        return PAIR_BOUNDARY in self.strings

    def by_kind(self, texts: Sequence[str]) -> list[list[str]]:
        """For each of `kinds`, the segments of this kind of each text, joined."""
        columns: list[list[str]] = [[] for _ in self.kinds]
        for text in texts:
            found: dict[tuple[str, str], list[str]] = {}
            for segment in self.segments(text):
                found.setdefault(segment.kind, []).append(segment.text)
            for kind, column in zip(self.kinds, columns, strict=True):
                column.append(" ".join(found.get(kind, ())))
        return columns

    def without_markers(self, text: str) -> list[str]:
        """The words of a text, without its markers."""
        return split_runs(self._pattern.sub(" ", text))

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(map(re.escape, self.strings)) + ")")


def _discover(texts: Sequence[str]) -> list[str]:
    """The strings that the texts have equally often, the longest first; none in fewer than `MIN_TEXTS` texts."""
    if len(texts) < MIN_TEXTS:
        return []
    counts: Counter[tuple[str, int]] = Counter()
    for text in texts:
        candidates = [*_TAG.finditer(text), *_SYMBOL.finditer(text)]
        counts.update(Counter(found[0] for found in candidates).items())
    frequent = {string for (string, times), count in counts.items() if times <= MAX_OCCURRENCES and count >= MIN_SHARE * len(texts)}
    whole = (string for string in frequent if not any(string in other for other in frequent - {string}))
    return sorted(whole, key=lambda string: (-len(string), string))
