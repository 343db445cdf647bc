"""Options that several commands share, and how options become a config.

An option overrides the config file, also where it equals the default. Options that a config file may set (`Optional...`) have therefore
the default None.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_type_hints

import typer

from cramlm.errors import DataError, UsageError, brief

if TYPE_CHECKING:
    from cramlm.evaluation.confidence import Confidence


def resolve_run(
    recipe: str | None,
    config_file: Path | None,
    overrides: list[str] | None,
    *,
    task: dict[str, Any],
    corpus: list[str] | None,
    budget: str | None,
    seed: int | None,
    preset: str | None = None,
    init: str | None = None,
    device: str | None = None,
) -> Any:
    """Return the run config: a recipe or a config file, overridden by the options, then the preset, then every --set.

    A value of None, also in `task`, leaves the setting as it is. `task["on_bad_row"]` is for the corpus, too. With a config file, `init`
    sets the initial weights and keeps the phases.

    Raises:
        UsageError: for a value that a setting does not accept, or --config with --recipe. DataError: for a bad row of the training file.
    """
    from cramlm import recipes
    from cramlm.config.base import parse_budget
    from cramlm.config.run import apply_overrides, load_config, read_toml

    if budget is not None:
        parse_budget(budget)
    task_settings = {name: value for name, value in task.items() if value is not None}
    if config_file is not None:
        if recipe is not None:
            raise UsageError("--config and --recipe exclude each other: a config file is a resolved recipe; drop one")
        data = read_toml(config_file)
        if not all(isinstance(data.get(name, {}), dict) for name in ("task", "corpus")):
            load_config(data, origin=str(config_file))  # raises: they are tables
        data.setdefault("task", {}).update(task_settings)
        if corpus:
            data.setdefault("corpus", {})["files"] = list(corpus)
        data.update({name: value for name, value in (("budget", budget), ("seed", seed), ("init", init)) if value is not None})
        if init is not None:  # encoder and tokenizer are those of the folder
            data = {name: value for name, value in data.items() if name not in ("encoder", "tokenizer")}
    else:
        if recipe is not None and recipe.endswith(".toml"):
            raise UsageError(f"--recipe {recipe}: is a config file; pass it with --config to fit or plan")
        if "train" not in task_settings:
            raise UsageError("no training data; pass --train FILE (or --config run.toml)")
        given = {"budget": budget, "seed": seed, "init": init, "device": device}
        options = {key: value for key, value in given.items() if value is not None}
        data = recipe_data(recipe or "tlm", {"corpus": corpus, **task_settings, **options}, overrides or [])
    if data.get("corpus") and "on_bad_row" in task_settings:
        data["corpus"]["on_bad_row"] = task_settings["on_bad_row"]
    origin = str(config_file or "command line")
    if preset is not None:
        data = recipes.with_preset(load_config(data, origin=origin), preset).model_dump(mode="json")
    data |= {} if device is None else {"device": device}
    return load_config(apply_overrides(data, overrides or []), origin=origin)


def recipe_data(name: str, arguments: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the config that a recipe builds from `arguments`, as plain data.

    Of `overrides` only what a recipe reads is applied: the section `task` and the seed, since it counts the rows of the training file, and
    the budget and the device, on which its size depends.

    Raises:
        UsageError: if there is no such recipe, or it refuses an argument. DataError: if the training file has a bad row.
    """
    from cramlm import recipes
    from cramlm.config.run import TaskConfig, apply_overrides

    build, suffix_arguments = recipes.find(name)
    read = [override for override in overrides if re.match(r"\s*(task\.|(budget|device|seed)\s*=)", override)]
    settings = apply_overrides({"task": {}}, read)
    if task := settings.pop("task"):  # here, since a recipe names its arguments in errors, not settings
        named = {name: value for name, value in arguments.items() if name in TaskConfig.model_fields}
        checked(lambda: TaskConfig.model_validate({**named, **task}), section="task")
    every = {**arguments, **task, **settings, **suffix_arguments}
    data: dict[str, Any] = checked(lambda: build(**every)).model_dump(mode="json")
    return data


