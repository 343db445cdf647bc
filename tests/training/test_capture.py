"""CUDA graphs: padded batches have the losses and gradients of the batch; on a GPU, graphs compute what single operations do."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_fixtures import make_batches, make_model, make_phase, run_phase, stop_after, weights_of

from cramlm.config.phase import OptimizerConfig
from cramlm.errors import Stopped
from cramlm.model.model import Model
from cramlm.training.batching import Batches
from cramlm.training.capture import CapturedGradients, Shapes, StaticBatch, is_capturable, padded_to
from cramlm.training.loop import Updater, deterministic
from cramlm.training.objective import dropout_of, gradients, in_parts, losses_of, objective_of
from cramlm.training.optimizers import StackedMuon, orthogonalize, orthogonalize_stack
from cramlm.training.prefetch import batches_of

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PHASE = make_phase(text_weight=0.5)


def gradients_of(model: Model) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("candidates", [None, 48])
def test_a_padded_batch_in_static_memory_has_the_losses_and_gradients_of_the_batch(candidates: int | None) -> None:
    phase = make_phase(text_weight=0.5, candidates=candidates)
    model, batches = make_model(pooling="mean"), make_batches(phase)
    first, second = batches.batch(0), batches.batch(1)
    rows, masked = 2 + max(len(each.token_ids) for each in (first, second)), 9 + max(len(each.masked) for each in (first, second))
    padded = [padded_to(each, rows=rows, masked=masked, pad_id=0) for each in (first, second)]
    counts = [objective_of(phase).counts(each) for each in (first, second)]
    memory = StaticBatch(padded[0], counts[0], torch.device("cpu"))
    for batch, extended, count in zip((first, second), padded, counts, strict=True):
        expected = gradients(model, in_parts(batch, 1), phase, count, precision="fp32", dropout_seed=0)
        wanted = gradients_of(model)
        model.zero_grad()
        memory.fill(extended, count)
        losses = losses_of(model, memory.batch, phase, memory.counts, "fp32", dropout_of(phase, 0))
        losses.total.backward()
        assert losses.as_numbers() == pytest.approx(expected.as_numbers(), rel=1e-6)
        found = gradients_of(model)
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-7)
        model.zero_grad()


def test_static_memory_holds_the_batch_that_was_filled_last() -> None:
    batches = [padded_to(make_batches(PHASE).batch(step), rows=12, masked=80, pad_id=0) for step in range(3)]
    counts = [objective_of(PHASE).counts(each) for each in batches]
    memory = StaticBatch(batches[0], counts[0], torch.device("cpu"))
    for batch, count in zip(batches, counts, strict=True):
        memory.fill(batch, count)
        for each in fields(batch):
            if each.name != "term":
                np.testing.assert_array_equal(getattr(memory.batch, each.name).numpy(), getattr(batch, each.name))
        assert {name: int(number) for name, number in (memory.counts.divisors or {}).items()} == count.numbers


@pytest.mark.parametrize("fills", [1, 3])
def test_static_memory_keeps_what_a_gpu_may_not_have_copied_yet_in_this_step_and_the_last(fills: int) -> None:
    batches = [padded_to(make_batches(PHASE).batch(step), rows=12, masked=80, pad_id=0) for step in range(2 * fills)]
    counts = objective_of(PHASE).counts(batches[0])
    memory, copied = StaticBatch(batches[0], counts, torch.device("cpu"), fills=fills), []
    for batch in batches:
        memory.fill(batch, counts)
        copied.append(memory.hosts[0].clone())
    kept = [host.numpy().tobytes() for host in memory.hosts]
    assert sorted(kept) == sorted(each.numpy().tobytes() for each in copied)
    assert len(set(kept)) == 2 * fills


@pytest.mark.parametrize(("rows", "masked"), [(34, 760), (271, 6100)])
def test_batches_of_a_phase_are_padded_to_few_shapes(rows: int, masked: int) -> None:
    rng, shapes, seen, padding = np.random.default_rng(0), Shapes(), set(), []
    for _ in range(500):
        size = rng.normal(1, 0.3 / np.sqrt(rows))
        wanted = round(rows * size), round(masked * size * rng.normal(1, 0.7 / np.sqrt(masked)))
        padded = shapes.padded("joint", *wanted)
        assert all(small <= large <= 1.3 * small for small, large in zip(wanted, padded, strict=True))
        seen.add(padded)
        padding.append(padded[0] / wanted[0])
    assert len(seen) <= 8
    assert np.mean(padding) < 1.2
    assert shapes.padded("joint", 3, 0) == (5, 0)
    assert shapes.padded("other", *wanted) not in seen


def test_experts_and_token_heads_are_not_captured() -> None:
    assert is_capturable(make_model(), PHASE)
    assert not is_capturable(make_model(shape="moe"), PHASE)
    assert not is_capturable(make_model(token_classifier=True), make_phase(text="shuffled_tokens"))


@pytest.mark.parametrize("shape", [(3, 24, 40), (2, 48, 16), (1, 20, 20)])
def test_matrices_of_one_shape_are_orthogonalized_together_as_they_are_one_by_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    settings: Any = ((3.4445, -4.775, 2.0315), 5, 1e-7)
    expected = torch.stack([orthogonalize(matrix, *settings) for matrix in matrices])
    torch.testing.assert_close(orthogonalize_stack(matrices, *settings), expected, rtol=1e-3, atol=1e-4)


def test_muon_for_gpus_makes_the_updates_of_pytorchs() -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in ((6, 8), (8, 6), (6, 8))]
    updates = [[torch.randn(each.shape, generator=generator) for each in start] for _ in range(3)]
    results = []
    for kind in ("pytorch", "stacked"):
        parameters = [torch.nn.Parameter(each.clone()) for each in start]
        optimizer: torch.optim.Optimizer
        if kind == "pytorch":
            optimizer = torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        else:
            optimizer = StackedMuon(parameters, lr=torch.tensor(0.02), weight_decay=0.1, momentum=0.95, dtype=torch.bfloat16)
        for gradient in updates:
            for parameter, value in zip(parameters, gradient, strict=True):
                parameter.grad = value.clone()
            optimizer.step()
        assert optimizer.state[parameters[0]].keys() == {"momentum_buffer"}
        results.append(parameters)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=4e-4)  # bf16: a hundredth of an update


def test_a_batch_that_does_not_fit_into_memory_is_computed_in_parts_with_the_gradients_of_the_whole() -> None:
    batch, model = make_batches(PHASE).batch(0), make_model(pooling="mean")
    counts = objective_of(PHASE).counts(batch)
    expected = gradients(model, in_parts(batch, 1), PHASE, counts, precision="fp32", dropout_seed=0)
    wanted, calls = gradients_of(model), []

    def refuse(_: Any, given: tuple[Any, ...]) -> None:
        calls.append(len(given[0].token_ids))
        if calls[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = model.encoder.register_forward_pre_hook(refuse)
    captured = CapturedGradients(model, PHASE, precision="fp32", enabled=False)
    for _ in range(2):
        found = captured(batch, counts, dropout_seed=0)
        assert found.as_numbers() == pytest.approx(expected.as_numbers(), rel=1e-5)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
    assert captured.parts == 4
    assert calls == [10, 5, 3, 3, 2, 2, 3, 3, 2, 2]
    hook.remove()
    model.encoder.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        captured(batch, counts, dropout_seed=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_layers_compile_as_one_graph_for_the_first_layer_and_one_for_the_others() -> None:
    from torch._dynamo.utils import counters

    from cramlm.model.model import PackedBatch

    model = make_model().to("meta")
    counters.clear()
    for layer in model.encoder.layers:
        layer.compile(backend="eager", fullgraph=True, dynamic=True)
    for step in range(3):  # of several shapes
        model.hidden(PackedBatch.of(make_batches(PHASE).batch(step), "meta"))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_updates_by_graphs_are_those_of_single_operations(dropout: float, kind: Any) -> None:
    phase = make_phase(text_weight=0.5, dropout=dropout, optimizer=OptimizerConfig(kind=kind))
    batches, results = make_batches(phase), []
    for captures in (False, True):
        model = make_model(pooling="mean").to("cuda")
        updater = Updater(model, phase, precision="bf16", captures=captures)
        with deterministic(model.device):
            losses = [updater.update(batches.batch(step), step=step, factor=1.0, dropout_seed=step).losses for step in range(12)]
        results.append((losses, weights_of(model)))
    (expected, weights), (found, by_graphs) = results
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in expected], rel=0.1 if dropout else 1e-2)
    assert found[-1]["loss"] < found[0]["loss"]
    if not dropout:
        for name, weight in weights.items():
            torch.testing.assert_close(by_graphs[name], weight, rtol=0, atol=2e-2)


@pytest.mark.gpu
@gpu
def test_dropout_in_a_graph_is_a_function_of_the_seed() -> None:
    phase = make_phase(text_weight=0.5, dropout=0.3)
    batch, model = make_batches(phase).batch(0), make_model(pooling="mean").to("cuda")
    captured, counts = CapturedGradients(model, phase, precision="bf16", enabled=True), objective_of(phase).counts(batch)
    totals = [float(captured(batch, counts, dropout_seed=seed).total) for seed in (1, 1, 2, 1, 2)]
    assert totals[1] == totals[3]
    assert totals[2] == totals[4] != totals[1]


@pytest.mark.gpu
@gpu
def test_a_phase_on_a_gpu_that_was_stopped_and_resumed_ends_with_the_same_weights_up_to_rounding(tmp_path: Path) -> None:
    phase = make_phase(text_weight=0.5, steps=24, checkpoint_every=6)
    whole, resumed = make_model().to("cuda"), make_model().to("cuda")
    run_phase(whole, phase, tmp_path / "whole", evaluate=None, precision="bf16")
    with pytest.raises(Stopped):
        run_phase(resumed, phase, tmp_path / "resumed", evaluate=None, precision="bf16", stop=stop_after(13))
    again = make_model().to("cuda")
    run_phase(again, phase, tmp_path / "resumed", evaluate=None, precision="bf16")
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(weights_of(again)[name], weight, rtol=0, atol=1e-3)


@pytest.mark.gpu
@gpu
def test_batches_made_ahead_are_those_of_the_steps() -> None:
    batches: Batches = make_batches(PHASE)
    with batches_of(batches, range(3, 9), torch.device("cuda")) as made:
        for step, batch in zip(range(3, 9), made, strict=True):
            np.testing.assert_array_equal(batch.token_ids, batches.batch(step).token_ids)
            np.testing.assert_array_equal(batch.masked, batches.batch(step).masked)
