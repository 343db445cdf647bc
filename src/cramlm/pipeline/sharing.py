"""Stages that runs share through the store: `shared_stages`.

The stages between the selection and the schedule depend on the task, the texts and a few settings. Another run with equal inputs (in
another folder, with another recipe or seed) links their files from `stages/` in the store. Phases are trained by every run.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cramlm.config.run import RunConfig
from cramlm.errors import EnvironmentFault
from cramlm.io.machine import available_cores
from cramlm.pipeline.stages.teacher import SOFT_LABELS
from cramlm.planning.speed import describe_machine
from cramlm.records import Emit, Event
from cramlm.storage.artifacts import StagePool, pooled
from cramlm.storage.locks import environment_faults, limit_in_environment, make_folder

SHARED: Final = frozenset({"baseline", "selection", "tokenizer", "tokens", "embedding", "static", "bayes", SOFT_LABELS})
"""Kinds of stages and of parts of stages that runs share."""
LIMIT_VARIABLE: Final = "CRAMLM_STAGES_GB"
DEFAULT_LIMIT: Final = 4.0  # GB
_LIBRARIES: Final = ("cramlm", "numpy", "scipy", "scikit-learn", "numba", "tokenizers")  # that compute these stages


@contextmanager
def shared_stages(store: Path, config: RunConfig, *, emit: Emit) -> Iterator[None]:
    """Inside the block, take stages that are in the store from there and put those that are built there; note if it cannot be written.

    Results of one machine, with the same number of threads and versions of libraries, are shared: others may differ in the last bits.

    Raises:
        UsageError: if the variable with the limit is no number.
    """
    limit, folder = stages_limit(), store / "stages"
    if limit == 0 or not _is_writable(folder, emit):
        yield
        return
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    threads = config.threads or available_cores()
    environment = {"libraries": libraries, "machine": describe_machine(), "threads": threads}
    with pooled(StagePool(folder, SHARED, environment, round(1e9 * limit))):
        yield


def stages_limit() -> float:
    """Return how many GB the shared stages may take: $CRAMLM_STAGES_GB, else 4; 0 shares nothing.

    Raises:
        UsageError: if the variable holds no such number.
    """
    return limit_in_environment(LIMIT_VARIABLE, DEFAULT_LIMIT, "a size in GB, like 4; 0 shares no stages", finite=True)


def _is_writable(folder: Path, emit: Emit) -> bool:
    try:
        with environment_faults(folder):
            make_folder(folder)
        if os.access(folder, os.W_OK):
            return True
        reason = "no permission to write"
    except EnvironmentFault as error:
        reason = str(error).partition(";")[0]
    emit(Event("note", "run", f"stages are not shared with other runs: {folder}: {reason}"))
    return False
