"""Which texts to label next: uncertain, different, new, and the same for the same seed."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from commands import cramlm, error_line, succeed
from cramlm.errors import UsageError
from cramlm.inference.label_next import label_next, margins, spread
from cramlm.inference.predictor import Predictor
from cramlm.records import Example
from jsonl import read_jsonl, write_jsonl
from tiny_task import COMMON, TOPICS


def unlabelled(count: int) -> list[Example]:
    """Texts of both topics, from clear to mixed."""
    generator = random.Random(4)
    words = [*TOPICS["sea"], *TOPICS["hill"], *COMMON]
    return [Example(str(number + 1), " ".join(generator.choices(words, k=8)), None, None) for number in range(count)]


def test_margins_are_small_where_two_labels_are_close() -> None:
    probabilities = np.array([[0.5, 0.4, 0.1], [0.9, 0.05, 0.05]], dtype=np.float32)
    assert margins(probabilities, several=False) == pytest.approx([0.1, 0.85])
    assert margins(probabilities, several=True) == pytest.approx([0.0, 0.8])


def test_one_text_of_each_cluster_is_chosen() -> None:
    centres = np.eye(4, 6, dtype=np.float32)
    noise = 0.01 * np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    vectors = np.repeat(centres, 10, axis=0) + noise
    chosen = spread(vectors, np.full(40, 0.5), 4, seed=1)
    assert (chosen // 10).tolist() == [0, 1, 2, 3]
    assert spread(csr_matrix(vectors), np.full(40, 0.5), 4, seed=1).tolist() == chosen.tolist()


def test_as_many_texts_as_wanted_are_chosen_where_vectors_are_equal() -> None:
    assert spread(np.ones((9, 3), dtype=np.float32), np.ones(9), 4, seed=0).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("model_part", ["combined", "encoder", "static", "tfidf"])
def test_chosen_texts_are_uncertain_new_and_ordered(finished: Path, model_part: Any) -> None:
    predictor = Predictor.load(finished / "export", model_part=model_part)
    texts = unlabelled(120)
    found = label_next(predictor, [*texts, *texts[:5]], 6, labelled=texts[:20], seed=3)
    assert (len(found.chosen), found.labelled, found.repeated) == (6, 25, 0)
    assert not {each.example.text for each in found.chosen} & {each.text for each in texts[:20]}
    assert len({each.example.id for each in found.chosen}) == 6
    shown = [each.margin for each in found.chosen]
    assert shown == sorted(shown)
    everything = margins(predictor.outputs([each.text for each in texts[20:]], None), several=False)
    assert max(shown) <= np.sort(everything)[60] + 1e-6
    assert label_next(predictor, [*texts, *texts[:5]], 6, labelled=texts[:20], seed=3) == found


def test_fewer_texts_than_wanted_are_all_chosen(finished: Path) -> None:
    predictor = Predictor.load(finished / "export", model_part="tfidf")
    texts = unlabelled(5)
    assert len(label_next(predictor, [*texts, *texts], 50).chosen) == 5
    assert label_next(predictor, [*texts, *texts], 50).repeated == 5
    with pytest.raises(UsageError, match="examples: all 5 texts are labelled already"):
        label_next(predictor, texts, 3, labelled=texts)
    with pytest.raises(UsageError, match="at least 1"):
        label_next(predictor, texts, 0)


def test_the_command_leaves_out_the_texts_of_the_run_and_writes_rows_to_fill_in(finished: Path, tmp_path: Path) -> None:
    train = [row["text"] for row in read_jsonl(finished / "task/train.jsonl")]
    new = [each.text for each in unlabelled(30)]
    file = tmp_path / "unlabelled.jsonl"
    write_jsonl(file, ({"text": text} for text in [train[0].upper(), *new]))
    result = succeed("label-next", finished, file, "-n", "4")
    assert "4 of 31 texts; left out: 1 labelled already, 0 repeated" in result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [list(row) for row in rows] == [["id", "text", "label", "predicted", "margin"]] * 4
    assert all(row["label"] is None and row["text"] == new[int(row["id"]) - 2] for row in rows)
    table = tmp_path / "next.csv"
    succeed("label-next", finished, file, "-n", "4", "-o", table)
    with table.open(encoding="utf-8", newline="") as opened:
        read = list(csv.DictReader(opened))
    assert [row["text"] for row in read] == [row["text"] for row in rows]
    assert {row["label"] for row in read} == {""}


def test_a_copied_model_says_that_it_does_not_know_its_training_texts(finished: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(finished / "export", tmp_path / "model")
    file = tmp_path / "new.txt"
    file.write_text("\n".join(each.text for each in unlabelled(12)) + "\n", "utf-8")
    assert "not in a run" in succeed("label-next", copied, file, "-n", "3").stderr
    message = error_line(cramlm("label-next", copied, file, "-n", "3", "--labelled", file), 2)
    assert message == f"{file}: all 12 texts are labelled already; pass others"
    provenance = copied / "provenance.json"
    provenance.write_text(provenance.read_text("utf-8").replace('"label_column": "label"', '"label_column": "predicted"'), "utf-8")
    assert "two columns of the output would be named 'predicted'" in error_line(cramlm("label-next", copied, file), 2)


def test_an_onnx_folder_compares_texts_by_its_linear_models(onnx_form: Path) -> None:
    texts = unlabelled(60)
    assert len(label_next(Predictor.load(onnx_form), texts, 5).chosen) == 5
    with pytest.raises(UsageError, match="ONNX folder gives logits only"):
        label_next(Predictor.load(onnx_form, model_part="encoder"), texts, 5)
