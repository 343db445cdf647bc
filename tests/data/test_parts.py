"""A corpus is what reading its files in order, in one go, would give: however they are grouped, whoever reads them, in any steps."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.config.run import CorpusConfig
from cramlm.data import parts
from cramlm.data.corpus import Corpus, build_corpus, verify_corpora
from cramlm.data.parts import group_files
from cramlm.errors import ArtifactError, DataError
from cramlm.io.paths import FileStamp
from cramlm.records import Document, Event
from cramlm.storage.artifacts import verify
from cramlm.text.words import MeasuredText, count_words, cut_passages
from jsonl import read_jsonl, write_jsonl

PASSAGE_WORDS = 20


def config(*paths: Path, **options: Any) -> CorpusConfig:
    return CorpusConfig(files=tuple(map(str, paths)), **options)


def invented(name: str, count: int) -> list[dict[str, Any]]:
    return [{"text": f"{name} tells story {n} about {name * (n % 7 + 1)}.", "id": f"{name}-{n}"} for n in range(count)]


def written(folder: Path, **files: list[dict[str, Any]]) -> CorpusConfig:
    """Write the rows of each file to input/NAME.jsonl in `folder`; return the config of all files there."""
    for name, rows in files.items():
        write_jsonl(folder / "input" / f"{name}.jsonl", rows)
    return config(folder / "input")


def build(settings: CorpusConfig, store: Path, **options: Any) -> Corpus:
    """Build a corpus with a part for every file."""
    return build_corpus(settings, store, **{"part_bytes": 1, **options})


def untouched(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: equal before and after if nothing was written."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())}


def leftovers(store: Path) -> list[Path]:
    return [path for path in store.rglob("*.tmp-*") if path.is_dir()]


def sequential_reading(files: dict[str, list[dict[str, Any]]], duplicates: str) -> tuple[list[Document], dict[str, Any]]:
    """The documents of these files read in order in one go, and what became of their rows."""
    seen: set[bytes] = set()
    seen_words: set[bytes] = set()
    documents: list[Document] = []
    counts: dict[str, Any] = {"rejected": [], "blank": 0, "cut": 0, "made": 0, "exact": 0, "near": 0, "words": 0}
    for name, records in files.items():
        for line, record in enumerate(records, start=1):
            text = record.get("text")
            if text is None:
                counts["rejected"].append((name, line))
                continue
            words = count_words(text)
            spans = cut_passages(text, words, PASSAGE_WORDS) if words else []
            counts["blank"] += not spans
            counts["cut"] += len(spans) > 1
            for piece, (start, end) in enumerate(spans):
                counts["made"] += 1
                passage, suffix = text[start:end], f"#{piece}" if len(spans) > 1 else ""
                measured = MeasuredText(passage)
                if measured.duplicate_key() in seen:
                    counts["exact"] += 1
                elif duplicates == "words" and measured.words_key() in seen_words:
                    counts["near"] += 1
                else:
                    counts["words"] += count_words(passage)
                    documents.append(Document((record.get("id") or f"{name}:{line}") + suffix, passage, record.get("source") or name))
                seen.add(measured.duplicate_key())
                seen_words.add(measured.words_key())
    return documents, counts


TEXTS = st.one_of(
    st.sampled_from(["One text.", "ONE text", "One \ttext.", "two", "2 words", "naïve", "第三", " ", "...", "!!"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.integers(30, 90).map(lambda words: " ".join(f"word{n}." if n % 9 == 8 else "word" for n in range(words))),
)
RECORDS = st.fixed_dictionaries(
    {}, optional={"text": TEXTS, "source": st.sampled_from(["", "news", "a.jsonl", "b.jsonl", "wiki"]), "own": st.booleans()}
)


@given(
    contents=st.lists(st.lists(RECORDS, min_size=1, max_size=8), min_size=1, max_size=5),
    part_bytes=st.sampled_from([1, 300, 900, 10**9]),
    duplicates=st.sampled_from(["exact", "words"]),
)
def test_every_grouping_equals_sequential_reading(
    tmp_path_factory: pytest.TempPathFactory, contents: list[list[dict[str, Any]]], part_bytes: int, duplicates: str
) -> None:
    folder = tmp_path_factory.mktemp("law")
    files = {f"{letter}.jsonl": records for letter, records in zip("abcde", contents, strict=False)}
    for name, records in files.items():
        for n, record in enumerate(records):
            if record.pop("own", False):
                record["id"] = f"{name}/{n}"
        write_jsonl(folder / "input" / name, records)
    documents, counts = sequential_reading(files, duplicates)
    settings = config(folder / "input", passage_words=PASSAGE_WORDS, on_bad_row="skip", duplicates=duplicates)
    if not documents:
        with pytest.raises(DataError, match="0 documents"):
            build_corpus(settings, folder / "store", part_bytes=part_bytes)
        return
    corpus = build_corpus(settings, folder / "store", part_bytes=part_bytes)
    assert list(corpus) == documents
    assert list(corpus.sources) == list(dict.fromkeys(document.source for document in documents))
    assert [corpus.sources[number] for number in corpus.source] == [document.source for document in documents]
    rows, passages = corpus.statistics["rows"], corpus.statistics["passages"]
    assert (rows["rejected"], rows["blank"], rows["cut"]) == (len(counts["rejected"]), counts["blank"], counts["cut"])
    assert rows["read"] == sum(map(len, contents)) == rows["used"] + rows["rejected"]
    found = {"duplicates": counts["exact"], "near_duplicates": counts["near"]}
    assert passages == {"made": counts["made"], "kept": len(documents), **found}
    assert (corpus.statistics["words"], corpus.statistics["bytes"]) == (counts["words"], sum(len(d.text.encode()) for d in documents))
    assert corpus.statistics["sources"] == {name: [d.source for d in documents].count(name) for name in corpus.sources}
    assert [file["name"] for file in corpus.statistics["files"]] == list(files)
    rejected = [row for file in corpus.path.glob("rejected.jsonl") for row in read_jsonl(file)]
    assert [(Path(row["file"]).name, row["line"]) for row in rejected] == counts["rejected"]
    other = build_corpus(settings, folder / "other", part_bytes=10**9)
    assert other.fingerprint == corpus.fingerprint
    buffer, offsets = corpus.gather(np.arange(len(corpus))[::-1])
    assert [buffer[start:end].tobytes().decode() for start, end in pairwise(offsets)] == [document.text for document in reversed(documents)]
    assert sum(map(len, corpus.parts)) == len(corpus)
    for part in corpus.parts:
        local = np.arange(len(part.offsets) - 1) if part.kept is None else part.kept
        assert [part.buffer[part.offsets[n] : part.offsets[n + 1]].tobytes().decode() for n in local] == [
            document.text for document in documents[part.first : part.first + len(part)]
        ]


def test_scattered_passages_are_read_from_the_files_and_a_truncated_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = build(written(tmp_path, ann=invented("ann", 900), bob=invented("bob", 900)), tmp_path)
    chosen = np.array([1500, 3, 4, 3, 1799, 899, 900])
    text, offsets = corpus.gather(chosen)
    monkeypatch.setattr(parts, "_SCATTERED", 10)
    corpus.release()
    from_files, ends = corpus.gather(chosen)
    assert (from_files.tobytes(), ends.tolist()) == (text.tobytes(), offsets.tolist())
    assert corpus.gather(chosen[:0])[0].size == 0
    file = corpus.parts[1].path / parts.PART_FILE
    os.truncate(file, corpus.parts[1].columns.text_start + 100)
    with pytest.raises(ArtifactError, match=f"{file}: damaged, its text ends after .* bytes"):
        corpus.gather(chosen)


def grouped(sizes: dict[str, int], part_bytes: int) -> list[tuple[str, ...]]:
    groups = group_files([FileStamp(Path("/corpus") / name, size, 0) for name, size in sorted(sizes.items())], part_bytes)
    return [tuple(Path(str(stamp.path)).name for stamp in group) for group in groups]


def test_small_files_share_a_part_a_large_one_has_its_own_and_one_more_file_changes_few_parts() -> None:
    assert grouped(dict.fromkeys("abcdefgh", 10), 10**9) == [tuple("abcdefgh")]
    assert grouped({"a": 10, "b": 10, "c": 10**8, "d": 10}, 4 * 10**8) == [("a", "b"), ("c",), ("d",)]
    sizes = {f"{number:04}.jsonl": 10 + number % 7 for number in range(400)}
    parts = grouped(sizes, 1000)
    assert [name for part in parts for name in part] == list(sizes)
    assert all(sum(sizes[name] for name in part) <= 1000 for part in parts)
    assert 5 <= len(parts) <= 21  # 5 kB in parts of about 500 bytes
    changed = [len(set(grouped({**sizes, f"{number:04}-new.jsonl": 12}, 1000)) - set(parts)) for number in range(0, 400, 10)]
    assert sum(changed) / len(changed) < 2.5


def test_a_file_that_is_added_is_read_alone(tmp_path: Path) -> None:
    first = build(written(tmp_path, b=invented("b", 50), d=invented("d", 50)), tmp_path / "store")
    before = {part.path: untouched(part.path) for part in first.parts}
    settings = written(tmp_path, c=[*invented("c", 20), {"text": invented("b", 3)[2]["text"]}, {"text": invented("d", 9)[8]["text"]}])
    events: list[Event] = []
    grown = build(settings, tmp_path / "store", emit=events.append)
    assert [part.path in before for part in grown.parts] == [True, False, True]
    assert {path: untouched(path) for path in before} == before
    assert events[0].message == "reading 1 of 3 files, the others are read already"
    assert events[0].data == {"parts": 3, "parts_read_already": 2}
    assert events[0].total == (tmp_path / "input/c.jsonl").stat().st_size / 1e6
    assert grown.statistics["passages"] == {"made": 122, "kept": 120, "duplicates": 2, "near_duplicates": 0}
    b, c, d = grown.parts
    assert (b.content, b.kept) == (first.parts[0].content, None)
    assert (len(c), len(c.offsets) - 1, c.first) == (21, 22, 50)
    assert d.content != first.parts[1].content  # it lost a passage to c
    assert (len(d), d.first) == (49, 71)
    assert d.kept.tolist() == [*range(8), *range(9, 50)]
    assert grown.document(71 + 8) == Document("d-9", invented("d", 10)[9]["text"], "d.jsonl")
    again = build(settings, tmp_path / "elsewhere", part_bytes=10**9)
    assert list(again) == list(grown)
    assert again.fingerprint == grown.fingerprint != first.fingerprint


def test_the_corpus_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    rows = {name: [*invented(name, 30), {"text": "Everyone says so."}, {"text": 5}] for name in "abc"}
    skipping = written(tmp_path, **rows).model_copy(update={"on_bad_row": "skip"})
    events: list[Event] = []
    alone, together = (build(skipping, tmp_path / f"by-{workers}", workers=workers, emit=events.append) for workers in (1, 2))
    assert len(together.parts) == 3
    assert together.fingerprint == alone.fingerprint
    assert list(together) == list(alone)
    assert sum(event.kind == "warning" and "1 of 32 rows rejected, first line 32" in event.message for event in events) == 6
    assert verify(tmp_path) == 8


@pytest.mark.parametrize("part_bytes", [1, 1_000_000])
def test_ids_that_two_files_share_are_preceded_by_the_name_of_the_file(tmp_path: Path, part_bytes: int) -> None:
    one = [{"text": "Red.", "id": 1}, {"text": "Green.", "id": 2}]
    other = [{"text": "Blue.", "id": 2}, {"text": "No id."}, {"text": "Red.", "id": 3}, {"text": "White.", "id": 1}]
    corpus = build(written(tmp_path, a=one, b=other), tmp_path / "store", part_bytes=part_bytes)
    assert [document.id for document in corpus] == ["a.jsonl/1", "a.jsonl/2", "b.jsonl/2", "b.jsonl:2", "b.jsonl/1"]
    assert corpus.statistics["repeated_ids"] == 2
    alone = build(config(tmp_path / "input/b.jsonl"), tmp_path / "store")
    assert [document.id for document in alone] == ["2", "b.jsonl:2", "3", "1"]
    assert "repeated_ids" not in alone.statistics


@pytest.mark.parametrize("part_bytes", [1, 1_000_000])
@pytest.mark.parametrize(("own", "text"), [("c.jsonl:2", "Two ships."), ("c.jsonl:2#1", " ".join(f"word{n}." for n in range(500)))])
@pytest.mark.parametrize("file", ["b", "c"])
def test_an_id_that_a_row_without_id_gets_fails_with_both_lines(tmp_path: Path, part_bytes: int, own: str, text: str, file: str) -> None:
    files = {"b": [{"text": "Blue."}, {"text": "Green.", "id": "c.jsonl:3"}], "c": [{"text": "Red."}, {"text": text}]}
    files[file][0]["id"] = own
    where = rf"/{file}.jsonl:1: the id '{own}' is also that of .*/c.jsonl:2, a row without id; give that row an id of its own"
    with pytest.raises(DataError, match=where):
        build(written(tmp_path, **files), tmp_path / "store", part_bytes=part_bytes)
    files["c"][1]["id"] = "other"
    corpus = build(written(tmp_path, **files), tmp_path / "store", part_bytes=part_bytes)
    assert len({document.id for document in corpus}) == len(corpus)


def test_an_id_like_that_of_a_row_without_id_is_accepted_if_one_of_both_is_no_document(tmp_path: Path) -> None:
    rows = [{"text": "One ship.", "id": "c.jsonl:2"}, {"text": "One ship."}, {"text": " "}, {"text": "Two.", "id": "c.jsonl:3"}]
    corpus = build(written(tmp_path, c=[*rows, {"text": "Three.", "id": "d.jsonl:1"}]), tmp_path / "store")
    assert [document.id for document in corpus] == ["c.jsonl:2", "c.jsonl:3", "d.jsonl:1"]


def test_repeated_ids_in_one_of_several_files_fail_with_both_lines(tmp_path: Path) -> None:
    repeated = [{"text": f"Text {n}.", "id": id_} for n, id_ in enumerate(["x-0", "y", "x-0", "z"])]
    with pytest.raises(DataError, match=r"b.jsonl:3: id already used in .*b.jsonl:1; 1 ids are repeated in this file"):
        build(written(tmp_path, a=invented("x", 4), b=repeated), tmp_path / "store")
    assert not [path for path in (tmp_path / "store/corpora").iterdir() if path.is_dir()]


def test_the_first_bad_file_is_reported_whichever_process_is_faster(tmp_path: Path) -> None:
    settings = written(tmp_path, a=invented("a", 10), b=[*invented("b", 3_000), {"text": 1}], **{name: [{"text": 2}] for name in "cdef"})
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"b.jsonl:3001: 'text' is not a string but a number \(1\); fix it"):
            build(settings, tmp_path / "store", workers=workers)
    assert verify(tmp_path / "store") == 1  # a's part is kept
    assert not leftovers(tmp_path / "store")


@pytest.mark.faults
def test_an_interruption_ends_the_workers_and_leaves_no_partial_folder(tmp_path: Path) -> None:
    settings = written(tmp_path, **{name: invented(name * 40, 20_000) for name in "ab"})

    def interrupt(event: Event) -> None:
        if event.kind == "progress":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(settings, tmp_path / "store", workers=2, emit=interrupt)
    assert not leftovers(tmp_path / "store")
    assert len(build(settings, tmp_path / "store")) == 40_000


@pytest.mark.faults
def test_after_kill_9_the_workers_end_and_the_next_call_resumes(tmp_path: Path) -> None:
    settings = written(tmp_path, **{name: invented(name * 40, 8_000 if name != "a" else 10) for name in "abc"})
    script = tmp_path / "script.py"  # without the guard of its main part that multiprocessing would need
    script.write_text(
        textwrap.dedent(f"""
            from pathlib import Path
            from cramlm.config.run import CorpusConfig
            from cramlm.data.corpus import build_corpus

            config = CorpusConfig(files=({str(tmp_path / "input")!r},))
            store = Path({str(tmp_path / "store")!r})
            build_corpus(config, store, workers=2, part_bytes=1, emit=lambda event: print(event.kind, flush=True))
        """)
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    with process:
        assert "progress\n" in process.stdout
        process.kill()
    assert process.returncode == -signal.SIGKILL
    parts = tmp_path / "store/parts"
    deadline = time.monotonic() + 600
    while leftovers(parts) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not leftovers(parts)
    assert len(build(settings, tmp_path / "store")) == 16_010
    assert verify(tmp_path / "store") == 4
    assert not leftovers(tmp_path / "store")


def test_a_store_can_be_moved(tmp_path: Path) -> None:
    corpus = build(written(tmp_path, a=invented("a", 3), b=invented("b", 3)), tmp_path / "store")
    documents, place = list(corpus), corpus.path.relative_to(tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    (tmp_path / "store").rename(tmp_path / "moved")
    for folder in ("copy", "moved"):
        opened = Corpus.open(tmp_path / folder / place)
        assert (list(opened), opened.fingerprint) == (documents, corpus.fingerprint)


def test_a_missing_part_is_named_and_read_again(tmp_path: Path) -> None:
    settings = written(tmp_path, a=invented("a", 3), b=invented("b", 3))
    corpus = build(settings, tmp_path / "store")
    lost = corpus.parts[1].path
    shutil.rmtree(lost)
    for check in (lambda: Corpus.open(corpus.path), lambda: verify_corpora(tmp_path)):
        with pytest.raises(ArtifactError, match=f"{lost.name}: missing, a part of the corpus"):
            check()
    events: list[Event] = []
    again = build(settings, tmp_path / "store", emit=events.append)
    assert (again.path, again.fingerprint, list(again)) == (corpus.path, corpus.fingerprint, list(corpus))
    assert [event.kind for event in events] == ["start", "up_to_date"]
    verify_corpora(tmp_path)


def test_more_parts_are_opened_than_the_initial_limit_of_open_files(tmp_path: Path) -> None:
    settings = written(tmp_path, **{f"n{n}": invented(f"n{n}", 1) for n in range(40)})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 30, hard))
        corpus = build(settings, tmp_path / "store")
        assert len([document.id for document in corpus]) == len(corpus.parts) == 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
