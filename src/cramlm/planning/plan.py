"""The stages `plan` and `schedule`, and `cramlm plan`.

plan: measure this machine, forecast the cost of the run, limit the text to retrieve. schedule: set the steps of every phase from the
tokens and the remaining time, and after each phase those of the remaining phases again.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from cramlm.config.base import Budget
from cramlm.config.phase import PhaseConfig
from cramlm.config.retriever import RETRIEVER
from cramlm.config.run import RunConfig
from cramlm.data.task import read_task, task_fingerprint
from cramlm.errors import EnvironmentFault, UsageError, counted, size
from cramlm.evaluation.prediction import sequences_of
from cramlm.io.machine import available_cores, available_memory, describe_machine, peak_memory, resident_memory
from cramlm.io.paths import stamp_inputs
from cramlm.model.huggingface.pretrained import start_from
from cramlm.model.model import CPU, ModelSpec, Precision, describe_device, empty_model, resolve_device, resolve_precision
from cramlm.model.tokenizer import UNCUT
from cramlm.pipeline.context import (
    EncodedTexts,
    FinishedPhase,
    RunContext,
    RunPlan,
    Stage,
    fingerprint,
    threads_of,
)
from cramlm.planning import budget
from cramlm.planning.cost import (
    CostForecast,
    Machine,
    TextSizes,
    beyond_budget,
    check_resources,
    estimate_texts,
    finishing_seconds,
    forecast_cost,
    raw_bytes,
    sizes_in_rows,
    time_shortage,
)
from cramlm.planning.speed import (
    Measurement,
    TrainingSetup,
    count_flops,
    count_step,
    estimate,
    least_step_memory,
    measure,
    step_tokens,
)
from cramlm.records import Emit, Event, Example, IntArray
from cramlm.retrieval.ranking import CHARACTERS_PER_TOKEN
from cramlm.storage.artifacts import Artifact, hash_json, publish_file, write_json
from cramlm.training.objective import count_parameters

PLANNED_BY = {"budget", "tokens_per_second", "encoder", "head", "tokenizer", "retriever"}
_SCHEDULED_BY = {"budget", "tokens_per_second", "encoder", "head"}  # not the measured speed, which always differs
_MEASURED = {"encoder", "head", "tokenizer", "threads", "device"}  # what the speed depends on
MEASUREMENT_SHARE = 0.015  # of a time budget, for each of the two measurements; at most `_MAX_SECONDS` seconds
_MAX_SECONDS = 1.2  # the speed is measured again after tokenizing
_FORECAST_SECONDS = 0.3  # for each measurement without a time budget: then the speed is used only to forecast the duration
_LONGEST_STEP = 3.0  # seconds; `cramlm plan` and a dry run estimate the speed of longer steps
_NOMINAL_SECONDS = 100.0  # `cramlm plan` measures as for a budget of so many seconds
_MEASUREMENT_LASTS = 86_400.0  # seconds
_BUSY_LASTS = 600.0  # seconds, if other processes took much of the CPU time
_MEASUREMENT_FORMAT = 2  # increase when the same machine and config are measured otherwise
MAX_LATENESS = 0.05  # share of the budget by which remaining phases may exceed it after earlier ones took too long
REMEASUREMENT_SHARE = 0.01  # of the budget, for each measurement after tokenizing
TYPICAL_TEXTS = TextSizes(budget.TYPICAL, rows=128, corpus_bytes=500_000_000)
"""Assumed if no files are given."""


def plan(run: RunContext) -> RunPlan:
    """Measure this machine for a few seconds, forecast the cost of the run, and bound the selection by what the budget trains on.

    With several ranks one process is measured. `tokens_per_second` of the config is the speed of all together.

    Raises:
        UsageError: if the budget is too small to train at all. EnvironmentFault: if memory or disk does not suffice.
    """
    device = resolve_device(run.config.device)
    on_gpu, precision = device.type == "cuda", resolve_precision(run.config.precision, device)
    texts = estimate_texts(run.task, run.config, _corpus_bytes(run.config))

    def write(target: Path) -> None:
        peak = peak_memory()
        machine = _measure_or_read(run, precision).times(run.ranks.count if run.config.tokens_per_second is None else 1)
        rates = (
            f"{machine.joint.tokens_per_second:,.0f} tokens/s with the vocabulary head, {machine.finetune.tokens_per_second:,.0f} without"
        )
        run.emit(Event("done", "plan", f"{rates}, {precision}, {counted(machine.joint.threads, 'thread')}, {describe_device(device)}"))
        if machine.starved is not None and run.config.limit.seconds is not None:
            run.emit(Event("warning", "plan", _starved(machine.starved)))
        cost = forecast_cost(run.config, texts, machine, elapsed=run.elapsed, resident=resident_memory(), peak=peak)
        if run.config.limit != Budget():
            run.emit(Event("plan", "plan", cost.describe(), data=cost.as_dict()))
            if (message := beyond_budget(run.config, cost)) is not None:
                run.emit(Event("warning", "plan", message))
        available = {"memory": memory_of(CPU), "gpu_memory": memory_of(device) if on_gpu else None}
        check_resources(cost, **available, disk=_free_disk(run.folder, run.store), folder=run.folder)
        chosen = None if cost.retriever is None else cost.retriever.model_dump(mode="json")
        rates_of = {"speed": asdict(machine.speed), "threads": machine.joint.threads}
        write_json(target / "plan.json", {"retriever": chosen, **rates_of, "cost": cost.as_dict()})

    artifact = run.build(Stage("plan", 4, _settings(run, PLANNED_BY, precision, run.threads), {"texts": asdict(texts)}, write))
    data = json.loads((artifact.path / "plan.json").read_bytes())
    retriever = None if data["retriever"] is None else RETRIEVER.validate_python(data["retriever"])
    return RunPlan(retriever, precision, data["threads"], budget.Speed(**data["speed"]))


def _settings(run: RunContext, names: set[str], precision: Precision, threads: int) -> dict[str, Any]:
    """Return these settings and all of the phases, by name, so that the reason for a rebuild reads 'phases.joint.steps 500 -> 600'."""
    phases = {phase.name: phase.model_dump(mode="json") for phase in run.config.phases}
    settings = run.config.model_dump(mode="json", include=names) | {"phases": phases, "precision": precision, "threads": threads}
    return settings | ({"ranks": run.ranks.count} if run.ranks.count > 1 else {})


def refuse_small_budget(run: RunContext) -> None:
    """Raise UsageError for a budget that is too small at any speed of this machine, before anything is fitted.

    A budget of operations does not depend on the speed; a budget of time is too small if no time is left to train, and then the speed is
    measured for the budget that the error names. A run that has a plan is not checked again. Phases of fixed length are not refused
    (`beyond_budget` warns of them).

    Raises:
        UsageError: as `forecast_cost`.
    """
    config, limit = run.config, run.config.limit
    if limit == Budget() or (run.folder / "plan").is_dir() or not any(map(budget.is_open, config.phases)):
        return
    texts = estimate_texts(run.task, config, _corpus_bytes(config))
    precision = resolve_precision(config.precision, resolve_device(config.device))
    if time_shortage(config, texts.corpus_bytes) is not None:
        machine = measure_machine(config, Budget(seconds=_NOMINAL_SECONDS), precision, longest_step=_LONGEST_STEP)
        forecast_cost(config, texts, machine, elapsed=run.elapsed)
    if limit.flops is not None:
        setups = (_setup(config, phase, precision) for phase in _phase_of_each_kind(config.phases))
        joint, finetune = (Measurement(1.0, 1, 1.0, count_flops(setup), None) for setup in setups)
        forecast_cost(config, texts, Machine(joint, finetune, parameters=0))


def _measure_or_read(run: RunContext, precision: Precision) -> Machine:
    """Measure this machine, or read an earlier measurement from the store.

    With a budget of operations the speed is used only to forecast the duration; then a measurement of the last day is read (of the last
    ten minutes if the machine was busy).
    """
    config, limit = run.config, run.config.limit
    if config.tokens_per_second is not None or limit.seconds is not None:
        how = "measuring the training speed" if config.tokens_per_second is None else "using the setting tokens_per_second"
        run.emit(Event("start", "plan", how))
        return measure_machine(config, limit, precision)
    key = {"format": _MEASUREMENT_FORMAT, "machine": describe_machine(), "precision": precision}
    key |= {"device": describe_device(resolve_device(config.device))}
    key |= {"config": config.model_dump(mode="json", include=_MEASURED), "cores": available_cores()}
    key |= {"phases": [phase.model_dump(mode="json") for phase in _phase_of_each_kind(config.phases)]}
    path = run.store / "speeds" / f"{hash_json(key)[:16]}.json"
    with suppress(OSError, ValueError):  # of a missing or damaged file: measured anew
        machine = _MACHINE.validate_json(path.read_bytes())
        lasts = _MEASUREMENT_LASTS if machine.starved is None else _BUSY_LASTS
        if 0 <= time.time() - path.stat().st_mtime < lasts:
            run.emit(Event("start", "plan", "using the training speed that an earlier run measured on this machine"))
            return machine
    run.emit(Event("start", "plan", "measuring the training speed"))
    machine = measure_machine(config, limit, precision)
    publish_file(path, json.dumps(asdict(machine)).encode())
    return machine


@dataclass(frozen=True, slots=True)
class RunForecast:
    """The forecast of a run, or the reason why `fit` would refuse it. rough: True if speed and memory were estimated, not measured."""

    config: RunConfig
    texts: TextSizes
    cost: CostForecast | None
    refused: str = ""
    rough: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON for a table."""
        encoder, cost = self.config.encoder, self.cost
        name = f"{'BERT ' if encoder.shape == 'bert' else ''}{encoder.layers} x {encoder.hidden}"
        common = {"budget": self.config.budget, "model": name, "vocab_size": self.config.tokenizer.vocab_size, "refused": self.refused}
        common["rough"] = self.rough
        if cost is None:
            return common
        sizes = replace(self.texts.sizes, external_tokens=cost.external_tokens)
        phases = [
            {
                "name": phase.name,
                "batch": f"{phase.batch_size:,} {'tokens' if phase.batch_unit == 'tokens' else 'texts'}",
                "steps": phase.steps,
                "max_length": phase.max_length,
                "passes": sizes.passes_of(phase),
                "seconds": seconds,
            }
            for phase, seconds in zip(cost.phases, cost.phase_seconds, strict=True)
        ]
        return {**common, **cost.as_dict(), "phases": phases}


