"""--help of every command: one screen, one sentence, an example that parses; old spellings of options; choices and their sources."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from commands import cramlm, error_line, printed
from cramlm.cli import options
from cramlm.cli.app import PANELS, app
from cramlm.cli.help import MAX_WIDTH, RENAMED_OPTIONS, repeat_options, replace_old_spellings, split_help
from cramlm.config.retriever import MOST_K1
from cramlm.config.run import Duplicates, OnBadRow
from cramlm.inference.linear import ModelPart
from cramlm.pipeline.trackers import TRACKERS
from cramlm.recipes.recipe import PRESETS
from cramlm.records import TaskKind

GROUP: Any = typer.main.get_command(app)
COMMANDS = [*sorted(GROUP.commands), "recipes show"]
SCREEN = 50  # lines, at 80 characters


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_on_a_screen_and_its_examples_parse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = GROUP
    for word in name.split():
        command = command.commands[word]
    printed = cramlm(*name.split(), "--help").stdout
    assert len(printed.splitlines()) <= SCREEN
    assert max(map(len, printed.splitlines())) <= MAX_WIDTH, "the examples, which are not wrapped"
    description, examples = split_help(command.help)
    sentence = description.partition("\n\n")[0]
    assert sentence.endswith(".")
    assert not sentence.endswith("..")
    assert examples
    assert all(example in printed for example in examples)
    names = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    assert names == [option.lower() for option in names], "some versions of typer take an upper-case metavar for the option's name"
    for example in examples:
        assert "curl" not in example or "-H 'Content-Type: application/json'" in example, "the server refuses any other type"
        if example.startswith("cramlm "):
            _, named, *arguments = shlex.split(example.partition(" | ")[0].partition(" > ")[0])
            GROUP.commands[named].make_context(named, arguments, resilient_parsing=named == "recipes").close()


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("predict", "cramlm predict [OPTIONS] MODEL FILE"),
        ("plan", "cramlm plan [OPTIONS] [BUDGETS...]"),
        ("search", "cramlm search [OPTIONS] INDEX [QUERY]"),
        ("report", "cramlm report [OPTIONS] RUNS..."),
        ("fit", "cramlm fit [OPTIONS]"),
    ],
)
def test_the_usage_of_a_command_names_its_arguments_without_python_types(name: str, usage: str) -> None:
    printed = cramlm(name, "--help").stdout
    assert printed.splitlines()[0] == f"Usage: {usage}"
    assert "<" not in printed.partition("Options:")[0]


def test_every_option_that_a_message_names_exists() -> None:
    """Checked are all strings of the package: messages, remedies, help."""
    known = {name for command in GROUP.commands.values() for parameter in command.params for name in parameter.opts}
    known |= {"--help", "--debug", "--version", *RENAMED_OPTIONS}
    known |= {"--abstain", "--head", "--long", "--local-dir"}  # the --abstain options; of ray start, zstd and hf download
    named: dict[str, str] = {}
    for path in (Path(__file__).parents[2] / "src" / "cramlm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", node.value), str(path))
    assert {name: path for name, path in named.items() if name not in known} == {}


def test_the_help_of_cramlm_is_a_screen_of_panels_with_a_line_for_each_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed("--help").splitlines()
    assert len(lines) <= SCREEN
    assert {f"{panel}:" for panel in PANELS} <= {line.strip() for line in lines}
    for name, command in GROUP.commands.items():
        assert any(line.split() == [name, *command.help.partition("\n\n")[0].split()] for line in lines), name


def test_an_old_spelling_is_replaced_with_one_line_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--task-type", "--base-model", "--top-k"}
    replaced = replace_old_spellings(["--kind=regression", "--init", "folder", "--limit", "3", "--track", "wandb", "--", "--kind"], names)
    assert replaced == ["--task-type=regression", "--base-model", "folder", "--top-k", "3", "--track", "wandb", "--", "--kind"]
    assert capsys.readouterr().err.splitlines() == [
        "cramlm: --kind is now --task-type; the next version does not accept --kind",
        "cramlm: --init is now --base-model; the next version does not accept --init",
        "cramlm: --limit is now --top-k; the next version does not accept --limit",
    ]
    assert replace_old_spellings(["--init", "folder"], {"--init", "--base-model"}) == ["--init", "folder"]


@pytest.mark.parametrize(
    ("arguments", "repeated"),
    [
        ("--corpus a b c --budget 1m", "--corpus a --corpus b --corpus c --budget 1m"),
        ("--corpus=a b --seed 1 2 --verbose", "--corpus=a --corpus b --seed 1 --seed 2 --verbose"),
        ("--budget 1m stray --corpus a", "--budget 1m stray --corpus a"),
        ("--corpus a -- b", "--corpus a -- b"),
        ("--corpus", "--corpus"),
    ],
)
def test_an_option_that_may_be_repeated_takes_several_values_as_the_shell_makes_them_of_a_pattern(arguments: str, repeated: str) -> None:
    assert repeat_options(arguments.split(), {"--corpus", "--seed"}) == repeated.split()


def test_a_pattern_that_the_shell_expanded_is_read_like_a_quoted_one() -> None:
    spread = cramlm("config", "--corpus", "a.jsonl", "b.jsonl", "--budget", "1m")
    assert spread.returncode == 0, spread.stderr
    assert spread.stdout == cramlm("config", "--corpus", "a.jsonl", "--corpus", "b.jsonl", "--budget", "1m").stdout
    assert "unexpected argument 'stray'" in error_line(cramlm("config", "--budget", "1m", "stray"), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "--train", "a.csv", "--train", "b.csv"), "--train is given twice; pass one file (join files that have the same header)"),
        (("fit", "--train=a.csv", "--dev", "b.csv", "--dev=c.csv"), "--dev is given twice; pass one file"),
        (("compare", "--train", "a.csv", "--test", "b", "--test", "c", "--test", "d"), "--test is given 3 times; pass one file"),
        (("fit", "--train", "a.csv", "--budget", "1m", "--budget", "2m"), "--budget is given twice; leave one out"),
        (("fit", "--train", "a.csv", "-o", "one", "--out", "two"), "--out is given twice; leave one out"),
        (("fit", "--train", "a.csv", "--kind", "regression", "--task-type", "regression"), "--task-type is given twice; leave one out"),
    ],
)
def test_an_option_with_one_value_is_refused_if_it_is_repeated(arguments: tuple[str, ...], message: str) -> None:
    assert message in error_line(cramlm(*arguments), 2)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("fit --train a.csv -o s3://bucket/run", "--out"),
        ("fit --train a.csv --store=gs://bucket/store", "--store"),
        ("index a.jsonl -o https://example.org/index", "--out"),
        ("select --queries a.txt --index index -o one --jsonl s3://bucket/out.jsonl", "--jsonl"),
        ("search index --queries a.tsv --run s3://bucket/out.trec", "--run"),
        ("search index --queries a.tsv --qrels https://example.org/qrels.txt", "--qrels"),
        ("predict hf://owner/model a.csv", "MODEL"),
        ("predict model a.csv -o s3://bucket/out.csv", "--out"),
        ("sample-data s3://bucket/data", "DIR"),
    ],
)
def test_a_url_is_refused_where_a_path_on_this_machine_is_read_or_written(tmp_path: Path, arguments: str, name: str) -> None:
    url = next(word for word in arguments.replace("=", " ").split() if "://" in word)
    message = f"{url}: is a URL, and {name} is a path on this machine"
    assert message in error_line(cramlm(*arguments.split(), cwd=tmp_path), 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["--out=~/index", "-o=~/index", "-o~/index"])
def test_a_tilde_that_the_shell_does_not_expand_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "corpus.txt").write_text("a ship\n", "utf-8")
    assert printed("index", "corpus.txt", "--workers", "1", out, cwd=tmp_path).strip() == str(tmp_path / "home" / "index")
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.txt", "home"}


def test_flags_and_options_of_several_values_may_be_repeated() -> None:
    shown = printed("config", "--set", "seed=3", "--set", "threads=1", "--corpus", "a", "--corpus", "b", "--budget", "1m")
    assert "seed = 3" in shown
    assert "threads = 1" in shown
    assert "given" not in cramlm("predict", "no-run", "new.csv", "--keep-columns", "--keep-columns").stderr


def test_every_old_spelling_has_a_command_with_its_successor() -> None:
    known = {name for command in GROUP.commands.values() for parameter in command.params for name in parameter.opts}
    assert set(RENAMED_OPTIONS.values()) <= known
    assert not set(RENAMED_OPTIONS) & known


@pytest.mark.parametrize(
    ("choices", "source"),
    [
        (options.TaskType, get_args(TaskKind)),
        (options.ModelPart, get_args(ModelPart)),
        (options.DuplicateRule, get_args(Duplicates)),
        (options.BadRowRule, get_args(OnBadRow)),
        (options.Preset, tuple(PRESETS)),
        (options.TrackerName, TRACKERS),
    ],
)
def test_the_choices_of_an_option_are_those_of_the_package_that_reads_them(choices: Any, source: tuple[str, ...]) -> None:
    assert set(get_args(choices)) == set(source)


def test_the_largest_k1_of_an_option_is_that_of_the_setting() -> None:
    assert options.MOST_K1 == MOST_K1


def test_a_choice_that_does_not_exist_gives_one_line_with_the_choices() -> None:
    line = error_line(cramlm("fit", "--train", "train.csv", "--task-type", "tagging"), 2)
    assert "'tagging'" in line
    assert "multi-label" in line
    assert line.endswith("see `cramlm fit --help`")
    assert error_line(cramlm("fit", "--train"), 2).endswith("Option '--train' requires an argument; see `cramlm fit --help`")
    assert cramlm("nonsense").stderr.strip().endswith("see `cramlm --help`")
    assert cramlm("recipes", "show", "--nonsense").stderr.strip().endswith("see `cramlm recipes show --help`")


def test_an_unexpected_argument_and_an_empty_value_are_refused_with_a_remedy() -> None:
    for arguments, message in (
        (
            ("fit", "train.csv", "--recipe", "tfidf"),
            "unexpected argument 'train.csv'; write --train train.csv for labelled texts (see `cramlm fit --help`)",
        ),
        (
            ("fit", "--train", "a.csv", "b.csv"),
            "unexpected argument 'b.csv'; fit reads one training file: join files that have the same header",
        ),
        (("doctor", "now"), "unexpected argument 'now'; leave it out, or name its option (see `cramlm doctor --help`)"),
        (("fit", "--train", ""), "--train is empty; pass a value"),
        (("fit", "--train", "a.csv", "--corpus="), "--corpus is empty; pass a value"),
        (("predict", "run", ""), "an argument is empty; pass a value"),
        (("search", "index", "--queries", ""), "--queries is empty; pass a value"),
    ):
        assert message in error_line(cramlm(*arguments), 2)
    assert "no-run: no such folder" in cramlm("explain", "no-run", "", "--text-pair", "").stderr, "a text is checked with its model"


def test_cramlm_alone_prints_its_help() -> None:
    result = cramlm()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == cramlm("--help").stdout
