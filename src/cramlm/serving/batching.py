"""The queue of requests and the model behind it: one thread computes the texts of several requests together.

`Batcher.submit` (event loop) puts the texts of a request into a bounded queue. The model's thread takes requests in order of arrival, up to
`BATCH_TOKENS` estimated tokens, tokenizes and computes them as one batch, and returns the results to the event loop in one call. Meanwhile
the next batch collects, so a busy server batches by itself; at an idle server the window lets requests that arrive together share a batch,
and adds at most its length to the latency.

A request leaves the queue when its future is cancelled (the client disconnected) or after `Limits.wait_seconds` (429).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from cramlm.inference.base import BasePredictor
from cramlm.inference.linear import ModelPart
from cramlm.inference.predictor import load_predictor
from cramlm.records import FloatArray, IntArray
from cramlm.serving import Limits
from cramlm.serving.middleware import Metrics

BATCH_TOKENS = 8192  # estimated; the model limits its own batches by the real number
CHARACTERS_PER_TOKEN = 3  # low on purpose; only the size of a batch depends on it


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """Outputs for n texts.

    values: probabilities or numbers, float32 (n, labels). lengths: int64 (n,), tokens of each text before truncation, special tokens
    included; of a linear model words.
    """

    values: FloatArray
    lengths: IntArray


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model. abstain_below: predictions of lower confidence get no label; None if every prediction has one."""

    predictor: BasePredictor
    abstain_below: float | None = None

    def compute(self, texts: Sequence[str], pairs: Sequence[str | None]) -> ModelOutputs:
        """Compute the outputs of texts.

        Raises:
            UsageError: if the model does not read pairs, or nothing else. DivergedError: if a logit is not finite.
        """
        values, lengths = self.predictor.compute(texts, pairs)
        full = np.flatnonzero(lengths == self.predictor.max_length).tolist()
        if full:  # truncated, or exactly that long: count these without truncation
            lengths[full] = self.predictor.whole_lengths([texts[index] for index in full], [pairs[index] for index in full])
        return ModelOutputs(values, lengths)


def load_model(
    folder: Path,
    threads: int | None,
    *,
    precision: Literal["auto", "fp32", "bf16"] = "fp32",
    device: str = "cpu",
    model_part: ModelPart = "combined",
    abstain_below: float | None = None,
) -> ServedModel:
    """Load and warm up the model of a folder; call it in the thread that computes (PyTorch sets its number of threads per thread).

    precision, device: of an encoder, as of `load_predictor`. abstain_below: the lowest confidence of a prediction with a label; None: every
    prediction has one.

    Raises:
        ArtifactError, EnvironmentFault, UsageError: as `load_predictor`. UsageError: if the model has no confidence to abstain by.
    """
    predictor = load_predictor(folder, precision=precision, device=device, model_part=model_part, threads=threads)
    if abstain_below is not None:
        predictor.calibrated()
    model = ServedModel(predictor, abstain_below)
    pair = "second text" if predictor.trained_on_pairs else None
    model.compute(["warm up"], [pair])  # the first call is slow, and fails if the model is broken
    return model


class BusyError(Exception):
    """The queue is full, or the request waited too long in it."""


class NotReadyError(Exception):
    """The model is not loaded yet, or the server drains."""


@dataclass(slots=True, eq=False)
class _Work:
    texts: Sequence[str]
    pairs: Sequence[str | None]
    tokens: int
    future: asyncio.Future[ModelOutputs]
    since: float


