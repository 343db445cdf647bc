"""What is handed from one stage to the next, where the pipeline's own tests do not look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramlm.artifacts import publish
from cramlm.model.tokenization import Tokenizer
from cramlm.recipes.phases import finetune_phase, joint_phase
from cramlm.stages.common import Chosen, Ended
from cramlm.stages.model import known_score
from cramlm.stages.pools import external_pool


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


@pytest.mark.parametrize(
    ("joint", "finetune", "known"),
    [
        ({}, {}, 0.4),
        ({}, {"reset_task_head": True}, None),
        ({}, {"max_length": 64}, None),
        ({"task_weight": 0.0}, {}, None),
        ({"keep": "last", "steps": 9}, {}, None),
        ({"keep": "last", "steps": 5}, {}, 0.4),
    ],
    ids=["as it was", "new head", "other rows", "no labels before", "not the best of before", "the last was the best"],
)
def test_a_phase_takes_the_score_of_the_weights_it_starts_from_only_where_it_would_find_the_same(
    tmp_path: Path, joint: dict[str, Any], finetune: dict[str, Any], known: float | None
) -> None:
    before = joint_phase().model_copy(update={"max_length": 128, "keep": "best", "steps": 9, **joint})
    phase = finetune_phase().model_copy(update={"max_length": 128, **finetune})
    artifact = publish_selection(tmp_path / "selection", ["any"], [1.0]).artifact
    ended = Ended(before, artifact, {"best_score": 0.4, "best_step": 5, "steps": before.steps})
    assert known_score(phase, ended) == known
