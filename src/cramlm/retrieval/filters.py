"""From a ranking to the documents that stay: read in order, without held-out text, up to the bound.

    Ranking ─► chunks, each read in the order of the corpus ─► held-out text ─► near-duplicates ─► the bound ─► Kept and Dropped, in order

Chunks bound the memory and change nothing else: what stays is the longest beginning of the ranking, without what is dropped, that the
bound allows.

**Tokens are estimated**, because the tokenizer is learnt from the selection and does not exist yet: a token for every
`CHARACTERS_PER_TOKEN` characters, and one for every character of a script without spaces. Measured with vocabularies of 8,192 on what
three tasks retrieve: 4.36 (ChemProt), 4.00 (20 Newsgroups) and 3.66 (Yoruba news) characters a token, so an estimate is off by up to a
tenth; with vocabularies of 4,096 to 30,000 it was 3.4 to 5.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from cramlm.config.retriever import RetrieverConfig
from cramlm.data.corpus import Corpus
from cramlm.data.decontamination import HeldOut
from cramlm.records import Example, IntArray
from cramlm.retrieval.duplicates import NearDuplicates
from cramlm.retrieval.ranking import Ranking
from cramlm.text.words import SPACELESS_CHARACTER

CHARACTERS_PER_TOKEN: Final = 4.0
_CHUNK: Final = 4096
_SPARE: Final = 1.25  # read this many times the documents that are still wanted, so that dropped ones seldom cost another chunk
_CONTINUATIONS: Final = bytes(range(0x80, 0xC0))  # bytes that begin no character
_SPACELESS_STARTS: Final = bytes(byte for byte in range(0xE0, 0xF5) if byte != 0xE2)  # E2 begins quotation marks, dashes and symbols


@dataclass(frozen=True, slots=True)
class Bound:
    """How much to keep: documents, estimated tokens; None = all."""

    documents: int | None = None
    tokens: int | None = None


def bound_of(config: RetrieverConfig) -> Bound:
    """How much of its list a retriever may give."""
    return Bound(config.max_documents, config.max_tokens)


@dataclass(frozen=True, slots=True)
class Kept:
    """place: in the ranking. tokens: estimated."""

    place: int
    tokens: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """reason: a few words. details: plain JSON, what it matched."""

    place: int
    reason: str
    details: Mapping[str, str | int | float]


def estimate_tokens(data: bytes) -> float:
    """About how many tokens a vocabulary made for this kind of text (UTF-8) will cut it into."""
    if data.isascii():
        return len(data) / CHARACTERS_PER_TOKEN
    characters = len(data.translate(None, _CONTINUATIONS))
    alone = len(SPACELESS_CHARACTER.findall(data.decode())) if _may_be_spaceless(data) else 0
    return (characters - alone) / CHARACTERS_PER_TOKEN + alone


def _may_be_spaceless(data: bytes) -> bool:
    return len(data.translate(None, _SPACELESS_STARTS)) < len(data)


def winnow(
    ranking: Ranking, corpus: Corpus, held_out: Sequence[Example], bound: Bound, *, duplicates: NearDuplicates | None = None
) -> Iterator[Kept | Dropped]:
    """What stays and what is dropped, in order; ends when the bound is reached. At least one document stays, however long."""
    forbidden = HeldOut(held_out)
    kept, tokens, start = 0, 0.0, 0
    while start < len(ranking) and kept != bound.documents:
        wanted = _CHUNK if bound.documents is None else int(_SPARE * (bound.documents - kept)) + 100
        chunk = range(start, min(start + min(wanted, _CHUNK), len(ranking)))
        positions = ranking.position[chunk.start : chunk.stop]
        texts = dict(_read(corpus, np.sort(positions)))
        overlaps = {overlap.position: overlap for overlap in forbidden.find(texts.items())}
        for place, position in zip(chunk, positions.tolist(), strict=True):
            text = texts[position]
            if (overlap := overlaps.get(position)) is not None:
                yield Dropped(place, overlap.reason, {"match": overlap.match, "example": overlap.split_example_id})
                continue
            if duplicates is not None and (twin := duplicates.twin(position, text.decode())) is not None:
                yield Dropped(place, "near-duplicate", {"twin": twin[0], "similarity": round(twin[1], 4)})
                continue
            cost = estimate_tokens(text)
            if kept and bound.tokens is not None and tokens + cost > bound.tokens:
                return
            yield Kept(place, cost)
            kept, tokens = kept + 1, tokens + cost
            if kept == bound.documents:
                return
        start = chunk.stop
        corpus.release()


def within_bound(ranking: Ranking, corpus: Corpus, bound: Bound) -> int:
    """How many documents from the beginning of the ranking fit; nothing is dropped here, and one always fits."""
    count = len(ranking) if bound.documents is None else min(len(ranking), bound.documents)
    if bound.tokens is None:
        return count
    tokens = 0.0
    for start in range(0, count, _CHUNK):
        texts = dict(_read(corpus, np.sort(ranking.position[start : min(start + _CHUNK, count)])))
        for place, position in enumerate(ranking.position[start : min(start + _CHUNK, count)].tolist(), start):
            tokens += estimate_tokens(texts[position])
            if place and tokens > bound.tokens:
                return place
    return count


def _read(corpus: Corpus, positions: IntArray) -> Iterator[tuple[int, bytes]]:
    """(position, UTF-8) of passages in the order of the corpus."""
    text, offsets = corpus.gather(positions)
    data, ends = text.tobytes(), offsets.tolist()
    return ((position, data[start:end]) for position, (start, end) in zip(positions.tolist(), pairwise(ends), strict=True))
