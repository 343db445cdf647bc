"""Cutting long texts into passages: at sentence ends, else between words, else between grapheme clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from cramlm.text.words import count_words, splits_cluster

_SENTENCE_END: Final = re.compile(r"""[.!?…؟۔।॥።][.!?…]*["'”’»)\]]*\s+|[。！？．][」』”’）]*\s*|\n\s*\n\s*""")
_WHITE_SPACE: Final = re.compile(r"\s+")
_LONG: Final = 1.5  # a text with more than this many times the words of a passage is cut


def cut_passages(text: str, words: int, passage_words: int) -> list[tuple[int, int]]:
    """Return spans (start, end) that cut a text of `words` words into passages of about `passage_words`, without white space at the edges.

    Texts up to 1.5 times that length are one span, unchanged. Cuts are at the sentence ends nearest to an even division; a sentence longer
    than half a passage may be cut between words, and a run without spaces between grapheme clusters. Every character except white space is
    in exactly one span.
    """
    if words <= _LONG * passage_words:
        return [(0, len(text))]
    pieces = max(2, round(words / passage_words))
    segments = list(_segments(text, words / pieces / 2))
    goal = sum(weight for _, weight in segments) / pieces  # words are rounded up per segment, so their sum may exceed `words`
    spans: list[tuple[int, int]] = []
    start, done, total, target = 0, 0, 0.0, goal
    for end, weight in segments:
        if done > start and abs(total + weight - target) >= abs(total - target):
            spans.append((start, done))
            start = done
            target += goal
        done, total = end, total + weight
    spans.append((start, len(text)))
    stripped = []
    for begin, end in spans:
        piece = text[begin:end]
        if kept := piece.strip():
            begin += len(piece) - len(piece.lstrip())
            stripped.append((begin, begin + len(kept)))
    return stripped


def _segments(text: str, longest: float) -> Iterator[tuple[int, float]]:
    """Yield (end, words) of the segments between possible cuts: sentences, or words or clusters of long sentences."""
    for start, end in _between(text, 0, len(text), _SENTENCE_END):
        weight = count_words(text[start:end])
        if weight <= longest:
            yield end, weight
            continue
        for word_start, word_end in _between(text, start, end, _WHITE_SPACE):
            weight = count_words(text[word_start:word_end])
            if weight <= longest:
                yield word_end, weight
                continue
            step, begin = max(2, int(longest)), word_start
            while begin < word_end:
                following = min(begin + step, word_end)
                while following < word_end and splits_cluster(text, following):
                    following += 1
                yield following, weight * (following - begin) / (word_end - word_start)
                begin = following


def _between(text: str, start: int, end: int, separator: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    begin = start
    for match in separator.finditer(text, start, end):
        if match.end() > begin:
            yield begin, match.end()
            begin = match.end()
    if begin < end:
        yield begin, end
