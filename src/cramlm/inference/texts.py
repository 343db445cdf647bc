"""Checks, word spans and streaming that all predictors share; needs NumPy only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from cramlm.errors import DataError, UsageError
from cramlm.records import FloatArray, Prediction

STREAM_BATCH = 1024

P = TypeVar("P")  # a prediction
Predict: TypeAlias = Callable[[Sequence[str], Sequence[str | None] | None], list[P]]


def check_texts(texts: Sequence[str], pairs: Sequence[str | None] | None) -> None:
    """Check that texts (and pairs) are lists of strings of equal length.

    Raises:
        UsageError: if `texts` is one string, or `pairs` has another length. DataError: if a text is not a string.
    """
    refuse_one_string(texts, pairs)
    if pairs is not None and len(pairs) != len(texts):
        raise UsageError(f"{len(texts)} texts but {len(pairs)} pairs; give one for each text (None where there is none)")
    _check_strings("text", texts)
    _check_strings("pair", [pair for pair in pairs or () if pair is not None])


def refuse_one_string(texts: object, pairs: object) -> None:
    """Raises UsageError if a string is passed in place of a list."""
    for name, value in (("texts", texts), ("pairs", pairs)):
        if isinstance(value, str | bytes):
            raise UsageError(f"{name} is one string ({str(value)[:30]!r}); pass a list of strings, like [text]")


def word_spans(tokenizer_json: str, text: str, *, max_length: int) -> list[tuple[int, int]]:
    """Character spans [start, stop) of the words within the model's input, in order.

    Raises:
        DataError: if the text holds a lone surrogate.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    tokenizer.enable_truncation(max_length)
    try:
        encoding = tokenizer.encode(text)
    except (TypeError, UnicodeEncodeError) as error:
        raise DataError("the text holds a lone surrogate; remove it") from error
    spans: dict[int, tuple[int, int]] = {}
    for word, (start, stop) in zip(encoding.word_ids, encoding.offsets, strict=True):
        if word is not None:  # None: [CLS] and [SEP]
            first, last = spans.get(word, (start, stop))
            spans[word] = (min(first, start), max(last, stop))
    return list(spans.values())


def predict_stream(predict: Predict[P], texts: Iterable[str], pairs: Iterable[str | None] | None, *, batch: int) -> Iterator[P]:
    """Yield the predictions of `predict` for any number of texts, reading `batch` of them at a time.

    Raises:
        UsageError: as `check_texts`, at once; later, if texts and pairs have different lengths.
    """
    refuse_one_string(texts, pairs)
    if batch < 1:
        raise UsageError(f"batch is {batch}; take at least 1 text at a time")
    return _stream(predict, iter(texts), None if pairs is None else iter(pairs), batch)


def predictions(probabilities: FloatArray, labels: Sequence[str]) -> list[Prediction]:
    """The most probable label of each row (n, labels), with the probability of every label."""
    return [Prediction(labels[int(row.argmax())], dict(zip(labels, row.tolist(), strict=True))) for row in probabilities]


def _stream(predict: Predict[P], texts: Iterator[str], pairs: Iterator[str | None] | None, batch: int) -> Iterator[P]:
    while chunk := list(itertools.islice(texts, batch)):
        yield from predict(chunk, None if pairs is None else list(itertools.islice(pairs, len(chunk))))
    if pairs is not None and next(pairs, _stream) is not _stream:
        raise UsageError("there are more pairs than texts; give one for each text")


def _check_strings(name: str, values: Sequence[object]) -> None:
    for number, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise DataError(f"{name} {number}: is {type(value).__name__} ({str(value)[:30]!r}), not a string; convert it, or leave it out")
