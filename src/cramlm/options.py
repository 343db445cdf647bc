"""What the flags of the command line mean as a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

    With a config file, `init` changes where the weights come from; the phases stay as they are.
    """
    from cramlm import recipes
    from cramlm.config import apply_overrides, load_config, parse_budget, read_toml

    if budget is not None:
        parse_budget(budget)
    given = {name: value for name, value in task.items() if value is not None}
    if config_file is not None:
        if recipe is not None:
            raise UsageError("--config and --recipe exclude each other: a config file is a resolved recipe; drop one")
        data = read_toml(config_file)
        defaults = {"text_column": "text", "label_column": "label", "on_bad_row": "fail"}
        data.setdefault("task", {}).update({name: value for name, value in given.items() if value != defaults.get(name)})
        if corpus:
            data.setdefault("corpus", {})["files"] = list(corpus)
        data.update({name: value for name, value in (("budget", budget), ("seed", seed), ("init", init)) if value is not None})
        if init is not None:
            data.pop("encoder", None)
    else:
        if "train" not in given:
            raise UsageError("no training data; pass --train FILE (or --config run.toml)")
        build, behind = recipes.find(recipe or "tlm")
        given |= {key: value for key, value in (("budget", budget), ("seed", seed), ("init", init)) if value is not None}
        data = checked(lambda: build(corpus=corpus, **given, **behind)).model_dump(mode="json", exclude_unset=False)
    origin = str(config_file or "command line")
    if preset is not None:
        data = recipes.with_preset(load_config(data, origin=origin), preset).model_dump(mode="json")
    return load_config(apply_overrides(data, overrides or []), origin=origin)


def resolve_retriever(given: Mapping[str, Any], overrides: list[str] | None) -> Any:
    """The retriever that the flags mean: BM25, changed by what was given, then by every --set retriever.KNOB=VALUE."""
    from cramlm.config import apply_overrides
    from cramlm.retriever_config import RETRIEVER

    table = {"kind": "bm25"} | {name: value for name, value in given.items() if value is not None}
    data = apply_overrides({"retriever": table}, overrides or [])
    if strange := sorted(set(data) - {"retriever"}):
        raise UsageError(f"--set {strange[0]}: select knows the knobs of retriever only, like retriever.k1=1.5")
    return checked(lambda: RETRIEVER.validate_python(data["retriever"]))


def resolve_corpus(files: list[str], *, text_column: str, on_bad_row: str) -> Any:
    """The corpus that the flags mean."""
    from cramlm.config import CorpusConfig

    values: dict[str, Any] = {"files": tuple(files), "text_column": text_column, "on_bad_row": on_bad_row}
    return checked(lambda: CorpusConfig(**values))


def checked(build: Callable[[], Any]) -> Any:
    """`build()`, with a value that a config refuses turned into a usage error."""
    from pydantic import ValidationError

    from cramlm.config import explain_validation_error

    try:
        return build()
    except ValidationError as error:
        raise UsageError(explain_validation_error(error)) from error


def checked_kind(kind: str | None) -> Any:
    """A kind of task by its name; classification where none is given."""
    from cramlm.config import TaskConfig

    return checked(lambda: TaskConfig(train="", **({} if kind is None else {"kind": kind}))).kind


def open_encoder(config: Any) -> Any:
    """The encoder of dense retrieval; torch is loaded only where one is asked for."""
    from cramlm.model.sentences import open_sentence_encoder

    return open_sentence_encoder(config)
