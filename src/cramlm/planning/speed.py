"""The training speed of this machine and the memory of a training step, measured on real updates with random text.

The machine may be busy. Waiting threads spin, so a second process on the same cores can make two threads a hundred times slower than one
(171 tokens per second, where one thread reached 13,000). The number of threads is therefore chosen in two steps: a chain of small
operations shows in a few tenths of a second whether more threads help at all; the remaining numbers run real updates in short windows. The
fastest window of each is compared, because disturbances only make a window slower.

The memory of a step is the peak of resident memory during these updates less what remains after the model is freed; what the process keeps
from its first step on (compiled kernels, libraries) is not part of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from cramlm.config.head import HeadConfig
from cramlm.config.phase import PhaseConfig
from cramlm.config.run import EncoderConfig
from cramlm.io.machine import available_cores, peak_memory, reset_peak_memory, resident_memory, trim_memory
from cramlm.model.model import CPU, Model, ModelSpec, Precision, build_model, empty_model
from cramlm.records import IntArray
from cramlm.storage.arrays import offsets_of
from cramlm.training.batching import Batches, generator
from cramlm.training.loop import Updater, deterministic
from cramlm.training.masking import SpecialIds
from cramlm.training.objective import count_parameters, executed_flops
from cramlm.training.sequences import TokenPool

STARVED = 0.7  # share of the CPU time that the threads could use; two undisturbed threads get 0.7 to 1
_WORTH_IT = 1.15  # speed-up of the small operations from which a number of threads is tried on updates
_PROBE_SECONDS = 0.1
_COUNTED = 20  # batches whose operations are counted
_LABELS = 8
_STEP_BYTES: Final[Mapping[Precision, int]] = {"bf16": 32, "fp32": 60}
_DTYPES: Final[Mapping[Precision, torch.dtype]] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PRODUCTS_SECONDS = 0.2
_PRODUCTS_SHARE = 0.75  # of the speed of matrix products that training reaches
_MEMORY_FACTOR = 1.4  # of the least memory of a step
_FACTOR = 1e-3  # of the learning rates: too small to diverge


@dataclass(frozen=True, slots=True)
class Measurement:
    """The training speed of a phase on this machine.

    tokens_per_second: tokens without padding, in the fastest window. cpu_share: of that window.
    flops_per_token: executed operations per token. bytes: memory of a training step, model included; None if the system does not report
    it. rough: estimated from matrix products, no update was run.
    """

    tokens_per_second: float
    threads: int
    cpu_share: float
    flops_per_token: float
    bytes: int | None
    rough: bool = False

    @property
    def starved(self) -> bool:
        """True if other processes took so much CPU time that the measured speed is not that of this machine."""
        return self.cpu_share < STARVED


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSetup:
    """A phase and a model to measure. lengths: tokens of the sequences; None = mixed, a quarter to a whole row. device: where it trains."""

    encoder: EncoderConfig
    head: HeadConfig
    phase: PhaseConfig
    vocab_size: int
    precision: Precision
    lengths: IntArray | None = None
    device: torch.device = CPU


def measure(setup: TrainingSetup, *, threads: Sequence[int], seconds: float = 3.0) -> Measurement:
    """Run real updates on random sequences for about `seconds`, longer if a step takes longer.

    threads: the numbers of threads to choose from, fewest first. Seeds torch's global generator; the number of threads is restored.
    """
    _reset_peak(setup.device)
    with deterministic(setup.device), restored_threads():
        trial = _Trial(setup)
        candidates = _worthwhile(threads)
        torch.set_num_threads(candidates[0])
        first = trial.window(0.0)  # allocates, compiles kernels
        window = seconds / (3 * len(candidates))
        best: dict[int, _Window] = {}
        ends = time.perf_counter() + seconds - first.seconds
        while not best or time.perf_counter() < ends:
            for count in candidates:
                torch.set_num_threads(count)
                current = trial.window(window)
                best[count] = max(best.get(count, current), current, key=lambda each: each.rate)
        count = max(best, key=lambda each: best[each].rate)
        flops_per_token = _flops_per_token(trial.model, trial.batches, setup.phase)
    del trial
    share = cpu_share(best[count].cpu_seconds, best[count].seconds, count) if setup.device.type == "cpu" else 1.0
    return Measurement(best[count].rate, count, share, flops_per_token, _step_memory(setup.device))


def cpu_share(cpu_seconds: float, seconds: float, threads: int) -> float:
    """CPU time over the CPU time that so many threads could use: wall time x threads, or x cores if there are fewer."""
    return cpu_seconds / (seconds * min(threads, available_cores()))


def estimate(setup: TrainingSetup, *, threads: Sequence[int]) -> Measurement:
    """Estimate the speed on a CPU from matrix products of the encoder's shape, in some tenths of a second; no update is run.

    Steps of BERT-base in fp32 (tlm-small, one thread, 16 texts) ran at 0.74 of the operations per second of its products (4 texts: 0.58 to
    0.71), and took 1.1 to 1.7 times the least memory: a factor of about 1.5 in both. threads: the numbers to choose from.
    """
    hidden, columns = setup.encoder.hidden, setup.encoder.intermediate
    matrix, weights = (torch.ones(shape, dtype=_DTYPES[setup.precision]) for shape in ((1024, hidden), (hidden, columns)))
    rates: dict[int, tuple[float, float]] = {}
    with restored_threads():
        for count in threads:
            torch.set_num_threads(count)
            matrix @ weights  # starts threads
            began, cpu, done = time.perf_counter(), time.process_time(), 0
            while not done or time.perf_counter() - began < _PRODUCTS_SECONDS:
                matrix @ weights
                done += 1
            seconds = time.perf_counter() - began
            rates[count] = 2.0 * 1024 * hidden * columns * done / seconds, cpu_share(time.process_time() - cpu, seconds, count)
    count = max(rates, key=lambda each: rates[each][0])
    rate, share = rates[count]
    flops_per_token, held = count_flops(setup), round(_MEMORY_FACTOR * least_step_memory(setup))
    return Measurement(_PRODUCTS_SHARE * rate / flops_per_token, count, share, flops_per_token, held, rough=True)


def count_step(setup: TrainingSetup) -> tuple[float, int | None]:
    """`flops_per_token` and `bytes` of a `Measurement`; one update is run."""
    _reset_peak(setup.device)
    with deterministic(setup.device):
        trial = _Trial(setup)
        trial.window(0.0)
        flops_per_token = _flops_per_token(trial.model, trial.batches, setup.phase)
    del trial
    return flops_per_token, _step_memory(setup.device)


def count_flops(setup: TrainingSetup) -> float:
    """`flops_per_token` of a `Measurement`; no update is run, and no weights are made."""
    model = empty_model(ModelSpec(setup.encoder, setup.head, vocab_size=setup.vocab_size, labels=_LABELS))
    return _flops_per_token(model, random_batches(setup), setup.phase)


def least_step_memory(setup: TrainingSetup) -> int:
    """Bytes that a training step on a CPU takes at least, so that one that cannot fit is not tried.

    Weights and one state of the optimizer, 8 bytes a parameter, and `_STEP_BYTES` for each token, layer and hidden unit of a batch. Steps
    of mini to base and of BERT's shape with 2,048 to 16,384 tokens took 1.1 to 1.5 times as much in bf16 and 1.1 to 1.7 times in fp32.
    """
    phase, encoder = setup.phase, setup.encoder
    parameters = count_parameters(empty_model(ModelSpec(encoder, setup.head, vocab_size=setup.vocab_size, labels=_LABELS)))
    return 8 * parameters + _STEP_BYTES[setup.precision] * step_tokens(phase) * encoder.layers * encoder.hidden


def step_tokens(phase: PhaseConfig) -> int:
    """Return the tokens of a step on random text of mixed lengths (`random_pool`)."""
    return phase.batch_size if phase.batch_unit == "tokens" else phase.batch_size * phase.row_length * 5 // 8


def _reset_peak(device: torch.device) -> None:
    reset_peak_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _step_memory(device: torch.device) -> int | None:
    """Peak of resident memory less what remains, in bytes; of a GPU the peak of its allocated memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = peak_memory()
    trim_memory()
    rest = resident_memory()
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
    """A model in training on random text."""

    def __init__(self, setup: TrainingSetup) -> None:
        spec = ModelSpec(setup.encoder, setup.head, vocab_size=setup.vocab_size, labels=_LABELS)
        self.model = build_model(spec, seed=0).to(setup.device)
        self.batches = random_batches(setup)
        self._updater = Updater(self.model, setup.phase, precision=setup.precision)
        self._step = 0

    def window(self, seconds: float) -> _Window:
        """Run updates until `seconds` are over, at least one."""
        wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
        while True:
            batch = self.batches.batch(self._step)
            self._updater.update(batch, step=self._step, factor=_FACTOR, dropout_seed=0)
            self._step += 1
            tokens += batch.tokens
            elapsed = time.perf_counter() - wall
            if elapsed >= seconds:
                return _Window(tokens, elapsed, time.process_time() - cpu)


