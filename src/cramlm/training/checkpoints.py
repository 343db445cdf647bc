"""Checkpoints, from which a phase resumes with the same bits as if it had not stopped.

A checkpoint holds weights, optimizer moments and the step; order, masks and dropout are functions of (seed, phase, step). If the phase
keeps the best weights on dev, it also holds the best so far and their score. Each is one published folder `step-00000500` (500 steps
done). The newest two are kept, so that a damaged one costs a tenth of the phase.

The key of the folder is the caller's fingerprint of the training (config, data, tokenizer); resuming with another fingerprint is an error
that names the differing fields. The caller holds the lock of the run; two processes must not share a folder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cramlm.errors import ArtifactError
from cramlm.records import Emit, Event
from cramlm.storage.artifacts import open_artifact, publish, verify, write_json
from cramlm.storage.locks import environment_faults
from cramlm.storage.stages import explain_difference
from cramlm.storage.tensors import read_tensors, save_tensors

KIND = "checkpoint"
KEPT = 2
_NAME = re.compile(r"step-(\d{8})")


@dataclass(slots=True)
class Progress:
    """The progress of a phase: everything in a checkpoint but tensors. Counts are sums over the steps done.

    tokens: real tokens. padded_tokens: with padding. seconds: training and dev evaluations, over all the starts of the phase.
    best_step: steps done at the best dev score; None before the first evaluation. device: type of the device that trained last.
    """

    step: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    executed_flops: float = 0.0
    seconds: float = 0.0
    best_step: int | None = None
    best_score: float | None = None
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read. best: empty if no best weights were kept."""

    path: Path
    progress: Progress
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    best: dict[str, Tensor] = field(default_factory=dict)


def checkpoint_path(work: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps; at eight digits, names sort as numbers."""
    return work / f"step-{step:08d}"


def save_checkpoint(
    work: Path,
    progress: Progress,
    *,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    fingerprint: Mapping[str, Any],
) -> Path:
    """Publish a checkpoint, then delete all but the newest two.

    Raises:
        EnvironmentFault: if the disk fails; existing checkpoints are unchanged.
    """

    def write(folder: Path) -> None:
        for name, tensors in (("weights", weights), ("optimizer", moments), ("best", best)):
            if tensors:
                save_tensors(folder / f"{name}.safetensors", tensors)
        write_json(folder / "state.json", asdict(progress))

    path = checkpoint_path(work, progress.step)
    publish(path, kind=KIND, key=_plain(fingerprint), write=write)
    with environment_faults(work):
        for old in _folders(work)[KEPT:]:
            # Renamed first: a folder half deleted would look like a damaged checkpoint.
            obsolete = old.with_name(f".{old.name}.tmp-old")
            old.rename(obsolete)
            shutil.rmtree(obsolete)
    return path


def load_newest(work: Path, *, fingerprint: Mapping[str, Any], emit: Emit, stage: str) -> Checkpoint | None:
    """Read the newest undamaged checkpoint, or return None if there is none. A damaged one is named in a warning and skipped. Removes
    temporary folders of killed writers.

    Raises:
        ArtifactError: if that checkpoint has another fingerprint (names the fields).
    """
    with environment_faults(work):
        for leftover in work.glob(".step-*.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folders = _folders(work)
    for path in folders:
        try:
            verify(path)
            artifact = open_artifact(path, kind=KIND)
        except ArtifactError as error:
            emit(Event("warning", stage, f"checkpoint {path.name} is damaged and skipped ({error})", data={"checkpoint": str(path)}))
            continue
        if reasons := explain_difference(artifact.key, _plain(fingerprint)):
            shown = "; ".join(reasons[:6]) + ("" if len(reasons) <= 6 else f"; and {len(reasons) - 6} more")
            raise ArtifactError(
                f"{path}: made with other settings or data ({shown}); undo the change, or delete {work} to start the phase again"
            )
        return _read(path)
    return None


def _read(path: Path) -> Checkpoint:
    tensors: dict[str, dict[str, Tensor]] = {}
    try:
        for name in ("weights", "optimizer", "best"):
            file = path / f"{name}.safetensors"
            tensors[name] = read_tensors(file) if file.exists() else {}
        progress = Progress(**json.loads((path / "state.json").read_text("utf-8")))
    except (ArtifactError, ValueError, TypeError) as error:
        # The hashes are right, so another version wrote these bytes.
        raise ArtifactError(f"{path}: not a checkpoint of this version ({error}); delete it to start from an earlier one") from error
    return Checkpoint(path, progress, tensors["weights"], tensors["optimizer"], tensors["best"])


def restore_weights(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, origin: str) -> None:
    """Copy weights into parameters of the same names and shapes.

    Raises:
        ArtifactError: naming the first parameter that is missing, extra, or of another shape or type.
    """
    if differing := sorted(set(parameters) ^ set(weights)):
        which = "missing" if differing[0] in parameters else "unknown"
        raise ArtifactError(f"{origin}: tensor {differing[0]!r} is {which}; delete the checkpoint to start again")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if (parameter.shape, parameter.dtype) != (weights[name].shape, weights[name].dtype):
                raise ArtifactError(
                    f"{origin}: tensor {name!r} is {weights[name].dtype} {list(weights[name].shape)}, the model has {parameter.dtype} "
                    f"{list(parameter.shape)}; delete the checkpoint to start again"
                )
            parameter.copy_(weights[name])


def _folders(work: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    if not work.is_dir():
        return []
    return sorted((path for path in work.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint after a round trip through JSON: tuples are lists, keys are strings."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(fingerprint)))
    return plain