def resolve_retriever(options: Mapping[str, Any], overrides: list[str] | None, *, bm25: Mapping[str, Any]) -> Any:
    """Return the retriever config: BM25 with the options that are not None, then every --set retriever.NAME=VALUE.

    bm25: k1, b and norm of the index, used where nothing else is set, also by the members of a union.
    """
    from cramlm.config.retriever import RETRIEVER, without_queries
    from cramlm.config.run import apply_overrides

    table = {"kind": "bm25"} | {name: value for name, value in options.items() if value is not None}
    data = apply_overrides({"retriever": table}, overrides or [])
    if unknown := sorted(set(data) - {"retriever"}):
        raise UsageError(f"--set {unknown[0]}: select has only the settings of retriever, like retriever.k1=1.5")
    retriever = data["retriever"]
    is_table = isinstance(retriever, dict)
    if is_table and options.get("top_k") is not None and without_queries(kind := retriever.get("kind")):
        raise UsageError(f"--top-k: the retriever {kind} has no number of passages per query; pass --max-documents N in its place")
    members = retriever.get("retrievers") if is_table else None
    for each in (retriever, *(members if isinstance(members, list) else ())):
        if isinstance(each, dict) and each.get("kind") == "bm25":
            each.update({name: value for name, value in bm25.items() if name not in each})
    return checked(lambda: RETRIEVER.validate_python(retriever), section="retriever")


def resolve_corpus_settings(files: list[str], overrides: list[str] | None) -> Any:
    """Return the corpus config of files with every --set corpus.NAME=VALUE."""
    from cramlm.config.run import CorpusConfig, apply_overrides

    data = apply_overrides({"corpus": {"files": files}}, overrides or [])
    corpus = data.pop("corpus")
    if data or not isinstance(corpus, dict):
        raise UsageError(f"--set {min(data, default='corpus')}: check has only the settings of corpus, like corpus.text_column=body")
    return checked(lambda: CorpusConfig.model_validate(corpus), section="corpus")


def read_stop_words(value: str) -> str | list[str]:
    """Return the value of --stop-words: the name of a list, or the lines of a file.

    Raises:
        DataError: a line has several words, such as a comment, whose words would all be stop words.
    """
    from cramlm.io.readers import Reader
    from cramlm.io.rows import Column

    if value in ("none", "english"):
        return value
    words = []
    for row in Reader(value, [Column("word")], txt_rows="lines"):
        word = (row.values[0] or "").strip()
        if len(word.split()) > 1:
            raise DataError(f"{value}:{row.line}: {brief(word)} is more than one word; write a stop word per line, without comments")
        words.append(word)
    return words


def top_k_option(text: str) -> Any:
    """Return the option for the number of hits, with this help."""
    return typer.Option("--top-k", "-k", metavar="N", min=1, help=text)


def seed_option(text: str) -> Any:
    """Return the option for a seed, with this help."""
    return typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help=text)


def printed_or_written(text: str) -> Any:
    """Return the option for a file to write; without it, or with `-` for the file, the value is None: standard output."""
    return typer.Option("-o", "--out", metavar="FILE", help=f"{text} (default, or -: standard output).", callback=_none_for_dash)


def _none_for_dash(file: Path | None) -> Path | None:
    return None if file == Path("-") else file


def complete_recipe(incomplete: str) -> list[str]:
    """Return the names of recipes that start with `incomplete`, for the completion of a shell."""
    from cramlm.recipes import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def checked(build: Callable[[], Any], *, section: str = "") -> Any:
    """Return `build()`, which validates options; raise UsageError instead of pydantic's ValidationError.

    section: the table of settings that is validated, if --set names its settings.
    """
    from pydantic import ValidationError

    from cramlm.config.run import explain_validation_error

    try:
        return build()
    except ValidationError as error:
        raise UsageError(f"command line: {explain_validation_error(error, section=section)}") from error


def abstain_threshold(confidence: Confidence, below: float | None, at_accuracy: float | None) -> float:
    """Return the threshold of the options --abstain-below and --abstain-at-accuracy, and print what it gave on dev to stderr.

    Raises:
        UsageError: if both are given, or the accuracy is not reached.
    """
    if below is not None and at_accuracy is not None:
        raise UsageError("--abstain-below and --abstain-at-accuracy exclude each other; drop one")
    threshold = confidence.threshold(accuracy=at_accuracy) if at_accuracy is not None else below
    assert threshold is not None, "the caller checks that one is given"
    texts, right = confidence.dev.at_threshold(threshold)
    total = int(confidence.dev.texts[-1])
    accuracy = f", {right / texts:.1%} of these labels are right" if texts else ""
    print(f"no label below confidence {threshold:g}; on dev {texts:,} of {total:,} texts get one{accuracy}", file=sys.stderr)
    return threshold


# The panels of --help that options of several commands are in; an option without one is among the first ("Options").
COLUMNS: Final = "Columns and labels"
METHOD: Final = "Method and settings"
FILES: Final = "Files and tracking"
LIMITS: Final = "Limits"
BM25: Final = "BM25"

