"""Fewer labels than there are: a part of the training rows, labels in their proportions, drawn from a seed; the same for every arm."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.data.task import read_examples
from cramlm.errors import UsageError
from cramlm.records import Example
from cramlm.storage.artifacts import hash_json, publish_file

_DRAW_STREAM = 0xD4A3


def draw_labels(task: Mapping[str, Any], *, count: int, seed: int, folder: Path) -> Path:
    """A file of about `count` rows of `task["train"]`, under the same column names; at least one row of every label.

    Of one seed, a smaller draw is part of a larger one.

    Raises:
        UsageError: if there are not so many rows, or fewer asked for than labels. DataError: a bad row.
    """
    columns = {name: task.get(f"{name}_column") or default for name, default in (("text", "text"), ("label", "label"))}
    pair = task.get("text_pair_column")
    examples = read_examples(
        task["train"],
        text_column=columns["text"],
        label_column=columns["label"],
        text_pair_column=pair,
        on_bad_row=task.get("on_bad_row") or "fail",
    )
    rows = []
    for example in _drawn(examples, count, seed, str(task["train"])):
        halves = {columns["text"]: example.text, **({} if pair is None else {pair: example.text_pair})}
        rows.append(json.dumps({**halves, columns["label"]: example.label}, ensure_ascii=False) + "\n")
    content = "".join(rows)
    target = folder / f"train-{count}-{seed}-{hash_json(content)[:8]}.jsonl"
    if not target.is_file():
        publish_file(target, content.encode())
    return target


def _drawn(examples: list[Example], count: int, seed: int, origin: str) -> list[Example]:
    by_label: dict[str, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        by_label[str(example.label)].append(index)
    if not len(by_label) <= count <= len(examples):
        raise UsageError(
            f"--labels {count}: {origin} has {len(examples):,} rows of {len(by_label)} labels; ask for a number between, or all"
        )
    generator = np.random.Generator(np.random.Philox(key=[seed, _DRAW_STREAM]))
    chosen: list[int] = []
    for label in sorted(by_label):
        share = max(1, round(count * len(by_label[label]) / len(examples)))
        chosen += generator.permutation(by_label[label])[:share].tolist()
    return [examples[index] for index in sorted(chosen)]
