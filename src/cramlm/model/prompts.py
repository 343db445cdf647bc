"""Texts inside patterns, as token sequences with a [MASK] where the words of the labels are read (Schick and Schütze 2021).

    [CLS] vectors... [MASK] : the text, cut if need be [SEP]

The parts of a pattern are encoded one by one, so that what is cut is always the text, and its last tokens do not depend on what follows.
[MASK] in a text is text, so that the masks of a sequence are those of its pattern. Learned vectors (soft prompts) have ids behind the
vocabulary. Texts with several patterns give several sequences each, those of a text one after the other.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from cramlm.errors import ArtifactError, UsageError
from cramlm.head_config import HeadConfig, Part, PromptConfig, Slots, parse_pattern
from cramlm.model.folders import read_json
from cramlm.model.tokenization import IdArray, Tokenizer, Tokens, longest_first, split_evenly

PROMPT_FILE: Final = "prompt.json"
VECTORS_FILE: Final = "prompt.safetensors"
LEAST_TEXT: Final = 4
"""Tokens of a text that a pattern must leave room for."""
ENTITY_TOKENS: Final = 16
_FORMAT: Final = 1
_MOST_NEAR: Final = 5


@dataclass(frozen=True, slots=True)
class Prompt:
    """Patterns, and for each label (in the order of the logits) and slot the words that stand for it, with their token ids.

    vectors: how many learned ones stand before the text. shift: what is added to each label's score; empty for nothing.
    """

    patterns: tuple[str, ...]
    markers: tuple[tuple[str, str], ...]
    words: tuple[Slots, ...]
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    mask_id: int
    vectors: int
    shift: tuple[float, ...] = ()

    @property
    def slots(self) -> int:
        """Masks in a pattern."""
        return len(self.words[0])


def resolve_prompt(config: PromptConfig, words: Sequence[Slots], tokenizer: Tokenizer, *, vectors: int) -> Prompt:
    """The prompt with the ids that its words, label by label, have in a vocabulary.

    Raises:
        UsageError: naming the words that are not one token, and tokens that are nearest to them.
    """
    numbers = {word: word_id(tokenizer, word) for slots in words for slot in slots for word in slot}
    if unknown := [word for word, number in numbers.items() if number is None]:
        raise UsageError(f"head.prompt.words: {'; '.join(_not_one_token(tokenizer, word) for word in unknown[:3])}")
    ids = tuple(tuple(tuple(numbers[word] or 0 for word in slot) for slot in slots) for slots in words)
    for number, one in enumerate(ids):
        if one in ids[:number]:
            raise UsageError(f"head.prompt.words: {words[ids.index(one)]} and {words[number]} are the same tokens here; take other words")
    return Prompt(config.patterns, config.markers, tuple(words), ids, tokenizer.mask_id, vectors)


def word_id(tokenizer: Tokenizer, word: str) -> int | None:
    """The token that a word is, behind a space where the vocabulary makes that difference; None where it is none or several."""
    for shown in (f" {word}", word):
        ids = tokenizer.encode([shown])[0]
        if len(ids) == 1 and ids[0] != tokenizer.unk_id:
            return int(ids[0])
    return None


def _not_one_token(tokenizer: Tokenizer, word: str) -> str:
    pieces = [tokenizer.token(number) for number in tokenizer.encode([f" {word}"])[0]]
    shown = (tokenizer.decode([number]).strip() for number in range(tokenizer.vocab_size))
    known = sorted({token for token in shown if token.isalpha()})
    near = difflib.get_close_matches(word.lower(), known, n=_MOST_NEAR, cutoff=0.5)
    advice = f"single tokens near it: {', '.join(near)}" if near else "take another word"
    return f"{word!r} is {len(pieces)} tokens of the vocabulary ({' '.join(pieces)}); {advice}"


def read_texts(
    prompt: Prompt, tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str | None] | None, *, max_length: int
) -> Tokens:
    """Each text (or pair) in each pattern, one sequence after the other; `source` leads back to the texts.

    Raises:
        UsageError: if a pattern leaves no room for text, or pairs come to patterns that read single texts. DataError: as the tokenizer.
    """
    layouts = [_Layout.of(pattern, prompt, tokenizer) for pattern in prompt.patterns]
    if pairs is not None and any(pair is not None for pair in pairs) and not any(layout.reads_pairs for layout in layouts):
        raise UsageError("the patterns of this prompt read one text, not a pair; leave the second text out")
    others = None if pairs is None else ["" if pair is None else pair for pair in pairs]
    filled = [layout.fill(texts, others, tokenizer, max_length=max_length) for layout in layouts]
    pieces = [piece for number in range(len(texts)) for parts in filled for piece in parts[number]]
    return _sequences(pieces, [len(parts[0]) for parts in filled if parts], np.repeat(np.arange(len(texts)), len(layouts)))


def read_passages(prompt: Prompt, tokenizer: Tokenizer, texts: Sequence[str], *, max_length: int) -> Tokens:
    """Texts cut into as many pieces as they need, each piece in one pattern, the patterns in turn.

    Raises:
        UsageError: if a pattern leaves no room for text. DataError: as the tokenizer.
    """
    layouts = [_Layout.of(pattern, prompt, tokenizer) for pattern in prompt.patterns]
    whole = tokenizer.encode(texts)
    starts, stops, source = split_evenly(whole.offsets, min(layout.room(max_length) for layout in layouts))
    nothing = whole.ids[:0]
    pieces: list[IdArray] = []
    counts = []
    for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        parts = layouts[number % len(layouts)].around(whole.ids[start:stop], nothing, (nothing, nothing))
        pieces += parts
        counts.append(len(parts))
    return _sequences(pieces, counts, source)


def text_room(prompt: Prompt, tokenizer: Tokenizer, max_length: int) -> int:
    """Tokens of a text that are read in the pattern that leaves most of them."""
    return max(_Layout.of(pattern, prompt, tokenizer).room(max_length) for pattern in prompt.patterns)


def _sequences(pieces: list[IdArray], counts: list[int], source: Any) -> Tokens:
    """Pieces end to end. counts: of pieces in each sequence, again and again."""
    if not pieces:
        return Tokens(np.zeros(0, np.uint16), np.zeros(1, np.int64), np.zeros(0, np.int64))
    ends = np.cumsum(np.resize(counts, len(source)))
    lengths = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(piece) for piece in pieces])])
    offsets = np.concatenate([np.zeros(1, np.int64), lengths[ends]])
    return Tokens(np.concatenate(pieces), offsets, np.asarray(source, np.int64))


@dataclass(frozen=True, slots=True)
class _Layout:
    """A pattern with its literals encoded. fixed: tokens of a sequence that are not text, entities at their longest."""

    pattern: str
    parts: tuple[tuple[Part, IdArray | None], ...]
    before: IdArray
    after: IdArray
    markers: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, pattern: str, prompt: Prompt, tokenizer: Tokenizer) -> _Layout:
        parts = parse_pattern(pattern)
        one = tokenizer.encode([""]).ids.dtype
        known = {"mask": np.array([prompt.mask_id], one)}
        literals = iter([tokenizer.encode([part.text])[0] for part in parts if part.kind == "literal"])
        encoded = tuple((part, next(literals) if part.kind == "literal" else known.get(part.kind)) for part in parts)
        last = tokenizer.vocab_size + prompt.vectors
        vectors = np.arange(tokenizer.vocab_size, last, dtype=one if last <= np.iinfo(one).max + 1 else np.uint32)
        before = np.concatenate([np.array([tokenizer.cls_id], one), vectors])
        return cls(pattern, encoded, before, np.array([tokenizer.sep_id], one), prompt.markers)

    @property
    def reads_pairs(self) -> bool:
        return any(part.kind == "text_b" for part, _ in self.parts)

    def room(self, max_length: int) -> int:
        """Tokens of text that a sequence certainly has room for."""
        fixed = len(self.before) + len(self.after)
        for part, ids in self.parts:
            fixed += len(ids) if ids is not None else ENTITY_TOKENS if part.kind.startswith("entity") else 0
        if max_length - fixed < LEAST_TEXT:
            raise UsageError(
                f"the pattern {self.pattern!r} takes {fixed} of the {max_length} tokens of a sequence, which leaves fewer than "
                f"{LEAST_TEXT} for the text; shorten it, or raise phases[i].max_length"
            )
        return max_length - fixed

    def fill(self, texts: Sequence[str], others: Sequence[str] | None, tokenizer: Tokenizer, *, max_length: int) -> list[list[IdArray]]:
        """The pieces of each text's sequence."""
        self.room(max_length)
        read: dict[str, Tokens] = {}
        for part, ids in self.parts:
            if ids is None:
                chosen = self._chosen(part, texts, others)
                read[part.kind] = tokenizer.encode([f" {text}" for text in chosen] if part.spaced else chosen)
        fixed = len(self.before) + len(self.after) + sum(len(ids) for _, ids in self.parts if ids is not None)
        result = []
        for number in range(len(texts)):
            own = {kind: tokens[number] for kind, tokens in read.items()}
            entities = tuple(own.get(kind, self.after[:0])[:ENTITY_TOKENS] for kind in ("entity_1", "entity_2"))
            said = sum(len(entities[int(part.kind[-1]) - 1]) for part, _ in self.parts if part.kind.startswith("entity"))
            room = max_length - fixed - said
            if "text" in own:
                one, two = own["text"][:room], self.after[:0]
            else:
                keep_one, keep_two = longest_first(len(own["text_a"]), len(own["text_b"]), room)
                one, two = own["text_a"][:keep_one], own["text_b"][:keep_two]
            result.append(self.around(one, two, entities))
        return result

    def around(self, one: IdArray, two: IdArray, entities: tuple[IdArray, ...]) -> list[IdArray]:
        """The pieces of a sequence: always as many."""
        values = {"text": one, "text_a": one, "text_b": two, "entity_1": entities[0], "entity_2": entities[1]}
        return [self.before, *(values[part.kind] if ids is None else ids for part, ids in self.parts), self.after]

    def _chosen(self, part: Part, texts: Sequence[str], others: Sequence[str] | None) -> Sequence[str]:
        """What a field stands for in each text."""
        if part.kind == "text_b":
            return [""] * len(texts) if others is None else others
        if not part.kind.startswith("entity"):
            return texts
        opens, closes = map(re.escape, self.markers[int(part.kind[-1]) - 1])
        found = (re.search(f"{opens}(.*?){closes}", text, re.DOTALL) for text in texts)
        return ["" if match is None else match[1].strip() for match in found]