# Choices as literal types: typer validates and completes them. They repeat types of packages that --help should not import
# (tests/cli/test_help.py compares them).
TaskType = Literal["classification", "multi-label", "regression"]
ModelPart = Literal["combined", "encoder", "static", "bayes", "tfidf"]
DuplicateRule = Literal["exact", "words", "none"]
BadRowRule = Literal["fail", "skip"]
Preset = Literal["tiny", "mini", "small", "base", "bert-base", "bert-large"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
RetrieverName = Literal["bm25", "dsir", "dense", "random", "union"]
Norm = Literal["exact", "lucene"]
Diacritics = Literal["keep", "remove"]
Precision = Literal["auto", "fp32", "bf16"]
MOST_K1: Final = 1000  # as in config/retriever.py, which --help need not import
NORM_HELP = "Document lengths: exact, or lucene: as Lucene stores them, in one byte"
ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A finished run, its export, an ONNX folder, or a Hugging Face classifier.")
]
TextsArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="Texts, in a format that fit reads; - reads a text or a JSON object per line from stdin.")
]
TrainOption = Annotated[str | None, typer.Option("--train", metavar="FILE", help="Labelled texts (jsonl, csv, tsv, parquet; .gz, .zst).")]
DevOption = Annotated[str | None, typer.Option("--dev", metavar="FILE", help="Labelled texts to choose settings (default: part of train).")]
CorpusOption = Annotated[
    list[str] | None, typer.Option("--corpus", metavar="FILES", help="Raw text: file, folder or quoted glob; may be repeated.")
]
UnlabelledOption = Annotated[
    list[str] | None,
    typer.Option("--unlabelled", metavar="FILE", help="Texts of the task without labels; may be repeated."),
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", metavar="BUDGET", help="Time of the run, like 20m, or operations, like 3e15flops.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ThreadsOption = Annotated[int, typer.Option("--threads", metavar="N", min=1, help="CPU threads; the result is the same.")]
OTHER_FORMATS = (".parquet", ".arrow", ".feather", ".xlsx", ".gz", ".zst", ".npy")
"""Endings of formats in which no command writes rows."""


def _column(flag: str, text: str) -> Any:
    """Return the option for the name of a column, with this help."""
    return typer.Option(flag, metavar="NAME", help=text, rich_help_panel=COLUMNS)


IdColumn = Annotated[str, _column("--id-column", "Column that holds the ids; only the default column may be missing.")]
TextColumn = Annotated[str, _column("--text-column", "Column that holds the text.")]
LabelColumn = Annotated[str, _column("--label-column", "Column that holds the label.")]
ModelTextColumn = Annotated[str | None, _column("--text-column", "Column that holds the text (default: as in training).")]
ModelLabelColumn = Annotated[str | None, _column("--label-column", "Column that holds the label (default: as in training).")]
ModelPairColumn = Annotated[str | None, _column("--text-pair-column", "Column of the second text (default: as in training).")]
PairColumn = Annotated[str | None, _column("--text-pair-column", "Column of the second text, for sentence pairs.")]
KindOption = Annotated[
    TaskType | None,
    typer.Option(
        "--task-type",
        metavar="TYPE",
        help="classification (default), multi-label, regression.",
        rich_help_panel=COLUMNS,
    ),
]
SeparatorOption = Annotated[
    str | None,
    typer.Option(
        "--label-separator",
        metavar="CHAR",
        help="Between several labels in one cell (default: |).",
        rich_help_panel=COLUMNS,
    ),
]
DuplicatesOption = Annotated[
    DuplicateRule,
    typer.Option("--duplicates", metavar="RULE", help="exact: drop copies; words: also if case or punctuation differ; none: keep all."),
]
OnBadRowOption = Annotated[
    BadRowRule, typer.Option("--on-bad-row", metavar="RULE", help="fail at the first bad row, or skip: list it in rejected.jsonl.")
]


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """Options for the columns of task files, by the names of `TaskConfig`; None leaves a setting as it is."""

    text_column: Annotated[str | None, _column("--text-column", "Column that holds the text (default: text).")] = None
    label_column: Annotated[str | None, _column("--label-column", "Column that holds the label (default: label).")] = None
    text_pair_column: PairColumn = None
    kind: KindOption = None
    label_separator: SeparatorOption = None


@dataclass(frozen=True, slots=True)
class RowOptions(ColumnOptions):
    """Options that say how the rows of task files are read."""

    on_bad_row: Annotated[
        BadRowRule | None,
        typer.Option(
            "--on-bad-row",
            metavar="RULE",
            help="fail (default), or skip: leave bad rows out, with a warning.",
            rich_help_panel=COLUMNS,
        ),
    ] = None


SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, like phases[0].steps=500; may be repeated.", rich_help_panel=METHOD),
]
SeedOption = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of all random numbers.", rich_help_panel=METHOD)]
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help="Corpora, indexes, shared stages (default: $CRAMLM_STORE or a cache).",
        rich_help_panel=FILES,
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace --out if it is a run on another task.", rich_help_panel=FILES)]
ModelPartOption = Annotated[
    ModelPart,
    typer.Option("--model-part", metavar="PART", help="combined (all models), or encoder, static, bayes or tfidf alone."),
]
AbstainBelowOption = Annotated[
    float | None,
    typer.Option("--abstain-below", min=0, max=1, metavar="SHARE", help="Give texts of lower confidence no label (null), like 0.6."),
]
AbstainAtAccuracyOption = Annotated[
    float | None,
    typer.Option(
        "--abstain-at-accuracy",
        min=0,
        max=1,
        metavar="SHARE",
        help="The same at the threshold where this share of the labels is right on dev, like 0.95.",
    ),
]
RayOption = Annotated[str | None, typer.Option("--ray", metavar="ADDRESS", help="Run on a Ray cluster: auto, host:port, or local.")]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help="Method, like tlm (default) or static; see `cramlm recipes`.",
        autocompletion=complete_recipe,
    ),
]
InitOption = Annotated[
    str | None,
    typer.Option("--base-model", metavar="DIR", help="Pretrained weights: Hugging Face folder, or export/mlm.", rich_help_panel=METHOD),
]
DEVICE_HELP = "auto, cpu, cuda or cuda:N; auto: a GPU if PyTorch has one."
DeviceOption = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help=DEVICE_HELP, rich_help_panel=METHOD)]
PrecisionOption = Annotated[
    Precision, typer.Option(metavar="TYPE", help="Of an encoder: fp32, bf16, or auto: bf16 if the device has it, labels as with fp32.")
]
PredictionDevice = Annotated[str, typer.Option("--device", metavar="DEVICE", help=f"Of an encoder: {DEVICE_HELP}")]
PresetOption = Annotated[
    Preset | None,
    typer.Option(
        "--preset",
        metavar="SIZE",
        help="Size: tiny, mini, small, base, bert-base or bert-large.",
        rich_help_panel=METHOD,
    ),
]


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Options for the files of a run."""

    train: TrainOption = None
    dev: DevOption = None
    test: Annotated[str | None, typer.Option("--test", metavar="FILE", help="Labelled texts for the final scores; evaluated once.")] = None
    corpus: CorpusOption = None
    unlabelled: UnlabelledOption = None


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Options for the method of a run."""

    recipe: RecipeOption = None
    base_model: InitOption = None
    preset: PresetOption = None
    device: DeviceOption = None
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="All settings as TOML, as `cramlm config` prints them.", rich_help_panel=METHOD),
    ] = None
    set_: SetOption = None


