from __future__ import annotations

import json
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from retrieval_fixtures import TextCorpus, index_texts, invented_texts, results

from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import build_corpus
from cramlm.errors import ArtifactError
from cramlm.io.executors import Processes
from cramlm.records import Event
from cramlm.retrieval.bm25 import analysis as analysis_module
from cramlm.retrieval.bm25 import segment as segment_module
from cramlm.retrieval.bm25.analysis import Vocabulary
from cramlm.retrieval.bm25.index import Bm25Index, build_index
from cramlm.storage.artifacts import MANIFEST, verify
from damaging import cut, flip
from jsonl import read_json, write_jsonl

TEXTS = [*invented_texts(300, seed=1), "日本語の文", "ẹ̀kọ́", "red " * 300]


def write_texts(path: Path) -> Path:
    return write_jsonl(path, [{"text": text} for text in TEXTS])


def test_an_index_is_built_once_and_elsewhere_with_the_same_bytes(tmp_path: Path) -> None:
    corpus, events = TextCorpus(TEXTS), list[Event]()
    first = build_index(corpus, tmp_path, emit=events.append)
    assert [event.kind for event in events if event.kind != "progress"] == ["start", "done"]
    events.clear()
    assert build_index(corpus, tmp_path, emit=events.append).path == first.path
    assert [event.kind for event in events] == ["up_to_date"]
    again = build_index(corpus, tmp_path / "elsewhere")
    assert (again.fingerprint, again.path.name) == (first.fingerprint, first.path.name)


def test_the_keys_of_an_index_and_its_segments_hold_the_version_of_unicode(tmp_path: Path) -> None:
    build_index(TextCorpus(TEXTS), tmp_path)
    manifests = sorted(tmp_path.rglob(MANIFEST))
    assert len(manifests) == 2, "the index and a segment"
    for manifest in manifests:
        assert unicodedata.unidata_version in json.dumps(read_json(manifest)["key"]), manifest


def test_statistics_count_documents_terms_postings_and_tokens_and_a_corpus_may_be_without_a_term(tmp_path: Path) -> None:
    index = index_texts(["red red blue", "", "blue 文"], tmp_path)
    assert index.statistics == {"documents": 3, "postings": 4, "tokens": 5, "segments": 1}
    assert index.segments[0][1].terms == 3
    assert index.documents == 3
    assert results(index_texts(["!!!", "..."], tmp_path), ["red", "!!!"], limit=3) == [[], []]


@pytest.mark.parametrize("name", [*segment_module.TYPES, "statistics"])
def test_a_damaged_or_missing_file_and_a_missing_segment_are_named(tmp_path: Path, name: str) -> None:
    file = f"{name}.json" if name == "statistics" else f"{name}.npy"
    index = index_texts(TEXTS, tmp_path)
    ((_, only),) = index.segments
    for damage in (flip, lambda path: cut(path, 0.9), Path.unlink):
        content = (only.path / file).read_bytes()
        damage(only.path / file)
        for check in (lambda: Bm25Index.open(index.path), index.verify, lambda: verify(tmp_path)):
            with pytest.raises(ArtifactError, match=file):
                check()
        (only.path / file).write_bytes(content)
    assert Bm25Index.open(index.path).fingerprint == index.fingerprint
    shutil.rmtree(only.path)
    with pytest.raises(ArtifactError, match=only.path.name):
        Bm25Index.open(index.path)


@pytest.mark.parametrize("executor", [None, Processes(1)])
def test_missing_segments_are_built_again_and_the_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Processes | None
) -> None:
    monkeypatch.setattr(segment_module, "SEGMENT_PASSAGES", 100)
    corpus, events = build_corpus(CorpusConfig(files=(str(write_texts(tmp_path / "corpus.jsonl")),)), tmp_path), list[Event]()
    index = build_index(corpus, tmp_path)
    found, kept = results(index, TEXTS[:20], limit=5), index.segments[1][1].path
    before = kept.stat().st_ino
    for number, (_, segment) in enumerate(index.segments):
        if number != 1:
            shutil.rmtree(segment.path)
    again = build_index(corpus, tmp_path, executor=executor, emit=events.append)
    missing = len(index.segments) - 1
    assert missing == 3
    assert [event.message for event in events if event.kind != "progress"] == [f"building {missing} missing segments again", "up to date"]
    assert (again.fingerprint, results(again, TEXTS[:20], limit=5)) == (index.fingerprint, found)
    assert kept.stat().st_ino == before
    verify(tmp_path)


