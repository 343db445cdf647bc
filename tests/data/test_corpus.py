import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from cramlm.cli.app import app
from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import MOST_SOURCES, Corpus, build_corpus
from cramlm.data.parts import PartColumns, check_offsets
from cramlm.errors import ArtifactError, DataError, EnvironmentFault, UsageError
from cramlm.records import Document, Event
from cramlm.retrieval.index import Index
from cramlm.storage.artifacts import verify


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def build(tmp_path: Path, *records: dict[str, Any], **options: Any) -> Corpus:
    path = write(tmp_path / "input" / "raw.jsonl", list(records))
    return build_corpus(CorpusConfig(files=(str(path),), **options), tmp_path / "store")


def test_documents_come_back_by_position_with_id_and_source(tmp_path: Path) -> None:
    write(tmp_path / "input/b.jsonl", [{"text": "Third text.", "id": "x", "source": "news"}])
    write(tmp_path / "input/a.jsonl", [{"text": "First text, naïve."}, {"text": "Second text.", "source": "news"}])
    corpus = build_corpus(CorpusConfig(files=(str(tmp_path / "input"),)), tmp_path / "store")
    assert list(corpus) == [
        Document("a.jsonl:1", "First text, naïve.", "a.jsonl"),
        Document("a.jsonl:2", "Second text.", "news"),
        Document("x", "Third text.", "news"),
    ]
    assert len(corpus) == 3
    assert corpus.statistics["sources"] == {"a.jsonl": 1, "news": 2}
    assert corpus.statistics["other_sources"] == {"sources": 0, "passages": 0}
    assert [file["name"] for file in corpus.statistics["files"]] == ["a.jsonl", "b.jsonl"]
    assert verify(corpus.path) == 1
    assert verify(tmp_path / "store") == 2  # the corpus and its only part


def test_blank_texts_and_repetitions_are_dropped_and_counted(tmp_path: Path) -> None:
    corpus = build(tmp_path, {"text": "One text."}, {"text": " \n"}, {"text": "ONE text"}, {"text": "Two."}, {"text": "One  text.\n"})
    assert [document.text for document in corpus] == ["One text.", "ONE text", "Two."]
    assert corpus.statistics["rows"] == {"read": 5, "used": 5, "rejected": 0, "blank": 1, "cut": 0}
    assert corpus.statistics["passages"] == {"made": 4, "kept": 3, "duplicates": 1, "near_duplicates": 0}
    assert (corpus.statistics["words"], corpus.statistics["bytes"]) == (5, len("One text.ONE textTwo."))


def test_texts_of_the_same_words_are_dropped_and_counted_apart_on_request(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("One text.", "ONE text", "Two.", "One text.", "a therapist", "a the rapist", "ONE text")]
    corpus = build(tmp_path, *rows, duplicates="words")
    assert [document.text for document in corpus] == ["One text.", "Two.", "a therapist", "a the rapist"]
    assert corpus.statistics["passages"] == {"made": 7, "kept": 4, "duplicates": 2, "near_duplicates": 1}
    exact = build(tmp_path, *rows)
    assert (len(exact), exact.statistics["passages"]["near_duplicates"]) == (5, 0)


def test_index_drops_texts_of_the_same_words_with_a_flag_and_names_its_values(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("One text.", "ONE text", "Two.")), "utf-8")
    for number, flags in enumerate((["--duplicates", "words"], [])):
        result = CliRunner().invoke(app, ["index", str(raw), "--out", str(tmp_path / "index"), "--workers", "1", *flags])
        assert result.exit_code == 0, result.output
        assert len(Index.open(tmp_path / "index")) == 2 + number
    with pytest.raises(UsageError, match="'exact', 'words' or 'none'"):
        CliRunner().invoke(app, ["index", str(raw), "--out", str(tmp_path), "--duplicates", "loose"], catch_exceptions=False)


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
    write(tmp_path / "raw/a.jsonl", [{"text": "One text."}])
    (tmp_path / f"raw/b.{suffix}").write_bytes(EMPTY_FILES[suffix])
    config = CorpusConfig(files=(str(tmp_path / "raw"),))
    with pytest.raises(DataError, match=rf"b\.{suffix}: no rows.*--on-bad-row skip"):
        build_corpus(config, tmp_path / "store")
    events: list[Event] = []
    corpus = build_corpus(config.model_copy(update={"on_bad_row": "skip"}), tmp_path / "store", emit=events.append)
    assert [document.text for document in corpus] == ["One text."]
    assert [file["rows_read"] for file in corpus.statistics["files"]] == [1, 0]
    assert next(event.message for event in events if event.kind == "warning").startswith(f"{tmp_path}/raw/b.{suffix}: no rows")


