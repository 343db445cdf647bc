"""Devices other than the CPU: no operation mixes tensors of two devices; attention for GPUs computes what attention for CPUs does.

Training steps run on PyTorch's `meta` device, whose tensors have shapes and no values. PyTorch lets some operations mix it with the CPU,
which a GPU refuses; `OneDevice` refuses them, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_fixtures import ENCODER, LABELS, SPECIAL, VOCABULARY, make_model

from cramlm.config.head import HeadConfig
from cramlm.config.phase import OptimizerConfig, PhaseConfig
from cramlm.errors import EnvironmentFault
from cramlm.evaluation.prediction import predict_logits
from cramlm.model.model import Model, ModelSpec, PackedBatch, build_model, resolve_device
from cramlm.model.operations import Rotation, attend, attend_fused
from cramlm.model.tokenizer import Tokens
from cramlm.planning.plan import memory_of
from cramlm.planning.speed import random_pool
from cramlm.training.batching import Batches
from cramlm.training.objective import gradients, in_parts, objective_of
from cramlm.training.optimizers import build_optimizer


class OneDevice(TorchDispatchMode):
    """Raises if an operation, other than a copy, gets tensors of two devices; scalars may be on the CPU, as for CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor) and each.dim()]
        devices = {each.device.type for each in given}
        if len(devices) > 1 and func not in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            raise RuntimeError(f"{func} mixes {sorted(devices)}")
        if func is torch.ops.aten.bincount.default and "meta" in devices:  # has no form without values
            return torch.empty(args[2] if len(args) > 2 else (kwargs or {}).get("minlength", 0), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _nonzero_without_values() -> Iterator[None]:
    """Let `nonzero` return as many indices as there are elements."""
    before, fx_config.meta_nonzero_assume_all_nonzero = fx_config.meta_nonzero_assume_all_nonzero, True
    yield
    fx_config.meta_nonzero_assume_all_nonzero = before


TERMS: dict[str, list[dict[str, Any]]] = {
    "mlm, classify, distil": [
        {"kind": "mlm", "on": "external"},
        {"kind": "mlm", "on": "task"},
        {"kind": "classify", "label_smoothing": 0.1},
        {"kind": "distil", "on": "external"},
        {"kind": "distil", "on": "task"},
    ],
    "causal": [{"kind": "causal", "on": "external"}, {"kind": "causal", "on": "task"}],
    "replaced tokens": [{"kind": "replaced_tokens", "on": "external"}, {"kind": "replaced_tokens", "on": "task"}, {"kind": "classify"}],
    "shuffled tokens": [{"kind": "shuffled_tokens", "on": "external"}, {"kind": "classify"}],
    "span infilling": [{"kind": "span_infilling", "on": "external"}, {"kind": "classify"}],
    "important tokens": [{"kind": "important_tokens"}],
    "labels": [{"kind": "classify"}],
}


def phase_of(terms: list[dict[str, Any]], **changes: Any) -> PhaseConfig:
    external = 2 if any(term.get("on") == "external" for term in terms) else 0
    values = {"name": "joint", "steps": 3, "external": external, "task": 1, "mixing": "blended", "batch_size": 256, "max_length": 32}
    return PhaseConfig.model_validate({"terms": terms, **values, **changes})


def batch_of(phase: PhaseConfig) -> Any:
    soft = np.full((1000, LABELS), 1 / LABELS, dtype=np.float32)
    pools = [replace(random_pool(phase, SPECIAL, origin, None), soft_labels=soft) for origin in ("external", "task")]
    pools[1] = replace(pools[1], labels=pools[1].labels % LABELS)
    return Batches(phase, *pools, seed=0, phase_index=0, special=SPECIAL).batch(0)


def train_on_meta(model: Model, phase: PhaseConfig) -> int:
    """One training step; returns the number of parameters that were updated."""
    batch = batch_of(phase)
    model.to("meta")
    with OneDevice():
        losses = gradients(model, in_parts(batch, 1, "meta"), phase, objective_of(phase).counts(batch), precision="fp32", dropout_seed=1)
        optimizer = build_optimizer(model, phase.optimizer)
        parameters = [parameter for parameter in optimizer.parameters if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        clip_grads_with_norm_(parameters, 1.0, norm)
        optimizer.step()
    assert losses.total.device.type == norm.device.type == "meta"
    assert all(value.device.type == "meta" for value in optimizer.state_tensors().values() if value.dim())
    return len(parameters)


@pytest.mark.parametrize("name", TERMS)
def test_a_training_step_of_every_term_stays_on_the_device(name: str) -> None:
    per_token = name in ("replaced tokens", "shuffled tokens", "important tokens")
    model = make_model(token_classifier=per_token, generator=16 if name == "replaced tokens" else None)
    assert train_on_meta(model, phase_of(TERMS[name], candidates=48 if name == "mlm, classify, distil" else None)) > 10


@pytest.mark.parametrize(("shape", "optimizer"), [("bert", "adamw"), ("roberta", "muon"), ("albert", "muon"), ("modernbert", "muon")])
def test_a_training_step_of_every_shape_and_optimizer_stays_on_the_device(shape: Any, optimizer: Any) -> None:
    encoder = ENCODER.model_copy(update={"shape": shape, "global_every": 2 if shape == "modernbert" else 1})
    spec = ModelSpec(encoder, HeadConfig(pooling="mean" if shape == "modernbert" else "cls"), vocab_size=VOCABULARY, labels=LABELS)
    phase = phase_of(TERMS["mlm, classify, distil"], optimizer=OptimizerConfig(kind=optimizer))
    assert train_on_meta(build_model(spec, seed=0), phase) > 10


@pytest.mark.parametrize("kind", ["classification", "multi-label", "regression"])
def test_the_forward_pass_of_every_kind_of_task_stays_on_the_device(kind: Any) -> None:
    model = make_model(labels=1 if kind == "regression" else LABELS, kind=kind).to("meta")
    with OneDevice(), torch.no_grad():
        batch = PackedBatch.of(batch_of(phase_of(TERMS["labels"])), "meta")
        assert model.task_logits(model.hidden(batch), batch).shape == (len(batch.first), model.labels)


def test_token_embeddings_and_a_logit_adjustment_are_set_on_the_device() -> None:
    model = make_model().to("meta")
    with OneDevice():
        model.set_word_embeddings(np.ones((VOCABULARY, 32), dtype=np.float32))
        model.add_to_logits(np.zeros(LABELS, dtype=np.float32))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_for_gpus_computes_what_attention_for_cpus_does(causal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(2, 12, 3 * 16, generator=generator, requires_grad=True)
    visible = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    visible[:, :, :5, 5:] = visible[:, :, 5:, :5] = False  # two sequences in a row
    if causal:
        visible &= torch.ones(12, 12, dtype=torch.bool).tril()
    bias = torch.zeros(2, 1, 12, 12).masked_fill(~visible, -torch.inf)
    angle = torch.rand(2, 12, 1, 4, generator=generator)
    rotation = Rotation(angle.cos(), angle.sin())
    results = [form(qkv, bias, rotation, 2) for form in (attend, attend_fused)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    gradients_of = [torch.autograd.grad(result.square().sum(), qkv)[0] for result in results]
    torch.testing.assert_close(*gradients_of, rtol=1e-3, atol=1e-4)


def test_a_device_that_pytorch_does_not_have_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:3"):
        with pytest.raises(EnvironmentFault, match=rf"device '{name}': PyTorch has no CUDA device here; use --device cpu"):
            resolve_device(name)


def test_each_rank_of_a_machine_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(EnvironmentFault, match="PyTorch has 2 CUDA devices here; use one of these"):
        resolve_device("cuda:2")
    for ranks, name in (("3", "auto"), ("3", "cuda"), ("2", "cuda:0")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with pytest.raises(EnvironmentFault, match=f"device '{name}': the {ranks} ranks on this machine need a GPU each, PyTorch has 2;"):
            resolve_device(name)
        assert resolve_device("cpu") == torch.device("cpu")


def test_memory_of_a_gpu_that_pytorch_keeps_after_a_measurement_is_available_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 45 * 10**9)
    assert memory_of(torch.device("cuda", 0)) == 75 * 10**9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_on_a_gpu_has_the_loss_of_a_step_on_the_cpu() -> None:
    phase = phase_of(TERMS["mlm, classify, distil"])
    batch, totals = batch_of(phase), []
    for device in ("cpu", "cuda"):
        model = make_model().to(device)
        counts = objective_of(phase).counts(batch)
        losses = gradients(model, in_parts(batch, 1, device), phase, counts, precision="bf16", dropout_seed=1)
        totals.append(float(losses.total))
        tokens = Tokens(np.array([2, 9, 8, 3, 2, 7, 3]), np.array([0, 4, 7]), np.arange(2))
        assert predict_logits(model, tokens, precision="bf16").shape == (2, LABELS)
    assert totals[1] == pytest.approx(totals[0], rel=1e-2)
