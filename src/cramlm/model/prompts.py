"""Prompts: texts inside patterns with a [MASK] at which the words of the labels are scored (Schick and Schütze 2021), and those words.

    [CLS] vectors... [MASK] : the text, cut if need be [SEP]

The parts of a pattern are encoded separately, so that truncation only cuts the text, and its last tokens do not depend on what follows.
[MASK] in a text is ordinary text. Learned vectors (soft prompts) have ids after the vocabulary. With several patterns a text gives several
consecutive sequences.

`choose_words` chooses the words of labels that have none in the config from the training texts (like AutoPrompt's label tokens, Shin et al.
2020). Candidates are the tokens of the vocabulary that are whole words of letters and their marks. For a word and a label with n texts, k
of which contain the word, and N other texts, K of which do:

    z  =  ( ln((k + 1/2) / (n - k + 1/2)) - ln((K + 1/2) / (N - K + 1/2)) )
          / sqrt( 1/(k + 1/2) + 1/(n - k + 1/2) + 1/(K + 1/2) + 1/(N - K + 1/2) )

the difference of the log-odds over its standard error (Monroe, Colaresi and Quinn 2008, with half a text as prior). A word belongs to the
label with its highest z; each label takes its best words. Ties are broken by the lower token id.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from cramlm.config.head import HeadConfig, Part, PromptConfig, Slots, parse_pattern
from cramlm.errors import ArtifactError, UsageError
from cramlm.model.huggingface.config import read_json
from cramlm.model.tokenizer import IdArray, Tokenizer, Tokens, longest_first, split_evenly
from cramlm.records import FloatArray, IntArray
from cramlm.storage.arrays import offsets_of
from cramlm.text.characters import is_mark

PROMPT_FILE: Final = "prompt.json"
VECTORS_FILE: Final = "prompt.safetensors"
LEAST_TEXT: Final = 4
"""Least tokens of a text in a pattern."""
ENTITY_TOKENS: Final = 16
_FORMAT: Final = 1
_MOST_SIMILAR: Final = 5


@dataclass(frozen=True, slots=True)
class Prompt:
    """Patterns, and for each label (in the order of the logits) and slot its words with their token ids.

    vectors: number of learned vectors before the text. shift: constant added to each label's score; empty = none.
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
    """Look up the token ids of the words of each label.

    Raises:
        UsageError: naming words that are not one token, and tokens similar to them.
    """
    found = {word: word_id(tokenizer, word) for slots in words for slot in slots for word in slot}
    numbers = {word: number for word, number in found.items() if number is not None}
    if invalid := [word for word in found if word not in numbers]:
        raise UsageError(f"head.prompt.words: {'; '.join(_not_one_token(tokenizer, word) for word in invalid[:3])}")
    ids = tuple(tuple(tuple(numbers[word] for word in slot) for slot in slots) for slots in words)
    for number, one in enumerate(ids):
        if one in ids[:number]:
            raise UsageError(f"head.prompt.words: {words[ids.index(one)]} and {words[number]} have the same tokens; use other words")
    return Prompt(config.patterns, config.markers, tuple(words), ids, tokenizer.mask_id, vectors)


def word_id(tokenizer: Tokenizer, word: str) -> int | None:
    """Return the token of a word, after a space if the vocabulary distinguishes that; None if it is not exactly one token."""
    for shown in (f" {word}", word):
        ids = tokenizer.encode([shown])[0]
        if len(ids) == 1 and ids[0] != tokenizer.unk_id:
            return int(ids[0])
    return None


def _not_one_token(tokenizer: Tokenizer, word: str) -> str:
    pieces = [tokenizer.token(number) for number in tokenizer.encode([f" {word}"])[0]]
    decoded = (tokenizer.decode([number]).strip() for number in range(tokenizer.vocab_size))
    candidates = sorted({token for token in decoded if _is_word(token)})
    similar = difflib.get_close_matches(word.lower(), candidates, n=_MOST_SIMILAR, cutoff=0.5)
    advice = f"similar single tokens: {', '.join(similar)}" if similar else "use another word"
    return f"{word!r} is {len(pieces)} tokens of the vocabulary ({' '.join(pieces)}); {advice}"


