"""The cost of training: operations, and the measured speed and memory of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training_fixtures import ENCODER, VOCABULARY, make_batches, make_model, make_phase

from cramlm.config.head import HeadConfig
from cramlm.config.phase import PhaseConfig
from cramlm.config.run import EncoderConfig
from cramlm.io.machine import available_cores, resident_memory
from cramlm.model.model import PackedBatch
from cramlm.planning.speed import Measurement, TrainingSetup, count_flops, count_step, cpu_share, estimate, least_step_memory, measure
from cramlm.training.objective import executed_flops, objective_of, paper_flops


def setup(phase: PhaseConfig) -> TrainingSetup:
    return TrainingSetup(ENCODER, HeadConfig(), phase, VOCABULARY, "fp32")


@pytest.mark.parametrize("changes", [{}, {"external": 0, "text_weight": 0.0}])
def test_speed_is_measured_on_real_updates_and_torch_keeps_its_settings(changes: dict[str, float]) -> None:
    phase, threads = make_phase(**changes), torch.get_num_threads()
    measured = measure(setup(phase), threads=(1, 2), seconds=0.05)
    assert measured.tokens_per_second > 0
    assert measured.threads in (1, 2)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    batches = make_batches(phase)
    batch = batches.batch(0)
    assert measured.flops_per_token == pytest.approx(executed_flops(make_model(), batch, phase) / batch.tokens, rel=0.3)


@pytest.mark.parametrize("changes", [{}, {"mixing": "interleaved"}])
def test_operations_per_token_do_not_depend_on_the_duration_of_the_measurement(changes: dict[str, str]) -> None:
    phase = make_phase(**changes)
    short, long = (measure(setup(phase), threads=(1,), seconds=seconds) for seconds in (0.01, 0.1))
    assert short.flops_per_token == long.flops_per_token == count_step(setup(phase))[0] == count_flops(setup(phase))


def test_an_estimate_runs_no_update_and_counts_the_operations_of_a_measurement() -> None:
    phase, threads = make_phase(), torch.get_num_threads()
    large = replace(setup(phase), encoder=EncoderConfig(layers=48, hidden=1024, heads=16, intermediate=4096))
    found = estimate(large, threads=(1, 2))  # the weights alone would take 2.4 GB
    assert found.rough
    assert found.threads in (1, 2)
    assert found.tokens_per_second > 0
    assert found.bytes > least_step_memory(large)
    assert torch.get_num_threads() == threads
    assert estimate(setup(phase), threads=(1,)).flops_per_token == measure(setup(phase), threads=(1,), seconds=0.01).flops_per_token


def test_a_measurement_with_little_cpu_time_is_starved() -> None:
    assert Measurement(171.0, 2, 0.22, 1e7, None).starved
    assert not Measurement(13_000.0, 1, 0.98, 1e7, None).starved


def test_more_threads_than_cores_are_not_taken_for_a_busy_machine() -> None:
    cores = available_cores()
    assert cpu_share(10.0 * cores, 10.0, 8 * cores) == cpu_share(10.0, 10.0, 1) == 1.0
    assert cpu_share(5.0, 10.0, 1) == 0.5


@pytest.mark.faults
@pytest.mark.skipif(resident_memory() is None, reason="resident memory is unknown on this system")
def test_a_larger_model_needs_more_memory_in_training() -> None:
    phase = make_phase(batch_size=2048, max_length=64)
    needed = []
    for width in (64, 512):
        encoder = EncoderConfig(layers=2, hidden=width, heads=4, intermediate=width, max_positions=64)
        setup = TrainingSetup(encoder, HeadConfig(), phase, 1000, "fp32")
        needed.append(count_step(setup)[1] or 0)
        assert least_step_memory(setup) < needed[-1]
    weights = 4 * 2 * (7 * 512 * 512)
    assert needed[1] > needed[0] + 2 * weights


@pytest.mark.parametrize("shape", ["modernbert", "bert"])
@pytest.mark.parametrize("changes", [{}, {"external": 0, "text_weight": 0.0}, {"label_weight": 0.0}])
def test_executed_operations_equal_those_that_torch_counts(shape: str, changes: dict[str, float]) -> None:
    phase = make_phase(**changes)
    model, batch = make_model(shape=shape), PackedBatch.of(make_batches(phase).batch(0))
    with FlopCounterMode(display=False) as counter:
        objective_of(phase).losses(model, batch).total.backward()
    # torch counts no backward for the lookup, and the classifier's last layer for all sequences, as we do
    assert executed_flops(model, batch, phase) == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_the_papers_count_gives_the_papers_figure_for_its_small_scale() -> None:
    # AGNews small: 1e5 steps of 256 sequences of 128 tokens, 109M parameters; the table averages 2.74e18 over eight tasks.
    assert paper_flops(109_000_000, padded_tokens=100_000 * 256 * 128) == pytest.approx(2.14e18, rel=0.01)
