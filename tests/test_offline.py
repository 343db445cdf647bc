"""Without a network: a whole fit, its predictions, its report and an index open no connection and resolve no name."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest

from commands import succeed
from tiny_task import write_task

SHORT = ("--set", "phases[0].steps=2", "--set", "phases[1].steps=2")


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse every connection but those to Unix sockets (between processes of this machine); the returned list has the attempts."""
    attempts: list[str] = []
    connect = socket.socket.connect

    def refused(*address: Any, **options: Any) -> NoReturn:
        attempts.append(str(address))
        raise OSError(f"this test has no network: {address}")

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            refused(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)
    monkeypatch.setattr(socket.socket, "connect_ex", connect_locally)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket, "create_connection", refused)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return attempts


def test_fit_predict_report_and_index_need_no_network(session_run: Path, tmp_path: Path, blocked: list[str]) -> None:
    paths = write_task(tmp_path / "data")
    commands: list[tuple[str | Path, ...]] = [
        ("fit", "--config", session_run / "run.toml", "--out", tmp_path / "run", "--store", tmp_path / "store", *SHORT),
        ("predict", tmp_path / "run", paths["test"], "--out", tmp_path / "predictions.jsonl"),
        ("evaluate", tmp_path / "run", paths["test"]),
        ("explain", tmp_path / "run", "wave ship harbour sailor"),
        ("report", tmp_path / "run"),
        ("index", paths["corpus"], "--out", tmp_path / "index", "--workers", "1"),
        ("search", tmp_path / "index", "lighthouse captain"),
        ("doctor",),
    ]
    for command in commands:
        succeed(*command)
    assert not blocked
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("localhost", 80))
    with socket.socket() as opened, pytest.raises(OSError, match="no network"):
        opened.connect(("127.0.0.1", 80))
