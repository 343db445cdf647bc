"""Several processes in one training, as torchrun starts them: what they do together, and how they end together.

One rank leads: the first. It alone reads and writes files, retrieves, evaluates, exports and speaks; the others wait in `told`, for as long
as it takes, and train with it. Every rank runs the same loop; what differs between them goes through the methods of `Ranks`:

    told      the leader does something, all get its result (JSON)       dev scores, checkpoints, orders
    given     all get the leader's tensors                               weights, moments, token pools
    sum_      tensors are summed over the ranks, in place                gradients, losses
    agreed    one answer for all to a question each answers for itself   has a signal come?

A training alone (`ALONE`) is the same loop with the same calls, each of which gives back what it got. Where one rank ends, all do: what the
leader raises gives the others its exit code without a word of theirs; a rank that is killed or stopped is noticed by the next exchange
(at once, or after `distributed.timeout`), one of those left names it, and all exit with 75: the same command goes on from the checkpoint.

Nothing is pickled: words go as JSON through the store of the rendezvous, numbers as bytes through gloo.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from cramlm.config import DistributedConfig
from cramlm.errors import CramError, DivergedError, RankLost, Stopped, UsageError
from cramlm.training.store import Store, meet

_ANSWER_SECONDS = 20.0  # how long the store may take for an answer
_BEAT_SECONDS = 0.5  # between two signs of life of a rank
_LOOK_SECONDS = 4 * _BEAT_SECONDS  # a rank that gives none for so long, when an exchange has failed, is the one that is gone
_NAP_SECONDS = 0.02, 0.2  # between two looks for the leader's word: the first, the longest
_LEAVING_SECONDS = 5.0  # how long the leader, who may host the store, waits for the others to leave
_ENDED = "ended"  # key of the exit code with which one rank has ended, after it said why

Stop = Callable[[], int | None]
_Result = TypeVar("_Result")


class Ranks(Protocol):
    """This process among those that train together; see above for what each method is for. All ranks make the same calls in the same order.

    index: 0 leads. local_count: ranks on this machine. settings: what the bits of a training depend on here, empty for one process.

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
    def config(self) -> DistributedConfig: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    def told(self, work: Callable[[], _Result]) -> _Result: ...
    def given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def sum_(self, tensors: Sequence[Tensor]) -> None: ...
    def agreed(self, code: int | None) -> int | None: ...
    def same(self, number: int) -> bool: ...
    def watched(self, stop: Stop) -> Stop: ...
    def exchanging(self) -> contextlib.AbstractContextManager[None]: ...


