"""One optimizer update, guarded: losses, backward, finite or stop, clip, step. The loop and the speed measurement share it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.utils import clip_grads_with_norm_

from cramlm.config import PhaseConfig
from cramlm.errors import DivergedError
from cramlm.model.device import Precision
from cramlm.model.model import Model, PackedBatch
from cramlm.training.gradients import gradients
from cramlm.training.objective import Counts, Losses
from cramlm.training.optimization import JointOptimizer
from cramlm.training.parallel import Parallel, Replicated, over_all


@dataclass(frozen=True, slots=True)
class Update:
    """What one update saw: the losses before it, and the gradient's norm before clipping."""

    losses: Losses
    gradient_norm: float


def update(
    model: Model,
    parts: Sequence[PackedBatch],
    phase: PhaseConfig,
    *,
    optimizer: JointOptimizer,
    factor: float,
    precision: Precision,
    dropout_seed: int,
    step: int,
    counts: Counts | None = None,
    parallel: Parallel | None = None,
) -> Update:
    """Change the model by one step of the optimizer at `factor` times the peak learning rates.

    parts: the batch, or what batching.share makes of it, to be computed side by side. Where several ranks train, they are this one's share
    of a step, and `parallel` brings the shares together; the update and what is returned are those of the whole step, whose counts are
    `counts` (None: those of the only part). Dropout is drawn from `dropout_seed` and the number of parts alone.

    Raises:
        DivergedError: if the loss or the gradient is not finite, on any rank; model and optimizer are then as before. RankLost: if a rank
            no longer answers.
    """
    parallel = parallel or Replicated(model)
    optimizer.zero_grad()
    counts = counts or Counts.of(parts[0], phase)
    computed = gradients(model, parts, phase, counts, precision=precision, dropout_seed=dropout_seed)
    seen = over_all(computed, parallel.ranks)
    _check("loss", float(seen.total), phase, optimizer=optimizer, step=step)
    parameters = [parameter for parameter in optimizer.parameters if parameter.grad is not None]
    parallel.sum_gradients(parameters)
    norm = parallel.norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    gradient_norm = float(norm)
    _check("gradient norm", gradient_norm, phase, optimizer=optimizer, step=step)
    clip_grads_with_norm_(parameters, phase.optimizer.clip_norm, norm)
    optimizer.set_factor(factor)
    optimizer.step()
    return Update(seen, gradient_norm)


def _check(what: str, value: float, phase: PhaseConfig, *, optimizer: JointOptimizer, step: int) -> None:
    if value - value == 0:  # false for inf and nan
        return
    rates = ", ".join(f"{name} {rate:.2g}" for name, rate in optimizer.learning_rates.items())
    raise DivergedError(
        f"phase {phase.name!r}, step {step}: the {what} is {value}, not a finite number (learning rates just before: {rates}); nothing of "
        "this step was kept. Lower optimizer.learning_rate or optimizer.muon_learning_rate, raise schedule.warmup_fraction, "
        "or set precision = 'fp32'"
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that give the same bits every time; the setting from before comes back afterwards."""
    enabled, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by cuBLAS under this mode; read when it starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid that writes every new tensor twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
