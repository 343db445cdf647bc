"""The planner: sets what a recipe leaves open from the budget and the sizes of the data.

It decides three times. Before any text is read, `plan_selection` bounds the text to retrieve by the speed of this machine, so that training
passes over it a few times. After tokenizing, when the remaining time and the tokens are known, `Planner.plan` sets the row length, the
steps of every phase and the number of dev evaluations. After each phase but the last it plans the remaining phases again, from the time
that is left at the speed that was reached (`drift`). All are pure functions; the pipeline stores their results in the run folder, so a run
that is started again keeps its plan.

A budget is an amount of seconds or of floating-point operations. A `Speed` is in tokens per second or tokens per operation; nothing else
differs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cramlm.config.phase import PhaseConfig
from cramlm.config.retriever import RetrieverConfig, unbounded
from cramlm.errors import UsageError, counted
from cramlm.records import IntArray

PASSES_OVER_SELECTION = 1.5  # of the whole budget; more text beats more passes (docs/log.md)
MIN_TOKENS = 50_000  # of a selection, with any budget: a few hundred passages
UNPLANNED_DOCUMENTS = 10_000
FINETUNE_SHARE = 0.3  # of the time for training, at most
MAX_FINETUNE_SHARE, FEW_PASSES = 0.6, 2.0  # at most, if FINETUNE_SHARE pays for fewer passes over the labels (docs/log.md)
EVALUATION_SHARE = 0.1  # of a phase's time, for dev evaluations; at least one evaluation
MAX_EVALUATIONS = 20
MAX_DRIFT = 5.0  # a larger factor between planned and reached speed is an accident, not the speed of this machine
EVALUATION_SPEEDUP = 3.0  # a forward pass costs a third of a training step
MIN_STEPS = 20
_MOST_STEPS = 10**15  # of a phase; `bisect` takes numbers of 64 bits
DROPOUT, DROPOUT_ABOVE_PASSES = 0.1, 8.0  # fewer passes underfit: dropout costs them 0.5 to 5 points (docs/log.md)
ROW_LENGTHS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens, without padding, per unit of the budget (second or operation) in training with and without the vocabulary head."""

    joint: float
    finetune: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the data: numbers of texts and labels, and tokens with [CLS] and [SEP]."""

    train_examples: int
    labels: int
    train_tokens: int
    dev_tokens: int
    test_tokens: int
    external_tokens: int

    def tokens_of(self, phase: PhaseConfig) -> float:
        """Tokens, without padding, that a planned phase reads."""
        assert phase.steps is not None, "it is planned"
        return phase.steps * self.tokens_per_step(phase)

    def passes_of(self, phase: PhaseConfig) -> dict[str, float]:
        """Passes of a planned phase over the task's texts and over the selection, for the texts that it reads."""
        tokens, share = self.tokens_of(phase), phase.task / (phase.external + phase.task)
        over = {"task": tokens * share / max(self.train_tokens, 1)} if phase.task else {}
        return over | ({"selection": tokens * (1 - share) / max(self.external_tokens, 1)} if phase.external else {})

    def tokens_per_step(self, phase: PhaseConfig) -> float:
        if phase.batch_unit == "tokens":
            return float(phase.batch_size)
        return phase.batch_size * self.train_tokens / max(self.train_examples, 1)

    def steps_for_passes(self, phase: PhaseConfig, passes: float) -> int:
        tokens = self.train_tokens if phase.task else self.external_tokens
        share = phase.task / (phase.external + phase.task) if phase.task else 1.0
        return max(1, round(passes * tokens / (share * self.tokens_per_step(phase))))


TYPICAL = Sizes(train_examples=4000, labels=8, train_tokens=200_000, dev_tokens=25_000, test_tokens=50_000, external_tokens=0)
"""Sizes that are assumed if no files are given."""


def plan_selection(
    retriever: RetrieverConfig, *, amount: float | None, tokens_per_unit: float, passes: float = PASSES_OVER_SELECTION
) -> RetrieverConfig:
    """Bound the selection to the tokens that a budget of `amount` reads `passes` times; a bound from the config stays.

    Without a budget (None) a retriever with queries keeps all passages that they find, and one that lists the whole corpus gets
    `UNPLANNED_DOCUMENTS`.
    """
    if retriever.bounded:
        return retriever
    if amount is not None:
        affordable = max(MIN_TOKENS, int(amount * tokens_per_unit / passes))
        return retriever.model_copy(update={"max_tokens": affordable})
    return retriever.model_copy(update={"max_documents": UNPLANNED_DOCUMENTS}) if unbounded(retriever) else retriever


def passes_over_selection(phases: Sequence[PhaseConfig]) -> float:
    """Passes over the selection: the smallest `max_passes` of the phases on external text, if one is set."""
    return min((phase.max_passes for phase in phases if phase.external and phase.max_passes), default=PASSES_OVER_SELECTION)


