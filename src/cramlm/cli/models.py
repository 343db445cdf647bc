"""Commands on a finished model: `evaluate`, `predict`, `serve`, `export`, `explain`, `push`."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, assert_never

import typer

from cramlm.cli.options import (
    COLUMNS,
    LIMITS,
    OTHER_FORMATS,
    AbstainAtAccuracyOption,
    AbstainBelowOption,
    IdColumn,
    JsonOption,
    ModelArgument,
    ModelLabelColumn,
    ModelPairColumn,
    ModelPartOption,
    ModelTextColumn,
    PrecisionOption,
    PredictionDevice,
    SeparatorOption,
    TextsArgument,
    abstain_threshold,
    printed_or_written,
    seed_option,
)
from cramlm.cli.process import check_address_space_of_model
from cramlm.errors import EnvironmentFault, UsageError, brief, counted

if TYPE_CHECKING:
    from cramlm.data.task import RowFormat
    from cramlm.inference.predictor import AnyPredictor
    from cramlm.io.readers import Table
    from cramlm.records import AnyPrediction, Example, FloatArray, SelectivePrediction

_AT_ONCE: Final = 8192  # texts computed before their rows are written; many, since an encoder computes texts of similar lengths together

_LEAST_TIME: Final = 0.001  # seconds of a limit of the server


def evaluate(
    model: ModelArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Labelled texts.")],
    as_json: JsonOption = False,
    device: PredictionDevice = "auto",
    unseen_labels: Annotated[
        Literal["fail", "ignore"],
        typer.Option(metavar="RULE", help="Labels that the model does not have: fail, or ignore: count these texts as wrong."),
    ] = "fail",
    model_part: ModelPartOption = "combined",
    text_column: ModelTextColumn = None,
    label_column: ModelLabelColumn = None,
    text_pair_column: ModelPairColumn = None,
    label_separator: SeparatorOption = None,
) -> None:
    """Score a model on labelled texts.

    Prints accuracy, micro- and macro-F1 and a row per label; for numbers RMSE, R² and correlations.

    Examples:
        cramlm evaluate runs/mine test.csv
        cramlm evaluate runs/mine test.csv --model-part static --json
    """
    check_address_space_of_model(model, "evaluate")
    from cramlm.cli.console import show_table
    from cramlm.data.task import read_examples
    from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, format_metric
    from cramlm.inference.folders import columns_of, model_of
    from cramlm.inference.predictor import load_predictor

    predictor = load_predictor(model_of(model), device=device, model_part=model_part)
    if label_separator is not None and predictor.kind != "multi-label":
        raise UsageError("--label-separator is for a model of several labels per text; leave it out")
    columns = columns_of(model_of(model), text_column, text_pair_column, label_column, label_separator)
    examples = read_examples(file, replace(columns, kind=predictor.kind))
    if unseen_labels != "ignore":
        predictor.check_labels(examples, origin=file)
    scores = predictor.score(examples)
    if as_json:
        print(json.dumps(scores.as_dict(), ensure_ascii=False))
        return
    rows = [
        [shown(name), *(f"{100 * row[score]:.1f}" for score in ("precision", "recall", "f1")), str(row["support"])]
        for name, row in scores.per_class.items()
    ]
    if rows:
        show_table(counted(len(examples), "text"), ("label", "precision", "recall", "F1", "texts"), rows)
    metrics = KINDS[predictor.kind].table_metrics
    print("  ".join(f"{METRIC_NAMES[metric]} {format_metric(metric, scores.metrics[metric], places=2)}" for metric in metrics))


def shown(label: str) -> str:
    """Return a label as a cell of a table: in one line."""
    return label if label.isprintable() else brief(label)


def predict(
    model: ModelArgument,
    file: TextsArgument,
    out: Annotated[Path | None, printed_or_written("File for the predictions: .jsonl, .csv or .tsv")] = None,
    precision: PrecisionOption = "fp32",
    device: PredictionDevice = "auto",
    model_part: ModelPartOption = "combined",
    abstain_below: AbstainBelowOption = None,
    abstain_at_accuracy: AbstainAtAccuracyOption = None,
    text_column: ModelTextColumn = None,
    text_pair_column: ModelPairColumn = None,
    id_column: IdColumn = "id",
    keep_columns: Annotated[
        bool, typer.Option("--keep-columns", help="Write the columns of FILE, too, from table to table.", rich_help_panel=COLUMNS)
    ] = False,
) -> None:
    """Predict the labels of texts and write a line per text.

    A line, JSON or a row of a table, has the id, the label (or labels) and probabilities, or a value, in input order. With one of the
    --abstain options it also has the calibrated confidence, and the label is null (empty in a table) if that is too low.

    Examples:
        cramlm predict runs/mine new.csv -o predictions.jsonl
        cramlm predict runs/mine new.csv -o predictions.csv --keep-columns
        cramlm predict runs/mine new.csv --abstain-at-accuracy 0.95
        echo "some text" | cramlm predict runs/mine -
    """
    if re.search(r"\s", file) and not re.search(r"\.\w+$", file) and not os.path.lexists(file):
        raise UsageError(f"{brief(file)}: no such file; pass a text itself on stdin: echo {shlex.quote(file)} | cramlm predict {model} -")
    check_address_space_of_model(model, "predict")
    from cramlm.data.task import read_examples
    from cramlm.inference.folders import model_of
    from cramlm.inference.predictor import load_predictor
    from cramlm.io.readers import Table
    from cramlm.storage.artifacts import publish_lines, refuse_output

    separator = None
    if out is not None:
        refuse_output(out, file)
        separator = separator_of(out)
    if keep_columns and separator is None:
        raise UsageError("--keep-columns writes a table; pass -o FILE.csv or FILE.tsv")
    folder = model_of(model)
    row_format = _texts_format(folder, text_column, text_pair_column, id_column)
    examples, label_separator = read_examples(file, row_format), row_format.label_separator
    table = Table.read(file) if keep_columns else None
    predictor = load_predictor(folder, precision=precision, device=device, model_part=model_part)
    if separator is not None:
        _refuse_joined_labels(predictor, label_separator)
    predict_some: Callable[[list[str], list[str | None]], Sequence[AnyPrediction | SelectivePrediction]] = predictor.predict
    if abstain_below is not None or abstain_at_accuracy is not None:
        below = abstain_threshold(predictor.calibrated(), abstain_below, abstain_at_accuracy)
        predict_some = partial(predictor.predict_or_abstain, below=below)
    rows = predicted_rows(examples, predict_some)
    if out is None:
        sys.stdout.writelines(json_lines(rows))
        return
    if separator is None:
        lines = json_lines(rows)
    elif table is None:
        lines = table_lines(map(with_columns, rows), separator, label_separator=label_separator)
    else:
        lines = beside_columns(table, rows, separator, label_separator=label_separator)
    publish_lines(out, lines)
    print(f"{counted(len(examples), 'prediction')}{'' if table is None else f' beside the columns of {file}'}: {out}")


def predicted_rows(
    examples: Sequence[Example], predict_some: Callable[[list[str], list[str | None]], Sequence[AnyPrediction | SelectivePrediction]]
) -> Iterator[dict[str, Any]]:
    """Yield the id and the prediction of each example, in order; `_AT_ONCE` predictions are in memory at a time."""
    for start in range(0, len(examples), _AT_ONCE):
        some = examples[start : start + _AT_ONCE]
        predictions = predict_some([example.text for example in some], [example.text_pair for example in some])
        for example, prediction in zip(some, predictions, strict=True):
            yield {"id": example.id, **_fields_of(prediction)}


def serve(
    model: ModelArgument,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen on; any but a loopback address needs --token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port to listen on; 0 is any free port.")] = 8000,
    token: Annotated[
        str | None, typer.Option("--token", metavar="TOKEN", envvar="CRAMLM_TOKEN", help="Clients must send `Authorization: Bearer TOKEN`.")
    ] = None,
    precision: PrecisionOption = "fp32",
    device: PredictionDevice = "auto",
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPU threads of the model (default: PyTorch's).")] = None,
    batch_window: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, max=1, help="Time that an idle server waits to fill a batch.")
    ] = 0.0,
    batch_window_ms: Annotated[float | None, typer.Option(min=0, max=1000, hidden=True)] = None,
    max_texts: Annotated[int, typer.Option(metavar="N", min=1, help="Texts in one request.", rich_help_panel=LIMITS)] = 64,
    max_characters: Annotated[int, typer.Option(metavar="N", min=1, help="Characters in one text.", rich_help_panel=LIMITS)] = 20_000,
    max_body_bytes: Annotated[int, typer.Option(metavar="N", min=1, help="Bytes of one request.", rich_help_panel=LIMITS)] = 1_000_000,
    queue_texts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Texts in the queue; beyond it status 429.", rich_help_panel=LIMITS)
    ] = 1024,
    max_wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=_LEAST_TIME, help="Time in the queue; beyond it status 429.", rich_help_panel=LIMITS)
    ] = 2.0,
    read_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=_LEAST_TIME, help="Time for sending a request.", rich_help_panel=LIMITS)
    ] = 10.0,
    model_part: ModelPartOption = "combined",
    abstain_below: AbstainBelowOption = None,
    abstain_at_accuracy: AbstainAtAccuracyOption = None,
) -> None:
    """Serve the predictions of a model over HTTP.

    Paths: POST /v1/predict, a page at /, /healthz, /readyz, /metrics, /openapi.json.

    Examples:
        cramlm serve runs/mine --port 8000 --abstain-below 0.6
        curl localhost:8000/v1/predict -H 'Content-Type: application/json' -d '{"texts": ["some text"]}'
    """
    check_address_space_of_model(model, "serve")
    from cramlm.serving import Address, Limits

    announce = partial(print, file=sys.stderr, flush=True)
    if batch_window_ms is not None:
        announce("cramlm: --batch-window-ms is now --batch-window, in seconds; the next version does not accept --batch-window-ms")
        batch_window = batch_window_ms / 1000
    limits = Limits(
        body_bytes=max_body_bytes,
        texts=max_texts,
        characters=max_characters,
        queue_texts=queue_texts,
        wait_seconds=max_wait,
        read_seconds=read_timeout,
    )
    if abstain_below is not None or abstain_at_accuracy is not None:
        from cramlm.inference.predictor import confidence_at

        abstain_below = abstain_threshold(confidence_at(model, model_part), abstain_below, abstain_at_accuracy)
    try:
        from cramlm.serving.batching import load_model
        from cramlm.serving.server import serve as serve_model
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("cramlm"):
            raise
        raise EnvironmentFault(f"serving needs the package {error.name}; run: pip install 'cramlm[serve]'") from error
    load = partial(load_model, threads=threads, precision=precision, device=device, model_part=model_part, abstain_below=abstain_below)
    code = serve_model(model, Address(host, port, token), load=load, window_seconds=batch_window, limits=limits, announce=announce)
    raise typer.Exit(code)


def export(
    path: Annotated[Path, typer.Argument(metavar="MODEL", help="A finished run, its export, or a Hugging Face classifier.")],
    form: Annotated[
        Literal["onnx", "sentence-transformers"],
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="onnx: a graph that runs without torch; sentence-transformers: the encoder for text vectors.",
        ),
    ] = "onnx",
    int8: Annotated[bool, typer.Option("--int8", help="Quantize to int8; reports the share of texts with the same label.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Output folder (default: a folder named like the format in the run).")
    ] = None,
    texts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Texts for the comparison with the model (default: dev and test of the run).")
    ] = None,
    text_column: ModelTextColumn = None,
    text_pair_column: ModelPairColumn = None,
) -> None:
    """Convert a model to ONNX or for sentence-transformers.

    The logits or the vectors of texts are compared with the model's before the folder is published.

    Examples:
        cramlm export runs/mine --format onnx --int8
        cramlm export runs/mine --format sentence-transformers -o encoder
    """
    if int8 and form != "onnx":
        raise UsageError("--int8 is for --format onnx; drop it")
    from cramlm.cli.console import console_events
    from cramlm.data.task import read_examples
    from cramlm.export.onnx import export_onnx
    from cramlm.export.sentence_transformers import export_sentence_encoder
    from cramlm.inference.folders import model_of

    examples = None
    if texts is not None:
        examples = read_examples(texts, _texts_format(model_of(path), text_column, text_pair_column))
    with console_events() as emit:
        match form:
            case "onnx":
                artifact = export_onnx(path, int8=int8, out=out, texts=examples, emit=emit)
            case "sentence-transformers":
                artifact = export_sentence_encoder(path, out=out, texts=examples, emit=emit)
            case _:
                assert_never(form)
    print(artifact.path)


def explain(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text to explain.")],
    text_pair: Annotated[str | None, typer.Option(metavar="TEXT", help="Second text, for a model of pairs.")] = None,
    label: Annotated[str | None, typer.Option(metavar="NAME", help="The label to explain (default: the most probable one).")] = None,
    passages: Annotated[int, typer.Option(metavar="N", min=0, help="Number of nearest retrieved passages to show.")] = 3,
    model_part: ModelPartOption = "combined",
    as_json: JsonOption = False,
) -> None:
    """Show what each word contributes to the label or number of a text.

    The contribution is the decrease of the label's log-odds, or of the number, without the word. Of a pair, the words of both texts are
    shown; of a run, also the nearest retrieved passages. Of a text of more than 500 words, each of at most 500 spans of consecutive words
    has a contribution.

    Examples:
        cramlm explain runs/mine "aspirin irreversibly inhibits COX-1"
        cramlm explain runs/pairs "a ship is in the harbour" --text-pair "a boat is at sea"
    """
    from cramlm.io.formats import names_data_file

    for is_named, what in ((os.path.isfile, "is a file"), (names_data_file, "no such file")):
        if (file := next(filter(is_named, [text, text_pair or ""]), None)) is not None:
            raise UsageError(f"{file}: {what}, and explain reads one text; pass the text itself, or use cramlm predict for a file")
    if text == "-":
        raise UsageError("-: explain reads one text from the command line; pass the text itself in place of -")
    check_address_space_of_model(model, "explain")
    from cramlm.cli.console import show_explanation
    from cramlm.inference.explain import explain_at

    explanation = explain_at(model, text, text_pair=text_pair, label=label, passages=passages, model_part=model_part).as_dict()
    if as_json:
        print(json.dumps(explanation, ensure_ascii=False))
    else:
        show_explanation(explanation)


def embed(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A finished run (of an encoder or static), its export, or a Hugging Face classifier.")
    ],
    file: TextsArgument,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Vectors: .npy, or .parquet with the columns id and embedding.")],
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale each vector to length 1, for inner products as cosines.")] = False,
    model_part: Annotated[
        Literal["encoder", "static"] | None,
        typer.Option("--model-part", metavar="PART", help="encoder (default): pooled hidden states; static: averaged word vectors."),
    ] = None,
    text_column: ModelTextColumn = None,
    text_pair_column: ModelPairColumn = None,
    id_column: IdColumn = "id",
) -> None:
    """Write a vector for each text, for search and clustering.

    Vectors are float32, in the order of the texts.

    Examples:
        cramlm embed runs/mine new.jsonl -o vectors.npy
        cramlm embed runs/mine new.csv -o vectors.parquet --normalize
    """
    ending = out.suffix.lower()
    if ending not in (".npy", ".parquet"):
        raise UsageError(f"{out}: vectors are written as .npy or .parquet; choose one of these endings")
    check_address_space_of_model(model, "embed")
    from cramlm.data.task import read_examples
    from cramlm.inference.folders import model_of
    from cramlm.inference.predictor import load_predictor
    from cramlm.linear.files import is_linear
    from cramlm.storage.artifacts import publish_written, refuse_output

    refuse_output(out, file)
    folder = model_of(model)
    predictor = load_predictor(folder, model_part=model_part or ("combined" if is_linear(folder) else "encoder"))
    examples = read_examples(file, _texts_format(folder, text_column, text_pair_column, id_column))
    vectors = text_vectors(examples, predictor, normalize=normalize)
    first = next(vectors)
    write = write_npy if ending == ".npy" else write_parquet
    publish_written(out, partial(write, itertools.chain([first], vectors), [example.id for example in examples], first.shape[1]))
    print(f"{counted(len(examples), 'vector')} of {first.shape[1]} numbers: {out}")


def text_vectors(examples: Sequence[Example], predictor: AnyPredictor, *, normalize: bool) -> Iterator[FloatArray]:
    """Yield the vectors of at most `_AT_ONCE` examples at a time, float32 (n, width), in order.

    normalize: scale each vector to length 1; one of zeros, of a text without a known token, stays so.
    """
    from cramlm.storage.arrays import unit_vectors

    for start in range(0, len(examples), _AT_ONCE):
        some = examples[start : start + _AT_ONCE]
        vectors = predictor.embeddings([example.text for example in some], [example.text_pair for example in some])
        yield unit_vectors(vectors) if normalize else vectors


def write_npy(vectors: Iterable[FloatArray], ids: Sequence[str], width: int, file: BinaryIO) -> None:
    """Write the content of the .npy file of vectors, (len(ids), width)."""
    import numpy as np

    from cramlm.storage.arrays import array_header

    file.write(array_header(np.float32, (len(ids), width)))
    for some in vectors:
        file.write(some.tobytes())


def write_parquet(vectors: Iterable[FloatArray], ids: Sequence[str], width: int, file: BinaryIO) -> None:
    """Write the content of a parquet file with the columns id (string) and embedding (list of `width` float32)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"id": pa.string(), "embedding": pa.list_(pa.float32(), width)})
    done = 0
    with pq.ParquetWriter(file, schema, use_dictionary=False) as writer:  # neither ids nor vectors repeat
        for some in vectors:
            column = pa.FixedSizeListArray.from_arrays(pa.array(some.ravel()), width)
            writer.write_table(pa.table([pa.array(ids[done : done + len(some)], pa.string()), column], schema=schema))
            done += len(some)


