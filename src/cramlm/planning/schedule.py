"""From sizes and time to the steps of every phase; and, between phases, from what training really took to the steps of the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.config.run import PhaseConfig, RunConfig
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.evaluate import sequences_of
from cramlm.model.prompts import Prompt
from cramlm.model.tokenizer import UNCUT, Tokenizer
from cramlm.pipeline.context import Context, Ended, Plan, Text, fingerprint, phases_by_name, write_json
from cramlm.planning import budget
from cramlm.planning.cost import finishing_seconds
from cramlm.planning.speed import count_step, measure
from cramlm.records import Event, Example, IntArray
from cramlm.retrieval.ranking import CHARACTERS_PER_TOKEN
from cramlm.storage.artifacts import Artifact, stage

LATENESS = 0.05  # of the budget, that phases to come may take beyond it where earlier ones took too long
MEASURED_SHARE = 0.01  # of the budget, for each phase, once the texts are there


@dataclass(frozen=True, slots=True)
class Schedule:
    """The phases as planned.

    amount: what of the budget (seconds, or operations) training had when this was planned; None without a budget. speed: in tokens per
    unit of that. seconds_per_unit: 1 for a time. finishing: seconds for what comes after training. rows: places of a row, for phases that
    leave them open.
    """

    artifact: Artifact
    phases: tuple[PhaseConfig, ...]
    sizes: budget.Sizes
    amount: float | None
    speed: budget.Speed
    seconds_per_unit: float
    finishing: float
    rows: int


def schedule(run: Context, plan: Plan, text: Text) -> Schedule:
    """Steps, row length and evaluation interval of every phase, from the time that is left and the tokens that are there.

    With a time as budget the speed is measured once more, on rows and a vocabulary as they are now known.
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
        trial = _Trial(run.config, plan, rows, text.tokenizer.vocab_size, lengths)
        speed, units = plan.speed, plan.speed
        if plan.operations:
            units = trial.economy()
        elif run.config.tokens_per_second is None and run.clock.budget.seconds is not None:
            speed = units = trial.speed(min(2.0, MEASURED_SHARE * run.clock.budget.seconds))
        seconds_per_unit = units.joint / speed.joint if plan.operations else 1.0
        finishing = finishing_seconds(sizes, speed)
        amount = run.clock.budget.flops if run.clock.left is None else run.clock.left - finishing
        # The plan has refused what is hopeless: what is tight now, on a machine that became busy, ends late rather than not at all.
        least = budget.least_amount(run.config.phases, sizes, units)
        if amount is not None and least > amount:
            told = f"training got slower than it was measured before: the run will end about {least - amount:.0f} s late"
            if plan.operations:
                told = f"the texts are longer than was guessed: the least that teaches takes {least:.1e} operations, not {amount:.1e}"
            run.emit(Event("warning", "schedule", told))
            amount = least
        phases = budget.plan_phases(run.config.phases, sizes=sizes, speed=units, amount=amount, rows=rows)
        facts = {"amount": amount, "seconds_per_unit": seconds_per_unit, "finishing": finishing, "rows": rows}
        planned = {"phases": [phase.model_dump(mode="json") for phase in phases], "sizes": asdict(sizes), "speed": asdict(units)}
        write_json(target / "schedule.json", {**planned, **facts})
        for phase in phases:
            seconds = budget.phase_amount(phase, sizes, units) * seconds_per_unit
            run.emit(Event("plan", "schedule", budget.describe(phase, sizes, seconds=seconds)))

    sections = {"phases": phases_by_name(run.config.phases), "budget": run.config.budget}
    inputs = {"tokenizer": text.tokenizer.fingerprint, "selection": fingerprint(text.selection), "task": task_fingerprint(run.task)}
    key = {"format": 3, **sections, **inputs, **({} if text.prompt is None else {"prompt": asdict(text.prompt)})}
    return _read(run.stage("schedule", key=key, write=write))


