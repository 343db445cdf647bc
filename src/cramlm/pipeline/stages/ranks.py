"""Training a phase on several ranks: rank 0 runs the stages, the others wait in `follow` for the phases that it trains.

They get settings as JSON and token pools as tensors, so only rank 0 needs the files, and machines need not share a disk.
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
from cramlm.model.device import Precision
from cramlm.model.model import Model, ModelSpec, build_model
from cramlm.training.batching import Batches
from cramlm.training.distributed import Ranks, Stop
from cramlm.training.loop import DevEvaluation, TrainingJob, train_phase
from cramlm.training.masking import SpecialIds
from cramlm.training.pools import TokenPool


@dataclass(frozen=True, slots=True)
class Order:
    """A phase to train; number: its place among the phases. work: where rank 0 keeps checkpoints."""

    phase: PhaseConfig
    number: int
    model: ModelSpec
    special: SpecialIds
    seed: int
    precision: Precision
    threads: int
    metric: str
    work: Path


_ORDER = TypeAdapter(Order)


@contextmanager
def training_together(ranks: Ranks, order: Order, external: TokenPool | None, task: TokenPool | None) -> Iterator[None]:
    """On rank 0, around `train_phase`: the others make the same call, and wait again afterwards."""
    ranks.on_leader(lambda: _ORDER.dump_python(order, mode="json"))
    for pool in (external, task):
        arrays = {} if pool is None else {name: getattr(pool, name) for name in TokenPool.__dataclass_fields__}
        writable = {name: np.require(array, requirements=["C", "W"]) for name, array in arrays.items() if array is not None}
        ranks.broadcast({name: torch.from_numpy(array) for name, array in writable.items()})
    yield
    ranks.lead()


def dismiss(ranks: Ranks, result: Mapping[str, Any]) -> None:
    """On rank 0, when everything is done: `follow` returns `result` to the others."""
    ranks.on_leader(lambda: {"result": dict(result)})


def follow(ranks: Ranks, *, stop: Stop) -> dict[str, Any]:
    """Train the phases that rank 0 trains, until it dismisses this rank; reads and writes no file.

    Raises:
        RankLost: if rank 0 is gone. Stopped, DivergedError: as `train_phase`, on all ranks at once.
    """
    while "result" not in (word := ranks.on_leader(_only_on_leader)):
        order = _ORDER.validate_python(word)
        external, task = (_pool(ranks), _pool(ranks))
        torch.set_num_threads(order.threads)
        train_phase(
            build_model(order.model, seed=order.seed),
            TrainingJob(
                Batches(order.phase, external, task, seed=order.seed, phase_index=order.number, special=order.special),
                order.work,
                fingerprint={},
                precision=order.precision,
                dev=DevEvaluation(_only_on_leader, order.metric),
                stop=stop,
                ranks=ranks,
            ),
        )
    result: dict[str, Any] = word["result"]
    return result


def _pool(ranks: Ranks) -> TokenPool | None:
    arrays = {name: tensor.numpy() for name, tensor in ranks.broadcast({}).items()}
    return TokenPool(**arrays) if arrays else None


def _only_on_leader(model: Model | None = None, step: int = 0) -> dict[str, Any]:
    raise AssertionError("only rank 0 does this")
