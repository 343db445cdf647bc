"""Training in several processes, started by torchrun, over the collectives of torch.distributed.

Rank 0 leads: it alone reads and writes files, retrieves, evaluates, exports and prints. The other ranks wait for it, and train with it.
All ranks run the same training loop and make the same calls of `Ranks` in the same order:

    told      rank 0 calls a function, all ranks get its result (JSON)    dev scores, checkpoints, orders
    given     all ranks get the tensors of rank 0                         weights, moments, token pools
    sum_      tensors are summed over the ranks, in place                 gradients, losses
    agreed    the largest exit code that any rank has, or None            signals

`ALONE` is the same interface for one process, where each call returns what it got.

While rank 0 works alone, a thread of it broadcasts a sign of life every second, which resets the timeout of the ranks that wait. A rank
that is killed breaks the connections of the others; a rank that is stopped, or late, makes them time out (`distributed.timeout`). Either
way every rank raises `RankLost`, torchrun ends whatever is left, and the same command continues from the last checkpoint. When rank 0
raises an error while it works alone, the others end with its exit code and print nothing.

Nothing is pickled: control messages are JSON, tensors are bytes. Why gradients are summed by one all_reduce after the backward pass and not
by DistributedDataParallel: docs/decisions/0004-one-sum-of-gradients.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cramlm.config.run import DistributedConfig
from cramlm.errors import CramError, DivergedError, EnvironmentFault, RankLost, Stopped, UsageError
from cramlm.training.objective import Losses

Stop = Callable[[], int | None]
_Result = TypeVar("_Result")

_SIGN_OF_LIFE_SECONDS: Final = 1.0
_WORKING, _DONE, _FAILED = range(3)  # states of rank 0 that it broadcasts to the ranks that wait
_AGAIN: Final = "what was trained since the last checkpoint is lost; run the same command again to continue"


class Ranks(Protocol):
    """The processes of one training. All ranks make the same calls in the same order.

    index: of this process; 0 leads. local_count: ranks on this machine. settings: what the bits of a training depend on here, empty for
    one process.

    Raises (each of the methods):
        RankLost: if a rank no longer answers.
    """

    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def local_count(self) -> int: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    def lead(self) -> None: ...
    def told(self, work: Callable[[], _Result]) -> _Result: ...
    def given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def sum_(self, tensors: Sequence[Tensor]) -> None: ...
    def agreed(self, code: int | None) -> int | None: ...
    def check_equal(self, tensors: Iterable[Tensor]) -> None: ...
    def watched(self, stop: Stop) -> Stop: ...


class Alone:
    """One process."""

    index, count, local_count = 0, 1, 1

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def lead(self) -> None:
        pass

    def told(self, work: Callable[[], _Result]) -> _Result:
        return work()

    def given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        pass

    def agreed(self, code: int | None) -> int | None:
        return code

    def check_equal(self, tensors: Iterable[Tensor]) -> None:
        pass

    def watched(self, stop: Stop) -> Stop:
        return stop


ALONE = Alone()


@contextlib.contextmanager
def join(config: DistributedConfig) -> Iterator[Ranks]:
    """Join the ranks that torchrun's variables describe (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); `ALONE` without them.

    An error inside the block ends all ranks. What all ranks raise alike (Stopped, DivergedError), and what rank 0 raises while the others
    wait, is raised on rank 0 alone; the others raise SystemExit with its exit code.

    Raises:
        UsageError: if the variables are incomplete. RankLost: if not all ranks come within `config.timeout` seconds.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    ranks = _Joined(config)
    try:
        yield ranks
    except BaseException as error:
        ranks.abandon(error)
        if ranks.index > 0 and isinstance(error, Stopped | DivergedError):
            raise SystemExit(error.exit_code) from error
        raise
    finally:
        dist.destroy_process_group()


