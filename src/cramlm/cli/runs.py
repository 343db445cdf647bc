"""Commands before and after a run: `plan`, `recipes`, `report`, `track`, `verify`, `doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cramlm.cli.options import (
    SPIN_COUNT,
    InitOption,
    KindOption,
    OptionalLabelColumn,
    OptionalOnBadRow,
    OptionalTextColumn,
    PairColumn,
    PresetOption,
    RecipeOption,
    SeedOption,
    SeparatorOption,
    SetOption,
    resolve_run,
)

PLANNED_BUDGETS = ("2m", "5m", "20m", "60m", "4h")
EXTRAS = {
    "onnxruntime": "ONNX export and prediction without torch ([onnx])",
    "fastapi": "`cramlm serve` ([serve])",
    "ray": "reading, indexing and selecting on a cluster ([ray])",
    "elasticsearch": "retrieval from an Elasticsearch server ([elasticsearch])",
    "datasketch": "removal of near-duplicates ([dedup])",
    "pytest": "the test suite ([dev])",
}
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "pyarrow", "zstandard", "scikit-learn", "pydantic")


def plan(
    budgets: Annotated[list[str] | None, typer.Argument(help="Budgets in time or operations, like 20m 4h 3e15flops.")] = None,
    train: Annotated[str | None, typer.Option(help="As in fit (default: 4,000 texts of 50 tokens are assumed).")] = None,
    dev: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    test: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="As in fit (default: 500 MB of text are assumed).")] = None,
    recipe: RecipeOption = None,
    init: InitOption = None,
    preset: PresetOption = None,
    config: Annotated[Path | None, typer.Option(help="As in fit.")] = None,
    set_: SetOption = None,
    text_column: OptionalTextColumn = None,
    label_column: OptionalLabelColumn = None,
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per budget.")] = False,
) -> None:
    """Show model size, steps and cost of `fit` for several budgets. Measures the speed of this machine; does not train."""
    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    columns |= {"kind": kind, "label_separator": label_separator}
    task = {"train": train or ("" if config is None else None), "dev": dev, "test": test, **columns}
    files = corpus or ([""] if config is None else None)
    common: dict[str, Any] = {"task": task, "corpus": files, "seed": None, "preset": preset, "init": init}
    runs = [resolve_run(recipe, config, set_, budget=each, **common) for each in budgets or PLANNED_BUDGETS]
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from cramlm.cli.console import console_events, show_plans
    from cramlm.planning.plan import forecast_runs

    with console_events() as emit:
        plans = forecast_runs(runs, emit=emit)
    if as_json:
        for planned in plans:
            print(json.dumps(planned.as_dict(), ensure_ascii=False))
        return
    show_plans([planned.as_dict() for planned in plans])


recipes = typer.Typer(help="List the recipes, or show the phases and loss terms of one.", invoke_without_command=True)


@recipes.callback()
def list_recipes(context: typer.Context) -> None:
    """List the recipes of `fit --recipe` with the options they need; `show NAME` prints the phases and loss terms of one."""
    if context.invoked_subcommand is not None:
        return
    from cramlm.recipes import RECIPES

    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        needs = ", ".join(["--corpus"] * recipe.retrieves + ["--init"] * (recipe.start == "checkpoint"))
        print(f"{name:<{width}}  {recipe.summary}" + (f" ({needs})" if needs else ""))


@recipes.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe, like tlm or tlm-small:chemprot.")],
    train: Annotated[str | None, typer.Option(help="Labelled texts; without them 4,000 texts of 8 labels are assumed.")] = None,
    dev: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    test: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="As in fit.")] = None,
    budget: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    init: InitOption = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    text_column: OptionalTextColumn = None,
    label_column: OptionalLabelColumn = None,
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
    on_bad_row: OptionalOnBadRow = None,
) -> None:
    """Show what a recipe runs on a task with a budget: data, phases and loss terms. Reads the training file only; trains nothing.

    `cramlm config --recipe NAME` prints every setting of the same run, `cramlm plan --recipe NAME` its steps and its cost on this machine.
    """
    from cramlm.recipes import find
    from cramlm.recipes.describe import describe_run

    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    task = {"train": train or "", "dev": dev, "test": test, **columns, "kind": kind, "label_separator": label_separator}
    config = resolve_run(
        name,
        None,
        set_,
        task=task | {"on_bad_row": on_bad_row},
        corpus=corpus or ["corpus/*.jsonl.zst"],
        budget=budget,
        seed=seed,
        preset=preset,
        init=init,
    )
    print(describe_run(config, summary=find(name)[0].summary))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folder of a run, finished or not; several are shown side by side.")],
    out: Annotated[Path | None, typer.Option(help="Output file (default: report.html in the run; runs.html for several).")] = None,
) -> None:
    """Write an HTML report of a run, or of several.

    Shows data, retrieved text, training curves, scores and errors. The page loads nothing from the network.
    """
    from cramlm.reporting.page import write_report

    print(write_report(runs, out))


def track(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")],
    tracker: Annotated[str, typer.Argument(help="tensorboard, wandb, mlflow or trackio.")],
) -> None:
    """Send losses and scores to an experiment tracker. `fit --track` does this during training."""
    from cramlm.cli.console import console_events
    from cramlm.pipeline.trackers import replay

    with console_events() as emit:
        replay(tracker, run, emit)


def verify(path: Annotated[Path, typer.Argument(help="A run, a corpus, an index, an exported model, or a folder with several.")]) -> None:
    """Check the hashes of all published files below a folder. A missing part of a corpus is an error, too."""
    from cramlm.data.corpus import verify_corpora
    from cramlm.retrieval.bm25.index import verify_indexes
    from cramlm.storage.artifacts import verify as verify_artifacts

    folders = verify_artifacts(path)
    verify_corpora(path)
    verify_indexes(path)
    print(f"{folders} folders verified: {path}")


def doctor() -> None:
    """Print versions, hardware and missing extras."""
    for name, value in machine_lines():
        print(f"{name:<14} {value}")


def machine_lines() -> Iterator[tuple[str, str]]:
    """Yield (name, value) lines about this machine. Imports torch."""
    from cramlm import __version__
    from cramlm.pipeline.run import default_store

    yield "cramlm", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    import torch

    from cramlm.model.model import TRAINING_DEVICE, has_bf16

    yield "cores", f"{os.cpu_count()} ({torch.get_num_threads()} used by torch)"
    yield "memory", memory()
    gpu = f"; {torch.cuda.get_device_name(0)} is used for dense retrieval only" if torch.cuda.is_available() else ""
    yield "device", f"CPU{gpu}"
    yield "bf16", "supported by the CPU" if has_bf16(TRAINING_DEVICE) else "not supported by the CPU: fp32 is used"
    store = default_store()
    existing = next(path for path in (store, *store.parents) if path.exists())
    yield "store", f"{store} ({shutil.disk_usage(existing).free / 1e9:.0f} GB free)"
    for name in PACKAGES:
        yield name, importlib.metadata.version(name)
    for name, use in EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            yield name, f"not installed; needed for {use}"


def memory() -> str:
    """Return total and available memory from /proc/meminfo as text; "unknown" where the file does not exist."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return "unknown"
    total, available = (int(fields[name].split()[0]) / 1e6 for name in ("MemTotal", "MemAvailable"))
    return f"{total:.1f} GB, {available:.1f} GB available"