def forecast_runs(configs: Sequence[RunConfig], *, emit: Emit) -> list[RunForecast]:
    """Forecast the run of each config on this machine. Equal models and phases are measured once.

    `TYPICAL_TEXTS` are assumed for a training file or a corpus named "".

    Raises:
        UsageError: if the model of a config is linear.
    """
    if linear := [config.model for config in configs if config.model != "encoder"]:
        raise UsageError(
            f"the model {linear[0]!r} is linear: it is fitted without a budget, so there are no steps to plan; choose another recipe"
        )
    machines: dict[str, Machine] = {}
    planned = []
    for config in (start_from(each)[0] for each in configs):
        model = config.model_dump_json(
            include={"encoder", "head", "tokenizer", "phases", "threads", "tokens_per_second", "precision", "device"}
        )
        if model not in machines:
            emit(Event("start", "plan", f"measuring {config.encoder.layers} layers of {config.encoder.hidden}"))
            precision = resolve_precision(config.precision, resolve_device(config.device))
            try:
                machine = measure_machine(config, Budget(seconds=_NOMINAL_SECONDS), precision, longest_step=_LONGEST_STEP)
            except EnvironmentFault as error:  # of one size: the others are forecast
                planned.append(RunForecast(config, TYPICAL_TEXTS, None, str(error)))
                continue
            machines[model] = machine
            about = "about " if machine.joint.rough else ""
            emit(Event("done", "plan", f"{about}{machine.speed.joint:,.0f} tokens/s, {counted(machine.joint.threads, 'thread')}"))
            if machine.starved is not None:
                emit(Event("warning", "plan", _starved(machine.starved)))
        texts = replace(TYPICAL_TEXTS, corpus_bytes=_corpus_bytes(config))
        if config.task.train:
            texts = estimate_texts(read_task(config.task, seed=config.seed), config, texts.corpus_bytes)
        try:
            cost = forecast_cost(config, texts, machines[model], resident=resident_memory())
            if (message := beyond_budget(config, cost)) is not None:
                emit(Event("warning", "plan", message))
            rough = machines[model].joint.rough or machines[model].finetune.rough
            planned.append(RunForecast(config, texts, cost, rough=rough))
        except UsageError as error:
            planned.append(RunForecast(config, texts, None, str(error)))
    return planned


