"""The interface to the processes of one training, and that of one process alone; distributed.py has that of several. Imports no torch, so
that a run of a linear model starts without it.
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
    """A `stop` for callers without signals."""
    return None


class Ranks:
    """The processes of one training; this class is that of one process. All ranks make the same calls in the same order.

    index: of this process; 0 leads. local_count: ranks on this machine. settings: those of the ranks that the bits of a training depend on.

    Raises (each of the methods):
        RankLost: if a rank is gone or does not respond.
    """

    index, count, local_count = 0, 1, 1

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def lead(self) -> None:
        pass

    def on_leader(self, work: Callable[[], _Result]) -> _Result:
        return work()

    def broadcast(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        pass

    def largest_exit_code(self, code: int | None) -> int | None:
        return code

    def check_equal(self, tensors: Iterable[Tensor]) -> None:
        pass

    def watch(self, stop: Stop) -> Stop:
        return stop


ALONE = Ranks()
