"""Masking and the loss terms of a phase, whose weighted sum is its loss; each term is computed by one file of training/terms/.

Text terms (`reads_text`) learn from tokens and define the input of the encoder; label terms learn from labels through the head. The class
attributes state what a term needs, so that no other module depends on which term it is.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import Field, model_validator

from cramlm.config.base import FrozenModel

Origin: TypeAlias = Literal["external", "task"]
LINEAR_TEACHER: Final = "linear"


class MaskingConfig(FrozenModel):
    """Dynamic masks: sampled at every step, at least one per sequence. Devlin et al. 2019: 15 %, 80/10/10.

    random: single tokens. whole-word: whole words. span: runs of words of geometric length (Joshi et al. 2020). phrase: collocations as
    wholes, and the other words (after Sun et al. 2019, who used a list of phrases). scored: tokens that a phase with the term
    important_tokens learned to detect, highest score first, at most `rate`, at least one. scored-control: as many random tokens.
    """

    kind: Literal["random", "whole-word", "span", "phrase", "scored", "scored-control"] = "random"
    scores_of: str | None = Field(
        None, description="scored and scored-control: the earlier phase, with the term important_tokens, that scores the tokens"
    )
    rate: float = Field(0.2, gt=0, lt=1, description="share of the maskable tokens; with rate_end, at the first step")
    rate_end: float | None = Field(None, gt=0, lt=1, description="share at the last step, interpolated linearly; None = constant rate")
    mean_span: float = Field(5.0, ge=1, description="span only: mean of the geometric distribution of lengths in words, which is cut at 10")
    mask_share: float = Field(1.0, ge=0, le=1, description="share of the chosen tokens that are replaced by [MASK]")
    random_share: float = Field(0.0, ge=0, le=1, description="share that is replaced by a random token; the rest is unchanged")

    @model_validator(mode="after")
    def _check_shares(self) -> MaskingConfig:
        if self.mask_share + self.random_share > 1:
            raise ValueError(f"mask_share {self.mask_share} + random_share {self.random_share} must not exceed 1")
        return self

    @property
    def is_scored(self) -> bool:
        """True if scores of an earlier phase determine which, or how many, tokens are masked."""
        return self.kind in ("scored", "scored-control")

    def rate_at(self, step: int, steps: int | None) -> float:
        """Return the share at a step; without a number of steps, the share in the middle of the phase."""
        if self.rate_end is None:
            return self.rate
        progress = 0.5 if steps is None else step / max(1, steps - 1)
        return self.rate + (self.rate_end - self.rate) * min(progress, 1.0)


class TermConfig(FrozenModel):
    """Common fields of all terms: the text whose mean loss is added, and its weight."""

    reads_text: ClassVar[bool] = False
    """True if the term learns from tokens; False if it learns from labels."""
    masks: ClassVar[bool] = False
    """True if the phase's `masking` chooses the tokens that the term predicts."""
    trains_mlm_head: ClassVar[bool] = False
    """True if the vocabulary head learns to predict masked tokens."""
    reads_candidates: ClassVar[bool] = False
    """True if the phase's `candidates` limit the softmax of the vocabulary head."""
    needs_words: ClassVar[bool] = False
    """True if the term needs word boundaries, whatever the masks."""
    needs_token_labels: ClassVar[bool] = False
    """True if the term needs labels of important tokens from an earlier model."""
    needs_token_head: ClassVar[bool] = False
    needs_generator: ClassVar[bool] = False
    needs_single_label: ClassVar[bool] = False
    """True if the term is defined only for tasks with one label per text."""
    works_with_prompt: ClassVar[bool] = True

    on: Origin
    weight: float = Field(1.0, ge=0, description="factor of the mean loss in the sum; 0 leaves the term out")

    def text_length(self, row_length: int, masking: MaskingConfig) -> int:
        """Return the longest sequence, in tokens, that fits into a row of `row_length` after the term has changed it."""
        return row_length


class Mlm(TermConfig):
    """Predict masked tokens (Devlin et al. 2019). On task text the weight is the paper's rho_2."""

    reads_text: ClassVar[bool] = True
    masks: ClassVar[bool] = True
    trains_mlm_head: ClassVar[bool] = True
    reads_candidates: ClassVar[bool] = True

    kind: Literal["mlm"] = "mlm"
    on: Origin = "external"


