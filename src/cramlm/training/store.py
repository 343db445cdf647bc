"""The store in which the ranks of a training meet, asked so that it cannot hang, and how they meet.

torch's client waits without end for a host that is there but does not answer: a process that was stopped, a machine that froze. So each
question is asked by a thread of its own, and given up after a while. Once one has failed, every other fails at once.

torchrun keeps its store when it starts the ranks again, with all that the earlier ones have written. So the first rank opens a meeting
with a name that was never used, and those that it welcomes there keep their keys under that name.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

_NAP_SECONDS = 0.05
_Result = TypeVar("_Result")


class Store:
    """Keys and values that all ranks see. Every question raises torch.distributed.DistStoreError if there is no answer in time."""

    def __init__(self, store: PrefixStore, *, timeout: float) -> None:
        self._store, self._timeout = store, timeout
        self._lost = False

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        value: bytes = self._ask(lambda: self._store.get(key))
        return value.decode()

    def add(self, key: str, number: int) -> int:
        total: int = self._ask(lambda: self._store.add(key, number))
        return total

    def has(self, key: str) -> bool:
        there: bool = self._ask(lambda: self._store.check([key]))
        return there

    def _ask(self, question: Callable[[], _Result]) -> _Result:
        if self._lost:
            raise dist.DistStoreError("the store does not answer")
        answer: Future[_Result] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except RuntimeError as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        try:
            return answer.result(self._timeout)
        except TimeoutError as error:
            self._lost = True
            raise dist.DistStoreError("the store does not answer") from error
        except RuntimeError:
            self._lost = True
            raise


def meet(store: PrefixStore, index: int, count: int, *, timeout: float) -> PrefixStore:
    """The part of `store` that these ranks share with no earlier ones; returns when all have come.

    Raises:
        torch.distributed.DistStoreError: if they do not come within `timeout` seconds.
    """
    asked, me, until = Store(store, timeout=timeout), uuid.uuid4().hex, time.monotonic() + timeout
    if index == 0:
        asked.set("meeting", me)
    others = range(1, count)
    while time.monotonic() < until:
        if index == 0 and all(asked.has(f"{me}/came/{other}") for other in others):
            asked.set(f"{me}/welcome", json.dumps([asked.get(f"{me}/came/{other}") for other in others]))
            return PrefixStore(me, store)
        if index > 0 and asked.has("meeting"):
            meeting = asked.get("meeting")  # perhaps one that is over, and welcomed others
            asked.set(f"{meeting}/came/{index}", me)
            if asked.has(f"{meeting}/welcome") and me in json.loads(asked.get(f"{meeting}/welcome")):
                return PrefixStore(meeting, store)
        time.sleep(_NAP_SECONDS)
    raise dist.DistStoreError(f"not all {count} ranks came")