@dataclass(frozen=True, slots=True)
class RecipeOptions(DataOptions):
    """Options of the commands that show what a recipe gives, also without a task."""

    train: Annotated[
        str | None, typer.Option("--train", metavar="FILE", help="Labelled texts (default: 4,000 texts of 8 labels are assumed).")
    ] = None
    budget: BudgetOption = None
    base_model: InitOption = None
    preset: PresetOption = None
    device: DeviceOption = None
    set_: SetOption = None
    seed: SeedOption = None


def resolve_options(
    data: DataOptions, rows: RowOptions, method: MethodOptions, *, budget: str | None = None, seed: int | None = None
) -> Any:
    """Return the run config of these options, as `resolve_run`."""
    task = {"train": data.train, "dev": data.dev, "test": data.test, "unlabelled": data.unlabelled, **asdict(rows)}
    given: dict[str, Any] = {"preset": method.preset, "init": method.base_model, "device": method.device, "budget": budget, "seed": seed}
    return resolve_run(method.recipe, method.config, method.set_, task=task, corpus=data.corpus, **given)


def resolve_recipe(recipe: str | None, options: RecipeOptions, rows: RowOptions, *, config_file: Path | None = None) -> Any:
    """Return the config of a recipe or a config file, as `resolve_run`; without files a recipe assumes a typical task and a corpus."""
    data: DataOptions = options
    if config_file is None:
        data = replace(options, train=options.train or "", corpus=options.corpus or ["corpus/*.jsonl.zst"])
    method = MethodOptions(recipe, options.base_model, options.preset, options.device, config_file, options.set_)
    return resolve_options(data, rows, method, budget=options.budget, seed=options.seed)


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that has the fields of dataclasses as options, in place of its parameters of these types."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
    listed = []
    for own in parameters:
        if own.name not in groups:
            listed.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(groups[own.name], include_extras=True)
        listed += [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
            for field in fields(groups[own.name])
        ]

    @functools.wraps(command)
    def flat(**values: Any) -> Any:
        options = {name: group(**{field.name: values.pop(field.name) for field in fields(group)}) for name, group in groups.items()}
        return command(**values, **options)

    flat.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]  # what typer reads
    return flat if groups else command
