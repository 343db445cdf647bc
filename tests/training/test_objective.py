from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from training_fixtures import SPECIAL, make_batches, make_model, make_phase, make_pool

from cramlm.config.phase import PhaseConfig
from cramlm.model.model import Model, PackedBatch, Precision
from cramlm.model.operations import weighted_cross_entropy
from cramlm.records import Scale
from cramlm.training.batching import Batches
from cramlm.training.objective import Losses, gradients, in_parts, objective_of
from cramlm.training.sequences import share_of_batch


def reference_terms(model: Model, batch: PackedBatch) -> dict[str, Tensor]:
    """The three means, position by position with torch's cross_entropy."""
    hidden = model.hidden(batch)
    mlm = functional.cross_entropy(model.mlm_logits(hidden, batch.masked), batch.mlm_labels, reduction="none")
    external = batch.external[batch.sequence.flatten()[batch.masked]]
    labelled = batch.task_labels >= 0
    task = functional.cross_entropy(model.task_logits(hidden, batch)[labelled], batch.task_labels[labelled])
    return {"mlm_external": mlm[external].mean(), "mlm_task": mlm[~external].mean(), "classify_task": task}


def first_batch(phase: PhaseConfig, step: int = 0) -> PackedBatch:
    return PackedBatch.of(make_batches(phase).batch(step))


def computed(phase: PhaseConfig, step: int = 0) -> tuple[Model, PackedBatch, Losses]:
    model, batch = make_model(), first_batch(phase, step)
    return model, batch, objective_of(phase).losses(model, batch)


@pytest.mark.parametrize("shape", ["modernbert", "bert"])
@pytest.mark.parametrize(("loss_scale", "divisor"), [("sum", 1.0), ("mean", 1 + 20 + 0.5)])
def test_a_blended_batch_weighs_the_mean_of_each_term(shape: str, loss_scale: str, divisor: float) -> None:
    phase = make_phase(text_weight=20.0, label_weight=0.5, loss_scale=loss_scale)
    model, batch = make_model(shape=shape), first_batch(phase)
    result, expected = objective_of(phase).losses(model, batch), reference_terms(model, batch)
    for name, value in expected.items():
        assert float(result.means[name]) == pytest.approx(float(value.detach()), rel=1e-5)
    total = (expected["mlm_external"] + 20 * expected["mlm_task"] + 0.5 * expected["classify_task"]) / divisor
    assert float(result.total.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    ours = torch.autograd.grad(result.total, list(model.parameters()), allow_unused=True)
    theirs = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    for left, right in zip(ours, theirs, strict=True):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_with_the_mean_scale_an_interleaved_external_batch_is_plain_mlm_and_a_task_batch_is_divided_by_rho2_plus_one() -> None:
    phase = make_phase(mixing="interleaved", external=1, task=1, text_weight=20.0, loss_scale="mean")
    _, _, external = computed(phase, 0)
    assert set(external.means) == {"mlm_external"}
    assert float(external.total.detach()) == pytest.approx(float(external.means["mlm_external"]), rel=1e-6)
    _, _, task = computed(phase, 1)
    assert set(task.means) == {"mlm_task", "classify_task"}
    expected = (20 * float(task.means["mlm_task"]) + float(task.means["classify_task"])) / 21
    assert float(task.total.detach()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "terms", "untouched", "trained"),
    [
        ({"external": 0, "text_weight": 0.0}, {"classify_task"}, "mlm_head", "classifier"),
        ({"label_weight": 0.0}, {"mlm_external", "mlm_task"}, "classifier", "mlm_head"),
    ],
    ids=["labels only", "text only"],
)
def test_a_head_without_a_term_gets_no_gradient(changes: dict[str, Any], terms: set[str], untouched: str, trained: str) -> None:
    model, _, result = computed(make_phase(**changes))
    result.total.backward()
    assert set(result.means) == terms
    assert all(parameter.grad is None for parameter in getattr(model, untouched).parameters())
    assert all(parameter.grad is not None for parameter in getattr(model, trained).parameters())


def test_sequences_without_a_label_count_in_no_mean() -> None:
    phase = make_phase(external=0, text_weight=0.0)
    model, batch = make_model(), first_batch(phase)
    labels = batch.task_labels.clone()
    labels[::2] = -1
    partly = replace(batch, task_labels=labels)
    each = functional.cross_entropy(model.task_logits(model.hidden(batch), batch), batch.task_labels, reduction="none")
    result = objective_of(phase).losses(model, partly)
    assert float(result.total.detach()) == pytest.approx(float(each[1::2].mean().detach()), rel=1e-5)
    assert objective_of(phase).counts(partly)["classify_task"] == len(labels[1::2])


