"""Who works changes no byte of an index or a selection; and whoever is killed loses nothing that was done."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from retrieval_fixtures import invented_texts
from selection_fixtures import make_task, select, write_corpus

from cramlm.config.retriever import Bm25Config, RandomConfig, UnionConfig
from cramlm.data.corpus import Corpus
from cramlm.errors import ArtifactError, EnvironmentFault, UsageError
from cramlm.io.executors import Executor, OnEvent, Processes, connect_ray, import_function
from cramlm.records import Emit, Event
from cramlm.retrieval.bm25 import segment as segment_module
from cramlm.retrieval.bm25.distributed import DistributedSearch, publish_search, remove_searches, run_search
from cramlm.retrieval.bm25.index import Bm25Index, build_index
from cramlm.retrieval.bm25.search import Scoring
from cramlm.retrieval.retrievers import Distribution
from cramlm.storage.artifacts import open_artifact
from damaging import flip

HAS_RAY = importlib.util.find_spec("ray") is not None
TEXTS = [*invented_texts(3000, seed=1, vocabulary=600), "zebra quagga", "日本語の文"]
QUERIES = [
    *invented_texts(60, seed=2, vocabulary=600),
    "zebra",
    "unheardof",
    "",
    *["ba co"] * 3,
    *invented_texts(2, seed=3, words=(2500, 2500)),
]
LIMIT = 40


@dataclass(frozen=True)
class Deadly:
    """Hands tasks on to another executor; the worker of one of them is killed at the first thing that it says, once."""

    inner: Executor
    folder: Path

    def map(self, function: str, tasks: Sequence[Any], *, on_event: OnEvent) -> list[Any]:
        wrapped = [{"function": function, "task": task, "folder": str(self.folder)} for task in tasks]
        return self.inner.map(f"{__name__}:die_once", wrapped, on_event=on_event)


def die_once(task: dict[str, Any], emit: Emit) -> Any:
    folder = Path(task["folder"])

    def die(event: Event) -> None:
        try:
            (folder / "died").touch(exist_ok=False)
        except FileExistsError:
            emit(event)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    if ray := sys.modules.get("ray"):
        (folder / f"node-{ray.get_runtime_context().get_node_id()}").touch()
    return import_function(task["function"])(task["task"], die)


@dataclass(frozen=True)
class Idle:
    """Nothing may be left to do for it."""

    def map(self, function: str, tasks: Sequence[Any], *, on_event: OnEvent) -> list[Any]:
        assert not tasks
        return []


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"), TEXTS)


@pytest.fixture(scope="module")
def index(corpus: Corpus) -> Bm25Index:
    return build_index(corpus, corpus.store)


@pytest.fixture(scope="module")
def cut(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Bm25Index]:
    """The index of the same corpus in so many segments."""

    @functools.cache
    def build_cut(segments: int) -> Bm25Index:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segment_module, "SEGMENT_PASSAGES", -(-len(corpus) // segments))
            index = build_index(corpus, tmp_path_factory.mktemp(f"segments-{segments}"))
        assert len(index.segments) == segments
        return index

    return build_cut


def publish(index: Bm25Index, folder: Path) -> DistributedSearch:
    return publish_search(index, QUERIES, folder, limit=LIMIT, scoring=Scoring())


def plain(found: Any) -> list[tuple[int, list[int], bytes]]:
    return [(number, positions.tolist(), scores.tobytes()) for number, positions, scores in found]


def expected(index: Bm25Index) -> list[tuple[int, list[int], bytes]]:
    return plain(index.search_distinct(index.compile(QUERIES), limit=LIMIT))


@pytest.mark.parametrize("segments", [1, 2, 5])
def test_a_distributed_search_finds_what_one_search_finds(
    index: Bm25Index, cut: Callable[[int], Bm25Index], tmp_path: Path, segments: int
) -> None:
    queries, found = run_search(publish(cut(segments), tmp_path), Processes())
    assert plain(found) == expected(index)
    assert queries.owner.tolist() == index.compile(QUERIES).owner.tolist()


def test_searches_at_the_same_time_do_each_group_once(index: Bm25Index, cut: Callable[[int], Bm25Index], tmp_path: Path) -> None:
    search = publish(cut(5), tmp_path)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda _: run_search(search, Processes()), range(3)))
    _, found = run_search(search, Idle())
    assert plain(found) == expected(index)


@pytest.mark.faults
def test_a_killed_worker_is_named_and_the_same_call_again_completes(
    index: Bm25Index, cut: Callable[[int], Bm25Index], tmp_path: Path
) -> None:
    search = publish(cut(5), tmp_path)
    with pytest.raises(EnvironmentFault, match=r"ended by signal 9.*finished tasks are kept"):
        run_search(search, Deadly(Processes(2), tmp_path))
    events: list[Event] = []
    _, found = run_search(search, Processes(), events.append)  # in this process: every other one imports all of this again, 2 CPU s each
    assert plain(found) == expected(index)
    assert {event.kind for event in events} == {"progress"}
    assert all(event.done <= event.total for event in events if event.total)


def test_a_flipped_byte_in_a_segment_or_in_its_hits_is_noticed(corpus: Corpus, tmp_path: Path) -> None:
    own = build_index(corpus, tmp_path / "store")
    search = publish(own, tmp_path / "work")
    run_search(search, Processes())
    flip(search.path("hits", 0) / "keys.npy")
    with pytest.raises(ArtifactError, match=r"keys\.npy"):
        plain(run_search(search, Idle())[1])
    flip(own.segments[0][1].path / "postings.npy")
    with pytest.raises(ArtifactError, match=r"postings\.npy"):
        run_search(publish(own, tmp_path / "again"), Processes())


def test_an_index_does_not_depend_on_the_executor(
    corpus: Corpus, cut: Callable[[int], Bm25Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = cut(5)
    monkeypatch.setattr(segment_module, "SEGMENT_PASSAGES", -(-len(corpus) // 5))
    events: list[Event] = []
    built = build_index(corpus, tmp_path, executor=Processes(2), emit=events.append)
    assert [segment.fingerprint for _, segment in built.segments] == [segment.fingerprint for _, segment in reference.segments]
    assert built.fingerprint == reference.fingerprint
    assert {event.kind for event in events} <= {"start", "progress", "done"}


def test_a_selection_has_the_same_bytes_and_leaves_no_files_of_the_search(
    corpus: Corpus, index: Bm25Index, cut: Callable[[int], Bm25Index], tmp_path: Path
) -> None:
    task = make_task([query for query in QUERIES if query], dev=TEXTS[:3])
    config = UnionConfig(retrievers=(Bm25Config(top_k=7), RandomConfig(max_documents=20), Bm25Config(top_k=3, k1=2.0)))
    distribution = Distribution(tmp_path / "distributed.shares", Processes())
    select((corpus, index), task, tmp_path / "plain", config, threads=2)
    select((corpus, cut(5)), task, tmp_path / "distributed", config, distribution=distribution)
    plain, distributed = (open_artifact(tmp_path / name, kind="selection").fingerprint for name in ("plain", "distributed"))
    assert distributed == plain
    assert not distribution.folder.exists()


@pytest.mark.parametrize("name", ["notes.txt", "0123456789abcdef/notes.txt", "0123456789abcdef/batch/notes.txt"])
def test_a_folder_of_the_user_with_the_name_of_a_distributed_search_is_kept(
    corpus: Corpus, index: Bm25Index, tmp_path: Path, name: str
) -> None:
    mine = tmp_path / "out.shares" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    distribution = Distribution(tmp_path / "out.shares", Processes())
    task, config = make_task([query for query in QUERIES if query]), Bm25Config(top_k=7)
    with pytest.raises(UsageError, match=r"out.shares/.*: is not of a distributed search.*; choose another --out, or rename out.shares$"):
        select((corpus, index), task, tmp_path / "out", config, distribution=distribution)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_the_files_of_a_distributed_search_that_was_interrupted_are_used_and_removed(
    corpus: Corpus, index: Bm25Index, tmp_path: Path
) -> None:
    queries, config = [query for query in QUERIES if query], Bm25Config(top_k=7)
    folder = tmp_path / "out.shares"
    run_search(publish_search(index, queries, folder, limit=7, scoring=Scoring()), Processes())
    (folder / "0123456789abcdef" / ".batch.tmp-host-1-0123456789ab").mkdir(parents=True)
    select((corpus, index), make_task(queries), tmp_path / "out", config, distribution=Distribution(folder, Processes()))
    assert not folder.exists()


def test_only_searches_are_removed_from_their_folder(index: Bm25Index, tmp_path: Path) -> None:
    publish_search(index, QUERIES, tmp_path / "searches", limit=7, scoring=Scoring())
    mine = tmp_path / "searches" / "notes.txt"
    mine.write_text("mine")
    remove_searches(tmp_path / "searches")
    assert list((tmp_path / "searches").iterdir()) == [mine]


def test_a_search_ends_after_the_block_of_each_thread_at_a_signal(cut: Callable[[int], Bm25Index]) -> None:
    index, blocks = cut(20), list[Event]()

    def interrupt(event: Event) -> None:
        blocks.append(event)
        os.kill(os.getpid(), signal.SIGINT) if len(blocks) == 1 else time.sleep(0.05)  # for the main thread to take it

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts processes in the background without it
    try:
        with pytest.raises(KeyboardInterrupt):
            index.search(QUERIES[:1], limit=7, emit=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(blocks) < 20


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_command_that_installs_it_is_given() -> None:
    with pytest.raises(EnvironmentFault, match=r'pip install "cramlm\[ray\]"'), connect_ray("auto"):
        pass


RAY = """
import sys
from pathlib import Path
from ray.cluster_utils import Cluster
import test_distributed_search as tests
from cramlm.io.executors import connect_ray
from cramlm.errors import CramError
from cramlm.retrieval.bm25 import distributed
from cramlm.retrieval.bm25.index import Bm25Index
from cramlm.retrieval.bm25.distributed import run_search

