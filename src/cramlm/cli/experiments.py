"""Commands on experiments of several runs: `compare`, `ablate`; and on attention heads: `attention`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cramlm.cli.options import (
    SPIN_COUNT,
    KindOption,
    OptionalLabelColumn,
    OptionalOnBadRow,
    OptionalTextColumn,
    OverwriteOption,
    PairColumn,
    PresetOption,
    SeparatorOption,
    SetOption,
    StoreOption,
    TextColumn,
)
from cramlm.cli.process import stop_on_signals

SeedsOption = Annotated[str, typer.Option(help='Number of seeds (3 means 1, 2, 3), or a list like 7,11,13; one seed is written "7,".')]
LabelsOption = Annotated[str, typer.Option(help="Numbers of training rows, like 100,500,all: stratified samples, the same for all arms.")]
JobsOption = Annotated[int, typer.Option(min=1, help="Runs in parallel, each in its own process with an equal share of the cores.")]
CheckpointOption = Annotated[
    str | None, typer.Option("--init", help="Checkpoint for recipes that need one, and for recipes written like tlm@init.")
]


def compare(
    train: Annotated[str, typer.Option(help="As in fit.")],
    recipes: Annotated[str, typer.Option(help="Recipes or config files, like tlm,labels-only,mine.toml; tlm@init starts from --init.")],
    dev: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    test: Annotated[str | None, typer.Option(help="As in fit; without it the table shows dev scores, which are optimistic.")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="As in fit.")] = None,
    init: CheckpointOption = None,
    budget: Annotated[str | None, typer.Option(help="As in fit, for each run.")] = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    seeds: SeedsOption = "3",
    labels: LabelsOption = "all",
    jobs: JobsOption = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the experiment (default: runs/TASK-compare).")] = None,
    overwrite: OverwriteOption = False,
    store: StoreOption = None,
    text_column: OptionalTextColumn = None,
    label_column: OptionalLabelColumn = None,
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
    on_bad_row: OptionalOnBadRow = None,
) -> None:
    """Compare recipes on one task with equal budgets.

    Writes scores over seeds, paired tests, costs and a plot. Run it again to continue.
    """
    from cramlm.experiments.grid import arms_of, default_folder

    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    columns |= {"kind": kind, "label_separator": label_separator}
    task = {"train": train, "dev": dev, "test": test, "on_bad_row": on_bad_row, **columns}
    common = {"task": task, "corpus": tuple(corpus or ()), "init": init, "budget": budget, "preset": preset, "settings": tuple(set_ or ())}
    out = out or default_folder(train, "compare")
    _experiment(arms_of(recipes.replace(" ", "").split(",")), common, seeds, labels, jobs=jobs, out=out, overwrite=overwrite, store=store)


def ablate(
    train: Annotated[str, typer.Option(help="As in fit.")],
    over: Annotated[
        list[str], typer.Option(help="A setting and its values, like retriever.top_k=0,50,500; may be repeated for all combinations.")
    ],
    recipe: Annotated[str, typer.Option(help="Recipe or config file to vary.")] = "tlm",
    dev: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    test: Annotated[str | None, typer.Option(help="As in fit; without it the table shows dev scores, which are optimistic.")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="As in fit.")] = None,
    init: CheckpointOption = None,
    budget: Annotated[str | None, typer.Option(help="As in fit, for each run.")] = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    seeds: SeedsOption = "3",
    labels: LabelsOption = "all",
    jobs: JobsOption = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the experiment (default: runs/TASK-ablate).")] = None,
    overwrite: OverwriteOption = False,
    store: StoreOption = None,
    text_column: OptionalTextColumn = None,
    label_column: OptionalLabelColumn = None,
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
    on_bad_row: OptionalOnBadRow = None,
) -> None:
    """Compare values of a setting. Writes the table and plot of `compare` with a row per value."""
    from cramlm.experiments.grid import arms_over, default_folder

    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    columns |= {"kind": kind, "label_separator": label_separator}
    task = {"train": train, "dev": dev, "test": test, "on_bad_row": on_bad_row, **columns}
    common = {"task": task, "corpus": tuple(corpus or ()), "init": init, "budget": budget, "preset": preset, "settings": tuple(set_ or ())}
    out = out or default_folder(train, "ablate")
    _experiment(arms_over(recipe, over), common, seeds, labels, jobs=jobs, out=out, overwrite=overwrite, store=store)


def attention(
    model: Annotated[Path, typer.Argument(help="A run, an exported model, its mlm folder, or a Hugging Face model folder.")],
    file: Annotated[str, typer.Argument(help="Texts, in a format that fit reads.")],
    others: Annotated[list[Path] | None, typer.Argument(help="More models, shown side by side.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for heads.md, heads.svg and heads.json.")] = Path("attention"),
    max_texts: Annotated[int, typer.Option(min=1, help="Read at most so many texts of the file.")] = 500,
    max_length: Annotated[int, typer.Option(min=8, help="Truncate texts to so many tokens.")] = 128,
    text_column: TextColumn = "text",
) -> None:
    """Count positional and vertical attention heads.

    Positional heads attend to neighbouring tokens, vertical heads to [CLS], [SEP] and full stops.
    """
    from cramlm.cli.console import console_events
    from cramlm.data.task import RowFormat, read_examples
    from cramlm.experiments.attention import markdown, measure_heads, write

    examples = read_examples(file, RowFormat(text_column, label_column=None))
    texts = [example.text for example in examples[:max_texts]]
    with console_events() as emit:
        heads = measure_heads([model, *(others or ())], texts, max_length=max_length, emit=emit)
    write(heads, out)
    print(markdown(heads))
    print(f"{out / 'heads.svg'}, heads.md, heads.json")


def _experiment(
    arms: Any, common: dict[str, Any], seeds: str, labels: str, *, jobs: int, out: Path, overwrite: bool, store: Path | None
) -> None:
    from cramlm.cli.console import console_events
    from cramlm.experiments.compare import compare as run_experiment
    from cramlm.experiments.grid import Grid, read_counts, read_seeds

    grid = Grid(arms=arms, seeds=read_seeds(seeds), labels=read_counts(labels), **common)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    with stop_on_signals() as stop, console_events() as emit:
        experiment = run_experiment(grid, out=out, store=store, jobs=jobs, overwrite=overwrite, emit=emit, stop=stop)
    print(experiment.table)
    print(f"{out / 'table.md'}, scores.svg, results.json")
    if experiment.failed:
        raise typer.Exit(1)
