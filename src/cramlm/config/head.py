"""Settings of the head: a classifier, or a prompt, which has patterns around a text and words for each label (docs/guides/prompts.md)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from cramlm.config.base import FrozenModel
from cramlm.config.phase import PhaseConfig

PartKind: TypeAlias = Literal["literal", "mask", "text", "text_a", "text_b", "entity_1", "entity_2"]
Slots: TypeAlias = tuple[tuple[str, ...], ...]
"""The words of a label: for each [MASK] in order, the alternatives."""

FIELDS: Final[tuple[PartKind, ...]] = ("mask", "text", "text_a", "text_b", "entity_1", "entity_2")
_FIELD: Final = re.compile(r"\{([^{}]*)\}")
_SHOWN: Final = " ".join(f"{{{name}}}" for name in FIELDS)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a pattern. spaced: True if white space precedes it; a literal's own is at the front of its `text`."""

    kind: PartKind
    text: str = ""
    spaced: bool = False


def parse_pattern(pattern: str) -> tuple[Part, ...]:
    """Split a pattern into its parts, in order.

    White space before a field belongs to the field, as in byte-level tokenizers; before {mask} it is dropped, as there.

    Raises:
        ValueError: if a field is unknown, there is no mask or no text, or the text occurs twice.
    """
    parts: list[Part] = []
    spaced = False
    for number, piece in enumerate(_FIELD.split(pattern)):
        if number % 2:
            if piece not in FIELDS:
                raise ValueError(f"pattern {pattern!r}: {{{piece}}} is not a field; fields are {_SHOWN}")
            parts.append(Part(piece, spaced=spaced))
            spaced = False
        elif piece:
            if "{" in piece or "}" in piece:
                raise ValueError(f"pattern {pattern!r}: an unmatched brace; fields are {_SHOWN}")
            words = piece.strip()
            if words:
                parts.append(Part("literal", f" {words}" if parts and piece[:1].isspace() else words))
            spaced = bool(parts) and piece[-1].isspace()
    kinds = [part.kind for part in parts]
    if "mask" not in kinds:
        raise ValueError(f"pattern {pattern!r}: has no {{mask}} for the words of the labels; write it like '{{text}} ({{mask}})'")
    if sorted(kind for kind in kinds if kind.startswith("text")) not in (["text"], ["text_a", "text_b"]):
        raise ValueError(f"pattern {pattern!r}: needs {{text}} once, or {{text_a}} and {{text_b}} once each for pairs of texts")
    return tuple(parts)


class PromptConfig(FrozenModel):
    """Labels as words that fill in a mask (Schick and Schütze 2021), for head.kind prompt and soft-prompt."""

    patterns: tuple[str, ...] = Field(
        ("{mask}: {text}",),
        min_length=1,
        description="text around the input, with {mask} for the words of the labels: fields {text}, or {text_a} and {text_b} "
        "for pairs; {entity_1} and {entity_2} repeat what is between `markers`. With several patterns each is trained, and the scores "
        "are averaged",
    )
    words: dict[str, str | tuple[str | tuple[str, ...], ...]] = Field(
        {},
        description="words of each label, each one token of the vocabulary; with several {mask} in a pattern, one entry (a word or a list "
        "of words) per mask, in order. Empty = chosen from the training texts",
    )
    words_per_label: int = Field(3, ge=1, description="words to choose for each label, where `words` is empty")
    markers: tuple[tuple[str, str], tuple[str, str]] = Field(
        (("[[", "]]"), ("<<", ">>")), description="opening and closing marker of the first and of the second entity in a text"
    )
    vectors: int = Field(20, ge=1, description="soft-prompt only: learned vectors before the text")

    @field_validator("words", mode="before")
    @classmethod
    def _words_are_texts(cls, words: Any) -> Any:
        """Raise one error instead of one for each alternative of the type."""
        for label, value in words.items() if isinstance(words, dict) else ():
            entries = value if isinstance(value, list | tuple) else [value]
            alternatives = [word for entry in entries for word in (entry if isinstance(entry, list | tuple) else [entry])]
            if not all(isinstance(word, str) for word in alternatives):
                raise ValueError(f"label {label!r}: expected a word, a list of words, or a list of these for each {{mask}}, got {value!r}")
        return words

    @model_validator(mode="after")
    def _parts_agree(self) -> PromptConfig:
        masks = {pattern: sum(part.kind == "mask" for part in parse_pattern(pattern)) for pattern in self.patterns}
        if len(set(masks.values())) > 1:
            counts = ", ".join(f"{count} in {pattern!r}" for pattern, count in masks.items())
            raise ValueError(f"patterns must have equal numbers of {{mask}}: {counts}")
        if len({any(part.kind == "text" for part in parse_pattern(pattern)) for pattern in self.patterns}) > 1:
            raise ValueError("patterns must all contain {text}, or all {text_a} and {text_b}")
        if not self.words and self.slots > 1:
            raise ValueError(f"patterns with {self.slots} {{mask}} need words for every label; set head.prompt.words")
        if not all(first and last for first, last in self.markers):
            raise ValueError("markers must not be empty text")
        tuples: dict[Slots, str] = {}
        for label in self.words:
            words = self.words_of(label)
            if len(words) != self.slots or not all(slot and all(word.strip() for word in slot) for slot in words):
                raise ValueError(f"label {label!r}: needs words for each of {self.slots} {{mask}}, got {self.words[label]!r}")
            if words in tuples:
                raise ValueError(f"labels {tuples[words]!r} and {label!r} have the same words and cannot be distinguished")
            tuples[words] = label
        return self

    @property
    def slots(self) -> int:
        """Number of masks in a pattern."""
        return sum(part.kind == "mask" for part in parse_pattern(self.patterns[0]))

    @property
    def reads_pairs(self) -> bool:
        """True if the patterns are for pairs of texts."""
        return any(part.kind == "text_a" for part in parse_pattern(self.patterns[0]))

    def words_of(self, label: str) -> Slots:
        """Return the words of a label in `words`, mask by mask."""
        words = self.words[label]
        if isinstance(words, str):
            return ((words,),)
        if self.slots == 1:  # alternatives for the one mask
            return (tuple(word for entry in words for word in ((entry,) if isinstance(entry, str) else entry)),)
        return tuple((entry,) if isinstance(entry, str) else entry for entry in words)


