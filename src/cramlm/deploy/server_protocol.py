"""A connection that does not wait for ever: uvicorn's HTTP/1.1 protocol with deadlines and bounds of its own.

uvicorn bounds neither the time nor the size of what comes before a request is whole. Here a request must arrive within
`Limits.read_seconds` of its first byte (a new connection: of its start), its headers within `HEADER_BYTES`; an answer that the client
does not read is given up after the same time; connections above the limit are answered 503 at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cramlm.deploy.server_limits import Limits
from cramlm.deploy.server_metrics import Metrics
from cramlm.deploy.server_wire import JSON, RefusedError

HEADER_BYTES = 32_768
FRAMING = 16  # times the size of the largest request may be received before the connection is cut, whatever it is made of
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


def bounded_protocol(limits: Limits, metrics: Metrics) -> type[HttpToolsProtocol]:
    """The protocol class for a server with these limits."""

    class BoundedProtocol(HttpToolsProtocol):
        """One connection."""

        _deadline: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _message_bytes = 0
        _in_headers = True

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._end(RefusedError(503, "too many connections; try again", "Overloaded", retry_seconds=1))
                return
            self._start_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_deadline()
            self.resume_writing()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._deadline is None:
                self._start_deadline()
            self._message_bytes += len(data)
            super().data_received(data)
            if self._in_headers and self._message_bytes > HEADER_BYTES:
                self._end(RefusedError(431, f"the headers are longer than {HEADER_BYTES} bytes; send fewer"))
            elif self._message_bytes > FRAMING * (limits.body_bytes + HEADER_BYTES):
                # The gate refuses too large a body; this is for what never becomes one, like trailers without end.
                self.transport.abort()

        def on_headers_complete(self) -> None:
            self._in_headers = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._stop_deadline()
            self._in_headers = True
            self._message_bytes = 0
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(limits.read_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def shutdown(self) -> None:
            if self._deadline is not None:  # a request half sent: there is nothing to finish
                self.transport.close()
            else:
                super().shutdown()

        def send_400_response(self, msg: str) -> None:
            self._end(RefusedError(400, "this is not HTTP/1.1; check the request line and the headers"))

        def _start_deadline(self) -> None:
            self._deadline = self.loop.call_later(limits.read_seconds, self._late)

        def _stop_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _late(self) -> None:
            self._deadline = None
            self._end(RefusedError(408, f"the request was not whole after {limits.read_seconds:g} s; send it faster"))

        def _end(self, error: RefusedError) -> None:
            """Close, with the reason unless an answer has begun already."""
            if self.transport.is_closing():
                return
            cycle: Any = self.cycle
            if cycle is None or cycle.response_complete or not cycle.response_started:
                metrics.answered("", error.status, 0.0)
                self.transport.write(_response(error))
            self.transport.close()

    return BoundedProtocol


def _response(error: RefusedError) -> bytes:
    headers = {"content-type": JSON, "content-length": str(len(error.body)), "connection": "close", **error.headers}
    lines = [f"HTTP/1.1 {error.status} {_PHRASES[error.status]}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + error.body
