"""What a label is, by kind of task: how a file writes it, which labels it names, what a split keeps in proportion, what training is told.

    classification    one label: any string                     "sport"
    multi-label       any number of labels, none too            '["sport", "travel"]': a JSON list, sorted, each once
    regression        a finite number                           "3.5": as Python spells it

`Example.label` holds the string on the right, so that equal strings are equal answers and nothing else needs to know the kind. What the
kinds differ in later on: their answers and scores (evaluation/kinds.py), their loss (training/terms/classify.py), their baseline
(evaluation/linear.py), and what config.json calls them (model/huggingface/config.py).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from cramlm.errors import DataError
from cramlm.io.rows import ColumnKind
from cramlm.io.streams import brief
from cramlm.records import FloatArray, IntArray, Scale, TaskKind

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_LARGEST: Final = 1e30  # beyond, squares do not fit into single precision


class LabelRules(Protocol):
    """What the kinds of task differ in before a model sees them. `labels` are always those of `Example`, `names` those of `Task`."""

    column: ColumnKind

    def read(self, value: str | None, column: str) -> str:
        """The label that a reader found in a column; ValueError with the reason if it is none."""

    def plain(self, label: str) -> Any:
        """As a JSON value: a string, a list of strings, or a number."""

    def names(self, label: str) -> tuple[str, ...]:
        """The labels that it names; a number names none."""

    def stratum(self, label: str) -> str:
        """What a dev split keeps in proportion."""

    def check(self, labels: Sequence[str], path: str) -> None:
        """DataError if there is nothing to learn from training rows with these labels."""

    def all_names(self, labels: Sequence[str], column: str) -> tuple[str, ...]:
        """What a model of these training rows answers with, in the order of its logits."""

    def scale(self, labels: Sequence[str]) -> Scale:
        """That of the training rows."""

    def targets(self, labels: Sequence[str], names: Sequence[str], scale: Scale) -> tuple[IntArray, FloatArray]:
        """`task_labels` and `targets` of a batch (records.Batch), for rows with these labels."""

    def sum_up(self, labels: Sequence[str], names: Sequence[str]) -> str:
        """The labels of the training rows in a few words."""


class OneLabel:
    """A text has exactly one label."""

    column: ColumnKind = "label"

    def read(self, value: str | None, column: str) -> str:
        if value is None or not value.strip():
            raise ValueError(f"label {column!r} is empty")
        return value

    def plain(self, label: str) -> str:
        return label

    def names(self, label: str) -> tuple[str, ...]:
        return (label,)

    def stratum(self, label: str) -> str:
        return label

    def check(self, labels: Sequence[str], path: str) -> None:
        if len(labels) == 1:
            raise DataError(f"{path}: 1 training row; a classifier needs at least two labels with examples")
        counts = Counter(labels)
        if len(counts) == 1:
            raise DataError(f"{path}: every row has the label {brief(next(iter(counts)))}; a classifier needs at least two")
        if len(counts) > len(labels) / 2:
            shown = ", ".join(brief(label, 30) for label in list(counts)[:3])
            raise DataError(
                f"{path}: {len(counts):,} labels for {len(labels):,} rows ({shown}, …), more than one per two rows; these look like "
                "numbers or ids, not classes: pass another --label-column, bin the values, or learn numbers with --set task.kind=regression"
            )

    def all_names(self, labels: Sequence[str], column: str) -> tuple[str, ...]:
        return tuple(sorted(set(labels)))

    def scale(self, labels: Sequence[str]) -> Scale:
        return Scale()

    def targets(self, labels: Sequence[str], names: Sequence[str], scale: Scale) -> tuple[IntArray, FloatArray]:
        ids = {name: number for number, name in enumerate(names)}
        return np.array([ids[label] for label in labels], dtype=np.int64), np.zeros((len(labels), 0), dtype=np.float32)

    def sum_up(self, labels: Sequence[str], names: Sequence[str]) -> str:
        return f"{len(names)} labels"


class SeveralLabels:
    """A text has any number of labels, none too."""

    column: ColumnKind = "labels"

    def read(self, value: str | None, column: str) -> str:
        if value is None:
            raise ValueError(f"{column!r} is null; write an empty list for a text without labels")
        found: list[str] = json.loads(value)
        if not all(name.strip() for name in found):
            raise ValueError(f"{column!r} holds an empty label among {brief(', '.join(found), 40)}")
        if twice := [name for name, count in Counter(found).items() if count > 1]:
            raise ValueError(f"{column!r} holds the label {brief(twice[0], 30)} twice")
        return spell_labels(found)

    def plain(self, label: str) -> list[str]:
        return list(_listed(label))

    def names(self, label: str) -> tuple[str, ...]:
        return _listed(label)

    def stratum(self, label: str) -> str:
        return ""

    def check(self, labels: Sequence[str], path: str) -> None:
        counts = Counter(name for label in labels for name in _listed(label))
        if len(labels) == 1:
            raise DataError(f"{path}: 1 training row; a classifier needs more")
        if not counts:
            raise DataError(f"{path}: no row has a label; there is nothing to learn")
        if len(set(labels)) == 1:
            shown = ", ".join(brief(name, 30) for name in list(counts)[:3])
            raise DataError(
                f"{path}: every row has the labels ({shown}); there is nothing to learn: "
                "add rows without them (an empty list) or with others"
            )
        if len(counts) > counts.total() / 2:
            shown = ", ".join(brief(name, 30) for name in list(counts)[:3])
            raise DataError(
                f"{path}: {len(counts):,} labels that occur {counts.total():,} times in all ({shown}, …), less than twice each; is "
                "task.label_separator the file's, and --label-column the right one?"
            )

    def all_names(self, labels: Sequence[str], column: str) -> tuple[str, ...]:
        return tuple(sorted({name for label in labels for name in _listed(label)}))

    def scale(self, labels: Sequence[str]) -> Scale:
        return Scale()

    def targets(self, labels: Sequence[str], names: Sequence[str], scale: Scale) -> tuple[IntArray, FloatArray]:
        ids = {name: number for number, name in enumerate(names)}
        targets = np.zeros((len(labels), len(names)), dtype=np.float32)
        for row, label in enumerate(labels):
            targets[row, [ids[name] for name in _listed(label) if name in ids]] = 1
        return np.zeros(len(labels), dtype=np.int64), targets

    def sum_up(self, labels: Sequence[str], names: Sequence[str]) -> str:
        mean = sum(len(_listed(label)) for label in labels) / len(labels)
        return f"{len(names)} labels, {mean:.1f} a text"


class Number:
    """A text has a number."""

    column: ColumnKind = "number"

    def read(self, value: str | None, column: str) -> str:
        spelled = (value or "").strip()
        if not _NUMBER.fullmatch(spelled):
            raise ValueError(f"{column!r} is not a number ({brief(value, 30)}); write it like 3.5 or -1e3")
        number = float(spelled)
        if not abs(number) <= _LARGEST:
            raise ValueError(f"{column!r} is not a number that can be learnt ({brief(value, 30)}): its size is over {_LARGEST:.0e}")
        return spell_number(number)

    def plain(self, label: str) -> float:
        return float(label)

    def names(self, label: str) -> tuple[str, ...]:
        return ()

    def stratum(self, label: str) -> str:
        return ""

    def check(self, labels: Sequence[str], path: str) -> None:
        if len(labels) == 1:
            raise DataError(f"{path}: 1 training row; a regression needs more")
        if len(set(labels)) == 1:
            raise DataError(f"{path}: every row has the number {labels[0]}; there is nothing to learn")

    def all_names(self, labels: Sequence[str], column: str) -> tuple[str, ...]:
        return (column,)

    def scale(self, labels: Sequence[str]) -> Scale:
        numbers = np.array([float(label) for label in labels])
        return Scale(float(numbers.mean()), float(numbers.std()) or 1.0)

    def targets(self, labels: Sequence[str], names: Sequence[str], scale: Scale) -> tuple[IntArray, FloatArray]:
        numbers = (np.array([float(label) for label in labels]).reshape(-1, 1) - scale.mean) / scale.spread
        return np.zeros(len(labels), dtype=np.int64), numbers.astype(np.float32)

    def sum_up(self, labels: Sequence[str], names: Sequence[str]) -> str:
        numbers = [float(label) for label in labels]
        scale = self.scale(labels)
        return f"numbers from {min(numbers):g} to {max(numbers):g}, mean {scale.mean:.4g}, spread {scale.spread:.4g}"


RULES: Final[dict[TaskKind, LabelRules]] = {"classification": OneLabel(), "multi-label": SeveralLabels(), "regression": Number()}


def spell_labels(names: Sequence[str]) -> str:
    """Several labels as `Example.label` holds them."""
    return json.dumps(sorted(names), ensure_ascii=False)


def spell_number(number: float) -> str:
    """A number as `Example.label` holds it."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return repr(float(number) + 0.0)  # so that -0.0 is 0.0


@functools.lru_cache(maxsize=65_536)
def _listed(label: str) -> tuple[str, ...]:
    return tuple(json.loads(label))
