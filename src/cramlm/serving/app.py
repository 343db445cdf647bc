"""The routes of the server: request and response models, strict JSON, the page at `/`.

A duplicate key, NaN, a lone surrogate, an unknown field or a number in place of a string is refused with one line that names the field and
does not repeat the text.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import hashlib
import html
import importlib.metadata
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Any, Final, Generic, Literal, NoReturn, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cramlm.errors import UsageError
from cramlm.evaluation.kinds import KINDS
from cramlm.records import TaskKind
from cramlm.serving import Limits
from cramlm.serving.batching import Batcher, BusyError, ModelOutputs, NotReadyError, ServedModel
from cramlm.serving.middleware import CLIENT_GONE, CheckAccess, CountRequests, LimitBodies, Metrics, error_response


class PredictRequest(BaseModel):
    """Texts to label, with second texts where the model was trained on pairs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    texts: Annotated[list[StrictStr], Field(min_length=1, description="Texts to label.", examples=[["first text", "second text"]])]
    pairs: Annotated[
        list[StrictStr | None] | None,
        Field(description="The second text of each, null where there is none; as many as texts.", examples=[None]),
    ] = None


class PredictedText(BaseModel):
    """The fields of the predictions of every kind of task."""

    truncated: Annotated[bool, Field(description="True if the text is longer than the model's input, so that its end was cut off.")]


class LabelOfText(PredictedText):
    """The prediction of a classification for one text."""

    label: Annotated[
        str | None,
        Field(
            description="The most probable label; null if the server abstains (--abstain-below) because its confidence is lower.",
            examples=["sport"],
        ),
    ]
    probabilities: Annotated[
        dict[str, float], Field(description="Probability of every label; they sum to 1.", examples=[{"sport": 0.9, "news": 0.1}])
    ]
    confidence: Annotated[
        float | None,
        Field(description="Calibrated probability that the most probable label is right; absent unless the server may abstain."),
    ] = None


class LabelsOfText(PredictedText):
    """The prediction for one text that may have several labels."""

    labels: Annotated[list[str], Field(description="The labels whose probability is at least 0.5.", examples=[["sport", "travel"]])]
    probabilities: Annotated[
        dict[str, float], Field(description="Probability of every label, each by itself.", examples=[{"sport": 0.9, "travel": 0.7}])
    ]


class NumberOfText(PredictedText):
    """The prediction of a regression for one text."""

    value: Annotated[float, Field(description="The number, in the unit of the training file.", examples=[3.42])]


PredictionT = TypeVar("PredictionT", bound=PredictedText)


class PredictResponse(BaseModel, Generic[PredictionT]):
    """One prediction per text, in the order of the texts."""

    predictions: list[PredictionT]


_RESPONSES: Final[Mapping[TaskKind, type[BaseModel]]] = {
    "classification": PredictResponse[LabelOfText],
    "multi-label": PredictResponse[LabelsOfText],
    "regression": PredictResponse[NumberOfText],
}


class ErrorResponse(BaseModel):
    """Why a request failed."""

    error: Annotated[str, Field(description="One line: what is wrong, and what to do.")]
    error_type: Literal["Validation", "Overloaded", "Unhealthy", "Unauthorized", "NotFound", "Backend"]


class StateResponse(BaseModel):
    """State of the server."""

    status: Literal["ok", "ready", "loading", "draining"]


_REASONS = {
    400: "Not JSON, or not strictly.",
    401: "The token is missing or wrong.",
    403: "Without a token: Host or Origin is not this machine.",
    408: "The request was incomplete after the time limit.",
    413: "The body, the number of texts or a text is too large.",
    415: "Not application/json.",
    422: "A field is missing, unknown or of the wrong type.",
    429: "The queue is full; Retry-After gives the seconds until the next attempt.",
    503: "The model is loading, or the server is shutting down.",
}
_FAULTS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorResponse, "description": reason} for status, reason in _REASONS.items()}
_UNREADY: dict[int | str, dict[str, Any]] = {503: {"model": StateResponse, "description": "Loading, or draining."}}
_DESCRIPTION = """Predicts labels or numbers of texts with a model exported by cramlm.

Predictions are in the order of the texts and equal to those of `cramlm predict`. With a token, send `Authorization: Bearer TOKEN`.
Every error is `{"error": "one line", "error_type": "..."}`."""


