"""Two processes that want the same folder of a store at the same time: one builds it, the other waits for it with a message."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import build_corpus
from cramlm.records import Event, FloatArray, silent
from cramlm.retrieval.dense import embed_part
from cramlm.storage.artifacts import verify
from server_process import PATIENCE, wait_until
from tiny_task import COMMON, TOPICS, write_task

COMMAND = [sys.executable, "-m", "cramlm"]
SIZES = (2_000, 20_000, 200_000)  # documents; the first that keeps a stage busy until it is stopped is enough


def write_corpus(path: Path, documents: int) -> Path:
    generator = random.Random(7)
    words = [*COMMON, *TOPICS["sea"], *TOPICS["hill"]]
    path.write_text("".join(json.dumps({"text": " ".join(generator.choices(words, k=30))}) + "\n" for _ in range(documents)), "utf-8")
    return path


def start(*arguments: str | Path, wait: str | None = None) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CRAMLM_WAIT"}
    environment |= {} if wait is None else {"CRAMLM_WAIT": wait}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def holds_a_lock(pid: int, folder: Path) -> bool:
    """True if this stopped process builds something in `folder`."""
    for path in folder.glob(".*.lock"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if path.read_text().startswith(f"pid {pid} "):
                    return True
    return False


@contextmanager
def stopped_while_it_builds(folder: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[str] | None]:
    """A command that is stopped (SIGSTOP) while it holds a lock in `folder`; None if it was faster than that."""
    process = start(*arguments)
    mine = f"pid {process.pid} "
    try:
        wait_until(lambda: process.poll() is not None or any(path.read_text().startswith(mine) for path in folder.glob(".*.lock")))
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        yield process if process.poll() is None and holds_a_lock(process.pid, folder) else None
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def line_with(process: subprocess.Popen[str], needle: str) -> str:
    """Read the standard error of a process up to a line with `needle`."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if needle in line:
            return line
    raise AssertionError("".join(lines))


def one_builds_and_the_other_waits(first: subprocess.Popen[str], *arguments: str | Path) -> tuple[str, str]:
    """Continue `first` once the same command says that it waits for it; the standard output of both."""
    refused = start(*arguments, wait="0")
    _, errors = refused.communicate(timeout=PATIENCE)
    assert refused.returncode == 7, errors
    assert re.search(rf"^cramlm: error: .*being built by another process \(pid {first.pid} on ", errors.splitlines()[-1]), errors

    second = start(*arguments)
    guard = threading.Timer(PATIENCE, second.kill)
    guard.start()
    line = line_with(second, "waiting: ")
    guard.cancel()
    assert f"being built by another process (pid {first.pid} on " in line
    first.send_signal(signal.SIGCONT)
    printed = []
    for process in (first, second):
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        printed.append(output)
    return printed[0], printed[1]


@pytest.mark.parametrize("stage", ["corpora", "indexes"])
def test_one_of_two_index_commands_on_a_folder_builds_and_the_other_waits(tmp_path: Path, stage: str) -> None:
    for documents in SIZES:
        folder = tmp_path / str(documents)
        folder.mkdir()
        arguments = ("index", write_corpus(folder / "corpus.jsonl", documents), "--out", folder / "index", "--workers", "1")
        with stopped_while_it_builds(folder / "index" / stage, *arguments) as first:
            if first is not None:
                one, other = one_builds_and_the_other_waits(first, *arguments)
                break
    else:
        raise AssertionError("no corpus was large enough")
    assert one == other == f"{folder / 'index'}\n"
    assert verify(folder / "index") == 4  # a part, the corpus, a segment, the index
    assert not list((folder / "index").rglob("*.tmp-*"))


def test_one_of_two_selections_hashes_shared_ngrams_and_the_other_waits(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    for documents in SIZES:
        folder = tmp_path / str(documents)
        folder.mkdir()
        index = folder / "index"
        indexing = start("index", write_corpus(folder / "corpus.jsonl", documents), "--out", index, "--workers", "1")
        _, errors = indexing.communicate(timeout=PATIENCE)
        assert indexing.returncode == 0, errors
        arguments = ("select", "--train", task["train"], "--index", index, "--retriever", "dsir", "--max-documents", "20", "--out")
        with stopped_while_it_builds(index / "ngrams", *arguments, folder / "one") as first:
            if first is not None:
                one_builds_and_the_other_waits(first, *arguments, folder / "other")
                break
    else:
        raise AssertionError("no corpus was large enough")
    assert (folder / "one/selection.arrow").read_bytes() == (folder / "other/selection.arrow").read_bytes()
    assert len([path for path in (index / "ngrams").iterdir() if path.is_dir()]) == 1
    verify(tmp_path)


class SlowEncoder:
    """Encodes a text as its lengths, but not before a file exists, which the process that waits writes."""

    fingerprint = "lengths"

    def __init__(self, waited_for: Path, encoded: Path) -> None:
        self.waited_for, self.encoded = waited_for, encoded

    def encode(self, texts: Sequence[str]) -> FloatArray:
        wait_until(self.waited_for.exists)
        with self.encoded.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return np.array([[len(text), 1] for text in texts], np.float32)


def test_one_of_two_processes_encodes_shared_passages_and_the_other_waits(tmp_path: Path) -> None:
    corpus = build_corpus(CorpusConfig(files=(str(write_corpus(tmp_path / "corpus.jsonl", 50)),)), tmp_path / "store")
    (part,) = corpus.parts
    encoder = SlowEncoder(tmp_path / "waited for", tmp_path / "encoded")

    def touch(event: Event) -> None:
        if event.message.startswith("waiting: "):
            encoder.waited_for.touch()

    pids = []
    for _ in range(2):
        if (pid := os.fork()) == 0:
            try:
                embed_part(corpus, part, encoder, tmp_path / "store", prefix="", emit=touch)
                os._exit(0)
            except BaseException as error:  # the child must never return into pytest
                os._exit(getattr(error, "exit_code", 99))
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    (builder,) = set(encoder.encoded.read_text().split())
    assert int(builder) in pids
    vectors = embed_part(corpus, part, encoder, tmp_path / "store", prefix="", emit=silent)
    assert vectors.shape == (len(part), 2)
    assert set(encoder.encoded.read_text().split()) == {builder}
