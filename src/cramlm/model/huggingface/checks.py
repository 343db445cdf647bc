"""What a model folder may hold, whoever wrote it: no pickles, no code, JSON objects of a sane size, whole safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from cramlm.errors import ArtifactError, EnvironmentFault
from cramlm.storage.artifacts import environment_faults, raise_if_refused

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_PICKLES: Final = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".joblib", ".ckpt", ".dill"}
_CODE_KEYS: Final = ("auto_map", "trust_remote_code", "custom_code", "custom_pipelines")
_LARGEST_JSON: Final = 64_000_000  # bytes


def refuse_pickles(folder: Path) -> None:
    """Raises ArtifactError if there is no such folder, or one of its files can hold pickled objects; none is opened. EnvironmentFault: if
    the disk fails.
    """
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise_if_refused(error, folder)
        raise ArtifactError(f"{folder}: {error.strerror}; pass a folder that holds an exported model") from error
    for path in files:
        suffixes = {suffix.lower() for suffix in path.suffixes}
        if suffixes & _PICKLES or (path.suffix.lower() in (".npy", ".npz") and _may_hold_objects(path)):
            raise ArtifactError(
                f"{path}: pickle, refused: it can run code when it is opened; convert it with transformers' save_pretrained and remove it"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that asks for no code to be run.

    Raises:
        ArtifactError: if it is missing, too large, damaged, or does.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: missing; pass a folder that holds an exported model")
    try:
        with environment_faults(path):
            if path.stat().st_size > _LARGEST_JSON:
                raise ArtifactError(f"{path}: {path.stat().st_size} bytes, too large for a config; export the model again")
            content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged, not JSON; export the model again") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: damaged, not a JSON object; export the model again")
    for key in _CODE_KEYS:
        if key in content:
            raise ArtifactError(f"{path}: {key!r} asks for code from the folder to be run, refused; export the model without custom code")
    return content


def open_weights(path: Path) -> Any:
    """A context over a safetensors file's tensors, for torch.

    Raises:
        ArtifactError: if it is missing or damaged. EnvironmentFault: if the disk fails.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: missing; pass a folder that holds an exported model")
    try:
        with environment_faults(path):
            return safe_open(path, framework="pt", device="cpu")
    except RuntimeError as error:  # torch maps the file
        raise EnvironmentFault(f"{path}: cannot be read ({str(error).rpartition(':')[2].strip()}); check the disk") from error
    except SafetensorError as error:
        raise ArtifactError(f"{path}: damaged, not a whole safetensors file ({error}); export the model again") from error


def more(names: Iterable[str]) -> str:
    """How many names there are beside the first, for a message."""
    others = len(list(names)) - 1
    return f" (and {others} more)" if others else ""


def _may_hold_objects(path: Path) -> bool:
    if path.suffix.lower() == ".npz":
        return True
    with environment_faults(path), path.open("rb") as file:
        return b"|O" in file.read(4096)
