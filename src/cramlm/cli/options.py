"""What the flags of the command line mean as a config.

What the parameters of several commands have in common: names, help, and the commands' shared constants.

Beside a config file a flag overrides it, whatever its value: there `Given...` parameters have no default but None, not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cramlm.errors import UsageError


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
) -> Any:
    """The config that the flags mean: a recipe or a file, then the flags that were given, the preset, then every --set.

    None in `task` stands for a flag that was not given.

    With a config file, `init` changes where the weights come from; the phases stay as they are.
    """
    from cramlm import recipes
    from cramlm.config.run import apply_overrides, load_config, parse_budget, read_toml

    if budget is not None:
        parse_budget(budget)
    given = {name: value for name, value in task.items() if value is not None}
    if config_file is not None:
        if recipe is not None:
            raise UsageError("--config and --recipe exclude each other: a config file is a resolved recipe; drop one")
        data = read_toml(config_file)
        data.setdefault("task", {}).update(given)
        if corpus:
            data.setdefault("corpus", {})["files"] = list(corpus)
        data.update({name: value for name, value in (("budget", budget), ("seed", seed), ("init", init)) if value is not None})
        if init is not None:
            data.pop("encoder", None)
    else:
        if "train" not in given:
            raise UsageError("no training data; pass --train FILE (or --config run.toml)")
        given |= {key: value for key, value in (("budget", budget), ("seed", seed), ("init", init)) if value is not None}
        data = recipe_data(recipe or "tlm", {"corpus": corpus, **given}, overrides or [])
    origin = str(config_file or "command line")
    if preset is not None:
        data = recipes.with_preset(load_config(data, origin=origin), preset).model_dump(mode="json")
    return load_config(apply_overrides(data, overrides or []), origin=origin)


def recipe_data(name: str, given: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """What a recipe makes of its arguments `given`, as plain data, before `overrides`; but those of the section task, like
    task.kind=multi-label, are arguments: they say how the training file is read that the recipe counts.

    Raises:
        UsageError: if there is no such recipe, or it refuses an argument. DataError: if the training file has a bad row.
    """
    from cramlm import recipes
    from cramlm.config.run import apply_overrides

    build, behind = recipes.find(name)
    of_task = [override for override in overrides if override.lstrip().startswith("task.")]
    arguments = {**given, **apply_overrides({"task": {}}, of_task)["task"], **behind}
    data: dict[str, Any] = checked(lambda: build(**arguments)).model_dump(mode="json")
    return data


def resolve_retriever(given: Mapping[str, Any], overrides: list[str] | None) -> Any:
    """The retriever that the flags mean: BM25, changed by what was given, then by every --set retriever.SETTING=VALUE."""
    from cramlm.config.retriever import RETRIEVER
    from cramlm.config.run import apply_overrides

    table = {"kind": "bm25"} | {name: value for name, value in given.items() if value is not None}
    data = apply_overrides({"retriever": table}, overrides or [])
    if strange := sorted(set(data) - {"retriever"}):
        raise UsageError(f"--set {strange[0]}: select knows the settings of retriever only, like retriever.k1=1.5")
    return checked(lambda: RETRIEVER.validate_python(data["retriever"]))


def resolve_corpus(files: list[str], *, text_column: str, on_bad_row: str, duplicates: str = "exact") -> Any:
    """The corpus that the flags mean."""
    from cramlm.config.run import CorpusConfig

    values: dict[str, Any] = {"files": tuple(files), "text_column": text_column, "on_bad_row": on_bad_row, "duplicates": duplicates}
    return checked(lambda: CorpusConfig(**values))


def checked(build: Callable[[], Any]) -> Any:
    """`build()`, with a value that a config refuses turned into a usage error."""
    from pydantic import ValidationError

    from cramlm.config.run import explain_validation_error

    try:
        return build()
    except ValidationError as error:
        raise UsageError(explain_validation_error(error)) from error


def checked_kind(kind: str | None) -> Any:
    """A kind of task by its name; classification where none is given."""
    from cramlm.config.run import TaskConfig

    return checked(lambda: TaskConfig(train="", **({} if kind is None else {"kind": kind}))).kind


def open_encoder(config: Any) -> Any:
    """The encoder of dense retrieval; torch is loaded only where one is asked for."""
    from cramlm.model.sentences import open_sentence_encoder

    return open_sentence_encoder(config)


TextColumn = Annotated[str, typer.Option("--text-column", help="Column that holds the text.")]
LabelColumn = Annotated[str, typer.Option("--label-column", help="Column that holds the label.")]
GivenTextColumn = Annotated[str | None, typer.Option("--text-column", help="Column that holds the text (default: text).")]
GivenLabelColumn = Annotated[str | None, typer.Option("--label-column", help="Column that holds the label (default: label).")]
PairColumn = Annotated[str | None, typer.Option("--text-pair-column", help="Column of the second text, for sentence pairs.")]
KindOption = Annotated[
    str | None,
    typer.Option(
        "--kind", help="What a text is answered with: classification (one label; default), multi-label, or regression (a number)."
    ),
]
SeparatorOption = Annotated[
    str | None, typer.Option("--label-separator", help="Between several labels in a csv, tsv or parquet cell (default: |).")
]
DuplicatesOption = Annotated[
    str, typer.Option("--duplicates", help="exact: drop repeated passages; words: also those that differ in case and punctuation only.")
]
OnBadRowOption = Annotated[str, typer.Option("--on-bad-row", help="fail: stop at the first bad row; skip: list it in rejected.jsonl.")]
GivenOnBadRow = Annotated[
    str | None, typer.Option("--on-bad-row", help="fail (default): stop at the first bad row; skip: list it in rejected.jsonl.")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="One setting, like phases[0].steps=500; may be repeated.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything random.")]
StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Where corpora and indexes are kept (default: $CRAMLM_STORE or the user's cache).")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what --out holds, even if it is a run on another task.")]
Precision = Literal["auto", "fp32", "bf16"]
RayOption = Annotated[str | None, typer.Option("--ray", metavar="ADDRESS", help="Work on a Ray cluster: auto, host:port, or local.")]
RecipeOption = Annotated[str | None, typer.Option(help="The method: tlm (default), labels-only, plm, ...; `cramlm recipes` lists them.")]
InitOption = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Pretrained weights to start from: a Hugging Face folder, or export/mlm of a run.")
]
PresetOption = Annotated[
    str | None, typer.Option(help="Model size: tiny, mini, small, base, bert-base or bert-large (default: by the budget).")
]
SPINS = "10000"
"""GOMP_SPINCOUNT: how long an OpenMP thread that waits keeps its core. With the default, two threads beside another busy process are up to
a hundred times slower than one; with this, at most about twice. Read when torch is loaded."""
