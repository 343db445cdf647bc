"""What training says about itself while it runs: means over the steps since the last report, speed, and sudden jumps of the loss.

Nothing here flows back into training: a phase that goes on from a checkpoint may report other windows, and ends with the same weights.

One optimizer update, guarded: losses, backward, finite or stop, clip, step. The loop and the speed measurement share it.

The only training loop. Every method (TLM, labels only, DAPT, TAPT, fine-tuning) is a list of phases, and each phase runs through here.

A step: batch(step) -> losses -> backward -> finite or stop -> clip -> update. At step boundaries, all of them functions of the
step alone: dev is evaluated, a checkpoint is published, a signal is answered. Nothing that chance or the clock decides lives
longer than a step, so a phase that was stopped anywhere, any number of times, ends with the same bits as one that was not (same
machine, same number of threads).

Several ranks run this same loop, each on its rows of the step's batch. They make the same calls of `ranks` in the same order; what only
one of them may do, it does inside `ranks.told`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cramlm.config.run import PhaseConfig
from cramlm.errors import DivergedError, Stopped
from cramlm.model.device import Precision
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Emit, Event
from cramlm.training.batching import Batches, torch_seed
from cramlm.training.checkpoints import Checkpoint, Progress, checkpoint_path, load_newest, restore_weights, save_checkpoint
from cramlm.training.distributed import ALONE, Ranks, over_all
from cramlm.training.flops import count_parameters, executed_flops, paper_flops
from cramlm.training.memory import trim
from cramlm.training.objective import Losses, gradients, in_parts, objective_of
from cramlm.training.optimizers import JointOptimizer, build_optimizer, learning_rate_factor
from cramlm.training.packing import share
from cramlm.training.terms.base import Counts

REPORTS = 100  # "step" events in a phase
PROGRESS_SECONDS = 0.5  # least time between "progress" events
SPIKE_SIGMAS = 6.0
_SPIKE_HISTORY = 50  # steps of one kind before jumps are judged
_SPIKE_MEMORY = 0.98


class Monitor:
    """Gathers updates and emits events; one per phase and start."""

    def __init__(self, stage: str, steps: int, *, emit: Emit) -> None:
        self._stage, self._steps, self._emit = stage, steps, emit
        self._every = max(1, steps // REPORTS)
        self._spikes: dict[str, _LossHistory] = {}
        self._told = 0.0
        self._sums: dict[str, tuple[float, int]] = {}
        self._tokens, self._norm, self._since = 0, 0.0, time.perf_counter()

    def saw(self, step: int, update: Update, *, tokens: int, learning_rates: Mapping[str, float]) -> None:
        """One update at `step` (0-based) of `tokens` real tokens."""
        terms = update.losses.as_numbers()
        for name, value in terms.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
        self._tokens += tokens
        self._norm = max(self._norm, update.gradient_norm)
        kind = "+".join(name for name in terms if name != "loss")
        if (jump := self._spikes.setdefault(kind, _LossHistory()).judge(terms["loss"])) is not None:
            self._emit(
                Event(
                    "warning",
                    self._stage,
                    f"step {step}: the loss jumped to {terms['loss']:.3f}, {jump:.0f} sigma above its recent mean",
                    data={"step": step, "loss": terms["loss"], "sigmas": jump},
                )
            )
        now = time.perf_counter()
        done = step + 1
        if done % self._every == 0 or done == self._steps:
            self._report(done, learning_rates, seconds=now - self._since)
        if now - self._told >= PROGRESS_SECONDS or done == self._steps:
            self._told = now
            self._emit(Event("progress", self._stage, done=done, total=self._steps, unit="steps"))

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
        self._sums = {}
        self._tokens, self._norm, self._since = 0, 0.0, time.perf_counter()


class _LossHistory:
    """Running mean and variance of the losses of one kind of batch, with exponential forgetting."""

    def __init__(self) -> None:
        self._mean, self._variance, self._seen = 0.0, 0.0, 0

    def judge(self, loss: float) -> float | None:
        """How many sigmas above the mean, if that is a jump; then remember the loss."""
        deviation = loss - self._mean if self._seen else 0.0
        sigmas = deviation / math.sqrt(self._variance) if self._variance > 0 else 0.0
        jumped = self._seen >= _SPIKE_HISTORY and sigmas > SPIKE_SIGMAS
        if self._seen == 0:
            self._mean = loss
        self._mean += (1 - _SPIKE_MEMORY) * deviation
        self._variance = _SPIKE_MEMORY * (self._variance + (1 - _SPIKE_MEMORY) * deviation * deviation)
        self._seen += 1
        return sigmas if jumped else None


@dataclass(frozen=True, slots=True)
class Update:
    """What one update saw: the losses before it, and the gradient's norm before clipping."""

    losses: Losses
    gradient_norm: float


