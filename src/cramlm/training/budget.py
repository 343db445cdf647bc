"""The planner: from a time budget and the sizes of the data to the numbers a recipe leaves open.

Two decisions, at two moments. Before anything is read (`plan_selection`): how much text to retrieve, from the speed of this
machine, so that training passes over it a few times. After tokenizing, when the time left and the tokens are known
(`plan_phases`): row length, steps of every phase and how often dev is evaluated. Both are pure functions of what they are given;
the pipeline publishes their answers in the run folder, so that a run that is started again keeps its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cramlm.config import PhaseConfig
from cramlm.errors import UsageError
from cramlm.records import IntArray
from cramlm.retriever_config import RetrieverConfig, unbounded

PASSES_OVER_SELECTION = 5.0  # repeated text keeps most of its use for a handful of passes
FEWEST_TOKENS = 50_000  # of a selection, whatever the budget: a few hundred passages
UNPLANNED_DOCUMENTS = 10_000
FINETUNE_SHARE = 0.3  # of the time for training, at most
EVALUATION_SHARE = 0.1  # of a phase's time, at most, for looking at dev
EVALUATION_SPEEDUP = 3.0  # a forward pass costs a third of a training step
FEWEST_STEPS = 20
DROPOUT, DROPOUT_ABOVE_PASSES = 0.1, 8.0  # fewer passes underfit: dropout costs them 0.5 to 5 points (docs/log.md)
ROW_LENGTHS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Speed:
    """Real tokens per second that training was measured at on this machine, with and without the vocabulary head."""

    joint: float
    finetune: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the planner knows of the data: counts, and tokens with their [CLS] and [SEP]."""

    train_examples: int
    train_tokens: int
    dev_tokens: int
    test_tokens: int
    external_tokens: int


def plan_selection(retriever: RetrieverConfig, *, seconds: float | None, tokens_per_second: float) -> RetrieverConfig:
    """Bound the selection to what `seconds` of training can read `PASSES_OVER_SELECTION` times; a bound set by hand stays.

    Without a budget (None) a retriever that finds documents by queries keeps all of them; one that lists the whole corpus gives
    `UNPLANNED_DOCUMENTS`.
    """
    if retriever.bounded:
        return retriever
    if seconds is not None:
        affordable = max(FEWEST_TOKENS, int(seconds * tokens_per_second / PASSES_OVER_SELECTION))
        return retriever.model_copy(update={"max_tokens": affordable})
    return retriever.model_copy(update={"max_documents": UNPLANNED_DOCUMENTS}) if unbounded(retriever) else retriever


def row_length(lengths: IntArray, *, longest: int) -> int:
    """The smallest of `ROW_LENGTHS` that holds 95 % of the training texts whole, else the largest; never over `longest`."""
    needed = float(np.quantile(lengths, 0.95)) if len(lengths) else 0.0
    fitting = [length for length in ROW_LENGTHS if length >= needed]
    return min(fitting[0] if fitting else ROW_LENGTHS[-1], longest)


def finetune_passes(examples: int) -> float:
    """Passes over the labelled texts: many over few, at least 10 over many (about 1,000 to 1,900 updates of 32 in between)."""
    return float(np.clip(40_000 / max(examples, 1), 10, 60))


