"""What cli.py takes in: `plan`, the commands on a finished model (`export`, `explain`, `push`, `track`), `verify` and `doctor`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from cramlm.errors import UsageError

PresetOption = Annotated[
    str | None, typer.Option(help="Model size: tiny, mini, small, base, bert-base or bert-large (default: by the budget).")
]
PLANNED_BUDGETS = ("2m", "5m", "20m", "60m", "4h")
SPINS = "10000"
"""GOMP_SPINCOUNT: how long an OpenMP thread that waits keeps its core. With the default, two threads beside another busy process are up to
a hundred times slower than one; with this, at most about twice. Read when torch is loaded."""


def add_commands(app: typer.Typer) -> None:
    """Put the commands of this file on a command line."""
    app.command()(plan)
    app.command()(verify)
    app.command()(doctor)
    app.command()(export)
    app.command()(explain)
    app.command()(push)
    app.command()(track)


def plan(
    budgets: Annotated[list[str] | None, typer.Argument(help="Times or operations, like 20m 4h 3e15flops.")] = None,
    train: Annotated[str | None, typer.Option(help="Labelled texts; without them 4,000 of 50 tokens are assumed.")] = None,
    dev: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    test: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="As in fit; without it 500 MB of text are assumed.")] = None,
    recipe: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    preset: PresetOption = None,
    config: Annotated[Path | None, typer.Option(help="As in fit.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One knob, as in fit; may be repeated.")] = None,
    text_column: Annotated[str, typer.Option("--text-column", help="Column that holds the text.")] = "text",
    label_column: Annotated[str, typer.Option("--label-column", help="Column that holds the label.")] = "label",
    text_pair_column: Annotated[str | None, typer.Option("--text-pair-column", help="Column of the second text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per budget.")] = False,
) -> None:
    """Show what `fit` would do with several budgets, and what it would cost; measures this machine, trains nothing."""
    from cramlm.options import resolve_run

    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    task = {"train": train or ("" if config is None else None), "dev": dev, "test": test, **columns}
    files = corpus or ([""] if config is None and recipe != "labels-only" else None)
    asked = budgets or list(PLANNED_BUDGETS)
    runs = [resolve_run(recipe, config, set_, task=task, corpus=files, budget=each, seed=None, preset=preset) for each in asked]
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from cramlm.console import console_events, show_plans
    from cramlm.stages.plan import foresee_runs

    with console_events() as emit:
        plans = foresee_runs(runs, emit=emit)
    if as_json:
        for planned in plans:
            print(json.dumps(planned.as_dict(), ensure_ascii=False))
        return
    show_plans([planned.as_dict() for planned in plans])


def verify(path: Annotated[Path, typer.Argument(help="A run, a corpus, an index, an export, or a folder of them.")]) -> None:
    """Check every published file below a folder against its hash, and that no part of a corpus is missing."""
    from cramlm.artifacts import verify as verify_artifacts
    from cramlm.data.corpus import verify_corpora
    from cramlm.retrieval.index import verify_indexes

    folders = verify_artifacts(path)
    verify_corpora(path)
    verify_indexes(path)
    print(f"{folders} folders whole: {path}")


def doctor() -> None:
    """Print what this machine offers: versions, device, bf16, memory, disk, and what missing extras would give."""
    from cramlm.doctor import report

    for name, value in report():
        print(f"{name:<14} {value}")


def export(
    path: Annotated[Path, typer.Argument(help="A finished run, or an exported model folder.")],
    form: Annotated[str, typer.Option("--format", help="onnx: a graph that runs without torch.")] = "onnx",
    int8: Annotated[bool, typer.Option("--int8", help="Quantise: smaller, answers change a little (told).")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result (default: onnx or onnx-int8 in the run).")] = None,
    texts: Annotated[str | None, typer.Option(help="Texts to check the result on (default: the run's dev and test).")] = None,
    text_column: Annotated[str, typer.Option("--text-column", help="Column that holds the text.")] = "text",
    text_pair_column: Annotated[str | None, typer.Option("--text-pair-column", help="Column of the second text.")] = None,
) -> None:
    """Turn a model into another form, checked against the model before it is published."""
    if form != "onnx":
        raise UsageError(f"--format {form!r} is not known; onnx is")
    from cramlm.console import console_events
    from cramlm.data.task import read_examples
    from cramlm.deploy.onnx import export_onnx

    examples = None
    if texts is not None:
        examples = read_examples(texts, text_column=text_column, label_column=None, text_pair_column=text_pair_column)
    with console_events() as emit:
        artifact = export_onnx(path, int8=int8, out=out, texts=examples, emit=emit)
    print(artifact.path)


def explain(
    model: Annotated[Path, typer.Argument(help="A finished run, an exported model, or an ONNX folder.")],
    text: Annotated[str, typer.Argument(help="The text whose label is to be explained.")],
    passages: Annotated[int, typer.Option(min=0, help="How many of the run's passages to show; 0 for none.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show what each word of a text adds to its label, and the passages of the run that are nearest to it."""
    from cramlm.console import show_explanation
    from cramlm.deploy.explain import explain_at

    explanation = explain_at(model, text, passages=passages).as_dict()
    if as_json:
        print(json.dumps(explanation, ensure_ascii=False))
    else:
        show_explanation(explanation)


def push(
    model: Annotated[Path, typer.Argument(help="A finished run, an exported model, or an ONNX folder.")],
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the Hugging Face Hub; made if it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public (default: private).")] = False,
    license_id: Annotated[str | None, typer.Option("--license", help="For the model card, like apache-2.0.")] = None,
    language: Annotated[str | None, typer.Option(help="For the model card, like en.")] = None,
) -> None:
    """Send a model with its card to the Hugging Face Hub; HF_TOKEN says who you are."""
    from cramlm.console import console_events
    from cramlm.deploy.push import push_model

    with console_events() as emit:
        url = push_model(model, repository, public=public, license_id=license_id, language=language, emit=emit)
    print(url)


def track(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")],
    tracker: Annotated[str, typer.Argument(help="tensorboard, wandb, mlflow or trackio.")],
) -> None:
    """Send a run's losses and scores to an experiment tracker, from its events.jsonl; `fit --track` does it as they come."""
    from cramlm.console import console_events
    from cramlm.deploy.trackers import replay

    with console_events() as emit:
        replay(tracker, run, emit)