def read_texts(
    prompt: Prompt, tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str | None] | None, *, max_length: int
) -> Tokens:
    """Each text (or pair) in each pattern, a sequence for each; `source` is the index of the text.

    Raises:
        UsageError: if a pattern leaves no tokens for text, or pairs are passed to patterns for single texts. DataError: as the tokenizer.
    """
    layouts = [_Layout.of(pattern, prompt, tokenizer) for pattern in prompt.patterns]
    if pairs is not None and any(pair is not None for pair in pairs) and not any(layout.reads_pairs for layout in layouts):
        raise UsageError("the patterns of this prompt read one text, not a pair; leave the second text out")
    others = None if pairs is None else ["" if pair is None else pair for pair in pairs]
    filled = [layout.fill(texts, others, tokenizer, max_length=max_length) for layout in layouts]
    pieces = [piece for number in range(len(texts)) for parts in filled for piece in parts[number]]
    return _sequences(pieces, [len(parts[0]) for parts in filled if parts], np.repeat(np.arange(len(texts)), len(layouts)))


def read_passages(prompt: Prompt, tokenizer: Tokenizer, whole: Tokens, *, max_length: int) -> Tokens:
    """Encoded texts cut into the fewest pieces, each in one pattern; the patterns take turns.

    Raises:
        UsageError: if a pattern leaves no tokens for text.
    """
    layouts = [_Layout.of(pattern, prompt, tokenizer) for pattern in prompt.patterns]
    starts, stops, source = split_evenly(whole.offsets, passage_length(prompt, tokenizer, max_length))
    nothing = whole.ids[:0]
    pieces: list[IdArray] = []
    counts = []
    for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        parts = layouts[number % len(layouts)].around(whole.ids[start:stop], nothing, (nothing, nothing))
        pieces += parts
        counts.append(len(parts))
    return _sequences(pieces, counts, source)


def passage_length(prompt: Prompt, tokenizer: Tokenizer, max_length: int) -> int:
    """Return the maximum tokens of a piece of `read_passages`, so that it fits into every pattern."""
    return min(_Layout.of(pattern, prompt, tokenizer).text_length(max_length) for pattern in prompt.patterns)


def longest_text(prompt: Prompt, tokenizer: Tokenizer, max_length: int) -> int:
    """Return the maximum tokens of a text that fit into at least one pattern."""
    return max(_Layout.of(pattern, prompt, tokenizer).text_length(max_length) for pattern in prompt.patterns)


def _sequences(pieces: list[IdArray], counts: list[int], source: Any) -> Tokens:
    """Concatenate pieces into sequences. counts: pieces of each sequence, repeated cyclically."""
    if not pieces:
        return Tokens(np.zeros(0, np.uint16), np.zeros(1, np.int64), np.zeros(0, np.int64))
    ends = np.cumsum(np.resize(counts, len(source)))
    starts = offsets_of(np.array([len(piece) for piece in pieces]))
    offsets = np.concatenate([np.zeros(1, np.int64), starts[ends]])
    return Tokens(np.concatenate(pieces), offsets, np.asarray(source, np.int64))


