"""What is handed from one stage to the next, where the pipeline's own tests do not look."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cramlm.artifacts import publish
from cramlm.model.tokenization import Tokenizer
from cramlm.stages.common import Chosen
from cramlm.stages.model import external_pool


def publish_selection(folder: Path, texts: list[str], weights: list[float]) -> Chosen:
    def write(target: Path) -> None:
        (target / "selected.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
        np.save(target / "weight.npy", np.array(weights, np.float32))

    return Chosen(publish(folder, kind="selection", key={}, write=write))


def test_every_piece_of_a_long_passage_has_the_passages_weight(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chosen = publish_selection(tmp_path / "selection", ["kinase " * 40, "river bank"], [1.5, 0.5])
    pool = external_pool(tokenizer, chosen, length=16)
    assert len(pool) > 2
    assert pool.weights is not None
    assert pool.weights.tolist() == [1.5] * (len(pool) - 1) + [0.5]


def test_equal_weights_are_none_so_that_training_draws_as_ever(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chosen = publish_selection(tmp_path / "selection", ["kinase", "river bank"], [1.0, 1.0])
    assert external_pool(tokenizer, chosen, length=16).weights is None
