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

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cramlm.data.corpus import Corpus
from cramlm.data.hygiene import HeldOut
from cramlm.data.words import SPACELESS
from cramlm.records import Document, Example
from cramlm.retrieval.duplicates import NearDuplicates
from cramlm.retrieval.ranking import Ranking
from cramlm.retriever_config import RetrieverConfig

CHARACTERS_PER_TOKEN: Final = 4.0
_CHUNK: Final = 4096
_SPARE: Final = 1.25  # read this many times the documents that are still wanted, so that dropped ones seldom cost another chunk
_SPACELESS_CHARACTER: Final = re.compile(f"[{SPACELESS}]")


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
    """place: in the ranking."""

    place: int
    document: Document
    tokens: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """reason: a few words. details: plain JSON, what it matched."""

    place: int
    document: Document
    reason: str
    details: Mapping[str, str | int | float]


def estimate_tokens(text: str) -> float:
    """About how many tokens a vocabulary made for this kind of text will cut it into."""
    alone = 0 if text.isascii() else len(_SPACELESS_CHARACTER.findall(text))
    return (len(text) - alone) / CHARACTERS_PER_TOKEN + alone


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
        documents = {position: corpus.document(position) for position in sorted(positions.tolist())}
        overlaps = {overlap.position: overlap for overlap in forbidden.find((place, text.text) for place, text in documents.items())}
        for place, position in zip(chunk, positions.tolist(), strict=True):
            document = documents[position]
            if (overlap := overlaps.get(position)) is not None:
                yield Dropped(place, document, overlap.reason, {"match": overlap.match, "example": overlap.split_example_id})
                continue
            if duplicates is not None and (twin := duplicates.twin(position, document.text)) is not None:
                yield Dropped(place, document, "near-duplicate", {"twin": twin[0], "similarity": round(twin[1], 4)})
                continue
            cost = estimate_tokens(document.text)
            if kept and bound.tokens is not None and tokens + cost > bound.tokens:
                return
            yield Kept(place, document, cost)
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
    for place, position in enumerate(ranking.position[:count].tolist()):
        tokens += estimate_tokens(corpus.text(position))
        if place and tokens > bound.tokens:
            return place
    return count
