"""The public index: `cramlm.Index`, the commands `index`, `search` and `select` without labels, runs and relevance judgements."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from retrieval_fixtures import invented_texts, reference_search, reference_union

import cramlm
from commands import cramlm as command
from commands import error_line, printed, python, succeed
from cramlm.errors import ArtifactError, CramError, DataError, EnvironmentFault, UsageError
from cramlm.records import Event
from cramlm.retrieval.bm25.analysis import Analyzer, analyze
from cramlm.retrieval.bm25.search import Scoring
from cramlm.retrieval.index import IndexSettings
from cramlm.retrieval.selection import SelectionTable
from cramlm.retrieval.trec import MEASURES, measure, read_qrels, run_lines
from cramlm.storage.stages import default_store
from damaging import edit_json
from server_process import PATIENCE

TEXTS = invented_texts(200, seed=3)
QUERIES = invented_texts(6, seed=4, words=(2, 6))
DOCUMENTS = {"ship": "The red ship leaves the harbour.", "hill": "A green hill above the harbour", "none": "!!!"}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> cramlm.Index:
    return cramlm.Index.build(TEXTS, tmp_path_factory.mktemp("texts"), workers=1)


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def test_hits_equal_the_formula_and_texts_are_those_of_the_ids(index: cramlm.Index) -> None:
    hits = index.search([*QUERIES, "xylophone"], top_k=7)
    assert len(hits) == len(QUERIES) + 1
    for query, ids, scores, texts in zip(QUERIES, hits.ids, hits.scores, hits.texts(), strict=False):
        expected = reference_search(TEXTS, query, 7)
        assert ids == [str(position) for position, _ in expected]
        assert scores.tolist() == pytest.approx([score for _, score in expected], rel=1e-5)
        assert texts == [TEXTS[int(name)] for name in ids]
    assert (hits.ids[-1], hits.texts()[-1], len(hits.scores[-1])) == ([], [], 0)
    assert index.search(QUERIES[0], top_k=7).ids == hits.ids[:1]


def test_the_union_keeps_the_best_rank_of_each_document_and_the_first_query_that_gave_it(index: cramlm.Index) -> None:
    queries = [*QUERIES, "xylophone", QUERIES[0]]
    hits, union = index.search(queries, top_k=9), index.union(queries, top_k=9)
    expected = reference_union([int(name) for name in ids] for ids in hits.ids)
    assert list(zip(union.ranks.tolist(), map(int, union.ids), union.queries.tolist(), strict=True)) == expected
    assert union.texts() == [TEXTS[int(name)] for name in union.ids]
    assert len(union) == len(union.scores) == len(expected)


def test_texts_in_memory_stay_whole_and_keep_their_ids(tmp_path: Path) -> None:
    long = " ".join(f"word{number}" for number in range(1000))
    index = cramlm.Index.build({"a": long, "b": long, "c": " "}, tmp_path)
    assert index.search(["word999"]).ids == [["a", "b"]]
    again = cramlm.Index.build({"a": long, "b": long, "c": " "}, tmp_path)
    assert again.bm25.path == index.bm25.path
    assert cramlm.Index.build({"a": "other"}, tmp_path).search(["other"]).ids == [["a"]]


def test_paths_and_texts_are_distinguished(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / f"{name}.jsonl", {"id": 1, "text": f"{name} text"}) for name in ("one", "two")]
    for source in (files, [str(file) for file in files], str(tmp_path / "*.jsonl"), tmp_path):
        index = cramlm.Index.build(source, tmp_path / "index")
        assert index.search(["two"]).ids == [["two.jsonl/1"]]
    assert cramlm.Index.build(["two texts", "one"], tmp_path / "texts").search(["two"]).ids == [["0"]]
    with pytest.raises(UsageError, match=r"'missing.jsonl' is a path, 'some text' is a text"):
        cramlm.Index.build(["missing.jsonl", "some text"], tmp_path / "index")
    with pytest.raises(UsageError, match=r"missing.jsonl: no such file"):
        cramlm.Index.build(["missing.jsonl"], tmp_path / "index")
    for nothing in ([], {}):
        with pytest.raises(UsageError, match="no texts to index"):
            cramlm.Index.build(nothing, tmp_path / "index")
    with pytest.raises(UsageError, match=r"the text of text '0' is not a string but int"):
        cramlm.Index.build([5], tmp_path / "index")
    with pytest.raises(UsageError, match=r"no setting 'k2' of an index; it has .*k1"):
        cramlm.Index.build(["a"], tmp_path / "index", k2=1)
    with pytest.raises(UsageError, match="workers: 0 processes; pass 1 or more, or None"):
        cramlm.Index.build(["a"], tmp_path / "index", workers=0)


@pytest.mark.parametrize(
    "name", ["corpus.jsnl", "corpus.jsonl", "corpus.cvs", "corpus.json", "corpus/part", "corpus/part?", "~/corpus-that-is-missing"]
)
def test_strings_that_look_like_paths_and_name_nothing_are_refused_and_not_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "other.jsonl", {"text": "some text"})
    remedy = "check the path; texts that look like paths are passed as a mapping from ids to texts"
    for source in ([name], ["other.jsonl", name]):
        with pytest.raises(UsageError, match=rf"^{re.escape(name)}: no such file.*; {remedy}$"):
            cramlm.Index.build(source, tmp_path / "index")
    assert not (tmp_path / "index").exists()
    assert cramlm.Index.build({"a": name}, tmp_path / "index").search(name.split("/")[-1]).ids == [["a"]]


def test_a_missing_path_is_named_with_near_names_and_one_string_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "corpus.jsonl", {"text": "some text"})
    with pytest.raises(UsageError, match=r"^corpus.jsnl: no such file or folder \(near: corpus.jsonl\); check"):
        cramlm.Index.build(["corpus.jsnl"], tmp_path / "index")
    with pytest.raises(UsageError, match=r"^a red ship: no such file.*; pass texts as a list, or as a mapping"):
        cramlm.Index.build("a red ship", tmp_path / "index")
    with pytest.raises(UsageError, match=r"^'a red ship\\n\\x00.*….*': no such file"):
        cramlm.Index.build("a red ship\n\0" + "word " * 2000, tmp_path / "index")


def test_a_list_with_a_string_that_is_no_path_holds_texts_also_words_with_a_slash_or_a_point(tmp_path: Path) -> None:
    texts = ["and/or", "node.js", "see corpus.jsnl", "km/h"]
    assert cramlm.Index.build(texts, tmp_path).search(["js", "km", "jsnl"]).ids == [["1"], ["3"], ["2"]]


def test_a_corpus_with_its_own_index_and_selection_is_indexed_again_without_them(tmp_path: Path) -> None:
    write_lines(tmp_path / "corpus.jsonl", {"text": "a red ship"}, "no JSON", {"text": "a green hill"})
    write_lines(tmp_path / "queries.txt", "red")
    fingerprints = set()
    for _ in range(3):
        succeed("index", ".", "-o", "index", "--on-bad-row", "skip", "--workers", "1", cwd=tmp_path)
        fingerprints.add(cramlm.Index.open(tmp_path / "index").corpus.fingerprint)
        assert len(fingerprints) == 1
        succeed("select", "--index", "index", "--queries", "queries.txt", "-o", "selection", cwd=tmp_path)


@pytest.mark.parametrize("out", ["s3://bucket/index", Path("s3://bucket/index")])
def test_an_index_is_not_written_to_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str | Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="s3://bucket/index: is a URL, and the output is a path on this machine"):
        cramlm.Index.build(["a red ship"], out)
    assert not list(tmp_path.iterdir())


def test_a_path_may_start_at_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "raw").mkdir()
    write_lines(tmp_path / "raw" / "corpus.jsonl", {"text": "some text"})
    assert cramlm.Index.build(["~/raw"], tmp_path / "index").search("text").ids == [["corpus.jsonl:1"]]
    monkeypatch.setenv("CRAMLM_STORE", "~/store")
    assert default_store() == tmp_path / "store"


def test_a_file_may_be_named_with_a_tilde_and_a_user_may_have_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "~notes.jsonl", {"text": "some text"})
    assert cramlm.Index.build(["~notes.jsonl"], tmp_path / "index").search("text").ids == [["~notes.jsonl:1"]]
    for name in ("HOME", "XDG_CACHE_HOME", "CRAMLM_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert "~/raw.jsonl: no such file" in error_line(command("index", "~/raw.jsonl", "-o", tmp_path / "other"), 2)
    with pytest.raises(EnvironmentFault, match=r"^this user has no home folder for the store; pass --store DIR, or set CRAMLM_STORE$"):
        default_store()


SETTINGS: list[IndexSettings] = [
    {"k1": 0.9, "b": 0.4},
    {"stop_words": "english"},
    {"stop_words": [TEXTS[0].split()[0]], "k1": 2.0},
    {"norm": "lucene", "k1": np.float32(2), "b": np.float32(0.5)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_index_keeps_its_settings_and_analyzes_queries_with_them(tmp_path: Path, settings: IndexSettings) -> None:
    cramlm.Index.build(TEXTS, tmp_path, **settings)
    index = cramlm.Index.open(tmp_path)
    analyzer = Analyzer.of(settings.get("stop_words", "none"))
    assert index.bm25.analyzer == analyzer
    scoring = Scoring(settings.get("k1", 1.2), settings.get("b", 0.75), settings.get("norm", "exact"))
    assert index.scoring == scoring
    kept = [" ".join(analyze(text, analyzer)) for text in TEXTS]
    hits = index.search(QUERIES, top_k=20)
    if scoring.norm == "exact":  # the reference has no other
        for query, ids, scores in zip(QUERIES, hits.ids, hits.scores, strict=True):
            expected = reference_search(kept, " ".join(analyze(query, analyzer)), 20, k1=scoring.k1, b=scoring.b)
            assert ids == [str(position) for position, _ in expected]
            assert scores.tolist() == pytest.approx([score for _, score in expected], rel=1e-5)


@pytest.mark.parametrize("k1", ["inf", "1e300", "1001", "nan", "-1"])
def test_a_k1_with_which_nothing_is_found_is_refused(folder: Path, tmp_path: Path, k1: str) -> None:
    with pytest.raises(UsageError, match=r"^BM25 needs 0 <= k1 <= 1000"):
        cramlm.Index.build(["a red ship"], tmp_path / "index", k1=float(k1))
    for arguments in (("index", folder / "corpus.jsonl", "-o", tmp_path / "index"), ("search", folder / "index", "ship")):
        assert "k1" in error_line(command(*arguments, f"--k1={k1}"), 2)
    select = ("select", "--index", folder / "index", "--queries", folder / "queries.csv", "-o", tmp_path / "out")
    assert error_line(command(*select, "--set", f"retriever.k1={k1}"), 2).startswith("command line: retriever.k1: ")
    assert not list(tmp_path.iterdir())


def test_passages_per_query_are_refused_for_a_retriever_without_queries(folder: Path, tmp_path: Path) -> None:
    select = ("select", "--index", folder / "index", "--queries", folder / "queries.csv", "-o", tmp_path / "out", "--top-k", "3")
    message = error_line(command(*select, "--retriever", "random"), 2)
    assert message.endswith("--top-k: the retriever random has no number of passages per query; pass --max-documents N in its place")
    assert "the retriever dsir has no number" in error_line(command(*select, "--set", "retriever.kind=dsir"), 2)
    assert "retriever.kind: '[1]' is not one of 'bm25', 'random'," in error_line(command(*select, "--set", "retriever.kind=[1]"), 2)
    assert "valid dictionary" in error_line(command(*select, "--set", "retriever=5"), 2)


def test_the_largest_k1_still_finds_documents(folder: Path) -> None:
    assert "ship" in printed("search", folder / "index", "ship", "--k1", "1000")


def test_a_stemmed_index_finds_inflected_words(tmp_path: Path) -> None:
    pytest.importorskip("Stemmer", reason="PyStemmer is missing: pip install 'cramlm[search]'")
    cramlm.Index.build({"d": "retrieving generous connections"}, tmp_path, stemmer="english", stop_words="english")
    index = cramlm.Index.open(tmp_path)
    assert index.search(["connected retrieval", "the connecting"]).ids == [["d"], ["d"]]
    assert [term for term, _ in index.explain("connect")[0].terms] == ["connect"]


def test_an_index_without_diacritics_finds_words_with_other_ones(tmp_path: Path) -> None:
    index = cramlm.Index.build({"d": "Ọ̀ṣun náà"}, tmp_path / "bare", diacritics="remove")
    assert index.search(["osun", "Òsún", "naa"]).ids == [["d"], ["d"], ["d"]]
    assert cramlm.Index.build({"d": "Ọ̀ṣun náà"}, tmp_path / "kept").search(["osun"]).ids == [[]]
    with pytest.raises(UsageError, match="diacritics 'none': use keep or remove"):
        cramlm.Index.build({"d": "x"}, tmp_path / "other", diacritics="none")


def test_indexes_of_other_settings_share_the_corpus_and_not_the_segments(tmp_path: Path) -> None:
    plain = cramlm.Index.build(TEXTS, tmp_path)
    stopped = cramlm.Index.build(TEXTS, tmp_path, stop_words="english")
    rescored = cramlm.Index.build(TEXTS, tmp_path, k1=0.9)
    assert plain.corpus.path == stopped.corpus.path
    assert plain.bm25.path == rescored.bm25.path != stopped.bm25.path


def test_an_index_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    index = cramlm.Index.build(TEXTS, tmp_path)
    edit_json(index.bm25.path / "manifest.json", format=99)
    assert "manifest.json" in error_line(command("search", tmp_path, "word"), 5)
    (tmp_path / "catalog.json").write_text('{"corpus": 5}', "utf-8")
    with pytest.raises(ArtifactError, match=r"not an index folder .*; build it with `cramlm index FILES --out "):
        cramlm.Index.open(tmp_path)


def test_an_up_to_date_index_writes_nothing(tmp_path: Path) -> None:
    def files() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}

    corpus = write_lines(tmp_path / "corpus.jsonl", {"text": "a red ship"})
    succeed("index", corpus, "-o", tmp_path / "index", "--workers", "1")
    before = files()
    succeed("index", corpus, "-o", tmp_path / "index", "--workers", "1")
    assert files() == before


def test_index_builds_missing_segments_again(tmp_path: Path) -> None:
    arguments = "index", write_lines(tmp_path / "corpus.jsonl", {"text": "a red ship"}), "-o", tmp_path / "index", "--workers", "1"
    succeed(*arguments)
    shutil.rmtree(tmp_path / "index" / "segments")
    assert "building 1 missing segment again" in succeed(*arguments).stderr
    assert cramlm.Index.open(tmp_path / "index").search("ship").ids == [["corpus.jsonl:1"]]


def test_a_folder_of_another_kind_is_not_proposed_as_the_output_of_index(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    line = error_line(command("search", tmp_path, "word"), 5)
    assert line.endswith("; pass the output folder of `cramlm index`")
    assert error_line(command("search", tmp_path / "new", "word"), 2).endswith(
        f"; build it with `cramlm index FILES --out {tmp_path / 'new'}`"
    )


def test_calls_at_the_same_time_index_their_own_texts(tmp_path: Path) -> None:
    others, is_waiting = list[cramlm.Index](), threading.Event()

    def build_other() -> None:
        try:
            others.append(cramlm.Index.build({"b": "a green hill"}, tmp_path / "index", workers=1, emit=lambda event: is_waiting.set()))
        finally:
            is_waiting.set()

    other = threading.Thread(target=build_other)

    def start_other(event: Event) -> None:
        if other.ident is None:
            other.start()
            is_waiting.wait(PATIENCE)

    index = cramlm.Index.build({"a": "a red ship"}, tmp_path / "index", workers=1, emit=start_other)
    other.join()
    assert (index.search("a").texts(), others[0].search("a").texts()) == ([["a red ship"]], [["a green hill"]])


@pytest.mark.parametrize("name", ["catalog.json", "texts.jsonl", "notes.md"])
def test_files_of_the_user_are_not_mixed_with_an_index(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine", "utf-8")
    with pytest.raises(UsageError, match=rf"holds other files \({name}\) and no index of cramlm; pass a new or empty folder"):
        cramlm.Index.build(TEXTS, tmp_path)
    assert [(path.name, path.read_text("utf-8")) for path in tmp_path.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize("other", ["", "parts/mine.txt", "corpora/mine.txt", "texts.jsonl"])
def test_a_catalog_of_the_user_is_kept_and_nothing_is_written_beside_it(tmp_path: Path, other: str) -> None:
    folder = tmp_path / "project"
    mine = [write_lines(tmp_path / "corpus.jsonl", {"text": "a red ship"}), folder / "catalog.json", *([folder / other] if other else [])]
    for path in mine[1:]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "a catalog of books", "index": 5}\n', "utf-8")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert "holds other files (catalog.json" in error_line(
        command("index", mine[-1] if other == "texts.jsonl" else mine[0], "-o", folder), 2
    )
    for source in (mine[0], ["a text"]):
        with pytest.raises(UsageError, match=r"project: holds other files \(catalog.json.* and no index of cramlm"):
            cramlm.Index.build(source, folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_store_with_a_catalog_of_the_user_gets_no_index(tmp_path: Path) -> None:
    cramlm.Index.build(TEXTS, tmp_path)
    (tmp_path / "catalog.json").write_text('{"my": "catalog of books"}', "utf-8")
    with pytest.raises(UsageError, match=r"catalog.json: is not the catalog of an index, and would be replaced; rename it, or pass"):
        cramlm.Index.build(TEXTS, tmp_path)
    assert (tmp_path / "catalog.json").read_text("utf-8") == '{"my": "catalog of books"}'


@pytest.mark.parametrize("left", [("texts.jsonl",), ("texts.jsonl", "parts"), ("texts.jsonl", "parts", "corpora"), ("parts",)])
def test_an_interrupted_build_is_continued_at_any_stage(tmp_path: Path, left: tuple[str, ...]) -> None:
    finished = cramlm.Index.build(TEXTS, tmp_path / "index")
    for path in finished.path.iterdir():
        if path.name not in left and not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert cramlm.Index.build(TEXTS, tmp_path / "index").bm25.fingerprint == finished.bm25.fingerprint


def test_a_build_that_was_interrupted_in_its_first_part_is_continued(tmp_path: Path) -> None:
    (tmp_path / "parts" / ".0123.tmp-host-1-0123456789ab").mkdir(parents=True)
    (tmp_path / "parts" / ".0123.lock").touch()
    assert cramlm.Index.build(write_lines(tmp_path / ".corpus.jsonl", {"text": "a red ship"}), tmp_path).search("ship").ids == [
        [".corpus.jsonl:1"]
    ]


def test_the_files_of_an_index_are_not_replaced_by_results(folder: Path) -> None:
    before = (folder / "index/catalog.json").read_bytes()
    for name in ("catalog.json", "hits.trec"):
        line = error_line(command("search", folder / "index", "--queries", folder / "queries.txt", "--run", folder / "index" / name), 2)
        assert line == f"{folder / 'index' / name}: is inside the index folder {folder / 'index'}; write the file outside of it"
    assert (folder / "index/catalog.json").read_bytes() == before


def test_queries_and_ids_that_are_no_strings_are_named(index: cramlm.Index, tmp_path: Path) -> None:
    for search in (index.search, index.union):
        with pytest.raises(UsageError, match="query 1 is not a string but NoneType; convert it"):
            search(["word", None])
        with pytest.raises(UsageError, match=r"queries is a mapping, whose keys would be searched for; pass list\(queries.values\(\)\)"):
            search({"q1": "word"})
        with pytest.raises(UsageError, match="the queries argument has 2 dimensions; pass one column of it"):
            search(np.array([["q1", "word"]]))
        for queries, kind in ((None, "a NoneType"), ({"word"}, "a set"), (b"word", r"one string \(b'word'\)")):
            with pytest.raises(UsageError, match=f"the queries argument is {kind}; pass a list of strings"):
                search(queries)
    with pytest.raises(UsageError, match="the id of text 7 is not a string but int"):
        cramlm.Index.build({7: "a text"}, tmp_path / "index")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a text", "half \ud83d"], "the text of text '1' has a lone surrogate, as character 6; remove it"),
        ({"half \ud83d": "a text"}, r"the id of text 'half \\ud83d' has a lone surrogate, as character 6; remove it"),
        ({"": "one", "b": "two"}, "the id of text 'one' is empty; pass a string that is not empty as its id"),
        (["", " \n"], "all texts are blank; pass at least one"),
        ([], "no texts to index; pass at least one"),
    ],
)
def test_texts_that_cannot_be_indexed_are_named_before_anything_is_written(texts: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CramError, match=f"^{message}$"):
        cramlm.Index.build(texts, tmp_path / "index")
    assert not list(tmp_path.iterdir())


def test_the_limit_of_a_row_counts_the_bytes_of_a_text_in_utf_8(tmp_path: Path) -> None:
    long = "long" + "—" * 2_700_000  # 8 MB in UTF-8, 16.2 MB escaped
    assert cramlm.Index.build([long, "a red ship"], tmp_path, workers=1).search(["long", "ship"]).ids == [["0"], ["1"]]


def test_texts_with_a_lone_surrogate_are_skipped_and_listed_on_request(tmp_path: Path) -> None:
    texts = {"a": "half \ud83d", "half \ud83d": "a red hill", "é\u2028": "a red\u2028ship\x85\r\n\ufeff漢"}
    index = cramlm.Index.build(texts, tmp_path, on_bad_row="skip")
    hits = index.search("red")
    assert (hits.ids, hits.texts()) == ([["é\u2028"]], [[texts["é\u2028"]]])
    rejected = [json.loads(line) for line in (index.corpus.path / "rejected.jsonl").read_text("utf-8").splitlines()]
    assert [row["line"] for row in rejected] == [1, 2]


def test_texts_and_queries_may_be_columns_of_tables_and_generators(tmp_path: Path) -> None:
    texts, ids = ["The red ship.", "A green hill.", "Boats and ships."], ["0", "1"]
    frame = pandas.DataFrame({"name": ["a", "b", "c"], "text": texts}, index=[7, 8, 9])
    for number, source in enumerate((frame["text"], frame["text"].to_numpy(), iter(texts), tuple(texts))):
        built = cramlm.Index.build(source, tmp_path / str(number), workers=1)
        assert built.search(pandas.Series(["red", "hill"], index=[3, 4]), top_k=1).ids == [[each] for each in ids]
    for table in (frame, frame.to_numpy()):
        with pytest.raises(UsageError, match=r"2 dimensions; pass one column of it, or a list of strings, or a mapping from ids to texts"):
            cramlm.Index.build(table, tmp_path / "refused")


def test_an_index_is_shown_in_one_short_line(index: cramlm.Index) -> None:
    assert repr(index) == f"Index({str(index.path)!r}, 200 documents, k1=1.2, b=0.75, norm='exact')"


@pytest.mark.parametrize("top_k", [2.0, "3", None])
def test_a_number_of_hits_that_is_not_whole_is_refused(index: cramlm.Index, top_k: object) -> None:
    for method in (index.search, index.union):
        with pytest.raises(UsageError, match=r"top_k is .*, not a whole number"):
            method(["red"], top_k=top_k)
    assert index.search(QUERIES, top_k=np.int64(2)).ids == index.search(QUERIES, top_k=2).ids


def test_fewer_than_one_hit_is_refused(index: cramlm.Index) -> None:
    for search in (index.search, index.union):
        with pytest.raises(UsageError, match="top_k is 0"):
            search(QUERIES, 0)
    assert "'--top-k'" in error_line(command("search", index.path, "word", "--top-k", "0"), 2)


# ------------------------------------------------------------------------------------------------------------------ command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus.jsonl, its index, queries and judgements."""
    folder = tmp_path_factory.mktemp("search")
    corpus = write_lines(folder / "corpus.jsonl", *({"docno": name, "body": text} for name, text in DOCUMENTS.items()))
    columns = ("--text-column", "body", "--id-column", "docno", "--workers", "1")
    settings = ("--stop-words", "english", "--k1", "0.9", "--b", "0.4", "--passage-words", "0", "--duplicates", "none")
    succeed("index", corpus, "--out", folder / "index", *columns, *settings)
    write_lines(folder / "queries.jsonl", {"_id": "q1", "text": "the red harbour"}, {"_id": "q2", "text": "zebra"})
    write_lines(folder / "queries.csv", "text,id", "the red harbour,q1", "zebra,q2")
    write_lines(folder / "queries.txt", "the red harbour", "zebra")
    write_lines(folder / "qrels.txt", "q1 0 hill 1", "q1 0 ship 0", "q2 0 ship 2", "q3 0 ship 1")
    write_lines(folder / "qrels.tsv", "query-id\tcorpus-id\tscore", "q1\thill\t1", "q1\tship\t0", "q2\tship\t2", "q3\tship\t1")
    return folder


