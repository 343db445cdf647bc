"""The only training loop. Every method (TLM, labels only, DAPT, TAPT, fine-tuning) is a list of phases, and each phase runs through here.

A step: batch(step) -> losses -> backward -> finite or stop -> clip -> update. At step boundaries, all of them functions of the
step alone: dev is evaluated, a checkpoint is published, a signal is answered. Nothing that chance or the clock decides lives
longer than a step, so a phase that was stopped anywhere, any number of times, ends with the same bits as one that was not (same
machine, same number of threads).

Several ranks run this same loop, each on its rows of the step's batch. They make the same calls of `ranks` and `parallel` in the same
order; what only one of them may do, it does inside `ranks.told`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cramlm.config import PhaseConfig
from cramlm.errors import DivergedError, Stopped
from cramlm.model.device import Precision
from cramlm.model.model import Model
from cramlm.records import Emit, Event
from cramlm.training.batching import Batches, share
from cramlm.training.checkpoint import Checkpoint, Progress, checkpoint_path, load_newest, restore_weights, save_checkpoint
from cramlm.training.distributed import ALONE, Ranks
from cramlm.training.gradients import in_parts
from cramlm.training.memory import trim
from cramlm.training.monitoring import Monitor
from cramlm.training.objective import Counts
from cramlm.training.optimization import JointOptimizer, build_optimizer, learning_rate_factor
from cramlm.training.parallel import spread
from cramlm.training.planning import count_parameters, executed_flops, paper_flops
from cramlm.training.randomness import torch_seed
from cramlm.training.update import deterministic, update

_TIMES = 10  # dev evaluations and checkpoints in a phase, unless it says otherwise

Evaluate = Callable[[Model], Mapping[str, float]]


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
    choose_by: str,
    incoming: float | None = None,
    stop: Callable[[], int | None] = never,
    fingerprint: Mapping[str, Any],
    strict: bool = False,
    ranks: Ranks = ALONE,
) -> PhaseResult:
    """Train `model` in place for `phase.steps` steps, going on from the newest whole checkpoint under `work` if there is one.

    Afterwards the model holds the weights that the phase hands on: with `keep = "best"`, labels learnt and an `evaluate` given,
    those with the highest `evaluate(model)[choose_by]` (of equal ones the earliest), else the last. The caller resets the task head where
    the phase asks for it, before.

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
    with deterministic(), ranks.exchanging():
        run.train(evaluate if phase.uses_labels else None, choose_by=choose_by, incoming=ranks.told(lambda: incoming), stop=stop)
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
        self.ranks, self.parallel = ranks, spread(model, ranks)
        self.optimizer: JointOptimizer = build_optimizer(self.parallel.trained, phase.optimizer)
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        self.saved_step: int | None = None

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is trained, as it lies on this rank."""
        return dict(self.parallel.trained.named_parameters())

    def resume(self, *, strict: bool) -> None:
        """Take up the newest checkpoint, if there is one, on all ranks."""
        checkpoint: Checkpoint | None = None
        if self.ranks.index == 0:
            checkpoint = load_newest(self.work, fingerprint=self.fingerprint, emit=self.emit, stage=self.stage, strict=strict)
        progress = self.ranks.told(lambda: None if checkpoint is None else asdict(checkpoint.progress))
        origin = self.stage if checkpoint is None else str(checkpoint.path)
        weights = dict(self.model.named_parameters()) if checkpoint is None else checkpoint.weights
        restore_weights(self.weights, self.parallel.split(self.ranks.given(weights)), origin=origin)
        if progress is not None:
            moments, best = (
                self.ranks.given(checkpoint.moments if checkpoint else {}),
                self.ranks.given(checkpoint.best if checkpoint else {}),
            )
            self.optimizer.load_state_tensors(self.parallel.split(moments))
            self.best = {name: tensor.to(self.device) for name, tensor in self.parallel.split(best).items()}
            self.progress = Progress(**progress)
            self.saved_step = self.progress.step
        self.emit(Event("start", self.stage, done=self.progress.step, total=self.steps, unit="steps"))
        if checkpoint is not None:
            self.emit(Event("note", self.stage, f"goes on from step {self.progress.step} of {self.steps}", data={"checkpoint": origin}))

    def train(self, evaluate: Evaluate | None, *, choose_by: str, incoming: float | None, stop: Callable[[], int | None]) -> None:
        """All the steps that are left."""
        evaluate_every = self.phase.evaluate_every or max(1, self.steps // _TIMES)
        checkpoint_every = self.phase.checkpoint_every or max(1, self.steps // _TIMES)
        monitor = Monitor(self.stage, self.steps, emit=self.emit)
        clock = time.perf_counter()
        if incoming is not None and self.phase.keep == "best" and self.progress.step == 0:
            self.remember({choose_by: incoming}, choose_by=choose_by)
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
                self.look_at_dev(evaluate, choose_by=choose_by)
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
                self.parallel.trained,
                in_parts(share(batch, rank, self.ranks.count), self.parallel.parts, self.device),
                self.phase,
                optimizer=self.optimizer,
                factor=learning_rate_factor(self.phase.schedule, step, self.steps),
                precision=self.precision,
                dropout_seed=torch_seed(
                    self.seed, phase_index=self.phase_index, purpose=f"dropout {rank}" if rank else "dropout", index=step
                ),
                step=step,
                counts=Counts.of(batch, self.phase),
                parallel=self.parallel,
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

    def look_at_dev(self, evaluate: Evaluate, *, choose_by: str) -> None:
        """Score the weights at hand."""
        self.parallel.settle()
        self.check_weights()
        scores = self.ranks.told(lambda: {name: float(value) for name, value in evaluate(self.model).items()})
        self.remember(scores, choose_by=choose_by)

    def remember(self, scores: Mapping[str, float], *, choose_by: str) -> None:
        """The scores of the weights at hand; these too, if they are the best so far and the phase keeps the best."""
        score, progress = scores[choose_by], self.progress
        assert score - score == 0, f"{choose_by} is {score}"
        better = progress.best_score is None or score > progress.best_score
        if better:
            progress.best_step, progress.best_score = progress.step, score
            if self.phase.keep == "best":
                self.best = {name: parameter.detach().clone() for name, parameter in self.weights.items()}
        self.emit(
            Event(
                "evaluation",
                self.stage,
                f"step {progress.step}: dev {choose_by} {score:.4f}" + (", the best so far" if better else ""),
                data={"step": progress.step, "best": better, "scores": dict(scores)},
            )
        )

    def save(self) -> None:
        """Publish a checkpoint of this step boundary, unless it is there already."""
        if self.saved_step == self.progress.step:
            return
        self.parallel.settle()
        self.check_weights()
        weights, fingerprint = dict(self.model.named_parameters()), self.fingerprint
        moments, best = self.parallel.whole(self.optimizer.state_tensors()), self.parallel.whole(self.best)
        self.ranks.told(
            lambda: str(save_checkpoint(self.work, self.progress, weights=weights, moments=moments, best=best, fingerprint=fingerprint))
        )
        self.saved_step = self.progress.step
        trim()  # batches of many sizes scatter what they free: 0.3 to 0.6 GB an hour (docs/log.md)

    def check_weights(self) -> None:
        """An update can overflow a weight although loss and gradient were finite; such weights are neither scored nor saved."""
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise DivergedError(
                    f"phase {self.phase.name!r}, step {self.progress.step - 1}: weight {name!r} is no longer finite; nothing was saved. "
                    "Lower optimizer.learning_rate or optimizer.muon_learning_rate, or set precision = 'fp32'"
                )

    def finish(self) -> PhaseResult:
        """Give the model the weights to hand on, and sum up."""
        self.parallel.settle()
        if self.best:
            restore_weights(dict(self.model.named_parameters()), self.parallel.whole(self.best), origin=self.stage)
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
