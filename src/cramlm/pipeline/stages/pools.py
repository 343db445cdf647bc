"""Labelled texts and chosen passages as the token sequences that a phase draws from."""

from __future__ import annotations

import numpy as np

from cramlm.config.run import PhaseConfig
from cramlm.data.labels import RULES
from cramlm.evaluation.evaluate import sequences_of
from cramlm.model.prompts import Prompt, read_passages
from cramlm.model.tokenizer import Tokenizer
from cramlm.pipeline.stages.common import Chosen
from cramlm.records import FloatArray, Task
from cramlm.training.pools import TokenPool


def task_pool(tokenizer: Tokenizer, task: Task, soft: FloatArray | None, prompt: Prompt | None, *, length: int) -> TokenPool:
    """The training texts as sequences of at most `length` tokens, in every pattern of a prompt if one is given. soft: (texts, labels)."""
    tokens = sequences_of(tokenizer, task.train, max_length=length, prompt=prompt)
    labels, targets = RULES[task.kind].targets([str(example.label) for example in task.train], task.labels, task.scale)
    taught, asked = (None if each is None else each[tokens.source] for each in (soft, targets if targets.shape[1] else None))
    return TokenPool(tokens.ids, tokens.offsets, labels[tokens.source], soft_labels=taught, targets=asked)


def external_length(phase: PhaseConfig) -> int:
    """Tokens of the longest sequence of external text."""
    return min(phase.external_length or phase.text_length, phase.text_length)


def external_pool(
    tokenizer: Tokenizer,
    selection: Chosen,
    soft: FloatArray | None = None,
    prompt: Prompt | None = None,
    *,
    soft_of_passages: FloatArray | None = None,
    length: int,
) -> TokenPool:
    """The selected passages as sequences of at most `length` tokens, each with its passage's weight, in the patterns of a prompt if there
    is one; a long passage gives several.

    soft: soft labels of every sequence, (sequences, labels). soft_of_passages: in place of them one for each passage, (passages, labels).
    """
    if prompt is None:
        tokens = tokenizer.cut(selection.ids, max_length=length, cut="split")
    else:
        tokens = read_passages(prompt, tokenizer, selection.ids, max_length=length)
    soft = soft if soft_of_passages is None else soft_of_passages[tokens.source]
    assert soft is None or len(soft) == len(tokens), "soft labels belong to the same pieces"
    weights = selection.weights()
    weights = None if weights is None else weights[tokens.source]
    return TokenPool(tokens.ids, tokens.offsets, np.full(len(tokens), -1, dtype=np.int64), weights, soft)
