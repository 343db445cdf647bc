"""Which folder a path argument means, the same for every command on a finished model; the run that a model lies in, and its texts.

    runs/mine            a run: its export/
    runs/mine/export     an encoder or a linear model, also copied out of its run
    runs/mine/onnx       an ONNX folder
    any other folder     a classifier in the layout of Hugging Face, whoever saved it

Commands on a run (`report`, `track`, `passages`) also take a folder inside of it. Every other path raises one line that says what lies
there, what is missing, and how to get it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from cramlm.config.run import read_toml
from cramlm.data.task import KIND as TASK
from cramlm.data.task import RowFormat, load_task
from cramlm.errors import ArtifactError, UsageError
from cramlm.inference.base import read_provenance
from cramlm.inference.onnx import GRAPH_FILE
from cramlm.io.paths import at_home, require_folder
from cramlm.io.remote import is_remote
from cramlm.linear.files import is_linear
from cramlm.model.huggingface.config import CONFIG_FILE, read_json
from cramlm.model.prompts import PROMPT_FILE
from cramlm.pipeline.run_folder import CONFIG, EXPORT
from cramlm.records import Example, Task
from cramlm.storage.artifacts import MANIFEST, is_run_folder, kind_of_artifact

FolderKind: TypeAlias = Literal["encoder", "linear", "onnx", "language model", "encoder without classifier"]
CLASSIFIERS: Final[frozenset[FolderKind]] = frozenset({"encoder", "linear", "onnx"})
ENCODERS: Final[frozenset[FolderKind]] = frozenset({"encoder", "language model", "encoder without classifier"})
MOST_TEXTS: Final = 200  # on which two forms of a model are compared
_DEPTH: Final = 2  # of export/mlm in a run


def kind_of_folder(folder: Path) -> FolderKind | None:
    """Return what kind of model lies in a folder, by its files; None if there is none.

    Raises:
        ArtifactError: if its config.json is damaged or would run code.
    """
    if is_linear(folder):
        return "linear"
    if (folder / GRAPH_FILE).is_file():
        return "onnx"
    if not (folder / CONFIG_FILE).is_file():
        return None
    names = read_json(folder / CONFIG_FILE).get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if name.endswith("ForMaskedLM") and not (folder / PROMPT_FILE).is_file():
        return "language model"
    return "encoder without classifier" if name.endswith("Model") else "encoder"  # the loader refuses what is none of these


def model_of(path: Path, *, kinds: Collection[FolderKind] = CLASSIFIERS) -> Path:
    """Return the model folder for `path`: of a run its export, else the folder itself. kinds: those that the caller can use.

    Raises:
        UsageError: if `path` is no folder. ArtifactError: if there is no such model in it.
    """
    _require_folder(path)
    for folder in (path, path / EXPORT):
        if (kind := kind_of_folder(folder)) is not None:
            if kind not in kinds:
                raise ArtifactError(f"{folder}: {_unsuitable(kind, folder)}")
            return folder
    raise ArtifactError(f"{path}: {_missing(path)}")


def run_of(path: Path) -> Path | None:
    """Return the run that `path` is or lies in; None for a copied model."""
    folder = path.resolve()
    run = next((candidate for candidate in (folder, *folder.parents[:_DEPTH]) if is_run_folder(candidate)), None)
    return run.relative_to(Path.cwd()) if run is not None and not path.is_absolute() and run.is_relative_to(Path.cwd()) else run


def columns_of(
    model: Path, text: str | None = None, text_pair: str | None = None, label: str | None = None, separator: str | None = None
) -> RowFormat:
    """Return the columns to read for a model: those that are passed; for None those of the files that it was trained on, or the default
    ones if neither its folder nor its run names them.

    Raises:
        ArtifactError: if the provenance of the model is damaged.
    """
    run = run_of(model)
    folders = (model, *([] if run is None else [run / EXPORT]))
    tasks = [(read_provenance(folder).get("config") or {}).get("task") or {} for folder in folders]
    trained = next((task for task in tasks if "text_column" in task), {})
    passed = {"text_column": text, "text_pair_column": text_pair, "label_column": label, "label_separator": separator}
    values: dict[str, Any] = {name: trained.get(name) if value is None else value for name, value in passed.items()}
    return RowFormat(**{name: value for name, value in values.items() if value is not None})


def run_at(path: Path, command: str) -> Path:
    """Return the run that `path` is, or that it lies in, for a command on runs, finished or not.

    Raises:
        UsageError: if `path` is no folder. ArtifactError: if there is none.
    """
    _require_folder(path)
    if is_run_folder(path):
        return path
    if (run := run_of(path)) is not None:
        return run
    if kind_of_folder(path) is not None:
        raise ArtifactError(f"{path}: is a model without its run, and {command} needs the folder that `cramlm fit` wrote; pass that folder")
    raise ArtifactError(f"{path}: {_runs_below(path) or f'not a run (no {CONFIG}); pass the output folder of `cramlm fit`'}")


def task_of(model: Path) -> Task | None:
    """Return the task of the run that a model lies in; None outside of a run, or if the run stores none.

    Raises:
        ArtifactError: if the copy is damaged.
    """
    run = run_of(model)
    return None if run is None or not (run / TASK / MANIFEST).is_file() else load_task(run)


def texts_for_check(path: Path, texts: Sequence[Example] | None, *, of: str) -> Sequence[Example]:
    """At most `MOST_TEXTS` texts on which another form of the model at `path` is compared with the model: `texts`, by default dev and test
    texts of its run, evenly spaced.

    of: what the message says is compared.

    Raises:
        UsageError: if there are none. ArtifactError: if the run's copy of its texts is damaged.
    """
    if texts is None:
        if (run := run_of(path)) is None:
            raise UsageError(f"{path}: is not in a run, so there are no texts to check {of} on; pass --texts FILE")
        if (task := task_of(path)) is None:
            raise UsageError(f"{run}: stores no texts of its task; run the same `cramlm fit` again, which adds them, or pass --texts FILE")
        held_out = task.dev + task.test
        texts = held_out[:: max(1, -(-len(held_out) // MOST_TEXTS))]
    if not texts:
        raise UsageError(f"there are no texts to check {of} on; pass --texts FILE")
    return texts[:MOST_TEXTS]


def folder_of_form(path: Path, name: str) -> Path:
    """Return the default folder of another form of the model at `path`: `name` in its run, or beside a model outside of a run."""
    run, folder = run_of(path), model_of(path)
    return run / name if run is not None else folder.parent / f"{folder.resolve().name}-{name}"


def _unsuitable(kind: FolderKind, folder: Path) -> str:
    """Say what a model folder is instead of what was needed, and what to pass."""
    run = run_of(folder)
    match kind:
        case "encoder" | "linear" | "onnx":
            what = {"encoder": "a classifier", "linear": "a linear model", "onnx": "an ONNX graph"}[kind]
            return f"is {what}, and this needs the weights of an encoder; pass the run of an encoder, or the folder that it exported"
        case "language model" | "encoder without classifier":
            what = "a language model" if kind == "language model" else "an encoder"
            training = f"train one: cramlm fit --recipe plm --base-model {_quoted(folder)} --train FILE"
            return f"is {what} without a classifier; {training if run is None else f'pass the run {run}'}"


def _require_folder(path: Path) -> None:
    """Raise UsageError if a path of a run or a model is no folder; a name on the Hugging Face Hub is not loaded."""
    name = path.as_posix()
    of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not path.parent.exists()
    load = f", or load it from the Hugging Face Hub first: hf download {name} --local-dir {path.name}" if of_hub else ""
    require_folder(path, remedy=f"pass a run, or the folder of a model{load}")


def _missing(path: Path) -> str:
    """Say why there is no model in a folder, and what to pass."""
    if is_run_folder(path):
        return f"the run is not finished; finish it: {finishing(path)}"
    if (path / MANIFEST).is_file():
        run = run_of(path)
        remedy = "pass the folder of a finished run, or of a model" if run is None else f"pass the run {run}"
        return f"is a folder of the kind {kind_of_artifact(path)!r} and holds no exported model; {remedy}"
    return _runs_below(path) or "holds no exported model; pass the folder of a finished run, or of a model"


def finishing(run: Path) -> str:
    """Return the command that finishes a run, and where to run it if relative paths of its config do not lead to its files from here."""
    try:
        train = str((read_toml(run / CONFIG).get("task") or {}).get("train") or "")
    except UsageError:
        train = ""
    file = at_home(train)
    elsewhere = train != "" and not is_remote(train) and not file.is_absolute() and not file.exists()
    folder = run.resolve() if elsewhere else run
    where = " (in the folder where that run was started: its paths are relative)" if elsewhere else ""
    return f"cramlm fit --config {_quoted(folder / CONFIG)} -o {_quoted(folder)}{where}"


def _runs_below(path: Path) -> str | None:
    """Name a run in a folder of runs, a finished one if there is one; None if there is no run."""
    runs = sorted(
        (each.parent for each in path.glob(f"*/{CONFIG}") if is_run_folder(each.parent)), key=lambda run: (not (run / EXPORT).is_dir(), run)
    )
    return f"is a folder of runs; pass one of them, like {runs[0]}" if runs else None


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
