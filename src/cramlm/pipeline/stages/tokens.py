"""Every text of a run as token ids, encoded once: the stages after it read these arrays, not the texts.

tokens/    passages-ids.npy, passages-offsets.npy: the selected passages; passages-spans.npy: where each token stands in its text, if a
           linear teacher needs the text of every piece; task-ids.npy, task-offsets.npy: the different texts of the task (`task_texts`)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.task import task_fingerprint
from cramlm.errors import ArtifactError
from cramlm.model.tokenizer import Tokenizer, Tokens
from cramlm.pipeline.stages.common import Chosen, Context, Text, fingerprint
from cramlm.pipeline.stages.teacher import needs_linear_teacher
from cramlm.records import Event, Task
from cramlm.storage.arrays import map_array, save_array
from cramlm.storage.artifacts import environment_faults

_PASSAGES: Final = "passages"
_TASK: Final = "task"


def tokens(run: Context, selection: Chosen | None, tokenizer: Tokenizer) -> Text:
    """The tokenizer, which knows the ids of the task's texts, and the selection with the ids of its passages."""
    texts = task_texts(run.task)
    has_spans = selection is not None and needs_linear_teacher(run.config.phases)

    def write(target: Path) -> None:
        run.emit(Event("start", "tokens"))
        _save(target, _TASK, own := tokenizer.encode(texts))
        passages = None
        if selection is not None:
            passages = tokenizer.encode(selection.texts()) if not has_spans else None
            if passages is None:
                passages, spans = tokenizer.encode_with_spans(selection.texts())
                save_array(target / f"{_PASSAGES}-spans.npy", spans)
            _save(target, _PASSAGES, passages)
        count = 0 if passages is None else len(passages.ids)
        run.emit(Event("done", "tokens", f"{count:,} tokens of passages, {len(own.ids):,} of {len(texts):,} different texts of the task"))

    inputs = {"tokenizer": tokenizer.fingerprint, "selection": fingerprint(selection), "task": task_fingerprint(run.task)}
    artifact = run.stage("tokens", key={"format": 1, "spans": has_spans, **inputs}, write=write)
    if selection is not None:
        spans = _map(artifact.path / f"{_PASSAGES}-spans.npy") if has_spans else None
        selection = selection.encoded(_open(artifact.path, _PASSAGES), spans)
    return Text(tokenizer.knowing(texts, _open(artifact.path, _TASK)), selection)


def task_texts(task: Task) -> list[str]:
    """The different texts that stages encode: every half of a pair and, for the linear models, both halves as one text."""
    examples = [*task.train, *task.dev, *task.test]
    texts = [text for each in examples for text in (each.text, each.text_pair, each.whole_text) if text is not None]
    return list(dict.fromkeys(texts))


def _save(folder: Path, name: str, tokens: Tokens) -> None:
    save_array(folder / f"{name}-ids.npy", tokens.ids)
    save_array(folder / f"{name}-offsets.npy", tokens.offsets)


def _open(folder: Path, name: str) -> Tokens:
    """Raises ArtifactError if the arrays do not fit together."""
    ids, offsets = _map(folder / f"{name}-ids.npy"), _map(folder / f"{name}-offsets.npy")
    if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise ArtifactError(f"{folder / name}-offsets.npy: damaged, the offsets do not fit the ids; delete the folder and run again")
    return Tokens(ids, offsets, np.arange(len(offsets) - 1, dtype=np.int64))


def _map(path: Path) -> npt.NDArray[Any]:
    try:
        with environment_faults(path):
            return map_array(path)
    except ValueError as error:
        raise ArtifactError(f"{path}: damaged ({error}); delete the folder and run again") from error