class Batcher:
    """The queue and the thread that computes it. Call all methods in the event loop's thread."""

    def __init__(
        self,
        load: Callable[[], ServedModel],
        *,
        limits: Limits,
        metrics: Metrics,
        window_seconds: float,
        loaded: Callable[[ServedModel], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` and then `loaded` run in the model's thread; their exception is stored as `failure`. clock: for waiting times."""
        self._load = load
        self._loaded = loaded
        self._limits = limits
        self._metrics = metrics
        self._window_seconds = window_seconds
        self._clock = clock
        self.model: ServedModel | None = None  # while it loads
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._waiting_texts = 0
        self._waiting_tokens = 0
        self._wanted_tokens = 1  # tokens in the queue at which `submit` wakes the thread
        self._closed = False
        self._draining = False
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def ready(self) -> bool:
        """True if the server accepts texts."""
        return self.model is not None and not self._draining

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start loading; results go to `loop`."""
        self._loop = loop
        self._thread.start()

    def drain(self) -> None:
        """Accept no further texts, and compute those in the queue without waiting for more."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        self._metrics.ready.set(0)

    def close(self, *, seconds: float) -> bool:
        """End the thread once the queue is empty. Return True if it ended within `seconds`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def submit(self, texts: Sequence[str], pairs: Sequence[str | None]) -> asyncio.Future[ModelOutputs]:
        """Queue the texts of a request (`pairs` of equal length); cancelling the future removes them.

        Raises:
            NotReadyError: while loading or draining. BusyError: if the queue is full; the future raises it after `Limits.wait_seconds`.
        """
        if self.model is None or self._draining:
            raise NotReadyError("draining" if self._draining else "loading")
        assert self._loop is not None
        tokens = sum(_estimate(text, pair, self.model.predictor.max_length) for text, pair in zip(texts, pairs, strict=True))
        work = _Work(texts, pairs, tokens, self._loop.create_future(), self._clock())
        with self._changed:
            if self._waiting_texts + len(texts) > self._limits.queue_texts:
                raise BusyError
            self._waiting.append(work)
            self._count(work, 1)
            if self._waiting_tokens >= self._wanted_tokens:
                self._changed.notify()
        work.future.add_done_callback(lambda _: self._done(work))
        return work.future

    def _count(self, work: _Work, change: Literal[1, -1]) -> None:
        """Add a request to the numbers of what is in the queue, or subtract it."""
        self._waiting_texts += change * len(work.texts)
        self._waiting_tokens += change * work.tokens
        self._metrics.queue_texts.set(self._waiting_texts)

    def _done(self, work: _Work) -> None:
        if work.future.cancelled():
            with self._changed:
                if work in self._waiting:
                    self._waiting.remove(work)
                    self._count(work, -1)

    # Below: the model's thread.

    def _run(self) -> None:
        try:
            model = self._load()
            if self._draining:
                return
            self.model = model
            self._loaded(model)  # announces that texts are accepted
        except BaseException as error:  # raised again in the main thread
            self.failure = error
            return
        self._metrics.ready.set(int(not self._draining))
        while batch := self._take():
            self._compute(model, batch)

    def _take(self) -> list[_Work]:
        """Return the next requests, at least one; none if the queue is closed and empty."""
        while True:
            with self._changed:
                self._gather()
                batch, expired = self._next()
                ended = self._closed and not self._waiting and not batch
            if expired:
                self._deliver([(work, BusyError()) for work in expired])
            if batch or ended:
                return batch

    def _gather(self) -> None:
        """Wait for a request, and then up to the window for others."""
        self._wanted_tokens = 1
        self._changed.wait_for(lambda: self._waiting or self._closed)
        if self._window_seconds:
            self._wanted_tokens = BATCH_TOKENS
            self._changed.wait_for(lambda: self._waiting_tokens >= BATCH_TOKENS or self._draining or self._closed, self._window_seconds)

    def _next(self) -> tuple[list[_Work], list[_Work]]:
        """Return the requests of the next batch, and those that waited too long; both may be empty, since clients may have disconnected."""
        batch: list[_Work] = []
        expired: list[_Work] = []
        oldest = self._clock() - self._limits.wait_seconds
        tokens = 0
        while self._waiting and (not batch or tokens + self._waiting[0].tokens <= BATCH_TOKENS):
            work = self._waiting.popleft()
            self._count(work, -1)
            if work.since < oldest:
                expired.append(work)
            else:
                batch.append(work)
                tokens += work.tokens
        return batch, expired

    def _compute(self, model: ServedModel, batch: Sequence[_Work]) -> None:
        started = time.perf_counter()
        texts = [text for work in batch for text in work.texts]
        pairs = [pair for work in batch for pair in work.pairs]
        try:
            outputs = model.compute(texts, pairs)
        except Exception as error:
            if len(batch) == 1:
                self._deliver([(batch[0], error)])
                return
            for work in batch:  # so that a request that fails does not fail the others
                self._compute(model, [work])
            return
        self._metrics.count_batch(
            texts=len(texts),
            tokens=int(np.minimum(outputs.lengths, model.predictor.max_length).sum()),
            seconds=time.perf_counter() - started,
        )
        results: list[tuple[_Work, ModelOutputs | Exception]] = []
        start = 0
        for work in batch:
            part = slice(start, start + len(work.texts))
            results.append((work, ModelOutputs(outputs.values[part], outputs.lengths[part])))
            start = part.stop
        self._deliver(results)

    def _deliver(self, results: Sequence[tuple[_Work, ModelOutputs | Exception]]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_settle, results)
        except RuntimeError:  # the loop is closed: the process ends
            return


def _settle(results: Sequence[tuple[_Work, ModelOutputs | Exception]]) -> None:
    for work, result in results:
        if work.future.done():  # the client disconnected meanwhile
            continue
        if isinstance(result, ModelOutputs):
            work.future.set_result(result)
        else:
            work.future.set_exception(result)


def _estimate(text: str, pair: str | None, longest: int) -> int:
    characters = len(text) + (0 if pair is None else len(pair))
    return min(longest, 3 + characters // CHARACTERS_PER_TOKEN)
