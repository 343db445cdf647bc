"""From a user's path to the model, its run, and the held-out texts of the run."""

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
    """Return the model folder for `path`: an exported or ONNX folder itself; of a run its export.

    Raises:
        ArtifactError: if there is none.
    """
    for folder in (path, path / "export"):
        if (folder / CONFIG_FILE).is_file() or is_linear(folder):
            return folder
    raise ArtifactError(f"{path}: holds no exported model; pass the folder of a finished run, or of a model")


def refuse_other_kinds(folder: Path, what: str, instead: str) -> None:
    """Raises UsageError if `what` does not support the kind of task of the model in `folder`."""
    path = folder / CONFIG_FILE
    if is_linear(folder):
        from cramlm.linear.model import kind_of_linear

        require_single_label(kind_of_linear(folder), what, instead)
    elif path.is_file():  # a missing model is reported elsewhere
        require_single_label(kind_of(read_json(path), path), what, instead)


def run_of(path: Path) -> Path | None:
    """Return the run that `path` is or lies in; None for a copied model."""
    folder = path.resolve()
    return next((candidate for candidate in (folder, folder.parent) if (candidate / "run.toml").is_file()), None)


def held_out(run: Path, *, limit: int) -> list[Example]:
    """At most `limit` dev and test examples, evenly spaced, from the task stored in the run.

    Raises:
        UsageError: if the run stores none. ArtifactError: if the copy is damaged.
    """
    if not (run / TASK / MANIFEST).is_file():
        raise UsageError(f"{run}: stores no texts of its task; run the same `cramlm fit` again, which adds them, or pass --texts FILE")
    task = load_task(run)
    examples = task.dev + task.test
    stride = max(1, -(-len(examples) // limit))
    return list(examples[::stride])
