from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fixtures import FINGERPRINT, assert_same_bits, make_batches, make_model, make_phase, run_phase, stop_after, weights_of

from cramlm.config.phase import PhaseConfig
from cramlm.errors import DivergedError, EnvironmentFault, Stopped
from cramlm.model.model import Model
from cramlm.records import Event
from cramlm.training.checkpoints import load_newest, save_checkpoint
from cramlm.training.loop import DevEvaluation, LossHistory, TrainingJob, train_phase

THOROUGH = {"dropout": 0.2, "attention_dropout": 0.1, "optimizer": {"kind": "muon"}, "keep": "best"}


def run_with_stops(phase: PhaseConfig, work: Path, stops: list[int], *, precision: str = "fp32") -> tuple[Model, Any]:
    """Start with other weights each time, as a new process would; stop after so many boundaries, then run to the end."""
    for number, boundaries in enumerate(stops):
        model = make_model(seed=7 if number == 0 else 1000 + number)
        with pytest.raises(Stopped):
            run_phase(model, phase, work, stop=stop_after(boundaries), precision=precision)
    model = make_model(seed=7 if not stops else 2000)
    return model, run_phase(model, phase, work, precision=precision)


PHASE = make_phase(steps=12, checkpoint_every=4, **THOROUGH)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after `PHASE` without an interruption."""
    return weights_of(run_with_stops(PHASE, tmp_path_factory.mktemp("straight"), [])[0])


@pytest.mark.parametrize(
    ("changes", "precision", "steps", "stops"),
    [
        ({"mixing": "blended"}, "bf16", 12, [[4, 3], [0, 11]]),
        ({"mixing": "interleaved"}, "fp32", 8, [[3, 2]]),
        ({"optimizer": {"kind": "adamw"}}, "fp32", 8, [[3, 2]]),
        ({"keep": "last"}, "fp32", 8, [[3, 2]]),
        ({"external": 0, "text_weight": 0.0}, "fp32", 8, [[3, 2]]),
    ],
    ids=str,
)
def test_a_phase_that_was_stopped_twice_ends_with_the_same_bits(
    tmp_path: Path, changes: dict[str, Any], precision: str, steps: int, stops: list[list[int]]
) -> None:
    phase = make_phase(**{"steps": steps, "checkpoint_every": 5, **THOROUGH, **changes})
    straight, result = run_with_stops(phase, tmp_path / "straight", [], precision=precision)
    for boundaries in stops:
        resumed, again = run_with_stops(phase, tmp_path / f"stopped-{boundaries}", boundaries, precision=precision)
        assert_same_bits(weights_of(resumed), weights_of(straight))
        for name in ("best_step", "best_score", "tokens", "padded_tokens", "executed_flops"):
            assert getattr(again, name) == getattr(result, name), name


def test_a_process_that_dies_between_checkpoints_resumes_from_the_last_one(tmp_path: Path, straight: dict[str, torch.Tensor]) -> None:
    calls = count()

    def die() -> None:
        if next(calls) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_phase(make_model(), PHASE, tmp_path, stop=die)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert_resumes_exactly(tmp_path, straight)


def assert_resumes_exactly(work: Path, straight: dict[str, torch.Tensor], **job: Any) -> None:
    """The same phase again, from other initial weights, ends with these weights."""
    resumed = make_model(seed=50)
    run_phase(resumed, PHASE, work, **job)
    assert_same_bits(weights_of(resumed), straight)


def test_a_finished_phase_that_is_run_again_trains_nothing_and_gives_the_same_weights(tmp_path: Path) -> None:
    phase = make_phase(steps=4, **THOROUGH)
    first = make_model()
    result = run_phase(first, phase, tmp_path)
    again = make_model(seed=77)
    assert run_phase(again, phase, tmp_path, evaluate=lambda model, step: pytest.fail("trained again")) == result
    assert_same_bits(weights_of(again), weights_of(first))


@pytest.mark.parametrize("exit_code", [75, 130])
def test_the_step_during_which_a_signal_arrives_is_finished_and_saved_before_its_exit_code(tmp_path: Path, exit_code: int) -> None:
    signalled: list[int] = []

    def emit(event: Event) -> None:
        if event.kind == "step" and event.data["step"] == 4:  # in the middle of the work on step 4
            signalled.append(exit_code)

    phase = make_phase(steps=12, checkpoint_every=10)
    with pytest.raises(Stopped, match="after step 4 of 12") as caught:
        run_phase(make_model(), phase, tmp_path, emit=emit, stop=lambda: signalled[0] if signalled else None)
    assert caught.value.exit_code == exit_code
    assert [path.parent.name for path in tmp_path.glob("*/manifest.json")] == ["step-00000004"]


def test_a_damaged_newest_checkpoint_costs_steps_but_not_the_result(tmp_path: Path, straight: dict[str, torch.Tensor]) -> None:
    with pytest.raises(Stopped):
        run_phase(make_model(), PHASE, tmp_path, stop=stop_after(9))
    newest = tmp_path / "step-00000009" / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    events: list[Event] = []
    assert_resumes_exactly(tmp_path, straight, emit=events.append)
    assert "step-00000009" in next(event.message for event in events if event.kind == "warning")
    assert "resuming from step 8" in next(event.message for event in events if event.kind == "note")


def scripted(scores: list[float]) -> tuple[Callable[[Model, int], Mapping[str, float]], list[dict[str, torch.Tensor]]]:
    """An evaluation with these scores, and the weights at each."""
    seen: list[dict[str, torch.Tensor]] = []

    def evaluate(model: Model, step: int) -> Mapping[str, float]:
        seen.append(weights_of(model))
        return {"accuracy": scores[len(seen) - 1]}

    return evaluate, seen


@pytest.mark.parametrize(
    ("keep", "initial", "best", "weights"), [("best", None, (4, 0.7), 1), ("best", 0.8, (0, 0.8), None), ("last", None, (4, 0.7), 4)]
)
def test_the_best_weights_on_dev_are_kept_or_the_last(
    tmp_path: Path, keep: str, initial: float | None, best: tuple[int, float], weights: int | None
) -> None:
    """Of equal scores the earliest; the initial weights compete if they have a score."""
    model = make_model()
    before = weights_of(model)
    evaluate, evaluated = scripted([0.1, 0.7, 0.4, 0.7, 0.2])
    phase = make_phase(steps=10, evaluate_every=2, keep=keep)
    result = run_phase(model, phase, tmp_path, evaluate=evaluate, initial=initial)
    assert (result.best_step, result.best_score) == best
    assert_same_bits(weights_of(model), before if weights is None else evaluated[weights])


def test_dev_is_evaluated_ten_times_by_default_and_always_after_the_last_step(tmp_path: Path) -> None:
    evaluate, seen = scripted([0.0] * 100)
    run_phase(make_model(), make_phase(steps=20), tmp_path / "ten", evaluate=evaluate)
    assert len(seen) == 10
    evaluate, seen = scripted([0.0] * 100)
    run_phase(make_model(), make_phase(steps=7, evaluate_every=3), tmp_path / "odd", evaluate=evaluate)
    assert len(seen) == 3


def test_a_phase_can_be_evaluated_by_a_score_of_the_caller(tmp_path: Path) -> None:
    events: list[Event] = []
    dev = DevEvaluation(lambda model, step: {"bits": -5.25}, "bits")
    phase = make_phase(steps=2, evaluate_every=2)
    train_phase(
        make_model(), TrainingJob(make_batches(phase), tmp_path, fingerprint=FINGERPRINT, precision="fp32", dev=dev, emit=events.append)
    )
    assert [event.message for event in events if event.kind == "evaluation"] == ["step 2: dev bits -5.25, the best so far"]


def test_a_phase_without_labels_is_never_evaluated(tmp_path: Path) -> None:
    phase = make_phase(steps=3, label_weight=0.0)
    result = run_phase(make_model(), phase, tmp_path, evaluate=lambda model, step: pytest.fail("evaluated"))
    assert (result.steps, result.best_step, result.best_score) == (3, None, None)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_anything_is_saved(tmp_path: Path, poison: float) -> None:
    model = make_model()
    with torch.no_grad():
        model.encoder.word_embeddings[6:] = poison
    before = weights_of(model)
    events: list[Event] = []
    with pytest.raises(DivergedError, match=r"phase 'joint', step 0: the loss is nan.*learning_rate") as caught:
        run_phase(model, make_phase(checkpoint_every=1), tmp_path / "work", emit=events.append)
    assert caught.value.exit_code == 6
    assert not (tmp_path / "work").exists()
    torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0, equal_nan=True)
    warning = next(event for event in events if event.kind == "warning")
    assert warning.data["step"] == 0
    assert warning.data["sequence_numbers"].keys() == {"external", "task"}


def test_divergence_later_on_keeps_the_good_checkpoints_and_adds_none(tmp_path: Path) -> None:
    phase = make_phase(steps=8, checkpoint_every=1)
    model = make_model()
    calls = count()

    def poison_at_five() -> None:
        if next(calls) == 5:
            with torch.no_grad():
                model.classifier.dense.weight.fill_(math.nan)

    with pytest.raises(DivergedError, match="step 5"):
        run_phase(model, phase, tmp_path, stop=poison_at_five)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    healthy = make_model(seed=3)
    run_phase(healthy, phase, tmp_path)
    assert all(torch.isfinite(weight).all() for weight in weights_of(healthy).values())


def test_a_gradient_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    model = make_model()
    model.classifier.classifier.weight.register_hook(lambda gradient: gradient * math.inf)
    before = weights_of(model)
    with pytest.raises(DivergedError, match=r"gradient norm is (nan|inf)"):
        run_phase(model, make_phase(), tmp_path)
    assert_same_bits(weights_of(model), before)


def test_weights_that_overflow_in_the_last_update_are_not_saved(tmp_path: Path) -> None:
    phase = make_phase(steps=1, optimizer={"kind": "adamw", "learning_rate": 1e39, "weight_decay": 0.0})
    with pytest.raises(DivergedError, match="is no longer finite"):
        run_phase(make_model(), phase, tmp_path, evaluate=None)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_stops_the_phase_with_one_line_and_it_can_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[str, torch.Tensor]
) -> None:
    writes = count()
    original = Path.write_bytes

    def refuse(self: Path, data: bytes) -> int:
        if self.suffix == ".safetensors" and next(writes) >= 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return original(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refuse)
        with pytest.raises(EnvironmentFault, match="No space left"):
            run_phase(make_model(), PHASE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert_resumes_exactly(tmp_path, straight)


def test_training_learns_the_task_and_the_words(tmp_path: Path) -> None:
    events: list[Event] = []
    phase = make_phase(
        steps=120, evaluate_every=60, text_weight=1.0, optimizer={"kind": "muon", "learning_rate": 3e-3, "muon_learning_rate": 1e-2}
    )
    result = run_phase(make_model(), phase, tmp_path, emit=events.append)
    losses = [event.data["mlm_task"] for event in events if event.kind == "step"]
    assert result.best_score > 0.7
    assert losses[-1] < losses[0] - 0.3


def test_tokens_and_operations_are_counted_and_events_are_plain_json_with_losses_rates_and_speed(tmp_path: Path) -> None:
    events: list[Event] = []
    phase, model, deterministic = make_phase(steps=12), make_model(), []

    def evaluate(model: Model, step: int) -> Mapping[str, float]:
        deterministic.append(torch.are_deterministic_algorithms_enabled())
        return {"accuracy": 0.0}

    result = run_phase(model, phase, tmp_path, emit=events.append, evaluate=evaluate)
    assert set(deterministic) == {True}
    assert not torch.are_deterministic_algorithms_enabled()  # only during training
    batches = [make_batches(phase).batch(step) for step in range(12)]
    assert result.tokens == sum(batch.tokens for batch in batches)
    assert result.padded_tokens == sum(batch.token_ids.size for batch in batches)
    assert result.paper_flops == 6 * result.padded_tokens * sum(parameter.numel() for parameter in model.parameters())
    assert [events[0].kind, events[-1].kind] == ["start", "done"]
    steps = [event for event in events if event.kind == "step"]
    assert [event.data["step"] for event in steps] == list(range(1, 13))
    assert steps[0].data.keys() >= {"loss", "mlm_external", "mlm_task", "classify_task", "learning_rate", "tokens", "tokens_per_second"}
    assert all(json.dumps(dict(event.data), allow_nan=False) for event in events)
    progress = [event for event in events if event.kind == "progress"]
    assert (progress[-1].done, progress[-1].total) == (12, 12)
    assert {event.stage for event in events} == {"phase-1-joint"}


def test_a_loss_spike_is_reported_and_a_steady_decrease_is_not() -> None:
    history = LossHistory()
    noise = [0.1, -0.05, 0.02, -0.1, 0.03]
    assert all(history.add(5.0 - 0.01 * step + noise[step % 5]) is None for step in range(200))
    assert history.add(9.0) is not None


def test_a_phase_that_goes_on_on_another_device_says_so(tmp_path: Path) -> None:
    seen: list[Event] = []
    newest = partial(load_newest, tmp_path, fingerprint=FINGERPRINT, emit=seen.append, stage="joint")
    with pytest.raises(Stopped):
        run_phase(make_model(), make_phase(steps=6), tmp_path, stop=stop_after(2))
    made = newest()
    assert made.progress.device == "cpu"
    made.progress.device = "cuda"
    save_checkpoint(tmp_path, made.progress, weights=made.weights, moments=made.moments, best=made.best, fingerprint=FINGERPRINT)
    run_phase(make_model(), make_phase(steps=6), tmp_path, emit=seen.append)
    assert "trained on cuda and goes on on cpu: the result will have other bits" in "".join(event.message for event in seen)
    assert newest().progress.device == "cpu"


def test_a_gpu_without_enough_memory_gets_one_line_with_the_remedies(tmp_path: Path) -> None:
    model = make_model()

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB")

    model.encoder.register_forward_pre_hook(refuse)
    message = r"phase 'joint': the GPU has no memory left for a batch of 256 tokens \(CUDA out of memory\); lower batch_size of the phase"
    with pytest.raises(EnvironmentFault, match=message):
        run_phase(model, make_phase(steps=3), tmp_path)
