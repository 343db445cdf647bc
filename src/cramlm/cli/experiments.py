"""Commands on experiments of several runs: `compare`, `ablate`; and on attention heads: `attention`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cramlm.cli.options import (
    METHOD,
    CorpusOption,
    DevOption,
    OverwriteOption,
    PresetOption,
    RowOptions,
    SetOption,
    StoreOption,
    TextColumn,
    UnlabelledOption,
    complete_recipe,
)
from cramlm.cli.process import stop_on_signals
from cramlm.errors import CramError, counted

SeedsOption = Annotated[str, typer.Option("--seeds", metavar="N", help="Number of seeds; 3 means 1, 2 and 3.")]
SeedList = Annotated[
    list[int] | None, typer.Option("--seed", metavar="SEED", help="One seed, in place of --seeds; may be repeated.", rich_help_panel=METHOD)
]
LabelsOption = Annotated[str, typer.Option("--labels", metavar="LIST", help="Numbers of training rows, like 100,500,all.")]
RestOption = Annotated[bool, typer.Option("--rest-unlabelled", help="Use the rows that --labels leaves out as --unlabelled.")]
JobsOption = Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Runs in parallel, with equal shares of the cores.")]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--base-model", metavar="DIR", help="Checkpoint for recipes that need one, and tlm@init.", rich_help_panel=METHOD),
]
RunBudgetOption = Annotated[str | None, typer.Option("--budget", metavar="BUDGET", help="Of each run: time or operations, as in fit.")]
RequiredTrain = Annotated[str, typer.Option("--train", metavar="FILE", help="Labelled texts, as in fit.")]
ScoredTest = Annotated[str | None, typer.Option("--test", metavar="FILE", help="Labelled texts for the scores (default: dev scores).")]
OutOption = Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="Folder (default: runs/TASK-COMMAND).")]


def compare(
    train: RequiredTrain,
    recipes: Annotated[
        str, typer.Option(metavar="LIST", help="Recipes or config files, like tlm,mine.toml; tlm@init starts from --base-model.")
    ],
    dev: DevOption = None,
    test: ScoredTest = None,
    corpus: CorpusOption = None,
    unlabelled: UnlabelledOption = None,
    base_model: CheckpointOption = None,
    budget: RunBudgetOption = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    seeds: SeedsOption = "3",
    seed: SeedList = None,
    labels: LabelsOption = "all",
    rest_unlabelled: RestOption = False,
    jobs: JobsOption = 1,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    store: StoreOption = None,
    *,
    rows: RowOptions,
) -> None:
    """Compare recipes on one task with equal budgets and seeds.

    Writes scores, paired tests, costs and a plot. Run it again to continue.

    Examples:
        cramlm compare --recipes tlm,labels-only,static --train train.csv --corpus raw --budget 10m
        cramlm compare --recipes tlm,static --train train.csv --corpus raw --seed 7 --seed 11 --labels 100
    """
    from cramlm.experiments.grid import arms_of, default_folder

    task = {"train": train, "dev": dev, "test": test, "unlabelled": unlabelled, **asdict(rows)}
    run = {"init": base_model, "budget": budget, "preset": preset, "rest_unlabelled": rest_unlabelled}
    common = _grid_fields(task, corpus, set_, **run)
    out = out or default_folder(train, "compare")
    _experiment(
        arms_of(recipes.replace(" ", "").split(",")),
        common,
        _seeds(seeds, seed),
        labels,
        jobs=jobs,
        out=out,
        overwrite=overwrite,
        store=store,
    )


def ablate(
    train: RequiredTrain,
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUES", help="A setting and its values, like retriever.top_k=0,50; repeated: all combinations."),
    ],
    recipe: Annotated[str, typer.Option(metavar="NAME", help="Recipe or config file to vary.", autocompletion=complete_recipe)] = "tlm",
    dev: DevOption = None,
    test: ScoredTest = None,
    corpus: CorpusOption = None,
    unlabelled: UnlabelledOption = None,
    base_model: CheckpointOption = None,
    budget: RunBudgetOption = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    seeds: SeedsOption = "3",
    seed: SeedList = None,
    labels: LabelsOption = "all",
    rest_unlabelled: RestOption = False,
    jobs: JobsOption = 1,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    store: StoreOption = None,
    *,
    rows: RowOptions,
) -> None:
    """Compare values of a setting on one task with equal budgets.

    Writes the table and plot of `compare` with a row per value.

    Examples:
        cramlm ablate --over retriever.top_k=0,50,500 --train train.csv --corpus raw --budget 10m
    """
    from cramlm.experiments.grid import arms_over, default_folder

    task = {"train": train, "dev": dev, "test": test, "unlabelled": unlabelled, **asdict(rows)}
    run = {"init": base_model, "budget": budget, "preset": preset, "rest_unlabelled": rest_unlabelled}
    common = _grid_fields(task, corpus, set_, **run)
    out = out or default_folder(train, "ablate")
    _experiment(arms_over(recipe, over), common, _seeds(seeds, seed), labels, jobs=jobs, out=out, overwrite=overwrite, store=store)


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
    text_column: TextColumn = "text",
) -> None:
    """Count positional and vertical attention heads in each layer.

    Positional heads attend to neighbouring tokens, vertical heads to [CLS], [SEP] and full stops.

    Examples:
        cramlm attention runs/mine test.csv -o attention
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


def _grid_fields(task: dict[str, Any], corpus: list[str] | None, settings: list[str] | None, **others: Any) -> dict[str, Any]:
    """Return the fields of `Grid` that both commands have."""
    return {"task": task, "corpus": tuple(corpus or ()), "settings": tuple(settings or ()), **others}


def _seeds(number: str, each: list[int] | None) -> str:
    """Return the seeds as `read_seeds` reads them."""
    return number if each is None else ",".join(map(str, each)) + ","


def _experiment(
    arms: Any, common: dict[str, Any], seeds: str, labels: str, *, jobs: int, out: Path, overwrite: bool, store: Path | None
) -> None:
    from cramlm.cli.console import console_events
    from cramlm.experiments.compare import PLOT, RESULTS, TABLE
    from cramlm.experiments.compare import compare as run_experiment
    from cramlm.experiments.grid import Grid, read_counts, read_seeds

    grid = Grid(arms=arms, seeds=read_seeds(seeds), labels=read_counts(labels), **common)
    with stop_on_signals() as stop, console_events() as emit:
        experiment = run_experiment(grid, out=out, store=store, jobs=jobs, overwrite=overwrite, emit=emit, stop=stop)
    print(experiment.table)
    print(f"{out / TABLE}, {f'{PLOT}, ' if (out / PLOT).is_file() else ''}{RESULTS}")
    if experiment.failed:
        name, message = next(iter(experiment.failed.items()))
        error = CramError(f"{counted(len(experiment.failed), 'run')} failed, the first is {name}: {message}")
        error.exit_code = experiment.exit_code
        raise error
