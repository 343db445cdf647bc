"""The gradient of a batch, its parts computed side by side in threads.

On a CPU PyTorch would give each operation to all cores, one operation at a time; most are too small for that, and the compiled loops of
model/kernels/cpu.py are of one thread. A batch in as many parts as there are threads, each with a pass of its own from embedding to
gradient, keeps every core busy (docs/log.md has the figures). The gradients are summed in the order of the parts, so the same number of
threads gives the same bits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from cramlm.config.phase import PhaseConfig
from cramlm.model.device import Precision
from cramlm.model.kernels.dropout import Dropout
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch
from cramlm.training.objective import Losses, objective_of
from cramlm.training.packing import share
from cramlm.training.terms.base import Counts


def in_parts(batch: Batch, count: int, device: torch.device | str = "cpu") -> list[PackedBatch]:
    """The batch on its device, its rows dealt over at most `count` parts."""
    count = min(count, len(batch.token_ids))
    return [PackedBatch.of(share(batch, number, count), device) for number in range(count)]


def gradients(
    model: Model, parts: Sequence[PackedBatch], phase: PhaseConfig, counts: Counts, *, precision: Precision, dropout_seed: int
) -> Losses:
    """The losses of the parts together, detached; their gradient is afterwards in every parameter's `grad`.

    counts: of the whole step. Dropout is a function of `dropout_seed` and the part.
    """
    if len(parts) == 1:
        computed = _losses(model, parts[0], phase, counts, precision, _dropout(phase, dropout_seed, part=0))
        computed.total.backward()  # type: ignore[no-untyped-call]
        return Losses(computed.total.detach(), computed.means)
    named = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def one(number: int) -> tuple[Losses, Sequence[Tensor | None]]:
        part_losses = _losses(model, parts[number], phase, counts, precision, _dropout(phase, dropout_seed, part=number))
        return part_losses, torch.autograd.grad(part_losses.total, named, allow_unused=True)

    answers = list(_threads(len(parts), os.getpid()).map(one, range(len(parts))))
    for parameter, *found in zip(named, *(gradient for _, gradient in answers), strict=True):
        for gradient in found:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return _summed([part_losses for part_losses, _ in answers])


def _dropout(phase: PhaseConfig, seed: int, *, part: int) -> Dropout:
    return Dropout(phase.dropout or 0.0, seed, attention_rate=phase.attention_dropout, part=part)


def _losses(model: Model, part: PackedBatch, phase: PhaseConfig, counts: Counts, precision: Precision, dropout: Dropout) -> Losses:
    # PyTorch's cache of cast weights is shared by all threads, and nothing here is cast twice.
    with torch.autocast(part.token_ids.device.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        return objective_of(phase).losses(model, part, counts, dropout=dropout)


def _summed(parts: Sequence[Losses]) -> Losses:
    names = dict.fromkeys(name for part in parts for name in part.means)
    means = {name: torch.stack([part.means[name] for part in parts if name in part.means]).sum() for name in names}
    return Losses(torch.stack([part.total.detach() for part in parts]).sum(), means)


@functools.cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Threads whose operations run on one core each; `process`, because a forked process inherits none."""
    del process
    return ThreadPoolExecutor(count, "gradients", initializer=torch.set_num_threads, initargs=(1,))