def build_app(
    batcher: Batcher, *, name: str, kind: TaskKind, reads_pairs: bool, limits: Limits, metrics: Metrics, token: str | None
) -> FastAPI:
    """Build the application for one model; all but the open paths need the `token`.

    name: shown on the page. kind: of the model's task. reads_pairs: the page has a field for the second texts.
    """
    app = FastAPI(
        title="cramlm",
        version=importlib.metadata.version("cramlm"),
        description=_DESCRIPTION,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            HTTPException: _refuse,
            ClientDisconnect: _disconnected,
            Exception: _report,
        },
    )
    app.add_middleware(LimitBodies, limits=limits)
    app.add_middleware(CheckAccess, token=token)
    app.add_middleware(CountRequests, metrics=metrics)  # the last one added is the outermost

    async def predict(request: Request, body: PredictRequest) -> Response:
        """Predict texts. The prediction of a text does not depend on the other texts, up to 1e-5."""
        pairs = [None] * len(body.texts) if body.pairs is None else body.pairs
        _check_texts(body.texts, pairs, limits)
        if batcher.model is not None:
            _check_pairs(pairs, batcher.model.predictor.trained_on_pairs)
        try:
            outputs = await _result_or_disconnect(request, batcher.submit(body.texts, pairs))
        except BusyError:
            raise HTTPException(429, "too many texts are waiting; try again in a second", {"retry-after": "1"}) from None
        except UsageError as error:
            raise HTTPException(422, str(error)) from None
        except NotReadyError as error:
            raise HTTPException(503, f"the server is {error}; try again in a second", {"retry-after": "1"}) from None
        assert batcher.model is not None
        return JSONResponse({"predictions": _predictions(batcher.model, outputs)})

    app.router.add_api_route(
        "/v1/predict",
        predict,
        methods=["POST"],
        response_model=_RESPONSES[kind],
        responses=_FAULTS,
        tags=["predict"],
        route_class_override=_PredictRoute,
    )

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=StateResponse, tags=["state"])
    async def healthz() -> Response:
        """Return 200 as long as the process responds."""
        return JSONResponse({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_model=StateResponse, responses=_UNREADY, tags=["state"])
    async def readyz() -> Response:
        """Return 200 if the server accepts texts: not while the model loads, nor after a signal to stop."""
        if batcher.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "loading" if batcher.model is None else "draining"}, 503)

    @app.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}, 401: _FAULTS[401]}, tags=["state"])
    async def metrics_page() -> Response:
        """Counts and times in Prometheus's text format."""
        return Response(metrics.page(), media_type=metrics.content_type)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def try_it() -> Response:
        return HTMLResponse(page(name, needs_token=token is not None, reads_pairs=reads_pairs), headers=PAGE_HEADERS)

    return app


def _predictions(model: ServedModel, outputs: ModelOutputs) -> list[dict[str, Any]]:
    """Return the predictions in the form of `Prediction`, with the numbers of `Predictor.predict`."""
    cut = (outputs.lengths > model.predictor.max_length).tolist()
    made = KINDS[model.predictor.kind].predictions(outputs.values, model.predictor.labels)
    fields = [field.name for field in dataclasses.fields(made[0])]
    predictions: list[dict[str, Any]] = [
        {**{name: getattr(prediction, name) for name in fields}, "truncated": truncated}
        for prediction, truncated in zip(made, cut, strict=True)
    ]
    if model.abstain_below is not None:
        confidences = model.predictor.calibrated().of(outputs.values).tolist()
        for prediction, confidence in zip(predictions, confidences, strict=True):
            prediction["confidence"] = confidence
            if confidence < model.abstain_below:
                prediction["label"] = None
    return predictions


class _PredictRoute(APIRoute):
    """A route that FastAPI documents, but whose requests it does not handle: solving dependencies takes longer than the endpoint itself.

    Bodies are parsed with `_parse`, which is stricter than Python's JSON.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive)
        _check_media_type(request)
        value = _parse(await request.body())
        try:
            body = PredictRequest.model_validate(value)
        except ValidationError as error:
            raise HTTPException(422, _describe(error.errors(include_url=False, include_context=False, include_input=False))) from None
        response: Response = await self.endpoint(request, body)
        await response(scope, receive, send)


def _check_media_type(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    if kind.strip() != "application/json" or parameters.replace(" ", "").replace('"', "") not in ("", "charset=utf-8"):
        raise HTTPException(415, "the body must be JSON in UTF-8; send the header `Content-Type: application/json`")
    if "content-encoding" in request.headers:
        raise HTTPException(415, "compressed bodies are not supported; send plain JSON")


async def _result_or_disconnect(request: Request, result: asyncio.Future[ModelOutputs]) -> ModelOutputs:
    """Wait for the result; if the client disconnects first, remove its texts from the queue.

    Raises:
        ClientDisconnect: if the client disconnected. BusyError: as `Batcher.submit`.
    """
    watch = asyncio.ensure_future(request.receive())
    watch.add_done_callback(lambda _: result.cancel())
    try:
        return await result
    except asyncio.CancelledError:
        if watch.done():
            raise ClientDisconnect from None
        result.cancel()  # the server shuts down
        raise
    finally:
        watch.cancel()


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reasons = {404: "no such path; see /openapi.json", 405: "wrong method for this path; see /openapi.json"}
    return error_response(error.status_code, reasons.get(error.status_code, error.detail), error.headers)


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _report(request: Request, error: Exception) -> Response:
    """Print where the program failed, without message and values: they could contain a client's text."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} in {last.name} ({last.filename}:{last.lineno})"
    print(f"cramlm: internal error: {where}; please report it", file=sys.stderr)
    if os.environ.get("CRAMLM_DEBUG"):
        sys.stderr.writelines(traceback.format_tb(error.__traceback__))
    sys.stderr.flush()
    return error_response(500, "internal error; it is in the server's log")


