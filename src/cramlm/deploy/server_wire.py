"""What goes over the wire: strict JSON in, models that describe and check it, JSON out.

Nothing is guessed: a key twice, NaN, half a character, an unknown field or a number where a string belongs is refused with one line that
names the place and never repeats the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from cramlm.records import FloatArray, IntArray

JSON = "application/json"
ErrorType: TypeAlias = Literal["Validation", "Overloaded", "Unhealthy", "Unauthorized", "NotFound", "Backend"]


class RefusedError(Exception):
    """An answer other than 200: status, one line, and the kind as text-embeddings-inference names it."""

    def __init__(self, status: int, reason: str, kind: ErrorType = "Validation", *, retry_seconds: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.kind: ErrorType = kind
        self.headers: dict[str, str] = {} if retry_seconds is None else {"retry-after": str(retry_seconds)}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    @property
    def body(self) -> bytes:
        """The answer's JSON."""
        return dumps({"error": " ".join(self.reason.split()), "error_type": self.kind})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PredictRequest(_Strict):
    """Texts to label, with second texts where the model was trained on pairs."""

    texts: Annotated[list[StrictStr], Field(min_length=1, description="Texts to label.", examples=[["first text", "second text"]])]
    pairs: Annotated[
        list[StrictStr | None] | None,
        Field(description="The second text of each, null where there is none; as many as texts.", examples=[None]),
    ] = None


class Labelled(BaseModel):
    """The answer to one text."""

    label: Annotated[str, Field(description="The most probable label.", examples=["sport"])]
    probabilities: Annotated[
        dict[str, float], Field(description="Probability of every label; they sum to 1.", examples=[{"sport": 0.9, "news": 0.1}])
    ]
    truncated: Annotated[bool, Field(description="Whether the text is longer than the model reads, and its end was left out.")]


class PredictAnswer(BaseModel):
    """One answer per text, in the order of the texts."""

    predictions: list[Labelled]


class TeiRequest(_Strict):
    """A request of text-embeddings-inference for sequence classification.

    A list of strings is one input: a text, or a text and its pair. A batch is a list of lists.
    """

    inputs: Annotated[
        StrictStr | list[StrictStr] | list[list[StrictStr]],
        Field(
            description='"text", ["text"], ["text", "pair"], or a batch of the last two.',
            examples=["one text", [["first text"], ["second text"]]],
        ),
    ]
    truncate: Annotated[bool | None, Field(description="Cut texts that are too long, instead of refusing them (413).")] = False
    truncation_direction: Annotated[
        Literal["right", "Right"], Field(description="Which end is cut; this server cuts the end of the text only.")
    ] = "right"
    raw_scores: Annotated[bool, Field(description="Logits instead of probabilities.")] = False


class TeiPrediction(BaseModel):
    """A label and its score."""

    score: float
    label: str


TeiAnswer: TypeAlias = list[TeiPrediction] | list[list[TeiPrediction]]


class Fault(BaseModel):
    """Why there is no answer."""

    error: Annotated[str, Field(description="One line: what is wrong, and what to do.")]
    error_type: ErrorType


class State(BaseModel):
    """Whether the server takes texts."""

    status: Literal["ok", "ready", "loading", "draining"]


def parse(body: bytes) -> Any:
    """The JSON value of a body.

    Raises:
        RefusedError: 400, if it is not UTF-8, not JSON, nested too deep, or holds a key twice or a number that is none.
    """
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"the body is not UTF-8: byte 0x{body[error.start]:02X} at offset {error.start}; send UTF-8") from None
    except json.JSONDecodeError as error:
        raise RefusedError(400, f"the body is not JSON: {error.msg} at character {error.pos + 1}; send one JSON object") from None
    except RecursionError:
        raise RefusedError(400, "the body is nested too deep; send one flat JSON object") from None
    except ValueError:  # Python refuses integers of thousands of digits
        raise RefusedError(400, "the body holds a number of too many digits; there is no field for it") from None


