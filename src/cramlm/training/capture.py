"""Forward and backward passes on a GPU as CUDA graphs.

A step of a small encoder is hundreds of kernels of some microseconds each. Launched from Python one at a time, they take longer to launch
than to run (docs/benchmarks/training.md). A CUDA graph is recorded once and launches all of them with one call; it repeats the same
operations on the same memory. Hence:

- Batches are padded to one of few shapes (`Shapes`), and copied into memory that belongs to the shape (`StaticBatch`).
- Numbers that change between steps are read from that memory: the counts that means are divided by, and the seed of dropout.
- Nothing reads a value back in between, and no shape depends on values. Prompts, experts and terms with a token head or a generator do
  not satisfy this; they run operation by operation.

The first batch of a shape runs operation by operation as well: libraries choose their algorithms and allocate work space then.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cramlm.config.phase import PhaseConfig
from cramlm.model.model import Model, PackedBatch, Precision
from cramlm.records import Batch
from cramlm.training.objective import Losses, dropout_of, losses_of, objective_of, summed
from cramlm.training.sequences import share_of_batch
from cramlm.training.terms.base import Counts, VocabularyTerm

_SHAPES: Final = 16  # graphs that are kept; each holds its gradients' work space
_MOST_PADDING: Final = 1.3  # size of a padded batch, relative to the batch
_ALIGNMENT: Final = 16  # bytes, of each array in the memory of a batch


def is_capturable(model: Model, phase: PhaseConfig) -> bool:
    """Return True if no operation of the phase's losses depends on values that the CPU would have to read."""
    terms = objective_of(phase).text_terms
    return model.prompt is None and model.encoder_config.shape != "moe" and all(isinstance(term, VocabularyTerm) for term in terms)


@contextmanager
def compiled_layers(model: Model, enabled: bool) -> Iterator[None]:
    """Inside the block, the operations of the encoder's layers are fused by torch.compile.

    They are compiled at their first use, for all layers and shapes at once, in half a minute (less if PyTorch's cache on disk has them).
    """
    layers = list(model.encoder.layers) if enabled else []
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


@contextmanager
def compiled_layers_unused(compiled: bool) -> Iterator[None]:
    """Inside the block, compiled layers run operation by operation: an evaluation has other shapes and no gradients, and would have them
    compiled again.
    """
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


class Shapes:
    """The numbers of rows and of masked positions that batches are padded to, as few as possible: recording a graph takes as long as dozens
    of steps.
    """

    def __init__(self) -> None:
        self._shapes: dict[Hashable, list[tuple[int, int]]] = {}

    def padded(self, kind: Hashable, rows: int, masked: int) -> tuple[int, int]:
        """Return the smallest shape so far that holds this one and is not much larger; without one, a new shape that is a little larger.

        kind: batches of different kinds share no shapes.
        """
        shapes = self._shapes.setdefault(kind, [])
        fits = [shape for shape in shapes if rows <= shape[0] <= _MOST_PADDING * rows and masked <= shape[1] <= _MOST_PADDING * masked]
        if not fits:
            fits = [(enlarged(rows), enlarged(masked))]
            shapes += fits
        return min(fits)


def enlarged(size: int) -> int:
    """Return a size that most batches sampled like this one fit: the relative spread of a sum of n terms falls as the root of n."""
    return size + math.ceil(math.sqrt(size))


def padded_to(batch: Batch, *, rows: int, masked: int, pad_id: int) -> Batch:
    """Return the batch with rows of padding and with masked positions in padding, whose losses have weight 0; there must be such a row."""
    assert rows > len(batch.token_ids)
    more_rows, more_masked = rows - len(batch.token_ids), masked - len(batch.masked)
    padding = batch.token_ids.size

    def extended(values: npt.NDArray[Any], count: int, value: float) -> npt.NDArray[Any]:
        return np.concatenate([values, np.full((count, *values.shape[1:]), value, dtype=values.dtype)])

    return replace(
        batch,
        token_ids=extended(batch.token_ids, more_rows, pad_id),
        sequence=extended(batch.sequence, more_rows, -1),
        position=extended(batch.position, more_rows, 0),
        masked=extended(batch.masked, more_masked, padding),
        mlm_labels=extended(batch.mlm_labels, more_masked, pad_id),
        chance=extended(batch.chance, more_masked, 0) if len(batch.chance) else batch.chance,
    )


