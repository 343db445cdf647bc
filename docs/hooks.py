"""Generate pages of the site: commands from the parser, settings from the config models, Python from docstrings, CONTRIBUTING, notebooks.

`pages` returns them as Markdown; MkDocs calls `on_files`, which adds them to the written pages.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import cramlm
from cramlm import recipes
from cramlm.cli.app import PANELS, app
from cramlm.cli.help import argument_name, split_help
from cramlm.config import head, phase, retriever, run, terms

DOCS = Path(__file__).parent


def on_files(files: Any, config: Any) -> Any:
    """MkDocs hook: add the generated pages."""
    from mkdocs.structure.files import File

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """MkDocs hook: replace links to files outside of docs/ by their names."""
    return re.sub(r"\[([^\]]+)\]\(\.\./(?:\.\./)*(?:README|CHANGELOG|CONTRIBUTING|src/|tests/|benchmarks/)[^)]*\)", r"\1", markdown)


def pages() -> dict[str, str]:
    """Return Markdown by path."""
    contributing = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8").replace("](docs/", "](")
    reference = {"reference/commands.md": _commands(), "reference/config.md": _config(), "reference/python.md": _python()}
    notebooks = {path.relative_to(DOCS).with_suffix(".md").as_posix(): _notebook(path) for path in DOCS.glob("notebooks/*.ipynb")}
    return {**reference, **notebooks, "contributing.md": contributing}


def _notebook(path: Path) -> str:
    """Return the cells and stored outputs of a notebook."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            language = "console" if source.startswith("!") else "python"
            parts.append(f"```{language}\n{source.replace('!', '$ ', 1) if language == 'console' else source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    parts.append(f"The notebook itself: [{path.name}]({path.name}).")
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![plot of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})"
    if "text/html" in data:
        return re.sub(
            r"<style.*?</style>| border=\"1\"| class=\"dataframe\"| style=\"[^\"]*\"", "", "".join(data["text/html"]), flags=re.DOTALL
        ).strip()
    return f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"


def _commands() -> str:
    group: Any = typer.main.get_command(app)
    parts = ["# Command line", "Results go to stdout, progress and errors to stderr. `cramlm COMMAND --help` prints the same text."]
    panels = {panel: [command for command in group.commands.values() if command.rich_help_panel == panel] for panel in PANELS}
    parts += [f"**{panel}**: {', '.join(f'[{each.name}](#cramlm-{each.name})' for each in of)}" for panel, of in panels.items()]
    for command in (command for of in panels.values() for command in of):
        description, examples = split_help(command.help)
        parts += [f"## cramlm {command.name}", description, "\n".join(["```", *examples, "```"])]
        rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help" and not parameter.hidden]
        if rows:
            parts.append("\n".join(["| | | default |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _parameter(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    names = ", ".join(f"`{name}`" for name in parameter.opts) if is_option else f"`{argument_name(parameter)}`"
    default = "" if parameter.default in (None, False) or callable(parameter.default) or parameter.required else f"`{parameter.default}`"
    return f"| {names} | {_cell(getattr(parameter, 'help', None) or '')} | {default} |"


def _config() -> str:
    parts = [
        "# Settings",
        "The settings that `cramlm config` prints and `--set` changes, like `--set phases[0].steps=500`. A recipe chooses their values.",
    ]
    for model in _models():
        parts += [f"## {model.__name__}", inspect.getdoc(model) or ""]
        rows = [_field(name, field) for name, field in model.model_fields.items()]
        parts.append("\n".join(["| setting | type | default | |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _models() -> Iterator[type[BaseModel]]:
    found = [
        member
        for module in (run, head, phase, terms, retriever)
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, BaseModel) and member.__name__.endswith("Config") and member.__module__ == module.__name__
    ]
    yield run.RunConfig
    yield from sorted((model for model in found if model not in (run.RunConfig, terms.TermConfig)), key=lambda model: model.__name__)


def _field(name: str, field: FieldInfo) -> str:
    default = "**required**" if field.is_required() else f"`{_short(field.get_default(call_default_factory=True))}`"
    bounds = [str(bound) for bound in field.metadata if any(hasattr(bound, each) for each in ("ge", "gt", "le", "lt", "min_length"))]
    words = "; ".join(part for part in (field.description or "", ", ".join(bounds)) if part)
    return f"| `{name}` | {_cell(_type(field.annotation))} | {_cell(default)} | {_cell(words)} |"


def _short(value: Any) -> str:
    return type(value).__name__ if isinstance(value, BaseModel) else repr(value)


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("unset" if each is types.NoneType else _type(each) for each in arguments)
    if origin is typing.Annotated:
        return _type(arguments[0])
    return getattr(annotation, "__name__", str(annotation)) if not arguments else str(annotation).replace("cramlm.config.run.", "")


def _python() -> str:
    parts = ["# Python", "The public names of `cramlm`, and its recipes."]
    for name in sorted(cramlm.__all__):
        member = getattr(cramlm, name)
        if inspect.isclass(member) or inspect.isfunction(member):
            parts += _entry(name, member)
    for recipe in recipes.RECIPES.values():
        name = re.sub(r"\W", "_", recipe.name)
        parts += [f"## cramlm.recipes.{name}", f"```python\n{name}{inspect.signature(recipe)}\n```", f"```text\n{recipe.summary}\n```"]
    parts.append(f"Called, a recipe:\n\n```text\n{inspect.getdoc(recipes.Recipe.__call__)}\n```")
    return "\n\n".join(parts) + "\n"


def _entry(name: str, member: Callable[..., Any]) -> Iterator[str]:
    yield f"## cramlm.{name}"
    with contextlib.suppress(ValueError):  # a class without a signature
        yield f"```python\n{name.rpartition('.')[2]}{inspect.signature(member)}\n```"
    yield f"```text\n{inspect.getdoc(member) or ''}\n```"
    if inspect.isclass(member):
        for method, function in inspect.getmembers(member, lambda each: inspect.isfunction(each) or inspect.ismethod(each)):
            if not method.startswith("_") and (text := inspect.getdoc(function)) and function.__module__.startswith("cramlm"):
                yield f"### {name}.{method}"
                yield f"```python\n{method}{inspect.signature(function)}\n```\n\n```text\n{text}\n```"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