def test_search_writes_a_trec_run_for_every_format_of_queries(folder: Path) -> None:
    index = cramlm.Index.open(folder / "index")
    assert index.scoring == Scoring(0.9, 0.4)
    hits = index.search(["the red harbour"], top_k=5)
    assert hits.ids == [["ship", "hill"]]
    expected = [
        f"q1 Q0 {name} {rank} {score:.9g} cramlm" for rank, (name, score) in enumerate(zip(hits.ids[0], hits.scores[0], strict=True), 1)
    ]
    for file, options in (("queries.jsonl", ["--id-column", "_id"]), ("queries.csv", [])):
        search = ("search", folder / "index", "--queries", folder / file, *options)
        assert printed(*search).splitlines() == expected
        assert "2 hits of 2 queries" in printed(*search, "--run", folder / "out.trec", "--k", "5")
        assert (folder / "out.trec").read_text().splitlines() == expected
    numbered = printed("search", folder / "index", "--queries", folder / "queries.txt")
    assert numbered.splitlines() == [line.replace("q1", "1", 1) for line in expected]
    as_json = printed("search", folder / "index", "--queries", folder / "queries.txt", "--top-k", "1", "--json")
    assert [json.loads(line)["ids"] for line in as_json.splitlines()] == [["ship"], []]
    other = printed("search", folder / "index", "red harbour", "--json", "--k1", "3", "--b", "0")
    score = index.search("red harbour", scoring=Scoring(3, 0)).scores[0][0]
    assert float(json.loads(other.splitlines()[0])["score"]) == pytest.approx(score)


