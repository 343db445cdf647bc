"""Labelled texts and chosen passages as the token sequences that a phase draws from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cramlm.evaluation.evaluate import sequences_of
from cramlm.model.prompts import Prompt, read_passages
from cramlm.model.tokenization import Tokenizer
from cramlm.records import Example, FloatArray
from cramlm.stages.common import Chosen
from cramlm.training.batching import TokenPool


def task_pool(
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    label_ids: Mapping[str, int],
    soft: FloatArray | None,
    prompt: Prompt | None,
    *,
    length: int,
) -> TokenPool:
    """Labelled texts as sequences of at most `length` tokens, in every pattern of a prompt where one is given. soft: (texts, labels)."""
    tokens = sequences_of(tokenizer, examples, max_length=length, prompt=prompt)
    labels = np.asarray([-1 if example.label is None else label_ids[example.label] for example in examples], dtype=np.int64)
    return TokenPool(tokens.ids, tokens.offsets, labels[tokens.source], soft_labels=None if soft is None else soft[tokens.source])


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
