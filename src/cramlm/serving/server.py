"""`cramlm serve`: an exported model behind HTTP, in one process with one copy of the weights.

    serve(Path("runs/mine/export"), port=8000)

It listens before the model is loaded (`/readyz` says so), and once the model is loaded the folder is not read again. SIGTERM or SIGINT:
no further connections and texts are taken, those taken are answered, then the process ends; a second signal ends it at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cramlm.errors import EnvironmentFault, UsageError
from cramlm.inference.runs import model_of, refuse_other_kinds
from cramlm.serving.limits import Limits, check_reach

STOP_SECONDS = 1.0  # after the last answer, for the model's thread to end


def serve(
    path: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    threads: int | None = None,
    window_seconds: float = 0.0,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    announce: Callable[[str], None] = print,
) -> int:
    """Serve the model of `path` (a run, an exported folder, or an ONNX one) until a signal; 0 after SIGTERM, 130 after SIGINT.

    port 0 takes a free one. threads: of the model (None: as it likes). window_seconds: how long an idle server waits for more requests
    to compute together. `announce` is called with one line when the server listens and one when the model is loaded.

    Raises:
        UsageError: for an address that others can reach without a token, or a limit that makes no sense. EnvironmentFault: if a package is
            missing or the port is taken. ArtifactError: if there is no model, or none that can be loaded safely.
    """
    check_reach(host, token)
    folder = model_of(path)
    refuse_other_kinds(folder, "cramlm serve", "use cramlm predict")
    try:
        from cramlm.serving.app import build_app
        from cramlm.serving.batching import Batcher
        from cramlm.serving.http import build_server
        from cramlm.serving.metrics import Metrics
        from cramlm.serving.models import ServedModel, load_model
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("cramlm"):
            raise
        raise EnvironmentFault(f"serving needs the package {error.name}; run: pip install 'cramlm[serve]'") from error

    metrics = Metrics()
    started = time.monotonic()

    def loaded(model: ServedModel) -> None:
        announce(f"ready after {time.monotonic() - started:.1f} s: {len(model.labels)} labels, {model.limit}")

    batcher = Batcher(lambda: load_model(folder, threads), limits=limits, metrics=metrics, window_seconds=window_seconds, loaded=loaded)
    app = build_app(batcher, name=path.resolve().name, limits=limits, metrics=metrics, token=token)
    server = build_server(app, batcher, limits)
    with _listening(host, port, backlog=limits.connections) as listener, server.capture_signals():
        announce(f"listening on http://{_printable(listener)}")
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
