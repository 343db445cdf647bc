"""The command line: parses, calls, prints. No logic that a Python user lacks; heavy modules are imported inside the commands.

Results go to stdout, progress and errors to stderr. Every error that a user can cause is one line, `cramlm: error: ...`, with the exit
code of its kind (errors.py); the traceback goes to the run's log, and to the terminal with --debug.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from cramlm.commands import SPINS, PresetOption, add_commands
from cramlm.errors import CramError, Stopped
from cramlm.options import checked, open_encoder, resolve_corpus, resolve_retriever, resolve_run
from cramlm.signals import EXIT_CODES, Interrupted, interrupt_at_signals

_STARTED = time.monotonic()  # a budget of time begins with the command, not with the pipeline
app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train a small text classifier from scratch on your labels and the slice of raw text that matters to them.",
)

TextColumn = Annotated[str, typer.Option("--text-column", help="Column that holds the text.")]
LabelColumn = Annotated[str, typer.Option("--label-column", help="Column that holds the label.")]
PairColumn = Annotated[str | None, typer.Option("--text-pair-column", help="Column of the second text, for sentence pairs.")]
OnBadRowOption = Annotated[str, typer.Option("--on-bad-row", help="fail: stop at the first bad row; skip: list it in rejected.jsonl.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="One knob, like phases[0].steps=500; may be repeated.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything random.")]
StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Where corpora and indexes are kept (default: $CRAMLM_STORE or the user's cache).")
]
Precision = Literal["auto", "fp32", "bf16"]
RayOption = Annotated[str | None, typer.Option("--ray", metavar="ADDRESS", help="Work on a Ray cluster: auto, host:port, or local.")]


@app.callback()
def common(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    """Options before the command."""
    if debug:
        os.environ["CRAMLM_DEBUG"] = "1"


@app.command()
def fit(
    train: Annotated[str | None, typer.Option(help="Labelled texts: jsonl, csv, tsv or parquet, also .gz or .zst.")] = None,
    dev: Annotated[str | None, typer.Option(help="Labelled texts to choose by; without it a part of train is split off.")] = None,
    test: Annotated[str | None, typer.Option(help="Labelled texts to report on; read once.")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="Raw text: file, folder or quoted glob; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/cramlm"),
    recipe: Annotated[str | None, typer.Option(help="tlm (default), random-retrieval or labels-only.")] = None,
    budget: Annotated[str | None, typer.Option(help="Wall-clock time for everything, like 20m, or operations, like 3e15flops.")] = None,
    preset: PresetOption = None,
    config: Annotated[Path | None, typer.Option(help="TOML as `cramlm config` prints it.")] = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    text_pair_column: PairColumn = None,
    on_bad_row: OnBadRowOption = "fail",
    store: StoreOption = None,
    track: Annotated[str | None, typer.Option(help="Send losses and scores to tensorboard, wandb, mlflow or trackio.")] = None,
) -> None:
    """Retrieve, train, evaluate and export; run it again to resume or to see that nothing is left to do."""
    from cramlm.console import console_events, show_table, summary_rows

    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    task = {"train": train, "dev": dev, "test": test, "on_bad_row": on_bad_row, **columns}
    resolved = resolve_run(recipe, config, set_, task=task, corpus=corpus, budget=budget, seed=seed, preset=preset)
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of a rank that is lost we tell in one line what gloo tells in fifty
    from cramlm.deploy.trackers import follow
    from cramlm.pipeline import run  # after the config was checked: this loads torch
    from cramlm.training.distributed import join

    with _stop_on_signals() as stop, _traceback_to(out / "error.log"), join(resolved.distributed) as ranks:
        if ranks.index > 0:
            run(resolved, out=out, stop=stop, ranks=ranks)
            return
        with console_events() as show, follow(track, out, resolved, show) as emit:
            finished = run(resolved, out=out, store=store, emit=emit, stop=stop, began=_STARTED, ranks=ranks)
    header = ("", "dev macro-F1", "test accuracy", "test micro-F1", "test macro-F1")
    show_table(f"{resolved.name}: {finished.path}", header, summary_rows(finished.scores))
    flops = finished.scores["flops"]
    print(f"training FLOPs: {flops['paper']:.2e} as the paper counts them (6 x tokens x parameters), {flops['executed']:.2e} executed")
    print(finished.scores["verdict"])
    print(f"model: {finished.export}")


@app.command()
def config(
    recipe: Annotated[str | None, typer.Option(help="tlm (default), random-retrieval or labels-only.")] = None,
    train: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    dev: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    test: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="As in fit.")] = None,
    budget: Annotated[str | None, typer.Option(help="As in fit.")] = None,
    preset: PresetOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
) -> None:
    """Print every knob as TOML; `cramlm fit --config` takes it back."""
    from cramlm.config import to_toml

    task = {"train": train or "train.jsonl", "dev": dev, "test": test}
    files = corpus or ["corpus/*.jsonl.zst"]
    print(to_toml(resolve_run(recipe, None, set_, task=task, corpus=files, budget=budget, seed=seed, preset=preset)), end="")


@app.command()
def index(
    corpus: Annotated[list[str], typer.Argument(help="Files, folders or quoted globs of raw text.")],
    out: Annotated[Path, typer.Option(help="Folder for the corpus and its index.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes (default: one per core); the result is the same.")] = None,
    ray: RayOption = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only the i-th of n shares of the work, for one job of an array.")] = None,
    text_column: TextColumn = "text",
    on_bad_row: OnBadRowOption = "fail",
) -> None:
    """Read raw text once and index it for search and selection."""
    from cramlm.console import console_events
    from cramlm.data.executors import Share, executor_for
    from cramlm.retrieval.catalog import build_catalog, build_share

    share = None if shard is None else Share.parse(shard)
    config = resolve_corpus(corpus, text_column=text_column, on_bad_row=on_bad_row)
    with console_events() as emit, executor_for(ray, workers) as executor:
        if share is None:
            build_catalog(config, out, workers=workers, executor=None if ray is None else executor, emit=emit)
        else:
            print(build_share(config, out, share, executor, emit=emit))
            return
    print(out)


@app.command()
def select(
    train: Annotated[str, typer.Option(help="Labelled texts; each is a query.")],
    index: Annotated[Path, typer.Option(help="What `cramlm index` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the selection.")],
    retriever: Annotated[str | None, typer.Option(help="bm25 (default), dsir, dense, random or union.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Documents per query (default: 50).")] = None,
    dev: Annotated[str | None, typer.Option(help="Passages that overlap these texts are dropped.")] = None,
    test: Annotated[str | None, typer.Option(help="Passages that overlap these texts are dropped.")] = None,
    max_documents: Annotated[str | None, typer.Option(help="Keep only the best-ranked so many, like 20k.")] = None,
    select_tokens: Annotated[str | None, typer.Option(help="Keep the best-ranked up to so many tokens, like 50M (estimated).")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One knob, like retriever.k1=1.5; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 13,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads (with --shard, processes); the result is the same.")] = 1,
    ray: RayOption = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only score the i-th of n shares of the index, into OUT.shares.")] = None,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    text_pair_column: PairColumn = None,
) -> None:
    """Write the passages that a task asks for, best rank first."""
    from cramlm.artifacts import refuse_foreign
    from cramlm.config import TaskConfig
    from cramlm.console import console_events, show_selection
    from cramlm.data.executors import Share, executor_for
    from cramlm.data.task import read_task
    from cramlm.retrieval.catalog import open_catalog
    from cramlm.retrieval.retrievers import Spread, search_share
    from cramlm.retrieval.selection import KIND, select_documents

    refuse_foreign(out, kind=KIND)
    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    task_config = checked(lambda: TaskConfig(train=train, dev=dev, test=test, **columns))
    given = {"kind": retriever, "top_k": top_k, "max_documents": max_documents, "max_tokens": select_tokens}
    chosen_by = resolve_retriever(given, set_)
    share = None if shard is None else Share.parse(shard)
    with console_events() as emit, executor_for(ray, threads) as executor:
        task = read_task(task_config, seed=seed, emit=emit)
        corpus, bm25 = open_catalog(index)
        spread = Spread(out.with_name(f"{out.name}.shares"), executor)
        if share is not None:
            print(search_share(chosen_by, corpus, bm25, task, share, spread, emit=emit))
            return
        used = spread if ray is not None or spread.folder.exists() else None
        means: dict[str, Any] = {"index": bm25, "store": index, "open_encoder": open_encoder, "threads": threads, "spread": used}
        chosen = select_documents(chosen_by, corpus, task, out=out, seed=seed, emit=emit, **means)
    show_selection(json.loads((out / "report.json").read_bytes()))
    print(f"{len(chosen)} passages: {out / 'selected.jsonl'}")


@app.command()
def search(
    index: Annotated[Path, typer.Argument(help="What `cramlm index` wrote.")],
    query: Annotated[str, typer.Argument(help="Any text.")],
    k: Annotated[int, typer.Option("-k", "--limit", min=1, help="How many passages.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per passage.")] = False,
) -> None:
    """Show the passages that a text retrieves, and by which of its words."""
    from cramlm.retrieval.catalog import search_catalog

    found = search_catalog(index, query, limit=k)
    for hit in found:
        if as_json:
            print(json.dumps(hit.as_dict(), ensure_ascii=False))
        else:
            terms = "  ".join(f"{term} {weight:.2f}" for term, weight in hit.terms[:8])
            print(f"{hit.rank + 1:>3}  {hit.score:8.3f}  {hit.id}  [{hit.source}]\n     {terms}\n     {_printable(hit.text[:200])}")
    if not found:
        print("no passage shares a word with this query", file=sys.stderr)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="An exported model folder.")],
    file: Annotated[str, typer.Argument(help="Labelled texts.")],
    as_json: Annotated[bool, typer.Option("--json", help="Scores as JSON.")] = False,
    unseen_labels: Annotated[str, typer.Option(help="fail, or ignore: a label the model does not know counts as missed.")] = "fail",
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    text_pair_column: PairColumn = None,
) -> None:
    """Score a model on labelled texts: accuracy, micro- and macro-F1, a row per class."""
    from cramlm.console import show_table
    from cramlm.data.task import read_examples
    from cramlm.deploy.predictor import Predictor

    examples = read_examples(file, text_column=text_column, label_column=label_column, text_pair_column=text_pair_column)
    predictor = Predictor.load(model)
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
    show_table(f"{len(examples)} texts", ("label", "precision", "recall", "F1", "texts"), rows)
    print(f"accuracy {100 * scores.accuracy:.2f}  micro-F1 {100 * scores.micro_f1:.2f}  macro-F1 {100 * scores.macro_f1:.2f}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="An exported model folder.")],
    file: Annotated[str, typer.Argument(help="Texts, in any form that fit takes; - reads one text or JSON object per line from stdin.")],
    out: Annotated[Path | None, typer.Option(help="Write JSON lines here instead of to stdout.")] = None,
    precision: Annotated[
        Precision, typer.Option(help="fp32: as in Python and over HTTP. auto: bf16 where hardware computes in it, with fp32's labels.")
    ] = "fp32",
    text_column: TextColumn = "text",
    text_pair_column: PairColumn = None,
) -> None:
    """Label texts: a JSON line each with label and probabilities, in the order of the input."""
    from cramlm.artifacts import publish_file
    from cramlm.data.task import read_examples
    from cramlm.deploy.onnx_predictor import load_predictor

    examples = read_examples(file, text_column=text_column, label_column=None, text_pair_column=text_pair_column)
    predictor = load_predictor(model, precision=precision)
    pairs = [example.text_pair for example in examples] if text_pair_column else None
    lines = (
        json.dumps({"id": example.id, "label": answer.label, "probabilities": dict(answer.probabilities)}, ensure_ascii=False) + "\n"
        for example, answer in zip(examples, predictor.predict([example.text for example in examples], pairs), strict=True)
    )
    if out is None:
        sys.stdout.writelines(lines)
    else:
        publish_file(out, "".join(lines).encode())
        print(f"{len(examples)} answers: {out}")


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="An exported model folder.")],
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
    from cramlm.deploy.server import serve as serve_model
    from cramlm.deploy.server_limits import Limits

    tell = partial(print, file=sys.stderr, flush=True)
    limits = Limits(
        body_bytes=max_body_bytes,
        texts=max_texts,
        characters=max_characters,
        queue_texts=queue_texts,
        wait_seconds=max_wait,
        read_seconds=read_timeout,
    )
    code = serve_model(
        model, host=host, port=port, token=token, threads=threads, window_seconds=batch_window_ms / 1000, limits=limits, announce=tell
    )
    raise typer.Exit(code)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folder of a run, finished or not; of several to see them side by side.")],
    out: Annotated[Path | None, typer.Option(help="The page (default: report.html in the run's folder; of several, runs.html).")] = None,
) -> None:
    """Write a run as one page to look at in a browser: data, retrieved text, learning, scores, mistakes; no network needed."""
    from cramlm.deploy.report.page import write_report

    print(write_report(runs, out))


add_commands(app)


def main() -> NoReturn:
    """Run the command line; never shows a traceback unless asked."""
    interrupt_at_signals()
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except CramError as error:
        _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        _fail(f"{message.rstrip('.')}; see `cramlm --help`" if message else "nothing to do; see `cramlm --help`", 2)
    except Interrupted as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output went away: not our error
        sys.exit(0)
    except MemoryError:
        _fail("out of memory; choose a smaller setting or close other programs", 4)
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}; check the path, space and permissions", 4)
    except Exception as error:
        _fail(f"internal error: {type(error).__name__}: {error}; please report it with the output of --debug", 1)


def _fail(message: str, code: int) -> NoReturn:
    if os.environ.get("CRAMLM_DEBUG"):
        traceback.print_exc()
    print(f"cramlm: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def _stop_on_signals() -> Iterator[Callable[[], int | None]]:
    """A `stop` that turns the first SIGTERM or SIGINT into its exit code; the second signal ends the process at once."""
    received: list[int] = []

    def remember(number: int, frame: Any) -> None:
        if received:
            os._exit(128 + number)
        received.append(EXIT_CODES[number])
        if os.environ.get("RANK", "0") == "0":  # of several ranks one speaks
            print("stopping at the next safe point; once more to stop at once", file=sys.stderr)

    previous = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: received[0] if received else None
        if received:
            raise Stopped("stopped; run the same command again to continue", exit_code=received[0])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _traceback_to(path: Path) -> Iterator[None]:
    """Keep the traceback of whatever fails in the run's folder."""
    try:
        yield
    except Exception:
        if path.parent.is_dir():
            path.write_text(traceback.format_exc(), "utf-8")
        raise


def _printable(text: str) -> str:  # for a terminal: control characters (escape sequences, line ends) as spaces
    return "".join(character if character.isprintable() else " " for character in text)
