"""Where the heads of an encoder look: how many of them are positional, how many vertical, layer by layer.

For every token of every text, as a query, the place of its largest attention weight is looked at. A head is

    positional   if at least 90 % of these places are neighbours of the query, |i - j| = 1
    vertical     if more than 90 % of them hold [CLS], [SEP] or "."

Source: Yao et al. 2022, section on attention. All tokens are queries, special ones too. Scores are computed here from the queries and keys
that the layers themselves compute (softmax does not move the largest), so that any encoder of model/encoder.py will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cramlm.model.kernels.torch import Rotation
from cramlm.model.model import Model, PackedBatch
from cramlm.model.tokenizer import Tokenizer
from cramlm.training.packing import pack

POSITIONAL, VERTICAL = 0.9, 0.9
_ROWS = 16  # computed at once
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class HeadShares:
    """Shares of the queries, each (layers, heads): whose largest weight lies on a neighbour, and on [CLS], [SEP] or "."."""

    neighbour: _Floats
    special: _Floats
    queries: int

    @property
    def positional(self) -> npt.NDArray[np.bool_]:
        """Which heads are."""
        return self.neighbour >= POSITIONAL

    @property
    def vertical(self) -> npt.NDArray[np.bool_]:
        """Which heads are."""
        return self.special > VERTICAL


def head_shares(model: Model, tokenizer: Tokenizer, texts: Sequence[str], *, max_length: int) -> HeadShares:
    """Look at all heads over `texts`, each cut at `max_length` tokens; fp32."""
    sequences = tokenizer.sequences(texts, max_length=max_length, cut="truncate")
    telling = {tokenizer.cls_id, tokenizer.sep_id, *_full_stops(tokenizer)}
    looked = _Looked(torch.tensor(sorted(telling)))
    with _watched(model.encoder, looked), torch.no_grad():
        for start in range(0, len(sequences), _ROWS):
            chunk = np.arange(start, min(start + _ROWS, len(sequences)))
            batch = pack(
                [sequences[int(index)] for index in chunk],
                labels=chunk,
                external=np.zeros(len(chunk), dtype=np.bool_),
                row_length=max_length,
                pad_id=tokenizer.pad_id,
            )
            packed = PackedBatch.of(batch)
            looked.begin(packed)
            model.hidden(packed)
    return looked.shares()


@dataclass(slots=True)
class _Looked:
    """What has been counted so far. Layers are told apart by the order in which they compute, so one may be used several times."""

    telling: Tensor
    queries: int = 0
    layer: int = 0
    neighbour: list[Tensor] = field(default_factory=list)
    special: list[Tensor] = field(default_factory=list)
    batch: PackedBatch | None = None
    bias: Tensor | None = None
    rotation: Rotation | None = None

    def begin(self, batch: PackedBatch) -> None:
        self.batch, self.layer = batch, 0
        self.queries += int((batch.sequence >= 0).sum())

    def layer_begins(self, inputs: tuple[Any, ...]) -> None:
        """The bias (R, 1, L, L) and the rotation, if any, are among what a layer is given."""
        self.rotation = next((each for each in inputs if isinstance(each, Rotation)), None)
        self.bias = next(each for each in inputs if isinstance(each, Tensor) and each.dim() == 4 and each.shape[1] == 1)

    def projected(self, heads: int, qkv: Tensor) -> None:
        """Queries and keys of a layer are there: count."""
        assert self.batch is not None
        assert self.bias is not None
        rows, length, width = qkv.shape
        query, key, _ = qkv.float().view(rows, length, 3, heads, width // 3 // heads).unbind(2)
        if self.rotation is not None:
            query, key = _turned(query, self.rotation), _turned(key, self.rotation)
        scores = torch.einsum("rqhd,rkhd->rhqk", query, key) / (width // 3 // heads) ** 0.5 + self.bias
        best = scores.argmax(dim=-1)  # (R, H, L)
        real = (self.batch.sequence >= 0)[:, None, :]
        beside = ((best - torch.arange(length)).abs() == 1) & real
        there = self.batch.token_ids[:, None, :].expand(-1, heads, -1).gather(2, best)
        special = torch.isin(there, self.telling) & real
        if self.layer == len(self.neighbour):
            self.neighbour.append(torch.zeros(heads, dtype=torch.int64))
            self.special.append(torch.zeros(heads, dtype=torch.int64))
        self.neighbour[self.layer] += beside.sum(dim=(0, 2))
        self.special[self.layer] += special.sum(dim=(0, 2))
        self.layer += 1

    def shares(self) -> HeadShares:
        neighbour, special = (torch.stack(counts).numpy() / self.queries for counts in (self.neighbour, self.special))
        return HeadShares(neighbour, special, self.queries)


@contextmanager
def _watched(encoder: nn.Module, looked: _Looked) -> Iterator[None]:
    """Hooks on every layer that projects queries, keys and values by a matrix `qkv`, until the block ends."""
    hooks = []
    for layer in encoder.modules():
        projection = getattr(layer, "qkv", None)
        if isinstance(projection, nn.Module):
            heads = int(layer.heads)  # type: ignore[arg-type]
            hooks.append(layer.register_forward_pre_hook(lambda _, inputs: looked.layer_begins(inputs)))
            hooks.append(projection.register_forward_hook(lambda _, __, output, heads=heads: looked.projected(heads, output)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * rotation.cos - second * rotation.sin, second * rotation.cos + first * rotation.sin], dim=-1)


def _full_stops(tokenizer: Tokenizer) -> list[int]:
    """Every token that stands for a full stop, whatever marks a word's beginning or continuation."""
    return [number for number, token in enumerate(tokenizer.vocabulary) if token.removeprefix("##").lstrip("Ġ▁ ") == "."]
