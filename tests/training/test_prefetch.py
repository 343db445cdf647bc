"""Batches that other processes make ahead, as for a GPU; the processes need none."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
from training_fixtures import make_batches, make_phase

from cramlm.errors import EnvironmentFault
from cramlm.records import Batch
from cramlm.training.batching import Batches
from cramlm.training.prefetch import batches_of

CUDA = torch.device("cuda")


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: batches are made by the process itself")
def test_signals_to_the_whole_process_group_do_not_end_the_processes_that_make_batches() -> None:
    batches = make_batches(make_phase(text_weight=0.5))
    with batches_of(batches, range(40), CUDA) as made:
        found = [next(made)]
        processes = multiprocessing.active_children()
        assert processes
        for sent in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            for process in processes:
                os.kill(process.pid, sent)
        found += made
    assert len(found) == 40
    for step, batch in enumerate(found):
        np.testing.assert_array_equal(batch.token_ids, batches.batch(step).token_ids)
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: batches are made by the process itself")
def test_a_process_that_is_gone_is_a_fault_of_the_environment_wherever_it_is_noticed() -> None:
    batches = make_batches(make_phase(text_weight=0.5))

    def wait_for_a_batch() -> None:
        with batches_of(batches, range(9), CUDA) as made:
            next(made)
            for process in multiprocessing.active_children():
                process.kill()
            time.sleep(60)  # the signal that a child ended breaks this off

    with pytest.raises(EnvironmentFault, match="a process that makes batches ended"):
        wait_for_a_batch()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: batches are made by the process itself")
def test_after_an_error_in_a_process_that_makes_batches_all_of_them_end_at_sigterm() -> None:
    class Unreadable(Batches):
        def batch(self, step: int) -> Batch:
            raise OSError(f"no batch {step}")

    batches = make_batches(make_phase(text_weight=0.5))
    batches.__class__ = Unreadable
    with pytest.raises(OSError, match="in DataLoader worker process 0") as error, batches_of(batches, range(9), CUDA) as made:
        next(made)
    assert not isinstance(error.value, EnvironmentFault)
    for process in multiprocessing.active_children():  # the traceback keeps the loader
        process.terminate()
        process.join(60)
        assert not process.is_alive()
