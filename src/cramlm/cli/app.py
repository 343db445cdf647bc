"""The command line: the entry point `main`, the commands `fit` and `config`, and the list of all commands.

Commands parse options, call the Python API and print; they import heavy modules inside their functions. Results go to stdout, progress and
errors to stderr. An error is one line, `cramlm: error: ...`, with the exit code of its class (errors.py); --debug adds the traceback.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from cramlm import __version__
from cramlm.cli import data, experiments, models, runs
from cramlm.cli.help import MAX_WIDTH, Command, Group
from cramlm.cli.options import (
    FILES,
    BudgetOption,
    DataOptions,
    MethodOptions,
    OverwriteOption,
    RecipeOption,
    RecipeOptions,
    RowOptions,
    SeedOption,
    StoreOption,
    TrackerName,
    resolve_options,
    resolve_recipe,
    with_options,
)
from cramlm.cli.process import (
    Interrupted,
    allow_any_text,
    check_address_space,
    collect_garbage_less_often,
    interrupt_at_signals,
    is_out_of_memory,
    skip_last_collection,
    stop_on_signals,
)
from cramlm.errors import CramError
from cramlm.io.machine import available_cores, limit_spinning

_LINE_BREAKS: Final = re.compile(r"\s*[\r\n\v\f\x85\u2028\u2029]+\s*")
_STARTED = time.monotonic()  # a time budget starts with the command, not with the pipeline
app = typer.Typer(
    cls=Group,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": MAX_WIDTH},
    help="Train a small text classifier from scratch on labelled texts and on the raw text that they retrieve.\n\n"
    "Examples:\ncramlm sample-data data/\ncramlm fit --help",
)


def _version(value: bool) -> None:
    if value:
        print(f"cramlm {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")] = False,
) -> None:
    """Apply the options that come before the command."""
    if debug:
        os.environ["CRAMLM_DEBUG"] = "1"
    limit_spinning()
    if (cores := available_cores()) < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))  # otherwise torch and NumPy start a thread for each core of the machine
    collect_garbage_less_often(context.invoked_subcommand)
    check_address_space(context.invoked_subcommand)


def fit(
    *,
    data: DataOptions,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Folder of the run (default: runs/TASK-RECIPE-N)."),
    ] = None,
    overwrite: OverwriteOption = False,
    method: MethodOptions,
    budget: BudgetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run and what it costs; write nothing.")] = False,
    seed: SeedOption = None,
    rows: RowOptions,
    store: StoreOption = None,
    track: Annotated[
        TrackerName | None,
        typer.Option("--report-to", metavar="TRACKER", help="tensorboard, wandb, mlflow or trackio.", rich_help_panel=FILES),
    ] = None,
) -> None:
    """Train a classifier on labels and on the raw text they retrieve.

    Also scores and exports it. Repeat the command to resume a stopped run; a finished run is not trained again.

    Examples:
        cramlm fit --train train.csv --test test.csv --corpus 'corpus/*.jsonl' --budget 20m -o runs/mine
        cramlm fit --train train.csv --recipe static --corpus articles.txt
    """
    from cramlm.cli.console import console_events, show_table, summary_header, summary_rows

    if dry_run:
        runs.show_dry_run(resolve_options(data, rows, method, budget=budget, seed=seed))
        return
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # then only the first rank reads the training file, after `join`
    unread = replace(data, train="") if several and data.train else data
    resolved = resolve_options(unread, rows, method, budget=budget, seed=seed)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost rank is reported in one line, gloo's own report has fifty
    from cramlm.pipeline.context import Process
    from cramlm.pipeline.run import run  # after the config is validated: imports SciPy
    from cramlm.records import Event
    from cramlm.training.ranks import ALONE, Ranks

    joined: AbstractContextManager[Ranks] = nullcontext(ALONE)
    if several:
        from cramlm.training.distributed import join

        joined = join(resolved.distributed, device=resolved.device)
    with stop_on_signals() as stop, joined as ranks:
        if ranks.index > 0:
            run(resolved, process=Process(stop, _STARTED, ranks))
            return
        ranks.lead()
        if several:
            resolved = resolve_options(data, rows, method, budget=budget, seed=seed)
        with console_events() as emit:
            for note in unused_options(resolved, data, method, budget):
                emit(Event("note", "task", f"the recipe {resolved.name} {note} not used"))
            folders: dict[str, Any] = {"out": out, "overwrite": overwrite, "store": store, "track": track}
            finished = run(resolved, **folders, emit=emit, process=Process(stop, _STARTED, ranks))
    show_table(f"{resolved.name}: {finished.path}", summary_header(finished.scores), summary_rows(finished.scores))
    if finished.config.model == "encoder":
        flops = finished.scores["flops"]
        print(f"training FLOPs: {flops['executed']:.2e} executed; {flops['paper']:.2e} by the paper's formula, 6 x tokens x parameters")
    print(finished.scores["verdict"])
    print(f"report: {finished.path / 'report.html'}")
    print(f"model: {finished.export}")
    print(next_commands(finished.path, finished.config))


def unused_options(config: Any, data: DataOptions, method: MethodOptions, budget: str | None) -> Iterator[str]:
    """Yield the reason and the names of options that have no effect: they are about text or an encoder that the run does not use."""
    text_options = {"--corpus": data.corpus and not config.corpus, "--unlabelled": data.unlabelled and not config.task.unlabelled}
    is_linear = config.model != "encoder"
    encoder_options = {"--budget": budget and is_linear, "--preset": method.preset and is_linear, "--device": method.device and is_linear}
    for reason, options in (("reads labelled texts only", text_options), ("trains no encoder", encoder_options)):
        if unused := [option for option, is_unused in options.items() if is_unused]:
            yield f"{reason}: {' and '.join(unused)} {'is' if len(unused) == 1 else 'are'}"


def next_commands(run: Path, config: Any) -> str:
    """Return the commands that use a finished run, to print after `fit`."""
    folder, pair = shlex.quote(str(run)), "" if config.task.text_pair_column is None else ' --text-pair "another text"'
    explain = f'cramlm explain {folder} "some text"{pair}'
    return "\n  ".join(["next:", f"cramlm predict {folder} new.csv", explain, f"cramlm serve {folder}"])


def config(recipe: RecipeOption = None, *, options: RecipeOptions, rows: RowOptions) -> None:
    """Print all settings of a run as TOML, for `cramlm fit --config`.

    Examples:
        cramlm config --train train.csv --budget 20m > run.toml
    """
    from cramlm.config.run import to_toml

    resolved = resolve_recipe(recipe, options, rows)
    if not resolved.task.train:
        resolved = resolved.model_copy(update={"task": resolved.task.model_copy(update={"train": "train.jsonl"})})
    print(to_toml(resolved), end="")


PANELS: dict[str, tuple[Callable[..., Any] | typer.Typer, ...]] = {
    "Train": (fit, runs.plan, runs.recipes, experiments.compare, experiments.ablate),
    "Data": (data.check, data.index, data.search, data.select, data.passages, models.label_next, data.sample_data),
    "Models": (models.predict, models.evaluate, models.explain, runs.report, models.embed, models.export, models.push, models.serve),
    "Tools": (runs.doctor, runs.verify, runs.track, experiments.attention, config),
}
"""The commands in the order of --help."""

for panel, commands in PANELS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, name="recipes", rich_help_panel=panel)
        else:
            app.command(cls=Command, rich_help_panel=panel)(with_options(command))


def main() -> NoReturn:
    """Run the command line; print a traceback only with --debug."""
    interrupt_at_signals()
    skip_last_collection()
    allow_any_text()
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        code = app(prog_name="cramlm", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except CramError as error:
        _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        message = message.replace("Value error, ", "").rstrip(".") or "no command"
        _fail(f"{message}; see `{_command_of(getattr(error, 'ctx', None))} --help`", 2)
    except Interrupted as error:
        _fail(str(error), error.exit_code)
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):  # typer exits with 1 for it
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the program that reads the output has ended, like `head`
        sys.exit(0)
    except MemoryError:
        _exit_out_of_memory()
    except OSError as error:
        from cramlm.storage.locks import published_path

        _fail(f"{published_path(error.filename or 'system')}: {error.strerror or error}; check the path, space and permissions", 4)
    except Exception as error:
        if is_out_of_memory(error):
            _exit_out_of_memory()
        _fail(f"internal error: {type(error).__name__}: {error}; please report it with the output of --debug", 1)


def _command_of(context: Any) -> str:
    """Return the command in whose arguments an error is, like `cramlm recipes show`."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return " ".join(["cramlm", *names])


def _fail(message: str, code: int) -> NoReturn:
    _print_error(message)
    sys.exit(code)


def _exit_out_of_memory() -> NoReturn:
    """End the process without exit handlers: without memory, those of native libraries abort it with another exit code."""
    _print_error("out of memory; choose a smaller setting or close other programs")
    sys.stdout.flush()
    os._exit(4)


def _print_error(message: str) -> None:
    if os.environ.get("CRAMLM_DEBUG"):
        traceback.print_exc()
    line = _LINE_BREAKS.sub(" ", message.strip())  # other white space stays: a value that the message quotes may be passed as an option
    print(f"cramlm: error: {line}", file=sys.stderr, flush=True)
