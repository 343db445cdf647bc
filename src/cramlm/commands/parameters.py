"""What the parameters of several commands have in common: names, help, and the commands' shared constants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

TextColumn = Annotated[str, typer.Option("--text-column", help="Column that holds the text.")]
LabelColumn = Annotated[str, typer.Option("--label-column", help="Column that holds the label.")]
PairColumn = Annotated[str | None, typer.Option("--text-pair-column", help="Column of the second text, for sentence pairs.")]
KindOption = Annotated[
    str | None,
    typer.Option(
        "--kind", help="What a text is answered with: classification (one label; default), multi-label, or regression (a number)."
    ),
]
SeparatorOption = Annotated[
    str | None, typer.Option("--label-separator", help="Between several labels in a csv, tsv or parquet cell (default: |).")
]
OnBadRowOption = Annotated[str, typer.Option("--on-bad-row", help="fail: stop at the first bad row; skip: list it in rejected.jsonl.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="One knob, like phases[0].steps=500; may be repeated.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything random.")]
StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Where corpora and indexes are kept (default: $CRAMLM_STORE or the user's cache).")
]
Precision = Literal["auto", "fp32", "bf16"]
RayOption = Annotated[str | None, typer.Option("--ray", metavar="ADDRESS", help="Work on a Ray cluster: auto, host:port, or local.")]
RecipeOption = Annotated[str | None, typer.Option(help="The method: tlm (default), labels-only, plm, ...; `cramlm recipes` lists them.")]
InitOption = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Pretrained weights to start from: a Hugging Face folder, or export/mlm of a run.")
]
PresetOption = Annotated[
    str | None, typer.Option(help="Model size: tiny, mini, small, base, bert-base or bert-large (default: by the budget).")
]
SPINS = "10000"
"""GOMP_SPINCOUNT: how long an OpenMP thread that waits keeps its core. With the default, two threads beside another busy process are up to
a hundred times slower than one; with this, at most about twice. Read when torch is loaded."""
