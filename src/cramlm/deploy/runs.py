"""From a path that a user gives to the model, the run it belongs to, and the run's held-out texts."""

from __future__ import annotations

from pathlib import Path

from cramlm.config import load_config, read_toml
from cramlm.data.task import read_task
from cramlm.errors import ArtifactError, CramError, UsageError
from cramlm.evaluation.kinds import only_one_label
from cramlm.model.folders import CONFIG_FILE, read_json
from cramlm.model.native_config import kind_of
from cramlm.records import Example


def model_of(path: Path) -> Path:
    """The exported model that `path`, a model or a run, means.

    Raises:
        ArtifactError: if there is none.
    """
    for folder in (path, path / "export"):
        if (folder / "config.json").is_file():
            return folder
    raise ArtifactError(f"{path}: holds no exported model; pass the folder of a finished run, or of a model")


def refuse_other_kinds(folder: Path, what: str, instead: str) -> None:
    """Raises UsageError if the model in `folder` is of a kind of task that `what` is not made for."""
    path = folder / CONFIG_FILE
    if path.is_file():  # else it is an ONNX folder, or nothing at all, which is said elsewhere
        only_one_label(kind_of(read_json(path), path), what, instead)


def run_of(path: Path) -> Path | None:
    """The run that `path`, a run or a folder in one, belongs to; None for a model that was copied elsewhere."""
    folder = path.resolve()
    return next((place for place in (folder, folder.parent) if (place / "run.toml").is_file()), None)


def held_out(run: Path, *, limit: int) -> list[Example]:
    """At most `limit` dev and test examples of a run, evenly spread over them, read from the files it was fitted on.

    Raises:
        UsageError: if those files are not there any more, or hold other rows than they did.
    """
    config = load_config(read_toml(run / "run.toml"), origin=str(run / "run.toml"))
    try:
        task = read_task(config.task, seed=config.seed)
    except CramError as error:
        raise UsageError(f"{run}: its task cannot be read again ({error}); pass other texts with --texts FILE") from error
    examples = task.dev + task.test
    stride = max(1, -(-len(examples) // limit))
    return list(examples[::stride])
