"""Layout of `--help`, and checks of arguments before a command parses them.

    Usage: cramlm COMMAND [OPTIONS]

      One sentence, then details.

    Options:                 the options that most calls need
    Data, Training, ...:     the others, by the `rich_help_panel` of each
    Examples:                the last paragraph of the docstring, as it stands

The layout is that of click, without boxes, at most 100 characters wide, so that a command fits on one screen.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from typer import TyperException
from typer.core import TyperCommand, TyperGroup

from cramlm.errors import UsageError

RENAMED_OPTIONS: Final = {
    "--kind": "--task-type",
    "--init": "--base-model",
    "--track": "--report-to",
    "--answer": "--model-part",
    "--k": "--top-k",
    "--limit": "--top-k",
}
"""Spellings that work until the next version."""
MAX_WIDTH: Final = 100
_EXAMPLES: Final = "Examples:\n"
_LABELLED: Final = ("--train", "--dev", "--test")
_JOIN: Final = "join files that have the same header"
_LONGEST_NAME: Final = 26  # characters of an option before its description starts on the next line


class _Sections:
    """Description, options by panel, and examples of a command or a group."""

    help: str | None
    get_params: Any

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(split_help(self.help)[0])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, a section for each panel; --help is in the first section of options."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument":
                panels["Arguments"].append((argument_name(parameter), parameter.help or ""))
            elif (record := parameter.get_help_record(ctx)) is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows, col_max=_LONGEST_NAME)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if examples := split_help(self.help)[1]:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in examples))


class Command(_Sections, TyperCommand):
    """A command whose help has panels and examples.

    Old spellings of options are accepted. If a command takes only options, an option that may be repeated accepts several values, because
    the shell expands `--corpus *.jsonl` to a list. Other options are refused if they are repeated.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = []
        for argument in self.get_params(ctx):
            if argument.param_type_name == "argument":
                name = argument_name(argument)
                pieces.append(name if argument.required else f"[{name}]")
        return ["[OPTIONS]", *pieces]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {name for parameter in self.params for name in parameter.opts}
        arguments = replace_old_spellings(args, names)
        if all(parameter.param_type_name == "option" for parameter in self.params):
            arguments = repeat_options(arguments, {name for parameter in self.params if parameter.multiple for name in parameter.opts})
        positional = [parameter for parameter in self.params if parameter.param_type_name == "argument"]
        refuse_empty(arguments, texts=any(parameter.metavar in ("TEXT", "QUERY") for parameter in positional))
        ctx.allow_extra_args = True  # refused here, with a remedy
        if not ctx.resilient_parsing:
            try:
                _, _, used = self.make_parser(ctx).parse_args(args=list(arguments))
            except TyperException as error:
                error.ctx = ctx  # type: ignore[attr-defined]  # missing if an option lacks its value
                raise
            refuse_repeated(used)
        extra = super().parse_args(ctx, arguments)
        if extra and not ctx.resilient_parsing:
            remedy = "leave it out, or name its option"
            if "--train" in names:
                has_train = any("--train" in parameter.opts for parameter in used)
                remedy = (
                    f"{ctx.info_name} reads one training file: {_JOIN}" if has_train else f"write --train {extra[0]} for labelled texts"
                )
            raise UsageError(f"unexpected argument {extra[0]!r}; {remedy} (see `{ctx.command_path} --help`)")
        if not ctx.resilient_parsing:
            refuse_no_paths(self.params, ctx.params)
            ctx.params = {name: expand_home(value) for name, value in ctx.params.items()}
        return extra


