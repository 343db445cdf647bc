"""The batches of a phase. For training on a GPU, other processes make them ahead.

Packing and masking a batch of 32,768 tokens takes a core 8 to 10 ms, longer than a GPU takes to train a small encoder on it. Batches are
functions of the step, so that it does not matter which process makes them.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import signal
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from cramlm.errors import EnvironmentFault
from cramlm.io.machine import available_cores
from cramlm.records import Batch
from cramlm.training.batching import Batches

_PROCESSES: Final = 8
_AHEAD: Final = 4  # batches of each process


class _Steps(Dataset[Batch]):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, step: int) -> Batch:
        return self._batches.batch(step)


@contextlib.contextmanager
def batches_of(batches: Batches, steps: range, device: torch.device) -> Iterator[Iterator[Batch]]:
    """An iterator over the batches of these steps in order; the end of the block ends the processes.

    Raises:
        EnvironmentFault: if a process is gone. PyTorch says so at any moment, not only when the next batch is requested.
    """
    processes = min(_PROCESSES, available_cores() - 1)
    if device.type != "cuda" or processes < 1:
        yield map(batches.batch, steps)
        return
    ended = mmap.mmap(-1, 1)  # shared with the processes
    loader: DataLoader[Any] = DataLoader(
        _Steps(batches),
        batch_size=None,
        sampler=steps,
        num_workers=processes,
        prefetch_factor=_AHEAD,
        pin_memory=True,  # a thread then receives batches while this one launches kernels
        multiprocessing_context="fork",  # the pools are not copied
        worker_init_fn=functools.partial(_leave_signals_to_the_parent, ended),
        generator=torch.Generator(),  # not PyTorch's global one
    )
    try:
        with contextlib.closing(batch for batch in loader) as made:  # closing it drops PyTorch's iterator, which ends its processes
            yield made
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):  # as "Caught ... in DataLoader worker process 0", which is an error of the process
            raise
        raise EnvironmentFault(
            "a process that makes batches ended, probably because the machine's memory is full; close other programs, or pass --device cpu"
        ) from error
    finally:
        ended[0] = 1


def _leave_signals_to_the_parent(ended: mmap.mmap, _worker: int) -> None:
    """Let a process go on after a signal: the parent stops after a checkpoint and ends it. Ctrl-C reaches the whole process group.

    ended: its byte is 1 when the parent needs no more batches. From then on SIGTERM, by which Python and PyTorch end what is left after an
    error, ends the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if ended[0] else None)
