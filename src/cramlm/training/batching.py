"""Batches as a function of (seed, phase, step): `Batches.batch(step)` does not depend on which batches were made before.

A pool (external or task) is an endless stream of sequence numbers, one permutation per epoch. A step takes the next numbers of its
streams, packs the sequences into rows and masks tokens. Only the permutation of the current epoch is stored between steps. With weights, an
epoch has the same length but contains a sequence of weight w (mean 1) floor(w) or ceil(w) times, w times on average.

Every random number is keyed by its purpose and by (seed, phase, step), so that no state of a generator is stored or replayed.

The number of sequences in a step is fixed from the pools' mean lengths, so a step holds about `batch_size` tokens, not exactly. In
exchange the sequences of a step are found by arithmetic, and resuming costs nothing.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from cramlm.config.phase import PhaseConfig
from cramlm.config.terms import Origin
from cramlm.errors import DataError
from cramlm.records import Batch, FloatArray, IntArray
from cramlm.training.masking import SpecialIds
from cramlm.training.objective import objective_of
from cramlm.training.sequences import TokenPool
from cramlm.training.terms.base import Sampled, token_values_of


class Stream:
    """One pool as an endless sequence of epochs, each in its own order."""

    def __init__(self, pool: TokenPool, origin: Origin, *, seed: int, phase_index: int) -> None:
        self.pool, self.origin = pool, origin
        self._seed, self._phase_index = seed, phase_index
        self._epochs: dict[int, IntArray] = {}

    def indices(self, numbers: range) -> IntArray:
        """Indices into the pool of consecutive sequence numbers."""
        size, number, pieces = len(self.pool), numbers.start, []
        while number < numbers.stop:
            epoch, within = divmod(number, size)
            count = min(size - within, numbers.stop - number)
            pieces.append(self._order(epoch)[within : within + count])
            number += count
        return np.concatenate(pieces)

    def _order(self, epoch: int) -> IntArray:
        if epoch not in self._epochs:
            if len(self._epochs) > 1:  # a batch may straddle two epochs; older ones are not needed
                del self._epochs[next(iter(self._epochs))]
            rng = generator(self._seed, phase_index=self._phase_index, purpose=f"order of {self.origin}", index=epoch)
            weights = self.pool.weights
            self._epochs[epoch] = rng.permutation(len(self.pool) if weights is None else _resampled(weights, rng))
        return self._epochs[epoch]


def _resampled(weights: FloatArray, rng: np.random.Generator) -> IntArray:
    """As many indices as there are weights, each in proportion to its weight: systematic resampling from one uniform number."""
    ends = np.cumsum(weights, dtype=np.float64)
    ends *= len(ends) / ends[-1]
    ends[-1] = len(ends)
    reached = np.floor(ends + rng.random()).astype(np.int64)
    return np.repeat(np.arange(len(weights)), np.concatenate([reached[:1], reached[1:] - reached[:-1]]))


class Batches:
    """The batches of one phase.

    interleaved: a cycle is `external` batches of external text, then `task` batches of task text. blended: every batch holds both, in the
    ratio external : task of tokens (from mean lengths, rounded to whole sequences, at least one of each).

    Raises:
        DataError: if a pool that the phase samples from is absent or empty.
    """

    def __init__(
        self,
        phase: PhaseConfig,
        external: TokenPool | None,
        task: TokenPool | None,
        *,
        seed: int,
        phase_index: int,
        special: SpecialIds,
    ) -> None:
        self.phase, self.special = phase, special
        self.seed, self.phase_index = seed, phase_index
        self._streams: dict[Origin, Stream] = {}
        pools: list[tuple[Origin, TokenPool | None, int]] = [("external", external, phase.external), ("task", task, phase.task)]
        for origin, pool, ratio in pools:
            if ratio == 0:
                continue
            if pool is None or len(pool) == 0:
                raise DataError(f"phase {phase.name!r} samples {origin} text but there is none; pass some or set phases.{origin} = 0")
            self._streams[origin] = Stream(pool, origin, seed=seed, phase_index=phase_index)
        self._per_step = self._counts()
        soft_labels = [stream.pool.soft_labels for stream in self._streams.values() if stream.pool.soft_labels is not None]
        self._classes = soft_labels[0].shape[1] if soft_labels else 0
        self._outputs = task.targets.shape[1] if task is not None and task.targets is not None else 0

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, with the masks of its text term. A few milliseconds for 4,096 tokens."""
        sequences: list[npt.NDArray[Any]] = []
        labels, external, soft_labels, targets = [], [], [], []
        token_values: list[npt.NDArray[Any]] = []
        for origin, numbers in self.sequence_numbers(step).items():
            stream = self._streams[origin]
            indices = stream.indices(numbers)
            sequences += [stream.pool.sequence(int(index)) for index in indices]
            labels.append(stream.pool.labels[indices] if origin == "task" else np.full(len(indices), -1, dtype=np.int64))
            external.append(np.full(len(indices), origin == "external"))
            soft = stream.pool.soft_labels
            soft_labels.append(np.full((len(indices), self._classes), np.nan, dtype=np.float32) if soft is None else soft[indices])
            own = stream.pool.targets
            targets.append(np.zeros((len(indices), self._outputs), dtype=np.float32) if own is None else own[indices])
            token_values += [each for index in indices if (each := token_values_of(self.phase, stream.pool, int(index))) is not None]
        parts = (np.concatenate(labels), np.concatenate(external), np.concatenate(soft_labels), np.concatenate(targets))
        sampled, random = Sampled(sequences, token_values, *parts), functools.partial(self._generator, index=step)
        return objective_of(self.phase).batch(sampled, self.special, step=step, random=random)

    def _generator(self, purpose: str, *, index: int) -> np.random.Generator:
        return generator(self.seed, phase_index=self.phase_index, purpose=purpose, index=index)

    def sequence_numbers(self, step: int) -> dict[Origin, range]:
        """Return the sequence numbers of a step in each stream, by origin."""
        if self.phase.mixing == "blended":
            return {origin: range(step * count, (step + 1) * count) for origin, count in self._per_step.items()}
        cycle, within = divmod(step, self.phase.external + self.phase.task)
        origin: Origin = "external" if within < self.phase.external else "task"
        turn = cycle * self.phase.external + within if origin == "external" else cycle * self.phase.task + within - self.phase.external
        count = self._per_step[origin]
        return {origin: range(turn * count, (turn + 1) * count)}

    def _tokens_read(self, origin: Origin) -> float:
        """Mean tokens of a sequence in a batch, as its text term arranges it."""
        random = functools.partial(self._generator, index=0)
        return objective_of(self.phase).tokens_read(self._streams[origin].pool, origin, self.special, random=random)

    def _counts(self) -> dict[Origin, int]:
        """Sequences of each origin in a step that samples from it."""
        phase, size = self.phase, float(self.phase.batch_size)
        lengths = {origin: self._tokens_read(origin) for origin in self._streams}
        if phase.mixing == "interleaved" or len(lengths) == 1:
            return {origin: max(1, round(size / length if phase.batch_unit == "tokens" else size)) for origin, length in lengths.items()}
        shares = {"external": phase.external, "task": phase.task}
        # Sequences of each origin per token of the batch, so that their tokens are in the ratio of the shares.
        density = {origin: shares[origin] / (phase.external + phase.task) / length for origin, length in lengths.items()}
        if phase.batch_unit == "tokens":
            return {origin: max(1, round(size * each)) for origin, each in density.items()}
        task = min(max(1, round(size * density["task"] / sum(density.values()))), max(1, phase.batch_size - 1))
        return {"external": max(1, phase.batch_size - task), "task": task}


def derived_key(seed: int, *, phase_index: int, purpose: str, index: int) -> int:
    """Return a 128-bit number that differs for every combination of arguments, equal on all machines and Pythons (sha256, not `hash`)."""
    name = f"cramlm/{seed}/{phase_index}/{purpose}/{index}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")


def generator(seed: int, *, phase_index: int, purpose: str, index: int) -> np.random.Generator:
    """numpy's counter-based generator (Philox) under that key; about 20 microseconds to make."""
    return np.random.Generator(np.random.Philox(key=derived_key(seed, phase_index=phase_index, purpose=purpose, index=index)))


def torch_seed(seed: int, *, phase_index: int, purpose: str, index: int) -> int:
    """Return the same key for `torch.manual_seed`, cut to the 63 bits it takes."""
    return derived_key(seed, phase_index=phase_index, purpose=purpose, index=index) & (2**63 - 1)
