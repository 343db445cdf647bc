"""Word vectors of a corpus, and the vectors of texts that they give."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.linear import contrastive, corpus_vectors, features, word_vectors
from cramlm.linear.corpus_vectors import build_word_vectors, count_word_vectors, forecast_word_vectors
from cramlm.linear.word_vectors import CorpusVectors, WordVectors
from cramlm.records import PAIR_BOUNDARY, FloatArray
from cramlm.storage.arrays import unit_vectors
from cramlm.storage.artifacts import verify
from cramlm.text.markers import Markers
from jsonl import write_jsonl


def passages() -> list[str]:
    """Sentences of two topics with the same frequent words; `kayak` and `summit` are in a few of them only."""
    rng = np.random.default_rng(0)
    topics = (["boat", "wave", "harbour", "sail"], ["ridge", "rock", "glacier", "valley"])
    texts = []
    for number in range(300):
        words = rng.choice(topics[number % 2], 6).tolist()
        words += (["kayak"] if number % 2 == 0 else ["summit"]) * (number % 20 < 2)
        texts.append(" ".join(["The", *words, "of", "the", f"number{number}", "."]))
    return texts


def corpus_of(texts: list[str], folder: Path) -> Corpus:
    path = write_jsonl(folder / "corpus.jsonl", ({"text": text} for text in texts))
    return build_corpus(CorpusConfig(files=(str(path),)), folder / "store")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(passages(), tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def vectors(corpus: Corpus) -> WordVectors:
    return count_word_vectors(corpus).trained


def test_words_with_the_same_contexts_have_similar_directions(vectors: WordVectors) -> None:
    direction = dict(zip(vectors.words, unit_vectors(vectors.vectors.astype(np.float32)), strict=True))
    assert direction["kayak"] @ direction["boat"] > 0.2
    assert direction["kayak"] @ direction["ridge"] < 0.1
    assert direction["kayak"] @ (direction["boat"] - direction["ridge"]) > 0.3


def test_rare_words_have_no_vector_and_frequent_ones_little_weight(vectors: WordVectors) -> None:
    assert not any(word.startswith("number") for word in vectors.words)
    assert vectors.words[0] == "the"
    weight = dict(zip(vectors.words, vectors.weights.tolist(), strict=True))
    share = 600 / sum(len(text.split()) - 1 for text in passages())  # every text has `the` twice and ends in a full stop
    assert weight["the"] == pytest.approx(word_vectors.FREQUENT / (word_vectors.FREQUENT + share), rel=1e-4)
    assert weight["kayak"] > 10 * weight["the"]


def test_words_too_rare_to_be_factorized_lie_near_words_with_the_same_contexts(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_vectors, "FACTORIZED_WORDS", 10)  # the, of, and the words of both topics
    found = count_word_vectors(corpus).counted
    direction = unit_vectors(found.vectors.astype(np.float32))
    place = {word: row for row, word in enumerate(found.words)}
    assert set(found.words[10:]) == {"kayak", "summit"}
    topics = ("boat", "wave", "harbour", "sail"), ("ridge", "rock", "glacier", "valley")
    near, far = (direction[[place[word] for word in topic]] @ direction[place["kayak"]] for topic in topics)
    assert near.min() > 0.1
    assert far.max() < 0
    assert near.min() > far.max() + 0.2
    monkeypatch.setattr(corpus_vectors, "MIN_FOLDED_COUNT", 1 + 300 // 20)  # `kayak` occurs 15 times
    assert count_word_vectors(corpus).counted.words == found.words[:10]


def test_texts_about_the_same_thing_are_close_whatever_frequent_and_unknown_words_they_hold(vectors: WordVectors) -> None:
    found = vectors.of(["a sail, a wave", "The boat, of the HARBOUR: unknown", "rock and glacier", "unknown", ""])
    assert found.dtype == np.float32
    assert found[0] @ found[1] > 0.5
    assert found[0] @ found[2] < 0
    assert np.linalg.norm(found, axis=1) == pytest.approx([1, 1, 1, 0, 0], abs=1e-5)


def test_many_texts_have_the_vectors_that_they_have_alone(vectors: WordVectors) -> None:
    texts = [*passages(), "漢字かな boat", "Ọ̀rọ̀ ridge", "sail\u200bboat"] * 2
    assert sum(map(len, texts)) > features._PLAIN_CHARACTERS
    alone = np.concatenate([vectors.of([text]) for text in texts])
    np.testing.assert_allclose(vectors.of(texts), alone, atol=1e-6)


def test_a_large_corpus_is_counted_at_equal_distances(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(text) for text in passages())
    monkeypatch.setattr(corpus_vectors, "MAX_BYTES", size // 3 + 1)
    messages: list[str] = []
    count_word_vectors(corpus, emit=lambda event: messages.append(event.message))
    assert any("of 100 passages" in message for message in messages)


@pytest.mark.faults
def test_the_forecast_of_memory_covers_the_arrays_of_counting_and_is_that_of_a_measured_corpus(tmp_path: Path) -> None:
    words, rng = [f"word{number}" for number in range(4000)], np.random.default_rng(1)
    texts = [" ".join(rng.choice(words, 200).tolist()) for _ in range(280)]  # half a megabyte with 4,000 words, as forecast
    corpus = corpus_of(texts, tmp_path / "many")
    size = sum(map(len, texts))
    tracemalloc.start()
    try:
        count_word_vectors(corpus)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.4 < peak / forecast_word_vectors(size)[1] < 1
    resident = 2_296e6  # peak less what was resident before: 482 MB of general text, one thread (docs/log.md)
    assert forecast_word_vectors(482_138_429)[1] == pytest.approx(resident, rel=0.1)
    assert forecast_word_vectors(0) == (0, 0)


@pytest.mark.parametrize(
    ("size", "threads", "seconds"),
    [
        (37_082_855, 1, 32.5),
        (148_359_022, 1, 49.9),
        (482_138_429, 1, 95.7),
        (37_082_855, 2, 21.4),
        (148_359_022, 2, 36.1),
        (482_138_429, 2, 74.1),
    ],
)
def test_the_forecast_of_seconds_is_that_of_measured_corpora(size: int, threads: int, seconds: float) -> None:
    assert forecast_word_vectors(size, threads)[0] == pytest.approx(seconds, rel=0.1)  # 1, 4 and 13 files of general text (docs/log.md)


def test_threads_that_read_spans_of_a_corpus_give_the_words_of_one(
    corpus: Corpus, vectors: WordVectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_vectors, "_BLOCK", 40)  # passages: eight blocks
    messages: list[int | None] = []
    found = count_word_vectors(corpus, threads=3, emit=lambda event: messages.append(event.done)).trained
    assert found.words == vectors.words
    assert np.array_equal(found.weights, vectors.weights)
    np.testing.assert_allclose(found.of(passages()[:5]), vectors.of(passages()[:5]), atol=1e-3)
    assert messages.index(300) > messages.index(120), "progress counts the passages of all threads"


def test_the_vectors_of_a_corpus_are_counted_once_and_verified(corpus: Corpus, vectors: WordVectors, tmp_path: Path) -> None:
    first = build_word_vectors(corpus, tmp_path)
    loaded = CorpusVectors.load(first.path).trained
    assert loaded.words == vectors.words
    np.testing.assert_allclose(loaded.of(passages()[:5]), vectors.of(passages()[:5]), atol=1e-3)
    starts: list[str] = []
    again = build_word_vectors(corpus, tmp_path, emit=lambda event: starts.append(event.kind))
    assert again.fingerprint == first.fingerprint
    assert "start" not in starts
    assert verify(tmp_path) == 1


def test_a_corpus_without_repeated_words_gives_texts_no_direction(tmp_path: Path) -> None:
    vectors = count_word_vectors(corpus_of(["one two three", "four five six"], tmp_path / "few")).trained
    assert vectors.words == ()
    assert not vectors.of(["one two"]).any()


class RecordingVectors(WordVectors):
    """Word vectors that record the texts of each call."""

    computed: ClassVar[list[list[str]]] = []

    def of(self, texts: Sequence[str]) -> FloatArray:
        self.computed.append(list(texts))
        return super().of(texts)


def test_the_texts_of_pairs_have_their_vectors_computed_once_where_they_are_the_segments(vectors: WordVectors) -> None:
    halves = [*itertools.pairwise(passages()[:9]), ("a sail", "")]
    texts = [*map(PAIR_BOUNDARY.join, halves), "a label", ""]
    kinds = (("", PAIR_BOUNDARY), (PAIR_BOUNDARY, ""))
    recording = RecordingVectors(vectors.words, vectors.vectors, vectors.weights)
    found = recording.of_segments(texts, Markers((PAIR_BOUNDARY,), kinds))
    first, second = ([pair[half] for pair in halves] for half in (0, 1))
    assert recording.computed == [texts, [*first, "a label", ""], [*second, "", ""]]
    of_kinds = unit_vectors(np.hstack([vectors.of([*column, "", ""]) for column in (first, second)]))
    width = vectors.vectors.shape[1]
    assert np.array_equal(found[:, width : 3 * width], of_kinds * np.float32(4**-0.5)), (
        "a text without a second one has no segment of a pair"
    )


def test_segments_that_are_not_the_texts_of_a_pair_have_vectors_of_their_own(vectors: WordVectors) -> None:
    markers = Markers((PAIR_BOUNDARY, "<", ">"), (("", "<"), ("<", ">"), (PAIR_BOUNDARY, "")))
    found = vectors.of_segments([f"boat <wave> sail{PAIR_BOUNDARY}ridge"], markers)
    expected = unit_vectors(np.hstack([vectors.of([text]) for text in ("boat", "wave", "ridge")]))
    width = vectors.vectors.shape[1]
    np.testing.assert_allclose(found[:, width : 4 * width], expected * np.float32(4**-0.5), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("own_words", [0, 12], ids=["one word", "words of their own"])
def test_a_corpus_of_passages_without_words_to_train_has_finite_vectors(
    own_words: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contrastive, "BATCH", 4)
    own = [[f"id{number}n{word}" for word in range(own_words)] for number in range(50)]
    texts = [" ".join(["eclipse"] * (1 if own_words else 12 + number) + words) for number, words in enumerate(own)]
    found = count_word_vectors(corpus_of(texts, tmp_path))
    found.save(tmp_path)
    assert np.isfinite(CorpusVectors.load(tmp_path).trained.vectors).all()


def test_the_trained_vectors_of_a_corpus_with_enough_passages_differ_from_the_counted_ones(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contrastive, "MIN_WORDS", 5)
    monkeypatch.setattr(contrastive, "MIN_WEIGHT", 0)
    few = count_word_vectors(corpus)
    assert np.array_equal(few.trained.vectors, few.counted.vectors)
    monkeypatch.setattr(contrastive, "BATCH", 16)
    messages: list[str] = []
    many = count_word_vectors(corpus, emit=lambda event: messages.append(event.message))
    assert any("halves of 288 passages" in message for message in messages)
    assert np.array_equal(many.counted.vectors, few.counted.vectors)
    found = many.trained.of(["a sail, a wave", "The boat, of the HARBOUR", "rock and glacier"])
    assert found[0] @ found[1] > few.trained.of(["a sail, a wave"])[0] @ few.trained.of(["The boat, of the HARBOUR"])[0]
    assert found[0] @ found[2] < 0
