"""The commands on a finished model, `export`, `explain`, `push` and `track`: a part of the command line that cli.py takes in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cramlm.errors import UsageError


def add_commands(app: typer.Typer) -> None:
    """Put the commands of this file on a command line."""
    app.command()(export)
    app.command()(explain)
    app.command()(push)
    app.command()(track)


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
