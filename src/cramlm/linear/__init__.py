"""Linear models of text: logistic regression on TF-IDF and co-occurrence vectors, naive Bayes; baselines and the teacher.

This file holds the names of a linear model's files, so that finding one on disk loads neither scikit-learn, SciPy nor Numba.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

MODEL_FILE: Final = "linear.json"
WEIGHTS_FILE: Final = "linear.safetensors"


def is_linear(folder: Path) -> bool:
    """Return True if the folder holds a linear model."""
    return (folder / MODEL_FILE).is_file()