def replan(run: Context, planned: Schedule, ended: Sequence[Ended]) -> tuple[PhaseConfig, ...]:
    """The phases again, those after the finished ones planned anew: from what is left, at the speed that the last one reached.

    An artifact like every plan, so that a run that is started again keeps it; in a run
    without a budget, or where nothing is open any more, the plan stays as it is. What is left is a pure function of what is published
    (the amount that was planned with, less what the reports say), or less, where this process saw more time pass.
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
        # A phase that was begun is worth its end, late or not; and a little lateness is worth more than a last phase cut to nothing.
        was_planned = sum(budget.phase_amount(phase, sizes, speed) for phase in planned.phases[number:])
        allowed = left + LATENESS * (run.clock.budget.flops or run.clock.budget.seconds or 0.0)
        amount = max(left, min(was_planned, allowed), budget.least_amount(coming, sizes, speed))
        phases = (*planned.phases[:number], *budget.plan_phases(coming, sizes=sizes, speed=speed, amount=amount, rows=planned.rows))
        data = {"phases": [phase.model_dump(mode="json") for phase in phases], "sizes": asdict(sizes), "speed": asdict(speed)}
        facts = {"amount": planned.amount, "left": left, "seconds_per_unit": planned.seconds_per_unit, "finishing": planned.finishing}
        write_json(target / "schedule.json", {**data, **facts, "rows": planned.rows})
        for before, phase in zip(planned.phases[number:], phases[number:], strict=True):
            if before != phase:
                seconds = budget.phase_amount(phase, sizes, speed) * planned.seconds_per_unit
                run.emit(Event("plan", name, f"{before.steps:,} steps -> {budget.describe(phase, sizes, seconds=seconds)}"))

    key = {"format": 1, "schedule": planned.artifact.fingerprint, "done": ended[-1].artifact.fingerprint}
    return _read(stage(run.folder / name, kind="schedule", key=key, write=write, emit=run.emit, name=name)).phases


def _read(artifact: Artifact) -> Schedule:
    data = json.loads((artifact.path / "schedule.json").read_bytes())
    phases = tuple(PhaseConfig.model_validate(phase) for phase in data["phases"])
    sizes, speed = budget.Sizes(**data["sizes"]), budget.Speed(**data["speed"])
    return Schedule(artifact, phases, sizes, data["amount"], speed, data["seconds_per_unit"], data["finishing"], data["rows"])


@dataclass(frozen=True, slots=True)
class _Trial:
    """Updates on sequences of the task's lengths, with its vocabulary and the threads of the plan."""

    config: RunConfig
    plan: Plan
    rows: int
    vocab_size: int
    lengths: IntArray

    def speed(self, seconds: float) -> budget.Speed:
        """Tokens per second."""

        def rate(phase: PhaseConfig) -> float:
            measured = measure(**self._settings(phase), threads=(self.plan.threads,), seconds=seconds)
            return measured.tokens_per_second

        return self._both(rate)

    def economy(self) -> budget.Speed:
        """Tokens per operation."""
        return self._both(lambda phase: 1 / count_step(**self._settings(phase))[0])

    def _settings(self, phase: PhaseConfig) -> dict[str, Any]:
        fixed = phase if phase.max_length else phase.model_copy(update={"max_length": self.rows})
        sizes = {"encoder": self.config.encoder, "head": self.config.head, "vocab_size": self.vocab_size}
        return {**sizes, "phase": fixed, "precision": self.plan.precision, "lengths": self.lengths}

    def _both(self, rate: Callable[[PhaseConfig], float]) -> budget.Speed:
        """With and without the vocabulary head; where there is one kind of phase only, its rate for both."""
        phases = self.config.phases
        joint = next((phase for phase in phases if phase.text_terms), None)
        finetune = next((phase for phase in phases if not phase.text_terms), None)
        rates = [None if phase is None else rate(phase) for phase in (joint, finetune)]
        return budget.Speed(rates[0] or rates[1] or 0.0, rates[1] or rates[0] or 0.0)


def _lengths(tokenizer: Tokenizer, examples: Sequence[Example], prompt: Prompt | None) -> IntArray:
    """Tokens per sequence with [CLS] and [SEP], uncut: of each example, or of each in each pattern."""
    return sequences_of(tokenizer, examples, max_length=UNCUT, prompt=prompt).lengths