def test_a_corpus_of_files_without_rows_is_refused_even_if_bad_rows_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [])
    with pytest.raises(DataError, match="0 documents"):
        build_corpus(CorpusConfig(files=(str(tmp_path / "a.jsonl"),), on_bad_row="skip"), tmp_path / "store")


def test_sources_may_be_as_many_as_passages_and_only_the_largest_are_listed(tmp_path: Path) -> None:
    url = "https://example.org/archive/2024/a-long-way-to-an-article/{}.html"
    rows = [{"text": f"Text {n}.", "source": url.format(n)} for n in range(2000)]
    rows += [{"text": f"More {n}.", "source": url.format(7)} for n in range(3)]
    events: list[Event] = []
    path = write(tmp_path / "input" / "raw.jsonl", rows)
    corpus = build_corpus(CorpusConfig(files=(str(path),)), tmp_path / "store", emit=events.append)
    assert [document.source for document in corpus] == [row["source"] for row in rows]
    assert (len(corpus.sources), corpus.sources[1999]) == (2000, url.format(1999))
    listed = corpus.statistics["sources"]
    assert (len(listed), next(iter(listed.items()))) == (MOST_SOURCES, (url.format(7), 4))
    assert corpus.statistics["other_sources"] == {"sources": 2000 - MOST_SOURCES, "passages": 2003 - MOST_SOURCES - 3}
    for folder in (corpus.path, corpus.parts[0].path):
        assert all(file.stat().st_size < 50_000 for file in folder.glob("*.json"))
    assert all(len(json.dumps(event.data)) < 50_000 for event in events)


def test_a_corpus_with_names_of_sources_cut_short_is_refused(tmp_path: Path) -> None:
    corpus = build(tmp_path, {"text": "Text.", "source": "news"}, {"text": "Other.", "source": "wiki"})
    np.save(corpus.path / "source_offsets.npy", np.array([0, 4, 7]))
    with pytest.raises(ArtifactError, match="source_offsets"):
        Corpus.open(corpus.path)


def test_a_long_document_becomes_numbered_passages(tmp_path: Path) -> None:
    text = " ".join(f"This is sentence number {n}." for n in range(30))
    corpus = build(tmp_path, {"text": text, "id": "long"}, {"text": text + " More."}, passage_words=40)
    assert [document.id for document in corpus][:4] == ["long#0", "long#1", "long#2", "long#3"]
    assert " ".join(corpus.text(position) for position in range(4)) == text
    assert corpus.document(4).id == "raw.jsonl:2#0"
    assert corpus.statistics["rows"]["cut"] == 2


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
    for column, ids in (("id", ["1"]), ("docno", None)):
        config = CorpusConfig(files=(str(tmp_path / file),), id_column=column)
        if ids is None:
            with pytest.raises(DataError, match=rf"{file}:1: no column 'docno'; found 'text', 'id'.*pass --id-column"):
                build_corpus(config, tmp_path / "store")
        else:
            assert [document.id for document in build_corpus(config, tmp_path / "store")] == ids


def test_repeated_ids_fail_with_their_number_and_two_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"raw.jsonl:3: id already used in .*raw.jsonl:1; 2 ids are repeated"):
        build(tmp_path, *({"text": f"text {n}", "id": id_} for n, id_ in enumerate(["a", "b", "a", "a", "c"])))
    assert not [path for path in (tmp_path / "store/corpora").iterdir() if path.is_dir()]


def test_bad_rows_fail_or_are_stored_with_their_reason(tmp_path: Path) -> None:
    records = [{"text": "good"}, {"text": 5}, {"txt": "a"}]
    with pytest.raises(DataError, match=r"raw.jsonl:2: 'text' is not a string"):
        build(tmp_path, *records)
    corpus = build(tmp_path, *records, on_bad_row="skip")
    rejected = [json.loads(line) for line in (corpus.path / "rejected.jsonl").read_text().splitlines()]
    assert [(row["line"], Path(row["file"]).name) for row in rejected] == [(2, "raw.jsonl"), (3, "raw.jsonl")]
    rows = corpus.statistics["rows"]
    assert rows["read"] == rows["used"] + rows["rejected"] == 3


