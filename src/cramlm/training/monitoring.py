"""What training says about itself while it runs: means over the steps since the last report, speed, and sudden jumps of the loss.

Nothing here flows back into training: a phase that goes on from a checkpoint may report other windows, and ends with the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from cramlm.records import Emit, Event
from cramlm.training.update import Update

REPORTS = 100  # "step" events in a phase
PROGRESS_SECONDS = 0.5  # least time between "progress" events
SPIKE_SIGMAS = 6.0
_SPIKE_HISTORY = 50  # steps of one kind before jumps are judged
_SPIKE_MEMORY = 0.98


class Monitor:
    """Gathers updates and emits events; one per phase and start."""

    def __init__(self, stage: str, steps: int, *, emit: Emit) -> None:
        self._stage, self._steps, self._emit = stage, steps, emit
        self._every = max(1, steps // REPORTS)
        self._spikes: dict[str, _LossHistory] = {}
        self._told = 0.0
        self._sums: dict[str, tuple[float, int]] = {}
        self._tokens, self._norm, self._since = 0, 0.0, time.perf_counter()

    def saw(self, step: int, update: Update, *, tokens: int, learning_rates: Mapping[str, float]) -> None:
        """One update at `step` (0-based) of `tokens` real tokens."""
        terms = update.losses.terms()
        for name, value in terms.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
        self._tokens += tokens
        self._norm = max(self._norm, update.gradient_norm)
        kind = "+".join(name for name in terms if name != "loss")
        if (jump := self._spikes.setdefault(kind, _LossHistory()).judge(terms["loss"])) is not None:
            self._emit(
                Event(
                    "warning",
                    self._stage,
                    f"step {step}: the loss jumped to {terms['loss']:.3f}, {jump:.0f} sigma above its recent mean",
                    data={"step": step, "loss": terms["loss"], "sigmas": jump},
                )
            )
        now = time.perf_counter()
        done = step + 1
        if done % self._every == 0 or done == self._steps:
            self._report(done, learning_rates, seconds=now - self._since)
        if now - self._told >= PROGRESS_SECONDS or done == self._steps:
            self._told = now
            self._emit(Event("progress", self._stage, done=done, total=self._steps, unit="steps"))

    def _report(self, done: int, learning_rates: Mapping[str, float], *, seconds: float) -> None:
        data: dict[str, Any] = {
            "step": done,
            **{name: total / count for name, (total, count) in self._sums.items()},
            "learning_rate": dict(learning_rates),
            "largest_gradient_norm": self._norm,
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / max(seconds, 1e-9),
        }
        self._emit(Event("step", self._stage, done=done, total=self._steps, unit="steps", data=data))
        self._sums = {}
        self._tokens, self._norm, self._since = 0, 0.0, time.perf_counter()


class _LossHistory:
    """Running mean and variance of the losses of one kind of batch, with exponential forgetting."""

    def __init__(self) -> None:
        self._mean, self._variance, self._seen = 0.0, 0.0, 0

    def judge(self, loss: float) -> float | None:
        """How many sigmas above the mean, if that is a jump; then remember the loss."""
        deviation = loss - self._mean if self._seen else 0.0
        sigmas = deviation / math.sqrt(self._variance) if self._variance > 0 else 0.0
        jumped = self._seen >= _SPIKE_HISTORY and sigmas > SPIKE_SIGMAS
        if self._seen == 0:
            self._mean = loss
        self._mean += (1 - _SPIKE_MEMORY) * deviation
        self._variance = _SPIKE_MEMORY * (self._variance + (1 - _SPIKE_MEMORY) * deviation * deviation)
        self._seen += 1
        return sigmas if jumped else None
