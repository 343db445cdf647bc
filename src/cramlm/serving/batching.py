"""Requests wait in one bounded queue; one thread computes those that wait together.

The path of a request: `submit` (event loop) puts its texts into the queue or refuses them; the model's thread takes requests in the
order of their coming, up to `BATCH_TOKENS` estimated tokens, cuts all their texts into tokens at once, computes them packed, and hands
the answers back to the event loop in one call. While a batch is computed the next one gathers, so that a busy server batches by itself;
the window only lets requests that arrive at the same moment at an idle one travel together, and an answer waits at most that long for it.

A request is dropped from the queue when its future is cancelled (the client went away) or after `Limits.wait_seconds` (answered 429):
a server that is asked too much refuses early and answers the rest in time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cramlm.evaluation.kinds import KINDS
from cramlm.linear import is_linear
from cramlm.model.tokenizer import UNCUT
from cramlm.records import FloatArray, IntArray
from cramlm.serving.limits import Limits
from cramlm.serving.metrics import Metrics

if TYPE_CHECKING:
    from cramlm.inference.linear import LinearPredictor
    from cramlm.inference.onnx import OnnxPredictor
    from cramlm.model.huggingface.folder import LoadedModel


BATCH_TOKENS = 8192  # estimated; the model computes at most as many at once whatever the estimate
CHARACTERS_PER_TOKEN = 3  # a cautious guess for deciding how much to take from the queue; correctness does not rest on it


class BusyError(Exception):
    """The queue is full, or the request waited too long in it."""


class NotReadyError(Exception):
    """The model is not loaded yet, or the server drains."""


@dataclass(slots=True, eq=False)
class _Work:
    texts: Sequence[str]
    pairs: Sequence[str | None]
    tokens: int
    future: asyncio.Future[Answers]
    since: float


class Batcher:
    """The queue and the thread that empties it. All methods are for the event loop's thread."""

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
        """`load` and then `loaded` run in the model's thread; an exception of theirs is kept as `failure`. clock: of waits in the queue."""
        self._load = load
        self._loaded = loaded
        self._limits = limits
        self._metrics = metrics
        self._window_seconds = window_seconds
        self._clock = clock
        self._model: ServedModel | None = None
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._waiting_texts = 0
        self._waiting_tokens = 0
        self._wanted_tokens = 1  # how many must wait before the thread is worth waking
        self._closed = False
        self._outstanding = 0
        self._draining = False
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def model(self) -> ServedModel | None:
        """The loaded model; None while it loads."""
        return self._model

    @property
    def ready(self) -> bool:
        """Whether texts are taken."""
        return self._model is not None and not self._draining

    @property
    def outstanding(self) -> int:
        """Requests taken and not answered."""
        return self._outstanding

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to load; answers are delivered to `loop`."""
        self._loop = loop
        self._thread.start()

    def drain(self) -> None:
        """Take no further texts; those taken are still answered, at once: nothing can join them."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        self._metrics.ready.set(0)

    def close(self, *, seconds: float) -> bool:
        """End the thread once the queue is empty; whether it ended within `seconds`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def submit(self, texts: Sequence[str], pairs: Sequence[str | None]) -> asyncio.Future[Answers]:
        """Queue the texts of a request (`pairs` of equal length); cancelling the future takes them out again.

        Raises:
            NotReadyError: while loading or draining. BusyError: if they do not fit; the future raises it too, after too long a wait.
        """
        if self._model is None or self._draining:
            raise NotReadyError("draining" if self._draining else "loading")
        assert self._loop is not None
        tokens = sum(_estimate(text, pair, self._model.max_length) for text, pair in zip(texts, pairs, strict=True))
        work = _Work(texts, pairs, tokens, self._loop.create_future(), self._clock())
        with self._changed:
            if self._waiting_texts + len(texts) > self._limits.queue_texts:
                raise BusyError
            self._append(work)
            if self._waiting_tokens >= self._wanted_tokens:
                self._changed.notify()
        self._outstanding += 1
        work.future.add_done_callback(lambda _: self._done(work))
        return work.future

    def _append(self, work: _Work) -> None:
        self._waiting.append(work)
        self._waiting_texts += len(work.texts)
        self._waiting_tokens += work.tokens
        self._metrics.queue_texts.set(self._waiting_texts)

    def _taken(self, work: _Work) -> None:
        self._waiting_texts -= len(work.texts)
        self._waiting_tokens -= work.tokens
        self._metrics.queue_texts.set(self._waiting_texts)

    def _done(self, work: _Work) -> None:
        self._outstanding -= 1
        if work.future.cancelled():
            with self._changed:
                if work in self._waiting:
                    self._waiting.remove(work)
                    self._taken(work)

    # Below: the model's thread.

    def _run(self) -> None:
        try:
            model = self._load()
            if self._draining:
                return
            self._loaded(model)
            self._model = model
        except BaseException as error:  # reported by the main thread, which ends the process
            self.failure = error
            return
        self._metrics.ready.set(int(not self._draining))
        while batch := self._take():
            self._compute(model, batch)

    def _take(self) -> list[_Work]:
        """The next requests, at least one; none when the queue was closed and is empty."""
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
        """Those to compute together, and those passed over that waited too long. Both may be empty: their clients may have gone away."""
        batch: list[_Work] = []
        expired: list[_Work] = []
        oldest = self._clock() - self._limits.wait_seconds
        tokens = 0
        while self._waiting and (not batch or tokens + self._waiting[0].tokens <= BATCH_TOKENS):
            work = self._waiting.popleft()
            self._taken(work)
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
            answers = model.answer(texts, pairs)
        except Exception as error:
            if len(batch) == 1:
                self._deliver([(batch[0], error)])
                return
            for work in batch:  # so that a request that the model cannot answer does not take its neighbours with it
                self._compute(model, [work])
            return
        self._metrics.computed(
            texts=len(texts), tokens=int(np.minimum(answers.lengths, model.max_length).sum()), seconds=time.perf_counter() - started
        )
        results: list[tuple[_Work, Answers | Exception]] = []
        start = 0
        for work in batch:
            part = slice(start, start + len(work.texts))
            results.append((work, Answers(answers.probabilities[part], answers.lengths[part])))
            start = part.stop
        self._deliver(results)

    def _deliver(self, results: Sequence[tuple[_Work, Answers | Exception]]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_settle, results)
        except RuntimeError:  # the loop was closed: the process ends, nobody waits any more
            return


def _settle(results: Sequence[tuple[_Work, Answers | Exception]]) -> None:
    for work, result in results:
        if work.future.done():  # its client went away while it was computed
            continue
        if isinstance(result, Answers):
            work.future.set_result(result)
        else:
            work.future.set_exception(result)


def _estimate(text: str, pair: str | None, longest: int) -> int:
    characters = len(text) + (0 if pair is None else len(pair))
    return min(longest, 3 + characters // CHARACTERS_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model says of the n texts of a request.

    probabilities: float32, (n, labels). lengths: tokens of each whole text with its special ones, before any was cut off, or words
    for a linear model; (n,).
    """

    probabilities: FloatArray
    lengths: IntArray