class HeadConfig(FrozenModel):
    """The head that scores labels.

    classifier: layers on the pooled text. BERT's and RoBERTa's native classes pool [CLS] only; ModernBERT's pools [CLS] or the mean.
    prompt: the vocabulary head, at the masks of a pattern around the text. soft-prompt: the same after learned vectors.
    """

    kind: Literal["classifier", "prompt", "soft-prompt"] = "classifier"
    prompt: PromptConfig = PromptConfig()
    pooling: Literal["cls", "mean"] = "mean"
    token_classifier: bool = Field(
        False, description="a binary classifier of every token, for the terms important_tokens and shuffled_tokens; it is not exported"
    )
    generator: int | None = Field(
        None,
        ge=8,
        description="width of the generator for the term replaced_tokens, a multiple of encoder.hidden / encoder.heads; it has as many "
        "layers as the encoder, shares its word embedding and is not exported. None = no generator",
    )

    @property
    def has_token_classifier(self) -> bool:
        """True if there is a binary classifier of every token; with a generator there always is (term replaced_tokens)."""
        return self.token_classifier or self.generator is not None

    @property
    def uses_prompt(self) -> bool:
        """True if labels are words that the vocabulary head predicts."""
        return self.kind != "classifier"

    @property
    def vectors(self) -> int:
        """Number of learned vectors before a text."""
        return self.prompt.vectors if self.kind == "soft-prompt" else 0


def check_head(head: HeadConfig, phases: Sequence[PhaseConfig], *, pairs: bool) -> None:
    """Raise ValueError if a phase or the task (`pairs`: True for pairs of texts) is incompatible with the head."""
    for phase in phases:
        if phase.trains == "vectors" and (head.kind != "soft-prompt" or phase.text_terms or not phase.learns_labels):
            raise ValueError(
                f"phase {phase.name!r}: trains = 'vectors' needs a soft prompt and no text term; set head.kind = 'soft-prompt'"
            )
        if head.uses_prompt and (others := [term.kind for term in phase.terms if not term.works_with_prompt]):
            raise ValueError(f"phase {phase.name!r}: the term {others[0]!r} is incompatible with a prompt; use mlm or causal")
    if not head.uses_prompt:
        return
    if head.has_token_classifier:
        raise ValueError(f"head.token_classifier and head.generator have no effect with head.kind {head.kind!r}; unset them")
    if head.prompt.reads_pairs != pairs:
        fields, texts = ("{text_a} and {text_b}", "pairs of texts") if pairs else ("{text}", "single texts")
        raise ValueError(f"head.prompt.patterns must contain {fields}, as the task has {texts}")
