"""What a corpus holds, what it refuses and what it reports; how its files are grouped and read is in test_parts.py."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from pydantic import ValidationError

from commands import cramlm, error_line, succeed
from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import MOST_SOURCES, Corpus, build_corpus
from cramlm.data.parts import PartColumns, Sources, save_sources
from cramlm.errors import ArtifactError, DataError, EnvironmentFault, UsageError
from cramlm.records import Document, Event
from cramlm.retrieval.index import Index
from cramlm.storage.artifacts import verify
from jsonl import write_jsonl


def build(tmp_path: Path, *records: dict[str, Any], **options: Any) -> Corpus:
    path = write_jsonl(tmp_path / "input" / "raw.jsonl", records)
    return build_corpus(CorpusConfig(files=(str(path),), **options), tmp_path / "store")


def test_documents_come_back_by_position_with_id_and_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "input/b.jsonl", [{"text": "Third text.", "id": "x", "source": "news"}])
    write_jsonl(tmp_path / "input/a.jsonl", [{"text": "First text, naïve."}, {"text": "Second text.", "source": "news"}])
    corpus = build_corpus(CorpusConfig(files=(str(tmp_path / "input"),)), tmp_path / "store")
    assert list(corpus) == [
        Document("a.jsonl:1", "First text, naïve.", "a.jsonl"),
        Document("a.jsonl:2", "Second text.", "news"),
        Document("x", "Third text.", "news"),
    ]
    buffer, offsets = corpus.gather(np.array([2, 0, 0]))
    assert buffer.tobytes().decode() == "Third text." + 2 * "First text, naïve."
    assert (buffer.dtype, offsets.dtype, buffer.flags.writeable) == (np.uint8, np.int64, True)
    assert verify(corpus.path) == 1
    assert verify(tmp_path / "store") == 2  # the corpus and its only part
    for outside in (lambda: corpus.text(3), lambda: corpus.gather(np.array([0, 20]))):
        with pytest.raises(IndexError):
            outside()


def test_index_drops_texts_of_the_same_words_with_a_flag_and_names_its_values(tmp_path: Path) -> None:
    raw = write_jsonl(tmp_path / "raw.jsonl", [{"text": text} for text in ("One text.", "ONE text", "Two.", "a therapist", "a the rapist")])
    for flags, kept in ((["--duplicates", "words"], 4), ([], 5)):
        succeed("index", raw, "--out", tmp_path / "index", "--workers", "1", *flags)
        corpus = Index.open(tmp_path / "index").corpus
        assert len(corpus) == kept
        assert (corpus.statistics["passages"]["duplicates"], corpus.statistics["passages"]["near_duplicates"]) == (0, 5 - kept)
    refused = cramlm("index", raw, "--out", tmp_path, "--duplicates", "loose")
    assert "'exact', 'words', 'none'" in error_line(refused, 2)


EMPTY_FILES = {
    "jsonl": b"",
    "csv": b"text,label\n",
    "tsv": b"",
    "txt": b"\n \n",
    "jsonl.gz": gzip.compress(b""),
    "jsonl.zst": zstandard.compress(b""),
    "parquet": b"",
}


@pytest.mark.parametrize("suffix", EMPTY_FILES)
def test_a_file_without_rows_stops_a_corpus_unless_bad_rows_are_skipped(tmp_path: Path, suffix: str) -> None:
    write_jsonl(tmp_path / "raw/a.jsonl", [{"text": "One text."}])
    (tmp_path / f"raw/b.{suffix}").write_bytes(EMPTY_FILES[suffix])
    config = CorpusConfig(files=(str(tmp_path / "raw"),))
    with pytest.raises(DataError, match=rf"b\.{suffix}: no rows.*--on-bad-row skip"):
        build_corpus(config, tmp_path / "store")
    events: list[Event] = []
    corpus = build_corpus(config.model_copy(update={"on_bad_row": "skip"}), tmp_path / "store", emit=events.append)
    assert [document.text for document in corpus] == ["One text."]
    assert [file["rows_read"] for file in corpus.statistics["files"]] == [1, 0]
    assert next(event.message for event in events if event.kind == "warning").startswith(f"{tmp_path}/raw/b.{suffix}: no rows")


def test_files_in_a_folder_that_are_not_read_are_counted_and_named(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_jsonl(raw / "sub/a.jsonl", [{"text": "One text."}])

    def notes(store: str, *files: Path) -> list[str]:
        events: list[Event] = []
        build_corpus(CorpusConfig(files=tuple(map(str, files))), tmp_path / store, emit=events.append)
        return [event.message for event in events if event.kind == "note"]

    assert notes("a", raw) == []
    (raw / ".hidden.pdf").touch()
    (raw / "old.zip").touch()
    assert notes("b", raw) == [f"left out by name: 1 file, like {raw}/old.zip"]
    described = write_jsonl(raw / "sub/wiki.json", [{"text": "Another text."}])
    assert notes("c", raw) == [f"left out by name: 2 files, like {described} (a .json file is read if it is passed by name)"]
    assert notes("d", raw, described) == [f"left out by name: 1 file, like {raw}/old.zip"]
    assert notes("e", described) == []


@pytest.mark.parametrize(("rows", "options"), [([{"text": " "}], {}), ([], {"on_bad_row": "skip"})], ids=["blank rows", "no rows"])
def test_a_corpus_without_a_document_is_bad_data(tmp_path: Path, rows: list[dict[str, str]], options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="0 documents"):
        build(tmp_path, *rows, **options)
    with pytest.raises(UsageError, match=r"near: raw.jsonl"):
        build_corpus(CorpusConfig(files=(str(tmp_path / "input/row.jsonl"),)), tmp_path / "store")


def test_sources_may_be_as_many_as_passages_and_only_the_largest_are_listed(tmp_path: Path) -> None:
    url = "https://example.org/archive/2024/a-long-way-to-an-article/{}.html"
    rows = [{"text": f"Text {n}.", "source": url.format(n)} for n in range(2000)]
    rows += [{"text": f"More {n}.", "source": url.format(7)} for n in range(3)]
    events: list[Event] = []
    path = write_jsonl(tmp_path / "input" / "raw.jsonl", rows)
    corpus = build_corpus(CorpusConfig(files=(str(path),)), tmp_path / "store", emit=events.append)
    assert [document.source for document in corpus] == [row["source"] for row in rows]
    assert (len(corpus.sources), corpus.sources[1999]) == (2000, url.format(1999))
    listed = corpus.statistics["sources"]
    assert (len(listed), next(iter(listed.items()))) == (MOST_SOURCES, (url.format(7), 4))
    assert corpus.statistics["other_sources"] == {"sources": 2000 - MOST_SOURCES, "passages": 2003 - MOST_SOURCES - 3}
    for folder in (corpus.path, corpus.parts[0].path):
        assert all(file.stat().st_size < 50_000 for file in folder.glob("*.json"))
    assert all(len(json.dumps(event.data)) < 50_000 for event in events)


def test_documents_are_kept_whole_and_repeated_on_request(tmp_path: Path) -> None:
    rows = [{"text": " ".join(["word"] * 500), "id": name} for name in "ab"]
    corpus = build(tmp_path, *rows, passage_words=0, duplicates="none")
    assert [(document.id, document.text) for document in corpus] == [(row["id"], row["text"]) for row in rows]
    assert corpus.statistics["passages"]["duplicates"] == 0
    assert len(build(tmp_path, *rows, passage_words=0)) == 1
    with pytest.raises(ValidationError, match="passage_words 19 is under 20"):
        CorpusConfig(files=("raw.jsonl",), passage_words=19)


@pytest.mark.parametrize(("file", "content"), [("raw.jsonl", b'{"text": "one", "id": 1}\n'), ("raw.csv", b"text,id\none,1\n")])
def test_an_id_column_that_was_named_must_be_there(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    named, absent = (CorpusConfig(files=(str(tmp_path / file),), id_column=column) for column in ("id", "docno"))
    assert [document.id for document in build_corpus(named, tmp_path / "store")] == ["1"]
    with pytest.raises(DataError, match=rf"{file}:1: no column 'docno'; found 'text', 'id'.*pass --id-column"):
        build_corpus(absent, tmp_path / "store")


def test_a_second_build_reads_nothing_and_an_equal_one_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    events: list[Event] = []
    first = build(tmp_path, {"text": "One."}, {"text": "Two."})
    config = CorpusConfig(files=(str(tmp_path / "input/raw.jsonl"),))
    assert build_corpus(config, tmp_path / "store", emit=events.append).fingerprint == first.fingerprint
    assert [event.kind for event in events] == ["up_to_date"]
    moved = build(tmp_path / "elsewhere", {"text": "One."}, {"text": "Two."})
    assert moved.fingerprint == first.fingerprint
    assert build(tmp_path, {"text": "One."}, {"text": "Three."}).path != first.path


def test_a_file_that_changes_during_the_build_is_an_environment_fault(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "raw.jsonl", [{"text": f"text {n}"} for n in range(10)])
    with pytest.raises(EnvironmentFault, match="changed during reading"):
        build_corpus(CorpusConfig(files=(str(path),)), tmp_path / "store", emit=lambda event: os.utime(path, (1, 1)))


def shift_offsets(*offsets: int) -> Callable[[Corpus], None]:
    """Replace the offsets of the two texts, 0, 4, 8."""

    def shift(corpus: Corpus) -> None:
        file = corpus.parts[0].path / "part.arrow"
        content, before = file.read_bytes(), np.array([0, 4, 8]).tobytes()
        assert content.count(before) == 1
        file.write_bytes(content.replace(before, np.array(offsets).tobytes()))
        with pytest.raises(ArtifactError, match=r"part\.arrow: damaged, the offsets do not fit the text"):
            PartColumns(corpus.parts[0].path).strings("text")

    return shift


@pytest.mark.parametrize("offsets", [[0, 4, 7], [0, 4, 9], [1, 4, 8], [0, 5, 4, 8], [], [[0, 8]]])
def test_offsets_of_sources_that_do_not_fit_their_names_are_damage(tmp_path: Path, offsets: list[Any]) -> None:
    save_sources(tmp_path, ["news", "wiki"])
    assert list(Sources(tmp_path)) == ["news", "wiki"]
    np.save(tmp_path / "source_offsets.npy", np.array(offsets, np.int64))
    with pytest.raises(ArtifactError, match=r"source_offsets\.npy: damaged, the offsets do not fit the text"):
        Sources(tmp_path)


def replace_part(corpus: Corpus) -> None:
    """By the part of another corpus, which is whole."""
    other = build(corpus.store / "other", {"text": "Other."})
    shutil.rmtree(corpus.parts[0].path)
    shutil.copytree(other.parts[0].path, corpus.parts[0].path)


def edit_part(change: Callable[[bytes], bytes]) -> Callable[[Corpus], object]:
    def edit(corpus: Corpus) -> None:
        file = corpus.parts[0].path / "part.arrow"
        file.write_bytes(change(file.read_bytes()))

    return edit


DAMAGES: dict[str, tuple[Callable[[Corpus], object], str]] = {
    "names of sources cut short": (lambda corpus: np.save(corpus.path / "source_offsets.npy", np.array([0, 4, 7])), "source_offsets"),
    "a text that begins behind its end": (shift_offsets(0, 9, 8), r"part\.arrow: damaged"),
    "a text that begins after the first byte": (shift_offsets(1, 4, 8), r"part\.arrow: damaged"),
    "a part cut": (edit_part(lambda data: data[:-1]), r"part\.arrow: damaged"),
    "a byte of a part": (edit_part(lambda data: b"X" + data[1:]), r"part\.arrow: damaged"),
    "no file in a part": (lambda corpus: (corpus.parts[0].path / "part.arrow").unlink(), r"part\.arrow: missing"),
    "another part": (replace_part, "is not the part that"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_when_a_corpus_is_opened(tmp_path: Path, damage: str) -> None:
    corpus = build(tmp_path, {"text": "One.", "source": "news"}, {"text": "Two.", "source": "wiki"})
    do, message = DAMAGES[damage]
    do(corpus)
    with pytest.raises(ArtifactError, match=message):
        Corpus.open(corpus.path)