distributed.FEW_SEGMENTS = 0
folder = Path(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
index = Bm25Index.open(Path(sys.argv[2]))
with connect_ray(cluster.address) as executor:
    _, found = run_search(tests.publish(index, folder), tests.Deadly(executor, folder))
    assert tests.plain(found) == tests.expected(index)
    assert (folder / "died").exists()
    assert len(list(folder.glob("node-*"))) == 2
    try:
        executor.map("test_distributed_search:refuse", [0], on_event=lambda number, event: None)
    except CramError as error:
        print(type(error).__name__, error)
    try:
        executor.map("test_distributed_search:always_die", [0], on_event=lambda number, event: None)
    except CramError as error:
        print(type(error).__name__, error)
cluster.shutdown()
"""


def refuse(task: int, emit: Emit) -> None:
    raise UsageError("refused in a worker")


def always_die(task: int, emit: Emit) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_two_ray_nodes_find_what_one_search_finds_when_a_worker_is_killed(cut: Callable[[int], Bm25Index], tmp_path: Path) -> None:
    from commands import python  # not above: workers import this module, and commands loads torch

    path = os.pathsep.join([*(entry for entry in sys.path if entry), os.environ.get("PYTHONPATH", "")])
    output = python(RAY, tmp_path, cut(5).path, PYTHONPATH=path, RAY_USAGE_STATS_ENABLED="0")
    refused, died = [line for line in output.splitlines() if line.startswith(("UsageError", "EnvironmentFault"))]
    assert refused == "UsageError refused in a worker"
    assert died.startswith("EnvironmentFault Ray could not finish a task (")
    assert died.endswith("finished tasks are kept")


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_an_unreachable_cluster_is_a_one_line_error() -> None:
    from commands import error_line

    command = [sys.executable, "-m", "cramlm", "index", "c.jsonl", "--out", "o", "--ray", "localhost:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert error_line(done, 4).startswith("no Ray cluster at 'localhost:1'")
    assert len(done.stderr.splitlines()) == 1
