"""The routes: what a client can ask, described for OpenAPI, and how an answer is put together."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from cramlm.deploy.server_batching import Batcher, BusyError, NotReadyError
from cramlm.deploy.server_gate import ClientGoneError
from cramlm.deploy.server_limits import Limits
from cramlm.deploy.server_metrics import Metrics
from cramlm.deploy.server_models import Answers
from cramlm.deploy.server_page import PAGE_HEADERS, page
from cramlm.deploy.server_wire import (
    JSON,
    Fault,
    PredictAnswer,
    PredictRequest,
    RefusedError,
    State,
    TeiAnswer,
    TeiRequest,
    check_texts,
    dumps,
    explain,
    own_answer,
    parse,
    tei_answer,
    tei_inputs,
)

_REASONS = {
    400: "Not JSON, or not strictly.",
    401: "The token is missing or wrong.",
    408: "The request was not whole in time.",
    413: "The body, the number of texts or a text is too large.",
    415: "Not application/json.",
    422: "A field is missing, unknown or of the wrong type.",
    429: "More is asked than can be answered in time; Retry-After says when to try again.",
    503: "The model is loading, or the server is about to stop.",
}
_FAULTS: dict[int | str, dict[str, Any]] = {status: {"model": Fault, "description": reason} for status, reason in _REASONS.items()}
_UNREADY: dict[int | str, dict[str, Any]] = {503: {"model": State, "description": "Loading, or draining."}}
_DESCRIPTION = """Labels texts with a model that cramlm exported.

Answers come in the order of the texts and are those of `cramlm predict`. With a token, send `Authorization: Bearer TOKEN`.
Every refusal is `{"error": "one line", "error_type": "..."}`."""


def build_app(batcher: Batcher, *, name: str, limits: Limits, metrics: Metrics, guarded: bool) -> FastAPI:
    """The application for one model; `name` is shown on the page, `guarded` says whether it must ask for a token."""
    app = FastAPI(
        title="cramlm",
        version=importlib.metadata.version("cramlm"),
        description=_DESCRIPTION,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={RefusedError: _refused, RequestValidationError: _invalid, HTTPException: _no_route},
    )
    app.router.route_class = _StrictRoute

    async def ask(request: Request, texts: Sequence[str], pairs: Sequence[str | None]) -> Answers:
        check_texts(texts, pairs, most=limits.texts, characters=limits.characters)
        try:
            return await _unless_gone(request, batcher.submit(texts, pairs))
        except BusyError:
            raise RefusedError(429, "too much is asked at once; try again in a second", "Overloaded", retry_seconds=1) from None
        except NotReadyError as error:
            raise RefusedError(503, f"the server is {error}; try again in a second", "Unhealthy", retry_seconds=1) from None

    @app.post("/v1/predict", response_model=None, responses={200: {"model": PredictAnswer}, **_FAULTS}, tags=["predict"])
    async def predict(request: Request, asked: PredictRequest) -> Response:
        """Label texts. The answer to a text does not depend on what is asked with it, up to 1e-5."""
        answers = await ask(request, asked.texts, [None] * len(asked.texts) if asked.pairs is None else asked.pairs)
        model = batcher.model
        assert model is not None
        return _json(own_answer(model.labels, answers.probabilities, answers.lengths, longest=model.max_length))

    @app.post("/predict", response_model=None, responses={200: {"model": TeiAnswer}, **_FAULTS}, tags=["text-embeddings-inference"])
    async def tei_predict(request: Request, asked: TeiRequest) -> Response:
        """Sequence classification as Hugging Face's text-embeddings-inference offers it: every label with its score, highest first."""
        texts, pairs, batch = tei_inputs(asked.inputs)
        answers = await ask(request, texts, pairs)
        model = batcher.model
        assert model is not None
        if not asked.truncate and (longest := int(answers.lengths.max())) > model.max_length:
            raise RefusedError(413, f"`inputs` must have less than {model.max_length + 1} tokens. Given: {longest}; or pass truncate: true")
        scored = tei_answer(model.labels, answers.logits if asked.raw_scores else answers.probabilities)
        return _json(scored if batch else scored[0])

    @app.get("/healthz", response_model=None, responses={200: {"model": State}}, tags=["state"])
    async def healthz() -> Response:
        """Whether the process lives: always, if it answers."""
        return _json({"status": "ok"})

    @app.get("/readyz", response_model=None, responses={200: {"model": State}, **_UNREADY}, tags=["state"])
    async def readyz() -> Response:
        """Whether texts are taken: not while the model loads, and no more once the server was told to stop."""
        if batcher.ready:
            return _json({"status": "ready"})
        return _json({"status": "loading" if batcher.model is None else "draining"}, status=503)

    @app.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}, 401: _FAULTS[401]}, tags=["state"])
    async def metrics_page() -> Response:
        """Counts and times in Prometheus's text format."""
        return Response(metrics.page(), media_type=metrics.content_type)

    @app.get("/", include_in_schema=False)
    async def try_it() -> Response:
        return Response(page(name, guarded=guarded), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    return app


class _StrictRequest(Request):
    value: Any

    async def json(self) -> Any:
        return self.value


class _StrictRoute(APIRoute):
    """Reads bodies by our rules of JSON instead of Python's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            strict = _StrictRequest(request.scope, request.receive)
            if request.method == "POST":
                strict.value = parse(await strict.body())  # here and not in `json`, whose exceptions FastAPI replaces by its own
            return await handle(strict)

        return handle_strictly


async def _unless_gone(request: Request, answers: asyncio.Future[Answers]) -> Answers:
    """Wait for the answers, or for the client to go away, which takes its texts out of the queue.

    Raises:
        ClientGoneError: if it went. BusyError: as `Batcher.submit`.
    """
    watch = asyncio.ensure_future(request.receive())
    watch.add_done_callback(lambda _: answers.cancel())
    try:
        return await answers
    except asyncio.CancelledError:
        if watch.done():
            raise ClientGoneError from None
        answers.cancel()  # the server itself gives up
        raise
    finally:
        watch.cancel()


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(dumps(value), status_code=status, media_type=JSON)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return Response(error.body, status_code=error.status, media_type=JSON, headers=error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _refused(request, RefusedError(422, explain(error.errors())))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            refusal = RefusedError(404, "there is nothing here; see /openapi.json for what there is", "NotFound")
        case 405:
            refusal = RefusedError(405, "this path takes another method; see /openapi.json")
            refusal.headers.update(error.headers or {})
        case status:
            refusal = RefusedError(status, str(error.detail))
    return await _refused(request, refusal)
