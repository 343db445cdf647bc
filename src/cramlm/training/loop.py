"""The training loop. Every method (TLM, labels only, DAPT, TAPT, fine-tuning) is a list of phases, and each phase runs through here.

A step: batch(step) -> losses -> backward -> stop if not finite -> clip -> optimizer update. At the boundaries of steps, as a function of
the step alone: an evaluation on dev, a checkpoint, a stop by signal. No state of a random generator or of a clock outlives a step, so
that a phase that was stopped anywhere, any number of times, ends with the same bits as one that was not (same machine, same number of
threads).

Several ranks run the same loop, each on its rows of the step's batch, and make the same calls of `ranks` in the same order; what only
rank 0 may do runs inside `ranks.on_leader`.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cramlm.config.phase import PhaseConfig
from cramlm.errors import DivergedError, EnvironmentFault, Stopped, counted
from cramlm.evaluation.kinds import METRIC_NAMES, format_metric
from cramlm.io.machine import trim_memory
from cramlm.model.model import Model, Precision, as_current
from cramlm.records import Batch, Emit, Event, silent
from cramlm.training.batching import Batches, torch_seed
from cramlm.training.capture import CapturedGradients, CapturedUpdate, compiled_layers, compiled_layers_unused
from cramlm.training.checkpoints import Checkpoint, Progress, checkpoint_path, load_newest, restore_weights, save_checkpoint
from cramlm.training.distributed import sum_losses
from cramlm.training.objective import count_parameters, executed_flops, gradients, in_parts, objective_of, paper_flops
from cramlm.training.optimizers import build_optimizer, learning_rate_factor
from cramlm.training.prefetch import batches_of
from cramlm.training.ranks import ALONE, Ranks, Stop, never
from cramlm.training.sequences import share_of_batch
from cramlm.training.terms.base import Counts

_TRIMMED_EVERY: Final = 60.0
"""Seconds. The heap grows by 0.3 to 0.6 GB an hour; to trim it takes half a second, with what the next step faults in again."""
_TIMES: Final = 10  # dev evaluations and checkpoints in a phase, unless it sets them
_REPORTS: Final = 100  # "step" events in a phase
_PROGRESS_SECONDS: Final = 0.5  # least time between "progress" events
_COMPILED_FROM: Final = 1e16  # operations of a phase that take longer than compiling saves
_SPIKE_SIGMAS: Final = 6.0
_SPIKE_HISTORY: Final = 50  # steps of one kind before spikes are reported
_SPIKE_DECAY: Final = 0.98

Evaluate: TypeAlias = Callable[[Model, int], Mapping[str, float]]
"""Model and steps done -> scores on dev, by name."""


@dataclass(frozen=True, slots=True)
class DevEvaluation:
    """The evaluation of a phase on dev. The metric called `metric` is the one that `keep = "best"` maximises.

    initial: the score of the weights that the phase starts from, if they have learned the task already; these then compete, since with few
    labels training can only lower it. None: they do not compete.
    """

    evaluate: Evaluate
    metric: str
    initial: float | None = None


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One phase to train.

    batches: hold the phase, the seed and the index of the phase.
    work: folder of the checkpoints; the caller holds the lock of the run.
    fingerprint: everything that the bits depend on; a checkpoint with another fingerprint is an error.
    dev: None = no evaluation. A phase that learns no labels is never evaluated.
    stop: called at every step boundary; returns the exit code of a signal that was received, else None.
    compile_layers: as in the config.
    ranks: the processes that train together. Each passes its own job; the weights, `work` and `dev` of rank 0 are used.
    """

    batches: Batches
    work: Path
    fingerprint: Mapping[str, Any]
    precision: Precision
    dev: DevEvaluation | None = None
    emit: Emit = silent
    stop: Stop = never
    ranks: Ranks = ALONE
    compile_layers: bool | None = None

    @property
    def phase(self) -> PhaseConfig:
        return self.batches.phase

    @property
    def stage(self) -> str:
        """The name of the phase in events."""
        return f"phase-{self.batches.phase_index + 1}-{self.phase.name}"


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """The result of a phase; sums are over all its starts.

    tokens: real tokens. padded_tokens: with padding. seconds: training and dev evaluations. best_step: steps done at the best dev score
    (None without evaluation). paper_flops: 6 x padded tokens x parameters. executed_flops: of the matrix products that ran.
    """

    name: str
    steps: int
    tokens: int
    padded_tokens: int
    seconds: float
    best_step: int | None
    best_score: float | None
    paper_flops: float
    executed_flops: float


