"""The passages of a selection that lie nearest to a text by BM25, and the words they share: the project's own index, built over them alone.

The index lives in a temporary folder for as long as the page is written: about a second for 10,000 passages.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.retrieval.bm25.index import Index, build_index

_LONGEST_WORDS = 1_000_000  # passages are not cut again
_MOST_TERMS = 12
_LEAST_SHARE = 0.3  # of the heaviest shared word's weight: below, a word is not worth marking


@dataclass(frozen=True, slots=True)
class Near:
    """A passage near a text. place: in the selection. terms: the words both share that weigh most, as the analyser writes them."""

    place: int
    score: float
    terms: tuple[str, ...]


class Neighbours:
    """A selection, searchable."""

    def __init__(self, corpus: Corpus, index: Index) -> None:
        self._index = index
        self._places = [int(document.id) for document in corpus]
        self._positions = {place: position for position, place in enumerate(self._places)}

    def nearest(self, texts: Sequence[str], *, limit: int) -> list[list[Near]]:
        """The best passages of every text, best first; none for a text that shares no word with any."""
        if not texts:
            return []
        hits = self._index.search(texts, limit=limit)
        found: list[list[Near]] = []
        for number, text in enumerate(texts):
            rows = range(int(hits.offsets[number]), int(hits.offsets[number + 1]))
            pairs = [(int(hits.position[row]), float(hits.score[row])) for row in rows]
            found.append([Near(self._places[position], score, self._heaviest(text, position)) for position, score in pairs])
        return found

    def shared(self, text: str, place: int) -> tuple[str, ...]:
        """The words that a text shares with the passage at `place` of the selection, without those that hardly count."""
        position = self._positions.get(place)
        return () if position is None else self._heaviest(text, position)

    def _heaviest(self, text: str, position: int) -> tuple[str, ...]:
        terms = self._index.explain(text, position)
        return tuple(term for term, weight in terms if weight >= _LEAST_SHARE * terms[0][1])[:_MOST_TERMS]


@contextmanager
def open_neighbours(passages: Sequence[Mapping[str, Any]]) -> Iterator[Neighbours | None]:
    """Neighbours among these rows of the selection until the block ends; None if there are none."""
    if not passages:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="cramlm-report-") as name:
        folder = Path(name)
        with (folder / "passages.jsonl").open("w", encoding="utf-8") as file:
            for place, passage in enumerate(passages):
                file.write(json.dumps({"id": str(place), "text": passage["text"]}) + "\n")
        config = CorpusConfig(files=(str(folder / "passages.jsonl"),), passage_words=_LONGEST_WORDS)
        corpus = build_corpus(config, folder / "store", workers=1)
        yield Neighbours(corpus, build_index(corpus, folder / "store"))