def test_an_index_and_its_hits_can_be_sent_to_another_process(index: cramlm.Index) -> None:
    sent = pickle.loads(pickle.dumps((index, index.search(QUERIES))))
    assert sent[0].search(QUERIES).ids == sent[1].ids == index.search(QUERIES).ids
    assert sent[1].texts() == index.search(QUERIES).texts()


@pytest.mark.parametrize("query", ["", "  \n"])
def test_a_blank_query_is_refused_as_in_a_file_of_queries(folder: Path, query: str) -> None:
    for options in ([], ["--json"]):
        line = error_line(command("search", folder / "index", query, *options), 2)
        assert line == "the query is blank; pass a text, or a file of queries with --queries"


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("the of", "this query has only stop words and punctuation, nothing to search for"),
        ("!!!", "this query has only stop words and punctuation, nothing to search for"),
        ("zebra", "no passage shares a word with this query"),
    ],
)
def test_a_query_without_hits_says_why_and_prints_nothing_else(folder: Path, query: str, reason: str) -> None:
    for options in ([], ["--json"]):
        result = command("search", folder / "index", query, *options)
        assert (result.returncode, result.stdout, result.stderr.splitlines()) == (0, "", [reason])


def test_queries_of_a_file_without_hits_are_counted(folder: Path, tmp_path: Path) -> None:
    queries = write_lines(tmp_path / "queries.txt", "zebra", "red", "the of", "!!!")
    for options in ([], ["--json"], ["--run", tmp_path / "out.trec"]):
        result = command("search", folder / "index", "--queries", queries, *options)
        assert (result.returncode, result.stderr.splitlines()) == (0, ["no hits: 3 of 4 queries, the first is '1' ('zebra')"])
    found = write_lines(tmp_path / "found.txt", "red", "green")
    assert command("search", folder / "index", "--queries", found).stderr == ""


