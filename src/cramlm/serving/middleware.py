"""ASGI middleware around the routes: host and token, size and deadline of a body, counts."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cramlm.serving.limits import Limits, names_loopback
from cramlm.serving.metrics import Metrics

OPEN_PATHS = ("/", "/healthz", "/readyz", "/openapi.json")  # they reveal nothing that the token protects
CLIENT_GONE = 499  # nginx's status for a request whose client closed the connection; never sent
_ERROR_TYPES = {401: "Unauthorized", 403: "Unauthorized", 404: "NotFound", 429: "Overloaded", 500: "Backend", 503: "Unhealthy"}


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the answer of a request that is refused: `reason` in one line and the kind of error."""
    content = {"error": " ".join(reason.split()), "error_type": _ERROR_TYPES.get(status, "Validation")}
    return JSONResponse(content, status, headers=headers)


class CountRequests:
    """Counts every request by path and status."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        status = 500  # an exception that leaves the routes becomes this answer

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            if status == CLIENT_GONE:
                self._metrics.abandoned()
            else:
                self._metrics.answered(scope["path"], status, time.perf_counter() - started)


class CheckAccess:
    """Refuses requests without the token; on a server without a token, requests from pages of other sites.

    A browser lets a page of another site read a loopback address under the page's own name (DNS rebinding), so that `Host` and `Origin`
    must name this machine. Starlette's TrustedHostMiddleware compares with fixed names: it knows neither 127.0.0.0/8 nor a missing Host,
    and does not look at Origin.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refused = _check_site(headers) if self._expected is None else self._check_token(scope["path"], headers)
        await (refused or self._app)(scope, receive, send)

    def _check_token(self, path: str, headers: Headers) -> JSONResponse | None:
        given = headers.get("authorization", "").encode("latin-1")
        # Compared in constant time: the time of a refusal does not depend on how much of a guess is right.
        if path in OPEN_PATHS or hmac.compare_digest(given, self._expected or b""):
            return None
        reason = "the token is missing or wrong; send the header `Authorization: Bearer TOKEN`"
        return refusal(401, reason, {"www-authenticate": "Bearer"})


def _check_site(headers: Headers) -> JSONResponse | None:
    hosts = [host.lower() for host in headers.getlist("host")]
    if not all(map(names_loopback, hosts)):
        return refusal(403, "the header Host must be localhost, 127.0.0.1 or [::1]; for other names start the server with --token")
    if any(origin.lower().partition("://")[2] not in hosts for origin in headers.getlist("origin")):
        reason = "the header Origin must name the same host and port as Host; for pages of other origins start the server with --token"
        return refusal(403, reason)
    return None


class LimitBodies:
    """Bounds the size of a body, the time until it is whole, and the bytes of all bodies together.

    The limits apply as the application reads: it raises HTTPException there. uvicorn reads and discards what the application leaves unread.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits
        deadline = asyncio.get_running_loop().time() + limits.read_seconds
        declared = Headers(scope=scope).get("content-length", "0")
        size = 0
        whole = False

        async def receive_bounded() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            if int(declared[:20]) > limits.body_bytes:
                raise self._too_large()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                reason = f"the request was not whole after {limits.read_seconds:g} s; send it faster"
                raise HTTPException(408, reason, {"connection": "close"}) from None
            part = len(message.get("body", b""))
            size += part
            self._held_bytes += part
            if size > limits.body_bytes:
                raise self._too_large()
            if self._held_bytes > limits.held_bytes:
                raise HTTPException(429, "too much is being read from other clients; try again", {"retry-after": "1"})
            whole = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, receive_bounded, send)
        finally:
            self._held_bytes -= size

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than {self._limits.body_bytes} bytes; send fewer or shorter texts")