def measure_machine(config: RunConfig, limit: Budget, precision: Precision, *, longest_step: float = math.inf) -> Machine:
    """Measure a phase with the vocabulary head and one without; with `config.tokens_per_second` only the memory of a step of each.

    longest_step: seconds; where a step on the CPU takes longer, none is run, and its speed and memory are estimated (`speed.estimate`).
    The number of threads is chosen if the budget is a time and the config leaves it open; otherwise it is the number of cores, so that
    equal configs give equal bits.
    """
    cores, on_gpu = threads_of(config), resolve_device(config.device).type == "cuda"
    fixed = config.threads or config.tokens_per_second or limit.seconds is None or cores == 1 or on_gpu
    choice = (cores,) if fixed else (1, cores)
    with_head, without_head = _phase_of_each_kind(config.phases)
    seconds = _FORECAST_SECONDS if limit.seconds is None else min(_MAX_SECONDS, MEASUREMENT_SHARE * limit.seconds)
    measured = partial(_measured, config, precision=precision, seconds=seconds, longest_step=longest_step)
    joint = measured(with_head, threads=choice)
    finetune = joint if without_head == with_head else measured(without_head, threads=(joint.threads,))
    model = empty_model(ModelSpec(config.encoder, config.head, vocab_size=config.tokenizer.vocab_size, labels=2, pad_id=0))
    return Machine(joint, finetune, count_parameters(model), on_gpu)


