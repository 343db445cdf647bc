from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from retrieval_fixtures import TextCorpus, index_texts, invented_texts, results

from cramlm.artifacts import verify
from cramlm.errors import ArtifactError
from cramlm.records import Event
from cramlm.retrieval import postings
from cramlm.retrieval.index import Index, build_index

TEXTS = [*invented_texts(300, seed=1), "日本語の文", "ẹ̀kọ́", "red " * 300]


def test_an_index_is_built_once_and_then_fresh(tmp_path: Path) -> None:
    corpus, events = TextCorpus(TEXTS), list[Event]()
    first = build_index(corpus, tmp_path, emit=events.append)
    assert [event.kind for event in events] == ["start", "done"]
    events.clear()
    assert build_index(corpus, tmp_path, emit=events.append).path == first.path
    assert [event.kind for event in events] == ["fresh"]


def test_the_same_corpus_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = index_texts(TEXTS, tmp_path / "one"), index_texts(TEXTS, tmp_path / "two")
    assert one.fingerprint == two.fingerprint
    assert one.path.name == two.path.name


def test_statistics_count_documents_terms_postings_and_tokens(tmp_path: Path) -> None:
    index = index_texts(["red red blue", "", "blue 文"], tmp_path)
    counted = {name: index.statistics[name] for name in ("documents", "terms", "postings", "tokens")}
    assert counted == {"documents": 3, "terms": 3, "postings": 4, "tokens": 5}
    assert index.documents == 3


def test_a_corpus_without_any_term_is_indexed_and_finds_nothing(tmp_path: Path) -> None:
    index = index_texts(["!!!", "..."], tmp_path)
    assert results(index, ["red", "!!!"], limit=3) == [[], []]


@pytest.mark.parametrize("name", [*postings.TYPES, "statistics"])
def test_a_flipped_or_missing_byte_is_noticed_and_the_file_named(tmp_path: Path, name: str) -> None:
    file = f"{name}.json" if name == "statistics" else f"{name}.npy"
    whole = index_texts(TEXTS, tmp_path).path
    for damage in ("flip", "cut", "remove"):
        copy = tmp_path / damage
        shutil.copytree(whole, copy)
        content = bytearray((copy / file).read_bytes())
        if damage == "flip":
            content[-1] ^= 1
            (copy / file).write_bytes(content)
        elif damage == "cut":
            (copy / file).write_bytes(content[:-1])
        else:
            (copy / file).unlink()
        for check in (Index.open, verify):
            with pytest.raises(ArtifactError, match=file):
                check(copy)


def test_a_large_file_is_mapped_and_damage_in_it_is_found_by_verify(tmp_path: Path) -> None:
    index = index_texts(invented_texts(5000, seed=2, words=(90, 110)), tmp_path)
    large = index.path / "row_terms.npy"
    assert large.stat().st_size > 1 << 20
    assert not index.postings.rows.terms.flags.owndata
    content = bytearray(large.read_bytes())
    content[len(content) // 2] ^= 1
    large.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"row_terms\.npy"):
        verify(index.path)


def test_an_index_of_another_corpus_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    corpus, other = TextCorpus(TEXTS), TextCorpus(["something else"])
    index = build_index(corpus, tmp_path)
    index.check_corpus(corpus)
    with pytest.raises(ArtifactError, match=f"{corpus.fingerprint[:16]}.*{other.fingerprint[:16]}"):
        index.check_corpus(other)


def test_an_index_by_another_analyzer_is_refused_with_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_texts(TEXTS, tmp_path)
    monkeypatch.setattr(postings, "ANALYZER", "words-of-tomorrow")
    with pytest.raises(ArtifactError, match=r"words-ngrams.*words-of-tomorrow"):
        Index.open(index.path)


def test_a_vocabulary_that_outgrows_its_tables_keeps_every_term(tmp_path: Path) -> None:
    texts = [" ".join(f"word{number}" for number in range(start, start + 50)) for start in range(0, 100_000, 50)]
    index = index_texts(texts, tmp_path)
    assert index.statistics["terms"] == 100_000
    found = results(index, ["word0", "word77777", "word99999"], limit=2)
    assert [[position for position, _ in hits] for hits in found] == [[0], [1555], [1999]]


def test_terms_that_share_a_hash_key_are_told_apart_when_looked_up(tmp_path: Path) -> None:
    index = index_texts(["elephantine", "rhinoceroses"], tmp_path)
    arrays = index.postings
    copy = tmp_path / "colliding"
    shutil.copytree(index.path, copy)
    keys = np.full(2, arrays.term_keys[list(arrays.term_ids).index(0)], np.uint64)  # both words under the first one's key
    for ids in ([0, 1], [1, 0]):
        colliding = postings.Postings(
            copy, arrays.fingerprint, arrays.statistics, arrays.rows, arrays.blocks, arrays.lengths, arrays.document_frequencies,
            arrays.term_offsets, arrays.term_bytes, keys, np.array(ids, np.int32),
        )  # fmt: skip
        assert [position for position, _ in results(Index(colliding), ["elephantine"], limit=2)[0]] == [0]