def plan_phases(phases: Sequence[PhaseConfig], *, sizes: Sizes, speed: Speed, seconds: float | None, rows: int) -> tuple[PhaseConfig, ...]:
    """Steps, row length, dropout and evaluation interval for every phase that leaves them open.

    Phases on labels alone get `finetune_passes`, within `FINETUNE_SHARE` of the time when other phases want the rest; those others
    share what is left. `seconds` is what training may still take; None = no budget, and then open steps must come from passes.

    Raises:
        UsageError: if there is no budget and a phase names neither steps nor passes, or the time is too short to train at all.
    """
    phases = [phase if phase.max_length else phase.model_copy(update={"max_length": rows}) for phase in phases]
    open_phases = [phase for phase in phases if phase.steps is None and phase.passes is None]
    spent = sum(_fixed_steps(phase, sizes) * _seconds_per_step(phase, sizes, speed) for phase in phases if phase not in open_phases)
    left = None if seconds is None else seconds - spent
    label_phases = [phase for phase in open_phases if not phase.uses_mlm]
    text_phases = [phase for phase in open_phases if phase.uses_mlm]
    if text_phases and left is None:
        raise UsageError(f"phase {text_phases[0].name!r} has no steps and there is no budget; pass --budget 20m or --set phases[0].steps=N")
    planned: dict[str, int] = {}
    for phase in label_phases:
        steps = _steps_for_passes(phase, sizes, finetune_passes(sizes.train_examples))
        if left is not None:
            allowed = left * (FINETUNE_SHARE if text_phases else 1.0) / len(label_phases)
            steps = min(steps, int(allowed / _seconds_per_step(phase, sizes, speed)))
        planned[phase.name] = steps
    if left is not None:
        left -= sum(planned[phase.name] * _seconds_per_step(phase, sizes, speed) for phase in label_phases)
        for phase in text_phases:
            planned[phase.name] = int(left / len(text_phases) / _seconds_per_step(phase, sizes, speed))
    for name, steps in planned.items():
        if steps < FEWEST_STEPS:
            raise UsageError(f"the budget leaves phase {name!r} only {max(steps, 0)} steps on this machine; pass a longer --budget")
    result = []
    for phase in phases:
        steps = planned.get(phase.name, _fixed_steps(phase, sizes))
        every = phase.evaluate_every or _evaluation_interval(phase, steps, sizes, speed)
        dropout = DROPOUT if _passes_over_labels(phase, steps, sizes) > DROPOUT_ABOVE_PASSES else 0.0
        dropout = dropout if phase.dropout is None else phase.dropout
        result.append(phase.model_copy(update={"steps": steps, "evaluate_every": every, "dropout": dropout}))
    return tuple(result)


def describe(phase: PhaseConfig, sizes: Sizes, speed: Speed) -> str:
    """A planned phase in one line: steps, tokens, passes over what it reads, time without evaluations."""
    assert phase.steps is not None, "describe comes after plan_phases"
    tokens = phase.steps * _tokens_per_step(phase, sizes)
    share = phase.task / (phase.external + phase.task)
    passes = [f"{tokens * share / max(sizes.train_tokens, 1):.1f} passes over the task"] if phase.task else []
    passes += [f"{tokens * (1 - share) / max(sizes.external_tokens, 1):.1f} over the selection"] if phase.external else []
    minutes = phase.steps * _seconds_per_step(phase, sizes, speed) / 60
    shape = f"{phase.steps:,} steps in rows of {phase.max_length}"
    return f"{phase.name}: {shape}, {tokens / 1e6:.1f}M tokens ({', '.join(passes)}), about {minutes:.1f} min"


def _evaluation_interval(phase: PhaseConfig, steps: int, sizes: Sizes, speed: Speed) -> int:
    """Ten looks at dev where its share of the time allows, at least two; only one, at the end, where the last weights are kept."""
    if phase.keep == "last":
        return max(1, steps)
    look = sizes.dev_tokens / (speed.finetune * EVALUATION_SPEEDUP)
    affordable = EVALUATION_SHARE * steps * _seconds_per_step(phase, sizes, speed) / max(look, 1e-9)
    return max(1, -(-steps // int(np.clip(affordable, 2, 20))))


def _passes_over_labels(phase: PhaseConfig, steps: int, sizes: Sizes) -> float:
    """How often a phase that learns the labels alone reads each; text beside them (MLM) is regularisation enough."""
    return 0.0 if phase.uses_mlm else steps * _tokens_per_step(phase, sizes) / max(sizes.train_tokens, 1)


def _fixed_steps(phase: PhaseConfig, sizes: Sizes) -> int:
    if phase.steps is not None:
        return phase.steps
    return 0 if phase.passes is None else _steps_for_passes(phase, sizes, phase.passes)


def _tokens_per_step(phase: PhaseConfig, sizes: Sizes) -> float:
    return float(phase.batch_size) if phase.batch_unit == "tokens" else phase.batch_size * sizes.train_tokens / max(sizes.train_examples, 1)


def _seconds_per_step(phase: PhaseConfig, sizes: Sizes, speed: Speed) -> float:
    return _tokens_per_step(phase, sizes) / (speed.joint if phase.uses_mlm else speed.finetune)


def _steps_for_passes(phase: PhaseConfig, sizes: Sizes, passes: float) -> int:
    tokens = sizes.train_tokens if phase.task else sizes.external_tokens
    share = phase.task / (phase.external + phase.task) if phase.task else 1.0
    return max(1, round(passes * tokens / (share * _tokens_per_step(phase, sizes))))
