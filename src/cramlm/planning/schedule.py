"""The schedule stage: the steps of every phase from tokens and remaining time; between phases, the steps of the remaining ones again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cramlm.config.run import PhaseConfig, RunConfig
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.evaluate import sequences_of
from cramlm.model.prompts import Prompt
from cramlm.model.tokenizer import UNCUT, Tokenizer
from cramlm.pipeline.context import EncodedTexts, FinishedPhase, RunContext, RunPlan, Stage, fingerprint, phases_by_name, write_json
from cramlm.planning import budget
from cramlm.planning.cost import finishing_seconds
from cramlm.planning.speed import TrainingSetup, count_step, measure
from cramlm.records import Event, Example, IntArray
from cramlm.retrieval.ranking import CHARACTERS_PER_TOKEN
from cramlm.storage.artifacts import Artifact

MAX_LATENESS = 0.05  # share of the budget by which remaining phases may exceed it after earlier ones took too long
REMEASUREMENT_SHARE = 0.01  # of the budget, for each measurement after tokenizing


@dataclass(frozen=True, slots=True)
class Schedule:
    """The planned phases.

    amount: the part of the budget (seconds or operations) for training; None without a budget. speed: in tokens per unit of the budget.
    seconds_per_unit: 1 if the budget is a time. finishing: seconds after training. rows: row length, in tokens, of phases that leave it
    open.
    """

    artifact: Artifact
    phases: tuple[PhaseConfig, ...]
    sizes: budget.Sizes
    amount: float | None
    speed: budget.Speed
    seconds_per_unit: float
    finishing: float
    rows: int


def schedule(run: RunContext, plan: RunPlan, text: EncodedTexts) -> Schedule:
    """Set steps, row length and evaluation interval of every phase, from the remaining time and the tokens.

    If the budget is a time, the speed is measured again with the final row length and vocabulary.
    """

    def write(target: Path) -> None:
        lengths = _lengths(text.tokenizer, run.task.train, text.prompt)
        rows = budget.row_length(lengths, longest=run.config.encoder.max_positions)
        longest = max(phase.max_length or rows for phase in run.config.phases)
        dev, test = (
            int(np.minimum(_lengths(text.tokenizer, split, text.prompt), longest).sum()) for split in (run.task.dev, run.task.test)
        )
        external = int(text.selection.table.text_characters() / CHARACTERS_PER_TOKEN) if text.selection else 0
        train = int(np.minimum(lengths, longest).sum()) * len(run.task.train) // len(lengths)  # a pass reads each text in one pattern
        sizes = budget.Sizes(len(run.task.train), len(run.task.labels), train, dev, test, external)
        trial = _Remeasurement(run.config, plan, rows, text.tokenizer.vocab_size, lengths)
        speed, units = plan.speed, plan.speed
        if plan.operations:
            units = trial.speed_per_flop()
        elif run.config.tokens_per_second is None and run.clock.budget.seconds is not None:
            speed = units = trial.speed(min(2.0, REMEASUREMENT_SHARE * run.clock.budget.seconds))
        seconds_per_unit = units.joint / speed.joint if plan.operations else 1.0
        finishing = finishing_seconds(sizes, speed)
        amount = run.clock.budget.flops if run.clock.left is None else run.clock.left - finishing
        # The plan stage refused budgets that are too small. If the machine became busy since, the run ends late rather than not at all.
        least = budget.minimum_amount(run.config.phases, sizes, units)
        if amount is not None and least > amount:
            message = f"training is slower than measured before: the run will end about {least - amount:.0f} s late"
            if plan.operations:
                message = f"the texts are longer than estimated: the minimum is {least:.1e} operations, not {amount:.1e}"
            run.emit(Event("warning", "schedule", message))
            amount = least
        phases = budget.plan_phases(run.config.phases, sizes=sizes, speed=units, amount=amount, rows=rows)
        facts = {"amount": amount, "seconds_per_unit": seconds_per_unit, "finishing": finishing, "rows": rows}
        planned = {"phases": [phase.model_dump(mode="json") for phase in phases], "sizes": asdict(sizes), "speed": asdict(units)}
        write_json(target / "schedule.json", {**planned, **facts})
        for phase in phases:
            seconds = budget.phase_amount(phase, sizes, units) * seconds_per_unit
            run.emit(Event("plan", "schedule", budget.describe(phase, sizes, seconds=seconds)))

    settings = {"phases": phases_by_name(run.config.phases), "budget": run.config.budget}
    inputs = {"tokenizer": text.tokenizer.fingerprint, "selection": fingerprint(text.selection), "task": task_fingerprint(run.task)}
    inputs |= {} if text.prompt is None else {"prompt": asdict(text.prompt)}
    return _read(run.build(Stage("schedule", 3, settings, inputs, write)))


def replan(run: RunContext, planned: Schedule, ended: Sequence[FinishedPhase]) -> tuple[PhaseConfig, ...]:
    """Plan the phases after the finished ones again, from the rest of the budget at the speed that the last phase reached.

    The result is an artifact, so that a run that is started again keeps it. Without a budget, or if no remaining phase is open, the plan
    stays. The rest is the planned amount less what the phase reports say, or less if more time passed in this process.
    """
    number = len(ended)
    if planned.amount is None or not any(budget.is_open(phase) for phase in run.config.phases[number:]):
        return planned.phases
    name = f"schedule-{number + 1}-{run.config.phases[number].name}"
    reports = [each.report for each in ended]

    def write(target: Path) -> None:
        sizes, speed = planned.sizes, planned.speed
        if run.clock.budget.flops is not None:
            left = run.clock.budget.flops - sum(report["executed_flops"] for report in reports)
        else:
            left = (planned.amount or 0.0) - sum(report["seconds"] for report in reports)
            left = left if run.clock.left is None else min(left, run.clock.left - planned.finishing)
            factor = budget.drift(budget.phase_amount(planned.phases[number - 1], sizes, speed), reports[-1]["seconds"])
            speed = budget.Speed(speed.joint * factor, speed.finetune * factor)
        coming = run.config.phases[number:]
        # Exceeding the budget a little is better than a last phase of no use.
        was_planned = sum(budget.phase_amount(phase, sizes, speed) for phase in planned.phases[number:])
        allowed = left + MAX_LATENESS * (run.clock.budget.flops or run.clock.budget.seconds or 0.0)
        amount = max(left, min(was_planned, allowed), budget.minimum_amount(coming, sizes, speed))
        phases = (*planned.phases[:number], *budget.plan_phases(coming, sizes=sizes, speed=speed, amount=amount, rows=planned.rows))
        data = {"phases": [phase.model_dump(mode="json") for phase in phases], "sizes": asdict(sizes), "speed": asdict(speed)}
        facts = {"amount": planned.amount, "left": left, "seconds_per_unit": planned.seconds_per_unit, "finishing": planned.finishing}
        write_json(target / "schedule.json", {**data, **facts, "rows": planned.rows})
        for before, phase in zip(planned.phases[number:], phases[number:], strict=True):
            if before != phase:
                seconds = budget.phase_amount(phase, sizes, speed) * planned.seconds_per_unit
                run.emit(
                    Event("plan", name, f"planned again: {budget.describe(phase, sizes, seconds=seconds)}; before: {before.steps:,} steps")
                )

    inputs = {"schedule": planned.artifact.fingerprint, "done": ended[-1].artifact.fingerprint}
    return _read(run.build(Stage(name, 1, {}, inputs, write, kind="schedule"))).phases


def _read(artifact: Artifact) -> Schedule:
    data = json.loads((artifact.path / "schedule.json").read_bytes())
    phases = tuple(PhaseConfig.model_validate(phase) for phase in data["phases"])
    sizes, speed = budget.Sizes(**data["sizes"]), budget.Speed(**data["speed"])
    return Schedule(artifact, phases, sizes, data["amount"], speed, data["seconds_per_unit"], data["finishing"], data["rows"])


@dataclass(frozen=True, slots=True)
class _Remeasurement:
    """Measures updates on sequences of the task's lengths, with its vocabulary and the threads of the plan."""

    config: RunConfig
    plan: RunPlan
    rows: int
    vocab_size: int
    lengths: IntArray

    def speed(self, seconds: float) -> budget.Speed:
        """Tokens per second."""

        def rate(phase: PhaseConfig) -> float:
            return measure(self._setup(phase), threads=(self.plan.threads,), seconds=seconds).tokens_per_second

        return self._both(rate)

    def speed_per_flop(self) -> budget.Speed:
        """Tokens per operation."""
        return self._both(lambda phase: 1 / count_step(self._setup(phase))[0])

    def _setup(self, phase: PhaseConfig) -> TrainingSetup:
        fixed = phase if phase.max_length else phase.model_copy(update={"max_length": self.rows})
        return TrainingSetup(self.config.encoder, self.config.head, fixed, self.vocab_size, self.plan.precision, self.lengths)

    def _both(self, rate: Callable[[PhaseConfig], float]) -> budget.Speed:
        """With and without the vocabulary head; if there is only one kind of phase, its rate for both."""
        phases = self.config.phases
        joint = next((phase for phase in phases if phase.text_terms), None)
        finetune = next((phase for phase in phases if not phase.text_terms), None)
        rates = [None if phase is None else rate(phase) for phase in (joint, finetune)]
        return budget.Speed(rates[0] or rates[1] or 0.0, rates[1] or rates[0] or 0.0)


def _lengths(tokenizer: Tokenizer, examples: Sequence[Example], prompt: Prompt | None) -> IntArray:
    """Tokens per sequence with [CLS] and [SEP], not truncated: of each example, or of each example in each pattern."""
    return sequences_of(tokenizer, examples, max_length=UNCUT, prompt=prompt).lengths
