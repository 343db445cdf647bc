"""The settings of a phase: which text is sampled, the terms of its loss, masks, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from cramlm.config.base import FrozenModel
from cramlm.config.terms import LINEAR_TEACHER, Causal, Classify, Distil, MaskingConfig, Origin, Term, TermConfig

_T = TypeVar("_T", bound=TermConfig)


class OptimizerConfig(FrozenModel):
    """adamw: decoupled weight decay on matrices. muon: Muon for the hidden matrices, AdamW for embeddings, norms, heads."""

    kind: Literal["adamw", "muon"] = "muon"
    learning_rate: float = Field(1e-3, gt=0, description="AdamW's peak")
    muon_learning_rate: float = Field(4e-3, gt=0, description="Muon's peak; unused by adamw")
    weight_decay: float = Field(0.01, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: float = Field(1e-6, gt=0)
    clip_norm: float = Field(1.0, gt=0, description="largest gradient norm")


class ScheduleConfig(FrozenModel):
    """linear: up, then down to 0. wsd: up, flat, then down to 0 over the last `decay_fraction` of the steps."""

    kind: Literal["linear", "wsd"] = "wsd"
    warmup_fraction: float = Field(0.05, ge=0, le=0.5)
    decay_fraction: float = Field(0.4, gt=0, le=1, description="wsd only")


class PhaseConfig(FrozenModel):
    """One segment of training: which text is sampled, the terms of its loss, how long.

    The loss of a step is the sum of weight * mean over `terms` (training/objective.py). Fields that may be None are set by the planner
    (planning/budget.py) before training begins: steps, max_length, dropout, evaluate_every.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    terms: tuple[Term, ...] = Field(min_length=1, description="what the loss is the sum of (docs/objectives.md)")
    steps: int | None = Field(None, ge=0, description="optimizer updates; None = from passes, or set by the budget")
    passes: float | None = Field(
        None,
        gt=0,
        description="passes over the task's training texts (over the external text if no task text is drawn); used when steps is None",
    )
    max_passes: float | None = Field(
        None,
        gt=0,
        description="where the planner sets the steps: at most so many passes over the same; None = what the budget gives, and of phases "
        "on labels alone 10 to 60 by their number",
    )
    external: int = Field(0, ge=0, description="external : task, first number (rho_1)")
    task: int = Field(1, ge=0, description="external : task, second number")
    mixing: Literal["interleaved", "blended"] = Field(
        "blended",
        description="interleaved: whole batches take turns (the paper); blended: each batch holds both in this ratio of tokens",
    )
    loss_scale: Literal["sum", "mean"] = Field(
        "sum",
        description="sum: the paper's formula; mean: the released code's, the sum divided by the weights of the terms that a batch has",
    )
    start_from: str | None = Field(
        None,
        description="the earlier phase whose weights this one takes; 'start' = those the run began with; None = the phase before",
    )
    masking: MaskingConfig = MaskingConfig()
    batch_size: int = Field(4096, ge=1)
    batch_unit: Literal["tokens", "sequences"] = "tokens"
    max_length: int | None = Field(
        None,
        ge=8,
        description="longest sequence and row length, in tokens; None = chosen from the lengths of the training texts. "
        "Longer external text is cut into several sequences, task text is truncated",
    )
    external_length: int | None = Field(None, ge=8, description="longest sequence of external text; None = max_length")
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="in embeddings, attention outputs, feed-forward outputs, classifier; None = 0.1 where the labelled texts are passed "
        "over often enough to be learnt by heart, else 0",
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention probabilities (BERT: 0.1)")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    keep: Literal["best", "last"] = Field("best", description="weights that the phase hands on: best on dev, or the last")
    trains: Literal["all", "vectors"] = Field(
        "all", description="what updates change; vectors: those of a soft prompt alone, every other weight keeps its bits"
    )
    reset_task_head: bool = Field(False, description="draw the classifier anew at the start of this phase")
    evaluate_every: int | None = Field(
        None,
        ge=1,
        description="steps between dev evaluations; the best is kept. None = 10 times; a phase without the term classify has none",
    )
    checkpoint_every: int | None = Field(None, ge=1, description="steps between checkpoints; None = 10 times a phase")

    @field_validator("terms", mode="after")
    @classmethod
    def _without_weightless(cls, terms: tuple[Term, ...]) -> tuple[Term, ...]:
        if not any(term.weight for term in terms):
            raise ValueError("every term has weight 0, so there is nothing to learn; give one a weight")
        return tuple(term for term in terms if term.weight)

    @model_validator(mode="after")
    def _terms_agree(self) -> PhaseConfig:
        where = f"phase {self.name!r}"
        if self.external + self.task == 0:
            raise ValueError(f"{where}: external and task are both 0, so there is nothing to draw")
        shares = {"external": self.external, "task": self.task}
        seen: set[tuple[str, str]] = set()
        for term in self.terms:
            if not shares[term.on]:
                raise ValueError(
                    f"{where}: the term {term.kind!r} is on {term.on} text, of which none is drawn; set {term.on} = 1 or remove it"
                )
            if (term.kind, term.on) in seen:
                raise ValueError(f"{where}: two terms {term.kind!r} on {term.on} text; keep one of them")
            seen.add((term.kind, term.on))
        unused = [origin for origin, share in shares.items() if share and all(term.on != origin for term in self.terms)]
        if unused:
            raise ValueError(f"{where}: no term is on {unused[0]} text, which is drawn all the same; add one, or set {unused[0]} = 0")
        kinds = {term.kind for term in self.text_terms}
        causal = [term for term in self.terms if isinstance(term, Causal)]
        if len({term.share for term in causal}) > 1:
            raise ValueError(f"{where}: the terms 'causal' have different shares of the steps; give them one")
        if causal and causal[0].share == 1.0:
            if others := [term.kind for term in self.terms if not isinstance(term, Causal)]:
                raise ValueError(
                    f"{where}: the term 'causal' reads every step left to right, where {others[0]!r} cannot be learnt (a first token "
                    "sees only itself); set its share below 1, or use a phase for each"
                )
        elif causal and len(kinds) == 1:
            raise ValueError(f"{where}: the term 'causal' has share {causal[0].share}, but no other term learns from text; set share = 1.0")
        if len(kinds - {"causal"}) > 1:
            raise ValueError(f"{where}: {' and '.join(map(repr, sorted(kinds)))} change the same tokens; use a phase for each")
        if self.masking.is_scored != (self.masking.scores_of is not None):
            raise ValueError(f"{where}: masking.kind 'scored' and masking.scores_of come together; name the phase that scores")
        if self.max_length is not None and self.text_length < 8:
            raise ValueError(f"{where}: max_length {self.max_length} leaves no room for spans to fill in; set it to 32 or more")
        return self

    @property
    def text_terms(self) -> tuple[Term, ...]:
        """Those that learn from tokens."""
        return tuple(term for term in self.terms if term.reads_text)

    def terms_of(self, kind: type[_T]) -> tuple[_T, ...]:
        """Those of one class."""
        return tuple(term for term in self.terms if isinstance(term, kind))

    def distil(self, on: Origin) -> Distil | None:
        """The term that learns from a teacher's soft labels of this text."""
        return next((term for term in self.terms_of(Distil) if term.on == on), None)

    @property
    def learns_labels(self) -> bool:
        """True if gold labels are learnt, so that dev scores mean something."""
        return bool(self.terms_of(Classify))

    @property
    def row_length(self) -> int:
        """`max_length`, once the planner has set it."""
        assert self.max_length is not None, f"phase {self.name}: max_length is resolved before training"
        return self.max_length

    @property
    def text_length(self) -> int:
        """Tokens of the longest sequence that is drawn: what fits into a row as every term leaves it."""
        return min(term.text_length(self.row_length, self.masking) for term in self.terms)

    @property
    def trains_mlm_head(self) -> bool:
        """True if the vocabulary head learns what a [MASK] stands for."""
        return any(term.trains_mlm_head for term in self.terms)

    @property
    def needs_words(self) -> bool:
        """True if it must be known where the words of the text begin."""
        by_masks = self.masking.kind in ("whole-word", "span", "phrase")
        return any(term.needs_words or (term.masks and by_masks) for term in self.terms)

    @property
    def needs_token_labels(self) -> bool:
        """True if an earlier model must say which tokens of the labelled texts are important."""
        return any(term.needs_token_labels for term in self.terms)

    @property
    def needs_scores(self) -> bool:
        """True if an earlier phase must score the tokens that masks choose from."""
        return self.masking.is_scored and any(term.masks for term in self.terms)


