from __future__ import annotations

from typing import Any

import pytest
import torch
from training_fixtures import assert_same_bits, make_batches, make_model, make_phase, weights_of

from cramlm.config.phase import OptimizerConfig, ScheduleConfig
from cramlm.model.model import Model, PackedBatch
from cramlm.training.objective import objective_of
from cramlm.training.optimizers import Float32Muon, build_optimizer, learning_rate_factor, orthogonalize


def train_a_little(model: Model, optimizer: Any, *, steps: int = 1, **changes: Any) -> None:
    phase = make_phase(**changes)
    batches = make_batches(phase)
    for step in range(steps):
        optimizer.zero_grad()
        objective_of(phase).losses(model, PackedBatch.of(batches.batch(step))).total.backward()
        optimizer.step()


def test_a_muon_update_has_the_same_root_mean_square_for_every_shape() -> None:
    model = make_model()
    matrices = model.parameter_groups().matrix
    optimizer = build_optimizer(model, OptimizerConfig(kind="muon", muon_learning_rate=0.02, weight_decay=0.0))
    before = weights_of(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in matrices.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.set_factor(0.5)
    optimizer.step()
    for name, parameter in matrices.items():
        moved = (parameter.detach() - before[name]).square().mean().sqrt()
        assert float(moved) == pytest.approx(0.5 * 0.2 * 0.02, rel=0.25), name  # its singular values are 0.7 to 1.2, not 1


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (12, 12)])
def test_muon_in_float32_is_torchs_muon_up_to_the_rounding_of_bf16(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = Float32Muon([ours], **settings), torch.optim.Muon([theirs], **settings)
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(optimizers[0].state[ours], optimizers[1].state[theirs])
    moved, expected = (each.detach() - start for each in (ours, theirs))
    assert float((moved - expected).norm() / expected.norm()) < 0.02
    in_bf16 = orthogonalize(start.bfloat16(), (3.4445, -4.775, 2.0315), 5, 1e-7)
    torch.testing.assert_close(orthogonalize(start, (3.4445, -4.775, 2.0315), 5, 1e-7), in_bf16.float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("shape", [(48, 48), (48, 72), (96, 48), (48, 144), (192, 48), (1, 8)])
@pytest.mark.parametrize("smallest", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("steps", [1, 2, 5, 6])
def test_newton_schulz_iterations_in_float32_are_the_plain_ones_also_of_ill_conditioned_matrices(
    shape: tuple[int, int], smallest: float, steps: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
    values = torch.linspace(1, 0, min(shape), dtype=torch.float64) ** 4 * (1 - smallest) + smallest
    values[min(shape) // 2 :] = smallest
    values[: 1 + min(shape) // 8] = 1.0
    matrix = left * values @ right
    linear, cubic, quintic = coefficients = (3.4445, -4.775, 2.0315)
    expected = matrix / matrix.norm()
    for _ in range(steps):
        gram = expected @ expected.T
        expected = linear * expected + (cubic * gram + quintic * gram @ gram) @ expected
    torch.testing.assert_close(orthogonalize(matrix.float(), coefficients, steps, 1e-7).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("capability", "expected"), [("avx512_bf16", torch.optim.Muon), ("avx2", Float32Muon)])
def test_newton_schulz_iterations_are_in_float32_on_a_processor_without_bf16(
    capability: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch emulates bf16 there, forty times as slowly."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    built: list[type] = []
    original = torch.optim.Optimizer.__init__

    def recording(self: torch.optim.Optimizer, *arguments: Any) -> None:
        built.append(type(self))
        original(self, *arguments)

    monkeypatch.setattr(torch.optim.Optimizer, "__init__", recording)
    build_optimizer(make_model(), OptimizerConfig(kind="muon"))
    assert built == [expected, torch.optim.AdamW]


def test_adamw_is_torchs_adamw_with_decay_on_matrices_only() -> None:
    ours, theirs = make_model(), make_model()
    optimizer = build_optimizer(ours, OptimizerConfig(kind="adamw", weight_decay=0.1))
    optimizer.set_factor(0.5)
    groups = theirs.parameter_groups()
    reference = torch.optim.AdamW(
        [
            {"params": [*groups.matrix.values(), *groups.decayed.values()], "weight_decay": 0.1},
            {"params": [*groups.undecayed.values()], "weight_decay": 0.0},
        ],
        lr=0.5e-3,
        betas=(0.9, 0.98),
        eps=1e-6,
        fused=False,
        foreach=False,
    )
    train_a_little(ours, optimizer, steps=4)
    train_a_little(theirs, reference, steps=4)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_muon_takes_the_hidden_matrices_and_adamw_all_the_rest() -> None:
    model = make_model()
    optimizer = build_optimizer(model, OptimizerConfig(kind="muon"))
    assert len(optimizer.parameters) == len({id(parameter) for parameter in optimizer.parameters}) == len(list(model.parameters()))
    train_a_little(model, optimizer)
    muon = {key.split("/")[1] for key in optimizer.state_tensors() if key.startswith("muon/")}
    assert muon == set(model.parameter_groups().matrix)


def test_parameters_without_gradient_are_left_alone_and_have_no_state() -> None:
    model = make_model()
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.5))
    before = weights_of(model)
    train_a_little(model, optimizer, external=0, text_weight=0.0)
    head = [{name: weight for name, weight in weights.items() if name.startswith("mlm_head.")} for weights in (before, weights_of(model))]
    assert head[0]
    assert_same_bits(*head)
    assert not any("mlm_head" in key for key in optimizer.state_tensors())


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (ScheduleConfig(kind="linear", warmup_fraction=0.2), [1 / 2, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        (ScheduleConfig(kind="wsd", warmup_fraction=0.2, decay_fraction=0.4), [1 / 2, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
    ],
    ids=["linear", "wsd"],
)
def test_schedules_rise_and_fall_as_by_hand(schedule: ScheduleConfig, factors: list[float]) -> None:
    assert [learning_rate_factor(schedule, step, 10) for step in range(10)] == pytest.approx(factors)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100, 1001])
@pytest.mark.parametrize("kind", ["linear", "wsd"])
@pytest.mark.parametrize(("warmup", "decay"), [(0.0, 0.4), (0.05, 1.0), (0.5, 1.0), (0.5, 0.01)])
def test_every_schedule_stays_in_range_reaches_its_peak_and_ends_low(steps: int, kind: str, warmup: float, decay: float) -> None:
    schedule = ScheduleConfig.model_validate({"kind": kind, "warmup_fraction": warmup, "decay_fraction": decay})
    factors = [learning_rate_factor(schedule, step, steps) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert max(factors) == 1
    peak = factors.index(1)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_is_that_of_torchs_own_method(kind: str) -> None:
    models = [make_model(), make_model()]
    ours, theirs = (build_optimizer(model, OptimizerConfig.model_validate({"kind": kind})) for model in models)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            gradient = torch.randn(parameters[0].shape, generator=generator)
            for parameter in parameters:
                parameter.grad = gradient.clone()
        ours.step()
        for optimizer, _ in theirs._parts.values():
            optimizer.step()
    ours.zero_grad()
    assert all(parameter.grad is None for parameter in models[0].parameters())
    assert_same_bits(weights_of(models[0]), weights_of(models[1]))