def test_a_large_file_is_mapped_takes_three_bytes_per_posting_and_damage_in_it_is_found_by_verify(tmp_path: Path) -> None:
    index = index_texts(invented_texts(8000, seed=2, words=(120, 140), vocabulary=8000), tmp_path)
    ((_, only),) = index.segments
    assert sum(file.stat().st_size for file in only.path.glob("*.npy")) < 3 * index.statistics["postings"]
    large = only.path / "postings.npy"
    assert large.stat().st_size > 1 << 20
    assert not only.blocks.postings.flags.owndata
    flip(large, large.stat().st_size // 2)
    with pytest.raises(ArtifactError, match=r"postings\.npy"):
        index.verify()


def test_a_corpus_that_grew_keeps_its_segments_and_finds_what_a_new_index_finds_and_so_does_a_changed_one(tmp_path: Path) -> None:
    texts = invented_texts(900, seed=4)
    first = build_index(TextCorpus(texts[:600], cuts=[200, 400]), tmp_path)
    grown = build_index(TextCorpus(texts, cuts=[200, 400, 100, 200]), tmp_path)
    assert [entry.fingerprint for _, entry in grown.segments][:1] == [entry.fingerprint for _, entry in first.segments]
    assert [first for first, _ in grown.segments] == [0, 600]
    changed = build_index(TextCorpus(texts[50:], cuts=[150, 400, 100, 200]), tmp_path)  # in front: segments of its own
    for index, own in ((grown, texts), (changed, texts[50:])):
        alone = index_texts(own, tmp_path / "alone")
        assert results(index, texts[:50], limit=20) == results(alone, texts[:50], limit=20)


def test_a_new_corpus_is_cut_into_segments_of_about_equal_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "SEGMENT_PASSAGES", 80)
    for cuts, sizes in (([10] * 13, [70, 60]), ([30] * 5, [60, 60, 30]), ([79, 2, 50], [79, 52])):
        index = build_index(TextCorpus(TEXTS[: sum(cuts)], cuts=cuts), tmp_path)
        assert [len(segment) for _, segment in index.segments] == sizes


def test_a_grown_corpus_keeps_the_segments_of_the_latest_published_index(tmp_path: Path) -> None:
    texts = invented_texts(900, seed=31)
    first = build_index(TextCorpus(texts[:600], cuts=[200, 400]), tmp_path)
    unpublished = tmp_path / "indexes" / ".0123.tmp-host-7-abc"  # of a process that builds another one, or was killed
    unpublished.mkdir()
    (unpublished / "index.json").write_text('{"segments": [{"content": ["of another corpus"]}]}', "utf-8")
    grown = build_index(TextCorpus(texts, cuts=[200, 400, 300]), tmp_path)
    assert [segment.path for _, segment in grown.segments][:1] == [segment.path for _, segment in first.segments]


def test_an_index_of_another_corpus_or_analyzer_is_refused_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, other = TextCorpus(TEXTS), TextCorpus(["something else"])
    index = build_index(corpus, tmp_path)
    index.check_corpus(corpus)
    with pytest.raises(ArtifactError, match=f"{corpus.fingerprint[:16]}.*{other.fingerprint[:16]}"):
        index.check_corpus(other)
    monkeypatch.setattr(analysis_module, "ANALYZER", "words-of-tomorrow")
    with pytest.raises(ArtifactError, match=r"words-ngrams.*words-of-tomorrow"):
        Bm25Index.open(index.path)


def test_a_vocabulary_that_outgrows_its_tables_keeps_every_term(tmp_path: Path) -> None:
    texts = [" ".join(f"word{number}" for number in range(start, start + 50)) for start in range(0, 100_000, 50)]
    index = index_texts(texts, tmp_path)
    assert index.segments[0][1].terms == 100_000
    found = results(index, ["word0", "word77777", "word99999"], limit=2)
    assert [[position for position, _ in hits] for hits in found] == [[0], [1555], [1999]]


def test_terms_with_equal_hash_keys_are_distinguished(tmp_path: Path) -> None:
    index = index_texts(["elephantine", "rhinoceroses"], tmp_path)
    ((_, whole),) = index.segments
    keys = np.full(2, whole.term_keys[list(whole.term_ids).index(0)], np.uint64)  # both words under the first one's key
    for ids in (np.array([0, 1], np.int32), np.array([1, 0], np.int32)):
        for array in (keys, ids):
            array.flags.writeable = False  # as those of a segment: their kernel is compiled for such arrays
        colliding = replace(whole, term_keys=keys, term_ids=ids)
        vocabulary = Vocabulary()
        vocabulary.tokenize(np.frombuffer(b"elephantine", np.uint8), np.array([0, 11]))
        number = int(colliding.find_terms(vocabulary)[0])
        start, end = whole.term_offsets[number : number + 2]
        assert whole.term_bytes[start:end].tobytes() == b"elephantine"
