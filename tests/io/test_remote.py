"""Files that lie elsewhere, read from a real HTTP server on this machine and from fsspec's file system in memory."""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cramlm.config.run import CorpusConfig, TaskConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.task import RowFormat, read_examples, read_task
from cramlm.errors import CramError, DataError, EnvironmentFault, UsageError
from cramlm.records import Event
from hub_stand_in import Hub, running_hub

ROWS = [f"passage number {number} tells of rivers and of kinase {number * 7}" for number in range(300)]
LINES = "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()


def parquet(rows: list[str], column: str = "text", **others: list[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({column: rows, **others}), sink, row_group_size=50)
    return sink.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def read(store: Path, *files: str, **settings: object) -> Corpus:
    return build_corpus(CorpusConfig(files=files, **settings), store)


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus]


def refusal(store: Path, *files: str) -> CramError:
    with pytest.raises(CramError) as caught:
        read(store, *files)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_file_on_a_web_server_gives_the_same_corpus_as_a_local_file(tmp_path: Path, hub: Hub, name: str) -> None:
    data = {"a.jsonl": LINES, "a.jsonl.gz": gzip.compress(LINES), "a.parquet": parquet(ROWS)}[name]
    hub.web[f"/{name}"] = data
    (tmp_path / name).write_bytes(data)
    here, there = read(tmp_path / "store", str(tmp_path / name)), read(tmp_path / "store", f"{hub.url}/{name}?signed=yes")
    assert texts(there) == texts(here) == ROWS
    assert [document.id for document in there] == [document.id for document in here]