def _parse(body: bytes) -> Any:
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
        reason = "the body contains a number with too many digits; no field takes a number"
    raise HTTPException(400, reason)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise HTTPException(400, "the body contains a duplicate key; send each key once")
    return record


def _no_constant(name: str) -> NoReturn:
    raise HTTPException(400, f"the body contains {name}, which is not JSON; leave it out")


def _describe(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the first of pydantic's errors in one line, without the value that caused it."""
    first = errors[0]
    location = [part for part in first["loc"] if part not in ("str", "nullable[str]")]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    match first["type"]:
        case "extra_forbidden":
            what = "unknown field; leave it out (the model is set when the server starts)"
        case "model_type" if not location:
            what = "must be one JSON object; see /openapi.json"
        case "missing":
            what = "is missing; add it"
        case "string_unicode":  # in the name of a field; `_check_texts` checks the texts
            what = "contains a lone surrogate; remove it"
        case _:
            what = str(first["msg"])[:1].lower() + str(first["msg"])[1:]
    return f"{name.removeprefix('.')[:80] or 'body'}: {what}"


def _check_texts(texts: Sequence[str], pairs: Sequence[str | None], limits: Limits) -> None:
    """Check the limits of a request.

    Raises:
        HTTPException: 413 for too many or too long texts, 422 for a blank one, U+0000, lone surrogates or another number of pairs.
    """
    if len(texts) > limits.texts:
        raise HTTPException(413, f"{len(texts)} texts in one request, at most {limits.texts} are allowed; send them in several requests")
    if len(texts) != len(pairs):
        raise HTTPException(422, f"{len(texts)} texts but {len(pairs)} pairs; give one for each text (null where there is none)")
    for name, values in (("text", texts), ("pair", pairs)):
        for number, value in enumerate(values, start=1):
            if value is None:
                continue
            if len(value) > limits.characters:
                raise HTTPException(413, f"{name} {number}: has {len(value)} characters, at most {limits.characters} allowed; shorten it")
            if not value.strip():
                raise HTTPException(422, f"{name} {number}: is blank; write a text, or leave it out")
            if "\0" in value:
                raise HTTPException(422, f"{name} {number}: contains U+0000; remove it")
            if not _is_whole(value):
                raise HTTPException(422, f"{name} {number}: contains a lone surrogate; remove it")


def _check_pairs(pairs: Sequence[str | None], trained_on_pairs: bool | None) -> None:
    """Raise HTTPException 422 if second texts are missing, or passed to a model of single texts. trained_on_pairs: None = unknown."""
    if trained_on_pairs is True and None in pairs:
        raise HTTPException(422, "pairs: this model reads pairs of texts; give the second text of each in pairs")
    if trained_on_pairs is False and any(pair is not None for pair in pairs):
        raise HTTPException(422, "pairs: this model reads single texts; leave out pairs")


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_TEMPLATE = files("cramlm.serving").joinpath("page.html").read_text("utf-8")


def _hash_of(tag: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", _TEMPLATE, re.DOTALL)
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


PAGE_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@functools.cache
def page(name: str, *, needs_token: bool, reads_pairs: bool) -> bytes:
    """Return the HTML page for a model, with fields for the token and for second texts if the server or the model needs them."""
    values = {
        "texts": "First texts" if reads_pairs else "Texts",
        "lines": "One pair per line: its texts are in the same line of the two fields." if reads_pairs else "One text per line.",
        "pair": "" if reads_pairs else "hidden",
        "token": "" if needs_token else "hidden",
        "name": html.escape(name),
    }
    content = _TEMPLATE
    for field, value in values.items():
        content = content.replace(f"{{{field}}}", value)
    return content.encode()
