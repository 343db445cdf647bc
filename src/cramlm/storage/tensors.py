"""Tensors as safetensors files, written and read through Python's own file objects, which report a full or broken disk as OSError.

Separate from arrays.py because this module imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from cramlm.errors import ArtifactError
from cramlm.storage.locks import environment_faults


def save_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name; they may be on any device.

    Raises:
        OSError: if the file cannot be written.
    """
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    path.write_bytes(safetensors.torch.save(plain, metadata=None if metadata is None else dict(metadata)))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, on the CPU.

    Raises:
        ArtifactError: if it is not a complete safetensors file. EnvironmentFault: if it cannot be read.
    """
    try:
        with environment_faults(path):
            return safetensors.torch.load(path.read_bytes())
    except SafetensorError as error:
        raise ArtifactError(f"{path}: damaged, not a whole safetensors file ({error}); delete the folder and build it again") from error