def test_a_remote_file_is_read_again_only_if_it_changes_and_a_server_without_versions_is_rejected(tmp_path: Path, hub: Hub) -> None:
    hub.web["/a.jsonl"] = LINES
    url = f"{hub.url}/a.jsonl"
    first = read(tmp_path, url)
    sent = hub.bytes_sent
    assert read(tmp_path, url).path == first.path
    assert hub.bytes_sent == sent
    hub.web["/a.jsonl"] = LINES.replace(b'kinase 7"', b'kinase 8"')  # of the same length
    changed = read(tmp_path, url)
    assert changed.path != first.path
    assert "kinase 8" in changed.text(1)
    hub.etags = False
    error = refusal(tmp_path, url)
    assert isinstance(error, UsageError)
    assert "a change could not be noticed" in str(error)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_broken_connection_is_a_one_line_error_and_leaves_nothing(tmp_path: Path, hub: Hub, name: str) -> None:
    hub.web[f"/{name}"] = LINES if name == "a.jsonl" else parquet(ROWS)
    hub.cut_after = 1000
    error = refusal(tmp_path, f"{hub.url}/{name}")
    assert isinstance(error, EnvironmentFault)
    assert "check the network" in str(error) or "ended after" in str(error)
    assert not list((tmp_path / "parts").glob("[0-9a-f]*"))
    hub.cut_after = None
    assert texts(read(tmp_path, f"{hub.url}/{name}")) == ROWS


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("http://127.0.0.1:9/a.jsonl", EnvironmentFault, "check the network and run again, or download it"),
        ("http://HERE/none.jsonl", UsageError, "no such file"),
        ("http://HERE/folder/", UsageError, "a web server does not list files"),
        ("http://user:secret@HERE/a.jsonl", UsageError, "a password in a URL"),
        ("strange://a/b.jsonl", UsageError, "unknown scheme strange://"),
        ("hf://train", UsageError, "hf://OWNER/NAME"),
        ("hf://owner/none/train", UsageError, "not on the hub"),
        ("hf://owner/name", UsageError, "if owner/name is the data set, add its split: hf://owner/name/train"),
        ("abfs://container/a.jsonl", EnvironmentFault, "nstall adlfs"),
        ("gs://bucket/a.jsonl", EnvironmentFault, "pip install 'cramlm[cloud]'"),
    ],
)
def test_a_url_that_cannot_be_read_is_a_one_line_error(
    tmp_path: Path, hub: Hub, url: str, error: type[CramError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # what the import system itself does for a module that is not to be found
    refused = refusal(tmp_path, url.replace("HERE", hub.url.removeprefix("http://")))
    assert isinstance(refused, error)
    assert message in str(refused)
    assert "secret" not in str(refused)


@pytest.mark.parametrize(("status", "problem"), [(429, "allows no more requests for now"), (503, "has an error of its own")])
def test_a_server_that_is_busy_or_fails_is_not_called_unreachable(tmp_path: Path, hub: Hub, status: int, problem: str) -> None:
    hub.web["/a.jsonl"], hub.failing = LINES, status
    error = refusal(tmp_path, f"{hub.url}/a.jsonl")
    assert isinstance(error, EnvironmentFault)
    assert f"the server {problem} (status {status}); wait and run again, or download it" in str(error)


def test_a_hub_that_cannot_be_reached_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    error = refusal(tmp_path, "hf://owner/name/train#text")
    assert isinstance(error, EnvironmentFault)
    assert "check the network and run again, or download it" in str(error)


def test_an_s3_bucket_is_read(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    for name, value in (("ENDPOINT_URL", hub.url), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "eu-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    hub.web["/bucket/a.jsonl"], hub.web["/bucket/b.parquet"] = LINES, parquet(["one more passage"])
    assert texts(read(tmp_path, "s3://bucket/a.jsonl", "s3://bucket/b.parquet")) == [*ROWS, "one more passage"]


def test_folders_and_globs_of_a_bucket_are_read_like_local_ones(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    for number in range(3):
        system.pipe(f"/bucket/raw/part-{number}.jsonl", b"".join(LINES.splitlines(True)[number::3]))
    system.pipe("/bucket/raw/readme.md", b"no data")
    try:
        whole = read(tmp_path, "memory://bucket/raw/")
        assert sorted(texts(whole)) == sorted(ROWS)
        assert tuple(whole.sources) == ("part-0.jsonl", "part-1.jsonl", "part-2.jsonl")
        assert texts(read(tmp_path, "memory://bucket/raw/part-[12].jsonl")) == texts(whole)[100:]
        assert "no data file" in str(refusal(tmp_path, "memory://bucket/raw/*.md"))
    finally:
        system.rm("/bucket", recursive=True)


FIRST, SECOND = ROWS[:150], ROWS[150:]
CARD = {"configs": [{"config_name": "c", "data_files": [{"split": "train", "path": "odd/*"}]}, {"config_name": "d", "data_files": "t*"}]}


@pytest.mark.parametrize(
    ("files", "card", "url"),
    [
        ({"data/train-0.parquet": FIRST, "data/train-1.parquet": SECOND, "data/test-0.parquet": ["x"]}, None, "hf://owner/name/train"),
        ({"en/train.parquet": ROWS, "yo/train.parquet": ["x"]}, None, "hf://owner/name:en/train"),
        ({"everything.parquet": ROWS}, None, "hf://owner/name/train"),
        ({"odd/first.parquet": FIRST, "odd/second.parquet": SECOND, "train.parquet": ["x"]}, CARD, "hf://owner/name:c/train"),
    ],
)
def test_a_split_of_the_hub_is_found_by_the_card_or_by_names(
    tmp_path: Path, hub: Hub, files: dict[str, list[str]], card: dict[str, object] | None, url: str
) -> None:
    hub.add("owner/name", {name: parquet(rows, column="body") for name, rows in files.items()}, card)
    assert texts(read(tmp_path, f"{url}#body")) == ROWS
    assert texts(read(tmp_path, f"{url}", text_column="body")) == ROWS


def test_a_data_set_without_data_files_is_read_from_the_parquet_that_the_hub_made(tmp_path: Path, hub: Hub) -> None:
    hub.add("owner/name", {"script.py": b"raise SystemExit"})
    hub.add("owner/name", {"default/train/0000.parquet": parquet(ROWS)}, branch="refs/convert/parquet")
    assert texts(read(tmp_path, "hf://owner/name/train")) == ROWS
    hub.add("owner/name", {"default/partial-train/0000.parquet": parquet(ROWS)}, branch="refs/convert/parquet")
    assert "only a part" in str(refusal(tmp_path, "hf://owner/name/train"))


def test_files_of_a_repository_are_read_by_the_urls_of_the_hub_s_own_library_in_several_processes(tmp_path: Path, hub: Hub) -> None:
    hub.add("owner/name", {"raw/a.jsonl": LINES, "raw/b.jsonl": b'{"text": "one more"}\n', "readme.md": b"no data"})
    assert texts(read(tmp_path, "hf://datasets/owner/name/raw/a.jsonl")) == ROWS
    one = read(tmp_path, "hf://datasets/owner/name/raw/*.jsonl")
    assert texts(one) == [*ROWS, "one more"]
    config = CorpusConfig(files=("hf://datasets/owner/name/raw/*.jsonl",))
    assert build_corpus(config, tmp_path / "two", workers=2, part_bytes=1).fingerprint == one.fingerprint


def test_only_the_requested_column_is_downloaded(tmp_path: Path, hub: Hub) -> None:
    sink = io.BytesIO()
    heavy = [random.Random(number).randbytes(3000).hex() for number in range(4000)]
    pq.write_table(pa.table({"heavy": heavy, "text": [f"short text {number}" for number in range(4000)]}), sink, row_group_size=2000)
    hub.add("owner/name", {"train.parquet": sink.getvalue()})
    assert len(read(tmp_path, "hf://owner/name/train")) == 4000
    assert hub.bytes_sent < len(sink.getvalue()) / 3


def test_a_commit_without_changed_data_reads_nothing_again(tmp_path: Path, hub: Hub) -> None:
    files = {"train.parquet": parquet(ROWS)}
    hub.add("owner/name", files)
    events: list[Event] = []
    config = CorpusConfig(files=("hf://owner/name/train",))
    first = build_corpus(config, tmp_path, emit=events.append)
    assert any(hub.repositories["owner/name"].sha in event.message for event in events), "the log names the commit"
    hub.add("owner/name", {**files, "README.md": b"more words"})
    sent = hub.bytes_sent
    assert build_corpus(config, tmp_path).path == first.path
    assert hub.bytes_sent == sent
    old = hub.repositories["owner/name"].sha
    hub.add("owner/name", {"train.parquet": parquet([*ROWS, "one more passage"])})
    assert len(build_corpus(config, tmp_path)) == len(ROWS) + 1
    assert isinstance(refusal(tmp_path, f"hf://owner/name@{old}/train"), UsageError)


def test_labelled_rows_are_read_from_the_hub(hub: Hub) -> None:
    labels = ["a", "b"] * 30
    hub.add("owner/task", {f"train-{part}.parquet": parquet(ROWS[part * 60 : part * 60 + 60], "review", label=labels) for part in (0, 1)})
    hub.add("owner/other", {"test.jsonl": LINES[: LINES.index(b"\n") + 1].replace(b"}", b', "label": "a"}')})
    task = read_task(TaskConfig(train="hf://owner/task/train#review", test="hf://owner/other/test"), seed=1)
    assert len(task.train) + len(task.dev) == 120
    assert len({example.id for example in (*task.train, *task.dev)}) == 120
    assert task.test[0].text == ROWS[0]
    with pytest.raises(DataError, match="no column 'text'"):
        read_examples("hf://owner/task/train", RowFormat())
