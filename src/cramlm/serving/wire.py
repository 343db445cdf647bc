"""Requests and answers: pydantic models, which describe them for OpenAPI and check them, over strict JSON.

A duplicate key, NaN, a lone surrogate, an unknown field or a number in place of a string is refused with one line that names the field and
never repeats the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, StrictStr
from starlette.exceptions import HTTPException


class PredictRequest(BaseModel):
    """Texts to label, with second texts where the model was trained on pairs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    texts: Annotated[list[StrictStr], Field(min_length=1, description="Texts to label.", examples=[["first text", "second text"]])]
    pairs: Annotated[
        list[StrictStr | None] | None,
        Field(description="The second text of each, null where there is none; as many as texts.", examples=[None]),
    ] = None


class Prediction(BaseModel):
    """The answer to one text."""

    label: Annotated[str, Field(description="The most probable label.", examples=["sport"])]
    probabilities: Annotated[
        dict[str, float], Field(description="Probability of every label; they sum to 1.", examples=[{"sport": 0.9, "news": 0.1}])
    ]
    truncated: Annotated[bool, Field(description="Whether the text is longer than the model reads, and its end was left out.")]


class PredictAnswer(BaseModel):
    """One answer per text, in the order of the texts."""

    predictions: list[Prediction]


class Fault(BaseModel):
    """Why there is no answer."""

    error: Annotated[str, Field(description="One line: what is wrong, and what to do.")]
    error_type: Literal["Validation", "Overloaded", "Unhealthy", "Unauthorized", "NotFound", "Backend"]


class State(BaseModel):
    """Whether the server takes texts."""

    status: Literal["ok", "ready", "loading", "draining"]


def parse(body: bytes) -> Any:
    """Return the JSON value of a body.

    Raises:
        HTTPException: 400, if it is not UTF-8, not JSON, nested too deep, or holds a duplicate key or a number that JSON does not have.
    """
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        reason = f"the body is not UTF-8: byte 0x{body[error.start]:02X} at offset {error.start}; send UTF-8"
    except json.JSONDecodeError as error:
        reason = f"the body is not JSON: {error.msg} at character {error.pos + 1}; send one JSON object"
    except RecursionError:
        reason = "the body is nested too deep; send one flat JSON object"
    except ValueError:  # Python refuses integers of thousands of digits
        reason = "the body holds a number of too many digits; there is no field for it"
    raise HTTPException(400, reason)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise HTTPException(400, "the body holds a key twice; send each once")
    return record


def _no_constant(name: str) -> NoReturn:
    raise HTTPException(400, f"the body holds {name}, which is not JSON; leave it out")


def explain(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the first of pydantic's errors in one line, without the value that caused it."""
    first = errors[0]
    place = [part for part in first["loc"] if part != "body"]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if part not in ("str", "nullable[str]"))
    match first["type"]:
        case "extra_forbidden":
            what = "is no field of this request; leave it out (the model is chosen when the server starts)"
        case "model_attributes_type" | "dict_type" | "missing" if not place:
            what = "must be one JSON object; see /openapi.json"
        case "missing":
            what = "is missing; add it"
        case "string_unicode":  # of the name of a field; texts are checked by `check_texts`
            what = "holds half of a character (a lone surrogate); remove it"
        case _:
            what = str(first["msg"])[:1].lower() + str(first["msg"])[1:]
    return f"{name.removeprefix('.')[:80] or 'body'}: {what}"


def check_texts(texts: Sequence[str], pairs: Sequence[str | None], *, most: int, characters: int) -> None:
    """Check the limits of a request.

    Raises:
        HTTPException: 413 for too many or too long texts, 422 for U+0000, lone surrogates or another number of pairs.
    """
    if len(texts) > most:
        raise HTTPException(413, f"{len(texts)} texts in one request, at most {most} are taken; send them in several requests")
    if len(texts) != len(pairs):
        raise HTTPException(422, f"{len(texts)} texts but {len(pairs)} pairs; give one for each text (null where there is none)")
    for name, values in (("text", texts), ("pair", pairs)):
        for place, value in enumerate(values, start=1):
            if value is not None and len(value) > characters:
                raise HTTPException(413, f"{name} {place}: has {len(value)} characters, at most {characters} are taken; shorten it")
            if value is not None and "\0" in value:
                raise HTTPException(422, f"{name} {place}: holds U+0000, which no text file can; remove it")
            if value is not None and not _is_whole(value):
                raise HTTPException(422, f"{name} {place}: holds half of a character (a lone surrogate); remove it")


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
