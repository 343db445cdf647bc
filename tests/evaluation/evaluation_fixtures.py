"""Tasks of which only the labels matter."""

from __future__ import annotations

from collections.abc import Sequence

from cramlm.records import Example, Task, TaskKind

LABELS = ("a", "b", "c")


def examples(labels: Sequence[str]) -> tuple[Example, ...]:
    return tuple(Example(str(number), "text", None, label) for number, label in enumerate(labels))


def dev_task(dev: Sequence[str], kind: TaskKind = "classification", *, train: Sequence[str] = (), labels: tuple[str, ...] = LABELS) -> Task:
    """A task with these true labels."""
    return Task(examples(train), examples(dev), (), ("value",) if kind == "regression" else labels, False, kind=kind)
