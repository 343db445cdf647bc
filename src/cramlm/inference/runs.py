"""From a path that a user gives to the model, the run it belongs to, and the run's held-out texts."""

from __future__ import annotations

from pathlib import Path

from cramlm.data.task import KIND as TASK
from cramlm.data.task import load_task
from cramlm.errors import ArtifactError, UsageError
from cramlm.evaluation.kinds import require_single_label
from cramlm.linear import is_linear
from cramlm.model.huggingface.config import CONFIG_FILE, kind_of, read_json
from cramlm.records import Example
from cramlm.storage.artifacts import MANIFEST


def model_of(path: Path) -> Path:
    """The model that `path` means: an exported folder or an ONNX one as it is, of a run its export.

    Raises:
        ArtifactError: if there is none.
    """
    for folder in (path, path / "export"):
        if (folder / CONFIG_FILE).is_file() or is_linear(folder):
            return folder
    raise ArtifactError(f"{path}: holds no exported model; pass the folder of a finished run, or of a model")


def refuse_other_kinds(folder: Path, what: str, instead: str) -> None:
    """Raises UsageError if the model in `folder` is of a kind of task that `what` is not made for."""
    path = folder / CONFIG_FILE
    if is_linear(folder):
        from cramlm.linear.model import kind_of_linear

        require_single_label(kind_of_linear(folder), what, instead)
    elif path.is_file():  # else there is nothing, which is said elsewhere
        require_single_label(kind_of(read_json(path), path), what, instead)


def run_of(path: Path) -> Path | None:
    """The run that `path`, a run or a folder in one, belongs to; None for a model that was copied elsewhere."""
    folder = path.resolve()
    return next((place for place in (folder, folder.parent) if (place / "run.toml").is_file()), None)


def held_out(run: Path, *, limit: int) -> list[Example]:
    """At most `limit` dev and test examples of a run, evenly spread over them, from the copy of its task that it keeps.

    Raises:
        UsageError: if the run keeps none. ArtifactError: if the copy is damaged.
    """
    if not (run / TASK / MANIFEST).is_file():
        raise UsageError(f"{run}: keeps no texts of its task; run the same `cramlm fit` again, which adds them, or pass --texts FILE")
    task = load_task(run)
    examples = task.dev + task.test
    stride = max(1, -(-len(examples) // limit))
    return list(examples[::stride])
