"""Names of the files of a linear model; importing this loads neither scikit-learn nor SciPy."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MODEL_FILE: Final = "linear.json"
WEIGHTS_FILE: Final = "linear.safetensors"


def is_linear(folder: Path) -> bool:
    """Return True if the folder holds a linear model."""
    return (folder / MODEL_FILE).is_file()
