"""The knobs of a phase: which text is drawn, how it is masked and weighed, by which optimizer and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from cramlm.retriever_config import FrozenModel


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


class MaskingConfig(FrozenModel):
    """Dynamic masks: drawn anew at every step, at least one per sequence. Devlin et al. 2019: 15 %, 80/10/10.

    random: single tokens. whole-word: words, whole. span: runs of words of geometric length (Joshi et al. 2020). phrase: words that stand
    together more often than chance has it, as wholes, and the other words (after Sun et al. 2019, who had a list of phrases). scored: the
    tokens that a phase with objective marks learnt to find, best first, at most `rate`, at least one. scored-control: as many, at random.
    """

    kind: Literal["random", "whole-word", "span", "phrase", "scored", "scored-control"] = "random"
    scores_of: str | None = Field(None, description="scored and scored-control: the earlier phase, with objective marks, that scores")
    rate: float = Field(0.2, gt=0, lt=1, description="share of the maskable tokens; at the first step, where rate_end is given")
    rate_end: float | None = Field(None, gt=0, lt=1, description="share at the last step, in a straight line; None = as at the first")
    mean_span: float = Field(5.0, ge=1, description="span only: mean of the geometric lengths in words, before they are cut at 10")
    mask_share: float = Field(1.0, ge=0, le=1, description="of the chosen tokens, how many become [MASK]")
    random_share: float = Field(0.0, ge=0, le=1, description="... and how many a random token; the rest stay as they are")

    @model_validator(mode="after")
    def _shares_fit(self) -> MaskingConfig:
        if self.mask_share + self.random_share > 1:
            raise ValueError(f"mask_share {self.mask_share} + random_share {self.random_share} must not exceed 1")
        return self

    @property
    def is_scored(self) -> bool:
        """Whether tokens have scores that say which, or how many, are hidden."""
        return self.kind in ("scored", "scored-control")

    def rate_at(self, step: int, steps: int | None) -> float:
        """The share at a step; in a phase that has no number of steps yet, the one in its middle."""
        if self.rate_end is None:
            return self.rate
        done = 0.5 if steps is None else step / max(1, steps - 1)
        return self.rate + (self.rate_end - self.rate) * min(done, 1.0)


class MarksConfig(FrozenModel):
    """Which words of the labelled texts are marked, for objective marks (training/importance.py; Gu et al. 2020)."""

    rule: Literal["auxiliary", "gradient"] = Field("auxiliary", description="a forward pass per word, or a backward pass per text")
    delta: float = Field(0.05, gt=0, lt=1, description="auxiliary: a word is marked if the label's probability then lacks less than this")
    share: float = Field(0.15, gt=0, lt=1, description="gradient: share of a text's words that are marked, at most")
    positive_weight: float = Field(3.0, gt=0, description="what a marked token weighs, others 1")


class PhaseConfig(FrozenModel):
    """One segment of training: which text is drawn, how it is masked, how the losses are weighted, how long.

    Losses per step (objective.py): external text gives MLM, task text gives mlm_weight * MLM + task_weight * classification.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    steps: int | None = Field(None, ge=0, description="optimizer updates; None = from passes, or set by the budget")
    passes: float | None = Field(
        None,
        gt=0,
        description="passes over the task's training texts (over the external text if no task text is drawn); used when steps is None",
    )
    most_passes: float | None = Field(
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
    mlm_weight: float = Field(
        0.0, ge=0, description="rho_2: weight of MLM on task text; 0 with external = 0 means no vocabulary head at all"
    )
    task_weight: float = Field(1.0, ge=0)
    teacher_weight: float | None = Field(
        None,
        ge=0,
        description="weight of the cross-entropy to a teacher's probabilities of external text (in a phase without any: of the task's "
        "own, held out of its fit); the teacher is logistic regression on TF-IDF and averaged counted embeddings; None = 1, but 0 where a "
        "phase without external text learns from fewer than 30 texts a label",
    )
    teacher_from: str | None = Field(
        None,
        description="the earlier phase whose model is the teacher of external text, in place of logistic regression (pseudo-labels; with a "
        "prompt those of its patterns together), at temperature 2",
    )
    loss_scale: Literal["sum", "mean"] = Field(
        "sum",
        description="sum: the paper's formula; mean: the released code's, task batches divided by mlm_weight + task_weight",
    )
    start_from: str | None = Field(
        None,
        description="the earlier phase whose weights this one takes; 'start' = those the run began with; None = the phase before",
    )
    objective: Literal["mlm", "clm", "hybrid", "rtd", "span", "marks"] = Field(
        "mlm",
        description="what is learnt from text (docs/objectives.md). mlm: masked tokens; clm: the next token, read left to right; hybrid: "
        "one of the two at each step; rtd: which tokens a small generator replaced; span: what stood in spans of which one [MASK] is left; "
        "marks: which words of the labelled texts matter, as the phase's starting weights have it",
    )
    causal_share: float = Field(0.5, gt=0, lt=1, description="hybrid only: share of the steps that are read left to right")
    rtd_weight: float = Field(50.0, gt=0, description="rtd only: weight of telling replaced tokens beside the generator's MLM; 50: ELECTRA")
    marks: MarksConfig = MarksConfig()
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
    label_smoothing: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of each label's weight that goes to all labels alike; None = 0.2 where teacher_weight = None means 0 "
        "for want of labels, else 0",
    )
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
        description="steps between dev evaluations; the best is kept. None = 10 times, 0 task_weight = never",
    )
    checkpoint_every: int | None = Field(None, ge=1, description="steps between checkpoints; None = 10 times a phase")

    @model_validator(mode="after")
    def _draws_something(self) -> PhaseConfig:
        if self.external + self.task == 0:
            raise ValueError(f"phase {self.name!r}: external and task are both 0, so there is nothing to draw")
        if self.external == 0 and self.mlm_weight == 0 and self.task_weight == 0:
            raise ValueError(f"phase {self.name!r}: every loss weight is 0, so there is nothing to learn")
        if self.objective == "clm" and self.uses_labels:
            raise ValueError(
                f"phase {self.name!r}: objective 'clm' reads left to right, where a text's first token sees only itself, so labels are not "
                "learnt beside it; set task_weight = 0 and learn them in another phase"
            )
        if self.objective == "marks" and (self.external or not self.mlm_weight):
            raise ValueError(f"phase {self.name!r}: objective 'marks' reads labelled texts; set external = 0 and mlm_weight = 1")
        if self.masking.is_scored != (self.masking.scores_of is not None):
            raise ValueError(f"phase {self.name!r}: masking.kind 'scored' and masking.scores_of come together; name the phase that scores")
        if self.max_length is not None and self.text_length < 8:
            raise ValueError(f"phase {self.name!r}: max_length {self.max_length} leaves no room for spans to fill in; set it to 32 or more")
        return self

    @property
    def row_length(self) -> int:
        """`max_length`, once the planner has set it."""
        assert self.max_length is not None, f"phase {self.name}: max_length is resolved before training"
        return self.max_length

    @property
    def text_length(self) -> int:
        """Tokens of the longest sequence drawn: a row; with `span` less two for each span, as many as there are if all are of one token."""
        if self.objective != "span":
            return self.row_length
        rate = max(self.masking.rate, self.masking.rate_end or 0.0)
        return min(self.row_length - 2, int((self.row_length - 1 + 4 * rate) / (1 + 2 * rate)))

    @property
    def uses_mlm(self) -> bool:
        """Whether text is learnt from at all, by whatever objective."""
        return self.external > 0 or (self.task > 0 and self.mlm_weight > 0)

    @property
    def fills_masks(self) -> bool:
        """Whether the vocabulary head learns what a [MASK] stands for."""
        return self.uses_mlm and self.objective in ("mlm", "hybrid")

    @property
    def needs_words(self) -> bool:
        """Whether it must be known where the words of the text begin."""
        if self.objective in ("span", "marks"):
            return self.uses_mlm
        return self.uses_mlm and self.objective != "clm" and self.masking.kind in ("whole-word", "span", "phrase")

    @property
    def uses_scores(self) -> bool:
        """Whether tokens need scores that say how fit they are to be hidden."""
        return self.uses_mlm and self.masking.is_scored and self.objective in ("mlm", "hybrid", "rtd")

    @property
    def uses_teacher(self) -> bool:
        """Whether soft labels are learnt; not before the planner has decided."""
        return (self.external > 0 or self.uses_labels) and (self.teacher_weight or 0.0) > 0 and self.objective != "clm"

    @property
    def uses_labels(self) -> bool:
        """Whether labels are learnt, and hence whether dev scores mean something."""
        return self.task > 0 and self.task_weight > 0


def check_order(phases: Sequence[PhaseConfig]) -> None:
    """Raises ValueError if a phase names one that does not come before it, or one that does not score."""
    earlier: dict[str, PhaseConfig] = {}
    for phase in phases:
        named = {"start_from": phase.start_from, "masking.scores_of": phase.masking.scores_of, "teacher_from": phase.teacher_from}
        for knob, name in named.items():
            if name is not None and name not in earlier and (knob, name) != ("start_from", "start"):
                raise ValueError(f"phase {phase.name!r}: {knob} {name!r} is no earlier phase; those are {', '.join(earlier) or 'none'}")
        if phase.objective == "marks" and not earlier:
            raise ValueError(f"phase {phase.name!r}: objective 'marks' asks a model that knows the labels; learn them in a phase before it")
        if phase.masking.scores_of is not None and earlier[phase.masking.scores_of].objective != "marks":
            raise ValueError(f"phase {phase.name!r}: {phase.masking.scores_of!r} scores nothing; only a phase with objective marks does")
        if phase.teacher_from is not None and not (phase.external and earlier[phase.teacher_from].uses_labels):
            raise ValueError(f"phase {phase.name!r}: teacher_from needs external text, and a phase that learnt labels; drop it")
        earlier[phase.name] = phase
