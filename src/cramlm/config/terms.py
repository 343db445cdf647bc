"""The loss terms that a phase may have. The loss of a phase is their weighted sum; each is computed by one file of training/terms/.

Text terms (`reads_text`) learn from the tokens and decide what the encoder reads; label terms learn from labels through the classifier.
The class attributes say what a term needs, so that no other module asks which term it is.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import Field, model_validator

from cramlm.config.base import FrozenModel

Origin: TypeAlias = Literal["external", "task"]
LINEAR_TEACHER: Final = "linear"


class MaskingConfig(FrozenModel):
    """Dynamic masks: drawn anew at every step, at least one per sequence. Devlin et al. 2019: 15 %, 80/10/10.

    random: single tokens. whole-word: words, whole. span: runs of words of geometric length (Joshi et al. 2020). phrase: words that stand
    together more often than chance has it, as wholes, and the other words (after Sun et al. 2019, who had a list of phrases). scored: the
    tokens that a phase with the term important_tokens learnt to find, best first, at most `rate`, at least one. scored-control: as many, at
    random.
    """

    kind: Literal["random", "whole-word", "span", "phrase", "scored", "scored-control"] = "random"
    scores_of: str | None = Field(
        None, description="scored and scored-control: the earlier phase, with the term important_tokens, that scores"
    )
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


class TermConfig(FrozenModel):
    """What all terms have: the text whose mean loss they add, and its weight."""

    reads_text: ClassVar[bool] = False
    """True if the term learns from tokens; False if it learns from labels."""
    masks: ClassVar[bool] = False
    """True if the phase's `masking` chooses the tokens that the term predicts."""
    trains_mlm_head: ClassVar[bool] = False
    """True if the vocabulary head learns what a [MASK] stands for."""
    needs_words: ClassVar[bool] = False
    """True if the term needs to know where words begin, whatever the masks."""
    needs_token_labels: ClassVar[bool] = False
    """True if an earlier model must say which tokens of the labelled texts are important."""
    needs_token_head: ClassVar[bool] = False
    needs_generator: ClassVar[bool] = False
    needs_single_label: ClassVar[bool] = False
    """True if the term is defined only where each text has exactly one label."""
    goes_with_prompt: ClassVar[bool] = True

    on: Origin
    weight: float = Field(1.0, ge=0, description="factor of the mean loss in the sum; 0 leaves the term out")

    def text_length(self, row_length: int, masking: MaskingConfig) -> int:
        """Return the longest sequence, in tokens, that still fits into a row after the term has changed it."""
        return row_length


class Mlm(TermConfig):
    """Predict the tokens that `masking` hid (Devlin et al. 2019). On task text the weight is the paper's rho_2."""

    reads_text: ClassVar[bool] = True
    masks: ClassVar[bool] = True
    trains_mlm_head: ClassVar[bool] = True

    kind: Literal["mlm"] = "mlm"
    on: Origin = "external"


class Causal(TermConfig):
    """Predict the next token, each position seeing itself and those before it.

    Labels cannot be learned at such a step, because the first token of a text sees only itself. With `share` below 1 the other steps have
    the other terms of the phase (GPT-BERT, Charpentier and Samuel 2024, with masked tokens predicted in their own positions).
    """

    reads_text: ClassVar[bool] = True

    kind: Literal["causal"] = "causal"
    on: Origin = "external"
    share: float = Field(1.0, gt=0, le=1, description="share of the steps that are read left to right")


class SpanInfilling(TermConfig):
    """Predict spans of words that were each replaced by one [MASK]; the spans follow the text (GLM, Du et al. 2022)."""

    reads_text: ClassVar[bool] = True
    needs_words: ClassVar[bool] = True
    goes_with_prompt: ClassVar[bool] = False

    kind: Literal["span_infilling"] = "span_infilling"
    on: Origin = "external"

    def text_length(self, row_length: int, masking: MaskingConfig) -> int:
        """A row less two tokens for each span, of which there are most if every span has one token."""
        rate = max(masking.rate, masking.rate_end or 0.0)
        return min(row_length - 2, int((row_length - 1 + 4 * rate) / (1 + 2 * rate)))


class ReplacedTokens(TermConfig):
    """Tell which tokens a small generator replaced (ELECTRA, Clark et al. 2020). The generator learns from the masked tokens."""

    reads_text: ClassVar[bool] = True
    masks: ClassVar[bool] = True
    needs_generator: ClassVar[bool] = True
    goes_with_prompt: ClassVar[bool] = False

    kind: Literal["replaced_tokens"] = "replaced_tokens"
    on: Origin = "external"
    detection_weight: float = Field(50.0, gt=0, description="weight of detection beside the generator's loss; 50: ELECTRA")


class ImportantTokens(TermConfig):
    """Tell which words of the labelled texts matter to the label, as the weights before the phase have it (Gu et al. 2020)."""

    reads_text: ClassVar[bool] = True
    needs_words: ClassVar[bool] = True
    needs_token_labels: ClassVar[bool] = True
    needs_token_head: ClassVar[bool] = True
    needs_single_label: ClassVar[bool] = True
    goes_with_prompt: ClassVar[bool] = False

    kind: Literal["important_tokens"] = "important_tokens"
    on: Literal["task"] = "task"
    rule: Literal["auxiliary", "gradient"] = Field("auxiliary", description="a forward pass per word, or a backward pass per text")
    delta: float = Field(
        0.05, gt=0, lt=1, description="auxiliary: a word is important if the label's probability with it lacks less than this"
    )
    share: float = Field(0.15, gt=0, lt=1, description="gradient: largest share of a text's words that are important")
    positive_weight: float = Field(3.0, gt=0, description="weight of an important token; that of others is 1")


class ShuffledTokens(TermConfig):
    """Tell which tokens were moved: those that `masking` chooses trade positions within their text (Yamaguchi et al. 2021)."""

    reads_text: ClassVar[bool] = True
    masks: ClassVar[bool] = True
    needs_token_head: ClassVar[bool] = True
    goes_with_prompt: ClassVar[bool] = False

    kind: Literal["shuffled_tokens"] = "shuffled_tokens"
    on: Origin = "external"


class Classify(TermConfig):
    """Predict the labels of the training texts: cross-entropy, or what suits a multi-label task or a regression."""

    kind: Literal["classify"] = "classify"
    on: Literal["task"] = "task"
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of each label's weight that is spread over all labels")


class Distil(TermConfig):
    """Predict the label probabilities of a teacher (Hinton et al. 2015): cross-entropy to its soft labels.

    The linear teacher gives those of training texts out of fold. The model of an earlier phase gives them at temperature 2, with a prompt
    over all patterns (Schick and Schütze 2021).
    """

    needs_single_label: ClassVar[bool] = True

    kind: Literal["distil"] = "distil"
    on: Origin = "external"
    teacher: str = Field(LINEAR_TEACHER, description="'linear' (section teacher), or the name of an earlier phase, for external text")


Term: TypeAlias = Annotated[
    Mlm | Causal | SpanInfilling | ReplacedTokens | ImportantTokens | ShuffledTokens | Classify | Distil, Field(discriminator="kind")
]