@pytest.mark.parametrize("qrels", ["qrels.txt", "qrels.tsv"])
def test_search_prints_the_measures_of_ir_measures(folder: Path, qrels: str) -> None:
    pytest.importorskip("ir_measures", reason="ir-measures is missing: pip install 'cramlm[search]'")
    arguments = ("search", folder / "index", "--queries", folder / "queries.csv", "--qrels", folder / qrels)
    # q1: the relevant document is second, q2: nothing is found; q3 is not among the queries
    ndcg = 1 / np.log2(3)
    assert json.loads(printed(*arguments, "--json")) == {"queries": 2, "nDCG@10": pytest.approx(ndcg / 2), "R@100": 0.5, "RR": 0.25}
    assert printed(*arguments).splitlines() == [f"nDCG@10  {ndcg / 2:.4f}", "R@100    0.5000", "RR       0.2500"]
    assert "means over" in command(*arguments).stderr.splitlines()[-1]
    assert "after the first 5 count as not found; pass --top-k 100 for R@100" in command(*arguments, "--top-k", 5).stderr
    other = write_lines(folder / "other.txt", "q1 0 elsewhere 1")
    assert "no hit is a judged document" in command(*arguments[:-1], other).stderr
    long = write_lines(folder / "long.jsonl", {"id": "hill", "text": "A red hill above the harbour. " * 10})
    cramlm.Index.build(long, folder / "cut", workers=1, passage_words=30)
    cut = command("search", folder / "cut", *arguments[2:]).stderr
    assert "hit counted as not relevant: passages of judged documents, like 'hill#0' of 'hill'; index whole documents" in cut
    unknown = write_lines(folder / "unknown.txt", "q9 0 ship 1")
    assert "for other queries, like 'q9', not for 'q1'" in error_line(command(*arguments[:-1], unknown), 2)


