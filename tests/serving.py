"""A real server process for tests, and small clients that can also misbehave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cramlm.config import EncoderConfig, HeadConfig
from cramlm.model.hf import save_classifier
from cramlm.model.model import build_model
from cramlm.model.tokenization import Tokenizer

LABELS = ("007", "negative", "très <b>bien</b>")
JSON = {"content-type": "application/json"}


def export_tiny(folder: Path, tokenizer: Tokenizer) -> Path:
    """A model whose answers differ between texts, exported; it reads 48 tokens."""
    encoder = EncoderConfig(shape="modernbert", layers=2, hidden=32, heads=4, intermediate=48, max_positions=64, init_std=0.3)
    model = build_model(encoder, HeadConfig(pooling="mean"), vocab_size=tokenizer.vocab_size, labels=3, seed=5)
    save_classifier(model, tokenizer, folder, labels=LABELS, max_length=48)
    return folder


@dataclass
class Server:
    """A running `cramlm serve`."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    port: int = 0
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30))

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

    def post(self, path: str, content: Any, *, headers: Mapping[str, str] = JSON) -> httpx.Response:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.client.post(path, content=body, headers=dict(headers))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def exchange(self, request: bytes) -> bytes:
        """Send bytes as they are, and read until the server closes."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_all(connection)

    def metric(self, name: str, *, headers: Mapping[str, str] | None = None) -> float:
        text = self.client.get("/metrics", headers=dict(headers or {})).text
        return float(re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[0])

    def wait_for_line(self, start: str, *, seconds: float = 60) -> None:
        wait_until(lambda: any(line.startswith(start) for line in self.lines) or self.process.poll() is not None, seconds=seconds)
        assert any(line.startswith(start) for line in self.lines), "\n".join(self.lines)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """(exit code, seconds it took)."""
        started = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(timeout=30), time.monotonic() - started


@contextmanager
def serving(folder: Path, *options: str, ready: bool = True, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`cramlm serve` on a free port, loaded unless told otherwise; killed at the end if it still runs."""
    command = [sys.executable, "-m", "cramlm", "serve", str(folder), "--port", "0", "--threads", "1", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})
    server = Server(process)
    assert process.stderr is not None
    reader = threading.Thread(target=lambda lines: server.lines.extend(line.rstrip("\n") for line in lines), args=(process.stderr,))
    reader.start()
    try:
        server.wait_for_line("listening on ")
        server.listens_on(int(server.lines[0].rpartition(":")[2]))
        if ready:
            server.wait_for_line("ready ")
        yield server
    finally:
        server.client.close()
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


def wait_until(true: Any, *, seconds: float = 10) -> None:
    """Return as soon as `true()`; fail after so long."""
    end = time.monotonic() + seconds
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
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body
    )
