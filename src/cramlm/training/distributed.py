"""Training in several processes, started by torchrun, over the collectives of torch.distributed.

Rank 0, the leader, alone reads and writes files, retrieves, evaluates, exports and prints. The other ranks wait for it, and train with it.
All ranks run the same training loop and make the same calls of `Ranks` in the same order:

    on_leader            rank 0 calls a function, all ranks get its result (JSON)    dev scores, checkpoints, settings of a phase
    broadcast            all ranks get the tensors of rank 0                         weights, moments, token pools
    sum_                 tensors are summed over the ranks, in place                 gradients, losses
    largest_exit_code    the largest exit code of any rank, or None                  signals

`ranks.ALONE` is the same interface for one process, where each call returns its argument.

While rank 0 works alone, a thread of it broadcasts a heartbeat every second, which resets the timeout of the ranks that wait. A rank that
is killed breaks the connections of the others; a rank that is stopped or late makes them time out (`distributed.timeout`). Either way
every rank raises `RankLost`, torchrun ends the rest, and the same command continues from the last checkpoint. When rank 0 raises an error
while it works alone, the others end with its exit code and print nothing.

Nothing is pickled: control messages are JSON, tensors are bytes. docs/decisions/0004-one-sum-of-gradients.md says why gradients are summed
by one all_reduce after the backward pass instead of DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cramlm.config.run import DistributedConfig
from cramlm.errors import CramError, DivergedError, EnvironmentFault, RankLost, Stopped, UsageError
from cramlm.model.model import resolve_device
from cramlm.training.objective import Losses
from cramlm.training.ranks import ALONE, Ranks, Stop

_Result = TypeVar("_Result")

_HEARTBEAT_SECONDS: Final = 1.0
_WORKING, _DONE, _FAILED = range(3)  # states of rank 0, broadcast to the waiting ranks
_AGAIN: Final = "what was trained since the last checkpoint is lost; run the same command again to continue"


@contextlib.contextmanager
def join(config: DistributedConfig, *, device: str = "auto") -> Iterator[Ranks]:
    """Join the ranks that torchrun's variables describe (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); `ALONE` without them.

    An error inside the block ends all ranks. What all ranks raise alike (Stopped, DivergedError), and what rank 0 raises while the others
    wait, is raised on rank 0 alone; the others raise SystemExit with its exit code.

    device: the setting; with a GPU tensors there are summed by nccl.

    Raises:
        UsageError: if the variables are incomplete. EnvironmentFault: if there is no such device for this rank. RankLost: if not all
        ranks connect within `config.timeout` seconds.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    ranks = _Joined(config, resolve_device(device))
    try:
        yield ranks
    except BaseException as error:
        ranks.abandon(error)
        if ranks.index > 0 and isinstance(error, Stopped | DivergedError):
            raise SystemExit(error.exit_code) from error
        raise
    finally:
        dist.destroy_process_group()