def label_next(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A finished run, its export, an ONNX folder, or a Hugging Face classifier.")
    ],
    file: Annotated[str, typer.Argument(metavar="FILE", help="Texts without labels, in a format that fit reads.")],
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", min=1, help="Number of texts to choose.")] = 50,
    out: Annotated[Path | None, printed_or_written("File for the texts: .jsonl, .csv or .tsv")] = None,
    labelled: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="More labelled texts that are left out, beside those of the run; may be repeated."),
    ] = None,
    model_part: ModelPartOption = "combined",
    seed: Annotated[int, seed_option("Seed of the choice among similar texts.")] = 0,
    text_column: ModelTextColumn = None,
    text_pair_column: ModelPairColumn = None,
    id_column: IdColumn = "id",
) -> None:
    """Choose the texts to label next.

    These are texts of low confidence that differ from one another. Writes a row per text, the least certain first, with an empty label to
    fill in; the columns are those of the training file. Texts that are labelled in the run are left out. For several labels per text the
    rows are JSON lines.

    Examples:
        cramlm label-next runs/mine unlabelled.jsonl -n 50 -o next.csv
    """
    check_address_space_of_model(model, "label-next")
    from cramlm.data.task import read_examples
    from cramlm.inference.folders import columns_of, model_of, task_of
    from cramlm.inference.label_next import label_next as choose
    from cramlm.inference.predictor import load_predictor
    from cramlm.storage.artifacts import publish_lines, refuse_output

    separator = None
    if out is not None:
        refuse_output(out, file, *(labelled or ()))
        separator = separator_of(out)
    folder = model_of(model)
    row_format, label = _texts_format(folder, text_column, text_pair_column, id_column), columns_of(folder).label_column or "label"
    columns = Counter(("id", "predicted", "margin", label, row_format.text_column, row_format.text_pair_column))
    if (repeated := columns.most_common(1)[0])[1] > 1:
        raise UsageError(f"two columns of the output would be named {repeated[0]!r}; give the column of texts or of labels another name")
    task = task_of(folder)
    labelled_rows = [] if task is None else [*task.train, *task.dev, *task.test]
    for name in labelled or ():
        labelled_rows += read_examples(name, replace(row_format, id_column=None))
    examples = read_examples(file, row_format)
    predictor = load_predictor(folder, model_part=model_part)
    if separator is not None and predictor.kind == "multi-label":
        raise UsageError(
            f"{out}: for several labels an empty cell means no label, so that a row left empty is not found; pass -o FILE.jsonl"
        )
    choice = choose(predictor, examples, count, labelled=labelled_rows, seed=seed, origin=file)
    unknown = "; the model is not in a run, so texts that it was trained on are not recognized (--labelled)" if not labelled_rows else ""
    message = (
        f"{len(choice.chosen):,} of {len(examples):,} texts; left out: {choice.labelled:,} labelled already, {choice.repeated:,} repeated"
    )
    print(f"{message}{unknown}", file=sys.stderr)
    rows = [
        {
            "id": each.example.id,
            row_format.text_column: each.example.text,
            **({} if row_format.text_pair_column is None else {row_format.text_pair_column: each.example.text_pair}),
            label: None,
            "predicted": each.predicted,
            "margin": round(each.margin, 4),
        }
        for each in choice.chosen
    ]
    lines = json_lines(rows) if separator is None else table_lines(rows, separator)
    if out is None:
        sys.stdout.writelines(lines)
    else:
        publish_lines(out, lines)
        print(f"{counted(len(rows), 'text')}: {out}")


