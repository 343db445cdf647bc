"""Importance resampling, against a plain implementation of the released code's arithmetic that shares nothing with ours."""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from retrieval_fixtures import invented_texts
from selection_fixtures import write_corpus

from cramlm.config.retriever import DsirConfig
from cramlm.data.corpus import Corpus
from cramlm.errors import DataError
from cramlm.records import Event, silent
from cramlm.retrieval.dsir import DsirRetriever, in_order, resample
from cramlm.retrieval.ranking import Ranking
from cramlm.storage.artifacts import verify
from cramlm.text.ngrams import count, divergence, hash_texts

MADE_UP = ["Well, this is (in a way) 3.5% of it_all!", "«Où?» – çà et là; naïve CAFÉ…", "", "  ...  ", "I\tsaw\nA\u00a0cat, a cat"]
TARGET = invented_texts(30, seed=32, words=(3, 15), vocabulary=300)


def plain_counts(texts: list[str], buckets: int) -> list[int]:
    """Xie et al. 2023, section 4: words and pairs of neighbours, hashed, counted."""
    counts = [0] * buckets
    for text in texts:
        words = re.findall(r"\w+|[^\w\s]+", text.lower())
        for ngram in [*words, *(f"{first} {second}" for first, second in itertools.pairwise(words))]:
            counts[int(hashlib.sha256(ngram.encode()).hexdigest(), 16) % buckets] += 1
    return counts


def plain_log_weights(raw: list[str], target: list[str], buckets: int) -> list[float]:
    def shares(texts: list[str]) -> np.ndarray:
        counts = np.array(plain_counts(texts, buckets))
        return counts / counts.sum()

    gain = np.log(shares(target) + 1e-8) - np.log(shares(raw) + 1e-8)
    return [float(np.inner(plain_counts([text], buckets), gain)) for text in raw]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    texts = [*invented_texts(250, seed=31, vocabulary=300), *filter(str.strip, MADE_UP)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), texts)


def propose(corpus: Corpus, config: DsirConfig, store: Path, *, seed: int = 1, threads: int = 1) -> Ranking:
    return DsirRetriever(config, store, seed, threads).propose(corpus, TARGET, emit=silent).ranking


@pytest.mark.parametrize("buckets", [10_000, 97, 65_536])
def test_words_and_pairs_fall_into_the_buckets_of_the_released_code(buckets: int) -> None:
    texts = [*MADE_UP, "x" * 200 + " y", *TARGET]
    ngrams = hash_texts(texts, buckets=buckets)
    for number, text in enumerate(texts):
        own = ngrams.buckets[ngrams.offsets[number] : ngrams.offsets[number + 1]]
        assert np.bincount(own, minlength=buckets).tolist() == plain_counts([text], buckets)
    assert count(ngrams, buckets=buckets).tolist() == plain_counts(texts, buckets)


@pytest.mark.parametrize("length", [1, 3, 4, 26, 27, 28, 54, 55, 56, 63, 64, 119, 120])
def test_words_of_any_length_fall_into_the_buckets_of_the_released_code(length: int) -> None:
    word = "abcdefghij" * 12
    texts = [" ".join(word[start : start + length] for start in range(10)), f"{word[:length]} {word[:length]} {word[:length]} b"]
    assert count(hash_texts(texts)).tolist() == plain_counts(texts, 10_000)


@given(st.lists(st.text(st.characters(codec="utf-8", max_codepoint=0x24F), max_size=150), max_size=6))
def test_any_latin_text_falls_into_the_buckets_of_the_released_code(texts: list[str]) -> None:
    texts = [unicodedata.normalize("NFC", text).replace("İ", "I") for text in texts]  # its lower case holds a mark, of which below
    assert count(hash_texts(texts)).tolist() == plain_counts(texts, 10_000)


