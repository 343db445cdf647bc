"""Inputs and outputs of single stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramlm.config.run import CorpusConfig, RunConfig, load_config
from cramlm.config.terms import Mlm
from cramlm.data.corpus import build_corpus
from cramlm.data.task import load_task
from cramlm.errors import ArtifactError
from cramlm.evaluation.prediction import outputs_of, sequences_of
from cramlm.linear.model import LinearModel
from cramlm.model.tokenizer import UNCUT, Tokenizer
from cramlm.pipeline.context import FinishedPhase, RunContext, SelectedPassages
from cramlm.pipeline.stages.evaluate import outputs_of_linear_model
from cramlm.pipeline.stages.text import report_task, tokens
from cramlm.pipeline.stages.train import external_pool, inherited_score
from cramlm.recipes.recipe import finetune_phase, joint_phase
from cramlm.records import Event, Example, Task, counting
from cramlm.retrieval.ranking import one_each
from cramlm.retrieval.selection import SelectionTable, save_selection
from cramlm.storage.artifacts import open_artifact, publish
from jsonl import write_jsonl
from tiny_task import tiny_config, write_task

SPLITS = {"train": ("on the river", "by the bank"), "dev": ("in the sea",), "test": ("up the hill", "In the sea")}


def context(config: RunConfig, task: Task, folder: Path) -> RunContext:
    return RunContext(config, task, folder, folder / "store", 0.0)


def publish_selection(folder: Path, texts: list[str], weights: list[float]) -> SelectedPassages:
    def write(target: Path) -> None:
        save_selection(target, corpus, one_each(np.arange(len(texts))), np.array(weights, np.float32), retrievers=["bm25"])

    file = folder.with_suffix(".jsonl")
    write_jsonl(file, ({"text": text} for text in texts))
    corpus = build_corpus(CorpusConfig(files=(str(file),)), folder.with_name("store"))
    return SelectedPassages(SelectionTable(publish(folder, kind="selection", key={}, write=write)))


def test_a_run_warns_of_a_test_text_that_is_in_dev(tmp_path: Path) -> None:
    rows = [tuple(Example(f"{split}:{number}", text, None, "a") for number, text in enumerate(texts)) for split, texts in SPLITS.items()]
    events: list[Event] = []
    report_task(replace(context(load_config(tiny_config(write_task(tmp_path))), Task(*rows, ("a",), False), tmp_path), emit=events.append))
    assert "leak: test:1: the text of dev:0, same label" in [event.message for event in events if event.kind == "warning"]


def test_each_piece_of_a_passage_has_its_weight_and_equal_weights_are_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name, weights in (("unequal", [1.5, 0.5]), ("equal", [1.0, 1.0])):
        chosen = publish_selection(tmp_path / name, ["kinase " * 40, "river bank"], weights)
        pool = external_pool(tokenizer.cut(tokenizer.encode(chosen.texts()), max_length=16, cut="split"), chosen)
        assert len(pool) > 2
        assert pool.weights is None if name == "equal" else pool.weights.tolist() == [1.5] * (len(pool) - 1) + [0.5]


@pytest.mark.parametrize(
    ("joint", "finetune", "inherited"),
    [
        ({}, {}, 0.4),
        ({}, {"reset_task_head": True}, None),
        ({}, {"max_length": 64}, None),
        ({"terms": (Mlm(), Mlm(on="task"))}, {}, None),
        ({"keep": "last", "steps": 9}, {}, None),
        ({"keep": "last", "steps": 5}, {}, 0.4),
    ],
    ids=["as it was", "new head", "other rows", "no labels before", "not the best of before", "the last was the best"],
)
def test_a_phase_inherits_the_score_of_its_start_only_if_comparable(
    tmp_path: Path, joint: dict[str, Any], finetune: dict[str, Any], inherited: float | None
) -> None:
    before = joint_phase().model_copy(update={"max_length": 128, "keep": "best", "steps": 9, **joint})
    phase = finetune_phase().model_copy(update={"max_length": 128, **finetune})
    artifact = publish_selection(tmp_path / "selection", ["any"], [1.0]).artifact
    ended = FinishedPhase(before, artifact, {"best_score": 0.4, "best_step": 5, "steps": before.steps})
    assert inherited_score(phase, ended) == inherited


@pytest.mark.parametrize("pair", [None, "aspirin reduces pain"], ids=["texts", "pairs"])
def test_the_stage_tokens_equals_encoding_the_texts_again(pair: str | None, tmp_path: Path, tokenizer: Tokenizer) -> None:
    examples = tuple(Example(str(number), text, pair, "a") for number, text in enumerate(["the cell acts", "strongly"]))
    task = Task(examples, examples[:1], (), ("a", "b"), dev_is_split_from_train=False)
    passages = ["kinase acts " * 40, "river bank"]
    chosen = publish_selection(tmp_path / "selection", passages, [1.0, 1.0])
    config = load_config(tiny_config(write_task(tmp_path / "data")))
    text = tokens(context(config, task, tmp_path), chosen, tokenizer)
    cached, encoded = text.tokenizer, text.selection
    assert encoded.spans is not None, "the recipe has a linear teacher"
    with counting() as counts:
        results = [
            sequences_of(cached, task.train, max_length=16),
            cached.sequences([each.whole_text for each in task.train], max_length=UNCUT, cut="truncate"),
            cached.cut(encoded.ids, max_length=16, cut="split"),
        ]
        pieces, texts = cached.cut_with_texts(passages, encoded.ids, encoded.spans, max_length=16)
    assert not counts
    expected = [
        sequences_of(tokenizer, task.train, max_length=16),
        tokenizer.sequences([each.whole_text for each in task.train], max_length=UNCUT, cut="truncate"),
        tokenizer.sequences(passages, max_length=16, cut="split"),
    ]
    for one, other in zip([*results, pieces], [*expected, tokenizer.pieces(passages, max_length=16)[0]], strict=True):
        for name in ("ids", "offsets", "source"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert one.ids.dtype == other.ids.dtype
    assert texts == tokenizer.pieces(passages, max_length=16)[1]


def test_ids_that_do_not_match_their_offsets_are_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    examples = (Example("0", "the cell acts", None, "a"),)
    task = Task(examples, examples, (), ("a", "b"), dev_is_split_from_train=False)
    config = load_config(tiny_config(write_task(tmp_path / "data")))
    tokens(context(config, task, tmp_path), None, tokenizer)
    with (tmp_path / "tokens/task-ids.npy").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtifactError, match=r"task-ids\.npy"):
        tokens(context(config, task, tmp_path), None, tokenizer)


def test_the_evaluation_loads_each_linear_model_once_for_all_splits(linear_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loaded = LinearModel.load, []

    def counted(folder: Path) -> LinearModel:
        loaded.append(folder)
        return load(folder)

    monkeypatch.setattr(LinearModel, "load", counted)
    task = load_task(linear_runs / "static")
    stages = {"tfidf": "baseline", "bayes": "bayes", "static": "static"}
    fitted = {name: open_artifact(linear_runs / "static" / stage, kind=stage) for name, stage in stages.items()}
    outputs = {name: outputs_of_linear_model(task, artifact, artifact) for name, artifact in fitted.items()}
    assert loaded == [artifact.path for artifact in fitted.values()]
    for name, artifact in fitted.items():
        for split, examples in (("dev", task.dev), ("test", task.test)):
            logits = load(artifact.path).logits([example.divided_text for example in examples])
            np.testing.assert_array_equal(outputs[name][split], outputs_of(task.kind, logits))
    loaded.clear()
    outputs_of_linear_model(task, fitted["static"], fitted["tfidf"])
    assert sorted(loaded) == sorted([fitted["static"].path, fitted["tfidf"].path]), "dev and test are of different fits"
