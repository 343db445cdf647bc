"""Commands before and after a run: `plan`, `recipes`, `report`, `track`, `verify`, `doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cramlm.cli.help import Command, Group
from cramlm.cli.options import (
    DataOptions,
    JsonOption,
    MethodOptions,
    RecipeOptions,
    RowOptions,
    TrackerName,
    complete_recipe,
    resolve_options,
    resolve_recipe,
    with_options,
)
from cramlm.errors import EnvironmentFault, counted, size
from cramlm.io.machine import available_cores, available_memory, system_memory

PLANNED_BUDGETS = ("2m", "5m", "20m", "60m", "4h")
EXTRAS = {
    "onnxruntime": "ONNX export and prediction without torch ([onnx])",
    "fastapi": "`cramlm serve` ([serve])",
    "ray": "reading, indexing and selecting on a cluster ([ray])",
    "gcsfs": "data at https://, s3:// and gs:// ([cloud])",
    "huggingface_hub": "data at hf://, and `cramlm push` ([hub])",
    "ir_measures": "stemmers, and measures of `cramlm search` ([search])",
    "elasticsearch": "retrieval from an Elasticsearch server ([elasticsearch])",
    "pytest": "the test suite ([dev])",
}
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "pyarrow", "zstandard", "scikit-learn", "pydantic")


@dataclass(frozen=True, slots=True)
class PlannedData(DataOptions):
    """Options for the files of runs that are only planned."""

    train: Annotated[
        str | None, typer.Option("--train", metavar="FILE", help="Labelled texts (default: 4,000 texts of 50 tokens are assumed).")
    ] = None
    corpus: Annotated[
        list[str] | None, typer.Option("--corpus", metavar="FILES", help="Raw text, as in fit (default: 500 MB of text are assumed).")
    ] = None


def plan(
    budgets: Annotated[
        list[str] | None, typer.Argument(metavar="BUDGETS", help="Budgets in time or operations, like 20m 4h 3e15flops.")
    ] = None,
    *,
    data: PlannedData,
    method: MethodOptions,
    rows: RowOptions,
    as_json: JsonOption = False,
) -> None:
    """Show size, steps and cost of `fit` for several budgets.

    Nothing is trained. The speed of this machine is measured in some seconds.

    Examples:
        cramlm plan 5m 20m 4h --train train.csv --corpus 'corpus/*.jsonl'
        cramlm plan 3e15flops --preset small
    """
    if method.config is None:
        data = replace(data, train=data.train or "", corpus=data.corpus or [""])
    runs = [resolve_options(data, rows, method, budget=each) for each in budgets or PLANNED_BUDGETS]
    from cramlm.cli.console import console_events, show_plans
    from cramlm.planning.plan import forecast_runs

    with console_events() as emit:
        plans = forecast_runs(runs, emit=emit)
    if as_json:
        for planned in plans:
            print(json.dumps(planned.as_dict(), ensure_ascii=False))
        return
    show_plans([planned.as_dict() for planned in plans])


def show_dry_run(config: Any) -> None:
    """Print what `fit` would run with this config, and for an encoder what it costs on this machine; write nothing."""
    from cramlm.cli.console import console_events, show_plans
    from cramlm.data.task import read_task
    from cramlm.io.paths import stamp_inputs
    from cramlm.pipeline.stages.text import check_settings
    from cramlm.recipes import RECIPES
    from cramlm.recipes.describe import describe_run, stages_of

    check_settings(config, read_task(config.task, seed=config.seed), None)
    stamp_inputs(() if config.corpus is None else config.corpus.files)  # refuses missing files
    recipe = RECIPES.get(config.name)
    print(describe_run(config, summary="" if recipe is None else recipe.summary))
    print(f"\nStages: {', '.join(stages_of(config))}")
    if config.model != "encoder":
        print("Cost: that of a linear model, which is fitted without a budget; nothing was written")
        return
    from cramlm.planning.plan import forecast_runs

    with console_events() as emit:
        plans = forecast_runs([config], emit=emit)
    print()
    show_plans([planned.as_dict() for planned in plans])
    print("nothing was written")


recipes = typer.Typer(cls=Group, invoke_without_command=True, subcommand_metavar="[show NAME]")


@recipes.callback()
def list_recipes(context: typer.Context) -> None:
    """List the recipes of `fit`, or show the phases of one.

    Examples:
        cramlm recipes
        cramlm recipes show tlm --train train.csv --budget 20m
    """
    if context.invoked_subcommand is not None:
        return
    from cramlm.recipes import RECIPES

    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        needs = ", ".join(["--corpus"] * recipe.retrieves + ["--base-model"] * (recipe.start == "checkpoint"))
        print(f"{name:<{width}}  {recipe.summary}" + (f" ({needs})" if needs else ""))


@recipes.command(cls=Command)
@with_options
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A recipe, like tlm or tlm-small:chemprot, or a config file.", autocompletion=complete_recipe),
    ],
    *,
    options: RecipeOptions,
    rows: RowOptions,
) -> None:
    """Show what a recipe runs on a task with a budget: data, phases and loss terms; nothing is trained.

    `cramlm config --recipe NAME` prints every setting of the same run, `cramlm fit --dry-run` its steps and its cost on this machine.

    Examples:
        cramlm recipes show tlm --train train.csv --budget 20m
    """
    from cramlm.recipes import find
    from cramlm.recipes.describe import describe_run

    if name.endswith(".toml"):
        print(describe_run(resolve_recipe(None, options, rows, config_file=Path(name))))
    else:
        print(describe_run(resolve_recipe(name, options, rows), summary=find(name)[0].summary))


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS", help="A run, finished or not, or a folder in it; several are shown side by side.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Output file (default: report.html in the run; runs.html for several)."),
    ] = None,
) -> None:
    """Write an HTML report of a run, or of several side by side.

    Shows data, retrieved text, training curves, scores and errors. The page loads nothing from the network.

    Examples:
        cramlm report runs/mine
        cramlm report runs/mine runs/other -o both.html
    """
    from cramlm.reporting.page import write_report

    print(write_report(runs, out))


def track(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, finished or not, or a folder in it.")],
    tracker: Annotated[TrackerName, typer.Argument(metavar="TRACKER", help="tensorboard, wandb, mlflow or trackio.")],
) -> None:
    """Send the losses and scores of a run to an experiment tracker.

    `cramlm fit --report-to` does this during training.

    Examples:
        cramlm track runs/mine tensorboard
    """
    from cramlm.cli.console import console_events
    from cramlm.inference.folders import run_at
    from cramlm.pipeline.trackers import replay

    with console_events() as emit:
        replay(tracker, run_at(run, "track"), emit)


def verify(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A run, a corpus, an index, an exported model, or a folder with several.")],
) -> None:
    """Check every published file below a folder against its hash.

    A missing part of a corpus is an error, too. The exit code of a damaged folder is 5.

    Examples:
        cramlm verify runs/mine
    """
    from cramlm.data.corpus import verify_corpora
    from cramlm.io.paths import require_folder
    from cramlm.retrieval.bm25.index import verify_indexes
    from cramlm.storage.artifacts import verify as verify_artifacts

    require_folder(path, remedy="pass a run, a corpus, an index or an export")
    folders = verify_artifacts(path)
    verify_corpora(path)
    verify_indexes(path)
    print(f"{counted(folders, 'folder')} verified: {path}")


def doctor() -> None:
    """Print versions, the hardware in use, and missing extras.

    Examples:
        cramlm doctor
    """
    for name, value in machine_lines():
        print(f"{name:<14} {value}")


def machine_lines() -> Iterator[tuple[str, str]]:
    """Yield (name, value) lines about this machine. Imports torch."""
    from cramlm import __version__
    from cramlm.storage.stages import default_store

    yield "cramlm", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    import torch

    from cramlm.model.model import describe_device, has_bf16, resolve_device

    yield "cores", f"{os.cpu_count()}, of which this process may use {available_cores()} ({torch.get_num_threads()} used by torch)"
    memory, free = system_memory(), available_memory()
    yield "memory", f"{size(memory[0])}, {size(free)} available to this process" if memory and free is not None else "unknown"
    device = resolve_device("auto")
    yield "device", f"{describe_device(device)} (--device auto)"
    yield "bf16", "supported by the device" if has_bf16(device) else "not supported by the device: fp32 is used"
    try:
        store = default_store()
        existing = next(path for path in (store, *store.parents) if path.exists())
        yield "store", f"{store} ({size(shutil.disk_usage(existing).free)} free)"
    except EnvironmentFault as error:
        yield "store", f"none: {error}"
    for name in PACKAGES:
        yield name, importlib.metadata.version(name)
    for name, use in EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            yield name, f"not installed; needed for {use}"