def update(
    model: Model,
    parts: Sequence[PackedBatch],
    phase: PhaseConfig,
    *,
    optimizer: JointOptimizer,
    factor: float,
    precision: Precision,
    dropout_seed: int,
    step: int,
    counts: Counts | None = None,
    ranks: Ranks = ALONE,
) -> Update:
    """Change the model by one step of the optimizer at `factor` times the peak learning rates.

    parts: the batch, or what batching.share makes of it, to be computed side by side. Where several ranks train, they are this one's share
    of a step, and gradients and losses are summed over `ranks`: the update and what is returned are those of the whole step, whose counts
    are `counts` (None: those of the only part). Dropout is drawn from `dropout_seed` and the number of parts alone.

    Raises:
        DivergedError: if the loss or the gradient is not finite, on any rank; model and optimizer are then as before. RankLost: if a rank
            no longer answers.
    """
    optimizer.zero_grad()
    counts = counts or objective_of(phase).counts(parts[0])
    computed = gradients(model, parts, phase, counts, precision=precision, dropout_seed=dropout_seed)
    seen = over_all(computed, ranks)
    _check("loss", float(seen.total), phase, optimizer=optimizer, step=step)
    parameters = [parameter for parameter in optimizer.parameters if parameter.grad is not None]
    summed = [parameter.grad for parameter in parameters if parameter.grad is not None]
    ranks.sum_(summed)
    norm = get_total_norm(summed)
    gradient_norm = float(norm)
    _check("gradient norm", gradient_norm, phase, optimizer=optimizer, step=step)
    clip_grads_with_norm_(parameters, phase.optimizer.clip_norm, norm)
    optimizer.set_factor(factor)
    optimizer.step()
    return Update(seen, gradient_norm)


