"""Commands on a finished model: `evaluate`, `predict`, `serve`, `export`, `explain`, `push`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from cramlm.cli.options import LabelColumn, PairColumn, Precision, SeparatorOption, TextColumn
from cramlm.cli.process import check_address_space_of_model
from cramlm.errors import UsageError


def evaluate(
    model: Annotated[Path, typer.Argument(help="A finished run, an exported model, or an ONNX folder.")],
    file: Annotated[str, typer.Argument(help="Labelled texts.")],
    as_json: Annotated[bool, typer.Option("--json", help="Scores as JSON.")] = False,
    unseen_labels: Annotated[
        Literal["fail", "ignore"], typer.Option(help="ignore: a label that the model does not know counts as missed.")
    ] = "fail",
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    text_pair_column: PairColumn = None,
    label_separator: SeparatorOption = None,
) -> None:
    """Score a model on labelled texts: accuracy, micro- and macro-F1, a row per class; of numbers RMSE and correlations."""
    check_address_space_of_model(model, "evaluate")
    from cramlm.cli.console import show_table
    from cramlm.data.task import RowFormat, read_examples
    from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, format_metric
    from cramlm.inference.predictor import load_predictor
    from cramlm.inference.runs import model_of

    predictor = load_predictor(model_of(model))
    examples = read_examples(file, RowFormat(text_column, label_column, text_pair_column, predictor.kind, label_separator or "|"))
    if unseen_labels != "ignore":
        predictor.check_labels(examples, origin=file)
    scores = predictor.score(examples)
    if as_json:
        print(json.dumps(scores.as_dict(), ensure_ascii=False))
        return
    rows = [
        [name, f"{100 * row['precision']:.1f}", f"{100 * row['recall']:.1f}", f"{100 * row['f1']:.1f}", str(row["support"])]
        for name, row in scores.per_class.items()
    ]
    if rows:
        show_table(f"{len(examples)} texts", ("label", "precision", "recall", "F1", "texts"), rows)
    metrics = KINDS[predictor.kind].table_metrics
    print("  ".join(f"{METRIC_NAMES[metric]} {format_metric(metric, scores.metrics[metric], places=2)}" for metric in metrics))


def predict(
    model: Annotated[Path, typer.Argument(help="A finished run, an exported model, or an ONNX folder.")],
    file: Annotated[str, typer.Argument(help="Texts, in any form that fit takes; - reads one text or JSON object per line from stdin.")],
    out: Annotated[Path | None, typer.Option(help="Write JSON lines here instead of to stdout.")] = None,
    precision: Annotated[
        Precision, typer.Option(help="fp32: as in Python and over HTTP. auto: bf16 where hardware computes in it, with fp32's labels.")
    ] = "fp32",
    text_column: TextColumn = "text",
    text_pair_column: PairColumn = None,
) -> None:
    """Label texts: a JSON line each with label (or labels) and probabilities, or with a value, in the order of the input."""
    check_address_space_of_model(model, "predict")
    from cramlm.data.task import RowFormat, read_examples
    from cramlm.inference.predictor import load_predictor
    from cramlm.inference.runs import model_of
    from cramlm.storage.artifacts import publish_file

    folder = model_of(model)
    examples = read_examples(file, RowFormat(text_column, None, text_pair_column))
    predictor = load_predictor(folder, precision=precision)
    pairs = [example.text_pair for example in examples] if text_pair_column else None
    lines = (
        json.dumps({"id": example.id, **asdict(answer)}, ensure_ascii=False) + "\n"
        for example, answer in zip(examples, predictor.predict([example.text for example in examples], pairs), strict=True)
    )
    if out is None:
        sys.stdout.writelines(lines)
    else:
        publish_file(out, "".join(lines).encode())
        print(f"{len(examples)} answers: {out}")


def serve(
    model: Annotated[Path, typer.Argument(help="A finished run, an exported model, or an ONNX folder.")],
    host: Annotated[str, typer.Option(help="Address to listen on; one that other machines reach needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8000,
    token: Annotated[str | None, typer.Option(envvar="CRAMLM_TOKEN", help="Clients must send `Authorization: Bearer TOKEN`.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the model (default: PyTorch's choice).")] = None,
    batch_window_ms: Annotated[float, typer.Option(min=0, max=1000, help="How long an idle server waits for more texts.")] = 0.0,
    max_texts: Annotated[int, typer.Option(help="Texts in one request.")] = 64,
    max_characters: Annotated[int, typer.Option(help="Characters of one text.")] = 20_000,
    max_body_bytes: Annotated[int, typer.Option(help="Bytes of one request.")] = 1_000_000,
    queue_texts: Annotated[int, typer.Option(help="Texts that may wait; more are refused with 429.")] = 1024,
    max_wait: Annotated[float, typer.Option(help="Seconds that a request may wait to be computed before 429.")] = 2.0,
    read_timeout: Annotated[float, typer.Option(help="Seconds that a client has to send a request.")] = 10.0,
) -> None:
    """Answer over HTTP: POST /v1/predict, a page at /, /healthz, /readyz, /metrics, /openapi.json."""
    check_address_space_of_model(model, "serve")
    from cramlm.serving import serve as serve_model
    from cramlm.serving.limits import Address, Limits

    limits = Limits(
        body_bytes=max_body_bytes,
        texts=max_texts,
        characters=max_characters,
        queue_texts=queue_texts,
        wait_seconds=max_wait,
        read_seconds=read_timeout,
    )
    announce = partial(print, file=sys.stderr, flush=True)
    address = Address(host, port, token)
    code = serve_model(model, address, threads=threads, window_seconds=batch_window_ms / 1000, limits=limits, announce=announce)
    raise typer.Exit(code)


def export(
    path: Annotated[Path, typer.Argument(help="A finished run, or an exported model folder.")],
    form: Annotated[str, typer.Option("--format", help="onnx: a graph that runs without torch.")] = "onnx",
    int8: Annotated[bool, typer.Option("--int8", help="Quantise: smaller, answers change a little (told).")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result (default: onnx or onnx-int8 in the run).")] = None,
    texts: Annotated[str | None, typer.Option(help="Texts to check the result on (default: the run's dev and test).")] = None,
    text_column: TextColumn = "text",
    text_pair_column: PairColumn = None,
) -> None:
    """Turn a model into another form, checked against the model before it is published."""
    if form != "onnx":
        raise UsageError(f"--format {form!r} is not known; onnx is")
    from cramlm.cli.console import console_events
    from cramlm.data.task import RowFormat, read_examples
    from cramlm.export.onnx import export_onnx

    examples = None
    if texts is not None:
        examples = read_examples(texts, RowFormat(text_column, None, text_pair_column))
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
    check_address_space_of_model(model, "explain")
    from cramlm.cli.console import show_explanation
    from cramlm.inference.explain import explain_at

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
    check_address_space_of_model(model, "push")
    from cramlm.cli.console import console_events
    from cramlm.export.hub import push_model

    with console_events() as emit:
        url = push_model(model, repository, public=public, license_id=license_id, language=language, emit=emit)
    print(url)