class Causal(TermConfig):
    """Predict the next token, with causal attention.

    Labels cannot be learned at such a step, because the first token attends only to itself. With `share` below 1 the other steps have the
    other terms of the phase (GPT-BERT, Charpentier and Samuel 2024, but masked tokens are predicted at their own positions).
    """

    reads_text: ClassVar[bool] = True
    reads_candidates: ClassVar[bool] = True

    kind: Literal["causal"] = "causal"
    on: Origin = "external"
    share: float = Field(1.0, gt=0, le=1, description="share of the steps with causal attention")


class SpanInfilling(TermConfig):
    """Predict spans of words, each replaced by one [MASK], after the text (GLM, Du et al. 2022)."""

    reads_text: ClassVar[bool] = True
    needs_words: ClassVar[bool] = True
    reads_candidates: ClassVar[bool] = True
    works_with_prompt: ClassVar[bool] = False

    kind: Literal["span_infilling"] = "span_infilling"
    on: Origin = "external"

    def text_length(self, row_length: int, masking: MaskingConfig) -> int:
        """Return the row less two tokens per span; the number of spans is largest if every span has one token."""
        rate = max(masking.rate, masking.rate_end or 0.0)
        return min(row_length - 2, int((row_length - 1 + 4 * rate) / (1 + 2 * rate)))


class ReplacedTokens(TermConfig):
    """Detect tokens that a small generator replaced (ELECTRA, Clark et al. 2020). The generator learns from masked tokens."""

    reads_text: ClassVar[bool] = True
    masks: ClassVar[bool] = True
    needs_generator: ClassVar[bool] = True
    works_with_prompt: ClassVar[bool] = False

    kind: Literal["replaced_tokens"] = "replaced_tokens"
    on: Origin = "external"
    detection_weight: float = Field(50.0, gt=0, description="weight of the detection loss relative to the generator's; 50: ELECTRA")


class ImportantTokens(TermConfig):
    """Detect the words of the labelled texts that matter to the label, according to the weights before the phase (Gu et al. 2020)."""

    reads_text: ClassVar[bool] = True
    needs_words: ClassVar[bool] = True
    needs_token_labels: ClassVar[bool] = True
    needs_token_head: ClassVar[bool] = True
    needs_single_label: ClassVar[bool] = True
    works_with_prompt: ClassVar[bool] = False

    kind: Literal["important_tokens"] = "important_tokens"
    on: Literal["task"] = "task"
    rule: Literal["auxiliary", "gradient"] = Field("auxiliary", description="a forward pass per word, or a backward pass per text")
    delta: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="auxiliary: a word is important if the label's probability with it is within this of that of the whole text",
    )
    share: float = Field(0.15, gt=0, lt=1, description="gradient: maximum share of a text's words that are important")
    positive_weight: float = Field(3.0, gt=0, description="weight of an important token; other tokens have weight 1")


class ShuffledTokens(TermConfig):
    """Detect moved tokens: those that `masking` chooses are permuted within their text (Yamaguchi et al. 2021)."""

    reads_text: ClassVar[bool] = True
    masks: ClassVar[bool] = True
    needs_token_head: ClassVar[bool] = True
    works_with_prompt: ClassVar[bool] = False

    kind: Literal["shuffled_tokens"] = "shuffled_tokens"
    on: Origin = "external"


class Classify(TermConfig):
    """Predict the labels of the training texts: cross-entropy; binary cross-entropy for multi-label; squared error for regression."""

    kind: Literal["classify"] = "classify"
    on: Literal["task"] = "task"
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of each label's weight that is distributed over all labels")


class Distil(TermConfig):
    """Predict the soft labels of a teacher (Hinton et al. 2015): the loss of `classify` with them in place of gold labels.

    Soft labels are probabilities; of a regression, numbers. Those of training texts by the linear teacher are out of fold. Probabilities by
    the model of an earlier phase are at temperature 2, with a prompt averaged over all patterns (Schick and Schütze 2021).
    """

    kind: Literal["distil"] = "distil"
    on: Origin = "external"
    teacher: str = Field(LINEAR_TEACHER, description="'linear' (section teacher), or on external text the name of an earlier phase")


Term: TypeAlias = Annotated[
    Mlm | Causal | SpanInfilling | ReplacedTokens | ImportantTokens | ShuffledTokens | Classify | Distil, Field(discriminator="kind")
]