class _Joined(Ranks):
    """One of several ranks."""

    def __init__(self, config: DistributedConfig, device: torch.device) -> None:
        self._timeout = config.timeout
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout))
        except ValueError as error:
            raise UsageError(
                f"WORLD_SIZE is set but the ranks cannot connect ({error}); start with torchrun, or unset WORLD_SIZE"
            ) from error
        except RuntimeError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RankLost(
                f"not all {os.environ['WORLD_SIZE']} ranks connected to {where} within {config.timeout:g} s; run the same command again"
            ) from error
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._heartbeat: _Heartbeat | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"ranks": self.count}

    def lead(self) -> None:
        """On rank 0: start the heartbeat for work that the other ranks wait for; the next `on_leader` ends it."""
        if self.index == 0 and self._heartbeat is None:
            self._heartbeat = _Heartbeat(self._state)

    def on_leader(self, work: Callable[[], _Result]) -> _Result:
        """Return on all ranks the result of `work` on rank 0, plain JSON. The others wait as long as it takes."""
        if self.index == 0:
            self.lead()
            result = work()
            message = json.dumps(result).encode()
            self._finish(_DONE, len(message))
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))
            return result
        state = _WORKING
        while state == _WORKING:  # the heartbeats of rank 0, then its last message
            state, number = self._state(_WORKING, 0)
        if state == _FAILED:
            raise SystemExit(number)
        received = torch.empty(number, dtype=torch.uint8)
        self._broadcast(received)
        value: _Result = json.loads(received.numpy().tobytes())
        return value

    def broadcast(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of rank 0 under its names, in CPU memory; on rank 0 without a copy where possible."""
        mine = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        kinds = self.on_leader(lambda: {name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in mine.items()})
        result = {}
        for name, (kind, *shape) in kinds.items():
            result[name] = mine[name] if self.index == 0 else torch.empty(shape, dtype=getattr(torch, kind))
            if result[name].numel():
                self._broadcast(result[name].view(-1).view(torch.uint8))
        return result

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """One all_reduce over one buffer of all tensors, so that the order of additions is the same in every step and every start."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self._collective():
            dist.all_reduce(flat)
        for tensor, summed in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))

    def largest_exit_code(self, code: int | None) -> int | None:
        (largest,) = self._largest(-1 if code is None else code)
        return largest if largest >= 0 else None

    def check_equal(self, tensors: Iterable[Tensor]) -> None:
        """Raise EnvironmentFault on rank 0, and SystemExit on the others, if float32 tensors do not have the same bits on all ranks."""
        checksum = sum(int(tensor.detach().view(torch.int32).sum(dtype=torch.int64)) for tensor in tensors)
        largest, minus_smallest = self._largest(checksum, -checksum)  # both by one all_reduce
        if largest + minus_smallest != 0:
            self.on_leader(_raise_drift)

    def watch(self, stop: Stop) -> Stop:
        """Return a `stop` that also ends this rank when torchrun is gone (75), and rank 0 when its heartbeat fails."""

        def stop_of_ranks() -> int | None:
            if self._heartbeat is not None and self._heartbeat.error is not None:
                raise self._lost(self._heartbeat.error)
            is_orphan = self._launcher is not None and os.getppid() != self._launcher
            return 75 if (code := stop()) is None and is_orphan else code

        return stop_of_ranks

    def abandon(self, error: BaseException) -> None:
        """Send the exit code of `error` to the other ranks if they wait for this one."""
        if self._heartbeat is not None:
            with contextlib.suppress(RankLost):
                self._finish(_FAILED, _exit_code(error))

    def _finish(self, state: int, number: int) -> None:
        assert self._heartbeat is not None, "only rank 0 leads"
        heartbeat, self._heartbeat = self._heartbeat, None
        if (error := heartbeat.stop()) is not None:
            raise self._lost(error)
        self._state(state, number)

    def _state(self, state: int, number: int) -> tuple[int, int]:
        """Send the state of rank 0 from rank 0, receive it on the others."""
        message = torch.tensor([state, number])
        self._broadcast(message)
        return int(message[0]), int(message[1])

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
        reason = str(error).partition("\n")[0].rpartition("] ")[2][:120]  # without the line of torch's source
        late = f"did not respond within {self._timeout:g} s"
        return RankLost(f"rank {self.index} of {self.count}: another rank is gone, stopped, or {late} ({reason}); {_AGAIN}")


class _Heartbeat:
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
            while not self._stopping.wait(_HEARTBEAT_SECONDS):
                self._broadcast(_WORKING, 0)
        except RankLost as error:
            self.error = error


def sum_losses(losses: Losses, ranks: Ranks) -> Losses:
    """Sum each rank's share of the losses of a batch; detached where there are several ranks."""
    if ranks.count == 1:
        return losses
    values: list[Tensor] = [value.detach().float().clone() for value in (losses.total, *losses.means.values())]
    ranks.sum_(values)
    return Losses(values[0], dict(zip(losses.means, values[1:], strict=True)))


def _raise_drift() -> None:
    raise EnvironmentFault(
        "the ranks' weights have drifted apart, because their machines compute different bits; nothing was saved. Use machines of one kind"
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
