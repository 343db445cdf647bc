"""R7 and the servers of R8: a server with many clients that send a fifth of invalid requests, and a server stopped at any moment."""

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
from typing import TypeAlias

import numpy as np
from figures import Figure, measured
from workloads import World

from cramlm.inference.predictor import Predictor
from cramlm.model.tokenizer import Tokenizer
from server_process import PATIENCE, Server, export_tiny, request_bytes, serving

CLIENTS = 64
MIN_REQUESTS = 10  # of each client, on a slow machine too
WAIT_SECONDS = 2.0  # the server's limit for the queue, without the time of one batch
INVALID = (
    *(b"{", b"\xff\xfe", b"[" * 5000, b'{"texts": [1]}', b'{"texts": ["a"], "texts": ["b"]}', b'{"texts": ["\\ud800"]}'),
    *(b'{"texts": ["a"], "model": "x"}', b'{"texts": [" "]}', json.dumps({"texts": ["a"] * 65}).encode()),
)


@dataclass
class Outcome:
    """The responses that the clients received."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong_predictions: int = 0
    dropped: int = 0
    unexpected: list[str] = field(default_factory=list)


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


Predictions: TypeAlias = dict[str, list[float]]  # text -> probabilities


async def client(server: Server, expected: Predictions, outcome: Outcome, *, seed: int, until: float, at_least: int) -> None:
    """Send requests on one connection until the time is over and `at_least` were sent, or the server closes it."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    requests = 0
    try:
        while time.monotonic() < until or requests < at_least:
            await send_one(reader, writer, rng, expected, outcome)
            requests += 1
    except (asyncio.IncompleteReadError, ConnectionError):
        outcome.dropped += 1
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def send_one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random, expected: Predictions, outcome: Outcome
) -> None:
    """Send one request, valid with probability 0.8, and check the response."""
    valid = rng.random() >= 0.2
    texts = rng.choices(list(expected), k=rng.choice((1, 1, 1, 2, 8, 32)))
    body = json.dumps({"texts": texts}).encode() if valid else rng.choice(INVALID)
    started = time.monotonic()
    status, response = await exchange(reader, writer, request_bytes(body))
    outcome.statuses[status] += 1
    if status not in ((200, 429, 503) if valid else (400, 413, 422, 503)):
        outcome.unexpected.append(f"{body[:60]!r}: {status} {response[:200]!r}")
    if valid and status == 200:
        outcome.seconds.append(time.monotonic() - started)
        probabilities = [list(each["probabilities"].values()) for each in json.loads(response)["predictions"]]
        outcome.wrong_predictions += not np.allclose(probabilities, [expected[text] for text in texts], atol=1e-5)
    elif valid:
        await asyncio.sleep(0.05)


async def load(server: Server, expected: Predictions, *, seconds: float, at_least: int = MIN_REQUESTS, stop: bool = False) -> Outcome:
    """Run all clients. stop: send SIGTERM to the server under load."""
    outcome, until = Outcome(), time.monotonic() + seconds
    clients = [client(server, expected, outcome, seed=seed, until=until, at_least=at_least) for seed in range(CLIENTS)]
    tasks = [asyncio.create_task(each) for each in clients]
    if stop:
        await asyncio.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    return outcome


def model_of(world: World, folder: Path) -> tuple[Path, Predictions]:
    """Export a model whose predictions differ between texts; return them, computed without a server."""
    export_tiny(folder, Tokenizer.load(world.folder / "run/tokenizer"))
    texts = [row.text for row in world.task.train]
    return folder, dict(zip(texts, Predictor.load(folder).probabilities(texts).tolist(), strict=True))


@measured("R7", f"{CLIENTS} clients, a fifth of their requests malformed: right predictions or one line")
def clients(figure: Figure, world: World, scratch: Path, *, seconds: float) -> None:
    """No wrong prediction, no 5xx, bounded memory and waiting time; then SIGTERM under load."""
    figure.what = figure.what.replace("clients", f"clients for {seconds:g} s")
    folder, expected = model_of(world, scratch / "export")
    with serving(folder, "--max-wait", str(WAIT_SECONDS), "--queue-texts", "512") as server:
        asyncio.run(load(server, expected, seconds=min(1, seconds), at_least=1))
        before = server.rss_bytes
        outcome = asyncio.run(load(server, expected, seconds=seconds))
        grown = (server.rss_bytes - before) / 1e6
        p99 = float(np.quantile(outcome.seconds, 0.99)) if outcome.seconds else float("inf")
        figure.trials = sum(outcome.statuses.values())
        _check_responses(figure, outcome)
        figure.check(not [status for status in outcome.statuses if status >= 500], f"statuses {dict(outcome.statuses)}")
        figure.check_time(outcome.statuses[200] > 100, f"only {outcome.statuses[200]} predictions")
        figure.check(outcome.statuses[422] > 0, "no malformed request was sent")
        figure.check(outcome.dropped == 0, f"{outcome.dropped} connections dropped")
        figure.check_time(p99 < WAIT_SECONDS + 1, f"99 % of the responses within {p99:.2f} s")
        figure.check(grown < 60, f"memory grew by {grown:.0f} MB")
        figure.notes.append(f"{outcome.statuses[200]:,} predictions, p99 {p99:.2f} s, {grown:+.0f} MB")
        began = time.monotonic()
        _check_responses(figure, asyncio.run(load(server, expected, seconds=15, at_least=0, stop=True)))
        figure.check(server.process.wait(timeout=PATIENCE) == 0, f"exit {server.process.returncode} at SIGTERM")
        figure.check_time((waited := time.monotonic() - began) < 10, f"{waited:.1f} s until the server ended")
        figure.check(len(server.lines) == 2, f"printed {server.lines}")


def _check_responses(figure: Figure, outcome: Outcome) -> None:
    figure.check(outcome.wrong_predictions == 0, f"{outcome.wrong_predictions} wrong predictions")
    figure.check(set(outcome.statuses) <= {200, 400, 413, 422, 429, 503}, f"statuses {dict(outcome.statuses)}")
    figure.check_time(outcome.statuses[200] > 0, "no prediction")
    figure.failures += outcome.unexpected[:20]


@measured("R8", "SIGTERM to `cramlm serve`, loading or loaded: exit 0 within 10 s")
def stops(figure: Figure, world: World, scratch: Path, *, times: int, seed: int = 3) -> None:
    folder, _ = model_of(world, scratch / "export")
    rng, slowest = random.Random(seed), 0.0
    for number in range(times):
        with serving(folder, ready=number % 2 == 0) as server:
            time.sleep(rng.random() * 2)
            code, seconds = server.stop()
        figure.trials += 1
        slowest = max(slowest, seconds)
        figure.check(code == 0, f"trial {number}: exit {code}")
        figure.check_time(seconds < 10, f"trial {number}: {seconds:.1f} s")
    figure.notes.append(f"slowest {slowest:.2f} s")
