"""The server under many clients, a fifth of them wrong, and stopped at any moment; short in the default suite, long before a release."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from cramlm.deploy.predictor import Predictor
from cramlm.model.tokenization import Tokenizer
from serving import Server, export_tiny, request_bytes, serving

CLIENTS = 64
WAIT_SECONDS = 2.0  # the server's own promise for the queue; one batch comes on top
WRONG = (
    b"{",
    b"\xff\xfe",
    b'{"texts": [1]}',
    b'{"texts": ["a"], "texts": ["b"]}',
    b'{"texts": ["\\ud800"]}',
    b'{"texts": ["a"], "model": "x"}',
    b"[" * 5000,
    json.dumps({"texts": ["a"] * 65}).encode(),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return export_tiny(tmp_path_factory.mktemp("loaded") / "export", tokenizer)


@dataclass
class Outcome:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong_answers: int = 0
    dropped: int = 0


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


async def client(server: Server, expected: dict[str, list[float]], outcome: Outcome, *, seed: int, until: float) -> None:
    """Asks one thing after the other on one connection, until the time is over or the server closes it."""
    draw = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        while time.monotonic() < until:
            await ask(reader, writer, draw, expected, outcome)
    except (asyncio.IncompleteReadError, ConnectionError):
        outcome.dropped += 1
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, draw: random.Random, expected: dict[str, list[float]], outcome: Outcome
) -> None:
    """Four times in five something right, whose answer is checked."""
    right = draw.random() >= 0.2
    asked = draw.choices(list(expected), k=draw.choice((1, 1, 1, 2, 8, 32)))
    body = json.dumps({"texts": asked}).encode() if right else draw.choice(WRONG)
    started = time.monotonic()
    status, answer = await exchange(reader, writer, request_bytes(body))
    outcome.statuses[status] += 1
    if not right:
        assert status in (400, 413, 422, 503), (status, answer)
    elif status == 200:
        outcome.seconds.append(time.monotonic() - started)
        answers = [list(each["probabilities"].values()) for each in json.loads(answer)["predictions"]]
        outcome.wrong_answers += not np.allclose(answers, [expected[text] for text in asked], atol=1e-5)
    else:
        assert status in (429, 503), answer
        await asyncio.sleep(0.05)


async def storm(server: Server, expected: dict[str, list[float]], *, seconds: float) -> Outcome:
    outcome = Outcome()
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(server, expected, outcome, seed=seed, until=until) for seed in range(CLIENTS)))
    return outcome


def answers_of(folder: Path, texts: list[str]) -> dict[str, list[float]]:
    return dict(zip(texts, Predictor.load(folder).probabilities(texts).tolist(), strict=True))


@pytest.mark.parametrize("seconds", [4, pytest.param(600, marks=pytest.mark.slow)])
def test_64_clients_a_fifth_of_whose_requests_are_wrong(folder: Path, texts: list[str], seconds: float) -> None:
    expected = answers_of(folder, texts)
    with serving(folder, "--max-wait", str(WAIT_SECONDS), "--queue-texts", "512") as server:
        asyncio.run(storm(server, expected, seconds=1))
        before = server.rss_bytes
        outcome = asyncio.run(storm(server, expected, seconds=seconds))
        p50, p99 = np.quantile(outcome.seconds, [0.5, 0.99])
        grown = (server.rss_bytes - before) / 1e6
        print(f"{seconds:g} s: {dict(outcome.statuses)}, p50 {p50:.3f} s, p99 {p99:.3f} s, memory {grown:+.1f} MB")  # shown by -rP
        assert outcome.wrong_answers == 0
        assert outcome.dropped == 0
        assert not [status for status in outcome.statuses if status >= 500], outcome.statuses
        assert outcome.statuses[200] > 100
        assert outcome.statuses[422] > 0
        assert p99 < WAIT_SECONDS + 1
        assert grown < 60
        # And stopped in the midst of it: nobody gets half an answer.
        outcome = Outcome()

        async def stopped() -> None:
            asking = [
                asyncio.create_task(client(server, expected, outcome, seed=seed, until=time.monotonic() + 15)) for seed in range(CLIENTS)
            ]
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*asking)

        started = time.monotonic()
        asyncio.run(stopped())
        assert server.process.wait(timeout=10) == 0
        assert time.monotonic() - started < 10
        assert outcome.wrong_answers == 0
        assert outcome.statuses[200] > 0
        assert set(outcome.statuses) <= {200, 400, 413, 422, 429, 503}
        assert len(server.lines) == 2, server.lines


@pytest.mark.slow
def test_a_server_stopped_at_any_of_50_moments_ends_with_0(folder: Path) -> None:
    draw = random.Random(3)
    for number in range(50):
        with serving(folder, ready=number % 2 == 0) as server:
            time.sleep(draw.random() * 2)
            code, seconds = server.stop()
            assert code == 0
            assert seconds < 10
