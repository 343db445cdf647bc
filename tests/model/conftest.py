from __future__ import annotations

from pathlib import Path

import model_fixtures
import pytest

from cramlm.config.run import TokenizerConfig
from cramlm.model.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("wordpiece")
    train_tokenizer(model_fixtures.training_texts(), TokenizerConfig(vocab_size=400), folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def bpe_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("bpe")
    train_tokenizer(model_fixtures.training_texts(), TokenizerConfig(kind="bpe", vocab_size=400, lowercase=False), folder)
    return Tokenizer.load(folder)
