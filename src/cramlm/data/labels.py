"""Labels by kind of task: how to read them from a file, check them, and turn them into training targets.

    classification    one label: any string                     "sport"
    multi-label       any number of labels, including none      '["sport", "travel"]': a JSON list, sorted, without repeats
    regression        a finite number                           "3.5": its Python repr

`Example.label` holds the canonical string on the right, so that equal labels are equal strings. Other code that depends on the kind:
predictions and scores (evaluation/kinds.py), loss (training/terms/classify.py), linear models (linear/solvers.py), config.json
(model/huggingface/config.py).
"""

from __future__ import annotations

import functools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from cramlm.errors import DataError, brief, counted
from cramlm.io.rows import ColumnKind
from cramlm.records import FloatArray, IntArray, Scale, TaskKind
from cramlm.text.characters import is_invisible, normalise

WRITTEN_LIST: Final = re.compile(r"""\[(\s*|\s*["'].*["']\s*|([\d.\s-]*,)+[\d.\s-]*)\]""", re.DOTALL)
"""How Python and JSON write a list of labels; a single number in brackets may be the name of a label."""
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WITH_DECIMALS: Final = re.compile(r"[+-]?\d+\.0+", re.ASCII)  # of a whole number
LARGEST_NUMBER: Final = 1e30  # squares of larger numbers overflow single precision
LARGEST_MEAN: Final = 1e6
"""Of numbers, as a multiple of their spread. Models predict in single precision, whose error is then 0.06 times the spread."""


class LabelRules(Protocol):
    """Label handling of one kind of task. `labels` are strings of `Example.label`, `names` are `Task.labels`."""

    column: ColumnKind

    def read(self, value: str | None, column: str) -> str:
        """Return the canonical label of a column's value; raise ValueError with the reason if the value is invalid."""

    def plain(self, label: str) -> Any:
        """Return the label as a JSON value: a string, a list of strings, or a number."""

    def names(self, label: str) -> tuple[str, ...]:
        """Return the label names in a label; none for a number."""

    def stratum(self, label: str) -> str:
        """Return the stratum of a label for a stratified split."""
        return ""

    def check(self, labels: Sequence[str], path: str) -> None:
        """Raise DataError if no model can be trained on rows with these labels."""

    def task_labels(self, labels: Sequence[str], column: str) -> tuple[str, ...]:
        """Return `Task.labels` for these training rows, in the order of the logits."""
        return tuple(sorted({name for label in labels for name in self.names(label)}))

    def scale(self, labels: Sequence[str]) -> Scale:
        """Return the scale of the training rows' numbers."""
        return Scale()

    def targets(self, labels: Sequence[str], names: Sequence[str], scale: Scale) -> tuple[IntArray, FloatArray]:
        """Return `task_labels` and `targets` of a batch (records.Batch) for rows with these labels."""

    def summarize(self, labels: Sequence[str], names: Sequence[str]) -> str:
        """Describe the labels of the training rows in a few words."""


class SingleLabel(LabelRules):
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
                "numbers or ids, not classes: pass another --label-column, bin the values, or learn numbers with --task-type regression"
            )

    def targets(self, labels: Sequence[str], names: Sequence[str], scale: Scale) -> tuple[IntArray, FloatArray]:
        ids = {name: number for number, name in enumerate(names)}
        return np.array([ids[label] for label in labels], dtype=np.int64), np.zeros((len(labels), 0), dtype=np.float32)

    def summarize(self, labels: Sequence[str], names: Sequence[str]) -> str:
        return counted(len(names), "label")


class MultiLabel(LabelRules):
    """A text has any number of labels, including none."""

    column: ColumnKind = "labels"

    def read(self, value: str | None, column: str) -> str:
        if value is None:
            raise ValueError(f"{column!r} is null; write an empty list for a text without labels")
        names: list[str] = json.loads(value)
        if WRITTEN_LIST.fullmatch(cell := ", ".join(names)):
            raise ValueError(f"{column!r} is a list written as text ({brief(cell, 40)}); write a|b, or lists in .jsonl or .parquet")
        if not all(name.strip() for name in names):
            raise ValueError(f"{column!r} holds an empty label among {brief(', '.join(names), 40)}")
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{column!r} holds the label {brief(repeated[0], 30)} twice")
        return format_labels(names)

    def plain(self, label: str) -> list[str]:
        return list(_parse_labels(label))

    def names(self, label: str) -> tuple[str, ...]:
        return _parse_labels(label)

    def check(self, labels: Sequence[str], path: str) -> None:
        counts = Counter(name for label in labels for name in _parse_labels(label))
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
                "--label-separator the file's, and --label-column the right one?"
            )

    def targets(self, labels: Sequence[str], names: Sequence[str], scale: Scale) -> tuple[IntArray, FloatArray]:
        ids = {name: number for number, name in enumerate(names)}
        targets = np.zeros((len(labels), len(names)), dtype=np.float32)
        for row, label in enumerate(labels):
            targets[row, [ids[name] for name in _parse_labels(label) if name in ids]] = 1
        return np.zeros(len(labels), dtype=np.int64), targets

    def summarize(self, labels: Sequence[str], names: Sequence[str]) -> str:
        mean = sum(len(_parse_labels(label)) for label in labels) / len(labels)
        return f"{counted(len(names), 'label')}, {mean:.1f} a text"


