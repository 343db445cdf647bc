"""`cramlm serve`: an exported model behind HTTP, in one process with one copy of the weights.

    serve(Path("runs/mine/export"), port=8000)

It listens before the model is loaded (`/readyz` says so), and once the model is loaded the folder is not read again. SIGTERM or SIGINT:
no further texts are taken, those taken are answered, then the process ends; a second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cramlm.deploy.runs import refuse_other_kinds
from cramlm.deploy.server_limits import Limits, check_reach
from cramlm.errors import EnvironmentFault, UsageError

STOP_SECONDS = 1.0  # after draining, for answers that are being written and the thread to end


def serve(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    threads: int | None = None,
    window_seconds: float = 0.0,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    announce: Callable[[str], None] = print,
) -> int:
    """Serve an exported folder, or an ONNX one, until a signal; 0 after SIGTERM, 130 after SIGINT.

    port 0 takes a free one. threads: of the model (None: as it likes). window_seconds: how long an idle server waits for more requests
    to compute together. `announce` is told one line when the server listens and one when the model is loaded.

    Raises:
        UsageError: for an address that others can reach without a token, or a limit that makes no sense. EnvironmentFault: if a package is
            missing or the port is taken. ArtifactError: if the folder holds no model that can be loaded safely.
    """
    check_reach(host, token)
    refuse_other_kinds(folder, "cramlm serve", "use cramlm predict")
    try:
        import httptools  # noqa: F401
        import uvicorn

        from cramlm.deploy.server_app import build_app
        from cramlm.deploy.server_batching import Batcher
        from cramlm.deploy.server_gate import Gate
        from cramlm.deploy.server_metrics import Metrics
        from cramlm.deploy.server_models import ServedModel, load_model
        from cramlm.deploy.server_protocol import bounded_protocol
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("cramlm"):
            raise
        raise EnvironmentFault(f"serving needs the package {error.name}; run: pip install 'cramlm[serve]'") from error

    metrics = Metrics()
    started = time.monotonic()

    def loaded(model: ServedModel) -> None:
        announce(f"ready after {time.monotonic() - started:.1f} s: {len(model.labels)} labels, {model.max_length} tokens per text")

    batcher = Batcher(lambda: load_model(folder, threads), limits=limits, metrics=metrics, window_seconds=window_seconds, loaded=loaded)
    app = build_app(batcher, name=folder.resolve().name, limits=limits, metrics=metrics, guarded=token is not None)

    class Server(uvicorn.Server):
        """uvicorn's, which would end by the signal's own exit code, and drop what is in flight if it takes long."""

        stopped_by: int | None = None
        _stop_at = float("inf")

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            numbers = (signal.SIGTERM, signal.SIGINT)
            previous = {number: signal.signal(number, self._stop) for number in numbers}
            try:
                batcher.start(asyncio.get_running_loop())
                yield
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)

        def _stop(self, number: int, frame: Any) -> None:
            if self.stopped_by is not None:
                os._exit(128 + number)
            self.stopped_by = number
            self._stop_at = time.monotonic() + limits.drain_seconds
            batcher.drain()

        async def on_tick(self, counter: int) -> bool:
            drained = self.stopped_by is not None and (not batcher.outstanding or time.monotonic() > self._stop_at)
            return await super().on_tick(counter) or drained or batcher.failure is not None

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it says may quote requests; failures are reported by the gate
    config = uvicorn.Config(
        Gate(app, limits=limits, token=token, metrics=metrics),
        http=bounded_protocol(limits, metrics),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(STOP_SECONDS),
        backlog=limits.connections,
    )
    with _listening(host, port, backlog=limits.connections) as listener:
        announce(f"listening on http://{_printable(listener)}")
        server = Server(config)
        server.run(sockets=[listener])
    if batcher.failure is not None:
        raise batcher.failure
    code = 130 if server.stopped_by == signal.SIGINT else 0
    if not batcher.close(seconds=STOP_SECONDS):
        # The model still loads or computes for nobody; ending the interpreter under its threads would crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextmanager
def _listening(host: str, port: int, *, backlog: int) -> Iterator[socket.socket]:
    """A socket that takes connections from the moment on that its address is announced, though nobody answers yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OverflowError as error:
        listener.close()
        raise UsageError(f"--port {port} is no port; choose 0 (any free one) to 65535") from error
    except OSError as error:
        listener.close()
        raise EnvironmentFault(f"{host}:{port}: {error.strerror}; choose another with --port (0 takes any free one)") from error
    with listener:
        yield listener


def _printable(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
