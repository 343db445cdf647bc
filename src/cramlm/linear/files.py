"""Read the files of a linear model: one rule for what is missing or damaged, and one remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from safetensors import SafetensorError

from cramlm.errors import ArtifactError
from cramlm.storage.locks import environment_faults

REBUILD: Final = "delete the folder and build it again"
_Content = TypeVar("_Content")


def read_file(path: Path, parse: Callable[[bytes], _Content]) -> _Content:
    """Return `parse` of the content. parse: such as `json.loads`; raises ValueError, RecursionError or SafetensorError for a damaged file.

    Raises:
        ArtifactError: if the file is missing or damaged. EnvironmentFault: if it cannot be read.
    """
    try:
        with environment_faults(path):
            if not path.is_file():
                raise ArtifactError(f"{path}: missing; pass the folder of a linear model, or {REBUILD}")
            return parse(path.read_bytes())
    except (ValueError, RecursionError, SafetensorError) as error:
        raise ArtifactError(f"{path}: damaged ({error}); {REBUILD}") from error