def test_a_mark_belongs_to_its_word_and_a_character_without_spaces_is_one() -> None:
    def ngrams(text: str) -> list[int]:
        return sorted(hash_texts([text]).buckets.tolist())

    def buckets(*words: str) -> list[int]:
        return sorted(int(hashlib.sha256(word.encode()).hexdigest(), 16) % 10_000 for word in words)

    assert ngrams("ẹ̀kọ́ ilé") == buckets("ẹ̀kọ́", "ilé", "ẹ̀kọ́ ilé")
    assert ngrams(unicodedata.normalize("NFD", "ẹ̀kọ́ ilé")) == ngrams("ẹ̀kọ́ ilé")
    assert ngrams("हिन्दी") == buckets("हिन्दी")
    assert ngrams("機械 a") == buckets("機", "械", "a", "機 械", "械 a")


@pytest.mark.parametrize("seed", [1, 2])
def test_the_ranking_equals_the_released_codes_top_k_of_weights_and_gumbel_noise(corpus: Corpus, tmp_path: Path, seed: int) -> None:
    log_weights = plain_log_weights([corpus.text(position) for position in range(len(corpus))], TARGET, 10_000)
    noised = np.array(log_weights) + np.random.default_rng([seed, 0x44534952]).gumbel(size=len(log_weights))
    ranking = propose(corpus, DsirConfig(), tmp_path, seed=seed)
    for k in (1, 20, 100):
        assert set(ranking.position[:k].tolist()) == set(np.argpartition(-noised, k)[:k].tolist())
    np.testing.assert_allclose(ranking.score, np.array(log_weights)[ranking.position], rtol=1e-5)


def test_sampling_is_in_proportion_to_the_weights() -> None:
    """Of two positions the first must win in w1 / (w1 + w2) of all samples; by the third decimal that is checked on 4,000 seeds."""
    weights = np.array([3.0, 1.0])
    wins = sum(int(resample(np.log(weights), seed=seed)[0] == 0) for seed in range(4000))
    assert wins / 4000 == pytest.approx(0.75, abs=0.02)


def test_weights_scaled_to_the_average_length_are_the_mean_gain_of_an_ngram(corpus: Corpus, tmp_path: Path) -> None:
    plain = propose(corpus, DsirConfig(), tmp_path)
    scaled = propose(corpus, DsirConfig(normalise="length"), tmp_path)
    lengths = np.diff(hash_texts([corpus.text(position) for position in range(len(corpus))]).offsets)
    expected = np.empty(len(corpus))
    expected[plain.position] = plain.score
    expected *= lengths.mean() / lengths
    np.testing.assert_allclose(scaled.score, expected[scaled.position], rtol=1e-5)


def test_the_corpus_is_hashed_once_and_neither_threads_nor_tasks_change_its_ngrams(corpus: Corpus, tmp_path: Path) -> None:
    events: list[Event] = []
    first = DsirRetriever(DsirConfig(), tmp_path / "one", 1, 1).propose(corpus, TARGET, emit=events.append)
    assert {event.kind for event in events} == {"progress"}
    events.clear()
    again = DsirRetriever(DsirConfig(), tmp_path / "one", 1, 1).propose(corpus, TARGET[:5], emit=events.append)
    assert events == []
    assert again.ranking.position.tolist() != first.ranking.position.tolist()
    other = DsirRetriever(DsirConfig(), tmp_path / "two", 1, 3).propose(corpus, TARGET, emit=silent)
    assert other.ranking.position.tolist() == first.ranking.position.tolist()
    assert verify(tmp_path / "one") == verify(tmp_path / "two") == len(corpus.parts)


def test_training_texts_without_a_character_are_an_error(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 n-grams in the training texts"):
        DsirRetriever(DsirConfig(), tmp_path, 1, 1).propose(corpus, ["", " \n"], emit=silent)


def test_divergence_is_zero_for_equal_shares_and_the_hand_calculated_value_elsewhere() -> None:
    target, other = np.array([3, 1, 0]), np.array([1, 1, 2])
    assert divergence(target, 5 * target) == pytest.approx(0)
    assert divergence(target, other) == pytest.approx(0.75 * np.log(0.75 / 0.25) + 0.25 * np.log(0.25 / 0.25))


@given(st.integers(0, 40), st.integers(1, 4))
def test_work_in_order_keeps_the_order(items: int, threads: int) -> None:
    assert list(in_order(lambda item: item * item, range(items), threads=threads)) == [item * item for item in range(items)]