@dataclass(frozen=True, slots=True)
class ServedModel:
    """labels: in the order of the logits. max_length: tokens that it reads, `UNCUT` where it reads whole texts. answer: texts and their
    pairs (None: none) -> Answers.

    `answer` raises DivergedError if a logit is not finite.
    """

    labels: tuple[str, ...]
    max_length: int
    answer: Callable[[Sequence[str], Sequence[str | None]], Answers]

    @property
    def limit(self) -> str:
        """How much of a text it reads, in words."""
        return "whole texts" if self.max_length == UNCUT else f"{self.max_length} tokens per text"


def load_model(folder: Path, threads: int | None) -> ServedModel:
    """The model of a folder, for the thread that will use it (PyTorch's number of threads is a matter of each thread); warm.

    Raises:
        ArtifactError, EnvironmentFault: as `OnnxPredictor.load`, `LinearPredictor.load` and `load_classifier`.
    """
    from cramlm.inference.linear import LinearPredictor
    from cramlm.inference.onnx import GRAPH_FILE, OnnxPredictor

    if is_linear(folder):
        model = of_linear(LinearPredictor.load(folder))
    elif (folder / GRAPH_FILE).is_file():
        model = of_onnx(OnnxPredictor.load(folder, threads=threads))
    else:
        import torch

        from cramlm.model.huggingface.folder import load_classifier

        if threads is not None:
            torch.set_num_threads(threads)
        model = of_torch(load_classifier(folder))
    model.answer(["warm up"], [None])  # the first call is slow, and shows whether the model answers at all
    return model


def of_torch(loaded: LoadedModel) -> ServedModel:
    return ServedModel(tuple(loaded.labels), loaded.max_length, partial(answer, loaded))


def of_linear(predictor: LinearPredictor) -> ServedModel:
    def answer_linear(texts: Sequence[str], pairs: Sequence[str | None]) -> Answers:
        logits = predictor.logits(texts, pairs)
        return Answers(KINDS[predictor.kind].outputs(logits), predictor.lengths(texts, pairs))

    return ServedModel(predictor.labels, UNCUT, answer_linear)


def of_onnx(predictor: OnnxPredictor) -> ServedModel:
    from cramlm.inference.onnx import probabilities_of

    def answer_onnx(texts: Sequence[str], pairs: Sequence[str | None]) -> Answers:
        logits, lengths = predictor.compute(texts, pairs)
        full = np.flatnonzero(lengths == predictor.max_length).tolist()
        if full:  # cut, or exactly as long: only these are worth a second look
            lengths[full] = predictor.whole_lengths([texts[index] for index in full], [pairs[index] for index in full])
        return Answers(probabilities_of(logits), lengths)

    return ServedModel(predictor.labels, predictor.max_length, answer_onnx)


def answer(model: LoadedModel, texts: Sequence[str], pairs: Sequence[str | None]) -> Answers:
    """Compute texts as `Predictor` does.

    Raises:
        DivergedError: if a logit is not finite.
    """
    from cramlm.evaluation.evaluate import outputs_of, predict_logits, sequences_of_texts

    tokenizer, longest, prompt = model.tokenizer, model.max_length, model.model.prompt
    sequences = sequences_of_texts(tokenizer, texts, pairs, max_length=longest, prompt=prompt)
    logits = predict_logits(model.model, sequences, precision="fp32", pad_id=tokenizer.pad_id)
    lengths = sequences.lengths.reshape(len(texts), -1).max(axis=1)  # of a prompt's patterns the longest
    full = np.flatnonzero(lengths == longest).tolist()
    if full:  # cut, or exactly as long: only these are worth a second look
        asked, others = [texts[index] for index in full], [pairs[index] for index in full]
        whole = sequences_of_texts(tokenizer, asked, others, max_length=UNCUT, prompt=prompt).lengths
        lengths[full] = whole.reshape(len(full), -1).max(axis=1)
    return Answers(outputs_of(model.model.kind, logits), lengths)