class StaticBatch:
    """Memory of batches of one shape on a device. `fill` copies a batch and its counts there in one transfer.

    fills: the most calls of `fill` in a step.
    """

    def __init__(self, like: Batch, counts: Counts, device: torch.device, *, fills: int = 1) -> None:
        arrays = {**like.arrays, "counts": np.zeros(len(counts.numbers), dtype=np.float32)}
        slices: dict[str, tuple[slice, npt.NDArray[Any]]] = {}
        end = 0
        for name, array in arrays.items():
            slices[name] = slice(end, end + array.nbytes), array
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Of two steps: the copies of the last step may not have begun, because the device still computes the step before.
        self.hosts = [torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2 * fills)]
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._arrays = [
            {name: host.numpy()[part].view(array.dtype).reshape(array.shape) for name, (part, array) in slices.items()}
            for host in self.hosts
        ]
        tensors = {name: self._device[part].view(torch.from_numpy(array).dtype).view(array.shape) for name, (part, array) in slices.items()}
        divisors = tensors.pop("counts")
        self.batch = PackedBatch(**tensors, term=like.term)
        self.counts = Counts(counts.numbers, dict(zip(counts.numbers, divisors, strict=True)))

    def fill(self, batch: Batch, counts: Counts) -> None:
        """Copy a batch of this shape. The caller has waited for the work on the step before the last."""
        self.hosts.append(self.hosts.pop(0))
        self._arrays.append(self._arrays.pop(0))
        for name, array in self._arrays[0].items():
            array[...] = [max(count, 1) for count in counts.numbers.values()] if name == "counts" else getattr(batch, name)
        self._device.copy_(self.hosts[0], non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph, its input, and the losses it writes: their names, the total first, and their memory."""

    graph: Any
    inputs: StaticBatch
    names: tuple[str, ...]
    numbers: Tensor
    trained: frozenset[str]


class CapturedGradients:
    """Gradients of the batches of a phase, in memory that stays the same from step to step.

    A graph is recorded at the second batch of a shape. enabled: False = everything runs operation by operation. parts: how many parts a
    batch is computed in, one after the other; it doubles, for good, when the memory of the GPU does not suffice.
    """

    def __init__(self, model: Model, phase: PhaseConfig, *, precision: Precision, enabled: bool) -> None:
        self._model, self._phase, self._precision = model, phase, precision
        self._enabled = enabled and is_capturable(model, phase)
        self._recorded: OrderedDict[Hashable, _Recorded | None] = OrderedDict()
        self._gradients: dict[str, Tensor] = {}
        self._generator = torch.Generator(model.device) if model.device.type == "cuda" else None
        self._pool: Any = None
        self._shapes = Shapes()
        self.parts = 1

    def __call__(self, batch: Batch, counts: Counts, *, dropout_seed: int) -> Losses:
        """Set every parameter's `grad`, None for those without; return the losses, whose memory the next call does not change.

        Raises:
            torch.OutOfMemoryError: if the memory of the GPU does not suffice for a row.
        """
        while True:
            if self._generator is not None:
                self._generator.manual_seed(dropout_seed)
            try:
                return self._of_parts(batch, counts, dropout_seed)
            except torch.OutOfMemoryError:
                if 2 * self.parts > len(batch.token_ids):
                    raise
            # The error is gone here, and with it the tensors of the attempt.
            self.parts *= 2
            self._recorded.clear()
            if self._model.device.type == "cuda":
                torch.cuda.empty_cache()

    def _of_parts(self, batch: Batch, counts: Counts, seed: int) -> Losses:
        parts = [share_of_batch(batch, number, self.parts) for number in range(self.parts)]
        losses = [self._of_part(part, counts, seed, number=number) for number, part in enumerate(parts)]
        return losses[0] if len(losses) == 1 else summed(losses)

    def _of_part(self, batch: Batch, counts: Counts, seed: int, *, number: int) -> Losses:
        added = number > 0
        if not self._enabled:
            return self._one_by_one(PackedBatch.of(batch, self._model.device), counts, seed, added=added)
        kind = batch.term, len(batch.first), batch.token_ids.shape[1]
        rows, masked = self._shapes.padded(kind, len(batch.token_ids) + 1, len(batch.masked))
        batch = padded_to(batch, rows=rows, masked=masked, pad_id=self._model.pad_id)
        key = added, *_shape(batch, counts)
        if key not in self._recorded:
            self._recorded[key] = None
            if len(self._recorded) > _SHAPES:
                self._recorded.popitem(last=False)
            return self._one_by_one(PackedBatch.of(batch, self._model.device), counts, seed, added=added)
        self._recorded.move_to_end(key)
        recorded = self._recorded[key]
        if recorded is None:
            recorded = self._recorded[key] = self._record(batch, counts, seed, added=added)
        else:
            recorded.inputs.fill(batch, counts)
        recorded.graph.replay()
        for name, parameter in self._model.named_parameters():
            parameter.grad = self._gradients[name] if name in recorded.trained else None
        numbers = recorded.numbers.clone()  # another graph may use its memory
        return Losses(numbers[0], dict(zip(recorded.names[1:], numbers[1:], strict=True)))

    def _one_by_one(self, batch: PackedBatch, counts: Counts, seed: int, *, added: bool) -> Losses:
        losses = self._backward(batch, counts, seed)
        self._keep_gradients(added=added)
        return Losses(losses.total.detach(), losses.means)

    def _backward(self, batch: PackedBatch, counts: Counts, seed: int) -> Losses:
        for parameter in self._model.parameters():
            parameter.grad = None
        losses = losses_of(
            self._model, batch, self._phase, counts, self._precision, dropout_of(self._phase, seed, generator=self._generator)
        )
        losses.total.backward()  # type: ignore[no-untyped-call]
        return losses

    def _keep_gradients(self, *, added: bool) -> frozenset[str]:
        """Move the gradients into memory of their own, or add them to those of the parts before; return the names of the parameters that
        have one.
        """
        named = {name: parameter for name, parameter in self._model.named_parameters() if parameter.grad is not None}
        for name, parameter in named.items():
            if name not in self._gradients:
                self._gradients[name] = torch.zeros_like(parameter)
        kept = [self._gradients[name] for name in named]
        computed = [parameter.grad for parameter in named.values() if parameter.grad is not None]
        torch._foreach_add_(kept, computed) if added else torch._foreach_copy_(kept, computed)
        for parameter, gradient in zip(named.values(), kept, strict=True):
            parameter.grad = gradient
        return frozenset(named)

    def _record(self, batch: Batch, counts: Counts, seed: int, *, added: bool) -> _Recorded:
        device = self._model.device
        graph = torch.cuda.CUDAGraph()
        inputs = StaticBatch(batch, counts, device, fills=max(1, self.parts - 1))  # parts after the first share a graph
        inputs.fill(batch, counts)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._phase.dropout or self._phase.attention_dropout:
            graph.register_generator_state(self._generator)
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # other threads make batches meanwhile
            losses = self._backward(inputs.batch, inputs.counts, seed)
            trained = self._keep_gradients(added=added)
            numbers = torch.stack([losses.total.detach().float(), *(value.float() for value in losses.means.values())])
        return _Recorded(graph, inputs, ("loss", *losses.means), numbers, trained)


def _shape(batch: Batch, counts: Counts) -> tuple[Hashable, ...]:
    """Batches with equal values have the same operations on the same shapes."""
    shapes = tuple(array.shape for array in batch.arrays.values())
    return batch.term, shapes, tuple(name for name, count in counts.numbers.items() if count)


class CapturedUpdate:
    """A function of the gradients and the weights, as `Optimizer.step`, that runs operation by operation twice and then as a CUDA graph.

    It must use the same memory at every call. One graph for each set of parameters with gradients.
    """

    def __init__(self, update: Callable[[], Tensor], *, enabled: bool) -> None:
        self._update, self._enabled = update, enabled
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[Any, Tensor]] = {}

    def __call__(self, key: Hashable) -> Tensor:
        """Run it; `key` stands for the set of parameters that have gradients. Returns its result in memory of its own."""
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result.clone()
        self._calls[key] = self._calls.get(key, 0) + 1
        if not self._enabled or self._calls[key] <= 2:  # the first creates the optimizer's state
            return self._update()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = self._update()
        self._graphs[key] = graph, result
        graph.replay()
        return result.clone()
