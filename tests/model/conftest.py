from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import model_fixtures
import pytest
import torch

from cramlm.config import TokenizerConfig
from cramlm.model.tokenization import Tokenizer, train_tokenizer


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The models here are far too small for more, and threads that wait for one another make the suite slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
