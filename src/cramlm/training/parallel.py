"""How the weights lie on the ranks of a training: all on each (ddp, here), or a share on each (fsdp2, sharding.py).

Either way a rank computes its rows of the batch, losses divided by the counts of the whole batch, and gradients are summed: the update is
that of one process on the whole batch, but for the order of additions.

ddp sums all gradients in one exchange after the backward pass, side by side in one buffer, and every rank makes the same update.
DistributedDataParallel would hide part of the exchange behind the backward pass, but it chooses its buffers anew after its first step, so
that with three ranks and more a resumed training adds in another order. That the ranks still have equal weights is checked bit by bit
whenever they are looked at: machines of different kinds may compute different bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from cramlm.errors import EnvironmentFault
from cramlm.model.model import Model
from cramlm.training.distributed import ALONE, Ranks
from cramlm.training.objective import Losses


class Parallel(Protocol):
    """What the loop asks of either way.

    trained: the model that computes and is updated. sum_gradients: after the backward pass. norm: of gradients, over all ranks. settle: the
    caller's model is up to date with `trained`. parts: in which a rank computes its rows side by side. whole and split: named tensors as
    one process would have them, and back; names end in that of their parameter, or in 'parameter/field' for moments.
    """

    ranks: Ranks
    trained: Model
    parts: int

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None: ...
    def norm(self, gradients: Sequence[Tensor]) -> Tensor: ...
    def settle(self) -> None: ...
    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


def spread(model: Model, ranks: Ranks) -> Parallel:
    """The model laid out over the ranks as their config asks; all must have the same weights."""
    match ranks.config.parallel if ranks.count > 1 else "ddp":
        case "ddp":
            return Replicated(model, ranks)
        case "fsdp2":
            from cramlm.training.sharding import Sharded  # a second of CPU time that the others save

            return Sharded(model, ranks)
        case unknown:
            assert_never(unknown)


def over_all(losses: Losses, ranks: Ranks) -> Losses:
    """The losses of the whole batch, from each rank's share of them; without gradients where there are several ranks."""
    if ranks.count == 1:
        return losses
    names = [field.name for field in fields(losses) if isinstance(getattr(losses, field.name), Tensor)]
    values: list[Tensor] = [getattr(losses, name).detach().float().clone() for name in names]
    ranks.sum_(values)
    summed: dict[str, Any] = dict(zip(names, values, strict=True))
    return replace(losses, **summed)


class Replicated:
    """All weights on every rank; one process is the case of one."""

    def __init__(self, model: Model, ranks: Ranks = ALONE) -> None:
        self.trained, self.ranks = model, ranks
        self.parts = torch.get_num_threads() if next(model.parameters()).device.type == "cpu" else 1

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        self.ranks.sum_([parameter.grad for parameter in parameters if parameter.grad is not None])

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return get_total_norm(gradients)

    def settle(self) -> None:
        """Raises EnvironmentFault if the ranks' weights are not the same bits."""
        if self.ranks.count > 1 and not self.ranks.same(_checksum(self.trained.parameters())):
            raise EnvironmentFault(
                "the ranks' weights have drifted apart, so their machines do not compute the same bits; nothing was saved. Use machines "
                "of one kind, or --set distributed.parallel=fsdp2, where each weight is updated in one place"
            )

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)


def _checksum(parameters: Any) -> int:
    """Sum of the bits of float32 tensors as whole numbers: exact, and the same in every order."""
    return sum(int(parameter.detach().view(torch.int32).sum(dtype=torch.int64)) for parameter in parameters)