@dataclass(frozen=True, slots=True)
class _Layout:
    """A pattern with encoded literals."""

    pattern: str
    parts: tuple[tuple[Part, IdArray | None], ...]
    before: IdArray
    after: IdArray
    markers: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, pattern: str, prompt: Prompt, tokenizer: Tokenizer) -> _Layout:
        parts = parse_pattern(pattern)
        dtype = tokenizer.encode([""]).ids.dtype
        fixed = {"mask": np.array([prompt.mask_id], dtype)}
        literals = iter([tokenizer.encode([part.text])[0] for part in parts if part.kind == "literal"])
        encoded = tuple((part, next(literals) if part.kind == "literal" else fixed.get(part.kind)) for part in parts)
        last = tokenizer.vocab_size + prompt.vectors
        vectors = np.arange(tokenizer.vocab_size, last, dtype=dtype if last <= np.iinfo(dtype).max + 1 else np.uint32)
        before = np.concatenate([np.array([tokenizer.cls_id], dtype), vectors])
        return cls(pattern, encoded, before, np.array([tokenizer.sep_id], dtype), prompt.markers)

    @property
    def reads_pairs(self) -> bool:
        return any(part.kind == "text_b" for part, _ in self.parts)

    def text_length(self, max_length: int) -> int:
        """Return how many tokens of text fit into a sequence beside the longest entities."""
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
        """Return the pieces of the sequence of each text."""
        self.text_length(max_length)
        fields: dict[str, Tokens] = {}
        for part, ids in self.parts:
            if ids is None:
                values = self._field(part, texts, others)
                fields[part.kind] = tokenizer.encode([f" {value}" for value in values] if part.spaced else values)
        fixed = len(self.before) + len(self.after) + sum(len(ids) for _, ids in self.parts if ids is not None)
        result = []
        for number in range(len(texts)):
            own = {kind: tokens[number] for kind, tokens in fields.items()}
            entities = tuple(own.get(kind, self.after[:0])[:ENTITY_TOKENS] for kind in ("entity_1", "entity_2"))
            in_entities = sum(len(entities[int(part.kind[-1]) - 1]) for part, _ in self.parts if part.kind.startswith("entity"))
            available = max_length - fixed - in_entities
            if "text" in own:
                one, two = own["text"][:available], self.after[:0]
            else:
                keep_one, keep_two = longest_first(len(own["text_a"]), len(own["text_b"]), available)
                one, two = own["text_a"][:keep_one], own["text_b"][:keep_two]
            result.append(self.around(one, two, entities))
        return result

    def around(self, one: IdArray, two: IdArray, entities: tuple[IdArray, ...]) -> list[IdArray]:
        """Return the pieces of a sequence; their number is constant."""
        values = {"text": one, "text_a": one, "text_b": two, "entity_1": entities[0], "entity_2": entities[1]}
        return [self.before, *(values[part.kind] if ids is None else ids for part, ids in self.parts), self.after]

    def _field(self, part: Part, texts: Sequence[str], others: Sequence[str] | None) -> Sequence[str]:
        """Return the value of a field for each text."""
        if part.kind == "text_b":
            return [""] * len(texts) if others is None else others
        if not part.kind.startswith("entity"):
            return texts
        opens, closes = map(re.escape, self.markers[int(part.kind[-1]) - 1])
        matches = (re.search(f"{opens}(.*?){closes}", text, re.DOTALL) for text in texts)
        return ["" if match is None else match[1].strip() for match in matches]


def prompt_json(prompt: Prompt, labels: Sequence[str]) -> dict[str, Any]:
    """Return the content of `prompt.json`, of a run and of an exported folder."""
    words = {label: [list(slot) for slot in slots] for label, slots in zip(labels, prompt.words, strict=True)}
    patterns, markers = list(prompt.patterns), [list(pair) for pair in prompt.markers]
    settings = {"patterns": patterns, "markers": markers, "vectors": prompt.vectors, "shift": list(prompt.shift)}
    return {"format": _FORMAT, **settings, "labels": list(labels), "words": words}


def read_prompt(folder: Path, tokenizer: Tokenizer) -> tuple[Prompt, tuple[str, ...]]:
    """Return the prompt of `folder/prompt.json`, and the labels in the order of the logits. tokenizer: the one it was made for.

    Raises:
        ArtifactError: if it is not one.
    """
    path = folder / PROMPT_FILE
    data = read_json(path)
    try:
        if data["format"] != _FORMAT:
            raise ArtifactError(f"{path}: format {data['format']!r}, this cramlm reads {_FORMAT}; export the model again")
        labels, words, vectors = list(data["labels"]), data["words"], data["vectors"]
        of_config = {label: words[label][0] if len(words[label]) == 1 else words[label] for label in labels}
        config = PromptConfig.model_validate({"patterns": data["patterns"], "markers": data["markers"], "words": of_config})
        if len(set(labels)) != len(labels) or len(labels) < 2 or type(vectors) is not int or not 0 <= vectors <= 10_000:
            raise ValueError("labels or vectors")
        shift = tuple(map(float, data["shift"]))
        if len(shift) not in (0, len(labels)) or not all(map(math.isfinite, shift)):
            raise ValueError("shift")
        prompt = resolve_prompt(config, [config.words_of(label) for label in labels], tokenizer, vectors=vectors)
        return replace(prompt, shift=shift), tuple(labels)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ArtifactError(f"{path}: damaged, or not made for this vocabulary ({reason}); export the model again") from error


