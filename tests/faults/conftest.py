"""The inputs and results that faults are tried on, made once for all files of a process."""

from __future__ import annotations

import os
import posix
from collections.abc import Iterator
from pathlib import Path

import pytest
import workloads


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workloads.World]:
    with workloads.scratch() as folder:
        yield workloads.World.build(folder / "world")


@pytest.fixture
def scratch() -> Iterator[Path]:
    with workloads.scratch() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _files_are_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss keeps what a command has synced."""
    monkeypatch.setattr(os, "fsync", posix.fsync)
