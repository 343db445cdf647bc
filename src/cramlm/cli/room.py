"""Whether torch can be loaded at all under a limit on this process's address space."""

from __future__ import annotations

import resource
from pathlib import Path

from cramlm.errors import EnvironmentFault

LOAD_NO_TORCH = frozenset({"check", "config", "doctor", "index", "recipes", "search", "select", "track", "verify"})
"""Commands that run without the torch memory check."""
DEPEND_ON_THE_MODEL = frozenset({"evaluate", "explain", "predict", "push", "serve"})
"""Commands that load torch only for some models; each calls `check_address_space_of_model`."""
LEAST_ADDRESS_SPACE = 2_000_000_000
"""Bytes. Loading torch, numba and scikit-learn maps 1.2e9 on two cores; where that does not fit, C++ aborts without a word to Python."""


def check_address_space(command: str | None) -> None:
    """Raises EnvironmentFault if `ulimit -v` allows less than a command of this name maps before it does anything."""
    if command not in LOAD_NO_TORCH | DEPEND_ON_THE_MODEL:
        _check(command)


def check_address_space_of_model(model: Path, command: str) -> None:
    """Raises EnvironmentFault if `ulimit -v` allows less than torch maps and `model`, a model or a run, needs torch."""
    from cramlm.inference.onnx import GRAPH_FILE  # NumPy, which the help does not load
    from cramlm.linear.files import is_linear

    if not any(is_linear(folder) or (folder / GRAPH_FILE).is_file() for folder in (model, model / "export")):
        _check(command)


def _check(command: str | None) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESS_SPACE:
        raise EnvironmentFault(
            f"this process may map {most / 1e9:.1f} GB of memory (ulimit -v), and {command} needs at least "
            f"{LEAST_ADDRESS_SPACE / 1e9:.0f} GB to load torch; raise the limit, or bound resident memory with a control group instead"
        )