def test_measures_without_their_package_are_refused_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    message = error_line(command("search", folder / "index", "--queries", folder / "queries.csv", "--qrels", folder / "qrels.txt"), 4)
    assert "pip install 'cramlm[search]'" in message


def test_a_stemmer_without_its_package_is_refused_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Stemmer", None)
    message = error_line(command("index", folder / "corpus.jsonl", "--out", folder / "stemmed", "--stemmer", "porter"), 4)
    assert message == "stemming needs the package PyStemmer: pip install 'cramlm[search]'"


def test_a_file_of_stop_words_has_one_in_a_line(folder: Path, tmp_path: Path) -> None:
    columns = ("--text-column", "body", "--id-column", "docno")
    words = write_lines(tmp_path / "words.txt", "the", " red ", "", "don't")
    succeed("index", folder / "corpus.jsonl", "--out", tmp_path / "index", "--stop-words", words, *columns)
    assert cramlm.Index.open(tmp_path / "index").bm25.analyzer.stop_words == ("don", "red", "t", "the")
    write_lines(words, "the", "of   | a preposition")
    line = error_line(command("index", folder / "corpus.jsonl", "--out", tmp_path / "index", "--stop-words", words, *columns), 3)
    assert line == f"{words}:2: 'of   | a preposition' is more than one word; write a stop word per line, without comments"


