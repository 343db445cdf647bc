"""The speed of this machine: from real updates, without lasting effects, with the threads that pay."""

from __future__ import annotations

import pytest
import torch
from training_fixtures import ENCODER, VOCABULARY, make_batches, make_model, make_phase

from cramlm.config.run import EncoderConfig, HeadConfig
from cramlm.planning.speed import Measurement, count_step, measure
from cramlm.training import memory
from cramlm.training.flops import executed_flops


@pytest.mark.parametrize("changes", [{}, {"external": 0, "text_weight": 0.0}, {"mixing": "interleaved"}])
def test_speed_is_measured_on_real_updates_and_leaves_torch_as_it_was(changes: dict[str, float]) -> None:
    phase, threads = make_phase(**changes), torch.get_num_threads()
    measured = measure(ENCODER, HeadConfig(), phase, vocab_size=VOCABULARY, precision="fp32", threads=(1,), seconds=0.05)
    assert measured.tokens_per_second > 100
    assert (measured.threads, torch.get_num_threads()) == (1, threads)
    assert not torch.are_deterministic_algorithms_enabled()
    batches = make_batches(phase)
    batch = batches.batch(0)
    assert measured.flops_per_token == pytest.approx(executed_flops(make_model(), batch, phase) / batch.tokens, rel=0.3)


@pytest.mark.parametrize("changes", [{}, {"mixing": "interleaved"}])
def test_operations_for_a_token_do_not_depend_on_how_long_was_measured(changes: dict[str, str]) -> None:
    phase = make_phase(**changes)
    step = {"vocab_size": VOCABULARY, "precision": "fp32"}
    short, long = (measure(ENCODER, HeadConfig(), phase, threads=(1,), seconds=seconds, **step) for seconds in (0.01, 0.3))
    assert short.flops_per_token == long.flops_per_token == count_step(ENCODER, HeadConfig(), phase, **step)[0]


def test_one_of_the_thread_counts_given_is_chosen_and_the_number_before_comes_back() -> None:
    before = torch.get_num_threads()
    measured = measure(ENCODER, HeadConfig(), make_phase(), vocab_size=VOCABULARY, precision="fp32", threads=(1, 2), seconds=0.05)
    assert measured.threads in (1, 2)
    assert torch.get_num_threads() == before


def test_a_measurement_without_cpu_time_is_called_starved() -> None:
    assert Measurement(171.0, 2, 0.22, 1e7, None).starved
    assert not Measurement(13_000.0, 1, 0.98, 1e7, None).starved


@pytest.mark.skipif(memory.resident() is None, reason="the system does not tell what is resident")
def test_a_larger_model_needs_more_memory_in_training() -> None:
    phase = make_phase(batch_size=2048, max_length=64)
    needed = []
    for width in (64, 512):
        encoder = EncoderConfig(layers=2, hidden=width, heads=4, intermediate=width, max_positions=64)
        needed.append(count_step(encoder, HeadConfig(), phase, vocab_size=1000, precision="fp32")[1] or 0)
    weights = 4 * 2 * (7 * 512 * 512)
    assert needed[1] > needed[0] + 2 * weights
