"""A real server process for tests, and small clients that can also misbehave."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from commands import Child, start
from cramlm.config.head import HeadConfig
from cramlm.config.run import EncoderConfig
from cramlm.model.huggingface.folder import save_classifier
from cramlm.model.model import ModelSpec, build_model
from cramlm.model.tokenizer import Tokenizer
from cramlm.serving import Address, Limits
from cramlm.serving.batching import load_model
from cramlm.serving.server import serve

PATIENCE = 600.0  # seconds after which a test takes a process for hung; no result depends on it
LABELS = ("007", "negative", "très <b>bien</b>")
JSON = {"content-type": "application/json"}


def export_tiny(folder: Path, tokenizer: Tokenizer, *, shape: Any = "modernbert", pooling: Any = "mean") -> Path:
    """An exported model whose predictions differ between texts; it reads 48 tokens."""
    encoder = EncoderConfig(shape=shape, layers=2, hidden=32, heads=4, intermediate=48, max_positions=64, init_std=0.3)
    model = build_model(ModelSpec(encoder, HeadConfig(pooling=pooling), vocab_size=tokenizer.vocab_size, labels=3), seed=5)
    save_classifier(model, tokenizer, folder, labels=LABELS, max_length=48)
    return folder


@dataclass
class Server:
    """A running `cramlm serve`."""

    process: Child | subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    port: int = 0
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=PATIENCE))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listens_on(self, port: int) -> None:
        self.port = port
        self.client.base_url = httpx.URL(self.url)

    @property
    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    @property
    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def post(self, path: str, content: Any, *, headers: Mapping[str, str] = JSON) -> httpx.Response:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.client.post(path, content=body, headers=dict(headers))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def exchange(self, request: bytes) -> bytes:
        """Send bytes as they are, and read until the server closes."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_all(connection)

    def metric(self, name: str, *, headers: Mapping[str, str] | None = None) -> float:
        text = self.client.get("/metrics", headers=dict(headers or {})).text
        return float(re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[0])

    def wait_for_line(self, start: str) -> None:
        wait_until(lambda: any(line.startswith(start) for line in self.lines) or self.process.poll() is not None)
        assert any(line.startswith(start) for line in self.lines), "\n".join(self.lines)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """(exit code, seconds it took)."""
        started = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE), time.monotonic() - started


@contextmanager
def serving(folder: Path, *options: str, ready: bool = True, prepare: Callable[[], None] | None = None) -> Iterator[Server]:
    """`cramlm serve` in a forked child on a free port, by default once it has loaded the model; killed at the end if it still runs.

    prepare: called in the child before the command.
    """
    with running(start("serve", folder, "--port", "0", "--threads", "1", *options, prepare=prepare)) as server:
        if ready:
            server.wait_for_line("ready ")
        yield server


@contextmanager
def serving_alone(folder: Path) -> Iterator[Server]:
    """`cramlm serve` in a new interpreter, which has loaded only what it needs."""
    command = [sys.executable, "-m", "cramlm", "serve", str(folder), "--port", "0", "--threads", "1"]
    with running(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as server:
        server.wait_for_line("ready ")
        yield server


@contextmanager
def holding(folder: Path, token: str) -> Iterator[Server]:
    """A server with a queue of 8 texts that computes nothing before it is stopped, and has no time limits."""
    never = 1e6
    limits = Limits(texts=8, queue_texts=8, wait_seconds=never, read_seconds=never, drain_seconds=never)

    def work() -> None:
        announce, load = partial(print, file=sys.stderr, flush=True), partial(load_model, threads=1)
        sys.exit(serve(folder, Address(port=0, token=token), load=load, window_seconds=never, limits=limits, announce=announce))

    with running(Child(work)) as server:
        server.wait_for_line("ready ")
        yield server


@contextmanager
def running(process: Child | subprocess.Popen[str]) -> Iterator[Server]:
    """A serving process that listens already; killed at the end if it still runs."""
    server = Server(process)
    reader = threading.Thread(target=lambda lines: server.lines.extend(line.rstrip("\n") for line in lines), args=(process.stderr,))
    reader.start()
    try:
        server.wait_for_line("listening on ")
        address = next(line for line in server.lines if line.startswith("listening on "))
        server.listens_on(int(address.rpartition(":")[2]))
        yield server
    finally:
        server.client.close()
        if process.poll() is None:
            process.kill()
        process.wait(timeout=PATIENCE)
        reader.join()
        process.stderr.close()
        if process.stdout is not None:
            process.stdout.close()


def wait_until(true: Any) -> None:
    """Return as soon as `true()`."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes or resets."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def request_bytes(body: bytes, *, path: str = "/v1/predict", headers: str = "") -> bytes:
    """A POST as it stands on the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body