def row_length(lengths: IntArray, *, longest: int) -> int:
    """The smallest of `ROW_LENGTHS` that holds 95 % of the training texts without truncation, else the largest; at most `longest`."""
    needed = float(np.quantile(lengths, 0.95)) if len(lengths) else 0.0
    fitting = [length for length in ROW_LENGTHS if length >= needed]
    return min(fitting[0] if fitting else ROW_LENGTHS[-1], longest)


def in_rows(phases: Sequence[PhaseConfig], rows: int) -> tuple[PhaseConfig, ...]:
    """The phases with this row length where they leave it open."""
    return tuple(phase if phase.max_length else phase.model_copy(update={"max_length": rows}) for phase in phases)


def finetune_passes(examples: int) -> float:
    """Passes over the labelled texts, 10 to 60: the more texts, the fewer passes (about 1,000 to 1,900 updates of 32 in between)."""
    return float(np.clip(40_000 / max(examples, 1), 10, 60))


def is_open(phase: PhaseConfig) -> bool:
    """Return True if the planner sets the length of the phase."""
    return phase.steps is None and phase.passes is None


def drift(planned: float, took: float) -> float:
    """The factor by which a phase was faster than planned; 1 if it took no measurable time."""
    if planned <= 0 or took <= 0:
        return 1.0
    return float(np.clip(planned / took, 1 / MAX_DRIFT, MAX_DRIFT))


