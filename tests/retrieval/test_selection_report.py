from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from retrieval_fixtures import invented_texts
from selection_fixtures import write_corpus

from cramlm.retrieval.report import PRIOR_WORDS, WordCounts, compare_with_corpus, over_represented, random_batches
from cramlm.text.ngrams import count, divergence, hash_texts

SEA = ["the tide and the harbour and a ship in the reef", "a sailor on the ship saw the reef and the tide", "the harbour of the sailor"]
OTHER = invented_texts(120, seed=41)


def test_a_selection_with_the_task_s_words_is_nearer_to_it_than_random_text(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [*OTHER, *SEA])
    report = compare_with_corpus(corpus, np.arange(120, 123), ["a ship at the reef", "sailor and tide"])
    likeness = report["task_likeness"]
    assert likeness["kl_reduction"] > 1
    assert likeness["kl_reduction"] == pytest.approx(likeness["kl_random"] - likeness["kl_selection"], abs=2e-4)
    expected = divergence(count(hash_texts(["a ship at the reef", "sailor and tide"])), count(hash_texts(SEA)))
    assert likeness["kl_selection"] == pytest.approx(expected, abs=1e-4)
    assert {"the", "ship", "harbour"} <= {row["word"] for row in report["over_represented"]}


def words_of(counts: dict[str, int]) -> WordCounts:
    text = " ".join(word for word, count in counts.items() for _ in range(count)).encode()
    return WordCounts.of(np.frombuffer(text, np.uint8), np.array([0, len(text)]))


def test_the_whole_corpus_is_no_nearer_than_random_text(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, OTHER)
    report = compare_with_corpus(corpus, np.random.default_rng(1).permutation(120), OTHER[:3])
    assert report["task_likeness"]["kl_reduction"] == 0
    assert report["task_likeness"]["random_passages"] == 120
    assert report["over_represented"] == []


def test_the_random_sample_has_as_much_text_as_the_selection(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [*OTHER, " ".join(OTHER[:6])])
    report = compare_with_corpus(corpus, np.array([120]), OTHER[:3])  # as long as six others
    assert 3 <= report["task_likeness"]["random_passages"] <= 12


def test_the_random_sample_needs_8_bytes_per_position() -> None:
    tracemalloc.start()
    try:
        first = next(random_batches(1_000_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(first)) == len(first) < 1000
    assert peak < 10_000_000  # an array of 8 MB; a list of as many numbers takes 40
    assert sorted(position for batch in random_batches(1_300) for position in batch) == list(range(1_300))


def test_log_odds_are_the_hand_calculated_ones_with_a_prior_of_pooled_counts() -> None:
    own, other = (words_of({"reef": 30, "the": 70, "7": 9}), words_of({"reef": 5, "the": 95}))
    (row,) = over_represented(own, other)
    prior = PRIOR_WORDS * 35 / 209
    first, second = 30 + prior, 5 + prior
    log_odds = math.log(first / (109 + PRIOR_WORDS - first)) - math.log(second / (100 + PRIOR_WORDS - second))
    assert (row["word"], row["selection"], row["random"]) == ("reef", 30, 5)
    assert row["log_odds"] == pytest.approx(log_odds, abs=1e-3)
    assert row["z"] == pytest.approx(log_odds / math.sqrt(1 / first + 1 / second), abs=0.05)
