"""Positional and vertical heads of one model or of several side by side: table, plot, plain figures (evaluation/attention.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cramlm.evaluation.attention import HeadShares, head_shares
from cramlm.inference.runs import model_of
from cramlm.model.huggingface.pretrained import open_pretrained
from cramlm.model.huggingface.weights import take_weights
from cramlm.model.model import ModelSpec, build_model
from cramlm.records import Emit, Event
from cramlm.reporting.charts import Bars, bar_panels
from cramlm.storage.artifacts import publish_file

TABLE, PLOT, FIGURES = "heads.md", "heads.svg", "heads.json"


def look_at(models: Sequence[Path], texts: Sequence[str], *, max_length: int, emit: Emit) -> dict[str, HeadShares]:
    """The heads of every model over the same texts, by the names of their folders.

    A model is a run, an export, its `mlm`, or a pretrained folder as `--init` takes it.

    Raises:
        ArtifactError: if one cannot be read.
    """
    found: dict[str, HeadShares] = {}
    for path in models:
        name = path.resolve().name
        name = name if name not in found else str(path)
        pretrained = open_pretrained(model_of(path))
        tokenizer = pretrained.tokenizer
        model = build_model(
            ModelSpec(pretrained.encoder, pretrained.head, vocab_size=tokenizer.vocab_size, labels=2, pad_id=tokenizer.pad_id), seed=0
        )
        take_weights(model, pretrained)
        longest = min(max_length, pretrained.encoder.max_positions)
        found[name] = head_shares(model, tokenizer, texts, max_length=longest)
        emit(Event("note", "attention", f"{name}: {found[name].queries:,} tokens looked from"))
    return found


def plain(found: Mapping[str, HeadShares]) -> dict[str, Any]:
    """JSON values: of every model, shares of positional and vertical heads, and of every head the shares that decide."""
    return {
        name: {
            "queries": shares.queries,
            "heads": int(shares.neighbour.size),
            "positional": float(shares.positional.mean()),
            "vertical": float(shares.vertical.mean()),
            "neighbour_shares": shares.neighbour.round(4).tolist(),
            "special_shares": shares.special.round(4).tolist(),
        }
        for name, shares in found.items()
    }


def markdown(found: Mapping[str, HeadShares]) -> str:
    """A row for each layer and one for all: heads that are positional and vertical, as counts and in percent."""
    header = ["layer", *(f"{name}, {kind}" for name in found for kind in ("positional", "vertical"))]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for layer in range(max(len(shares.neighbour) for shares in found.values())):
        cells = [str(layer + 1)]
        for shares in found.values():
            there = layer < len(shares.neighbour)
            cells += [_counted(kind[layer]) if there else "" for kind in (shares.positional, shares.vertical)]
        lines.append(f"| {' | '.join(cells)} |")
    every = [_counted(kind.ravel()) for shares in found.values() for kind in (shares.positional, shares.vertical)]
    lines.append(f"| all | {' | '.join(every)} |")
    words = (
        "Positional: at least 90 % of a head's attention maxima lie on a neighbouring token; vertical: more than 90 % on [CLS], [SEP] or a "
    )
    return "\n".join([*lines, "", f"{words}full stop (Yao et al. 2022)."]) + "\n"


def draw(found: Mapping[str, HeadShares]) -> str:
    """SVG: a panel for each model, in it two bars for each layer, the shares of its heads that are positional and vertical."""
    panels = []
    for name, shares in found.items():
        summary = f"{100 * shares.positional.mean():.0f} % positional, {100 * shares.vertical.mean():.0f} % vertical"
        rows = [
            [(float(heads.mean()), _counted(heads)) for heads in layer] for layer in zip(shares.positional, shares.vertical, strict=True)
        ]
        panels.append(Bars(name, summary, rows))
    description = "; ".join(
        f"{name}: {100 * shares.positional.mean():.0f} % of the heads positional, {100 * shares.vertical.mean():.0f} % vertical"
        for name, shares in found.items()
    )
    layers = [f"layer {layer + 1}" for layer in range(max(len(shares.neighbour) for shares in found.values()))]
    return bar_panels("Heads of each layer", description, panels, series=("positional", "vertical"), row_names=layers)


def write(found: Mapping[str, HeadShares], out: Path) -> None:
    """Table, plot and figures into a folder."""
    publish_file(out / TABLE, markdown(found).encode())
    publish_file(out / PLOT, draw(found).encode())
    publish_file(out / FIGURES, (json.dumps(plain(found), ensure_ascii=False, indent=1) + "\n").encode())


def _counted(heads: Any) -> str:
    return f"{int(heads.sum())} of {len(heads)} ({100 * heads.mean():.0f} %)"