class Alone:
    """One process: everything is what it was."""

    index, count, local_count = 0, 1, 1
    config = DistributedConfig()

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def told(self, work: Callable[[], _Result]) -> _Result:
        return work()

    def given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        pass

    def agreed(self, code: int | None) -> int | None:
        return code

    def same(self, number: int) -> bool:
        return True

    def watched(self, stop: Stop) -> Stop:
        return stop

    def exchanging(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


ALONE = Alone()


@contextlib.contextmanager
def join(config: DistributedConfig) -> Iterator[Ranks]:
    """The ranks that this process was started among (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun sets them); else `ALONE`.

    When the block ends on one rank with an error, it ends on all of them: one raises the error, the others SystemExit with its exit code.

    Raises:
        UsageError: if the variables contradict one another. RankLost: if not all ranks come within `config.timeout`.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    ranks = _Joined(config)
    try:
        yield ranks
    except BaseException as error:
        ranks.end(error)
        raise
    ranks.leave()


class _Ended(BaseException):
    """Another rank has ended with this exit code, and has said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _Joined:
    """A rank of several. The store holds what is told, signs of life, and who has ended; gloo carries tensors."""

    def __init__(self, config: DistributedConfig) -> None:
        self.config = config
        self._timeout = timedelta(seconds=config.timeout)
        try:
            store, self.index, self.count = next(rendezvous("env://", timeout=self._timeout))
            shared = meet(PrefixStore("cramlm", store), self.index, self.count, timeout=config.timeout)
            self._store = Store(PrefixStore("words", shared), timeout=min(config.timeout, _ANSWER_SECONDS))
            group = PrefixStore("gloo", shared)
            dist.init_process_group("gloo", store=group, rank=self.index, world_size=self.count, timeout=self._timeout)
        except ValueError as error:
            raise UsageError(f"WORLD_SIZE is set but the ranks cannot meet ({error}); start with torchrun, or unset WORLD_SIZE") from error
        except RuntimeError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RankLost(
                f"not all {os.environ['WORLD_SIZE']} ranks came to {where} within {config.timeout:g} s; run the same command again"
            ) from error
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._turn, self._gone = 0, [self.index]  # ranks that nobody waits for when this one leaves
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._store.set(f"who/{self.index}", f"pid {os.getpid()} on {socket.gethostname()}")
        self._leaving = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._heart.start()

    @property
    def settings(self) -> dict[str, Any]:
        return {"ranks": self.count, "parallel": self.config.parallel}

    def told(self, work: Callable[[], _Result]) -> _Result:
        """What `work` gives on the leader, on all; it must be plain JSON."""
        self._turn += 1
        key = f"told/{self._turn}"
        with self.exchanging():
            if self.index > 0:
                self._wait_for(key)
                heard: _Result = json.loads(self._store.get(key))
                return heard
        result = work()
        with self.exchanging():
            self._store.set(key, json.dumps(result))
        return result

    def given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The leader's tensors under its names; on the leader the very same, made contiguous."""
        mine = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        kinds = self.told(lambda: {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in mine.items()})
        shapes = self.told(lambda: {name: list(tensor.shape) for name, tensor in mine.items()})
        result = {}
        with self.exchanging():
            for name, kind in kinds.items():
                result[name] = mine[name] if self.index == 0 else torch.empty(shapes[name], dtype=getattr(torch, kind))
                if result[name].numel():
                    dist.broadcast(result[name].view(-1).view(torch.uint8), src=0)
        return result

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """One exchange for all of them, side by side: the order of every addition is the same whenever it is asked."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self.exchanging():
            dist.all_reduce(flat)
        for tensor, summed in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))

    def agreed(self, code: int | None) -> int | None:
        """The largest of the ranks' codes, None if all have None."""
        largest = torch.tensor(-1 if code is None else code)
        with self.exchanging():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest) if largest >= 0 else None

    def same(self, number: int) -> bool:
        """Whether all ranks have this number."""
        extremes = torch.tensor([number, -number])
        with self.exchanging():
            dist.all_reduce(extremes, dist.ReduceOp.MAX)
        return bool(extremes.sum() == 0)

    def watched(self, stop: Stop) -> Stop:
        """`stop`, which also asks for a stop (75) when the launcher is gone: nobody would end this rank any more."""
        return lambda: 75 if (code := stop()) is None and self._orphaned else code

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Turn the failure of an exchange inside the block into a line that names the rank that is gone."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise self._explained(error) from error
            raise

    def leave(self) -> None:
        """End without an error; the leader last."""
        with contextlib.suppress(RuntimeError):  # everything is done: that another one has gone already does not matter
            self._part()
        dist.destroy_process_group()

    def end(self, error: BaseException) -> None:
        """End because of `error`: returns where it is to be raised on, raises SystemExit where another rank says why."""
        code = _exit_code(error)
        if isinstance(error, _Ended):
            silent = True
        elif isinstance(error, Stopped | DivergedError):  # each rank has raised its own
            silent = self.index > 0
        else:
            silent = self._spoken()
        if not silent:
            with contextlib.suppress(RuntimeError):
                self._store.set(_ENDED, str(code))
        with contextlib.suppress(RuntimeError):
            self._part()
        if silent:
            raise SystemExit(code)

    def _spoken(self) -> bool:
        """Whether another rank has said already why all end; where the store is gone, nobody can know."""
        try:
            return int(self._store.add("spoken", 1)) > 1
        except RuntimeError:
            return False

    def _part(self) -> None:
        """Leave; the leader, who may host the store, when the others have left too."""
        self._store.set(f"left/{self.index}", "")
        until = time.monotonic() + _LEAVING_SECONDS
        while self.index == 0 and time.monotonic() < until:
            if all(index in self._gone or self._store.has(f"left/{index}") for index in range(self.count)):
                break
            time.sleep(_NAP_SECONDS[0])
        self._leaving.set()
        self._heart.join()

    def _wait_for(self, key: str) -> None:
        """Until the leader sets `key`, however long it works, as long as it gives signs of life."""
        nap, longest = _NAP_SECONDS
        beats, since = -1, time.monotonic()
        while not self._store.has(key):
            if self._store.has(_ENDED):
                raise _Ended(int(self._store.get(_ENDED)))
            if self._orphaned:
                raise Stopped("the process that started this rank is gone; run the same command again to continue")
            if (now := self._store.add("alive/0", 0)) != beats:
                beats, since = now, time.monotonic()
            elif time.monotonic() - since > self.config.timeout:
                raise self._explained(None)
            time.sleep(nap)
            nap = min(1.5 * nap, longest)

    def _explained(self, error: RuntimeError | None) -> BaseException:
        """Why an exchange failed: the leader has ended by itself, or a rank is gone, or late."""
        again = "what was trained since the last checkpoint is lost; run the same command again to continue"
        try:
            lost = self._lost()
            if self._store.has(_ENDED):
                return _Ended(int(self._store.get(_ENDED)))
            self._gone += lost
            names = [f"rank {index} ({self._store.get(f'who/{index}')})" for index in lost]
        except RuntimeError:
            return RankLost(f"rank {self.index} of {self.count}: the machine where the ranks meet is gone ({_brief(error)}); {again}")
        if names:
            return RankLost(f"{', '.join(names)} is gone or stopped; {again}")
        late = f"a rank did not answer within {self.config.timeout:g} s, or its connection broke ({_brief(error)})"
        return RankLost(f"{late}; {again}, with a larger distributed.timeout if its machine is slow")

    def _lost(self) -> list[int]:
        """Ranks that have not left, and yet give no sign of life for a while."""
        others = [index for index in range(self.count) if index != self.index]
        before = [self._store.add(f"alive/{index}", 0) for index in others]
        time.sleep(_LOOK_SECONDS)
        silent = [index for index, beats in zip(others, before, strict=True) if self._store.add(f"alive/{index}", 0) == beats]
        return [index for index in silent if not self._store.has(f"left/{index}")]

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: whoever asks it next will say so
            while not self._leaving.wait(_BEAT_SECONDS):
                self._store.add(f"alive/{self.index}", 1)

    @property
    def _orphaned(self) -> bool:
        return self._launcher is not None and os.getppid() != self._launcher


def _exit_code(error: BaseException) -> int:
    match error:
        case CramError() | _Ended():
            return error.exit_code
        case SystemExit(code=int() as code):
            return code
        case KeyboardInterrupt():
            return 130
        case _:
            return 1


def _brief(error: RuntimeError | None) -> str:
    """The first line of a library's message, without the place in its source."""
    return "no sign of life" if error is None else str(error).partition("\n")[0].rpartition("] ")[2][:120] or "no reason given"