def linear_teachers(phase: PhaseConfig) -> tuple[Distil, ...]:
    """The terms that learn from the linear teacher."""
    return tuple(term for term in phase.terms_of(Distil) if term.teacher == LINEAR_TEACHER)


def check_order(phases: Sequence[PhaseConfig]) -> None:
    """Raises ValueError if a phase names one that does not come before it, or one that does not score."""
    earlier: dict[str, PhaseConfig] = {}
    for phase in phases:
        named = [("start_from", phase.start_from), ("masking.scores_of", phase.masking.scores_of)]
        named += [("teacher", term.teacher) for term in phase.terms_of(Distil) if term.teacher != LINEAR_TEACHER]
        for setting, name in named:
            if name is not None and name not in earlier and (setting, name) != ("start_from", "start"):
                raise ValueError(f"phase {phase.name!r}: {setting} {name!r} is no earlier phase; those are {', '.join(earlier) or 'none'}")
        if phase.needs_token_labels and not earlier:
            raise ValueError(
                f"phase {phase.name!r}: the term 'important_tokens' needs a model that knows the labels; learn them in a phase before it"
            )
        if phase.masking.scores_of is not None and not earlier[phase.masking.scores_of].needs_token_labels:
            raise ValueError(
                f"phase {phase.name!r}: {phase.masking.scores_of!r} scores nothing; only a phase with the term important_tokens does"
            )
        for term in phase.terms_of(Distil):
            if term.teacher != LINEAR_TEACHER and (term.on != "external" or not earlier[term.teacher].learns_labels):
                raise ValueError(
                    f"phase {phase.name!r}: teacher {term.teacher!r} must be a phase that learns labels, and its term on external text"
                )
        earlier[phase.name] = phase
