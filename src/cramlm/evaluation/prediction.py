"""Predict with an encoder: texts are sorted by length, packed into rows with next to no padding, and returned in the given order.

Attention stays inside a sequence, so the logits of a text do not depend on what shares its row, up to the order of floating-point sums
(1e-5 in fp32). Rows are as long as the longest sequence of their chunk; because neighbours have nearly equal lengths, most rows hold one
sequence. In fp32 on a CPU batches are small enough for its cache, and have next to no padding. The vocabulary head is computed at the
[MASK] tokens of a prompt only; the logits of a prompt's patterns are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cramlm.errors import DivergedError
from cramlm.evaluation.kinds import KINDS
from cramlm.model.prompts import Prompt, read_texts
from cramlm.model.tokenizer import Tokenizer, Tokens
from cramlm.records import Example, FloatArray, IntArray, Scale, TaskKind
from cramlm.storage.arrays import offsets_of
from cramlm.training.sequences import pack_by_length

if TYPE_CHECKING:
    import torch

    from cramlm.model.model import Model, PackedBatch, Precision

BATCH_TOKENS = 8192
CACHED_TOKENS = 2048  # of a batch in fp32 on a CPU: with 8,192, elementwise operations on a token take twice as long (docs/log.md)
CACHED_PADDING = 32  # positions of padding in such a batch, which take about as long as the overhead of one more batch


def example_logits(
    model: Model,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    max_length: int,
    precision: Precision,
    scale: Scale = Scale(),  # noqa: B008 - immutable
) -> FloatArray:
    """Logits of examples, float32 (n, labels).

    scale: of a regression in training, whose weights predict standardized numbers; the result is in the user's unit.
    """
    sequences = sequences_of(tokenizer, examples, max_length=max_length, prompt=model.prompt)
    logits = predict_logits(model, sequences, precision=precision)
    return logits * np.float32(scale.spread) + np.float32(scale.mean)


def sequences_of(tokenizer: Tokenizer, examples: Sequence[Example], *, max_length: int, prompt: Prompt | None = None) -> Tokens:
    """Encode examples as the model reads them: one sequence each, or one for each pattern of a prompt, cut at `max_length` tokens."""
    texts, pairs = [example.text for example in examples], [example.text_pair for example in examples]
    return sequences_of_texts(tokenizer, texts, pairs, max_length=max_length, prompt=prompt)


def sequences_of_texts(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str | None] | None, *, max_length: int, prompt: Prompt | None
) -> Tokens:
    """As `sequences_of`, from texts and their pairs.

    Raises:
        UsageError: if a pattern leaves no token for the text, or takes single texts only. DataError: if a text holds a lone surrogate.
    """
    paired = pairs if pairs is not None and any(pair is not None for pair in pairs) else None
    if prompt is not None:
        return read_texts(prompt, tokenizer, texts, paired, max_length=max_length)
    return tokenizer.sequences(texts, paired, max_length=max_length, cut="truncate")


def outputs_of(kind: TaskKind, logits: FloatArray) -> FloatArray:
    """Convert logits (n, labels) to probabilities, or to numbers (kinds.py).

    Raises:
        DivergedError: if a logit is not finite.
    """
    if not np.isfinite(logits).all():
        raise DivergedError("the model's logits are not finite numbers; train it again with a lower learning rate")
    return KINDS[kind].outputs(logits)


def predict_logits(model: Model, sequences: Tokens, *, precision: Precision, batch_tokens: int = BATCH_TOKENS) -> FloatArray:
    """Logits of each text, float32 (n, labels), in the given order, computed on the device of the model's weights.

    A text is one sequence; with a prompt it is one sequence per pattern, and its logits are their mean. `batch_tokens` bounds the tokens
    computed at once, in fp32 on a CPU `CACHED_TOKENS` as well; a single longer sequence is computed alone.
    """
    logits = _of_sequences(model, sequences, model.task_logits, model.labels, precision=precision, batch_tokens=batch_tokens)
    return logits if _patterns(model) == 1 else logits.reshape(-1, _patterns(model), model.labels).mean(axis=1)


def predict_embeddings(model: Model, sequences: Tokens) -> FloatArray:
    """Return the pooled hidden states of each text, float32 (n, hidden), in the given order: the input of the classifier, in fp32."""
    assert model.prompt is None, "a model with a prompt pools nothing"
    width = model.encoder_config.hidden
    return _of_sequences(model, sequences, model.pooled, width, precision="fp32", batch_tokens=BATCH_TOKENS)


def _of_sequences(
    model: Model,
    sequences: Tokens,
    head: Callable[[torch.Tensor, PackedBatch], torch.Tensor],
    width: int,
    *,
    precision: Precision,
    batch_tokens: int,
) -> FloatArray:
    """Return the output of `head` for the hidden states, float32 (sequences, width), in the order of the sequences."""
    import torch  # here: linear models use this module without it

    from cramlm.model.model import PackedBatch, autocast

    device, padding = model.device, None
    if precision == "fp32" and device.type == "cpu":
        batch_tokens, padding = min(batch_tokens, CACHED_TOKENS), CACHED_PADDING
    results = np.empty((len(sequences), width), dtype=np.float32)
    with torch.no_grad(), autocast(device, precision):
        for batch in pack_by_length(sequences, most=batch_tokens, pad_id=model.pad_id, padding=padding):
            packed = PackedBatch.of(batch, device)
            results[batch.task_labels] = head(model.hidden(packed), packed).float().cpu().numpy()
    return results


def predict_logits_fast(model: Model, sequences: Tokens) -> FloatArray:
    """As `predict_logits` in bf16, but with the predictions of fp32: near ties (`Kind.near_ties`) are computed again in fp32."""
    logits = predict_logits(model, sequences, precision="bf16")
    if np.isfinite(logits).all():
        close = np.flatnonzero(KINDS[model.kind].near_ties(logits))
        if len(close):
            rows = (close[:, None] * _patterns(model) + np.arange(_patterns(model))).ravel()
            logits[close] = predict_logits(model, _only(sequences, rows), precision="fp32")
    return logits


def lengths_of(model: Model, sequences: Tokens) -> IntArray:
    """Return the tokens of each text, int64 (n,); with a prompt those of its longest pattern."""
    lengths: IntArray = sequences.lengths.reshape(-1, _patterns(model)).max(axis=1)
    return lengths


def _patterns(model: Model) -> int:
    """Sequences per text."""
    return 1 if model.prompt is None else len(model.prompt.patterns)


def _only(sequences: Tokens, indices: IntArray) -> Tokens:
    """Some of the sequences, in the order of `indices`."""
    chosen = [sequences[int(index)] for index in indices]
    return Tokens(np.concatenate(chosen), offsets_of(sequences.lengths[indices]), sequences.source[indices])
