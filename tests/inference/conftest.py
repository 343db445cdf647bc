from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commands import succeed


@pytest.fixture(scope="module")
def finished(tiny_run: Path) -> Path:
    """A finished run of an encoder with its linear models; its data are in ../data."""
    return tiny_run / "run"


@pytest.fixture(scope="session")
def onnx_form(once: Callable[..., Path], session_run: Path) -> Path:
    """The ONNX form of `session_run`; no test may change it."""
    pytest.importorskip("onnxruntime")
    return once("session-onnx", lambda folder: succeed("export", session_run / "run", "--out", folder))