BAD_QUERIES = {
    "empty.jsonl": ([], "empty.jsonl: no rows"),
    "column.csv": (["body", "red"], "column.csv:1: no column 'text'; found 'body'"),
    "row.jsonl": ([{"text": "red"}, {"body": "red"}], "row.jsonl:2: no column 'text'"),
    "twice.csv": (["text,id", "red,7", "green,8", "blue,7"], "twice.csv:4: id '7' is already used in line 2"),
    "blank.txt": (["red", " ", "green"], "blank.txt:2: 'text' is blank"),
    "ids.csv": (["text,id", "red,7"], "ids.csv:1: no column 'number'; found 'text', 'id'; pass --id-column", "--id-column", "number"),
}


@pytest.mark.parametrize("name", BAD_QUERIES)
def test_bad_queries_are_refused_with_file_and_line(folder: Path, tmp_path: Path, name: str) -> None:
    rows, message, *options = BAD_QUERIES[name]
    assert message in error_line(command("search", folder / "index", "--queries", write_lines(tmp_path / name, *rows), *options), 3)


def test_judgements_may_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "qrels.gz").write_bytes(gzip.compress(b"q1 0 hill 1\nq1 0 ship 0\n"))
    assert read_qrels(tmp_path / "qrels.gz") == {"q1": {"hill": 1, "ship": 0}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"q1 0 hill 1\nq1 0 ship\n", ":2: 3 columns, expected 4: QUERY 0 DOCUMENT GRADE"),
        (b"q1 0 hill 1\nq1 0 ship high\n", ":2: the grade 'high' is not a whole number"),
        (b"q1 0 hill 1000\nq1 0 ship 1001\n", ":2: the grade '1001' is over 1,000; is it the last column?"),
        (b"q1 0 hill 3000000000\n", ":1: the grade '3000000000' is over 1,000; is it the last column?"),
        (b"q1 0 hill -1000\nq1 0 ship -1001\n", ":2: the grade '-1001' is under -1,000; is it the last column?"),
        (b"q1 0 hill 1\nq1 0 hill 0\n", ":2: query 'q1' judges document 'hill' twice"),
        (b"q1 0 caf\xe9 1\n", ":1: not UTF-8"),
        (b"\n", ": no judgements"),
    ],
)
def test_damaged_judgements_are_refused_with_their_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "qrels.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"{path}{message}")):
        read_qrels(path)


