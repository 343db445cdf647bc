"""The exported model that the tests of predictors and of the server share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cramlm.model.tokenizer import Tokenizer
from serving import export_tiny


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The folder of `export_tiny`; no test may change it."""
    return export_tiny(tmp_path_factory.mktemp("tiny-export") / "export", tokenizer)
