"""Count the positional and the vertical attention heads of encoders, layer by layer; as a table, a plot and JSON.

For every token as a query, take the position of its largest attention weight. A head is

    positional   if at least 90 % of these positions are neighbours of the query, |i - j| = 1
    vertical     if more than 90 % of them hold [CLS], [SEP] or "."

Source: Yao et al. 2022, section on attention. All tokens are queries, special tokens too. Attention scores are computed from the queries
and keys of the layers (softmax keeps the maximum), for every encoder of model/encoder.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cramlm.inference.folders import ENCODERS, model_of
from cramlm.model.huggingface.pretrained import open_pretrained
from cramlm.model.huggingface.weights import load_pretrained_weights
from cramlm.model.model import Model, ModelSpec, PackedBatch, build_model
from cramlm.model.operations import Rotation
from cramlm.model.tokenizer import Tokenizer
from cramlm.records import Emit, Event, Example
from cramlm.reporting.charts import Bars, bar_panels
from cramlm.reporting.comparison import names_of
from cramlm.storage.artifacts import publish_file
from cramlm.training.sequences import pack

TABLE, PLOT, DATA = FILES = "heads.md", "heads.svg", "heads.json"
POSITIONAL, VERTICAL = 0.9, 0.9
_ROWS = 16  # computed at once
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class HeadShares:
    """Shares of the queries whose largest weight is on a neighbour, and on [CLS], [SEP] or "."; each (layers, heads)."""

    neighbour: _Floats
    special: _Floats
    queries: int

    @property
    def positional(self) -> npt.NDArray[np.bool_]:
        """True for positional heads, (layers, heads)."""
        return self.neighbour >= POSITIONAL

    @property
    def vertical(self) -> npt.NDArray[np.bool_]:
        """True for vertical heads, (layers, heads)."""
        return self.special > VERTICAL


def head_shares(model: Model, tokenizer: Tokenizer, examples: Sequence[Example], *, max_length: int) -> HeadShares:
    """Return the shares of all heads over the texts or pairs, each truncated to `max_length` tokens; computed in fp32."""
    texts, pairs = [example.text for example in examples], [example.text_pair for example in examples]
    sequences = tokenizer.sequences(texts, pairs, max_length=max_length, cut="truncate")
    special_ids = {tokenizer.cls_id, tokenizer.sep_id, *_full_stops(tokenizer)}
    counts = _Counts(torch.tensor(sorted(special_ids)))
    with _hooked(model.encoder, counts), torch.no_grad():
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
            counts.begin(packed)
            model.hidden(packed)
    return counts.shares()


@dataclass(slots=True)
class _Counts:
    """Counts so far. Layers are numbered in the order in which they run, so a module may run several times."""

    special_ids: Tensor
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
        """Take the attention bias (R, 1, L, L) and the rotation, if any, from the inputs of a layer."""
        self.rotation = next((each for each in inputs if isinstance(each, Rotation)), None)
        self.bias = next(each for each in inputs if isinstance(each, Tensor) and each.dim() == 4 and each.shape[1] == 1)

    def projected(self, heads: int, qkv: Tensor) -> None:
        """Count over the queries and keys of a layer."""
        assert self.batch is not None
        assert self.bias is not None
        rows, length, width = qkv.shape
        query, key, _ = qkv.float().view(rows, length, 3, heads, width // 3 // heads).unbind(2)
        if self.rotation is not None:
            query, key = _rotated(query, self.rotation), _rotated(key, self.rotation)
        scores = torch.einsum("rqhd,rkhd->rhqk", query, key) / (width // 3 // heads) ** 0.5 + self.bias
        best = scores.argmax(dim=-1)  # (R, H, L)
        real = (self.batch.sequence >= 0)[:, None, :]
        on_neighbour = ((best - torch.arange(length)).abs() == 1) & real
        best_ids = self.batch.token_ids[:, None, :].expand(-1, heads, -1).gather(2, best)
        special = torch.isin(best_ids, self.special_ids) & real
        if self.layer == len(self.neighbour):
            self.neighbour.append(torch.zeros(heads, dtype=torch.int64))
            self.special.append(torch.zeros(heads, dtype=torch.int64))
        self.neighbour[self.layer] += on_neighbour.sum(dim=(0, 2))
        self.special[self.layer] += special.sum(dim=(0, 2))
        self.layer += 1

    def shares(self) -> HeadShares:
        neighbour, special = (torch.stack(each).numpy() / self.queries for each in (self.neighbour, self.special))
        return HeadShares(neighbour, special, self.queries)


@contextmanager
def _hooked(encoder: nn.Module, counts: _Counts) -> Iterator[None]:
    """Hooks, for the block, on every layer that projects queries, keys and values by a matrix `qkv`."""
    hooks = []
    for layer in encoder.modules():
        projection = getattr(layer, "qkv", None)
        if isinstance(projection, nn.Module):
            heads = int(layer.heads)  # type: ignore[arg-type]
            hooks.append(layer.register_forward_pre_hook(lambda _, inputs: counts.layer_begins(inputs)))
            hooks.append(projection.register_forward_hook(lambda _, __, output, heads=heads: counts.projected(heads, output)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * rotation.cos - second * rotation.sin, second * rotation.cos + first * rotation.sin], dim=-1)


def _full_stops(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens that are a full stop, with or without a prefix for the start or the continuation of a word."""
    return [number for number, token in enumerate(tokenizer.vocabulary) if token.removeprefix("##").lstrip("Ġ▁ ") == "."]