def describe(phase: PhaseConfig, sizes: Sizes, *, seconds: float) -> str:
    """A planned phase in one line: steps, tokens, passes over what it reads, and the time it is planned to take."""
    assert phase.steps is not None
    over = ", ".join(f"{count:.1f} passes over the {text}" for text, count in sizes.passes_of(phase).items())
    shape = f"{counted(phase.steps, 'step')} in rows of {phase.max_length}"
    return f"{phase.name}: {shape}, {sizes.tokens_of(phase) / 1e6:.2f}M tokens ({over}), about {seconds / 60:.1f} min"


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans phases on data of these sizes at this speed. What they cost is in units of the budget."""

    sizes: Sizes
    speed: Speed

    def plan(self, phases: Sequence[PhaseConfig], *, amount: float | None, rows: int) -> tuple[PhaseConfig, ...]:
        """Set steps, row length, dropout and evaluation interval of every phase that leaves them open.

        Phases without the vocabulary head get at most `_share_beside_text` of the budget if there are phases with it, which share the rest;
        those on labelled texts alone get `finetune_passes` within it. amount: what training may still take, dev evaluations included; None
        = no budget, in which case open steps must come from passes.

        Raises:
            UsageError: if there is no budget and a phase names neither steps nor passes, or the budget is too small to train at all.
        """
        phases = in_rows(phases, rows)
        boundless = [phase.name for phase in phases if is_open(phase) and (phase.text_terms or phase.external) and phase.max_passes is None]
        if boundless and amount is None:
            raise UsageError(f"phase {boundless[0]!r} has no steps and there is no budget; pass --budget 20m or --set phases[0].steps=N")
        planned = []
        for phase, steps in zip(phases, self._steps(phases, amount), strict=True):
            every = phase.evaluate_every or max(1, -(-steps // max(1, self._evaluations(phase, steps))))
            dropout = DROPOUT if self._passes_over_labels(phase, steps) > DROPOUT_ABOVE_PASSES else 0.0
            dropout = dropout if phase.dropout is None else phase.dropout
            planned.append(phase.model_copy(update={"steps": steps, "evaluate_every": every, "dropout": dropout}))
        return tuple(planned)

    def _passes_over_labels(self, phase: PhaseConfig, steps: int) -> float:
        """Passes of a phase on labels alone over the labelled texts; 0 for phases over passages, which need no further regularisation."""
        tokens = 0.0 if phase.text_terms or phase.external else steps * self.sizes.tokens_per_step(phase)
        return tokens / max(self.sizes.train_tokens, 1)

    def _steps(self, phases: Sequence[PhaseConfig], amount: float | None) -> list[int]:
        """The steps of each phase. Fixed phases come first, then those on labels, then those with the vocabulary head share the rest.

        Raises:
            UsageError: if an open phase gets fewer than `MIN_STEPS`.
        """
        fixed = {phase.name: self._fixed_steps(phase) for phase in phases if not is_open(phase)}
        label_phases = [phase for phase in phases if is_open(phase) and not phase.text_terms]
        text_phases = [phase for phase in phases if is_open(phase) and phase.text_terms]
        left = math.inf if amount is None else amount
        left -= sum(self._cost(phase, fixed[phase.name]) for phase in phases if phase.name in fixed)
        planned: dict[str, int] = {}
        for phase in label_phases:
            allowed = left / len(label_phases)
            if text_phases:
                allowed = self._share_beside_text(phase, allowed)
            planned[phase.name] = min(self._most_steps(phase), self._affordable_steps(phase, allowed))
        left -= sum(self._cost(phase, planned[phase.name]) for phase in label_phases)
        for phase in text_phases:
            planned[phase.name] = min(self._most_steps(phase), self._affordable_steps(phase, left / len(text_phases)))
        for name, steps in planned.items():
            if steps < MIN_STEPS:
                raise UsageError(f"the budget leaves phase {name!r} {counted(max(steps, 0), 'step')}, and at least {MIN_STEPS} are needed")
        return [{**fixed, **planned}[phase.name] for phase in phases]

    def minimum_amount(self, phases: Sequence[PhaseConfig]) -> float:
        """The smallest amount, to 1 %, with which `plan` succeeds: fixed phases complete, open ones with `MIN_STEPS`."""
        fixed = sum(self._cost(phase, self._fixed_steps(phase)) for phase in phases if not is_open(phase))
        label_phases = [phase for phase in phases if is_open(phase) and not phase.text_terms]
        text_phases = [phase for phase in phases if is_open(phase) and phase.text_terms]
        share = FINETUNE_SHARE if text_phases else 1.0  # its least, and 1 - its most for the text
        slack = 1.0 + 1e-6  # against rounding
        for_labels = max((slack * self._minimum(phase) * len(label_phases) / share for phase in label_phases), default=0.0)
        for_text = sum(self._minimum(phase) for phase in text_phases)
        too_little, enough = fixed, fixed + slack * max(for_labels, for_text / (1 - MAX_FINETUNE_SHARE if label_phases else 1.0))

        while not self.suffices(phases, enough):
            too_little, enough = enough, 2 * enough
        while enough - too_little > 0.01 * enough:
            between = (too_little + enough) / 2
            if self.suffices(phases, between):
                enough = between
            else:
                too_little = between
        return enough

    def suffices(self, phases: Sequence[PhaseConfig], amount: float) -> bool:
        """Return True if `plan` succeeds. A little more than an amount that suffices may not: it may pay for one more evaluation."""
        try:
            self.plan(phases, amount=amount, rows=ROW_LENGTHS[0])
        except UsageError:
            return False
        return True

    def amount_of(self, phase: PhaseConfig) -> float:
        """Return the part of the budget that a planned phase takes, evaluations on dev included."""
        assert phase.steps is not None, "it is planned"
        return self._cost(phase, phase.steps)

    def _cost(self, phase: PhaseConfig, steps: int) -> float:
        """Cost of the updates and of the dev evaluations."""
        return steps * self._of_step(phase) + self._evaluations(phase, steps) * self._of_evaluation

    def _of_step(self, phase: PhaseConfig) -> float:
        return self.sizes.tokens_per_step(phase) / (self.speed.joint if phase.text_terms else self.speed.finetune)

    @property
    def _of_evaluation(self) -> float:
        return self.sizes.dev_tokens / (self.speed.finetune * EVALUATION_SPEEDUP)

    def _share_beside_text(self, phase: PhaseConfig, amount: float) -> float:
        """Return the most that a phase without the vocabulary head may take of `amount` if there are phases with it."""
        if phase.external:
            return FINETUNE_SHARE * amount
        few = self._cost(phase, self.sizes.steps_for_passes(phase, FEW_PASSES))
        return min(max(few, FINETUNE_SHARE * amount), MAX_FINETUNE_SHARE * amount)

    def _minimum(self, phase: PhaseConfig) -> float:
        """Return the most that `MIN_STEPS` steps can take, with the largest number of evaluations."""
        steps = (MIN_STEPS + 1) * self._of_step(phase)
        if phase.evaluate_every is not None:
            return steps + self._evaluations(phase, MIN_STEPS + 1) * self._of_evaluation
        return steps + max(EVALUATION_SHARE * steps, self._of_evaluation)

    def _affordable_steps(self, phase: PhaseConfig, amount: float) -> int:
        """Return the largest number of steps whose cost, which rises with them, is within `amount`; 0 if there is none."""
        most = int(min(max(0.0, amount / self._of_step(phase)), _MOST_STEPS))
        return bisect_right(range(1, most + 1), amount, key=lambda steps: self._cost(phase, steps))

    def _evaluations(self, phase: PhaseConfig, steps: int) -> int:
        """Number of dev evaluations: what `EVALUATION_SHARE` pays for, at least one; one, at the end, if the last weights are kept."""
        if not phase.learns_labels or steps <= 0:
            return 0
        if phase.evaluate_every is not None:
            return -(-steps // phase.evaluate_every)
        if phase.keep == "last":
            return 1
        affordable = EVALUATION_SHARE * steps * self._of_step(phase) / max(self._of_evaluation, 1e-30)
        return int(np.clip(affordable, 1, MAX_EVALUATIONS))

    def _fixed_steps(self, phase: PhaseConfig) -> int:
        return phase.steps if phase.steps is not None else self.sizes.steps_for_passes(phase, phase.passes or 0.0)

    def _most_steps(self, phase: PhaseConfig) -> int:
        """Return the steps of an open phase with any budget: those of its passes, `finetune_passes` on labels alone, or no limit."""
        passes = phase.max_passes
        if passes is None and not phase.text_terms and not phase.external:
            passes = finetune_passes(self.sizes.train_examples)
        return _MOST_STEPS if passes is None else max(MIN_STEPS, self.sizes.steps_for_passes(phase, passes))