def _phase_of_each_kind(phases: Sequence[PhaseConfig]) -> tuple[PhaseConfig, PhaseConfig]:
    """Return the first phase with the vocabulary head and the first without it; if all are of one kind, the first phase twice."""
    with_head = next((phase for phase in phases if phase.text_terms), phases[0])
    return with_head, next((phase for phase in phases if not phase.text_terms), with_head)


def _measured(
    config: RunConfig, phase: PhaseConfig, *, precision: Precision, threads: Sequence[int], seconds: float, longest_step: float
) -> Measurement:
    """Measure a phase.

    Raises:
        EnvironmentFault: if a step needs more memory than is available; none is run.
    """
    setup = _setup(config, phase, precision)
    device, available = setup.device, memory_of(setup.device)
    if device.type == "cpu" and available is not None and (least := least_step_memory(setup)) > available:
        raise EnvironmentFault(
            f"a step of phase {phase.name!r} needs at least {size(least)} of memory and {size(available)} are available; "
            f"pass a smaller --preset, a smaller --set phases[{config.phases.index(phase)}].batch_size=N, or close other programs"
        )
    if longest_step < math.inf and device.type == "cpu":
        rough = estimate(setup, threads=threads)
        if step_tokens(setup.phase) > longest_step * rough.tokens_per_second:
            fixed_speed = config.tokens_per_second
            return rough if fixed_speed is None else replace(rough, tokens_per_second=fixed_speed, cpu_share=1.0)
    if config.tokens_per_second is None:
        return measure(setup, threads=threads, seconds=seconds)
    flops_per_token, step_bytes = count_step(setup)
    return Measurement(config.tokens_per_second, threads[0], 1.0, flops_per_token, step_bytes)


def _setup(config: RunConfig, phase: PhaseConfig, precision: Precision) -> TrainingSetup:
    """Return the set-up to measure a phase with; an open row length is set to that of most tasks."""
    (fixed,) = budget.in_rows([phase], min(128, config.encoder.max_positions))
    device = resolve_device(config.device)
    return TrainingSetup(config.encoder, config.head, fixed, config.tokenizer.vocab_size, precision, device=device)


def _corpus_bytes(config: RunConfig) -> int:
    if config.corpus is None:
        return 0
    if config.corpus.files == ("",):
        return TYPICAL_TEXTS.corpus_bytes
    return raw_bytes((str(stamp.path), stamp.bytes) for stamp in stamp_inputs(config.corpus.files))