def _texts_format(model: Path, text: str | None, pair: str | None, id_column: str | None = None) -> RowFormat:
    """Return the columns of texts without labels: those that are given, for None those that the model in a folder was trained on."""
    from cramlm.inference.folders import columns_of

    return replace(columns_of(model, text, pair), label_column=None, id_column=id_column, ids="any")


def _fields_of(prediction: AnyPrediction | SelectivePrediction) -> dict[str, Any]:
    """As `asdict`, which copies the dictionary of probabilities value by value."""
    return {field.name: getattr(prediction, field.name) for field in fields(prediction)}


def with_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prediction with a column `probability_LABEL` for each label in place of the dictionary."""
    flat = {name: value for name, value in row.items() if name != "probabilities"}
    return flat | {f"probability_{label}": value for label, value in row.get("probabilities", {}).items()}


def beside_columns(table: Table, predictions: Iterable[Mapping[str, Any]], separator: str, *, label_separator: str) -> Iterator[str]:
    """Yield the lines of a table with the predictions of its rows in further columns, the label as `predicted`.

    separator: that of the format; a .csv file with semicolons keeps them, and a byte order mark is kept, for the program that reads it.
    label_separator: as in `table_lines`.

    Raises:
        UsageError: if a column of the predictions is in the table already.
    """

    def joined() -> Iterator[dict[str, Any]]:
        for row, prediction in zip(table.rows, predictions, strict=True):
            named = {
                "predicted" if name in ("label", "labels", "value") else name: value for name, value in prediction.items() if name != "id"
            }
            columns = with_columns(named)
            if own := row.keys() & columns.keys():
                raise UsageError(
                    f"{table.path}: it has a column {min(own)!r} already, as the predictions do; rename it, or drop --keep-columns"
                )
            yield row | columns

    if table.marked:
        yield "\N{BYTE ORDER MARK}"
    written = ";" if (separator, table.separator) == (",", ";") else separator
    yield from table_lines(joined(), written, label_separator=label_separator)


def separator_of(out: Path) -> str | None:
    """Return the separator of the table that `out` is by its ending; None for JSON lines.

    Raises:
        UsageError: if the ending is that of a format that is not written.
    """
    ending = out.suffix.lower()
    if ending in OTHER_FORMATS:
        raise UsageError(f"{out}: rows are written as JSON lines (.jsonl) or as a table (.csv, .tsv); choose one of these endings")
    return {".csv": ",", ".tsv": "\t"}.get(ending)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each row as a line of JSON."""
    return (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table_lines(rows: Iterable[Mapping[str, Any]], separator: str, *, label_separator: str = "|") -> Iterator[str]:
    """Yield the lines of a table of rows with equal keys, the header first; None is empty. Nothing if there is no row.

    label_separator: between the labels of a cell.
    """
    for number, row in enumerate(rows):
        if not number:
            yield _line(row, separator)
        yield _line((label_separator.join(value) if isinstance(value, list | tuple) else value for value in row.values()), separator)


def _refuse_joined_labels(predictor: AnyPredictor, separator: str) -> None:
    """Raise UsageError if several labels in a cell could not be separated again."""
    joined = next((label for label in predictor.labels if separator in label), None) if predictor.kind == "multi-label" else None
    if joined is not None:
        raise UsageError(f"label {brief(joined)} contains {separator}, which separates the labels of a cell; pass -o FILE.jsonl")


def _line(cells: Iterable[Any], separator: str) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=separator, lineterminator="\r\n").writerow(cells)  # with "\n" a cell with "\r" is not quoted
    return text.getvalue().removesuffix("\r\n") + "\n"


def push(
    model: ModelArgument,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face Hub; created if missing.")],
    public: Annotated[bool, typer.Option("--public", help="Create the repository as public (default: private).")] = False,
    license_id: Annotated[str | None, typer.Option("--license", metavar="NAME", help="License in the model card, like apache-2.0.")] = None,
    language: Annotated[str | None, typer.Option(metavar="CODE", help="Language in the model card, like en.")] = None,
) -> None:
    """Upload a model with its card to the Hugging Face Hub.

    The access token is in the environment variable HF_TOKEN.

    Examples:
        cramlm push runs/mine me/topics --license apache-2.0 --language yo
    """
    check_address_space_of_model(model, "push")
    from cramlm.cli.console import console_events
    from cramlm.export.hub import push_model

    with console_events() as emit:
        url = push_model(model, repository, public=public, license_id=license_id, language=language, emit=emit)
    print(url)
