"""The words of a prompt in the vocabulary at hand: given ones looked up, or chosen from the training texts.

prompt/    prompt.json: patterns, labels, words
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cramlm.artifacts import stage
from cramlm.config import RunConfig
from cramlm.data.task import task_fingerprint
from cramlm.errors import UsageError
from cramlm.evaluation.evaluate import sequences_of
from cramlm.head_config import Slots
from cramlm.model.folders import more
from cramlm.model.label_words import choose_words
from cramlm.model.pretrained import Pretrained
from cramlm.model.prompts import PROMPT_FILE, Prompt, prompt_json, read_prompt, resolve_prompt
from cramlm.model.tokenization import UNCUT, Tokenizer
from cramlm.records import Emit, Event, Task
from cramlm.stages.common import write_json

_MOST_SHOWN = 4  # labels in a message


def check_prompt(config: RunConfig, task: Task, pretrained: Pretrained | None) -> None:
    """At the start of a run: words for each label of the task and for no other, known to the vocabulary where there is one already.

    Raises:
        UsageError: naming the label or the word.
    """
    words = config.head.prompt.words
    if not config.head.fills_masks or not words:
        return
    if lacking := [label for label in task.labels if label not in words]:
        raise UsageError(f"head.prompt.words: the label {lacking[0]!r}{more(lacking)} has no words; give each label some, or none any")
    if strange := sorted(words.keys() - set(task.labels)):
        known = ", ".join(map(repr, task.labels[:8]))
        raise UsageError(f"head.prompt.words: {strange[0]!r}{more(strange)} is no label of the training texts ({known}); drop it")
    if pretrained is not None:
        _resolved(config, [config.head.prompt.words_of(label) for label in task.labels], pretrained.tokenizer)


def prompt(config: RunConfig, task: Task, tokenizer: Tokenizer, folder: Path, *, emit: Emit) -> Prompt | None:
    """The prompt of the run, published; None where labels have a classifier.

    Raises:
        UsageError: naming words that are not one token of the vocabulary.
    """
    settings = config.head.prompt
    if not config.head.fills_masks:
        return None

    def write(target: Path) -> None:
        words: Sequence[Slots] = [settings.words_of(label) for label in task.labels] if settings.words else _chosen(config, task, tokenizer)
        resolved = _resolved(config, words, tokenizer)
        write_json(target / PROMPT_FILE, prompt_json(resolved, task.labels))
        shown = [f"{label}: {' + '.join('|'.join(slot) for slot in slots)}" for label, slots in zip(task.labels, words, strict=True)]
        left = f"; and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
        how = "given" if settings.words else "chosen from the training texts"
        emit(Event("done", "prompt", f"words {how}: {'; '.join(shown[:_MOST_SHOWN])}{left}"))

    inputs = {"tokenizer": tokenizer.fingerprint, "train": task_fingerprint(task)["train"], "vectors": config.head.vectors}
    key = {"format": 1, "config": settings.model_dump(mode="json", exclude={"vectors"}), **inputs}
    artifact = stage(folder / "prompt", kind="prompt", key=key, write=write, emit=emit)
    return read_prompt(artifact.path, tokenizer)[0]


def _chosen(config: RunConfig, task: Task, tokenizer: Tokenizer) -> list[Slots]:
    tokens = sequences_of(tokenizer, task.train, max_length=UNCUT)
    numbers = {label: number for number, label in enumerate(task.labels)}
    label_ids = np.array([numbers[example.label or ""] for example in task.train], np.int64)
    return [(words,) for words in choose_words(tokens, label_ids, task.labels, tokenizer, count=config.head.prompt.chosen)]


def _resolved(config: RunConfig, words: Sequence[Slots], tokenizer: Tokenizer) -> Prompt:
    return resolve_prompt(config.head.prompt, words, tokenizer, vectors=config.head.vectors)
