"""What every request passes before the application sees it: token, form, size; and what every answer leaves behind: a count.

The gate reads the whole body itself, so that the application never waits for a client. An answer that comes before the body was read is
sent at once; what the client still sends is then read and thrown away for a moment, because closing on unread bytes would take the
answer away from it again.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from cramlm.deploy.server_limits import Limits
from cramlm.deploy.server_metrics import Metrics
from cramlm.deploy.server_wire import JSON, RefusedError

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/healthz", "/readyz", "/openapi.json")  # nothing behind them that a token would protect
LINGER_SECONDS = 1.0


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Gate:
    """ASGI middleware for one server."""

    def __init__(self, app: App, *, limits: Limits, token: str | None, metrics: Metrics) -> None:
        self._app = app
        self._limits = limits
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._metrics = metrics
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise AssertionError(f"{scope['type']} is switched off")
        started = time.perf_counter()
        exchange = _Exchange(receive, send, unread=scope["method"] not in ("GET", "HEAD"))
        held = 0
        try:
            headers = dict(scope["headers"])
            self._check_token(scope["path"], headers)
            if scope["method"] == "POST":
                self._check_headers(headers)
                body = await self._read(exchange)
                held = len(body)
                exchange.replay(bytes(body))
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGoneError:
            self._metrics.abandoned()
            return
        except RefusedError as error:
            await exchange.refuse(error)
        except Exception as error:
            _report(error)
            if exchange.status is not None:
                raise RuntimeError("the answer could not be finished") from None
            await exchange.refuse(RefusedError(500, "internal error; it is in the server's log", "Backend"))
        finally:
            self._held_bytes -= held
            if exchange.status is not None:
                self._metrics.answered(scope["path"], exchange.status, time.perf_counter() - started)

    def _check_token(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self._expected is None or path in OPEN_PATHS:
            return
        # Compared in constant time: how long a refusal takes says nothing about how much of a guess is right.
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            raise RefusedError(401, "the token is missing or wrong; send the header `Authorization: Bearer TOKEN`", "Unauthorized")

    def _check_headers(self, headers: Mapping[bytes, bytes]) -> None:
        kind, _, parameters = headers.get(b"content-type", b"").decode("latin-1").lower().partition(";")
        charset = parameters.replace(" ", "").replace('"', "")
        if kind.strip() != JSON or charset not in ("", "charset=utf-8"):
            raise RefusedError(415, f"the body must be JSON in UTF-8; send the header `Content-Type: {JSON}`")
        if b"content-encoding" in headers:
            raise RefusedError(415, "compressed bodies are not taken; send the JSON as it is")
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self._limits.body_bytes:
            raise self._too_large()

    async def _read(self, exchange: _Exchange) -> bytearray:
        """The whole body, counted among what is held until it is whole or refused."""
        body = bytearray()
        try:
            while True:
                part, more = await exchange.body_part()
                self._held_bytes += len(part)
                body += part
                if len(body) > self._limits.body_bytes:
                    raise self._too_large()
                if self._held_bytes > self._limits.held_bytes:
                    raise RefusedError(429, "too much is being read from other clients; try again", "Overloaded", retry_seconds=1)
                if not more:
                    return body
        except BaseException:
            self._held_bytes -= len(body)
            raise

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"the body is larger than {self._limits.body_bytes} bytes; send fewer or shorter texts")


class _Exchange:
    """One request and its answer: which part of the body was read, and which status was sent."""

    def __init__(self, receive: Receive, send: Send, *, unread: bool) -> None:
        self._receive = receive
        self._send = send
        self._body: bytes | None = None
        self._unread = unread
        self.status: int | None = None

    async def body_part(self) -> tuple[bytes, bool]:
        """Bytes, and whether more follow.

        Raises:
            ClientGoneError: if the connection closed first.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._unread = bool(message.get("more_body", False))
        return message.get("body", b""), self._unread

    def replay(self, body: bytes) -> None:
        """Give `body` as the first thing that the application receives."""
        self._body = body

    async def receive(self) -> Message:
        """The body at once; after it, whether the client went away."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Pass the answer on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def refuse(self, error: RefusedError) -> None:
        """Answer with an error; if the body was not read to its end, the connection closes soon after."""
        headers = {"content-type": JSON, "content-length": str(len(error.body)), **error.headers}
        if self._unread:
            headers["connection"] = "close"
        encoded = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": error.body, "more_body": self._unread})
        if self._unread:
            try:
                async with asyncio.timeout(LINGER_SECONDS):
                    while (await self.body_part())[1]:
                        pass
            except (TimeoutError, ClientGoneError):
                pass
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _report(error: Exception) -> None:
    """Say where the program failed, without the message or the values: they could hold what a client sent."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    print(
        f"cramlm: internal error: {type(error).__name__} in {last.name} ({last.filename}:{last.lineno}); please report it", file=sys.stderr
    )
    if os.environ.get("CRAMLM_DEBUG"):
        sys.stderr.writelines(traceback.format_tb(error.__traceback__))
    sys.stderr.flush()