def random_batches(setup: TrainingSetup) -> Batches:
    """Batches of random sequences."""
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4, vocab_size=setup.vocab_size)
    external, task = (random_pool(setup.phase, special, origin, setup.lengths) for origin in ("external", "task"))
    return Batches(setup.phase, external, task, seed=0, phase_index=0, special=special)


def _flops_per_token(model: Model, batches: Batches, phase: PhaseConfig) -> float:
    """Return operations per token over a fixed number of batches, so that a plan by operations does not depend on the measured speed."""
    flops, tokens = 0.0, 0
    for step in range(_COUNTED):  # one at a time: batches held here would count as memory of training
        batch = batches.batch(step)
        flops += executed_flops(model, batch, phase)
        tokens += batch.tokens
    return flops / tokens


def _worthwhile(threads: Sequence[int]) -> list[int]:
    """Return the fewest threads, and the numbers with which small operations are clearly faster."""
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
    return [count for index, count in enumerate(threads) if index == 0 or rates[count] > _WORTH_IT * rates[threads[0]]]


@contextmanager
def restored_threads() -> Iterator[None]:
    """Restore PyTorch's number of threads at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_pool(phase: PhaseConfig, special: SpecialIds, origin: str, lengths: IntArray | None) -> TokenPool:
    """Random tokens in sequences of the given lengths, truncated to a row, with [CLS] and [SEP]."""
    rng = generator(0, phase_index=0, purpose=f"trial {origin}", index=0)
    if lengths is None or origin == "external":  # external text is cut into pieces that nearly fill a row
        lengths = rng.integers(max(3, phase.text_length // (4 if lengths is None else 2)), phase.text_length + 1, size=1000)
    else:
        lengths = np.clip(rng.choice(lengths, size=1000), 3, phase.text_length)
    offsets = offsets_of(lengths)
    ids = rng.integers(len(special.all), special.vocab_size, size=offsets[-1]).astype(np.uint32)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = special.cls, special.sep
    uniform = rng.random(len(ids), dtype=np.float32)
    labels, token_labels = rng.integers(0, _LABELS, size=len(lengths)), np.uint8(1) + (uniform < 0.2)
    return TokenPool(ids, offsets, labels, begins=uniform < 0.7, token_labels=token_labels, scores=uniform - np.float32(0.5))
