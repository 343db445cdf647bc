"""Settings of a phase: sampled text, loss terms, masking, optimizer and schedule."""

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
    clip_norm: float = Field(1.0, gt=0, description="maximum gradient norm")


class ScheduleConfig(FrozenModel):
    """linear: linear warm-up, then linear decay to 0. wsd: constant in between; decays over the last `decay_fraction` of the steps."""

    kind: Literal["linear", "wsd"] = "wsd"
    warmup_fraction: float = Field(0.05, ge=0, le=0.5)
    decay_fraction: float = Field(0.4, gt=0, le=1, description="wsd only")


class PhaseConfig(FrozenModel):
    """One phase of training.

    The loss of a step is the sum of weight * mean loss over `terms` (training/objective.py). Where steps, max_length, dropout
    and evaluate_every are None, the planner sets them before training starts (planning/budget.py).
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    terms: tuple[Term, ...] = Field(min_length=1, description="terms whose weighted sum is the loss (docs/guides/objectives.md)")
    steps: int | None = Field(None, ge=1, description="optimizer updates; None = from passes, or set by the budget")
    passes: float | None = Field(
        None,
        gt=0,
        description="passes over the training texts (over the external text if no task text is sampled); used if steps is None",
    )
    max_passes: float | None = Field(
        None,
        gt=0,
        description="maximum passes if the planner sets the steps; None = limited by the budget alone, and in phases on labels alone by 10 "
        "to 60 passes, depending on the number of texts",
    )
    external: int = Field(0, ge=0, description="external text in the ratio external : task (rho_1)")
    task: int = Field(1, ge=0, description="task text in the ratio external : task")
    mixing: Literal["interleaved", "blended"] = Field(
        "blended",
        description="interleaved: batches of either text alternate (the paper); blended: each batch has both, in this ratio of tokens",
    )
    loss_scale: Literal["sum", "mean"] = Field(
        "sum",
        description="sum: the paper's formula; mean: as in the released code, divided by the sum of the weights of the terms in a batch",
    )
    start_from: str = Field(
        "previous",
        description="weights to start from: 'previous' = those of the phase before, 'start' = the initial weights of the run, or the name "
        "of an earlier phase",
    )
    masking: MaskingConfig = MaskingConfig()
    batch_size: int = Field(4096, ge=1)
    batch_unit: Literal["tokens", "sequences"] = "tokens"
    max_length: int | None = Field(
        None,
        ge=8,
        description="maximum sequence and row length, in tokens; None = from the lengths of the training texts. Longer external text is "
        "cut into several sequences, longer task text is truncated",
    )
    external_length: int | None = Field(None, ge=8, description="maximum sequence length of external text; None = max_length")
    candidates: int | None = Field(
        None,
        ge=1,
        description="tokens that the softmax of the vocabulary head is over at a step: those to predict, and random others that stand for "
        "the rest; None = the whole vocabulary",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="dropout of embeddings, attention outputs, feed-forward outputs, classifier; None = 0.1 with many passes over the "
        "labelled texts, else 0",
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention probabilities (BERT: 0.1)")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    keep: Literal["best", "last"] = Field("best", description="resulting weights of the phase: best on dev, or last")
    trains: Literal["all", "vectors"] = Field(
        "all", description="weights to update. vectors: those of a soft prompt only; all other weights are frozen"
    )
    reset_task_head: bool = Field(False, description="initialise the classifier at the start of this phase")
    evaluate_every: int | None = Field(
        None,
        ge=1,
        description="steps between evaluations on dev; None = 10 evaluations per phase. Phases without the term classify have none",
    )
    checkpoint_every: int | None = Field(None, ge=1, description="steps between checkpoints; None = 10 per phase")

    @field_validator("terms", mode="after")
    @classmethod
    def _drop_weight_zero(cls, terms: tuple[Term, ...]) -> tuple[Term, ...]:
        if not any(term.weight for term in terms):
            raise ValueError("every term has weight 0, so there is nothing to learn; set a weight above 0")
        return tuple(term for term in terms if term.weight)

    @model_validator(mode="after")
    def _check_terms(self) -> PhaseConfig:
        where = f"phase {self.name!r}"
        if self.external + self.task == 0:
            raise ValueError(f"{where}: external and task are both 0, so there is no text to sample")
        shares = {"external": self.external, "task": self.task}
        seen: set[tuple[str, str]] = set()
        for term in self.terms:
            if not shares[term.on]:
                raise ValueError(
                    f"{where}: the term {term.kind!r} is on {term.on} text, of which none is sampled; set {term.on} = 1 or remove it"
                )
            if (term.kind, term.on) in seen:
                raise ValueError(f"{where}: two terms {term.kind!r} on {term.on} text; keep one of them")
            seen.add((term.kind, term.on))
        unused = [origin for origin, share in shares.items() if share and all(term.on != origin for term in self.terms)]
        if unused:
            raise ValueError(f"{where}: {unused[0]} text is sampled, but no term is on it; add one, or set {unused[0]} = 0")
        kinds = {term.kind for term in self.text_terms}
        causal = [term for term in self.terms if isinstance(term, Causal)]
        if len({term.share for term in causal}) > 1:
            raise ValueError(f"{where}: the terms 'causal' have different shares of the steps; set one share")
        if causal and causal[0].share == 1.0:
            if others := [term.kind for term in self.terms if not isinstance(term, Causal)]:
                raise ValueError(
                    f"{where}: with share 1.0 the term 'causal' leaves no step for {others[0]!r}; set the share below 1, or use a phase "
                    "for each"
                )
        elif causal and len(kinds) == 1:
            raise ValueError(f"{where}: the term 'causal' has share {causal[0].share}, but there is no other text term; set share = 1.0")
        if len(kinds - {"causal"}) > 1:
            raise ValueError(f"{where}: {' and '.join(map(repr, sorted(kinds)))} change the same tokens; use one phase for each")
        if self.masking.is_scored != (self.masking.scores_of is not None):
            raise ValueError(f"{where}: masking.kind 'scored' and masking.scores_of must be set together; name the phase that scores")
        if self.max_length is not None and self.text_length < 8:
            raise ValueError(f"{where}: max_length {self.max_length} is too short for span infilling; set it to 32 or more")
        return self

    @property
    def text_terms(self) -> tuple[Term, ...]:
        """Terms that learn from tokens."""
        return tuple(term for term in self.terms if term.reads_text)

    def terms_of(self, kind: type[_T]) -> tuple[_T, ...]:
        """Return the terms of one class."""
        return tuple(term for term in self.terms if isinstance(term, kind))

    def distil(self, on: Origin) -> Distil | None:
        """Return the term that learns from soft labels of this text, if there is one."""
        return next((term for term in self.terms_of(Distil) if term.on == on), None)

    @property
    def learns_labels(self) -> bool:
        """True if the phase learns gold labels, so that it can be evaluated on dev."""
        return bool(self.terms_of(Classify))

    @property
    def row_length(self) -> int:
        """`max_length`, which the planner has set."""
        assert self.max_length is not None, f"phase {self.name}: max_length is resolved before training"
        return self.max_length

    @property
    def text_length(self) -> int:
        """Maximum tokens of a sampled sequence; it fits into a row even after a term has added tokens to it."""
        return min(term.text_length(self.row_length, self.masking) for term in self.terms)

    @property
    def trains_mlm_head(self) -> bool:
        """True if the vocabulary head learns to predict masked tokens."""
        return any(term.trains_mlm_head for term in self.terms)

    @property
    def needs_words(self) -> bool:
        """True if a term or the masking needs word boundaries."""
        masks_words = self.masking.kind in ("whole-word", "span", "phrase")
        return any(term.needs_words or (term.masks and masks_words) for term in self.terms)

    @property
    def needs_token_labels(self) -> bool:
        """True if a term needs labels of important tokens from an earlier model."""
        return any(term.needs_token_labels for term in self.terms)

    @property
    def needs_scores(self) -> bool:
        """True if the masking needs token scores of an earlier phase."""
        return self.masking.is_scored and any(term.masks for term in self.terms)


def linear_teachers(phase: PhaseConfig) -> tuple[Distil, ...]:
    """Return the terms that learn from the linear teacher."""
    return tuple(term for term in phase.terms_of(Distil) if term.teacher == LINEAR_TEACHER)


def check_order(phases: Sequence[PhaseConfig]) -> None:
    """Raise ValueError if a phase refers to a phase that is not an earlier one, or that lacks the terms that it needs."""
    earlier: dict[str, PhaseConfig] = {}
    for phase in phases:
        references = [("masking.scores_of", phase.masking.scores_of)]
        references += [("start_from", phase.start_from)] if phase.start_from not in ("previous", "start") else []
        references += [("teacher", term.teacher) for term in phase.terms_of(Distil) if term.teacher != LINEAR_TEACHER]
        for setting, name in references:
            if name is not None and name not in earlier:
                raise ValueError(
                    f"phase {phase.name!r}: {setting} {name!r} is not an earlier phase; earlier phases: {', '.join(earlier) or 'none'}"
                )
        if phase.needs_token_labels and not earlier:
            raise ValueError(
                f"phase {phase.name!r}: 'important_tokens' needs a model trained on the labels; add an earlier phase with the term classify"
            )
        if phase.masking.scores_of is not None and not earlier[phase.masking.scores_of].needs_token_labels:
            raise ValueError(
                f"phase {phase.name!r}: {phase.masking.scores_of!r} does not score tokens; name a phase with the term important_tokens"
            )
        for term in phase.terms_of(Distil):
            if term.teacher != LINEAR_TEACHER and (term.on != "external" or not earlier[term.teacher].learns_labels):
                raise ValueError(
                    f"phase {phase.name!r}: teacher {term.teacher!r} must be a phase with the term classify, for external text"
                )
        earlier[phase.name] = phase