class _Joined:
    """One of several ranks."""

    def __init__(self, config: DistributedConfig) -> None:
        self._timeout = config.timeout
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        if backend != "gloo":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout))
        except ValueError as error:
            raise UsageError(f"WORLD_SIZE is set but the ranks cannot meet ({error}); start with torchrun, or unset WORLD_SIZE") from error
        except RuntimeError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RankLost(
                f"not all {os.environ['WORLD_SIZE']} ranks came to {where} within {config.timeout:g} s; run the same command again"
            ) from error
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._leading: _SignsOfLife | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"ranks": self.count}

    def lead(self) -> None:
        """On rank 0: work alone from now until the next `told`, for which the other ranks wait."""
        if self.index == 0 and self._leading is None:
            self._leading = _SignsOfLife(self._state)

    def told(self, work: Callable[[], _Result]) -> _Result:
        """The result of `work` on rank 0, on all ranks; it must be plain JSON. The others wait as long as rank 0 works."""
        if self.index == 0:
            self.lead()
            result = work()
            message = json.dumps(result).encode()
            self._finish(_DONE, len(message))
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))
            return result
        state, number = self._state(_WORKING, 0)
        while state == _WORKING:
            state, number = self._state(_WORKING, 0)
        if state == _FAILED:
            raise SystemExit(number)
        heard = torch.empty(number, dtype=torch.uint8)
        self._broadcast(heard)
        answer: _Result = json.loads(heard.numpy().tobytes())
        return answer

    def given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of rank 0 under its names, in the memory of the CPU; on rank 0 they are not copied unless they must be."""
        mine = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        kinds = self.told(lambda: {name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in mine.items()})
        result = {}
        for name, (kind, *shape) in kinds.items():
            result[name] = mine[name] if self.index == 0 else torch.empty(shape, dtype=getattr(torch, kind))
            if result[name].numel():
                self._broadcast(result[name].view(-1).view(torch.uint8))
        return result

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """One all_reduce for all of them, side by side in one buffer: the order of additions is the same in every step and every start."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self._collective():
            dist.all_reduce(flat)
        for tensor, summed in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))

    def agreed(self, code: int | None) -> int | None:
        (largest,) = self._largest(-1 if code is None else code)
        return largest if largest >= 0 else None

    def check_equal(self, tensors: Iterable[Tensor]) -> None:
        """Raise EnvironmentFault on rank 0, and SystemExit on the others, if float32 tensors are not the same bits on all ranks."""
        checksum = sum(int(tensor.detach().view(torch.int32).sum(dtype=torch.int64)) for tensor in tensors)
        largest, smallest = self._largest(checksum, -checksum)
        if largest + smallest != 0:
            self.told(_refuse_drift)

    def watched(self, stop: Stop) -> Stop:
        """`stop`, which also ends this rank when torchrun is gone (75), and rank 0 when the others no longer receive its signs of life."""

        def stop_of_ranks() -> int | None:
            if self._leading is not None and self._leading.error is not None:
                raise self._lost(self._leading.error)
            is_orphan = self._launcher is not None and os.getppid() != self._launcher
            return 75 if (code := stop()) is None and is_orphan else code

        return stop_of_ranks

    def abandon(self, error: BaseException) -> None:
        """End because of `error`: if the others wait for this rank, they end with its exit code."""
        if self._leading is not None:
            with contextlib.suppress(RankLost):
                self._finish(_FAILED, _exit_code(error))

    def _finish(self, state: int, number: int) -> None:
        assert self._leading is not None, "only rank 0 leads"
        leading, self._leading = self._leading, None
        if (error := leading.stop()) is not None:
            raise self._lost(error)
        self._state(state, number)

    def _state(self, state: int, number: int) -> tuple[int, int]:
        """Broadcast the state of rank 0: on rank 0 as given, on the others whatever it sends."""
        word = torch.tensor([state, number])
        self._broadcast(word)
        return int(word[0]), int(word[1])

    def _broadcast(self, tensor: Tensor) -> None:
        with self._collective():
            dist.broadcast(tensor, src=0)

    def _largest(self, *numbers: int) -> list[int]:
        largest = torch.tensor(numbers)
        with self._collective():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError | RankLost) -> RankLost:
        if isinstance(error, RankLost):
            return error
        reason = str(error).partition("\n")[0].rpartition("] ")[2][:120]  # without the place in torch's source
        late = f"did not answer within {self._timeout:g} s"
        return RankLost(f"rank {self.index} of {self.count}: another rank is gone, stopped, or {late} ({reason}); {_AGAIN}")


class _SignsOfLife:
    """A thread that broadcasts that rank 0 is still working."""

    def __init__(self, broadcast: Callable[[int, int], Any]) -> None:
        self.error: RankLost | None = None
        self._broadcast, self._stopping = broadcast, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> RankLost | None:
        """End the thread; returns its error."""
        self._stopping.set()
        self._thread.join()
        return self.error

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_SIGN_OF_LIFE_SECONDS):
                self._broadcast(_WORKING, 0)
        except RankLost as error:
            self.error = error


def over_all(losses: Losses, ranks: Ranks) -> Losses:
    """The losses of the whole batch, from each rank's share of them; without gradients where there are several ranks."""
    if ranks.count == 1:
        return losses
    values: list[Tensor] = [value.detach().float().clone() for value in (losses.total, *losses.means.values())]
    ranks.sum_(values)
    return Losses(values[0], dict(zip(losses.means, values[1:], strict=True)))


def _refuse_drift() -> None:
    raise EnvironmentFault(
        "the ranks' weights have drifted apart, so their machines do not compute the same bits; nothing was saved. Use machines of one kind"
    )


def _exit_code(error: BaseException) -> int:
    match error:
        case CramError():
            return error.exit_code
        case SystemExit(code=int() as code):
            return code
        case KeyboardInterrupt():
            return 130
        case _:
            return 1
