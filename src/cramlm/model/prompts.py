"""Texts inside patterns, as token sequences with a [MASK] where the words of the labels are read (Schick and Schütze 2021).

    [CLS] vectors... [MASK] : the text, cut if need be [SEP]

The parts of a pattern are encoded one by one, so that what is cut is always the text, and its last tokens do not depend on what follows.
[MASK] in a text is text, so that the masks of a sequence are those of its pattern. Learned vectors (soft prompts) have ids behind the
vocabulary. Texts with several patterns give several sequences each, those of a text one after the other.

Words to stand for labels, chosen by the training texts where nobody gives any (the useful half of AutoPrompt, Shin et al. 2020).

Candidates are the tokens of the vocabulary that are whole words of letters. Of a word and a label, n texts of which k hold the word, and N
other texts of which K do:

    z  =  ( ln((k + 1/2) / (n - k + 1/2)) - ln((K + 1/2) / (N - K + 1/2)) )
          / sqrt( 1/(k + 1/2) + 1/(n - k + 1/2) + 1/(K + 1/2) + 1/(N - K + 1/2) )

the difference of their log-odds over its standard error (Monroe, Colaresi and Quinn 2008, with half a text as prior). A word goes to the
label for which its z is highest; each label takes its best. No chance in it: of equal words the one with the lower token id.
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

from cramlm.config.head import HeadConfig, Part, PromptConfig, Slots, parse_pattern
from cramlm.errors import ArtifactError, UsageError
from cramlm.model.huggingface.config import read_json
from cramlm.model.tokenizer import IdArray, Tokenizer, Tokens, longest_first, split_evenly
from cramlm.records import FloatArray, IntArray

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


def read_passages(prompt: Prompt, tokenizer: Tokenizer, whole: Tokens, *, max_length: int) -> Tokens:
    """Encoded texts cut into as many pieces as they need, each piece in one pattern, the patterns in turn.

    Raises:
        UsageError: if a pattern leaves no room for text.
    """
    layouts = [_Layout.of(pattern, prompt, tokenizer) for pattern in prompt.patterns]
    starts, stops, source = split_evenly(whole.offsets, passage_room(prompt, tokenizer, max_length))
    nothing = whole.ids[:0]
    pieces: list[IdArray] = []
    counts = []
    for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        parts = layouts[number % len(layouts)].around(whole.ids[start:stop], nothing, (nothing, nothing))
        pieces += parts
        counts.append(len(parts))
    return _sequences(pieces, counts, source)


def passage_room(prompt: Prompt, tokenizer: Tokenizer, max_length: int) -> int:
    """Tokens of the longest piece that `read_passages` makes: what fits into every pattern."""
    return min(_Layout.of(pattern, prompt, tokenizer).room(max_length) for pattern in prompt.patterns)


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


_DECIMALS = 9  # of z, so that the last bits of a logarithm decide nothing


def choose_words(tokens: Tokens, label_ids: IntArray, labels: Sequence[str], tokenizer: Tokenizer, *, count: int) -> list[tuple[str, ...]]:
    """For each label the `count` words most associated with it (fewer if it has no more of its own), best first.

    tokens: of the training texts; label_ids: (n,), which label each has.

    Raises:
        UsageError: if a label is left without a word.
    """
    candidates, words = _candidates(tokenizer)
    z = association(tokens, label_ids, candidates, labels=len(labels))
    order = np.lexsort((np.broadcast_to(candidates, z.shape), -z), axis=1)
    best = z.argmax(axis=0)
    chosen: list[list[int]] = [[int(place) for place in row if best[place] == label][:count] for label, row in enumerate(order)]
    taken = {place for places in chosen for place in places}
    for label, row in enumerate(order):  # a label whose words all speak for others yet more has the best that nobody took
        if not chosen[label]:
            chosen[label] = [int(place) for place in row if place not in taken][:1]
            taken.update(chosen[label])
    if empty := [label for label, places in zip(labels, chosen, strict=True) if not places]:
        raise UsageError(
            f"head.prompt.words: the vocabulary has {len(words)} whole words, none of which is left for label {empty[0]!r}; give words, "
            "or raise tokenizer.vocab_size"
        )
    return [tuple(words[place] for place in places) for places in chosen]


def association(tokens: Tokens, label_ids: IntArray, candidates: IntArray, *, labels: int) -> FloatArray:
    """z of each label and candidate, (labels, candidates)."""
    texts = np.repeat(np.arange(len(tokens)), tokens.lengths)
    place = np.full(int(max(tokens.ids.max(initial=0), candidates.max(initial=0))) + 1, -1)
    place[candidates] = np.arange(len(candidates))
    at = place[tokens.ids]
    held = np.unique(texts[at >= 0] * len(candidates) + at[at >= 0])  # a text counts once, however often it says the word
    text, word = np.divmod(held, max(1, len(candidates)))
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
        if word.isalpha() and len(whole) == 1 and whole[0] == number and word_id(tokenizer, word) == number:
            ids.append(number)
            words.append(word)
    return np.array(ids, np.int64), words
