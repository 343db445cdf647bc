from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from retrieval_fixtures import invented_texts, reference_union
from selection_fixtures import make_task, select, selected, write_corpus

from artifact_fixtures import ReleasedWhenWaitedFor
from cramlm.config.retriever import DenseConfig
from cramlm.data.corpus import Corpus
from cramlm.errors import UsageError
from cramlm.records import Emit, FloatArray, silent
from cramlm.retrieval import dense
from cramlm.retrieval.dense import DenseRetriever, nearest, unpack
from cramlm.storage.artifacts import verify

CONFIG = DenseConfig(encoder="anywhere", top_k=5)
TEXTS = invented_texts(12, seed=72, words=(4, 9))


class LetterEncoder:
    """A text's vector: how often each letter occurs in it, scaled to length 1."""

    fingerprint = "letters"

    def __init__(self) -> None:
        self.texts = 0

    def encode(self, texts: Sequence[str]) -> FloatArray:
        self.texts += len(texts)
        counts = np.array([[text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts], np.float32)
        return np.asarray(counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9), np.float32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"), invented_texts(150, seed=71))


def test_nearest_equals_a_full_sort_for_any_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    queries, vectors = (rng.integers(-2, 3, (rows, 6)).astype(np.float32) for rows in (9, 50))  # small whole numbers: many ties
    expected = [sorted(range(50), key=lambda place, row=row: (-row[place], place))[:7] for row in queries @ vectors.T]
    for passages, at_once in ((4096, 1024), (8, 4), (1, 1)):
        monkeypatch.setattr(dense, "_PASSAGES", passages)
        monkeypatch.setattr(dense, "_QUERIES", at_once)
        parts = [(0, vectors[:20]), (20, vectors[20:20]), (20, vectors[20:])]
        found = list(nearest(queries, parts, limit=7, emit=silent))
        assert [query for query, _ in found] == list(range(9))
        assert [unpack(keys)[0].tolist() for _, keys in found] == expected
        for (query, keys), places in zip(found, expected, strict=True):
            np.testing.assert_array_equal(unpack(keys)[1], (queries @ vectors.T)[query, places])


def test_the_union_is_that_of_a_full_comparison(corpus: Corpus, tmp_path: Path) -> None:
    texts = [*TEXTS, TEXTS[2], "  "]
    proposal = DenseRetriever(CONFIG, LetterEncoder(), tmp_path).propose(corpus, texts, emit=silent)
    encoder = LetterEncoder()
    scores = encoder.encode(TEXTS) @ encoder.encode([corpus.text(position) for position in range(len(corpus))]).T
    expected = reference_union(sorted(range(len(corpus)), key=lambda place, row=row: (-row[place], place))[:5] for row in scores)
    ranking = proposal.ranking
    assert list(zip(ranking.rank.tolist(), ranking.position.tolist(), ranking.query.tolist(), strict=True)) == expected
    counts = proposal.queries
    assert (counts.texts, counts.distinct, counts.answered, counts.empty) == (14, 12, 13, 1)


def test_the_corpus_is_encoded_once_for_all_tasks_and_again_for_another_prefix(corpus: Corpus, tmp_path: Path) -> None:
    encoder = LetterEncoder()
    first = DenseRetriever(CONFIG, encoder, tmp_path).propose(corpus, TEXTS, emit=silent)
    assert encoder.texts == 150 + 12
    again = DenseRetriever(CONFIG, encoder, tmp_path).propose(corpus, TEXTS[:3], emit=silent)
    assert encoder.texts == 150 + 12 + 3
    assert len(again.ranking) < len(first.ranking)
    DenseRetriever(CONFIG.model_copy(update={"passage_prefix": "zz "}), encoder, tmp_path).propose(corpus, TEXTS[:3], emit=silent)
    assert encoder.texts == 2 * 150 + 12 + 3 + 3
    assert verify(tmp_path) == 2 * len(corpus.parts)


def test_vectors_are_written_as_they_are_made(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is then an error of a write; the pages of a mapped file that has its full size at once end the process by a signal."""
    sizes: list[int] = []

    class Watching(LetterEncoder):
        def encode(self, texts: Sequence[str]) -> FloatArray:
            sizes.extend(path.stat().st_size for path in tmp_path.rglob("vectors.npy"))
            return super().encode(texts)

    monkeypatch.setattr(dense, "_ENCODED", 50)
    DenseRetriever(CONFIG, Watching(), tmp_path).propose(corpus, TEXTS, emit=silent)
    assert sizes[0] < sizes[-1] == next(tmp_path.rglob("vectors.npy")).stat().st_size


def test_blank_texts_alone_find_nothing(corpus: Corpus, tmp_path: Path) -> None:
    encoder = LetterEncoder()
    proposal = DenseRetriever(CONFIG, encoder, tmp_path).propose(corpus, ["", " "], emit=silent)
    assert len(proposal.ranking) == encoder.texts == 0
    assert proposal.queries.empty == 2


def test_vectors_that_another_process_computes_are_waited_for(corpus: Corpus, tmp_path: Path) -> None:
    def positions(emit: Emit) -> list[int]:
        found: list[int] = DenseRetriever(CONFIG, LetterEncoder(), tmp_path).propose(corpus, TEXTS, emit=emit).ranking.position.tolist()
        return found

    expected = positions(silent)
    (folder,) = (path for path in (tmp_path / "embeddings").iterdir() if path.is_dir())
    shutil.rmtree(folder)
    other = ReleasedWhenWaitedFor(folder)
    assert positions(other) == expected
    assert f"waiting: {folder}: being built by another process" in other.notes[0]


def test_a_selection_is_published_through_the_encoder_that_is_passed_in(corpus: Corpus, tmp_path: Path) -> None:
    task, out = make_task(TEXTS), tmp_path / "out"
    selection = select((corpus, None), task, out, CONFIG, open_encoder=lambda config: LetterEncoder())
    assert [row["position"] for row in selected(out)] == selection.position.tolist()
    assert 0 < selection.score.min() <= selection.score.max() <= 1.0001
    with pytest.raises(UsageError, match="needs an encoder"):
        select((corpus, None), task, out, CONFIG)
