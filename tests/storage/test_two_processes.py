"""Two processes that want the same folder of a store at the same time: one builds it, the other waits for it with a message.

The process of the test holds the lock as a builder does. The same at functions: test_stage_folders.py, retrieval/test_dense.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from commands import Child, cramlm, error_line, printed, start, succeed
from cramlm.storage.artifacts import verify
from cramlm.storage.locks import lock
from server_process import PATIENCE
from tiny_task import write_task


def errors_up_to(process: Child, needle: str) -> str:
    """Read the standard error of a process up to a line with `needle`; return that line."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if needle in line:
            return line
    raise AssertionError("".join(lines))


INDEX = "index data/corpus.jsonl --out index --workers 1"
SELECT = "select --train data/train.jsonl --index index --retriever dsir --max-documents 20 --out one"


@pytest.mark.parametrize(("stage", "command"), [("corpora", INDEX), ("indexes", INDEX), ("ngrams", SELECT)])
def test_a_command_waits_for_another_process_that_builds_a_shared_folder(
    stage: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(Path("data"), documents=60)
    succeed(*INDEX.split())
    alone = printed(*command.split())
    (folder,) = (path for path in Path("index", stage).iterdir() if path.is_dir())
    shutil.rmtree(folder)
    shutil.rmtree("one", ignore_errors=True)
    holder = f"being built by another process (pid {os.getpid()} on "
    with lock(folder):
        refused = cramlm(*command.split(), environment={"CRAMLM_WAIT": "0"})
        assert holder in error_line(refused, 7)
        process = start(*command.split())
        assert holder in errors_up_to(process, "waiting: ")
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert output == alone
    assert folder.is_dir()
    assert verify(Path("index")) >= 4  # a part, the corpus, a segment, the index
    assert not list(Path("index").rglob("*.tmp-*"))