class NumberLabel(LabelRules):
    """A text has a number."""

    column: ColumnKind = "number"

    def read(self, value: str | None, column: str) -> str:
        stripped = (value or "").strip()
        if not _NUMBER.fullmatch(stripped):
            raise ValueError(f"{column!r} is not a number ({brief(value, 30)}); write it like 3.5 or -1e3")
        number = float(stripped)
        if not abs(number) <= LARGEST_NUMBER:
            raise ValueError(f"{column!r} is too large a number ({brief(value, 30)}): its absolute value is over {LARGEST_NUMBER:.0e}")
        return format_number(number)

    def plain(self, label: str) -> float:
        return float(label)

    def names(self, label: str) -> tuple[str, ...]:
        return ()

    def check(self, labels: Sequence[str], path: str) -> None:
        if len(labels) == 1:
            raise DataError(f"{path}: 1 training row; a regression needs more")
        if len(set(labels)) == 1:
            raise DataError(f"{path}: every row has the number {labels[0]}; there is nothing to learn")
        scale = self.scale(labels)
        if abs(scale.mean) > LARGEST_MEAN * scale.spread:
            (mean,), spread = number_texts([scale.mean], scale.spread), number_text(scale.spread, 3)
            raise DataError(
                f"{path}: the mean of the numbers, {mean}, is more than {LARGEST_MEAN:,.0f} times their spread of {spread}, "
                "too much for single precision; subtract the mean from all numbers"
            )

    def task_labels(self, labels: Sequence[str], column: str) -> tuple[str, ...]:
        return (column,)

    def scale(self, labels: Sequence[str]) -> Scale:
        numbers = np.array([float(label) for label in labels])
        return Scale(float(numbers.mean()), float(numbers.std()) or 1.0)

    def targets(self, labels: Sequence[str], names: Sequence[str], scale: Scale) -> tuple[IntArray, FloatArray]:
        numbers = scale.standardized(np.array([float(label) for label in labels]).reshape(-1, 1))
        return np.zeros(len(labels), dtype=np.int64), numbers.astype(np.float32)

    def summarize(self, labels: Sequence[str], names: Sequence[str]) -> str:
        scale = self.scale(labels)
        least, most, mean = number_texts([*range_of(labels), scale.mean], scale.spread)
        return f"numbers from {least} to {most}, mean {mean}, spread {number_text(scale.spread, 4)}"


RULES: Final[dict[TaskKind, LabelRules]] = {"classification": SingleLabel(), "multi-label": MultiLabel(), "regression": NumberLabel()}


def format_labels(names: Sequence[str]) -> str:
    """Return `Example.label` for several labels."""
    return json.dumps(sorted(names), ensure_ascii=False)


def format_number(number: float) -> str:
    """Return `Example.label` for a number; raise ValueError if it is not finite."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return repr(float(number) + 0.0)  # -0.0 becomes 0.0


def folded(label: str) -> str:
    """Return a key that is equal for labels that differ in case, Unicode form, white space, invisible characters or decimals (1.0) only."""
    key = " ".join(_visible(normalise(label)).split())
    return key.partition(".")[0] if _WITH_DECIMALS.fullmatch(key) else key


def _visible(text: str) -> str:
    return "".join(each for each in text if not is_invisible(each) and unicodedata.category(each) != "Cf")


def spelling_difference(label: str, other: str) -> str:
    """Return in words how two labels of equal `folded` differ, with both in a form that shows it."""
    composed, other_composed = (unicodedata.normalize("NFC", name) for name in (label, other))
    if composed == other_composed:
        difference = "Unicode form"
    elif _visible(composed) == _visible(other_composed):
        difference = "invisible characters"
    elif _WITH_DECIMALS.fullmatch(label.strip()) or _WITH_DECIMALS.fullmatch(other.strip()):
        difference = "decimals"
    else:
        difference = "case, Unicode form or white space"
    shown = [ascii(name) if difference in ("Unicode form", "invisible characters") else brief(name) for name in (label, other)]
    return f"{shown[0]} differs from {shown[1]} in {difference} only"


def spelled_otherwise(label: str, names: Iterable[str]) -> str:
    """Return `spelling_difference` from a name with the same `folded` after a semicolon; "" if there is none."""
    key = folded(label)
    other = next((name for name in names if folded(name) == key), None)
    return "" if other is None else f"; {spelling_difference(label, other)}"


def range_of(labels: Sequence[str]) -> tuple[float, float]:
    """Return the least and the largest number of these labels."""
    numbers = [float(label) for label in labels]
    return min(numbers), max(numbers)


def number_texts(numbers: Sequence[float], spread: float) -> list[str]:
    """Return numbers with six significant digits, or as many more as a thousandth of their spread takes."""
    largest = max(map(abs, numbers))
    digits = 4 + math.floor(math.log10(largest / spread)) if largest > spread > 0 else 0
    return [number_text(number, min(max(digits, 6), 15)) for number in numbers]


def number_text(number: float, digits: int) -> str:
    """Return a number with so many significant digits; below 1e15 with all those before the point instead of an exponent."""
    return f"{number:.0f}" if 10**digits - 0.5 <= abs(number) < 1e15 else f"{number:.{digits}g}"


@functools.lru_cache(maxsize=65_536)
def _parse_labels(label: str) -> tuple[str, ...]:
    return tuple(json.loads(label))
