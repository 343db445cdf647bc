"""Optimizers and learning rate schedules.

AdamW for everything, or Muon for the hidden matrices and AdamW for the rest, both torch.optim's. Muon scales its updates to a root mean
square of 0.2 x lr whatever the shape (Liu et al. 2025, Muon is Scalable for LLM Training), so one learning rate serves all matrices.
Its Newton-Schulz iterations take 42 ms a step for four layers of 256, a tenth of a step of 4,096 tokens. PyTorch computes them in bf16,
which takes 7.6 s on a processor without bf16 instructions; there `Float32Muon` takes 0.2 s. AdamW runs fused: on a CPU an 8192 x 256
embedding takes 0.8 ms instead of 4.5.

A parameter without gradient in a step (of a head that had no work) is unchanged, without weight decay.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from cramlm.config.phase import OptimizerConfig, ScheduleConfig
from cramlm.model.model import Model, has_bf16

MUON_MOMENTUM = 0.95
_EXCLUDED: Final = "__dynamo_disable"
"""Attribute of a function of torch: its form that torch.compile does not compile."""


def learning_rate_factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Return the factor of the peak learning rate at `step` (0-based) of `steps`, in (0, 1].

    Rises linearly over the warm-up, from above 0. linear: then falls towards 0 at `steps`. wsd: then is constant, and falls linearly to
    0 over the last `decay_fraction` of the steps (fewer if the warm-up extends into them).
    """
    assert 0 <= step < steps, f"step {step} of {steps}"
    warmup_steps = round(schedule.warmup_fraction * steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    match schedule.kind:
        case "linear":
            decay_start = warmup_steps
        case "wsd":
            decay_start = max(warmup_steps, steps - max(1, round(schedule.decay_fraction * steps)))
    return 1.0 if step < decay_start else (steps - step) / (steps - decay_start)


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with Newton-Schulz iterations in float32 instead of bf16; only with `adjust_lr_fn="match_rms_adamw"`, Nesterov's
    momentum and matrices on one device. The state is the same.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                average = state["momentum_buffer"]
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalize(
                    parameter.grad.lerp(average, group["momentum"]), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


class StackedMuon(torch.optim.Optimizer):
    """Muon for GPUs: the Newton-Schulz iterations of all matrices of a shape are batched products, in bf16 or float32.

    As torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` and Nesterov's momentum, one matrix at a time, but with a tenth of the
    kernels; its state is the same. The learning rate is a tensor, so that a CUDA graph reads its present value.
    """

    def __init__(self, params: list[Parameter], *, lr: Tensor, weight_decay: float, momentum: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            gradients, averages = [each.grad for each in parameters], [self.state[each]["momentum_buffer"] for each in parameters]
            torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, averages, group["momentum"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for shape in dict.fromkeys(each.shape for each in parameters):
                chosen = [number for number, each in enumerate(parameters) if each.shape == shape]
                stacked = torch.stack([updates[number] for number in chosen]).to(self._dtype)
                scale = group["lr"] * (-0.2 * math.sqrt(max(shape)))
                changes = orthogonalize_stack(stacked, *_NEWTON_SCHULZ).float() * scale
                torch._foreach_add_([parameters[number] for number in chosen], list(changes.unbind()))


_NEWTON_SCHULZ: Final = ((3.4445, -4.775, 2.0315), 5, 1e-7)
"""Coefficients, iterations and eps of torch.optim.Muon."""


def orthogonalize_stack(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """`orthogonalize` of each of the matrices (K, M, N), in their precision."""
    wide = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    linear, cubic, quintic = coefficients
    result = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = result @ result.mT
        result = torch.baddbmm(result, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), result, beta=linear)
    same_shape: Tensor = result if wide is matrices else result.mT
    return same_shape


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Bring the singular values of a matrix (M, N) near 1 by Newton-Schulz iterations of fifth order, in its own precision (Jordan et al.
    2024, Muon: An optimizer for hidden layers in neural networks).

    An iteration is X <- P X with P = a I + b G + c G^2 and G = X X^T of the smaller side. P commutes with G, so the next G is P G P,
    without X: if one side is at least twice the other, half of the iterations run on G alone before their product is multiplied with X.
    That takes 48 ms instead of 64 for 1152 x 384 in float32 and is as exact; all of them on one G would lose small singular values (5e-4).
    """
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    result = wide / wide.norm().clamp(min=eps)
    half = steps // 2
    for iterations in (steps - half, half) if half and wide.shape[1] >= 2 * wide.shape[0] else (1,) * steps:
        gram = result @ result.T
        product = factor = _polynomial(gram, coefficients)
        for _ in range(iterations - 1):
            gram = factor @ gram @ factor
            factor = _polynomial(gram, coefficients)
            product = factor @ product
        result = product @ result
    same_shape: Tensor = result if wide is matrix else result.T
    return same_shape


def _polynomial(gram: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """a I + b G + c G^2."""
    linear, cubic, quintic = coefficients
    result = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
    result.diagonal().add_(linear)
    return result


class JointOptimizer:
    """AdamW, or Muon and AdamW, with one `step`; its state is a flat dictionary of named tensors."""

    def __init__(self, parts: Mapping[str, tuple[torch.optim.Optimizer, Mapping[str, Parameter]]]) -> None:
        self._parts, self._factor = dict(parts), 1.0
        self._peaks = {name: [float(group["lr"]) for group in optimizer.param_groups] for name, (optimizer, _) in self._parts.items()}

    def set_factor(self, factor: float) -> None:
        """Multiply every peak learning rate."""
        self._factor = factor
        for name, (optimizer, _) in self._parts.items():
            for group, peak in zip(optimizer.param_groups, self._peaks[name], strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(peak * factor)
                else:
                    group["lr"] = peak * factor

    @property
    def learning_rates(self) -> dict[str, float]:
        """The rates of the next step, by part."""
        return {name: peaks[0] * self._factor for name, peaks in self._peaks.items()}

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters that are updated."""
        return [parameter for _, named in self._parts.values() for parameter in named.values()]

    @torch.no_grad()
    def step(self) -> None:
        for optimizer, _ in self._parts.values():
            inspect.unwrap(type(optimizer).step)(optimizer)  # its wrapper imports torch.compile's compiler

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and counters as 'adamw/<parameter>/exp_avg'; the tensors themselves, not copies."""
        return {
            f"{part}/{name}/{field}": value
            for part, (optimizer, named) in self._parts.items()
            for name, parameter in named.items()
            for field, value in optimizer.state.get(parameter, {}).items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore moments and counters; parameters without tensors start without.

        Raises:
            KeyError: if a tensor belongs to no parameter of this optimizer.
        """
        states: dict[str, dict[str, dict[str, Tensor]]] = {}
        for key, value in tensors.items():
            part, name, field = key.split("/")
            states.setdefault(part, {}).setdefault(name, {})[field] = value
        for part, by_name in states.items():
            optimizer, named = self._parts[part]
            for name, fields in by_name.items():
                parameter = named[name]
                optimizer.state[parameter] = {field: value.to(parameter.device, copy=True) for field, value in fields.items()}


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Inside the block, construct optimizers without importing torch.compile's compiler (1.3 CPU seconds), which nothing here uses.

    `Optimizer.add_param_group` imports it to exclude itself from compilation, unless its function has the excluded form already. A version
    of PyTorch without that attribute imports the compiler as before.
    """
    function: Any = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    if hasattr(function, _EXCLUDED):
        yield
        return
    setattr(function, _EXCLUDED, function)
    try:
        yield
    finally:
        delattr(function, _EXCLUDED)


def build_optimizer(model: Model, config: OptimizerConfig) -> JointOptimizer:
    """Return the optimizer of every trained parameter of the model; weight decay on matrices and embeddings, none on norms and biases."""
    groups = model.parameter_groups()
    matrix, decayed, undecayed = (_trained(named) for named in (groups.matrix, groups.decayed, groups.undecayed))
    parts: dict[str, tuple[torch.optim.Optimizer, Mapping[str, Parameter]]] = {}
    device, on_gpu = model.device, model.device.type == "cuda"

    def rate(value: float) -> float | Tensor:
        return torch.tensor(value, device=device) if on_gpu else value

    with _without_compiler():
        match config.kind:
            case "adamw":
                decayed = {**matrix, **decayed}
            case "muon" if matrix:
                given: dict[str, Any] = {
                    "lr": rate(config.muon_learning_rate),
                    "weight_decay": config.weight_decay,
                    "momentum": MUON_MOMENTUM,
                }
                muon: torch.optim.Optimizer
                if on_gpu:
                    muon = StackedMuon(list(matrix.values()), dtype=torch.bfloat16 if has_bf16(device) else torch.float32, **given)
                else:
                    muon = (torch.optim.Muon if has_bf16(device) else Float32Muon)(
                        list(matrix.values()), adjust_lr_fn="match_rms_adamw", **given
                    )
                parts["muon"] = (muon, matrix)
        adamw = torch.optim.AdamW(
            [
                {"params": list(decayed.values()), "weight_decay": config.weight_decay},
                {"params": list(undecayed.values()), "weight_decay": 0.0},
            ],
            lr=rate(config.learning_rate),
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=device.type != "meta",  # tensors without data, in tests
            capturable=on_gpu,
        )
    parts["adamw"] = (adamw, {**decayed, **undecayed})
    return JointOptimizer(parts)


def _trained(named: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}
