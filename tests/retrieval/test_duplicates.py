from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from retrieval_fixtures import invented_texts
from scipy.stats import binom
from selection_fixtures import make_task, report_of, select, write_corpus

from cramlm.config.retriever import RandomConfig
from cramlm.errors import EnvironmentFault
from cramlm.retrieval.duplicates import NearDuplicates, bands_for, jaccard, least_equal, shingles
from jsonl import read_jsonl

BASE = invented_texts(60, seed=61, words=(60, 90))


def changed(text: str, words: int) -> str:
    """The text with so many words at its end replaced."""
    kept = text.split()[:-words]
    return " ".join([*kept, *(f"new{number}" for number in range(words))])


def test_shingles_are_runs_of_five_words_whatever_their_case_and_punctuation() -> None:
    assert shingles("One two, THREE four five six!") == {"one two three four five", "two three four five six"}
    assert shingles("Too short.") == {"too short"}
    assert shingles("ประเทศ") == {"ป ร ะ เ ท", "ร ะ เ ท ศ"}
    assert jaccard({"a", "b", "c"}, {"b", "c", "d"}) == 0.5


def test_texts_of_symbols_alone_are_near_duplicates_only_if_they_are_equal(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, ["😀 😀", "😡", "*** ***", "one two three four five"])
    duplicates = NearDuplicates(corpus, 0.8)
    assert [duplicates.twin(position, corpus.text(position)) for position in range(4)] == [None] * 4
    assert duplicates.twin(9, "😀  😀\n") == (0, 1.0)


@example(1.0)
@given(st.floats(0.01, 1))
def test_the_table_finds_a_pair_at_the_threshold_and_uses_at_most_128_permutations(threshold: float) -> None:
    rows, bands = bands_for(threshold)
    assert rows * bands <= 128
    assert rows == 1 or 1 - (1 - threshold**rows) ** bands >= 0.999
    assert bands >= 2  # datasketch has no table of one band


def test_at_a_threshold_of_one_only_passages_of_the_same_words_are_near_duplicates(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [BASE[0], changed(BASE[0], 1), BASE[1], BASE[0].upper()])
    duplicates = NearDuplicates(corpus, 1.0)
    assert [duplicates.twin(position, corpus.text(position)) for position in range(4)] == [None, None, None, (0, 1.0)]


def test_dropped_passages_are_those_of_comparing_all_pairs(tmp_path: Path) -> None:
    texts = [text for number, text in enumerate(BASE) for text in (text, changed(text, 1 + number % 20))]
    corpus = write_corpus(tmp_path, texts)
    duplicates = NearDuplicates(corpus, 0.8)
    found = [duplicates.twin(position, corpus.text(position)) for position in range(len(corpus))]
    kept: list[int] = []
    for position, twin in enumerate(found):
        same = [earlier for earlier in kept if jaccard(shingles(texts[position]), shingles(texts[earlier])) >= 0.8]
        if same:
            assert twin == (same[0], jaccard(shingles(texts[position]), shingles(texts[same[0]])))
        else:
            assert twin is None
            kept.append(position)
    assert 5 < len(texts) - len(kept) < 60


def test_words_of_passages_that_only_share_a_footer_are_seldom_compared(tmp_path: Path) -> None:
    footer = " ".join(f"footer{number}" for number in range(35))
    texts = [f"{text} {footer}" for text in invented_texts(200, seed=62, words=(60, 70))]
    corpus = write_corpus(tmp_path, texts)
    assert 0.15 < jaccard(shingles(texts[0]), shingles(texts[1])) < 0.3
    compared = []

    class Counting:
        def text(self, position: int) -> str:
            compared.append(position)
            return corpus.text(position)

    counting: Any = Counting()
    duplicates = NearDuplicates(counting, 0.5)
    assert [duplicates.twin(position, text) for position, text in enumerate(texts)] == [None] * len(texts)
    assert len(compared) < 0.03 * len(texts) ** 2 / 2


@pytest.mark.parametrize("threshold", [0.01, 0.3, 0.8, 1.0])
def test_a_near_duplicate_has_the_least_equal_hashes_with_the_probability_of_a_binomial_distribution(threshold: float) -> None:
    rows, bands = bands_for(threshold)
    least = least_equal(threshold, rows * bands)
    assert binom.cdf(least - 1, rows * bands, threshold) <= 1e-5 < binom.cdf(least, rows * bands, threshold)


def test_near_duplicates_of_a_selection_are_listed_with_their_twins_and_replaced(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [*BASE, *(changed(text, 2) for text in BASE[:20])])
    selection = select((corpus, None), make_task(["x"]), tmp_path / "out", RandomConfig(max_documents=60, near_duplicates=0.8))
    dropped = read_jsonl(tmp_path / "out" / "dropped.jsonl")
    assert len(selection) == 60
    assert {row["reason"] for row in dropped} == {"near-duplicate"}
    for row in dropped:
        assert abs(row["position"] - row["twin"]) == 60
        assert row["twin"] in selection.position
        assert row["position"] not in selection.position
        assert 0.8 <= row["similarity"] < 1
    assert report_of(tmp_path / "out")["dropped"] == {"near-duplicate": len(dropped)}


def test_without_the_package_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path, BASE[:2])
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "datasketch", raising=False)
    sys.path_importer_cache.clear()
    with pytest.raises(EnvironmentFault, match=r"pip install 'cramlm\[dedup\]'"):
        select((corpus, None), make_task(["x"]), tmp_path / "out", RandomConfig(max_documents=1, near_duplicates=0.8))