def test_a_batch_with_nothing_to_learn_has_loss_zero_and_gradient_zero() -> None:
    phase = make_phase(external=0, text_weight=0.0)
    model, batch = make_model(), first_batch(phase)
    result = objective_of(phase).losses(model, replace(batch, task_labels=torch.full_like(batch.task_labels, -1)))
    result.total.backward()
    assert float(result.total.detach()) == 0.0
    assert result.as_numbers() == {"loss": 0.0}
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_label_smoothing_is_torchs() -> None:
    phase = make_phase(external=0, text_weight=0.0, label_smoothing=0.2)
    model, batch, result = computed(phase)
    expected = functional.cross_entropy(model.task_logits(model.hidden(batch), batch), batch.task_labels, label_smoothing=0.2)
    assert float(result.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_vocabulary_loss_and_its_gradient_are_torchs(kind: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(45, 100, generator=generator) * 8).to(kind).requires_grad_()
    targets = torch.randint(0, 100, (45,), generator=generator)
    weights = torch.rand(45, generator=generator)
    total, each = weighted_cross_entropy(logits, targets, weights)
    (gradient,) = torch.autograd.grad(total * 3, logits)
    exact = logits.detach().to(weights.dtype).requires_grad_()
    expected = functional.cross_entropy(exact, targets, reduction="none")
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum() * 3, exact)
    torch.testing.assert_close(each, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.detach(), (expected * weights).sum().detach(), rtol=1e-5, atol=0)
    assert gradient.dtype == kind
    torch.testing.assert_close(gradient.to(weights.dtype), expected_gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("trained", [True, False])
def test_vocabulary_loss_is_finite_if_and_only_if_the_logits_are(kind: torch.dtype, bad: float, trained: bool) -> None:
    underflowing = torch.tensor([[0.0, 500.0, -300.0]], requires_grad=trained)  # exact also in bf16
    _, each = weighted_cross_entropy(underflowing.to(kind), torch.tensor([2]), torch.ones(1))
    assert each.tolist() == [800.0]
    logits = torch.zeros(2, 40, dtype=kind)
    logits[1, 7] = bad
    _, each = weighted_cross_entropy(logits.requires_grad_(trained), torch.tensor([3, 3]), torch.ones(2))
    assert math.isfinite(each[0])
    assert not math.isfinite(each[1])


@pytest.mark.parametrize(("loss_scale", "divisor"), [("sum", 1.0), ("mean", 1 + 0.25 + 0.5 + 2.0)])
def test_soft_labels_of_external_text_are_a_cross_entropy_of_their_own(loss_scale: str, divisor: float) -> None:
    phase = make_phase(text_weight=0.25, label_weight=0.5, teacher_weight=2.0, loss_scale=loss_scale)
    model, batch = make_model(), first_batch(phase)
    soft = torch.full((len(batch.first), model.labels), torch.nan)
    soft[batch.external] = torch.softmax(torch.arange(float(model.labels)), 0)
    labelled_batch = replace(batch, soft_labels=soft)
    result, expected = objective_of(phase).losses(model, labelled_batch), reference_terms(model, batch)
    logits = model.task_logits(model.hidden(batch), batch)[batch.external]
    expected["distil_external"] = functional.cross_entropy(logits, soft[batch.external])
    assert float(result.means["distil_external"]) == pytest.approx(float(expected["distil_external"].detach()), rel=1e-5)
    weights = {"mlm_external": 1.0, "mlm_task": 0.25, "classify_task": 0.5, "distil_external": 2.0}
    total = sum(weights[name] * float(value.detach()) for name, value in expected.items()) / divisor
    assert float(result.total.detach()) == pytest.approx(total, rel=1e-5)
    assert objective_of(phase).losses(model, batch).means.keys() == {"mlm_external", "mlm_task", "classify_task"}


@pytest.mark.parametrize("kind", ["multi-label", "regression"])
def test_the_loss_of_several_labels_or_of_numbers_is_torchs_and_the_sum_of_shares_is_that_of_the_whole(kind: Any) -> None:
    phase = make_phase(label_weight=0.5)
    outputs = 3 if kind == "multi-label" else 1
    external, task = make_pool(90, labelled=False, seed=1), make_pool(40, labelled=True, seed=2)
    values = np.random.default_rng(3).normal(size=(len(task), outputs)).astype(np.float32)
    targets = (values > 0).astype(np.float32) if kind == "multi-label" else values
    pools = external, replace(task, labels=np.zeros_like(task.labels), targets=targets)
    batch = Batches(phase, *pools, seed=7, phase_index=0, special=SPECIAL).batch(0)
    model = make_model(labels=outputs, kind=kind)
    packed = PackedBatch.of(batch)
    labelled = packed.task_labels >= 0
    assert labelled.tolist() == (~packed.external).tolist()
    logits = model.task_logits(model.hidden(packed), packed)[labelled]
    reference = {"multi-label": torch.nn.BCEWithLogitsLoss(), "regression": torch.nn.MSELoss()}[kind]
    expected = float(reference(logits, packed.targets[labelled]).detach())
    result = objective_of(phase).losses(model, packed)
    assert float(result.means["classify_task"]) == pytest.approx(expected, rel=1e-5)
    counts = objective_of(phase).counts(batch)
    shares = [objective_of(phase).losses(model, PackedBatch.of(share_of_batch(batch, rank, 3)), counts).total for rank in range(3)]
    assert float(torch.stack(shares).sum().detach()) == pytest.approx(float(result.total.detach()), rel=1e-5)


@pytest.mark.parametrize("kind", ["multi-label", "regression"])
def test_soft_labels_of_several_labels_or_of_numbers_have_the_loss_of_gold_ones_where_the_teacher_predicts_them(kind: Any) -> None:
    phase = make_phase(label_weight=0.0, teacher_weight=1.0)
    outputs = 3 if kind == "multi-label" else 1
    soft = np.random.default_rng(3).random((90, outputs)).astype(np.float32)
    soft[::2] = np.nan
    pools = replace(make_pool(90, labelled=False, seed=1), soft_labels=soft), make_pool(40, labelled=True, seed=2)
    batch = Batches(phase, *pools, seed=7, phase_index=0, special=SPECIAL).batch(0)
    if kind == "multi-label":
        batch.soft_labels[np.flatnonzero(np.isfinite(batch.soft_labels[:, 0]))[0], 1] = np.nan  # one label of a text
    model, packed = make_model(labels=outputs, kind=kind), PackedBatch.of(batch)
    predicted = packed.soft_labels.isfinite()
    assert 0 < int(predicted.any(1).sum()) < int(packed.external.sum())
    logits = model.task_logits(model.hidden(packed), packed)[predicted]
    loss = {"multi-label": functional.binary_cross_entropy_with_logits, "regression": functional.mse_loss}[kind]
    summed = loss(logits, packed.soft_labels[predicted], reduction="sum") / outputs
    result = objective_of(phase).losses(model, packed)
    assert float(result.means["distil_external"]) == pytest.approx(float(summed.detach()) / int(predicted.any(1).sum()), rel=1e-5)
    result.total.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)
    counts = objective_of(phase).counts(batch)
    shares = [objective_of(phase).losses(model, PackedBatch.of(share_of_batch(batch, rank, 3)), counts).total for rank in range(3)]
    assert float(torch.stack(shares).sum().detach()) == pytest.approx(float(result.total.detach()), rel=1e-5)