def prompt_json(prompt: Prompt, labels: Sequence[str]) -> dict[str, Any]:
    """What `prompt.json` holds, for a run and for an exported folder."""
    words = {label: [list(slot) for slot in slots] for label, slots in zip(labels, prompt.words, strict=True)}
    patterns, markers = list(prompt.patterns), [list(pair) for pair in prompt.markers]
    told = {"patterns": patterns, "markers": markers, "vectors": prompt.vectors, "shift": list(prompt.shift)}
    return {"format": _FORMAT, **told, "labels": list(labels), "words": words}


def read_prompt(folder: Path, tokenizer: Tokenizer) -> tuple[Prompt, tuple[str, ...]]:
    """The prompt of `folder/prompt.json` with the vocabulary it was made for, and the labels in the order of the logits.

    Raises:
        ArtifactError: if it is not one.
    """
    path = folder / PROMPT_FILE
    data = read_json(path)
    try:
        if data["format"] != _FORMAT:
            raise ArtifactError(f"{path}: format {data['format']!r}, this cramlm reads {_FORMAT}; export the model again")
        labels, words, vectors = list(data["labels"]), data["words"], data["vectors"]
        given = {label: tuple(tuple(slot) for slot in words[label]) for label in labels}
        shown = json.loads(json.dumps({"patterns": data["patterns"], "markers": data["markers"]}))
        config = PromptConfig.model_validate({**shown, "words": _as_given(given)})
        if len(set(labels)) != len(labels) or len(labels) < 2 or type(vectors) is not int or not 0 <= vectors <= 10_000:
            raise ValueError("labels or vectors")
        shift = tuple(map(float, data["shift"]))
        if len(shift) not in (0, len(labels)) or not all(map(math.isfinite, shift)):
            raise ValueError("shift")
        prompt = resolve_prompt(config, [config.words_of(label) for label in labels], tokenizer, vectors=vectors)
        return replace(prompt, shift=shift), tuple(labels)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        said = " ".join(str(error).split())[:160]
        raise ArtifactError(f"{path}: damaged, or not made for this vocabulary ({said}); export the model again") from error


def _as_given(words: dict[str, Slots]) -> dict[str, Any]:
    """Words by slots, as a config has them."""
    return {label: slots[0] if len(slots) == 1 else slots for label, slots in words.items()}


def head_of(prompt: Prompt) -> HeadConfig:
    """A head that has such a prompt; the pooling, which no prompt asks for, is the one of every shape."""
    return HeadConfig(kind="soft-prompt" if prompt.vectors else "prompt", pooling="cls")