def explain(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first of pydantic's errors in one line, without the value that caused it."""
    first = errors[0]
    place = [part for part in first["loc"] if part != "body"]
    if place and place[0] == "inputs" and first["type"] != "missing":
        return 'inputs: must be "text", ["text"], ["text", "pair"] or a list of such lists, all strings of whole Unicode characters'
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if part not in ("str", "nullable[str]"))
    match first["type"]:
        case "extra_forbidden":
            what = "is no field of this request; leave it out (the model is chosen when the server starts)"
        case "model_attributes_type" | "dict_type" | "missing" if not place:
            what = "must be one JSON object; see /openapi.json"
        case "missing":
            what = "is missing; add it"
        case "string_unicode":
            what = "holds half of a character (a lone surrogate); remove it"
        case _:
            what = str(first["msg"])[:1].lower() + str(first["msg"])[1:]
    return f"{name.removeprefix('.')[:80] or 'body'}: {what}"


def check_texts(texts: Sequence[str], pairs: Sequence[str | None], *, most: int, characters: int) -> None:
    """Refuse what is more than the server takes, and texts that no file could hold.

    Raises:
        RefusedError: 413 for too many or too long, 422 for U+0000, lone surrogates, or pairs of another number.
    """
    if len(texts) > most:
        raise RefusedError(413, f"{len(texts)} texts in one request, at most {most} are taken; send them in several requests")
    if len(texts) != len(pairs):
        raise RefusedError(422, f"{len(texts)} texts but {len(pairs)} pairs; give one for each text (null where there is none)")
    for name, values in (("text", texts), ("pair", pairs)):
        for place, value in enumerate(values, start=1):
            if value is None:
                continue
            if len(value) > characters:
                raise RefusedError(413, f"{name} {place}: has {len(value)} characters, at most {characters} are taken; shorten it")
            if "\0" in value:
                raise RefusedError(422, f"{name} {place}: holds U+0000, which no text file can; remove it")
            if not _whole(value):
                raise RefusedError(422, f"{name} {place}: holds half of a character (a lone surrogate); remove it")


def tei_inputs(inputs: str | list[str] | list[list[str]]) -> tuple[list[str], list[str | None], bool]:
    """(texts, pairs, whether they are a batch) of the inputs of text-embeddings-inference.

    Raises:
        RefusedError: 422 for an input of no or more than two strings, or no input.
    """
    if isinstance(inputs, str):
        return [inputs], [None], False
    batch = [part for part in inputs if isinstance(part, list)]
    single = [part for part in inputs if isinstance(part, str)]
    rows = batch or [single]
    for row in rows:
        if not 1 <= len(row) <= 2:
            raise RefusedError(422, f"inputs: one of them has {len(row)} strings; give a text, or a text and its pair, in each list")
    return [row[0] for row in rows], [row[1] if len(row) == 2 else None for row in rows], bool(batch)


def tei_answer(labels: Sequence[str], scores: FloatArray) -> list[list[dict[str, Any]]]:
    """Labels with their scores (n, labels), highest first; of equal scores the later label first, as text-embeddings-inference does."""
    return [
        [{"score": score, "label": label} for label, score in sorted(zip(labels, row, strict=True), key=lambda pair: pair[1])[::-1]]
        for row in scores.tolist()
    ]


def own_answer(labels: Sequence[str], probabilities: FloatArray, lengths: IntArray, *, longest: int) -> dict[str, Any]:
    """The answer of /v1/predict, with the numbers that `Predictor.predict` gives."""
    best = probabilities.argmax(axis=1).tolist()
    cut = (lengths > longest).tolist()
    return {
        "predictions": [
            {"label": labels[index], "probabilities": dict(zip(labels, row, strict=True)), "truncated": truncated}
            for index, row, truncated in zip(best, probabilities.tolist(), cut, strict=True)
        ]
    }


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8; a number that JSON has no word for is a bug."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise RefusedError(400, "the body holds a key twice; send each once")
    return record


def _no_constant(name: str) -> NoReturn:
    raise RefusedError(400, f"the body holds {name}, which is not JSON; leave it out")


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
