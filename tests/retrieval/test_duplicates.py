"""Near-duplicates in a selection: those that a comparison of all pairs finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from retrieval_fixtures import invented_texts
from selection_fixtures import make_task, report_of, select, write_corpus

from cramlm.config.retriever import RandomConfig
from cramlm.retrieval.duplicates import NearDuplicates, shingles_of
from cramlm.storage.arrays import joined
from cramlm.text.words import segment
from jsonl import read_jsonl

BASE = invented_texts(60, seed=61, words=(60, 90))


def changed(text: str, words: int) -> str:
    """Return the text with its last `words` words replaced."""
    kept = text.split()[:-words]
    return " ".join([*kept, *(f"new{number}" for number in range(words))])


def shingles(text: str) -> set[str]:
    """The runs of 5 words of a text, which are compared by hashes."""
    words = segment(text)
    return {" ".join(words[start : start + 5]) for start in range(max(1, len(words) - 4))}


def jaccard(one: str, other: str) -> float:
    return len(shingles(one) & shingles(other)) / len(shingles(one) | shingles(other))


def find(texts: Sequence[str], threshold: float, chunk: int = 300) -> list[tuple[int, float] | None]:
    """For each text (at positions 100, 101, ...) its near-duplicate and the similarity, found chunk by chunk."""
    duplicates = NearDuplicates(threshold)
    found: dict[int, tuple[int, float]] = {}
    for start in range(0, len(texts), chunk):
        part = texts[start : start + chunk]
        positions = np.arange(100 + start, 100 + start + len(part))
        data, offsets = joined([text.encode() for text in part])
        rows = duplicates.find(positions, data, offsets, np.ones(len(part), np.bool_))
        found |= {start + index: (twin, similarity) for index, twin, similarity in rows}
    return [found.get(number) for number in range(len(texts))]


def test_shingles_are_distinct_runs_of_five_words_whatever_their_case_and_punctuation() -> None:
    texts = ["One two, THREE four five six!", "one TWO three four five one two three four five", "Too short.", "ประเทศ", *BASE]
    found, offsets = shingles_of(*joined([text.encode() for text in texts]))
    assert np.diff(offsets).tolist() == [len(shingles(text)) for text in texts]
    assert len(np.intersect1d(found[: offsets[1]], found[offsets[1] : offsets[2]])) == 1


def test_texts_of_symbols_alone_are_near_duplicates_only_if_they_are_equal() -> None:
    texts = ["😀 😀", "😡", "*** ***", "one two three four five", "", "😀  😀\n"]
    assert find(texts, 0.8) == [None] * 5 + [(100, 1.0)]


def test_at_a_threshold_of_one_only_passages_of_the_same_words_are_near_duplicates() -> None:
    assert find([BASE[0], changed(BASE[0], 1), BASE[1], BASE[0].upper()], 1.0) == [None, None, None, (100, 1.0)]


FOOTER = " ".join(f"footer{number}" for number in range(25))


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.5, 0.8])
def test_dropped_passages_are_those_of_comparing_all_pairs(threshold: float) -> None:
    texts = [
        each for number, text in enumerate(BASE) for each in (text, changed(text, 1 + number), f"{text} {FOOTER[: 9 * (number % 20)]}")
    ]
    kept: list[int] = []
    for number, found in enumerate(find(texts, threshold)):
        similar = ((100 + earlier, jaccard(texts[number], texts[earlier])) for earlier in kept)
        assert found == next((pair for pair in similar if pair[1] >= threshold), None)
        kept += [] if found else [number]
    assert 20 < len(kept) < 160


def test_near_duplicates_of_a_selection_are_listed_and_replaced(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [*BASE, *(changed(text, 2) for text in BASE[:20])])
    selection = select((corpus, None), make_task(["x"], [BASE[3]]), tmp_path / "out", RandomConfig(max_documents=58, near_duplicates=0.8))
    dropped = [row for row in read_jsonl(tmp_path / "out" / "dropped.jsonl") if row["position"] not in (3, 63)]  # those of a dev text
    assert len(selection) == 58
    assert {row["reason"] for row in dropped} == {"near-duplicate"}
    for row in dropped:
        assert abs(row["position"] - row["twin"]) == 60
        assert row["twin"] in selection.position
        assert row["position"] not in selection.position
        assert 0.8 <= row["similarity"] < 1
    assert report_of(tmp_path / "out")["dropped"]["near-duplicate"] == len(dropped)
