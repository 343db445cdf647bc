"""Middleware around the routes: token, Host and Origin, size and deadline of a body, counts of requests; the Prometheus metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cramlm.serving import Limits, names_loopback

ROUTES = ("/", "/v1/predict", "/healthz", "/readyz", "/metrics", "/openapi.json")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_POWERS_OF_TWO = tuple(float(2**power) for power in range(15))
OPEN_PATHS = ("/", "/healthz", "/readyz", "/openapi.json")  # public: nothing in them is protected by the token
CLIENT_GONE = 499  # nginx's status for a request whose client closed the connection; never sent
_ERROR_TYPES = {401: "Unauthorized", 403: "Unauthorized", 404: "NotFound", 429: "Overloaded", 500: "Backend", 503: "Unhealthy"}


class Metrics:
    """Counts and times of one server, never a text, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=self._registry), partial(Histogram, registry=self._registry)
        self._requests = counter("cramlm_requests", "Responses by path and status.", ("path", "status"))
        after_headers = "Time from the end of the request's headers to the end of the response."
        self._seconds = histogram("cramlm_request_seconds", after_headers, ("path",), buckets=_SECONDS)
        self.abandoned = counter("cramlm_abandoned_requests", "Requests whose client disconnected before the response.")
        self._texts = counter("cramlm_texts", "Texts computed.")
        self._tokens = counter("cramlm_tokens", "Tokens computed, special tokens included.")
        self._batch_texts = histogram("cramlm_batch_texts", "Texts computed together.", buckets=_POWERS_OF_TWO[:11])
        self._batch_tokens = histogram("cramlm_batch_tokens", "Tokens computed together.", buckets=_POWERS_OF_TWO)
        self._batch_seconds = histogram("cramlm_batch_seconds", "Time to tokenize and compute a batch.", buckets=_SECONDS)
        self.queue_texts = Gauge("cramlm_queue_texts", "Texts in the queue.", registry=self._registry)
        self.ready = Gauge("cramlm_ready", "1 while the server accepts texts, 0 while it loads or drains.", registry=self._registry)
        ProcessCollector(registry=self._registry)

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count a response. Unknown paths share one name, so that clients cannot make the page grow."""
        route = path if path in ROUTES else "other"
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_batch(self, *, texts: int, tokens: int, seconds: float) -> None:
        """Count a batch."""
        self._texts.inc(texts)
        self._tokens.inc(tokens)
        self._batch_texts.observe(texts)
        self._batch_tokens.observe(tokens)
        self._batch_seconds.observe(seconds)

    def page(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)


def error_response(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return a JSON error: `reason` in one line and the kind of error."""
    content = {"error": " ".join(reason.split()), "error_type": _ERROR_TYPES.get(status, "Validation")}
    return JSONResponse(content, status, headers=headers)


class CountRequests:
    """Counts every request by path and status."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        status = 500  # the status of an exception that leaves the routes

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            if status == CLIENT_GONE:
                self._metrics.abandoned.inc()
            else:
                self._metrics.count_request(scope["path"], status, time.perf_counter() - started)


class CheckAccess:
    """Refuses requests without the token; on a server without a token, requests from pages of other sites.

    By DNS rebinding a page of another site can read a loopback address under its own name; therefore `Host` and `Origin` must name this
    machine. Starlette's TrustedHostMiddleware compares Host with fixed names: it covers neither 127.0.0.0/8 nor a missing Host, nor Origin.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        error = _check_site(headers) if self._expected is None else self._check_token(scope["path"], headers)
        await (error or self._app)(scope, receive, send)

    def _check_token(self, path: str, headers: Headers) -> JSONResponse | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # In constant time, so that the time of a refusal says nothing about the token.
        is_right = hmac.compare_digest(token.encode("latin-1"), self._expected or b"")
        if path in OPEN_PATHS or (is_right and scheme.lower() == "bearer"):  # a scheme in any case (RFC 9110, section 11.1)
            return None
        reason = "the token is missing or wrong; send the header `Authorization: Bearer TOKEN`"
        return error_response(401, reason, {"www-authenticate": "Bearer"})


def _check_site(headers: Headers) -> JSONResponse | None:
    hosts = [host.lower() for host in headers.getlist("host")]
    if not all(map(names_loopback, hosts)):
        return error_response(403, "the header Host must be localhost, 127.0.0.1 or [::1]; for other names start the server with --token")
    if any(origin.lower().partition("://")[2] not in hosts for origin in headers.getlist("origin")):
        reason = "the header Origin must name the same host and port as Host; for pages of other origins start the server with --token"
        return error_response(403, reason)
    return None


class LimitBodies:
    """Limits the size of a body, the time until it is complete, and the bytes of all bodies together.

    HTTPException is raised while the application reads; uvicorn discards what the application does not read.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._open_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits
        deadline = asyncio.get_running_loop().time() + limits.read_seconds
        declared = Headers(scope=scope).get("content-length", "0")
        size = 0
        complete = False

        async def receive_bounded() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            if int(declared[:20]) > limits.body_bytes:
                raise self._too_large()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                reason = f"the request was incomplete after {limits.read_seconds:g} s; send it faster"
                raise HTTPException(408, reason, {"connection": "close"}) from None
            part = len(message.get("body", b""))
            size += part
            self._open_bytes += part
            if size > limits.body_bytes:
                raise self._too_large()
            if self._open_bytes > limits.open_bytes:
                raise HTTPException(429, "the bodies of other requests take all memory; try again", {"retry-after": "1"})
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, receive_bounded, send)
        finally:
            self._open_bytes -= size

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than {self._limits.body_bytes} bytes; send fewer or shorter texts")