class Group(_Sections, TyperGroup):
    """A group of commands whose help lists them by panel, each with its first sentence."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            sentence = (command.help or "").partition("\n\n")[0].replace("\n", " ")
            panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, sentence))
        width = max(len(name) for name in self.commands)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), sentence) for name, sentence in rows])


def replace_old_spellings(arguments: Sequence[str], names: set[str]) -> list[str]:
    """Return the arguments with the current names of options, short ones without `=`; print a line to stderr for each old one.

    names: the options of the command; an old spelling that it still has, or whose successor it lacks, stays as it is.
    """
    replaced = list(arguments)
    for position, argument in enumerate(arguments):
        if argument == "--":
            break
        old, equals, value = argument.partition("=")
        new = RENAMED_OPTIONS.get(old)
        if len(old) == 2 and old in names and value:
            replaced[position] = f"{old}{value}"  # -o=DIR means -oDIR, not a folder =DIR
        if new in names and old not in names:
            replaced[position] = f"{new}{equals}{value}"
            print(f"cramlm: {old} is now {new}; the next version does not accept {old}", file=sys.stderr)
    return replaced


def repeat_options(arguments: Sequence[str], names: set[str]) -> list[str]:
    """Return the arguments with one of `names` before each of its values: --corpus A B -> --corpus A --corpus B."""
    result: list[str] = []
    option, needs_value = "", False
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[position:]]
        if argument.startswith("-") and not needs_value:
            option, equals, _ = argument.partition("=")
            needs_value = option in names and not equals
        elif option in names and not needs_value:
            result.append(option)
        else:
            needs_value = False
        result.append(argument)
    return result


def refuse_empty(arguments: Sequence[str], *, texts: bool) -> None:
    """Raise UsageError for an empty value, as of an unset shell variable. texts: True if an argument is a text, checked later."""
    for before, argument in itertools.pairwise(["", *arguments]):
        if argument == "":
            option = before if before.startswith("-") else ""
        elif argument.startswith("-") and argument.partition("=")[1:] == ("=", ""):
            option = argument.removesuffix("=")
        else:
            continue
        if option != "--text-pair" and (option or not texts):
            raise UsageError(f"{option or 'an argument'} is empty; pass a value (is a variable of the shell not set?)")


def refuse_repeated(used: Sequence[Any]) -> None:
    """Raise UsageError for an option of one value that is given more than once: click would drop all but the last value.

    used: a parameter for each time that it is given, in any spelling.
    """
    single = [each for each in used if each.param_type_name == "option" and not (each.multiple or each.is_flag or each.count)]
    for parameter, times in Counter(single).items():
        if times > 1:
            name = max(parameter.opts, key=len)
            remedy = f"pass one file ({_JOIN})" if name in _LABELLED else "leave one out"
            raise UsageError(f"{name} is given {'twice' if times == 2 else f'{times} times'}; {remedy}")


def refuse_no_paths(parameters: Sequence[Any], values: Mapping[str, Any]) -> None:
    """Raise UsageError for a URL where a command takes only paths on this machine, and for `-` where it takes a folder.

    Parameters that take URLs are strings.
    """
    from cramlm.storage.artifacts import refuse_url

    for parameter in parameters:
        value = values.get(parameter.name)
        name = argument_name(parameter) if parameter.param_type_name == "argument" else max(parameter.opts, key=len)
        for path in value if isinstance(value, list | tuple) else [value]:
            if isinstance(path, Path):
                refuse_url(path, name)
                if str(path) == "-" and parameter.metavar == "DIR":
                    raise UsageError(f"-: is standard input or output, and {name} is a folder; pass the path of a folder")


def expand_home(value: Any) -> Any:
    """Return a path, or a list of paths, with `~` replaced by the home folder, as the shell does except in `--out=~/run`."""
    from cramlm.io.paths import at_home

    if isinstance(value, list):
        return [expand_home(each) for each in value]
    return at_home(value) if isinstance(value, Path) else value


def split_help(text: str | None) -> tuple[str, list[str]]:
    """Split the docstring of a command into its description and the lines of its examples."""
    description, found, examples = (text or "").partition(_EXAMPLES)
    return description.strip(), [line.strip() for line in examples.splitlines() if line.strip()] if found else []


def argument_name(argument: Any) -> str:
    """Return the name of an argument as usage lines and tables show it, like FILES... for one that may be repeated."""
    name = argument.metavar or argument.name.upper()
    return name if argument.nargs == 1 else f"{name}..."
