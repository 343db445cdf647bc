"""`cramlm serve`: uvicorn in one process with one copy of the weights.

The server listens before the model is loaded (`/readyz` says so), and reads the folder only once. After SIGTERM or SIGINT it accepts no
further connections and texts, responds to those in the queue and ends; a second signal ends it at once.

uvicorn's `timeout_keep_alive` starts after a response and ends with the next byte: it does not cover a new connection that sends nothing, a
half-sent head, or the rest of a body that the application does not read. Ten times a second the server therefore closes the connections
that have neither a response in progress nor sent the whole head of a request for `read_seconds`
(docs/decisions/0005-serving-deadlines.md).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cramlm.errors import EnvironmentFault, UsageError, counted
from cramlm.inference.base import are_pairs, read_provenance
from cramlm.inference.folders import model_of
from cramlm.inference.predictor import kind_in
from cramlm.model.tokenizer import UNCUT
from cramlm.serving import Address, Limits
from cramlm.serving.app import build_app
from cramlm.serving.batching import Batcher, ServedModel
from cramlm.serving.middleware import Metrics, error_response

STOP_SECONDS = 1.0  # after the last response, for the model's thread to end
HEADER_BYTES = 32_768
KEEP_ALIVE_SECONDS = 5


def serve(
    path: Path,
    address: Address,
    *,
    load: Callable[[Path], ServedModel],
    window_seconds: float = 0.0,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    announce: Callable[[str], None] = print,
) -> int:
    """Serve the model of `path` (a run, an exported folder, or an ONNX one) until a signal; return 0 after SIGTERM, 130 after SIGINT.

    load: returns the model of its folder; called in the thread that computes (`load_model`). window_seconds: how long an idle server waits
    for more requests to compute together. `announce` is called with one line when the server listens and one when the model is loaded.

    Raises:
        EnvironmentFault: if the port is taken. ArtifactError: if there is no model, or it cannot be loaded safely.
    """
    folder = model_of(path)
    metrics = Metrics()
    started = time.monotonic()

    def loaded(model: ServedModel) -> None:
        gc.collect()
        gc.freeze()  # collections while serving then skip the model and the imported modules
        longest = model.predictor.max_length
        limit = "whole texts" if longest == UNCUT else f"{longest} tokens per text"
        announce(f"ready after {time.monotonic() - started:.1f} s: {counted(len(model.predictor.labels), 'label')}, {limit}")

    batcher = Batcher(lambda: load(folder), limits=limits, metrics=metrics, window_seconds=window_seconds, loaded=loaded)
    reads_pairs = are_pairs(read_provenance(folder)) is True
    name, kind, token = path.resolve().name, kind_in(folder), address.token
    app = build_app(batcher, name=name, kind=kind, reads_pairs=reads_pairs, limits=limits, metrics=metrics, token=token)
    server = build_server(app, batcher, limits)
    with _listening(address, backlog=limits.connections) as listener, server.capture_signals():
        announce(f"listening on http://{_printable(listener)}")
        server.run(sockets=[listener])
    if batcher.failure is not None:
        raise batcher.failure
    code = 130 if server.stopped_by == signal.SIGINT else 0
    if not batcher.close(seconds=STOP_SECONDS):
        # The model still loads or computes; ending the interpreter under its threads would crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextmanager
def _listening(address: Address, *, backlog: int) -> Iterator[socket.socket]:
    """A listening socket: connections wait in its backlog until the server accepts them."""
    host, port = address.host, address.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OverflowError as error:
        listener.close()
        raise UsageError(f"--port {port} is not a port; choose 0 (any free one) to 65535") from error
    except OSError as error:
        listener.close()
        raise EnvironmentFault(f"{host}:{port}: {error.strerror}; choose another with --port (0 takes any free one)") from error
    with listener:
        yield listener


def _printable(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def build_server(app: ASGIApp, batcher: Batcher, limits: Limits) -> Server:
    """Build a server of `app` that starts and drains `batcher`."""
    for name in ("uvicorn.error", "asyncio"):  # their messages may quote requests; the application prints its own errors
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    config = uvicorn.Config(
        app,
        http="h11",  # bounds the size of a head; httptools does not
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.connections + 1,  # uvicorn counts the refused connection, too
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(limits.drain_seconds),
        h11_max_incomplete_event_size=HEADER_BYTES,
        backlog=limits.connections,
    )
    return Server(config, batcher, limits)


class Server(uvicorn.Server):
    """uvicorn's server with a deadline for request heads; drains the queue of texts at shutdown."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher, limits: Limits) -> None:
        super().__init__(config)
        self._batcher = batcher
        self._read_seconds = limits.read_seconds
        self._waiting: dict[H11Protocol, tuple[Any, float]] = {}  # connection -> (its last request, when it began to wait for the next)
        self.stopped_by: int | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._batcher.start(asyncio.get_running_loop())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._batcher.drain()
        for connection in tuple(self.server_state.connections):
            assert isinstance(connection, H11Protocol)
            if connection.cycle is not None and connection.cycle.more_body:  # its body is incomplete: there is nothing to finish
                connection.transport.close()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        self._close_late(asyncio.get_running_loop().time())
        return await super().on_tick(counter) or self._batcher.failure is not None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install `handle_exit`; unlike uvicorn's, do not raise the signal again at the end, which would end the process by it."""
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            os._exit(128 + sig)
        self.stopped_by = sig
        super().handle_exit(sig, frame)

    def _close_late(self, now: float) -> None:
        waiting: dict[H11Protocol, tuple[Any, float]] = {}
        for connection in tuple(self.server_state.connections):
            assert isinstance(connection, H11Protocol)
            request = connection.cycle
            stalled = connection.flow.write_paused or connection.transport.is_closing()  # the client does not read its response
            if request is not None and not request.response_complete and not stalled:
                continue
            last, since = self._waiting.get(connection, (request, now))
            waiting[connection] = (request, since if last is request else now)
            if now - waiting[connection][1] <= self._read_seconds:
                continue
            if stalled:
                connection.transport.abort()
            else:
                connection.transport.write(_late(self._read_seconds))
                connection.transport.close()
        self._waiting = waiting


def _late(seconds: float) -> bytes:
    response = error_response(408, f"the request was incomplete after {seconds:g} s; send it faster", {"connection": "close"})
    head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    return b"HTTP/1.1 408 Request Timeout\r\n" + head + b"\r\n" + bytes(response.body)