def head_of(prompt: Prompt) -> HeadConfig:
    """Return the head config of a prompt; its pooling is not used."""
    return HeadConfig(kind="soft-prompt" if prompt.vectors else "prompt", pooling="cls")


_DECIMALS = 9  # of z, so that the last bits of a logarithm decide no tie


def choose_words(tokens: Tokens, label_ids: IntArray, labels: Sequence[str], tokenizer: Tokenizer, *, count: int) -> list[tuple[str, ...]]:
    """For each label the `count` words most associated with it (fewer if there are no more), best first.

    tokens: of the training texts. label_ids: (n,), their labels.

    Raises:
        UsageError: if no word is left for a label.
    """
    candidates, words = _candidates(tokenizer)
    z = association(tokens, label_ids, candidates, labels=len(labels))
    order = np.lexsort((np.broadcast_to(candidates, z.shape), -z), axis=1)
    best = z.argmax(axis=0)
    chosen: list[list[int]] = [[int(word) for word in row if best[word] == label][:count] for label, row in enumerate(order)]
    used = {word for of_label in chosen for word in of_label}
    for label, row in enumerate(order):  # a label all of whose words are associated more with others gets the best unused one
        if not chosen[label]:
            chosen[label] = [int(word) for word in row if word not in used][:1]
            used.update(chosen[label])
    if empty := [label for label, of_label in zip(labels, chosen, strict=True) if not of_label]:
        raise UsageError(
            f"head.prompt.words: the vocabulary has {len(words)} whole words, none of which is left for label {empty[0]!r}; give words, "
            "or raise tokenizer.vocab_size"
        )
    return [tuple(words[word] for word in of_label) for of_label in chosen]


def association(tokens: Tokens, label_ids: IntArray, candidates: IntArray, *, labels: int) -> FloatArray:
    """z of each label and candidate, (labels, candidates)."""
    texts = np.repeat(np.arange(len(tokens)), tokens.lengths)
    index = np.full(int(max(tokens.ids.max(initial=0), candidates.max(initial=0))) + 1, -1)
    index[candidates] = np.arange(len(candidates))
    of_token = index[tokens.ids]
    is_candidate = of_token >= 0
    pairs = np.unique(texts[is_candidate] * len(candidates) + of_token[is_candidate])  # a text counts once, however often it has the word
    text, word = np.divmod(pairs, max(1, len(candidates)))
    with_word = np.zeros((labels, len(candidates)))
    np.add.at(with_word, (label_ids[text], word), 1.0)
    texts_of = np.bincount(label_ids, minlength=labels)[:, None].astype(np.float64)
    k, n = with_word, texts_of
    rest, others = with_word.sum(axis=0) - k, len(label_ids) - n
    cells = [cell + 0.5 for cell in (k, n - k, rest, others - rest)]
    z = (np.log(cells[0] / cells[1]) - np.log(cells[2] / cells[3])) / np.sqrt(sum(1 / cell for cell in cells))
    result: FloatArray = np.round(z, _DECIMALS)
    return result


def _candidates(tokenizer: Tokenizer) -> tuple[IntArray, list[str]]:
    """Token ids of whole words, rising, and the words."""
    ids, words = [], []
    shown = [tokenizer.decode([number]).strip() for number in range(tokenizer.vocab_size)]
    alone = tokenizer.encode([f" {word}" for word in shown])
    for number, word in enumerate(shown):
        whole = alone[number]
        if _is_word(word) and len(whole) == 1 and whole[0] == number and word_id(tokenizer, word) == number:
            ids.append(number)
            words.append(word)
    return np.array(ids, np.int64), words


def _is_word(text: str) -> bool:
    """True for letters with their marks: many scripts, like Devanagari and Thai, write vowels as marks."""
    return text[:1].isalpha() and all(character.isalpha() or is_mark(character) for character in text)