def test_a_number_keeps_its_digits_in_bf16_and_takes_its_unit_in_the_last_layer() -> None:
    model = make_model(labels=1, kind="regression")
    batch = first_batch(make_phase())
    with torch.no_grad():
        before = model.task_logits(model.hidden(batch), batch)
        model.rescale_output(Scale(2000.0, 10.0))
        torch.testing.assert_close(model.task_logits(model.hidden(batch), batch), 2000 + 10 * before)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = model.task_logits(model.hidden(batch), batch)
    assert rough.dtype == torch.float32
    assert float((rough - (2000 + 10 * before)).abs().max()) < 0.5  # the neighbours in bf16 are 2000 and 2008


def gradients_in_parts(count: int, phase: PhaseConfig, *, precision: Precision = "fp32", seed: int = 3) -> tuple[Losses, dict[str, Tensor]]:
    """Losses and gradients of one batch in so many parts."""
    model, batch = make_model(), make_batches(phase).batch(0)
    losses = gradients(model, in_parts(batch, count), phase, objective_of(phase).counts(batch), precision=precision, dropout_seed=seed)
    return losses, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_parts_have_the_losses_and_the_gradient_of_the_whole_batch_in_bf16() -> None:
    whole, expected = gradients_in_parts(1, make_phase(), precision="bf16")
    parts, summed = gradients_in_parts(3, make_phase(), precision="bf16")
    assert parts.as_numbers() == pytest.approx(whole.as_numbers(), rel=2e-2)
    batch = make_batches(make_phase()).batch(0)
    assert len(in_parts(batch, 1000)) == len(batch.token_ids)  # no more parts than rows
    assert summed.keys() == expected.keys()
    for name, gradient in summed.items():
        torch.testing.assert_close(gradient, expected[name], rtol=2e-2, atol=2e-2 * float(expected[name].abs().max()))


@pytest.mark.parametrize("rates", [{"dropout": 0.3}, {"attention_dropout": 0.3}])
def test_the_same_number_of_parts_gives_the_same_bits_with_dropout_too(rates: dict[str, float]) -> None:
    phase = make_phase(**rates)
    once, first = gradients_in_parts(2, phase, precision="bf16")
    again, second = gradients_in_parts(2, phase, precision="bf16")
    assert once.as_numbers() == again.as_numbers()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert gradients_in_parts(2, phase, precision="bf16", seed=4)[0].as_numbers() != once.as_numbers()


@pytest.mark.parametrize("rates", [{"dropout": 0.3}, {"attention_dropout": 0.3}])
def test_parts_that_hold_the_same_rows_have_different_dropout_masks(rates: dict[str, float]) -> None:
    """The loss of two equal parts is not twice that of one part."""
    phase = make_phase(**rates)
    model, batch = make_model(), make_batches(phase).batch(0)
    (part,) = in_parts(batch, 1)
    counts = objective_of(phase).counts(batch)
    losses = [float(gradients(model, parts, phase, counts, precision="fp32", dropout_seed=3).total) for parts in ([part], [part, part])]
    assert losses[1] != pytest.approx(2 * losses[0], rel=1e-6)
