"""How fast this machine trains, from real updates before any text is read, and how much memory a step holds.

A busy machine is the usual one. Threads that wait for one another spin, so that a second process on the same cores can make two threads
a hundred times slower than one (171 tokens a second where one thread made 13,000). Hence, in this order: a chain of small operations
tells in a few tenths of a second whether more threads pay at all; real updates run in short windows with every thread count that is
left; the best window of each counts, because what disturbs a window only ever makes it slower; the faster count wins.

What a step needs in memory is measured on the same updates, as the difference between the most that was resident while they ran and
what stays when their model is gone: what the process keeps from its first step on (compiled kernels, libraries) is not counted in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from cramlm.config.run import EncoderConfig, HeadConfig, PhaseConfig
from cramlm.model.device import Precision
from cramlm.model.model import ModelSpec, build_model
from cramlm.records import IntArray
from cramlm.training import memory
from cramlm.training.batching import Batches, generator
from cramlm.training.flops import executed_flops
from cramlm.training.loop import Updater, deterministic
from cramlm.training.masking import SpecialIds
from cramlm.training.pools import TokenPool

STARVED = 0.7  # share of the CPU time that the threads could have had; two undisturbed threads get 0.7 to 1
_WORTH_IT = 1.15  # what more threads must gain in the chain of small operations to be tried on updates
_PROBE_SECONDS = 0.1
_COUNTED = 20  # batches whose operations are counted
_LABELS = 8
_FACTOR = 1e-3  # of the learning rates: too small to diverge


@dataclass(frozen=True, slots=True)
class Measurement:
    """A phase as it trains on this machine.

    tokens_per_second: real tokens, in the best window. threads: that were used. cpu_share: CPU time of that window over wall time x
    threads. flops_per_token: executed operations per real token. bytes: memory of the model in training, the step with all it holds; None
    where the system does not tell.
    """

    tokens_per_second: float
    threads: int
    cpu_share: float
    flops_per_token: float
    bytes: int | None

    @property
    def starved(self) -> bool:
        """Whether other work took so much that the speed says little about this machine."""
        return self.cpu_share < STARVED


def measure(
    encoder: EncoderConfig,
    head: HeadConfig,
    phase: PhaseConfig,
    *,
    vocab_size: int,
    precision: Precision,
    threads: Sequence[int],
    seconds: float = 3.0,
    lengths: IntArray | None = None,
) -> Measurement:
    """Run real updates of `phase`, on a model of that size and made-up sequences, for about `seconds`; more where a step takes that long.

    threads: the counts to choose among, fewest first. lengths: tokens of the sequences; None = mixed, a quarter to a whole row.
    Seeds torch's global generator; the number of threads is as before afterwards.
    """
    memory.reset_peak()
    with deterministic(), _thread_count_kept():
        trial = _Trial(encoder, head, phase, vocab_size=vocab_size, precision=precision, lengths=lengths)
        candidates = _worthwhile(threads)
        torch.set_num_threads(candidates[0])
        first = trial.window(0.0)  # allocates, compiles kernels
        window = seconds / (3 * len(candidates))
        best: dict[int, _Window] = {}
        ends = time.perf_counter() + seconds - first.seconds
        while not best or time.perf_counter() < ends:
            for count in candidates:
                torch.set_num_threads(count)
                seen = trial.window(window)
                best[count] = max(best.get(count, seen), seen, key=lambda each: each.rate)
        count = max(best, key=lambda each: best[each].rate)
        flops_per_token = trial.flops_per_token
    del trial
    share = best[count].cpu_seconds / (best[count].seconds * count)
    return Measurement(best[count].rate, count, share, flops_per_token, _taken())


def count_step(
    encoder: EncoderConfig,
    head: HeadConfig,
    phase: PhaseConfig,
    *,
    vocab_size: int,
    precision: Precision,
    lengths: IntArray | None = None,
) -> tuple[float, int | None]:
    """`flops_per_token` and `bytes` of a `Measurement`; one update is run."""
    memory.reset_peak()
    with deterministic():
        trial = _Trial(encoder, head, phase, vocab_size=vocab_size, precision=precision, lengths=lengths)
        trial.window(0.0)
        flops_per_token = trial.flops_per_token
    del trial
    return flops_per_token, _taken()


def _taken() -> int | None:
    """The most that was resident since the peak was forgotten, less what stays."""
    most = memory.peak_resident()
    memory.trim()
    rest = memory.resident()
    return None if most is None or rest is None else max(0, most - rest)


@dataclass(frozen=True, slots=True)
class _Window:
    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class _Trial:
    """A model under training on made-up text."""

    def __init__(
        self,
        encoder: EncoderConfig,
        head: HeadConfig,
        phase: PhaseConfig,
        *,
        vocab_size: int,
        precision: Precision,
        lengths: IntArray | None,
    ) -> None:
        special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4, vocab_size=vocab_size)
        pools = [_made_up_pool(phase, special, origin, lengths) for origin in ("external", "task")]
        self._phase = phase
        self._model = build_model(ModelSpec(encoder, head, vocab_size=vocab_size, labels=_LABELS), seed=0)
        self._batches = Batches(phase, pools[0], pools[1], seed=0, phase_index=0, special=special)
        self._updater = Updater(self._model, phase, precision=precision)
        self._step = 0

    def window(self, seconds: float) -> _Window:
        """At least one update, until `seconds` are over."""
        wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
        while True:
            batch = self._batches.batch(self._step)
            self._updater.update(batch, step=self._step, factor=_FACTOR, dropout_seed=0)
            self._step += 1
            tokens += batch.tokens
            elapsed = time.perf_counter() - wall
            if elapsed >= seconds:
                return _Window(tokens, elapsed, time.process_time() - cpu)

    @property
    def flops_per_token(self) -> float:
        """Over the same batches however many the windows held: a plan by operations does not depend on the speed of the moment."""
        flops, tokens = 0.0, 0
        for step in range(_COUNTED):  # one at a time: what is held here would be taken for what training needs
            batch = self._batches.batch(step)
            flops += executed_flops(self._model, batch, self._phase)
            tokens += batch.tokens
        return flops / tokens


def _worthwhile(threads: Sequence[int]) -> list[int]:
    """The counts that a chain of small operations runs clearly faster with than with the fewest; the fewest always."""
    matrix, weights = torch.zeros(1024, 256), torch.zeros(256, 256)
    rates = dict.fromkeys(threads, 0.0)
    if len(threads) > 1:
        for _ in range(3):
            for count in threads:
                torch.set_num_threads(count)
                done, began = 0, time.perf_counter()
                while (elapsed := time.perf_counter() - began) < _PROBE_SECONDS or not done:
                    matrix = (matrix @ weights).add_(1.0).relu_()
                    done += 1
                rates[count] = max(rates[count], done / elapsed)
    return [count for place, count in enumerate(threads) if place == 0 or rates[count] > _WORTH_IT * rates[threads[0]]]


@contextmanager
def _thread_count_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _made_up_pool(phase: PhaseConfig, special: SpecialIds, origin: str, lengths: IntArray | None) -> TokenPool:
    """Random tokens in sequences of the lengths given (cut to a row), [CLS] first and [SEP] last."""
    rng = generator(0, phase_index=0, purpose=f"trial {origin}", index=0)
    if lengths is None or origin == "external":  # external text is cut into pieces that nearly fill a row
        lengths = rng.integers(max(3, phase.text_length // (4 if lengths is None else 2)), phase.text_length + 1, size=1000)
    else:
        lengths = np.clip(rng.choice(lengths, size=1000), 3, phase.text_length)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(len(special.all), special.vocab_size, size=offsets[-1]).astype(np.uint32)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = special.cls, special.sep
    chance = rng.random(len(ids), dtype=np.float32)
    labels, marks = rng.integers(0, _LABELS, size=len(lengths)), np.uint8(1) + (chance < 0.2)
    return TokenPool(ids, offsets, labels, begins=chance < 0.7, token_labels=marks, scores=chance - np.float32(0.5))
