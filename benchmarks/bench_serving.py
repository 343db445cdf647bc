"""Throughput and latency of `cramlm serve` and of FastAPI with a transformers pipeline, on the same exported model.

    python benchmarks/bench_serving.py runs/mine/export --concurrency 1 16 64 --seconds 10

Each server is a process on this machine with the same number of threads; they run one after the other. The load is closed:
each client sends its next text after the response, on a persistent connection. Texts are words of the model's
vocabulary: short ones of 16 tokens, long ones of 256 (or the maximum length of the model). The servers alternate `--rounds` times, and the
median round counts. CPU time per text is that of the server's process; it is more reliable than wall-clock time on a busy machine.
Probabilities of both servers must agree within 1e-4; with --precision auto, labels must be equal.
Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cramlm.cli.console import show_table
from cramlm.model.huggingface.folder import LoadedModel, load_classifier

GOAL = 4.0
SHORT, LONG = 16, 256
TEXTS = 512


def main() -> None:
    """Measure every load on both servers and print the results."""
    arguments = parse_arguments()
    model = load_classifier(arguments.model)
    loads = {"short": texts_of(model, SHORT), "long": texts_of(model, min(LONG, model.max_length))}
    cases = list(itertools.product(loads, arguments.batch, arguments.concurrency))
    measured: dict[str, dict[Any, list[Load]]] = {name: {case: [] for case in cases} for name in ("cramlm", "pipeline")}
    for _ in range(arguments.rounds):
        for name in measured:
            with running(name, arguments) as (port, process):
                asyncio.run(storm(port, Load(loads["short"], 8, 1), seconds=1))  # warm
                for case in cases:
                    load = Load(loads[case[0]], case[2], case[1])
                    before = cpu_seconds(process)
                    asyncio.run(storm(port, load, seconds=arguments.seconds))
                    load.cpu_seconds = cpu_seconds(process) - before
                    measured[name][case].append(load)
    check = check_labels if arguments.precision == "auto" else check_probabilities
    rows = [row(case, middle(measured["cramlm"][case]), middle(measured["pipeline"][case]), check) for case in cases]
    header = ("texts", "each", "clients", "texts/s", "peer", "ratio", "p50 ms", "peer", "p99 ms", "peer", "CPU ms", "peer")
    show_table(
        f"{arguments.model} with {arguments.threads} threads on {os.cpu_count()} cores", header, [list(map(text_of, row)) for row in rows]
    )
    ratios = [row[5] for row in rows if row[2] > 1]
    print(f"{min(ratios):.1f} to {max(ratios):.1f} times the pipeline's throughput with several clients; the goal is {GOAL:g}")
    names = ["texts", "batch", "clients", "per_second", "peer_per_second", "ratio", "p50_ms", "peer_p50_ms", "p99_ms", "peer_p99_ms"]
    names += ["cpu_ms", "peer_cpu_ms"]
    settings = {
        "model": str(arguments.model),
        "onnx": arguments.onnx is not None,
        "precision": arguments.precision,
        "threads": arguments.threads,
        "cores": os.cpu_count(),
        "seconds": arguments.seconds,
    }
    print(json.dumps({"benchmark": "serving", **settings, "rows": [dict(zip(names, row, strict=True)) for row in rows]}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="an exported folder")
    parser.add_argument("--onnx", type=Path, help="ONNX folder (fp32) of the model for cramlm to serve instead")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="texts per request")
    parser.add_argument("--seconds", type=float, default=10.0, help="per load and server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--precision", choices=["fp32", "auto"], default="fp32", help="of cramlm; auto: bf16, and labels as with fp32")
    parser.add_argument("--window-ms", type=float, default=0.0, help="cramlm's batching window")
    parser.add_argument("--parallel-peer", action="store_true", help="call the pipeline from several threads")
    return parser.parse_args()


@dataclass
class Load:
    """Requests of a load, their seconds, and the probabilities by text."""

    texts: list[str]
    clients: int
    batch: int
    latencies: list[float] = field(default_factory=list)
    probabilities: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def cpu_ms(self) -> float:
        """Return the CPU time of the server per text."""
        return 1000 * self.cpu_seconds / (len(self.latencies) * self.batch)

    @property
    def per_second(self) -> float:
        return len(self.latencies) * self.batch / self.seconds

    def percentile_ms(self, percent: int) -> float:
        return 1000 * statistics.quantiles(self.latencies, n=100, method="inclusive")[percent - 1]


def texts_of(model: LoadedModel, tokens: int) -> list[str]:
    """Return texts of so many tokens, including special ones, made from words that are single tokens."""
    words = [word for word in map(model.tokenizer.token, range(5, model.tokenizer.vocab_size)) if word.isalpha()]
    lengths = model.tokenizer.encode(words).lengths
    words = [word for word, length in zip(words, lengths, strict=True) if length == 1]
    rng = random.Random(7)
    return [" ".join(rng.choices(words, k=tokens - 2)) for _ in range(TEXTS)]


@contextmanager
def running(name: str, arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yield port and process id of a server that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threads = str(arguments.threads)
    if name == "cramlm":
        options = [
            "--port",
            str(port),
            "--threads",
            threads,
            "--batch-window",
            str(arguments.window_ms / 1000),
            "--max-wait",
            "3600",
            "--queue-texts",
            "65536",
            "--precision",
            arguments.precision,
        ]
        command = [sys.executable, "-m", "cramlm", "serve", str(arguments.onnx or arguments.model), *options]
    else:
        command = [sys.executable, str(Path(__file__).with_name("serving_peer.py")), str(arguments.model), str(port), threads]
        command += ["parallel"] if arguments.parallel_peer else []
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_ready(port, process)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process with all its threads; 0 without /proc."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{' '.join(process.args)} ended by itself")  # type: ignore[arg-type]


async def storm(port: int, load: Load, *, seconds: float) -> None:
    """All clients at once, for so long."""
    chunks = itertools.cycle([load.texts[start : start + load.batch] for start in range(0, len(load.texts), load.batch)])
    started = time.perf_counter()
    await asyncio.gather(*(client(port, load, chunks, until=started + seconds) for _ in range(load.clients)))
    load.seconds = time.perf_counter() - started


async def client(port: int, load: Load, chunks: Iterator[Any], *, until: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    while (started := time.perf_counter()) < until:
        texts = next(chunks)
        body = json.dumps({"texts": list(texts)}).encode()
        writer.write(head % len(body) + body)
        response_head = await reader.readuntil(b"\r\n\r\n")
        content = await reader.readexactly(int(response_head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        load.latencies.append(time.perf_counter() - started)
        if response_head[9:12] != b"200":
            raise SystemExit(f"a server returned {content.decode()[:200]}")
        if texts[0] not in load.probabilities:
            load.probabilities.update(
                (text, each["probabilities"]) for text, each in zip(texts, json.loads(content)["predictions"], strict=True)
            )
    writer.close()
    await writer.wait_closed()


def middle(loads: list[Load]) -> Load:
    return sorted(loads, key=lambda load: load.per_second)[len(loads) // 2]


def check_probabilities(ours: dict[str, float], theirs: dict[str, float]) -> bool:
    return max(abs(ours[label] - theirs[label]) for label in ours) < 1e-4


def check_labels(ours: dict[str, float], theirs: dict[str, float]) -> bool:
    """Return True for equal labels, or a tie in fp32."""
    return theirs[max(ours, key=lambda label: ours[label])] > max(theirs.values()) - 1e-4


def row(case: tuple[str, int, int], ours: Load, theirs: Load, check: Callable[[dict[str, float], dict[str, float]], bool]) -> list[Any]:
    """Return a row of the table."""
    both = ours.probabilities.keys() & theirs.probabilities.keys()
    if different := sum(not check(ours.probabilities[text], theirs.probabilities[text]) for text in both):
        raise SystemExit(f"the servers disagree on {different} of {len(both)} texts: they do not do the same work")
    rates = [ours.per_second, theirs.per_second, ours.per_second / theirs.per_second]
    times = [load.percentile_ms(percent) for percent in (50, 99) for load in (ours, theirs)]
    return [*case, *rates, *times, ours.cpu_ms, theirs.cpu_ms]


def text_of(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return str(value)


if __name__ == "__main__":
    main()
