"""The loss terms that a phase may have. The loss of a phase is their weighted sum; each is computed by one file of training/terms/.

Text terms (`reads_text`) learn from the tokens and decide what the encoder reads; label terms learn from labels through the classifier.
The class attributes say what a term needs, so that no other module asks which term it is.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import Field

from cramlm.config.masking import MaskingConfig
from cramlm.config.retriever import FrozenModel

Origin: TypeAlias = Literal["external", "task"]
LINEAR_TEACHER: Final = "linear"


class TermConfig(FrozenModel):
    """What all terms have: the text whose mean loss they add, and its weight."""

    reads_text: ClassVar[bool] = False
    """True if the term learns from tokens; False if it learns from labels."""
    masks: ClassVar[bool] = False
    """True if the phase's `masking` chooses the tokens that the term predicts."""
    fills_masks: ClassVar[bool] = False
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
    fills_masks: ClassVar[bool] = True

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