def measure_heads(models: Sequence[Path], examples: Sequence[Example], *, max_length: int, emit: Emit) -> dict[str, HeadShares]:
    """Return the head statistics of every model over the same texts, by the name of its folder (`names_of`).

    models: runs, exported models, their `mlm` folders, or Hugging Face model folders.

    Raises:
        ArtifactError: if a model cannot be read.
    """
    heads: dict[str, HeadShares] = {}
    for name, path in zip(names_of(models), models, strict=True):
        pretrained = open_pretrained(model_of(path, kinds=ENCODERS))
        tokenizer = pretrained.tokenizer
        model = build_model(
            ModelSpec(pretrained.encoder, pretrained.head, vocab_size=tokenizer.vocab_size, labels=2, pad_id=tokenizer.pad_id), seed=0
        )
        load_pretrained_weights(model, pretrained)
        limit = min(max_length, pretrained.encoder.max_positions)
        heads[name] = head_shares(model, tokenizer, examples, max_length=limit)
        emit(Event("note", "attention", f"{name}: attention of {heads[name].queries:,} tokens measured"))
    return heads


def plain(heads: Mapping[str, HeadShares]) -> dict[str, Any]:
    """Return JSON values: shares of positional and vertical heads per model, and the shares of attention maxima per head."""
    return {
        name: {
            "queries": shares.queries,
            "heads": int(shares.neighbour.size),
            "positional": float(shares.positional.mean()),
            "vertical": float(shares.vertical.mean()),
            "neighbour_shares": shares.neighbour.round(4).tolist(),
            "special_shares": shares.special.round(4).tolist(),
        }
        for name, shares in heads.items()
    }


def markdown(heads: Mapping[str, HeadShares]) -> str:
    """Return a Markdown table with a row per layer and one for all: counts of positional and vertical heads."""
    header = ["layer", *(f"{name}, {kind}".replace("|", "\\|") for name in heads for kind in ("positional", "vertical"))]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for layer in range(max(len(shares.neighbour) for shares in heads.values())):
        cells = [str(layer + 1)]
        for shares in heads.values():
            has_layer = layer < len(shares.neighbour)
            cells += [_count(kind[layer]) if has_layer else "" for kind in (shares.positional, shares.vertical)]
        lines.append(f"| {' | '.join(cells)} |")
    every = [_count(kind.ravel()) for shares in heads.values() for kind in (shares.positional, shares.vertical)]
    lines.append(f"| all | {' | '.join(every)} |")
    legend = (
        "Positional: at least 90 % of a head's attention maxima lie on a neighbouring token; vertical: more than 90 % on [CLS], [SEP] or a "
    )
    return "\n".join([*lines, "", f"{legend}full stop (Yao et al. 2022)."]) + "\n"


def heads_plot(heads: Mapping[str, HeadShares]) -> str:
    """Return an SVG with a panel per model and two bars per layer: the shares of positional and of vertical heads."""
    panels = []
    for name, shares in heads.items():
        summary = f"{100 * shares.positional.mean():.0f} % positional, {100 * shares.vertical.mean():.0f} % vertical"
        rows = [[(float(flags.mean()), _count(flags)) for flags in layer] for layer in zip(shares.positional, shares.vertical, strict=True)]
        panels.append(Bars(name, summary, rows))
    description = "; ".join(
        f"{name}: {100 * shares.positional.mean():.0f} % of the heads positional, {100 * shares.vertical.mean():.0f} % vertical"
        for name, shares in heads.items()
    )
    layers = [f"layer {layer + 1}" for layer in range(max(len(shares.neighbour) for shares in heads.values()))]
    return bar_panels("Heads of each layer", description, panels, series=("positional", "vertical"), row_names=layers)


def write(heads: Mapping[str, HeadShares], out: Path) -> None:
    """Write table, plot and JSON to the folder `out`."""
    publish_file(out / TABLE, markdown(heads).encode())
    publish_file(out / PLOT, heads_plot(heads).encode())
    publish_file(out / DATA, (json.dumps(plain(heads), ensure_ascii=False, indent=1) + "\n").encode())


def _count(flags: Any) -> str:
    return f"{int(flags.sum())} of {len(flags)} ({100 * flags.mean():.0f} %)"