@pytest.mark.parametrize(
    "arguments", [[], ["a query", "--queries", "queries.csv"], ["a query", "--run", "out.trec"], ["a query", "--qrels", "x"]]
)
def test_search_takes_one_query_or_a_file(folder: Path, arguments: list[str]) -> None:
    assert "--queries" in error_line(command("search", folder / "index", *arguments), 2)


def test_an_id_with_white_space_cannot_be_in_a_run(tmp_path: Path) -> None:
    index = cramlm.Index.build({"red ship": "red"}, tmp_path)
    with pytest.raises(DataError, match="'red ship': a TREC run cannot hold ids with white space"):
        list(run_lines(index.search(["red"]), ["q1"]))


def test_queries_without_a_judgement_do_not_count(index: cramlm.Index) -> None:
    pytest.importorskip("ir_measures", reason="ir-measures is missing: pip install 'cramlm[search]'")
    hits = index.search(QUERIES[:2], top_k=5)
    perfect = measure(hits, ["a", "b"], {"a": {hits.ids[0][0]: 1}})
    assert perfect == dict.fromkeys(MEASURES, 1.0)


ALONE = """
import sys, cramlm
from cramlm.cli.app import app

index = cramlm.Index.build(["a red ship"], sys.argv[1])
assert index.search(["ship"]).ids == [["0"]]
app(sys.argv[2:], standalone_mode=False)
assert not {"torch", "transformers", "sklearn", "scipy.linalg"} & set(sys.modules)
"""


