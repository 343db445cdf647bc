"""Positional and vertical heads of one model or of several side by side: table, picture, plain figures (evaluation/attention.py)."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cramlm.artifacts import publish_file
from cramlm.deploy.report.markup import clean
from cramlm.deploy.runs import model_of
from cramlm.evaluation.attention import HeadShares, head_shares
from cramlm.experiments.picture import STYLE
from cramlm.model.model import build_model
from cramlm.model.pretrained import open_pretrained
from cramlm.model.starting_weights import take_weights
from cramlm.records import Emit, Event

TABLE, PICTURE, FIGURES = "heads.md", "heads.svg", "heads.json"
_PANEL, _LEFT, _STEP, _TOP = 300, 70, 26, 64


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
        model = build_model(pretrained.encoder, pretrained.head, vocab_size=tokenizer.vocab_size, labels=2, seed=0, pad_id=tokenizer.pad_id)
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
    layers = max(len(shares.neighbour) for shares in found.values())
    width, height = _LEFT + _PANEL * len(found) + 10, _TOP + _STEP * layers + 34
    parts = [_text(12, 20, "Heads of each layer", "start", "strong")]
    parts += ['<rect x="190" y="10" width="12" height="12" fill="var(--one)"/>', _text(208, 20, "positional", "start", "")]
    parts += ['<rect x="290" y="10" width="12" height="12" fill="var(--two)"/>', _text(308, 20, "vertical", "start", "")]
    parts += [_text(_LEFT - 10, _TOP + _STEP * layer + 17, f"layer {layer + 1}", "end", "quiet") for layer in range(layers)]
    for place, (name, shares) in enumerate(found.items()):
        left, wide = _LEFT + _PANEL * place, _PANEL - 50
        summed = f"{100 * shares.positional.mean():.0f} % positional, {100 * shares.vertical.mean():.0f} % vertical"
        parts += [_text(left, 42, name if len(name) <= 40 else name[:39] + "…", "start", ""), _text(left, 57, summed, "start", "quiet")]
        for mark in (0, 50, 100):
            x, bottom = left + wide * mark / 100, _TOP + _STEP * layers
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
            parts.append(_text(x, bottom + 16, f"{mark} %", "middle", "quiet"))
        for layer in range(len(shares.neighbour)):
            for number, (hue, kind) in enumerate((("one", shares.positional), ("two", shares.vertical))):
                share = float(kind[layer].mean())
                y = _TOP + _STEP * layer + 4 + 9 * number
                tip = f"<title>{_counted(kind[layer])}</title>"
                parts.append(f'<rect x="{left}" y="{y}" width="{max(wide * share, 1):.1f}" height="8" fill="var(--{hue})">{tip}</rect>')
    told = "; ".join(
        f"{name}: {100 * shares.positional.mean():.0f} % of the heads positional, {100 * shares.vertical.mean():.0f} % vertical"
        for name, shares in found.items()
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="title told">'
    naming = f'<title id="title">Positional and vertical heads</title><desc id="told">{_escape(told)}</desc>'
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    return "\n".join([head, naming, f"<style>{STYLE}</style>", page, *parts, "</svg>\n"])


def write(found: Mapping[str, HeadShares], out: Path) -> None:
    """Table, picture and figures into a folder."""
    publish_file(out / TABLE, markdown(found).encode())
    publish_file(out / PICTURE, draw(found).encode())
    publish_file(out / FIGURES, (json.dumps(plain(found), ensure_ascii=False, indent=1) + "\n").encode())


def _counted(heads: Any) -> str:
    return f"{int(heads.sum())} of {len(heads)} ({100 * heads.mean():.0f} %)"


def _text(x: float, y: float, words: str, anchor: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(words)}</text>'


def _escape(words: str) -> str:
    return html.escape(clean(words))
