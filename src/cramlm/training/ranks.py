"""`Ranks`: the interface to the processes of a distributed training, and its implementation for one process (`ALONE`).

distributed.py implements it for several processes. This module does not import torch, so that a run of a linear model starts without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Stop: TypeAlias = Callable[[], int | None]
"""Returns an exit code after a signal, None before."""
_Result = TypeVar("_Result")


def never() -> int | None:
    """Return None: the `Stop` of callers that handle no signals."""
    return None


class Ranks:
    """The processes of one training; this class implements one process alone. All ranks make the same calls in the same order.

    index: number of this process; 0 is the leader. count: number of ranks. local_count: ranks on this machine.

    Raises (each of the methods):
        RankLost: if a rank is gone or does not respond.
    """

    index, count, local_count = 0, 1, 1

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the ranks on which the bits of a training depend, for stage keys."""
        return {}

    def lead(self) -> None:
        """On rank 0: begin work for which the other ranks wait in `on_leader`."""

    def on_leader(self, work: Callable[[], _Result]) -> _Result:
        """Return on all ranks the result of `work` on rank 0, plain JSON."""
        return work()

    def broadcast(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of rank 0 on all ranks."""
        return dict(tensors)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the ranks, in place."""

    def largest_exit_code(self, code: int | None) -> int | None:
        """Return the largest exit code of any rank, None if none has one."""
        return code

    def check_equal(self, tensors: Iterable[Tensor]) -> None:
        """Raise EnvironmentFault if tensors differ between ranks."""

    def watch(self, stop: Stop) -> Stop:
        """Return a `Stop` that also stops if other ranks are lost."""
        return stop


ALONE = Ranks()
