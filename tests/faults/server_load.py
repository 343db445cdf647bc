"""R7 and the servers of R8: a server under many clients, a fifth of whose requests are wrong, and stopped at any moment."""

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
from figures import Figure
from workloads import World

from cramlm.inference.predictor import Predictor
from cramlm.model.tokenizer import Tokenizer
from serving import PATIENCE, Server, export_tiny, request_bytes, serving

CLIENTS = 64
LEAST = 10  # requests of each client, however slow the machine is
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


@dataclass
class Outcome:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong_answers: int = 0
    dropped: int = 0
    unexpected: list[str] = field(default_factory=list)

    def check(self, holds: bool, answer: str) -> None:
        """Note an answer that should not be."""
        if not holds:
            self.unexpected.append(answer)


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


async def client(server: Server, expected: dict[str, list[float]], outcome: Outcome, *, seed: int, until: float, least: int = 0) -> None:
    """Asks one thing after the other on one connection, until the time is over and `least` were asked, or the server closes it."""
    draw = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    asked = 0
    try:
        while time.monotonic() < until or asked < least:
            await ask(reader, writer, draw, expected, outcome)
            asked += 1
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
        outcome.check(status in (400, 413, 422, 503), f"{body[:60]!r}: {status} {answer[:200]!r}")
    elif status == 200:
        outcome.seconds.append(time.monotonic() - started)
        answers = [list(each["probabilities"].values()) for each in json.loads(answer)["predictions"]]
        outcome.wrong_answers += not np.allclose(answers, [expected[text] for text in asked], atol=1e-5)
    else:
        outcome.check(status in (429, 503), f"{status} {answer[:200]!r}")
        await asyncio.sleep(0.05)


async def storm(server: Server, expected: dict[str, list[float]], *, seconds: float) -> Outcome:
    outcome = Outcome()
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(server, expected, outcome, seed=seed, until=until, least=LEAST) for seed in range(CLIENTS)))
    return outcome


async def stopped(server: Server, expected: dict[str, list[float]]) -> Outcome:
    """SIGTERM in the midst of it: nobody gets half an answer."""
    outcome = Outcome()
    until = time.monotonic() + 15
    asking = [asyncio.create_task(client(server, expected, outcome, seed=seed, until=until)) for seed in range(CLIENTS)]
    await asyncio.sleep(0.3)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*asking)
    return outcome


def model_of(world: World, folder: Path) -> tuple[Path, dict[str, list[float]]]:
    """An export whose answers differ from text to text, and its answers, computed alone."""
    export_tiny(folder, Tokenizer.load(world.folder / "run/tokenizer"))
    texts = ["", *(row.text for row in world.task.train)]
    return folder, dict(zip(texts, Predictor.load(folder).probabilities(texts).tolist(), strict=True))


def clients(world: World, scratch: Path, *, seconds: float) -> Figure:
    """R7: no wrong answer, no 5xx, bounded memory, the promised wait; at the end a SIGTERM in the midst of it."""
    figure = Figure("R7", f"{CLIENTS} clients for {seconds:g} s, a fifth of their requests malformed: right answers or one line")
    folder, expected = model_of(world, scratch / "export")
    with figure.timed(), serving(folder, "--max-wait", str(WAIT_SECONDS), "--queue-texts", "512") as server:
        asyncio.run(storm(server, expected, seconds=1))
        before = server.rss_bytes
        outcome = asyncio.run(storm(server, expected, seconds=seconds))
        grown = (server.rss_bytes - before) / 1e6
        p99 = float(np.quantile(outcome.seconds, 0.99)) if outcome.seconds else float("inf")
        figure.trials = sum(outcome.statuses.values())
        _check_answers(figure, outcome)
        figure.check(not [status for status in outcome.statuses if status >= 500], f"statuses {dict(outcome.statuses)}")
        figure.check_time(outcome.statuses[200] > 100, f"only {outcome.statuses[200]} answered")
        figure.check(outcome.statuses[422] > 0, "no malformed request was asked")
        figure.check(outcome.dropped == 0, f"{outcome.dropped} connections dropped")
        figure.check_time(p99 < WAIT_SECONDS + 1, f"99 % answered within {p99:.2f} s")
        figure.check(grown < 60, f"memory grew by {grown:.0f} MB")
        figure.notes.append(f"{outcome.statuses[200]:,} answered, p99 {p99:.2f} s, {grown:+.0f} MB")
        began = time.monotonic()
        late = asyncio.run(stopped(server, expected))
        _check_answers(figure, late)
        figure.check(server.process.wait(timeout=PATIENCE) == 0, f"exit {server.process.returncode} at SIGTERM")
        figure.check_time((waited := time.monotonic() - began) < 10, f"{waited:.1f} s until it had ended")
        figure.check(len(server.lines) == 2, f"said {server.lines}")
    return figure


def _check_answers(figure: Figure, outcome: Outcome) -> None:
    figure.check(outcome.wrong_answers == 0, f"{outcome.wrong_answers} wrong answers")
    figure.check(set(outcome.statuses) <= {200, 400, 413, 422, 429, 503}, f"statuses {dict(outcome.statuses)}")
    figure.check_time(outcome.statuses[200] > 0, "nothing was answered")
    figure.failures += outcome.unexpected[:20]


def stops(world: World, scratch: Path, *, times: int, seed: int = 3) -> Figure:
    """R8, servers: SIGTERM at random moments, while it loads and after."""
    figure = Figure("R8", "SIGTERM to `cramlm serve`, loading or loaded: exit 0 within 10 s")
    folder, _ = model_of(world, scratch / "export")
    draw, slowest = random.Random(seed), 0.0
    with figure.timed():
        for number in range(times):
            with serving(folder, ready=number % 2 == 0) as server:
                time.sleep(draw.random() * 2)
                code, seconds = server.stop()
            figure.trials += 1
            slowest = max(slowest, seconds)
            figure.check(code == 0, f"trial {number}: exit {code}")
            figure.check_time(seconds < 10, f"trial {number}: {seconds:.1f} s")
    figure.notes.append(f"slowest {slowest:.2f} s")
    return figure
