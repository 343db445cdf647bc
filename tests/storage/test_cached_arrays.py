"""Arrays that are kept on disk for the next process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cramlm.storage.arrays import Arrays, cached_on_disk


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "source.py").write_text("one")
    return tmp_path / "source.py"


def table(source: Path, calls: list[int]) -> Callable[[], Arrays]:
    """Return a function that is decorated as in a new process, and counts its computations."""

    @cached_on_disk(str(source))
    def numbers() -> Arrays:
        calls.append(1)
        return np.arange(5, dtype=np.int32), np.zeros((0, 2), np.int64)

    return numbers


def test_a_table_is_computed_once_for_all_processes_and_again_for_another_source(source: Path) -> None:
    calls: list[int] = []
    first, again = table(source, calls)(), table(source, calls)()
    assert [array.tolist() for array in first] == [array.tolist() for array in again] == [[0, 1, 2, 3, 4], []]
    assert [(array.dtype, array.shape) for array in first] == [(array.dtype, array.shape) for array in again]
    assert len(calls) == 1
    source.write_text("two")
    table(source, calls)()
    assert len(calls) == 2


def test_a_damaged_table_is_computed_again(source: Path, tmp_path: Path) -> None:
    calls: list[int] = []
    table(source, calls)()
    (file,) = (tmp_path / "cache").iterdir()
    for content in (file.read_bytes()[:-1], b"", file.read_bytes()[:40] + b"x" + file.read_bytes()[41:]):
        file.write_bytes(content)
        assert table(source, calls)()[0].tolist() == [0, 1, 2, 3, 4]
    assert len(calls) == 4


def test_a_folder_that_cannot_be_written_is_passed_over(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    calls: list[int] = []
    table(source, calls)()
    table(source, calls)()
    assert len(calls) == 1
    assert list((tmp_path / "__pycache__").iterdir())