def _check(what: str, value: float, phase: PhaseConfig, *, optimizer: JointOptimizer, step: int) -> None:
    if value - value == 0:  # false for inf and nan
        return
    rates = ", ".join(f"{name} {rate:.2g}" for name, rate in optimizer.learning_rates.items())
    raise DivergedError(
        f"phase {phase.name!r}, step {step}: the {what} is {value}, not a finite number (learning rates just before: {rates}); nothing of "
        "this step was kept. Lower optimizer.learning_rate or optimizer.muon_learning_rate, raise schedule.warmup_fraction, "
        "or set precision = 'fp32'"
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that give the same bits every time; the setting from before comes back afterwards."""
    enabled, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by cuBLAS under this mode; read when it starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid that writes every new tensor twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


_TIMES = 10  # dev evaluations and checkpoints in a phase, unless it says otherwise

Evaluate = Callable[[Model, int], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """What a phase did; sums are over all its starts.

    tokens: real ones. places: with padding. seconds: training and dev evaluations. best_step: steps done at the best dev score
    (None without evaluation). paper_flops: 6 x places x parameters. executed_flops: the matrix products that ran.
    """

    name: str
    steps: int
    tokens: int
    places: int
    seconds: float
    best_step: int | None
    best_score: float | None
    paper_flops: float
    executed_flops: float


def never() -> int | None:
    """A `stop` for callers without signals."""
    return None


def train_phase(
    model: Model,
    phase: PhaseConfig,
    batches: Batches,
    *,
    seed: int,
    phase_index: int,
    work: Path,
    precision: Precision,
    emit: Emit,
    evaluate: Evaluate | None,
    metric: str,
    incoming: float | None = None,
    stop: Callable[[], int | None] = never,
    fingerprint: Mapping[str, Any],
    strict: bool = False,
    ranks: Ranks = ALONE,
) -> PhaseResult:
    """Train `model` in place for `phase.steps` steps, going on from the newest whole checkpoint under `work` if there is one.

    Afterwards the model holds the weights that the phase hands on: with `keep = "best"`, labels learnt and an `evaluate` given,
    those with the highest `evaluate(model, step)[metric]` (of equal ones the earliest), else the last. The caller resets the task head
    where the phase asks for it, before.

    incoming: that score of the weights that the phase starts from, if they have learnt the task already; then they compete, since with few
    labels training can only lower it.

    stop: asked at every step boundary; an exit code means that a signal came. fingerprint: what the bits depend on; a checkpoint
    made under another is an error. strict: a damaged checkpoint is an error instead of a warning. The caller holds the lock of
    the run. ranks: those that train together, each of which calls this; the first one's weights, `work` and `evaluate` are used, and all
    get the same model and result.

    Raises:
        DivergedError: if loss, gradient or weights are not finite; nothing is saved from then on.
        Stopped: with the signal's exit code, after a checkpoint was saved.
        ArtifactError: for a checkpoint of other settings. EnvironmentFault: if the disk refuses. RankLost: if a rank is gone.
    """
    assert phase.steps is not None, "the caller decides the number of steps"
    settings: dict[str, Any] = {"seed": seed, "phase_index": phase_index, "work": work, "precision": precision}
    run = _Phase(model, phase, batches, **settings, fingerprint=fingerprint, emit=emit, ranks=ranks)
    run.resume(strict=strict)
    trim()  # what the stages before training have freed
    with deterministic():
        run.train(evaluate if phase.learns_labels else None, metric=metric, incoming=ranks.told(lambda: incoming), stop=stop)
    return run.finish()


class _Phase:
    """The state of one phase while it runs."""

    def __init__(
        self,
        model: Model,
        phase: PhaseConfig,
        batches: Batches,
        *,
        seed: int,
        phase_index: int,
        work: Path,
        precision: Precision,
        fingerprint: Mapping[str, Any],
        emit: Emit,
        ranks: Ranks,
    ) -> None:
        assert phase.steps is not None
        self.model, self.phase, self.batches, self.precision = model, phase, batches, precision
        self.seed, self.phase_index, self.work, self.fingerprint, self.emit = seed, phase_index, work, fingerprint, emit
        self.steps = phase.steps
        self.stage = f"phase-{phase_index + 1}-{phase.name}"
        self.device = next(model.parameters()).device
        model.let_train(phase.trains)
        self.ranks = ranks
        self.parts = torch.get_num_threads() if self.device.type == "cpu" else 1
        self.optimizer: JointOptimizer = build_optimizer(model, phase.optimizer)
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        self.saved_step: int | None = None

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def resume(self, *, strict: bool) -> None:
        """Take up the newest checkpoint, if there is one, on all ranks."""
        checkpoint: Checkpoint | None = None

        def load() -> dict[str, Any] | None:
            nonlocal checkpoint
            checkpoint = load_newest(self.work, fingerprint=self.fingerprint, emit=self.emit, stage=self.stage, strict=strict)
            return None if checkpoint is None else asdict(checkpoint.progress)

        progress = self.ranks.told(load)
        origin = self.stage if checkpoint is None else str(checkpoint.path)
        weights = self.weights if checkpoint is None else checkpoint.weights
        restore_weights(self.weights, self.ranks.given(weights), origin=origin)
        if progress is not None:
            self.optimizer.load_state_tensors(self.ranks.given(checkpoint.moments if checkpoint else {}))
            best = self.ranks.given(checkpoint.best if checkpoint else {})
            self.best = {name: tensor.to(self.device) for name, tensor in best.items()}
            self.progress = Progress(**progress)
            self.saved_step = self.progress.step
        self.emit(Event("start", self.stage, done=self.progress.step, total=self.steps, unit="steps"))
        if checkpoint is not None:
            self.emit(Event("note", self.stage, f"goes on from step {self.progress.step} of {self.steps}", data={"checkpoint": origin}))

    def train(self, evaluate: Evaluate | None, *, metric: str, incoming: float | None, stop: Callable[[], int | None]) -> None:
        """All the steps that are left."""
        evaluate_every = self.phase.evaluate_every or max(1, self.steps // _TIMES)
        checkpoint_every = self.phase.checkpoint_every or max(1, self.steps // _TIMES)
        monitor = Monitor(self.stage, self.steps, emit=self.emit)
        clock = time.perf_counter()
        if incoming is not None and self.phase.keep == "best" and self.progress.step == 0:
            self.remember({metric: incoming}, metric=metric)
        while self.progress.step < self.steps:
            if (exit_code := self.ranks.agreed(stop())) is not None:
                self.save()
                raise Stopped(
                    f"{self.stage} stopped after step {self.progress.step} of {self.steps}; "
                    f"saved in {checkpoint_path(self.work, self.progress.step)}, run the same command again to go on",
                    exit_code=exit_code,
                )
            self.step(monitor)
            done, last = self.progress.step, self.progress.step == self.steps
            if evaluate is not None and (last or done % evaluate_every == 0):
                self.look_at_dev(evaluate, metric=metric)
            now = time.perf_counter()
            self.progress.seconds, clock = self.progress.seconds + now - clock, now
            if last or done % checkpoint_every == 0:
                self.save()
                clock = time.perf_counter()

    def step(self, monitor: Monitor) -> None:
        """One update on the batch of the step at hand; a rank computes its rows of it."""
        step, rank = self.progress.step, self.ranks.index
        batch = self.batches.batch(step)
        try:
            result = update(
                self.model,
                in_parts(share(batch, rank, self.ranks.count), self.parts, self.device),
                self.phase,
                optimizer=self.optimizer,
                factor=learning_rate_factor(self.phase.schedule, step, self.steps),
                precision=self.precision,
                dropout_seed=torch_seed(
                    self.seed, phase_index=self.phase_index, purpose=f"dropout {rank}" if rank else "dropout", index=step
                ),
                step=step,
                counts=objective_of(self.phase).counts(batch),
                ranks=self.ranks,
            )
        except DivergedError as error:
            drawn = {origin: [numbers.start, numbers.stop] for origin, numbers in self.batches.drawn(step).items()}
            self.emit(Event("warning", self.stage, str(error), data={"step": step, "sequence_numbers": drawn}))
            raise
        self.progress.step += 1
        self.progress.tokens += batch.tokens
        self.progress.places += batch.token_ids.size
        self.progress.executed_flops += executed_flops(self.model, batch, self.phase)
        monitor.saw(step, result, tokens=batch.tokens, learning_rates=self.optimizer.learning_rates)

    def look_at_dev(self, evaluate: Evaluate, *, metric: str) -> None:
        """Score the weights at hand."""
        self.check_weights()
        scores = self.ranks.told(lambda: {name: float(value) for name, value in evaluate(self.model, self.progress.step).items()})
        self.remember(scores, metric=metric)

    def remember(self, scores: Mapping[str, float], *, metric: str) -> None:
        """The scores of the weights at hand; these too, if they are the best so far and the phase keeps the best."""
        score, progress = scores[metric], self.progress
        assert score - score == 0, f"{metric} is {score}"
        better = progress.best_score is None or score > progress.best_score
        if better:
            progress.best_step, progress.best_score = progress.step, score
            if self.phase.keep == "best":
                self.best = {name: parameter.detach().clone() for name, parameter in self.weights.items()}
        self.emit(
            Event(
                "evaluation",
                self.stage,
                f"step {progress.step}: dev {metric} {score:.4f}" + (", the best so far" if better else ""),
                data={"step": progress.step, "best": better, "scores": dict(scores)},
            )
        )

    def save(self) -> None:
        """Publish a checkpoint of this step boundary, unless it is there already."""
        if self.saved_step == self.progress.step:
            return
        self.check_weights()
        tensors = {"weights": self.weights, "moments": self.optimizer.state_tensors(), "best": self.best}
        self.ranks.told(lambda: str(save_checkpoint(self.work, self.progress, **tensors, fingerprint=self.fingerprint)))
        self.saved_step = self.progress.step
        trim()  # batches of many sizes scatter what they free: 0.3 to 0.6 GB an hour (docs/log.md)

    def check_weights(self) -> None:
        """An update can overflow a weight although loss and gradient were finite, and the ranks' machines may compute different bits; such
        weights are neither scored nor saved.
        """
        self.ranks.check_equal(self.weights.values())
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise DivergedError(
                    f"phase {self.phase.name!r}, step {self.progress.step - 1}: weight {name!r} is no longer finite; nothing was saved. "
                    "Lower optimizer.learning_rate or optimizer.muon_learning_rate, or set precision = 'fp32'"
                )

    def finish(self) -> PhaseResult:
        """Give the model the weights to hand on, and sum up."""
        if self.best:
            restore_weights(self.weights, self.best, origin=self.stage)
        progress = self.progress
        best = "" if progress.best_score is None else f", best dev score {progress.best_score:.4f} at step {progress.best_step}"
        self.emit(
            Event(
                "done",
                self.stage,
                f"{progress.step} steps, {progress.tokens:,} tokens in {progress.seconds:.0f} s{best}",
                done=progress.step,
                total=self.steps,
                unit="steps",
            )
        )
        return PhaseResult(
            name=self.phase.name,
            steps=progress.step,
            tokens=progress.tokens,
            places=progress.places,
            seconds=progress.seconds,
            best_step=progress.best_step,
            best_score=progress.best_score,
            paper_flops=paper_flops(count_parameters(self.model).total, places=progress.places),
            executed_flops=progress.executed_flops,
        )
