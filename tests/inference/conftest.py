from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def finished(tiny_run: Path) -> Path:
    """A finished run of an encoder with its linear models; its data are in ../data."""
    return tiny_run / "run"