def train_phase(model: Model, job: TrainingJob) -> PhaseResult:
    """Train `model` in place for the phase's steps, from the newest undamaged checkpoint in `job.work` if there is one.

    Afterwards the model holds the best weights on dev (of equal scores the earliest) if the phase has `keep = "best"` and was evaluated,
    else the last. On several ranks all get the same model and result. The caller resets the task head beforehand where the phase says so.

    Raises:
        DivergedError: if loss, gradient or weights are not finite; nothing is saved from then on.
        Stopped: with the exit code of the signal, after a checkpoint was saved.
        ArtifactError: for a checkpoint of other settings. EnvironmentFault: if the disk fails. RankLost: if a rank is gone.
    """
    run = _PhaseRun(model, job)
    run.resume()
    trim_memory()  # what the stages before training have freed
    with as_current(model.device), deterministic(model.device), compiled_layers(model, run.compiles):
        run.train()
    return run.finish()


class _PhaseRun:
    """The state of one phase while it runs."""

    def __init__(self, model: Model, job: TrainingJob) -> None:
        assert job.phase.steps is not None, "the caller decides the number of steps"
        self.model, self.job, self.phase, self.steps = model, job, job.phase, job.phase.steps
        model.set_trainable(job.phase.trains)
        self.updater = Updater(model, job.phase, precision=job.precision, ranks=job.ranks)
        self.monitor = Monitor(job.stage, self.steps, emit=job.emit)
        self.progress = Progress(device=model.device.type)
        self.best: dict[str, Tensor] = {}
        self.saved_step: int | None = None
        self.trimmed = time.perf_counter()
        self.pending: Callable[[], None] | None = None  # reads and records the numbers of the last step

    @functools.cached_property
    def compiles(self) -> bool:
        """Return True if layers are compiled (`RunConfig.compile_layers`)."""
        phase, wanted = self.phase, self.job.compile_layers
        if self.model.device.type != "cuda" or phase.dropout or phase.attention_dropout or wanted is False:
            return False
        return wanted or self.steps * executed_flops(self.model, self.job.batches.batch(0), phase) >= _COMPILED_FROM

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def resume(self) -> None:
        """Restore the newest checkpoint, if there is one, on all ranks."""
        job, ranks = self.job, self.job.ranks
        checkpoint: Checkpoint | None = None

        def load() -> dict[str, Any] | None:
            nonlocal checkpoint
            checkpoint = load_newest(job.work, fingerprint=job.fingerprint, emit=job.emit, stage=job.stage)
            return None if checkpoint is None else asdict(checkpoint.progress)

        progress = ranks.on_leader(load)
        origin = job.stage if checkpoint is None else str(checkpoint.path)
        weights = self.weights if checkpoint is None else checkpoint.weights
        restore_weights(self.weights, ranks.broadcast(weights), origin=origin)
        if progress is not None:
            self.updater.optimizer.load_state_tensors(ranks.broadcast(checkpoint.moments if checkpoint else {}))
            best = ranks.broadcast(checkpoint.best if checkpoint else {})
            self.best = {name: tensor.to(self.updater.device) for name, tensor in best.items()}
            self.progress = Progress(**progress)
            self.saved_step = self.progress.step
            if self.progress.device != (device := self.model.device.type):
                message = f"the checkpoint was trained on {self.progress.device} and goes on on {device}: the result will have other bits"
                job.emit(Event("note", job.stage, message))
                self.progress.device = device
        job.emit(Event("start", job.stage, done=self.progress.step, total=self.steps, unit="steps"))
        if checkpoint is not None:
            job.emit(Event("note", job.stage, f"resuming from step {self.progress.step} of {self.steps}", data={"checkpoint": origin}))

    def train(self) -> None:
        """Run the remaining steps."""
        dev = self.job.dev if self.phase.learns_labels else None
        initial = self.job.ranks.on_leader(lambda: None if dev is None else dev.initial)
        clock = time.perf_counter()
        if dev is not None and initial is not None and self.phase.keep == "best" and self.progress.step == 0:
            self.record_scores({dev.metric: initial}, metric=dev.metric)
        with batches_of(self.job.batches, range(self.progress.step, self.steps), self.model.device) as made:
            self.train_on(made, dev, clock)

    def train_on(self, made: Iterator[Batch], dev: DevEvaluation | None, clock: float) -> None:
        """Run the remaining steps on their batches. clock: when the time that is not in `progress` began."""
        evaluate_every = self.phase.evaluate_every or max(1, self.steps // _TIMES)
        checkpoint_every = self.phase.checkpoint_every or max(1, self.steps // _TIMES)
        while self.progress.step < self.steps:
            self.stop_if_signalled()
            self.step(next(made))
            done, last = self.progress.step, self.progress.step == self.steps
            if dev is not None and (last or done % evaluate_every == 0):
                self.evaluate(dev)
            now = time.perf_counter()
            self.progress.seconds, clock = self.progress.seconds + now - clock, now
            if last or done % checkpoint_every == 0:
                self.save()
                clock = time.perf_counter()

    def stop_if_signalled(self) -> None:
        """Save and raise Stopped if any rank received a signal."""
        exit_code = self.job.ranks.largest_exit_code(self.job.stop())
        if exit_code is not None:
            self.record_last_step()
            self.save()
            raise Stopped(
                f"{self.job.stage} stopped after step {self.progress.step} of {self.steps}; "
                f"saved in {checkpoint_path(self.job.work, self.progress.step)}, run the same command again to continue",
                exit_code=exit_code,
            )

    def step(self, batch: Batch) -> None:
        """One update on the batch of the current step; a rank computes its rows of it.

        A GPU computes it while this process goes on; its numbers are read after the next step was started, or at a boundary.
        """
        step, rank, batches = self.progress.step, self.job.ranks.index, self.job.batches
        purpose = f"dropout {rank}" if rank else "dropout"
        with self.reported_divergence(step):
            update = self.updater.start(
                batch,
                step=step,
                factor=learning_rate_factor(self.phase.schedule, step, self.steps),
                dropout_seed=torch_seed(batches.seed, phase_index=batches.phase_index, purpose=purpose, index=step),
            )
        tokens, rates = batch.tokens, self.updater.optimizer.learning_rates
        self.record_last_step()

        def record() -> None:
            with self.reported_divergence(step):
                numbers = update()
            self.monitor.record(step, numbers, tokens=tokens, learning_rates=rates)

        self.pending = record
        if self.model.device.type == "cpu":
            self.record_last_step()
        self.progress.step += 1
        self.progress.tokens += tokens
        self.progress.padded_tokens += batch.token_ids.size
        self.progress.executed_flops += executed_flops(self.model, batch, self.phase)

    def record_last_step(self) -> None:
        """Wait for the last step, check its numbers and report them."""
        if self.pending is not None:
            record, self.pending = self.pending, None
            record()

    @contextmanager
    def reported_divergence(self, step: int) -> Iterator[None]:
        """Inside the block, report which sequences a step that diverged was on."""
        try:
            yield
        except DivergedError as error:
            numbers = {origin: [each.start, each.stop] for origin, each in self.job.batches.sequence_numbers(step).items()}
            self.job.emit(Event("warning", self.job.stage, str(error), data={"step": step, "sequence_numbers": numbers}))
            raise

    def evaluate(self, dev: DevEvaluation) -> None:
        """Score the current weights on dev."""
        self.record_last_step()
        self.check_weights()
        step = self.progress.step
        with compiled_layers_unused(self.compiles):
            scores = self.job.ranks.on_leader(lambda: {name: float(score) for name, score in dev.evaluate(self.model, step).items()})
        self.record_scores(scores, metric=dev.metric)

    def record_scores(self, scores: Mapping[str, float], *, metric: str) -> None:
        """Report the scores of the current weights; copy the weights if they are the best so far and the phase keeps the best."""
        score, progress = scores[metric], self.progress
        assert math.isfinite(score), f"{metric} is {score}"
        is_best = progress.best_score is None or score > progress.best_score
        if is_best:
            progress.best_step, progress.best_score = progress.step, score
            if self.phase.keep == "best":
                self.best = {name: parameter.detach().clone() for name, parameter in self.weights.items()}
        shown = _shown(metric, score)
        message = f"step {progress.step}: dev {shown}" + (", the best so far" if is_best else "")
        data = {"step": progress.step, "best": is_best, "scores": dict(scores)}
        self.job.emit(Event("evaluation", self.job.stage, message, data=data))

    def save(self) -> None:
        """Publish a checkpoint of this step boundary, unless it is there already."""
        self.record_last_step()
        if self.saved_step == self.progress.step:
            return
        self.check_weights()
        job = self.job
        tensors = {"weights": self.weights, "moments": self.updater.optimizer.state_tensors(), "best": self.best}
        job.ranks.on_leader(lambda: str(save_checkpoint(job.work, self.progress, **tensors, fingerprint=job.fingerprint)))
        self.saved_step = self.progress.step
        if (now := time.perf_counter()) - self.trimmed > _TRIMMED_EVERY:  # batches of many sizes fragment the heap: docs/log.md
            trim_memory()
            self.trimmed = now

    def check_weights(self) -> None:
        """Raise before weights are scored or saved that are not finite (an update can overflow although loss and gradient were finite), or
        that differ between ranks (whose machines may compute different bits).
        """
        self.job.ranks.check_equal(self.weights.values())
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise DivergedError(
                    f"phase {self.phase.name!r}, step {self.progress.step - 1}: weight {name!r} is no longer finite; nothing was saved. "
                    "Lower optimizer.learning_rate or optimizer.muon_learning_rate, or set precision = 'fp32'"
                )

    def finish(self) -> PhaseResult:
        """Load the best weights into the model if the phase kept them, and return the sums."""
        if self.best:
            restore_weights(self.weights, self.best, origin=self.job.stage)
        progress, stage = self.progress, self.job.stage
        message = f"{counted(progress.step, 'step')}, {progress.tokens:,} tokens in {progress.seconds:.0f} s"
        if progress.best_score is not None and self.job.dev is not None:
            message += f", best dev {_shown(self.job.dev.metric, progress.best_score)} at step {progress.best_step}"
        self.job.emit(Event("done", stage, message, done=progress.step, total=self.steps, unit="steps"))
        return PhaseResult(
            name=self.phase.name,
            steps=progress.step,
            tokens=progress.tokens,
            padded_tokens=progress.padded_tokens,
            seconds=progress.seconds,
            best_step=progress.best_step,
            best_score=progress.best_score,
            paper_flops=paper_flops(count_parameters(self.model), padded_tokens=progress.padded_tokens),
            executed_flops=progress.executed_flops,
        )


@dataclass(frozen=True, slots=True)
class Update:
    """The losses before an update by name, the total as `loss`, and the norm of the gradient before clipping."""

    losses: Mapping[str, float]
    gradient_norm: float


class Updater:
    """Optimizer updates that stop before they spoil the model. The training loop and the measurement of speed share it.

    captures: False = never as CUDA graphs (capture.py), for comparisons.
    """

    def __init__(self, model: Model, phase: PhaseConfig, *, precision: Precision, ranks: Ranks = ALONE, captures: bool = True) -> None:
        self.optimizer = build_optimizer(model, phase.optimizer)
        self.device = model.device
        self._model, self._phase, self._precision, self._ranks = model, phase, precision, ranks
        captures = captures and self.device.type == "cuda"
        self._captured = CapturedGradients(model, phase, precision=precision, enabled=captures)
        self._captured_update = CapturedUpdate(lambda: self._clip_and_step(get_total_norm(self._gradients())), enabled=captures)

    def update(self, batch: Batch, *, step: int, factor: float, dropout_seed: int) -> Update:
        """`start`, and wait for the result."""
        return self.start(batch, step=step, factor=factor, dropout_seed=dropout_seed)()

    def start(self, batch: Batch, *, step: int, factor: float, dropout_seed: int) -> Callable[[], Update]:
        """Change the model by one step of the optimizer at `factor` times the peak learning rates; the function returned gives its numbers.

        On a GPU the kernels are only launched here; that function waits for them.

        batch: of the whole step. This rank computes its rows, split over the threads of a CPU; losses and gradients are summed over the
        ranks. Dropout masks are a function of `dropout_seed` and the number of parts. step: for messages.

        Raises:
            DivergedError: if the loss or the gradient is not finite on any rank. On a CPU it is raised here, and model and optimizer are as
                before; on a GPU it is raised by the function, and they are not.
            RankLost: if a rank is gone. EnvironmentFault: if the memory of the GPU does not suffice.
        """
        ranks, counts = self._ranks, objective_of(self._phase).counts(batch)
        own_rows = share_of_batch(batch, ranks.index, ranks.count)
        with _enough_memory(self._phase):
            if self.device.type == "cpu":
                update = self._update_on_cpu(own_rows, counts, step=step, factor=factor, dropout_seed=dropout_seed)
                return lambda: update
            return self._launch_on_gpu(own_rows, counts, step=step, factor=factor, dropout_seed=dropout_seed)

    def _update_on_cpu(self, own_rows: Batch, counts: Counts, *, step: int, factor: float, dropout_seed: int) -> Update:
        optimizer, ranks = self.optimizer, self._ranks
        parts = in_parts(own_rows, torch.get_num_threads(), self.device)
        optimizer.zero_grad()
        losses = sum_losses(gradients(self._model, parts, self._phase, counts, precision=self._precision, dropout_seed=dropout_seed), ranks)
        self._check_finite("loss", float(losses.total), step=step)
        summed = self._gradients()
        ranks.sum_(summed)
        norm = get_total_norm(summed)
        self._check_finite("gradient norm", float(norm), step=step)
        optimizer.set_factor(factor)
        self._clip_and_step(norm)
        return Update(losses.as_numbers(), float(norm))

    def _launch_on_gpu(self, own_rows: Batch, counts: Counts, *, step: int, factor: float, dropout_seed: int) -> Callable[[], Update]:
        self.optimizer.set_factor(factor)
        losses = sum_losses(self._captured(own_rows, counts, dropout_seed=dropout_seed), self._ranks)
        self._ranks.sum_(self._gradients())
        names = tuple(name for name, parameter in self._model.named_parameters() if parameter.grad is not None)
        norm = self._captured_update(names)
        numbers = torch.stack([losses.total.float(), norm.float(), *(value.float() for value in losses.means.values())])
        return functools.partial(self._read, tuple(losses.means), numbers, step)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.optimizer.parameters if parameter.grad is not None]

    def _clip_and_step(self, norm: Tensor) -> Tensor:
        """Clip the gradients, whose norm this is, and update the weights; return the norm."""
        parameters = [parameter for parameter in self.optimizer.parameters if parameter.grad is not None]
        clip_grads_with_norm_(parameters, self._phase.optimizer.clip_norm, norm)
        self.optimizer.step()
        return norm

    def _read(self, names: tuple[str, ...], numbers: Tensor, step: int) -> Update:
        """Wait for the numbers of a step: the loss, the norm of the gradient, and the mean of each name."""
        loss, norm, *means = numbers.tolist()
        self._check_finite("loss", loss, step=step)
        self._check_finite("gradient norm", norm, step=step)
        return Update({"loss": loss, **dict(zip(names, means, strict=True))}, norm)

    def _check_finite(self, name: str, value: float, *, step: int) -> None:
        if math.isfinite(value):
            return
        rates = ", ".join(f"{part} {rate:.2g}" for part, rate in self.optimizer.learning_rates.items())
        raise DivergedError(
            f"phase {self._phase.name!r}, step {step}: the {name} is {value}, not a finite number (learning rates just before: {rates}); "
            "nothing of this step was kept. Lower optimizer.learning_rate or optimizer.muon_learning_rate, raise schedule.warmup_fraction, "
            "or set precision = 'fp32'"
        )


def _shown(metric: str, score: float) -> str:
    return f"{METRIC_NAMES[metric]} {format_metric(metric, score)}" if metric in METRIC_NAMES else f"{metric} {score:.4g}"


@contextmanager
def _enough_memory(phase: PhaseConfig) -> Iterator[None]:
    """Turn PyTorch's error about the memory of a GPU into one line with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EnvironmentFault(
            f"phase {phase.name!r}: the GPU has no memory left for a batch of {phase.batch_size:,} {phase.batch_unit} "
            f"({str(error).split('. ')[0]}); lower batch_size of the phase, or pass a smaller --preset or --device cpu"
        ) from error


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use only kernels that give the same bits every time, on a GPU where there are such; restore the previous setting afterwards.

    On a GPU the gradient of attention is not among them; PyTorch's warning about it is not shown.
    """
    enabled, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it in this mode and reads it when it starts
    _set_deterministic(True, warn_only=device.type != "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid that writes every new tensor twice
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*defaults to a non-deterministic algorithm")
            yield
    finally:
        _set_deterministic(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _set_deterministic(enabled: bool, *, warn_only: bool) -> None:
    """As `torch.use_deterministic_algorithms`, which also imports torch.compile's compiler to configure it (1.3 CPU seconds)."""
    configure = getattr(torch._C, "_set_deterministic_algorithms", None)
    if configure is None or "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    else:
        configure(enabled, warn_only=warn_only)


class Monitor:
    """Emits means over the steps since the last report, speed, and warnings of loss spikes. Nothing here flows back into training."""

    def __init__(self, stage: str, steps: int, *, emit: Emit) -> None:
        self._stage, self._steps, self._emit = stage, steps, emit
        self._every = max(1, steps // _REPORTS)
        self._histories: dict[str, LossHistory] = {}
        self._last_progress = 0.0
        self._reset()

    def _reset(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._tokens, self._norm, self._since = 0, 0.0, time.perf_counter()

    def record(self, step: int, update: Update, *, tokens: int, learning_rates: Mapping[str, float]) -> None:
        """Record one update at `step` (0-based) of `tokens` real tokens."""
        losses = update.losses
        for name, value in losses.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
        self._tokens += tokens
        self._norm = max(self._norm, update.gradient_norm)
        self._warn_of_spike(step, losses)
        now, done = time.perf_counter(), step + 1
        if done % self._every == 0 or done == self._steps:
            self._report(done, learning_rates, seconds=now - self._since)
        if now - self._last_progress >= _PROGRESS_SECONDS or done == self._steps:
            self._last_progress = now
            self._emit(Event("progress", self._stage, done=done, total=self._steps, unit="steps"))

    def _warn_of_spike(self, step: int, losses: Mapping[str, float]) -> None:
        kind = "+".join(name for name in losses if name != "loss")
        sigmas = self._histories.setdefault(kind, LossHistory()).add(losses["loss"])
        if sigmas is not None:
            message = f"step {step}: the loss jumped to {losses['loss']:.3f}, {sigmas:.0f} sigma above its recent mean"
            self._emit(Event("warning", self._stage, message, data={"step": step, "loss": losses["loss"], "sigmas": sigmas}))

    def _report(self, done: int, learning_rates: Mapping[str, float], *, seconds: float) -> None:
        data: dict[str, Any] = {
            "step": done,
            **{name: total / count for name, (total, count) in self._sums.items()},
            "learning_rate": dict(learning_rates),
            "largest_gradient_norm": self._norm,
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / max(seconds, 1e-9),
        }
        self._emit(Event("step", self._stage, done=done, total=self._steps, unit="steps", data=data))
        self._reset()


class LossHistory:
    """Mean and variance of the losses of one kind of batch, with exponential decay."""

    def __init__(self) -> None:
        self._mean, self._variance, self._count = 0.0, 0.0, 0

    def add(self, loss: float) -> float | None:
        """Add a loss; return by how many sigmas it exceeds the mean before it if that is a spike, else None."""
        deviation = loss - self._mean if self._count else 0.0
        sigmas = deviation / math.sqrt(self._variance) if self._variance > 0 else 0.0
        is_spike = self._count >= _SPIKE_HISTORY and sigmas > _SPIKE_SIGMAS
        if self._count == 0:
            self._mean = loss
        self._mean += (1 - _SPIKE_DECAY) * deviation
        self._variance = _SPIKE_DECAY * (self._variance + (1 - _SPIKE_DECAY) * deviation * deviation)
        self._count += 1
        return sigmas if is_spike else None