def test_index_and_select_with_compiled_kernels_import_few_packages(folder: Path, tmp_path: Path) -> None:
    options = ("select", "--index", folder / "index", "--queries", folder / "queries.csv", "--out")
    succeed(*options, tmp_path / "first")  # compiles, which imports more
    python(ALONE, tmp_path / "texts", *options, tmp_path / "second")


def test_select_takes_texts_without_labels_and_the_settings_of_the_index(folder: Path, tmp_path: Path) -> None:
    arguments = ("select", "--index", folder / "index", "--queries", folder / "queries.csv", "--out", tmp_path / "out", "-k", "1")
    assert "retrieving with bm25 for 2 queries\n" in succeed(*arguments).stderr
    (row,) = SelectionTable.open(tmp_path / "out").rows()
    best = cramlm.Index.open(folder / "index").search(["the red harbour"], top_k=1)
    assert (row["id"], row["query"], row["text"]) == ("ship", 0, DOCUMENTS["ship"])
    assert row["score"] == pytest.approx(float(best.scores[0][0]))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert {name: manifest["key"]["config"][name] for name in ("k1", "b", "norm")} == {"k1": 0.9, "b": 0.4, "norm": "exact"}
    assert " stop-" in manifest["key"]["analyzer"]
    changed = command(*arguments, "--set", "retriever.k1=2.5")
    assert "config.k1 0.9 -> 2.5" in changed.stderr
    assert "--train" in error_line(command(*arguments[:3], *arguments[5:]), 2)
    assert "--train" in error_line(command(*arguments, "--train", folder / "queries.csv"), 2)


def test_select_keeps_a_folder_of_the_user_that_has_the_name_of_the_files_of_a_distributed_search(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out.shares" / "portfolio.csv"
    mine.parent.mkdir()
    mine.write_text("mine", "utf-8")
    succeed("select", "--index", folder / "index", "--queries", folder / "queries.csv", "-o", tmp_path / "out")
    assert mine.read_text("utf-8") == "mine"
