"""Training a phase on several ranks: rank 0 runs the stages; the others wait in `follow` and join each phase.

Rank 0 sends settings as JSON and token pools as tensors, so that only rank 0 needs files, and machines need not share a disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from cramlm.config.run import PhaseConfig
from cramlm.model.model import Model, ModelSpec, Precision, build_model
from cramlm.training.batching import Batches
from cramlm.training.distributed import Ranks, Stop
from cramlm.training.loop import DevEvaluation, TrainingJob, train_phase
from cramlm.training.masking import SpecialIds
from cramlm.training.sequences import TokenPool


@dataclass(frozen=True, slots=True)
class PhaseJob:
    """A phase to train. number: index of the phase. work: folder of rank 0's checkpoints."""

    phase: PhaseConfig
    number: int
    model: ModelSpec
    special: SpecialIds
    seed: int
    precision: Precision
    threads: int
    metric: str
    work: Path


_JOB = TypeAdapter(PhaseJob)


@contextmanager
def training_together(ranks: Ranks, job: PhaseJob, external: TokenPool | None, task: TokenPool | None) -> Iterator[None]:
    """On rank 0, around `train_phase`: start the same phase on the other ranks."""
    ranks.on_leader(lambda: _JOB.dump_python(job, mode="json"))
    for pool in (external, task):
        arrays = {} if pool is None else {name: getattr(pool, name) for name in TokenPool.__dataclass_fields__}
        writable = {name: np.require(array, requirements=["C", "W"]) for name, array in arrays.items() if array is not None}
        ranks.broadcast({name: torch.from_numpy(array) for name, array in writable.items()})
    yield
    ranks.lead()


def dismiss(ranks: Ranks, result: Mapping[str, Any]) -> None:
    """On rank 0, at the end: make `follow` return `result` on the other ranks."""
    ranks.on_leader(lambda: {"result": dict(result)})


def follow(ranks: Ranks, *, stop: Stop) -> dict[str, Any]:
    """Join the phases that rank 0 trains until `dismiss`, and return its result; reads and writes no file.

    Raises:
        RankLost: if rank 0 is gone. Stopped, DivergedError: as `train_phase`, on all ranks at once.
    """
    while "result" not in (message := ranks.on_leader(_only_on_leader)):
        job = _JOB.validate_python(message)
        external, task = (_pool(ranks), _pool(ranks))
        torch.set_num_threads(job.threads)
        train_phase(
            build_model(job.model, seed=job.seed),
            TrainingJob(
                Batches(job.phase, external, task, seed=job.seed, phase_index=job.number, special=job.special),
                job.work,
                fingerprint={},
                precision=job.precision,
                dev=DevEvaluation(_only_on_leader, job.metric),
                stop=stop,
                ranks=ranks,
            ),
        )
    result: dict[str, Any] = message["result"]
    return result


def _pool(ranks: Ranks) -> TokenPool | None:
    arrays = {name: tensor.numpy() for name, tensor in ranks.broadcast({}).items()}
    return TokenPool(**arrays) if arrays else None


def _only_on_leader(model: Model | None = None, step: int = 0) -> dict[str, Any]:
    raise AssertionError("only rank 0 does this")
