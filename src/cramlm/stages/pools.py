"""Labelled texts and chosen passages as the token sequences that a phase draws from."""

from __future__ import annotations

import numpy as np

from cramlm.data.labels import RULES
from cramlm.evaluation.evaluate import sequences_of
from cramlm.model.prompts import Prompt, read_passages
from cramlm.model.tokenization import Tokenizer
from cramlm.records import FloatArray, Task
from cramlm.stages.common import Chosen
from cramlm.training.batching import TokenPool


def task_pool(tokenizer: Tokenizer, task: Task, soft: FloatArray | None, prompt: Prompt | None, *, length: int) -> TokenPool:
    """The training texts as sequences of at most `length` tokens, in every pattern of a prompt if one is given. soft: (texts, labels)."""
    tokens = sequences_of(tokenizer, task.train, max_length=length, prompt=prompt)
    labels, targets = RULES[task.kind].targets([str(example.label) for example in task.train], task.labels, task.scale)
    taught, asked = (None if each is None else each[tokens.source] for each in (soft, targets if targets.shape[1] else None))
    return TokenPool(tokens.ids, tokens.offsets, labels[tokens.source], soft_labels=taught, targets=asked)


def external_pool(
    tokenizer: Tokenizer, selection: Chosen, soft: FloatArray | None = None, prompt: Prompt | None = None, *, length: int
) -> TokenPool:
    """The selected passages as sequences of at most `length` tokens, each with its passage's weight and soft labels (`soft`, (passages,
    labels)), in the patterns of a prompt where one is given; a long passage gives several.
    """
    texts = selection.texts()
    if prompt is None:
        tokens = tokenizer.sequences(texts, max_length=length, cut="split")
    else:
        tokens = read_passages(prompt, tokenizer, texts, max_length=length)
    weights, taught = (None if given is None else given[tokens.source] for given in (selection.weights(), soft))
    return TokenPool(tokens.ids, tokens.offsets, np.full(len(tokens), -1, dtype=np.int64), weights, taught)