def test_a_corpus_without_a_document_is_bad_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 documents"):
        build(tmp_path, {"text": " "})
    with pytest.raises(UsageError, match=r"near: raw.jsonl"):
        build_corpus(CorpusConfig(files=(str(tmp_path / "input/row.jsonl"),)), tmp_path / "store")


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
    path = write(tmp_path / "raw.jsonl", [{"text": f"text {n}"} for n in range(10)])

    def touch(event: Event) -> None:
        os.utime(path, (1, 1))

    with pytest.raises(EnvironmentFault, match="changed during reading"):
        build_corpus(CorpusConfig(files=(str(path),)), tmp_path / "store", emit=touch)


def test_the_stage_emits_start_progress_and_done(tmp_path: Path) -> None:
    events: list[Event] = []
    path = write(tmp_path / "raw.jsonl", [{"text": "text"}])
    build_corpus(CorpusConfig(files=(str(path),)), tmp_path / "store", emit=events.append)
    assert [event.kind for event in events] == ["start", "done"]
    assert {event.stage for event in events} == {"corpus"}
    assert events[0].total == events[1].done == path.stat().st_size / 1e6


def test_invalid_offsets_are_reported_as_damage(tmp_path: Path) -> None:
    corpus = build(tmp_path, {"text": "One."}, {"text": "Two."})
    with pytest.raises(IndexError):
        corpus.text(2)
    part = corpus.parts[0].path
    content, places = (part / "part.arrow").read_bytes(), np.array([0, 4, 8]).tobytes()
    assert content.count(places) == 1
    (part / "part.arrow").write_bytes(content.replace(places, np.array([0, 9, 8]).tobytes()))
    with pytest.raises(ArtifactError, match=r"part\.arrow: damaged"):
        Corpus.open(corpus.path)
    with pytest.raises(ArtifactError, match=r"part\.arrow: damaged, the offsets do not fit the text"):
        PartColumns(part).text()
    with pytest.raises(ArtifactError, match="the offsets do not fit the text"):
        check_offsets(Path("offsets.npy"), np.array([0, 5, 4]), end=4)


def test_texts_are_gathered_in_the_given_order(tmp_path: Path) -> None:
    corpus = build(tmp_path, *({"text": f"Text number {n}, naïve."} for n in range(20)))
    for positions in ([], [3], [19, 4, 5, 6, 6, 0], list(range(20))):
        buffer, offsets = corpus.gather(np.array(positions, np.int64))
        assert (buffer.dtype, offsets.dtype, buffer.flags.writeable) == (np.uint8, np.int64, True)
        assert [buffer[start:end].tobytes().decode() for start, end in pairwise(offsets)] == [corpus.text(p) for p in positions]
    with pytest.raises(IndexError):
        corpus.gather(np.array([0, 20]))
    assert sum(len(part) for part in corpus.parts) == 20


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=12))
def test_a_text_is_its_slice_of_the_buffer_and_none_is_lost(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("law")
    kept = [text for text in texts if text.strip()]
    if not kept:
        return
    corpus = build(folder, *({"text": text, "id": str(n)} for n, text in enumerate(texts)))
    buffer, offsets = corpus.gather(np.arange(len(corpus)))
    for document, (start, end) in zip(corpus, pairwise(offsets), strict=True):
        assert buffer[start:end].tobytes() == document.text.encode() == texts[int(document.id)].encode()
    passages, rows = corpus.statistics["passages"], corpus.statistics["rows"]
    assert passages["kept"] + passages["duplicates"] + rows["blank"] == len(texts)


SHARED = Path(__file__).parents[3] / "shared/data/corpus"


@pytest.mark.slow
@pytest.mark.shared_data
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared corpus is not here")
def test_the_shared_corpus_is_read_whole(tmp_path: Path) -> None:
    corpus = build_corpus(CorpusConfig(files=(str(SHARED / "general-0001.jsonl.zst"),)), tmp_path)
    rows = corpus.statistics["rows"]
    assert rows["read"] == rows["used"] == json.loads((SHARED / "general.json").read_text())["shards"][0]["passages"]
