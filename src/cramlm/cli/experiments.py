"""Commands that ask what the data and the methods are worth: `check`, `compare`, `ablate`, `attention`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cramlm.cli.options import (
    SPINS,
    GivenLabelColumn,
    GivenOnBadRow,
    GivenTextColumn,
    KindOption,
    OverwriteOption,
    PairColumn,
    PresetOption,
    SeparatorOption,
    SetOption,
    StoreOption,
    TextColumn,
)
from cramlm.cli.process import stop_on_signals

SeedsOption = Annotated[str, typer.Option(help='How many seeds (3 means 1, 2, 3), or which, like 7,11,13; one, like "7,".')]
LabelsOption = Annotated[str, typer.Option(help="Training rows to keep, like 100,500,all: stratified draws by the seed, the same for all.")]
JobsOption = Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of its own with its share of the cores.")]
CheckpointOption = Annotated[
    str | None, typer.Option("--init", help="Checkpoint for the recipes that start from one, and for those written like tlm@init.")
]


def compare(
    train: Annotated[str, typer.Option(help="As in fit.")],
    recipes: Annotated[str, typer.Option(help="Recipes or config files, like tlm,labels-only,mine.toml; tlm@init starts from --init.")],
    dev: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    test: Annotated[str | None, typer.Option(help="As in fit; without it the table shows dev, which chose.")] = None,
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
    text_column: GivenTextColumn = None,
    label_column: GivenLabelColumn = None,
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
    on_bad_row: GivenOnBadRow = None,
) -> None:
    """Several recipes on one task under equal budgets: scores over seeds, paired tests, costs, a picture; run it again to go on."""
    from cramlm.experiments.grid import arms_of, default_folder

    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    columns |= {"kind": kind, "label_separator": label_separator}
    task = {"train": train, "dev": dev, "test": test, "on_bad_row": on_bad_row, **columns}
    asked = {"task": task, "corpus": tuple(corpus or ()), "init": init, "budget": budget, "preset": preset, "settings": tuple(set_ or ())}
    out = out or default_folder(train, "compare")
    _experiment(arms_of(recipes.replace(" ", "").split(",")), asked, seeds, labels, jobs=jobs, out=out, overwrite=overwrite, store=store)


def ablate(
    train: Annotated[str, typer.Option(help="As in fit.")],
    over: Annotated[
        list[str], typer.Option(help="A setting and its values, like retriever.top_k=0,50,500; of several, every combination.")
    ],
    recipe: Annotated[str, typer.Option(help="Recipe or config file whose setting is varied.")] = "tlm",
    dev: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    test: Annotated[str | None, typer.Option(help="As in fit; without it the table shows dev, which chose.")] = None,
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
    text_column: GivenTextColumn = None,
    label_column: GivenLabelColumn = None,
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
    on_bad_row: GivenOnBadRow = None,
) -> None:
    """One recipe with several values of a setting: the same table, picture and tests as compare, a row for each value."""
    from cramlm.experiments.grid import arms_over, default_folder

    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    columns |= {"kind": kind, "label_separator": label_separator}
    task = {"train": train, "dev": dev, "test": test, "on_bad_row": on_bad_row, **columns}
    asked = {"task": task, "corpus": tuple(corpus or ()), "init": init, "budget": budget, "preset": preset, "settings": tuple(set_ or ())}
    out = out or default_folder(train, "ablate")
    _experiment(arms_over(recipe, over), asked, seeds, labels, jobs=jobs, out=out, overwrite=overwrite, store=store)


def attention(
    model: Annotated[Path, typer.Argument(help="A run, an export, its mlm folder, or a checkpoint as --init takes it.")],
    file: Annotated[str, typer.Argument(help="Texts to look at, in any form that fit takes.")],
    others: Annotated[list[Path] | None, typer.Argument(help="More models, to see side by side.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for heads.md, heads.svg and heads.json.")] = Path("attention"),
    limit: Annotated[int, typer.Option(min=1, help="At most so many texts, from the first.")] = 500,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a text; what follows is cut off.")] = 128,
    text_column: TextColumn = "text",
) -> None:
    """How many heads look at neighbours and how many at [CLS], [SEP] and full stops, layer by layer."""
    from cramlm.cli.console import console_events
    from cramlm.data.task import RowFormat, read_examples
    from cramlm.experiments.attention import look_at, markdown, write

    examples = read_examples(file, RowFormat(text_column, label_column=None))
    texts = [example.text for example in examples[:limit]]
    with console_events() as emit:
        found = look_at([model, *(others or ())], texts, max_length=max_length, emit=emit)
    write(found, out)
    print(markdown(found))
    print(f"{out / 'heads.svg'}, heads.md, heads.json")


def _experiment(
    arms: Any, asked: dict[str, Any], seeds: str, labels: str, *, jobs: int, out: Path, overwrite: bool, store: Path | None
) -> None:
    from cramlm.cli.console import console_events
    from cramlm.experiments.compare import compare as run_experiment
    from cramlm.experiments.grid import Question, read_counts, read_seeds

    question = Question(arms=arms, seeds=read_seeds(seeds), labels=read_counts(labels), **asked)
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    with stop_on_signals() as stop, console_events() as emit:
        experiment = run_experiment(question, out=out, store=store, jobs=jobs, overwrite=overwrite, emit=emit, stop=stop)
    print(experiment.table)
    print(f"{out / 'table.md'}, scores.svg, results.json")
    if experiment.failed:
        raise typer.Exit(1)
