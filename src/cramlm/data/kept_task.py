"""The labelled texts of a run, kept in its folder, so that its report and its checks need no other file.

train.jsonl, dev.jsonl, test.jsonl      id, text, label, and text_pair where there is one; a JSON line each, in order
task.json                               kind, labels, scale, and whether dev was split off from train
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from cramlm.data.task import split_rows, task_fingerprint
from cramlm.errors import ArtifactError
from cramlm.records import Emit, Example, Scale, Split, Task
from cramlm.storage.artifacts import Artifact, hash_json, open_artifact, stage, verify

KIND: Final = "task"
_SPLITS: Final[tuple[Split, ...]] = ("train", "dev", "test")
_FACTS: Final = "task.json"


def keep_task(task: Task, run: Path, *, emit: Emit) -> Artifact:
    """Publish the task at RUN/task."""

    facts = {"kind": task.kind, "labels": list(task.labels), "scale": asdict(task.scale), "dev_is_split": task.dev_is_split_from_train}

    def write(folder: Path) -> None:
        for split in _SPLITS:
            with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(_row(example), ensure_ascii=False) + "\n" for example in getattr(task, split))
        (folder / _FACTS).write_text(json.dumps(facts, ensure_ascii=False) + "\n", "utf-8")

    key = {"format": 1, "task": task_fingerprint(task), "rows": hash_json([split_rows(task), facts])}
    return stage(run / KIND, kind=KIND, key=key, write=write, emit=emit)


def load_task(run: Path) -> Task:
    """Return the task that `keep_task` published for a run.

    Raises:
        ArtifactError: if there is none, or it is damaged.
    """
    folder = open_artifact(run / KIND, kind=KIND).path
    verify(folder)
    try:
        facts = json.loads((folder / _FACTS).read_bytes())
        train, dev, test = (tuple(_read(folder / f"{split}.jsonl")) for split in _SPLITS)
        labels, scale = tuple(facts["labels"]), Scale(**facts["scale"])
        return Task(train, dev, test, labels, bool(facts["dev_is_split"]), facts["kind"], scale)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder}: damaged ({error}); delete the folder and run `cramlm fit` again") from error


def _row(example: Example) -> dict[str, Any]:
    return {name: value for name, value in asdict(example).items() if value is not None}


def _read(path: Path) -> list[Example]:
    with path.open(encoding="utf-8") as file:
        return [Example(row["id"], row["text"], row.get("text_pair"), row.get("label")) for row in map(json.loads, file)]
