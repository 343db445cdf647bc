"""Table, plot and JSON of the positional and vertical attention heads (evaluation/attention.py) of one or several models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cramlm.evaluation.attention import HeadShares, head_shares
from cramlm.inference.folders import ENCODERS, model_of
from cramlm.model.huggingface.pretrained import open_pretrained
from cramlm.model.huggingface.weights import load_pretrained_weights
from cramlm.model.model import ModelSpec, build_model
from cramlm.records import Emit, Event
from cramlm.reporting.charts import Bars, bar_panels
from cramlm.storage.artifacts import publish_file

TABLE, PLOT, DATA = "heads.md", "heads.svg", "heads.json"


def measure_heads(models: Sequence[Path], texts: Sequence[str], *, max_length: int, emit: Emit) -> dict[str, HeadShares]:
    """Return the head statistics of every model over the same texts, by folder name.

    models: runs, exported models, their `mlm` folders, or Hugging Face model folders.

    Raises:
        ArtifactError: if a model cannot be read.
    """
    heads: dict[str, HeadShares] = {}
    for path in models:
        name = path.resolve().name
        name = name if name not in heads else str(path)
        pretrained = open_pretrained(model_of(path, kinds=ENCODERS))
        tokenizer = pretrained.tokenizer
        model = build_model(
            ModelSpec(pretrained.encoder, pretrained.head, vocab_size=tokenizer.vocab_size, labels=2, pad_id=tokenizer.pad_id), seed=0
        )
        load_pretrained_weights(model, pretrained)
        limit = min(max_length, pretrained.encoder.max_positions)
        heads[name] = head_shares(model, tokenizer, texts, max_length=limit)
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
    header = ["layer", *(f"{name}, {kind}" for name in heads for kind in ("positional", "vertical"))]
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
