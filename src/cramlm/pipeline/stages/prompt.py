"""The words of a prompt in the vocabulary at hand: given ones looked up, or chosen from the training texts.

prompt/    prompt.json: patterns, labels, words
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cramlm.config.head import Slots
from cramlm.config.run import RunConfig
from cramlm.data.task import task_fingerprint
from cramlm.errors import UsageError
from cramlm.evaluation.evaluate import sequences_of
from cramlm.model.huggingface.checks import more
from cramlm.model.prompts import PROMPT_FILE, Prompt, choose_words, prompt_json, read_prompt, resolve_prompt
from cramlm.model.tokenizer import UNCUT, Tokenizer
from cramlm.pipeline.stages.common import Context, write_json
from cramlm.records import Event, Task

_MOST_SHOWN = 4  # labels in a message


def check_prompt(run: Context) -> None:
    """At the start of a run: words for each label of the task and for no other, known to the vocabulary where there is one already.

    Raises:
        UsageError: naming the label or the word.
    """
    words = run.config.head.prompt.words
    if not run.config.head.fills_masks or not words:
        return
    if lacking := [label for label in run.task.labels if label not in words]:
        raise UsageError(f"head.prompt.words: the label {lacking[0]!r}{more(lacking)} has no words; give each label some, or none any")
    if strange := sorted(words.keys() - set(run.task.labels)):
        known = ", ".join(map(repr, run.task.labels[:8]))
        raise UsageError(f"head.prompt.words: {strange[0]!r}{more(strange)} is no label of the training texts ({known}); drop it")
    if run.pretrained is not None:
        _resolved(run.config, [run.config.head.prompt.words_of(label) for label in run.task.labels], run.pretrained.tokenizer)


def prompt(run: Context, tokenizer: Tokenizer) -> Prompt | None:
    """The prompt of the run, published; None where labels have a classifier.

    Raises:
        UsageError: naming words that are not one token of the vocabulary.
    """
    settings = run.config.head.prompt
    if not run.config.head.fills_masks:
        return None

    def write(target: Path) -> None:
        words: Sequence[Slots] = (
            [settings.words_of(label) for label in run.task.labels] if settings.words else _chosen(run.config, run.task, tokenizer)
        )
        resolved = _resolved(run.config, words, tokenizer)
        write_json(target / PROMPT_FILE, prompt_json(resolved, run.task.labels))
        shown = [f"{label}: {' + '.join('|'.join(slot) for slot in slots)}" for label, slots in zip(run.task.labels, words, strict=True)]
        left = f"; and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
        how = "given" if settings.words else "chosen from the training texts"
        run.emit(Event("done", "prompt", f"words {how}: {'; '.join(shown[:_MOST_SHOWN])}{left}"))

    inputs = {"tokenizer": tokenizer.fingerprint, "train": task_fingerprint(run.task)["train"], "vectors": run.config.head.vectors}
    key = {"format": 1, "config": settings.model_dump(mode="json", exclude={"vectors"}), **inputs}
    artifact = run.stage("prompt", key=key, write=write)
    return read_prompt(artifact.path, tokenizer)[0]


def _chosen(config: RunConfig, task: Task, tokenizer: Tokenizer) -> list[Slots]:
    tokens = sequences_of(tokenizer, task.train, max_length=UNCUT)
    numbers = {label: number for number, label in enumerate(task.labels)}
    label_ids = np.array([numbers[example.label or ""] for example in task.train], np.int64)
    return [(words,) for words in choose_words(tokens, label_ids, task.labels, tokenizer, count=config.head.prompt.chosen)]


def _resolved(config: RunConfig, words: Sequence[Slots], tokenizer: Tokenizer) -> Prompt:
    return resolve_prompt(config.head.prompt, words, tokenizer, vectors=config.head.vectors)
