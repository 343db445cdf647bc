"""Commands on experiments of several runs: `compare`, `ablate`; and on attention heads: `attention`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cramlm.cli.options import (
    METHOD,
    CorpusOption,
    DevOption,
    ModelPairColumn,
    ModelTextColumn,
    OverwriteOption,
    PresetOption,
    RowOptions,
    SetOption,
    StoreOption,
    UnlabelledOption,
    complete_recipe,
)
from cramlm.cli.process import stop_on_signals
from cramlm.errors import CramError, counted

RequiredTrain = Annotated[str, typer.Option("--train", metavar="FILE", help="Labelled texts, as in fit.")]


@dataclass(frozen=True, slots=True)
class GridOptions:
    """Options of `compare` and `ablate`."""

    dev: DevOption = None
    test: Annotated[str | None, typer.Option("--test", metavar="FILE", help="Labelled texts for the scores (default: dev scores).")] = None
    corpus: CorpusOption = None
    unlabelled: UnlabelledOption = None
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", metavar="DIR", help="Checkpoint for recipes that need one, and tlm@init.", rich_help_panel=METHOD),
    ] = None
    budget: Annotated[str | None, typer.Option("--budget", metavar="BUDGET", help="Of each run: time or operations, as in fit.")] = None
    preset: PresetOption = None
    set_: SetOption = None
    seeds: Annotated[str, typer.Option("--seeds", metavar="N", help="Number of seeds; 3 means 1, 2 and 3.")] = "3"
    seed: Annotated[
        list[int] | None,
        typer.Option("--seed", metavar="SEED", help="One seed, in place of --seeds; may be repeated.", rich_help_panel=METHOD),
    ] = None
    labels: Annotated[str, typer.Option("--labels", metavar="LIST", help="Numbers of training rows, like 100,500,all.")] = "all"
    rest_unlabelled: Annotated[bool, typer.Option("--rest-unlabelled", help="Use the rows that --labels leaves out as --unlabelled.")] = (
        False
    )
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Runs in parallel, with equal shares of the cores.")] = 1
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="Folder (default: runs/TASK-COMMAND).")] = None
    overwrite: OverwriteOption = False
    store: StoreOption = None


def compare(
    train: RequiredTrain,
    recipes: Annotated[
        str, typer.Option(metavar="LIST", help="Recipes or config files, like tlm,mine.toml; tlm@init starts from --base-model.")
    ],
    *,
    options: GridOptions,
    rows: RowOptions,
) -> None:
    """Compare recipes on one task with equal budgets and seeds.

    Writes scores, paired tests, costs and a plot. Run it again to continue.

    Examples:
        cramlm compare --recipes tlm,labels-only,static --train train.csv --corpus raw --budget 10m
        cramlm compare --recipes tlm,static --train train.csv --corpus raw --seed 7 --seed 11 --labels 100
    """
    from cramlm.experiments.grid import arms_of

    _experiment("compare", train, arms_of(recipes.replace(" ", "").split(",")), options, rows)


def ablate(
    train: RequiredTrain,
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUES", help="A setting and its values, like retriever.top_k=0,50; repeated: all combinations."),
    ],
    recipe: Annotated[str, typer.Option(metavar="NAME", help="Recipe or config file to vary.", autocompletion=complete_recipe)] = "tlm",
    *,
    options: GridOptions,
    rows: RowOptions,
) -> None:
    """Compare values of a setting on one task with equal budgets.

    Writes the table and plot of `compare` with a row per value.

    Examples:
        cramlm ablate --over retriever.top_k=0,50,500 --train train.csv --corpus raw --budget 10m
    """
    from cramlm.experiments.grid import arms_over

    _experiment("ablate", train, arms_over(recipe, over), options, rows)


def attention(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run, an exported model, its mlm folder, or a Hugging Face model folder.")
    ],
    file: Annotated[str, typer.Argument(metavar="FILE", help="Texts, in a format that fit reads.")],
    others: Annotated[list[Path] | None, typer.Argument(metavar="MODELS", help="More models, shown side by side.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder for heads.md, heads.svg and heads.json.")] = Path(
        "attention"
    ),
    max_texts: Annotated[int, typer.Option(metavar="N", min=1, help="Read at most so many texts of the file.")] = 500,
    max_length: Annotated[int, typer.Option(metavar="N", min=8, help="Truncate texts to so many tokens.")] = 128,
    text_column: ModelTextColumn = None,
    text_pair_column: ModelPairColumn = None,
) -> None:
    """Count positional and vertical attention heads in each layer.

    Positional heads attend to neighbouring tokens, vertical heads to [CLS], [SEP] and full stops.

    Examples:
        cramlm attention runs/mine test.csv -o attention
    """
    from cramlm.cli.console import console_events
    from cramlm.data.task import read_examples
    from cramlm.experiments.attention import FILES, markdown, measure_heads, write
    from cramlm.inference.folders import ENCODERS, columns_of, model_of
    from cramlm.storage.artifacts import refuse_output

    for name in FILES:
        refuse_output(out / name, file)
    columns = replace(columns_of(model_of(model, kinds=ENCODERS), text_column, text_pair_column), label_column=None)
    examples = read_examples(file, columns)[:max_texts]
    with console_events() as emit:
        heads = measure_heads([model, *(others or ())], examples, max_length=max_length, emit=emit)
    write(heads, out)
    print(markdown(heads))
    print(f"{out / 'heads.svg'}, heads.md, heads.json")


def _experiment(command: str, train: str, arms: Any, options: GridOptions, rows: RowOptions) -> None:
    """Run the grid of a command, and print its table and where it is."""
    from cramlm.cli.console import console_events
    from cramlm.experiments.compare import PLOT, RESULTS, TABLE
    from cramlm.experiments.compare import compare as run_experiment
    from cramlm.experiments.grid import Grid, default_folder, read_counts, read_seeds

    grid = Grid(
        arms=arms,
        seeds=read_seeds(options.seeds) if options.seed is None else tuple(dict.fromkeys(options.seed)),
        labels=read_counts(options.labels),
        task={"train": train, "dev": options.dev, "test": options.test, "unlabelled": options.unlabelled, **asdict(rows)},
        corpus=tuple(options.corpus or ()),
        settings=tuple(options.set_ or ()),
        init=options.base_model,
        budget=options.budget,
        preset=options.preset,
        rest_unlabelled=options.rest_unlabelled,
    )
    out = options.out or default_folder(train, command)
    where: dict[str, Any] = {"out": out, "store": options.store, "overwrite": options.overwrite}
    with stop_on_signals() as stop, console_events() as emit:
        experiment = run_experiment(grid, **where, jobs=options.jobs, emit=emit, stop=stop)
    print(experiment.table)
    print(f"{out / TABLE}, {f'{PLOT}, ' if (out / PLOT).is_file() else ''}{RESULTS}")
    if experiment.failed:
        name, message = next(iter(experiment.failed.items()))
        error = CramError(f"{counted(len(experiment.failed), 'run')} failed, the first is {name}: {message}")
        error.exit_code = experiment.exit_code
        raise error