def _starved(measured: Measurement) -> str:
    threads = counted(measured.threads, "thread")
    return (
        f"this machine is busy: training got {measured.cpu_share:.0%} of the CPU time of its {threads} while it was "
        "measured, so the plan may be too small; close other programs, or pass --set tokens_per_second=N"
    )


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of memory that this process can use in all; for a GPU, the free bytes and those that PyTorch has reserved."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
    free, here = available_memory(), resident_memory()
    return None if free is None or here is None else free + here


def _free_disk(*folders: Path) -> int:
    """Return the free bytes of the fullest disk of these folders."""
    existing = [next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()) for folder in folders]
    return min(shutil.disk_usage(path).free for path in existing)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The planned phases (schedule.json).

    speed: in tokens per unit of the budget. amount: the part of the budget (seconds or operations) for training; None without a budget.
    seconds_per_unit: 1 if the budget is a time. finishing: seconds after training. rows: row length, in tokens, of phases that leave it
    open. fingerprint: of the artifact; "" before it is published.
    """

    phases: tuple[PhaseConfig, ...]
    sizes: budget.Sizes
    speed: budget.Speed
    amount: float | None
    seconds_per_unit: float
    finishing: float
    rows: int
    fingerprint: str = ""

    @property
    def planner(self) -> budget.Planner:
        return budget.Planner(self.sizes, self.speed)


_MACHINE, _SCHEDULE = TypeAdapter(Machine), TypeAdapter(Schedule)


def _write_schedule(planned: Schedule, folder: Path) -> None:
    write_json(folder / "schedule.json", _SCHEDULE.dump_python(planned, mode="json", exclude={"fingerprint"}))


def _read_schedule(artifact: Artifact) -> Schedule:
    planned = _SCHEDULE.validate_json((artifact.path / "schedule.json").read_bytes())
    return replace(planned, fingerprint=artifact.fingerprint)


def phases_in_rows(run: RunContext, text: EncodedTexts) -> tuple[PhaseConfig, ...]:
    """Return the phases with the row length of the schedule; the teacher labels pieces of passages of this length."""
    rows = budget.row_length(_lengths(text, run.task.train), longest=run.config.encoder.max_positions)
    return budget.in_rows(run.config.phases, rows)


def schedule(run: RunContext, plan: RunPlan, text: EncodedTexts) -> Schedule:
    """Set steps, row length and evaluation interval of every phase, from the remaining time and the tokens.

    If the budget is a time, the speed is measured again with the final row length and vocabulary.
    """

    def write(target: Path) -> None:
        external = int(text.selection.characters() / CHARACTERS_PER_TOKEN) if text.selection else 0
        lengths = [_lengths(text, split) for split in (run.task.train, run.task.dev, run.task.test)]
        sizes, rows = sizes_in_rows(run.task, run.config, lengths, external_tokens=external)
        speed, budget_speed = _measure_again(run, plan, rows=rows, vocab_size=text.tokenizer.vocab_size, lengths=lengths[0])
        planner = budget.Planner(sizes, budget_speed)
        of_operations = run.config.limit.flops is not None
        seconds_per_unit = budget_speed.joint / speed.joint if of_operations else 1.0
        finishing = finishing_seconds(sizes, speed)
        amount = run.config.limit.flops if run.seconds_left is None else run.seconds_left - finishing
        # The plan stage refused budgets that are too small. If the machine became busy since, the run ends late rather than not at all.
        least = planner.minimum_amount(run.config.phases)
        if amount is not None and least > amount:
            if of_operations:
                message = f"the texts are longer than estimated: the minimum is {least:.1e} operations, not {amount:.1e}"
            else:
                left = amount + finishing - finishing_seconds(sizes, plan.speed)
                message = late_message(least - amount, budget.Planner(sizes, plan.speed).minimum_amount(run.config.phases) - left)
            run.emit(Event("warning", "schedule", message))
            amount = least
        phases = planner.plan(run.config.phases, amount=amount, rows=rows)
        _write_schedule(Schedule(phases, sizes, budget_speed, amount, seconds_per_unit, finishing, rows), target)
        for phase in phases:
            seconds = planner.amount_of(phase) * seconds_per_unit
            run.emit(Event("plan", "schedule", budget.describe(phase, sizes, seconds=seconds)))

    settings = _settings(run, _SCHEDULED_BY, plan.precision, plan.threads)
    inputs = {"tokenizer": text.tokenizer.fingerprint, "selection": fingerprint(text.selection), "task": task_fingerprint(run.task)}
    inputs |= {} if text.prompt is None else {"prompt": asdict(text.prompt)}
    return _read_schedule(run.build(Stage("schedule", 3, settings, inputs, write)))


def late_message(late: float, late_at_planned_speed: float) -> str:
    """Return the warning that a run will end `late` seconds after its budget, with the cause.

    late_at_planned_speed: the same if training were as fast as planned; if it is positive, earlier stages are the cause.
    """
    reason = (
        "the stages before training took longer than planned" if late_at_planned_speed > 0 else "training is slower than measured before"
    )
    return f"{reason}: the run will end about {late:.0f} s late"


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
        planner = planned.planner
        if run.config.limit.flops is not None:
            left = run.config.limit.flops - sum(report["executed_flops"] for report in reports)
        else:
            left = (planned.amount or 0.0) - sum(report["seconds"] for report in reports)
            left = left if run.seconds_left is None else min(left, run.seconds_left - planned.finishing)
            factor = budget.drift(planner.amount_of(planned.phases[number - 1]), reports[-1]["seconds"])
            planner = replace(planner, speed=budget.Speed(planner.speed.joint * factor, planner.speed.finetune * factor))
        coming = run.config.phases[number:]
        # Exceeding the budget a little is better than a last phase of no use.
        was_planned = sum(map(planner.amount_of, planned.phases[number:]))
        allowed = left + MAX_LATENESS * (run.config.limit.flops or run.config.limit.seconds or 0.0)
        amount = max(left, min(was_planned, allowed), planner.minimum_amount(coming))
        phases = (*planned.phases[:number], *planner.plan(coming, amount=amount, rows=planned.rows))
        _write_schedule(replace(planned, phases=phases, speed=planner.speed), target)
        for before, phase in zip(planned.phases[number:], phases[number:], strict=True):
            if before != phase:
                now = budget.describe(phase, planner.sizes, seconds=planner.amount_of(phase) * planned.seconds_per_unit)
                run.emit(Event("plan", name, f"planned again: {now}; at the start: {before.steps:,} steps"))

    inputs = {"schedule": planned.fingerprint, "done": ended[-1].artifact.fingerprint}
    return _read_schedule(run.build(Stage(name, 1, {}, inputs, write, kind="schedule"))).phases


def _measure_again(run: RunContext, plan: RunPlan, *, rows: int, vocab_size: int, lengths: IntArray) -> tuple[budget.Speed, budget.Speed]:
    """Return the speed in tokens per second and in tokens per unit of the budget, measured on sequences of the task's lengths.

    Unless the budget is a time, the speed in tokens per second is that of the plan.
    """
    config, seconds, device = run.config, run.config.limit.seconds, resolve_device(run.config.device)

    def rates(rate: Callable[[TrainingSetup], float]) -> budget.Speed:
        phases = budget.in_rows(_phase_of_each_kind(config.phases), rows)
        measured = {
            name: rate(TrainingSetup(config.encoder, config.head, phase, vocab_size, plan.precision, lengths, device))
            for name, phase in {phase.name: phase for phase in phases}.items()  # once if both are the same phase
        }
        return budget.Speed(*(measured[phase.name] for phase in phases))

    if config.limit.flops is not None:
        return plan.speed, rates(lambda setup: 1 / count_flops(setup))
    if config.tokens_per_second is not None or seconds is None:
        return plan.speed, plan.speed
    window = min(2.0, REMEASUREMENT_SHARE * seconds)
    speed = rates(lambda setup: measure(setup, threads=(plan.threads,), seconds=window).tokens_per_second)
    return speed, speed


def _lengths(text: EncodedTexts, examples: Sequence[Example]) -> IntArray:
    """Return the untruncated tokens per sequence, [CLS] and [SEP] included: for each example, or for each example in each pattern."""
    return sequences_of(text.tokenizer, examples, max_length=UNCUT, prompt=text.prompt).lengths
